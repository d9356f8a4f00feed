//! Settings both sides have, and what a core must know of a device.

use core::time::Duration;

/// Longest wait for the queues of a closed connection to run empty. Devices that work take
/// milliseconds; as long as it takes, requests wait. The same as path death [RT-88], so that both
/// together bound an outage [RT-100].
pub(crate) const DRAIN_MAX: Duration = Duration::from_secs(3);

/// How the peer's silence is noticed [RT-60], [RT-88]. When a dead *path* is given up is mostly the
/// device's own setting: the queue pairs fail, and the core takes that as the sign. Below a second
/// it is too short for a kernel server [RT-96].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HbConfig {
    /// Time between two looks at the peer [RT-63].
    pub interval: Duration,
    /// So many looks without a sign of life are borne; the one after them ends the path.
    pub missed_max: u32,
    /// A silent path is asked sooner, every `probe_interval`.
    pub fast_path_detection: bool,
    /// Silence after which the peer is asked.
    pub probe_interval: Duration,
    /// Of a server, towards clients that do not wait for it when their last path is lost: time
    /// without any acknowledgement after which a path is given up if another one of the session
    /// works [RT-93].
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

/// What a core must know of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// Most work requests of one queue.
    pub max_qp_wr: usize,
    /// Most elements of a gather list.
    pub max_sge: usize,
    /// Memory can be registered by a work request.
    pub fast_registration: bool,
    /// Keys can be withdrawn and renewed, so a server can refresh them. Where they cannot, it
    /// announces that it does not [RT-73].
    pub key_refresh: bool,
    /// WRITEs of data that fills packets leave together, so many bytes with one call; 0: they do
    /// not.
    pub burst: usize,
    /// Bytes of data of a packet, at most.
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
