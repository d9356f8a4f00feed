//! Notices: a client tells over one path that it has given up another [RT-101].

use bowline_rtrs::WrKind;
use bowline_rtrs::server::{CloseReason, PathState, Request};
use bowline_wire::rtrs::{
    ConReq, INFO_REQ_LEN, INFO_REQ_MAX, Imm, PathLife, SessionName, emit_given_up, emit_info_req,
};

use super::rig::{Answer, Path, Rig, con_req, uuid};

const TO: &str = "10.0.0.1";
const A: &str = "10.0.0.2";
const B: &str = "10.0.0.3";
const C: &str = "10.0.0.4";

/// A server and two paths of a client that gives notice.
fn rig() -> (Rig, Path, Path) {
    let mut rig = Rig::new();
    rig.gives_notice = true;
    let (a, b) = (rig.path(1, 2, A, 2), rig.path(1, 3, B, 2));
    rig.sent.clear();
    (rig, a, b)
}

/// The path with this UUID in the generation that begins with this attempt.
fn generation(path: u8, attempt: u16) -> PathLife {
    PathLife::new(&uuid(path), attempt)
}

fn usr(requests: &[Request]) -> Vec<u8> {
    requests.iter().flat_map(|request| request.usr.to_vec()).collect()
}

// tests [RT-101]
#[test]
fn the_path_that_is_named_is_closed() {
    for cid in 0..2 {
        let (mut rig, a, b) = rig();
        let c = rig.path(1, 4, C, 2);
        rig.hear(b.conn(cid), Imm::GivenUp(generation(2, 1)));
        assert_eq!(rig.take_closed(), [(a.id, CloseReason::GivenUp)]);
        assert_eq!(rig.closed, [a.conn(0), a.conn(1)]);
        for path in [b.id, c.id] {
            assert_eq!(rig.server.path(path).unwrap().state, PathState::Connected);
        }
        let counters = *rig.server.counters();
        assert_eq!((counters.notices, counters.notices_ignored), (1, 0));
        assert_eq!((counters.paths_violated, counters.immediates_ignored), (0, 0));
        // The client may reconnect as another generation, which an old notice does not concern.
        let mut again = None;
        for cid in 0..2 {
            let req = ConReq { recon_cnt: 2, gives_notice: true, ..con_req(1, 2, cid, 2) };
            let Answer::Accepted(conn, rsp) = rig.ask(A, TO, &req.emit()) else {
                panic!("refused")
            };
            again = Some((conn.path, rsp));
        }
        let (id, rsp) = again.unwrap();
        let mut again = Path::new(id, &rsp);
        rig.info(&mut again, "s1").expect("connected");
        rig.hear(b.conn(cid), Imm::GivenUp(generation(2, 1)));
        assert_eq!(rig.take_closed(), []);
        assert_eq!(rig.server.counters().notices_ignored, 1);
    }
}

// tests [RT-101]
#[test]
fn nobody_elses_path_is_closed_nor_the_one_it_came_over() {
    let (mut rig, _, b) = rig();
    // A path of another session with the same name.
    let other = rig.path(7, 2, C, 1);
    let own = rig.path(7, 9, A, 1);
    let mut names = vec![
        generation(3, 1),
        generation(5, 1),
        generation(2, 2),
        generation(9, 1),
        PathLife::from_u32(!0),
    ];
    names.extend((0..1000).map(|n| PathLife::from_u32(n * 7919)));
    let count = names.len() as u64;
    for name in names {
        rig.hear(b.conn(1), Imm::GivenUp(name));
    }
    assert_eq!(rig.take_closed(), []);
    let counters = *rig.server.counters();
    assert_eq!((counters.notices, counters.notices_ignored), (count, count));
    assert!(!rig.server.ends_given_up());
    // In its own session the notice closes the path of that name.
    rig.hear(own.conn(0), Imm::GivenUp(generation(2, 1)));
    assert_eq!(rig.take_closed(), [(other.id, CloseReason::GivenUp)]);
    assert_eq!(rig.server.sessions().map(|session| session.paths.len()).sum::<usize>(), 3);
}

// tests [RT-101]: to clients without notices, such as kernels, the server offers none, and it
// ignores theirs
#[test]
fn who_has_not_agreed_gives_no_notice() {
    let mut rig = Rig::new();
    let (a, b) = (rig.path(1, 2, A, 2), rig.path(1, 3, B, 2));
    assert!(!a.accepts_notice && !b.accepts_notice);
    for cid in 0..2 {
        rig.hear(b.conn(cid), Imm::GivenUp(generation(2, 1)));
    }
    assert_eq!(rig.take_closed(), []);
    let counters = *rig.server.counters();
    assert_eq!((counters.notices, counters.immediates_ignored), (0, 2));
    // Their INFO_REQ has no additional fields either.
    assert_eq!(rig.server.path(a.id).unwrap().state, PathState::Connected);
    let c = rig.connect(1, 4, C, 1);
    let posted = rig.recvs[&c.conn(0)][0].mem.unwrap().len as usize;
    assert_eq!(posted, INFO_REQ_LEN);
    // This is agreed for each path: other paths of the session may use notices.
    rig.gives_notice = true;
    let d = rig.path(1, 5, "10.0.0.5", 1);
    assert!(d.accepts_notice);
    rig.hear(d.conn(0), Imm::GivenUp(generation(2, 1)));
    assert_eq!(rig.take_closed(), [(a.id, CloseReason::GivenUp)]);
    // A path that is still connecting accepts no notice.
    let e = rig.connect(1, 6, "10.0.0.6", 1);
    assert_eq!(rig.recvs[&e.conn(0)][0].mem.unwrap().len as usize, INFO_REQ_MAX);
}

