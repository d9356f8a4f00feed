//! Drains: from time to time the window is small for three round trips, so that all senders of a
//! queue see the route without it [CC-19]. BBR calls the same ProbeRTT.

use std::time::Duration;

use bowline_base::Instant;

use super::super::round_trip::RoundTrip;
use super::follow::floor;
use super::round::Round;

/// The least round trip is looked for again after so many round trips, rounded up to a power of two
/// of nanoseconds: senders that share a queue do so at the same time, and the queue becomes empty
/// (decision 0014). Chosen: 3 of 131 round trips are 2 % of the rate.
const AFTER: u32 = 128;
const AFTER_MIN: Duration = Duration::from_millis(10);
/// BBR's RTprop filter is as long.
const AFTER_MAX: Duration = Duration::from_secs(10);
/// Round trips that a drain lasts: one until the queue is gone, two that see the route. Chosen.
const ROUND_TRIPS: u32 = 3;
/// What a drain leaves of the window that the route alone holds. Chosen; BBRv2 leaves half.
const PART: f64 = 0.75;
/// What a drain leaves of the window while others fill the queue, of which the same part stays.
/// Chosen.
const COMPETING: f64 = 0.25;
/// Round trips that show what processors add, at least: a single one may be that of the thread
/// that was late.
const SAMPLES_MIN: u32 = 2;

/// A drain under way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Drain {
    /// The window before.
    pub(super) window: f64,
    pub(super) until: Instant,
    /// The least round trip meanwhile.
    pub(super) least: Duration,
    /// What is sent from then on does not meet the queue of before.
    empty_from: Instant,
    /// Of what was sent since then, the longest round trip, and how many there were.
    longest: Duration,
    samples: u32,
    /// Others fill the queue, as it is thought until this time.
    pub(super) competing: Option<Instant>,
}

impl Drain {
    /// Begins a drain after a round.
    pub(super) fn begin(
        now: Instant,
        window: f64,
        round: &Round,
        competing: Option<Instant>,
    ) -> Self {
        Self {
            window,
            until: now + round.shortest() * ROUND_TRIPS,
            least: Duration::MAX,
            empty_from: now + round.shortest(),
            longest: Duration::ZERO,
            samples: 0,
            competing,
        }
    }

    /// The window during the drain that begins after a round, on a route of `least`.
    pub(super) fn small_window(&self, packet: f64, round: &Round, least: Duration) -> f64 {
        let part = match self.competing {
            Some(_) => COMPETING,
            None => least.as_secs_f64() / round.shortest().as_secs_f64().max(1e-9),
        };
        (self.window * part.min(1.0) * PART).max(floor(self.window, packet))
    }

    /// Something that was sent at a time took this long.
    pub(super) fn add(&mut self, sample: Duration, sent_at: Instant) {
        self.least = self.least.min(sample);
        if sent_at >= self.empty_from {
            self.longest = self.longest.max(sample);
            self.samples += 1;
        }
    }

    /// By how much round trips are longer than the least one where there is no queue [CC-20]. What
    /// others fill shows nothing about processors, nor does a single round trip.
    pub(super) fn host_delay(&self) -> Option<Duration> {
        let shown = self.competing.is_none() && self.samples >= SAMPLES_MIN;
        shown.then(|| self.longest.saturating_sub(self.least))
    }
}

/// Tells whether the least round trip is to be looked for again.
pub(super) fn is_due(now: Instant, round_trip: &RoundTrip) -> bool {
    now.saturating_since(round_trip.least_at()) > interval(round_trip.smoothed())
}

fn interval(smoothed: Option<Duration>) -> Duration {
    let after = smoothed.unwrap_or_default() * AFTER;
    let nanos = (after.as_nanos() as u64).next_power_of_two();
    Duration::from_nanos(nanos).clamp(AFTER_MIN, AFTER_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    fn round(shortest: Duration) -> Round {
        let mut round = Round::new(at(0));
        round.add(shortest);
        round
    }

    // tests [CC-19]
    #[test]
    fn senders_with_nearly_the_same_round_trip_drain_after_the_same_time() {
        assert_eq!(interval(Some(us(1000))), interval(Some(us(1040))));
        assert_eq!(interval(Some(us(1000))), Duration::from_nanos(1 << 27));
        assert_eq!(interval(Some(us(10))), Duration::from_millis(10));
        assert_eq!(interval(Some(us(1_000_000))), Duration::from_secs(10));
    }

    // tests [CC-19]
    #[test]
    fn a_drain_leaves_three_quarters_of_what_the_route_holds() {
        let round = round(us(400));
        let drain = Drain::begin(at(1000), 80_000.0, &round, None);
        assert_eq!(drain.until, at(1000 + 3 * 400));
        // A quarter of the round trip is route, and three quarters are queue.
        assert_eq!(drain.small_window(1000.0, &round, us(100)), 15_000.0);
        let competing = Drain::begin(at(1000), 80_000.0, &round, Some(at(9000)));
        assert_eq!(competing.small_window(1000.0, &round, us(100)), 15_000.0);
        assert_eq!(competing.small_window(1000.0, &round, us(400)), 15_000.0);
    }

    // tests [CC-20]
    #[test]
    fn what_is_sent_after_the_first_third_shows_what_processors_add() {
        let round = round(us(400));
        let mut drain = Drain::begin(at(1000), 80_000.0, &round, None);
        drain.add(us(900), at(1399));
        drain.add(us(100), at(1400));
        assert_eq!(drain.host_delay(), None, "one says nothing");
        drain.add(us(350), at(1500));
        assert_eq!((drain.host_delay(), drain.least), (Some(us(250)), us(100)));
        let competing = Drain { competing: Some(at(9000)), ..drain };
        assert_eq!(competing.host_delay(), None);
    }
}
