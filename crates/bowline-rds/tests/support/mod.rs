//! Harness of the tests: a node against a script that plays its peers, and two nodes joined by
//! TCP connections in memory. The clock is virtual; nothing is random but by a seed.
#![allow(dead_code, reason = "each user of the harness takes a part of it")]

pub(crate) mod rdma;

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_rds::{
    CloseHow, CloseReason, Config, Error, Event, Instant, Interest, LinkId, Node, Output, Received,
    RecvOpts, RxBuf, SendControl, SendMsg, Sent, SocketId, TxBatch,
};
use bowline_wire::rds::{BowlineExt, Flags, HEADER_LEN, Handshake, Header, MAP_LEN};

/// Smaller and larger address of the tests.
pub(crate) const A: &str = "10.0.0.1";
pub(crate) const B: &str = "10.0.0.2";

pub(crate) fn addr(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) fn config(local: &str) -> Config {
    Config { addrs: vec![ip(local)], generation: 0x1111, ..Config::default() }
}

/// One frame of a byte stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

impl Frame {
    pub(crate) fn is_data(&self) -> bool {
        self.header.sport > 1 && self.header.dport > 1
    }

    pub(crate) fn is_map(&self) -> bool {
        self.header.is_map()
    }

    pub(crate) fn is_ack(&self) -> bool {
        let h = &self.header;
        (h.sequence, h.len, h.sport, h.dport, h.flags) == (0, 0, 0, 0, Flags::NONE)
    }

    pub(crate) fn retransmitted(&self) -> bool {
        self.header.flags.contains(Flags::RETRANSMITTED)
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.header.to_bytes().to_vec();
        out.extend_from_slice(&self.payload);
        out
    }
}

/// Takes whole frames off the front of a stream.
pub(crate) fn take_frames(stream: &mut Vec<u8>) -> Vec<Frame> {
    let mut frames = Vec::new();
    let mut at = 0;
    while stream.len() - at >= HEADER_LEN {
        let header = Header::parse(&stream[at..]).expect("48 bytes");
        let end = at + HEADER_LEN + header.len as usize;
        if stream.len() < end {
            break;
        }
        frames.push(Frame { header, payload: stream[at + HEADER_LEN..end].to_vec() });
        at = end;
    }
    stream.drain(..at);
    frames
}

pub(crate) fn data(sequence: u64, sport: u16, dport: u16, payload: &[u8]) -> Frame {
    let header = Header { sequence, len: payload.len() as u32, sport, dport, ..Header::default() };
    Frame { header, payload: payload.to_vec() }
}

pub(crate) fn flagged(mut frame: Frame) -> Frame {
    frame.header.flags = Flags::RETRANSMITTED;
    frame
}

pub(crate) fn map_of(ports: &[u16]) -> Frame {
    let mut payload = vec![0; MAP_LEN];
    for port in ports {
        payload[usize::from(port >> 3)] |= 1 << (port & 7);
    }
    Frame { header: Header::map(), payload }
}

/// Extension area of a kernel's probe.
pub(crate) fn npaths_ext(n: u16) -> [u8; 16] {
    Handshake { npaths: Some(n), ..Handshake::default() }.emit()
}

/// Extension area of a later kernel's probe: its ports tell the path, and so do ours for it.
pub(crate) fn later_ext(n: u16) -> [u8; 16] {
    Handshake { npaths: Some(n), sport_idx: true, ..Handshake::default() }.emit()
}

/// Extension area of a bowline node's probe.
pub(crate) fn bowline_ext(generation: u32, path: u8, max_message: u32) -> [u8; 16] {
    Handshake {
        npaths: Some(8),
        generation: Some(generation),
        sport_idx: true,
        bowline: Some(BowlineExt { version: 1, path, max_message }),
    }
    .emit()
}

pub(crate) fn ping_with(sequence: u64, ext: [u8; 16]) -> Frame {
    let header = Header { sequence, sport: 1, dport: 0, ext, ..Header::default() };
    Frame { header, payload: Vec::new() }
}

pub(crate) fn pong_with(sequence: u64, ext: [u8; 16]) -> Frame {
    let header = Header { sequence, sport: 0, dport: 1, ext, ..Header::default() };
    Frame { header, payload: Vec::new() }
}

