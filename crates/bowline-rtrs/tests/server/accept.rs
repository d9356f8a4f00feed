//! Connection requests and INFO_REQ.

use std::time::Duration;

use bowline_rtrs::server::{
    AllowRule, CloseReason, PathState, Server, ServerConfig, ServerEvent, ServerLimits,
};
use bowline_rtrs::{Errno, Input, PathId, PortAttr, PortId, Tag};
use bowline_wire::rtrs::{ConReq, Geometry, MAX_CONNECTIONS, MAX_PATHS, Uuid};

use super::rig::{Answer, PORT, Path, Rig, con_req, config, uuid};

const A: &str = "10.0.0.2";
const B: &str = "10.0.0.3";
const TO: &str = "10.0.0.1";

const ENXIO: Answer = Answer::Refused(6);
const ENOMEM: Answer = Answer::Refused(12);
const EEXIST: Answer = Answer::Refused(17);
const RESET: Answer = Answer::Refused(104);

fn accepted(answer: Answer) -> bool {
    matches!(answer, Answer::Accepted(..))
}

/// Paths closed so far, those of them that were not admitted, and those that broke a rule.
fn refusals(rig: &Rig) -> (u64, u64, u64) {
    let counters = rig.server.counters();
    (counters.paths_closed, counters.paths_refused, counters.paths_violated)
}

// tests [RT-19], [RT-20], [RT-25], [RT-99]
#[test]
fn a_path_is_made_of_connections_in_any_order() {
    let mut rig = Rig::new();
    let mut path = None;
    for cid in [2, 0, 1] {
        // The first connection decides for the path how keys are refreshed.
        let counts_keys = path.is_some();
        let answer = rig.ask(A, TO, &ConReq { counts_keys, ..con_req(1, 2, cid, 3) }.emit());
        let Answer::Accepted(conn, rsp) = answer else { panic!("{answer:?}") };
        assert_eq!((rsp.new_rkey, rsp.counted_keys), (true, false));
        assert_eq!(conn.cid, cid);
        let made = Path::new(conn.path, &rsp);
        assert_eq!(path.get_or_insert(made).id, conn.path);
        let posted = &rig.recvs[&conn];
        assert_eq!(posted.len(), usize::from(cid == 0), "the receive for INFO_REQ only");
    }
    let mut path = path.unwrap();
    rig.info(&mut path, "one").unwrap();
    assert_eq!(rig.recvs[&path.conn(0)].len(), 512);
    assert_eq!(rig.recvs[&path.conn(1)].len(), 8);
    assert_eq!(rig.recvs[&path.conn(2)].len(), 8);
    assert_eq!(path.chunks.len(), 8);
    let info: Vec<_> = rig.server.sessions().collect();
    assert_eq!(info[0].name.as_ref().unwrap().as_str(), "one");
    assert_eq!((info[0].uuid, info[0].paths.len()), (uuid(1), 1));
    assert_eq!(info[0].paths[0].state, PathState::Connected);
    assert_eq!(info[0].paths[0].remote.to_string(), "10.0.0.2:40000");
    assert!(matches!(
        &rig.events[..],
        [ServerEvent::Up { first: true, name, path: up, .. }, ServerEvent::PathConnected { .. }]
            if name.as_str() == "one" && *up == path.id
    ));
}

// tests [RT-10]: one descriptor for each chunk with refresh, one for all without
#[test]
fn keys_are_per_chunk_with_refresh_and_one_without() {
    let mut rig = Rig::new();
    let path = rig.path(1, 2, A, 1);
    let mut keys: Vec<u32> = path.chunks.iter().map(|chunk| chunk.1).collect();
    keys.dedup();
    assert_eq!(keys.len(), 8);

    let mut rig = Rig::with(ServerConfig { always_invalidate: false, ..config() });
    let path = rig.path(1, 2, A, 1);
    assert!(!path.new_rkey);
    assert!(path.chunks.iter().all(|chunk| chunk.1 == path.chunks[0].1));

    let port = PortAttr { key_refresh: false, ..PORT };
    let mut rig = Rig::on(config(), &[port]);
    assert!(!rig.path(1, 2, A, 1).new_rkey, "the device cannot");
}

