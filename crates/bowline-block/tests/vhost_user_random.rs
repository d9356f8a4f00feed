//! A machine's process and its guest that send and write anything. Whatever that is: no thread
//! panics, each connection ends, rings can be stopped, every page that is written is in the dirty
//! log, and other machines are served. Used by the test on random bytes and by the fuzz target
//! `vhost_user`.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use bowline_block::LocalDevice;
use bowline_block::backend::{self, BackendSpec};
use bowline_block::front::vhost_user::{self, VhostUserOptions, VhostUserServer};
use bowline_verbs::Buffer;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Longest wait for what has to come.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the guest's memory, which it sees at address 0, and the upper half once more.
const BYTES: usize = 64 << 10;
const AGAIN: u64 = 0x2_0000;
const PAGE: usize = 4096;
/// Descriptors of the ring, and where its parts are.
const SIZE: u16 = 16;
const AVAILABLE: u64 = 16 * SIZE as u64;
const USED: u64 = AVAILABLE + 8 + 2 * SIZE as u64;
const RING: std::ops::Range<usize> = USED as usize..USED as usize + 6 + 8 * SIZE as usize;
/// Where the used ring is for the log.
const USED_LOG: u64 = 0x3_0000;
const LOG_ALL: u64 = 1 << 26;
const INDIRECT: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;

static SERVER: LazyLock<(VhostUserServer, PathBuf)> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("bowline-random-{}", std::process::id()));
    let store = backend::open(BackendSpec::Memory { bytes: 1 << 20, block: 512 });
    let disk = LocalDevice::new("disk", store.expect("memory"));
    let served = vhost_user::serve(disk, &path, VhostUserOptions::default(), |_| {});
    (served.expect("served"), path)
});

fn memfd(len: usize) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("machine", flags).expect("a file");
    ftruncate(&file, len as u64).expect("its size");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
    file
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).expect("an event descriptor")
}

/// A machine's process.
struct Machine(UnixStream);

