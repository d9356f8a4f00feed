//! Rights of memory, and path MTUs.

bitflags::bitflags! {
    /// What a key allows [MR-4]. Sending from a region needs no right; receiving into it, and the
    /// results of reads and atomics, need `LOCAL_WRITE`.
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
    }
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
    /// All, smallest first.
    pub const ALL: [Self; 5] = [Self::M256, Self::M512, Self::M1024, Self::M2048, Self::M4096];

    /// Reads the code used on the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.code() == code)
    }

    /// The code used on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Bytes.
    pub const fn bytes(self) -> usize {
        128 << self as u8
    }

    /// What rdma_cm chooses for an interface of this MTU [HDR-8]; `None` below 352 bytes.
    pub fn for_interface(mtu: usize) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|code| code.bytes() + 96 <= mtu)
    }
}
