//! What the server sends after the handshake: simple replies and chunks. A server that lies breaks
//! its own connection: each cookie, type, length and offset is checked before it is used, and a
//! read has succeeded only if every one of its bytes came exactly once.

use std::collections::HashMap;
use std::io::{self, Read};

use super::handshake::invalid;
use super::wire::{self, Fields};

/// Bytes of data that are read at once.
const PIECE: usize = 128 << 10;
/// Longest chunk of an error in bytes: two numbers and a text of at most 4096.
const ERROR_MAX: u32 = 4096 + 64;
/// Most stretches with gaps between them in the reply to one read.
const STRETCHES_MAX: usize = 1024;

/// A request in flight.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Asked {
    /// It is a read: data comes back.
    pub is_read: bool,
    /// First byte on the disk.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
}

/// The requests in flight, by their cookies.
pub(crate) trait Requests {
    /// Returns a request that the server was sent and has not answered.
    fn find(&mut self, cookie: u64) -> Option<Asked>;
    /// Takes data of a read, from byte `at` of it on: within the read, and not twice.
    fn data(&mut self, cookie: u64, at: u32, bytes: &[u8]);
    /// The request has ended, with this error number of NBD, or 0.
    fn ended(&mut self, cookie: u64, error: u32);
}

/// Reads replies.
#[derive(Debug)]
pub(crate) struct Replies {
    is_structured: bool,
    /// Reads of which chunks have come, but not the last one.
    partial: HashMap<u64, Partial>,
    piece: Vec<u8>,
}

/// What has come of the reply to a request.
#[derive(Debug, Default)]
struct Partial {
    /// Error number of the first chunk with an error.
    error: u32,
    covered: Covered,
}

/// The bytes of a read that have come: stretches, sorted, with gaps between them.
#[derive(Debug, Default)]
struct Covered(Vec<(u32, u32)>);

impl Covered {
    /// Adds bytes from `begin` up to `end`. Returns false if some were there, or the stretches are
    /// too many.
    fn add(&mut self, begin: u32, end: u32) -> bool {
        let at = self.0.partition_point(|stretch| stretch.1 < begin);
        match self.0.get(at).copied() {
            Some((other, last)) if last == begin => {
                // Behind it, and perhaps up to the next one.
                let next = self.0.get(at + 1).copied();
                if next.is_some_and(|next| next.0 < end) {
                    return false;
                }
                let joins = next.is_some_and(|next| next.0 == end);
                self.0[at] = (other, if joins { next.map_or(end, |next| next.1) } else { end });
                if joins {
                    self.0.remove(at + 1);
                }
                true
            }
            Some((other, _)) if other < end => false,
            Some((other, last)) if other == end => {
                self.0[at] = (begin, last);
                true
            }
            _ if self.0.len() >= STRETCHES_MAX => false,
            _ => {
                self.0.insert(at, (begin, end));
                true
            }
        }
    }

    /// Tells whether these are all of `len` bytes.
    fn is_all(&self, len: u32) -> bool {
        len == 0 || self.0 == [(0, len)]
    }
}

impl Replies {
    /// Makes a reader of one connection.
    pub(crate) fn new(is_structured: bool) -> Self {
        Self { is_structured, partial: HashMap::new(), piece: vec![0; PIECE] }
    }

    /// Reads one reply, or one chunk of it.
    ///
    /// # Errors
    /// `InvalidData` when the server breaks the rules, and errors of the stream. Nothing can be
    /// read from it any more.
    pub(crate) fn next(
        &mut self,
        stream: &mut impl Read,
        requests: &mut impl Requests,
    ) -> io::Result<()> {
        let mut magic = [0; 4];
        stream.read_exact(&mut magic)?;
        match u32::from_be_bytes(magic) {
            wire::SIMPLE_MAGIC => self.simple(stream, requests),
            wire::STRUCTURED_MAGIC if self.is_structured => self.chunk(stream, requests),
            _ => Err(invalid("something that is not a reply")),
        }
    }

    fn simple(&mut self, stream: &mut impl Read, requests: &mut impl Requests) -> io::Result<()> {
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        let mut at = Fields(&head);
        let (Some(error), Some(cookie)) = (at.u32(), at.u64()) else {
            return Err(invalid("a reply that is cut off"));
        };
        let asked = find(requests, cookie)?;
        if self.partial.contains_key(&cookie) || (self.is_structured && asked.is_read) {
            return Err(invalid("a reply of the wrong kind"));
        }
        if asked.is_read && error == 0 {
            self.data(stream, requests, cookie, 0, asked.len)?;
        }
        requests.ended(cookie, error);
        Ok(())
    }

