//! A node on RDMA driven by bytes: every call a driver may make, in any order, against peers that
//! send anything. Used by the tests on random bytes and by the fuzz target `rds_rdma`.

use std::collections::HashMap;
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_rds::{
    CloseReason, Config, Control, Instant, Misbehaviour, Node, Output, RdmaAccess, RdmaFrame,
    RdmaLinkId, RdmaOp, RdmaPiece, RdmaRequest, RdmaStatus, RecvOpts, RxBuf, SendControl, SendMsg,
    SocketId,
};
use bowline_wire::rds::{
    BowlineConnect, ConnectData, Flags, Header, RdmaDest, RdmaExt, Version, checksum,
};

use super::Input;

/// Memory of a long frame, bytes.
const FRAME_MAX: usize = 16 << 10;
/// Longest payload, so that an input of some hundred bytes cannot take much memory.
const LEN_MAX: usize = 20_000;
const PEERS: [[u8; 4]; 3] = [[10, 0, 0, 1], [10, 0, 0, 3], [10, 0, 0, 4]];
const NODE: [u8; 4] = [10, 0, 0, 2];

/// A connection as its driver knows it.
#[derive(Default)]
struct Link {
    /// Requests that were posted and have a completion to come, in order.
    posted: Vec<u64>,
    next: Option<u64>,
    /// The node has ended it; nothing more is posted on it.
    ending: bool,
}

struct Driver {
    node: Node,
    now: Instant,
    /// Connections, in the order in which they were made.
    order: Vec<RdmaLinkId>,
    links: HashMap<RdmaLinkId, Link>,
    sockets: Vec<SocketId>,
    /// Memory that peers may use, by the driver's number.
    regions: Vec<u64>,
    next_region: u32,
    /// Operations by token: their socket, until they are reported.
    tokens: HashMap<u64, Option<SocketId>>,
}

/// Plays an input. Panics when the node contradicts itself.
pub(crate) fn rdma(bytes: &[u8]) {
    let mut input = Input(bytes);
    let kind = input.byte();
    let mut config = Config {
        addrs: vec![IpAddr::from(NODE)],
        paths: if kind & 1 == 0 { 8 } else { 1 },
        max_message: if kind & 2 == 0 { 1 << 20 } else { 4 << 20 },
        send_buffer: 60_000,
        recv_buffer: 30_000,
        ..Config::default()
    };
    config.sysctl.ib_flow_control = i32::from(kind & 4 != 0);
    config.sysctl.ib_max_recv_wr = 8;
    if kind & 8 != 0 {
        config.limits.peers = 2;
        config.limits.peers_unproven = 1;
        config.limits.recv_bytes_per_peer = 3000;
        config.limits.recv_bytes_total = 5000;
        config.limits.pongs_per_path = 2;
        config.limits.partial_bytes_total = 10_000;
    }
    let mut node = Node::new(config);
    node.set_rdma_addrs([IpAddr::from(NODE)]);
    if kind & 16 != 0 {
        node.set_rdma_frame(FRAME_MAX);
    }
    let mut driver = Driver {
        node,
        now: Instant::from_nanos(1),
        order: Vec::new(),
        links: HashMap::new(),
        sockets: Vec::new(),
        regions: Vec::new(),
        next_region: 0,
        tokens: HashMap::new(),
    };
    driver.open_socket(5000);
    while !input.0.is_empty() {
        driver.step(&mut input);
        driver.carry_out();
        driver.node.check_invariants();
    }
    driver.finish();
}

fn peer(input: &mut Input<'_>) -> IpAddr {
    PEERS[input.below(PEERS.len())].into()
}

