//! Tables for people, and the result file.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::cell::{Subject, Words};
use crate::costs::{self, Cost};
use crate::doors;
use crate::head::Head;
use crate::json;
use crate::plan::{Block, Entry, Figure};
use crate::results::{Results, figure};
use crate::run::Sample;
use crate::stats::median;
use crate::targets::{Against, Metric, Outcome, Verdict};

/// Room for the names in tables of short names.
const NAMES: usize = 16;

/// Writes a number with three digits and a unit of thousands.
pub(crate) fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, " G"),
        v if v >= 1e6 => (value / 1e6, " M"),
        v if v >= 1e4 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 0.1 || v == 0.0 => 2,
        v if v >= 0.01 => 3,
        _ => 4,
    };
    format!("{value:.digits$}{unit}")
}

/// Writes a time with the unit that suits it.
pub(crate) fn time(ns: f64) -> String {
    match ns {
        v if v >= 1e6 => format!("{:.2} ms", v / 1e6),
        v if v >= 1e3 => format!("{:.1} us", v / 1e3),
        v => format!("{v:.0} ns"),
    }
}

/// What bowline did about congestion control, as its own sockets say.
fn cc_of(samples: &[&Sample]) -> String {
    samples.first().map_or(String::new(), |s| s.words.text("cc").to_owned())
}

/// Writes the costs.
pub(crate) fn costs_table(costs: &[Cost]) -> String {
    let mut out = String::from("\nCosts of this machine\n");
    for cost in costs {
        let p99 = cost.p99.map_or(String::new(), |p99| format!("   p99 {p99:.0}"));
        let digits = if cost.value < 100.0 { 1 } else { 0 };
        let value = format!("{:.digits$}", cost.value);
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(out, "  {:40} {value:>9} {}{p99}", cost.name, cost.unit);
    }
    out
}

/// Writes the table of one block.
pub(crate) fn block_table(block: &Block, results: &Results) -> String {
    let mut out = format!("\n{}  [{}]\n", block.title, block.id);
    let columns = match block.figure {
        Figure::Rate => {
            "      msg/s      GB/s   ns/msg send   receive   syscalls/msg send, receive"
        }
        Figure::Latency => "        min        p50        p90        p99      p99.9   CPU/trip",
        Figure::Curve => "      msg/s   ns/msg send   receive",
        Figure::Memory => " bytes each        of",
        Figure::Doors => {
            "      req/s      MB/s        p50        p99   of nbdkit: rate   p99   processors a request"
        }
        Figure::Pauses => "      req/s   longest pause   longest request   failed, of all rounds",
    };
    let shown = |entry: &Entry| Subject::shown(&entry.label);
    let longest = block.entries.iter().map(|entry| shown(entry).len()).max().unwrap_or(0);
    let wide = longest.max(NAMES);
    let _ = writeln!(out, "  {:wide$}{columns}", "");
    for entry in &block.entries {
        let samples = results.samples(&block.id, &entry.label);
        if samples.is_empty() {
            let why = results.error(&block.id, &entry.label).unwrap_or_default();
            let _ = writeln!(out, "  {:wide$} failed: {why}", shown(entry));
            continue;
        }
        let row = match block.figure {
            Figure::Rate | Figure::Curve => rate_row(&samples, entry.cell.size, block.figure),
            Figure::Latency => latency_row(&samples),
            Figure::Memory => {
                let bytes = results.figure(&block.id, &entry.label, Metric::Bytes).unwrap_or(0.0);
                format!(" {bytes:>10.0} {:>9}", entry.cell.flows)
            }
            Figure::Pauses => pauses_row(&samples),
            Figure::Doors => door_row(&samples, |metric| {
                results.ratio(&block.id, &entry.label, Subject::Nbdkit.name(), metric)
            }),
        };
        let foreign = median(samples.iter().map(|s| s.foreign)).unwrap_or(0.0);
        let note = if samples.iter().any(|s| s.is_disturbed()) {
            format!("   disturbed ({:.0} % foreign)", foreign * 100.0)
        } else {
            String::new()
        };
        let cc = match cc_of(&samples) {
            cc if cc.is_empty() => String::new(),
            cc => format!("  {cc}"),
        };
        let _ = writeln!(out, "  {:wide$}{row}{cc}{note}", shown(entry));
    }
    out
}

