//! INFO_REQ and INFO_RSP: the name of the session, and where its chunks are.
//!
//! ```text
//!     INFO_REQ, 272 bytes              INFO_RSP, 8 + 16 * n bytes
//!     0      2            257          0      2      4         8        16      20     24
//!     +------+------------+-----+      +------+------+---------+---------+-------+------+--
//!     |  0   | name, NULs |  0  |      |  1   |  n   |    0    | address |  key  | len  | ..
//!     +------+------------+-----+      +------+------+---------+---------+-------+------+--
//! ```

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Deref;

use super::{DESC_LEN, Geometry, INFO_REQ_LEN};

/// Message types [RT-6] [RT-7].
const INFO_REQ: u16 = 0;
const INFO_RSP: u16 = 1;
/// Bytes of the name field, of which the last must be a NUL [RT-6].
const NAME_FIELD: usize = 255;
const RSP_HEADER: usize = 8;

/// Why a text is not a session's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameError {
    /// Empty.
    Empty,
    /// More than 254 bytes, or no NUL behind it.
    Long,
    /// Not UTF-8.
    Encoding,
    /// A character that is not allowed: `/`, `.` or a control character.
    Character(char),
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("session name is empty"),
            Self::Long => f.write_str("session name is longer than 254 bytes"),
            Self::Encoding => f.write_str("session name is not UTF-8"),
            Self::Character(c) => write!(f, "session name has a character {c:?}"),
        }
    }
}

impl core::error::Error for NameError {}

/// Name of a session: 1 to 254 bytes of UTF-8 without `/`, `.` and control characters [RT-68]
/// [RS-24].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionName(String);

impl SessionName {
    /// Takes a text as a session's name.
    ///
    /// # Errors
    /// [`NameError`]; EINVAL to a caller.
    pub fn new(name: &str) -> Result<Self, NameError> {
        if name.is_empty() {
            return Err(NameError::Empty);
        }
        if name.len() >= NAME_FIELD {
            return Err(NameError::Long);
        }
        match name.chars().find(|c| matches!(c, '/' | '.') || c.is_control()) {
            Some(c) => Err(NameError::Character(c)),
            None => Ok(Self(name.into())),
        }
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Deref for SessionName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why an INFO_REQ or INFO_RSP is refused; the path is closed [RT-9] [RT-20].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InfoError {
    /// Fewer bytes than its parts need.
    Short {
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        got: usize,
    },
    /// Another type.
    Type(u16),
    /// What stands for a name is none.
    Name(NameError),
    /// A number of descriptors that does not divide the number of chunks.
    Count(u16),
    /// A descriptor whose length is not that of one or more chunks, whose end wraps around, or
    /// that is for chunks beyond the last.
    Desc(Desc),
    /// Descriptors for fewer chunks than there are; for how many.
    Missing(usize),
}

impl fmt::Display for InfoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { needed, got } => write!(f, "info of {got} bytes instead of {needed}"),
            Self::Type(kind) => write!(f, "info message of type {kind}"),
            Self::Name(error) => error.fmt(f),
            Self::Count(number) => write!(f, "info with {number} descriptors"),
            Self::Desc(desc) => write!(f, "info with a descriptor {desc}"),
            Self::Missing(chunks) => write!(f, "info with descriptors of {chunks} chunks only"),
        }
    }
}

impl core::error::Error for InfoError {}

/// Reads an INFO_REQ; what is behind the 272 bytes and what is reserved is not looked at [RT-68].
///
/// # Errors
/// [`InfoError`]; the path is closed.
pub fn parse_info_req(bytes: &[u8]) -> Result<SessionName, InfoError> {
    let short = InfoError::Short { needed: INFO_REQ_LEN, got: bytes.len() };
    let b: &[u8; INFO_REQ_LEN] = bytes.first_chunk().ok_or(short)?;
    let kind = u16::from_le_bytes([b[0], b[1]]);
    if kind != INFO_REQ {
        return Err(InfoError::Type(kind));
    }
    let field = &b[2..2 + NAME_FIELD];
    let end = field.iter().position(|byte| *byte == 0).ok_or(InfoError::Name(NameError::Long))?;
    let name = core::str::from_utf8(field.get(..end).unwrap_or_default())
        .map_err(|_| InfoError::Name(NameError::Encoding))?;
    SessionName::new(name).map_err(InfoError::Name)
}

