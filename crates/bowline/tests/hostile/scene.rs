//! A node under attack, and an honest peer whose messages must continue meanwhile.

use std::net::SocketAddr;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::{Builder, Node, Socket};

use crate::common::{LIMIT, Stop, addr, builder};
use crate::memory::alone;

/// A node under attack, and an honest peer of it.
pub(crate) struct Scene {
    pub(crate) test: u16,
    pub(crate) node: Node,
    pub(crate) friend: Node,
    over_rdma: bool,
    _alone: MutexGuard<'static, ()>,
}

/// Last byte of the address of the node under attack; peers with a smaller one open connections.
pub(crate) const NODE: u8 = 200;
pub(crate) const FRIEND: u8 = 201;
/// Port at which the node echoes.
pub(crate) const ECHO: u16 = 4000;
/// Port at which it receives what attackers send.
pub(crate) const SINK: u16 = 4001;

impl Scene {
    pub(crate) fn new(test: u16, set: impl Fn(Builder) -> Builder) -> Self {
        let _alone = alone();
        let node = set(builder(test, NODE)).build().unwrap();
        let friend = builder(test, FRIEND).build().unwrap();
        Self { test, node, friend, over_rdma: false, _alone }
    }

    /// The same over RDMA, on devices of this process.
    pub(crate) fn over_rdma(test: u16, set: impl Fn(Builder) -> Builder) -> Self {
        let _alone = alone();
        let on_device = |node| Node::builder().rdma(crate::rdma::device(test, node));
        let node = set(on_device(NODE)).build().unwrap();
        let friend = on_device(FRIEND).build().unwrap();
        Self { test, node, friend, over_rdma: true, _alone }
    }

    pub(crate) fn sink(&self) -> Socket {
        let socket = self.node.bind(addr(self.test, NODE, SINK)).unwrap();
        socket.set_recv_timeout(Some(LIMIT));
        socket.set_send_timeout(Some(LIMIT));
        socket
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        counter(&self.node, name)
    }

    /// Attacks while messages go to and fro between the node and its friend, and until ten more
    /// have after that; what the attack returns is dropped only then.
    pub(crate) fn during_traffic<T>(&self, attack: impl FnOnce() -> T) -> T {
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
            // The thread that exchanges messages ends with the attack, however that ends.
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
        assert!(longest < Duration::from_secs(10), "others waited {longest:?}");
        // Over RDMA the last messages are acknowledged when later ones ask for it.
        if !self.over_rdma {
            drop(socket.flush(Some(LIMIT)));
        }
        kept
    }
}

/// Sends everything back until an empty message comes.
pub(crate) fn answer(socket: &Socket) {
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
pub(crate) fn exchange(socket: &Socket, to: SocketAddr, round: u64) -> Duration {
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

pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
