//! Following the target: growth below it [CC-17], and what is left above it [CC-18].

use std::time::Duration;

/// What the window grows by in a round trip, in packets: the same for all senders, so that they
/// become equal. Chosen; Swift and Reno have one packet.
const ADDED: f64 = 0.25;
/// What it grows by each round in addition, of itself; and at most, after rounds without a queue.
/// Chosen.
const PART: f64 = 1.0 / 64.0;
const PART_MAX: f64 = 0.25;
/// Rounds without a queue after which growth doubles, and each so many further rounds. Chosen.
const EMPTY_ROUNDS: u32 = 4;
/// Most doublings: more than lead to `PART_MAX`.
const DOUBLINGS_MAX: u32 = 8;
/// A queue below this part of the target is none. Chosen.
const EMPTY_PART: u32 = 4;
/// Part of what is too much by which the window shrinks, and the least that is left of it: Swift's
/// beta and 1 - max_mdf (section 3.1).
const BETA: f64 = 0.8;
const LEFT_MIN: f64 = 0.5;
/// Smallest window, in packets, that delay alone leads to. Chosen.
const DELAY_MIN: f64 = 0.25;

/// Growth of the window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    /// Consecutive rounds without a queue.
    empty_rounds: u32,
}

impl Growth {
    pub(super) const fn new() -> Self {
        Self { empty_rounds: 0 }
    }

    /// A round has ended with a queue.
    pub(super) fn end_round(&mut self, queue: Duration, target: Duration) {
        self.empty_rounds = if queue < target / EMPTY_PART { self.empty_rounds + 1 } else { 0 };
    }

    /// The window was reduced.
    pub(super) const fn restart(&mut self) {
        self.empty_rounds = 0;
    }

    /// The window after a round below the target. Rounds of less than a packet last longer, and
    /// give as much in a round trip.
    pub(super) fn grown(&self, window: f64, packet: f64) -> f64 {
        let packets = window / packet;
        let doublings = (self.empty_rounds / EMPTY_ROUNDS).min(DOUBLINGS_MAX);
        let part = (PART * f64::from(1_u32 << doublings)).min(PART_MAX);
        window + packet * ADDED / packets.min(1.0) + window * part
    }
}

/// The window after a round with a queue above the target.
pub(super) fn shrunk(
    window: f64,
    packet: f64,
    queue: Duration,
    target: Duration,
    least: Duration,
) -> f64 {
    let over = (queue - target).as_secs_f64() / (queue + least).as_secs_f64();
    (window * (1.0 - BETA * over).max(LEFT_MIN)).max(floor(window, packet))
}

/// The smallest window that delay leads to: not more than the present one.
pub(super) fn floor(window: f64, packet: f64) -> f64 {
    (DELAY_MIN * packet).min(window)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    // tests [CC-17]
    #[test]
    fn growth_is_a_quarter_of_a_packet_and_a_64th_and_more_where_there_is_no_queue() {
        let mut growth = Growth::new();
        assert_eq!(growth.grown(64_000.0, 1000.0), 64_000.0 + 250.0 + 1000.0);
        for _ in 0..4 {
            growth.end_round(us(74), us(300));
        }
        assert_eq!(growth.grown(64_000.0, 1000.0), 64_000.0 + 250.0 + 2000.0);
        for _ in 0..100 {
            growth.end_round(us(0), us(300));
        }
        assert_eq!(growth.grown(64_000.0, 1000.0), 64_000.0 + 250.0 + 16_000.0, "a quarter");
        growth.end_round(us(75), us(300));
        assert_eq!(growth.grown(64_000.0, 1000.0), 64_000.0 + 250.0 + 1000.0);
        // Half a packet in two round trips grows by as much in each.
        assert_eq!(growth.grown(500.0, 1000.0), 500.0 + 500.0 + 500.0 / 64.0);
    }

    // tests [CC-18]
    #[test]
    fn above_the_target_four_fifths_of_what_is_too_much_go_and_half_at_most() {
        // A queue of 600 us is 300 too much, of a round trip of 1200.
        assert_eq!(shrunk(10_000.0, 1000.0, us(600), us(300), us(600)), 8000.0);
        assert_eq!(shrunk(10_000.0, 1000.0, us(100_000), us(300), us(600)), 5000.0);
        assert_eq!(shrunk(300.0, 1000.0, us(100_000), us(300), us(600)), 250.0);
        assert_eq!(shrunk(100.0, 1000.0, us(100_000), us(300), us(600)), 100.0);
    }
}
