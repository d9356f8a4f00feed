//! Captures of sent and received packets, as frames in a pcapng file.
//!
//! The frames are rebuilt from what a UDP socket knows: IP and UDP headers as on the wire, UDP
//! checksum 0, no link header. A socket does not show the identification of a received IPv4 packet;
//! the frame has the one for which the ICRC is correct if that can be solved for [ICRC-31],
//! otherwise 0.
//!
//! ```text
//! section header | interface (raw IP, nanoseconds) | packet | packet | ...
//! packet: 6 | length | 0 | time (high, low) | bytes | bytes | frame, padded | flags | length
//! ```

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use bowline_wire::roce::{IcrcChecker, IcrcMatch, IcrcPolicy, Outer, split_icrc};

/// Link type of packets that begin with the IP header.
const LINKTYPE_RAW: u16 = 101;
/// Longest frame written.
const SNAP_LEN: u32 = 65_535;
/// Bytes of an enhanced packet block besides the frame: 28 before it, 16 after it.
const PACKET_OVERHEAD: usize = 44;
/// Time to live written.
const TTL: u8 = 64;
/// Protocol number of UDP.
const UDP: u8 = 17;

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    In = 1,
    Out = 2,
}

/// A datagram: the header fields that a socket knows, and the payload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datagram<'a> {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) tos: u8,
    /// Identification of IPv4.
    pub(crate) ident: u16,
    pub(crate) payload: &'a [u8],
}

/// Writer of a capture file.
#[derive(Debug)]
pub(crate) struct Capture {
    file: BufWriter<File>,
    block: Vec<u8>,
    checker: IcrcChecker,
}

impl Capture {
    /// Creates the file with its section header.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::with_capacity(1 << 18, File::create(path)?);
        file.write_all(&head())?;
        file.flush()?;
        let checker = IcrcChecker::new(IcrcPolicy::Solve);
        Ok(Self { file, block: Vec::with_capacity(1 << 13), checker })
    }

    /// Finds the IPv4 identification of a received packet by its ICRC; 0 if the ICRC does not show
    /// it.
    pub(crate) fn solve(&mut self, from: SocketAddr, to: IpAddr, likely: u16, bytes: &[u8]) -> u16 {
        let outer = Outer { from: from.ip(), to, source_port: from.port() };
        let checked = split_icrc(bytes)
            .map(|(packet, icrc)| self.checker.check(&outer, packet, icrc, &[likely]));
        match checked {
            Some(Ok(IcrcMatch::Exact(ident) | IcrcMatch::Solved(ident))) => ident,
            _ => 0,
        }
    }

    /// Appends a packet.
    pub(crate) fn write(
        &mut self,
        direction: Direction,
        datagram: &Datagram<'_>,
    ) -> io::Result<()> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.block.clear();
        append_packet(&mut self.block, direction, nanos, datagram);
        self.file.write_all(&self.block)
    }

    /// Flushes all buffered packets to the file.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Section header and interface description.