/// A bowline node's greeting of a connection.
pub(crate) fn hello(generation: u32, path: u8, ack: u64) -> Frame {
    let mut frame = ping_with(0, bowline_ext(generation, path, 1 << 20));
    frame.header.ack = ack;
    frame
}

pub(crate) fn ack_frame(ack: u64) -> Frame {
    Frame { header: Header { ack, ..Header::default() }, payload: Vec::new() }
}

/// Result of a receive in a form that can be compared.
/// The number that the node gave last on its only path.
pub(crate) fn last_number(lab: &Lab) -> u64 {
    lab.node.info().paths[0].next_tx_seq - 1
}

pub(crate) fn text(received: &Received) -> Vec<u8> {
    received.data.as_ref().expect("a message").slices().flatten().copied().collect()
}

/// A node whose peers are played by the test.
pub(crate) struct Lab {
    pub(crate) node: Node,
    pub(crate) now: Instant,
    /// Bytes that the node wrote on each connection and the test has not taken yet.
    pub(crate) written: HashMap<LinkId, Vec<u8>>,
    /// Connections the node asked for, not answered yet.
    pub(crate) connects: Vec<(LinkId, SocketAddr, u8)>,
    pub(crate) closes: Vec<(LinkId, CloseHow)>,
    pub(crate) wakes: Vec<(SocketId, Interest)>,
    pub(crate) events: Vec<Event>,
    pub(crate) resumes: Vec<LinkId>,
    pub(crate) checks: Vec<LinkId>,
    /// Bytes the peer's TCP takes before it is full, all connections together.
    pub(crate) room: usize,
    /// Whether TCP acknowledges at once.
    pub(crate) acks: bool,
    /// Checks of connections end only when the test says so.
    pub(crate) slow_checks: bool,
    /// Connections to be cut wait for the test to close them; else there is nothing left to read.
    pub(crate) slow_cuts: bool,
    next_port: u16,
}

