//! What the requester is told when its queue pair goes to RTS.

use std::time::Duration;

use crate::config::GiveUp;

/// Smallest window, packets.
pub(super) const WINDOW_MIN: u32 = 16;
/// Largest window, packets: far below half of the PSNs [REQ-6].
pub(super) const WINDOW_MAX: u32 = 4096;
/// Shortest time before a silent peer is asked, beside that of two answers.
const PROBE_MIN: Duration = Duration::from_millis(1);
/// The same while fewer packets than these are unanswered: who waits for one answer sleeps, and a
/// timer that ends before the system's next tick costs each sleep some microseconds.
const PROBE_MIN_FEW: Duration = Duration::from_millis(5);
pub(super) const FEW_UNANSWERED: u32 = 16;
/// A retry count, as an RNR retry count, of 7 [REQ-13].
pub(super) const RETRY_SEVEN: u8 = 7;

/// Attributes of the queue pair that concern the requester. What it makes of them is its own
/// affair: the peer never sees it [REQ-21].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) mtu: usize,
    pub(crate) max_rd_atomic: u8,
    /// Code of the acknowledgement timeout; 0: never [REQ-12].
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) window: u32,
    pub(crate) give_up: GiveUp,
    pub(crate) retransmit_min: Duration,
}

impl Settings {
    /// The negotiated timeout: an upper bound of the own timer [REQ-22].
    pub(super) fn timeout(&self) -> Option<Duration> {
        (self.timeout != 0).then(|| Duration::from_nanos(4096 << (self.timeout & 31)))
    }

    /// When a silent peer is asked how far it has come, for the time of an answer: late enough for
    /// one that slept.
    pub(super) fn probe_after(round_trip: Option<Duration>, unanswered: u32) -> Duration {
        let least = if unanswered < FEW_UNANSWERED { PROBE_MIN_FEW } else { PROBE_MIN };
        round_trip.unwrap_or(PROBE_MIN) * 2 + least
    }

    /// Time without progress after which the peer is given up.
    pub(super) fn give_up_time(&self) -> Option<Duration> {
        match self.give_up {
            GiveUp::After(time) => Some(time),
            GiveUp::RetryCountSevenForever if self.retry_cnt == RETRY_SEVEN => None,
            GiveUp::RetryCount | GiveUp::RetryCountSevenForever => {
                let timeout = self.timeout()?.max(self.retransmit_min);
                Some(timeout * u32::from(self.retry_cnt.max(1)))
            }
        }
    }
}
