//! Connections of two devices: rdma_cm's messages in real packets, and their effect on queue pairs.
//! The state machine alone is tested beside its code.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::common::{self, Fate, Node, Pair, Seen, Setup};
use bowline_roce::{Burst, CmConfig, Config, Device, Event, IdentHint, Instant};
use bowline_verbs::{
    Access, CmEvent, CmId, Completion, ConnParam, ConnRequest, Error, InvalidReason, Mtu, Object,
    QpAttr, QpAttrName, QpCap, QpInit, QpState, QpType, Qpn, RejectReason, RequestPart, SendOp,
    Status,
};
use bowline_wire::roce::cm::{CmMad, CmMessage};
use bowline_wire::roce::{GSI_QKEY, GSI_QPN, MAD_LEN};
use proptest::prelude::*;

/// The connecting side.
const A: usize = 0;
/// The side connected to.
const P: usize = 1;
const PORT: u16 = 7174;

/// What the wire does with each packet.
type Wire = Box<dyn FnMut(usize, &Seen) -> Fate>;

fn no_early() -> Setup {
    let cm = CmConfig { first_resends: Vec::new(), ..CmConfig::default() };
    Setup { config: Config { cm, ..Config::default() }, ..Setup::default() }
}

fn message(seen: &Seen) -> Option<CmMad> {
    let packet = seen.packet();
    (packet.bth.dest_qpn == GSI_QPN).then(|| CmMad::parse(packet.payload).expect("a message"))
}

fn name(seen: &Seen) -> &'static str {
    match message(seen).map(|mad| mad.message) {
        None => "data",
        Some(CmMessage::Req(_)) => "REQ",
        Some(CmMessage::Mra(_)) => "MRA",
        Some(CmMessage::Rej(_)) => "REJ",
        Some(CmMessage::Rep(_)) => "REP",
        Some(CmMessage::Rtu(_)) => "RTU",
        Some(CmMessage::Dreq(_)) => "DREQ",
        Some(CmMessage::Drep(_)) => "DREP",
        Some(CmMessage::SidrReq(_)) => "SIDR_REQ",
        Some(CmMessage::SidrRep(_)) => "SIDR_REP",
    }
}

fn names(pair: &Pair) -> Vec<&'static str> {
    pair.log.iter().map(name).filter(|name| *name != "data").collect()
}

/// Gives the first packet of a kind its own fate.
fn once(kind: &'static str, fate: Fate) -> Wire {
    let mut done = false;
    Box::new(move |_, seen| {
        if name(seen) == kind && !done {
            done = true;
            return fate;
        }
        Fate::Pass
    })
}

fn param(node: &Node) -> ConnParam {
    ConnParam { qpn: node.qp, ..ConnParam::default() }
}

fn cm_events(node: &Node) -> Vec<CmEvent> {
    let cm = |event: &Event| match event {
        Event::Cm(event) => Some(event.clone()),
        _ => None,
    };
    node.events.iter().filter_map(cm).collect()
}

fn listen(pair: &mut Pair) -> CmId {
    let at = SocketAddr::new(pair.nodes[P].addr, PORT);
    pair.nodes[P].dev.listen(at).unwrap()
}

fn connect(pair: &mut Pair, param: &ConnParam) -> CmId {
    let remote = SocketAddr::new(pair.nodes[P].addr, PORT);
    let id = pair.nodes[A].dev.connect(pair.now, None, remote, param).unwrap();
    pair.settle();
    id
}

/// Takes the request among the passive side's events.
fn request(pair: &mut Pair) -> Option<(CmId, ConnRequest)> {
    let events = &mut pair.nodes[P].events;
    let is = |event: &Event| matches!(event, Event::Cm(CmEvent::ConnectRequest { .. }));
    match events.remove(events.iter().position(is)?) {
        Event::Cm(CmEvent::ConnectRequest { id, request }) => Some((id, request)),
        _ => None,
    }
}

fn accept(pair: &mut Pair, id: CmId, param: &ConnParam) {
    pair.nodes[P].dev.accept(pair.now, id, param).unwrap();
    pair.settle();
}

fn is_up(node: &Node) -> bool {
    cm_events(node).iter().any(|event| matches!(event, CmEvent::Established { .. }))
}

fn is_down(node: &Node) -> bool {
    cm_events(node).iter().any(|event| matches!(event, CmEvent::TimewaitExit { .. }))
}

