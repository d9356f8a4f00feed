//! A hostile node against the agent of a program: it gets what calls have given, and nothing else.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bowline_host_client::Descriptors;
use bowline_host_client::agent::{self, Given, Reach};
use bowline_host_wire::agent::{ANSWER_HEAD, Answer, BYTES_MAX, Kind, REQUEST_HEAD, Request};
use bowline_testkit::skipped;
use bowline_wire::rds::uapi::{RDS_CMSG_RDMA_ARGS, RDS_GET_MR, SOL_RDS, put_cmsg};

const LIMIT: Duration = Duration::from_secs(20);
const EFAULT: u32 = libc::EFAULT.cast_unsigned();

/// The agent is one for the whole process.
static ONLY: Mutex<()> = Mutex::new(());

fn only() -> MutexGuard<'static, ()> {
    ONLY.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Plain;

impl Descriptors for Plain {
    fn opened(fd: c_int) -> c_int {
        fd
    }

    fn closes(_fd: c_int) {}
}

/// Descriptors of a process that has the memory of another.
struct OfVisitor;

impl Descriptors for OfVisitor {
    fn opened(fd: c_int) -> c_int {
        fd
    }

    fn closes(_fd: c_int) {}

    fn are_kept() -> bool {
        false
    }
}

/// A node of some other user, which does as it likes. It names this grant, or with 0 none.
struct Hostile(OwnedFd, u32);