// tests [RT-28], [RT-29]
#[test]
fn requests_to_connect_are_refused_as_the_table_says() {
    let mut rig = Rig::new();
    let good = con_req(1, 2, 0, 2);
    assert_eq!(rig.ask(A, TO, &good.emit()[..55]), RESET, "short");
    for (at, what) in [(2, "magic"), (5, "major version")] {
        let mut bytes = good.emit();
        bytes[at] ^= 1;
        assert_eq!(rig.ask(A, TO, &bytes), RESET, "{what}");
    }
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 0, 4097).emit()), RESET, "4097 connections");
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 2, 2).emit()), RESET, "cid is cid_num");
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 0, 0).emit()), RESET, "no connections");
    let mut joining = good;
    joining.first = false;
    assert_eq!(rig.ask(A, TO, &joining.emit()), ENXIO);
    assert_eq!(rig.server.sessions().count(), 0, "nothing is kept of what was refused");

    let mut odd = good.emit();
    odd[4] = 7; // minor version
    odd[50] = 0xff; // reserved
    assert!(accepted(rig.ask(A, TO, &odd)));
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 0, 2).emit()), RESET, "this cid again");
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 1, 3).emit()), RESET, "another cid_num");
    assert_eq!(rig.ask(B, TO, &con_req(1, 2, 1, 2).emit()), RESET, "from elsewhere");
    assert_eq!(rig.ask(A, TO, &con_req(1, 3, 0, 2).emit()), EEXIST, "the same addresses");
    assert_eq!(rig.ask("::ffff:10.0.0.2", TO, &con_req(1, 3, 0, 2).emit()), EEXIST, "the same");
    // Of another family is another address.
    assert!(accepted(rig.ask("fd00::2", "fd00::1", &con_req(1, 4, 0, 1).emit())));
    joining.path = uuid(5);
    assert!(accepted(rig.ask(B, TO, &joining.emit())), "joins");
}

// tests [RT-28]
#[test]
fn a_path_that_is_connected_or_closing_is_not_connected_again() {
    let mut rig = Rig::new();
    let path = rig.path(1, 2, A, 1);
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 0, 1).emit()), RESET);
    rig.hold_drain = true;
    rig.server.disconnect_path(rig.now, path.id);
    rig.settle();
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 0, 1).emit()), RESET);
    rig.drain_all();
    assert!(accepted(rig.ask(A, TO, &con_req(1, 2, 0, 1).emit())));
}

// tests [RT-33], [RT-102]
#[test]
fn a_half_open_path_ends_when_its_client_begins_it_once_more() {
    let mut rig = Rig::new();
    let old = rig.connect(1, 2, A, 2);
    let ask = |recon_cnt, cid| ConReq { recon_cnt, ..con_req(1, 2, cid, 2) }.emit();
    assert_eq!(rig.ask(B, TO, &ask(2, 0)), RESET, "from elsewhere");
    rig.hold_drain = true;
    let request = rig.ask_at(PortId(0), A, TO, &ask(2, 0));
    rig.settle();
    assert!(!rig.answers.contains_key(&request), "the queues of the old connections live");
    assert_eq!(rig.ask(A, TO, &ask(3, 0)), RESET, "while they do");
    rig.hold_drain = false;
    rig.drain_all();
    let Answer::Accepted(conn, rsp) = rig.answers[&request] else { panic!("not accepted") };
    assert_ne!(conn.path, old.id);
    let ended = |event: &ServerEvent| match event {
        ServerEvent::PathClosed { path, reason, .. } => Some((path.path, *reason)),
        _ => None,
    };
    let ended: Vec<_> = rig.events.iter().filter_map(ended).collect();
    assert_eq!(ended, [(old.id, CloseReason::ComesAgain)]);
    assert_eq!(rig.ask(A, TO, &ask(1, 1)), RESET, "a late request of the first attempt");
    assert!(accepted(rig.ask(A, TO, &ask(2, 1))));
    let mut path = Path::new(conn.path, &rsp);
    rig.info(&mut path, "one").expect("connected");
}