impl Lab {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            node: Node::new(config),
            now: Instant::from_nanos(1_000_000_000),
            written: HashMap::new(),
            connects: Vec::new(),
            closes: Vec::new(),
            wakes: Vec::new(),
            events: Vec::new(),
            resumes: Vec::new(),
            checks: Vec::new(),
            room: usize::MAX,
            acks: true,
            slow_checks: false,
            slow_cuts: false,
            next_port: 40_000,
        }
    }

    /// A node on the larger address: peers connect to it.
    pub(crate) fn larger() -> Self {
        Self::new(config(B))
    }

    /// A node on the smaller address: it connects.
    pub(crate) fn smaller() -> Self {
        Self::new(config(A))
    }

    pub(crate) fn bound(&mut self, at: &str) -> SocketId {
        let socket = self.node.socket().expect("a socket");
        self.node.bind(socket, addr(at)).expect("bound");
        socket
    }

    /// Carries out the node's requests, until there are no more.
    pub(crate) fn settle(&mut self) {
        loop {
            self.carry_out();
            self.node.process(self.now, None, usize::MAX);
            self.node.idle(self.now);
            if self.acks {
                let mut links = Vec::new();
                self.node.links_wanting_tcp_ack(&mut links);
                for link in links {
                    self.node.handle_tcp_acked(self.now, link, 0);
                }
            }
            self.node.check_invariants();
            if !self.carry_out() {
                return;
            }
        }
    }

    fn carry_out(&mut self) -> bool {
        let mut any = false;
        while let Some(out) = self.node.poll_output() {
            any = true;
            match out {
                Output::Connect { link, remote, port_mod8, .. } => {
                    self.connects.push((link, remote, port_mod8));
                }
                Output::Close { link, how } => {
                    self.connects.retain(|(l, ..)| *l != link);
                    self.closes.push((link, how));
                    if how == CloseHow::Cut && !self.slow_cuts {
                        self.node.handle_closed(self.now, link, CloseReason::Reset);
                    }
                }
                Output::Transmit { link } => self.write(link),
                Output::Wake { socket, ready } => self.wakes.push((socket, ready)),
                Output::Resume { link } => self.resumes.push(link),
                Output::CheckAlive { link } => {
                    self.checks.push(link);
                    if !self.slow_checks {
                        self.node.handle_checked(self.now, link);
                    }
                }
                Output::Event(event) => self.events.push(event),
                other => panic!("unexpected output {other:?}"),
            }
        }
        any
    }

    /// Writes as much of a connection as TCP takes.
    pub(crate) fn write(&mut self, link: LinkId) {
        let mut batch = TxBatch::default();
        loop {
            let n = self.node.poll_transmit(self.now, link, &mut batch, 256 << 10);
            if n == 0 {
                return;
            }
            let bytes: Vec<u8> = batch.slices().flatten().copied().collect();
            assert_eq!(bytes.len(), n);
            let taken = n.min(self.room);
            self.room -= taken;
            self.written.entry(link).or_default().extend_from_slice(&bytes[..taken]);
            self.node.transmitted(self.now, link, taken, taken < n);
            self.node.check_invariants();
            if taken < n {
                return;
            }
        }
    }

    /// TCP has room again.
    pub(crate) fn unblock(&mut self, link: LinkId, room: usize) {
        self.room = room;
        self.node.handle_writable(self.now, link);
        self.settle();
    }

    /// A peer connects; returns `None` when the connection is refused.
    pub(crate) fn try_accept(&mut self, peer: &str) -> Option<LinkId> {
        self.next_port += 1;
        let remote = SocketAddr::new(ip(peer), self.next_port);
        self.accept_from(remote)
    }

    pub(crate) fn accept_from(&mut self, remote: SocketAddr) -> Option<LinkId> {
        let local = SocketAddr::new(self.node.config().addrs[0], 16385);
        let link = self.node.handle_accepted(self.now, local, remote);
        self.settle();
        link.ok()
    }

    pub(crate) fn accept(&mut self, peer: &str) -> LinkId {
        self.try_accept(peer).expect("accepted")
    }

    /// Answers the node's oldest connect.
    pub(crate) fn establish(&mut self) -> LinkId {
        let (link, ..) = self.connects.remove(0);
        self.establish_link(link);
        link
    }

    /// A socket at one address sends to another, and the node connects for it.
    pub(crate) fn dial(&mut self, at: &str, to: &str, payload: &[u8]) -> (SocketId, LinkId) {
        let socket = self.bound(at);
        self.send(socket, to, payload).expect("queued");
        (socket, self.establish())
    }

    pub(crate) fn establish_link(&mut self, link: LinkId) {
        self.connects.retain(|(l, ..)| *l != link);
        self.next_port += 1;
        let local = SocketAddr::new(self.node.config().addrs[0], self.next_port);
        self.node.handle_connected(self.now, link, local);
        self.settle();
    }

    pub(crate) fn fail(&mut self, link: LinkId, reason: CloseReason) {
        self.connects.retain(|(l, ..)| *l != link);
        self.node.handle_closed(self.now, link, reason);
        self.settle();
    }

    pub(crate) fn feed(&mut self, link: LinkId, bytes: &[u8]) {
        self.node.handle_data(self.now, link, RxBuf::from_vec(bytes.to_vec()));
        self.settle();
    }

    pub(crate) fn deliver(&mut self, link: LinkId, frames: &[Frame]) {
        let bytes: Vec<u8> = frames.iter().flat_map(Frame::bytes).collect();
        self.feed(link, &bytes);
    }

    /// Whole frames the node has written on a connection since the last look.
    pub(crate) fn frames(&mut self, link: LinkId) -> Vec<Frame> {
        take_frames(self.written.entry(link).or_default())
    }

    /// The same, application messages only.
    pub(crate) fn data_frames(&mut self, link: LinkId) -> Vec<Frame> {
        self.frames(link).into_iter().filter(Frame::is_data).collect()
    }

    /// Lets time pass; everything due happens at its time.
    pub(crate) fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        self.settle();
        while let Some(at) = self.node.poll_timeout() {
            if at > end {
                break;
            }
            self.now = self.now.max(at);
            self.node.handle_timeout(self.now);
            self.settle();
        }
        self.now = end;
        self.node.handle_timeout(end);
        self.settle();
    }

    pub(crate) fn ms(&mut self, millis: u64) {
        self.advance(Duration::from_millis(millis));
    }

    pub(crate) fn send(
        &mut self,
        socket: SocketId,
        to: &str,
        payload: &[u8],
    ) -> Result<Sent, Error> {
        self.send_with(socket, to, payload, &[], false)
    }

    pub(crate) fn send_with(
        &mut self,
        socket: SocketId,
        to: &str,
        payload: &[u8],
        control: &[SendControl],
        zerocopy: bool,
    ) -> Result<Sent, Error> {
        let slices = [IoSlice::new(payload)];
        let name = Some(addr(to));
        let msg = SendMsg { name, payload: &slices, control, zerocopy, ..SendMsg::default() };
        let sent = self.node.send(self.now, socket, &msg);
        if let Ok(Sent { link: Some(link), .. }) = sent {
            self.write(link);
        }
        self.settle();
        sent
    }

    /// Sends a message without payload, and writes nothing.
    pub(crate) fn send_empty(&mut self, socket: SocketId, to: &str) -> Result<Sent, Error> {
        let msg = SendMsg { name: Some(addr(to)), ..SendMsg::default() };
        self.node.send(self.now, socket, &msg)
    }

    /// Sends without writing anything.
    pub(crate) fn send_slow(&mut self, socket: SocketId, to: &str, payload: &[u8]) -> Sent {
        let slices = [IoSlice::new(payload)];
        let msg = SendMsg { name: Some(addr(to)), payload: &slices, ..SendMsg::default() };
        self.node.send(self.now, socket, &msg).expect("sent")
    }

    pub(crate) fn recv(&mut self, socket: SocketId) -> Result<Received, Error> {
        let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
        let got = self.node.recv(self.now, socket, opts);
        self.settle();
        got
    }

    /// Payloads of everything that waits on a socket.
    pub(crate) fn recv_all(&mut self, socket: SocketId) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while let Ok(got) = self.recv(socket) {
            all.push(text(&got));
        }
        all
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.node.counters().iter().find(|(n, _)| *n == name).expect("a counter").1
    }

    /// A kernel at `peer` connects and is known as a kernel with `npaths` paths; the node's
    /// greeting is discarded.
    pub(crate) fn kernel(&mut self, peer: &str, npaths: u16) -> LinkId {
        let link = self.accept(peer);
        self.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(npaths))]);
        self.written.clear();
        link
    }

    /// Connects to a peer and learns that it is a kernel with one path.
    pub(crate) fn dial_kernel(&mut self, socket: SocketId, to: &str) -> LinkId {
        self.send(socket, to, b"first").expect("sent");
        let link = self.establish();
        self.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(1))]);
        self.written.clear();
        link
    }

    /// A kernel connects on all of its eight paths.
    pub(crate) fn kernel_paths(&mut self, peer: &str) -> Vec<LinkId> {
        let first = self.kernel(peer, 8);
        [first].into_iter().chain((1..8).map(|_| self.accept(peer))).collect()
    }

    /// A bowline node connects and greets.
    pub(crate) fn greeted(&mut self, peer: &str, greeting: Frame) -> LinkId {
        let link = self.accept(peer);
        self.deliver(link, &[map_of(&[]), greeting]);
        link
    }

    /// A bowline node of generation `generation` connects for `path`.
    pub(crate) fn bowline(&mut self, peer: &str, generation: u32, path: u8) -> LinkId {
        self.greeted(peer, hello(generation, path, 0))
    }

    /// Payloads of the application messages written on a connection since the last look.
    pub(crate) fn payloads(&mut self, link: LinkId) -> Vec<Vec<u8>> {
        self.data_frames(link).into_iter().map(|frame| frame.payload).collect()
    }
}

