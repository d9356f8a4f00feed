//! Peers that mean harm, over real connections: each costs itself at most its connection, is
//! counted, holds a bounded amount of memory, and does not keep others from each other.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::{Builder, Limits, Node, Socket};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

mod common;
use common::{LIMIT, addr, builder, ip};

/// Counts the bytes in use, and the most there were.
struct Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);
/// Memory is that of the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[allow(unsafe_code)]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size = layout.size() as i64;
        PEAK.fetch_max(LIVE.fetch_add(size, Relaxed) + size, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const KIB: i64 = 1024;

/// Runs something and returns by how much the memory in use grew at most meanwhile.
fn growth<T>(of: impl FnOnce() -> T) -> (T, i64) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = of();
    (result, PEAK.load(Relaxed) - before)
}

/// A node under attack, and one it has an ordinary relation with.
struct Scene {
    test: u16,
    node: Node,
    friend: Node,
    _alone: MutexGuard<'static, ()>,
}

/// Last byte of the address of the node under attack; peers with a smaller one open connections.
const NODE: u8 = 200;
const FRIEND: u8 = 201;
/// Where the node echoes.
const ECHO: u16 = 4000;
/// Where it takes what attackers send.
const SINK: u16 = 4001;

impl Scene {
    fn new(test: u16, set: impl Fn(Builder) -> Builder) -> Self {
        let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
        let node = set(builder(test, NODE)).build().unwrap();
        let friend = builder(test, FRIEND).build().unwrap();
        Self { test, node, friend, _alone }
    }

    fn sink(&self) -> Socket {
        let socket = self.node.bind(addr(self.test, NODE, SINK)).unwrap();
        socket.set_recv_timeout(Some(LIMIT));
        socket.set_send_timeout(Some(LIMIT));
        socket
    }

    fn counter(&self, name: &str) -> u64 {
        counter(&self.node, name)
    }

