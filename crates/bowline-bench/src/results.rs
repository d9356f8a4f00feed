//! Everything that was measured.

use std::collections::BTreeMap;

use crate::plan::{Block, Entry};
use crate::run::Sample;
use crate::stats::median;
use crate::targets::{ANCHOR_LIMIT, Against, Metric, Round, Target};

/// One measurement, or why it failed.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) block: String,
    pub(crate) label: String,
    pub(crate) size: usize,
    pub(crate) flows: usize,
    pub(crate) round: u32,
    pub(crate) pinned: bool,
    pub(crate) result: Result<Sample, String>,
}

impl Record {
    /// Notes a measurement.
    pub(crate) fn new(
        block: &Block,
        entry: &Entry,
        round: u32,
        result: Result<Sample, String>,
    ) -> Self {
        Self {
            block: block.id.clone(),
            label: entry.label.clone(),
            size: entry.cell.size,
            flows: entry.cell.flows,
            round,
            pinned: entry.cell.pin.is_some(),
            result,
        }
    }
}

/// Takes a figure out of a measurement.
pub(crate) fn figure(sample: &Sample, metric: Metric) -> Option<f64> {
    let lat = |i: usize| sample.lat.as_ref()?.get(i).map(|ns| *ns as f64);
    match metric {
        Metric::Rate => Some(sample.rate()),
        Metric::ByteRate => Some(sample.byte_rate()),
        Metric::P50 => lat(3),
        Metric::P99 => lat(7),
        Metric::RxSyscalls => sample.rx_syscalls,
        Metric::TxSyscalls => sample.tx_syscalls,
        Metric::RxAcks => {
            sample.words.number("acks").ok().map(|n| n as f64 / sample.count.max(1) as f64)
        }
        Metric::Bytes => {
            sample.words.number("bytes").ok().map(|n| n as f64 / sample.count.max(1) as f64)
        }
        Metric::DataPackets => Some(sample.data_packets()?.iter().sum()),
        Metric::Pause => sample.words.number("pause_ns").ok().map(|ns| ns as f64 / 1e9),
        Metric::Failed => sample.words.number("failed").ok().map(|n| n as f64),
    }
}

/// All records of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Results {
    pub(crate) records: Vec<Record>,
}

impl Results {
    /// Says whether anything of a block was measured.
    pub(crate) fn has_block(&self, block: &str) -> bool {
        self.records.iter().any(|r| r.block == block)
    }

    /// How many measurements others disturbed, and how many there are.
    pub(crate) fn disturbed(&self) -> (usize, usize) {
        let good = || self.records.iter().filter_map(|r| r.result.as_ref().ok());
        (good().filter(|s| s.is_disturbed()).count(), good().count())
    }

    fn of<'a>(&'a self, block: &str, label: &str) -> impl Iterator<Item = &'a Record> {
        self.records.iter().filter(move |r| r.block == block && r.label == label)
    }

    /// The measurements of one entry that were not disturbed, or all when each was.
    pub(crate) fn samples(&self, block: &str, label: &str) -> Vec<&Sample> {
        let all: Vec<&Sample> =
            self.of(block, label).filter_map(|r| r.result.as_ref().ok()).collect();
        let good: Vec<&Sample> = all.iter().copied().filter(|s| !s.is_disturbed()).collect();
        if good.is_empty() { all } else { good }
    }

    /// Why an entry has no measurement, when every attempt failed or any was wrong.
    pub(crate) fn error(&self, block: &str, label: &str) -> Option<String> {
        self.of(block, label).find_map(|r| r.result.as_ref().err().cloned())
    }

    /// The median of a figure of one entry.
    pub(crate) fn figure(&self, block: &str, label: &str, metric: Metric) -> Option<f64> {
        median(self.samples(block, label).into_iter().filter_map(|s| figure(s, metric)))
    }

    /// The median of the ratios of two entries in each round that has both; of the rounds that were
    /// not disturbed, if there are some.
    pub(crate) fn ratio(&self, block: &str, own: &str, other: &str, metric: Metric) -> Option<f64> {
        let compare = |own: &Record| {
            let mut others = self.of(block, other).filter(|other| other.round == own.round);
            let (own, other) = (own.result.as_ref().ok()?, others.next()?.result.as_ref().ok()?);
            let disturbed = own.is_disturbed() || other.is_disturbed();
            Some((figure(own, metric)? / figure(other, metric)?, disturbed))
        };
        let rounds: Vec<(f64, bool)> = self.of(block, own).filter_map(compare).collect();
        let good = || rounds.iter().filter(|(_, disturbed)| !disturbed).map(|(ratio, _)| *ratio);
        median(good()).or_else(|| median(rounds.iter().map(|(ratio, _)| *ratio)))
    }

    /// The ratio of each round that has both sides.
    pub(crate) fn rounds(&self, target: &Target) -> Vec<Round> {
        let mut by_round: BTreeMap<u32, Vec<&Record>> = BTreeMap::new();
        for record in self.records.iter().filter(|r| r.block == target.block) {
            by_round.entry(record.round).or_default().push(record);
        }
        by_round.values().filter_map(|records| ratio_of_round(target, records)).collect()
    }
}