/// Connects over any wire; returns the connection ids of both sides when both are up.
fn establish(pair: &mut Pair) -> (CmId, CmId) {
    let ids = accepted(pair);
    let limit = Duration::from_secs(80);
    assert!(pair.run(limit, |pair| pair.nodes.iter().all(is_up)), "{:?}", names(pair));
    ids
}

/// The same until the passive side has accepted.
fn accepted(pair: &mut Pair) -> (CmId, CmId) {
    let ours = param(&pair.nodes[A]);
    let active = connect(pair, &ours);
    let limit = Duration::from_secs(80);
    let waiting = |node: &Node| {
        cm_events(node).iter().any(|event| matches!(event, CmEvent::ConnectRequest { .. }))
    };
    assert!(pair.run(limit, |pair| waiting(&pair.nodes[P])));
    let (passive, _) = request(pair).unwrap();
    let theirs = param(&pair.nodes[P]);
    accept(pair, passive, &theirs);
    (active, passive)
}

fn connected(setup: &Setup) -> (Pair, CmId, CmId) {
    let mut pair = Pair::unconnected(setup);
    listen(&mut pair);
    let (active, passive) = establish(&mut pair);
    for node in &mut pair.nodes {
        node.events.clear();
    }
    pair.log.clear();
    (pair, active, passive)
}

fn disconnect(pair: &mut Pair, side: usize, id: CmId) {
    pair.nodes[side].dev.disconnect(pair.now, id).unwrap();
    pair.settle();
}

/// Replaces a device by a new one of the same address.
fn renew(node: &mut Node, config: Config) {
    node.dev = Device::new(Config { addrs: vec![node.addr], ..config }, [9; 32]);
    node.send_cq = node.dev.create_cq(4).unwrap();
    node.recv_cq = node.dev.create_cq(4).unwrap();
}

/// Sends a message each way, and reads and writes.
fn exchange(pair: &mut Pair) {
    for side in [A, P] {
        let other = 1 - side;
        let start = [pair.nodes[side].sent.len(), pair.nodes[other].received.len()];
        pair.nodes[side].fill(0, 5000, side as u8);
        let into = pair.nodes[other].sge(8192, 8192);
        pair.post_recv(other, 1, &[into]);
        let from = pair.nodes[side].sge(0, 5000);
        pair.post(side, 2, SendOp::Send, &[from]);
        let remote = pair.nodes[other].remote(65536);
        pair.post(side, 3, SendOp::Write(remote), &[from]);
        let back = pair.nodes[side].sge(131_072, 5000);
        pair.post(side, 4, SendOp::Read(remote), &[back]);
        pair.finish(side, start[0] + 3);
        assert_eq!(pair.nodes[other].received.len(), start[1] + 1);
        let bytes = common::pattern(5000, side as u8);
        assert_eq!(pair.nodes[other].bytes(8192, 5000), bytes);
        assert_eq!(pair.nodes[side].bytes(131_072, 5000), bytes);
    }
}

