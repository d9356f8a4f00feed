//! Captures of one rule: the bytes of TCP connections as frames of a pcap file, which Wireshark
//! reads as if they had been on a wire.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Payload bytes of a frame.
const SEGMENT: usize = 1400;
/// Link type of frames that begin with an IP header.
const RAW_IP: u32 = 101;
/// Flags of TCP.
const ACK: u8 = 0x10;
const PSH_ACK: u8 = 0x18;
const FIN_ACK: u8 = 0x11;
const SYN: u8 = 0x02;

/// What happened on a connection.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) at: SystemTime,
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    pub(super) what: What,
}

#[derive(Clone, Debug)]
pub(super) enum What {
    /// The connection is made, by `from`.
    Opened,
    Bytes(Vec<u8>),
    /// `from` has ended it.
    Ended,
}

/// Writes events as a capture. Numbers of TCP begin at 1 in each direction.
pub(super) fn write(path: &Path, events: &[Event]) -> std::io::Result<()> {
    let mut out = Vec::new();
    for word in [0xa1b2_c3d4, 4 << 16 | 2, 0, 0, 0xffff, RAW_IP] {
        out.extend(word.to_le_bytes());
    }
    let mut directions: Vec<(SocketAddr, SocketAddr, u32)> = Vec::new();
    for event in events {
        let mut number = |from: SocketAddr, to: SocketAddr, add: u32| {
            let known = directions.iter().position(|(a, b, _)| (*a, *b) == (from, to));
            let index = known.unwrap_or_else(|| {
                directions.push((from, to, 1));
                directions.len() - 1
            });
            let next = directions[index].2;
            directions[index].2 = next.wrapping_add(add);
            next
        };
        let Event { at, from, to, what } = event;
        let pieces: Vec<(&[u8], u8)> = match what {
            What::Opened => vec![(&[], SYN)],
            What::Ended => vec![(&[], FIN_ACK)],
            What::Bytes(bytes) => bytes.chunks(SEGMENT).map(|piece| (piece, PSH_ACK)).collect(),
        };
        for (piece, flags) in pieces {
            let counted = piece.len() as u32 + u32::from(flags == FIN_ACK);
            let seq = number(*from, *to, counted);
            let ack = number(*to, *from, 0);
            // A SYN has the number before the first byte.
            let seq = if flags == SYN { seq.wrapping_sub(1) } else { seq };
            frame(&mut out, *at, (*from, *to), (seq, ack), flags, piece);
        }
        if matches!(what, What::Opened) {
            let (seq, ack) = (number(*to, *from, 0), number(*from, *to, 0));
            frame(&mut out, *at, (*to, *from), (seq.wrapping_sub(1), ack), SYN | ACK, &[]);
        }
    }
    std::fs::File::create(path)?.write_all(&out)
}

fn frame(
    out: &mut Vec<u8>,
    at: SystemTime,
    (from, to): (SocketAddr, SocketAddr),
    (seq, ack): (u32, u32),
    flags: u8,
    payload: &[u8],
) {
    let mut packet = Vec::with_capacity(60 + payload.len());
    let len = (20 + payload.len()) as u16;
    match (from.ip(), to.ip()) {
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            packet.extend([0x60, 0, 0, 0]);
            packet.extend(len.to_be_bytes());
            packet.extend([6, 64]);
            packet.extend(from.octets());
            packet.extend(to.octets());
        }
        (from, to) => {
            packet.extend([0x45, 0]);
            packet.extend((20 + len).to_be_bytes());
            packet.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
            for ip in [from, to] {
                if let IpAddr::V4(ip) = ip {
                    packet.extend(ip.octets());
                }
            }
        }
    }
    packet.extend(from.port().to_be_bytes());
    packet.extend(to.port().to_be_bytes());
    packet.extend(seq.to_be_bytes());
    packet.extend(ack.to_be_bytes());
    packet.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    packet.extend(payload);
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let len = packet.len() as u32;
    for word in [since.as_secs() as u32, since.subsec_micros(), len, len] {
        out.extend(word.to_le_bytes());
    }
    out.extend(packet);
}
