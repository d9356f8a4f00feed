//! Messages about sessions and devices, and the reading of any request.

use core::fmt;

use super::{CLOSE, IO, Io, OPEN, OPEN_RSP, SESS_INFO, SESS_INFO_RSP};

/// Major version of the protocol, the only part that is exchanged [NB-14].
#[doc(alias = "RNBD_PROTO_VER_MAJOR")]
pub const VERSION_MAJOR: u8 = 2;
/// Bytes of SESS_INFO and SESS_INFO_RSP [NB-6].
pub const SESS_INFO_LEN: usize = 36;
/// Bytes of OPEN [NB-7].
pub const OPEN_LEN: usize = 264;
/// Bytes of CLOSE [NB-8].
pub const CLOSE_LEN: usize = 8;
/// Bytes of OPEN_RSP [NB-9].
pub const OPEN_RSP_LEN: usize = 56;
/// Most bytes of a device's name, without the NUL [NB-7].
pub const NAME_MAX: usize = 254;
/// Where the name of OPEN begins, and the bytes kept for it.
const NAME_AT: usize = 6;
const NAME_FIELD: usize = NAME_MAX + 1;

/// How a device is opened [NB-19].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "rnbd_access_mode")]
pub enum Access {
    /// To read; any number at a time.
    Ro = 0,
    /// To read and write; one at a time.
    Rw = 1,
    /// To write beside one other writer, while a user moves between hosts.
    Migration = 2,
}

impl Access {
    /// Reads the byte of OPEN; `None` is answered with EINVAL [NB-19].
    pub const fn parse(mode: u8) -> Option<Self> {
        match mode {
            0 => Some(Self::Ro),
            1 => Some(Self::Rw),
            2 => Some(Self::Migration),
            _ => None,
        }
    }

    /// Returns the word for it in control files [NB-34].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ro => "ro",
            Self::Rw => "rw",
            Self::Migration => "migration",
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a request cannot be read; EINVAL [NB-22].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MsgError {
    /// Fewer bytes than its parts need.
    Short {
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        got: usize,
    },
    /// A type that is no request.
    Type(u16),
    /// A name without a NUL behind it.
    Name,
}

impl fmt::Display for MsgError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { needed, got } => write!(f, "message of {got} bytes instead of {needed}"),
            Self::Type(kind) => write!(f, "message of type {kind}"),
            Self::Name => f.write_str("device name without an end"),
        }
    }
}

impl core::error::Error for MsgError {}

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Begins a session's use [NB-6].
    #[doc(alias = "rnbd_msg_sess_info")]
    SessInfo {
        /// Major version the client knows.
        ver: u8,
    },
    /// Opens a device [NB-7].
    #[doc(alias = "rnbd_msg_open")]
    Open {
        /// How, see [`Access::parse`].
        access: u8,
        /// Its name, any bytes but NUL, perhaps none.
        name: &'a [u8],
    },
    /// Closes a device [NB-8].
    #[doc(alias = "rnbd_msg_close")]
    Close {
        /// The device.
        id: u32,
    },
    /// Reads, writes and the like.
    Io(Io),
}

/// Reads a request. Lengths are judged before any field; what is behind a message and what is
/// reserved is not looked at [NB-5] [NB-22].
///
/// # Errors
/// [`MsgError`]; EINVAL to the client.
pub fn parse(usr: &[u8]) -> Result<Request<'_>, MsgError> {
    let short = |needed| MsgError::Short { needed, got: usr.len() };
    let [t0, t1, _, _] = *usr.first_chunk().ok_or(short(4))?;
    match u16::from_le_bytes([t0, t1]) {
        SESS_INFO => Ok(Request::SessInfo { ver: *usr.get(4).ok_or(short(5))? }),
        OPEN => {
            let (access, name) = (usr.get(4), usr.get(NAME_AT..).filter(|name| !name.is_empty()));
            let (access, field) = access.zip(name).ok_or(short(NAME_AT + 1))?;
            let end = field.iter().take(NAME_FIELD).position(|byte| *byte == 0);
            let name = end.and_then(|end| field.get(..end)).ok_or(MsgError::Name)?;
            Ok(Request::Open { access: *access, name })
        }
        CLOSE => {
            let [_, _, _, _, id @ ..] = *usr.first_chunk::<CLOSE_LEN>().ok_or(short(CLOSE_LEN))?;
            Ok(Request::Close { id: u32::from_le_bytes(id) })
        }
        IO => Ok(Request::Io(Io::parse(usr)?)),
        other => Err(MsgError::Type(other)),
    }
}

/// Writes a SESS_INFO [NB-6].
pub fn emit_sess_info(ver: u8) -> [u8; SESS_INFO_LEN] {
    sess_info(SESS_INFO, ver)
}

/// Writes a SESS_INFO_RSP [NB-6].
pub fn emit_sess_info_rsp(ver: u8) -> [u8; SESS_INFO_LEN] {
    sess_info(SESS_INFO_RSP, ver)
}

fn sess_info(kind: u16, ver: u8) -> [u8; SESS_INFO_LEN] {
    let mut out = [0; SESS_INFO_LEN];
    out[..2].copy_from_slice(&kind.to_le_bytes());
    out[4] = ver;
    out
}