/// What fio reached at a door, beside nbdkit, and what each process took of the processors for it.
fn door_row(samples: &[&Sample], nbdkit_ratio: impl Fn(Metric) -> Option<f64>) -> String {
    let mid = |metric| median(samples.iter().filter_map(|s| figure(s, metric))).unwrap_or(0.0);
    let ratio = |metric| nbdkit_ratio(metric).map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    format!(
        " {:>10} {:>9.1} {:>10} {:>10} {:>17} {:>5}   {}",
        short(mid(Metric::Rate)),
        mid(Metric::ByteRate) / 1e6,
        time(mid(Metric::P50)),
        time(mid(Metric::P99)),
        ratio(Metric::Rate),
        ratio(Metric::P99),
        shares(samples),
    )
}

/// Writes the processors' time of a request, process by process, and all of it.
pub(crate) fn shares(samples: &[&Sample]) -> String {
    let each: Vec<Vec<(&str, f64)>> = samples.iter().map(|sample| doors::shares(sample)).collect();
    let names: Vec<&str> = each.first().into_iter().flatten().map(|(name, _)| *name).collect();
    let of = |name: &str| {
        let mut all = each.iter().flatten().filter(|(other, _)| *other == name).map(|of| of.1);
        median(&mut all).unwrap_or(0.0) / 1e3
    };
    let parts: Vec<String> = names.iter().map(|name| format!("{name} {:.1}", of(name))).collect();
    let sum: f64 = names.iter().map(|name| of(name)).sum();
    format!("{} = {sum:.1} us", parts.join(" + "))
}

/// Pauses are those of the worst round.
fn pauses_row(samples: &[&Sample]) -> String {
    let most = |key: &str| samples.iter().filter_map(|s| s.words.number(key).ok()).max();
    let longest = |key: &str| most(key).map_or_else(|| "-".to_owned(), |ns| time(ns as f64));
    let rate = median(samples.iter().map(|s| s.rate())).unwrap_or(0.0);
    format!(
        " {:>10} {:>15} {:>17} {:>8}",
        short(rate),
        longest("pause_ns"),
        longest("slowest_ns"),
        most("failed").unwrap_or(0),
    )
}

fn rate_row(samples: &[&Sample], size: usize, figure: Figure) -> String {
    let mid = |f: &dyn Fn(&Sample) -> f64| median(samples.iter().map(|s| f(s))).unwrap_or(0.0);
    let rate = mid(&|s| s.rate());
    let (tx, rx) = (time(mid(&|s| s.tx_cpu)), time(mid(&|s| s.rx_cpu)));
    if figure == Figure::Curve {
        return format!(" {:>10} {tx:>13} {rx:>9}", short(rate));
    }
    let calls = |f: fn(&Sample) -> Option<f64>| {
        median(samples.iter().filter_map(|s| f(s))).map_or("-".to_owned(), short)
    };
    let (tx_calls, rx_calls) = (calls(|s| s.tx_syscalls), calls(|s| s.rx_syscalls));
    let gbs = rate * size as f64 / 1e9;
    format!(" {:>10} {gbs:>9.2} {tx:>13} {rx:>9}   {tx_calls:>12} {rx_calls:>12}", short(rate))
}

/// Writes what went over the wire for each message, where devices say so; else nothing.
pub(crate) fn wire_table(block: &Block, results: &Results) -> String {
    let mut out = String::new();
    for entry in block.entries.iter().filter(|entry| entry.cell.subject == Subject::Roce) {
        let samples = results.samples(&block.id, &entry.label);
        if samples.is_empty() {
            continue;
        }
        if out.is_empty() {
            let _ = writeln!(
                out,
                "  {:16}{:>24}{:>16}{:>20}{:>12}{:>10}{:>12}",
                "per message",
                "packets to, from rx",
                "ACKs of rx",
                "syscalls send, rx",
                "sent again",
                "NAKs",
                "lost, both"
            );
        }
        // The side that counts does so within the window, the other over its whole life.
        let of = |words: &Words, n: u64, key: &str| Some(words.number(key).ok()? as f64 / n as f64);
        let counting =
            |key: &str| median(samples.iter().filter_map(|s| of(&s.words, s.count, key)));
        let other = |key: &str| {
            let sent = |s: &Sample| s.other.number("sent").ok().filter(|n| *n > 0);
            median(samples.iter().filter_map(|s| of(&s.other, sent(s)?, key)))
        };
        let text = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), short);
        let round_trip = entry.cell.kind.is_round_trip();
        let (into, from) = match round_trip {
            true => ("packets_out", "packets_in"), // the side that asks counts
            false => ("packets_in", "packets_out"),
        };
        let sum = |key: &str| Some(counting(key)? + other(key).unwrap_or(0.0));
        let calls = match round_trip {
            true => (counting("syscalls"), None),
            false => (other("syscalls"), counting("syscalls")),
        };
        let packets = format!("{}, {}", text(counting(into)), text(counting(from)));
        let calls = format!("{}, {}", text(calls.0), text(calls.1));
        let _ = writeln!(
            out,
            "  {:16}{packets:>24}{:>16}{calls:>20}{:>12}{:>10}{:>12}",
            entry.label,
            if round_trip { "-".to_owned() } else { text(counting("acks")) },
            text(sum("resent")),
            text(sum("naks")),
            text(sum("dropped")),
        );
    }
    out
}

