//! Checklist 8 to 10 and 12: what cannot go on says why, on both sides.

use std::time::Duration;

use bowline_verbs::{Access, Mtu, QpAttr, QpState, SendOp, Sge, Status};

use crate::world::{EVERY, Fault, Setup, World, pattern};

const FLUSHED: Status = Status::WrFlushErr;

/// [RSP-12], [RSP-13], [REQ-13]: the peer waits as long as it is told, and goes on.
#[test]
fn a_missing_receive_is_waited_for() {
    let waits = [(0, 655_360), (1, 10), (12, 640), (31, 491_520)];
    for (rnr_timer, micros) in waits {
        let mut world = World::new(&Setup { rnr_timer, ..Setup::default() });
        let (from, to) = (world.a.filled(&pattern(700, 0), EVERY), world.b.region(700, EVERY));
        for id in 0..5 {
            world.send(id, SendOp::Send, &[from.sge(0, 700)]);
        }
        world.settle();
        assert_eq!(world.b.device.counters().rnr_naks_sent, 1);
        assert_eq!(world.b.device.counters().naks_sequence_sent, 0);
        for id in 0..5 {
            world.recv(id, &[to.sge(0, 700)]);
        }
        world.run(Duration::from_micros(micros) - Duration::from_nanos(1));
        assert_eq!(world.a.done, []);
        world.run(Duration::from_nanos(1));
        assert_eq!(world.a.done.len(), 5);
        assert_eq!(to.bytes(0, 700), pattern(700, 0));
        assert_eq!(world.a.device.counters().go_backs, 0);
    }
}

/// [REQ-13]: 7 is for ever.
#[test]
fn a_receive_may_come_after_hours() {
    let mut world = World::new(&Setup { rnr_timer: 31, ..Setup::default() });
    let (from, to) = (world.a.filled(b"x", EVERY), world.b.region(1, EVERY));
    world.send(0, SendOp::Send, &[from.sge(0, 1)]);
    world.run(Duration::from_secs(3600));
    assert_eq!(world.a.done, []);
    assert!(world.b.device.counters().rnr_naks_sent > 7000);
    world.recv(0, &[to.sge(0, 1)]);
    world.run(Duration::from_secs(1));
    assert_eq!(world.a.statuses(), [(0, Status::Success)]);
}

/// [REQ-13], [QP-4].
#[test]
fn without_patience_a_missing_receive_is_an_error() {
    for rnr_retry in [0, 1, 6] {
        let mut world = World::new(&Setup { rnr_retry, ..Setup::default() });
        let from = world.a.filled(b"x", EVERY);
        world.send(0, SendOp::Send, &[from.sge(0, 1)]);
        world.send(1, SendOp::Send, &[from.sge(0, 1)]);
        world.run(Duration::from_secs(10));
        assert_eq!(world.a.statuses(), [(0, Status::RnrRetryExcErr), (1, FLUSHED)]);
        assert_eq!(world.a.state(), QpState::Err);
        assert_eq!(world.b.device.counters().rnr_naks_sent, u64::from(rnr_retry) + 1);
    }
}

/// [REQ-12]: an answer gives all tries back.
#[test]
fn progress_renews_patience() {
    let mut world = World::new(&Setup { rnr_retry: 1, ..Setup::default() });
    let (from, to) = (world.a.filled(b"x", EVERY), world.b.region(1, EVERY));
    for id in 0..3 {
        world.send(id, SendOp::Send, &[from.sge(0, 1)]);
        world.settle();
        world.recv(id, &[to.sge(0, 1)]);
        world.run(Duration::from_secs(1));
        assert_eq!(world.a.statuses(), [(id, Status::Success)]);
    }
    assert_eq!(world.a.device.counters().rnr_naks_received, 3);
}