// tests [CM-31] [CMA-5] [CMA-17] [GSI-1]
#[test]
fn connected_queue_pairs_carry_data() {
    for v6 in [false, true] {
        let mut pair = Pair::unconnected(&Setup { v6, ..no_early() });
        let listener = listen(&mut pair);
        let ours = ConnParam { private_data: vec![5; 56], ..param(&pair.nodes[A]) };
        let active = connect(&mut pair, &ours);
        let (passive, request) = request(&mut pair).unwrap();
        assert_eq!((request.listener, request.private_data), (listener, vec![5; 56]));
        assert_eq!(request.remote_qpn, pair.nodes[A].qp);
        assert_eq!(request.remote.ip(), pair.nodes[A].addr);
        assert_eq!(request.local, SocketAddr::new(pair.nodes[P].addr, PORT));
        assert_eq!(pair.nodes[A].dev.local_addr(active), Ok(request.remote));
        let theirs = ConnParam { private_data: vec![6; 196], ..param(&pair.nodes[P]) };
        accept(&mut pair, passive, &theirs);
        let up = |id, private_data: Vec<u8>| {
            let (responder_resources, initiator_depth) = (16, 16);
            CmEvent::Established { id, private_data, responder_resources, initiator_depth }
        };
        assert_eq!(cm_events(&pair.nodes[A]), [up(active, vec![6; 196])]);
        assert_eq!(cm_events(&pair.nodes[P]), [up(passive, Vec::new())]);
        assert!(pair.nodes.iter().all(|node| node.state() == QpState::Rts));
        assert_eq!(names(&pair), ["REQ", "REP", "RTU"]);
        for (number, seen) in pair.log.iter().enumerate() {
            let packet = seen.packet();
            let deth = packet.deth.expect("a datagram");
            assert_eq!((deth.qkey, deth.source_qpn), (GSI_QKEY, GSI_QPN));
            assert_eq!(packet.bth.pkey, 0xffff);
            assert_eq!((packet.payload.len(), seen.bytes.len()), (MAD_LEN, 280));
            assert_eq!(packet.bth.psn.get(), [0, 0, 1][number], "a counter of each side");
        }
        exchange(&mut pair);
        // The first PSN of a side is the one that the other side has announced.
        let told = |wanted: &str| {
            let seen = pair.log.iter().find(|seen| name(seen) == wanted).unwrap();
            match message(seen).unwrap().message {
                CmMessage::Req(req) => req.starting_psn,
                CmMessage::Rep(rep) => rep.starting_psn,
                _ => unreachable!(),
            }
        };
        let first = |side| {
            let data = |seen: &&Seen| {
                seen.from == side && name(seen) == "data" && !seen.packet().opcode.is_response()
            };
            pair.log.iter().find(data).unwrap().packet().bth.psn.get()
        };
        assert_eq!((first(A), first(P)), (told("REP"), told("REQ")));
        disconnect(&mut pair, A, active);
        assert!(pair.run(Duration::from_secs(1), |pair| pair.nodes.iter().all(is_down)));
    }
}

// tests [CMA-13] [CM-10]
#[test]
fn refused() {
    let mut pair = Pair::unconnected(&no_early());
    let ours = param(&pair.nodes[A]);
    let id = connect(&mut pair, &ours);
    let rejected = |id, reason, private_data| CmEvent::Rejected { id, reason, private_data };
    let nobody = rejected(id, RejectReason::INVALID_SERVICE_ID, vec![0; 148]);
    assert_eq!(cm_events(&pair.nodes[A]), [nobody]);
    assert_eq!(pair.nodes[A].state(), QpState::Err);
    pair.nodes[A].events.clear();

    listen(&mut pair);
    let again = pair.nodes[A].dev.connect(pair.now, None, ([10, 0, 0, 2], PORT).into(), &ours);
    assert_eq!(again, Err(Error::Invalid(InvalidReason::StateToConnect(QpState::Err))));
    let reset = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
    let (now, qp) = (pair.now, pair.nodes[A].qp);
    pair.nodes[A].dev.modify_qp(now, qp, &reset).unwrap();
    let id = connect(&mut pair, &ours);
    let (passive, _) = request(&mut pair).unwrap();
    let (now, dev) = (pair.now, &mut pair.nodes[P].dev);
    let part = RequestPart::RejectData;
    let long = Error::Invalid(InvalidReason::TooLong { part, limit: 148, given: 149 });
    assert_eq!(dev.reject(now, passive, &[1; 149]), Err(long));
    dev.reject(now, passive, &[1; 148]).unwrap();
    pair.settle();
    let by_program = rejected(id, RejectReason::CONSUMER, vec![1; 148]);
    assert_eq!(cm_events(&pair.nodes[A]), [by_program]);
    assert_eq!(pair.nodes[P].state(), QpState::Reset);
    assert!(pair.nodes.iter().all(|node| node.dev.poll_timeout().is_none()));
}

// tests [CM-45] [CM-42] [QP-4]
#[test]
fn either_side_or_both_disconnect() {
    for sides in [&[A][..], &[P], &[A, P]] {
        let (mut pair, active, passive) = connected(&no_early());
        for side in [A, P] {
            let into = pair.nodes[side].sge(0, 64);
            pair.post_recv(side, 9, &[into]);
            let (dev, qp) = (&mut pair.nodes[side].dev, pair.nodes[side].qp);
            assert_eq!(dev.destroy_qp(qp), Err(Error::Busy(Object::QueuePair)));
        }
        for side in sides {
            let id = [active, passive][*side];
            pair.nodes[*side].dev.disconnect(pair.now, id).unwrap();
        }
        pair.settle();
        for (side, id) in [(A, active), (P, passive)] {
            let node = &mut pair.nodes[side];
            assert_eq!(cm_events(node), [CmEvent::Disconnected { id }]);
            assert_eq!(node.state(), QpState::Err);
            let [Completion { wr_id: 9, status: Status::WrFlushErr, .. }] = node.received[..]
            else {
                panic!("{:?}", node.received)
            };
            // The queue pair can be destroyed; its number is not reused for a while.
            node.dev.destroy_qp(node.qp).unwrap();
        }
        assert!(pair.run(Duration::from_millis(513), |pair| pair.nodes.iter().all(is_down)));
        assert!(pair.nodes.iter().all(|node| node.dev.poll_timeout().is_none()));
    }
}

