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
        /// Take the bytes now; the memory may be used again at once and needs no key.
        const INLINE = 8;
    }
}

/// Memory of a gather or scatter list, laid out as `struct ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Address within the region, in the terms it was registered with (`iova`).
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Local key.
    pub lkey: u32,
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Remote {
    /// Address, in the peer's terms.
    pub addr: u64,
    /// The peer's key.
    pub rkey: u32,
}

/// A stretch of memory, for fast registration.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The memory.
    pub buffer: Arc<Buffer>,
    /// Where it begins.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDest {
    /// Address.
    pub addr: IpAddr,
    /// Queue pair.
    pub qpn: Qpn,
    /// Its queue key.
    pub qkey: u32,
}

bitflags::bitflags! {
    /// How far what was written is to have come when a flush completes: FETH's placement types
    /// [HDR-2].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Placement: u8 {
        /// Everybody at the peer sees it.
        const GLOBAL = 1;
        /// It outlives a loss of power.
        const PERSISTENT = 2;
    }
}

/// What a flush is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushOf {
    /// So many bytes from the address on.
    Range(u32),
    /// The whole region of the key.
    Region,
}

/// What a send work request does. Immediates are four opaque bytes, shown here as the big-endian
/// number they are on the wire.
#[derive(Clone, Debug)]
pub enum SendOp {
    /// Send to a receive of the peer.
    Send,
    /// The same with an immediate.
    SendImm(u32),
    /// The same, and the peer's key is invalidated.
    SendInv(u32),
    /// Send a datagram (UD), perhaps with an immediate.
    Datagram(UdDest, Option<u32>),
    /// RDMA write.
    Write(Remote),
    /// RDMA write that takes a receive of the peer and tells it an immediate.
    WriteImm(Remote, u32),
    /// RDMA read.
    Read(Remote),
    /// Compare and swap of 8 bytes: when the peer's are `compare` they become `swap`.
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
    /// Ends a fast-registration region or a window of type 2 [MR-7].
    LocalInv(u32),
    /// Binds a window of type 2, in the order of the queue [MR-9], [MR-12].
    BindMw {
        /// The new key: its upper 24 bits are those of the window, its low byte is another than
        /// that of the last one. The next one is told by [`next_key`](crate::next_key).
        key: u32,
        /// To what, at least one byte.
        to: MwBind,
    },
    /// Writes 8 bytes at once as others see it.
    AtomicWrite(Remote),
    /// Completes when earlier writes to the peer's memory have come as far as this says.
    Flush {
        /// The peer's memory.
        remote: Remote,
        /// All of it, or a part.
        of: FlushOf,
        /// How far; not empty.
        placement: Placement,
    },
}

/// A send work request.
#[derive(Clone, Debug)]
pub struct SendWr<'a> {
    /// Comes back in the completion.
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
    /// Comes back in the completion.
    pub id: u64,
    /// Scatter list.
    pub sges: &'a [Sge],
}
