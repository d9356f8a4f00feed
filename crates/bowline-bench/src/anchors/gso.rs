//! What RoCEv2 in userspace could reach at best: UDP in bursts, with a checksum over every segment
//! on both sides, one copy in and one out, a window and cumulative acknowledgements.
//!
//! ```text
//!  0        8      12                          size-4    size
//!  | number | zero | payload, from a ring      | CRC-32  |
//! ```
//!
//! The sender gives the kernel a burst that it cuts into segments (UDP_SEGMENT); the receiver takes
//! merged ones (UDP_GRO) and answers each batch with the number of the segment due next. Lost
//! segments are sent again from there after a while without an answer.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use bowline_verbs::Buffer;

use super::{at, is_gone};
use crate::payload::BODY_EVERY;
use crate::role::{Role, done, stopping};
use crate::sys;

const HEADER: usize = 12;
const TRAILER: usize = 4;
/// Bytes of a burst, and segments of it, at most: what one call takes.
const BURST: usize = 65_000;
const BURST_SEGMENTS: usize = 64;
/// Kernel buffers asked for, in bytes; the kernel caps them at its limit.
const BUFFER: usize = 4 << 20;
/// Application memory that is sent from and received into, on both sides.
pub(crate) const RING: usize = 4 << 20;
/// How long a side polls before it sleeps.
const SPIN_NS: u64 = 25_000;
/// Without an answer for so long, the sender goes back.
const PATIENCE: Duration = Duration::from_millis(10);

/// Segments sent and not acknowledged, at most: as many as a queue pair with a fixed window has.
pub(crate) const fn window() -> u64 {
    240
}

/// Says what of sending and receiving in bursts this kernel can do.
pub(crate) fn abilities() -> String {
    let can = |set: &dyn Fn(&UdpSocket) -> std::io::Result<()>| {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0));
        if socket.and_then(|socket| set(&socket)).is_ok() { "yes" } else { "no" }
    };
    let (cut, merged) = (can(&|s| sys::set_segment(s, 1024)), can(&|s| sys::set_merging(s)));
    format!("UDP_SEGMENT {cut}, UDP_GRO {merged}")
}

/// Application memory, of the same kind as that which a device registers, cut into the payloads of
/// segments.
struct Ring {
    bytes: Buffer,
    payload: usize,
}

impl Ring {
    fn new(segment: usize, filled: bool) -> Result<Self, String> {
        let payload = segment.checked_sub(HEADER + TRAILER).filter(|n| *n > 0);
        let payload = payload.ok_or_else(|| format!("segments of {segment} bytes"))?;
        let byte = |i: usize| (i.wrapping_mul(131) ^ (i >> 8).wrapping_mul(17)) as u8;
        let bytes = Buffer::new(RING).map_err(at("memory"))?;
        let body: Vec<u8> = (0..RING).map(|i| if filled { byte(i) } else { 0 }).collect();
        bytes.write(0, &body);
        Ok(Self { bytes, payload })
    }

    /// Where the payload of segment `number` lies.
    fn place(&self, number: u64) -> usize {
        let slots = (self.bytes.len() / self.payload) as u64;
        (number % slots) as usize * self.payload
    }

    fn holds(&self, number: u64, payload: &[u8]) -> bool {
        let mut expected = vec![0; self.payload];
        self.bytes.read(self.place(number), &mut expected);
        payload == expected
    }

    /// Appends segment `number`.
    fn append_to(&self, number: u64, burst: &mut Vec<u8>) {
        let start = burst.len();
        burst.extend_from_slice(&number.to_le_bytes());
        burst.extend_from_slice(&[0; HEADER - 8]);
        self.bytes.append_to(self.place(number), self.payload, burst);
        let crc = bowline_crc::update(0, &burst[start..]);
        burst.extend_from_slice(&crc.to_le_bytes());
    }

    /// Copies the payload of segment `number` in.
    fn take(&self, number: u64, payload: &[u8]) {
        self.bytes.write(self.place(number), payload);
    }
}

/// Checks a segment and returns its number and payload.
fn open(segment: &[u8], size: usize) -> Result<(u64, &[u8]), String> {
    let parts = segment.split_last_chunk::<TRAILER>().filter(|_| segment.len() == size);
    let Some((covered, crc)) = parts else {
        return Err(format!("a segment of {} bytes instead of {size}", segment.len()));
    };
    let number = covered.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if bowline_crc::update(0, covered) != u32::from_le_bytes(*crc) {
        return Err(format!("segment {number} has a wrong checksum"));
    }
    Ok((number, covered.get(HEADER..).unwrap_or_default()))
}

