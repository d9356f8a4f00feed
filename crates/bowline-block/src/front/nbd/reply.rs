//! The bytes of replies. All numbers are big-endian.
//!
//! ```text
//!   simple,     16 bytes:  magic u32 | error u32 | cookie u64, then the data of a read
//!   structured, 20 bytes:  magic u32 | flags u16 | type u16 | cookie u64 | length u32
//!     OFFSET_DATA           offset u64, data                     one for each read
//!     ERROR                 error u32 | text length u16, text
//!     ERROR_OFFSET          the same, then offset u64
//!     BLOCK_STATUS          context u32 | for each extent: length u32, state u32
//!   extended,   32 bytes:  magic u32 | flags u16 | type u16 | cookie u64 | offset u64 | length u64
//!     BLOCK_STATUS_EXT      context u32 | count u32 | for each extent: length u64, state u64
//! ```
//!
//! A structured or extended reply is a single chunk here: the data of a read comes from the disk in
//! one piece. With structured replies negotiated, successes without data remain simple replies.

use super::contexts::ALLOCATION_ID;
use super::wire::{
    DONE, ERROR, ERROR_OFFSET, Format, NONE, OFFSET_DATA, SIMPLE_MAGIC, STRUCTURED_MAGIC,
};

const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

const BLOCK_STATUS: u16 = 5;
const BLOCK_STATUS_EXT: u16 = 6;

/// Longest text of an error in bytes, far below the protocol's 4096.
const TEXT_MAX: usize = 256;
/// Length of the longest head: an extended header, and the offset of data.
const HEAD_MAX: usize = 40;

/// The first bytes of a reply, before data or a [tail](Failure).
#[derive(Clone, Copy)]
pub(super) struct Head {
    bytes: [u8; HEAD_MAX],
    len: u8,
}

impl std::fmt::Debug for Head {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Head").field(&self.bytes()).finish()
    }
}

impl Head {
    const fn new() -> Self {
        Self { bytes: [0; HEAD_MAX], len: 0 }
    }

    fn with(mut self, bytes: &[u8]) -> Self {
        let at = usize::from(self.len);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len() as u8;
        self
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// The request that a reply belongs to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Origin {
    pub(super) cookie: u64,
    pub(super) is_read: bool,
    pub(super) offset: u64,
}

/// An error for the client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Failure<'a> {
    /// NBD's error number.
    pub(super) error: u32,
    /// For people; simple replies do not have it.
    pub(super) text: &'a str,
    /// Where on the disk, if that is known: within the request.
    pub(super) at: Option<u64>,
}

/// Consecutive bytes with the same state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Descriptor {
    pub(super) len: u64,
    /// Flags of `base:allocation`: 0 where nothing is known.
    pub(super) state: u32,
}

/// Builds the head of a success. `len` bytes of data follow a read.
pub(super) fn success(format: Format, to: Origin, len: u32) -> Head {
    match format {
        Format::Structured | Format::Extended if to.is_read && len > 0 => {
            chunk(format, to, OFFSET_DATA, 8 + len).with(&to.offset.to_be_bytes())
        }
        Format::Structured if to.is_read => chunk(format, to, NONE, 0),
        Format::Extended => chunk(format, to, NONE, 0),
        Format::Simple | Format::Structured => simple(to, 0),
    }
}

/// Builds the head and the tail of an error.
pub(super) fn failure(format: Format, to: Origin, failure: &Failure<'_>) -> (Head, Box<[u8]>) {
    if format == Format::Simple {
        return (simple(to, failure.error), Box::default());
    }
    let mut end = failure.text.len().min(TEXT_MAX);
    while !failure.text.is_char_boundary(end) {
        end -= 1;
    }
    let text = &failure.text.as_bytes()[..end];
    let mut tail = Vec::with_capacity(14 + end);
    tail.extend(failure.error.to_be_bytes());
    tail.extend((end as u16).to_be_bytes());
    tail.extend(text);
    let kind = match failure.at {
        Some(at) => {
            tail.extend(at.to_be_bytes());
            ERROR_OFFSET
        }
        None => ERROR,
    };
    (chunk(format, to, kind, tail.len() as u32), tail.into())
}

/// Builds the head and the tail of a reply to NBD_CMD_BLOCK_STATUS, which clients send only with
/// chunks. Lengths are multiples of `block`.
pub(super) fn status(
    format: Format,
    to: Origin,
    extents: &[Descriptor],
    block: u32,
) -> (Head, Box<[u8]>) {
    let mut tail = Vec::with_capacity(8 + 16 * extents.len());
    tail.extend(ALLOCATION_ID.to_be_bytes());
    if format == Format::Extended {
        tail.extend((extents.len() as u32).to_be_bytes());
        for extent in extents {
            tail.extend(extent.len.to_be_bytes());
            tail.extend(u64::from(extent.state).to_be_bytes());
        }
        return (chunk(format, to, BLOCK_STATUS_EXT, tail.len() as u32), tail.into());
    }
    for extent in extents {
        // Only the last extent may be longer than a request.
        let len = u32::try_from(extent.len).unwrap_or(u32::MAX - u32::MAX % block);
        tail.extend(len.to_be_bytes());
        tail.extend(extent.state.to_be_bytes());
    }
    (chunk(format, to, BLOCK_STATUS, tail.len() as u32), tail.into())
}

fn simple(to: Origin, error: u32) -> Head {
    Head::new()
        .with(&SIMPLE_MAGIC.to_be_bytes())
        .with(&error.to_be_bytes())
        .with(&to.cookie.to_be_bytes())
}

