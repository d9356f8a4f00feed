//! nbdkit with its memory plugin and qemu-nbd with a file in memory, over TCP, and a client of our
//! own: as many requests outstanding as asked, sent with one call as far as they come together.

use std::io::{BufReader, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;

use bowline_verbs::Buffer;

use super::server::{serve, start_on, start_with_socket};
use super::{Gauge, Load, fill, memory_file};
use crate::cell::Kind;
use crate::role::{Role, done, stopping};
use crate::sys;

const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
const READ: u16 = 0;
const WRITE: u16 = 1;
const EXPORT_NAME: u32 = 1;
/// Bytes that are read ahead: of several small answers, or little besides a large one, which then
/// is read to where it belongs.
const AHEAD: usize = 1 << 18;
const AHEAD_OF_LARGE: usize = 1 << 12;
/// Data of this size is sent from where it is.
const LARGE: usize = 1 << 16;

pub(super) fn serve_nbdkit(role: Role) -> Result<(), String> {
    let size = format!("size={}", role.cell.store());
    let args = ["--foreground", "memory", &size];
    if role.cell.kind == Kind::DoorWrite {
        let failed = |e: std::io::Error| format!("nbdkit: {e}");
        let name = format!("bowline-bench-{}", std::process::id());
        let at = SocketAddr::from_abstract_name(&name).map_err(failed)?;
        let socket = UnixListener::bind_addr(&at).map_err(failed)?;
        let server = start_on("nbdkit", &args, socket.into())?;
        return serve(role, server, &format!("name={name}"));
    }
    let (server, port) = start_with_socket(&role, "nbdkit", &args)?;
    serve(role, server, &format!("port={port}"))
}

pub(super) fn serve_qemu(role: Role) -> Result<(), String> {
    let (_file, path) = memory_file(role.cell.store())?;
    let args = ["--persistent", "--format", "raw", &path];
    let (server, port) = start_with_socket(&role, "qemu-nbd", &args)?;
    serve(role, server, &format!("port={port}"))
}

pub(super) struct Client {
    stream: Box<dyn Write>,
    reader: BufReader<Box<dyn Read>>,
    out: Vec<u8>,
}

fn failed(e: std::io::Error) -> String {
    format!("NBD: {e}")
}

impl Client {
    fn connect(role: &Role) -> Result<Self, String> {
        let stream = TcpStream::connect(role.peer_addr()?).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        if !role.cell.cc.is_empty() {
            sys::set_all_congestion_control(&role.cell.cc);
        }
        let ahead = if role.cell.size < LARGE { AHEAD } else { AHEAD_OF_LARGE };
        let reader = stream.try_clone().map_err(failed)?;
        Self::greet(Box::new(stream), Box::new(reader), ahead)
    }

    /// Connects to the unix socket whose name the other side has sent.
    pub(super) fn connect_near(role: &Role) -> Result<Self, String> {
        let at = SocketAddr::from_abstract_name(role.peer("name")).map_err(failed)?;
        Self::from_unix(UnixStream::connect_addr(&at).map_err(failed)?)
    }

    /// Connects to the unix socket at this path.
    pub(super) fn connect_at(at: &Path) -> Result<Self, String> {
        Self::from_unix(UnixStream::connect(at).map_err(failed)?)
    }

    fn from_unix(stream: UnixStream) -> Result<Self, String> {
        let reader = stream.try_clone().map_err(failed)?;
        Self::greet(Box::new(stream), Box::new(reader), AHEAD)
    }

    fn greet(stream: Box<dyn Write>, reader: Box<dyn Read>, ahead: usize) -> Result<Self, String> {
        let reader = BufReader::with_capacity(ahead, reader);
        let mut client = Self { stream, reader, out: Vec::new() };
        let mut hello = [0; 18];
        client.reader.read_exact(&mut hello).map_err(failed)?;
        if !hello.starts_with(b"NBDMAGICIHAVEOPT") {
            return Err("this is not an NBD server".into());
        }
        // Fixed newstyle, no zeroes after the export's size.
        client.out.extend_from_slice(&3u32.to_be_bytes());
        client.out.extend_from_slice(b"IHAVEOPT");
        client.out.extend_from_slice(&EXPORT_NAME.to_be_bytes());
        client.out.extend_from_slice(&0u32.to_be_bytes());
        client.flush()?;
        let mut export = [0; 10];
        client.reader.read_exact(&mut export).map_err(failed)?;
        Ok(client)
    }

    fn request(&mut self, kind: u16, slot: u64, offset: u64, len: usize) {
        self.out.extend_from_slice(&REQUEST.to_be_bytes());
        self.out.extend_from_slice(&0u16.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&slot.to_be_bytes());
        self.out.extend_from_slice(&offset.to_be_bytes());
        self.out.extend_from_slice(&(len as u32).to_be_bytes());
    }

    fn flush(&mut self) -> Result<(), String> {
        self.stream.write_all(&self.out).map_err(|e| format!("NBD: {e}"))?;
        self.out.clear();
        Ok(())
    }

    /// Sends the requests so far, and `data` of the last one behind them.
    fn flush_with(&mut self, data: &[u8]) -> Result<(), String> {
        let mut parts = [IoSlice::new(&self.out), IoSlice::new(data)];
        let mut left = &mut parts[..];
        while left.iter().any(|part| !part.is_empty()) {
            let sent = self.stream.write_vectored(left).map_err(|e| format!("NBD: {e}"))?;
            IoSlice::advance_slices(&mut left, sent);
        }
        self.out.clear();
        Ok(())
    }

    /// Writes, and waits for the answer.
    pub(super) fn write_one(&mut self, offset: u64, data: &[u8]) -> Result<(), String> {
        self.request(WRITE, 0, offset, data.len());
        self.out.extend_from_slice(data);
        self.flush()?;
        self.reply().map(drop)
    }

    /// Reads, and waits for the data.
    pub(super) fn read_one(&mut self, offset: u64, data: &mut [u8]) -> Result<(), String> {
        self.request(READ, 0, offset, data.len());
        self.flush()?;
        self.reply()?;
        self.reader.read_exact(data).map_err(failed)
    }

    /// Takes the head of the next reply; returns its slot.
    fn reply(&mut self) -> Result<u64, String> {
        let mut head = [0; 16];
        self.reader.read_exact(&mut head).map_err(|e| format!("NBD: {e}"))?;
        let [m0, m1, m2, m3, e0, e1, e2, e3, slot @ ..] = head;
        let (magic, errno) = ([m0, m1, m2, m3], [e0, e1, e2, e3]);
        if u32::from_be_bytes(magic) != REPLY || u32::from_be_bytes(errno) != 0 {
            return Err(format!("reply {head:x?}"));
        }
        Ok(u64::from_be_bytes(slot))
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let (size, depth) = (role.cell.size, role.cell.depth);
    let mut client = Client::connect(&role)?;
    let bytes = role.cell.store();
    let store = Buffer::new(bytes).map_err(|e| format!("memory: {e}"))?;
    fill(&store);
    const PIECE: usize = 1 << 20;
    for at in (0..bytes).step_by(PIECE) {
        client.request(WRITE, 0, at as u64, PIECE);
        store.append_to(at, PIECE, &mut client.out);
        client.flush()?;
        client.reply()?;
    }
    let mut load = Load::new(&role.cell);
    let mut gauge = Gauge::new(&role, None);
    let mut memory = vec![vec![0u8; size]; depth];
    let mut offsets = vec![0; depth];
    let mut free: Vec<u64> = (0..depth as u64).collect();
    let mut answers = 0;
    while !stopping() {
        for slot in free.drain(..) {
            let offset = load.next();
            let at = slot as usize;
            gauge.asked(at);
            *offsets.get_mut(at).ok_or("an invalid slot")? = offset;
            if load.write {
                client.request(WRITE, slot, offset, size);
                let data = memory.get_mut(at).ok_or("an invalid slot")?;
                data[..8].copy_from_slice(&offset.to_le_bytes());
                if size < LARGE {
                    client.out.extend_from_slice(data);
                } else {
                    client.flush_with(data)?;
                }
            } else {
                client.request(READ, slot, offset, size);
            }
        }
        client.flush()?;
        loop {
            let slot = client.reply()?;
            if !load.write {
                let data = memory.get_mut(slot as usize).ok_or("an invalid slot")?;
                client.reader.read_exact(data).map_err(|e| format!("NBD: {e}"))?;
                let first = data.first_chunk::<8>().ok_or("requests of less than 8 bytes")?;
                let offset = offsets.get(slot as usize).ok_or("an invalid slot")?;
                load.check(*offset, *first)?;
            }
            gauge.answered(slot as usize);
            free.push(slot);
            let more = if load.write { 16 } else { 16 + size };
            if client.reader.buffer().len() < more {
                break;
            }
        }
        answers += free.len() as u64;
        if gauge.add(free.len()) {
            break;
        }
    }
    done(answers, 0);
    // The server serves until its parent ends.
    std::process::exit(0);
}
