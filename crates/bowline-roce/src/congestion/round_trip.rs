//! Round trip of a path or a queue pair: smoothed, its deviation, and the least [CC-2].
//!
//! A path's round trip steers its window and pacer; a queue pair's steers its timers (CC-13), which
//! have to wait for the queue pair's own peer thread as well.

use std::time::Duration;

use bowline_base::Instant;

/// A round trip that is longer by this part of the least one is one without a queue.
const NEARLY: u32 = 50;
/// Weight of a new sample in the smoothed round trip, one in this many (RFC 6298, alpha).
const SMOOTHED: u32 = 8;

/// Weight of a new sample in the deviation, one in this many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum DeviationWeight {
    /// For timers (RFC 6298, beta): one late packet must make the next timer longer.
    Timer = 4,
    /// For windows: how late threads usually are, which single late ones must not change
    /// (bench/notes/2026-11-27-on-a-network.md, "A short target beside late threads").
    Window = 16,
}

/// Estimates of a round trip. Every sample is that of a packet sent once (Karn) [CC-2].
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundTrip {
    weight: DeviationWeight,
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
    /// An estimator that knows nothing.
    pub(crate) const fn new(weight: DeviationWeight) -> Self {
        Self {
            weight,
            smoothed: None,
            least: Duration::ZERO,
            deviation: Duration::ZERO,
            least_at: Instant::from_nanos(0),
            guessed: false,
        }
    }

    /// Takes a guess, which holds until the first sample.
    pub(crate) const fn guess(&mut self, now: Instant, guess: Duration) {
        self.first(now, guess);
        self.guessed = true;
    }

    /// Takes the longest that the round trip can be, in the place of a longer guess; tells whether
    /// there was one.
    pub(crate) fn bound_guess(&mut self, now: Instant, longest: Duration) -> bool {
        let gives_way = self.guessed && self.smoothed.is_some_and(|guess| guess > longest);
        if gives_way {
            self.guess(now, longest);
        }
        gives_way
    }

    /// Takes a sample.
    pub(crate) fn sample(&mut self, now: Instant, sample: Duration) {
        let Some(smoothed) = self.smoothed.filter(|_| !self.guessed) else {
            self.first(now, sample);
            return;
        };
        let weight = self.weight as u32;
        self.deviation = (self.deviation * (weight - 1) + smoothed.abs_diff(sample)) / weight;
        self.smoothed = Some((smoothed * (SMOOTHED - 1) + sample) / SMOOTHED);
        if sample <= self.least + self.least / NEARLY {
            self.least = self.least.min(sample);
            self.least_at = now;
        }
    }

    /// Nothing was measured yet: the estimate is a guess.
    pub(crate) const fn is_guess(&self) -> bool {
        self.guessed
    }

    /// Begins with a first sample.
    const fn first(&mut self, now: Instant, sample: Duration) {
        let first = Self::new(self.weight);
        *self = Self { smoothed: Some(sample), least: sample, least_at: now, ..first };
    }

    /// How far samples deviate from the smoothed one.
    pub(crate) const fn deviation(&self) -> Duration {
        self.deviation
    }

    /// When the round trip was the least last.
    pub(crate) const fn least_at(&self) -> Instant {
        self.least_at
    }

    /// The smoothed round trip, if any was measured.
    #[inline]
    pub(crate) const fn smoothed(&self) -> Option<Duration> {
        self.smoothed
    }

    /// The least round trip: that of empty queues.
    pub(crate) const fn least(&self) -> Duration {
        self.least
    }

    /// The least round trip was looked for: it is `least` now.
    pub(crate) const fn reset_least(&mut self, now: Instant, least: Duration) {
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
        let mut round_trip = RoundTrip::new(DeviationWeight::Window);
        assert_eq!(round_trip.smoothed(), None);
        round_trip.sample(at(1), us(100));
        round_trip.sample(at(2), us(180));
        assert_eq!(round_trip.smoothed(), Some(us(110)));
        assert_eq!(round_trip.least(), us(100));
        round_trip.sample(at(3), us(60));
        assert_eq!(round_trip.least(), us(60));
    }

    #[test]
    fn a_deviation_for_timers_follows_single_samples_and_one_for_windows_does_not() {
        let us = Duration::from_micros;
        let at = Instant::from_nanos;
        let deviation = |weight| {
            let mut round_trip = RoundTrip::new(weight);
            round_trip.sample(at(1), us(100));
            round_trip.sample(at(2), us(260));
            round_trip.deviation()
        };
        assert_eq!(deviation(DeviationWeight::Timer), us(40));
        assert_eq!(deviation(DeviationWeight::Window), us(10));
    }

    // tests [CC-2]
    #[test]
    fn a_guess_holds_until_the_first_sample() {
        let us = Duration::from_micros;
        let at = Instant::from_nanos;
        let mut round_trip = RoundTrip::new(DeviationWeight::Window);
        round_trip.guess(at(1), us(130_000));
        assert_eq!(round_trip.smoothed(), Some(us(130_000)));
        round_trip.sample(at(2), us(20));
        assert_eq!((round_trip.smoothed(), round_trip.least()), (Some(us(20)), us(20)));
        round_trip.sample(at(3), us(28));
        assert_eq!(round_trip.smoothed(), Some(us(21)));
    }
}
