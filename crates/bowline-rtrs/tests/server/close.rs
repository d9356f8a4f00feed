//! The end of paths, sessions and the server.

use std::time::Duration;

use bowline_rtrs::server::{CloseReason, PathState, ServerEvent};
use bowline_rtrs::{Done, Errno, Input, Tag};
use bowline_verbs::Status;

use super::rig::{Answer, Rig, con_req, done};

const A: &str = "10.0.0.2";
const B: &str = "10.0.0.3";

/// Something that happens to a path.
type Event = dyn Fn(&mut Rig, &super::rig::Path);

// tests [RS-19]
#[test]
fn everything_that_ends_a_connection_ends_its_path() {
    let why: [(&Event, CloseReason); 6] = [
        (
            &|rig, path| rig.server.handle(rig.now, Input::Disconnected { conn: path.conn(1) }),
            CloseReason::Disconnected,
        ),
        (
            &|rig, path| {
                let (conn, errno) = (path.conn(2), Errno::EIO);
                rig.server.handle(rig.now, Input::Failed { conn, errno });
            },
            CloseReason::Failed(Errno::EIO),
        ),
        (
            &|rig, path| {
                let tag = Tag::new(Tag::REPLY, 1);
                let status = Status::RetryExcErr;
                let failed = Done { tag, status, ..done(path.conn(1)) };
                rig.server.handle_done(rig.now, &[failed]);
            },
            CloseReason::Completion(Status::RetryExcErr),
        ),
        (
            &|rig, path| {
                let tag = Tag::new(Tag::RECV, 0);
                let status = Status::WrFlushErr;
                let failed = Done { tag, status, ..done(path.conn(1)) };
                rig.server.handle_done(rig.now, &[failed]);
            },
            CloseReason::Completion(Status::WrFlushErr),
        ),
        (&|rig, path| rig.server.disconnect_path(rig.now, path.id), CloseReason::Local),
        (&|rig, _| rig.server.close(rig.now), CloseReason::Local),
    ];
    for (end, reason) in why {
        let mut rig = Rig::new();
        let path = rig.path(1, 2, A, 3);
        end(&mut rig, &path);
        rig.settle();
        assert_eq!(rig.take_closed(), [(path.id, reason)]);
        assert_eq!(rig.closed, [path.conn(0), path.conn(1), path.conn(2)]);
        assert_eq!(rig.downs().len(), 1);
        assert!(!reason.to_string().is_empty());
        rig.assert_empty();
    }
}

// tests [RT-58]: one that is not connected yet, too
#[test]
fn a_failed_receive_of_info_req_ends_the_path() {
    let mut rig = Rig::new();
    let path = rig.connect(1, 2, A, 1);
    let mut failed = rig.message(path.conn(0), b"");
    failed.status = Status::LocLenErr;
    rig.deliver(&[failed]);
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Completion(Status::LocLenErr))]);
    rig.assert_empty();
}

// tests [RS-6], [RT-93]: the disconnect is repeated for 30 s, and the client can reconnect
// meanwhile
#[test]
fn a_client_that_does_not_answer_is_told_for_a_while() {
    let mut rig = Rig::new();
    rig.silent = true;
    let path = rig.path(1, 2, A, 2);
    rig.server.disconnect_path(rig.now, path.id);
    rig.settle();
    assert_eq!(rig.server.path(path.id).unwrap().state, PathState::Closed);
    assert!(rig.forgotten.is_empty());
    assert_eq!(rig.server.sessions().count(), 0);
    let again = rig.path(1, 2, A, 2);
    assert_ne!(again.id, path.id);
    rig.pass(Duration::from_millis(29_900));
    assert!(!rig.forgotten.contains(&path.conn(0)));
    rig.disconnect(path.conn(0));
    assert_eq!(rig.forgotten, [path.conn(0)], "told");
    rig.pass(Duration::from_millis(200));
    assert_eq!(rig.forgotten, [path.conn(0), path.conn(1)], "given up");
    assert!(rig.server.path(path.id).is_none());
    assert!(rig.server.path(again.id).is_some());
}