/// Private data that look right, or nearly so.
fn connect_data(input: &mut Input<'_>, from: IpAddr) -> Vec<u8> {
    let major = [3, 3, 3, 4, 0, 2][input.below(6)];
    let version = Version { major, minor: [1, 1, 0, 2][input.below(4)] };
    let mut data = ConnectData::new(from, IpAddr::from(NODE), version);
    data.tos = input.byte() % 2;
    data.ack = input.number();
    data.credit = [0, 1, 8, 65_535, u32::MAX][input.below(5)];
    data.bowline = (input.byte() & 3 == 0).then(|| BowlineConnect {
        frame_kib: [0, 5, 8, 16, 255][input.below(5)],
        max_message: [0, 16, 40, u16::MAX][input.below(4)],
    });
    let mut bytes = data.to_bytes().to_vec();
    if input.byte() > 230 {
        let at = input.below(bytes.len());
        bytes[at] = input.byte();
        bytes.truncate(input.below(bytes.len() + 1));
    }
    bytes
}

/// Frames that look right, or nearly so: of a message, a map, or acknowledgements.
fn frames(input: &mut Input<'_>) -> Vec<(Header, Vec<u8>)> {
    let mut header = Header { sequence: input.number(), ack: input.number(), ..Header::default() };
    let mut len = input.below(LEN_MAX);
    match input.byte() % 8 {
        0..=3 => {
            header.sport = [9, 0, 1, 5000][input.below(4)];
            header.dport = [5000, 5001, 0, 1][input.below(4)];
            header.flags = Flags::from_bits(input.byte() & 7);
            header.ext = match input.byte() % 4 {
                0 => RdmaExt::Op(u32::from(input.byte() % 8)).emit(),
                1 => RdmaExt::Dest(RdmaDest { rkey: 1, offset: input.byte().into() }).emit(),
                2 => [input.byte(); 16],
                _ => [0; 16],
            };
        }
        4 | 5 => {
            header = Header { ack: header.ack, ..Header::map() };
            len = if input.byte() > 200 { input.below(LEN_MAX) } else { 8192 };
        }
        _ => len = 0,
    }
    header.credit = if input.bit() { input.byte() } else { 0 };
    header.len = len as u32;
    if input.byte() > 250 {
        header.len = u32::from(input.byte()) << 13;
    }
    let fill = input.byte();
    let fragment = if input.byte() > 200 { FRAME_MAX - 48 } else { 4096 };
    let mut parts: Vec<_> =
        vec![fill; len].chunks(fragment).map(|part| (header, part.to_vec())).collect();
    if parts.is_empty() {
        parts.push((header, Vec::new()));
    }
    if input.byte() > 220 {
        let at = input.below(parts.len());
        parts[at].1.resize(input.below(4097), 1);
    }
    if input.byte() > 220 {
        let at = input.below(parts.len());
        parts.remove(at);
    }
    if input.byte() > 200 {
        let at = input.below(parts.len() + 1);
        parts.insert(at, (Header { ack: input.number(), ..Header::default() }, Vec::new()));
    }
    if input.byte() > 240 {
        parts.truncate(input.below(parts.len() + 1));
    }
    parts
}

fn op(input: &mut Input<'_>, token: u64) -> RdmaOp {
    let access = match input.byte() % 4 {
        0 => RdmaAccess::Write,
        1 => RdmaAccess::Read,
        2 => RdmaAccess::FetchAdd(1),
        _ => RdmaAccess::CompareSwap { compare: 1, swap: 2 },
    };
    let pieces = if access.is_atomic() { 1 } else { input.below(40) + 1 };
    let piece = RdmaPiece { addr: 4096, len: 8, lkey: 7 };
    RdmaOp {
        access,
        cookie: input.number() << 3,
        offset: input.number() << 3,
        len: 8 * pieces as u64,
        local: vec![piece; pieces],
        fence: input.bit(),
        silent: input.bit(),
        token,
        notify: input.bit(),
        hold: None,
    }
}

impl Driver {
    fn open_socket(&mut self, port: u16) {
        let Ok(socket) = self.node.socket() else { return };
        let _ = self.node.bind(socket, SocketAddr::new(NODE.into(), port));
        self.sockets.push(socket);
    }

