//! A node driven by bytes: every call a driver may make, in any order, against peers that send
//! anything. Used by the tests on random bytes and by the fuzz target `rds_stream`; over RDMA by
//! `rds_rdma`.
#![allow(dead_code, reason = "each fuzz target takes one of the two")]

mod rdma;

pub(crate) use rdma::rdma;

use std::collections::HashMap;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Duration;

use bowline_rds::{
    CloseHow, CloseReason, Config, Instant, Interest, LinkId, Node, Output, RecvOpts, RxBuf,
    SendControl, SendMsg, SocketId, TxBatch,
};
use bowline_wire::rds::{BowlineExt, Flags, Handshake, Header, MAP_LEN};

/// Longest payload, so that an input of some hundred bytes cannot take much memory.
const LEN_MAX: usize = 5000;
const PEERS: [&str; 3] = ["10.0.0.1", "10.0.0.3", "10.0.0.4"];

/// Numbers taken from the input; zeros after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, bound: usize) -> usize {
        let n = usize::from(self.byte()) << 8 | usize::from(self.byte());
        if bound == 0 { 0 } else { n % bound }
    }

    fn bit(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// A small number mostly, any sometimes.
    fn number(&mut self) -> u64 {
        match self.byte() {
            n @ 0..=239 => u64::from(n % 40),
            240..=247 => u64::MAX - u64::from(self.byte() % 4),
            _ => u64::from(self.byte()) << 32,
        }
    }
}

struct Driver {
    node: Node,
    now: Instant,
    links: Vec<LinkId>,
    connecting: Vec<LinkId>,
    /// Bytes handed out by `poll_transmit` and not reported.
    writing: HashMap<LinkId, usize>,
    sockets: Vec<SocketId>,
    next_port: u16,
}

/// Plays an input. Panics when the node contradicts itself.
pub(crate) fn stream(bytes: &[u8]) {
    let mut input = Input(bytes);
    let kind = input.byte();
    let mut config = Config {
        addrs: vec!["10.0.0.2".parse().expect("an address")],
        end_to_end: kind & 1 == 0,
        paths: if kind & 2 == 0 { 8 } else { 1 },
        generation: 7,
        max_message: if kind & 4 == 0 { 1 << 20 } else { 4 << 20 },
        send_buffer: 4000,
        recv_buffer: 3000,
        ..Config::default()
    };
    if kind & 8 != 0 {
        config.limits.peers = 2;
        config.limits.peers_unproven = 1;
        config.limits.links_extra_per_peer = 1;
        config.limits.recv_bytes_per_peer = 3000;
        config.limits.recv_bytes_total = 5000;
        config.limits.pongs_per_path = 2;
        config.limits.sockets = 4;
    }
    let mut driver = Driver {
        node: Node::new(config),
        now: Instant::from_nanos(1),
        links: Vec::new(),
        connecting: Vec::new(),
        writing: HashMap::new(),
        sockets: Vec::new(),
        next_port: 40_000,
    };
    driver.open_socket(5000);
    while !input.0.is_empty() {
        driver.step(&mut input);
        driver.carry_out();
        driver.node.check_invariants();
    }
    driver.finish();
}

impl Driver {
    fn open_socket(&mut self, port: u16) {
        let Ok(socket) = self.node.socket() else { return };
        let _ = self.node.bind(socket, SocketAddr::from(([10, 0, 0, 2], port)));
        self.sockets.push(socket);
    }

    fn socket(&self, input: &mut Input<'_>) -> Option<SocketId> {
        self.sockets.get(input.below(self.sockets.len())).copied()
    }

    fn link(&self, input: &mut Input<'_>) -> Option<LinkId> {
        self.links.get(input.below(self.links.len())).copied()
    }

    fn forget(&mut self, link: LinkId) {
        self.links.retain(|l| *l != link);
        self.connecting.retain(|l| *l != link);
        self.writing.remove(&link);
    }

    fn carry_out(&mut self) {
        while let Some(out) = self.node.poll_output() {
            match out {
                Output::Connect { link, .. } => self.connecting.push(link),
                Output::Close { link, how: CloseHow::Reset | CloseHow::Fin } => self.forget(link),
                Output::Close { link, how: CloseHow::Cut } => {
                    self.forget(link);
                    self.node.handle_closed(self.now, link, CloseReason::Reset);
                }
                Output::CheckAlive { link } => self.node.handle_checked(self.now, link),
                _ => {}
            }
        }
    }

