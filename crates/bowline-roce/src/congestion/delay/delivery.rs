//! How much is delivered: what the route holds, which no loss takes from the window [CC-23]. BBR's
//! bandwidth-delay product.

use std::time::Duration;

/// Rounds of which the fastest counts: single ones are slow because a thread is. Chosen; BBR has
/// ten.
const ROUNDS: usize = 4;
/// Smallest window, in packets, for which the rate is known well enough. Chosen.
pub(super) const RATE_PACKETS: f64 = 8.0;

/// Bytes per second delivered in the last rounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeliveryRate([f64; ROUNDS]);

impl DeliveryRate {
    pub(super) const fn new() -> Self {
        Self([0.0; ROUNDS])
    }

    /// A round has delivered `bytes`.
    pub(super) fn end_round(&mut self, bytes: f64, took: Duration) {
        self.0.rotate_left(1);
        self.0[ROUNDS - 1] = bytes / took.as_secs_f64().max(1e-9);
    }

    /// The window that fills the route of `least`; 0 if a window of that many packets does not
    /// show it.
    pub(super) fn fills_route(&self, window: f64, packet: f64, least: Duration) -> f64 {
        if window < RATE_PACKETS * packet {
            return 0.0;
        }
        self.0.iter().copied().fold(0.0, f64::max) * least.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [CC-23]
    #[test]
    fn the_fastest_of_four_rounds_tells_what_fills_the_route() {
        let ms = Duration::from_millis;
        let mut rate = DeliveryRate::new();
        for bytes in [9000.0, 4000.0, 2000.0, 1000.0] {
            rate.end_round(bytes, ms(2));
        }
        assert_eq!(rate.fills_route(8000.0, 1000.0, ms(1)), 4500.0);
        assert_eq!(rate.fills_route(7999.0, 1000.0, ms(1)), 0.0);
        rate.end_round(1000.0, ms(2));
        assert_eq!(rate.fills_route(8000.0, 1000.0, ms(1)), 2000.0);
    }
}
