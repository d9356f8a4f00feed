//! RNBD: the messages of a block device over RTRS. Each is the user message of an RTRS request.
//!
//! | message | bytes | RTRS direction | comes back |
//! |---|---|---|---|
//! | SESS_INFO | 36 | READ | SESS_INFO_RSP, 36 bytes |
//! | OPEN | 264 | READ | OPEN_RSP, 56 bytes |
//! | CLOSE | 8 | WRITE | nothing but success |
//! | IO | 32 | by its operation [NB-2] | data, and an errno |
//!
//! All begin with a type and two bytes that nobody looks at [NB-4] [NB-5]. All integers are
//! little-endian; a sector is 512 bytes. Spec: `docs/spec/rnbd.md`, sections 2 and 6.

mod errno;
mod io;
mod msg;

pub use errno::status_of_errno;
pub use io::{
    IO_LEN, Io, IoFlags, OP_DISCARD, OP_FLUSH, OP_READ, OP_SECURE_ERASE, OP_WRITE, OP_WRITE_ZEROES,
};
pub use msg::{
    Access, CACHE_FUA, CACHE_WRITE_BACK, CLOSE_LEN, MsgError, NAME_MAX, OPEN_LEN, OPEN_RSP_LEN,
    OpenRsp, Request, SESS_INFO_LEN, VERSION_MAJOR, emit_close, emit_open, emit_sess_info,
    emit_sess_info_rsp, parse, parse_sess_info_rsp,
};

/// Bytes of a sector, whatever the block size of a device.
pub const SECTOR: u32 = 512;

/// Message types [NB-4].
const SESS_INFO: u16 = 0;
const SESS_INFO_RSP: u16 = 1;
const OPEN: u16 = 2;
const OPEN_RSP: u16 = 3;
const IO: u16 = 4;
const CLOSE: u16 = 5;
