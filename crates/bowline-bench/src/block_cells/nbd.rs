//! nbdkit with its memory plugin over TCP, and a client of our own: as many requests outstanding as
//! asked, sent with one call as far as they come together.

use std::io::{BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bowline_verbs::Buffer;

use super::{Gauge, Load, STORE, fill};
use crate::role::{Role, done, stopping};

const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
const READ: u16 = 0;
const WRITE: u16 = 1;
const EXPORT_NAME: u32 = 1;
/// Bytes that are read ahead.
const AHEAD: usize = 1 << 18;
/// How long the server may take to start.
const PATIENCE: Duration = Duration::from_secs(4);

/// Says whether nbdkit is there.
pub(crate) fn is_installed() -> bool {
    let asked = Command::new("nbdkit").arg("--version").stdout(Stdio::null()).status();
    asked.is_ok_and(|status| status.success())
}

pub(super) fn serve(mut role: Role) -> Result<(), String> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    let port = free.map_err(|e| format!("bind: {e}"))?.port();
    let mut child = Command::new("nbdkit")
        .args(["--foreground", "--exit-with-parent", "--ipaddr", "127.0.0.1", "--port"])
        .args([&port.to_string(), "memory", &format!("size={STORE}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|e| format!("nbdkit: {e}"))?;
    let begun = Instant::now();
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        if begun.elapsed() > PATIENCE {
            return Err("nbdkit does not listen".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    role.ready(&format!("port={port}"))?;
    let status = child.wait().map_err(|e| format!("nbdkit: {e}"))?;
    Err(format!("nbdkit ended: {status}"))
}

struct Client {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
    out: Vec<u8>,
}

impl Client {
    fn connect(role: &Role) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("NBD: {e}");
        let stream = TcpStream::connect(role.peer_addr()?).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let reader = BufReader::with_capacity(AHEAD, stream.try_clone().map_err(failed)?);
        let mut client = Self { stream, reader, out: Vec::new() };
        let mut hello = [0; 18];
        client.reader.read_exact(&mut hello).map_err(failed)?;
        if !hello.starts_with(b"NBDMAGICIHAVEOPT") {
            return Err("this is no NBD server".into());
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
    let store = Buffer::new(STORE).map_err(|e| format!("memory: {e}"))?;
    fill(&store);
    const PIECE: usize = 1 << 20;
    for at in (0..STORE).step_by(PIECE) {
        client.request(WRITE, 0, at as u64, PIECE);
        store.append_to(at, PIECE, &mut client.out);
        client.flush()?;
        client.reply()?;
    }
    let mut load = Load::new(&role.cell);
    let mut gauge = Gauge::new(&role, None);
    let memory = Buffer::new(depth * size).map_err(|e| format!("memory: {e}"))?;
    let mut offsets = vec![0; depth];
    let mut data = vec![0; size];
    let mut free: Vec<u64> = (0..depth as u64).collect();
    let mut answers = 0;
    while !stopping() {
        for slot in free.drain(..) {
            let offset = load.next();
            let at = slot as usize;
            *offsets.get_mut(at).ok_or("a slot that there is not")? = offset;
            if load.write {
                client.request(WRITE, slot, offset, size);
                memory.write(at * size, &offset.to_le_bytes());
                memory.append_to(at * size, size, &mut client.out);
            } else {
                client.request(READ, slot, offset, size);
            }
        }
        client.flush()?;
        loop {
            let slot = client.reply()?;
            if !load.write {
                client.reader.read_exact(&mut data).map_err(|e| format!("NBD: {e}"))?;
                let first = data.first_chunk::<8>().ok_or("requests of less than 8 bytes")?;
                let offset = offsets.get(slot as usize).ok_or("a slot that there is not")?;
                load.check(*offset, *first)?;
                memory.write(slot as usize * size, &data);
            }
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