/// Builds the header of the only chunk of a reply.
fn chunk(format: Format, to: Origin, kind: u16, len: u32) -> Head {
    let is_extended = format == Format::Extended;
    let magic = if is_extended { EXTENDED_MAGIC } else { STRUCTURED_MAGIC };
    let head = Head::new()
        .with(&magic.to_be_bytes())
        .with(&DONE.to_be_bytes())
        .with(&kind.to_be_bytes())
        .with(&to.cookie.to_be_bytes());
    if is_extended {
        head.with(&to.offset.to_be_bytes()).with(&u64::from(len).to_be_bytes())
    } else {
        head.with(&len.to_be_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Origin = Origin { cookie: 7, is_read: true, offset: 4096 };
    const WRITE: Origin = Origin { is_read: false, ..READ };

    #[test]
    fn simple_replies_have_an_error_number() {
        let cookie = [0, 0, 0, 0, 0, 0, 0, 7];
        let simple = |error| [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, error], &cookie[..]].concat();
        assert_eq!(success(Format::Simple, READ, 512).bytes(), simple(0));
        assert_eq!(success(Format::Structured, WRITE, 512).bytes(), simple(0));
        let wrong = Failure { error: 22, text: "wrong", at: Some(4096) };
        let (head, tail) = failure(Format::Simple, READ, &wrong);
        assert_eq!((head.bytes(), &*tail), (&simple(22)[..], &[][..]));
    }

    #[test]
    fn chunks_have_a_type_and_the_length_of_what_follows() {
        let head = |kind: u16, len: u32| {
            let mut out = vec![0x66, 0x8e, 0x33, 0xef, 0, 1];
            out.extend(kind.to_be_bytes());
            out.extend(7_u64.to_be_bytes());
            out.extend(len.to_be_bytes());
            out
        };
        let data = success(Format::Structured, READ, 512);
        assert_eq!(data.bytes(), [head(1, 520), 4096_u64.to_be_bytes().to_vec()].concat());
        assert_eq!(success(Format::Structured, READ, 0).bytes(), head(0, 0));
        let mut wrong = Failure { error: 22, text: "wrong", at: None };
        let (begin, tail) = failure(Format::Structured, WRITE, &wrong);
        assert_eq!(begin.bytes(), head(0x8001, 11));
        assert_eq!(*tail, *b"\0\0\0\x16\0\x05wrong");
        wrong.at = Some(8192);
        let (begin, tail) = failure(Format::Structured, READ, &wrong);
        assert_eq!(begin.bytes(), head(0x8002, 19));
        assert_eq!(*tail, *b"\0\0\0\x16\0\x05wrong\0\0\0\0\0\0\x20\0");
    }

    #[test]
    fn an_extent_beyond_a_request_is_cut_to_what_can_be_said() {
        let extents = [Descriptor { len: 4096, state: 3 }, Descriptor { len: 1 << 40, state: 0 }];
        let (head, tail) = status(Format::Structured, WRITE, &extents, 4096);
        assert_eq!(head.bytes()[4..8], [0, 1, 0, 5]);
        assert_eq!(head.bytes()[16..], 20_u32.to_be_bytes());
        let cut = [0xff, 0xff, 0xf0, 0, 0, 0, 0, 0];
        assert_eq!(*tail, [&[0, 0, 0, 1, 0, 0, 0x10, 0, 0, 0, 0, 3], &cut[..]].concat());
    }

    #[test]
    fn extended_chunks_have_the_offset_of_the_request_and_long_lengths() {
        let head = |kind: u16, len: u64| {
            let mut out = vec![0x6e, 0x8a, 0x27, 0x8c, 0, 1];
            out.extend(kind.to_be_bytes());
            out.extend([7, 4096, len].map(u64::to_be_bytes).concat());
            out
        };
        let data = success(Format::Extended, READ, 512);
        assert_eq!(data.bytes(), [head(1, 520), 4096_u64.to_be_bytes().to_vec()].concat());
        assert_eq!(success(Format::Extended, WRITE, 512).bytes(), head(0, 0));
        assert_eq!(success(Format::Extended, READ, 0).bytes(), head(0, 0));
        let wrong = Failure { error: 22, text: "wrong", at: None };
        let (begin, tail) = failure(Format::Extended, WRITE, &wrong);
        assert_eq!((begin.bytes(), &*tail), (&*head(0x8001, 11), &b"\0\0\0\x16\0\x05wrong"[..]));
        let extents = [Descriptor { len: 4096, state: 3 }, Descriptor { len: 1 << 40, state: 0 }];
        let (begin, tail) = status(Format::Extended, WRITE, &extents, 4096);
        assert_eq!(begin.bytes(), head(6, 40));
        let pairs = [4096, 3, 1 << 40, 0].map(u64::to_be_bytes).concat();
        assert_eq!(*tail, [&[0, 0, 0, 1, 0, 0, 0, 2], &pairs[..]].concat());
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let text = "\u{e9}".repeat(5000);
        let wrong = Failure { error: 5, text: &text, at: None };
        let (head, tail) = failure(Format::Structured, WRITE, &wrong);
        assert!(std::str::from_utf8(&tail[6..]).is_ok());
        assert_eq!(head.bytes()[16..], (tail.len() as u32).to_be_bytes());
        assert_eq!(tail.len(), 6 + TEXT_MAX);
    }
}