/// Writes what each request of RTRS cost in packets and calls, where both sides count; else
/// nothing.
pub(crate) fn requests_table(block: &Block, results: &Results) -> String {
    let mut out = String::new();
    for entry in block.entries.iter().filter(|entry| entry.cell.subject.is_rtrs()) {
        let samples = results.samples(&block.id, &entry.label);
        let both: Vec<[f64; 2]> = samples.iter().filter_map(|s| s.data_packets()).collect();
        if both.is_empty() {
            continue;
        }
        if out.is_empty() {
            let _ = writeln!(
                out,
                "  {:24}{:>24}{:>24}{:>24}",
                "per request",
                "packets there, back",
                "ACKs client, server",
                "sleeps client, server"
            );
        }
        let text = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), short);
        let packets = [0, 1].map(|side| text(median(both.iter().map(|both| both[side]))));
        // The client counts within the window, the server over its whole life.
        let of = |words: &Words, n: u64, key: &str| Some(words.number(key).ok()? as f64 / n as f64);
        let served = |s: &Sample| s.other.number("sent").ok().filter(|n| *n > 0);
        let each = |key: &str| {
            let client = median(samples.iter().filter_map(|s| of(&s.words, s.count, key)));
            let server = median(samples.iter().filter_map(|s| of(&s.other, served(s)?, key)));
            format!("{}, {}", text(client), text(server))
        };
        let _ = writeln!(
            out,
            "  {:24}{:>24}{:>24}{:>24}",
            entry.label,
            packets.join(", "),
            each("acks"),
            each("sleeps"),
        );
    }
    out
}

fn latency_row(samples: &[&Sample]) -> String {
    let at = |i: usize| {
        let values = samples.iter().filter_map(|s| Some(*s.lat.as_ref()?.get(i)? as f64));
        time(median(values).unwrap_or(0.0))
    };
    let cpu = median(samples.iter().map(|s| s.rx_cpu + s.tx_cpu)).unwrap_or(0.0);
    let [min, p50, p90, p99, p999] = [0, 3, 5, 7, 8].map(at);
    format!(" {min:>10} {p50:>10} {p90:>10} {p99:>10} {p999:>10} {:>10}", time(cpu))
}

/// Writes the table of targets.
pub(crate) fn targets_table(outcomes: &[Outcome]) -> String {
    let mut out = String::from("\nTargets (ratio to what was measured in the same round)\n");
    let _ = writeln!(
        out,
        "  {:4} {:37} {:22} {:>8} {:>17} {:>7} {:>7} {:>6} {:>5}  verdict",
        "", "figure", "against", "ratio", "quartiles", "must", "goal", "CPU", "rnds"
    );
    for o in outcomes {
        let t = &o.target;
        let sign = if t.metric.smaller_is_better() { "<=" } else { ">=" };
        let (ratio, quartiles) = match o.ratio {
            Some(s) => (short(s.mid), format!("{} - {}", short(s.low), short(s.high))),
            None => ("-".into(), String::new()),
        };
        let cpu = o.cpu.map_or("-".into(), |c| format!("{c:.2}"));
        let mut why = match o.verdict.why() {
            "" => String::new(),
            why => format!(": {why}"),
        };
        if let Some(ceiling) = o.ceiling {
            let _ = write!(why, " (bare sockets: {})", short(ceiling));
        }
        let _ = writeln!(
            out,
            "  {:4} {:37} {:22} {ratio:>8} {quartiles:>17} {sign}{:>5} {:>7} {cpu:>6} {:>5}  {}{why}",
            t.id,
            t.what,
            t.against_text(),
            short(t.must),
            short(t.goal),
            o.good_rounds,
            o.verdict.word(),
        );
    }
    let count = |f: fn(&Verdict) -> bool| outcomes.iter().filter(|o| f(&o.verdict)).count();
    let _ = writeln!(
        out,
        "\n{} pass, {} fail, {} undecided, {} at their ceiling, {} skipped",
        count(|v| matches!(v, Verdict::Pass)),
        count(|v| matches!(v, Verdict::Fail(_))),
        count(|v| matches!(v, Verdict::Undecided(_))),
        count(|v| matches!(v, Verdict::Ceiling(_))),
        count(|v| matches!(v, Verdict::Skipped(_))),
    );
    out
}

