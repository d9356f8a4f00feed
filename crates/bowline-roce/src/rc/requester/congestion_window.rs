//! How many packets may be in flight at once, as losses and acknowledgements tell it [REQ-6].
//!
//! A go-back halves the window; many losses at a peer that reorders reduce it by a quarter. Each
//! window without a loss raises it by a quarter while it is below `ssthresh`, then by a sixteenth.

use bowline_wire::roce::Psn;

/// Smallest window, in packets.
const WINDOW_MIN: u32 = 16;
/// Largest window, in packets: far below half of the PSN space [REQ-6].
const WINDOW_MAX: u32 = 4096;
/// Size of the window where that of the path decides.
const PATH_DECIDES: u32 = 1 << 14;
/// Losses within one window that do not reduce the window of a peer that reorders.
const LOSSES_TOLERATED: u32 = 4;
/// The same tolerance as a fraction of the window (one in this many packets).
const LOSSES_TOLERATED_PART: u32 = 16;

/// Size of the window, in packets.
#[derive(Clone, Copy, Debug)]
pub(super) struct CongestionWindow {
    size: u32,
    max: u32,
    ssthresh: u32,
    /// Packets acknowledged since the window last grew or shrank.
    acked: u32,
    /// Losses in the present window; a new window begins when `una` reaches `loss_epoch`.
    losses: u32,
    loss_epoch: Psn,
    /// The size is fixed, because the window of the path decides.
    path_decides: bool,
}

impl CongestionWindow {
    /// A window that lets no packet pass.
    pub(super) const fn closed() -> Self {
        Self {
            size: 0,
            max: 0,
            ssthresh: 0,
            acked: 0,
            losses: 0,
            loss_epoch: Psn::ZERO,
            path_decides: false,
        }
    }

    /// A window as large as sequence numbers and the peer's memory allow: that of the path decides.
    pub(super) fn of_path() -> Self {
        Self { size: PATH_DECIDES, max: PATH_DECIDES, path_decides: true, ..Self::closed() }
    }

    /// A window that begins with `packets` packets, as far as the limits allow, and never becomes
    /// larger. The first PSN is `psn`.
    pub(super) fn open(packets: u32, psn: Psn) -> Self {
        let max = packets.clamp(WINDOW_MIN, WINDOW_MAX);
        Self { size: max, max, ssthresh: max, loss_epoch: psn, ..Self::closed() }
    }

    /// Number of packets that may be in flight.
    #[inline]
    pub(super) const fn size(&self) -> u32 {
        self.size
    }

    /// Notes that `packets` more packets have been acknowledged.
    #[inline]
    pub(super) fn acknowledged(&mut self, packets: u32) {
        self.acked += packets;
        if self.acked >= self.size {
            self.acked = 0;
            let more = if self.size < self.ssthresh { 4 } else { 16 };
            self.size = (self.size + self.size / more).min(self.max);
        }
    }

    /// Notes that one packet was lost, `una`, while the packets from there to `end` are in flight.
    /// Single losses say nothing about the path; many at once mean that it is congested.
    pub(super) fn lost_one(&mut self, una: Psn, end: Psn) {
        if !una.is_before(self.loss_epoch) {
            self.loss_epoch = end;
            self.losses = 0;
        }
        self.losses += 1;
        if self.path_decides {
            return;
        }
        if self.losses == (self.size / LOSSES_TOLERATED_PART).max(LOSSES_TOLERATED) {
            self.size = (self.size - self.size / 4).max(WINDOW_MIN);
            self.ssthresh = self.size;
            self.acked = 0;
        }
    }

    /// Notes that all packets in flight are sent again, after that many consecutive `expiries` of
    /// the retransmission timer. Further expiries concern the same loss and leave `ssthresh`.
    pub(super) fn lost_all(&mut self, expiries: u32) {
        if self.path_decides {
            return;
        }
        self.size = (self.size / 2).max(WINDOW_MIN);
        if expiries <= 1 {
            self.ssthresh = self.size;
        }
        self.acked = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_loss_the_window_grows_slowly_back_to_where_it_began() {
        let mut window = CongestionWindow::open(64, Psn::ZERO);
        window.lost_all(0);
        assert_eq!(window.size(), 32);
        window.acknowledged(31);
        assert_eq!(window.size(), 32);
        window.acknowledged(1);
        assert_eq!(window.size(), 34);
        for _ in 0..100 {
            window.acknowledged(64);
        }
        assert_eq!(window.size(), 64);
    }

    #[test]
    fn while_the_timer_expires_again_and_again_the_way_back_stays_fast() {
        let mut window = CongestionWindow::open(256, Psn::ZERO);
        for expiries in 1..10 {
            window.lost_all(expiries);
        }
        assert_eq!(window.size(), WINDOW_MIN);
        window.acknowledged(16);
        assert_eq!(window.size(), 20);
    }

    #[test]
    fn only_many_losses_in_one_window_reduce_it() {
        let mut window = CongestionWindow::open(64, Psn::ZERO);
        for epoch in 0..10 {
            let una = Psn::new(64 * epoch);
            for _ in 1..LOSSES_TOLERATED {
                window.lost_one(una, una + 64);
            }
        }
        assert_eq!(window.size(), 64);
        window.lost_one(Psn::new(9 * 64 + 1), Psn::new(10 * 64));
        assert_eq!(window.size(), 48);
    }
}