// tests [RT-102]
#[test]
fn a_session_continues_with_its_last_path_begun_once_more() {
    let mut rig = Rig::new();
    let path = rig.path(1, 2, A, 1);
    let asks = |recon_cnt, cid| ConReq { recon_cnt, first: false, ..con_req(1, 3, cid, 2) }.emit();
    assert!(accepted(rig.ask(B, TO, &asks(1, 0))), "half-open");
    rig.server.disconnect_path(rig.now, path.id);
    rig.drain_all();
    assert!(accepted(rig.ask(B, TO, &asks(2, 0))));
    assert!(!rig.events.iter().any(|event| matches!(event, ServerEvent::Down { .. })));
}

// tests [RT-66]
#[test]
fn there_is_an_end_to_what_clients_can_make() {
    let limits = ServerLimits {
        sessions: 3,
        sessions_per_address: 2,
        connections: 9,
        connections_per_path: 5,
        ..ServerLimits::default()
    };
    let mut rig = Rig::with(ServerConfig { limits, ..config() });
    assert_eq!(rig.ask(A, TO, &con_req(1, 1, 0, 6).emit()), RESET, "connections of a path");
    assert!(accepted(rig.ask(A, TO, &con_req(1, 1, 0, 1).emit())));
    assert!(accepted(rig.ask(A, TO, &con_req(2, 2, 0, 1).emit())));
    assert_eq!(rig.ask(A, TO, &con_req(3, 3, 0, 1).emit()), ENOMEM, "sessions of an address");
    assert!(accepted(rig.ask(B, TO, &con_req(3, 3, 0, 3).emit())));
    assert_eq!(rig.ask("10.0.0.4", TO, &con_req(4, 4, 0, 1).emit()), ENOMEM, "sessions");
    assert_eq!(rig.ask("10.0.0.4", TO, &con_req(3, 4, 0, 5).emit()), ENOMEM, "connections");
    assert!(accepted(rig.ask("10.0.0.4", TO, &con_req(3, 4, 0, 4).emit())));

    let memory = 3 * config().session_bytes() - 1;
    let limits = ServerLimits { memory, ..ServerLimits::default() };
    let mut rig = Rig::with(ServerConfig { limits, ..config() });
    assert!(accepted(rig.ask(A, TO, &con_req(1, 1, 0, 1).emit())));
    assert!(accepted(rig.ask(A, TO, &con_req(2, 2, 0, 1).emit())));
    assert_eq!(rig.ask(B, TO, &con_req(3, 3, 0, 1).emit()), ENOMEM, "memory of all sessions");
    assert_eq!(rig.server.counters().refused_full, 1);

    let limits = ServerLimits { connections_per_address: 4, ..ServerLimits::default() };
    let mut rig = Rig::with(ServerConfig { limits, ..config() });
    assert!(accepted(rig.ask(A, TO, &con_req(1, 1, 0, 3).emit())));
    assert_eq!(rig.ask(A, TO, &con_req(2, 2, 0, 2).emit()), ENOMEM, "connections of an address");
    assert!(accepted(rig.ask(B, TO, &con_req(2, 2, 0, 4).emit())));
    // Closed paths whose end the client has not confirmed count too.
    rig.silent = true;
    let path = rig.server.sessions().next().unwrap().paths[0].path;
    rig.server.disconnect_path(rig.now, path);
    rig.settle();
    assert_eq!(rig.server.sessions().count(), 1);
    assert_eq!(rig.ask(A, TO, &con_req(3, 3, 0, 2).emit()), ENOMEM, "while it is told");
    assert!(accepted(rig.ask(A, TO, &con_req(3, 3, 0, 1).emit())));
    rig.pass(Duration::from_millis(30_100));
    assert!(accepted(rig.ask(A, TO, &con_req(4, 4, 0, 3).emit())));

    let mut rig = Rig::new();
    for n in 0..MAX_PATHS {
        let from = format!("10.1.0.{n}");
        assert!(accepted(rig.ask(&from, TO, &con_req(1, n as u8, 0, 1).emit())));
    }
    assert_eq!(rig.ask(A, TO, &con_req(1, 200, 0, 1).emit()), RESET, "paths of a session");
}