/// What many tests begin with: a node, a socket of it, and a connection with the peer at the other
/// address. Each end of the chain returns them.
pub(crate) struct Scene {
    config: Config,
    port: u16,
}

/// A node at one of the two addresses, with a socket of this port.
pub(crate) fn at(local: &str, port: u16) -> Scene {
    Scene { config: config(local), port }
}

impl Scene {
    /// The node has this many paths to a peer.
    pub(crate) fn paths(mut self, paths: u8) -> Self {
        self.config.paths = paths;
        self
    }

    fn bound(self) -> (Lab, SocketId) {
        let at = SocketAddr::new(self.config.addrs[0], self.port);
        let mut lab = Lab::new(self.config);
        let socket = lab.bound(&at.to_string());
        (lab, socket)
    }

    /// A kernel with `npaths` paths has connected to the larger address.
    pub(crate) fn kernel(self, npaths: u16) -> (Lab, SocketId, LinkId) {
        let (mut lab, socket) = self.bound();
        let link = lab.kernel(A, npaths);
        (lab, socket, link)
    }

    /// A bowline node of generation 7 has connected to the larger address, for path 0.
    pub(crate) fn bowline(self) -> (Lab, SocketId, LinkId) {
        let (mut lab, socket) = self.bound();
        let link = lab.bowline(A, 7, 0);
        (lab, socket, link)
    }

