//! The control connection of a stress run: option block, start, end.
//!
//! ```text
//! active                            passive
//!   | -- option block (59 or 77 B) --> |
//!   |   both make their tasks          |
//!   | -- one byte -------------------> |
//!   | <------------------- one byte -- |
//!   |   2 s, 2 s of burn-in, measure   |
//!   | -- end of the connection ------> |
//! ```
//!
//! The layout is that of rds-stress 2.0.7 (version text, then the old block, then type of service
//! and async; without the last two only the old block), so that either end can be the original.
//! Numbers are big endian without padding. Spec: `docs/spec/tools.md`, section 4.2.

use std::{
    io::{self, Read, Write},
    net::Ipv4Addr,
};

/// The version whose protocol is spoken, and as it is sent, padded with NUL.
pub(crate) const VERSION: &str = "2.0.7";
const VERSION_TEXT: [u8; 16] = *b"2.0.7\0\0\0\0\0\0\0\0\0\0\0";
const OLD_LEN: usize = 59;
const TAIL_LEN: usize = 2;

/// Options that the active side decides for both.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Block {
    pub(crate) depth: u32,
    pub(crate) req_bytes: u32,
    pub(crate) ack_bytes: u32,
    pub(crate) rdma_bytes: u32,
    /// Address of the passive side, as the active side calls it.
    pub(crate) send_addr: Ipv4Addr,
    /// Address of the active side: where the passive side sends to.
    pub(crate) recv_addr: Ipv4Addr,
    /// Control port; task `i` uses the RDS port `port + 1 + i`.
    pub(crate) port: u16,
    pub(crate) tasks: u16,
    /// Seconds; 0 is without end.
    pub(crate) run_time: u32,
    pub(crate) summary_only: bool,
    pub(crate) rtprio: bool,
    pub(crate) trace: bool,
    pub(crate) verify: bool,
    pub(crate) show_params: bool,
    pub(crate) show_perfdata: bool,
    pub(crate) cong_monitor: bool,
    pub(crate) keys: Keys,
    pub(crate) one_way: bool,
    pub(crate) rdma_mode: u8,
    pub(crate) rdma_vector: u32,
    pub(crate) rdma_alignment: u32,
    pub(crate) connect_retries: u32,
    pub(crate) tos: u8,
    pub(crate) asynchronous: bool,
}

/// How memory is registered and used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Keys {
    /// They end with the first operation.
    pub(crate) use_once: bool,
    /// By a call of its own instead of with the request.
    pub(crate) get_mr: bool,
    /// The acknowledgement waits for what is read.
    pub(crate) fence: bool,
    /// They are used again.
    pub(crate) cache: bool,
    /// Those that come back are reported.
    pub(crate) meter: bool,
}

/// Why no block was read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The error of the stream; an end in the middle is `UnexpectedEof`.
    Stream(io::Error),
    /// The other side begins with the name of another version, as 2.3 does before its own kind of
    /// block.
    Version(String),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Stream(error)
    }
}

/// The value that rds-stress sends for "suppress warnings" by default.
const UNSET: u8 = 0xff;

impl Block {
    /// Returns the bytes of a remote read or write.
    pub(crate) fn rdma_total(&self) -> u64 {
        u64::from(self.rdma_bytes) * u64::from(self.rdma_vector)
    }

    /// Returns the bytes the active side sends.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(VERSION_TEXT.len() + OLD_LEN + TAIL_LEN);
        let new = self.tos != 0 || self.asynchronous;
        if new {
            out.extend(VERSION_TEXT);
        }
        for number in [self.depth, self.req_bytes, self.ack_bytes, self.rdma_bytes] {
            out.extend(number.to_be_bytes());
        }
        out.extend(self.send_addr.octets());
        out.extend(self.recv_addr.octets());
        out.extend(self.port.to_be_bytes());
        out.extend(self.tasks.to_be_bytes());
        out.extend(self.run_time.to_be_bytes());
        out.extend(
            [
                self.summary_only,
                self.rtprio,
                self.trace,
                self.verify,
                self.show_params,
                self.show_perfdata,
                self.cong_monitor,
            ]
            .map(u8::from),
        );
        let Keys { use_once, get_mr, fence, cache, meter } = self.keys;
        out.extend([use_once, get_mr, fence, cache, meter].map(u8::from));
        out.extend([UNSET, u8::from(self.one_way), self.rdma_mode]);
        for number in [self.rdma_vector, self.rdma_alignment, self.connect_retries] {
            out.extend(number.to_be_bytes());
        }
        if new {
            out.extend([self.tos, u8::from(self.asynchronous)]);
        }
        out
    }

    /// Reads the block of either form.
    ///
    /// # Errors
    ///
    /// See [`ReadError`].
    pub(crate) fn read(stream: &mut impl Read) -> Result<Self, ReadError> {
        let mut bytes = [0; VERSION_TEXT.len() + OLD_LEN + TAIL_LEN];
        let head = VERSION_TEXT.len();
        stream.read_exact(&mut bytes[..head])?;
        if bytes[..head] == VERSION_TEXT {
            stream.read_exact(&mut bytes[head..])?;
            let mut block = Self::decode(&bytes[head..]);
            block.tos = bytes[head + OLD_LEN];
            block.asynchronous = bytes[head + OLD_LEN + 1] != 0;
            Ok(block)
        } else if let Some(version) = version(&bytes[..head]) {
            Err(ReadError::Version(version))
        } else {
            stream.read_exact(&mut bytes[head..OLD_LEN])?;
            Ok(Self::decode(&bytes[..OLD_LEN]))
        }
    }

    fn decode(bytes: &[u8]) -> Self {
        let quad = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let u32_at = |at: usize| u32::from_be_bytes(quad(at));
        let u16_at = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let flag = |at: usize| bytes[at] != 0;
        Self {
            depth: u32_at(0),
            req_bytes: u32_at(4),
            ack_bytes: u32_at(8),
            rdma_bytes: u32_at(12),
            send_addr: quad(16).into(),
            recv_addr: quad(20).into(),
            port: u16_at(24),
            tasks: u16_at(26),
            run_time: u32_at(28),
            summary_only: flag(32),
            rtprio: flag(33),
            trace: flag(34),
            verify: flag(35),
            show_params: flag(36),
            show_perfdata: flag(37),
            cong_monitor: flag(38),
            keys: Keys {
                use_once: flag(39),
                get_mr: flag(40),
                fence: flag(41),
                cache: flag(42),
                meter: flag(43),
            },
            one_way: flag(45),
            rdma_mode: bytes[46],
            rdma_vector: u32_at(47),
            rdma_alignment: u32_at(51),
            connect_retries: u32_at(55),
            tos: 0,
            asynchronous: false,
        }
    }
}