/// Connects, transfers data and disconnects, over any wire.
fn whole_life(setup: &Setup, fate: Wire) -> Pair {
    whole_life_from(setup, fate, establish)
}

/// The same, begun in one way or another.
fn whole_life_from(setup: &Setup, fate: Wire, begin: fn(&mut Pair) -> (CmId, CmId)) -> Pair {
    let mut pair = Pair::unconnected(setup);
    listen(&mut pair);
    pair.fate = fate;
    let (active, passive) = begin(&mut pair);
    exchange(&mut pair);
    disconnect(&mut pair, A, active);
    let over = pair.run(Duration::from_secs(80), |pair| pair.nodes.iter().all(is_down));
    assert!(over, "{:?}", names(&pair));
    // Old timers of queue pairs may still expire, without effect.
    pair.run(Duration::from_secs(10), |_| false);
    for (node, id) in pair.nodes.iter().zip([active, passive]) {
        let events = cm_events(node);
        let count = |wanted: fn(&CmEvent) -> bool| events.iter().filter(|e| wanted(e)).count();
        assert_eq!(count(|event| matches!(event, CmEvent::Established { .. })), 1);
        assert_eq!(events[1..], [CmEvent::Disconnected { id }, CmEvent::TimewaitExit { id }]);
        assert_eq!(node.dev.poll_timeout(), None);
        assert!(node.dev.former_connections().is_empty());
    }
    pair
}

// tests checklist 6 and 7: loss, repetition and reordering of each message
#[test]
fn each_message_is_lost_doubled_and_late() {
    for kind in ["REQ", "REP", "RTU", "DREQ", "DREP"] {
        for fate in [Fate::Drop, Fate::Twice, Fate::Late] {
            for setup in [no_early(), Setup::default()] {
                whole_life(&setup, once(kind, fate));
            }
        }
    }
}

#[test]
fn an_early_repetition_repairs_a_loss_in_no_time() {
    for kind in ["REQ", "REP"] {
        let mut pair = Pair::unconnected(&Setup::default());
        listen(&mut pair);
        pair.fate = once(kind, Fate::Drop);
        let start = pair.now;
        establish(&mut pair);
        assert!(pair.now.saturating_since(start) < Duration::from_millis(60), "{kind}");
    }
}

#[test]
fn rights_the_program_has_set_stay() {
    let mut pair = Pair::unconnected(&no_early());
    listen(&mut pair);
    let access = Access::REMOTE_READ;
    let init = QpAttr { state: Some(QpState::Init), access: Some(access), ..QpAttr::default() };
    let now = pair.now;
    for node in &mut pair.nodes {
        node.dev.modify_qp(now, node.qp, &init).unwrap();
    }
    establish(&mut pair);
    for node in &pair.nodes {
        assert_eq!(node.dev.query_qp(node.qp).unwrap().1.access, Some(access));
    }
}

#[test]
fn the_nearest_address_is_taken() {
    let mut pair = Pair::unconnected(&no_early());
    let node = &mut pair.nodes[A];
    let ips = ["10.9.9.9", "fd00::1", "127.0.0.1", "10.0.0.1"].map(|ip| ip.parse().unwrap());
    node.dev = Device::new(Config { addrs: ips.to_vec(), ..Config::default() }, [0; 32]);
    let (pd, cq) = (node.dev.alloc_pd().unwrap(), node.dev.create_cq(4).unwrap());
    let (qp_type, cap) = (QpType::Rc, QpCap::default());
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all: false };
    for (remote, own) in [
        ("10.0.0.2:7", "10.0.0.1"),
        ("10.9.0.1:7", "10.9.9.9"),
        ("127.0.0.9:7", "127.0.0.1"),
        ("[fd00::2]:7", "fd00::1"),
    ] {
        let qpn = node.dev.create_qp(&init).unwrap();
        let param = ConnParam { qpn, ..ConnParam::default() };
        let id = node.dev.connect(pair.now, None, remote.parse().unwrap(), &param).unwrap();
        let local = node.dev.local_addr(id).unwrap();
        assert_eq!(local.ip(), own.parse::<IpAddr>().unwrap(), "to {remote}");
        assert_ne!(local.port(), 0);
        node.dev.destroy_id(pair.now, id).unwrap();
        node.dev.destroy_qp(qpn).unwrap();
    }
}

