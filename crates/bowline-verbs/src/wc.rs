//! Work completions.

use crate::Qpn;

/// Status of a work request, with the kernel's numbers [QP-7].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Done.
    #[default]
    Success = 0,
    /// The message was longer than the receive.
    LocLenErr = 1,
    /// The request is invalid, or a region is not in the required state.
    LocQpOpErr = 2,
    /// A local key does not allow the access.
    LocProtErr = 4,
    /// The queue pair is in error.
    WrFlushErr = 5,
    /// A window could not be bound.
    MwBindErr = 6,
    /// The response was invalid.
    BadRespErr = 7,
    /// Local access error.
    LocAccessErr = 8,
    /// The peer considered the request invalid.
    RemInvReqErr = 9,
    /// The peer's key does not allow the access.
    RemAccessErr = 10,
    /// The peer could not execute the request.
    RemOpErr = 11,
    /// The peer did not answer.
    RetryExcErr = 12,
    /// The peer had no receive posted for too long.
    RnrRetryExcErr = 13,
    /// The queue pair is broken.
    FatalErr = 19,
    /// Anything else.
    GeneralErr = 21,
}

/// Kind of the completed request, with the kernel's numbers [QP-8].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WcOpcode {
    /// A send of any form.
    #[default]
    Send = 0,
    /// RDMA write.
    RdmaWrite = 1,
    /// RDMA read.
    RdmaRead = 2,
    /// Compare and swap.
    CompSwap = 3,
    /// Fetch and add.
    FetchAdd = 4,
    /// A window was bound.
    BindMw = 5,
    /// Local invalidate.
    LocalInv = 6,
    /// Flush.
    Flush = 8,
    /// Atomic write.
    AtomicWrite = 9,
    /// Fast registration.
    RegMr = 10,
    /// A receive.
    Recv = 0x80,
    /// A receive taken by a write with immediate.
    RecvRdmaWithImm = 0x81,
}

/// Entry of a completion queue. After a failure only `wr_id`, `status`, `qpn` and
/// [`is_recv`](Self::is_recv) are valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// Id of the work request.
    pub wr_id: u64,
    /// Status of the work request.
    pub status: Status,
    /// Kind of the work request.
    pub opcode: WcOpcode,
    /// Bytes of the message.
    pub byte_len: u32,
    /// Immediate.
    pub imm: Option<u32>,
    /// Key of this side that the peer has invalidated.
    pub invalidated: Option<u32>,
    /// Queue pair of this side.
    pub qpn: Qpn,
    /// Sender's queue pair (UD).
    pub src_qp: Qpn,
    /// The first 40 bytes of the buffer are the network header (UD).
    pub grh: bool,
}

impl Completion {
    /// Tells whether this is a receive.
    pub const fn is_recv(&self) -> bool {
        self.opcode as u8 & 0x80 != 0
    }
}
