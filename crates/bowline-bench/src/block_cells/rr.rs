//! Requests and answers over UDP, in bursts that the kernel cuts and merges: what is possible
//! without a protocol. Data of more than 4 KiB goes in segments of 4 KiB, each with the header of
//! its own place; its answer, or what is answered, is one segment.
//!
//! ```text
//!  0        8      16
//!  | offset | slot | data of a write, or of the answer to a read | with `rr-udp-crc` the checksum of all that
//! ```
//!
//! `rr-udp-crc` computes and checks what RoCE demands of both sides for each packet, and nothing
//! more of it.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use bowline_verbs::Buffer;

use super::{Gauge, Load, fill};
use crate::cell::{Kind, Subject, Wait};
use crate::role::{Role, done, stopping};
use crate::sys;

/// Bytes of the header.
pub(super) const HEADER: usize = 16;
/// Bytes of the checksum.
const CHECK: usize = 4;
/// Most bytes of data of a segment.
const PIECE: usize = 4096;
/// Bytes of a burst, and segments of it, at most.
const BURST: usize = 65_000;
const BURST_SEGMENTS: usize = 64;
/// Kernel buffers asked for, in bytes.
const BUFFER: usize = 4 << 20;
/// Nothing is lost on one machine with so few requests outstanding; it only may take a while.
const PATIENCE: Duration = Duration::from_secs(20);

struct Socket {
    socket: UdpSocket,
    /// Bytes of a segment, out and in.
    out: usize,
    into: usize,
    spin: bool,
    buf: Vec<u8>,
    burst: Vec<u8>,
}

impl Socket {
    fn open(role: &mut Role, out: usize, into: usize) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("UDP socket: {e}");
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        sys::set_buffers(&socket, BUFFER).map_err(failed)?;
        sys::set_segment(&socket, out).map_err(failed)?;
        sys::set_merging(&socket).map_err(failed)?;
        socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        let port = socket.local_addr().map_err(failed)?.port();
        role.ready(&format!("port={port}"))?;
        socket.connect(role.peer_addr()?).map_err(failed)?;
        let spin = role.cell.wait == Wait::Spin;
        Ok(Self { socket, out, into, spin, buf: vec![0; 1 << 16], burst: Vec::new() })
    }

    /// Takes what has come, merged; 0 bytes when nothing does.
    fn receive(&mut self) -> Result<usize, String> {
        loop {
            match sys::receive(&self.socket, &mut self.buf, !self.spin) {
                Ok(n) => return Ok(n),
                Err(e) if e.kind() == ErrorKind::WouldBlock && self.spin => {
                    if stopping() {
                        return Ok(0);
                    }
                    std::hint::spin_loop();
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock) => return Ok(0),
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Ok(0),
                Err(e) => return Err(format!("recv: {e}")),
            }
        }
    }

    /// Sends the burst when it is full, or in any case.
    fn flush(&mut self, always: bool) -> Result<(), String> {
        let full =
            self.burst.len() + self.out > BURST || self.burst.len() >= self.out * BURST_SEGMENTS;
        if self.burst.is_empty() || !(full || always) {
            return Ok(());
        }
        sent(self.socket.send(&self.burst).map(drop))?;
        self.burst.clear();
        Ok(())
    }
}

/// Nobody there is no error: one side ends before the other.
fn sent(result: std::io::Result<()>) -> Result<(), String> {
    match result {
        Err(e) if e.kind() != ErrorKind::ConnectionRefused => Err(format!("send: {e}")),
        _ => Ok(()),
    }
}

/// Bytes of a segment of a request and of an answer.
fn sizes(role: &Role) -> (usize, usize) {
    let with_data = HEADER + piece(role) + if checked(role) { CHECK } else { 0 };
    if role.cell.kind == Kind::IoWrite { (with_data, HEADER) } else { (HEADER, with_data) }
}

/// Says whether segments with data carry a checksum.
fn checked(role: &Role) -> bool {
    role.cell.subject == Subject::RrUdpCrc
}

/// Appends the checksum of a segment that begins at `start`.
fn seal(burst: &mut Vec<u8>, start: usize) {
    let sum = bowline_crc::update(0, &burst[start..]);
    burst.extend_from_slice(&sum.to_le_bytes());
}

/// Checks the checksum of a segment; returns what it is the checksum of.
fn unseal(segment: &[u8]) -> Result<&[u8], String> {
    let (covered, sum) = segment.split_last_chunk::<CHECK>().ok_or("a segment without checksum")?;
    let right = bowline_crc::update(0, covered) == u32::from_le_bytes(*sum);
    right.then_some(covered).ok_or_else(|| "a wrong checksum".to_owned())
}

/// Bytes of data of a segment.
fn piece(role: &Role) -> usize {
    role.cell.size.min(PIECE)
}

/// Counts segments of each slot, of which several belong together.
struct Parts {
    each: usize,
    come: Vec<usize>,
}