    fn feed(&mut self, link: LinkId, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.node.handle_data(self.now, link, RxBuf::from_vec(bytes));
        }
    }

    /// A frame that looks right, or nearly so.
    fn frame(input: &mut Input<'_>) -> Vec<u8> {
        let mut header = Header { sequence: input.number(), ..Header::default() };
        let mut payload = Vec::new();
        match input.byte() % 8 {
            0..=2 => {
                header.sport = [9, 0, 1, 5000][input.below(4)];
                header.dport = [5000, 5001, 0, 1][input.below(4)];
                header.flags = Flags::from_bits(input.byte() & 7);
                payload = vec![input.byte(); input.below(LEN_MAX)];
            }
            3 => {
                header = Header { ack: input.number(), ..Header::map() };
                payload = vec![if input.bit() { 0xff } else { 0 }; MAP_LEN];
                if input.bit() {
                    payload.truncate(input.below(MAP_LEN));
                }
            }
            4 => header = Header { ack: input.number(), ..Header::default() },
            5 | 6 => {
                (header.sport, header.dport) = if input.bit() { (1, 0) } else { (0, 1) };
                header.ack = input.number();
                header.ext = Handshake {
                    npaths: Some(u16::from(input.byte() % 10)),
                    generation: input.bit().then_some(u32::from(input.byte() % 3)),
                    sport_idx: input.bit(),
                    bowline: input.bit().then_some(BowlineExt {
                        version: input.byte() % 3,
                        path: input.byte() % 10,
                        max_message: 2 << 20,
                    }),
                }
                .emit();
                if input.bit() {
                    header.sequence = 0;
                }
            }
            _ => {
                header.len = u32::from(input.byte()) << 16;
                return header.to_bytes().to_vec();
            }
        }
        header.len = payload.len() as u32;
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend_from_slice(&payload);
        bytes
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let now = self.now;
        match input.byte() % 20 {
            0 => {
                self.next_port = self.next_port.wrapping_add(1);
                let peer = PEERS[input.below(PEERS.len())].parse().expect("an address");
                let remote = SocketAddr::new(peer, self.next_port);
                let local = SocketAddr::from(([10, 0, 0, 2], 16385));
                self.links.extend(self.node.handle_accepted(now, local, remote));
            }
            1 => {
                let Some(link) = self.link(input) else { return };
                let bytes = (0..input.below(100)).map(|_| input.byte()).collect();
                self.feed(link, bytes);
            }
            2..=5 => {
                let Some(link) = self.link(input) else { return };
                let mut bytes = Self::frame(input);
                if input.byte() > 200 {
                    bytes.truncate(input.below(bytes.len()));
                }
                if input.byte() > 128 {
                    let tail = bytes.split_off(input.below(bytes.len()));
                    self.feed(link, bytes);
                    self.node.process(now, None, usize::MAX);
                    self.carry_out();
                    if self.links.contains(&link) {
                        self.feed(link, tail);
                    }
                } else {
                    self.feed(link, bytes);
                }
            }
            6 => {
                let until = if input.bit() { self.socket(input) } else { None };
                let budget = if input.bit() { usize::MAX } else { input.below(4) + 1 };
                self.node.process(now, until, budget);
                self.node.idle(now);
            }
            7 => {
                let millis = [0, 1, 10, 250, 3_000, 36_000][input.below(6)];
                self.now = now + Duration::from_millis(millis);
                self.node.handle_timeout(self.now);
            }
            8 | 9 => {
                let Some(socket) = self.socket(input) else { return };
                let payload = vec![input.byte(); input.below(LEN_MAX)];
                let peer = PEERS[input.below(PEERS.len())].parse().expect("an address");
                let name = SocketAddr::new(peer, [9, 0, 5000][input.below(3)]);
                let cookie = [SendControl::ZcopyCookie(u32::from(input.byte()))];
                let zerocopy = input.bit();
                let control = if zerocopy { &cookie[..] } else { &[] };
                let slices = [IoSlice::new(&payload)];
                let blocking = input.bit();
                let msg = SendMsg {
                    name: Some(name),
                    payload: &slices,
                    control,
                    rdma: &[],
                    lent: None,
                    zerocopy,
                    blocking,
                    promised: false,
                };
                let _ = self.node.send(now, socket, &msg);
            }
            10 => {
                let Some(socket) = self.socket(input) else { return };
                let (peek, want_control) = (input.bit(), input.bit());
                let opts = RecvOpts { peek, want_control, ..RecvOpts::default() };
                if let Ok(got) = self.node.recv(now, socket, opts)
                    && let Some(data) = got.data
                {
                    assert_eq!(data.slices().map(<[u8]>::len).sum::<usize>(), data.len());
                }
            }
            11 | 12 => {
                let Some(link) = self.link(input) else { return };
                let mut batch = TxBatch::default();
                let n = self.node.poll_transmit(now, link, &mut batch, input.below(20_000) + 1);
                assert_eq!(batch.slices().map(<[u8]>::len).sum::<usize>(), n);
                if n > 0 {
                    assert!(self.writing.insert(link, n).is_none(), "one write at a time");
                }
            }
            13 => {
                let Some(link) = self.link(input) else { return };
                let Some(n) = self.writing.remove(&link) else { return };
                let written = if input.bit() { n } else { input.below(n + 1) };
                self.node.transmitted(now, link, written, written < n);
            }
            14 => {
                let Some(link) = self.link(input) else { return };
                self.node.handle_writable(now, link);
                self.node.handle_tcp_acked(now, link, input.below(3000) as u64);
            }
            15 => {
                let Some(link) = self.link(input) else { return };
                self.forget(link);
                self.node.handle_closed(now, link, CloseReason::Reset);
            }
            16 => {
                let Some(link) = self.connecting.pop() else { return };
                if input.bit() {
                    let local = SocketAddr::from(([10, 0, 0, 2], 50_000));
                    self.links.push(link);
                    self.node.handle_connected(now, link, local);
                } else {
                    self.node.handle_closed(now, link, CloseReason::Refused);
                }
            }
            17 => match input.byte() % 3 {
                0 => self.open_socket([5000, 5001, 0][input.below(3)]),
                1 => {
                    let Some(socket) = self.socket(input) else { return };
                    let peer = PEERS[input.below(PEERS.len())].parse().expect("an address");
                    let _ = self.node.cancel_sent_to(now, socket, SocketAddr::new(peer, 9));
                }
                _ => {
                    let Some(socket) = self.socket(input) else { return };
                    self.sockets.retain(|s| *s != socket);
                    self.node.close(now, socket);
                    assert!(self.node.register(socket, Interest::READ).is_err(), "it is gone");
                }
            },
            18 => {
                let Some(socket) = self.socket(input) else { return };
                let _ = self.node.register(socket, Interest::READ | Interest::WRITE);
                let _ = self.node.poll(socket);
                let _ = self.node.set_cong_monitor(socket, input.bit());
                let _ = self.node.set_zerocopy(socket, input.bit());
                let _ = self.node.set_recv_buffer(socket, input.below(6000));
            }
            _ => match input.byte() % 8 {
                0 => {
                    self.node.drop_links(now, Some(PEERS[0].parse().expect("an address")));
                }
                1 => {
                    let _ = self.node.set_sysctl(now, "rds_tcp_sndbuf", 10_000);
                }
                2 => {
                    let _ = self.node.set_sysctl(now, "ping_enable", i64::from(input.bit()));
                }
                3 => self.node.acknowledge_all(now),
                4 if input.byte() == 7 => self.node.close_links(now),
                _ => {
                    for option in 10_000..10_018 {
                        let _ = self.node.info_option(option);
                    }
                }
            },
        }
    }

    /// Ends everything; nothing may be left over.
    fn finish(mut self) {
        self.node.process(self.now, None, usize::MAX);
        self.carry_out();
        self.node.check_invariants();
        for link in std::mem::take(&mut self.links) {
            self.node.handle_closed(self.now, link, CloseReason::Eof);
            self.carry_out();
            self.node.check_invariants();
        }
        for socket in std::mem::take(&mut self.sockets) {
            self.node.close(self.now, socket);
        }
        self.carry_out();
        self.node.check_invariants();
        assert_eq!(self.node.unsent_total(), 0, "no socket, nothing to send");
        let info = self.node.info();
        assert!(info.sockets.is_empty() && info.recv.is_empty());
        for _ in 0..100 {
            let Some(at) = self.node.poll_timeout() else { break };
            self.now = self.now.max(at);
            self.node.handle_timeout(self.now);
            self.carry_out();
            self.node.check_invariants();
        }
    }
}
