//! Packets that a peer which reports gaps has not received, while it keeps later ones: only they
//! are sent again [CC-11].
//!
//! ```text
//!   una   reported 3..5   8..9        end
//!    |----xxx-----------xx-------------|       each one waits a little, since it may only be late
//! ```

use std::collections::VecDeque;

use bowline_base::Instant;
use bowline_wire::roce::Psn;

/// Most holes; further ones are found when these are filled.
const HOLES_MAX: usize = 4096;

/// Consecutive missing packets.
#[derive(Clone, Copy, Debug)]
struct Hole {
    from: Psn,
    upto: Psn,
    /// When they are sent again, or were.
    at: Instant,
}

/// Missing packets, both lists in the order of their PSNs.
#[derive(Debug, Default)]
pub(super) struct Holes {
    due: VecDeque<Hole>,
    /// Sent again, and not acknowledged.
    sent: VecDeque<Hole>,
}

impl Holes {
    pub(super) const fn new() -> Self {
        Self { due: VecDeque::new(), sent: VecDeque::new() }
    }

    pub(super) fn clear(&mut self) {
        self.due.clear();
        self.sent.clear();
    }

    /// Adds the packets `from` to before `upto`, to be sent again at `due`, unless they are known.
    pub(super) fn add(&mut self, una: Psn, from: Psn, upto: Psn, due: Instant) {
        let mut from = from;
        for list in [&self.due, &self.sent] {
            let end = list.partition_point(|hole| hole.from.since(una) < upto.since(una));
            let known = end.checked_sub(1).and_then(|at| list.get(at));
            if let Some(hole) = known
                && hole.upto.is_after(from)
            {
                from = hole.upto;
            }
        }
        if from.is_before(upto) && self.due.len() < HOLES_MAX {
            let at = self.due.partition_point(|hole| hole.from.since(una) < from.since(una));
            self.due.insert(at, Hole { from, upto, at: due });
        }
    }

    /// Returns when the next hole is due.
    #[inline]
    pub(super) fn due(&self) -> Option<Instant> {
        self.due.front().map(|hole| hole.at)
    }

    /// Takes the next packet that is due now, and tells whether it is the last of its hole.
    pub(super) fn take(&mut self, now: Instant) -> Option<(Psn, bool)> {
        let first = self.due.front_mut().filter(|hole| hole.at <= now)?;
        let psn = first.from;
        first.from = psn.next();
        let last = first.from == first.upto;
        if last {
            self.due.pop_front();
        }
        match self.sent.back_mut() {
            Some(back) if back.upto == psn && back.at == now => back.upto = psn.next(),
            _ => {
                let at = self.sent.partition_point(|hole| hole.from.is_before(psn));
                self.sent.insert(at, Hole { from: psn, upto: psn.next(), at: now });
            }
        }
        Some((psn, last))
    }

    /// Lets everything sent again before `before` be sent again once more: it has not arrived, and
    /// something sent later has.
    pub(super) fn lost_again(&mut self, una: Psn, before: Instant, now: Instant) {
        for hole in std::mem::take(&mut self.sent) {
            if hole.at < before {
                self.add(una, hole.from, hole.upto, now);
            } else {
                self.sent.push_back(hole);
            }
        }
    }

    /// Number of packets missing from `from` to before `upto`.
    pub(super) fn missing(&self, from: Psn, upto: Psn) -> u32 {
        let common = |hole: &Hole| {
            let first = if hole.from.is_before(from) { from } else { hole.from };
            let end = if hole.upto.is_after(upto) { upto } else { hole.upto };
            if first.is_before(end) { end.since(first) } else { 0 }
        };
        self.due.iter().chain(&self.sent).map(common).sum()
    }

    /// Forgets the holes before `una`; returns when the newest of them was sent again, if one was.
    pub(super) fn filled(&mut self, una: Psn) -> Option<Instant> {
        let mut sent_at = None;
        for (list, sent) in [(&mut self.due, false), (&mut self.sent, true)] {
            while let Some(first) = list.front_mut()
                && first.from.is_before(una)
            {
                if sent {
                    sent_at = Some(first.at);
                }
                if una.is_before(first.upto) {
                    first.from = una;
                    break;
                }
                list.pop_front();
            }
        }
        sent_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    // tests [CC-11]
    #[test]
    fn each_missing_packet_is_sent_again_once_when_it_is_due() {
        let psn = Psn::new;
        let mut holes = Holes::new();
        holes.add(psn(0), psn(3), psn(5), at(10));
        holes.add(psn(0), psn(8), psn(9), at(20));
        holes.add(psn(0), psn(3), psn(5), at(30));
        assert_eq!(holes.take(at(9)), None);
        assert_eq!(holes.take(at(10)), Some((psn(3), false)));
        assert_eq!(holes.take(at(10)), Some((psn(4), true)));
        assert_eq!((holes.take(at(10)), holes.due()), (None, Some(at(20))));
        assert_eq!(holes.filled(psn(9)), Some(at(10)));
        assert_eq!(holes.due(), None);
    }

    // tests [CC-11]
    #[test]
    fn a_hole_that_was_only_late_is_not_sent_again() {
        let psn = Psn::new;
        let mut holes = Holes::new();
        holes.add(psn(0), psn(3), psn(5), at(10));
        assert_eq!(holes.filled(psn(7)), None);
        assert_eq!(holes.take(at(10)), None);
    }

    // tests [CC-11]
    #[test]
    fn a_packet_lost_twice_is_sent_a_third_time() {
        let psn = Psn::new;
        let mut holes = Holes::new();
        holes.add(psn(0), psn(3), psn(4), at(10));
        assert_eq!(holes.take(at(10)), Some((psn(3), true)));
        holes.lost_again(psn(0), at(10), at(15));
        assert_eq!(holes.take(at(15)), None);
        holes.lost_again(psn(0), at(11), at(20));
        assert_eq!(holes.take(at(20)), Some((psn(3), true)));
    }

    #[test]
    fn what_is_missing_is_counted_once_sent_again_or_not() {
        let psn = Psn::new;
        let mut holes = Holes::new();
        holes.add(psn(0), psn(3), psn(6), at(10));
        holes.add(psn(0), psn(8), psn(9), at(20));
        assert_eq!(holes.take(at(10)), Some((psn(3), false)));
        assert_eq!(holes.missing(psn(0), psn(20)), 4);
        assert_eq!(holes.missing(psn(4), psn(8)), 2);
        assert_eq!(holes.missing(psn(6), psn(8)), 0);
    }
}
