//! Requests and answers over TCP, in the form of [`rr`](super::rr): everything that came together
//! is answered together, in one write.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use bowline_verbs::Buffer;

use super::rr::HEADER;
use super::{Gauge, Load, fill};
use crate::cell::{Kind, Wait};
use crate::role::{Role, done, stopping};
use crate::sys;

/// Bytes read at once.
const AHEAD: usize = 1 << 20;
/// Kernel buffers asked for, in bytes: no side ever waits for the other to read.
const BUFFER: usize = 4 << 20;

/// A stream of messages that are all of the same size.
struct Stream {
    stream: TcpStream,
    /// Bytes of a message that comes.
    into: usize,
    buf: Vec<u8>,
    filled: usize,
    out: Vec<u8>,
}

impl Stream {
    fn new(role: &Role, stream: TcpStream, into: usize) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("TCP socket: {e}");
        stream.set_nodelay(true).map_err(failed)?;
        stream.set_nonblocking(role.cell.wait == Wait::Spin).map_err(failed)?;
        Ok(Self { stream, into, buf: vec![0; AHEAD], filled: 0, out: Vec::new() })
    }

    /// Reads until whole messages are there; says how many bytes they are, 0 at the end.
    fn receive(&mut self) -> Result<usize, String> {
        while self.filled < self.into {
            match self.stream.read(&mut self.buf[self.filled..]) {
                Ok(0) => return Ok(0),
                Ok(n) => self.filled += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if stopping() {
                        return Ok(0);
                    }
                    std::hint::spin_loop();
                }
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(0),
                Err(e) => return Err(format!("read: {e}")),
            }
        }
        Ok(self.filled - self.filled % self.into)
    }

    /// Forgets messages that have been taken.
    fn taken(&mut self, len: usize) {
        self.buf.copy_within(len..self.filled, 0);
        self.filled -= len;
    }

    fn flush(&mut self) -> Result<(), String> {
        let mut left = &self.out[..];
        while !left.is_empty() {
            match self.stream.write(left) {
                Ok(n) => left = &left[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock && !stopping() => {}
                // The other side is gone, or is to end.
                Err(_) => break,
            }
        }
        self.out.clear();
        Ok(())
    }
}

/// Bytes of a request and of an answer.
fn sizes(role: &Role) -> (usize, usize) {
    let with_data = HEADER + role.cell.size;
    if role.cell.kind == Kind::IoWrite { (with_data, HEADER) } else { (HEADER, with_data) }
}

pub(super) fn serve(mut role: Role) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("TCP socket: {e}");
    let store = Buffer::new(role.cell.store()).map_err(|e| format!("memory: {e}"))?;
    fill(&store);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
    sys::set_buffers(&listener, BUFFER).map_err(failed)?;
    if !role.cell.cc.is_empty() {
        sys::set_all_congestion_control(&role.cell.cc); // accepted sockets take it over
    }
    let port = listener.local_addr().map_err(failed)?.port();
    role.ready(&format!("port={port}"))?;
    let (request, size) = (sizes(&role).0, role.cell.size);
    let mut stream = Stream::new(&role, listener.accept().map_err(failed)?.0, request)?;
    loop {
        let len = stream.receive()?;
        if len == 0 {
            return Ok(());
        }
        for message in stream.buf[..len].chunks(request) {
            let (header, data) = message.split_at(HEADER);
            let offset = header.first_chunk::<8>().ok_or("a short request")?;
            let offset = u64::from_le_bytes(*offset) as usize;
            if offset + size > store.len() {
                return Err(format!("a request at {offset}"));
            }
            stream.out.extend_from_slice(header);
            if role.cell.kind == Kind::IoWrite {
                store.write(offset, data);
            } else {
                store.append_to(offset, size, &mut stream.out);
            }
        }
        stream.taken(len);
        stream.flush()?;
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let failed = |e: std::io::Error| format!("TCP socket: {e}");
    let (answer, size, depth) = (sizes(&role).1, role.cell.size, role.cell.depth);
    let socket = TcpStream::connect(role.peer_addr()?).map_err(failed)?;
    sys::set_buffers(&socket, BUFFER).map_err(failed)?;
    if !role.cell.cc.is_empty() {
        sys::set_all_congestion_control(&role.cell.cc);
    }
    let mut stream = Stream::new(&role, socket, answer)?;
    let mut load = Load::new(&role.cell);
    let memory = Buffer::new(depth * size).map_err(|e| format!("memory: {e}"))?;
    let mut gauge = Gauge::new(&role, None);
    let mut free: Vec<u64> = (0..depth as u64).collect();
    let mut answers = 0;
    while !stopping() {
        for slot in free.drain(..) {
            let offset = load.next();
            stream.out.extend_from_slice(&offset.to_le_bytes());
            stream.out.extend_from_slice(&slot.to_le_bytes());
            if load.write {
                let at = slot as usize * size;
                memory.write(at, &offset.to_le_bytes());
                memory.append_to(at, size, &mut stream.out);
            }
        }
        stream.flush()?;
        let len = stream.receive()?;
        if len == 0 && !stopping() {
            return Err("the answering side closed the connection".into());
        }
        for message in stream.buf[..len].chunks(answer) {
            let (offset, rest) = message.split_first_chunk::<8>().ok_or("a short answer")?;
            let (slot, data) = rest.split_first_chunk::<8>().ok_or("a short answer")?;
            if !load.write {
                let first = data.first_chunk::<8>().ok_or("an answer without its data")?;
                load.check(u64::from_le_bytes(*offset), *first)?;
                memory.write(u64::from_le_bytes(*slot) as usize * size, data);
            }
            free.push(u64::from_le_bytes(*slot));
        }
        stream.taken(len);
        answers += free.len() as u64;
        if gauge.add(free.len()) {
            break;
        }
    }
    done(answers, 0);
    Ok(())
}
