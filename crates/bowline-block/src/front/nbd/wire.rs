//! The NBD protocol's numbers, and requests. All numbers are big-endian.
//!
//! ```text
//!   request, 28 bytes:  magic u32 | flags u16 | command u16 | cookie u64 | offset u64 | length u32
//!   extended, 32 bytes: the same with another magic and a length of 64 bits
//! ```

use bowline_rnbd::Limits;

/// First of the server's greeting: `NBDMAGIC`.
pub(crate) const GREETING: u64 = 0x4e42_444d_4147_4943;
/// Second of the greeting, and first of every option: `IHAVEOPT`.
pub(crate) const OPTION: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;

pub(crate) const FIXED_NEWSTYLE: u16 = 1;
pub(crate) const NO_ZEROES: u16 = 2;

pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_STARTTLS: u32 = 5;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(crate) const OPT_SET_META_CONTEXT: u32 = 10;
pub(crate) const OPT_EXTENDED_HEADERS: u32 = 11;

pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_SERVER: u32 = 2;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;
/// What all replies that refuse an option have.
pub(crate) const REP_ERROR: u32 = 1 << 31;
pub(crate) const REP_ERR_UNSUP: u32 = 1 << 31 | 1;
pub(crate) const REP_ERR_POLICY: u32 = 1 << 31 | 2;
pub(crate) const REP_ERR_INVALID: u32 = 1 << 31 | 3;
pub(crate) const REP_ERR_TLS_REQD: u32 = 1 << 31 | 5;
pub(crate) const REP_ERR_UNKNOWN: u32 = 1 << 31 | 6;
pub(crate) const REP_ERR_TOO_BIG: u32 = 1 << 31 | 9;
pub(crate) const REP_ERR_EXT_HEADER_REQD: u32 = 1 << 31 | 10;

pub(crate) const INFO_EXPORT: u16 = 0;
pub(crate) const INFO_NAME: u16 = 1;
pub(crate) const INFO_BLOCK_SIZE: u16 = 3;

pub(crate) const HAS_FLAGS: u16 = 1;
pub(crate) const READ_ONLY: u16 = 1 << 1;
pub(crate) const SEND_FLUSH: u16 = 1 << 2;
pub(crate) const SEND_FUA: u16 = 1 << 3;
pub(crate) const SEND_TRIM: u16 = 1 << 5;
pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
const SEND_DF: u16 = 1 << 7;
const CAN_MULTI_CONN: u16 = 1 << 8;
const SEND_CACHE: u16 = 1 << 10;
const SEND_FAST_ZERO: u16 = 1 << 11;

pub(crate) const CMD_READ: u16 = 0;
pub(crate) const CMD_WRITE: u16 = 1;
pub(crate) const CMD_DISC: u16 = 2;
pub(crate) const CMD_FLUSH: u16 = 3;
pub(crate) const CMD_TRIM: u16 = 4;
pub(crate) const CMD_CACHE: u16 = 5;
pub(crate) const CMD_WRITE_ZEROES: u16 = 6;
pub(crate) const CMD_BLOCK_STATUS: u16 = 7;

pub(crate) const CMD_FLAG_FUA: u16 = 1;
pub(crate) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(crate) const CMD_FLAG_DF: u16 = 1 << 2;
pub(crate) const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub(crate) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
pub(crate) const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;

pub(crate) const SIMPLE_MAGIC: u32 = 0x6744_6698;
pub(crate) const STRUCTURED_MAGIC: u32 = 0x668e_33ef;

/// Flag of a chunk that no other one of its reply follows.
pub(crate) const DONE: u16 = 1;
/// Types of chunks. Those of errors have the highest bit.
pub(crate) const NONE: u16 = 0;
pub(crate) const OFFSET_DATA: u16 = 1;
pub(crate) const OFFSET_HOLE: u16 = 2;
pub(crate) const ERROR: u16 = 1 << 15 | 1;
pub(crate) const ERROR_OFFSET: u16 = 1 << 15 | 2;

/// Most data of one request in bytes: the limit for clients that have not negotiated one.
pub(crate) const MAX_PAYLOAD: u32 = 32 << 20;

/// How requests and replies look.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Format {
    /// A header with an error number, then the data of a read.
    #[default]
    Simple,
    /// Chunks with a type and a length, for reads and for errors.
    Structured,
    /// Requests and chunks have lengths of 64 bits, and every reply is a chunk.
    Extended,
}

/// Length of the longest header of a request in bytes.
pub(crate) const REQUEST_MAX: usize = Format::Extended.request_len();

impl Format {
    /// Returns the length of a request's header in bytes.
    pub(crate) const fn request_len(self) -> usize {
        match self {
            Self::Simple | Self::Structured => 28,
            Self::Extended => 32,
        }
    }
}

/// What a client has negotiated before its first request.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Session {
    /// Its requests and replies.
    pub format: Format,
    /// The client has selected the context `base:allocation`, so it may ask for block status.
    pub has_allocation: bool,
}

