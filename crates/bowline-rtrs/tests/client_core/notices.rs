//! The server is told of paths that are given up [RT-101].

use std::time::Duration;

use bowline_rtrs::client::{Event, PathState};
use bowline_rtrs::{ConnId, PortAttr};
use bowline_wire::rtrs::{INFO_REQ_LEN, PathLife, Uuid, parse_given_up};

use crate::peer::{ATTR, Connects, Rig, config};

/// A session of `paths` paths with two IO connections each, at a server that accepts notices.
fn rig(paths: u8) -> Rig {
    let mut config = config();
    config.io_connections = 2;
    let mut rig = Rig::new(config, true);
    rig.accepts_notice = true;
    assert_eq!(rig.open(paths), Ok(()));
    rig
}

/// Returns the path to this address, in the generation that began with this attempt.
fn generation(n: u8, attempt: u16) -> PathLife {
    PathLife::new(&Uuid([n; 16]), attempt)
}

/// Returns the paths named by the INFO_REQs since the last call.
fn named(rig: &mut Rig) -> Vec<Vec<PathLife>> {
    let sent = std::mem::take(&mut rig.info_reqs);
    sent.iter().map(|(_, bytes)| parse_given_up(bytes).collect()).collect()
}

// tests [RT-101]
#[test]
fn notice_goes_before_the_requests_that_move() {
    let mut rig = rig(3);
    rig.write_many(6);
    assert_eq!(rig.ios.len(), 6);
    let dead = rig.live(1);
    rig.connects = Connects::Ignore;
    rig.lose(dead[1]);
    assert!(rig.ios.len() > 6, "none has moved");
    // The notice is sent once on each connection of the other paths, before anything else.
    let others: Vec<ConnId> = [rig.live(2), rig.live(3)].concat();
    assert_eq!(others.len(), 6);
    let told: Vec<_> = others.iter().map(|conn| (*conn, generation(1, 1), 6)).collect();
    assert_eq!(rig.notices, told);
    // The next path is lost: both are named, each with its own generation.
    rig.notices.clear();
    let before = rig.ios.len();
    rig.lose(rig.live(2)[0]);
    let told: Vec<_> = rig.live(3).iter().map(|conn| (*conn, generation(2, 1), before)).collect();
    assert_eq!(rig.notices, told);
}

// tests [RT-101]: a path all of whose requests were answered needs no notice
#[test]
fn a_path_without_requests_needs_no_notice() {
    let mut rig = rig(2);
    rig.write_one(1);
    rig.reply_all();
    rig.lose(rig.live(1)[0]);
    rig.pass(Duration::from_secs(40));
    assert_eq!(rig.state(0), PathState::Connected);
    assert!(rig.notices.is_empty());
    let named = named(&mut rig);
    assert!(named.len() > 2 && named.iter().all(Vec::is_empty), "{named:?}");
}

// tests [RT-101]: kernels are sent no notices
#[test]
fn a_server_that_does_not_accept_notices_gets_none() {
    let mut rig = Rig::opened(true, 2);
    let memory = rig.memory();
    let permit = rig.permit();
    for n in 1..=4 {
        rig.write(&permit, memory, 1).unwrap();
        let dead = rig.live(1 + n % 2)[0];
        rig.lose(dead);
        rig.ios.retain(|one| one.conn.path != dead.path);
        rig.reply_all();
        rig.pass(Duration::from_secs(40));
    }
    assert!(rig.notices.is_empty());
    assert!(rig.info_reqs.iter().all(|(_, bytes)| bytes.len() == INFO_REQ_LEN));
    assert!(rig.info_reqs.len() > 4, "paths have come back");
}

