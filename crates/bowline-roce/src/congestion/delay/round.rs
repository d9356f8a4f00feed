//! Samples of round trips: those of a round, and the last few.

use std::time::Duration;

use bowline_base::Instant;

/// Samples that show a queue only if the shortest of them does: a thread that is late makes single
/// ones longer (bench/notes/2026-11-27-on-a-network.md, "Processors that are late").
pub(super) const RECENT: usize = 4;

/// One round trip: from an acknowledgement to that of something sent after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    /// The round ends with the answer to what was sent from then on.
    pub(super) began: Instant,
    shortest: Duration,
    longest: Duration,
    pub(super) samples: u32,
    /// The window was full.
    pub(super) limited: bool,
    /// Bytes that were acknowledged.
    pub(super) delivered: f64,
    /// A loss or mark has reduced the window in this round.
    pub(super) reduced: bool,
    /// Packets that were lost.
    pub(super) lost: u64,
    /// A notification of congestion has come.
    pub(super) marked: bool,
}

impl Round {
    pub(super) const fn new(began: Instant) -> Self {
        Self {
            began,
            shortest: Duration::MAX,
            longest: Duration::ZERO,
            samples: 0,
            limited: false,
            delivered: 0.0,
            reduced: false,
            lost: 0,
            marked: false,
        }
    }

    pub(super) fn add(&mut self, sample: Duration) {
        self.shortest = self.shortest.min(sample);
        self.longest = self.longest.max(sample);
        self.samples += 1;
    }

    /// The shortest sample: threads and acknowledgements that are late make single ones longer, but
    /// not all of a round [CC-3].
    pub(super) const fn shortest(&self) -> Duration {
        self.shortest
    }

    /// The queue that all packets of the round met, on a route of `least`.
    pub(super) const fn queue(&self, least: Duration) -> Duration {
        self.shortest.saturating_sub(least)
    }

    /// The longest queue that a packet of the round met, if nothing else was late.
    pub(super) const fn longest_queue(&self, least: Duration) -> Duration {
        self.longest.saturating_sub(least)
    }
}

/// The last samples, of whatever round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recent([Duration; RECENT]);

impl Recent {
    pub(super) const fn new() -> Self {
        Self([Duration::ZERO; RECENT])
    }

    pub(super) fn add(&mut self, sample: Duration) {
        self.0.rotate_left(1);
        self.0[RECENT - 1] = sample;
    }

    pub(super) fn shortest(&self) -> Duration {
        self.0.iter().min().copied().unwrap_or_default()
    }

    pub(super) fn longest(&self) -> Duration {
        self.0.iter().max().copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [CC-3]
    #[test]
    fn one_late_sample_of_a_round_is_no_queue() {
        let ms = Duration::from_millis;
        let mut round = Round::new(Instant::from_nanos(0));
        for sample in [9, 3, 30, 8] {
            round.add(ms(sample));
        }
        assert_eq!((round.queue(ms(2)), round.longest_queue(ms(2))), (ms(1), ms(28)));
    }
}
