//! A queue that stands above the target: either others fill it, or there is none and the route has
//! become longer [CC-22].

use std::time::Duration;

/// Rounds above the target, all nearly as long, that show a longer route, if the window has become
/// so many times smaller meanwhile. Chosen; `--cells longer` is a route that becomes five times
/// longer.
const ROUNDS: u32 = 6;
const SHRUNK: f64 = 16.0;
/// Round trips that differ by this part of what they are longer than the least are steady. Chosen.
const STEADY_PART: u32 = 32;

/// Rounds whose shortest round trips are nearly the same: where others fill a queue it changes.
#[derive(Clone, Copy, Debug)]
struct Steady {
    rounds: u32,
    least: Duration,
    most: Duration,
}

impl Steady {
    const fn new() -> Self {
        Self { rounds: 0, least: Duration::MAX, most: Duration::ZERO }
    }

    /// Adds a round, on a route of `route`.
    fn add(&mut self, shortest: Duration, route: Duration) {
        let (least, most) = (self.least.min(shortest), self.most.max(shortest));
        if most - least > shortest.saturating_sub(route) / STEADY_PART {
            *self = Self { rounds: 1, least: shortest, most: shortest };
        } else {
            *self = Self { rounds: self.rounds + 1, least, most };
        }
    }
}

/// A queue above the target.
#[derive(Clone, Copy, Debug)]
pub(super) struct StandingQueue {
    /// Consecutive rounds above the target.
    rounds: u32,
    /// Window when the first of them ended.
    window_before: f64,
    steady: Steady,
}

impl StandingQueue {
    pub(super) const fn new() -> Self {
        Self { rounds: 0, window_before: 0.0, steady: Steady::new() }
    }

    /// A round of this shortest round trip has ended, on a route of `least`.
    pub(super) fn sample(&mut self, shortest: Duration, least: Duration) {
        self.steady.add(shortest, least);
    }

    /// A round has ended above the target, or not, with a window.
    pub(super) const fn end_round(&mut self, above: bool, window: f64) {
        if !above {
            self.rounds = 0;
            return;
        }
        if self.rounds == 0 {
            self.window_before = window;
        }
        self.rounds += 1;
    }

    /// Consecutive rounds above the target.
    pub(super) const fn rounds(&self) -> u32 {
        self.rounds
    }

    /// What was seen says nothing about the next rounds.
    pub(super) const fn restart(&mut self) {
        self.rounds = 0;
    }

    /// Tells whether the queue is none: the window has become much smaller, and the round trip
    /// neither shorter nor longer. Returns the window before.
    pub(super) fn is_route(&self, window: f64, packet: f64) -> Option<f64> {
        let shrunk = window * SHRUNK <= self.window_before || window <= packet;
        let stays = self.rounds >= ROUNDS && self.steady.rounds >= ROUNDS;
        (shrunk && stays).then_some(self.window_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_millis(1);

    /// Rounds above the target while the window halves from 160 packets on.
    fn rounds(shortest: impl Fn(u32) -> Duration) -> Option<f64> {
        let (mut queue, mut window) = (StandingQueue::new(), 160.0);
        for round in 0..6 {
            assert_eq!(queue.is_route(window, 1.0), None, "{round} rounds");
            queue.sample(shortest(round), LEAST);
            queue.end_round(true, window);
            window /= 2.0;
        }
        queue.is_route(window, 1.0)
    }

    // tests [CC-22]
    #[test]
    fn a_delay_that_does_not_shrink_with_the_window_is_a_longer_route() {
        assert_eq!(rounds(|_| LEAST * 5), Some(160.0), "the window before comes back");
        let wavers = |us| rounds(|round| LEAST * 5 + Duration::from_micros(us) * (round % 2));
        assert_eq!((wavers(125), wavers(130)), (Some(160.0), None), "a 32nd of the queue");
        assert_eq!(rounds(|round| LEAST * 5 - LEAST / 10 * round), None, "it shrinks");
        assert_eq!(rounds(|round| LEAST * (5 + round % 2)), None, "others fill it");
    }

    // tests [CC-22]
    #[test]
    fn a_window_that_is_still_large_proves_nothing() {
        let mut queue = StandingQueue::new();
        for _ in 0..100 {
            queue.sample(LEAST * 5, LEAST);
            queue.end_round(true, 160.0);
        }
        assert_eq!(queue.is_route(11.0, 1.0), None);
        assert_eq!(queue.is_route(10.0, 1.0), Some(160.0));
        queue.end_round(false, 10.0);
        assert_eq!((queue.is_route(10.0, 1.0), queue.rounds()), (None, 0));
    }
}
