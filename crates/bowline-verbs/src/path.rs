//! What a device that controls congestion knows about the paths to its peers.

use std::net::IpAddr;
use std::time::Duration;

/// What is known about the path to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStats {
    /// Address of the peer.
    pub peer: IpAddr,
    /// Queue pairs that use the path.
    pub queue_pairs: usize,
    /// Smoothed round trip; `None`: none was measured.
    pub round_trip: Option<Duration>,
    /// Least round trip.
    pub least_round_trip: Duration,
    /// Bytes that may be in flight; `None`: each queue pair has a fixed window.
    pub window: Option<u64>,
    /// Bytes in flight.
    pub in_flight: u64,
    /// Bytes per second at which is sent; `None`: not limited.
    pub rate: Option<u64>,
    /// Packets believed lost because the peer reported a gap.
    pub lost_gaps: u64,
    /// Packets believed lost because nothing was acknowledged in time.
    pub lost_timeouts: u64,
    /// Losses that were taken for congestion.
    pub congestion_losses: u64,
    /// Packets sent again.
    pub resent: u64,
    /// Congestion notifications received.
    pub cnps_received: u64,
    /// Congestion notifications sent.
    pub cnps_sent: u64,
}