/// Reads a SESS_INFO_RSP: the major version the server will use [NB-14]. `None` when it is short
/// or something else.
pub fn parse_sess_info_rsp(bytes: &[u8]) -> Option<u8> {
    let b: &[u8; SESS_INFO_LEN] = bytes.first_chunk()?;
    (u16::from_le_bytes([b[0], b[1]]) == SESS_INFO_RSP).then_some(b[4])
}

/// Writes an OPEN [NB-7]. `None` when the name is longer than 254 bytes or has a NUL in it.
pub fn emit_open(access: Access, name: &[u8]) -> Option<[u8; OPEN_LEN]> {
    if name.len() > NAME_MAX || name.contains(&0) {
        return None;
    }
    let mut out = [0; OPEN_LEN];
    out[..2].copy_from_slice(&OPEN.to_le_bytes());
    out[4] = access as u8;
    for (to, from) in out[NAME_AT..NAME_AT + NAME_MAX].iter_mut().zip(name) {
        *to = *from;
    }
    Some(out)
}

/// Writes a CLOSE [NB-8].
pub fn emit_close(id: u32) -> [u8; CLOSE_LEN] {
    let ([t0, t1], [i0, i1, i2, i3]) = (CLOSE.to_le_bytes(), id.to_le_bytes());
    [t0, t1, 0, 0, i0, i1, i2, i3]
}

/// Bit of [`OpenRsp::cache_policy`]: a write can be made durable by itself.
#[doc(alias = "RNBD_FUA")]
pub const CACHE_FUA: u8 = 1;
/// Bit of [`OpenRsp::cache_policy`]: writes are durable after a flush only.
#[doc(alias = "RNBD_WRITEBACK")]
pub const CACHE_WRITE_BACK: u8 = 2;

/// What a server says of a device it has opened [NB-9].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias = "rnbd_msg_open_rsp")]
pub struct OpenRsp {
    /// Its number in the session.
    pub device_id: u32,
    /// Size in sectors.
    pub nsectors: u64,
    /// Most sectors the backing device takes at once.
    pub max_hw_sectors: u32,
    /// Most sectors of one write of zeroes, 0 for not supported.
    pub max_write_zeroes_sectors: u32,
    /// Most sectors of one discard, 0 for not supported; may be more than a request can say
    /// [NB-59].
    pub max_discard_sectors: u32,
    /// Bytes a discard should be a multiple of.
    pub discard_granularity: u32,
    /// Bytes by which the first such multiple is off.
    pub discard_alignment: u32,
    /// Physical block in bytes.
    pub physical_block_size: u16,
    /// Logical block in bytes.
    pub logical_block_size: u16,
    /// Most pieces of memory the backing device takes at once.
    pub max_segments: u16,
    /// Not 0: secure erase is supported.
    pub secure_discard: u16,
    /// Not used any more.
    pub obsolete_rotational: u8,
    /// [`CACHE_FUA`] and [`CACHE_WRITE_BACK`].
    pub cache_policy: u8,
}

impl OpenRsp {
    /// Reads an OPEN_RSP. `None` when it is short or something else.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let b: &[u8; OPEN_RSP_LEN] = bytes.first_chunk()?;
        if u16::from_le_bytes([b[0], b[1]]) != OPEN_RSP {
            return None;
        }
        Some(Self {
            device_id: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
            nsectors: u64::from_le_bytes([b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]]),
            max_hw_sectors: u32::from_le_bytes([b[16], b[17], b[18], b[19]]),
            max_write_zeroes_sectors: u32::from_le_bytes([b[20], b[21], b[22], b[23]]),
            max_discard_sectors: u32::from_le_bytes([b[24], b[25], b[26], b[27]]),
            discard_granularity: u32::from_le_bytes([b[28], b[29], b[30], b[31]]),
            discard_alignment: u32::from_le_bytes([b[32], b[33], b[34], b[35]]),
            physical_block_size: u16::from_le_bytes([b[36], b[37]]),
            logical_block_size: u16::from_le_bytes([b[38], b[39]]),
            max_segments: u16::from_le_bytes([b[40], b[41]]),
            secure_discard: u16::from_le_bytes([b[42], b[43]]),
            obsolete_rotational: b[44],
            cache_policy: b[45],
        })
    }

    /// Writes an OPEN_RSP.
    pub fn emit(&self) -> [u8; OPEN_RSP_LEN] {
        let mut out = [0; OPEN_RSP_LEN];
        out[..2].copy_from_slice(&OPEN_RSP.to_le_bytes());
        out[4..8].copy_from_slice(&self.device_id.to_le_bytes());
        out[8..16].copy_from_slice(&self.nsectors.to_le_bytes());
        out[16..20].copy_from_slice(&self.max_hw_sectors.to_le_bytes());
        out[20..24].copy_from_slice(&self.max_write_zeroes_sectors.to_le_bytes());
        out[24..28].copy_from_slice(&self.max_discard_sectors.to_le_bytes());
        out[28..32].copy_from_slice(&self.discard_granularity.to_le_bytes());
        out[32..36].copy_from_slice(&self.discard_alignment.to_le_bytes());
        out[36..38].copy_from_slice(&self.physical_block_size.to_le_bytes());
        out[38..40].copy_from_slice(&self.logical_block_size.to_le_bytes());
        out[40..42].copy_from_slice(&self.max_segments.to_le_bytes());
        out[42..44].copy_from_slice(&self.secure_discard.to_le_bytes());
        out[44] = self.obsolete_rotational;
        out[45] = self.cache_policy;
        out
    }
}
