//! Messages of a stress run: 63 bytes of header, then the payload.
//!
//! Spec: `docs/spec/tools.md`, section 4.3.

use std::{fmt, net::SocketAddrV4};

/// Bytes of the header; also the smallest request and acknowledgement.
pub(crate) const HEADER_LEN: usize = 63;

/// What a message is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// Asks for an acknowledgement.
    Request,
    /// Answers a request of the same index.
    Ack,
}

/// What the receiver of a request does with the memory of its sender.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Access {
    #[default]
    Read,
    Write,
}

impl Access {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The part of a header about a remote read or write; an acknowledgement repeats that of its
/// request.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Rdma {
    pub(crate) access: Access,
    /// Two addresses that mean something to the sender of the request alone.
    pub(crate) addresses: [u64; 2],
    /// What the memory is filled with, eight bytes in the order of the machine.
    pub(crate) pattern: u64,
    pub(crate) key: u64,
    /// Bytes of a local buffer, and number of local buffers.
    pub(crate) size: u32,
    pub(crate) vector: u32,
}

impl Rdma {
    /// Writes this part to a message that has its header already.
    pub(crate) fn encode(&self, out: &mut [u8]) {
        out[19] = match self.access {
            Access::Read => 1,
            Access::Write => 2,
        };
        let [addr, physical] = self.addresses;
        for (at, number) in [(20, addr), (28, physical), (36, self.pattern), (44, self.key)] {
            out[at..at + 8].copy_from_slice(&number.to_be_bytes());
        }
        out[52..56].copy_from_slice(&self.size.to_be_bytes());
        out[56..60].copy_from_slice(&self.vector.to_be_bytes());
    }

    /// Reads this part of a header; an unknown operation is returned as the error.
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Option<Self>, u8> {
        let access = match bytes[19] {
            0 => return Ok(None),
            1 => Access::Read,
            2 => Access::Write,
            other => return Err(other),
        };
        let long = |at: usize| bytes[at..at + 8].iter().fold(0, |n, b| n << 8 | u64::from(*b));
        let word = |at: usize| bytes[at..at + 4].iter().fold(0, |n, b| n << 8 | u32::from(*b));
        Ok(Some(Self {
            access,
            addresses: [long(20), long(28)],
            pattern: long(36),
            key: long(44),
            size: word(52),
            vector: word(56),
        }))
    }
}

/// The fields both sides agree on before a message arrives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Header {
    /// Counts all messages from one task to one other task.
    pub(crate) sequence: u32,
    pub(crate) from: SocketAddrV4,
    pub(crate) to: SocketAddrV4,
    /// Slot of the request, below the depth.
    pub(crate) index: u16,
    pub(crate) kind: Kind,
}

impl Header {
    /// Writes the header to the start of a message.
    pub(crate) fn encode(&self, out: &mut [u8]) {
        out[..HEADER_LEN].fill(0);
        out[..4].copy_from_slice(&self.sequence.to_be_bytes());
        out[4..8].copy_from_slice(&self.from.ip().octets());
        out[8..12].copy_from_slice(&self.to.ip().octets());
        out[12..14].copy_from_slice(&self.from.port().to_be_bytes());
        out[14..16].copy_from_slice(&self.to.port().to_be_bytes());
        out[16..18].copy_from_slice(&self.index.to_be_bytes());
        out[18] = match self.kind {
            Kind::Request => 1,
            Kind::Ack => 2,
        };
    }

    /// Reads a header; an unknown operation is returned as the error.
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, u8> {
        let quad = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let pair = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        Ok(Self {
            sequence: u32::from_be_bytes(quad(0)),
            from: SocketAddrV4::new(quad(4).into(), pair(12)),
            to: SocketAddrV4::new(quad(8).into(), pair(14)),
            index: pair(16),
            kind: match bytes[18] {
                1 => Kind::Request,
                2 => Kind::Ack,
                other => return Err(other),
            },
        })
    }
}