// tests [RS-28], [RT-92]
#[test]
fn a_server_closes_when_all_is_answered() {
    let mut rig = Rig::new();
    let (a, _b) = (rig.path(1, 2, A, 2), rig.path(2, 3, B, 1));
    let request = rig.begin(a.io(0));
    rig.silent = true;
    rig.server.close(rig.now);
    rig.settle();
    assert_eq!(rig.ask(A, "10.0.0.1", &con_req(3, 4, 0, 1).emit()), Answer::Refused(104));
    rig.pass(Duration::from_secs(2));
    assert!(!rig.events.contains(&ServerEvent::Closed), "one is not answered");
    assert_eq!(rig.forgotten.len(), 3, "silent clients are waited 1 s");
    rig.respond(request.op, 0, None);
    assert_eq!(rig.events.last(), Some(&ServerEvent::Closed));
    assert_eq!(rig.downs().len(), 2);
    rig.assert_empty();

    let mut rig = Rig::new();
    rig.server.close(rig.now);
    rig.settle();
    assert_eq!(rig.events, [ServerEvent::Closed]);
}

#[test]
fn what_comes_late_for_a_path_that_is_gone_is_ignored() {
    let mut rig = Rig::new();
    let mut path = rig.path(1, 2, A, 2);
    rig.server.disconnect_path(rig.now, path.id);
    rig.settle();
    let again = rig.path(1, 2, A, 2);
    assert_eq!((again.id.slot, again.id.generation), (path.id.slot, path.id.generation + 1));
    rig.sent.clear();
    let conn = path.conn(0);
    for tag in [Tag::RECV, Tag::REPLY, Tag::DRAIN, Tag::INFO] {
        let late = Done { tag: Tag::new(tag, 0), status: Status::WrFlushErr, ..done(conn) };
        rig.deliver(&[late]);
    }
    for input in [
        Input::Disconnected { conn },
        Input::Drained { conn },
        Input::Failed { conn, errno: Errno::EIO },
        Input::Established { conn, private: Vec::new() },
        Input::Refused { conn, reason: bowline_verbs::RejectReason::TIMEOUT, private: Vec::new() },
    ] {
        rig.server.handle(rig.now, input);
    }
    rig.settle();
    rig.take_closed();
    assert!(rig.take_sent(&mut path).is_empty());
    assert_eq!(rig.server.path(again.id).unwrap().state, PathState::Connected);
}

// tests [RS-19]: answers to a path that is closing are dropped
#[test]
fn answers_nobody_waits_for_are_dropped() {
    let mut rig = Rig::new();
    let mut path = rig.path(1, 2, A, 2);
    rig.sent.clear();
    let dones = [rig.send(path.io(0)), rig.send(path.io(1))];
    rig.deliver(&dones);
    let requests = std::mem::take(&mut rig.requests);
    rig.hold_drain = true;
    rig.server.disconnect_path(rig.now, path.id);
    rig.settle();
    rig.respond(requests[0].op, 0, None);
    rig.drain_all();
    rig.respond(requests[1].op, 0, None);
    assert!(rig.take_sent(&mut path).is_empty());
    assert_eq!(rig.server.counters().answers_dropped, 2);
    assert_eq!(rig.downs().len(), 1);
    rig.assert_empty();
}

// After a hundred repetitions nothing is left.
#[test]
fn sessions_come_and_go() {
    let mut rig = Rig::new();
    for round in 0..600_u32 {
        let mut path = rig.path(1, 2, A, 3);
        rig.serve(path.io(0).cid(1 + (round % 2) as u16).data(b"data"), 0);
        rig.take_sent(&mut path);
        rig.disconnect(path.conn(0));
        rig.assert_empty();
        (rig.closed, rig.forgotten) = (Vec::new(), Vec::new());
    }
    assert_eq!(rig.downs().len(), 600);
}
