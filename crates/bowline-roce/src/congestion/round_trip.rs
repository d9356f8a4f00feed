//! Round trip of a path: smoothed, and the least.

use std::time::Duration;

use bowline_base::Instant;

/// A round trip that is longer by this part of the least one is one without a queue.
const NEARLY: u32 = 50;

/// Estimates of a round trip. Every sample is that of a packet sent once (Karn) [CC-2].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundTrip {
    smoothed: Option<Duration>,
    least: Duration,
    /// How far samples deviate from the smoothed one.
    deviation: Duration,
    /// When the round trip was the least last, or nearly so.
    least_at: Instant,
    /// Nothing was measured yet: the estimate is a guess.
    guessed: bool,
}

impl RoundTrip {
    /// Takes a guess, which holds until the first sample.
    pub(super) fn guess(&mut self, now: Instant, guess: Duration) {
        *self = Self { guessed: true, ..Self::first(now, guess) };
    }

    /// Takes a sample.
    pub(super) fn sample(&mut self, now: Instant, sample: Duration) {
        let Some(smoothed) = self.smoothed.filter(|_| !self.guessed) else {
            *self = Self::first(now, sample);
            return;
        };
        self.deviation = (self.deviation * 15 + smoothed.abs_diff(sample)) / 16;
        self.smoothed = Some((smoothed * 7 + sample) / 8);
        if sample <= self.least + self.least / NEARLY {
            self.least = self.least.min(sample);
            self.least_at = now;
        }
    }

    /// Nothing was measured yet: the estimate is a guess.
    pub(super) const fn is_guess(&self) -> bool {
        self.guessed
    }

    fn first(now: Instant, sample: Duration) -> Self {
        Self { smoothed: Some(sample), least: sample, least_at: now, ..Self::default() }
    }

    /// How far samples deviate from the smoothed one.
    pub(super) const fn deviation(&self) -> Duration {
        self.deviation
    }

    /// When the round trip was the least last.
    pub(super) const fn least_at(&self) -> Instant {
        self.least_at
    }

    /// The smoothed round trip, if any was measured.
    #[inline]
    pub(super) const fn smoothed(&self) -> Option<Duration> {
        self.smoothed
    }

    /// The least round trip: that of empty queues.
    pub(super) const fn least(&self) -> Duration {
        self.least
    }

    /// The least round trip was looked for: it is `least` now.
    pub(super) const fn reset_least(&mut self, now: Instant, least: Duration) {
        (self.least, self.least_at) = (least, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_smoothed_and_the_least_is_kept() {
        let us = Duration::from_micros;
        let at = Instant::from_nanos;
        let mut round_trip = RoundTrip::default();
        assert_eq!(round_trip.smoothed(), None);
        round_trip.sample(at(1), us(100));
        round_trip.sample(at(2), us(180));
        assert_eq!(round_trip.smoothed(), Some(us(110)));
        assert_eq!(round_trip.least(), us(100));
        round_trip.sample(at(3), us(60));
        assert_eq!(round_trip.least(), us(60));
    }

    // tests [CC-2]
    #[test]
    fn a_guess_holds_until_the_first_sample() {
        let us = Duration::from_micros;
        let at = Instant::from_nanos;
        let mut round_trip = RoundTrip::default();
        round_trip.guess(at(1), us(130_000));
        assert_eq!(round_trip.smoothed(), Some(us(130_000)));
        round_trip.sample(at(2), us(20));
        assert_eq!((round_trip.smoothed(), round_trip.least()), (Some(us(20)), us(20)));
        round_trip.sample(at(3), us(28));
        assert_eq!(round_trip.smoothed(), Some(us(21)));
    }
}