/// Polls for a while, then sleeps until something arrives; nothing after [`PATIENCE`], or when the
/// other side is gone.
fn receive(socket: &UdpSocket, buf: &mut [u8]) -> Result<Option<usize>, String> {
    let until = sys::now_ns() + SPIN_NS;
    loop {
        let wait = sys::now_ns() >= until;
        match sys::receive(socket, buf, wait) {
            Ok(n) => return Ok(Some(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock && !wait => std::hint::spin_loop(),
            Err(e) if e.kind() == ErrorKind::WouldBlock || is_gone(&e) => return Ok(None),
            Err(e) => return Err(at("recv")(e)),
        }
    }
}

fn socket() -> Result<UdpSocket, String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(at("bind"))?;
    sys::set_buffers(&socket, BUFFER).map_err(at("SO_RCVBUF"))?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(at("SO_RCVTIMEO"))?;
    Ok(socket)
}

pub(super) fn rx(mut role: Role) -> Result<(), String> {
    let size = role.cell.size;
    let expected = Ring::new(size, true)?;
    let ring = Ring::new(size, false)?;
    let socket = socket()?;
    sys::set_merging(&socket).map_err(at("UDP_GRO"))?;
    let port = socket.local_addr().map_err(at("getsockname"))?.port();
    role.ready(&format!("port={port}"))?;
    socket.connect(role.peer_addr()?).map_err(at("connect"))?;
    let mut meter = role.meter();
    let mut buf = vec![0; 1 << 16];
    let mut due = 0;
    loop {
        let Some(n) = receive(&socket, &mut buf)? else {
            meter.look_if_started();
            continue;
        };
        let before = due;
        for segment in buf[..n].chunks(size) {
            let (number, payload) = open(segment, size)?;
            if number != due {
                continue; // after a gap, or sent again
            }
            if due.is_multiple_of(BODY_EVERY) && !expected.holds(due, payload) {
                return Err(format!("segment {number} has a wrong payload"));
            }
            ring.take(number, payload);
            due += 1;
        }
        match socket.send(&due.to_le_bytes()) {
            Ok(_) => {}
            Err(e) if is_gone(&e) => {}
            Err(e) => return Err(at("send")(e)),
        }
        meter.syscalls += 2;
        meter.add(due - before);
    }
}

pub(super) fn tx(mut role: Role) -> Result<(), String> {
    let (size, window) = (role.cell.size, window());
    let ring = Ring::new(size, true)?;
    let socket = socket()?;
    sys::set_segment(&socket, size).map_err(at("UDP_SEGMENT"))?;
    let port = socket.local_addr().map_err(at("getsockname"))?.port();
    role.ready(&format!("port={port}"))?;
    socket.connect(role.peer_addr()?).map_err(at("connect"))?;
    // A quarter of the window at most, so that both sides always have something to do.
    let most = ((BURST / size).min(BURST_SEGMENTS) as u64).min(window / 4).max(1);
    let mut burst = Vec::with_capacity(BURST);
    let (mut next, mut acked, mut calls) = (0u64, 0u64, 0);
    while !stopping() {
        let mut answer = [0; 8];
        let got = if next + most <= acked + window {
            burst.clear();
            for number in next..next + most {
                ring.append_to(number, &mut burst);
            }
            match socket.send(&burst) {
                Ok(_) => {}
                Err(e) if is_gone(&e) => {}
                Err(e) => return Err(at("send")(e)),
            }
            calls += 1;
            next += most;
            match sys::receive(&socket, &mut answer, false) {
                Ok(n) => Some(n),
                Err(e) if e.kind() == ErrorKind::WouldBlock || is_gone(&e) => None,
                Err(e) => return Err(at("recv")(e)),
            }
        } else {
            let got = receive(&socket, &mut answer)?;
            if got.is_none() {
                next = acked;
            }
            got
        };
        if got == Some(answer.len()) {
            calls += 1;
            acked = acked.max(u64::from_le_bytes(answer));
            next = next.max(acked);
        }
    }
    done(acked, calls);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_taken_only_whole_and_unharmed() {
        let ring = Ring::new(272, true).unwrap();
        let mut burst = Vec::new();
        ring.append_to(70_000, &mut burst);
        ring.append_to(70_001, &mut burst);
        assert_eq!(burst.len(), 2 * 272);
        let (number, payload) = open(&burst[272..], 272).unwrap();
        assert!(number == 70_001 && ring.holds(70_001, payload));
        assert!(open(&burst[..271], 272).is_err_and(|e| e.contains("271 bytes")));
        burst[20] ^= 1;
        assert!(open(&burst[..272], 272).is_err_and(|e| e.contains("checksum")));
        assert!(Ring::new(16, true).is_err());
    }
}