// tests [CM-50]
#[test]
fn data_stands_for_a_lost_rtu() {
    let mut pair = Pair::unconnected(&no_early());
    listen(&mut pair);
    pair.fate = Box::new(|_, seen| if name(seen) == "RTU" { Fate::Drop } else { Fate::Pass });
    let (ours, theirs) = (param(&pair.nodes[A]), param(&pair.nodes[P]));
    connect(&mut pair, &ours);
    let (passive, _) = request(&mut pair).unwrap();
    accept(&mut pair, passive, &theirs);
    assert!(is_up(&pair.nodes[A]) && !is_up(&pair.nodes[P]));
    exchange(&mut pair);
    assert!(is_up(&pair.nodes[P]));
    assert_eq!(pair.nodes[P].dev.counters().cm_resent, 0);
}

#[test]
fn queue_pairs_in_error() {
    // While the peer answers: the connection is refused.
    let mut pair = Pair::unconnected(&no_early());
    listen(&mut pair);
    let (ours, theirs) = (param(&pair.nodes[A]), param(&pair.nodes[P]));
    let active = connect(&mut pair, &ours);
    let (passive, _) = request(&mut pair).unwrap();
    let error = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    let (now, qp) = (pair.now, pair.nodes[A].qp);
    pair.nodes[A].dev.modify_qp(now, qp, &error).unwrap();
    accept(&mut pair, passive, &theirs);
    assert_eq!(names(&pair), ["REQ", "REP", "REJ"]);
    for (node, id) in pair.nodes.iter().zip([active, passive]) {
        let [CmEvent::Rejected { id: of, reason, .. }] = cm_events(node)[..] else {
            panic!("{:?}", node.events)
        };
        assert_eq!((of, reason), (id, RejectReason::CONSUMER));
        assert_eq!(node.state(), QpState::Err);
    }
    // Both sides have announced their queue pairs [CM-45].
    let over = |pair: &Pair| pair.nodes.iter().all(is_down);
    assert!(!pair.run(Duration::from_millis(511), over));
    assert!(pair.run(Duration::from_millis(2), over));

    // While the connection is established: it lasts until one side ends it.
    let (mut pair, active, passive) = connected(&no_early());
    let (now, qp) = (pair.now, pair.nodes[P].qp);
    pair.nodes[P].dev.modify_qp(now, qp, &error).unwrap();
    pair.settle();
    assert!(cm_events(&pair.nodes[A]).is_empty() && cm_events(&pair.nodes[P]).is_empty());
    assert_eq!(pair.nodes[P].dev.destroy_qp(qp), Err(Error::Busy(Object::QueuePair)));
    disconnect(&mut pair, P, passive);
    assert_eq!(cm_events(&pair.nodes[A]), [CmEvent::Disconnected { id: active }]);
    assert_eq!(pair.nodes[A].state(), QpState::Err);
}

