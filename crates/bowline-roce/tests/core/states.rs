//! States, attributes, limits, and packets that never reach a queue pair.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::common::{self, Pair, Setup, rts_steps};
use bowline_base::Errno;
use bowline_roce::{Config, Device, Event, IdentHint, Limits};
use bowline_verbs::{
    Access, AsyncEvent, Buffer, Error, InvalidReason, Mtu, Object, QpAttr, QpAttrName, QpCap,
    QpInit, QpState, QpType, Qpn, RecvWr, Remote, RequestPart, Resource, SendFlags, SendOp, SendWr,
    Status, UdDest,
};
use bowline_wire::roce::{Bth, IcrcPolicy, Opcode, Outer, Packet, Psn};

fn to(state: QpState) -> QpAttr {
    QpAttr { state: Some(state), ..QpAttr::default() }
}

/// [QP-1]: each transition needs its attributes, all of them, and no others.
#[test]
fn transitions_need_exactly_their_attributes() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(&setup);
    let (now, peer) = (pair.now, pair.nodes[1].qp);
    let node = &mut pair.nodes[0];
    let qp = node.qp;
    let steps = rts_steps(&setup, 0, peer);
    let skipped = InvalidReason::Transition { from: QpState::Reset, to: QpState::Rtr };
    assert_eq!(node.dev.modify_qp(now, qp, &steps[1]), Err(Error::Invalid(skipped)));
    assert!(node.dev.modify_qp(now, qp, &to(QpState::Err)).is_err());
    type Take = fn(&mut QpAttr);
    let takes: [&[(Take, &str)]; 3] = [
        &[(|a| a.access = None, "access is needed")],
        &[
            (|a| a.av = None, "av is needed"),
            (|a| a.path_mtu = None, "path_mtu is needed"),
            (|a| a.dest_qpn = None, "dest_qpn is needed"),
            (|a| a.rq_psn = None, "rq_psn is needed"),
            (|a| a.max_dest_rd_atomic = None, "max_dest_rd_atomic is needed"),
            (|a| a.min_rnr_timer = None, "min_rnr_timer is needed"),
            (|a| a.sq_psn = Some(1), "sq_psn cannot be changed now"),
            (|a| a.rq_psn = Some(1 << 24), "rq_psn is 0x1000000, which has more than 24 bits"),
            (|a| a.dest_qpn = Some(Qpn(1)), "dest_qpn is not that of a connection"),
            (
                |a| a.max_dest_rd_atomic = Some(129),
                "max_dest_rd_atomic is 129, above the limit of 128",
            ),
            (|a| a.min_rnr_timer = Some(32), "min_rnr_timer is 32, above the limit of 31"),
        ],
        &[
            (|a| a.timeout = None, "timeout is needed"),
            (|a| a.retry_cnt = None, "retry_cnt is needed"),
            (|a| a.rnr_retry = None, "rnr_retry is needed"),
            (|a| a.sq_psn = None, "sq_psn is needed"),
            (|a| a.max_rd_atomic = None, "max_rd_atomic is needed"),
            (|a| a.retry_cnt = Some(8), "retry_cnt is 8, above the limit of 7"),
            (|a| a.qkey = Some(8), "qkey cannot be changed now"),
        ],
    ];
    for (step, takes) in steps.iter().zip(takes) {
        for (take, why) in takes {
            let mut attr = *step;
            take(&mut attr);
            let before = node.dev.query_qp(qp);
            let refused = node.dev.modify_qp(now, qp, &attr).unwrap_err();
            assert_eq!((refused.errno(), refused.to_string()), (Errno::EINVAL, (*why).to_owned()));
            assert_eq!(node.dev.query_qp(qp), before);
        }
        node.dev.modify_qp(now, qp, step).unwrap();
    }
    let (state, attr) = node.dev.query_qp(qp).unwrap();
    assert_eq!(
        (state, attr.sq_psn, attr.dest_qpn),
        (QpState::Rts, Some(setup.psns[0]), Some(peer))
    );
    assert!(node.dev.modify_qp(now, qp, &to(QpState::Sqe)).is_err(), "nobody can ask for it");
    let more = QpAttr { access: Some(Access::REMOTE_READ), ..QpAttr::default() };
    node.dev.modify_qp(now, qp, &more).unwrap();
    for state in [QpState::Err, QpState::Reset, QpState::Reset] {
        node.dev.modify_qp(now, qp, &to(state)).unwrap();
    }
    assert_eq!(node.dev.query_qp(qp).unwrap().1, to(QpState::Reset));
    assert_eq!(node.dev.query_qp(peer), Err(Error::NoSuch(Object::QueuePair)));
}

