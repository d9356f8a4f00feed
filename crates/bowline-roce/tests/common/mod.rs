//! Two devices wired back to back in memory, with a clock that only moves when nothing else can
//! happen, and a wire that loses, repeats and reorders what a test tells it to.
#![allow(dead_code, unreachable_pub, reason = "each test uses its own part")]

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bowline_roce::{
    Burst, Config, Congestion, Device, Event, GroBuffer, IdentHint, Instant, PlacementOutcome,
};
use bowline_verbs::{
    Access, AddressVector, Buffer, Completion, CqId, MrKeys, Mtu, PdId, QpAttr, QpCap, QpInit,
    QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, Status,
};
use bowline_wire::roce::{Outer, Packet};

pub const BUFFER: usize = 5 << 20;

/// What the wire does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Pass,
    Drop,
    Twice,
    /// Delivered after the next packet of its direction.
    Late,
}

/// How a pair is set up.
#[derive(Clone, Debug)]
pub struct Setup {
    pub mtu: Mtu,
    pub config: Config,
    pub depth: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    /// Settings of the queue pairs alone.
    pub give_up: Option<Duration>,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub access: Access,
    pub psns: [u32; 2],
    pub cq_depth: usize,
    pub v6: bool,
    /// Devices may place payloads directly.
    pub direct_placement: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mtu: Mtu::M1024,
            // What single packets do is looked at without a window that changes.
            config: Config { congestion: Congestion::Fixed(240), ..Config::default() },
            depth: 16,
            timeout: 17,
            retry_cnt: 7,
            give_up: None,
            rnr_retry: 7,
            min_rnr_timer: 12,
            access: Access::LOCAL_WRITE
                | Access::REMOTE_READ
                | Access::REMOTE_WRITE
                | Access::REMOTE_ATOMIC,
            // First PSNs; both wrap soon.
            psns: [0xff_fff0, 0xff_fffa],
            cq_depth: 4096,
            v6: false,
            direct_placement: true,
        }
    }
}

#[derive(Debug)]
pub struct Node {
    pub dev: Device,
    pub pd: PdId,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    pub qp: Qpn,
    pub addr: IpAddr,
    pub buffer: Arc<Buffer>,
    pub keys: MrKeys,
    pub events: Vec<Event>,
    pub sent: Vec<Completion>,
    pub received: Vec<Completion>,
}

impl Node {
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        let addr = self.buffer.addr() + offset as u64;
        Sge { addr, len: len as u32, lkey: self.keys.lkey }
    }

    pub fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.buffer.addr() + offset as u64, rkey: self.keys.rkey }
    }

    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        self.buffer.append_to(offset, len, &mut out);
        out
    }

    pub fn fill(&self, offset: usize, len: usize, seed: u8) {
        self.buffer.write(offset, &pattern(len, seed));
    }

    pub fn take(&mut self) {
        self.dev.poll_cq(self.send_cq, &mut self.sent, usize::MAX).unwrap();
        self.dev.poll_cq(self.recv_cq, &mut self.received, usize::MAX).unwrap();
        while let Some(event) = self.dev.poll_event() {
            self.events.push(event);
        }
    }

    pub fn state(&self) -> QpState {
        self.dev.query_qp(self.qp).unwrap().0
    }
}

pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}

/// Hands in a merged run, or one datagram, as a driver with direct placement does.
pub fn receive_in_place(
    dev: &mut Device,
    now: Instant,
    from: SocketAddr,
    to: IpAddr,
    segment: Option<usize>,
    bytes: &[u8],
) -> PlacementOutcome {
    let Some(open_message) = dev.open_message() else { return PlacementOutcome::NoTarget };
    let framing = &mut Vec::new();
    dev.receive_in_place(now, open_message, |placement| {
        placement.scatter(bytes, framing);
        Some(GroBuffer { from: Some(from), to, segment, tos: 0, len: bytes.len(), framing })
    })
}

/// A packet on the wire.
#[derive(Clone, Debug)]
pub struct Seen {
    pub from: usize,
    pub at: Instant,
    /// Its index in its burst.
    pub place: usize,
    pub fate: Fate,
    pub bytes: Vec<u8>,
}

impl Seen {
    pub fn packet(&self) -> Packet<'_> {
        Packet::parse(&self.bytes[..self.bytes.len() - 4]).unwrap()
    }
}

/// Decides the fate of a packet by its number and content.
pub type Fates = Box<dyn FnMut(usize, &Seen) -> Fate>;

type Flight = (usize, SocketAddr, IpAddr, Vec<u8>);

pub struct Pair {
    pub now: Instant,
    pub nodes: [Node; 2],
    pub log: Vec<Seen>,
    pub keep_log: bool,
    pub fate: Fates,
    count: usize,
    wire: VecDeque<Flight>,
    late: [Option<Flight>; 2],
    burst: Burst,
}

