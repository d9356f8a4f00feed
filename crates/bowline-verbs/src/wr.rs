//! Work requests.

use std::net::IpAddr;
use std::sync::Arc;

use crate::{Access, Buffer, MwBind, Qpn};

bitflags::bitflags! {
    /// Flags of a send work request, with the kernel's numbers [QP-8].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SendFlags: u32 {
        /// Wait for earlier reads and atomics [REQ-5].
        const FENCE = 1;
        /// Complete with an entry also on success.
        const SIGNALED = 2;
        /// Wake a receiver that waits for solicited completions [REQ-14].
        const SOLICITED = 4;
        /// Copy the bytes now; the memory may be reused at once and needs no key.
        const INLINE = 8;
    }
}

/// Memory of a gather or scatter list, laid out as `struct ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Address within the region, relative to the `iova` it was registered with.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Local key.
    pub lkey: u32,
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Remote {
    /// Address in the peer's region.
    pub addr: u64,
    /// The peer's key.
    pub rkey: u32,
}

/// A contiguous piece of memory, for fast registration.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The memory.
    pub buffer: Arc<Buffer>,
    /// Offset of the piece in the buffer, in bytes.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// Destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDest {
    /// Address; of a multicast group, all queue pairs attached to it get the datagram.
    pub addr: IpAddr,
    /// Local address to send from; `None`: the first of the same family.
    pub from: Option<IpAddr>,
    /// Queue pair; [`Qpn::MULTICAST`] for a group.
    pub qpn: Qpn,
    /// Its queue key.
    pub qkey: u32,
}

bitflags::bitflags! {
    /// Required placement of earlier writes when a flush completes: FETH's placement types [HDR-2].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Placement: u8 {
        /// The data are visible to all observers at the peer.
        const GLOBAL = 1;
        /// The data survive a loss of power.
        const PERSISTENT = 2;
    }
}

/// The memory that a flush covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushOf {
    /// This many bytes from the address on.
    Range(u32),
    /// The whole region of the key.
    Region,
}

/// Operation of a send work request. Immediates are four opaque bytes, shown here as the big-endian
/// number they are on the wire.
#[derive(Clone, Debug)]
pub enum SendOp {
    /// Send to a receive of the peer.
    Send,
    /// Send with an immediate.
    SendImm(u32),
    /// Send that invalidates a key of the peer.
    SendInv(u32),
    /// Send a datagram (UD), perhaps with an immediate.
    Datagram(UdDest, Option<u32>),
    /// RDMA write.
    Write(Remote),
    /// RDMA write with an immediate, which consumes a receive of the peer.
    WriteImm(Remote, u32),
    /// RDMA read.
    Read(Remote),
    /// Compare and swap of 8 bytes: if the peer's value is `compare`, it becomes `swap`.
    CompareSwap {
        /// The peer's 8 bytes, aligned.
        remote: Remote,
        /// Expected.
        compare: u64,
        /// New.
        swap: u64,
    },
    /// Fetch and add of 8 bytes.
    FetchAdd {
        /// The peer's 8 bytes, aligned.
        remote: Remote,
        /// Added, wrapping.
        add: u64,
    },
    /// Makes a fast-registration region valid, in the order of the queue [MR-6].
    RegMr {
        /// The new key: its upper 24 bits are those of the region.
        key: u32,
        /// The memory, in order.
        pieces: Vec<Piece>,
        /// Address of its first byte.
        iova: u64,
        /// Rights.
        access: Access,
    },
    /// Invalidates a fast-registration region or a window of type 2 [MR-7].
    LocalInv(u32),
    /// Binds a window of type 2, in the order of the queue [MR-9], [MR-12].
    BindMw {
        /// The new key: its upper 24 bits are those of the window, and its low byte differs from
        /// the previous key. [`next_key`](crate::next_key) returns a suitable one.
        key: u32,
        /// The range to bind, at least one byte.
        to: MwBind,
    },
    /// Atomic write of 8 bytes.
    AtomicWrite(Remote),
    /// Completes when earlier writes to the peer's memory have the required placement.
    Flush {
        /// The peer's memory.
        remote: Remote,
        /// Whole region or range.
        of: FlushOf,
        /// Required placement; not empty.
        placement: Placement,
    },
}

/// A send work request.
#[derive(Clone, Debug)]
pub struct SendWr<'a> {
    /// Identifies the request in its completion.
    pub id: u64,
    /// What to do.
    pub op: SendOp,
    /// Gather list, or scatter list of reads and atomics.
    pub sges: &'a [Sge],
    /// Bytes instead of `sges` with [`SendFlags::INLINE`].
    pub inline: &'a [u8],
    /// Flags.
    pub flags: SendFlags,
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Identifies the request in its completion.
    pub id: u64,
    /// Scatter list.
    pub sges: &'a [Sge],
}
