//! The message of one IO.
//!
//! ```text
//!     0    2    4        8                16     20       24    26      32
//!     +----+----+--------+----------------+------+--------+-----+-------+
//!     | 4  |    | device | sector         | rw   | length | prio|       |
//!     +----+----+--------+----------------+------+--------+-----+-------+
//! ```

use core::fmt;
use core::ops::BitOr;

use super::{IO, MsgError};

/// Bytes of an IO message as this version writes it [NB-10].
pub const IO_LEN: usize = 32;
/// Bytes of one without priority, as a peer of version 1 may send it [NB-11].
const IO_LEN_MIN: usize = 24;
/// Bits of `rw` that are the operation [NB-12].
const OP_MASK: u32 = 0xff;

/// Operation: read.
#[doc(alias = "RNBD_OP_READ")]
pub const OP_READ: u8 = 0;
/// Operation: write.
#[doc(alias = "RNBD_OP_WRITE")]
pub const OP_WRITE: u8 = 1;
/// Operation: make durable what was acknowledged before.
#[doc(alias = "RNBD_OP_FLUSH")]
pub const OP_FLUSH: u8 = 2;
/// Operation: the contents are no longer needed.
#[doc(alias = "RNBD_OP_DISCARD")]
pub const OP_DISCARD: u8 = 3;
/// Operation: discard so that it cannot be read again.
#[doc(alias = "RNBD_OP_SECURE_ERASE")]
pub const OP_SECURE_ERASE: u8 = 4;
/// Operation: write zeroes. Before Linux 5.18 the value was WRITE_SAME, with data [NB-12].
#[doc(alias = "RNBD_OP_WRITE_ZEROES")]
pub const OP_WRITE_ZEROES: u8 = 5;

/// Flags of an IO: the bits of `rw` above the operation [NB-12]. Unknown ones are kept.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct IoFlags(u32);

impl IoFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// Somebody waits for it.
    #[doc(alias = "RNBD_F_SYNC")]
    pub const SYNC: Self = Self(0x100);
    /// It is durable when it is acknowledged.
    #[doc(alias = "RNBD_F_FUA")]
    pub const FUA: Self = Self(0x200);
    /// What was acknowledged before is durable before it begins; later than 6.12 [NB-57].
    #[doc(alias = "RNBD_F_PREFLUSH")]
    pub const PREFLUSH: Self = Self(0x400);
    /// Zeroes keep their space; later than 6.12 [NB-57].
    #[doc(alias = "RNBD_F_NOUNMAP")]
    pub const NOUNMAP: Self = Self(0x800);

    /// Makes flags of the bits of `rw`; those of the operation are dropped.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits & !OP_MASK)
    }

    /// Returns the bits as they are in `rw`.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Tells whether all of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for IoFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for IoFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoFlags({:#05x})", self.0)
    }
}

/// One IO [NB-10].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "rnbd_msg_io")]
pub struct Io {
    /// Device, as OPEN_RSP named it.
    pub device: u32,
    /// First sector of 512 bytes; all ones for a flush of a kernel [NB-13].
    pub sector: u64,
    /// Operation, one of `OP_*` or unknown.
    pub op: u8,
    /// Flags.
    pub flags: IoFlags,
    /// Bytes read, written or discarded.
    #[doc(alias = "bi_size")]
    pub len: u32,
    /// Linux IO priority, the class in bits 13 to 15; 0 if the message has none. Ignored before the
    /// session has agreed on version 2 [NB-11].
    pub prio: u16,
}

impl Io {
    /// Reads an IO message with or without priority [NB-11] [NB-22].
    pub(super) fn parse(usr: &[u8]) -> Result<Self, MsgError> {
        let short = MsgError::Short { needed: IO_LEN_MIN, got: usr.len() };
        let b: &[u8; IO_LEN_MIN] = usr.first_chunk().ok_or(short)?;
        let rw = u32::from_le_bytes([b[16], b[17], b[18], b[19]]);
        let prio =
            usr.first_chunk().map_or(0, |b: &[u8; IO_LEN]| u16::from_le_bytes([b[24], b[25]]));
        Ok(Self {
            device: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
            sector: u64::from_le_bytes([b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]]),
            op: (rw & OP_MASK) as u8,
            flags: IoFlags::from_bits(rw),
            len: u32::from_le_bytes([b[20], b[21], b[22], b[23]]),
            prio,
        })
    }

    /// Writes an IO message.
    pub fn emit(&self) -> [u8; IO_LEN] {
        let mut out = [0; IO_LEN];
        out[..2].copy_from_slice(&IO.to_le_bytes());
        out[4..8].copy_from_slice(&self.device.to_le_bytes());
        out[8..16].copy_from_slice(&self.sector.to_le_bytes());
        out[16..20].copy_from_slice(&(u32::from(self.op) | self.flags.bits()).to_le_bytes());
        out[20..24].copy_from_slice(&self.len.to_le_bytes());
        out[24..26].copy_from_slice(&self.prio.to_le_bytes());
        out
    }
}
