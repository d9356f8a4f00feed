//! Tables for people, and the result file.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::Record;
use super::judge::Judged;
use super::measure::{Measured, Percentile};
use super::plan::{Beside, NetCell};
use crate::cell::Subject;
use crate::head::Head;
use crate::json;
use crate::plan::bytes;
use crate::report::{shares, short, time};
use crate::run::Sample;
use crate::stats::median;
use crate::targets::Verdict;

/// Writes what was measured: a table for each network.
pub(crate) fn tables(cells: &[NetCell], records: &[Record]) -> String {
    let mut out = String::new();
    let mut last = String::new();
    for (at, cell) in cells.iter().enumerate() {
        let clients = if cell.clients == 1 { "client" } else { "clients" };
        let limit = bytes(cell.link.limit as usize);
        let rate = short(cell.link.rate as f64);
        let title =
            format!("{rate}bit/s, {limit} of buffer, MTU {}, {} {clients}", cell.mtu, cell.clients);
        // Writing to a String cannot fail, here and below.
        if title != last {
            let _ = writeln!(
                out,
                "\n{title}\n  {:32}{:14}{:>9}{:>9}{:>11}{:>11}{:>11}{:>10}{:>10}{:>10}",
                "", "", "MB/s", "of link", "p50", "p99", "pause", "fairness", "TCP MB/s", "dropped"
            );
            last = title;
        }
        for subject in [cell.work.own, cell.work.rival] {
            row(&mut out, cell, subject, records, at);
        }
        if cell.work.is_by_fio() {
            let ratio = |f: &dyn Fn(&Measured) -> Option<f64>| {
                ratio(cell, records, at, f).map_or("-".to_owned(), |ratio| format!("{ratio:.2}"))
            };
            let p99 = |m: &Measured| m.latency(Percentile::Hundredth);
            let (rate, p99) = (ratio(&|m| Some(m.rate())), ratio(&p99));
            let _ = writeln!(out, "  {:32}of nbdkit: rate {rate}, p99 {p99}", "");
        }
    }
    out
}

/// The median of bowline's figure divided by its rival's in each round.
fn ratio(
    cell: &NetCell,
    records: &[Record],
    at: usize,
    figure: &dyn Fn(&Measured) -> Option<f64>,
) -> Option<f64> {
    let of = |subject, round| {
        let mut all = records.iter().filter(|r| r.cell == at && r.subject == subject);
        all.find(|r| r.round == round).and_then(|r| figure(r.result.as_ref().ok()?))
    };
    let rounds = records.iter().map(|r| r.round).max().map_or(0, |last| last + 1);
    let (own, rival) = (cell.work.own, cell.work.rival);
    median((0..rounds).filter_map(|round| Some(of(own, round)? / of(rival, round)?)))
}

fn row(out: &mut String, cell: &NetCell, subject: Subject, records: &[Record], at: usize) {
    let of = || records.iter().filter(|r| r.cell == at && r.subject == subject);
    let good: Vec<&Measured> = of().filter_map(|r| r.result.as_ref().ok()).collect();
    let beside = match cell.beside {
        Beside::Nothing => String::new(),
        other => format!("+{}", other.name()),
    };
    let name = format!("{}{beside}", cell.work.name);
    let _ = write!(out, "  {name:32}{:14}", Subject::shown(subject.name()));
    if good.is_empty() {
        let why = of().find_map(|r| r.result.as_ref().err()).map_or("not measured", |why| why);
        let _ = writeln!(out, " failed: {why}");
        return;
    }
    let mid = |f: &dyn Fn(&Measured) -> Option<f64>| median(good.iter().filter_map(|m| f(m)));
    let text = |value: Option<f64>, write: &dyn Fn(f64) -> String| {
        value.map_or_else(|| "-".to_owned(), write)
    };
    let megabytes = |value: f64| format!("{:.1}", value / 1e6);
    let times = |f: &dyn Fn(&Measured) -> Option<f64>| text(mid(f), &|ns| time(ns));
    let rate = mid(&|m| Some(m.rate()));
    let _ = writeln!(
        out,
        "{:>9}{:>9}{:>11}{:>11}{:>11}{:>10}{:>10}{:>10}{}{}",
        text(rate, &megabytes),
        text(rate, &|rate| format!("{:.2}", rate / cell.capacity())),
        times(&|m| m.latency(Percentile::Half)),
        times(&|m| m.latency(Percentile::Hundredth)),
        times(&Measured::pause),
        text(mid(&|m| (cell.clients > 1).then(|| m.fairness())), &|x| format!("{x:.2}")),
        text(mid(&|m| m.flow.as_ref().map(Sample::byte_rate)), &megabytes),
        text(mid(&|m| Some(m.ports.share())), &|share| format!("{:.3} %", share * 100.0)),
        used(cell, &good),
        note(&good),
    );
}