impl Hostile {
    /// The node has been sent the descriptor.
    fn of(given: &Given) -> Self {
        // SAFETY: makes a descriptor.
        let end = unsafe { libc::dup(given.descriptor()) };
        // SAFETY: the copy is this one's alone.
        let end = unsafe { OwnedFd::from_raw_fd(end) };
        let limit = libc::timeval { tv_sec: LIMIT.as_secs().cast_signed(), tv_usec: 0 };
        let len = size_of::<libc::timeval>() as libc::socklen_t;
        let (fd, limit) = (end.as_raw_fd(), (&raw const limit).cast());
        for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            // SAFETY: the value has this length.
            let set = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, name, limit, len) };
            assert_eq!(set, 0);
        }
        Self(end, 0)
    }

    /// The same node for what uses a region by its key: it asks for what was given then.
    fn with_key(given: &Given) -> Self {
        Self(Self::of(given).0, given.number() as u32)
    }

    fn send(&self, message: &[u8]) -> io::Result<()> {
        let (fd, flags) = (self.0.as_raw_fd(), libc::MSG_NOSIGNAL);
        // SAFETY: the message is readable for its length.
        let sent = unsafe { libc::send(fd, message.as_ptr().cast(), message.len(), flags) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn receive(&self) -> Vec<u8> {
        let mut message = vec![0; ANSWER_HEAD + BYTES_MAX + 1];
        let (fd, to, len) = (self.0.as_raw_fd(), message.as_mut_ptr().cast(), message.len());
        // SAFETY: writable for its length.
        let got = unsafe { libc::recv(fd, to, len, 0) };
        assert!(got >= 0, "{}", io::Error::last_os_error());
        message.truncate(got as usize);
        message
    }

    /// The error number of the answer, or its bytes.
    fn ask(&self, kind: Kind, at: u64, len: u64, payload: &[u8]) -> Result<Vec<u8>, u32> {
        let request = Request { kind, grant: self.1, sequence: at ^ len, at, len };
        self.send(&[&request.emit()[..], payload].concat()).unwrap();
        let answer = self.receive();
        let (head, bytes) = answer.split_first_chunk().expect("an answer");
        let errno = Answer::parse(head, &request, bytes.len(), bytes.len());
        match errno.expect("the answer to this request") {
            0 => Ok(bytes.to_vec()),
            errno => Err(errno),
        }
    }

    fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, u32> {
        self.ask(Kind::Read, at, len, b"")
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), u32> {
        self.ask(Kind::Write, at, bytes.len() as u64, bytes).map(drop)
    }

    fn has(&self, ranges: &[(u64, u64)]) -> Result<(), u32> {
        let bytes: Vec<u8> = ranges
            .iter()
            .flat_map(|(at, len)| [at.to_ne_bytes(), len.to_ne_bytes()].concat())
            .collect();
        self.ask(Kind::Has, 0, ranges.len() as u64, &bytes).map(drop)
    }

    fn swap(&self, at: u64, old: u64, new: u64) -> Result<u64, u32> {
        let payload = [old.to_ne_bytes(), new.to_ne_bytes()].concat();
        let found = self.ask(Kind::Swap, at, 8, &payload)?;
        Ok(u64::from_ne_bytes(found.try_into().unwrap()))
    }

    fn give_back(&self, grants: &[u64]) {
        let request =
            Request { kind: Kind::Forget, grant: 0, sequence: 0, at: 0, len: grants.len() as u64 }
                .emit();
        let numbers: Vec<u8> = grants.iter().flat_map(|grant| grant.to_ne_bytes()).collect();
        self.send(&[&request[..], &numbers].concat()).unwrap();
    }

    fn is_ended(&self) -> bool {
        self.receive().is_empty()
    }
}

/// Memory whose addresses are known.
struct Memory(Box<[u64]>);

impl Memory {
    fn new(words: usize) -> Self {
        Self((0..words as u64).map(|n| n * 0x0101_0101).collect())
    }

    fn at(&mut self) -> u64 {
        self.0.as_mut_ptr().expose_provenance() as u64
    }
}

fn get_mr(at: u64, len: u64, key_at: u64) -> Reach {
    let value: Vec<u8> = [at, len, key_at, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    Reach::for_option(SOL_RDS, RDS_GET_MR, &value).expect("memory")
}

/// An operation that reads here, or writes.
fn operation(pieces: &[u64], reads: bool) -> Reach {
    let vector = pieces.as_ptr().expose_provenance() as u64;
    let words = [0, 0, 1 << 20, vector, pieces.len() as u64 / 2, u64::from(reads), 0];
    let data: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut bytes = Vec::new();
    put_cmsg(&mut bytes, usize::MAX, SOL_RDS, RDS_CMSG_RDMA_ARGS, &data);
    Reach::for_control(&bytes).expect("memory")
}

fn give(node: u64, socket: u64, reach: &Reach) -> Given {
    agent::give::<Plain>(node, socket, reach).expect("given")
}

/// The call is over, and was accepted.
fn accepted(mut given: Given) {
    given.accept();
}

/// Calls until it is so: the agent does what has no answer at some time.
fn comes_about(mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
    }
}

// tests [RMR-12]
#[test]
fn a_program_gives_memory_to_as_many_nodes_as_it_lives_to_see() {
    const AT_A_TIME: u64 = 32;
    let _only = only();
    let mut memory = Memory::new(64);
    let at = memory.at();
    let reach = get_mr(at, 64, at + 256);
    memory.0[32] = 9;
    let kept = give(1000, 1000, &reach);
    let node = Hostile::of(&kept);
    accepted(kept);
    // One after the other, each of which is gone by the next.
    for number in 1001..1001 + 3 * AT_A_TIME {
        accepted(give(number, number, &reach));
        agent::take_back(number, None);
    }
    assert_eq!(node.read(at + 8, 8).map(|bytes| bytes.len()), Ok(8), "what is given stays so");
    // At the same time this many may exist.
    let more: Vec<_> = (2001..2000 + AT_A_TIME).map(|number| give(number, 7, &reach)).collect();
    assert_eq!(agent::give::<Plain>(3000, 7, &reach).map(drop), Err(libc::EMFILE));
    drop(more);
    agent::take_back(1000, None);
    drop(give(3000, 7, &reach));
}

// tests [RMR-12]
#[test]
fn a_node_reads_and_writes_what_was_given_and_nothing_beside_it() {
    let _only = only();
    let mut memory = Memory::new(64);
    let at = memory.at();
    let given = give(1, 7, &get_mr(at + 16, 100, at + 256));
    let node = Hostile::of(&given);
    assert_eq!(node.read(at + 16, 8), Ok((2 * 0x0101_0101_u64).to_ne_bytes().to_vec()));
    assert_eq!(node.read(at + 16, 100).map(|bytes| bytes.len()), Ok(100));
    assert_eq!(node.read(at + 115, 1).map(|bytes| bytes.len()), Ok(1));
    assert_eq!(node.write(at + 108, b"8 bytes."), Ok(()));
    assert_eq!(node.read(at + 108, 8), Ok(b"8 bytes.".to_vec()));
    assert_eq!(node.has(&[(at + 16, 100), (at + 256, 8), (at + 115, 1)]), Ok(()));
    for (from, len) in [
        (at + 15, 1),
        (at + 15, 2),
        (at + 16, 101),
        (at + 116, 1),
        (at + 115, 2),
        (at, 512),
        (at + 16, BYTES_MAX as u64),
        (0, 8),
        (u64::MAX - 8, 8),
        (1 << 63, 8),
    ] {
        assert_eq!(node.read(from, len), Err(EFAULT), "{from:x} {len}");
        assert_eq!(node.write(from, &vec![0xff; len as usize]), Err(EFAULT), "{from:x} {len}");
        assert_eq!(node.has(&[(at + 16, 1), (from, len)]), Err(EFAULT), "{from:x} {len}");
    }
    assert_eq!(node.has(&[(at + 16, 0)]), Err(EFAULT));
    assert_eq!(node.has(&[(u64::MAX, u64::MAX)]), Err(EFAULT));
    assert_eq!(node.swap(at + 24, 3 * 0x0101_0101, 5), Ok(3 * 0x0101_0101));
    assert_eq!(node.swap(at + 24, 6, 7), Ok(5), "another value");
    assert_eq!(node.swap(at + 8, 0, 7), Err(EFAULT));
    assert_eq!(node.swap(at + 112, 0, 7), Err(EFAULT), "half of it");
    // Where the key is stored the node writes, in this call.
    assert_eq!(node.read(at + 256, 8), Err(EFAULT));
    assert_eq!(node.swap(at + 256, 0, 7), Err(EFAULT));
    assert_eq!(node.write(at + 256, &0x0010_0000_0007_u64.to_ne_bytes()), Ok(()));
    accepted(given);
    assert_eq!(node.write(at + 256, &[0; 8]), Err(EFAULT));
    assert_eq!(memory.0[32], 0x0010_0000_0007);
    assert_eq!(node.read(at + 16, 8).map(|bytes| bytes.len()), Ok(8), "the region stays");
    let others: Vec<u64> = (0..64).filter(|n| ![3, 13, 14, 32].contains(n)).collect();
    assert!(others.iter().all(|n| memory.0[*n as usize] == n * 0x0101_0101), "unchanged");

    // RDS_FREE_MR of other keys and of other sockets does not count.
    for (socket, cookie) in [(7, 8), (8, 7)] {
        agent::take_back(socket, Some(cookie));
    }
    assert_eq!(node.read(at + 16, 8).map(|bytes| bytes.len()), Ok(8));
    agent::take_back(7, Some(0x0020_0000_0007));
    assert_eq!(node.read(at + 16, 8), Err(EFAULT));
    assert_eq!(node.write(at + 16, b"late"), Err(EFAULT));
    assert_eq!(node.swap(at + 24, 5, 9), Err(EFAULT));
    assert_eq!(node.has(&[(at + 16, 1)]), Err(EFAULT));
    assert_eq!(memory.0[3], 5);
}

/// The program frees what it finds where the key is stored: so that is what counts, and nothing
/// that the node has had there before or would like there later.
// tests [RMR-12]
#[test]
fn the_key_of_a_region_is_the_one_that_the_program_finds() {
    let _only = only();
    let mut memory = Memory::new(64);
    let at = memory.at();
    let key_at = at + 256;
    let mut given = give(1, 7, &get_mr(at, 64, key_at));
    let node = Hostile::of(&given);
    for key in [0x1007_u64, 0x2007] {
        assert_eq!(node.write(key_at, &key.to_ne_bytes()), Ok(()));
    }
    given.accept();
    // The call has not returned yet.
    assert_eq!(node.write(key_at, &0x3007_u64.to_ne_bytes()), Err(EFAULT));
    drop(given);
    assert_eq!(memory.0[32], 0x2007);
    assert!(node.read(at, 8).is_ok());
    agent::take_back(7, Some(memory.0[32]));
    assert_eq!(node.read(at, 8), Err(EFAULT));
}

// tests [RMR-12]
#[test]
fn a_region_with_a_key_that_nobody_can_free_is_not_given() {
    let _only = only();
    let mut memory = Memory::new(64);
    let at = memory.at();
    memory.0[32] = 0;
    // No key, or none that the node has said; without a place for it the program wants none.
    for (key_at, is_given) in [(at + 256, false), (0, true)] {
        let given = give(1, 7, &get_mr(at, 64, key_at));
        let node = Hostile::of(&given);
        assert!(node.read(at, 8).is_ok());
        accepted(given);
        assert_eq!(node.read(at, 8).is_ok(), is_given, "{key_at:x}");
    }
    agent::take_back(7, None);
    // What an operation in the same call needs is given all the same.
    let pieces = [at + 8, 8];
    accepted(give(1, 7, &operation(&pieces, true)));
    let node = Hostile::of(&give(1, 7, &get_mr(at + 128, 8, 0)));
    assert!(node.read(at + 8, 8).is_ok());
    agent::take_back(7, None);
}

// tests [RMR-12]
#[test]
fn what_is_given_ends_with_the_last_descriptor_of_its_socket() {
    let _only = only();
    let mut memory = Memory::new(64);
    let at = memory.at();
    let (first, other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let copy = first.try_clone().unwrap();
    let of = |socket: &std::os::unix::net::UnixDatagram| agent::socket_of(socket.as_raw_fd());
    let socket = of(&first).expect("a number");
    assert_eq!(of(&copy), Some(socket), "of the same socket");
    assert_ne!(of(&other), Some(socket));
    assert_eq!(agent::socket_of(std::fs::File::open("/dev/null").unwrap().as_raw_fd()), None);
    let given = give(1, socket, &get_mr(at, 8, 0));
    let node = Hostile::of(&given);
    accepted(given);
    accepted(give(1, of(&other).unwrap(), &get_mr(at + 64, 8, 0)));
    drop(first);
    agent::has_closed(socket);
    agent::has_closed_some();
    assert!(node.read(at, 8).is_ok(), "there is a copy");
    drop(copy);
    agent::has_closed(socket);
    assert_eq!(node.read(at, 8), Err(EFAULT));
    assert!(node.read(at + 64, 8).is_ok());
    drop(other);
    agent::has_closed_some();
    assert_eq!(node.read(at + 64, 8), Err(EFAULT));
}

// tests [RMR-12]
#[test]
fn operations_give_what_their_direction_needs_until_they_end() {
    let _only = only();
    let mut memory = Memory::new(64);
    let at = memory.at();
    let pieces = [at + 8, 8, at + 16, 8, at + 64, 8];
    let vector = pieces.as_ptr().expose_provenance() as u64;
    let writes = give(1, 7, &operation(&pieces, true));
    let node = Hostile::of(&writes);
    assert_eq!(node.read(vector, 48).map(|bytes| bytes.len()), Ok(48));
    assert_eq!(node.write(vector, &[0; 8]), Err(EFAULT));
    assert_eq!(node.read(at + 8, 16).map(|bytes| bytes.len()), Ok(16), "neighbours");
    assert_eq!(node.write(at + 8, &[0; 8]), Err(EFAULT), "it is only sent");
    assert_eq!(node.swap(at + 8, 0, 1), Err(EFAULT));
    assert_eq!(node.read(at + 24, 8), Err(EFAULT), "between pieces");
    let first = writes.number();
    accepted(writes);
    assert_eq!(node.read(vector, 16), Err(EFAULT));
    assert_eq!(node.read(at + 64, 8).map(|bytes| bytes.len()), Ok(8));
    let reads = give(1, 7, &operation(&pieces[4..], false));
    assert_eq!(node.write(at + 64, b"from far"), Ok(()));
    let second = reads.number();
    accepted(reads);
    node.give_back(&[u64::MAX, second, 0]);
    comes_about(|| node.write(at + 64, b"too late") == Err(EFAULT));
    assert_eq!(node.read(at + 64, 8), Ok(b"from far".to_vec()), "the other goes on");
    node.give_back(&[first]);
    comes_about(|| node.read(at + 64, 8) == Err(EFAULT));
    // A call that fails leaves nothing, nor does a socket that is closed.
    let failed = give(1, 7, &operation(&pieces, true));
    drop(failed);
    assert_eq!(node.read(at + 8, 8), Err(EFAULT));
    accepted(give(1, 7, &operation(&pieces, true)));
    accepted(give(1, 8, &get_mr(at + 128, 8, 0)));
    agent::take_back(7, None);
    assert_eq!(node.read(at + 8, 8), Err(EFAULT));
    assert_eq!(node.read(at + 128, 8).map(|bytes| bytes.len()), Ok(8), "another socket's");
    agent::take_back(8, None);
}

// tests [RMR-12]
#[test]
fn a_node_uses_nothing_that_was_given_to_another() {
    let _only = only();
    let mut memory = Memory::new(8);
    let at = memory.at();
    let (one, other) = (give(1, 7, &get_mr(at, 8, 0)), give(2, 7, &get_mr(at + 32, 8, 0)));
    let (a, b) = (Hostile::of(&one), Hostile::of(&other));
    assert!(a.read(at, 8).is_ok() && b.read(at + 32, 8).is_ok());
    assert_eq!((a.read(at + 32, 8), b.read(at, 8)), (Err(EFAULT), Err(EFAULT)));
    b.give_back(&[one.number()]);
    assert!(b.read(at + 32, 8).is_ok() && a.read(at, 8).is_ok(), "it was not b's to give back");
}

// tests [RMR-12]
#[test]
fn a_malformed_message_ends_the_connection_and_all_that_was_given_over_it() {
    let _only = only();
    let mut memory = Memory::new(8);
    let at = memory.at();
    let head = |kind: u64, at: u64, len: u64| {
        [kind, 1, at, len].iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>()
    };
    let max = BYTES_MAX as u64;
    for message in [
        vec![7; 1],
        vec![7; REQUEST_HEAD - 1],
        vec![0; REQUEST_HEAD],
        head(6, at, 8),
        head(6 | 1 << 40, at, 8),
        [head(5 | 1 << 40, 0, 1), vec![0; 8]].concat(),
        head(1, at, 0),
        head(1, at, max + 1),
        head(1, u64::MAX, 2),
        [head(1, at, 8), vec![0]].concat(),
        [head(2, at, 8), vec![0; 7]].concat(),
        [head(2, at, 8), vec![0; 9]].concat(),
        [head(2, at, max + 1), vec![0; BYTES_MAX + 1]].concat(),
        [head(2, at, max), vec![0; BYTES_MAX + 4096]].concat(),
        head(3, 0, 1 << 60),
        [head(3, 0, 1025), vec![0; 16 * 1025]].concat(),
        [head(4, at + 4, 8), vec![0; 16]].concat(),
        [head(5, 0, 2), vec![0; 8]].concat(),
    ] {
        let given = give(3, 7, &get_mr(at, 64, 0));
        let node = Hostile::of(&given);
        assert!(node.read(at, 64).is_ok());
        accepted(given);
        node.send(&message).unwrap();
        assert!(node.is_ended(), "{message:?}");
        // The program goes on, and so does its memory at another time.
        let mut again = None;
        comes_about(|| {
            let given = give(3, 7, &get_mr(at + 8, 8, 0));
            let node = Hostile::of(&given);
            let answers = node.send(&head(1, at + 8, 8)).is_ok() && !node.receive().is_empty();
            again = answers.then_some((given, node));
            answers
        });
        let (_given, node) = again.unwrap();
        assert_eq!(node.read(at, 8), Err(EFAULT), "what was given before");
    }
}

// tests [RMR-12]
#[test]
fn floods_cost_a_node_its_connection_and_nobody_else_anything() {
    let _only = only();
    let mut memory = Memory::new(8 << 10);
    let at = memory.at();
    let flooding = give(4, 7, &get_mr(at, 64 << 10, 0));
    let patient = give(5, 7, &get_mr(at, 64 << 10, 0));
    let (flood, node) = (Hostile::of(&flooding), Hostile::of(&patient));
    let request =
        Request { kind: Kind::Read, grant: 0, sequence: 1, at, len: BYTES_MAX as u64 }.emit();
    let mut sent = 0;
    // No answer is taken.
    while flood.send(&request).is_ok() {
        sent += 1;
        assert!(sent < 100_000);
    }
    assert_eq!(node.read(at, 64 << 10).map(|bytes| bytes.len()), Ok(64 << 10));
    comes_about(|| flood.is_ended());
    // Numbers that are nobody's, as many as there is room for.
    for _ in 0..2000 {
        node.give_back(&[u64::MAX; 1024]);
    }
    assert_eq!(node.read(at, 8).map(|bytes| bytes.len()), Ok(8));
}

// tests [RMR-12]
#[test]
fn a_node_that_gives_nothing_back_fills_only_what_there_is_for_it() {
    let _only = only();
    let mut memory = Memory::new(3 * 1024);
    let at = memory.at();
    let pieces: Vec<u64> = (0..1024).flat_map(|n| [at + 24 * n, 8]).collect();
    let reach = operation(&pieces, false);
    let mut kept = 0;
    let errno = loop {
        match agent::give::<Plain>(6, 7, &reach) {
            Ok(given) => accepted(given),
            Err(errno) => break errno,
        }
        kept += 1;
        assert!(kept < 1000);
    };
    assert_eq!((errno, kept), (libc::EAGAIN, 15));
    agent::take_back(7, None);
    assert!(agent::give::<Plain>(6, 7, &reach).is_ok(), "all of it is there again");
}

const PAGE: u64 = 4096;

/// Maps private memory, at an address where the test has some, or anywhere for 0, without a call
/// that the library would see.
fn map(at: u64, len: u64) -> u64 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let flags = if at == 0 { flags } else { flags | libc::MAP_FIXED };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let to = std::ptr::with_exposed_provenance_mut(at as usize);
    // SAFETY: it replaces nothing but memory that the test has mapped and nothing refers to.
    let at = unsafe { libc::mmap(to, len as usize, access, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at.expose_provenance() as u64
}

/// Tells whether this process can watch its memory.
fn watches() -> bool {
    // SAFETY: makes a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, bowline_host_wire::watch::FLAGS) };
    // SAFETY: it was just made.
    fd >= 0 && unsafe { libc::close(fd as c_int) } == 0
}

// tests [RMR-13]
#[test]
fn what_was_replaced_stays_gone_whatever_is_given_afterwards() {
    let _only = only();
    if !watches() {
        return skipped::because("there is no userfaultfd");
    }
    for is_operation in [false, true] {
        for (name, offset, len) in [
            ("the same", PAGE + 8, 100),
            ("of the same page", PAGE + 2000, 100),
            ("the next page", 2 * PAGE, 100),
            ("the page before", 0, PAGE),
            ("all of it", 0, 4 * PAGE),
            ("a part", PAGE + 48, 8),
        ] {
            let at = map(0, 4 * PAGE);
            let region = |at, len| {
                let given = give(1, 7, &get_mr(at, len, 0));
                let node = Hostile::with_key(&given);
                accepted(given);
                node
            };
            let (first, beside) = (region(at + PAGE + 8, 100), region(at + 3 * PAGE, 100));
            assert_eq!(first.write(at + PAGE + 8, b"w"), Ok(()), "{name}");
            map(at + PAGE, PAGE);
            let second = if is_operation {
                let pieces = [at + offset, len];
                accepted(give(1, 7, &operation(&pieces, false)));
                None
            } else {
                Some(region(at + offset, len))
            };
            let there = at + PAGE + 64;
            assert_eq!(first.write(there, b"w"), Err(EFAULT), "{name}");
            assert_eq!(first.read(there, 8), Err(EFAULT), "{name}");
            assert_eq!(first.swap(there, 0, 1), Err(EFAULT), "{name}");
            assert_eq!(beside.write(at + 3 * PAGE, b"w"), Ok(()), "{name}");
            if let Some(second) = second {
                assert_eq!(second.write(at + offset, b"w"), Ok(()), "{name}");
            }
            agent::take_back(7, None);
            // SAFETY: the test has mapped it.
            unsafe {
                libc::munmap(std::ptr::with_exposed_provenance_mut(at as usize), 4 * PAGE as usize)
            };
        }
    }
}

/// The library sees that the memory goes away, and that what comes in its place is given.
// tests [RMR-13]
#[test]
fn what_went_away_is_not_what_is_given_at_its_address_later() {
    let _only = only();
    let mut memory = Memory::new(64);
    let at = memory.at();
    let given = give(1, 7, &get_mr(at, 64, 0));
    let first = Hostile::with_key(&given);
    accepted(given);
    assert!(first.read(at, 8).is_ok());
    agent::goes_away(at as usize, 64);
    let given = give(1, 7, &get_mr(at, 64, 0));
    let second = Hostile::with_key(&given);
    accepted(given);
    assert_eq!(first.read(at, 8), Err(EFAULT));
    assert_eq!(first.write(at, b"w"), Err(EFAULT));
    assert_eq!(first.has(&[(at, 8)]), Err(EFAULT));
    assert!(second.write(at, b"w").is_ok() && second.has(&[(at, 8)]).is_ok());
    agent::take_back(7, None);
}

/// Two pages of memory, of which an access to the second waits until it is let.
struct Slow {
    at: *mut u8,
    faults: OwnedFd,
}

// SAFETY: plain memory and a descriptor; who uses the memory when, the test says.
unsafe impl Sync for Slow {}

impl Slow {
    const PAGE: usize = 4096;

    /// `None` where the system does not let a process have such memory.
    fn new() -> Option<Self> {
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let len = 2 * Self::PAGE;
        // SAFETY: a mapping at an address of the system's choosing touches no memory that exists.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: makes a descriptor.
        let faults =
            unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if faults < 0 {
            return None;
        }
        // SAFETY: it is nobody else's.
        let faults = unsafe { OwnedFd::from_raw_fd(faults as c_int) };
        let slow = Self { at: at.cast(), faults };
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        slow.ioctl(API, [0xaa, 0, 0, 0]);
        // Of pages that are missing.
        slow.ioctl(REGISTER, [slow.second(), Self::PAGE as u64, 1, 0]);
        Some(slow)
    }

    fn ioctl(&self, request: libc::c_ulong, mut words: [u64; 4]) {
        // SAFETY: the requests read and write at most this many bytes.
        let done =
            unsafe { libc::ioctl(self.faults.as_raw_fd(), request as _, words.as_mut_ptr()) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }

    fn first(&self) -> u64 {
        self.at.expose_provenance() as u64
    }

    fn second(&self) -> u64 {
        self.first() + Self::PAGE as u64
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: aligned, mapped as long as this, and looked at as such by this process only.
        unsafe { AtomicU64::from_ptr(self.at.cast()) }
    }

    /// Waits until an access waits.
    fn wait(&self) {
        let mut event =
            libc::pollfd { fd: self.faults.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure.
        assert_eq!(unsafe { libc::poll(&raw mut event, 1, LIMIT.as_millis() as c_int) }, 1);
        assert_eq!(event.revents, libc::POLLIN);
    }

    fn let_go_on(&self) {
        const ZEROPAGE: libc::c_ulong = 0xc020_aa04;
        self.ioctl(ZEROPAGE, [self.second(), Self::PAGE as u64, 0, 0]);
    }
}

// tests [RMR-12]
#[test]
fn what_is_taken_back_during_a_read_is_not_told() {
    const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;
    let _only = only();
    let Some(slow) = Slow::new() else {
        return skipped::because("no userfaultfd");
    };
    let pieces = [slow.first(), 2 * Slow::PAGE as u64];
    let given = give(8, 7, &operation(&pieces, true));
    let node = Hostile::of(&given);
    accepted(given);
    let read = std::thread::scope(|scope| {
        let read = scope.spawn(|| node.read(pieces[0], pieces[1]));
        slow.wait();
        agent::take_back(7, None);
        slow.word().store(SECRET, SeqCst);
        slow.let_go_on();
        read.join().unwrap()
    });
    assert_eq!(read, Err(EFAULT));
}

// tests [RMR-12]
#[test]
fn memory_is_taken_back_when_nothing_is_written_there_any_more() {
    let _only = only();
    let Some(slow) = Slow::new() else {
        return skipped::because("no userfaultfd");
    };
    let (at, len) = (slow.first(), 2 * Slow::PAGE as u64);
    let given = give(8, 7, &get_mr(at, len, 0));
    let node = Hostile::of(&given);
    accepted(given);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| node.write(at, &vec![0x11; len as usize]));
        slow.wait();
        let lets = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            slow.let_go_on();
        });
        agent::take_back(7, None);
        slow.word().store(77, SeqCst);
        lets.join().unwrap();
        let _ = write.join().unwrap();
    });
    assert_eq!(slow.word().load(SeqCst), 77, "written after it was taken back");
}