impl Machine {
    fn connect() -> Self {
        let socket = UnixStream::connect(&SERVER.1).expect("it listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self(socket)
    }

    /// Sends a message; returns false if the connection has ended.
    fn send(&self, request: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let header = [request, flags, body.len() as u32].into_iter().flat_map(u32::to_ne_bytes);
        let bytes: Vec<u8> = header.chain(body.iter().copied()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let piece = [IoSlice::new(&bytes)];
        let sent = rustix::net::sendmsg(&self.0, &piece, &mut ancillary, SendFlags::NOSIGNAL);
        sent.is_ok()
    }

    fn set(&self, request: u32, numbers: &[u64], fds: &[BorrowedFd<'_>]) -> bool {
        let body: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.send(request, 1, &body, fds)
    }

    /// Asks something; `None`: the connection has ended.
    fn ask(&mut self, request: u32, numbers: &[u64]) -> Option<u64> {
        if !self.set(request, numbers, &[]) {
            return None;
        }
        let mut answer = [0; 20];
        match self.0.read_exact(&mut answer) {
            Ok(()) => Some(u64::from_ne_bytes(answer[12..].try_into().expect("8 bytes"))),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("no answer"),
            Err(_) => None,
        }
    }

    /// Sends no more; the server ends the connection.
    fn end(mut self) {
        _ = self.0.shutdown(Shutdown::Write);
        let mut bytes = [0; 4096];
        loop {
            match self.0.read(&mut bytes) {
                Ok(1..) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    panic!("the connection does not end")
                }
                _ => return,
            }
        }
    }
}

fn halves(low: u32, high: u32) -> u64 {
    let [a, b, c, d] = low.to_ne_bytes();
    let [e, f, g, h] = high.to_ne_bytes();
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// Plays what the bytes say; returns the number of requests that were used.
pub fn play(bytes: &[u8]) -> u64 {
    let Some((kind, rest)) = bytes.split_first() else { return 0 };
    let used = if kind & 1 == 0 { guest(*kind, rest) } else { messages(rest) };
    let mut other = Machine::connect();
    assert!(other.ask(1, &[]).is_some(), "another machine is served");
    other.end();
    used
}

/// A guest whose memory begins with these bytes.
fn guest(kind: u8, bytes: &[u8]) -> u64 {
    let file = memfd(BYTES);
    let memory = Buffer::from_memfd(&file).expect("memory");
    memory.write(0, &bytes[..bytes.len().min(BYTES)]);
    if kind & 2 != 0 {
        tidy(&memory);
    }
    let mut machine = Machine::connect();
    let Some(features) = machine.ask(1, &[]) else { panic!("it does not answer") };
    let without = [(4, INDIRECT), (8, EVENT_IDX)];
    let without = without.iter().filter(|(bit, _)| kind & bit != 0);
    let features = without.fold(features | LOG_ALL, |features, (_, feature)| features & !feature);
    machine.set(2, &[features], &[]);
    let half = BYTES as u64 / 2;
    let regions = [2, 0, BYTES as u64, 0, 0, AGAIN, half, AGAIN, half];
    machine.set(5, &regions, &[file.as_fd(), file.as_fd()]);
    let log_file = memfd(8);
    let log = Buffer::from_memfd(&log_file).expect("a log");
    machine.set(6, &[8, 0], &[log_file.as_fd()]);
    // Its echo.
    machine.0.read_exact(&mut [0; 28]).expect("an answer");
    if kind & 16 != 0 {
        // What was in flight is what the last bytes say.
        let inflight = memfd(320);
        let region = Buffer::from_memfd(&inflight).expect("a region");
        let last = &bytes[bytes.len().saturating_sub(320)..];
        region.write(0, last);
        machine.set(32, &[320, 0, u64::from(halves_of_queue())], &[inflight.as_fd()]);
    }
    let kick = event();
    machine.set(8, &[halves(0, SIZE.into())], &[]);
    machine.set(9, &[halves(0, 1), 0, USED, AVAILABLE, USED_LOG], &[]);
    machine.set(12, &[0], &[kick.as_fd()]);
    let before = contents(&memory);
    let used_before = memory.load_u16(USED as usize + 2);
    machine.set(18, &[halves(0, 1)], &[]);
    rustix::io::write(&kick, &1_u64.to_ne_bytes()).expect("kicked");
    if kind & 32 != 0 {
        // While the memory is read, it changes.
        for (at, byte) in (0..).zip(bytes.iter().rev().take(600)) {
            memory.write(at * 7 % 600, &[*byte]);
        }
        _ = machine.ask(1, &[]);
        _ = machine.ask(11, &[0]);
        machine.end();
        return 0;
    }
    // The kick is there before the question, whose answer comes after the kick was seen; requests
    // are taken before the next message.
    let is_stopped = machine.ask(1, &[]).is_some() && machine.ask(11, &[0]).is_some();
    assert!(is_stopped, "its process has done nothing wrong");
    let used = memory.load_u16(USED as usize + 2).wrapping_sub(used_before);
    machine.end();
    let mut word = [0; 8];
    log.read(0, &mut word);
    let marked = |page: usize| u64::from_le_bytes(word) >> page & 1 != 0;
    for (page, (before, now)) in before.chunks(PAGE).zip(contents(&memory).chunks(PAGE)).enumerate()
    {
        let again = page.checked_sub(BYTES / PAGE / 2).map(|page| AGAIN as usize / PAGE + page);
        let is_logged = marked(page) && again.is_none_or(marked);
        // The ring has a log of its own.
        let in_ring = |at: &usize| page == 0 && RING.contains(at);
        let changed = (0..PAGE).filter(|at| !in_ring(at)).any(|at| before[at] != now[at]);
        assert!(is_logged || !changed, "page {page} is not logged");
    }
    let ring_changed = before[RING] != contents(&memory)[RING];
    assert!(!ring_changed || marked(USED_LOG as usize / PAGE) || marked(0), "the ring");
    if used <= SIZE { used.into() } else { 0 }
}

/// One queue of the ring's size, as a message says it.
fn halves_of_queue() -> u32 {
    let [a, b] = 1_u16.to_ne_bytes();
    let [c, d] = SIZE.to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

fn contents(memory: &Buffer) -> Vec<u8> {
    let mut bytes = Vec::new();
    memory.append_to(0, BYTES, &mut bytes);
    bytes
}

/// Has descriptors refer to memory, most of the time, and the ring to descriptors.
fn tidy(memory: &Buffer) {
    let word = |at: usize| {
        let mut bytes = [0; 4];
        memory.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    };
    for at in (0..usize::from(SIZE) * 16).step_by(16) {
        let (address, more) = (word(at), word(at + 4));
        let (len, flags) = (word(at + 8), word(at + 12));
        // Up to the second place where memory is, and a little behind.
        let address = u64::from(address) % (AGAIN + BYTES as u64 / 2 + 64);
        let len = [len % 32, len % 1024, len % 16 * 512, 16][(len >> 28) as usize % 4];
        let (flags, next) = (flags & 0x7, (flags >> 16) % (u32::from(SIZE) + 1));
        let flags = if flags & 4 != 0 && flags & 3 != 0 { flags & 3 } else { flags };
        // Most are header, data and status of a request.
        let (part, following) = (at / 16 % 3, at as u32 / 16 + 1);
        let (len, flags, next) = match more & 7 {
            0 | 1 => (len, flags, next),
            _ if part == 0 => (16, 1, following),
            _ if part == 1 => (len, 1 | more >> 3 & 2, following),
            _ => (1 + len % 4, 2, following),
        };
        if part == 0 && address < BYTES as u64 - 16 {
            memory.write(address as usize, &[(more >> 8) as u8 % 14, 0, 0, 0]);
            memory.write(address as usize + 10, &[0; 6]);
        }
        memory.write(at, &address.to_le_bytes());
        memory.write(at + 8, &len.to_le_bytes());
        memory.write(at + 12, &(flags | next << 16).to_le_bytes());
    }
    let available = AVAILABLE as usize;
    let index = memory.load_u16(available + 2) % (SIZE + 2);
    memory.store_u16(available + 2, index.to_le());
    for at in (0..usize::from(SIZE)).map(|n| available + 4 + 2 * n) {
        memory.store_u16(at, u16::from_le(memory.load_u16(at)) % SIZE);
    }
    memory.write(USED as usize, &[0; 4]);
}

/// Numbers that messages have in common.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    16,
    4096,
    8192,
    1 << 16,
    1 << 20,
    (1 << 20) - 8,
    1 << 32,
    0x10_0001,
    u32::MAX as u64,
    u64::MAX - 4095,
    u64::MAX,
];

/// A machine's process that sends messages with numbers and descriptors of any kind.
fn messages(mut bytes: &[u8]) -> u64 {
    let machine = Machine::connect();
    let (file, channel) = (memfd(1 << 20), UnixStream::pair().expect("a pair"));
    let null = File::open("/dev/null").expect("a device");
    for _ in 0..64 {
        let Some(([request, flags, fds, len], rest)) = bytes.split_first_chunk() else { break };
        let (body, rest) = rest.split_at(rest.len().min(usize::from(len % 80)));
        bytes = rest;
        // Numbers that mean something are likelier in a byte each.
        let body: Vec<u8> = match flags & 0x80 {
            0 => body.to_vec(),
            _ => {
                let number = |byte: &u8| match NUMBERS.get(usize::from(*byte)) {
                    Some(number) => *number,
                    None => halves(u32::from(byte >> 5), u32::from(byte & 0x1f)),
                };
                body.iter().flat_map(|byte| number(byte).to_ne_bytes()).collect()
            }
        };
        let event = event();
        let all: [BorrowedFd<'_>; 4] =
            [file.as_fd(), event.as_fd(), channel.1.as_fd(), null.as_fd()];
        let count = usize::from(fds >> 4) % 5;
        let fds: Vec<_> = (0..count).map(|n| all[(usize::from(*fds) + n) % 4]).collect();
        let flags = if flags & 0x40 == 0 { 1 | u32::from(flags & 8) } else { (*flags).into() };
        if !machine.send((request % 44).into(), flags, &body, &fds) {
            break;
        }
    }
    machine.end();
    0
}

/// Returns bytes that the seed draws.
#[cfg(test)]
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

// tests [NB-66]
#[test]
fn random_machines_are_served_or_disconnected_and_what_they_have_written_is_logged() {
    std::panic::set_hook(Box::new(|why| {
        // Also in a thread of the server.
        eprintln!("{why}");
        std::process::abort();
    }));
    let mut used = 0;
    for seed in 0..600_u64 {
        // Shown when it fails.
        println!("seed {seed}");
        let mut bytes = noise(seed, 1024);
        bytes[0] = (seed % 64) as u8;
        used += play(&bytes);
    }
    assert!(used > 50, "{used}");
}