// tests the rows "QP set-up fails" of 9.3, [QP-4] and [CM-45]
#[test]
fn a_connection_that_ends_half_way_flushes_what_was_posted() {
    let init = |node: &mut Node, now| {
        let access = Some(Access::REMOTE_WRITE);
        let attr = QpAttr { state: Some(QpState::Init), access, ..QpAttr::default() };
        node.dev.modify_qp(now, node.qp, &attr).unwrap();
    };
    // Attributes that no queue pair accepts are noticed in the middle of the transition.
    let wrong = |node: &Node| ConnParam { min_rnr_timer: 32, ..param(node) };
    let flushed = [(7, Status::WrFlushErr), (8, Status::WrFlushErr)];
    let done = |node: &Node| {
        node.received.iter().map(|entry| (entry.wr_id, entry.status)).collect::<Vec<_>>()
    };

    // The passive side: the peer is not told.
    let mut pair = Pair::unconnected(&no_early());
    listen(&mut pair);
    let now = pair.now;
    init(&mut pair.nodes[P], now);
    for id in [7, 8] {
        let into = pair.nodes[P].sge(0, 64);
        pair.post_recv(P, id, &[into]);
    }
    let ours = param(&pair.nodes[A]);
    connect(&mut pair, &ours);
    let (passive, _) = request(&mut pair).unwrap();
    let bad = wrong(&pair.nodes[P]);
    let refused = pair.nodes[P].dev.accept(pair.now, passive, &bad);
    let attr = QpAttrName::MinRnrTimer;
    let above = InvalidReason::AttrTooLarge { attr, limit: 31, given: 32 };
    assert_eq!(refused, Err(Error::Invalid(above)));
    pair.settle();
    assert_eq!(names(&pair), ["REQ"]);
    assert_eq!(pair.nodes[P].state(), QpState::Err);
    assert_eq!(done(&pair.nodes[P]), flushed);
    // The queue pair is the program's again, which accepts with it after a reset.
    let reset = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
    let qp = pair.nodes[P].qp;
    pair.nodes[P].dev.modify_qp(now, qp, &reset).unwrap();
    let good = param(&pair.nodes[P]);
    accept(&mut pair, passive, &good);
    assert!(pair.nodes.iter().all(is_up));

    // The active side: the peer knows the queue pair number, so it is not reused for a while.
    let mut pair = Pair::unconnected(&no_early());
    listen(&mut pair);
    init(&mut pair.nodes[A], now);
    for id in [7, 8] {
        let into = pair.nodes[A].sge(0, 64);
        pair.post_recv(A, id, &[into]);
    }
    let bad = wrong(&pair.nodes[A]);
    let active = connect(&mut pair, &bad);
    let (passive, _) = request(&mut pair).unwrap();
    let theirs = param(&pair.nodes[P]);
    accept(&mut pair, passive, &theirs);
    assert_eq!(names(&pair), ["REQ", "REP", "REJ"]);
    assert_eq!(done(&pair.nodes[A]), flushed);
    for (node, id) in pair.nodes.iter().zip([active, passive]) {
        assert_eq!(node.state(), QpState::Err);
        let events = cm_events(node);
        assert!(matches!(events[..], [CmEvent::Rejected { id: of, .. }] if of == id), "{events:?}");
    }
    let (qp, to) = (pair.nodes[A].qp, SocketAddr::new(pair.nodes[P].addr, PORT));
    pair.nodes[A].dev.modify_qp(now, qp, &reset).unwrap();
    let ours = param(&pair.nodes[A]);
    let again = |pair: &mut Pair| pair.nodes[A].dev.connect(pair.now, None, to, &ours);
    assert_eq!(again(&mut pair), Err(Error::Busy(Object::QueuePair)));
    assert!(pair.run(Duration::from_millis(513), |pair| pair.nodes.iter().all(is_down)));
    again(&mut pair).unwrap();
    pair.settle();
    assert!(request(&mut pair).is_some());
}