fn head() -> Vec<u8> {
    let mut out = Vec::new();
    for word in [0x0a0d_0d0a_u32, 28, 0x1a2b_3c4d, 1, u32::MAX, u32::MAX, 28] {
        out.extend(word.to_le_bytes());
    }
    let len = 32_u32;
    out.extend(1_u32.to_le_bytes());
    out.extend(len.to_le_bytes());
    out.extend(LINKTYPE_RAW.to_le_bytes());
    out.extend(0_u16.to_le_bytes());
    out.extend(SNAP_LEN.to_le_bytes());
    // Option 9, resolution of time: 10^-9 s; then the end of the options.
    out.extend([9, 0, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
    out.extend(len.to_le_bytes());
    out
}

fn append_packet(out: &mut Vec<u8>, direction: Direction, nanos: u64, datagram: &Datagram<'_>) {
    let start = out.len();
    let header = if datagram.to.is_ipv4() { 20 } else { 40 };
    let len = header + 8 + datagram.payload.len();
    let padded = len.next_multiple_of(4);
    let total = (PACKET_OVERHEAD + padded) as u32;
    let time = [(nanos >> 32) as u32, nanos as u32];
    for word in [6, total, 0, time[0], time[1], len as u32, len as u32] {
        out.extend(word.to_le_bytes());
    }
    append_frame(out, datagram);
    out.resize(start + 28 + padded, 0);
    // Option 2, flags; then the end of the options.
    out.extend([2, 0, 4, 0, direction as u8, 0, 0, 0, 0, 0, 0, 0]);
    out.extend(total.to_le_bytes());
}

fn append_frame(out: &mut Vec<u8>, datagram: &Datagram<'_>) {
    let udp_len = 8 + datagram.payload.len();
    let start = out.len();
    match (datagram.from.ip(), datagram.to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            out.extend([0x45, datagram.tos]);
            out.extend(((20 + udp_len) as u16).to_be_bytes());
            out.extend(datagram.ident.to_be_bytes());
            out.extend([0x40, 0, TTL, UDP, 0, 0]);
            out.extend(from.octets());
            out.extend(to.octets());
            let sum = checksum(out.get(start..).unwrap_or_default());
            if let Some(field) = out.get_mut(start + 10..start + 12) {
                field.copy_from_slice(&sum.to_be_bytes());
            }
        }
        (from, to) => {
            out.extend((0x6000_0000 | u32::from(datagram.tos) << 20).to_be_bytes());
            out.extend((udp_len as u16).to_be_bytes());
            out.extend([UDP, TTL]);
            for ip in [from, to] {
                match ip {
                    IpAddr::V4(ip) => out.extend(ip.to_ipv6_mapped().octets()),
                    IpAddr::V6(ip) => out.extend(ip.octets()),
                }
            }
        }
    }
    out.extend(datagram.from.port().to_be_bytes());
    out.extend(datagram.to.port().to_be_bytes());
    out.extend((udp_len as u16).to_be_bytes());
    out.extend([0, 0]);
    out.extend(datagram.payload);
}

/// Computes the Internet checksum of a header whose checksum field is still 0.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2).map(|pair| match pair {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(bytes: &[u8], at: usize) -> usize {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
    }

    /// Type and body of each block, with the lengths at both ends checked.
    fn blocks(bytes: &[u8]) -> Vec<(usize, &[u8])> {
        let mut at = 0;
        let mut found = Vec::new();
        while at < bytes.len() {
            let len = word(bytes, at + 4);
            assert_eq!(len % 4, 0);
            assert_eq!(word(bytes, at + len - 4), len);
            found.push((word(bytes, at), &bytes[at + 8..at + len - 4]));
            at += len;
        }
        found
    }

    #[test]
    fn frames_are_as_on_the_wire() {
        let path = std::env::temp_dir().join(format!("bowline-capture-{}", std::process::id()));
        let mut capture = Capture::create(&path).unwrap();
        let datagram = Datagram {
            from: "10.0.0.1:49152".parse().unwrap(),
            to: "10.0.0.2:4791".parse().unwrap(),
            tos: 4,
            ident: 3,
            payload: b"hello",
        };
        capture.write(Direction::Out, &datagram).unwrap();
        let datagram = Datagram {
            from: "[fe80::1]:4791".parse().unwrap(),
            to: "[fe80::2]:4791".parse().unwrap(),
            tos: 0x12,
            ..datagram
        };
        capture.write(Direction::In, &datagram).unwrap();
        capture.flush().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let blocks = blocks(&bytes);
        let types: Vec<usize> = blocks.iter().map(|block| block.0).collect();
        assert_eq!(types, [0x0a0d_0d0a, 1, 6, 6]);
        let frame = &blocks[2].1[20..20 + word(blocks[2].1, 12)];
        assert_eq!(frame.len(), 33);
        assert_eq!(&frame[..10], [0x45, 4, 0, 33, 0, 3, 0x40, 0, 64, 17]);
        assert_eq!(checksum(&frame[..20]), 0, "the header with its checksum sums up to nothing");
        assert_eq!(&frame[20..], b"\xc0\x00\x12\xb7\x00\x0d\x00\x00hello");
        let frame = &blocks[3].1[20..20 + word(blocks[3].1, 12)];
        assert_eq!(frame.len(), 53);
        assert_eq!(&frame[..8], [0x61, 0x20, 0, 0, 0, 13, 17, 64]);
        let flags = &blocks[3].1[20 + 56..];
        assert_eq!(&flags[..8], [2, 0, 4, 0, 1, 0, 0, 0]);
    }
}