/// A header that was not the expected one, field by field.
#[derive(Debug)]
pub(crate) struct Mismatch {
    pub(crate) expected: Header,
    pub(crate) got: Header,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (e, g) = (self.expected, self.got);
        let rows: [(&str, String, String); 5] = [
            ("seq", e.sequence.to_string(), g.sequence.to_string()),
            ("from", e.from.to_string(), g.from.to_string()),
            ("to", e.to.to_string(), g.to.to_string()),
            ("index", e.index.to_string(), g.index.to_string()),
            ("op", format!("{:?}", e.kind), format!("{:?}", g.kind)),
        ];
        writeln!(f, "a message does not have the header that was expected:")?;
        writeln!(f, "{:>8} {:>22} {:>22}", "field", "expected", "got")?;
        for (name, expected, got) in rows {
            let mark = if expected == got { "" } else { "  <- differs" };
            writeln!(f, "{name:>8} {expected:>22} {got:>22}{mark}")?;
        }
        f.write_str("messages were lost, repeated or reordered, or the peer runs another protocol")
    }
}

/// Returns a message of `len` bytes with an empty header and the payload that `--verify` expects:
/// byte i is the low byte of k(i), k(0) = 11, k(i+1) = 41 (k(i) + 3) + ((i + 1) >> 8).
pub(crate) fn template(len: usize) -> Vec<u8> {
    let mut message = vec![0; len.max(HEADER_LEN)];
    let mut k: u32 = 11;
    for (i, byte) in (1u32..).zip(&mut message[HEADER_LEN..]) {
        *byte = k as u8;
        k = k.wrapping_add(3).wrapping_mul(41).wrapping_add(i >> 8);
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_documented_layout() {
        let header = Header {
            sequence: 0x0102_0304,
            from: "10.0.0.1:4001".parse().expect("an address"),
            to: "10.0.0.2:4002".parse().expect("an address"),
            index: 3,
            kind: Kind::Ack,
        };
        let mut bytes = [0xee; 64];
        header.encode(&mut bytes);
        assert_eq!(bytes[..12], [1, 2, 3, 4, 10, 0, 0, 1, 10, 0, 0, 2]);
        assert_eq!(bytes[12..19], [0x0f, 0xa1, 0x0f, 0xa2, 0, 3, 2]);
        assert!(bytes[19..63].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[63], 0xee);
        let head: [u8; HEADER_LEN] = bytes[..63].try_into().expect("63 bytes");
        assert_eq!(Header::decode(&head), Ok(header));
    }

    #[test]
    fn what_it_says_of_rdma_has_the_documented_layout() {
        let rdma = Rdma {
            access: Access::Write,
            addresses: [0x2021_2223_2425_2627, 0x2829_2a2b_2c2d_2e2f],
            pattern: 0x3031_3233_3435_3637,
            key: 0x4041_4243_4445_4647,
            size: 0x5051_5253,
            vector: 0x6061_6263,
        };
        let mut bytes = [0; HEADER_LEN];
        assert_eq!(Rdma::decode(&bytes), Ok(None));
        rdma.encode(&mut bytes);
        let mut wanted = vec![2];
        wanted.extend((0x20..0x38).chain(0x40..0x48).chain(0x50..0x54).chain(0x60..0x64));
        wanted.extend([0; 3]);
        assert_eq!(bytes[19..], wanted);
        assert_eq!(Rdma::decode(&bytes), Ok(Some(rdma)));
        bytes[19] = 3;
        assert_eq!(Rdma::decode(&bytes), Err(3));
    }

    #[test]
    fn the_payload_follows_the_recurrence() {
        let message = template(HEADER_LEN + 300);
        // 11; 41 * 14 = 574; 41 * 577 = 23657; 41 * 23660 = 970060
        assert_eq!(message[63..67], [11, 574u32 as u8, 23657u32 as u8, 970_060u32 as u8]);
        assert_eq!(template(10).len(), HEADER_LEN);
    }
}
