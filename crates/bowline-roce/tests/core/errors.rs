//! Requests that cannot be carried out, at either end, and the effect on their queue pairs.

use std::time::Duration;

use crate::common::{BUFFER, Fate, Pair, Setup, pattern};
use bowline_roce::{Config, Congestion, Event};
use bowline_verbs::{
    Access, AsyncEvent, Error, InvalidReason, Piece, QpAttr, QpState, Remote, SendFlags, SendOp,
    SendWr, Sge, Status,
};
use bowline_wire::roce::{NakCode, Opcode, Syndrome};

/// Runs until everything has settled, timers of retransmission included.
fn settle(pair: &mut Pair) {
    pair.run(Duration::from_secs(5), |_| false);
}

fn refusals(pair: &Pair) -> Vec<Syndrome> {
    let aeths = pair.log.iter().filter_map(|seen| seen.packet().aeth);
    aeths.map(|aeth| aeth.syndrome).filter(|s| !matches!(s, Syndrome::Ack(_))).collect()
}

/// Checklist 10: what the peer refuses fails with its status, the rest is flushed, both ends are in
/// error, and one in error answers nothing [REQ-10], [QP-4], [RSP-18].
#[test]
fn a_refusal_ends_both_queue_pairs() {
    let good = Setup::default();
    let read_only = Setup { access: Access::LOCAL_WRITE | Access::REMOTE_READ, ..Setup::default() };
    type Make = fn(&Pair) -> SendOp;
    let wrong_key: Make = |pair| {
        let mut remote = pair.nodes[1].remote(0);
        remote.rkey ^= 1;
        SendOp::Write(remote)
    };
    let outside: Make = |pair| SendOp::Write(pair.nodes[1].remote(BUFFER - 9));
    let before: Make = |pair| {
        let mut remote = pair.nodes[1].remote(0);
        remote.addr -= 1;
        SendOp::Read(remote)
    };
    let wrapping: Make =
        |pair| SendOp::Read(Remote { addr: u64::MAX - 3, ..pair.nodes[1].remote(0) });
    let no_key: Make = |_| SendOp::Read(Remote { addr: 0, rkey: 0 });
    let write: Make = |pair| SendOp::Write(pair.nodes[1].remote(0));
    let too_long: Make = |_| SendOp::Send;
    use NakCode::{InvalidRequest, RemoteAccess};
    for (name, setup, make, nak, status) in [
        ("key byte", &good, wrong_key, RemoteAccess, Status::RemAccessErr),
        ("end", &good, outside, RemoteAccess, Status::RemAccessErr),
        ("start", &good, before, RemoteAccess, Status::RemAccessErr),
        ("wrap", &good, wrapping, RemoteAccess, Status::RemAccessErr),
        ("no key", &good, no_key, RemoteAccess, Status::RemAccessErr),
        ("rights", &read_only, write, InvalidRequest, Status::RemInvReqErr),
        ("length", &good, too_long, InvalidRequest, Status::RemInvReqErr),
    ] {
        let mut pair = Pair::new(setup);
        for id in 0..3 {
            let room = [pair.nodes[1].sge(0, 5)];
            pair.post_recv(1, id, &room);
        }
        pair.post_recv(0, 9, &[]);
        let sges = [pair.nodes[0].sge(0, 10)];
        let op = make(&pair);
        pair.post(0, 1, SendOp::Send, &sges[..0]);
        pair.post_flags(0, 2, op, &sges, SendFlags::empty());
        pair.post(0, 3, SendOp::Send, &sges[..0]);
        pair.post(1, 4, SendOp::Send, &[]);
        settle(&mut pair);
        let flushed = Status::WrFlushErr;
        let expected = [(1, Status::Success), (2, status), (3, flushed)];
        assert_eq!(pair.outcomes(0), expected, "{name}");
        assert_eq!(refusals(&pair), [Syndrome::Nak(nak)], "{name}");
        assert!(pair.nodes.iter().all(|node| node.state() == QpState::Err), "{name}");
        // The side whose program gets no completion is told by an event [QP-10].
        let fatal = Event::Async(AsyncEvent::QpFatal(pair.nodes[1].qp));
        assert_eq!(pair.nodes[1].events, [fatal], "{name}");
        let received: Vec<_> = pair.nodes[1].received.iter().map(|entry| entry.status).collect();
        let second = if name == "length" { Status::LocLenErr } else { flushed };
        assert_eq!(received, [Status::Success, second, flushed], "{name}");
        assert_eq!(pair.outcomes(1).last().map(|(id, _)| *id), Some(4), "{name}");
        let packets = pair.packets();
        settle(&mut pair);
        assert_eq!(pair.packets(), packets, "{name}");
    }
}