    fn socket(&self, input: &mut Input<'_>) -> Option<SocketId> {
        self.sockets.get(input.below(self.sockets.len())).copied()
    }

    fn link(&self, input: &mut Input<'_>) -> Option<RdmaLinkId> {
        self.order.get(input.below(self.order.len())).copied()
    }

    fn add(&mut self, link: RdmaLinkId) {
        assert!(self.links.insert(link, Link::default()).is_none(), "each has an id of its own");
        self.order.push(link);
    }

    fn carry_out(&mut self) {
        while let Some(out) = self.node.poll_output() {
            match out {
                Output::RdmaConnect { link, .. } => self.add(link),
                Output::RdmaClose { link } => {
                    let known = self.links.get_mut(&link).expect("what is ended was there");
                    assert!(!std::mem::replace(&mut known.ending, true), "ended once");
                }
                Output::RdmaRelease { tag } => {
                    let at = self.regions.iter().position(|known| *known == tag);
                    self.regions.remove(at.expect("released once"));
                }
                Output::Connect { .. } | Output::Transmit { .. } => panic!("nothing goes over TCP"),
                _ => {}
            }
        }
    }

    /// Posts what a connection has to send.
    fn post(&mut self, link: RdmaLinkId, max: usize) {
        let Some(known) = self.links.get_mut(&link) else { return };
        let mut ids = Vec::new();
        self.node.poll_rdma_requests(self.now, link, max, |request, payload| {
            let (id, signalled) = match request {
                RdmaRequest::Frame(send) => {
                    let header = Header::from_bytes(&send.header);
                    assert!(bowline_wire::rds::checksum_ok(&send.header));
                    assert_eq!(payload.map(<[u8]>::len).sum::<usize>(), send.len);
                    assert!(send.len <= FRAME_MAX - 48 && send.len <= header.len as usize);
                    let handshake = [5, 6].contains(&header.ext[0]);
                    assert!(!handshake, "no handshake of paths [SAFE-3]");
                    (send.id, send.signalled)
                }
                RdmaRequest::Work(work) => {
                    assert!(!work.local.is_empty() && work.local.len() <= 8);
                    (work.id, work.signalled)
                }
            };
            ids.push((id, signalled));
        });
        assert!(ids.is_empty() || !known.ending, "nothing is posted on what was ended");
        for (id, signalled) in &ids {
            assert!(known.next.is_none_or(|next| next == *id), "ids rise by one");
            known.next = Some(id + 1);
            known.posted.extend(signalled.then_some(*id));
        }
        if !ids.is_empty() {
            self.node.handle_rdma_posted(self.now, link);
        }
    }

    fn closed(&mut self, link: RdmaLinkId) {
        if self.links.remove(&link).is_some() {
            self.order.retain(|known| *known != link);
            self.node.handle_rdma_closed(self.now, link, CloseReason::Reset);
        }
    }

    fn feed(&mut self, link: RdmaLinkId, frames: &[(Header, Vec<u8>)], damage: bool) {
        let (mut bytes, mut list) = (Vec::new(), Vec::new());
        for (header, payload) in frames {
            let start = bytes.len();
            bytes.extend_from_slice(payload);
            let mut header = Header { csum: 0, ..*header };
            header.csum = checksum(&header.to_bytes()) ^ u16::from(damage);
            let (header, bytes) = (header.to_bytes(), 48 + payload.len());
            list.push(RdmaFrame { bytes, header, start });
        }
        self.node.handle_rdma_frames(self.now, link, &RxBuf::from_vec(bytes), &list);
        if self.node.wants_rdma_frames(link) {
            self.node.handle_rdma_receives_posted(link, list.len());
        }
    }