fn addr(side: usize, v6: bool) -> IpAddr {
    let last = side as u8 + 1;
    if v6 {
        IpAddr::from([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last])
    } else {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }
}

pub fn rts_steps(setup: &Setup, side: usize, peer: Qpn) -> [QpAttr; 3] {
    let (local, remote) = (addr(side, setup.v6), addr(1 - side, setup.v6));
    [
        QpAttr {
            state: Some(QpState::Init),
            access: Some(setup.access),
            give_up: setup.give_up,
            ..QpAttr::default()
        },
        QpAttr {
            state: Some(QpState::Rtr),
            av: Some(AddressVector { local, remote, flow_label: 0x1234, tos: 0 }),
            path_mtu: Some(setup.mtu),
            dest_qpn: Some(peer),
            rq_psn: Some(setup.psns[1 - side]),
            max_dest_rd_atomic: Some(setup.depth),
            min_rnr_timer: Some(setup.min_rnr_timer),
            ..QpAttr::default()
        },
        QpAttr {
            state: Some(QpState::Rts),
            timeout: Some(setup.timeout),
            retry_cnt: Some(setup.retry_cnt),
            rnr_retry: Some(setup.rnr_retry),
            sq_psn: Some(setup.psns[side]),
            max_rd_atomic: Some(setup.depth),
            ..QpAttr::default()
        },
    ]
}

fn node(setup: &Setup, side: usize) -> Node {
    let config =
        Config { guid: side as u64 + 1, addrs: vec![addr(side, setup.v6)], ..setup.config.clone() };
    let mut dev = Device::new(config, [side as u8 + 1; 32]);
    let pd = dev.alloc_pd().unwrap();
    let send_cq = dev.create_cq(setup.cq_depth).unwrap();
    let recv_cq = dev.create_cq(setup.cq_depth).unwrap();
    let cap = QpCap { max_send_wr: 1024, max_recv_wr: 1024, ..QpCap::default() };
    let init =
        QpInit { pd, send_cq, recv_cq, srq: None, qp_type: QpType::Rc, cap, sq_sig_all: false };
    let qp = dev.create_qp(&init).unwrap();
    let buffer = Buffer::new(BUFFER).unwrap();
    let buffer = if setup.direct_placement { buffer } else { buffer.without_direct_placement() };
    let buffer = Arc::new(buffer);
    let all =
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let keys = dev.reg_mr(pd, &buffer, 0, BUFFER, None, all).unwrap();
    Node {
        dev,
        pd,
        send_cq,
        recv_cq,
        qp,
        addr: addr(side, setup.v6),
        buffer,
        keys,
        events: Vec::new(),
        sent: Vec::new(),
        received: Vec::new(),
    }
}

impl Pair {
    /// Makes a pair with both queue pairs in RTS.
    pub fn new(setup: &Setup) -> Self {
        let mut pair = Self::unconnected(setup);
        let now = pair.now;
        let qpns = [pair.nodes[0].qp, pair.nodes[1].qp];
        for side in 0..2 {
            for attr in rts_steps(setup, side, qpns[1 - side]) {
                pair.nodes[side].dev.modify_qp(now, qpns[side], &attr).unwrap();
            }
        }
        pair
    }

    pub fn unconnected(setup: &Setup) -> Self {
        Self {
            now: Instant::from_nanos(1_000_000_000),
            nodes: [node(setup, 0), node(setup, 1)],
            log: Vec::new(),
            keep_log: true,
            fate: Box::new(|_, _| Fate::Pass),
            count: 0,
            wire: VecDeque::new(),
            late: [None, None],
            burst: Burst::new(),
        }
    }

    /// Loses every packet with a number in `lost`.
    pub fn lose(&mut self, lost: &[usize]) {
        let lost = lost.to_vec();
        self.fate = Box::new(move |n, _| if lost.contains(&n) { Fate::Drop } else { Fate::Pass });
    }

    pub fn packets(&self) -> usize {
        self.count
    }

    pub fn post_recv(&mut self, side: usize, id: u64, sges: &[Sge]) {
        let node = &mut self.nodes[side];
        node.dev.post_recv(self.now, node.qp, &[RecvWr { id, sges }]).unwrap();
    }

    pub fn post(&mut self, side: usize, id: u64, op: SendOp, sges: &[Sge]) {
        self.post_flags(side, id, op, sges, SendFlags::SIGNALED);
    }

    pub fn post_flags(&mut self, side: usize, id: u64, op: SendOp, sges: &[Sge], flags: SendFlags) {
        let wr = SendWr { id, op, sges, inline: &[], flags };
        let node = &mut self.nodes[side];
        node.dev.post_send(self.now, node.qp, &[wr]).unwrap();
    }