// tests [RMR-13]
#[test]
fn memory_goes_away_by_the_page() {
    let _only = only();
    let page = bowline_host_client::system::page();
    let mut memory = Memory::new(4 * page / 8);
    let first = (memory.at() as usize).next_multiple_of(page);
    let [here, next] = [page - 8, page].map(|at| (first + at) as u64);
    for (at, len) in [(first, 1), (first + page - 1, 1), (first + 1, page - 1)] {
        let both = give(9, 7, &operation(&[here, 8, next + 8, 8], true));
        let node = Hostile::of(&both);
        accepted(both);
        assert!(node.read(here, 8).is_ok() && node.read(next + 8, 8).is_ok());
        agent::goes_away(at, len);
        assert_eq!(node.read(here, 8), Err(EFAULT), "{at:x} {len}");
        assert!(node.read(next + 8, 8).is_ok(), "of the page after it");
        agent::take_back(7, None);
    }
}

/// Of `/proc/self/task`: the status of the agent, if there is one.
fn status_of_agent() -> Option<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let statuses =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
    statuses.into_iter().find(|status| status.contains("bowline-memory"))
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn the_agent_is_in_nobody_s_way() {
    let _only = only();
    agent::make_way::<Plain>(0, u32::MAX);
    assert_eq!(status_of_agent(), None);
    let before = descriptors();
    let mut memory = Memory::new(8);
    let at = memory.at();
    let given = give(1, 7, &get_mr(at, 8, 0));
    let node = Hostile::of(&given);
    assert!(node.read(at, 8).is_ok());
    let status = status_of_agent().expect("an agent");
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
    let blocked = u64::from_str_radix(blocked.trim(), 16).unwrap();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGALRM] {
        assert_ne!(blocked & 1 << (signal - 1), 0, "{signal}");
    }
    // The C library asks every thread to change its user.
    // SAFETY: changes nothing.
    assert_eq!(unsafe { libc::setresuid(u32::MAX, u32::MAX, u32::MAX) }, 0);
    accepted(given);
    agent::make_way::<Plain>(20_000, u32::MAX);
    assert!(status_of_agent().is_some(), "it is in the way of none of these");
    agent::make_way::<Plain>(3, u32::MAX);
    assert!(node.is_ended());
    drop(node);
    assert_eq!((status_of_agent(), descriptors()), (None, before));
}

