//! What a node asks the agent of a program: a thread of it that gives the node those parts of its
//! memory that the program has named, and no other.
//!
//! They have a pair of `SOCK_SEQPACKET` sockets that the program has made; each message is one
//! request, or one answer:
//!
//! ```text
//!   0      4        8          16       24       32
//!   | kind | grant  | sequence | at     | len    | bytes          requests
//!   | kind | status | sequence | bytes                            answers
//! ```
//!
//! The grant is the lower half of the number under which a call has given what is meant, or 0 for
//! whatever call: the number of a region of before is not that of what was given at its address
//! later. A node names it to programs that have [`Features::GRANTS`](crate::Features::GRANTS).
//!
//! Numbers are in the byte order of the machine. A node has one request under way, and the answer
//! has its kind and its sequence number. Both sides take the other for hostile: who gets a message
//! that is not exactly as described here ends the connection.

/// Bytes before those of a request.
pub const REQUEST_HEAD: usize = 32;
/// Bytes before those of an answer.
pub const ANSWER_HEAD: usize = 16;
/// Most bytes that one request reads or writes.
pub const BYTES_MAX: usize = 64 << 10;
/// Most ranges that one request asks for.
pub const RANGES_MAX: usize = 1024;
/// Most numbers that one request gives back.
pub const GRANTS_MAX: usize = 1024;

/// What a node asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The `len` bytes from `at` on, at most [`BYTES_MAX`]. Answer: the bytes.
    Read = 1,
    /// Stores the bytes that come along, `len`, from `at` on.
    Write = 2,
    /// Asks whether ranges are there that the program has given, for whatever: address and length
    /// of each come along, `len` is how many, at most [`RANGES_MAX`].
    Has = 3,
    /// Compares the 8 bytes at `at`, which is aligned, with the first 8 that come along, and if
    /// they are the same stores the second there, as one step. Answer: the 8 bytes of before.
    Swap = 4,
    /// Gives back what the program has given under numbers: `len` of them come along, 8 bytes each,
    /// at most [`GRANTS_MAX`]. It has no answer.
    Forget = 5,
}

/// A request without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is asked.
    pub kind: Kind,
    /// By what it was given, or 0 for any; 0 with [`Kind::Forget`].
    pub grant: u32,
    /// Comes back with the answer.
    pub sequence: u64,
    /// Address in the program.
    pub at: u64,
    /// How many bytes, ranges or numbers.
    pub len: u64,
}

impl Request {
    /// Bytes that come along; `None` for a length that there cannot be.
    fn payload(kind: Kind, at: u64, len: u64) -> Option<usize> {
        let count = usize::try_from(len).ok().filter(|len| *len > 0)?;
        let (payload, is_valid) = match kind {
            Kind::Read => (0, count <= BYTES_MAX),
            Kind::Write => (count, count <= BYTES_MAX),
            Kind::Has => (count.checked_mul(16)?, count <= RANGES_MAX && at == 0),
            Kind::Swap => (16, count == 8 && at.is_multiple_of(8)),
            Kind::Forget => (count.checked_mul(8)?, count <= GRANTS_MAX && at == 0),
        };
        (is_valid && at.checked_add(len).is_some()).then_some(payload)
    }

    /// Reads a request and what comes along; `None` for one that is malformed.
    pub fn parse(message: &[u8]) -> Option<(Self, &[u8])> {
        let (head, payload) = message.split_first_chunk::<REQUEST_HEAD>()?;
        let [what, sequence, at, len] = words(head)?;
        let grant = (what >> 32) as u32;
        let kind = match what as u32 {
            1 => Kind::Read,
            2 => Kind::Write,
            3 => Kind::Has,
            4 => Kind::Swap,
            5 => Kind::Forget,
            _ => return None,
        };
        let is_whole =
            Self::payload(kind, at, len)? == payload.len() && (grant == 0 || kind != Kind::Forget);
        is_whole.then_some((Self { kind, grant, sequence, at, len }, payload))
    }

    /// The bytes of the request before those that come along.
    pub fn emit(&self) -> [u8; REQUEST_HEAD] {
        bytes([self.kind as u64 | u64::from(self.grant) << 32, self.sequence, self.at, self.len])
    }
}

/// An answer without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Kind of the request.
    pub kind: Kind,
    /// Error number, or 0. With an error no bytes come along.
    pub errno: u32,
    /// Sequence number of the request.
    pub sequence: u64,
}

impl Answer {
    /// The bytes of the answer before those that come along.
    pub fn emit(&self) -> [u8; ANSWER_HEAD] {
        bytes([self.kind as u64 | u64::from(self.errno) << 32, self.sequence])
    }