#[test]
fn what_cannot_be_done() {
    let (mut pair, active, _) = connected(&no_early());
    let (now, remote) = (pair.now, SocketAddr::new(pair.nodes[P].addr, PORT));
    let elsewhere: SocketAddr = ([10, 0, 0, 77], 0).into();
    let node = &mut pair.nodes[A];
    let (dev, own) = (&mut node.dev, node.addr);
    assert_eq!(dev.listen(elsewhere), Err(Error::AddrNotAvailable));
    let at = SocketAddr::new(own, PORT);
    dev.listen(at).unwrap();
    assert!(matches!(dev.listen(at), Err(Error::AddrInUse(_))));
    let mut connect = |local, qpn| {
        dev.connect(now, local, remote, &ConnParam { qpn, ..ConnParam::default() }).unwrap_err()
    };
    assert_eq!(connect(Some(elsewhere), node.qp), Error::AddrNotAvailable);
    assert_eq!(connect(None, node.qp), Error::Busy(Object::QueuePair));
    assert_eq!(connect(None, Qpn(2)), Error::NoSuch(Object::QueuePair));
    let cap = QpCap::default();
    let (pd, send_cq, recv_cq) = (node.pd, node.send_cq, node.recv_cq);
    let init =
        QpInit { pd, send_cq, recv_cq, srq: None, qp_type: QpType::Ud, cap, sq_sig_all: false };
    let ud = dev.create_qp(&init).unwrap();
    let refused = dev.connect(now, None, remote, &ConnParam { qpn: ud, ..ConnParam::default() });
    assert_eq!(refused, Err(Error::Invalid(InvalidReason::TypeToConnect)));
    let init = QpInit { qp_type: QpType::Rc, ..init };
    let rc = dev.create_qp(&init).unwrap();
    let v6 = "[fd00::7]:7".parse().unwrap();
    let param = ConnParam { qpn: rc, ..ConnParam::default() };
    assert_eq!(dev.connect(now, None, v6, &param), Err(Error::AddrNotAvailable));
    let answered = Err(Error::Invalid(InvalidReason::NotARequest));
    assert_eq!(dev.accept(now, active, &param), answered);
    assert_eq!(dev.accept(now, CmId(9999), &param), Err(Error::NoSuch(Object::Connection)));
    assert_eq!(dev.reject(now, CmId(9999), &[]), Err(Error::NoSuch(Object::Connection)));
    assert_eq!(dev.disconnect(now, CmId(9999)), Err(Error::NoSuch(Object::Connection)));
    assert_eq!(dev.destroy_id(now, CmId(9999)), Err(Error::NoSuch(Object::CmId)));
}

// tests [HDR-9]: the smaller port's path MTU must do for both
#[test]
fn a_path_mtu_that_cannot_be_carried_is_refused() {
    let mut pair = Pair::unconnected(&no_early());
    renew(&mut pair.nodes[P], Config { mtu: Mtu::M1024, ..Config::default() });
    listen(&mut pair);
    let ours = param(&pair.nodes[A]);
    let id = connect(&mut pair, &ours);
    let [CmEvent::Rejected { id: of, reason, .. }] = cm_events(&pair.nodes[A])[..] else {
        panic!("{:?}", pair.nodes[A].events)
    };
    assert_eq!((of, reason), (id, RejectReason::INVALID_MTU));
}

// tests [CM-53]
#[test]
fn a_new_life_ends_the_connections_of_the_former() {
    let (mut pair, _, passive) = connected(&no_early());
    let former = pair.nodes[A].dev.former_connections();
    assert_eq!(former.len(), 1);
    renew(&mut pair.nodes[A], Config { guid: 99, ..Config::default() });
    let now = pair.now;
    pair.nodes[A].dev.end_former_connection(now, &former[0]).unwrap();
    pair.settle();
    assert_eq!(cm_events(&pair.nodes[P]), [CmEvent::Disconnected { id: passive }]);
    assert_eq!(names(&pair), ["DREQ", "DREP"]);
    let other = bowline_roce::FormerConnection { local: [10, 0, 0, 9].into(), ..former[0] };
    assert_eq!(pair.nodes[A].dev.end_former_connection(now, &other), Err(Error::AddrNotAvailable));
}

