//! What the port can queue at most, as losses have taught [CC-24].

use std::time::Duration;

/// Part of the longest possible queue that is aimed at, at most: bursts need the rest. Chosen.
const OF_LIMIT: f64 = 0.7;
/// Limit before the first loss, and the largest that is learned again: none.
const UNKNOWN: Duration = Duration::from_secs(1);
/// The longest queue that is taken for possible is at least this: at 100 Gb/s it is 50 KB. Chosen.
const LIMIT_MIN: Duration = Duration::from_micros(4);
/// What it grows by with each round without a loss: what was learned may have been due to others.
/// It doubles in 1420 round trips. Chosen.
const GROWTH: f64 = 1.0 / 2048.0;
/// The longest queue of late becomes shorter by this part each round: it halves in 88 round trips,
/// fewer than there are between two drains. Chosen.
const PEAK_FADES: u32 = 128;
/// Part of it that shows with a loss that the port was full. Chosen.
const PEAK_PART: f64 = 0.8;
/// The shortest peak that says anything: this, and this part of the route. Chosen.
const PEAK_MIN: Duration = Duration::from_micros(4);
const PEAK_OF_ROUTE: u32 = 32;

/// The longest queue that the port holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueLimit {
    /// The longest queue that is possible.
    longest: Duration,
    /// The longest queue of late, which fades.
    peak: Duration,
}

impl QueueLimit {
    pub(super) const fn new() -> Self {
        Self { longest: UNKNOWN, peak: Duration::ZERO }
    }

    /// A packet has met this queue.
    pub(super) fn seen(&mut self, queue: Duration) {
        self.peak = self.peak.max(queue);
    }

    /// A round has ended.
    pub(super) fn end_round(&mut self, reduced: bool) {
        self.peak -= self.peak / PEAK_FADES;
        self.longest = self.longest.max(self.peak);
        if !reduced {
            self.longest = self.longest.mul_f64(1.0 + GROWTH).min(UNKNOWN);
        }
    }

    /// Packets were lost because the port was full, with this queue at most.
    pub(super) fn learn(&mut self, longest: Duration) {
        if longest > LIMIT_MIN {
            self.longest = longest.max(self.peak).max(LIMIT_MIN);
        }
    }

    /// The longest queue that may be aimed at.
    pub(super) fn cap(&self) -> Duration {
        self.longest.mul_f64(OF_LIMIT)
    }

    /// Tells whether the port is full if its queue is `queue`, on a route of `least`.
    pub(super) fn is_reached(&self, queue: Duration, least: Duration) -> bool {
        let says_something = self.peak > PEAK_MIN.max(least / PEAK_OF_ROUTE);
        queue >= self.peak.mul_f64(PEAK_PART) && says_something
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    // tests [CC-24]
    #[test]
    fn the_target_stays_below_what_was_lost_at_and_the_limit_grows_back() {
        let mut limit = QueueLimit::new();
        assert_eq!(limit.cap(), Duration::from_millis(700));
        limit.seen(us(100));
        limit.learn(us(90));
        assert_eq!(limit.cap(), us(70), "the longest queue that was seen");
        limit.end_round(true);
        assert_eq!(limit.cap(), us(70));
        for _ in 0..1420 {
            limit.end_round(false);
        }
        assert!((us(139)..us(141)).contains(&limit.cap()), "{:?}", limit.cap());
        // A queue of 4 us is none that a port overflows with.
        let mut limit = QueueLimit::new();
        limit.learn(us(4));
        assert_eq!(limit.cap(), Duration::from_millis(700));
        limit.learn(us(5));
        assert_eq!(limit.cap(), Duration::from_nanos(3500));
    }

    // tests [CC-23]
    #[test]
    fn a_port_is_full_near_the_longest_queue_of_late() {
        let mut limit = QueueLimit::new();
        assert!(!limit.is_reached(us(100), us(50)), "nothing was seen");
        limit.seen(us(4));
        assert!(!limit.is_reached(us(4), us(50)), "too short");
        limit.seen(us(5));
        assert!(limit.is_reached(us(5), us(50)));
        limit.seen(us(100));
        assert!(limit.is_reached(us(80), us(50)) && !limit.is_reached(us(79), us(50)));
        assert!(!limit.is_reached(us(100), us(3200)), "too short on that route");
        for _ in 0..88 {
            limit.end_round(true);
        }
        assert!(limit.is_reached(us(41), us(50)));
    }
}
