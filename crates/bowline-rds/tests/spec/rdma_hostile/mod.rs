//! RDS over RDMA with peers that break rules, and what a peer can see of the node. The peer is a
//! script. Spec: `docs/spec/rds-rdma.md`.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bowline_rds::{
    CloseReason, Config, Control, Error, Event, Instant, Limits, Misbehaviour, Node, Output,
    RDMA_REJECT, RdmaAccept, RdmaAccess, RdmaFrame, RdmaLinkId, RdmaOp, RdmaPiece, RdmaShape,
    RdmaStatus, RecvOpts, Refusal, RxBuf, SendControl, SendMsg, SocketId,
};
use bowline_wire::rds::{
    BowlineConnect, ConnectData, Flags, Header, MAP_LEN, RdmaDest, RdmaExt, Version, checksum,
    checksum_ok,
};

use crate::support::rdma::{Pair, Sent, Side};
use crate::support::{addr, ip, npaths_ext};

mod credits;
mod frames;
mod memory;
mod ops;
mod requests;
mod sending;

const NODE: &str = "10.0.0.2";
/// A peer with a smaller address than the node, and one with a larger.
const LOW: &str = "10.0.0.1";
const HIGH: &str = "10.0.0.9";
const PORT: u16 = 5000;

/// A frame as the peer sends it; the checksum is added.
#[derive(Clone, Debug)]
struct Raw {
    header: Header,
    payload: Vec<u8>,
}

fn raw(header: Header, payload: &[u8]) -> Raw {
    Raw { header, payload: payload.to_vec() }
}

/// A message of one frame to the node's socket.
fn message(sequence: u64, payload: &[u8]) -> Raw {
    let len = payload.len() as u32;
    raw(Header { sequence, len, sport: 9, dport: PORT, ..Header::default() }, payload)
}

/// The frames of a message.
fn fragments(sequence: u64, payload: &[u8]) -> Vec<Raw> {
    let whole = message(sequence, payload);
    payload.chunks(4096).map(|part| raw(whole.header, part)).collect()
}

fn asking(mut frame: Raw) -> Raw {
    frame.header.flags = frame.header.flags.with(Flags::ACK_REQUIRED);
    frame
}

fn again(mut frame: Raw) -> Raw {
    frame.header.flags = frame.header.flags.with(Flags::RETRANSMITTED);
    frame
}

fn ack(ack: u64) -> Raw {
    raw(Header { ack, ..Header::default() }, b"")
}

fn credits(credit: u8) -> Raw {
    raw(Header { credit, ..Header::default() }, b"")
}

fn map(ports: &[u16]) -> Vec<Raw> {
    let mut bytes = vec![0; MAP_LEN];
    for port in ports {
        bytes[usize::from(port >> 3)] |= 1 << (port & 7);
    }
    bytes.chunks(4096).map(|part| raw(Header::map(), part)).collect()
}

/// A node with a socket, and peers that are scripts.
struct Lab {
    now: Instant,
    side: Side,
    events: Vec<Event>,
    resumed: Vec<RdmaLinkId>,
}

impl Lab {
    fn new() -> Self {
        Self::with(Config::default())
    }

    fn with(config: Config) -> Self {
        let side = Side::new(NODE, config);
        let (events, resumed) = (Vec::new(), Vec::new());
        Self { now: Instant::from_nanos(1), side, events, resumed }
    }

    fn socket(&mut self, port: u16) -> SocketId {
        let node = &mut self.side.node;
        let socket = node.socket().expect("room");
        node.bind(socket, SocketAddr::new(ip(NODE), port)).expect("a free port");
        socket
    }