// tests [RT-66], [RT-24], [RT-28]: the largest allowed path, and all paths of a client with 16
// processors.
#[test]
fn an_honest_client_finds_room_and_leaves_some() {
    let mut rig = Rig::new();
    assert!(accepted(rig.ask(A, TO, &con_req(1, 1, 0, MAX_CONNECTIONS).emit())));
    assert_eq!(rig.ask(A, TO, &con_req(2, 2, 0, 1).emit()), ENOMEM, "an address has no more");
    assert!(accepted(rig.ask(B, TO, &con_req(3, 3, 0, MAX_CONNECTIONS).emit())), "another has");

    let mut rig = Rig::new();
    for n in 0..MAX_PATHS {
        let to = format!("10.1.0.{n}");
        assert!(accepted(rig.ask(A, &to, &con_req(1, n as u8, 0, 17).emit())), "path {n}");
    }
}

// tests [RT-66]
#[test]
fn a_path_half_made_is_closed_in_the_end() {
    let mut rig = Rig::new();
    let path = rig.connect(1, 2, A, 2);
    rig.pass(Duration::from_millis(29_900));
    assert!(rig.closed.is_empty());
    rig.pass(Duration::from_millis(200));
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::NotEstablished)]);
    assert_eq!(refusals(&rig), (1, 0, 0));
    rig.assert_empty();
    assert!(rig.downs().is_empty(), "the upper layer never heard of it");
}

/// Requests from unused addresses, each for a session of its own, in the given order.
fn forge(rig: &mut Rig, numbers: std::ops::Range<u16>) {
    rig.forged = true;
    for n in numbers {
        let [high, low] = n.to_be_bytes();
        let mut req = con_req(0, 0, MAX_CONNECTIONS - 1, MAX_CONNECTIONS);
        req.session = Uuid::from_random([[high, low]; 8].concat().try_into().unwrap());
        req.path = req.session;
        assert!(accepted(rig.ask(&format!("203.0.{high}.{low}"), TO, &req.emit())));
    }
    rig.forged = false;
}

// tests [RT-66]: forged requests of any kind take no place that a client needs.
#[test]
fn forged_requests_keep_nobody_out() {
    let mut rig = Rig::new();
    forge(&mut rig, 0..3000);
    let strangers = rig.server.config().limits.strangers;
    assert_eq!(rig.server.sessions().count(), strangers);
    assert_eq!(rig.server.counters().paths_pushed_out, 3000 - strangers as u64);
    let closed = rig.take_closed();
    assert!(closed.iter().all(|(_, reason)| *reason == CloseReason::PushedOut));
    // None of them has memory for chunks.
    let empty = |rig: &Rig, session| rig.server.memory(session).unwrap().is_empty();
    assert!(rig.server.sessions().all(|info| empty(&rig, info.session)));

    // A real client gets a path, also if the flood goes on while its connections are made.
    assert!(accepted(rig.ask(A, TO, &con_req(1, 2, 0, 2).emit())));
    forge(&mut rig, 3000..4000);
    let Answer::Accepted(conn, rsp) = rig.ask(A, TO, &con_req(1, 2, 1, 2).emit()) else {
        panic!("refused")
    };
    let mut path = Path::new(conn.path, &rsp);
    rig.info(&mut path, "one").unwrap();
    forge(&mut rig, 4000..5000);
    assert_eq!(rig.server.path(path.id).unwrap().state, PathState::Connected);
    let closed = rig.take_closed();
    assert!(closed.iter().all(|(id, reason)| *id != path.id && *reason == CloseReason::PushedOut));
    // The remaining forged requests time out soon.
    rig.pass(Duration::from_millis(10_100));
    assert_eq!(rig.server.sessions().count(), 1);
}