#[test]
fn a_thousand_connections_leave_nothing() {
    let mut pair = Pair::unconnected(&Setup::default());
    pair.keep_log = false;
    let listener = listen(&mut pair);
    for node in &mut pair.nodes {
        node.dev.destroy_qp(node.qp).unwrap();
    }
    for round in 0..1000 {
        for node in &mut pair.nodes {
            let (pd, send_cq, recv_cq) = (node.pd, node.send_cq, node.recv_cq);
            let (qp_type, cap) = (QpType::Rc, QpCap::default());
            let init = QpInit { pd, send_cq, recv_cq, srq: None, qp_type, cap, sq_sig_all: false };
            node.qp = node.dev.create_qp(&init).unwrap();
        }
        let (active, passive) = establish(&mut pair);
        let side = round % 2;
        disconnect(&mut pair, side, [active, passive][side]);
        let now = pair.now;
        for (node, id) in pair.nodes.iter_mut().zip([active, passive]) {
            node.dev.destroy_qp(node.qp).unwrap();
            if round % 3 == 0 {
                node.dev.destroy_id(now, id).unwrap();
            }
            node.events.clear();
        }
    }
    pair.run(Duration::from_secs(1), |_| false);
    let now = pair.now;
    pair.nodes[P].dev.destroy_id(now, listener).unwrap();
    for node in &mut pair.nodes {
        assert_eq!(node.dev.poll_timeout(), None);
        assert!(node.dev.former_connections().is_empty());
        assert!(node.dev.poll_event().is_none());
        // Nothing refers to them any more.
        node.dev.destroy_cq(node.send_cq).unwrap();
        node.dev.destroy_cq(node.recv_cq).unwrap();
        node.dev.dereg_mr(node.keys.lkey).unwrap();
        node.dev.dealloc_pd(node.pd).unwrap();
        let counters = node.dev.counters();
        assert_eq!((counters.cm_resent, counters.cm_ignored, counters.cm_timeouts), (0, 0, 0));
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

// tests vector V5: a REQ as the kernel sent it, in its packet, is accepted
#[test]
fn a_recorded_request_of_a_kernel() {
    let zeroes = |n: usize| "00".repeat(n);
    let req = [
        "6400ffff00000001800000008001000000000001010702030000000000000002
         2358edbf0010000000000000bfed5823000000000000000001061c06505400ff
         fe77000300000000000000000000110100000001000000a0715ee4a7ffff37f0
         ffffffff00000000000000000000ffff0a4d000300000000000000000000ffff
         0a4d0002c165b00000400088",
        &zeroes(45),
        "40e70b0000000000000000000000000a4d00030000000000000000000000000a 4d0002",
        &zeroes(56),
        "a1ae377e",
    ]
    .concat();
    let own: IpAddr = [10, 77, 0, 2].into();
    let from: SocketAddr = ([10, 77, 0, 3], 55410).into();
    let now = Instant::from_nanos(1);
    let mut dev = Device::new(Config { addrs: vec![own], ..Config::default() }, [0; 32]);
    dev.listen(([0, 0, 0, 0], 7174).into()).unwrap();
    dev.handle_datagram(now, from, own, IdentHint::Unknown, &bytes(&req));
    let Some(Event::Cm(CmEvent::ConnectRequest { id, request })) = dev.poll_event() else {
        panic!("{:?}", dev.counters())
    };
    assert_eq!(request.remote, ([10, 77, 0, 3], 0xe70b).into());
    assert_eq!((request.remote_qpn, request.responder_resources), (Qpn(0x11), 1));
    let pd = dev.alloc_pd().unwrap();
    let cq = dev.create_cq(8).unwrap();
    let (qp_type, cap) = (QpType::Rc, QpCap::default());
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all: false };
    let qpn = dev.create_qp(&init).unwrap();
    dev.accept(now, id, &ConnParam { qpn, ..ConnParam::default() }).unwrap();
    let (state, attr) = dev.query_qp(qpn).unwrap();
    assert_eq!(
        (state, attr.sq_psn, attr.dest_qpn),
        (QpState::Rts, Some(0x71_5ee4), Some(Qpn(0x11)))
    );
    assert_eq!((attr.path_mtu, attr.max_rd_atomic), (Some(Mtu::M1024), Some(1)));
    let av = attr.av.unwrap();
    assert_eq!((av.remote, av.flow_label), (from.ip(), 0xc165b));
    let mut burst = Burst::new();
    assert!(dev.poll_transmit(now, &mut burst));
    assert_eq!((burst.to, burst.source_port, burst.bytes.len()), (from.ip(), 55410, 280));
    let CmMessage::Rep(rep) = CmMad::parse(&burst.bytes[20..276]).unwrap().message else {
        panic!("a REP")
    };
    assert_eq!((rep.remote_id, rep.qpn), (0xbfed_5823, qpn.0));
    assert_eq!((rep.responder_resources, rep.initiator_depth, rep.ack_delay), (1, 1, 15));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// On a bad wire connections are established, carry data and end all the same. The passive side
    /// may learn by data that the connection is up, since its REP is sent six times only [CM-57].
    #[test]
    fn a_wire_that_loses_doubles_and_reorders(fates in prop::collection::vec(0..6u8, 1..40)) {
        let mut number = 0;
        let fate = move |_: usize, _: &Seen| {
            number += 1;
            match fates.get(number) {
                Some(0) => Fate::Drop,
                Some(1) => Fate::Twice,
                Some(2) => Fate::Late,
                _ => Fate::Pass,
            }
        };
        whole_life_from(&Setup::default(), Box::new(fate), |pair| {
            let ids = accepted(pair);
            assert!(pair.run(Duration::from_secs(80), |pair| is_up(&pair.nodes[A])));
            ids
        });
    }
}