/// Warns when the figures say more about others on the machine than about what was measured.
pub(crate) fn warning(results: &Results) -> Option<String> {
    let (disturbed, all) = results.disturbed();
    (disturbed * 4 > all).then(|| {
        format!(
            "{disturbed} of {all} measurements were disturbed by other programs: \
             rates are lower than this machine's, and ratios may be off"
        )
    })
}

/// The legend of what fio has measured.
const DOORS: &str = "
Legend
  NBD socket      of a mapped disk: fio -- `rnbd map --nbd` == `rnbd export --memory`
  file by FUSE    of a mapped disk: fio (direct, libaio) -- `rnbd map --fuse` == the same
    io_uring      the kernel hands its requests to `rnbd map` by io_uring
  nbdkit          plugin memory over TCP: fio -- nbdkit
  nbdfuse         fio (direct, libaio) -- nbdfuse -- nbdkit over TCP
  qemu-nbd        a raw file in memory over TCP: fio -- qemu-nbd
  processors      time of all processors that each process took for a request, in us
";

/// Says what the names in the tables mean.
pub(crate) fn legend(blocks: &[Block]) -> String {
    let entries = || blocks.iter().flat_map(|b| &b.entries);
    if entries().any(|e| e.cell.kind.is_by_fio()) {
        return DOORS.to_owned();
    }
    let used = |s: Subject| entries().any(|e| e.cell.subject == s);
    let mut out = String::from("\nLegend\n");
    for (subject, text) in [
        (Subject::Bowline, "send_to and recv_from, one call per message"),
        (Subject::BowlineBatch, "send_batch and recv_batch, up to 64 messages a call"),
        (Subject::BowlineShared, "send_shared: over TCP, from buffers that are not copied"),
        (Subject::BowlineRdma, "the same as bowline over RDMA, on soft devices"),
        (Subject::Host, "programs on RDS sockets of two nodes, whose CPU time is not counted"),
        (Subject::HostOne, "programs on RDS sockets of one node, whose CPU time is not counted"),
        (Subject::HostPython, "programs in Python on RDS sockets of two nodes"),
        (Subject::TcpPython, "the same programs over TCP, each message with its length"),
        (Subject::Futex, "a word in memory that two processes share, and no payload"),
        (Subject::Pipe, "calls of write and read in turn on a pipe within one process"),
        (Subject::PipePreloaded, "the same with the library for RDS sockets loaded"),
        (Subject::Roce, "write, read, send and so on: verbs between soft devices of two processes"),
        (Subject::Rtrs, "requests of a session, several a call; keys of chunks are refreshed"),
        (Subject::RtrsKept, "the same; clients keep the keys (always_invalidate off)"),
        (Subject::Rnbd, "a mapped disk, used through the library: an export of memory"),
        (
            Subject::DoorNbd,
            "the same through its NBD socket; the receiver has export and front end",
        ),
        (Subject::DoorFuse, "the same through its file (FUSE), likewise"),
        (Subject::RrUdp, "requests and answers over UDP, cut and merged by the kernel, polling"),
        (
            Subject::RrUdpCrc,
            "the same with a checksum of each segment, computed and checked, as RoCE has it",
        ),
        (Subject::RrTcp, "requests and answers over TCP, as many in a write as there are, polling"),
        (Subject::Nbdkit, "nbdkit, plugin memory, over tcp; a client of this program"),
        (Subject::QemuNbd, "qemu-nbd, a raw file in memory, over tcp; the same client"),
        (Subject::Tgt, "tgtd, a file in memory, over tcp; iscsi-perf for a whole second"),
        (
            Subject::UdpGso,
            "UDP cut and merged by the kernel, CRC-32, copy in and out, window, acknowledgements",
        ),
        (Subject::Tcpb, "framed TCP, 64 KiB staged per write, each payload copied out once"),
        (Subject::Tcpz, "framed TCP, one gathering write for up to 64 KiB of messages"),
        (Subject::Tcp1, "framed TCP, one write per message"),
        (Subject::Tcpk, "framed TCP, one write per message, from a copy kept for a retransmission"),
        (Subject::Udp, "one datagram per message, unreliable: what arrived"),
        (Subject::Seqp, "unix SOCK_SEQPACKET"),
        (Subject::Zmq, "ZeroMQ DEALER to ROUTER over tcp"),
        (Subject::Nano, "nanomsg PUSH to PULL over tcp; PAIR for round trips"),
        (Subject::OfiNet, "libfabric reliable datagrams, provider net"),
        (Subject::OfiRxm, "libfabric reliable datagrams, provider tcp;ofi_rxm"),
        (Subject::Ucx, "UCX active messages over tcp"),
    ] {
        if used(subject) {
            let _ = writeln!(out, "  {:14} {text}", Subject::shown(subject.name()));
        }
    }
    out
}