fn samples<'a>(records: &[&'a Record], label: &str) -> Vec<&'a Sample> {
    let of = records.iter().filter(|r| r.label == label);
    of.filter_map(|r| r.result.as_ref().ok()).collect()
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Says whether two or more runs of the same anchor lie too far apart.
fn apart(values: &[f64]) -> bool {
    let Some(mean) = mean(values) else { return false };
    let max = values.iter().copied().fold(f64::MIN, f64::max);
    let min = values.iter().copied().fold(f64::MAX, f64::min);
    (max - min) / mean > ANCHOR_LIMIT
}

/// The best of some entries in a round.
struct Best<'a> {
    value: f64,
    /// Which of the labels it was.
    at: usize,
    samples: Vec<&'a Sample>,
    /// Two runs of the same entry lie too far apart.
    unsteady: bool,
}

fn best_of<'a>(records: &[&'a Record], labels: &[&str], metric: Metric) -> Option<Best<'a>> {
    let mut best: Option<Best<'a>> = None;
    let mut unsteady = false;
    for (at, label) in labels.iter().enumerate() {
        let samples = samples(records, label);
        let values: Vec<f64> = samples.iter().filter_map(|s| figure(s, metric)).collect();
        let Some(value) = mean(&values) else { continue };
        unsteady |= apart(&values);
        let better = best.as_ref().is_none_or(|best| {
            if metric.smaller_is_better() { value < best.value } else { value > best.value }
        });
        if better {
            best = Some(Best { value, at, samples, unsteady: false });
        }
    }
    best.map(|best| Best { unsteady, ..best })
}

