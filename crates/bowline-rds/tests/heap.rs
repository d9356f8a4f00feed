//! A node that is used for long has no more of the heap than one that was used for a while.

mod support;

use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use bowline_base::SplitMix64;
use bowline_rds::{
    Config, Instant, Interest, Node, RecvOpts, RxPool, SendControl, SendMsg, SocketId,
};
use bowline_testkit::allocations::{Counting, bytes};
use support::*;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What is counted is the whole process's, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A peer that refuses, and two that do not answer, of which this node dials one.
const OTHERS: [&str; 3] = ["10.0.0.9", "10.0.0.8", "10.0.0.0"];
/// Most sockets of a program at a time.
const SOCKETS_MAX: usize = 24;

/// A program on the first of two nodes, which does anything in any order.
struct Program {
    pair: Pair,
    rng: SplitMix64,
    sockets: Vec<SocketId>,
    /// What the peer echoes with.
    far: SocketId,
}

impl Program {
    fn new(seed: u64) -> Self {
        let mut pair = Pair::bowline();
        pair.refusing = vec![ip(OTHERS[0])];
        let far = pair.bound(1, 5000);
        // These stay, and what others send stands behind them.
        let near = pair.bound(0, 4000);
        pair.send(0, near, 5000, b"first").expect("sent");
        for other in OTHERS {
            let name = Some(SocketAddr::new(ip(other), 5000));
            let msg = SendMsg { name, payload: &[IoSlice::new(b"stays")], ..SendMsg::default() };
            pair.nodes[0].send(pair.now, near, &msg).expect("sent");
        }
        pair.settle();
        Self { pair, rng: SplitMix64::new(seed), sockets: Vec::new(), far }
    }

    fn one_of(&mut self, count: usize) -> usize {
        self.rng.below(count as u64) as usize
    }

    fn destination(&mut self) -> SocketAddr {
        let at = match self.one_of(6) {
            0 => ip(OTHERS[0]),
            1 => ip(OTHERS[1]),
            2 => ip(OTHERS[2]),
            3 => self.pair.addrs[0],
            _ => self.pair.addrs[1],
        };
        // A socket that reads, one of nobody, a ping.
        SocketAddr::new(at, [5000, 5000, 5001, 0][self.one_of(4)])
    }

    fn call(&mut self, id: SocketId) {
        let now = self.pair.now;
        let to = self.destination();
        let (what, len) = (self.one_of(16), [0, 1, 300, 5000, 66_000, 106_000][self.one_of(6)]);
        let node = &mut self.pair.nodes[0];
        // Whatever is wrong with a call is the program's.
        match what {
            0 => drop(node.connect(id, to)),
            1 => drop(node.cancel_all(now, id)),
            2 => drop(node.cancel_sent_to(now, id, to)),
            3 => drop(node.recv(now, id, RecvOpts::default())),
            4 => drop(node.recv_into(now, id, &mut [0; 100])),
            5 => drop(node.register(id, Interest::WRITE)),
            6 => drop(node.set_send_buffer(id, len)),
            7 => drop(node.lend(now, id, |_, _, _| true)),
            8 => node.give_back(now, id, 3),
            9 => drop(node.set_zerocopy(id, true)),
            _ => {
                let bytes = vec![9; len];
                let payload = [IoSlice::new(&bytes)];
                let zerocopy = what == 15;
                let control = [SendControl::ZcopyCookie(7)];
                let control = if zerocopy { &control[..] } else { &[] };
                let name = (what > 10).then_some(to);
                let msg =
                    SendMsg { name, payload: &payload, control, zerocopy, ..SendMsg::default() };
                if let Ok(sent) = node.send(now, id, &msg)
                    && let Some(link) = sent.link
                {
                    self.pair.write(0, link);
                }
            }
        }
    }

    fn sequence(&mut self) {
        if self.sockets.len() < SOCKETS_MAX {
            let id = self.pair.nodes[0].socket().expect("a socket");
            let at = SocketAddr::new(self.pair.addrs[0], 0);
            if self.one_of(8) > 0 {
                self.pair.nodes[0].bind(id, at).expect("bound");
            }
            self.sockets.push(id);
        }
        for _ in 0..4 {
            let at = self.one_of(self.sockets.len());
            self.call(self.sockets[at]);
        }
        if self.one_of(2) == 0 || self.sockets.len() == SOCKETS_MAX {
            let at = self.one_of(self.sockets.len());
            let id = self.sockets.swap_remove(at);
            self.pair.nodes[0].close(self.pair.now, id);
        }
        match self.one_of(200) {
            0 => self.pair.cut(),
            1 => self.pair.window = [0, 5000, usize::MAX][self.one_of(3)],
            2..6 => self.pair.ms(20),
            6..20 => self.pair.settle(),
            _ => {}
        }
        if self.one_of(8) == 0 {
            let far = self.far;
            while self.pair.nodes[1].recv(self.pair.now, far, RecvOpts::default()).is_ok() {}
        }
    }

