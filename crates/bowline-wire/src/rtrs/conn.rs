//! CON_REQ and CON_RSP, the private data of connecting.
//!
//! ```text
//!     CON_REQ                                  CON_RSP
//!     0  2  4        6    8        10          0      2        4      6            8       12
//!     +--+--+--------+----+--------+-------+   +------+--------+------+------------+-------+
//!     |0 |mg| version|cid |cid_num |recon  |   |magic | version| errno| queue_depth| max_io|
//!     +--+--+--------+----+--------+-------+   +------+--------+------+------------+-------+
//!  12 | path UUID (16)                     |12 | max_hdr       | flags (16)        | 0 ..  |
//!  28 | session UUID (16)                  |45 | notices: 0, or "gu1"                      |
//!  44 | bit 0: first connection            |48 | counted keys: 0, or "bowline1"            |
//!  45 | notices: 0, or "gu1"               |   +-------------------------------------------+
//!  48 | counts keys: 0, or "bowline1"      |
//!     +------------------------------------+
//! ```

use core::fmt;

use super::{CON_LEN, Geometry, GeometryError, MAGIC, MAX_CONNECTIONS, Uuid, VERSION};

/// Bit of CON_REQ: the session may be new [RT-34].
const FIRST_CONN: u8 = 1;
/// The last bytes of both, where kernels have zeros and ignore them: the client counts keys, and
/// the server does not send them [RT-99].
const COUNTED_KEYS: [u8; 8] = *b"bowline1";
const COUNTED_KEYS_AT: usize = CON_LEN - COUNTED_KEYS.len();
/// The bytes before it in both: the client gives notice of paths it has given up, and the server
/// accepts such notices [RT-101].
const NOTICES: [u8; 3] = *b"gu1";
const NOTICES_AT: usize = COUNTED_KEYS_AT - NOTICES.len();
/// Flag of CON_RSP: keys are renewed with every reply [RT-4].
const NEW_RKEY: u32 = 0x2;

/// Why a CON_REQ is refused; all are answered with ECONNRESET [RT-28].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConReqError {
    /// Fewer than 56 bytes; how many.
    Short(usize),
    /// Another magic number.
    Magic(u16),
    /// Another major version.
    Version(u16),
    /// More connections than a path can have.
    Connections(u16),
    /// A connection beyond the number of connections.
    Cid {
        /// Its index.
        cid: u16,
        /// Their number.
        cid_num: u16,
    },
}

impl fmt::Display for ConReqError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short(len) => write!(f, "connect request of {len} bytes"),
            Self::Magic(magic) => write!(f, "connect request with magic {magic:#06x}"),
            Self::Version(version) => write!(f, "connect request of version {version:#06x}"),
            Self::Connections(number) => write!(f, "path of {number} connections"),
            Self::Cid { cid, cid_num } => write!(f, "connection {cid} of {cid_num}"),
        }
    }
}

impl core::error::Error for ConReqError {}

/// What a client asks with a connect [RT-1].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "rtrs_msg_conn_req")]
pub struct ConReq {
    /// Index of the connection.
    pub cid: u16,
    /// Number of connections of the path, 1 to 4096.
    pub cid_num: u16,
    /// How often the path was tried, modulo 2^16, 1 at first [RT-33].
    pub recon_cnt: u16,
    /// The path.
    #[doc(alias = "sess_uuid")]
    pub path: Uuid,
    /// The session.
    #[doc(alias = "paths_uuid")]
    pub session: Uuid,
    /// The session may be new; else it must exist [RT-34].
    #[doc(alias = "first_conn")]
    pub first: bool,
    /// The client knows how keys are renewed, and need not be told them [RT-99].
    pub counts_keys: bool,
    /// The client gives notice of paths it has given up, if the server accepts notices [RT-101].
    pub gives_notice: bool,
}

impl ConReq {
    /// Reads the private data of a connect; what is behind the 56 bytes and what stays reserved is
    /// not looked at [RT-2] [RT-28] [RT-68].
    ///
    /// # Errors
    /// [`ConReqError`], the first in the order of the rule.
    pub fn parse(bytes: &[u8]) -> Result<Self, ConReqError> {
        let b: &[u8; CON_LEN] = bytes.first_chunk().ok_or(ConReqError::Short(bytes.len()))?;
        let magic = u16::from_le_bytes([b[2], b[3]]);
        if magic != MAGIC {
            return Err(ConReqError::Magic(magic));
        }
        let version = u16::from_le_bytes([b[4], b[5]]);
        if version >> 8 != VERSION >> 8 {
            return Err(ConReqError::Version(version));
        }
        let (cid, cid_num) = (u16::from_le_bytes([b[6], b[7]]), u16::from_le_bytes([b[8], b[9]]));
        if cid_num > MAX_CONNECTIONS {
            return Err(ConReqError::Connections(cid_num));
        }
        if cid >= cid_num {
            return Err(ConReqError::Cid { cid, cid_num });
        }
        let recon_cnt = u16::from_le_bytes([b[10], b[11]]);
        let (mut path, mut session) = (Uuid::default(), Uuid::default());
        path.0.copy_from_slice(&b[12..28]);
        session.0.copy_from_slice(&b[28..44]);
        let (first, counts_keys) = (b[44] & FIRST_CONN != 0, b[COUNTED_KEYS_AT..] == COUNTED_KEYS);
        let gives_notice = b[NOTICES_AT..COUNTED_KEYS_AT] == NOTICES;
        Ok(Self { cid, cid_num, recon_cnt, path, session, first, counts_keys, gives_notice })
    }