impl Parts {
    fn new(role: &Role) -> Self {
        Self { each: role.cell.size / piece(role), come: vec![0; role.cell.depth] }
    }

    /// Notes a segment; true when it was the last one.
    fn add(&mut self, slot: u64) -> Result<bool, String> {
        let come = self.come.get_mut(slot as usize).ok_or("an invalid slot")?;
        *come = (*come + 1) % self.each;
        Ok(*come == 0)
    }
}

pub(super) fn serve(mut role: Role) -> Result<(), String> {
    let (request, answer) = sizes(&role);
    let (size, piece, mut parts) = (role.cell.size, piece(&role), Parts::new(&role));
    let checked = checked(&role);
    let store = Buffer::new(role.cell.store()).map_err(|e| format!("memory: {e}"))?;
    fill(&store);
    let mut socket = Socket::open(&mut role, answer, request)?;
    loop {
        let n = socket.receive()?;
        for at in (0..n).step_by(socket.into) {
            let Some(header) = socket.buf[at..n].first_chunk::<HEADER>().copied() else { break };
            let [o0, o1, o2, o3, o4, o5, o6, o7, slot @ ..] = header;
            let offset = u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]);
            let from = offset as usize;
            if role.cell.kind == Kind::IoWrite {
                let data = socket.buf.get(at + HEADER..at + HEADER + piece);
                if from + piece > store.len() {
                    return Err(format!("a request at {from}"));
                }
                if checked {
                    unseal(&socket.buf[at..n.min(at + request)])?;
                }
                store.write(from, data.ok_or("a write without its data")?);
                if parts.add(u64::from_le_bytes(slot))? {
                    socket.burst.extend_from_slice(&header);
                    socket.flush(false)?;
                }
                continue;
            }
            if from + size > store.len() {
                return Err(format!("a request at {from}"));
            }
            for at in (from..from + size).step_by(piece) {
                let start = socket.burst.len();
                socket.burst.extend_from_slice(&(at as u64).to_le_bytes());
                socket.burst.extend_from_slice(&slot);
                store.append_to(at, piece, &mut socket.burst);
                if checked {
                    seal(&mut socket.burst, start);
                }
                socket.flush(false)?;
            }
        }
        socket.flush(true)?;
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let (request, answer) = sizes(&role);
    let (size, depth) = (role.cell.size, role.cell.depth);
    let (piece, mut parts, mut offsets) = (piece(&role), Parts::new(&role), vec![0; depth]);
    let checked = checked(&role);
    let mut load = Load::new(&role.cell);
    let memory = Buffer::new(depth * size).map_err(|e| format!("memory: {e}"))?;
    let mut socket = Socket::open(&mut role, request, answer)?;
    let mut gauge = Gauge::new(&role, None);
    let mut free: Vec<u64> = (0..depth as u64).collect();
    let mut answers = 0;
    while !stopping() {
        for slot in free.drain(..) {
            let offset = load.next();
            offsets[slot as usize] = offset;
            if !load.write {
                socket.burst.extend_from_slice(&offset.to_le_bytes());
                socket.burst.extend_from_slice(&slot.to_le_bytes());
                socket.flush(false)?;
                continue;
            }
            let at = slot as usize * size;
            memory.write(at, &offset.to_le_bytes());
            for done in (0..size).step_by(piece) {
                let start = socket.burst.len();
                socket.burst.extend_from_slice(&(offset + done as u64).to_le_bytes());
                socket.burst.extend_from_slice(&slot.to_le_bytes());
                memory.append_to(at + done, piece, &mut socket.burst);
                if checked {
                    seal(&mut socket.burst, start);
                }
                socket.flush(false)?;
            }
        }
        socket.flush(true)?;
        let n = socket.receive()?;
        if n == 0 && !stopping() {
            return Err("an answer is lost".into());
        }
        for segment in socket.buf[..n].chunks(answer) {
            let segment = if checked && !load.write { unseal(segment)? } else { segment };
            let (offset, rest) = segment.split_first_chunk::<8>().ok_or("a short answer")?;
            let (slot, data) = rest.split_first_chunk::<8>().ok_or("a short answer")?;
            let (offset, slot) = (u64::from_le_bytes(*offset), u64::from_le_bytes(*slot));
            if load.write {
                free.push(slot);
                continue;
            }
            let first = data.first_chunk::<8>().ok_or("an answer without its data")?;
            load.check(offset, *first)?;
            let begin = *offsets.get(slot as usize).ok_or("an invalid slot")?;
            let within = offset.checked_sub(begin).filter(|within| *within < size as u64);
            let within = within.ok_or("an answer that nobody asked for")? as usize;
            memory.write(slot as usize * size + within, data);
            if parts.add(slot)? {
                free.push(slot);
            }
        }
        answers += free.len() as u64;
        if gauge.add(free.len()) {
            break;
        }
    }
    done(answers, 0);
    Ok(())
}
