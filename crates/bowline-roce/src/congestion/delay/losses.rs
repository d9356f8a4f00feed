//! Losses: which of them show congestion [CC-23], and what they leave of the window.

use super::delivery::RATE_PACKETS;

/// Share of lost packets that is taken for congestion even without a queue, one in this many: a
/// line that loses 1 % is only a bad one (`--cells loss-1`).
const SHARE: u64 = 40;
/// Packets over which that share is counted, at least; and losses.
const PACKETS: u64 = 400;
const LOSSES_MIN: u64 = 3;
/// What a loss leaves of the window, as CUBIC's beta (RFC 9438)...
const LEFT: f64 = 0.7;
/// ...and of what fills the route, if that is more: a queue is shorter than the route. Chosen.
const LEFT_OF_ROUTE: f64 = 0.92;
/// Packets that losses leave of the window: what chance takes from fewer says nothing, and the
/// delay decides. Reno's smallest ssthresh (RFC 5681).
const PACKETS_LEFT: f64 = 2.0;
/// Packets that time-outs leave of the window [CC-25]: a peer that is dead says nothing about the
/// path, and a later connection must not begin with less than a packet.
const PACKETS_LEFT_BY_TIMEOUT: f64 = 4.0;
/// What a time-out leaves of the window, where that is more. Chosen; TCP leaves one packet
/// (RFC 5681).
const LEFT_BY_TIMEOUT: f64 = 0.5;

/// Share of packets that are lost.
#[derive(Clone, Copy, Debug)]
pub(super) struct LossShare {
    lost: u64,
    /// Bytes.
    delivered: f64,
}

impl LossShare {
    pub(super) const fn new() -> Self {
        Self { lost: 0, delivered: 0.0 }
    }

    pub(super) fn delivered(&mut self, bytes: f64) {
        self.delivered += bytes;
    }

    pub(super) const fn lost(&mut self) {
        self.lost += 1;
    }

    /// Tells whether so much is lost that no bad line explains it, and begins to count anew when
    /// that was counted over enough packets.
    pub(super) fn judge(&mut self, window: f64, packet: f64) -> bool {
        let packets = (self.delivered / packet) as u64;
        let many = self.lost >= LOSSES_MIN && self.lost * SHARE > packets.max(PACKETS);
        if packets >= PACKETS.max((window / packet) as u64) {
            (self.lost, self.delivered) = (1, 0.0);
        }
        many
    }

    /// The window was reduced for what was lost.
    pub(super) const fn restart(&mut self) {
        (self.lost, self.delivered) = (0, 0.0);
    }
}

/// Tells whether a port that was full explains `lost` losses in a round: it drops several packets
/// at once.
pub(super) fn is_bunch(lost: u64, window: f64, packet: f64) -> bool {
    lost >= LOSSES_MIN && lost as f64 * SHARE as f64 * packet > window
}

/// Tells whether a window is so small that a single loss may be that of a full port.
pub(super) fn is_small(window: f64, packet: f64) -> bool {
    window < RATE_PACKETS * packet
}

/// What is left of a window after a loss: at least `least` of it, and what fills the route.
pub(super) fn left(window: f64, packet: f64, fills_route: f64, least: Option<f64>) -> f64 {
    let route = fills_route * LEFT_OF_ROUTE;
    let part = least.unwrap_or(LEFT).max((route / window).min(1.0));
    at_least(part, window, packet)
}

/// The part of a window that is left, but not less than a few packets.
pub(super) fn at_least(part: f64, window: f64, packet: f64) -> f64 {
    part.max((PACKETS_LEFT * packet / window).min(1.0))
}

/// The part of a window that a time-out leaves.
pub(super) fn left_by_timeout(window: f64, packet: f64) -> f64 {
    (PACKETS_LEFT_BY_TIMEOUT * packet / window).clamp(LEFT_BY_TIMEOUT, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [CC-23]
    #[test]
    fn more_than_a_fortieth_of_the_packets_shows_congestion_without_a_queue() {
        let mut share = LossShare::new();
        for loss in 1..=11 {
            share.lost();
            assert_eq!(share.judge(100_000.0, 1000.0), loss == 11, "{loss} of fewer than 400");
        }
        share.restart();
        // One in a hundred is a bad line, for however long.
        for _ in 0..1000 {
            share.delivered(100_000.0);
            share.lost();
            assert!(!share.judge(100_000.0, 1000.0));
        }
    }

    // tests [CC-23]
    #[test]
    fn three_losses_of_a_round_are_a_bunch_if_they_are_a_fortieth_of_the_window() {
        assert!(!is_bunch(2, 10_000.0, 1000.0));
        assert!(is_bunch(3, 119_000.0, 1000.0) && !is_bunch(3, 120_000.0, 1000.0));
        assert!(is_small(7999.0, 1000.0) && !is_small(8000.0, 1000.0));
    }

    // tests [CC-23]
    #[test]
    fn a_loss_leaves_seven_tenths_or_what_fills_the_route() {
        assert_eq!(left(100_000.0, 1000.0, 0.0, None), 0.7);
        assert_eq!(left(100_000.0, 1000.0, 90_000.0, None), 90_000.0 * 0.92 / 100_000.0);
        assert_eq!(left(100_000.0, 1000.0, 200_000.0, None), 1.0);
        assert_eq!(left(100_000.0, 1000.0, 0.0, Some(0.5)), 0.5, "of the start");
        assert_eq!(left(2500.0, 1000.0, 0.0, None), 0.8, "two packets");
        assert_eq!(left(1500.0, 1000.0, 0.0, None), 1.0);
    }

    // tests [CC-25]
    #[test]
    fn a_timeout_leaves_half_and_four_packets() {
        assert_eq!(left_by_timeout(100_000.0, 1000.0), 0.5);
        assert_eq!(left_by_timeout(5000.0, 1000.0), 0.8);
        assert_eq!(left_by_timeout(400.0, 1000.0), 1.0);
    }
}
