//! Unreliable connections [UC-1 to UC-6].

use bowline_roce::{Config, Congestion, Event};
use bowline_verbs::{
    Access, AddressVector, AsyncEvent, Completion, Error, InvalidReason, Mtu, MwBind, MwType,
    QpAttr, QpAttrName, QpCap, QpInit, QpState, QpType, Qpn, RecvWr, SendFlags, SendOp, SendWr,
    Sge, SrqInit, Status, WcOpcode, next_key,
};
use bowline_wire::roce::{Bth, Opcode, Packet, Psn, Reth};
use proptest::prelude::*;

use crate::common::{Fate, Pair, Setup, pattern};

const MTU: usize = 1024;

/// What a queue pair needs for each state [UC-1].
fn steps(pair: &Pair, side: usize, peer: Qpn, psns: [u32; 2]) -> [QpAttr; 3] {
    let (local, remote) = (pair.nodes[side].addr, pair.nodes[1 - side].addr);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    [
        QpAttr { state: Some(QpState::Init), access: Some(access), ..QpAttr::default() },
        QpAttr {
            state: Some(QpState::Rtr),
            av: Some(AddressVector { local, remote, flow_label: 0x1234, tos: 0 }),
            path_mtu: Some(Mtu::M1024),
            dest_qpn: Some(peer),
            rq_psn: Some(psns[1 - side]),
            ..QpAttr::default()
        },
        QpAttr { state: Some(QpState::Rts), sq_psn: Some(psns[side]), ..QpAttr::default() },
    ]
}

fn init(pair: &Pair, side: usize) -> QpInit {
    let node = &pair.nodes[side];
    QpInit {
        pd: node.pd,
        send_cq: node.send_cq,
        recv_cq: node.recv_cq,
        srq: None,
        qp_type: QpType::Uc,
        cap: QpCap { max_send_wr: 1024, max_recv_wr: 1024, ..QpCap::default() },
        sq_sig_all: false,
    }
}

const PSNS: [u32; 2] = [0xff_fffe, 7];

/// Two connected queue pairs, in place of those that the pair has.
fn connected(setup: &Setup) -> Pair {
    let mut pair = Pair::unconnected(setup);
    for side in [0, 1] {
        let init = init(&pair, side);
        pair.nodes[side].qp = pair.nodes[side].dev.create_qp(&init).unwrap();
    }
    for side in [0, 1] {
        let (qp, peer) = (pair.nodes[side].qp, pair.nodes[1 - side].qp);
        for attr in steps(&pair, side, peer, PSNS) {
            pair.nodes[side].dev.modify_qp(pair.now, qp, &attr).unwrap();
        }
    }
    pair
}

fn post_recv(pair: &mut Pair, id: u64, offset: usize, len: usize) {
    let sge = pair.nodes[1].sge(offset, len);
    pair.post_recv(1, id, &[sge]);
}

fn send(pair: &mut Pair, id: u64, op: SendOp, len: usize) {
    let sge = pair.nodes[0].sge(0, len);
    pair.post(0, id, op, &[sge]);
}

/// Receives of side 1 that have completed since the last call: id, status, kind, bytes, immediate.
fn received(pair: &mut Pair) -> Vec<(u64, Status, WcOpcode, u32, Option<u32>)> {
    let all = std::mem::take(&mut pair.nodes[1].received);
    let of =
        |entry: &Completion| (entry.wr_id, entry.status, entry.opcode, entry.byte_len, entry.imm);
    all.iter().map(of).collect()
}

fn dropped(pair: &Pair) -> u64 {
    pair.nodes[1].dev.counters().uc_messages_dropped
}