    /// Closes all but what stays, and tells how many bytes are in use.
    fn rest(&mut self) -> i64 {
        for id in self.sockets.drain(..) {
            self.pair.nodes[0].close(self.pair.now, id);
        }
        self.pair.window = usize::MAX;
        self.pair.ms(60_000);
        while self.pair.recv(1, self.far).is_ok() {}
        self.pair.ms(60_000);
        let memory = self.pair.nodes[0].send_memory();
        assert!(memory.accounted < 4096, "{memory:?}");
        assert!(memory.frames + memory.records < 2 << 20, "{memory:?}");
        bytes()
    }
}

// tests, [R-532]: what any order of calls leaves behind
#[test]
fn a_hundred_thousand_sequences_of_calls_leave_no_memory_behind() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut program = Program::new(43);
    // Pools and tables have their size then.
    (0..5_000).for_each(|_| program.sequence());
    let before = program.rest();
    let mut most = 0;
    for _ in 0..100_000 {
        program.sequence();
        most = most.max(bytes());
    }
    let after = program.rest();
    assert!(after <= before + before / 10, "{before} bytes became {after}");
    // Buffers of all sockets, two of the peer's, messages being read, and pools.
    let bound = before + (SOCKETS_MAX as i64 * 4 + 8) * 106_496 + (16 << 20);
    assert!(most <= bound, "{most} bytes were in use");
}

// tests [B-33]
#[test]
fn a_queue_that_was_long_gives_its_memory_back() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut node = Node::new(Config { addrs: vec![ip(A)], ..Config::default() });
    let now = Instant::default();
    let [from, to] = [4000, 4001].map(|port| {
        let id = node.socket().expect("a socket");
        node.bind(id, SocketAddr::new(ip(A), port)).expect("bound");
        id
    });
    node.set_recv_buffer(to, 32 << 20).expect("open");
    let name = Some(SocketAddr::new(ip(A), 4001));
    let before = bytes();
    for _ in 0..100_000 {
        let msg = SendMsg { name, ..SendMsg::default() };
        node.send(now, from, &msg).expect("sent");
    }
    assert!(bytes() > before + 2_000_000);
    for _ in 0..50_000 {
        node.recv(now, to, RecvOpts::default()).expect("a message");
    }
    node.lend(now, to, |_, _, _| true).expect("messages");
    node.give_back(now, to, 50_000);
    assert!(bytes() < before + 200_000, "{}", bytes() - before);
}

// tests that programs cannot fill the table of local addresses
#[test]
fn addresses_that_were_bound_once_are_forgotten() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut node = Node::new(Config::default());
    node.add_local(ip("fe80::1"));
    let mut bind = |at: SocketAddr| {
        let id = node.socket().expect("a socket");
        node.bind(id, at).expect("bound");
        node.check_invariants();
        node.close(Instant::default(), id);
    };
    let any = |n: u32| SocketAddr::new(std::net::Ipv4Addr::from(0x7f00_0000 | n).into(), 4000);
    (1..300).for_each(|n| bind(any(n)));
    let before = bytes();
    for n in 300..30_000 {
        bind(any(n));
        bind(format!("[fe80::1%{n}]:4000").parse().expect("an address"));
    }
    assert!(bytes() < before + 100_000, "{}", bytes() - before);
}

// tests that one short message of a read keeps little of it
#[test]
fn short_messages_do_not_keep_the_buffers_they_came_in() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut lab, slow, link) = at(B, 5000).bowline();
    let mut pool = RxPool::default();
    let before = bytes();
    let count = 3000;
    for n in 0..count {
        let mut buf = pool.get();
        // The second message is for nobody, and gone at once.
        for frame in [data(2 * n + 1, 9, 5000, b"x"), data(2 * n + 2, 9, 5001, &[1; 15_000])] {
            buf.vec().extend_from_slice(&frame.bytes());
        }
        let buf = pool.freeze(buf);
        lab.node.handle_data(lab.now, link, buf);
        lab.node.process(lab.now, None, usize::MAX);
        while lab.node.poll_output().is_some() {}
    }
    assert_eq!(
        lab.node.info().sockets.iter().filter(|s| s.recv_bytes == count as usize).count(),
        1
    );
    let held = bytes() - before;
    assert!(held < 3 << 20, "{held} bytes for {count} messages");
    assert!(lab.node.recv(lab.now, slow, RecvOpts::default()).is_ok());
}