    /// Writes the private data of a connect.
    pub fn emit(&self) -> [u8; CON_LEN] {
        let mut out = [0; CON_LEN];
        out[2..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&self.cid.to_le_bytes());
        out[8..10].copy_from_slice(&self.cid_num.to_le_bytes());
        out[10..12].copy_from_slice(&self.recon_cnt.to_le_bytes());
        out[12..28].copy_from_slice(&self.path.0);
        out[28..44].copy_from_slice(&self.session.0);
        out[44] = if self.first { FIRST_CONN } else { 0 };
        if self.counts_keys {
            out[COUNTED_KEYS_AT..].copy_from_slice(&COUNTED_KEYS);
        }
        if self.gives_notice {
            out[NOTICES_AT..COUNTED_KEYS_AT].copy_from_slice(&NOTICES);
        }
        out
    }
}

/// Why a server's answer to a connect cannot be used; ECONNRESET to the caller [RT-30] [RT-31].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConRspError {
    /// Fewer than 56 bytes; how many.
    Short(usize),
    /// Another magic number.
    Magic(u16),
    /// Another major version.
    Version(u16),
    /// An acceptance with invalid numbers. A client evaluates them on connection 0 only [RT-5].
    Geometry(GeometryError),
}

impl fmt::Display for ConRspError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short(len) => write!(f, "answer to a connect of {len} bytes"),
            Self::Magic(magic) => write!(f, "answer to a connect with magic {magic:#06x}"),
            Self::Version(version) => write!(f, "answer to a connect of version {version:#06x}"),
            Self::Geometry(error) => write!(f, "server announces {error}"),
        }
    }
}

impl core::error::Error for ConRspError {}

/// What a server announces when it accepts [RT-4].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "rtrs_msg_conn_rsp")]
pub struct ConRsp {
    /// Number and size of the chunks.
    pub geometry: Geometry,
    /// Every reply brings a new key of its chunk [RT-50].
    #[doc(alias = "RTRS_MSG_NEW_RKEY_F")]
    pub new_rkey: bool,
    /// Every reply renews the key of its chunk: it is the next one [RT-99].
    pub counted_keys: bool,
    /// The server ends paths of which it gets notice that they are given up [RT-101].
    pub accepts_notice: bool,
}

/// A server's answer to a connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConAnswer {
    /// Accepted.
    Accepted(ConRsp),
    /// Refused, with the magnitude of an errno. ECONNRESET has other causes too [RT-28].
    Refused(u16),
}

impl ConAnswer {
    /// Reads the private data of the CM's REP or REJ, in the order of the rules [RT-30] [RT-32].
    ///
    /// # Errors
    /// [`ConRspError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ConRspError> {
        let b: &[u8; CON_LEN] = bytes.first_chunk().ok_or(ConRspError::Short(bytes.len()))?;
        let magic = u16::from_le_bytes([b[0], b[1]]);
        if magic != MAGIC {
            return Err(ConRspError::Magic(magic));
        }
        let version = u16::from_le_bytes([b[2], b[3]]);
        if version >> 8 != VERSION >> 8 {
            return Err(ConRspError::Version(version));
        }
        let errno = i16::from_le_bytes([b[4], b[5]]).unsigned_abs();
        if errno != 0 {
            return Ok(Self::Refused(errno));
        }
        let queue_depth = u16::from_le_bytes([b[6], b[7]]);
        let max_io = u32::from_le_bytes([b[8], b[9], b[10], b[11]]);
        let max_hdr = u32::from_le_bytes([b[12], b[13], b[14], b[15]]);
        let flags = u32::from_le_bytes([b[16], b[17], b[18], b[19]]);
        let geometry =
            Geometry::new(queue_depth, max_io, max_hdr).map_err(ConRspError::Geometry)?;
        let counted_keys = b[COUNTED_KEYS_AT..] == COUNTED_KEYS;
        let new_rkey = flags & NEW_RKEY != 0;
        let accepts_notice = b[NOTICES_AT..COUNTED_KEYS_AT] == NOTICES;
        Ok(Self::Accepted(ConRsp { geometry, new_rkey, counted_keys, accepts_notice }))
    }

    /// Writes the private data of the CM's REP or REJ [RT-4] [RT-29].
    pub fn emit(&self) -> [u8; CON_LEN] {
        let mut out = [0; CON_LEN];
        out[..2].copy_from_slice(&MAGIC.to_le_bytes());
        out[2..4].copy_from_slice(&VERSION.to_le_bytes());
        match self {
            Self::Accepted(ConRsp { geometry, new_rkey, counted_keys, accepts_notice }) => {
                let flags = if *new_rkey { NEW_RKEY } else { 0 };
                if *counted_keys {
                    out[COUNTED_KEYS_AT..].copy_from_slice(&COUNTED_KEYS);
                }
                if *accepts_notice {
                    out[NOTICES_AT..COUNTED_KEYS_AT].copy_from_slice(&NOTICES);
                }
                out[6..8].copy_from_slice(&geometry.queue_depth().to_le_bytes());
                out[8..12].copy_from_slice(&geometry.max_io().to_le_bytes());
                out[12..16].copy_from_slice(&geometry.max_hdr().to_le_bytes());
                out[16..20].copy_from_slice(&flags.to_le_bytes());
            }
            Self::Refused(errno) => {
                out[4..6].copy_from_slice(&errno.wrapping_neg().to_le_bytes());
            }
        }
        out
    }
}