// tests [RMR-12]
#[test]
fn who_has_the_memory_of_another_process_starts_no_agent_there() {
    let _only = only();
    agent::make_way::<Plain>(0, u32::MAX);
    let mut memory = Memory::new(8);
    let at = memory.at();
    let reach = get_mr(at, 8, 0);
    assert_eq!(agent::give::<OfVisitor>(1, 7, &reach).map(drop), Err(libc::EOPNOTSUPP));
    assert_eq!(status_of_agent(), None);
    let given = give(1, 7, &reach);
    let node = Hostile::of(&given);
    accepted(given);
    assert_eq!(agent::give::<OfVisitor>(1, 7, &reach).map(drop), Err(libc::EOPNOTSUPP));
    assert!(node.read(at, 8).is_ok());
    agent::take_back(7, None);
}

/// What a child does has to be little: other threads of this process are not there in it.
fn in_child(does: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only does what follows, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(does));
        // SAFETY: ends the child.
        unsafe { libc::_exit(if done.unwrap_or(false) { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status == 0
}

// tests [RMR-12]
#[test]
fn the_child_of_a_fork_gives_memory_of_its_own() {
    let _only = only();
    let mut memory = Memory::new(8);
    let at = memory.at();
    let given = give(1, 7, &get_mr(at, 8, 0));
    let node = Hostile::of(&given);
    let there = given.descriptor();
    assert!(node.read(at, 8).is_ok());
    let memory = &mut memory.0;
    let done = in_child(|| {
        memory[0] = 77;
        // SAFETY: asks about a number.
        let is_closed = unsafe { libc::fcntl(there, libc::F_GETFD) } < 0;
        let own = give(1, 7, &get_mr(at, 8, 0));
        let own_node = Hostile::of(&own);
        let reads = own_node.read(at, 8) == Ok(77_u64.to_ne_bytes().to_vec());
        accepted(own);
        agent::take_back(7, None);
        is_closed && reads && own_node.read(at, 8) == Err(EFAULT)
    });
    assert!(done, "in the child");
    assert_eq!(node.read(at, 8), Ok(vec![0; 8]), "the parent's goes on");
}