// tests [RT-66]: a connection accepted from an unconfirmed address counts against the limits once
// it is confirmed.
#[test]
fn limits_hold_for_those_who_prove_themselves_later() {
    let limits = ServerLimits { sessions: 2, connections: 5, ..ServerLimits::default() };
    let mut rig = Rig::with(ServerConfig { limits, ..config() });
    rig.forged = true;
    let conns: Vec<_> = [(1, 2), (2, 2), (3, 1), (4, 4)]
        .map(|(session, count)| {
            let from = format!("10.0.0.{}", 10 + session);
            let answer = rig.ask(&from, TO, &con_req(session, session, 0, count).emit());
            let Answer::Accepted(conn, _) = answer else { panic!("{answer:?}") };
            conn
        })
        .into();
    for conn in [conns[0], conns[3], conns[1], conns[2]] {
        let input = Input::Established { conn, private: Vec::new() };
        rig.server.handle(rig.now, input);
        rig.settle();
    }
    // The path of 4 connections would have made 6 in all, and the last path a third session.
    let no_room = CloseReason::Failed(Errno::ENOMEM);
    assert_eq!(rig.take_closed(), [(conns[3].path, no_room), (conns[2].path, no_room)]);
    assert_eq!(rig.server.sessions().count(), 2);
}

// tests [RT-28]
#[test]
fn a_registration_that_fails_refuses_with_its_error() {
    let mut rig = Rig::new();
    rig.no_memory = true;
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 0, 1).emit()), ENOMEM);
    rig.assert_empty();

    let mut rig = Rig::new();
    let mut path = rig.connect(1, 2, A, 1);
    rig.no_memory = true;
    assert!(rig.info(&mut path, "one").is_none());
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Failed(Errno::ENOMEM))]);
    rig.assert_empty();
}

// tests [RT-28]: the last row
#[test]
fn a_queue_pair_that_cannot_be_made_refuses_with_its_error() {
    let mut rig = Rig::new();
    let request = rig.ask_at(PortId(0), A, TO, &con_req(1, 2, 0, 1).emit());
    // The memory, then the accept, which fails.
    let order = rig.server.poll_order().unwrap();
    let bowline_rtrs::Order::AddRegion { region, .. } = order else { panic!("{order:?}") };
    let (port, keys) = (PortId(0), Ok(Vec::new()));
    rig.server.handle(rig.now, Input::Region { region, port, keys });
    let order = rig.server.poll_order().unwrap();
    let bowline_rtrs::Order::Accept { conn, .. } = order else { panic!("{order:?}") };
    rig.server.handle(rig.now, Input::Failed { conn, errno: Errno::ENOMEM });
    let order = rig.server.poll_order().unwrap();
    let bowline_rtrs::Order::Reject { request: refused, private } = order else {
        panic!("{order:?}")
    };
    assert_eq!((refused, &private[4..6]), (request, &[0xf4, 0xff][..]));
    let order = rig.server.poll_order().unwrap();
    assert!(matches!(order, bowline_rtrs::Order::Close { conn: closed } if closed == conn));
    rig.server.handle(rig.now, Input::Drained { conn });
    rig.server.handle(rig.now, Input::Disconnected { conn });
    assert_eq!(rig.server.sessions().count(), 0);
}

// tests [RT-20], [RT-68]
#[test]
fn info_req_needs_all_connections() {
    let mut rig = Rig::new();
    let answer = rig.ask(A, TO, &con_req(1, 2, 0, 2).emit());
    let Answer::Accepted(conn, rsp) = answer else { panic!("{answer:?}") };
    let mut path = Path::new(conn.path, &rsp);
    assert!(rig.info(&mut path, "one").is_none());
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Info)]);
    rig.assert_empty();
}

// tests [RT-20], [RS-48]
#[test]
fn a_name_is_that_of_one_session() {
    let mut rig = Rig::new();
    let first = rig.path(1, 2, A, 1);
    let mut second = rig.connect(2, 3, B, 1);
    assert!(rig.info(&mut second, "s1").is_none());
    assert_eq!(rig.take_closed(), [(second.id, CloseReason::NameTaken)]);
    // Nor has a session two names.
    let mut joined = rig.connect(1, 4, B, 1);
    assert!(rig.info(&mut joined, "other").is_none());
    assert_eq!(rig.take_closed(), [(joined.id, CloseReason::NameTaken)]);
    assert!(rig.server.path(first.id).is_some());
    assert_eq!(refusals(&rig), (2, 2, 0));
    // When the first session is gone, the name is free.
    rig.server.disconnect_path(rig.now, first.id);
    rig.settle();
    let mut third = rig.connect(3, 5, B, 1);
    rig.info(&mut third, "s1").unwrap();
}