    /// The same, and on that connection a message has been written that waited for it.
    pub(crate) fn begun(self, payload: &[u8]) -> (Lab, SocketId, LinkId) {
        let (mut lab, socket) = self.sends("10.0.0.1:5000", payload);
        let link = lab.bowline(A, 7, 0);
        assert_eq!(lab.data_frames(link).len(), 1, "it is begun");
        (lab, socket, link)
    }

    /// The socket has sent a message, for which there is no connection yet.
    pub(crate) fn sends(self, to: &str, payload: &[u8]) -> (Lab, SocketId) {
        let (mut lab, socket) = self.bound();
        lab.send(socket, to, payload).expect("queued");
        (lab, socket)
    }

    /// The socket has sent a message, and the connection that the node made for it is new.
    pub(crate) fn dials(self, to: &str, payload: &[u8]) -> (Lab, SocketId, LinkId) {
        let (mut lab, socket) = self.sends(to, payload);
        let link = lab.establish();
        (lab, socket, link)
    }

    /// The same, and the peer has greeted as a bowline node of generation 7.
    pub(crate) fn dials_bowline(self, to: &str, payload: &[u8]) -> (Lab, SocketId, LinkId) {
        let (mut lab, socket, link) = self.dials(to, payload);
        lab.deliver(link, &[map_of(&[]), hello(7, 0, 0)]);
        (lab, socket, link)
    }

    /// The node has connected to a kernel with one path at the larger address.
    pub(crate) fn dials_kernel(self) -> (Lab, SocketId, LinkId) {
        let (mut lab, socket) = self.bound();
        let link = lab.dial_kernel(socket, "10.0.0.2:5000");
        (lab, socket, link)
    }
}

/// One TCP connection between two nodes.
struct Wire {
    /// Link at each end, while the end exists.
    ends: [Option<LinkId>; 2],
    /// Bytes on their way to each end.
    to: [VecDeque<u8>; 2],
    /// The writer of the stream to this end has finished or is gone, and how.
    ended: [Option<CloseReason>; 2],
}

/// Two nodes and the TCP connections between them.
pub(crate) struct Pair {
    pub(crate) nodes: [Node; 2],
    pub(crate) now: Instant,
    pub(crate) addrs: [IpAddr; 2],
    wires: Vec<Wire>,
    pub(crate) wakes: Vec<(usize, SocketId, Interest)>,
    pub(crate) listening: [bool; 2],
    /// Addresses of nobody that refuse connections; others do not answer.
    pub(crate) refusing: Vec<IpAddr>,
    /// Most bytes given to a node at once.
    pub(crate) chunk: usize,
    /// Most bytes on their way in one direction of a connection.
    pub(crate) window: usize,
    /// Bytes move.
    pub(crate) moving: bool,
    next_port: u16,
}

impl Pair {
    pub(crate) fn new(a: Config, b: Config) -> Self {
        let addrs = [a.addrs[0], b.addrs[0]];
        Self {
            nodes: [Node::new(a), Node::new(b)],
            now: Instant::from_nanos(1_000_000_000),
            addrs,
            wires: Vec::new(),
            wakes: Vec::new(),
            listening: [true; 2],
            refusing: Vec::new(),
            chunk: usize::MAX,
            window: usize::MAX,
            moving: true,
            next_port: 40_000,
        }
    }

    /// Two bowline nodes with all paths.
    pub(crate) fn bowline() -> Self {
        Self::new(config(A), Config { generation: 0x2222, ..config(B) })
    }

