//! Others that fill the queue until they lose packets, such as CUBIC [CC-21]. Senders that follow a
//! target do not keep a queue above it for long, and drain it together. Copa has such a mode too
//! (competitive mode), and looks for a queue that is nearly empty once in five round trips.

use std::time::Duration;

use bowline_base::Instant;

/// Rounds above the target after which further ones count, the rounds that are looked at together,
/// and the part of them that shows that others fill the queue. Chosen with `--cells cubic`.
const LONG_FULL: u32 = 12;
const JUDGED: u32 = 64;
const FILLED_PART: u32 = 8;
/// Drains in a row in which the queue stays, which show that too. With two, four clients at
/// 200 Mb/s took each other for strangers, Jain's index 0.63; 0.91 to 0.99 with four
/// (bench/notes/2026-11-27-on-a-network.md, "The full matrix").
const FILLED_DRAINS: u32 = 4;
/// Drains whose least round trips are compared. Chosen.
const DRAINS: usize = 4;
/// Round trips for which this is thought, at first and after it was found again and again. Chosen.
const LASTS_MIN: u32 = 256;
const LASTS_MAX: u32 = 4096;
/// Packets of the window with which one begins to compete, at least: the delay has shrunk it to a
/// fifth of a packet by then (the same note, "Beside TCP it starves").
pub(super) const WINDOW_MIN: f64 = 4.0;
/// Packets that the window grows by in a round trip, as Reno's does (RFC 5681).
pub(super) const ADDED: f64 = 1.0;
/// What a loss leaves of the window, as CUBIC's does (RFC 9438, beta).
pub(super) const AFTER_LOSS: f64 = 0.7;

/// Looks for others who fill the queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Competition {
    /// Rounds since the queue was last judged, and those of them after many above the target.
    judged: u32,
    filled: u32,
    /// Round trips for which others were thought to fill the queue last time.
    lasts: u32,
    /// Consecutive drains in which the queue did not become empty.
    filled_drains: u32,
    /// The least round trips around the last drains.
    emptiest: [Duration; DRAINS],
}

impl Competition {
    pub(super) const fn new() -> Self {
        Self {
            judged: 0,
            filled: 0,
            lasts: LASTS_MIN,
            filled_drains: 0,
            emptiest: [Duration::MAX; DRAINS],
        }
    }

    /// Counts a round that is the last of `above` in a row above the target, and judges the last
    /// ones; tells whether others fill the queue.
    pub(super) fn judge_round(&mut self, above: u32) -> bool {
        self.judged += 1;
        self.filled += u32::from(above >= LONG_FULL);
        if self.judged < JUDGED {
            return false;
        }
        let others = self.filled * FILLED_PART > self.judged;
        self.restart();
        if !others && self.filled_drains == 0 {
            self.lasts = LASTS_MIN;
        }
        others
    }

    /// Looks at what a drain has left of the queue: all senders that follow a target have drained
    /// it. What was `found` then is the route, unless shorter round trips were seen around the last
    /// drains. Tells whether others fill the queue.
    pub(super) fn judge_drain(
        &mut self,
        found: Duration,
        before: Duration,
        target: Duration,
    ) -> bool {
        let emptiest = self.emptiest.iter().copied().fold(before, Duration::min);
        self.emptiest.rotate_left(1);
        self.emptiest[DRAINS - 1] = found.min(before);
        self.filled_drains = if found > emptiest + target / 2 { self.filled_drains + 1 } else { 0 };
        self.filled_drains >= FILLED_DRAINS
    }

    /// Begins to compete, each time for twice as long; returns until when.
    pub(super) fn begin(&mut self, now: Instant, smoothed: Duration) -> Instant {
        self.lasts = (self.lasts * 2).min(LASTS_MAX);
        now + smoothed * self.lasts
    }

    /// Rounds until now say nothing about the next ones.
    pub(super) const fn restart(&mut self) {
        (self.judged, self.filled) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Judges 64 rounds, the last `above` of which are above the target in a row.
    fn judge(competition: &mut Competition, above: u32) -> bool {
        (0..64).fold(false, |_, round| {
            competition.judge_round((round + above + 1_u32).saturating_sub(64))
        })
    }

    // tests [CC-21]
    #[test]
    fn a_queue_that_stays_above_the_target_for_many_rounds_is_that_of_others() {
        let mut competition = Competition::new();
        assert!(!judge(&mut competition, 0));
        // Of 64 rounds more than 8 have to follow 11 others above the target.
        assert!(!judge(&mut competition, 19));
        assert!(judge(&mut competition, 20));
    }

    // tests [CC-21]
    #[test]
    fn each_time_that_others_are_found_it_lasts_twice_as_long() {
        let mut competition = Competition::new();
        let now = Instant::from_nanos(0);
        let last = |competition: &mut Competition| {
            competition.begin(now, MS).saturating_since(now).as_millis()
        };
        for expected in [512, 1024, 2048, 4096, 4096] {
            assert_eq!(last(&mut competition), expected);
        }
        assert!(!judge(&mut competition, 0));
        assert_eq!(last(&mut competition), 512, "64 rounds without them");
    }

    // tests [CC-21]
    #[test]
    fn four_drains_in_a_row_that_leave_a_queue_show_others() {
        let mut competition = Competition::new();
        assert!(!competition.judge_drain(MS, MS, MS), "the route");
        for drain in 1..=4 {
            // The queue of others is taken for the route meanwhile: the shortest of four counts.
            let others = competition.judge_drain(MS * 2, MS * 2, MS);
            assert_eq!(others, drain == 4, "drain {drain}");
        }
        assert!(!competition.judge_drain(MS * 2, MS * 2, MS), "the fifth knows no other route");
        assert!(!competition.judge_drain(MS, MS * 2, MS), "an empty queue ends it");
    }
}