    fn send(&mut self, input: &mut Input<'_>, socket: SocketId) {
        let payload = vec![input.byte(); input.below(LEN_MAX) * usize::from(input.bit())];
        let name = SocketAddr::new(peer(input), [9, 0, 5000][input.below(3)]);
        let slices = [IoSlice::new(&payload)];
        let mut ops = Vec::new();
        if input.bit() {
            for _ in 0..=input.byte() % 2 {
                ops.push(op(input, self.tokens.len() as u64 + ops.len() as u64));
            }
        }
        let cookie = [SendControl::RdmaDest(u64::from(input.byte() % 8))];
        let control = if input.byte() > 200 { &cookie[..] } else { &[] };
        let (name, payload, rdma) = (Some(name), &slices[..], &ops[..]);
        let msg = SendMsg { name, payload, control, rdma, ..SendMsg::default() };
        if self.node.send(self.now, socket, &msg).is_ok() {
            let tokens = self.tokens.len() as u64..;
            let tokens: Vec<_> = tokens.take(ops.len()).collect();
            for (token, op) in tokens.into_iter().zip(&ops) {
                // Those that are not to be reported count as reported.
                self.tokens.insert(token, op.notify.then_some(socket));
            }
        }
    }

    fn recv(&mut self, socket: SocketId, opts: RecvOpts) -> bool {
        let Ok(got) = self.node.recv(self.now, socket, opts) else { return false };
        // A peek takes notifications, as in a kernel.
        for control in got.control {
            if let Control::RdmaStatus { token, .. } = control {
                let told = self.tokens.get_mut(&token).expect("a number that was given");
                assert_eq!(told.take(), Some(socket), "told once, and who sent it");
            }
        }
        true
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let now = self.now;
        match input.byte() % 20 {
            0 => {
                let from = peer(input);
                let data = connect_data(input, from);
                let remote = SocketAddr::new(from, 50_000);
                let local = SocketAddr::new(NODE.into(), 18_634);
                let answer = self.node.handle_rdma_request(now, local, remote, &data);
                // What the request replaces is ended before the new one is made.
                self.carry_out();
                if let Ok(accept) = answer {
                    self.add(accept.link);
                }
            }
            1 | 2 => {
                let Some(link) = self.link(input) else { return };
                let from = peer(input);
                let data = connect_data(input, from);
                let data = input.bit().then_some(&data[..]);
                self.node.handle_rdma_established(now, link, data);
            }
            3..=6 => {
                let Some(link) = self.link(input) else { return };
                let frames = frames(input);
                self.feed(link, &frames, input.byte() > 250);
            }
            7 => {
                let Some(link) = self.link(input) else { return };
                let mut header = [0; 48];
                header.fill_with(|| input.byte());
                let frame = RdmaFrame { bytes: input.below(5000), header, start: 0 };
                let bytes = vec![1; input.below(5000)];
                self.node.handle_rdma_frames(now, link, &RxBuf::from_vec(bytes), &[frame]);
            }
            8 | 9 => {
                let Some(link) = self.link(input) else { return };
                self.post(link, input.below(70) + 1);
            }
            10 | 11 => {
                // Completions come in order, some of them together.
                let Some(link) = self.link(input) else { return };
                let Some(known) = self.links.get_mut(&link) else { return };
                let count = input.below(known.posted.len() + 1);
                if let Some(last) = known.posted.drain(..count).next_back() {
                    self.node.handle_rdma_sent(now, link, last);
                }
            }
            12 => {
                let Some(link) = self.link(input) else { return };
                let Some(known) = self.links.get_mut(&link) else { return };
                let Some(failed) = known.posted.first().copied() else { return };
                known.posted.clear();
                let status = [RdmaStatus::RemoteError, RdmaStatus::OtherError][input.below(2)];
                self.node.handle_rdma_failed(now, link, failed, status);
                if input.bit() {
                    self.closed(link);
                }
            }
            13 => {
                // What was ended first, mostly.
                let ending = self.order.iter().copied().find(|link| self.links[link].ending);
                let Some(link) = ending.or_else(|| self.link(input)) else { return };
                self.closed(link);
            }
            14 => {
                let millis = [0, 1, 10, 250, 3_000, 36_000][input.below(6)];
                self.now = now + Duration::from_millis(millis);
                self.node.handle_timeout(self.now);
            }
            15 | 16 => {
                let Some(socket) = self.socket(input) else { return };
                self.send(input, socket);
            }
            17 => {
                let Some(socket) = self.socket(input) else { return };
                self.recv(
                    socket,
                    RecvOpts {
                        peek: input.byte() > 220,
                        want_control: true,
                        ..RecvOpts::default()
                    },
                );
            }
            18 => self.manage(input),
            _ => self.disturb(input),
        }
    }