    /// The error number, or 0, of an answer to a request; `None` if it is not the answer to it.
    /// `bytes` came along, of a success `len`.
    pub fn parse(head: &[u8; ANSWER_HEAD], to: &Request, bytes: usize, len: usize) -> Option<u32> {
        let [kinds, sequence] = words(head)?;
        let errno = (kinds >> 32) as u32;
        let is_right = kinds as u32 == to.kind as u32
            && sequence == to.sequence
            && bytes == if errno == 0 { len } else { 0 };
        is_right.then_some(errno)
    }

    /// The sequence number of an answer.
    pub fn sequence(head: &[u8; ANSWER_HEAD]) -> u64 {
        words(head).map_or(0, |[_, sequence]| sequence)
    }
}

/// Numbers of 8 bytes.
pub fn words<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let mut words = [0; N];
    let (chunks, rest) = bytes.as_chunks::<8>();
    if chunks.len() != N || !rest.is_empty() {
        return None;
    }
    words.iter_mut().zip(chunks).for_each(|(word, chunk)| *word = u64::from_ne_bytes(*chunk));
    Some(words)
}

fn bytes<const N: usize, const M: usize>(words: [u64; N]) -> [u8; M] {
    let mut bytes = [0; M];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::vec::Vec;

    fn message(words: [u64; 4], payload: usize) -> Vec<u8> {
        let mut message = bytes::<4, REQUEST_HEAD>(words).to_vec();
        message.resize(REQUEST_HEAD + payload, 7);
        message
    }

    #[test]
    fn requests_of_exactly_their_length_are_read() {
        let max = BYTES_MAX as u64;
        for (kind, at, len, payload) in [
            (Kind::Read, 5, 1, 0),
            (Kind::Read, u64::MAX - max, max, 0),
            (Kind::Write, 5, max, BYTES_MAX),
            (Kind::Has, 0, 1024, 16 * 1024),
            (Kind::Swap, 8, 8, 16),
            (Kind::Forget, 0, 1024, 8 * 1024),
        ] {
            let grant = if kind == Kind::Forget { 0 } else { u32::MAX - 1 };
            let request = Request { kind, grant, sequence: 9, at, len };
            let mut message = request.emit().to_vec();
            message.resize(REQUEST_HEAD + payload, 7);
            assert_eq!(Request::parse(&message), Some((request, &message[REQUEST_HEAD..])));
            message.push(7);
            assert_eq!(Request::parse(&message), None, "longer: {request:?}");
            message.truncate(REQUEST_HEAD + payload - usize::from(payload > 0));
            assert_eq!(Request::parse(&message).is_none(), payload > 0, "shorter: {request:?}");
        }
    }

    #[test]
    fn other_requests_are_malformed() {
        let max = BYTES_MAX as u64;
        for (words, payload) in [
            ([0, 0, 0, 1], 0),
            ([6, 0, 0, 1], 0),
            ([6 | 1 << 32, 0, 0, 1], 0),
            ([1, 0, 0, 0], 0),
            ([1, 0, 0, max + 1], 0),
            ([1, 0, u64::MAX, 1], 0),
            ([1, 0, 0, u64::MAX], 0),
            ([2, 0, 0, 0], 0),
            ([2, 0, 0, max + 1], BYTES_MAX + 1),
            ([2, 0, u64::MAX - 6, 8], 8),
            ([3, 0, 1, 1], 16),
            ([3, 0, 0, 1025], 16 * 1025),
            ([3, 0, 0, 1 << 60], 0),
            ([4, 0, 4, 8], 16),
            ([4, 0, 8, 4], 16),
            ([4, 0, 8, 16], 16),
            ([5, 0, 8, 1], 8),
            ([5 | 1 << 32, 0, 0, 1], 8),
            ([5, 0, 0, 1025], 8 * 1025),
        ] {
            assert_eq!(Request::parse(&message(words, payload)), None, "{words:?}");
        }
        assert_eq!(Request::parse(&message([1, 0, 0, 1], 0)[..31]), None);
        assert_eq!(Request::parse(b""), None);
    }

    #[test]
    fn an_answer_is_that_to_its_request_or_none() {
        let to = Request { kind: Kind::Read, grant: 7, sequence: 9, at: 4, len: 3 };
        let answer = Answer { kind: Kind::Read, errno: 0, sequence: 9 };
        let failed = Answer { errno: 14, ..answer };
        assert_eq!(Answer::parse(&answer.emit(), &to, 3, 3), Some(0));
        assert_eq!(Answer::parse(&failed.emit(), &to, 0, 3), Some(14));
        assert_eq!(Answer::sequence(&answer.emit()), 9);
        for (answer, bytes) in [
            (answer, 2),
            (answer, 4),
            (failed, 3),
            (Answer { sequence: 8, ..answer }, 3),
            (Answer { kind: Kind::Write, ..answer }, 3),
        ] {
            assert_eq!(Answer::parse(&answer.emit(), &to, bytes, 3), None, "{answer:?}");
        }
    }
}