/// [UC-2], [HDR-6].
#[test]
fn messages_of_all_kinds_and_lengths_arrive_and_are_not_answered() {
    let mut pair = connected(&Setup::default());
    pair.nodes[0].fill(0, 100_000, 5);
    let remote = pair.nodes[1].remote(2 << 20);
    for (n, len) in [0, 1, 3, MTU - 1, MTU, MTU + 1, 2 * MTU, 70_001].into_iter().enumerate() {
        let imm = n as u32;
        for (kind, op) in [
            SendOp::Send,
            SendOp::SendImm(imm),
            SendOp::Write(remote),
            SendOp::WriteImm(remote, imm),
        ]
        .into_iter()
        .enumerate()
        {
            let at = format!("{op:?} of {len}");
            let has_receive = kind != 2;
            if has_receive {
                post_recv(&mut pair, 9, 0, 100_000);
            }
            pair.nodes[1].buffer.write(0, &vec![0; 100_000]);
            pair.nodes[1].buffer.write(2 << 20, &vec![0; 100_000]);
            send(&mut pair, imm.into(), op, len);
            pair.settle();
            let opcode = if kind == 3 { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
            let with_imm = (kind % 2 == 1).then_some(imm);
            let expected = (9, Status::Success, opcode, len as u32, with_imm);
            let got = received(&mut pair);
            assert_eq!(got, if has_receive { vec![expected] } else { Vec::new() }, "{at}");
            let offset = if kind < 2 { 0 } else { 2 << 20 };
            assert_eq!(pair.nodes[1].bytes(offset, len), pattern(100_000, 5)[..len], "{at}");
            assert_eq!(pair.nodes[1].bytes(offset + len, 8), [0; 8], "{at}");
            let sent = std::mem::take(&mut pair.nodes[0].sent);
            assert_eq!((sent.len(), sent[0].status), (1, Status::Success), "{at}");
            assert_eq!(sent[0].byte_len, len as u32, "{at}");
        }
    }
    assert!(pair.log.iter().all(|seen| seen.from == 0), "nothing goes back");
    let psns: Vec<_> = pair.log.iter().map(|seen| seen.packet().bth.psn).collect();
    assert_eq!(psns[0], Psn::new(PSNS[0]));
    assert!(psns.windows(2).all(|two| two[1] == two[0].next()));
    assert!(pair.log.iter().all(|seen| (0x20..0x2c).contains(&seen.bytes[0])));
    assert!(pair.log.iter().all(|seen| !seen.packet().bth.ack_req));
}

/// [UC-2]: also when nobody receives.
#[test]
fn a_message_is_complete_when_it_is_sent() {
    let mut pair = connected(&Setup::default());
    pair.fate = Box::new(|_, _| Fate::Drop);
    for id in 0..3 {
        send(&mut pair, id, SendOp::Send, 5000);
    }
    pair.settle();
    let done = [(0, Status::Success), (1, Status::Success), (2, Status::Success)];
    assert_eq!(pair.outcomes(0), done);
    assert_eq!(pair.nodes[0].dev.poll_timeout(), None, "nothing is sent again");
}

/// [UC-4]: a message of which a packet is lost, whichever, is dropped, and its receive is that of
/// the next message.
#[test]
fn a_message_with_a_lost_packet_is_dropped() {
    for lost in 0..5 {
        for (kind, op) in [SendOp::Send, SendOp::SendImm(4)].into_iter().enumerate() {
            let mut pair = connected(&Setup::default());
            pair.nodes[0].fill(0, 5 * MTU, 5);
            post_recv(&mut pair, 1, 0, 8 * MTU);
            post_recv(&mut pair, 2, 8 * MTU, 8 * MTU);
            pair.lose(&[lost]);
            send(&mut pair, 1, op.clone(), 5 * MTU);
            send(&mut pair, 2, op.clone(), 3 * MTU);
            send(&mut pair, 3, op, 10);
            pair.settle();
            let imm = (kind == 1).then_some(4);
            let expected =
                [3 * MTU as u32, 10].map(|len| (Status::Success, WcOpcode::Recv, len, imm));
            let got: Vec<_> =
                received(&mut pair).into_iter().map(|(_, a, b, c, d)| (a, b, c, d)).collect();
            assert_eq!(got, expected, "packet {lost}");
            assert_eq!(pair.nodes[1].bytes(0, 3 * MTU), pattern(3 * MTU, 5));
            // Of a message that is lost from its first packet on nothing has begun.
            assert_eq!(dropped(&pair), u64::from(lost > 0), "packet {lost}");
        }
    }
}

/// [UC-4]: the immediate of a WRITE with a gap reports nothing.
#[test]
fn a_write_with_a_lost_packet_reports_nothing() {
    for lost in 0..3 {
        let mut pair = connected(&Setup::default());
        post_recv(&mut pair, 1, 0, 0);
        pair.lose(&[lost]);
        let remote = pair.nodes[1].remote(1 << 20);
        send(&mut pair, 1, SendOp::WriteImm(remote, 1), 3 * MTU);
        pair.settle();
        assert_eq!(received(&mut pair), [], "packet {lost}");
        send(&mut pair, 2, SendOp::WriteImm(remote, 2), 3 * MTU);
        pair.settle();
        let expected = (1, Status::Success, WcOpcode::RecvRdmaWithImm, 3 * MTU as u32, Some(2));
        assert_eq!(received(&mut pair), [expected], "packet {lost}");
    }
}

/// [UC-3]: what the network repeats or delays is dropped, and the message goes its way.
#[test]
fn late_and_repeated_packets_change_nothing() {
    let mut pair = connected(&Setup::default());
    pair.fate = Box::new(|_, _| Fate::Twice);
    pair.nodes[0].fill(0, 4000, 5);
    for id in 0..3 {
        post_recv(&mut pair, id, 4000 * id as usize, 4000);
    }
    send(&mut pair, 1, SendOp::Send, 4000);
    send(&mut pair, 2, SendOp::Send, 10);
    pair.settle();
    let got: Vec<_> = received(&mut pair).iter().map(|entry| (entry.0, entry.3)).collect();
    assert_eq!(got, [(0, 4000), (1, 10)]);
    assert_eq!(pair.nodes[1].bytes(0, 4000), pattern(4000, 5));
    assert_eq!(dropped(&pair), 0);
    // A packet that another one overtakes breaks its message.
    let mut first = true;
    pair.fate = Box::new(move |_, _| match std::mem::replace(&mut first, false) {
        true => Fate::Late,
        false => Fate::Pass,
    });
    send(&mut pair, 3, SendOp::Send, 4000);
    send(&mut pair, 4, SendOp::Send, 20);
    pair.settle();
    let got: Vec<_> = received(&mut pair).iter().map(|entry| (entry.0, entry.3)).collect();
    assert_eq!(got, [(2, 20)]);
}

/// [UC-3]: after a long silence of the network the next message is taken.
#[test]
fn a_peer_that_is_far_ahead_or_has_wrapped_is_followed() {
    for psn in [0x10_0000, 0x7f_ffff, 0x80_0001, 0xe0_0000] {
        let mut pair = connected(&Setup::default());
        post_recv(&mut pair, 1, 0, 100);
        inject(&mut pair, Opcode::UcSendOnly, PSNS[0].wrapping_add(psn), None, b"here");
        pair.settle();
        assert_eq!(received(&mut pair).len(), 1, "{psn:#x}");
    }
}

fn inject(pair: &mut Pair, opcode: Opcode, psn: u32, reth: Option<Reth>, payload: &[u8]) {
    let bth = Bth { dest_qpn: pair.nodes[1].qp.0, psn: Psn::new(psn), ..Bth::default() };
    let mut bytes = Vec::new();
    Packet { payload, reth, ..Packet::new(opcode, bth) }.emit(&mut bytes);
    pair.inject(1, &mut bytes);
}

/// [UC-5].
#[test]
fn what_is_not_allowed_is_dropped_and_the_connection_works_still() {
    let mut pair = connected(&Setup::default());
    let sink = pair.nodes[1].remote(1 << 20);
    let mut wrong = sink;
    wrong.rkey ^= 1 << 31;
    send(&mut pair, 1, SendOp::Send, 5000); // no receive is posted
    send(&mut pair, 2, SendOp::WriteImm(sink, 3), 5000);
    pair.settle();
    assert_eq!((received(&mut pair), dropped(&pair)), (vec![], 2));
    post_recv(&mut pair, 7, 0, 4000);
    send(&mut pair, 3, SendOp::Send, 5000); // too long
    send(&mut pair, 4, SendOp::Write(wrong), 5000);
    send(&mut pair, 5, SendOp::WriteImm(wrong, 3), 5000);
    pair.settle();
    assert_eq!((received(&mut pair), dropped(&pair)), (vec![], 5));
    assert_eq!(pair.nodes[1].state(), QpState::Rts);
    send(&mut pair, 6, SendOp::Send, 4000);
    pair.settle();
    assert_eq!(received(&mut pair), [(7, Status::Success, WcOpcode::Recv, 4000, None)]);
    // Without the right to write [RSP-5].
    let none = QpAttr { access: Some(Access::LOCAL_WRITE), ..QpAttr::default() };
    let (now, qp) = (pair.now, pair.nodes[1].qp);
    pair.nodes[1].dev.modify_qp(now, qp, &none).unwrap();
    pair.nodes[1].fill(1 << 20, 100, 9);
    send(&mut pair, 7, SendOp::Write(sink), 100);
    pair.settle();
    assert_eq!(dropped(&pair), 6);
    assert_eq!(pair.nodes[1].bytes(1 << 20, 100), pattern(100, 9));
    assert!(pair.log.iter().all(|seen| seen.from == 0), "nothing is answered");
}

/// [UC-4], [UC-5]: packets of a peer that does not keep the rules.
#[test]
fn packets_out_of_place_are_dropped() {
    let mut pair = connected(&Setup::default());
    post_recv(&mut pair, 1, 0, 8000);
    let sink = pair.nodes[1].remote(1 << 20);
    let reth = |len| Some(Reth { va: sink.addr, rkey: sink.rkey, len });
    let full = &[1; MTU];
    use Opcode as O;
    let all: [(Opcode, Option<Reth>, &[u8]); 12] = [
        (O::UcSendMiddle, None, full),
        (O::UcSendLast, None, b"last"),
        (O::UcSendFirst, None, b"short"),
        (O::UcSendFirst, None, full),
        (O::UcWriteLast, None, b"of another"),
        (O::UcSendLast, None, b"too late"),
        (O::UcWriteFirst, reth(2 * MTU as u32), full),
        (O::UcWriteLast, None, b"too short"),
        (O::UcWriteOnly, reth(3), b"four"),
        (O::UcWriteFirst, reth(u32::MAX), full),
        (O::UcSendFirst, None, full),
        (O::UcSendOnly, None, b"right"),
    ];
    for (n, (opcode, reth, payload)) in all.into_iter().enumerate() {
        inject(&mut pair, opcode, PSNS[0] + n as u32, reth, payload);
    }
    // Of another transport, and of another peer.
    inject(&mut pair, O::SendOnly, PSNS[0] + 12, None, b"RC");
    let psn = PSNS[0] + 12;
    let bth = Bth { dest_qpn: pair.nodes[1].qp.0, psn: Psn::new(psn), ..Bth::default() };
    let mut bytes = Vec::new();
    Packet::new(O::UcSendOnly, bth).emit(&mut bytes);
    let stranger = [10, 0, 0, 9].into();
    let to = pair.nodes[1].addr;
    bowline_wire::roce::Outer { from: stranger, to, source_port: 49_999 }
        .append_icrc(0, &mut bytes, 0);
    let ident = bowline_roce::IdentHint::Unknown;
    pair.nodes[1].dev.handle_datagram(pair.now, (stranger, 49_999).into(), to, ident, &bytes);
    pair.settle();
    assert_eq!(received(&mut pair), [(1, Status::Success, WcOpcode::Recv, 5, None)]);
    let counters = pair.nodes[1].dev.counters();
    assert_eq!((counters.drop_transport, counters.drop_peer), (1, 1));
    assert_eq!(pair.packets(), 0, "nothing is answered");
}

/// [UC-1], [UC-6].
#[test]
fn only_what_an_unreliable_connection_needs_is_taken() {
    let mut pair = Pair::unconnected(&Setup::default());
    let now = pair.now;
    let init = init(&pair, 0);
    let qp = pair.nodes[0].dev.create_qp(&init).unwrap();
    let [to_init, to_rtr, to_rts] = steps(&pair, 0, Qpn(0x55), PSNS);
    let invalid = |reason| Err(Error::Invalid(reason));
    let dev = &mut pair.nodes[0].dev;
    dev.modify_qp(now, qp, &to_init).unwrap();
    for (attr, name) in [
        (QpAttr { dest_qpn: None, ..to_rtr }, QpAttrName::DestQpn),
        (QpAttr { rq_psn: None, ..to_rtr }, QpAttrName::RqPsn),
        (QpAttr { path_mtu: None, ..to_rtr }, QpAttrName::PathMtu),
        (QpAttr { av: None, ..to_rtr }, QpAttrName::Av),
    ] {
        let got = dev.modify_qp(now, qp, &attr);
        assert_eq!(got, invalid(InvalidReason::AttrMissing(name)));
    }
    let with_reads = QpAttr { max_dest_rd_atomic: Some(1), ..to_rtr };
    let refused = invalid(InvalidReason::AttrNotAllowed(QpAttrName::MaxDestRdAtomic));
    assert_eq!(dev.modify_qp(now, qp, &with_reads), refused);
    dev.modify_qp(now, qp, &to_rtr).unwrap();
    let with_retries = QpAttr { retry_cnt: Some(1), ..to_rts };
    let refused = invalid(InvalidReason::AttrNotAllowed(QpAttrName::RetryCnt));
    assert_eq!(dev.modify_qp(now, qp, &with_retries), refused);
    dev.modify_qp(now, qp, &to_rts).unwrap();
    let remote = bowline_verbs::Remote::default();
    for op in [
        SendOp::Read(remote),
        SendOp::SendInv(3),
        SendOp::FetchAdd { remote, add: 1 },
        SendOp::CompareSwap { remote, compare: 1, swap: 2 },
        SendOp::AtomicWrite(remote),
    ] {
        let sges = &[Sge { len: 8, ..Sge::default() }];
        let wr = SendWr { id: 1, op, sges, inline: &[], flags: SendFlags::SIGNALED };
        let refused = Error::Invalid(InvalidReason::RequestOfOtherType(QpType::Uc));
        assert_eq!(dev.post_send(now, qp, &[wr]), Err((0, refused)));
    }
}

/// [UC-6]: receiving continues.
#[test]
fn a_message_that_cannot_be_read_stops_the_send_queue() {
    let mut pair = connected(&Setup::default());
    let good = pair.nodes[0].sge(0, 2000);
    let bad = Sge { lkey: good.lkey ^ 1 << 31, ..good };
    post_recv(&mut pair, 1, 0, 8000);
    pair.post(0, 1, SendOp::Send, &[good, bad]);
    pair.post(0, 2, SendOp::Send, &[good]);
    pair.settle();
    assert_eq!(pair.outcomes(0), [(1, Status::LocProtErr), (2, Status::WrFlushErr)]);
    assert_eq!(pair.nodes[0].state(), QpState::Sqe);
    let (now, qp) = (pair.now, pair.nodes[0].qp);
    let rts = QpAttr { state: Some(QpState::Rts), ..QpAttr::default() };
    pair.nodes[0].dev.modify_qp(now, qp, &rts).unwrap();
    pair.post(0, 3, SendOp::Send, &[good]);
    pair.settle();
    assert_eq!(received(&mut pair), [(1, Status::Success, WcOpcode::Recv, 2000, None)]);
    assert_eq!(dropped(&pair), 1, "the one of which only the beginning came");
}

/// [QP-3], [QP-4], [MR-4].
#[test]
fn queues_are_drained_and_flushed() {
    let config = Config { gso: false, congestion: Congestion::Fixed(240), ..Config::default() };
    let mut pair = connected(&Setup { config, ..Setup::default() });
    let (now, qp) = (pair.now, pair.nodes[0].qp);
    for id in 1..3 {
        post_recv(&mut pair, id, 0, 8000);
        send(&mut pair, id, SendOp::Send, 3000);
    }
    // One packet is sent.
    let mut burst = bowline_roce::Burst::new();
    assert!(pair.nodes[0].dev.poll_transmit(now, &mut burst));
    assert_eq!(burst.count, 1);
    let from = (burst.from, burst.source_port).into();
    let hint = bowline_roce::IdentHint::Unknown;
    pair.nodes[1].dev.handle_datagram(now, from, burst.to, hint, &burst.bytes);
    let sqd = QpAttr { state: Some(QpState::Sqd), sqd_notify: Some(true), ..QpAttr::default() };
    pair.nodes[0].dev.modify_qp(now, qp, &sqd).unwrap();
    pair.settle();
    assert_eq!(pair.outcomes(0), [(1, Status::Success)]);
    assert!(pair.nodes[0].events.contains(&Event::Async(AsyncEvent::SqDrained(qp))));
    assert_eq!(received(&mut pair).len(), 1);
    let rts = QpAttr { state: Some(QpState::Rts), ..QpAttr::default() };
    pair.nodes[0].dev.modify_qp(now, qp, &rts).unwrap();
    assert!(pair.nodes[0].dev.poll_transmit(now, &mut burst));
    pair.nodes[1].dev.handle_datagram(now, from, burst.to, hint, &burst.bytes);
    post_recv(&mut pair, 3, 0, 8000);
    let err = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    for side in [0, 1] {
        let qp = pair.nodes[side].qp;
        pair.nodes[side].dev.modify_qp(now, qp, &err).unwrap();
    }
    pair.settle();
    assert_eq!(pair.outcomes(0)[1..], [(2, Status::WrFlushErr)]);
    let flushed: Vec<_> = received(&mut pair).iter().map(|entry| (entry.0, entry.1)).collect();
    assert_eq!(flushed, [(2, Status::WrFlushErr), (3, Status::WrFlushErr)]);
}

/// [MR-4]: memory of a receive that is gone fails the queue pair.
#[test]
fn a_useless_receive_fails_the_queue_pair() {
    let mut pair = connected(&Setup::default());
    let bad = Sge { lkey: 1, ..pair.nodes[1].sge(0, 100) };
    pair.post_recv(1, 1, &[bad]);
    send(&mut pair, 1, SendOp::Send, 100);
    pair.settle();
    assert_eq!(received(&mut pair)[0].1, Status::LocProtErr);
    assert_eq!(pair.nodes[1].state(), QpState::Err);
}

/// [MR-8], [MR-9]: in the order of the queue.
#[test]
fn windows_are_bound_between_messages() {
    let mut pair = connected(&Setup::default());
    let node = &mut pair.nodes[0];
    let buffer = std::sync::Arc::clone(&node.buffer);
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let keys = node.dev.reg_mr(node.pd, &buffer, 0, 4096, None, access).unwrap();
    let first = node.dev.alloc_mw(node.pd, MwType::Type2).unwrap();
    let key = next_key(first);
    let addr = buffer.addr();
    let to = MwBind { lkey: keys.lkey, addr, len: 4096, access: Access::REMOTE_WRITE };
    pair.post(0, 1, SendOp::BindMw { key, to }, &[]);
    pair.post(0, 2, SendOp::LocalInv(key), &[]);
    pair.post(0, 3, SendOp::LocalInv(key ^ 1 << 31), &[]);
    pair.settle();
    let expected = [(1, Status::Success), (2, Status::Success), (3, Status::LocQpOpErr)];
    assert_eq!(pair.outcomes(0), expected);
}

/// [SRQ-2], [SRQ-5].
#[test]
fn a_shared_receive_of_a_dropped_message_is_that_of_the_next_one() {
    let mut pair = connected(&Setup::default());
    let (now, pd) = (pair.now, pair.nodes[1].pd);
    let srq = pair.nodes[1].dev.create_srq(&SrqInit { pd, max_wr: 4, max_sge: 1 }).unwrap();
    let init = QpInit { srq: Some(srq), ..init(&pair, 1) };
    pair.nodes[1].qp = pair.nodes[1].dev.create_qp(&init).unwrap();
    let reset = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
    let qp = pair.nodes[0].qp;
    pair.nodes[0].dev.modify_qp(now, qp, &reset).unwrap();
    for side in [0, 1] {
        let (qp, peer) = (pair.nodes[side].qp, pair.nodes[1 - side].qp);
        for attr in steps(&pair, side, peer, PSNS) {
            pair.nodes[side].dev.modify_qp(now, qp, &attr).unwrap();
        }
    }
    send(&mut pair, 1, SendOp::Send, 10);
    pair.settle();
    assert_eq!((received(&mut pair), dropped(&pair)), (vec![], 1), "the queue is empty");
    let sge = pair.nodes[1].sge(0, 5000);
    for id in [1, 2] {
        pair.nodes[1].dev.post_srq_recv(srq, &[RecvWr { id, sges: &[sge] }]).unwrap();
    }
    let lost = pair.packets() + 2;
    pair.lose(&[lost]);
    send(&mut pair, 2, SendOp::Send, 5000);
    send(&mut pair, 3, SendOp::Send, 10);
    send(&mut pair, 4, SendOp::Send, 5000);
    pair.settle();
    let got: Vec<_> = received(&mut pair).iter().map(|entry| (entry.0, entry.3)).collect();
    assert_eq!(got, [(1, 10), (2, 5000)]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// [UC-3], [UC-4]: whatever the network does, messages arrive whole, in order and once, or not
    /// at all, and all arrive by a network that does nothing.
    #[test]
    fn messages_arrive_whole_and_in_order_or_not_at_all(
        lens in prop::collection::vec(1..6 * MTU, 1..40),
        fates in prop::collection::vec(0..10_u8, 300),
        harm in any::<bool>(),
        gso in any::<bool>(),
    ) {
        let config = Config { gso, congestion: Congestion::Fixed(240), ..Config::default() };
        let mut pair = connected(&Setup { config, ..Setup::default() });
        let room = 6 * MTU;
        for id in 0..lens.len() {
            post_recv(&mut pair, id as u64, id * room, room);
        }
        pair.fate = Box::new(move |n, _| match fates[n % fates.len()] {
            _ if !harm => Fate::Pass,
            0 => Fate::Drop,
            1 => Fate::Twice,
            2 => Fate::Late,
            _ => Fate::Pass,
        });
        for (n, len) in lens.iter().enumerate() {
            let source = (1 << 20) + n * room;
            pair.nodes[0].fill(source, *len, n as u8);
            let sge = pair.nodes[0].sge(source, *len);
            pair.post(0, n as u64, SendOp::SendImm(n as u32), &[sge]);
        }
        pair.settle();
        prop_assert!(pair.nodes[0].sent.iter().all(|entry| entry.status == Status::Success));
        prop_assert_eq!(pair.nodes[0].sent.len(), lens.len());
        let got = received(&mut pair);
        let mut after = None;
        for (at, (id, status, _, len, imm)) in got.iter().enumerate() {
            prop_assert_eq!((*id, *status), (at as u64, Status::Success));
            let n = imm.unwrap() as usize;
            prop_assert!(after.is_none_or(|after| n > after), "{} after {:?}", n, after);
            prop_assert_eq!(*len as usize, lens[n]);
            let bytes = pair.nodes[1].bytes(at * room, lens[n]);
            prop_assert_eq!(bytes, pattern(lens[n], n as u8));
            after = Some(n);
        }
        prop_assert!(harm || got.len() == lens.len());
    }

    /// [UC-4], [UC-5]: a peer that sends what it likes gets no answer, reaches no other memory than
    /// that of receives and what it may write, and stops nobody.
    #[test]
    fn a_peer_that_keeps_no_rule_does_no_harm(
        packets in prop::collection::vec(
            (0x20..0x2c_u8, -3..4_i32, 0..4_usize, any::<bool>(), 0..6_u64),
            1..200,
        ),
    ) {
        let mut pair = connected(&Setup::default());
        let room = 3 * MTU;
        for id in 0..8 {
            post_recv(&mut pair, id, id as usize * room, room);
        }
        let (target, size) = (1 << 20, 4 * MTU);
        let sink = pair.nodes[1].remote(target);
        let untouched = [(8 * room, target - 8 * room), (target + size, 1 << 20)];
        let before = untouched.map(|(at, len)| pair.nodes[1].bytes(at, len));
        // The right key is that of the whole buffer.
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let node = &mut pair.nodes[1];
        let buffer = std::sync::Arc::clone(&node.buffer);
        let keys = node.dev.reg_mr(node.pd, &buffer, target, size, None, access).unwrap();
        let mut psn = PSNS[0];
        for (opcode, step, len, is_right, packets) in packets {
            let opcode = Opcode::from_u8(opcode).unwrap();
            let len = [0, 1, MTU - 1, MTU][len];
            psn = psn.wrapping_add_signed(if is_right { 1 } else { step }) & 0xff_ffff;
            let whole = if opcode.ends() { len } else { packets as usize * MTU + 7 };
            let rkey = if is_right { keys.rkey } else { keys.rkey ^ 1 << 31 };
            let reth = Some(Reth { va: sink.addr, rkey, len: whole as u32 });
            inject(&mut pair, opcode, psn, reth, &vec![0xee; len]);
        }
        pair.settle();
        prop_assert_eq!(pair.packets(), 0);
        prop_assert_eq!(pair.nodes[1].state(), QpState::Rts);
        let ids: Vec<_> = received(&mut pair).iter().map(|entry| entry.0).collect();
        prop_assert_eq!(&ids, &(0..ids.len() as u64).collect::<Vec<_>>());
        let after = untouched.map(|(at, len)| pair.nodes[1].bytes(at, len));
        prop_assert_eq!(before, after);
        if ids.len() < 8 {
            // Steps lead back by 600 at most.
            inject(&mut pair, Opcode::UcSendOnly, psn.wrapping_add(10_000) & 0xff_ffff, None, b"right");
            pair.settle();
            prop_assert_eq!(received(&mut pair)[0].3, 5);
        }
    }
}
