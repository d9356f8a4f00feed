//! RTRS: the messages of the RDMA transport library, and the immediates of its requests.
//!
//! ```text
//!     client                                               server
//!       CON_REQ  (56 bytes in the CM's REQ)       ->
//!                                                 <-  CON_RSP (56 bytes in the REP or REJ)
//!       INFO_REQ (272 bytes, SEND)                ->
//!                                                 <-  INFO_RSP (8 + 16 per descriptor, SEND)
//!       data, user message, WRITE or READ header,
//!       RDMA WRITE into a chunk with immediate    ->
//!                                                 <-  data by RDMA WRITE
//!                                                 <-  immediate, with RKEY_RSP (8 bytes) if keys
//!                                                     are renewed, unless they are counted
//!                                                     [RT-99]
//! ```
//! All integers of messages are little-endian. An immediate is the number in its header, whose
//! byte order is the transport's affair. Spec: `docs/spec/rtrs.md`, sections 1 and 2.

mod conn;
mod geometry;
mod given_up;
mod imm;
mod info;
mod io;

pub use conn::{ConAnswer, ConReq, ConReqError, ConRsp, ConRspError};
pub use geometry::{Geometry, GeometryError};
pub use given_up::{INFO_REQ_MAX, PathLife, emit_given_up, parse_given_up};
pub use imm::{ERRNO_MAX, Imm};
pub use info::{
    Desc, InfoError, NameError, SessionName, emit_info_req, emit_info_rsp, info_rsp_len,
    parse_info_req, parse_info_rsp,
};
pub use io::{
    IoError, IoHdr, IoReq, READ_HDR_MAX, RkeyRsp, RkeyRspError, WRITE_HDR_LEN, parse_io, read_hdr,
    write_hdr,
};

use core::fmt;

/// First number of a connection's messages [RT-1].
#[doc(alias = "RTRS_MAGIC")]
pub const MAGIC: u16 = 0x1bbd;
/// Version 2.0; the major version is the high byte [RT-1].
#[doc(alias = "RTRS_PROTO_VER")]
pub const VERSION: u16 = 0x0200;
/// Bytes of CON_REQ and of CON_RSP [RT-1] [RT-4].
pub const CON_LEN: usize = 56;
/// Bytes of INFO_REQ [RT-6].
pub const INFO_REQ_LEN: usize = 272;
/// Bytes of RKEY_RSP [RT-13].
pub const RKEY_RSP_LEN: usize = 8;
/// Bytes of one descriptor [RT-8].
#[doc(alias = "rtrs_sg_desc")]
pub const DESC_LEN: usize = 16;
/// Port a server listens on, unless told otherwise [NB-1].
pub const PORT: u16 = 1234;
/// Most connections of a path [RT-28].
pub const MAX_CONNECTIONS: u16 = 4096;
/// Most paths of a session.
#[doc(alias = "MAX_PATHS_NUM")]
pub const MAX_PATHS: usize = 128;
/// Most chunks of a session [RT-16].
#[doc(alias = "MAX_SESS_QUEUE_DEPTH")]
pub const MAX_QUEUE_DEPTH: u32 = 65535;
/// Smallest chunk in bytes [RT-16].
#[doc(alias = "MIN_CHUNK_SIZE")]
pub const MIN_CHUNK: u32 = 8192;

/// The number 128 bits long that tells a path or a session from every other.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Makes a random UUID (version 4) of random bytes.
    pub const fn from_random(random: [u8; 16]) -> Self {
        let mut bytes = random;
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Self(bytes)
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            let dash = if matches!(i, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uuid({self})")
    }
}

/// Which way the data of a request goes, as the client sees it. A request without data has a
/// direction too: that of its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dir {
    /// Server to client.
    Read,
    /// Client to server.
    Write,
}
