//! Settings of the requester, which it gets when its queue pair goes to RTS.

use std::time::Duration;

use crate::config::GiveUp;
use crate::congestion::Congestion;

/// The retry count, or RNR retry count, that can mean "for ever" [REQ-13].
pub(super) const RETRY_SEVEN: u8 = 7;

/// Attributes of the queue pair that concern the requester. Its use of them is not visible to the
/// peer [REQ-21].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) mtu: usize,
    pub(crate) max_rd_atomic: u8,
    /// Code of the acknowledgement timeout; 0: infinite [REQ-12].
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    /// How the window is determined.
    pub(crate) congestion: Congestion,
    pub(crate) give_up: GiveUp,
    pub(crate) retransmit_min: Duration,
}

impl Settings {
    /// Returns the negotiated timeout, an upper bound of the retransmission timer [REQ-22].
    pub(super) fn timeout(&self) -> Option<Duration> {
        (self.timeout != 0).then(|| Duration::from_nanos(4096 << (self.timeout & 31)))
    }

    /// Returns the time without progress after which the peer is given up; `None`: never.
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