#[test]
fn addresses_and_mtus_must_be_those_of_the_port() {
    let config = Config { mtu: Mtu::M1024, ..Config::default() };
    let setup = Setup { mtu: Mtu::M2048, config, ..Setup::default() };
    let mut pair = Pair::unconnected(&setup);
    let (now, peer) = (pair.now, pair.nodes[1].qp);
    let node = &mut pair.nodes[0];
    let [init, mut rtr, _] = rts_steps(&setup, 0, peer);
    node.dev.modify_qp(now, node.qp, &init).unwrap();
    let error = node.dev.modify_qp(now, node.qp, &rtr);
    let attr = QpAttrName::PathMtu;
    let above = InvalidReason::AttrTooLarge { attr, limit: 1024, given: 2048 };
    assert_eq!(error, Err(Error::Invalid(above)));
    rtr.path_mtu = Some(Mtu::M1024);
    let mut av = rtr.av.unwrap();
    std::mem::swap(&mut av.local, &mut av.remote);
    rtr.av = Some(av);
    assert_eq!(node.dev.modify_qp(now, node.qp, &rtr), Err(Error::AddrNotAvailable));
}

/// [REQ-19], [QP-2], [QP-9].
#[test]
fn posting_needs_a_state_and_room() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(&setup);
    let (now, peer) = (pair.now, pair.nodes[1].qp);
    let node = &mut pair.nodes[0];
    let send =
        SendWr { id: 1, op: SendOp::Send, sges: &[], inline: &[], flags: SendFlags::empty() };
    let recv = RecvWr { id: 2, sges: &[] };
    let [init, rtr, rts] = rts_steps(&setup, 0, peer);
    let early = Err((0, Error::Invalid(InvalidReason::StateToReceive(QpState::Reset))));
    assert_eq!(node.dev.post_recv(now, node.qp, &[recv]), early);
    node.dev.modify_qp(now, node.qp, &init).unwrap();
    assert_eq!(node.dev.post_recv(now, node.qp, &[recv; 1025]), Err((1024, Error::QueueFull)));
    assert!(node.dev.post_send(now, node.qp, std::slice::from_ref(&send)).is_err());
    node.dev.modify_qp(now, node.qp, &rtr).unwrap();
    let early = Err((0, Error::Invalid(InvalidReason::StateToSend(QpState::Rtr))));
    assert_eq!(node.dev.post_send(now, node.qp, std::slice::from_ref(&send)), early);
    node.dev.modify_qp(now, node.qp, &rts).unwrap();
    let many = vec![send.clone(); 1030];
    assert_eq!(node.dev.post_send(now, node.qp, &many), Err((1024, Error::QueueFull)));
    assert_eq!(node.dev.sends_pending(node.qp), Ok(1024));
    let list = [bowline_verbs::Sge::default(); 5];
    let long = SendWr { sges: &list, ..send.clone() };
    assert!(matches!(node.dev.post_send(now, node.qp, &[long]), Err((0, Error::QueueFull))));
    node.dev.modify_qp(now, node.qp, &to(QpState::Err)).unwrap();
    pair.settle();
    let node = &pair.nodes[0];
    assert_eq!((node.sent.len(), node.received.len()), (1024, 1024));
    assert!(node.sent.iter().chain(&node.received).all(|e| e.status == Status::WrFlushErr));
    assert_eq!(node.events, []);
}

