//! Connections over RDMA: what the node and its driver exchange, and the state of one connection.
//! Spec: `docs/spec/rds-rdma.md`.
//!
//! ```text
//!  Node                                             driver
//!  Output::RdmaConnect, handle_rdma_request  ---->  queue pair, receives posted, REQ or REP
//!  poll_rdma_requests                        ---->  SENDs: one per frame; WRITEs, READs, atomics
//!  handle_rdma_sent, handle_rdma_frames      <----  completions
//!  Output::RdmaClose                         ---->  queue pair to ERR, everything flushed
//!  handle_rdma_closed                        <----
//! ```

mod credits;
mod link;
pub(crate) mod op;
mod remembered;

pub(crate) use credits::Credits;
pub(crate) use link::{Check, MapFrames, RdmaLink, RdmaState, Said, Sending};
pub(crate) use remembered::Remembered;

pub use op::{
    RDMA_MAX, RDMA_PIECES, RDMA_PIECES_MAX, RdmaAccess, RdmaHold, RdmaOp, RdmaPiece, RdmaStatus,
    RdmaWork,
};

use bowline_wire::rds::{CONNECT_LEN, HEADER_LEN};

use crate::ids::RdmaLinkId;

/// Private data of a refusal: the number 1 of a little-endian host [IB-22], [IB-23].
pub const RDMA_REJECT: [u8; 4] = [1, 0, 0, 0];

/// Queues of the queue pair of a connection, and what it tells the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaShape {
    /// Number of SENDs that may be outstanding. The ids of SENDs rise by one, so those of
    /// outstanding SENDs differ modulo this number.
    pub sends: usize,
    /// Number of receives to post, before the peer learns of the queue pair and again whenever
    /// frames were taken.
    pub receives: usize,
    /// Memory of a frame, its header included, in bytes.
    pub frame: usize,
    /// Private data of the REQ or REP.
    pub private_data: [u8; CONNECT_LEN],
    /// Type of service of the connection.
    pub tos: u8,
}

/// A connection request that the node accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaAccept {
    /// Id of the connection from now on.
    pub link: RdmaLinkId,
    /// Its queues and its REP.
    pub shape: RdmaShape,
}

/// A request to post on the send queue of a connection.
#[derive(Clone, Copy, Debug)]
pub enum RdmaRequest<'a> {
    /// A frame; its payload comes beside it.
    Frame(RdmaSend),
    /// A request of an RDMA operation.
    Work(RdmaWork<'a>),
}

/// A frame to send. Its payload comes beside it, piece by piece.
#[derive(Clone, Copy, Debug)]
pub struct RdmaSend {
    /// Id of the request; its completion, if it has one, is reported with it.
    pub id: u64,
    /// The header, finished.
    pub header: [u8; HEADER_LEN],
    /// Number of bytes of the payload.
    pub len: usize,
    /// The request has a completion, which also stands for those before it.
    pub signalled: bool,
    /// The peer is to be woken [IB-42].
    pub solicited: bool,
    /// Reads and atomics before it have to be over [IB-90].
    pub fence: bool,
}

/// A frame that was received. Its payload lies in the buffer that comes with it.
#[derive(Clone, Copy, Debug)]
pub struct RdmaFrame {
    /// Number of bytes received, the header included. Fewer than 48 are no frame.
    pub bytes: usize,
    /// The header.
    pub header: [u8; HEADER_LEN],
    /// Offset of the payload in the buffer.
    pub start: usize,
}
