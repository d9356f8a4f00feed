//! Many sockets and many peers on one node: the cost of each, and that other ones do not make a
//! message more expensive.

use std::alloc::{GlobalAlloc, Layout, System};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::{Builder, DriverStats, Node, Paths, PollMode, Socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

mod common;
use bowline_testkit::skipped;
use common::{LIMIT, addr, builder};

/// Counts the bytes in use.
struct Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);

#[allow(unsafe_code)]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Relaxed);
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

const PEERS: usize = 1000;
const SOCKETS: usize = 10_000;
const PORT: u16 = 4000;
/// A listener with its spare descriptor for every address, both ends of every connection, and some.
const DESCRIPTORS: u64 = 4 * PEERS as u64 + 500;
/// Messages of a measurement.
const COUNT: u64 = 20_000;

/// Address of a peer, below and above that of the node so that either side connects.
fn peer(n: usize) -> IpAddr {
    let net = if n.is_multiple_of(2) { 119 } else { 121 };
    Ipv4Addr::new(127, net, (n / 200) as u8, 1 + (n % 200) as u8).into()
}

/// The node in the middle is 127.120.0.1.
const TEST: u16 = 20 << 8;

fn timed(socket: Socket) -> Socket {
    socket.set_recv_timeout(Some(LIMIT));
    socket.set_send_timeout(Some(LIMIT));
    socket
}

fn payload(n: usize) -> Vec<u8> {
    (0..100 + n % 50).map(|i| (n * 7 + i) as u8).collect()
}

/// Counts of the node and its peers for each message of an exchange, one at a time.
fn cost(nodes: [&Node; 2], from: &Socket, to: SocketAddr, echo: &Socket) -> f64 {
    let total = || nodes.map(Node::driver_stats);
    // The background thread looks at intervals, each look one wait, whatever the rate of messages;
    // how many looks a thread makes before it sleeps depends on time.
    let calls = |s: DriverStats| s.busy_syscalls() - s.helper_turns.min(s.waits);
    let mut before = None;
    thread::scope(|s| {
        s.spawn(|| {
            let mut buf = [0; 64];
            for _ in 0..COUNT + COUNT / 10 {
                let (n, from) = echo.recv_from(&mut buf).unwrap();
                echo.send_to(&buf[..n], from).unwrap();
            }
        });
        let mut buf = [0; 64];
        for i in 0..COUNT + COUNT / 10 {
            if i == COUNT / 10 {
                before = Some(total());
            }
            from.send_to(&i.to_be_bytes(), to).unwrap();
            assert_eq!(from.recv(&mut buf).unwrap(), 8);
            assert_eq!(buf[..8], i.to_be_bytes());
        }
    });
    let after = total();
    let [a, b] = before.unwrap();
    let spent = calls(after[0] - a) + calls(after[1] - b);
    spent as f64 / (2 * COUNT) as f64
}

#[test]
fn ten_thousand_sockets_and_a_thousand_peers() {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < DESCRIPTORS) {
        let allowed = limit.maximum;
        return skipped::because(format_args!(
            "{DESCRIPTORS} descriptors are needed, {allowed:?} allowed"
        ));
    }
    let enough = limit.current.map(|now| now.max(DESCRIPTORS));
    setrlimit(Resource::Nofile, Rlimit { current: enough, ..limit }).unwrap();

    let set = |b: Builder| b.paths(Paths::One).poll(PollMode::Sleep);
    let node = set(builder(TEST, 1)).build().unwrap();
    let crowd = set((0..PEERS).map(peer).fold(Node::builder(), Builder::address)).build().unwrap();
    let at = |n: usize| SocketAddr::new(peer(n), PORT);
    let centre = timed(node.bind(addr(TEST, 1, PORT)).unwrap());
    let first = timed(crowd.bind(at(0)).unwrap());
    let alone = cost([&node, &crowd], &centre, at(0), &first);

    // Sockets, idle.
    let before = LIVE.load(Relaxed);
    let sockets: Vec<_> =
        (0..SOCKETS).map(|n| node.bind(addr(TEST, 1, 5000 + n as u16)).unwrap()).collect();
    let per_socket = (LIVE.load(Relaxed) - before) / SOCKETS as i64;

    // Peers: a message each way. Which of ten thousand sockets takes part changes with the peer.
    let mut others = vec![first];
    others.extend((1..PEERS).map(|n| timed(crowd.bind(at(n)).unwrap())));
    let own = |n: usize| &sockets[n * (SOCKETS / PEERS)];
    let before = LIVE.load(Relaxed);
    let start = Instant::now();
    thread::scope(|s| {
        s.spawn(|| {
            for n in 0..PEERS {
                own(n).send_to(&payload(n), at(n)).unwrap();
            }
        });
        for (n, socket) in others.iter().enumerate() {
            let message = socket.recv_message().unwrap();
            assert_eq!(message.to_vec(), payload(n), "to peer {n}");
            socket.send_to(&message.to_vec(), message.source()).unwrap();
        }
    });
    for n in 0..PEERS {
        own(n).set_recv_timeout(Some(LIMIT));
        let message = own(n).recv_message().unwrap();
        assert_eq!((message.source(), message.to_vec()), (at(n), payload(n)), "from peer {n}");
    }
    println!("{PEERS} peers connected and answered in {:?}", start.elapsed());
    for socket in others.iter().chain(&sockets) {
        socket.flush(Some(LIMIT)).unwrap();
    }
    let info = node.info();
    assert_eq!(info.connections.len(), PEERS);
    assert_eq!(info.links.len(), PEERS);
    // Both ends of each connection are in this process. What is left of the exchange, such as
    // acknowledgements, is through in a moment.
    thread::sleep(Duration::from_millis(100));
    let per_connection = (LIVE.load(Relaxed) - before) / (2 * PEERS as i64);
    println!("{per_socket} bytes per idle socket, {per_connection} per idle connection");
    assert!(per_socket <= 2 << 10, "{per_socket} bytes per socket");
    assert!(per_connection <= 64 << 10, "{per_connection} bytes per connection");

    // A message among all these costs the same as before.
    for n in [0, 1, PEERS - 1] {
        let among = cost([&node, &crowd], &centre, at(n), &others[n]);
        println!("system calls per message: {alone:.3} alone, {among:.3} among all, peer {n}");
        assert!(among <= alone * 1.1 + 0.1, "{among} system calls per message, {alone} before");
    }
}