/// One end in error answers nothing, whatever comes [QP-4].
#[test]
fn a_queue_pair_in_error_is_silent() {
    let mut pair = Pair::new(&Setup::default());
    let qp = pair.nodes[1].qp;
    let attr = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    pair.nodes[1].dev.modify_qp(pair.now, qp, &attr).unwrap();
    let (sges, remote) = ([pair.nodes[0].sge(0, 10)], pair.nodes[1].remote(0));
    pair.post(0, 1, SendOp::Read(remote), &sges);
    settle(&mut pair);
    assert!(pair.log.iter().all(|seen| seen.from == 0));
    assert_eq!(pair.outcomes(0), [(1, Status::RetryExcErr)]);
    // The owner caused the error itself and gets no event.
    assert_eq!(pair.nodes[1].events, []);
    assert!(pair.nodes[1].dev.counters().drop_state > 0);
}

/// A local key that does not allow it fails the request when its turn comes, not before, and
/// nothing is sent after it [REQ-16], [MR-4], [REQ-15].
#[test]
fn local_protection_errors_come_in_order() {
    for read in [false, true] {
        let mut pair = Pair::new(&Setup::default());
        let node = &mut pair.nodes[0];
        let pd = node.pd;
        let weak = node.dev.reg_mr(pd, &node.buffer, 0, 1000, Some(0), Access::empty()).unwrap();
        let good = [node.sge(0, 5000)];
        let remote = pair.nodes[1].remote(0);
        let bad = if read {
            Sge { addr: 0, len: 1000, lkey: weak.lkey }
        } else {
            Sge { addr: 0, len: 1001, lkey: weak.lkey }
        };
        let op = if read { SendOp::Read(remote) } else { SendOp::Write(remote) };
        pair.post(0, 1, SendOp::Write(remote), &good);
        // The weak region may be sent from.
        pair.post(0, 2, SendOp::Write(remote), &[Sge { addr: 1, len: 999, lkey: weak.lkey }]);
        pair.post(0, 3, op, &[bad]);
        pair.post(0, 4, SendOp::Write(remote), &good);
        settle(&mut pair);
        let good = Status::Success;
        let expected = [(1, good), (2, good), (3, Status::LocProtErr), (4, Status::WrFlushErr)];
        assert_eq!(pair.outcomes(0), expected);
        assert_eq!(pair.nodes[0].state(), QpState::Err);
        assert_eq!(pair.nodes[1].state(), QpState::Rts);
        assert!(pair.log.iter().all(|seen| seen.packet().opcode != Opcode::ReadRequest));
    }
}

/// An unsignalled message relies on the next one to request an acknowledgement. When that one
/// cannot be sent, it fails at once all the same, even without a retransmission timer [REQ-25].
#[test]
fn a_request_that_cannot_be_sent_asks_for_what_relied_on_it() {
    for timeout in [0, 17] {
        let mut pair = Pair::new(&Setup { timeout, ..Setup::default() });
        let to = pair.nodes[1].remote(0);
        let node = &mut pair.nodes[0];
        let good = [node.sge(0, 5000)];
        let bad = [Sge { lkey: node.keys.lkey ^ 1, ..node.sge(0, 10) }];
        let op = SendOp::Write(to);
        let wr = |id, sges, flags| SendWr { id, op: op.clone(), sges, inline: &[], flags };
        let wrs = [wr(1, &good, SendFlags::empty()), wr(2, &bad, SendFlags::SIGNALED)];
        node.dev.post_send(pair.now, node.qp, &wrs).unwrap();
        let begun = pair.now;
        pair.settle();
        assert_eq!(pair.outcomes(0), [(2, Status::LocProtErr)], "timeout {timeout}");
        assert!(pair.now < begun + Duration::from_millis(1), "no timer was needed");
    }
}

/// The region goes away between the packets of one message: what was sent stays, the request fails.
#[test]
fn a_region_deregistered_under_way_fails_the_request() {
    let config = Config { congestion: Congestion::Fixed(16), ..Config::default() };
    let mut pair = Pair::new(&Setup { config, ..Setup::default() });
    let (remote, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 100_000)]);
    pair.fate = Box::new(|_, seen| if seen.from == 1 { Fate::Drop } else { Fate::Pass });
    pair.post(0, 1, SendOp::Write(remote), &sges);
    pair.settle();
    let key = pair.nodes[0].keys.lkey;
    pair.nodes[0].dev.dereg_mr(key).unwrap();
    pair.fate = Box::new(|_, _| Fate::Pass);
    settle(&mut pair);
    assert_eq!(pair.outcomes(0), [(1, Status::LocProtErr)]);
}

/// A read whose local memory is gone when the answer comes, and one whose answer makes no sense.
#[test]
fn a_read_without_a_place_fails() {
    let mut pair = Pair::new(&Setup::default());
    let (remote, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 5000)]);
    pair.fate = Box::new(|n, _| if n == 0 { Fate::Drop } else { Fate::Pass });
    pair.post(0, 1, SendOp::Read(remote), &sges);
    pair.settle();
    let key = pair.nodes[0].keys.lkey;
    pair.nodes[0].dev.dereg_mr(key).unwrap();
    settle(&mut pair);
    assert_eq!(pair.outcomes(0), [(1, Status::LocProtErr)]);
}

