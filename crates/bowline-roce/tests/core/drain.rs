//! SQD and SQE: a send queue that is stopped, and one that has failed [QP-1], [QP-3].

use std::time::Duration;

use crate::common::{Fate, Pair, Setup};
use bowline_roce::Event;
use bowline_verbs::{
    Access, AddressVector, AsyncEvent, Error, InvalidReason, QpAttr, QpAttrName, QpCap, QpInit,
    QpState, QpType, RecvWr, SendFlags, SendOp, SendWr, Sge, Status, UdDest,
};

fn to(state: QpState) -> QpAttr {
    QpAttr { state: Some(state), ..QpAttr::default() }
}

fn modify(pair: &mut Pair, attr: &QpAttr) -> Result<(), Error> {
    let now = pair.now;
    let node = &mut pair.nodes[0];
    node.dev.modify_qp(now, node.qp, attr)
}

fn drained(pair: &Pair) -> usize {
    let event = Event::Async(AsyncEvent::SqDrained(pair.nodes[0].qp));
    pair.nodes[0].events.iter().filter(|e| **e == event).count()
}

/// Requests that have begun are finished, lost packets included, and no others begin; then the
/// program is told, once.
#[test]
fn a_queue_is_drained_and_goes_on() {
    let setup = Setup { depth: 1, ..Setup::default() };
    let mut pair = Pair::new(&setup);
    pair.fate = Box::new(|n, _| if n == 1 { Fate::Drop } else { Fate::Pass });
    let there = pair.nodes[1].remote(0);
    let sges = [pair.nodes[0].sge(0, 5000)];
    pair.nodes[0].fill(0, 5000, 1);
    // With one outstanding at most, the second read and what follows wait.
    pair.post(0, 1, SendOp::Read(there), &sges);
    pair.post(0, 2, SendOp::Read(there), &sges);
    pair.post(0, 3, SendOp::Write(there), &sges);
    // The first request goes out, and its answer is not there yet.
    let mut burst = bowline_roce::Burst::new();
    let now = pair.now;
    assert!(pair.nodes[0].dev.poll_transmit(now, &mut burst));
    let attr = QpAttr { sqd_notify: Some(true), ..to(QpState::Sqd) };
    modify(&mut pair, &attr).unwrap();
    let (state, now_is) = pair.nodes[0].dev.query_qp(pair.nodes[0].qp).unwrap();
    assert_eq!((state, now_is.sq_draining), (QpState::Sqd, Some(true)));
    let timeout = QpAttr { timeout: Some(14), ..QpAttr::default() };
    assert_eq!(modify(&mut pair, &timeout), Err(Error::Invalid(InvalidReason::NotDrained)));
    modify(&mut pair, &QpAttr { min_rnr_timer: Some(3), ..QpAttr::default() }).unwrap();
    // That burst is lost; the timer brings it again.
    assert!(pair.run(Duration::from_secs(5), |pair| drained(pair) > 0));
    pair.run(Duration::from_secs(5), |_| false);
    assert_eq!((drained(&pair), pair.outcomes(0)), (1, vec![(1, Status::Success)]));
    let (_, now_is) = pair.nodes[0].dev.query_qp(pair.nodes[0].qp).unwrap();
    assert_eq!(now_is.sq_draining, Some(false));
    // Posting is allowed, and waits. Requests of the peer are answered all the while.
    pair.post(0, 4, SendOp::Write(there), &sges);
    let (from, back) = ([pair.nodes[1].sge(9000, 100)], pair.nodes[0].remote(0));
    pair.post(1, 1, SendOp::Read(back), &from);
    pair.finish(1, 1);
    assert_eq!(pair.outcomes(0).len(), 1);
    // Attributes that may be changed in SQD.
    let more = QpAttr {
        timeout: Some(14),
        retry_cnt: Some(3),
        rnr_retry: Some(2),
        max_rd_atomic: Some(4),
        max_dest_rd_atomic: Some(2),
        access: Some(setup.access - Access::REMOTE_ATOMIC),
        av: Some(AddressVector { flow_label: 0x777, ..now_is.av.unwrap() }),
        pkey_index: Some(0),
        port: Some(1),
        ..QpAttr::default()
    };
    modify(&mut pair, &more).unwrap();
    for (wrong, why) in [
        (QpAttr { port: Some(2), ..more }, InvalidReason::AttrValue(QpAttrName::Port)),
        (QpAttr { pkey_index: Some(1), ..more }, InvalidReason::AttrValue(QpAttrName::PkeyIndex)),
        (
            QpAttr { path_mtu: Some(setup.mtu), ..more },
            InvalidReason::AttrNotAllowed(QpAttrName::PathMtu),
        ),
        (QpAttr { sq_psn: Some(1), ..more }, InvalidReason::AttrNotAllowed(QpAttrName::SqPsn)),
        (
            QpAttr { cur_state: Some(QpState::Rts), ..to(QpState::Rts) },
            InvalidReason::CurState(QpState::Sqd),
        ),
    ] {
        assert_eq!(modify(&mut pair, &wrong), Err(Error::Invalid(why)));
    }
    modify(&mut pair, &QpAttr { cur_state: Some(QpState::Sqd), ..to(QpState::Rts) }).unwrap();
    pair.finish(0, 4);
    let ids: Vec<u64> = pair.outcomes(0).iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [1, 2, 3, 4]);
    let (_, now_is) = pair.nodes[0].dev.query_qp(pair.nodes[0].qp).unwrap();
    assert_eq!((now_is.timeout, now_is.max_rd_atomic), (Some(14), Some(4)));
    assert_eq!((now_is.av.unwrap().flow_label, now_is.sq_draining), (0x777, None));
    // Without a request for it there is no notification; an error in SQD is still an error.
    modify(&mut pair, &to(QpState::Sqd)).unwrap();
    pair.post(0, 5, SendOp::Write(there), &sges);
    pair.settle();
    modify(&mut pair, &to(QpState::Err)).unwrap();
    pair.settle();
    assert_eq!((drained(&pair), pair.outcomes(0).last()), (1, Some(&(5, Status::WrFlushErr))));
}