/// Everything, for a result file.
pub(crate) fn json(
    head: &Head,
    machine_costs: &[Cost],
    notes: &[String],
    results: &Results,
    outcomes: &[Outcome],
) -> Value {
    json!({
        "head": head.json(),
        "costs": costs::json(machine_costs),
        "notes": notes,
        "targets": outcomes.iter().map(outcome_json).collect::<Vec<_>>(),
        "measurements": results.records.iter().map(record_json).collect::<Vec<_>>(),
    })
}

fn outcome_json(o: &Outcome) -> Value {
    let against = match o.target.against {
        Against::Best(labels) | Against::SameIndex(labels) => json!(labels),
        Against::Limit(_) => Value::Null,
    };
    json!({
        "id": o.target.id,
        "what": o.target.what,
        "cell": o.target.block,
        "label": o.target.own.join("|"),
        "against": against,
        "ratio": o.ratio.map(|s| s.mid),
        "low": o.ratio.map(|s| s.low),
        "high": o.ratio.map(|s| s.high),
        "cpu_ratio": o.cpu,
        "ceiling": o.ceiling,
        "must": o.target.must,
        "goal": o.target.goal,
        "rounds": o.good_rounds,
        "foreign": o.foreign,
        "verdict": o.verdict.word().to_lowercase(),
        "why": o.verdict.why(),
    })
}

fn record_json(r: &crate::results::Record) -> Value {
    let mut record = json!({
        "cell": r.block,
        "label": r.label,
        "size": r.size,
        "flows": r.flows,
        "round": r.round,
        "pinned": r.pinned,
    });
    let more = match &r.result {
        Err(why) => json!({ "error": why }),
        Ok(s) => {
            let said = s.words.iter().filter(|(k, _)| *k != "lat");
            let said: Vec<String> = said.map(|(k, v)| format!("{k}={v}")).collect();
            let mut more = json!({
                "count": s.count,
                "seconds": s.seconds,
                "rate": s.rate(),
                "send_cpu_ns": s.tx_cpu,
                "receive_cpu_ns": s.rx_cpu,
                "send_syscalls": s.tx_syscalls,
                "receive_syscalls": s.rx_syscalls,
                "foreign": s.foreign,
                "tries": s.tries,
            });
            if let Some(lat) = &s.lat {
                more["lat_ns"] = json!(lat);
            }
            more["said"] = json!(said.join(" "));
            more["other_said"] = json!(s.other.line());
            more
        }
    };
    json::extend(&mut record, more);
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_keep_three_digits() {
        assert_eq!(short(53_149_891.0), "53.1 M");
        assert_eq!(short(4403.0), "4403");
        assert_eq!(short(0.0123), "0.012");
        assert_eq!(short(123_456.0), "123 k");
        assert_eq!(time(6190.0), "6.2 us");
        assert_eq!(time(44.7), "45 ns");
    }
}
