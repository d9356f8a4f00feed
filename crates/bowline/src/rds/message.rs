//! Received messages.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::SystemTime;

use bowline_rds::{Control as CoreControl, LatencyTrace, RdmaStatus, Received, Rope};
use bowline_rds_driver::Driver;

/// A control message that accompanies a received message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Control {
    /// Port groups (port mod 64) in which a refused destination may be free now.
    #[doc(alias = "RDS_CMSG_CONG_UPDATE")]
    CongestionUpdate(u64),
    /// Remote memory key from the sender.
    #[doc(alias = "RDS_CMSG_RDMA_DEST")]
    RdmaDest(u64),
    /// How a transfer ended.
    #[doc(alias = "RDS_CMSG_RDMA_STATUS")]
    RdmaStatus {
        /// Number that its sender gave it.
        token: u64,
        /// How it ended.
        status: RdmaStatus,
    },
    /// When the message was queued.
    #[doc(alias = "SCM_TIMESTAMP")]
    Timestamp(SystemTime),
    /// Receive path latency.
    #[doc(alias = "RDS_CMSG_RXPATH_LATENCY")]
    Latency {
        /// The positions that the user asked for.
        trace: LatencyTrace,
        /// One interval for each position, nanoseconds.
        nanos: [u64; 3],
    },
    /// Cookies of zero-copy messages that were sent and released.
    #[doc(alias = "RDS_CMSG_ZCOPY_COMPLETION")]
    ZcopyCompletion(Vec<u32>),
}

impl Control {
    fn new(control: CoreControl, driver: &Driver) -> Option<Self> {
        Some(match control {
            CoreControl::CongestionUpdate(ports) => Self::CongestionUpdate(ports),
            CoreControl::RdmaDest(key) => Self::RdmaDest(key),
            CoreControl::RdmaStatus { token, status } => Self::RdmaStatus { token, status },
            CoreControl::Timestamp(at) => Self::Timestamp(driver.wall_clock(at)),
            CoreControl::Latency { trace, nanos } => Self::Latency { trace, nanos },
            CoreControl::ZcopyCompletion(cookies) => Self::ZcopyCompletion(cookies),
            // Users cannot have asked for a control message that this library has no name for.
            _ => return None,
        })
    }
}

/// A received message, in the buffers it arrived in. Kept messages keep those buffers.
#[derive(Clone, Debug)]
pub struct Message {
    source: Option<SocketAddr>,
    data: Option<Rope>,
    control: Vec<Control>,
}

impl Message {
    pub(super) fn new(received: Received, driver: &Driver) -> Self {
        let Received { source, data, control } = received;
        let control = control.into_iter().filter_map(|c| Control::new(c, driver)).collect();
        Self { source, data, control }
    }

    pub(super) const fn from_parts(
        source: Option<SocketAddr>,
        data: Option<Rope>,
        control: Vec<Control>,
    ) -> Self {
        Self { source, data, control }
    }

    /// Returns the length of the payload in bytes.
    pub fn len(&self) -> usize {
        self.data.as_ref().map_or(0, Rope::len)
    }

    /// Tells whether the payload is empty, as it may be.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the sender. A notification has no sender (see
    /// [`is_notification`](Self::is_notification)); for it this returns the unspecified address.
    pub fn source(&self) -> SocketAddr {
        self.source.unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))
    }

    /// Tells whether this is not a message but only control information: congestion updates after
    /// [`Socket::set_cong_monitor`](super::Socket::set_cong_monitor), ends of RDMA transfers.
    pub fn is_notification(&self) -> bool {
        self.data.is_none()
    }

    /// Copies as much of the payload as fits; returns the number of bytes copied.
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        self.data.as_ref().map_or(0, |data| data.copy_to(out))
    }

    /// Copies the payload into a vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        for slice in self.slices() {
            bytes.extend_from_slice(slice);
        }
        bytes
    }

    /// Returns the payload without copying it, piece by piece.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.data.iter().flat_map(Rope::slices)
    }

    /// Returns the control messages in the kernel's order.
    pub fn control(&self) -> &[Control] {
        &self.control
    }
}