    pub(crate) fn bound(&mut self, side: usize, port: u16) -> SocketId {
        let at = SocketAddr::new(self.addrs[side], port);
        let socket = self.nodes[side].socket().expect("a socket");
        self.nodes[side].bind(socket, at).expect("bound");
        socket
    }

    fn end_of(&self, side: usize, link: LinkId) -> Option<usize> {
        self.wires.iter().position(|w| w.ends[side] == Some(link))
    }

    /// Open TCP connections.
    pub(crate) fn connections(&self) -> usize {
        self.wires.iter().filter(|w| w.ends.iter().all(Option::is_some)).count()
    }

    fn output(&mut self, side: usize, out: Output) {
        let other = 1 - side;
        match out {
            Output::Connect { link, remote, port_mod8, .. } => {
                self.connect(side, link, remote.ip(), port_mod8);
            }
            Output::Transmit { link } => self.write(side, link),
            Output::Close { link, how } => {
                let Some(w) = self.end_of(side, link) else {
                    if how == CloseHow::Cut {
                        self.nodes[side].handle_closed(self.now, link, CloseReason::TimedOut);
                    }
                    return;
                };
                let wire = &mut self.wires[w];
                let resets = matches!(how, CloseHow::Reset | CloseHow::Cut);
                let reason = if resets { CloseReason::Reset } else { CloseReason::Eof };
                if resets {
                    wire.to[other].clear();
                }
                wire.ended[other] = wire.ended[other].or(Some(reason));
                if how == CloseHow::Cut {
                    let bytes: Vec<u8> = wire.to[side].drain(..).collect();
                    self.nodes[side].handle_data(self.now, link, RxBuf::from_vec(bytes));
                    self.nodes[side].handle_closed(self.now, link, CloseReason::Reset);
                }
                let wire = &mut self.wires[w];
                if how != CloseHow::Drain {
                    wire.ends[side] = None;
                    wire.to[side].clear();
                }
            }
            Output::CheckAlive { link } => {
                self.nodes[side].handle_checked(self.now, link);
            }
            Output::Wake { socket, ready } => self.wakes.push((side, socket, ready)),
            _ => {}
        }
    }

    fn connect(&mut self, side: usize, link: LinkId, to: IpAddr, port_mod8: u8) {
        let other = 1 - side;
        let nobody = to != self.addrs[other];
        if nobody && !self.refusing.contains(&to) {
            return;
        }
        if nobody || !self.listening[other] {
            self.nodes[side].handle_closed(self.now, link, CloseReason::Refused);
            return;
        }
        self.next_port += 8;
        let local = SocketAddr::new(self.addrs[side], self.next_port + u16::from(port_mod8));
        let remote = SocketAddr::new(self.addrs[other], 16385);
        let accepted = self.nodes[other].handle_accepted(self.now, remote, local).ok();
        let mut ends = [None; 2];
        ends[side] = Some(link);
        ends[other] = accepted;
        let mut ended = [None; 2];
        if accepted.is_none() {
            ended[side] = Some(CloseReason::Reset);
        }
        self.wires.push(Wire { ends, to: Default::default(), ended });
        self.nodes[side].handle_connected(self.now, link, local);
    }

    pub(crate) fn write(&mut self, side: usize, link: LinkId) {
        let other = 1 - side;
        let mut batch = TxBatch::default();
        loop {
            let Some(w) = self.end_of(side, link) else { return };
            let n = self.nodes[side].poll_transmit(self.now, link, &mut batch, 256 << 10);
            if n == 0 {
                return;
            }
            let stream = &mut self.wires[w].to[other];
            let taken = n.min(self.window - stream.len().min(self.window));
            stream.extend(batch.slices().flatten().take(taken));
            self.nodes[side].transmitted(self.now, link, taken, taken < n);
            if taken < n {
                return;
            }
        }
    }