fn ratio_of_round(target: &Target, records: &[&Record]) -> Option<Round> {
    let own = best_of(records, target.own, target.metric)?;
    let rival = match target.against {
        Against::Limit(_) => None,
        Against::Best(labels) => Some(best_of(records, labels, target.metric)?),
        Against::SameIndex(labels) => {
            let rival = labels.get(own.at..=own.at)?;
            Some(best_of(records, rival, target.metric)?)
        }
    };
    let rivals = rival.iter().flat_map(|rival| &rival.samples);
    let used = || own.samples.iter().chain(rivals.clone());
    let foreign = used().map(|s| s.foreign).fold(0.0, f64::max);
    let mut disturbed = used().any(|s| s.is_disturbed());
    disturbed |= rival.as_ref().is_some_and(|rival| rival.unsteady);
    // Per byte where messages of different sizes are compared.
    let unit = |s: &Sample| if target.metric == Metric::ByteRate { s.bytes as f64 } else { 1.0 };
    let cpu = |samples: &[&Sample]| {
        mean(&samples.iter().map(|s| (s.rx_cpu + s.tx_cpu) / unit(s)).collect::<Vec<_>>())
    };
    let anchor = match (&rival, target.against) {
        (Some(rival), _) => rival.value,
        (None, Against::Limit(limit)) => limit,
        (None, _) => return None,
    };
    let anchor_cpu = rival.as_ref().and_then(|rival| cpu(&rival.samples));
    // Whatever the rival, the bare sockets of the same block tell whether the machine was steady.
    let labels: std::collections::BTreeSet<&str> = records
        .iter()
        .filter(|r| matches!(r.label.as_str(), "tcpb" | "tcp1" | "tcpz" | "udp-gso" | "rr-udp"))
        .map(|r| r.label.as_str())
        .collect();
    for label in labels {
        let values: Vec<f64> =
            samples(records, label).iter().filter_map(|s| figure(s, target.metric)).collect();
        disturbed |= apart(&values);
    }
    let cpu = cpu(&own.samples).zip(anchor_cpu).map(|(own, anchor)| own / anchor);
    Some(Round { ratio: own.value / anchor, cpu, foreign, disturbed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Words;
    use crate::targets::{RDS, ROCE};

    fn record(label: &str, rate: u64, foreign: f64) -> Record {
        Record {
            block: "stream/64".into(),
            label: label.into(),
            size: 64,
            flows: 1,
            round: 0,
            pinned: true,
            result: Ok(Sample {
                count: rate,
                seconds: 1.0,
                bytes: 64,
                rx_cpu: 10.0,
                tx_cpu: 20.0,
                rx_syscalls: None,
                tx_syscalls: None,
                lat: None,
                words: Words::default(),
                other: Words::default(),
                foreign,
                tries: 1,
            }),
        }
    }

    #[test]
    fn a_ratio_is_formed_with_the_mean_of_both_anchor_runs() {
        let results = Results {
            records: vec![
                record("tcpb", 90, 0.0),
                record("bowline", 20, 0.0),
                record("tcpb", 110, 0.0),
            ],
        };
        let rounds = results.rounds(&RDS[0]);
        assert_eq!(rounds.len(), 1);
        assert!((rounds[0].ratio - 0.2).abs() < 1e-9);
        assert_eq!((rounds[0].cpu, rounds[0].disturbed), (Some(1.0), false));
    }

    #[test]
    fn a_round_is_disturbed_by_others_and_by_unsteady_anchors() {
        let noisy = Results { records: vec![record("tcpb", 100, 0.2), record("bowline", 20, 0.0)] };
        assert!(noisy.rounds(&RDS[0])[0].disturbed);
        let unsteady = Results {
            records: vec![
                record("tcpb", 80, 0.0),
                record("bowline", 20, 0.0),
                record("tcpb", 120, 0.0),
            ],
        };
        assert!(unsteady.rounds(&RDS[0])[0].disturbed);
        assert!(unsteady.rounds(&RDS[1]).is_empty(), "ZeroMQ was not measured");
    }

    #[test]
    fn messages_of_different_sizes_are_compared_by_their_bytes() {
        let [mut anchor, mut write] = [record("udp-gso", 1000, 0.0), record("write", 10, 0.0)];
        for (record, bytes) in [(&mut anchor, 4096), (&mut write, 1 << 20)] {
            record.block = "bulk/4096".into();
            record.result.as_mut().unwrap().bytes = bytes;
        }
        let round = Results { records: vec![anchor, write] }.rounds(&ROCE[0])[0];
        assert!((round.ratio - 2.56).abs() < 1e-9, "{round:?}");
        assert!(round.cpu.is_some_and(|cpu| (cpu - 1.0 / 256.0).abs() < 1e-9), "{round:?}");
    }

    #[test]
    fn entries_are_compared_within_a_round_and_disturbed_rounds_left_out() {
        let round = |round, own, other, foreign| {
            [("door-nbd", own), ("nbdkit", other)]
                .map(|(label, rate)| Record { round, ..record(label, rate, foreign) })
        };
        // The other is three times as fast in the second round, and so is what is compared with it.
        let [a, b, c] = [round(0, 50, 100, 0.0), round(1, 150, 300, 0.1), round(2, 9, 10, 0.5)];
        let lonely = Record { round: 3, ..record("door-nbd", 700, 0.0) };
        let mut results = Results { records: [a, b, c].concat() };
        results.records.push(lonely);
        let ratio =
            |results: &Results, metric| results.ratio("stream/64", "door-nbd", "nbdkit", metric);
        assert_eq!(ratio(&results, Metric::Rate), Some(0.5));
        assert_eq!(ratio(&results, Metric::P99), None, "no times were taken");
        results.records.retain(|record| record.round == 2);
        assert_eq!(ratio(&results, Metric::Rate), Some(0.9), "there is no better round");
    }

    #[test]
    fn the_best_of_several_rivals_counts() {
        let records =
            vec![record("bowline", 100, 0.0), record("ofi-net", 5, 0.0), record("ucx", 10, 0.0)];
        let rounds = Results { records }.rounds(&RDS[2]);
        assert!((rounds[0].ratio - 10.0).abs() < 1e-9);
    }
}
