//! Messages of the quickstart: 32 bytes of header, then random bytes.
//!
//! ```text
//!  0  checksum u32   CRC-32 of everything behind it, header and payload
//!  4  magic u32
//!  8  sequence u64   counts per flow from 0: one sending socket to one receiving socket
//! 16  sent u64       nanoseconds of CLOCK_MONOTONIC, which both processes share
//! 24  length u32     of the payload
//! 28  from u8, to u8 numbers of the sockets
//! 30  last u16       1 in the final message of a flow
//! ```

use std::time::Duration;

/// Bytes of a header.
pub(crate) const HEADER_LEN: usize = 32;
/// Longest message of all, header included: the most that RDS carries.
pub(crate) const MESSAGE_LEN_MAX: usize = 1 << 20;
/// Smallest message.
pub(crate) const MESSAGE_LEN_MIN: usize = 64;

const MAGIC: u32 = 0x626f_776c;
/// Payloads are windows of a pool this much longer than the longest of them.
const POOL_SLACK: usize = 64 << 10;

/// The contents of a header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Header {
    pub(crate) sequence: u64,
    pub(crate) sent_ns: u64,
    pub(crate) from: u8,
    pub(crate) to: u8,
    pub(crate) last: bool,
}

impl Header {
    /// Returns the bytes in front of this payload.
    pub(crate) fn encode(&self, payload: &[u8]) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[4..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sent_ns.to_le_bytes());
        bytes[24..28].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes[28..30].copy_from_slice(&[self.from, self.to]);
        bytes[30..32].copy_from_slice(&u16::from(self.last).to_le_bytes());
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&bytes[4..]);
        hasher.update(payload);
        bytes[..4].copy_from_slice(&hasher.finalize().to_le_bytes());
        bytes
    }

    /// Checks a whole message, given in pieces, and returns its header.
    ///
    /// # Errors
    ///
    /// A text that says what is wrong with the message.
    pub(crate) fn check<'a>(
        len: usize,
        head: &[u8; HEADER_LEN],
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> Result<Self, String> {
        let quad =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let oct = |at: usize| u64::from(quad(at)) | u64::from(quad(at + 4)) << 32;
        if len < HEADER_LEN {
            return Err(format!("{len} bytes are less than a header"));
        }
        let mut hasher = crc32fast::Hasher::new();
        let mut skip = 4;
        for piece in pieces {
            let cut = skip.min(piece.len());
            hasher.update(&piece[cut..]);
            skip -= cut;
        }
        let (wanted, got) = (quad(0), hasher.finalize());
        if wanted != got {
            return Err(format!("checksum {got:08x} instead of {wanted:08x}"));
        }
        if quad(4) != MAGIC || quad(24) as usize != len - HEADER_LEN {
            return Err("the checksum is right and the header is not".to_owned());
        }
        Ok(Self {
            sequence: oct(8),
            sent_ns: oct(16),
            from: head[28],
            to: head[29],
            last: head[30] != 0,
        })
    }
}

/// Returns nanoseconds of the clock that all processes of a machine share.
pub(crate) fn clock_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let time = Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32);
    time.as_nanos() as u64
}

/// Random numbers for sizes and contents; not for secrets.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Starts the sequence of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next number (xorshift64*).
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn within(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() >> 16) as usize % (high - low + 1)
    }

    /// Returns the length of the next message: most are small, half of the bytes are in large ones.
    pub(crate) fn message_len(&mut self) -> usize {
        match self.next() >> 32 & 0xff {
            0..=149 => self.within(MESSAGE_LEN_MIN, 512),
            150..=219 => self.within(512, 8 << 10),
            220..=253 => self.within(8 << 10, 64 << 10),
            _ => self.within(64 << 10, MESSAGE_LEN_MAX),
        }
    }
}

/// Random bytes that payloads are cut from.
#[derive(Debug)]
pub(crate) struct Pool(Vec<u8>);

impl Pool {
    /// Fills a pool.
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let words = (MESSAGE_LEN_MAX + POOL_SLACK) / 8;
        Self((0..words).flat_map(|_| random.next().to_le_bytes()).collect())
    }

    /// Returns a payload; `choice` decides where it starts.
    pub(crate) fn payload(&self, len: usize, choice: u64) -> &[u8] {
        let start = choice as usize % POOL_SLACK;
        &self.0[start..start + len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(header: Header, payload: &[u8]) -> Vec<u8> {
        let mut message = header.encode(payload).to_vec();
        message.extend(payload);
        message
    }

    fn check(message: &[u8], piece: usize) -> Result<Header, String> {
        let mut head = [0; HEADER_LEN];
        let len = message.len().min(HEADER_LEN);
        head[..len].copy_from_slice(&message[..len]);
        Header::check(message.len(), &head, message.chunks(piece))
    }

    #[test]
    fn a_message_survives_any_cut_into_pieces_and_no_change() {
        let header = Header { sequence: 9, sent_ns: 1 << 40, from: 3, to: 15, last: true };
        let message = whole(header, Pool::new(1).payload(100, 77));
        for piece in [1, 3, 32, 200] {
            assert_eq!(check(&message, piece), Ok(header));
        }
        for at in 0..message.len() {
            let mut wrong = message.clone();
            wrong[at] ^= 0x10;
            assert!(check(&wrong, 50).is_err(), "byte {at}");
        }
        assert!(check(&message[..131], 50).is_err());
        assert!(check(&message[..20], 50).is_err());
    }

    #[test]
    fn sizes_are_mixed_and_within_bounds() {
        let mut random = Random::new(5);
        let sizes: Vec<usize> = (0..20_000).map(|_| random.message_len()).collect();
        assert!(sizes.iter().all(|size| (MESSAGE_LEN_MIN..=MESSAGE_LEN_MAX).contains(size)));
        assert!(sizes.iter().any(|size| *size < 100));
        assert!(sizes.iter().any(|size| *size > 900 << 10));
    }
}