// tests [RT-101]
#[test]
fn what_comes_late_over_a_path_that_is_given_up_is_not_carried_out() {
    for held in [false, true] {
        let (mut rig, a, b) = rig();
        rig.hold_drain = held;
        // One came before, one with the notice, one after.
        let running = rig.begin(a.io(0).usr(b"0").data(b"data"));
        let beside = rig.send(a.io(1).usr(b"1").data(b"data"));
        let told = rig.imm(b.conn(1), Imm::GivenUp(generation(2, 1)).to_u32(), 0);
        let moved = rig.send(b.io(2).usr(b"2").data(b"data"));
        let late = rig.send(a.io(3).usr(b"3").data(b"data"));
        rig.deliver(&[beside, told, moved, late]);
        assert_eq!(usr(&rig.requests), b"2", "of those that came over it nothing begins");
        let moved = rig.one();
        rig.respond(moved.op, 0, None);
        // A request that has begun continues, and its repetition waits for it [RS-9].
        rig.receive(b.io(0).usr(b"4").data(b"data"));
        assert!(rig.requests.is_empty());
        rig.respond(running.op, 0, None);
        if held {
            assert!(rig.requests.is_empty(), "its queue pairs are not dead");
            assert!(rig.server.ends_given_up());
            rig.drain_all();
        }
        assert_eq!(usr(&rig.requests), b"4");
        let replies = |sent: &super::rig::Sent| matches!(sent.kind, WrKind::WriteImm(..));
        assert!(rig.sent.iter().filter(|sent| replies(sent)).all(|sent| sent.conn.path == b.id));
    }
}

// tests [RT-101]: the driver has to close the path before it hands on messages that came after the
// notice
#[test]
fn it_is_told_that_a_path_has_to_be_closed_first() {
    let (mut rig, _, b) = rig();
    rig.hold_drain = true;
    let told = rig.imm(b.conn(1), Imm::GivenUp(generation(2, 1)).to_u32(), 0);
    assert!(!rig.server.ends_given_up());
    rig.server.handle_done(rig.now, &[told]);
    assert!(rig.server.ends_given_up());
    rig.settle();
    assert_eq!(rig.closed.len(), 2);
    rig.drain_all();
    assert!(!rig.server.ends_given_up());
}

/// INFO_REQ of a path that joins, with names of others.
fn info_req(rig: &mut Rig, path: &Path, lives: &[PathLife]) {
    let mut bytes = emit_info_req(&SessionName::new("s1").unwrap()).to_vec();
    emit_given_up(lives, &mut bytes);
    let done = rig.message(path.conn(0), &bytes);
    rig.deliver(&[done]);
}

// tests [RT-101]: a client that has lost all its paths has given up their requests, and reuses the
// chunks as soon as one path is back
#[test]
fn a_path_joins_when_those_it_names_are_dead() {
    let (mut rig, a, b) = rig();
    let running = rig.begin(a.io(0).usr(b"0").data(b"data"));
    rig.hold_drain = true;
    let mut c = rig.connect(1, 4, C, 2);
    let names = [generation(9, 1), generation(2, 1), generation(4, 1)];
    info_req(&mut rig, &c, &names);
    assert_eq!(rig.take_closed(), [(a.id, CloseReason::GivenUp)]);
    assert!(rig.learn(&mut c).is_none(), "its queue pairs live");
    rig.respond(running.op, 0, None);
    assert!(rig.learn(&mut c).is_none());
    rig.drain(a.conn(0));
    rig.settle();
    assert!(rig.learn(&mut c).is_none());
    rig.drain(a.conn(1));
    rig.settle();
    rig.learn(&mut c).expect("now");
    let counters = *rig.server.counters();
    assert_eq!((counters.notices, counters.notices_ignored), (3, 2), "it does not end itself");
    assert_eq!(rig.server.path(b.id).unwrap().state, PathState::Connected);

    // A path that is closing for another reason is waited for, too.
    let mut d = rig.connect(1, 5, "10.0.0.5", 1);
    rig.server.disconnect_path(rig.now, b.id);
    rig.settle();
    info_req(&mut rig, &d, &[generation(3, 1)]);
    assert!(rig.learn(&mut d).is_none());
    rig.drain_all();
    rig.learn(&mut d).expect("now");
}

// tests [RT-100, RT-101]: a device that does not drain its queues does not keep paths from joining
// for ever
#[test]
fn a_path_joins_in_the_end_though_the_queues_of_another_do_not_empty() {
    let (mut rig, _, _) = rig();
    rig.hold_drain = true;
    let mut c = rig.connect(1, 4, C, 1);
    info_req(&mut rig, &c, &[generation(2, 1)]);
    rig.pass(std::time::Duration::from_secs(2));
    assert!(rig.learn(&mut c).is_none());
    rig.pass(std::time::Duration::from_secs(2));
    rig.learn(&mut c).expect("now");
}