/// Writes an INFO_REQ [RT-6].
pub fn emit_info_req(name: &SessionName) -> [u8; INFO_REQ_LEN] {
    let mut out = [0; INFO_REQ_LEN];
    out[..2].copy_from_slice(&INFO_REQ.to_le_bytes());
    for (to, from) in out[2..2 + NAME_FIELD].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    out
}

/// Memory at a peer: where, its key, and how many bytes [RT-8].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "rtrs_sg_desc")]
pub struct Desc {
    /// Address as the owner's registration has it.
    pub addr: u64,
    /// Remote key.
    pub key: u32,
    /// Length in bytes.
    pub len: u32,
}

impl Desc {
    pub(super) fn parse(b: &[u8; DESC_LEN]) -> Self {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, l0, l1, l2, l3] = *b;
        Self {
            addr: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            key: u32::from_le_bytes([k0, k1, k2, k3]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
        }
    }

    pub(super) fn emit(&self) -> [u8; DESC_LEN] {
        let mut out = [0; DESC_LEN];
        out[..8].copy_from_slice(&self.addr.to_le_bytes());
        out[8..12].copy_from_slice(&self.key.to_le_bytes());
        out[12..].copy_from_slice(&self.len.to_le_bytes());
        out
    }
}

impl fmt::Display for Desc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{} key {:#x}", self.addr, self.len, self.key)
    }
}

/// Returns the bytes of an INFO_RSP with `descs` descriptors: what a client has room for, with one
/// for every chunk [RT-7].
pub fn info_rsp_len(descs: u16) -> usize {
    RSP_HEADER + DESC_LEN * usize::from(descs)
}

/// Reads an INFO_RSP: `out` gets the address and key of every chunk, in the order of their
/// indices, and is empty after an error. Sums are of 64 bits [RT-9] [RT-69].
///
/// # Errors
/// [`InfoError`]; the path is closed.
pub fn parse_info_rsp(
    bytes: &[u8],
    geometry: &Geometry,
    out: &mut Vec<(u64, u32)>,
) -> Result<(), InfoError> {
    out.clear();
    let result = fill(bytes, geometry, out);
    if result.is_err() {
        out.clear();
    }
    result
}

fn fill(bytes: &[u8], geometry: &Geometry, out: &mut Vec<(u64, u32)>) -> Result<(), InfoError> {
    let got = bytes.len();
    let short = InfoError::Short { needed: RSP_HEADER, got };
    let ([t0, t1, n0, n1, _, _, _, _], rest) = bytes.split_first_chunk().ok_or(short)?;
    let kind = u16::from_le_bytes([*t0, *t1]);
    if kind != INFO_RSP {
        return Err(InfoError::Type(kind));
    }
    let (depth, count) = (geometry.queue_depth(), u16::from_le_bytes([*n0, *n1]));
    if depth.checked_rem(count) != Some(0) {
        return Err(InfoError::Count(count));
    }
    let short = InfoError::Short { needed: info_rsp_len(count), got };
    let descs = rest.as_chunks().0.get(..usize::from(count)).ok_or(short)?;
    let (depth, chunk) = (usize::from(depth), geometry.chunk());
    for desc in descs.iter().map(Desc::parse) {
        let chunks = (desc.len / chunk) as usize;
        let fits = desc.len.is_multiple_of(chunk)
            && (1..=depth - out.len()).contains(&chunks)
            && desc.addr.checked_add(desc.len.into()).is_some();
        if !fits {
            return Err(InfoError::Desc(desc));
        }
        let ends = (0..chunks as u64).map(|i| (desc.addr + i * u64::from(chunk), desc.key));
        out.extend(ends);
    }
    if out.len() == depth { Ok(()) } else { Err(InfoError::Missing(out.len())) }
}

/// Appends an INFO_RSP with these descriptors to `out`, of at most 65535 of them [RT-7].
pub fn emit_info_rsp(descs: impl ExactSizeIterator<Item = Desc>, out: &mut Vec<u8>) {
    let count = u16::try_from(descs.len()).unwrap_or(u16::MAX);
    out.reserve(info_rsp_len(count));
    out.extend(INFO_RSP.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend([0; 4]);
    for desc in descs.take(count.into()) {
        out.extend(desc.emit());
    }
}