#[test]
fn requests_that_are_wrong_in_themselves_are_refused() {
    let mut pair = Pair::new(&Setup::default());
    let now = pair.now;
    let node = &mut pair.nodes[0];
    let remote = node.remote(0);
    let dest = UdDest { addr: node.addr, from: None, qpn: Qpn(5), qkey: 1 };
    let lists = [node.sge(0, 8), node.sge(0, 7), node.sge(0, u32::MAX as usize)];
    let inline = [0; 257];
    let good = SendWr {
        id: 1,
        op: SendOp::Send,
        sges: &lists[..1],
        inline: &inline[..8],
        flags: SendFlags::empty(),
    };
    let odd = Remote { addr: remote.addr + 4, ..remote };
    let add = |remote| SendOp::FetchAdd { remote, add: 1 };
    let too_long = |part, limit, given| InvalidReason::TooLong { part, limit, given };
    for (why, wr) in [
        (
            InvalidReason::RequestOfOtherType(QpType::Rc),
            SendWr { op: SendOp::Datagram(dest, None), ..good.clone() },
        ),
        (InvalidReason::AtomicOperand, SendWr { op: add(odd), ..good.clone() }),
        (
            InvalidReason::AtomicOperand,
            SendWr { op: add(remote), sges: &lists[1..2], ..good.clone() },
        ),
        (
            InvalidReason::InlineRead,
            SendWr { op: SendOp::Read(remote), flags: SendFlags::INLINE, ..good.clone() },
        ),
        (
            too_long(RequestPart::Inline, 256, 257),
            SendWr { inline: &inline, flags: SendFlags::INLINE, ..good.clone() },
        ),
        (
            too_long(RequestPart::Message, 1 << 31, u64::from(u32::MAX)),
            SendWr { sges: &lists[2..], ..good.clone() },
        ),
        (too_long(RequestPart::GatherList, 4, 5), SendWr { sges: &[lists[0]; 5], ..good.clone() }),
    ] {
        let posted = node.dev.post_send(now, node.qp, &[good.clone(), wr]);
        assert_eq!(posted, Err((1, Error::Invalid(why))));
    }
}

/// [REQ-19]: of requests that are posted all or none, a wrong one leaves what was posted before
/// them, and what is posted after them, as it is.
#[test]
fn requests_of_which_one_is_refused_are_taken_back() {
    let mut pair = Pair::new(&Setup::default());
    let (now, qp) = (pair.now, pair.nodes[0].qp);
    pair.nodes[0].fill(0, 2000, 7);
    for id in 0..3 {
        let room = [pair.nodes[1].sge(3000 * id, 3000)];
        pair.post_recv(1, id as u64, &room);
    }
    let lists = [0, 500].map(|at| pair.nodes[0].sge(at, 1000));
    let send = |id: u64, inline: bool| SendWr {
        id,
        op: SendOp::Send,
        sges: if inline { &[] } else { &lists },
        inline: if inline { b"inline" } else { &[] },
        flags: if inline { SendFlags::INLINE } else { SendFlags::empty() } | SendFlags::SIGNALED,
    };
    let dev = &mut pair.nodes[0].dev;
    assert_eq!(dev.post_all_or_none(now, qp, &[send(1, true), send(2, false)]), Ok(()));
    let wrong =
        SendWr { op: SendOp::FetchAdd { remote: Remote::default(), add: 1 }, ..send(9, false) };
    let refused = dev.post_all_or_none(now, qp, &[send(9, false), send(9, true), wrong]);
    assert_eq!(refused, Err(Error::Invalid(InvalidReason::AtomicOperand)));
    let many = vec![send(9, true); 1023];
    assert_eq!(dev.post_all_or_none(now, qp, &many), Err(Error::QueueFull));
    assert_eq!(dev.sends_pending(qp), Ok(2));
    assert_eq!(dev.post_all_or_none(now, qp, &[send(3, true)]), Ok(()));
    pair.settle();
    let done: Vec<_> = [1, 2, 3].map(|id| (id, Status::Success)).into();
    assert_eq!(pair.outcomes(0), done);
    let lens: Vec<_> = pair.nodes[1].received.iter().map(|entry| entry.byte_len).collect();
    assert_eq!(lens, [6, 2000, 6]);
    let [from, to] = &pair.nodes;
    assert_eq!((to.bytes(0, 6), to.bytes(6000, 6)), (b"inline".to_vec(), b"inline".to_vec()));
    assert_eq!(to.bytes(3000, 2000), [from.bytes(0, 1000), from.bytes(500, 1000)].concat());
}