/// What each process took of the processors for a request, where fio asked.
fn used(cell: &NetCell, good: &[&Measured]) -> String {
    let all: Vec<&Sample> = good.iter().flat_map(|m| &m.clients).collect();
    if cell.work.is_by_fio() { format!("   {}", shares(&all)) } else { String::new() }
}

/// Says that others disturbed it.
fn note(good: &[&Measured]) -> String {
    let foreign = median(good.iter().map(|m| m.foreign)).unwrap_or(0.0);
    match good.iter().any(|m| m.is_disturbed()) {
        true => format!("   disturbed ({:.0} % foreign)", foreign * 100.0),
        false => String::new(),
    }
}

/// Writes the figures that must be reached.
pub(crate) fn figures(judged: &[Judged]) -> String {
    let mut out = String::from("\nFigures (bowline's, of what was measured in the same round)\n");
    let _ = writeln!(
        out,
        "  {:5} {:45} {:42} {:>8} {:>15} {:>12} {:>7} {:>5}  verdict",
        "", "cell", "figure", "ratio", "quartiles", "must", "goal", "rnds"
    );
    for j in judged {
        let f = &j.figure;
        let sign = if f.smaller { "<=" } else { ">=" };
        let (ratio, quartiles) = match j.ratio {
            Some(s) => (short(s.mid), format!("{} - {}", short(s.low), short(s.high))),
            None => ("-".into(), String::new()),
        };
        let why = match j.verdict.why() {
            "" => String::new(),
            why => format!(": {why}"),
        };
        let goal = if j.reaches_goal() { ", the goal too" } else { "" };
        let goal = if j.verdict == Verdict::Pass { goal } else { "" };
        let _ = writeln!(
            out,
            "  {:5} {:45} {:42} {ratio:>8} {quartiles:>15} {:>12} {:>7} {:>5}  {}{goal}{why}",
            f.id,
            j.cell,
            f.what,
            f.most.map_or_else(
                || format!("{sign} {}", short(f.must)),
                |most| format!("{} to {}", short(f.must), short(most))
            ),
            short(f.goal),
            j.good_rounds,
            j.verdict.word(),
        );
    }
    let count = |word: &str| judged.iter().filter(|j| j.verdict.word() == word).count();
    let [pass, fail, open, left_out] = ["pass", "FAIL", "undecided", "skipped"].map(count);
    let _ = writeln!(out, "\n{pass} pass, {fail} fail, {open} undecided, {left_out} skipped");
    out
}

/// Everything, for a result file.
pub(crate) fn json(
    head: &Head,
    notes: &[String],
    cells: &[NetCell],
    records: &[Record],
    judged: &[Judged],
) -> Value {
    let record = |record: &Record| record_json(&cells[record.cell], record);
    json!({
        "head": head.json(),
        "notes": notes,
        "figures": judged.iter().map(figure_json).collect::<Vec<_>>(),
        "measurements": records.iter().map(record).collect::<Vec<_>>(),
    })
}

fn figure_json(j: &Judged) -> Value {
    json!({
        "id": j.figure.id,
        "cell": j.cell,
        "what": j.figure.what,
        "ratio": j.ratio.map(|s| s.mid),
        "low": j.ratio.map(|s| s.low),
        "high": j.ratio.map(|s| s.high),
        "must": j.figure.must,
        "goal": j.figure.goal,
        "rounds": j.good_rounds,
        "verdict": j.verdict.word().to_lowercase(),
        "why": j.verdict.why(),
    })
}

fn record_json(cell: &NetCell, record: &Record) -> Value {
    let mut all = json!({
        "cell": cell.name(),
        "label": record.subject.name(),
        "round": record.round,
    });
    let more = match &record.result {
        Err(why) => json!({ "error": why }),
        Ok(m) => json!({
            "bytes_per_second": m.rate(),
            "p50_ns": m.latency(Percentile::Half),
            "p99_ns": m.latency(Percentile::Hundredth),
            "pause_ns": m.pause(),
            "fairness": m.fairness(),
            "flow_bytes_per_second": m.flow.as_ref().map(Sample::byte_rate),
            "router_sent": m.ports.sent,
            "router_dropped": m.ports.dropped,
            "foreign": m.foreign,
            "clients": m.clients.iter().map(client_json).collect::<Vec<_>>(),
        }),
    };
    json::extend(&mut all, more);
    all
}

fn client_json(s: &Sample) -> Value {
    json!({
        "bytes_per_second": s.byte_rate(),
        "said": s.words.line(),
        "other_said": s.other.line(),
    })
}
