//! Headers of requests in chunks, and the message that brings a chunk's new key.
//!
//! ```text
//!     chunk                                                     WRITE     0     2
//!     0           data_len      off                                       +-----+-------+
//!     +-----------+-------------+----------------+                        |  2  |usr_len|
//!     | data      | usr message | WRITE or READ  |                        +-----+-------+
//!     +-----------+-------------+----------------+
//!                               ^ in the immediate
//!     READ  0     2       4       6      8       16      20     24      RKEY_RSP
//!           +-----+-------+-------+------+-------+-------+------+       +-----+-------+------+
//!           |  3  |usr_len| flags | 0, 1 | addr  | key   | len  |       |  4  |buf_id | key  |
//!           +-----+-------+-------+------+-------+-------+------+       +-----+-------+------+
//! ```
//! The server derives everything from `off` and from its copy of the header [RT-38] [RT-65].

use core::fmt;

use super::{DESC_LEN, Desc, Geometry, RKEY_RSP_LEN};

/// Message types [RT-11] [RT-12] [RT-13].
const WRITE: u16 = 2;
const READ: u16 = 3;
const RKEY_RSP: u16 = 4;
/// Flag of READ: the client wants the key of its descriptor invalidated.
const NEED_INVAL: u16 = 0x1;

/// Bytes of a WRITE header [RT-11].
pub const WRITE_HDR_LEN: usize = 4;
/// Most bytes of a READ header, that with a descriptor [RT-12].
pub const READ_HDR_MAX: usize = READ_HDR_LEN + DESC_LEN;
const READ_HDR_LEN: usize = 8;

/// Header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoHdr {
    /// Data goes to the server, or nowhere [RT-11].
    #[doc(alias = "rtrs_msg_rdma_write")]
    Write {
        /// Bytes of the user message.
        usr_len: u16,
    },
    /// Data goes to the client, or nowhere [RT-12].
    #[doc(alias = "rtrs_msg_rdma_read")]
    Read {
        /// Bytes of the user message.
        usr_len: u16,
        /// The key of `desc` is to be invalidated with the reply.
        #[doc(alias = "RTRS_MSG_NEED_INVAL_F")]
        need_inval: bool,
        /// Where the data goes, if there is any.
        desc: Option<Desc>,
    },
}

/// Writes a WRITE header [RT-11].
pub fn write_hdr(usr_len: u16) -> [u8; WRITE_HDR_LEN] {
    let ([t0, t1], [l0, l1]) = (WRITE.to_le_bytes(), usr_len.to_le_bytes());
    [t0, t1, l0, l1]
}

/// Writes a READ header at the beginning of `out` and returns its length, 8 or 24 bytes. Without a
/// descriptor there is nothing to invalidate: the flag is clear [RT-12] [RT-41].
pub fn read_hdr(
    usr_len: u16,
    need_inval: bool,
    desc: Option<Desc>,
    out: &mut [u8; READ_HDR_MAX],
) -> usize {
    let flags = if need_inval && desc.is_some() { NEED_INVAL } else { 0 };
    out[..2].copy_from_slice(&READ.to_le_bytes());
    out[2..4].copy_from_slice(&usr_len.to_le_bytes());
    out[4..6].copy_from_slice(&flags.to_le_bytes());
    out[6..8].copy_from_slice(&u16::from(desc.is_some()).to_le_bytes());
    match desc {
        None => READ_HDR_LEN,
        Some(desc) => {
            out[READ_HDR_LEN..].copy_from_slice(&desc.emit());
            READ_HDR_MAX
        }
    }
}

/// Why a request is malformed; the path is closed [RT-45] [RT-67].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoError {
    /// The header does not fit in its chunk; its offset in bytes.
    Header(u32),
    /// Another type.
    Type(u16),
    /// A user message longer than what lies before the header, or than is allowed.
    UsrLen(u16),
    /// More data than a request may have, bytes.
    DataLen(u32),
    /// More than one descriptor.
    Count(u16),
    /// Flags that do not exist, or that make no sense without a descriptor.
    Flags(u16),
    /// Data without a descriptor that says where it goes, bytes.
    NoDesc(u32),
    /// A descriptor of no bytes, of more than the data, or that wraps around.
    Desc(Desc),
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(off) => write!(f, "header at {off} does not fit in its chunk"),
            Self::Type(kind) => write!(f, "request of type {kind}"),
            Self::UsrLen(len) => write!(f, "user message of {len} bytes"),
            Self::DataLen(len) => write!(f, "{len} bytes of data"),
            Self::Count(number) => write!(f, "{number} descriptors"),
            Self::Flags(flags) => write!(f, "flags {flags:#06x}"),
            Self::NoDesc(len) => write!(f, "{len} bytes of data without a descriptor"),
            Self::Desc(desc) => write!(f, "descriptor {desc}"),
        }
    }
}