    fn collect(&mut self) {
        while let Some(output) = self.side.node.poll_output() {
            match output {
                Output::Event(event) => self.events.push(event),
                Output::RdmaResume { link } => self.resumed.push(link),
                other => self.side.took(other),
            }
        }
        self.side.node.check_invariants();
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.side.node.poll_timeout().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.side.node.handle_timeout(self.now);
            self.collect();
        }
        self.now = end;
    }

    fn data(from: &str) -> ConnectData {
        ConnectData::new(ip(from), ip(NODE), Version::V3_1)
    }

    fn request_with(&mut self, from: IpAddr, bytes: &[u8]) -> Result<RdmaAccept, [u8; 4]> {
        let (local, remote) = (SocketAddr::new(ip(NODE), 18_634), SocketAddr::new(from, 50_000));
        let answer = self.side.node.handle_rdma_request(self.now, local, remote, bytes);
        self.collect();
        answer
    }

    fn request(&mut self, from: &str) -> Result<RdmaAccept, [u8; 4]> {
        self.request_with(ip(from), &Self::data(from).to_bytes())
    }

    /// A connection of a peer that is up, of which the node's map has been taken.
    fn connected(&mut self, from: &str) -> RdmaLinkId {
        let link = self.request(from).expect("accepted").link;
        self.up(link);
        assert!(self.frames(link).len() >= 2, "the map");
        link
    }

    /// The same peer connects again after a connection of it has ended; the map is not taken.
    fn reconnected(&mut self, ended: RdmaLinkId) -> RdmaLinkId {
        self.closed(ended);
        let link = self.request(LOW).expect("accepted").link;
        self.up(link);
        link
    }

    fn up(&mut self, link: RdmaLinkId) {
        self.side.node.handle_rdma_established(self.now, link, None);
        self.collect();
    }

    fn feed(&mut self, link: RdmaLinkId, frames: &[Raw]) {
        let mut bytes = Vec::new();
        let mut list = Vec::new();
        for frame in frames {
            let start = bytes.len();
            bytes.extend_from_slice(&frame.payload);
            let mut header = frame.header;
            header.csum = 0;
            header.csum = checksum(&header.to_bytes());
            let header = header.to_bytes();
            list.push(RdmaFrame { bytes: 48 + frame.payload.len(), header, start });
        }
        self.side.node.handle_rdma_frames(self.now, link, &RxBuf::from_vec(bytes), &list);
        self.collect();
    }

    /// What the node has to send, none of which has completed.
    fn posted(&mut self, link: RdmaLinkId) -> Vec<Sent> {
        let frames = self.side.frames(self.now, link);
        self.collect();
        frames
    }

    /// What the node has to send; all of it completes.
    fn frames(&mut self, link: RdmaLinkId) -> Vec<Sent> {
        let frames = self.posted(link);
        self.complete(link, &frames);
        frames
    }

    fn complete(&mut self, link: RdmaLinkId, frames: &[Sent]) {
        for sent in frames.iter().filter(|sent| sent.signalled) {
            self.side.node.handle_rdma_sent(self.now, link, sent.id);
        }
        self.collect();
    }

    fn closed(&mut self, link: RdmaLinkId) {
        self.side.closed.retain(|closed| *closed != link);
        self.side.node.handle_rdma_closed(self.now, link, CloseReason::Reset);
        self.collect();
    }

    fn send(&mut self, socket: SocketId, to: &str, payload: &[u8]) {
        self.send_with(socket, to, payload, &[]).expect("room in the queue");
    }

    fn send_with(
        &mut self,
        socket: SocketId,
        to: &str,
        payload: &[u8],
        rdma: &[RdmaOp],
    ) -> Result<(), Error> {
        let name = Some(SocketAddr::new(ip(to), 9));
        let payload = [IoSlice::new(payload)];
        let msg = SendMsg { name, payload: &payload, rdma, ..SendMsg::default() };
        let sent = self.side.node.send(self.now, socket, &msg).map(drop);
        self.collect();
        sent
    }

    fn recv(&mut self, socket: SocketId) -> Option<Vec<u8>> {
        let got = self.side.node.recv(self.now, socket, RecvOpts::default()).ok()?;
        let data = got.data.expect("a message");
        let bytes = data.slices().flatten().copied().collect();
        drop(data);
        self.collect();
        Some(bytes)
    }

    /// The ends of operations that a socket is told.
    fn told(&mut self, socket: SocketId) -> Vec<(u64, RdmaStatus)> {
        let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
        let mut all = Vec::new();
        while let Ok(got) = self.side.node.recv(self.now, socket, opts) {
            all.extend(got.control.into_iter().map(|control| match control {
                Control::RdmaStatus { token, status } => (token, status),
                other => panic!("{other:?}"),
            }));
        }
        all
    }

    fn counter(&self, name: &str) -> u64 {
        let counters = self.side.node.counters();
        counters.iter().find(|(known, _)| *known == name).expect("a counter of that name").1
    }

    fn is_closed(&self, link: RdmaLinkId) -> bool {
        self.side.closed.contains(&link)
    }
}

/// A node with a socket, and a peer whose connection is up.
fn with_peer() -> (Lab, SocketId, RdmaLinkId) {
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    let link = lab.connected(LOW);
    (lab, socket, link)
}

fn header(sent: &Sent) -> Header {
    assert!(checksum_ok(&sent.header));
    Header::from_bytes(&sent.header)
}

fn headers(frames: &[Sent]) -> Vec<Header> {
    frames.iter().map(header).collect()
}

fn is_ack(header: &Header) -> bool {
    (header.sequence, header.len, header.sport, header.dport) == (0, 0, 0, 0)
        && header.flags == Flags::NONE
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7) as u8).collect()
}

fn request_id(request: &bowline_rds::RdmaRequest<'_>) -> u64 {
    match request {
        bowline_rds::RdmaRequest::Frame(send) => send.id,
        bowline_rds::RdmaRequest::Work(work) => work.id,
    }
}