    /// Numbers of packets in the bursts that a side has to send, which go nowhere.
    pub fn burst_sizes(&mut self, side: usize) -> Vec<usize> {
        let (now, dev) = (self.now, &mut self.nodes[side].dev);
        let mut burst = Burst::new();
        std::iter::from_fn(|| dev.poll_transmit(now, &mut burst).then_some(burst.count)).collect()
    }

    /// Carries what side 0 has to send to side 1, and nothing back.
    pub fn carry(&mut self) {
        let [from, to] = &mut self.nodes;
        let mut burst = Burst::new();
        while from.dev.poll_transmit(self.now, &mut burst) {
            let source = SocketAddr::new(burst.from, burst.source_port);
            for packet in burst.segments() {
                to.dev.handle_datagram(self.now, source, burst.to, IdentHint::Unknown, packet);
            }
        }
    }

    fn transmit(&mut self) -> bool {
        let mut any = false;
        for side in 0..2 {
            while self.nodes[side].dev.poll_transmit(self.now, &mut self.burst) {
                any = true;
                let burst = &self.burst;
                assert_eq!(burst.segments().count(), burst.count);
                assert!(burst.count <= 64 && burst.bytes.len() <= 65_000);
                let from = SocketAddr::new(burst.from, burst.source_port);
                let sent: Vec<Vec<u8>> = burst.segments().map(<[u8]>::to_vec).collect();
                let to = burst.to;
                for (place, bytes) in sent.into_iter().enumerate() {
                    let flight = (1 - side, from, to, bytes.clone());
                    let mut seen =
                        Seen { from: side, at: self.now, place, fate: Fate::Pass, bytes };
                    seen.fate = (self.fate)(self.count, &seen);
                    self.count += 1;
                    let waiting = self.late[side].take();
                    match seen.fate {
                        Fate::Pass => self.wire.push_back(flight),
                        Fate::Drop => {}
                        Fate::Twice => {
                            self.wire.push_back(flight.clone());
                            self.wire.push_back(flight);
                        }
                        Fate::Late => self.late[side] = Some(flight),
                    }
                    self.wire.extend(waiting);
                    if self.keep_log {
                        self.log.push(seen);
                    }
                }
            }
        }
        any
    }

    /// Adds the ICRC to a packet and hands it to a side, as if the other side had sent it.
    pub fn inject(&mut self, side: usize, packet: &mut Vec<u8>) {
        let (from, to) = (self.nodes[1 - side].addr, self.nodes[side].addr);
        Outer { from, to, source_port: 49_999 }.append_icrc(0, packet, 0);
        let from = SocketAddr::new(from, 49_999);
        self.nodes[side].dev.handle_datagram(self.now, from, to, IdentHint::Unknown, packet);
    }

    /// Does everything that can be done now.
    pub fn settle(&mut self) {
        loop {
            let mut any = self.transmit();
            if self.wire.is_empty() {
                for side in 0..2 {
                    self.wire.extend(self.late[side].take());
                }
            }
            while let Some((side, from, to, bytes)) = self.wire.pop_front() {
                any = true;
                self.now = self.now + Duration::from_nanos(200);
                let dev = &mut self.nodes[side].dev;
                if receive_in_place(dev, self.now, from, to, None, &bytes)
                    == PlacementOutcome::NoTarget
                {
                    dev.handle_datagram(self.now, from, to, IdentHint::Unknown, &bytes);
                }
            }
            for node in &mut self.nodes {
                node.take();
            }
            if !any {
                return;
            }
        }
    }

    /// Lets time pass until `done`, at most `limit`; returns whether it is done.
    pub fn run(&mut self, limit: Duration, mut done: impl FnMut(&Self) -> bool) -> bool {
        let end = self.now + limit;
        loop {
            self.settle();
            if done(self) {
                return true;
            }
            let next = self.nodes.iter().filter_map(|node| node.dev.poll_timeout()).min();
            match next {
                Some(at) if at <= end => self.now = self.now.max(at),
                _ => {
                    self.now = self.now.max(end);
                    return false;
                }
            }
            for node in &mut self.nodes {
                node.dev.handle_timeout(self.now);
            }
        }
    }

    /// Runs until a side has this many completions of sends, all of them successes.
    pub fn finish(&mut self, side: usize, count: usize) {
        let done = self.run(Duration::from_secs(20), |pair| pair.nodes[side].sent.len() >= count);
        let node = &self.nodes[side];
        assert!(done, "{} of {count}: {:?}", node.sent.len(), node.dev.counters());
        assert!(node.sent.iter().all(|entry| entry.status == Status::Success), "{:?}", node.sent);
    }

    /// Statuses of the sends of a side, with their ids.
    pub fn outcomes(&self, side: usize) -> Vec<(u64, Status)> {
        self.nodes[side].sent.iter().map(|entry| (entry.wr_id, entry.status)).collect()
    }
}
