//! Rights of memory, and path MTUs.

bitflags::bitflags! {
    /// Access rights of a key [MR-4]. Sending from a region needs no right; receiving into it, and
    /// the results of READs and atomics, need `LOCAL_WRITE`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// This side's requests may write.
        const LOCAL_WRITE = 1;
        /// The peer may write.
        const REMOTE_WRITE = 2;
        /// The peer may read.
        const REMOTE_READ = 4;
        /// The peer may do atomics.
        const REMOTE_ATOMIC = 8;
        /// Memory windows may be bound.
        const MW_BIND = 16;
        /// Addresses begin at 0.
        const ZERO_BASED = 32;
        /// The peer may flush to global visibility: all observers at the peer see what it wrote.
        const FLUSH_GLOBAL = 256;
        /// The peer may flush to memory that survives a loss of power.
        const FLUSH_PERSISTENT = 512;
    }
}

/// Returns the next key of a region or window: the low byte is one more, wrapping, and the upper 24
/// bits, which name the region or window, are the same [MR-6], [MR-12].
pub const fn next_key(key: u32) -> u32 {
    key & !0xff | key.wrapping_add(1) & 0xff
}

/// Kind of a memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MwType {
    /// Bound by [`Device::bind_mw`](crate::Device::bind_mw), which chooses the key. Valid for every
    /// queue pair of its protection domain. Cannot be invalidated, but can be rebound.
    Type1 = 1,
    /// Bound by [`SendOp::BindMw`](crate::SendOp::BindMw) with a key that the program chooses.
    /// Valid for the queue pair on which it was bound. Must be invalidated by this side or the peer
    /// before it is bound again.
    Type2 = 2,
}

/// The region and range that a memory window is bound to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MwBind {
    /// Local key of the region, which must have been registered with [`Access::MW_BIND`], and also
    /// with [`Access::LOCAL_WRITE`] if the peer is to write.
    pub lkey: u32,
    /// Address of the window's first byte, as an address of the region.
    pub addr: u64,
    /// Length in bytes. 0 ends the binding of a window of type 1; `lkey` must name a region even
    /// then.
    pub len: u64,
    /// Rights of the peer: to read, to write and to do atomics; [`Access::ZERO_BASED`] for
    /// addresses that begin at 0 instead of `addr`.
    pub access: Access,
}

/// Payload bytes of a full packet [HDR-7].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    M256 = 1,
    /// 512 bytes.
    M512 = 2,
    /// 1024 bytes.
    M1024 = 3,
    /// 2048 bytes.
    M2048 = 4,
    /// 4096 bytes.
    M4096 = 5,
}

impl Mtu {
    /// All MTUs, smallest first.
    pub const ALL: [Self; 5] = [Self::M256, Self::M512, Self::M1024, Self::M2048, Self::M4096];

    /// Returns the MTU of a code used on the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.code() == code)
    }

    /// Returns the code used on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the MTU in bytes.
    pub const fn bytes(self) -> usize {
        128 << self as u8
    }

    /// Returns what rdma_cm chooses for an interface of this MTU [HDR-8]; `None` below 352 bytes.
    pub fn for_interface(mtu: usize) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|code| code.bytes() + 96 <= mtu)
    }
}