/// [RX-2] to [RX-9]: a packet that fails a check changes a counter and nothing else [RX-11].
#[test]
fn packets_that_fail_a_check_are_dropped() {
    let config = Config { icrc: IcrcPolicy::Strict, ..Config::default() };
    let mut pair = Pair::new(&Setup { config, ..Setup::default() });
    pair.post_recv(1, 1, &[]);
    let [a, b] = [pair.nodes[0].addr, pair.nodes[1].addr];
    let qp = pair.nodes[1].qp;
    let good = Packet::new(
        Opcode::SendOnly,
        Bth { dest_qpn: qp.0, psn: Psn::new(Setup::default().psns[0]), ..Bth::default() },
    );
    let with = |change: &dyn Fn(&mut Packet<'_>)| {
        let mut packet = good;
        change(&mut packet);
        let mut bytes = Vec::new();
        packet.emit(&mut bytes);
        bytes
    };
    let stranger = "10.9.9.9".parse().unwrap();
    let plain = with(&|_| {});
    let mut version = plain.clone();
    version[1] |= 1;
    let mut unknown = plain.clone();
    unknown[0] = 0x1f;
    let deth = |packet: &mut Packet<'_>| packet.opcode = Opcode::UdSendOnly;
    let general = |packet: &mut Packet<'_>| {
        packet.bth.dest_qpn = 1;
        packet.opcode = Opcode::UdSendOnly;
    };
    type Counter = fn(&bowline_roce::Counters) -> u64;
    let cases: [(&str, Vec<u8>, Counter); 13] = [
        ("short", plain[..8].to_vec(), |c| c.drop_malformed),
        ("opcode", unknown, |c| c.drop_malformed),
        ("pad", with(&|p| p.bth.psn = Psn::ZERO)[..11].to_vec(), |c| c.drop_malformed),
        ("version", version, |c| c.drop_header),
        ("qpn 0", with(&|p| p.bth.dest_qpn = 0), |c| c.drop_header),
        ("multicast", with(&|p| p.bth.dest_qpn = 0xff_ffff), |c| c.drop_header),
        ("no qp", with(&|p| p.bth.dest_qpn ^= 1), |c| c.drop_no_qp),
        ("ud to rc", with(&deth), |c| c.drop_transport),
        ("rc to gsi", with(&|p| p.bth.dest_qpn = 1), |c| c.drop_transport),
        ("pkey", with(&|p| p.bth.pkey = 0x1234), |c| c.drop_pkey),
        ("qkey", with(&general), |c| c.drop_qkey),
        ("cnp", with(&|p| p.opcode = Opcode::Cnp), |c| c.rx_cnp),
        ("peer", plain.clone(), |c| c.drop_peer),
    ];
    for (name, mut bytes, counter) in cases {
        let from = SocketAddr::new(if name == "peer" { stranger } else { a }, 50_000);
        if bytes.len() >= 12 {
            let outer = Outer { from: from.ip(), to: b, source_port: 50_000 };
            outer.append_icrc(0, &mut bytes, 0);
        }
        let dev = &mut pair.nodes[1].dev;
        let before = counter(dev.counters());
        dev.handle_datagram(pair.now, from, b, IdentHint::Unknown, &bytes);
        assert_eq!(counter(dev.counters()), before + 1, "{name}");
    }
    let outer = Outer { from: a, to: b, source_port: 50_000 };
    let dev = &mut pair.nodes[1].dev;
    let mut deliver = |bytes: &[u8], to, hint| {
        dev.handle_datagram(pair.now, SocketAddr::new(a, 50_000), to, hint, bytes);
        (dev.counters().drop_address, dev.counters().drop_icrc, dev.counters().requests_executed)
    };
    let mut bytes = plain;
    outer.append_icrc(77, &mut bytes, 0);
    assert_eq!(deliver(&bytes, stranger, IdentHint::Unknown), (1, 0, 0));
    // The strict policy refuses an identification that could not be expected [ICRC-33].
    assert_eq!(deliver(&bytes, b, IdentHint::Unknown), (1, 1, 0));
    assert_eq!(deliver(&bytes, b, IdentHint::Exact(77)), (1, 1, 1));
    bytes[9] ^= 1;
    assert_eq!(deliver(&bytes, b, IdentHint::Exact(77)), (1, 2, 1));
    pair.settle();
    assert_eq!(pair.nodes[1].received.len(), 1);
}