/// [REQ-20]: a registration behind an unacknowledged request survives any number of resends; one
/// that cannot be carried out ends the queue pair with a status that says so [MR-6].
#[test]
fn a_registration_is_executed_once() {
    let mut pair = Pair::new(&Setup::default());
    let pd = pair.nodes[0].pd;
    let slot = pair.nodes[0].dev.alloc_mr(pd).unwrap();
    pair.fate = Box::new(
        |_, seen| {
            if seen.at.as_nanos() < 2_400_000_000 { Fate::Drop } else { Fate::Pass }
        },
    );
    let (remote, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 3000)]);
    pair.nodes[0].fill(0, 3000, 5);
    let bind = |pair: &Pair| SendOp::RegMr {
        key: slot.rkey,
        pieces: vec![Piece { buffer: pair.nodes[0].buffer.clone(), offset: 100, len: 50 }],
        iova: 0,
        access: Access::LOCAL_WRITE,
    };
    pair.post(0, 1, SendOp::Write(remote), &sges);
    let op = bind(&pair);
    pair.post(0, 2, op, &[]);
    pair.post(0, 3, SendOp::Write(remote), &[Sge { addr: 1, len: 49, lkey: slot.lkey }]);
    pair.post(0, 4, SendOp::LocalInv(slot.rkey), &[]);
    let op = bind(&pair);
    pair.post(0, 5, op, &[]);
    pair.finish(0, 5);
    assert!(pair.nodes[0].dev.counters().timeouts >= 3);
    assert_eq!(pair.nodes[1].bytes(0, 49), pattern(3000, 5)[101..150]);
    // The window is bound now.
    let op = bind(&pair);
    pair.post(0, 6, op, &[]);
    pair.post(0, 7, SendOp::Send, &[]);
    settle(&mut pair);
    let tail = [(6, Status::LocQpOpErr), (7, Status::WrFlushErr)];
    assert_eq!(pair.outcomes(0)[5..], tail);
}

/// A response that no responder gives: the request fails [REQ-10].
#[test]
fn answers_that_make_no_sense_fail_the_request() {
    type Damage = fn(&mut bowline_wire::roce::Packet<'_>);
    let cases: [(Damage, Status); 5] = [
        (|packet| packet.opcode = Opcode::ReadResponseFirst, Status::BadRespErr),
        (|packet| packet.payload = &packet.payload[..9], Status::BadRespErr),
        (
            |packet| {
                packet.aeth.as_mut().unwrap().syndrome = Syndrome::Reserved(0x41);
            },
            Status::BadRespErr,
        ),
        (
            |packet| {
                packet.opcode = Opcode::Acknowledge;
                packet.payload = &[];
                packet.aeth.as_mut().unwrap().syndrome = Syndrome::Nak(NakCode::Other(9));
            },
            Status::RemOpErr,
        ),
        (
            |packet| {
                packet.opcode = Opcode::AtomicAcknowledge;
                packet.payload = &[];
            },
            Status::BadRespErr,
        ),
    ];
    for (damage, status) in cases {
        let mut pair = Pair::new(&Setup::default());
        let (remote, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 10)]);
        pair.fate = Box::new(|_, seen| if seen.from == 1 { Fate::Drop } else { Fate::Pass });
        pair.post(0, 1, SendOp::Read(remote), &sges);
        pair.settle();
        let answer = pair.log.last().unwrap().clone();
        let mut packet = answer.packet();
        damage(&mut packet);
        let mut bytes = Vec::new();
        packet.emit(&mut bytes);
        pair.inject(0, &mut bytes);
        pair.settle();
        assert_eq!(pair.outcomes(0), [(1, status)]);
    }
}

/// [QP-2], [RX-5]: a completion queue that overruns takes its queue pairs with it, and nothing
/// else.
#[test]
fn an_overrun_completion_queue_ends_its_queue_pairs() {
    let mut pair = Pair::new(&Setup { cq_depth: 2, ..Setup::default() });
    let cq = pair.nodes[0].send_cq;
    // No completion follows, since there is no room for it.
    assert_eq!(pair.nodes[0].dev.arm_cq(cq, true), Ok(true));
    for id in 0..3 {
        let node = &mut pair.nodes[0];
        let flags = SendFlags::SIGNALED;
        let remote = Remote { addr: 0, rkey: 0 };
        let wr = SendWr { id, op: SendOp::Write(remote), sges: &[], inline: &[], flags };
        node.dev.post_send(pair.now, node.qp, &[wr]).unwrap();
    }
    settle(&mut pair);
    let qp = pair.nodes[0].qp;
    let [lost, fatal] = [AsyncEvent::CqError(cq), AsyncEvent::QpFatal(qp)].map(Event::Async);
    assert_eq!(pair.nodes[0].events, [Event::CqReady(cq), lost, fatal]);
    assert_eq!(pair.nodes[0].sent.len(), 2);
    let overrun = Err(Error::Invalid(InvalidReason::CqOverrun));
    assert_eq!(pair.nodes[0].dev.arm_cq(cq, false), overrun);
    assert_eq!(pair.nodes[0].state(), QpState::Err);
    assert_eq!(pair.nodes[1].state(), QpState::Rts);
}