/// Returns the transmission flags of an export. [NB-53]
pub(crate) fn transmission_flags(limits: &Limits, session: Session) -> u16 {
    // Flushes act on the disk, so they cover the writes of all connections.
    let mut flags = HAS_FLAGS | CAN_MULTI_CONN | SEND_CACHE;
    let can_zero = limits.max_write_zeroes > 0 && !limits.read_only;
    for (has, flag) in [
        (limits.read_only, READ_ONLY),
        (limits.write_cache, SEND_FLUSH),
        (limits.fua, SEND_FUA),
        (limits.discard.is_some() && !limits.read_only, SEND_TRIM),
        (can_zero, SEND_WRITE_ZEROES | SEND_FAST_ZERO),
        (session.format != Format::Simple, SEND_DF),
    ] {
        flags |= if has { flag } else { 0 };
    }
    flags
}

/// A request, without its data.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Request {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Request {
    /// Parses a request. `None` if the magic is wrong: the stream cannot be parsed any further.
    pub(crate) fn parse(format: Format, bytes: &[u8]) -> Option<Self> {
        let mut at = Fields(bytes);
        let magic = at.u32()?;
        let (flags, command) = (at.u16()?, at.u16()?);
        let (cookie, offset) = (at.u64()?, at.u64()?);
        let (wanted, len) = match format {
            Format::Simple | Format::Structured => (REQUEST_MAGIC, at.u32()?.into()),
            Format::Extended => (EXTENDED_REQUEST_MAGIC, at.u64()?),
        };
        (magic == wanted).then_some(Self { flags, command, cookie, offset, len })
    }

    /// Returns how many bytes of data follow the header. QEMU sends the data of extended writes
    /// without saying so; no client sends a write without data.
    pub(crate) fn payload(&self, format: Format) -> u64 {
        let says_so = format == Format::Extended && self.flags & CMD_FLAG_PAYLOAD_LEN != 0;
        if says_so || self.command == CMD_WRITE { self.len } else { 0 }
    }
}

pub(crate) const EPERM: u32 = 1;
pub(crate) const EIO: u32 = 5;
pub(crate) const ENOMEM: u32 = 12;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;
pub(crate) const ENOTSUP: u32 = 95;
pub(crate) const ESHUTDOWN: u32 = 108;

/// Converts an errno of a disk, which is negative, to an NBD error number. EOVERFLOW and ENOTSUP
/// are not among the results: in NBD they are answers to flags of requests.
pub(crate) fn error_number(errno: i32) -> u32 {
    match -errno {
        libc::EPERM | libc::EACCES | libc::EROFS => EPERM,
        libc::ENOMEM => ENOMEM,
        libc::EINVAL | libc::EOPNOTSUPP => EINVAL,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ENOSPC,
        libc::ESHUTDOWN => ESHUTDOWN,
        _ => EIO,
    }
}

/// Reads numbers from a message.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.bytes(2)?.try_into().ok().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.bytes(4)?.try_into().ok().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.bytes(8)?.try_into().ok().map(u64::from_be_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_parsed_and_noise_is_not() {
        let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6];
        bytes.extend(7_u64.to_be_bytes());
        bytes.extend(4096_u64.to_be_bytes());
        bytes.extend(512_u32.to_be_bytes());
        let request = Request { flags: 1, command: 6, cookie: 7, offset: 4096, len: 512 };
        assert_eq!(Request::parse(Format::Structured, &bytes), Some(request));
        assert_eq!(Request::parse(Format::Simple, &bytes[..27]), None);
        assert_eq!(Request::parse(Format::Extended, &bytes), None);
        bytes[3] = 0;
        assert_eq!(Request::parse(Format::Simple, &bytes), None);

        bytes[..8].copy_from_slice(&[0x21, 0xe4, 0x1c, 0x71, 0, 0x20, 0, 1]);
        bytes.splice(24.., (1_u64 << 40).to_be_bytes());
        let request = Request { flags: 0x20, command: 1, cookie: 7, offset: 4096, len: 1 << 40 };
        assert_eq!(Request::parse(Format::Extended, &bytes), Some(request));
        assert_eq!(Request::parse(Format::Extended, &bytes[..31]), None);
        assert_eq!(Request::parse(Format::Simple, &bytes), None);
    }

    #[test]
    fn flags_say_what_the_disk_can_do() {
        // tests [NB-53]
        let plain = Limits::plain(1 << 20);
        let flags_of = |limits: &_| transmission_flags(limits, Session::default());
        let always = HAS_FLAGS | CAN_MULTI_CONN | SEND_CACHE;
        assert_eq!(flags_of(&plain), always);
        let discard = bowline_rnbd::Discard { max_bytes: 1, granularity: 1, alignment: 0 };
        let all = Limits {
            discard: Some(discard),
            max_write_zeroes: 1,
            write_cache: true,
            fua: true,
            ..plain
        };
        let changes = SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO;
        let more = SEND_FLUSH | SEND_FUA | changes;
        assert_eq!(flags_of(&all), always | more);
        let ro = Limits { read_only: true, ..all };
        assert_eq!(flags_of(&ro) & (READ_ONLY | changes), READ_ONLY);
        assert_eq!(flags_of(&Limits { fua: false, ..all }) & SEND_FUA, 0);
        let structured =
            transmission_flags(&all, Session { format: Format::Structured, has_allocation: false });
        assert_eq!(structured, flags_of(&all) | SEND_DF);
    }
}