/// [QP-2], [RX-5], [CM-50]: requests are taken in RTR, and the first one is told.
#[test]
fn a_queue_pair_answers_before_it_may_ask() {
    let setup = Setup::default();
    let mut pair = Pair::unconnected(&setup);
    let now = pair.now;
    let qpns = [pair.nodes[0].qp, pair.nodes[1].qp];
    for attr in rts_steps(&setup, 0, qpns[1]) {
        pair.nodes[0].dev.modify_qp(now, qpns[0], &attr).unwrap();
    }
    let [init, rtr, rts] = rts_steps(&setup, 1, qpns[0]);
    pair.nodes[1].dev.modify_qp(now, qpns[1], &init).unwrap();
    pair.post_recv(1, 1, &[]);
    pair.post_recv(1, 2, &[]);
    pair.post(0, 1, SendOp::Send, &[]);
    pair.settle();
    assert_eq!(pair.nodes[1].dev.counters().drop_state, 1);
    pair.nodes[1].dev.modify_qp(now, qpns[1], &rtr).unwrap();
    pair.finish(0, 1);
    pair.post(0, 2, SendOp::Send, &[]);
    pair.finish(0, 2);
    let told = [Event::Async(AsyncEvent::CommEstablished(qpns[1]))];
    assert_eq!(pair.nodes[1].events, told);
    pair.nodes[1].dev.modify_qp(now, qpns[1], &rts).unwrap();
}

/// [QP-6], [CM-53].
#[test]
fn numbers_are_not_used_again_soon() {
    let mut dev = Device::new(Config::default(), [9; 32]);
    let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(1).unwrap());
    let init = QpInit {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        qp_type: QpType::Rc,
        cap: QpCap::default(),
        sq_sig_all: true,
    };
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3000 {
        let qp = dev.create_qp(&init).unwrap();
        assert!(qp.0 > 1 && qp.0 < 0xff_ffff && seen.insert(qp));
        assert_eq!(dev.destroy_cq(cq), Err(Error::Busy(Object::CompletionQueue)));
        assert_eq!(dev.dealloc_pd(pd), Err(Error::Busy(Object::ProtectionDomain)));
        dev.destroy_qp(qp).unwrap();
        assert_eq!(dev.destroy_qp(qp), Err(Error::NoSuch(Object::QueuePair)));
    }
    let buffer = Arc::new(Buffer::new(10).unwrap());
    let keys = dev.reg_mr(pd, &buffer, 0, 10, None, Access::empty()).unwrap();
    assert!(dev.dealloc_pd(pd).is_err());
    dev.dereg_mr(keys.lkey).unwrap();
    dev.dealloc_pd(pd).unwrap();
    dev.destroy_cq(cq).unwrap();
    assert!(dev.create_qp(&init).is_err());
}

#[test]
fn limits_hold() {
    let limits = Limits { qps: 1, pds: 1, cqs: 1, mrs: 1, sges: 4, ..Limits::default() };
    let mut dev = Device::new(Config { limits, ..Config::default() }, [0; 32]);
    let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(1).unwrap());
    let cap = QpCap::default();
    let init = QpInit {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        qp_type: QpType::Rc,
        cap,
        sq_sig_all: true,
    };
    let large = QpInit { cap: QpCap { max_send_sge: 5, ..cap }, ..init };
    assert_eq!(dev.create_qp(&large), Err(Error::Limit(Resource::Sges)));
    dev.create_qp(&init).unwrap();
    assert_eq!(dev.create_qp(&init), Err(Error::Limit(Resource::QueuePairs)));
    assert_eq!(dev.alloc_pd(), Err(Error::Limit(Resource::ProtectionDomains)));
    assert_eq!(dev.create_cq(1), Err(Error::Limit(Resource::CompletionQueues)));
    dev.alloc_mr(pd).unwrap();
    assert_eq!(dev.alloc_mr(pd), Err(Error::Limit(Resource::MemoryRegions)));
}