/// [REQ-12], [REQ-22], [QP-4], checklist 9.
#[test]
fn a_silent_peer_is_given_up() {
    let mut world = World::new(&Setup::default());
    let from = world.a.filled(&pattern(700, 0), EVERY);
    let slot = world.a.device.alloc_mr(world.a.pd).unwrap().rkey;
    world.fault = Box::new(|_| Fault::Drop);
    let start = world.now;
    for id in 0..3 {
        world.send(id, SendOp::Send, &[from.sge(0, 700)]);
    }
    world.bind(3, slot, &from, 10);
    world.run_until(4);
    let waited = world.now.saturating_since(start);
    assert!(Duration::from_millis(3700) < waited && waited < Duration::from_millis(4400));
    let expected = [(0, Status::RetryExcErr), (1, FLUSHED), (2, FLUSHED), (3, FLUSHED)];
    assert_eq!(world.a.statuses(), expected);
    world.send(9, SendOp::Send, &[]);
    world.settle();
    assert_eq!(world.a.statuses(), [(9, FLUSHED)]);
    let sent = world.sent;
    world.run(Duration::from_secs(10));
    assert_eq!(world.sent, sent);
}

/// Checklist 10: what A asks, how it ends for A, and for the receives of B.
#[test]
fn a_refusal_ends_both_sides() {
    type Ask = fn(&mut World);
    let cases: [(Ask, Status, Status); 7] = [
        (
            |world| {
                let (from, to) = (world.a.region(8, EVERY), world.b.region(8, EVERY));
                let mut remote = to.remote(0);
                remote.rkey ^= 1;
                world.send(1, SendOp::Write(remote), &[from.sge(0, 8)]);
            },
            Status::RemAccessErr,
            FLUSHED,
        ),
        (
            |world| {
                let (from, to) = (world.a.region(8, EVERY), world.b.region(8, EVERY));
                world.send(1, SendOp::Read(to.remote(1)), &[from.sge(0, 8)]);
            },
            Status::RemAccessErr,
            FLUSHED,
        ),
        (
            |world| {
                let from = world.a.region(8, EVERY);
                let to = world.b.region(8, Access::REMOTE_READ);
                let op = SendOp::FetchAdd { remote: to.remote(0), add: 1 };
                world.send(1, op, &[from.sge(0, 8)]);
            },
            Status::RemAccessErr,
            FLUSHED,
        ),
        (
            |world| {
                let from = world.a.region(1000, EVERY);
                world.send(1, SendOp::Send, &[from.sge(0, 1000)]);
            },
            Status::RemInvReqErr,
            Status::LocLenErr,
        ),
        (
            |world| {
                let from = world.a.region(8, EVERY);
                let to = world.b.region(8, EVERY);
                let attr = QpAttr { access: Some(Access::REMOTE_READ), ..QpAttr::default() };
                world.b.device.modify_qp(world.now, world.b.qp, &attr).unwrap();
                world.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 8)]);
            },
            Status::RemInvReqErr,
            FLUSHED,
        ),
        (
            |world| {
                let from = world.a.region(8, EVERY);
                let to = world.b.region(8, EVERY);
                let remote = bowline_verbs::Remote { rkey: 0, ..to.remote(0) };
                world.send(1, SendOp::WriteImm(remote, 0), &[from.sge(0, 8)]);
            },
            Status::RemAccessErr,
            Status::RemAccessErr,
        ),
        (
            |world| {
                // The memory of B's receive is gone.
                let attr = QpAttr { state: Some(QpState::Rts), ..QpAttr::default() };
                world.b.device.modify_qp(world.now, world.b.qp, &attr).unwrap();
                world.b.device.dereg_mr(world.receive_key).unwrap();
                let from = world.a.region(8, EVERY);
                world.send(1, SendOp::Send, &[from.sge(0, 8)]);
            },
            Status::RemOpErr,
            Status::LocProtErr,
        ),
    ];
    for (i, (ask, status, receive)) in cases.into_iter().enumerate() {
        let mut world = World::new(&Setup::default());
        let to = world.b.region(900, EVERY);
        world.receive_key = to.key;
        world.recv(20, &[to.sge(0, 900)]);
        world.recv(21, &[to.sge(0, 900)]);
        ask(&mut world);
        world.send(2, SendOp::Send, &[]);
        world.settle();
        assert_eq!(world.a.statuses(), [(1, status), (2, FLUSHED)], "case {i}");
        assert_eq!(world.b.statuses(), [(20, receive), (21, FLUSHED)], "case {i}");
        assert_eq!((world.a.state(), world.b.state()), (QpState::Err, QpState::Err));
        // Nobody answers any more.
        let sent = world.sent;
        world.run(Duration::from_secs(10));
        assert_eq!(world.sent, sent);
    }
}