// tests [RT-101]: with a full send queue the notice waits, and moved requests wait behind it
#[test]
fn notice_is_not_lost_for_want_of_room() {
    let attr = PortAttr { max_qp_wr: 24, ..ATTR };
    let mut rig = Rig::of_device(config(), true, attr, 0x77);
    rig.accepts_notice = true;
    assert_eq!(rig.open(3), Ok(()));
    rig.sends_complete = false;
    rig.write_many(60);
    assert!(rig.ios.len() < 60, "all found room");
    rig.connects = Connects::Ignore;
    let io = rig.live(3)[1];
    for n in 1..=2 {
        rig.lose(rig.live(n)[0]);
    }
    // One notice fits where no request does, the other does not.
    let over = |rig: &Rig| {
        let over = rig.notices.iter().filter(|(conn, ..)| *conn == io);
        over.map(|(_, generation, _)| *generation).collect::<Vec<_>>()
    };
    assert_eq!(over(&rig), [generation(1, 1)]);
    rig.ios.retain(|one| one.conn == io);
    let first = std::mem::take(&mut rig.ios);
    let answered = first.len();
    first.iter().for_each(|one| rig.reply(one, 0));
    rig.pump();
    assert!(rig.ios.is_empty(), "a request overtakes a notice");
    let mut moved = 0;
    while moved + answered < 60 {
        let sent = std::mem::take(&mut rig.unsent);
        let sent: Vec<_> = sent.into_iter().filter(|done| done.conn.path == io.path).collect();
        assert!(!sent.is_empty(), "it stands still");
        rig.session.handle_done(rig.now, &sent);
        rig.pump();
        assert_eq!(over(&rig), [generation(1, 1), generation(2, 1)]);
        assert_eq!(rig.notices.last().map(|(.., before)| *before), Some(0), "the notice first");
        let ios = std::mem::take(&mut rig.ios);
        moved += ios.len();
        ios.iter().for_each(|one| rig.reply(one, 0));
        rig.pump();
        rig.session.check_invariants();
    }
    assert_eq!(rig.take_completed().len(), 60);
}

// tests [RT-101]: a path whose INFO_REQ was sent before brings the notice when it is up, on each
// connection
#[test]
fn a_path_that_is_just_coming_up_brings_notice() {
    let mut rig = rig(3);
    rig.answers_info = false;
    rig.lose(rig.live(2)[0]);
    assert_eq!(rig.state(1), PathState::Connecting);
    let joining = rig.live(2);
    assert_eq!(named(&mut rig).last(), Some(&vec![]));
    rig.write_many(4);
    rig.lose(rig.live(1)[1]);
    let third = rig.live(3);
    let over: Vec<_> =
        rig.notices.drain(..).map(|(conn, generation, _)| (conn, generation)).collect();
    assert_eq!(over, third.iter().map(|conn| (*conn, generation(1, 1))).collect::<Vec<_>>());
    let rsp = rig.info_rsp(joining[0].path);
    rig.give_message(joining[0], &rsp, None);
    rig.pump();
    assert_eq!(rig.state(1), PathState::Connected);
    let over: Vec<_> =
        rig.notices.drain(..).map(|(conn, generation, _)| (conn, generation)).collect();
    assert_eq!(over, joining.iter().map(|conn| (*conn, generation(1, 1))).collect::<Vec<_>>());
}

// tests [RT-101]: when all paths are lost, the next INFO_REQs name those given up, until one path
// is back
#[test]
fn the_next_path_names_those_given_up() {
    let mut rig = rig(2);
    rig.write_many(4);
    named(&mut rig);
    rig.answers_info = false;
    rig.lose(rig.live(1)[1]);
    rig.lose(rig.live(2)[1]);
    assert!(rig.take_events().contains(&Event::Disconnected));
    assert_eq!(rig.take_completed().len(), 4);
    rig.notices.clear();
    // The first path's INFO_REQ was sent when the second still had its requests: another one is
    // sent.
    rig.pass(Duration::from_secs(3));
    let asked = named(&mut rig);
    let last = &asked[asked.len() - 2..];
    assert_eq!(last, [[generation(1, 1), generation(2, 1)], [generation(1, 1), generation(2, 1)]]);
    let joining = rig.live(1);
    let rsp = rig.info_rsp(joining[0].path);
    rig.give_message(joining[0], &rsp, None);
    rig.pump();
    assert_eq!(rig.state(0), PathState::Connected);
    assert!(rig.notices.is_empty(), "the server has answered that there is nothing left of them");
    // From then on no path is named any more.
    rig.answers_info = true;
    rig.lose(rig.live(2)[0]);
    rig.pass(Duration::from_secs(40));
    assert_eq!(rig.state(1), PathState::Connected);
    assert_eq!(named(&mut rig).last(), Some(&vec![]));
}