/// The answers a responder has saved stay when it is to save more or fewer [RSP-3].
#[test]
fn the_depth_changes_while_the_peer_asks() {
    let mut pair = Pair::new(&Setup { depth: 4, ..Setup::default() });
    let there = pair.nodes[0].remote(0);
    let sge = [pair.nodes[1].sge(0, 8)];
    let mut total = 0;
    // Answers are lost now and then, so that requests come again.
    pair.fate =
        Box::new(|n, seen| if seen.from == 0 && n % 5 == 0 { Fate::Drop } else { Fate::Pass });
    for depth in [4, 8, 16, 4, 64, 4] {
        modify(&mut pair, &to(QpState::Sqd)).unwrap();
        modify(&mut pair, &QpAttr { max_dest_rd_atomic: Some(depth), ..QpAttr::default() })
            .unwrap();
        modify(&mut pair, &to(QpState::Rts)).unwrap();
        for _ in 0..7 {
            total += 1;
            pair.post(1, total, SendOp::FetchAdd { remote: there, add: 1 }, &sge);
        }
        // In the middle of it.
        for _ in 0..3 {
            let now = pair.now;
            let mut burst = bowline_roce::Burst::new();
            pair.nodes[1].dev.poll_transmit(now, &mut burst);
        }
        pair.finish(1, total as usize);
    }
    let now = u64::from_ne_bytes(pair.nodes[0].bytes(0, 8).try_into().unwrap());
    assert_eq!(now, total);
}

/// [QP-4] concerns connected queue pairs: of a UD queue pair only the sends are flushed.
#[test]
fn a_datagram_that_cannot_be_sent_stops_the_send_queue_alone() {
    let mut pair = Pair::unconnected(&Setup::default());
    let now = pair.now;
    for node in &mut pair.nodes {
        let init = QpInit {
            pd: node.pd,
            send_cq: node.send_cq,
            recv_cq: node.recv_cq,
            srq: None,
            qp_type: QpType::Ud,
            cap: QpCap::default(),
            sq_sig_all: true,
        };
        node.qp = node.dev.create_qp(&init).unwrap();
        let init =
            QpAttr { qkey: Some(0x1111), port: Some(1), pkey_index: Some(0), ..to(QpState::Init) };
        let rts = QpAttr { sq_psn: Some(1), ..to(QpState::Rts) };
        for attr in [init, to(QpState::Rtr), rts] {
            node.dev.modify_qp(now, node.qp, &attr).unwrap();
        }
    }
    let other = |pair: &Pair, side: usize| UdDest {
        addr: pair.nodes[side].addr,
        from: None,
        qpn: pair.nodes[side].qp,
        qkey: 0x1111,
    };
    let dest = other(&pair, 1);
    let node = &mut pair.nodes[0];
    let (good, bad) = ([node.sge(0, 10)], [Sge { lkey: node.keys.lkey ^ 1, ..node.sge(0, 10) }]);
    let send = |id, sges| SendWr {
        id,
        op: SendOp::Datagram(dest, None),
        sges,
        inline: &[],
        flags: SendFlags::empty(),
    };
    let list = [send(1, &good), send(2, &bad), send(3, &good)];
    node.dev.post_send(now, node.qp, &list).unwrap();
    let space = [node.sge(100, 100)];
    node.dev.post_recv(now, node.qp, &[RecvWr { id: 9, sges: &space }]).unwrap();
    pair.settle();
    use Status::{LocProtErr, Success, WrFlushErr};
    assert_eq!(pair.outcomes(0), [(1, Success), (2, LocProtErr), (3, WrFlushErr)]);
    assert_eq!(pair.nodes[0].state(), QpState::Sqe);
    let node = &mut pair.nodes[0];
    node.dev.post_send(now, node.qp, &[send(4, &good)]).unwrap();
    // Receives continue.
    let back = other(&pair, 0);
    let from = [pair.nodes[1].sge(0, 10)];
    pair.post(1, 1, SendOp::Datagram(back, None), &from);
    pair.settle();
    assert_eq!(pair.nodes[0].received.len(), 1);
    assert_eq!(pair.outcomes(0).last(), Some(&(4, WrFlushErr)));
    assert!(modify(&mut pair, &to(QpState::Sqd)).is_err());
    modify(&mut pair, &to(QpState::Rts)).unwrap();
    // SQD holds datagrams back as well.
    modify(&mut pair, &QpAttr { sqd_notify: Some(true), ..to(QpState::Sqd) }).unwrap();
    pair.post(0, 5, SendOp::Datagram(dest, None), &good);
    pair.settle();
    assert_eq!((drained(&pair), pair.outcomes(0).len()), (1, 4));
    modify(&mut pair, &QpAttr { qkey: Some(0x2222), ..QpAttr::default() }).unwrap();
    modify(&mut pair, &to(QpState::Rts)).unwrap();
    pair.settle();
    assert_eq!(pair.outcomes(0).last(), Some(&(5, Success)));
}
