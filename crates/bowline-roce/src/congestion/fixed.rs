//! A window of a number of packets that only losses reduce [REQ-6].
//!
//! A go-back halves the window; many losses at a peer that reorders reduce it by a quarter. Each
//! window without a loss raises it by a quarter while it is below `ssthresh`, then by a sixteenth.
//! All amounts are packets.

use super::controller::{Acknowledged, Cause, Controller, Extent, Lost, Route, TimedOut};

/// Smallest window, in packets.
const WINDOW_MIN: u32 = 16;
/// Largest window, in packets: far below half of the PSN space [REQ-6].
const WINDOW_MAX: u32 = 4096;
/// Losses within one window that do not reduce the window of a peer that reorders.
const LOSSES_TOLERATED: u32 = 4;
/// The same tolerance as a fraction of the window (one in this many packets).
const LOSSES_TOLERATED_PART: u32 = 16;

/// Size of the window, in packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedWindow {
    size: u32,
    max: u32,
    ssthresh: u32,
    /// Packets acknowledged since the window last grew or shrank.
    acked: u32,
    /// Packets acknowledged in all.
    delivered: u64,
    /// Losses in the present window; a new one begins when `delivered` reaches `losses_until`.
    losses: u32,
    losses_until: u64,
}

impl FixedWindow {
    /// A window that lets no packet pass.
    pub(crate) const fn closed() -> Self {
        Self { size: 0, max: 0, ssthresh: 0, acked: 0, delivered: 0, losses: 0, losses_until: 0 }
    }

    /// A window that begins with `packets` packets, as far as the limits allow, and never becomes
    /// larger.
    pub(crate) fn new(packets: u32) -> Self {
        let max = packets.clamp(WINDOW_MIN, WINDOW_MAX);
        Self { size: max, max, ssthresh: max, ..Self::closed() }
    }

    /// One packet was lost. Single losses say nothing about the path; many at once mean that it is
    /// congested.
    fn lost_packet(&mut self, in_flight: u64) -> Cause {
        if self.delivered >= self.losses_until {
            self.losses_until = self.delivered + in_flight;
            self.losses = 0;
        }
        self.losses += 1;
        if self.losses != (self.size / LOSSES_TOLERATED_PART).max(LOSSES_TOLERATED) {
            return Cause::Chance;
        }
        self.size = (self.size - self.size / 4).max(WINDOW_MIN);
        self.ssthresh = self.size;
        self.acked = 0;
        Cause::Congestion
    }

    /// All packets in flight are sent again.
    fn halve(&mut self) {
        self.size = (self.size / 2).max(WINDOW_MIN);
        self.acked = 0;
    }
}

impl Controller for FixedWindow {
    #[inline]
    fn window(&self) -> Option<u64> {
        Some(u64::from(self.size))
    }

    #[inline]
    fn acknowledged(&mut self, acknowledged: &Acknowledged<'_>) -> Route {
        self.delivered += acknowledged.amount;
        self.acked += acknowledged.amount as u32;
        if self.acked >= self.size {
            self.acked = 0;
            let more = if self.size < self.ssthresh { 4 } else { 16 };
            self.size = (self.size + self.size / more).min(self.max);
        }
        Route::Same
    }

    fn lost(&mut self, lost: &Lost<'_>) -> Cause {
        if lost.extent == Extent::Packet {
            return self.lost_packet(lost.in_flight);
        }
        self.halve();
        self.ssthresh = self.size;
        Cause::Congestion
    }

    /// Further time-outs concern the same loss and leave `ssthresh`.
    fn timed_out(&mut self, timed_out: &TimedOut<'_>) {
        self.halve();
        if timed_out.consecutive <= 1 {
            self.ssthresh = self.size;
        }
    }

    fn heeds_marks(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use bowline_base::Instant;

    use super::*;
    use crate::congestion::{DeviationWeight, RoundTrip};

    const NOW: Instant = Instant::from_nanos(1);
    const UNKNOWN: RoundTrip = RoundTrip::new(DeviationWeight::Timer);

    impl FixedWindow {
        fn ack(&mut self, amount: u64) {
            let acknowledged =
                Acknowledged { now: NOW, amount, sample: None, round_trip: &UNKNOWN };
            assert_eq!(self.acknowledged(&acknowledged), Route::Same);
        }

        fn lose(&mut self, extent: Extent, in_flight: u64) -> Cause {
            self.lost(&Lost { now: NOW, sent_at: NOW, extent, in_flight, round_trip: &UNKNOWN })
        }

        fn expire(&mut self, consecutive: u32) {
            self.timed_out(&TimedOut { now: NOW, consecutive, round_trip: &UNKNOWN });
        }
    }

    // tests [REQ-6]
    #[test]
    fn after_a_loss_the_window_grows_slowly_back_to_where_it_began() {
        let mut window = FixedWindow::new(64);
        assert_eq!(window.lose(Extent::Window, 64), Cause::Congestion);
        assert_eq!(window.window(), Some(32));
        window.ack(31);
        assert_eq!(window.window(), Some(32));
        window.ack(1);
        assert_eq!(window.window(), Some(34));
        for _ in 0..100 {
            window.ack(64);
        }
        assert_eq!(window.window(), Some(64));
    }

    // tests [REQ-6]
    #[test]
    fn while_the_timer_expires_again_and_again_the_way_back_stays_fast() {
        let mut window = FixedWindow::new(256);
        for consecutive in 1..10 {
            window.expire(consecutive);
        }
        assert_eq!(window.window(), Some(u64::from(WINDOW_MIN)));
        window.ack(16);
        assert_eq!(window.window(), Some(20));
    }

    // tests [REQ-6]
    #[test]
    fn only_many_losses_in_one_window_reduce_it() {
        let mut window = FixedWindow::new(64);
        for _ in 0..10 {
            for _ in 1..LOSSES_TOLERATED {
                assert_eq!(window.lose(Extent::Packet, 64), Cause::Chance);
            }
            window.ack(64);
        }
        assert_eq!(window.window(), Some(64));
        for _ in 1..LOSSES_TOLERATED {
            assert_eq!(window.lose(Extent::Packet, 64), Cause::Chance);
        }
        window.ack(1);
        assert_eq!(window.lose(Extent::Packet, 64), Cause::Congestion);
        assert_eq!(window.window(), Some(48));
    }
}