    /// Attacks while messages go to and fro between the node and its friend, and until ten more
    /// have after that; what the attack returns is dropped only then.
    fn during_traffic<T>(&self, attack: impl FnOnce() -> T) -> T {
        let echo = self.node.bind(addr(self.test, NODE, ECHO)).unwrap();
        let socket = self.friend.bind(addr(self.test, FRIEND, ECHO)).unwrap();
        for socket in [&echo, &socket] {
            socket.set_recv_timeout(Some(LIMIT));
            socket.set_send_timeout(Some(LIMIT));
        }
        let stop = AtomicBool::new(false);
        let rounds = AtomicU64::new(0);
        let longest = thread::scope(|s| {
            s.spawn(|| answer(&echo));
            let talk = s.spawn(|| {
                let mut longest = Duration::ZERO;
                while !stop.load(Relaxed) {
                    let round = rounds.load(Relaxed);
                    longest = longest.max(exchange(&socket, addr(self.test, NODE, ECHO), round));
                    rounds.store(round + 1, Relaxed);
                    thread::sleep(Duration::from_micros(200));
                }
                socket.send_to(b"", addr(self.test, NODE, ECHO)).unwrap();
                longest
            });
            // The thread that talks ends with the attack, however that ends.
            let end = Stop(&stop);
            wait_until("the first message", || rounds.load(Relaxed) > 0 || talk.is_finished());
            let kept = attack();
            let goal = rounds.load(Relaxed) + 10;
            wait_until("more messages", || rounds.load(Relaxed) >= goal || talk.is_finished());
            drop(end);
            (talk.join().unwrap(), kept)
        });
        let (longest, kept) = longest;
        println!("{} rounds, the longest {longest:?}", rounds.load(Relaxed));
        assert!(longest < Duration::from_secs(3), "others waited {longest:?}");
        drop(socket.flush(Some(LIMIT)));
        kept
    }
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends everything back until an empty message comes.
fn answer(socket: &Socket) {
    let mut buf = vec![0; 8192];
    loop {
        let (n, from) = socket.recv_from(&mut buf).unwrap();
        if n == 0 {
            return;
        }
        socket.send_to(&buf[..n], from).unwrap();
    }
}

/// One message there and back, verified to the last byte; returns how long that took.
fn exchange(socket: &Socket, to: SocketAddr, round: u64) -> Duration {
    let start = Instant::now();
    let len = [8, 64, 1000, 4096, 8000][round as usize % 5];
    let sent: Vec<u8> = (0..len).map(|i| (round * 31 + i) as u8).collect();
    socket.send_to(&sent, to).unwrap();
    let mut got = [0; 8192];
    let (n, from) = socket.recv_from(&mut got).unwrap();
    assert_eq!((&got[..n], from), (&sent[..], to), "round {round}");
    start.elapsed()
}

fn counter(node: &Node, name: &str) -> u64 {
    let all = node.counters();
    all.iter().find(|(n, _)| *n == name).map(|(_, value)| *value).expect("a counter of that name")
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Opens a TCP connection to a node from an address that is not a node's; `receive` bytes of
/// receive buffer, if given.
fn dial(from: IpAddr, to: IpAddr, receive: Option<usize>) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    if let Some(bytes) = receive {
        sockopt::set_socket_recv_buffer_size(&socket, bytes).unwrap();
    }
    rustix::net::bind(&socket, &SocketAddr::new(from, 0)).unwrap();
    rustix::net::connect(&socket, &SocketAddr::new(to, 16385)).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

/// The fields of a header that the tests set.
#[derive(Clone, Copy, Default)]
struct Frame {
    sequence: u64,
    ack: u64,
    len: u32,
    ports: (u16, u16),
    flags: u8,
    ext: [u8; 16],
}

impl Frame {
    fn bytes(&self, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(48 + payload.len());
        out.extend(self.sequence.to_be_bytes());
        out.extend(self.ack.to_be_bytes());
        out.extend(self.len.to_be_bytes());
        out.extend(self.ports.0.to_be_bytes());
        out.extend(self.ports.1.to_be_bytes());
        out.extend([self.flags, 0, 0, 0, 0, 0, 0, 0]);
        out.extend(self.ext);
        out.extend(payload);
        out
    }
}

const MAP: u8 = 1;

/// A whole message to the sink.
fn message(sequence: u64, payload: &[u8]) -> Vec<u8> {
    let len = payload.len() as u32;
    Frame { sequence, len, ports: (9, SINK), ..Frame::default() }.bytes(payload)
}

/// The frame a bowline node begins a connection with [R-2002]: one path, and its generation.
fn greeting(generation: u8, ack: u64) -> Vec<u8> {
    let ext = [5, 0, 1, 6, 0, 0, 0, generation, 8, 0, 0x42, 0x10, 0, 0x10, 0, 0];
    Frame { ack, ports: (1, 0), ext, ..Frame::default() }.bytes(&[])
}

/// Reads up to the end of the connection.
fn ends(mut stream: &TcpStream) {
    let mut buf = [0; 4096];
    loop {
        match stream.read(&mut buf) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
            Err(error) => panic!("the connection should end: {error}"),
        }
    }
}

/// Tells whether a connection has ended, without waiting.
fn has_ended(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut buf = [0; 4096];
    loop {
        match stream.read(&mut buf) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

/// Reads frames until one is for `port`; returns its number and payload.
fn frame_for(mut stream: &TcpStream, port: u16) -> (u64, Vec<u8>) {
    loop {
        let mut head = [0; 48];
        stream.read_exact(&mut head).unwrap();
        let len = u32::from_be_bytes(head[16..20].try_into().unwrap());
        let mut payload = vec![0; len as usize];
        stream.read_exact(&mut payload).unwrap();
        if head[22..24] == port.to_be_bytes() {
            return (u64::from_be_bytes(head[..8].try_into().unwrap()), payload);
        }
    }
}

/// Bytes without sense, the same at every run.
fn garbage(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8 | 1
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn nonsense_costs_its_sender_the_connection() {
    let scene = Scene::new(940, |b| b);
    let sink = scene.sink();
    let node = ip(940, NODE);
    scene.during_traffic(|| {
        // A long enough row of bytes announces a message of any length.
        let stream = dial(ip(940, 1), node, None);
        drop((&stream).write_all(&garbage(64 << 10)));
        ends(&stream);
        assert_eq!(scene.counter("bl_peer_oversized"), 1);

        let stream = dial(ip(940, 2), node, None);
        let long = Frame { sequence: 1, len: (1 << 20) + 1, ports: (9, SINK), ..Frame::default() };
        (&stream).write_all(&long.bytes(&[])).unwrap();
        ends(&stream);
        assert_eq!(scene.counter("bl_peer_oversized"), 2);
        assert_eq!(scene.counter("bl_peer_errors"), 2);

        // Streams that end early: within a header, within a payload, a byte before its end.
        let cuts = [20, 48, 148, 1047];
        for (n, cut) in cuts.into_iter().enumerate() {
            let resets = scene.counter("conn_reset");
            let stream = dial(ip(940, 3 + n as u8), node, None);
            (&stream).write_all(&message(1, &[7; 1000])[..cut]).unwrap();
            drop(stream);
            wait_until("the end", || scene.counter("conn_reset") > resets);
        }

        // A map of a wrong length is left out; the connection goes on.
        let stream = dial(ip(940, 10), node, None);
        for len in [100, 0, 8191, 8193, 1 << 20] {
            let map = Frame { len, flags: MAP, ..Frame::default() };
            (&stream).write_all(&map.bytes(&vec![0xff; len as usize])).unwrap();
        }
        (&stream).write_all(&message(1, b"after the maps")).unwrap();
        assert_eq!(sink.recv_message().unwrap().to_vec(), b"after the maps");
        let info = scene.node.info();
        let known = info.connections.iter().find(|c| c.remote == ip(940, 10)).unwrap();
        assert!(!known.congested);
        assert_eq!(scene.counter("bl_peer_nonsense"), 5);
    });
    sink.set_nonblocking(true);
    assert_eq!(sink.recv(&mut [0; 8]).unwrap_err().errno(), 11, "nothing of that is delivered");
}

#[test]
fn a_peer_that_breaks_the_order_harms_its_own_messages_only() {
    let scene = Scene::new(941, |b| b);
    let sink = scene.sink();
    let node = ip(941, NODE);
    let next = || sink.recv_message().unwrap().to_vec();
    scene.during_traffic(|| {
        // Numbers again, numbers of the past, and the last there is.
        let stream = dial(ip(941, 1), node, None);
        (&stream).write_all(&greeting(1, 0)).unwrap();
        for (sequence, payload) in
            [(5, b"five"), (5, b"late"), (3, b"late"), (1 << 60, b"leap"), (6, b"late")]
        {
            (&stream).write_all(&message(sequence, payload)).unwrap();
        }
        (&stream).write_all(&message(u64::MAX, b"last")).unwrap();
        assert_eq!([next(), next(), next()], [b"five", b"leap", b"last"]);
        assert_eq!(scene.counter("recv_drop_old_seq"), 3);
        // Its next process begins anew.
        let again = dial(ip(941, 1), node, None);
        (&again).write_all(&greeting(2, 0)).unwrap();
        (&again).write_all(&message(1, b"anew")).unwrap();
        assert_eq!(next(), b"anew");
        ends(&stream);
        assert_eq!(scene.counter("bl_peer_restarts"), 1);

        // Greeted as a bowline node on one connection, and not on the next.
        let stream = dial(ip(941, 2), node, None);
        (&stream).write_all(&greeting(1, 0)).unwrap();
        (&stream).write_all(&message(1, b"greeted")).unwrap();
        assert_eq!(next(), b"greeted");
        let rude = dial(ip(941, 2), node, None);
        (&rude).write_all(&message(1, b"rude")).unwrap();
        assert_eq!(next(), b"rude", "taken for a kernel that has its address now");
        ends(&stream);
        assert_eq!(scene.counter("bl_peer_restarts"), 2);

        // The other way round: a second connection is in use when the first one greets.
        let first = dial(ip(941, 3), node, None);
        (&first).write_all(&message(1, b"one")).unwrap();
        assert_eq!(next(), b"one");
        let second = dial(ip(941, 3), node, None);
        (&second).write_all(&message(2, b"two")).unwrap();
        assert_eq!(next(), b"two");
        (&first).write_all(&greeting(1, 0)).unwrap();
        (&first).write_all(&message(3, b"three")).unwrap();
        assert_eq!(next(), b"three");
        (&second).write_all(&message(4, b"not greeted")).unwrap();
        ends(&second);
        assert_eq!(scene.counter("bl_peer_errors"), 1);

        // Acknowledges what was never sent, before it could be.
        let to = addr(941, 4, 77);
        for payload in [b"a", b"b", b"c"] {
            sink.send_to(payload, to).unwrap();
        }
        let stream = dial(ip(941, 4), node, None);
        let ack = Frame { ack: u64::MAX, ..Frame::default() }.bytes(&[]);
        (&stream).write_all(&greeting(1, u64::MAX)).unwrap();
        (&stream).write_all(&ack).unwrap();
        for payload in [b"a", b"b", b"c"] {
            assert_eq!(frame_for(&stream, 77).1, payload);
        }
        (&stream).write_all(&ack).unwrap();
        sink.flush(Some(LIMIT)).unwrap();
        (first, second, again, rude, stream)
    });
    sink.set_nonblocking(true);
    assert_eq!(sink.recv(&mut [0; 8]).unwrap_err().errno(), 11, "nothing else is delivered");
}

#[test]
fn a_crowd_that_says_nothing_is_held_within_the_limits() {
    const PEERS: u8 = 40;
    const EACH: usize = 10;
    let limits = Limits { peers_unproven: 16, links_extra_per_peer: 2, ..Limits::default() };
    let scene = Scene::new(942, |b| b.limits(limits.clone()));
    let late = builder(942, 202).build().unwrap();
    let (crowd, grown) = scene.during_traffic(|| {
        growth(|| {
            let mut crowd = Vec::new();
            for n in 0..PEERS as usize * EACH {
                let stream = dial(ip(942, 1 + (n % PEERS as usize) as u8), ip(942, NODE), None);
                drop((&stream).write(b"x"));
                crowd.push(stream);
            }
            wait_until("all to be accepted", || {
                scene.counter("bl_links_accepted") >= crowd.len() as u64
            });
            // A node that comes now is served all the same.
            let socket = late.bind(addr(942, 202, ECHO)).unwrap();
            socket.set_recv_timeout(Some(LIMIT));
            for round in 0..10 {
                exchange(&socket, addr(942, NODE, ECHO), round);
            }
            crowd
        })
    });
    let info = scene.node.info();
    let of_crowd = |remote: IpAddr| remote < ip(942, NODE);
    let peers = info.connections.iter().filter(|c| of_crowd(c.remote)).count();
    let links = info.links.iter().filter(|l| of_crowd(l.remote.ip())).count();
    println!("{peers} peers and {links} connections stay; memory grew by {} KiB", grown / KIB);
    assert!(peers <= 16, "{peers} peers");
    assert!(links <= 16 * (1 + 2), "{links} connections");
    // What the node has dropped is closed, not kept aside for ever.
    let closed = || crowd.iter().filter(|s| has_ended(s)).count();
    wait_until("the others to end", || closed() >= crowd.len() - links);
    assert!(grown < 6 * 1024 * KIB, "{} KiB", grown / KIB);
}

#[test]
fn endless_pings_are_answered_as_far_as_the_peer_listens() {
    const PINGS: u64 = 50_000;
    let scene = Scene::new(943, |b| b);
    let attack = |n: u8, hello: &[u8], first: u64| {
        let (dropped, pinged) = (scene.counter("bl_pongs_dropped"), scene.counter("recv_ping"));
        let ((stream, most), grown) = growth(|| {
            let stream = dial(ip(943, n), ip(943, NODE), Some(4096));
            (&stream).write_all(hello).unwrap();
            let mut most = 0;
            for chunk in 0..PINGS / 500 {
                let mut bytes = Vec::new();
                for i in 0..500 {
                    let sequence = first + chunk * 500 + i;
                    let ping = Frame { sequence, ports: (5, 0), ..Frame::default() };
                    bytes.extend(ping.bytes(&[]));
                }
                (&stream).write_all(&bytes).unwrap();
                let queued = |p: &bowline::rds::PathInfo| p.send_messages + p.retrans_messages;
                let info = scene.node.info();
                let of = info.paths.iter().filter(|p| p.remote == ip(943, n));
                most = most.max(of.map(queued).sum());
            }
            wait_until("all pings", || scene.counter("recv_ping") >= pinged + PINGS);
            (stream, most)
        });
        let dropped = scene.counter("bl_pongs_dropped") - dropped;
        println!("{dropped} not answered, {most} queued, {} KiB", grown / KIB);
        assert!(dropped > PINGS / 2, "{dropped} not answered");
        // The limit is 64; the node's own probe may wait too.
        assert!(most <= 66, "{most} queued");
        stream
    };
    scene.during_traffic(|| {
        // A kernel's TCP acknowledges; a bowline node that does not, keeps what it was sent waiting.
        let ((kernel, bowline), grown) =
            growth(|| (attack(1, &[], 1), attack(2, &greeting(1, 0), 1)));
        assert!(grown < 24 * 1024 * KIB, "{} KiB", grown / KIB);
        (kernel, bowline)
    });
}

#[test]
fn a_peer_that_never_reads_keeps_its_own_messages_waiting() {
    let scene = Scene::new(944, |b| b);
    let sink = scene.sink();
    scene.during_traffic(|| {
        let stream = dial(ip(944, 1), ip(944, NODE), Some(4096));
        (&stream).write_all(&greeting(1, 0)).unwrap();
        sink.set_nonblocking(true);
        let (sent, grown) = growth(|| {
            let mut sent = 0;
            let end = Instant::now() + Duration::from_millis(200);
            while Instant::now() < end {
                match sink.send_to(&[3; 8192], addr(944, 1, 77)) {
                    Ok(_) => sent += 1,
                    Err(error) => assert_eq!(error.errno(), 11),
                }
            }
            sent
        });
        println!("{sent} messages taken, {} KiB", grown / KIB);
        // The send buffer, which may be passed by one message.
        assert_eq!(sent, 106_496 / 8192);
        // It reads after all.
        for _ in 0..sent {
            let (sequence, payload) = frame_for(&stream, 77);
            assert_eq!(payload, [3; 8192]);
            let ack = Frame { ack: sequence, ..Frame::default() };
            (&stream).write_all(&ack.bytes(&[])).unwrap();
        }
        sink.flush(Some(LIMIT)).unwrap();
        stream
    });
}

#[test]
fn a_peer_that_never_reads_does_not_hold_up_the_end() {
    let scene = Scene::new(949, |b| b);
    let sink = scene.sink();
    let stream = dial(ip(949, 1), ip(949, NODE), Some(4096));
    (&stream).write_all(&greeting(1, 0)).unwrap();
    for _ in 0..10 {
        sink.send_to(&[3; 8192], addr(949, 1, 77)).unwrap();
    }
    let start = Instant::now();
    assert!(!scene.node.shutdown(Duration::from_millis(200)), "not acknowledged");
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "it took {took:?}");
}

#[test]
fn connections_that_come_and_go_leave_nothing() {
    const COUNT: u64 = 1000;
    let limits = Limits { peers_unproven: 4, ..Limits::default() };
    // One path: no more descriptors are taken for the friend while they are counted.
    let scene = Scene::new(950, |b| b.paths(1).limits(limits.clone()));
    scene.during_traffic(|| {
        let before = descriptors();
        let (_, grown) = growth(|| {
            for n in 0..COUNT {
                let stream = dial(ip(950, 1 + (n % 10) as u8), ip(950, NODE), None);
                // Some leave in good order, some in the middle of a header, some with a reset.
                if n % 3 > 0 {
                    drop((&stream).write(&[0; 47]));
                }
                if n % 3 > 1 {
                    sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
                }
            }
            // The system does not hand over each one that was reset before its turn.
            wait_until("them to be gone", || {
                let info = scene.node.info();
                scene.counter("bl_links_accepted") >= COUNT / 2
                    && !info.links.iter().any(|l| l.remote.ip() < ip(950, NODE))
            });
        });
        // A refused one is kept for a second.
        wait_until("their descriptors", || descriptors() <= before);
        let peers = scene.node.info().connections.len();
        println!("{peers} peers are known, memory grew by {} KiB", grown / KIB);
        assert!(peers <= 4 + 2, "{peers} peers");
        assert!(grown < 4 * 1024 * KIB, "{} KiB", grown / KIB);
    });
}

#[test]
fn a_peer_that_ignores_congestion_is_not_read() {
    const COUNT: u32 = 8192;
    const PER_PEER: usize = 256 << 10;
    let limits = Limits { recv_bytes_per_peer: PER_PEER, ..Limits::default() };
    let scene = Scene::new(945, |b| b.limits(limits.clone()).default_recv_buffer(16 << 10));
    let sink = scene.sink();
    scene.during_traffic(|| {
        let stream = dial(ip(945, 1), ip(945, NODE), None);
        let written = AtomicU64::new(0);
        thread::scope(|s| {
            s.spawn(|| {
                (&stream).write_all(&greeting(1, 0)).unwrap();
                for i in 0..COUNT {
                    let mut payload = [i as u8; 8192];
                    payload[..4].copy_from_slice(&i.to_be_bytes());
                    (&stream).write_all(&message(1 + u64::from(i), &payload)).unwrap();
                    written.store(u64::from(i), Relaxed);
                }
            });
            wait_until("a pause", || scene.counter("bl_read_pauses") > 0);
            let mut before = u64::MAX;
            wait_until("the writer to be stopped", || {
                thread::sleep(Duration::from_millis(50));
                std::mem::replace(&mut before, written.load(Relaxed)) == before
            });
            assert!(before + 1 < u64::from(COUNT), "TCP took everything: nothing was tried");
            let held: usize =
                scene.node.info().sockets.iter().map(|s| s.recv_bytes).max().unwrap_or(0);
            println!("{before} messages written, {held} bytes wait");
            // What was read before the limit showed comes on top: one read, and what it completed.
            assert!(held <= PER_PEER + (256 << 10) + 8192, "{held} bytes wait");
            let mut buf = [0; 8192];
            for i in 0..COUNT {
                assert_eq!(sink.recv(&mut buf).unwrap(), buf.len());
                assert_eq!(buf[..4], i.to_be_bytes());
                assert!(buf[4..].iter().all(|b| *b == i as u8), "message {i}");
            }
        });
        stream // closed before its end is read, it would take its last messages with it
    });
}

#[test]
fn connecting_again_does_not_get_round_the_limits() {
    const PER_PEER: usize = 256 << 10;
    let limits = Limits { recv_bytes_per_peer: PER_PEER, ..Limits::default() };
    let scene = Scene::new(951, |b| b.limits(limits.clone()));
    let sink = scene.sink();
    scene.during_traffic(|| {
        let mut sequence = 0;
        let mut connect = |greets: bool, peer: u8| {
            let stream = dial(ip(951, peer), ip(951, NODE), None);
            let mut bytes = if greets { greeting(1, 0) } else { Vec::new() };
            for _ in 0..60 {
                sequence += 1;
                bytes.extend(message(sequence, &[9; 4096]));
            }
            // The node may end the connection at any time.
            stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
            drop((&stream).write_all(&bytes));
            thread::sleep(Duration::from_millis(5));
        };
        for (peer, greets) in [(1, true), (2, false)] {
            for _ in 0..40 {
                connect(greets, peer);
            }
            let info = scene.node.info();
            let held: usize = info.sockets.iter().map(|s| s.recv_bytes).max().unwrap_or(0);
            println!("{held} bytes wait, {} pauses", scene.counter("bl_read_pauses"));
            assert!(held <= usize::from(peer) * (PER_PEER + (512 << 10)), "{held} bytes wait");
        }
    });
    drop(sink);
}

#[test]
fn unfinished_messages_lose_the_oldest() {
    const PIECE: usize = 256 << 10;
    const LEN: usize = 300 << 10;
    // Four pieces, and what completes one of the messages.
    let limits = Limits { partial_bytes_total: 4 * PIECE + (128 << 10), ..Limits::default() };
    let scene = Scene::new(946, |b| b.limits(limits.clone()));
    let sink = scene.sink();
    scene.during_traffic(|| {
        let start = |n: u8| {
            let stream = dial(ip(946, n), ip(946, NODE), None);
            let whole = message(1, &vec![n; LEN]);
            (&stream).write_all(&whole[..48 + PIECE]).unwrap();
            let came = || {
                let info = scene.node.info();
                info.links
                    .iter()
                    .any(|l| l.remote.ip() == ip(946, n) && l.received_bytes >= (48 + PIECE) as u64)
            };
            // What was dropped is not there any more.
            wait_until("its beginning", || came() || has_ended(&stream));
            stream.set_nonblocking(false).unwrap();
            (stream, whole)
        };
        let (peers, grown) = growth(|| (1..=12).map(start).collect::<Vec<_>>());
        println!("memory grew by {} KiB", grown / KIB);
        wait_until("drops", || scene.counter("bl_partials_dropped") >= 8);
        assert_eq!(scene.counter("bl_partials_dropped"), 8);
        let (dropped, kept) = peers.split_at(8);
        for (stream, _) in dropped {
            ends(stream);
        }
        for (stream, whole) in kept {
            (&*stream).write_all(&whole[48 + PIECE..]).unwrap();
            assert_eq!(sink.recv_message().unwrap().to_vec(), whole[48..]);
        }
        assert_eq!(scene.counter("bl_partials_dropped"), 8);
        peers
    });
}

/// A listener at a peer's address, above the node's: the node opens the connections.
fn listen(at: IpAddr) -> std::net::TcpListener {
    let listener = std::net::TcpListener::bind(SocketAddr::new(at, 16385)).unwrap();
    listener.set_nonblocking(true).unwrap();
    listener
}

/// How often a node dials a peer within half a second that does this with each connection before
/// it resets it.
fn dialled(listener: &std::net::TcpListener, serve: impl Fn(&TcpStream, u64)) -> u64 {
    let end = Instant::now() + Duration::from_millis(500);
    let mut times = 0;
    while Instant::now() < end {
        match listener.accept() {
            Ok((stream, _)) => {
                times += 1;
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                serve(&stream, times);
                sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
            }
            Err(_) => thread::sleep(Duration::from_micros(200)),
        }
    }
    times
}

// tests
#[test]
fn a_peer_that_resets_each_connection_is_not_dialled_without_pause() {
    let scene = Scene::new(948, |b| b.paths(1));
    let sink = scene.sink();
    scene.during_traffic(|| {
        let plain = listen(ip(948, 210));
        sink.send_to(b"x", addr(948, 210, 77)).unwrap();
        let at_once = dialled(&plain, |_, _| {});
        let polite = listen(ip(948, 211));
        sink.send_to(b"x", addr(948, 211, 77)).unwrap();
        let greeted = dialled(&polite, |mut stream, _| {
            drop(stream.write_all(&greeting(1, 0)));
            frame_for(stream, 77);
        });
        // A connection that has brought a message through is made again at once; a pong the peer
        // asked for itself is no such message.
        let cunning = listen(ip(948, 212));
        sink.send_to(b"x", addr(948, 212, 77)).unwrap();
        let pinged = dialled(&cunning, |mut stream, sequence| {
            let ping = Frame { sequence, ports: (5, 0), ..Frame::default() };
            let ack = Frame { ack: u64::MAX, ..Frame::default() };
            drop(stream.write_all(&greeting(1, u64::MAX)));
            drop(stream.write_all(&ping.bytes(&[])));
            frame_for(stream, 5);
            drop(stream.write_all(&ack.bytes(&[])));
        });
        println!("dialled {at_once}, {greeted} and {pinged} times in half a second");
        assert!((2..60).contains(&at_once), "{at_once} times");
        assert!((2..200).contains(&greeted), "{greeted} times");
        assert!((2..200).contains(&pinged), "{pinged} times");
    });
}

/// Descriptors a process has open.
fn descriptors() -> u64 {
    std::fs::read_dir("/proc/self/fd").unwrap().count() as u64
}

/// Processor time a process has used, in ticks of a hundredth of a second.
fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
#[ignore = "not a test: the process that a_node_without_descriptors_goes_on_serving starts"]
fn child_with_few_descriptors() {
    let node = builder(947, NODE).paths(1).build().unwrap();
    let echo = node.bind(addr(947, NODE, ECHO)).unwrap();
    let few = Rlimit { current: Some(descriptors() + 24), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, few).unwrap();
    println!("ready.");
    echo.set_recv_timeout(Some(Duration::from_secs(60)));
    answer(&echo);
    node.shutdown(LIMIT);
}

#[test]
fn a_node_without_descriptors_goes_on_serving() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_with_few_descriptors", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("ready.")), "the child begins");
    let to = addr(947, NODE, ECHO);
    let socket = |n: u8| {
        let node = builder(947, n).paths(1).build().unwrap();
        let socket = node.bind(addr(947, n, ECHO)).unwrap();
        socket.set_recv_timeout(Some(LIMIT));
        socket
    };
    let friend = socket(FRIEND);
    exchange(&friend, to, 0);

    let crowd: Vec<_> = (0..100)
        .map(|n| {
            let stream = dial(ip(947, 1 + n % 20), ip(947, NODE), None);
            drop((&stream).write(b"x"));
            stream
        })
        .collect();
    // One that connects, and one that the node has to connect to.
    let (smaller, larger) = (socket(199), socket(202));
    for socket in [&smaller, &larger] {
        socket.send_to(b"patient", to).unwrap();
    }
    for round in 0..100 {
        exchange(&friend, to, round);
    }
    let before = ticks(child.id());
    thread::sleep(Duration::from_millis(500));
    let used = ticks(child.id()) - before;
    for socket in [&smaller, &larger] {
        socket.set_nonblocking(true);
        let nothing = socket.recv(&mut [0; 16]).unwrap_err();
        assert_eq!(nothing.errno(), 11, "there are no descriptors for it");
        socket.set_nonblocking(false);
    }
    println!("used {used} hundredths of a second of 50 while out of descriptors");
    assert!(used <= 25, "it must not spin: {used} of 50");

    drop(crowd);
    for socket in [&smaller, &larger] {
        let mut buf = [0; 16];
        let n = socket.recv(&mut buf).unwrap();
        assert_eq!(buf[..n], *b"patient");
    }
    exchange(&friend, to, 1);
    friend.send_to(b"", to).unwrap();
    assert!(child.wait().unwrap().success());
}