    fn chunk(&mut self, stream: &mut impl Read, requests: &mut impl Requests) -> io::Result<()> {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let mut at = Fields(&head);
        let (Some(flags), Some(kind), Some(cookie), Some(len)) =
            (at.u16(), at.u16(), at.u64(), at.u32())
        else {
            return Err(invalid("a chunk that is cut off"));
        };
        let (asked, is_last) = (find(requests, cookie)?, flags & wire::DONE != 0);
        let mut partial = self.partial.remove(&cookie).unwrap_or_default();
        match kind {
            wire::NONE if len == 0 && is_last => {}
            wire::OFFSET_DATA if asked.is_read && len > 8 => {
                let at = place(stream, &asked, &mut partial, len - 8)?;
                self.data(stream, requests, cookie, at, len - 8)?;
            }
            wire::OFFSET_HOLE if asked.is_read && len == 12 => {
                let offset = number(stream)?;
                let mut hole = [0; 4];
                stream.read_exact(&mut hole)?;
                let hole = u32::from_be_bytes(hole);
                let at = within(&asked, &mut partial, offset, hole)?;
                self.zeroes(requests, cookie, at, hole);
            }
            // Servers may have further kinds of errors, which begin in the same way.
            kind if kind & 1 << 15 != 0 && (6..=ERROR_MAX).contains(&len) => {
                let mut data = vec![0; len as usize];
                stream.read_exact(&mut data)?;
                let error = Fields(&data).u32().filter(|error| *error != 0);
                let error = error.ok_or_else(|| invalid("an error without a number"))?;
                if partial.error == 0 {
                    partial.error = error;
                }
            }
            _ => return Err(invalid("a chunk of the wrong kind or length")),
        }
        if !is_last {
            self.partial.insert(cookie, partial);
            return Ok(());
        }
        if asked.is_read && partial.error == 0 && !partial.covered.is_all(asked.len) {
            return Err(invalid("a read of which bytes are missing"));
        }
        requests.ended(cookie, partial.error);
        Ok(())
    }

    /// Reads data of a read, from byte `at` of it on.
    fn data(
        &mut self,
        stream: &mut impl Read,
        requests: &mut impl Requests,
        cookie: u64,
        mut at: u32,
        mut left: u32,
    ) -> io::Result<()> {
        while left > 0 {
            let len = left.min(PIECE as u32);
            let piece = &mut self.piece[..len as usize];
            stream.read_exact(piece)?;
            requests.data(cookie, at, piece);
            (at, left) = (at + len, left - len);
        }
        Ok(())
    }

    fn zeroes(&mut self, requests: &mut impl Requests, cookie: u64, mut at: u32, mut left: u32) {
        self.piece.fill(0);
        while left > 0 {
            let len = left.min(PIECE as u32);
            requests.data(cookie, at, &self.piece[..len as usize]);
            (at, left) = (at + len, left - len);
        }
    }
}

fn find(requests: &mut impl Requests, cookie: u64) -> io::Result<Asked> {
    requests.find(cookie).ok_or_else(|| invalid("a reply to nothing that was asked"))
}

/// Reads the offset of data of this length, and returns the place in the read.
fn place(
    stream: &mut impl Read,
    asked: &Asked,
    partial: &mut Partial,
    len: u32,
) -> io::Result<u32> {
    let offset = number(stream)?;
    within(asked, partial, offset, len)
}

fn number(stream: &mut impl Read) -> io::Result<u64> {
    let mut number = [0; 8];
    stream.read_exact(&mut number)?;
    Ok(u64::from_be_bytes(number))
}

/// Returns the place in a read of bytes of the disk, which have not come before.
fn within(asked: &Asked, partial: &mut Partial, offset: u64, len: u32) -> io::Result<u32> {
    let outside = || invalid("data that was not asked for, or that has come before");
    let at = offset.checked_sub(asked.offset).and_then(|at| u32::try_from(at).ok());
    let at = at.ok_or_else(outside)?;
    let end = at.checked_add(len).filter(|end| *end <= asked.len).ok_or_else(outside)?;
    if len == 0 || !partial.covered.add(at, end) {
        return Err(outside());
    }
    Ok(at)
}