    /// Moves bytes one round; returns whether anything moved.
    fn carry(&mut self) -> bool {
        let mut moved = false;
        for w in 0..self.wires.len() {
            for side in 0..2 {
                let wire = &mut self.wires[w];
                let Some(link) = wire.ends[side] else {
                    wire.to[side].clear();
                    continue;
                };
                if !wire.to[side].is_empty() && self.nodes[side].wants_read(link) {
                    moved = true;
                    let n = wire.to[side].len().min(self.chunk);
                    let bytes: Vec<u8> = wire.to[side].drain(..n).collect();
                    let writer = wire.ends[1 - side];
                    self.nodes[side].handle_data(self.now, link, RxBuf::from_vec(bytes));
                    self.nodes[side].process(self.now, None, usize::MAX);
                    if let Some(writer) = writer {
                        self.nodes[1 - side].handle_writable(self.now, writer);
                    }
                } else if wire.to[side].is_empty()
                    && let Some(reason) = wire.ended[side]
                {
                    moved = true;
                    wire.ends[side] = None;
                    wire.ended[1 - side] = wire.ended[1 - side].or(Some(CloseReason::Eof));
                    self.nodes[side].handle_closed(self.now, link, reason);
                }
            }
        }
        self.wires.retain(|w| w.ends.iter().any(Option::is_some));
        moved
    }

    /// Runs until nothing happens without time passing.
    pub(crate) fn settle(&mut self) {
        loop {
            let mut busy = false;
            for side in 0..2 {
                while let Some(out) = self.nodes[side].poll_output() {
                    busy = true;
                    self.output(side, out);
                }
                self.nodes[side].idle(self.now);
                let mut links = Vec::new();
                self.nodes[side].links_wanting_tcp_ack(&mut links);
                for link in links {
                    if let Some(w) = self.end_of(side, link) {
                        let unacked = self.wires[w].to[1 - side].len() as u64;
                        self.nodes[side].handle_tcp_acked(self.now, link, unacked);
                    }
                }
                self.nodes[side].check_invariants();
            }
            if self.moving {
                busy |= self.carry();
            }
            if !busy {
                return;
            }
        }
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        self.settle();
        loop {
            let next = self.nodes.iter().filter_map(Node::poll_timeout).min();
            let Some(at) = next.filter(|at| *at <= end) else { break };
            self.now = self.now.max(at);
            for node in &mut self.nodes {
                node.handle_timeout(self.now);
            }
            self.settle();
        }
        self.now = end;
    }

    pub(crate) fn ms(&mut self, millis: u64) {
        self.advance(Duration::from_millis(millis));
    }

    /// Sends without moving anything.
    pub(crate) fn send_quiet(
        &mut self,
        side: usize,
        socket: SocketId,
        port: u16,
        payload: &[u8],
    ) -> Result<Sent, Error> {
        let slices = [IoSlice::new(payload)];
        let name = Some(SocketAddr::new(self.addrs[1 - side], port));
        let msg = SendMsg { name, payload: &slices, ..SendMsg::default() };
        self.nodes[side].send(self.now, socket, &msg)
    }

    pub(crate) fn send(
        &mut self,
        side: usize,
        socket: SocketId,
        port: u16,
        payload: &[u8],
    ) -> Result<Sent, Error> {
        let sent = self.send_quiet(side, socket, port, payload);
        if let Ok(Sent { link: Some(link), .. }) = sent {
            self.write(side, link);
        }
        self.settle();
        sent
    }

    /// Writes what was sent without moving anything.
    pub(crate) fn flush(&mut self, side: usize) {
        let links: Vec<_> = self.wires.iter().filter_map(|w| w.ends[side]).collect();
        for link in links {
            self.write(side, link);
        }
        self.settle();
    }

    pub(crate) fn recv(&mut self, side: usize, socket: SocketId) -> Result<Received, Error> {
        let got = self.nodes[side].recv(self.now, socket, RecvOpts::default());
        self.settle();
        got
    }

    pub(crate) fn recv_all(&mut self, side: usize, socket: SocketId) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while let Ok(got) = self.recv(side, socket) {
            all.push(text(&got));
        }
        all
    }

    /// Cuts every TCP connection; what is under way is lost.
    pub(crate) fn cut(&mut self) {
        for w in &mut self.wires {
            w.to = Default::default();
            w.ended = [Some(CloseReason::Reset); 2];
        }
        let moving = std::mem::replace(&mut self.moving, true);
        self.settle();
        self.moving = moving;
    }

    pub(crate) fn counter(&self, side: usize, name: &str) -> u64 {
        self.nodes[side].counters().iter().find(|(n, _)| *n == name).expect("a counter").1
    }
}