/// [REQ-16], [REQ-18], [MR-4]: bad local keys; what is before them completes, what is behind is
/// flushed.
#[test]
fn a_bad_local_key_ends_the_queue_pair_in_order() {
    for op in 0..3 {
        let mut world = World::new(&Setup::default());
        let (from, to) = (world.a.region(600, EVERY), world.b.region(600, EVERY));
        let read_only = world.a.region(600, Access::REMOTE_READ);
        world.send(0, SendOp::Write(to.remote(0)), &[from.sge(0, 600)]);
        let bad = [Sge { lkey: from.key ^ 1, ..from.sge(0, 600) }];
        match op {
            0 => world.send(1, SendOp::Write(to.remote(0)), &bad),
            1 => world.send(1, SendOp::Send, &[from.sge(0, 300), from.sge(301, 300)]),
            _ => world.send(1, SendOp::Read(to.remote(0)), &[read_only.sge(0, 600)]),
        }
        world.send(2, SendOp::Write(to.remote(0)), &[from.sge(0, 1)]);
        world.run(Duration::from_secs(1));
        let expected = [(0, Status::Success), (1, Status::LocProtErr), (2, FLUSHED)];
        assert_eq!(world.a.statuses(), expected);
    }
}

/// [MR-6], [MR-7]: local operations that cannot be.
#[test]
fn a_local_operation_may_fail() {
    let mut world = World::new(&Setup::default());
    let (from, to) = (world.a.region(600, EVERY), world.b.region(600, EVERY));
    world.send(0, SendOp::Write(to.remote(0)), &[from.sge(0, 600)]);
    world.send(1, SendOp::LocalInv(from.key), &[]);
    world.send(2, SendOp::Write(to.remote(0)), &[from.sge(0, 600)]);
    world.run(Duration::from_secs(1));
    let expected = [(0, Status::Success), (1, Status::LocQpOpErr), (2, FLUSHED)];
    assert_eq!(world.a.statuses(), expected);
}

/// [RSP-18], [MR-13]: the peer ends a key; it is of no use from then on.
#[test]
fn a_key_sent_back_is_of_no_use() {
    let mut world = World::new(&Setup { mtu: Mtu::M1024, ..Setup::default() });
    let (from, to) = (world.a.region(64, EVERY), world.b.region(64, EVERY));
    let slot = world.b.device.alloc_mr(world.b.pd).unwrap().rkey;
    let piece =
        bowline_verbs::Piece { buffer: std::sync::Arc::clone(&to.buffer), offset: 0, len: 64 };
    let op = SendOp::RegMr { key: slot, pieces: vec![piece], iova: 0, access: EVERY };
    let flags = bowline_verbs::SendFlags::empty();
    let wr = bowline_verbs::SendWr { id: 50, op, sges: &[], inline: &[], flags };
    world.b.device.post_send(world.now, world.b.qp, &[wr]).unwrap();
    world.settle();
    assert_eq!(world.b.statuses(), [(50, Status::Success)]);
    let remote = bowline_verbs::Remote { addr: 0, rkey: slot };
    world.recv(20, &[to.sge(0, 64)]);
    world.recv(21, &[to.sge(0, 64)]);
    world.send(0, SendOp::Write(remote), &[from.sge(0, 64)]);
    world.send(1, SendOp::SendInv(slot), &[from.sge(0, 8)]);
    world.settle();
    assert_eq!(world.a.statuses(), [(0, Status::Success), (1, Status::Success)]);
    assert_eq!(world.b.done.pop().unwrap().invalidated, Some(slot));
    world.send(2, SendOp::Write(remote), &[from.sge(0, 64)]);
    world.settle();
    assert_eq!(world.a.statuses(), [(2, Status::RemAccessErr)]);
    assert_eq!(world.b.statuses(), [(21, FLUSHED)]);
}
