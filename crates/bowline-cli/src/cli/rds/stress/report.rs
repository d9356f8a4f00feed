//! Figures of a stress run: the table of rds-stress, its performance data, its histogram.

use std::{
    fs,
    sync::{Arc, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use super::{block::Block, task::Tally};
use crate::cli::common::histogram::Histogram;

/// Sums over all tasks at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Totals {
    at: Instant,
    req_tx: u64,
    req_rx: u64,
    ack_tx: u64,
    ack_rx: u64,
    send_ns: u64,
    sends: u64,
    rtt_ns: u64,
    rdma_in: u64,
    rdma_out: u64,
    cpu: Option<Cpu>,
}

/// Jiffies of all processors since boot, as `/proc/stat` counts them.
#[derive(Clone, Copy, Debug, Default)]
struct Cpu {
    user: u64,
    system: u64,
    idle: u64,
    irq: u64,
    interrupts: u64,
}

impl Totals {
    /// Adds the tallies up; processor use only when `cpu` asks for it.
    pub(crate) fn take(tallies: &[Arc<Tally>], cpu: bool) -> Self {
        let sum = |field: fn(&Tally) -> u64| tallies.iter().map(|tally| field(tally)).sum();
        Self {
            at: Instant::now(),
            req_tx: sum(|tally| tally.req_tx.load(Ordering::Relaxed)),
            req_rx: sum(|tally| tally.req_rx.load(Ordering::Relaxed)),
            ack_tx: sum(|tally| tally.ack_tx.load(Ordering::Relaxed)),
            ack_rx: sum(|tally| tally.ack_rx.load(Ordering::Relaxed)),
            send_ns: sum(|tally| tally.send_ns.load(Ordering::Relaxed)),
            sends: sum(|tally| tally.sends.load(Ordering::Relaxed)),
            rtt_ns: sum(|tally| tally.rtt_ns.load(Ordering::Relaxed)),
            rdma_in: sum(|tally| tally.rdma_in.load(Ordering::Relaxed)),
            rdma_out: sum(|tally| tally.rdma_out.load(Ordering::Relaxed)),
            cpu: if cpu { Cpu::read() } else { None },
        }
    }
}

impl Cpu {
    fn read() -> Option<Self> {
        let text = fs::read_to_string("/proc/stat").ok()?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Option<Self> {
        let numbers = |name: &str| -> Option<Vec<u64>> {
            let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
            line.split_whitespace().skip(1).map(|word| word.parse().ok()).collect()
        };
        let cpu = numbers("cpu")?;
        let at = |index: usize| cpu.get(index).copied().unwrap_or(0);
        Some(Self {
            user: at(0) + at(1),
            system: at(2),
            idle: at(3) + at(4),
            irq: at(5) + at(6),
            interrupts: numbers("intr")?.first().copied().unwrap_or(0),
        })
    }

    fn busy_since(self, before: Self) -> Shares {
        let user = self.user.saturating_sub(before.user);
        let system = self.system.saturating_sub(before.system);
        let idle = self.idle.saturating_sub(before.idle);
        let irq = self.irq.saturating_sub(before.irq);
        let all = (user + system + idle + irq).max(1) as f64;
        let percent = |part: u64| 100.0 * part as f64 / all;
        Shares {
            user: percent(user),
            system: percent(system),
            idle: percent(idle),
            irq: percent(irq),
            interrupts: self.interrupts.saturating_sub(before.interrupts),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Shares {
    user: f64,
    system: f64,
    idle: f64,
    irq: f64,
    interrupts: u64,
}

/// Figures of the time between two moments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    seconds: f64,
    tasks: u16,
    tx: f64,
    rx: f64,
    kib: f64,
    /// KiB that RDMA has brought to this side's memory, and taken from it.
    rdma_in: f64,
    rdma_out: f64,
    send_us: f64,
    rtt_us: f64,
    /// -1 when it was not measured.
    cpu: f64,
    shares: Shares,
}

/// The column headings.
pub(crate) fn heading() -> String {
    format!(
        "{:>4} {:>6} {:>6} {:>10} {:>10} {:>10} {:>7} {:>8} {:>5}",
        "tsks", "tx/s", "rx/s", "tx+rx K/s", "mbi K/s", "mbo K/s", "tx us/c", "rtt us", "cpu %"
    )
}

/// The line above the averages.
pub(crate) const RULE: &str = "---------------------------------------------";

impl Rates {
    /// Returns the figures between two moments.
    pub(crate) fn between(block: &Block, before: &Totals, after: &Totals) -> Self {
        let seconds =
            after.at.duration_since(before.at).max(Duration::from_micros(1)).as_secs_f64();
        let per = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        let mean = |sum: u64, count: u64| {
            if count == 0 { 0.0 } else { sum as f64 / count as f64 / 1000.0 }
        };
        let (tx, rx) = (per(after.req_tx, before.req_tx), per(after.req_rx, before.req_rx));
        let acks = per(after.ack_tx + after.ack_rx, before.ack_tx + before.ack_rx);
        let bytes = (tx + rx) * f64::from(block.req_bytes) + acks * f64::from(block.ack_bytes);
        let shares = after.cpu.zip(before.cpu).map(|(now, then)| now.busy_since(then));
        Self {
            seconds,
            tasks: block.tasks,
            tx,
            rx,
            kib: bytes / 1024.0,
            rdma_in: per(after.rdma_in, before.rdma_in) / 1024.0,
            rdma_out: per(after.rdma_out, before.rdma_out) / 1024.0,
            send_us: mean(after.send_ns - before.send_ns, after.sends - before.sends),
            rtt_us: mean(after.rtt_ns - before.rtt_ns, after.ack_rx - before.ack_rx),
            cpu: shares.map_or(-1.0, |shares| 100.0 - shares.idle),
            shares: shares.unwrap_or_default(),
        }
    }

    /// Returns a line of the table.
    pub(crate) fn line(&self) -> String {
        format!(
            "{:4} {:6.0} {:6.0} {:10.2} {:10.2} {:10.2} {:7.2} {:8.2} {:5.2}",
            self.tasks,
            self.tx,
            self.rx,
            self.kib,
            self.rdma_in,
            self.rdma_out,
            self.send_us,
            self.rtt_us,
            self.cpu
        )
    }

    /// Returns a line of performance data; its fields are those of [`perfdata_heading`].
    pub(crate) fn perfdata(
        &self,
        block: &Block,
        counters: &[(&'static str, u64)],
        before: &[(&'static str, u64)],
    ) -> String {
        let mut line = format!(
            "::{},{},{},{},{:.0},{:.2},{:.2},{:.2},{:.2},{:.2},{:.2}",
            block.tasks,
            block.req_bytes,
            block.ack_bytes,
            block.rdma_bytes,
            self.tx,
            self.kib,
            self.rdma_in,
            self.rdma_out,
            self.send_us,
            self.rtt_us,
            self.cpu
        );
        for (index, (_, value)) in counters.iter().enumerate() {
            let then = before.get(index).map_or(0, |(_, then)| *then);
            line.push_str(&format!(",{:.0}", value.saturating_sub(then) as f64 / self.seconds));
        }
        let shares = &self.shares;
        line.push_str(&format!(
            ",{:.2},{:.2},{:.2},{:.2},{}",
            shares.user,
            shares.system,
            shares.idle,
            shares.irq,
            (shares.interrupts as f64 / self.seconds) as u64
        ));
        line
    }
}

/// Returns the names and units of the performance data. Unlike the original's heading it names
/// both RDMA columns, so that headings and values are equal in number.
pub(crate) fn perfdata_heading(counters: &[(&'static str, u64)]) -> String {
    let mut line = String::from(
        "::nr_tasks:count,req_size:bytes,ack_size:bytes,rdma_size:bytes,req_sent:count,\
         thruput:kB/s,thruput_rdma_in:kB/s,thruput_rdma_out:kB/s,tx_delay:microseconds,\
         rtt:microseconds,cpu:percent",
    );
    for (name, _) in counters {
        let unit =
            if name.contains("bytes") || name.starts_with("copy_") { "bytes" } else { "count" };
        line.push_str(&format!(",{name}:{unit}"));
    }
    line.push_str(",user:percent,system:percent,idle:percent,irq:percent,intr:count");
    line
}

/// Returns the round trips of all tasks.
pub(crate) fn round_trips(tallies: &[Arc<Tally>]) -> Histogram {
    let mut all = Histogram::default();
    for tally in tallies {
        all.merge(&tally.rtt.lock().unwrap_or_else(PoisonError::into_inner));
    }
    all
}

/// Returns the sixteen lines of `--show-histogram`; the last takes everything above.
pub(crate) fn histogram_lines(all: &Histogram) -> Vec<String> {
    (0..16)
        .map(|power: u32| {
            let low = if power == 0 { 0 } else { 1u64 << power };
            let high = if power == 15 { u64::MAX } else { 1u64 << (power + 1) };
            let shown = if power == 15 { "more".to_owned() } else { (high - 1).to_string() };
            format!("[{low:>8} - {shown:>8}]  {}", all.between(low, high))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heading_is_that_of_rds_stress() {
        assert_eq!(
            heading(),
            "tsks   tx/s   rx/s  tx+rx K/s    mbi K/s    mbo K/s tx us/c   rtt us cpu %"
        );
        assert_eq!(RULE.len(), 45);
    }

    #[test]
    fn a_line_is_that_of_rds_stress() {
        let rates = Rates {
            seconds: 1.0,
            tasks: 2,
            tx: 1922.0,
            rx: 1937.0,
            kib: 15607.51,
            rdma_in: 0.0,
            rdma_out: 64.0,
            send_us: 281.12,
            rtt_us: 6435.32,
            cpu: -1.0,
            shares: Shares::default(),
        };
        assert_eq!(
            rates.line(),
            "   2   1922   1937   15607.51       0.00      64.00  281.12  6435.32 -1.00"
        );
    }

    #[test]
    fn performance_data_has_a_value_for_every_name() {
        let counters = [("conn_reset", 14), ("copy_to_user", 4000)];
        let heading = perfdata_heading(&counters);
        let mut bytes: &[u8] = &[0; 59];
        let block = Block::read(&mut bytes).expect("an old block");
        let rates = Rates {
            seconds: 2.0,
            tasks: 1,
            tx: 10.0,
            rx: 10.0,
            kib: 20.0,
            rdma_in: 0.0,
            rdma_out: 0.0,
            send_us: 1.0,
            rtt_us: 30.0,
            cpu: 50.0,
            shares: Shares::default(),
        };
        let line = rates.perfdata(&block, &counters, &[("conn_reset", 4), ("copy_to_user", 0)]);
        assert_eq!(heading.split(',').count(), line.split(',').count());
        assert!(heading.contains("copy_to_user:bytes"), "{heading}");
        assert!(line.contains(",50.00,5,2000,"), "per second: {line}");
    }

    #[test]
    fn processor_shares_come_from_the_difference() {
        let text = |user: u64, idle: u64| {
            format!("cpu  {user} 0 50 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\nintr {} 1 2\n", user * 2)
        };
        let before = Cpu::parse(&text(100, 100)).expect("numbers");
        let after = Cpu::parse(&text(130, 110)).expect("numbers");
        let shares = after.busy_since(before);
        assert_eq!((shares.user, shares.idle, shares.interrupts), (75.0, 25.0, 60));
    }

    #[test]
    fn every_round_trip_is_in_one_line_of_the_histogram() {
        let mut all = Histogram::default();
        for value in [0, 1, 2, 3, 4, 1000, 65_535, 65_536, 10_000_000] {
            all.record(value);
        }
        let lines = histogram_lines(&all);
        assert_eq!(lines.len(), 16);
        let counts: Vec<u64> = lines
            .iter()
            .map(|line| line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect("a count"))
            .collect();
        assert_eq!(counts.iter().sum::<u64>(), all.count());
        assert_eq!((counts[0], counts[1], counts[2], counts[15]), (2, 2, 1, 3));
    }
}
