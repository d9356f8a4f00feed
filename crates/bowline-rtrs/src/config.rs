//! Settings that both sides share, and attributes of a device.

use core::time::Duration;

/// Longest wait until the queues of a closed connection are flushed. Working devices take
/// milliseconds; requests wait that long. Equal to the path-death time [RT-88], so that both
/// together bound an outage [RT-100].
pub(crate) const DRAIN_MAX: Duration = Duration::from_secs(3);

/// How a silent peer is detected [RT-60], [RT-88]. When a dead *path* is given up is mostly
/// determined by the device: its queue pairs fail, which the core takes as the sign. Less than a
/// second is too short for a kernel server [RT-96].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HbConfig {
    /// Time between two checks of the peer [RT-63].
    pub interval: Duration,
    /// Number of checks without a message from the peer that are tolerated; the next one ends the
    /// path.
    pub missed_max: u32,
    /// Probe a silent path sooner, after `probe_interval`.
    pub fast_path_detection: bool,
    /// Silence after which the peer is probed.
    pub probe_interval: Duration,
    /// For a server with clients that do not wait for it when their last path is lost: time without
    /// any acknowledgement after which a path is given up if another path of the session works
    /// [RT-93].
    pub path_dead: Duration,
}

impl Default for HbConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            missed_max: 5,
            fast_path_detection: true,
            probe_interval: Duration::from_secs(1),
            path_dead: Duration::from_secs(3),
        }
    }
}

impl HbConfig {
    /// How late timers may run without a dead peer or path being noticed much later: a tenth of the
    /// shortest time here. Paths whose timers run together cost less [RT-88].
    pub fn slack(&self) -> Duration {
        let probe = if self.fast_path_detection { self.probe_interval } else { self.interval };
        self.interval.min(probe) / 10
    }
}

/// Attributes of a device that a core needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// Most work requests of one queue.
    pub max_qp_wr: usize,
    /// Most elements of a gather list.
    pub max_sge: usize,
    /// Whether memory can be registered by a work request.
    pub fast_registration: bool,
    /// Whether keys can be withdrawn and renewed, so that a server can refresh them. If not, the
    /// server announces that it does not [RT-73].
    pub key_refresh: bool,
    /// Bytes of data that leave with one call in WRITEs that fill their packets; 0: the device does
    /// not batch.
    pub burst: usize,
    /// Most bytes of data in a packet.
    pub mtu: usize,
}

impl PortAttr {
    /// Tells whether so many bytes leave with fewer calls as a WRITE of data and one with the
    /// immediate behind it than as one [RT-47], [RT-97]: an immediate makes the last packet longer,
    /// and the first packet of a long message is longer, too, so that they could not leave together
    /// with the others.
    pub(crate) const fn takes_two(&self, bytes: u32) -> bool {
        self.burst > 0 && bytes as usize > self.mtu
    }
}
