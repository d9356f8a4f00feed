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
/// A sample below this part of the smoothed round trip shows that a late answer has made that much
/// too long: queues seldom become so much shorter, and a link may hold an answer back for seconds.
/// Chosen. With a half, 44 of 150 seeds of `--cells connections-1g-16` are not fair enough, instead
/// of 33.
const SHORT_PART: u32 = 8;
/// Rounds in a row with such samples only, after which the longest of them is believed. Chosen.
const SHORT_ROUNDS: u32 = 4;

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
    short: Short,
}

/// Samples that are much shorter than the smoothed round trip, since the last one that was not.
#[derive(Clone, Copy, Debug)]
struct Short {
    longest: Duration,
    rounds: u32,
    /// The answer to what was sent from then on ends the round.
    began: Instant,
}

impl Short {
    const fn new(now: Instant) -> Self {
        Self { longest: Duration::ZERO, rounds: 0, began: now }
    }

    /// Adds a sample; after enough rounds, returns the longest of them.
    fn add(&mut self, now: Instant, sample: Duration) -> Option<Duration> {
        self.longest = self.longest.max(sample);
        if now.saturating_since(self.began) >= sample {
            self.rounds += 1;
            self.began = now;
        }
        (self.rounds >= SHORT_ROUNDS).then_some(self.longest)
    }
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
            short: Short::new(Instant::from_nanos(0)),
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
        let smoothed = (smoothed * (SMOOTHED - 1) + sample) / SMOOTHED;
        self.smoothed = Some(self.unless_outdated(now, sample, smoothed));
        if sample <= self.least + self.least / NEARLY {
            self.least = self.least.min(sample);
            self.least_at = now;
        }
    }

    /// Tells whether the last sample was much shorter than the smoothed round trip: a late answer
    /// has made that too long.
    pub(crate) const fn is_doubtful(&self) -> bool {
        !self.short.longest.is_zero()
    }

    /// Returns a smoothed round trip, or what takes its place where a single late answer, such as
    /// one that a link has held back, still makes it much longer than any of the last rounds. A
    /// timer still waits for one as late.
    fn unless_outdated(&mut self, now: Instant, sample: Duration, smoothed: Duration) -> Duration {
        if self.weight == DeviationWeight::Timer {
            return smoothed;
        }
        let longest = if sample * SHORT_PART < smoothed {
            self.short.add(now, sample)
        } else {
            Some(smoothed)
        };
        if longest.is_some() {
            self.short = Short::new(now);
        }
        longest.unwrap_or(smoothed)
    }

    /// Nothing was measured yet: the estimate is a guess.
    pub(crate) const fn is_guess(&self) -> bool {
        self.guessed
    }

    /// Begins with a first sample.
    const fn first(&mut self, now: Instant, sample: Duration) {
        let (first, short) = (Self::new(self.weight), Short::new(now));
        *self = Self { smoothed: Some(sample), least: sample, least_at: now, short, ..first };
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
    fn four_rounds_of_less_than_an_eighth_replace_the_smoothed_one_but_that_of_timers() {
        let us = Duration::from_micros;
        let at = |us: u64| Instant::from_nanos(us * 1000);
        let held = |weight| {
            let mut round_trip = RoundTrip::new(weight);
            round_trip.sample(at(1000), us(400));
            round_trip.sample(at(400_000), us(360_400));
            assert_eq!(round_trip.smoothed(), Some(us(45_400)));
            round_trip
        };
        let mut round_trip = held(DeviationWeight::Window);
        // Of one round, however many they are: sent before the last one was acknowledged.
        for more in 0..4 {
            round_trip.sample(at(400_500 + more), us(380));
        }
        assert!(round_trip.smoothed() > Some(us(26_000)));
        for (now, sample) in [(401_000, 410), (402_000, 370)] {
            round_trip.sample(at(now), us(sample));
        }
        assert!(round_trip.smoothed() > Some(us(20_000)), "three rounds");
        round_trip.sample(at(403_000), us(380));
        assert_eq!(round_trip.smoothed(), Some(us(410)), "the longest of them");
        // One that is not so short begins again.
        let mut round_trip = held(DeviationWeight::Window);
        for (now, sample) in [(401, 400), (402, 400), (403, 400), (440, 30_000), (441, 400)] {
            round_trip.sample(at(now * 1000), us(sample));
        }
        assert!(round_trip.smoothed() > Some(us(20_000)));
        let mut timers = held(DeviationWeight::Timer);
        for round in 0..8 {
            timers.sample(at(401_000 + round * 1000), us(400));
        }
        assert!(timers.smoothed() > Some(us(15_000)));
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