    /// Sockets and memory.
    fn manage(&mut self, input: &mut Input<'_>) {
        let now = self.now;
        let Some(socket) = self.socket(input) else {
            return self.open_socket(5000);
        };
        match input.byte() % 8 {
            0 => self.open_socket([5000, 5001, 0][input.below(3)]),
            1 => {
                let _ = self.node.cancel_sent_to(now, socket, SocketAddr::new(peer(input), 9));
            }
            2 => {
                let _ = self.node.cancel_all(now, socket);
            }
            3 => {
                while self.recv(socket, RecvOpts { want_control: true, ..RecvOpts::default() }) {}
                self.sockets.retain(|known| *known != socket);
                self.node.close(now, socket);
            }
            4 | 5 => {
                self.next_region += 1;
                let (rkey, len) = (self.next_region, input.below(9000) as u64);
                let tag = u64::from(rkey);
                let only = input.bit().then(|| peer(input));
                if self.node.add_region(socket, rkey, len, only, input.bit(), tag).is_ok() {
                    self.regions.push(tag);
                }
            }
            6 => {
                let _ = self.node.free_region(socket, u64::from(input.byte() % 8));
            }
            _ => {
                let _ = self.node.set_recv_buffer(socket, input.below(60_000));
            }
        }
    }

    /// What an operator or a device may do.
    fn disturb(&mut self, input: &mut Input<'_>) {
        let now = self.now;
        match input.byte() % 8 {
            0 => drop(self.node.drop_links(now, Some(peer(input)))),
            1 => {
                let Some(link) = self.link(input) else { return };
                self.node.handle_rdma_misbehaviour(now, link, Misbehaviour::Completion);
            }
            2 => {
                let _ = self.node.set_sysctl(now, "flow_control", i64::from(input.byte() % 3));
            }
            3 => self.node.acknowledge_all(now),
            4 => {
                let Some(link) = self.link(input) else { return };
                let sent = self.links[&link].next.map_or(0, |next| next + u64::from(input.byte()));
                self.node.handle_rdma_sent(now, link, sent);
            }
            5 if input.byte() == 7 => self.node.close_links(now),
            _ => {
                for option in 10_000..10_018 {
                    let _ = self.node.info_option(option);
                }
            }
        }
    }

    /// Ends everything; nothing may be left over.
    fn finish(mut self) {
        for socket in self.sockets.clone() {
            let _ = self.node.cancel_all(self.now, socket);
        }
        self.carry_out();
        for link in self.order.clone() {
            self.closed(link);
            self.carry_out();
            self.node.check_invariants();
        }
        for socket in std::mem::take(&mut self.sockets) {
            while self.recv(socket, RecvOpts { want_control: true, ..RecvOpts::default() }) {}
            let untold = self.tokens.values().any(|of| *of == Some(socket));
            assert!(!untold, "the end of each operation is told");
            self.node.close(self.now, socket);
        }
        self.carry_out();
        self.node.check_invariants();
        assert_eq!(self.node.unsent_total(), 0, "no socket, nothing to send");
        assert!(self.regions.is_empty(), "memory goes with its socket");
        let info = self.node.info();
        assert!(info.sockets.is_empty() && info.recv.is_empty());
    }
}
