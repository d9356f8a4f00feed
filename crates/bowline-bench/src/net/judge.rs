//! The figures that must be reached, W1 to W6, and the verdicts.

use super::measure::{Measured, Percentile};
use super::plan::{Beside, NetCell};
use crate::stats::{Spread, median, spread};
use crate::targets::{Verdict, decide_by_rounds};

/// A link is full from this share of what it can carry.
const FULL: f64 = 0.85;
/// Fewer packets than this that are dropped of those sent are none.
const FEW_DROPS: f64 = 1e-4;

/// A figure of a cell.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) id: &'static str,
    pub(crate) what: &'static str,
    /// Of each round that has both sides: the figure, and whether others disturbed it.
    rounds: Vec<(f64, bool)>,
    pub(crate) must: f64,
    pub(crate) goal: f64,
    /// At most this much, too.
    pub(crate) most: Option<f64>,
    pub(crate) smaller: bool,
}

/// A figure and how it came out.
#[derive(Clone, Debug)]
pub(crate) struct Judged {
    pub(crate) cell: String,
    pub(crate) figure: Figure,
    pub(crate) ratio: Option<Spread>,
    pub(crate) good_rounds: usize,
    pub(crate) verdict: Verdict,
}

impl Judged {
    /// Says whether even the goal is reached.
    pub(crate) fn reaches_goal(&self) -> bool {
        let Figure { goal, most, smaller, .. } = self.figure;
        self.ratio.is_some_and(|ratio| {
            let enough = if smaller { ratio.mid <= goal } else { ratio.mid >= goal };
            enough && most.is_none_or(|most| ratio.mid <= most)
        })
    }
}

/// What a cell gave in a round: bowline, and what it is compared with.
pub(crate) type Round<'a> = (&'a Measured, Option<&'a Measured>);

/// The figures that a cell is about.
pub(crate) fn figures(cell: &NetCell, rounds: &[Round<'_>]) -> Vec<Figure> {
    let of = |figure: &dyn Fn(&Measured, Option<&Measured>) -> Option<f64>| -> Vec<(f64, bool)> {
        let value = |(own, rival): &Round<'_>| {
            let disturbed = own.is_disturbed() || rival.is_some_and(Measured::is_disturbed);
            Some((figure(own, *rival)?, disturbed))
        };
        rounds.iter().filter_map(value).collect()
    };
    let at_least = |id, what, rounds, must, goal| Figure {
        id,
        what,
        rounds,
        must,
        goal,
        most: None,
        smaller: false,
    };
    let at_most = |id, what, rounds, must, goal| Figure {
        smaller: true,
        ..at_least(id, what, rounds, must, goal)
    };
    let rate = || of(&|own, rival| Some(own.rate() / rival?.rate()));
    let capacity = cell.capacity();
    let disk = cell.work.is_of_disk();
    if cell.beside == Beside::Busy {
        return vec![at_least("busy", "rate, of the rival's beside busy loops", rate(), 0.7, 0.7)];
    }
    if cell.beside == Beside::Tcp {
        // A request that is alone waits for what the TCP flow has queued: there is no share.
        if disk && cell.work.depth == 1 {
            return Vec::new();
        }
        let share = of(&|own, _| Some(own.rate() / (cell.link.bytes_per_second() / 2.0)));
        let what = "share beside a TCP flow, of half the link";
        return vec![Figure { most: Some(1.5), ..at_least("W5", what, share, 0.5, 0.5) }];
    }
    let mut figures = Vec::new();
    if cell.clients > 1 {
        // Where every client has a port of its own, processors may be the limit and not the links.
        if !cell.work.comes_back() && cell.work.depth != 1 {
            let filled = of(&|own, _| Some(own.rate() / capacity));
            figures.push(at_least("W4", "rate of all, of the link's", filled, 0.92, 0.92));
        }
        let fair = of(&|own, _| Some(own.fairness()));
        figures.push(at_least("W4", "Jain's index of fairness", fair, 0.9, 0.9));
    } else if disk {
        let best = rounds
            .iter()
            .map(|(own, rival)| rival.map_or(0.0, Measured::rate).max(own.rate()) / capacity);
        let full = median(best).is_some_and(|share| share >= FULL);
        let (must, goal) = if full { (0.95, 0.98) } else { (1.05, 1.05) };
        figures.push(at_least("W1", "rate, of nbdkit's", rate(), must, goal));
    } else if cell.work.size == 1 << 20 {
        figures.push(at_least("W3", "rate, of bare TCP's", rate(), 0.92, 0.98));
    }
    if disk && cell.work.depth == 32 {
        let slow = |of: &Measured| of.latency(Percentile::Hundredth);
        let slow = of(&|own, rival| Some(slow(own)? / slow(rival?)?));
        figures.push(at_most("W2", "99th percentile, of nbdkit's", slow, 1.2, 1.0));
    }
    let drops = of(&|own, rival| {
        let (own, rival) = (own.ports.share(), rival?.ports.share());
        Some(if own < FEW_DROPS { 0.0 } else { own / rival.max(FEW_DROPS) })
    });
    figures.push(at_most("W6", "packets dropped, of the rival's", drops, 1.0, 1.0));
    figures
}

/// Judges a figure; `why`: bowline or its rival could not be measured.
pub(crate) fn judge(cell: String, figure: Figure, why: Option<Verdict>) -> Judged {
    let good: Vec<f64> = figure.rounds.iter().filter(|r| !r.1).map(|r| r.0).collect();
    let all = figure.rounds.iter().map(|r| r.0);
    let ratio = if good.is_empty() { spread(all) } else { spread(good.iter().copied()) };
    let verdict = match (why, ratio) {
        (Some(why), _) => why,
        (None, None) => Verdict::Skipped("not measured".into()),
        (None, Some(ratio)) => {
            let decide = |must, smaller| {
                decide_by_rounds(must, smaller, ratio, good.len(), figure.rounds.len())
            };
            match (decide(figure.must, figure.smaller), figure.most) {
                (Verdict::Pass, Some(most)) => decide(most, true),
                (verdict, _) => verdict,
            }
        }
    };
    Judged { cell, figure, ratio, good_rounds: good.len(), verdict }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(rounds: &[f64]) -> Figure {
        let rounds = rounds.iter().map(|ratio| (*ratio, false)).collect();
        let (must, goal) = (0.5, 0.5);
        Figure { id: "W5", what: "", rounds, must, goal, most: Some(1.5), smaller: false }
    }

    #[test]
    fn a_share_may_be_too_large_as_well_as_too_small() {
        let judge = |rounds: &[f64]| judge(String::new(), figure(rounds), None);
        assert_eq!(judge(&[1.0, 1.1, 0.9]).verdict, Verdict::Pass);
        assert!(judge(&[1.0, 1.1, 0.9]).reaches_goal());
        assert_eq!(judge(&[0.4, 0.4, 0.4]).verdict.word(), "FAIL");
        assert_eq!(judge(&[1.9, 1.8, 1.9]).verdict.word(), "FAIL");
        assert!(!judge(&[1.9, 1.8, 1.9]).reaches_goal());
        assert_eq!(judge(&[1.0, 1.0]).verdict.word(), "undecided");
        assert_eq!(judge(&[]).verdict.word(), "skipped");
    }

    #[test]
    fn disturbed_rounds_do_not_count() {
        let mut figure = figure(&[0.1, 1.0, 1.0, 1.0]);
        figure.rounds[0].1 = true;
        let judged = judge(String::new(), figure, None);
        assert_eq!((judged.good_rounds, judged.verdict), (3, Verdict::Pass));
    }
}