/// Returns the version number at the start of an opening. An old block starts with a depth, of
/// which any in use has a zero byte there.
fn version(opening: &[u8]) -> Option<String> {
    let number = |byte: &&u8| byte.is_ascii_digit() || **byte == b'.';
    let text: String = opening.iter().take_while(number).map(|byte| char::from(*byte)).collect();
    (text.starts_with(|c: char| c.is_ascii_digit()) && text.contains('.')).then_some(text)
}

/// Exchanges the two bytes that say "my tasks exist".
pub(crate) fn exchange_start(stream: &mut (impl Read + Write), active: bool) -> io::Result<()> {
    let mut byte = [0];
    if active {
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)
    } else {
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block() -> Block {
        Block {
            depth: 1,
            req_bytes: 1024,
            ack_bytes: 63,
            rdma_bytes: 0,
            send_addr: Ipv4Addr::new(10, 0, 0, 2),
            recv_addr: Ipv4Addr::new(10, 0, 0, 1),
            port: 4000,
            tasks: 2,
            run_time: 9,
            summary_only: false,
            rtprio: false,
            trace: false,
            verify: true,
            show_params: false,
            show_perfdata: false,
            cong_monitor: true,
            keys: Keys { use_once: false, get_mr: false, fence: true, cache: false, meter: false },
            one_way: true,
            rdma_mode: 0,
            rdma_vector: 1,
            rdma_alignment: 0,
            connect_retries: 3,
            tos: 0,
            asynchronous: false,
        }
    }

    #[test]
    fn the_old_block_has_the_documented_layout() {
        let bytes = block().encode();
        let mut wanted = vec![0, 0, 0, 1, 0, 0, 4, 0, 0, 0, 0, 63, 0, 0, 0, 0];
        wanted.extend([10, 0, 0, 2, 10, 0, 0, 1, 0x0f, 0xa0, 0, 2, 0, 0, 0, 9]);
        wanted.extend([0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0xff, 1, 0]);
        wanted.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3]);
        assert_eq!(bytes, wanted);
        assert_eq!(bytes.len(), 59);
    }

    #[test]
    fn the_new_block_starts_with_the_version_and_ends_with_the_type_of_service() {
        let bytes = Block { tos: 5, ..block() }.encode();
        assert_eq!(bytes.len(), 77);
        assert_eq!(&bytes[..8], b"2.0.7\0\0\0");
        assert_eq!(bytes[40..44], [0x0f, 0xa0, 0, 2]);
        assert_eq!(bytes[75..], [5, 0]);
    }

    #[test]
    fn another_version_is_named() {
        let json = "2.3.11\0\0\0\0\0\0\0\0\0\0{\"req_depth\":1}";
        for (opening, wanted) in
            [(json, "2.3.11"), ("2.3 {\"req_depth\":1,", "2.3"), ("3.0{\"req_depth\":1}", "3.0")]
        {
            match Block::read(&mut opening.as_bytes()) {
                Err(ReadError::Version(version)) => assert_eq!(version, wanted),
                other => panic!("{opening:?} is {other:?}"),
            }
        }
    }

    #[test]
    fn both_forms_read_back() {
        for block in [block(), Block { tos: 7, ..block() }, Block { asynchronous: true, ..block() }]
        {
            let bytes = block.encode();
            let mut rest = bytes.as_slice();
            assert_eq!(Block::read(&mut rest).ok(), Some(block));
            assert!(rest.is_empty());
            assert!(Block::read(&mut &bytes[..bytes.len() - 1]).is_err());
        }
    }
}