/// Datagrams from one UD queue pair to another [RX-8], [RX-12].
#[test]
fn datagrams_arrive_with_their_header() {
    for v6 in [false, true] {
        let setup = Setup { v6, ..Setup::default() };
        let mut pair = Pair::unconnected(&setup);
        let now = pair.now;
        for side in 0..2 {
            let node = &mut pair.nodes[side];
            let init = QpInit {
                pd: node.pd,
                send_cq: node.send_cq,
                recv_cq: node.recv_cq,
                srq: None,
                qp_type: QpType::Ud,
                cap: QpCap::default(),
                sq_sig_all: false,
            };
            node.qp = node.dev.create_qp(&init).unwrap();
            let init = QpAttr { qkey: Some(0x1111), ..to(QpState::Init) };
            let rts = QpAttr { sq_psn: Some(1), ..to(QpState::Rts) };
            for attr in [init, to(QpState::Rtr), rts] {
                node.dev.modify_qp(now, node.qp, &attr).unwrap();
            }
        }
        pair.nodes[0].fill(0, 1000, 6);
        let (addr, qpn) = (pair.nodes[1].addr, pair.nodes[1].qp);
        let from = [pair.nodes[0].sge(0, 1000)];
        for (id, qkey, room) in [(1, 0x2222, 1040), (2, 0x1111, 1039), (3, 0x1111, 1040)] {
            let room = [pair.nodes[1].sge(5000, room)];
            if id > 1 {
                pair.post_recv(1, id, &room);
            }
            let op = SendOp::Datagram(UdDest { addr, from: None, qpn, qkey }, Some(5));
            pair.post(0, id, op, &from);
            pair.settle();
            if id == 2 {
                assert_eq!(pair.nodes[1].dev.counters().ud_dropped, 1);
                let larger = pair.nodes[1].sge(5000, 1040);
                let qp = pair.nodes[1].qp;
                let reset = [to(QpState::Reset)];
                for attr in reset {
                    pair.nodes[1].dev.modify_qp(now, qp, &attr).unwrap();
                }
                let init = QpAttr { qkey: Some(0x1111), ..to(QpState::Init) };
                pair.nodes[1].dev.modify_qp(now, qp, &init).unwrap();
                pair.post_recv(1, 4, &[larger]);
                pair.nodes[1].dev.modify_qp(now, qp, &to(QpState::Rtr)).unwrap();
            }
        }
        assert_eq!(pair.nodes[0].sent.len(), 3);
        assert_eq!(pair.nodes[1].dev.counters().drop_qkey, 1);
        let got = pair.nodes[1].received[0];
        assert_eq!((got.wr_id, got.byte_len, got.imm, got.grh), (4, 1040, Some(5), true));
        assert_eq!(got.src_qp, pair.nodes[0].qp);
        assert_eq!(pair.nodes[1].bytes(5040, 1000), common::pattern(1000, 6));
        let version = pair.nodes[1].bytes(if v6 { 5000 } else { 5020 }, 1)[0] >> 4;
        assert_eq!(version, if v6 { 6 } else { 4 });
    }
}

/// [ICRC-23]: bursts can be switched off at any time.
#[test]
fn without_bursts_every_packet_goes_alone() {
    let config = Config { gso: false, ..Config::default() };
    let mut pair = Pair::new(&Setup { config, ..Setup::default() });
    let (to, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 5000)]);
    pair.post(0, 1, SendOp::Write(to), &sges);
    pair.post(0, 2, SendOp::Read(to), &sges);
    pair.finish(0, 2);
    assert!(pair.log.iter().all(|seen| seen.place == 0));
    for node in &mut pair.nodes {
        node.dev.set_gso(true);
    }
    pair.post(0, 3, SendOp::Read(to), &sges);
    pair.finish(0, 3);
    assert!(pair.log.iter().any(|seen| seen.place > 0));
}

/// [MR-1], [QP-6], [CM-53]: numbers and keys follow from the seed alone, and differ with it.
#[test]
fn the_seed_makes_the_numbers() {
    let numbers = |seed: u8| {
        let mut dev = Device::new(Config::default(), [seed; 32]);
        let pd = dev.alloc_pd().unwrap();
        (0..4).map(|_| dev.alloc_mr(pd).unwrap().rkey).collect::<Vec<_>>()
    };
    assert_eq!(numbers(1), numbers(1));
    assert_ne!(numbers(1), numbers(2));
}

/// [RX-7].
#[test]
fn both_halves_of_the_partition_key_are_good() {
    let mut pair = Pair::new(&Setup::default());
    for (step, pkey) in [0xffff, 0x7fff].into_iter().enumerate() {
        pair.post_recv(1, step as u64, &[]);
        let bth = Bth {
            dest_qpn: pair.nodes[1].qp.0,
            psn: Psn::new(Setup::default().psns[0]) + step as u32,
            pkey,
            ..Bth::default()
        };
        let mut bytes = Vec::new();
        Packet::new(Opcode::SendOnly, bth).emit(&mut bytes);
        pair.inject(1, &mut bytes);
    }
    pair.settle();
    assert_eq!(pair.nodes[1].received.len(), 2);
}