impl core::error::Error for IoError {}

/// A request that was judged: everything about it lies in its chunk and within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoReq {
    /// The header.
    pub hdr: IoHdr,
    /// Bytes of data; they are at the beginning of the chunk.
    pub data_len: u32,
    /// Offset of the user message in the chunk: behind the data.
    pub usr_at: u32,
    /// Bytes of the user message.
    pub usr_len: u16,
}

/// Reads the header at `off` of a chunk and judges it [RT-38] [RT-67]. `tail` is a copy of the
/// chunk from `off` on, of 24 bytes or up to its end [RT-65].
///
/// # Errors
/// [`IoError`]; the path is closed, nothing is answered [RT-45].
pub fn parse_io(geometry: &Geometry, off: u32, tail: &[u8]) -> Result<IoReq, IoError> {
    let outside = IoError::Header(off);
    let room = geometry.chunk().saturating_sub(off) as usize;
    let tail = tail.get(..room).unwrap_or(tail);
    let ([t0, t1, l0, l1], rest) = tail.split_first_chunk().ok_or(outside)?;
    let (kind, usr_len) = (u16::from_le_bytes([*t0, *t1]), u16::from_le_bytes([*l0, *l1]));
    if kind != WRITE && kind != READ {
        return Err(IoError::Type(kind));
    }
    let data_len = off.checked_sub(usr_len.into()).ok_or(IoError::UsrLen(usr_len))?;
    if u32::from(usr_len) > geometry.max_hdr() {
        return Err(IoError::UsrLen(usr_len));
    }
    if data_len > geometry.max_io() {
        return Err(IoError::DataLen(data_len));
    }
    let hdr = if kind == WRITE {
        IoHdr::Write { usr_len }
    } else {
        let ([f0, f1, n0, n1], rest) = rest.split_first_chunk().ok_or(outside)?;
        let (flags, count) = (u16::from_le_bytes([*f0, *f1]), u16::from_le_bytes([*n0, *n1]));
        let desc = match count {
            0 => None,
            1 => Some(Desc::parse(rest.first_chunk().ok_or(outside)?)),
            more => return Err(IoError::Count(more)),
        };
        if flags & !NEED_INVAL != 0 || (desc.is_none() && flags != 0) {
            return Err(IoError::Flags(flags));
        }
        match desc {
            None if data_len != 0 => return Err(IoError::NoDesc(data_len)),
            // More would return bytes of earlier requests.
            Some(desc)
                if !(1..=data_len).contains(&desc.len)
                    || desc.addr.checked_add(desc.len.into()).is_none() =>
            {
                return Err(IoError::Desc(desc));
            }
            _ => IoHdr::Read { usr_len, need_inval: flags & NEED_INVAL != 0, desc },
        }
    };
    Ok(IoReq { hdr, data_len, usr_at: data_len, usr_len })
}

/// Why the bytes beside a reply are no RKEY_RSP; the path is closed [RT-56].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RkeyRspError {
    /// Fewer than 8 bytes; how many.
    Short(usize),
    /// Another type.
    Type(u16),
}

impl fmt::Display for RkeyRspError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short(len) => write!(f, "key message of {len} bytes"),
            Self::Type(kind) => write!(f, "key message of type {kind}"),
        }
    }
}

impl core::error::Error for RkeyRspError {}

/// The new key of a chunk on a path [RT-13].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "rtrs_msg_rkey_rsp")]
pub struct RkeyRsp {
    /// Index of the chunk.
    #[doc(alias = "buf_id")]
    pub id: u16,
    /// The key from now on.
    pub key: u32,
}

impl RkeyRsp {
    /// Reads an RKEY_RSP; what is behind its 8 bytes is not looked at.
    ///
    /// # Errors
    /// [`RkeyRspError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, RkeyRspError> {
        let short = RkeyRspError::Short(bytes.len());
        let [t0, t1, i0, i1, k0, k1, k2, k3] = *bytes.first_chunk().ok_or(short)?;
        let kind = u16::from_le_bytes([t0, t1]);
        if kind != RKEY_RSP {
            return Err(RkeyRspError::Type(kind));
        }
        Ok(Self { id: u16::from_le_bytes([i0, i1]), key: u32::from_le_bytes([k0, k1, k2, k3]) })
    }

    /// Writes an RKEY_RSP.
    pub fn emit(&self) -> [u8; RKEY_RSP_LEN] {
        let ([t0, t1], [i0, i1]) = (RKEY_RSP.to_le_bytes(), self.id.to_le_bytes());
        let [k0, k1, k2, k3] = self.key.to_le_bytes();
        [t0, t1, i0, i1, k0, k1, k2, k3]
    }
}