// tests [RT-64]
#[test]
fn only_those_on_the_list_come_in() {
    let rule = |addr: &str, prefix, name: Option<&str>| AllowRule {
        addr: addr.parse().unwrap(),
        prefix,
        name: name.map(str::to_owned),
    };
    let allow = vec![rule("10.0.0.2", 32, Some("db*")), rule("10.9.0.0", 16, None)];
    let mut rig = Rig::with(ServerConfig { allow, ..config() });
    assert_eq!(rig.ask(B, TO, &con_req(1, 2, 0, 1).emit()), Answer::Refused(1), "EPERM");
    assert_eq!(rig.server.sessions().count(), 0);
    let mut path = rig.connect(1, 2, A, 1);
    assert!(rig.info(&mut path, "web").is_none());
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::NotAllowed)]);
    let mut path = rig.connect(1, 3, A, 1);
    rig.info(&mut path, "db7").unwrap();
    // A further path is judged by its own address.
    let mut path = rig.connect(1, 4, "10.9.1.1", 1);
    rig.info(&mut path, "db7").unwrap();
    assert_eq!(refusals(&rig), (1, 1, 0));
}

// tests [RS-27]
#[test]
fn the_upper_layer_can_refuse_a_session() {
    let mut rig = Rig::new();
    rig.link = Some(false);
    let mut path = rig.connect(1, 2, A, 1);
    assert!(rig.info(&mut path, "one").is_none());
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::NotAllowed)]);
    assert!(rig.downs().is_empty(), "it was never up");
    rig.assert_empty();
    assert_eq!(refusals(&rig), (1, 1, 0));
}

// tests [RS-27]: paths wait for the upper layer's consent, and the end of an accepted session is
// reported to it even when no path is left by then
#[test]
fn the_upper_layer_may_take_its_time() {
    let mut rig = Rig::new();
    rig.link = None;
    let mut first = rig.connect(1, 2, A, 1);
    assert!(rig.info(&mut first, "one").is_none());
    let mut second = rig.connect(1, 3, B, 1);
    assert!(rig.info(&mut second, "one").is_none());
    let ups: Vec<bool> = rig
        .events
        .iter()
        .filter_map(|event| match event {
            ServerEvent::Up { first, .. } => Some(*first),
            _ => None,
        })
        .collect();
    assert_eq!(ups, [true, false]);
    let session = rig.server.sessions().next().unwrap().session;
    rig.server.answer_link(rig.now, session, true);
    rig.settle();
    let infos: Vec<PathId> = rig
        .sent
        .iter()
        .filter(|sent| sent.tag.kind() == Tag::INFO)
        .map(|sent| sent.conn.path)
        .collect();
    assert_eq!(infos, [first.id, second.id]);

    let mut rig = Rig::new();
    rig.link = None;
    let mut path = rig.connect(1, 2, A, 1);
    assert!(rig.info(&mut path, "one").is_none());
    rig.server.disconnect_path(rig.now, path.id);
    rig.settle();
    let session = rig.server.sessions().next().expect("it is still being asked about").session;
    assert_eq!(rig.ask(A, TO, &con_req(1, 2, 0, 1).emit()), RESET, "until then");
    rig.server.answer_link(rig.now, session, true);
    rig.settle();
    assert_eq!(rig.downs(), [session]);
    rig.assert_empty();
}

// tests [RT-16]
#[test]
fn a_server_of_no_use_is_not_made() {
    assert!(Server::new(config(), &[]).is_err());
    let geometry = Geometry::new(8, 5000, 4096).unwrap();
    assert!(Server::new(ServerConfig { geometry, ..config() }, &[PORT]).is_err());
    let port = PortAttr { max_qp_wr: 15, ..PORT };
    assert!(Server::new(config(), &[port]).is_err());
    let port = PortAttr { max_qp_wr: 16, ..PORT };
    let mut rig = Rig::on(config(), &[port]);
    rig.path(1, 2, A, 2);
    assert!(Server::new(ServerConfig::default(), &[PORT]).is_ok());
}
