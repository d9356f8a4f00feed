//! Disconnecting, time-wait, what is left.

use bowline_verbs::{Error, Object};
use bowline_wire::roce::cm::{Dreq, Ids};

use super::super::FormerConnection;
use super::*;

// tests [CM-45] [CM-51] [CM-6] [GSI-4] [CMA-14] [QP-6]
#[test]
fn either_side_ends_it() {
    for by in [A, P] {
        let (mut pair, active, passive) = Pair::connected(config());
        let (ids, qps) = ([active, passive], [QP_A, QP_P]);
        let other = 1 - by;
        pair.disconnect(by, ids[by]);
        assert_eq!(pair.names(by), ["DREQ"]);
        assert_eq!(pair.names(other), ["DREP"]);
        let CmMessage::Dreq(dreq) = pair.log[0].mad.message else { panic!("a DREQ") };
        assert_eq!(dreq.remote_qpn, qps[other].0, "the receiver's");
        assert_eq!(pair.log[0].mad.transaction, pair.log[1].mad.transaction);
        for side in [A, P] {
            assert_eq!(pair.sides[side].events, [disconnected(ids[side])]);
            assert_eq!(pair.states(side), [QpState::Err]);
            let manager = &pair.sides[side].manager;
            assert!(!manager.holds(qps[side]) && manager.reserves(qps[side]));
        }
        // Nothing more happens on a second call.
        pair.disconnect(by, ids[by]);
        pair.disconnect(other, ids[other]);
        assert_eq!(pair.log.len(), 2);
        pair.pass(Duration::from_millis(511));
        assert_eq!(pair.sides[A].events.len(), 1);
        let busy = pair.sides[A].manager.check_qp(&param(QP_A));
        assert_eq!(busy, Err(Error::Busy(Object::QueuePair)));
        pair.pass(Duration::from_millis(1));
        for side in [A, P] {
            let id = ids[side];
            assert_eq!(pair.sides[side].events, [disconnected(id), CmEvent::TimewaitExit { id }]);
        }
        pair.assert_nothing_left();
    }
}

// tests [CM-44]: DREQ crosses DREQ
#[test]
fn both_sides_end_it_at_once() {
    let (mut pair, active, passive) = Pair::connected(config());
    pair.sides[A].manager.disconnect(pair.now, active).unwrap();
    pair.sides[P].manager.disconnect(pair.now, passive).unwrap();
    pair.settle();
    assert_eq!(pair.names(A), ["DREQ", "DREP"]);
    assert_eq!(pair.names(P), ["DREQ", "DREP"]);
    assert_eq!(pair.sides[A].events, [disconnected(active)], "told once");
    assert_eq!(pair.sides[P].events, [disconnected(passive)]);
    pair.pass(Duration::from_secs(1));
    pair.assert_nothing_left();
}

// tests [CM-42]: nobody answers
#[test]
fn a_dead_peer_does_not_keep_a_connection_for_ever() {
    for (by, period) in [(A, 4608), (P, 4096)] {
        let (mut pair, active, passive) = Pair::connected(config());
        pair.delivery = Box::new(|_| 0);
        let start = ms(pair.now.saturating_since(Instant::from_nanos(0)));
        let id = [active, passive][by];
        pair.disconnect(by, id);
        pair.pass(Duration::from_millis(16 * period - 1));
        assert!(pair.sides[by].events.is_empty());
        pair.pass(Duration::from_millis(1));
        assert_eq!(pair.sides[by].events, [disconnected(id)]);
        let times: Vec<u64> = pair.log.iter().map(|sent| ms(sent.at) - start).collect();
        assert_eq!(times, (0..16).map(|n| n * period).collect::<Vec<_>>());
        assert!(pair.log.iter().all(|sent| sent.bytes == pair.log[0].bytes), "[GSI-6]");
        pair.pass(Duration::from_millis(512));
        pair.sides[by].manager.assert_empty();
        assert_eq!(pair.counters[by].cm_resent, 15);
        assert_eq!(pair.counters[by].cm_timeouts, 1);
    }
}

// tests [CM-44] [CM-53]
#[test]
fn unknown_connections_are_confirmed_as_gone() {
    let (mut pair, _, passive) = Pair::connected(config());
    let former: Vec<FormerConnection> = pair.sides[A].manager.former_connections().collect();
    let [former] = former[..] else { panic!("one connection") };
    let (from, stranger) = (pair.sides[A].ip, IpAddr::from([192, 0, 2, 50]));
    let ids = Ids { local: former.local_id, remote: former.remote_id };
    let dreq = |ids, remote_qpn| CmMessage::Dreq(Dreq { ids, remote_qpn });

    pair.inject(P, stranger, 77, dreq(Ids { local: 5, remote: 6 }, 7));
    assert_eq!(pair.last(P).mad.message, CmMessage::Drep(Ids { local: 6, remote: 5 }));
    assert_eq!((pair.last(P).mad.transaction, pair.last(P).to), (77, stranger));
    let count = pair.log.len();
    pair.inject(P, from, 77, dreq(ids, former.remote_qpn ^ 1));
    pair.inject(P, stranger, 77, dreq(ids, former.remote_qpn));
    assert_eq!(pair.log.len(), count, "neither confirmed nor obeyed");
    assert!(pair.sides[P].events.is_empty());

    // The active side's process dies; its next life ends what it remembers.
    pair.sides[A].manager = manager(config(), 0xcc);
    pair.sides[A].manager.end_former_connection(&former);
    pair.settle();
    assert_eq!(pair.sides[P].events, [disconnected(passive)]);
    assert!(pair.sides[A].events.is_empty());
    pair.sides[A].manager.assert_empty();
}

// tests [CM-54] [CM-44]: what is repeated after the end is a new request
#[test]
fn a_request_that_comes_again_after_the_end_is_new() {
    let (mut pair, active, passive) = Pair::connected(config());
    pair.disconnect(A, active);
    let _ = passive;
    pair.clear();
    let from = pair.sides[A].ip;
    for wait in [0, 600] {
        pair.pass(Duration::from_millis(wait));
        let events = pair.sides[P].events.len();
        let local = SocketAddr::new(from, 9);
        let remote = SocketAddr::new(pair.sides[P].ip, PORT);
        let other = &mut pair.sides[A].manager;
        other.connect(pair.now, local, remote, &param(Qpn(0x333 + wait as u32))).unwrap();
        pair.settle();
        let (transaction, req) = pair.req();
        let (first, _) = pair.request();
        pair.sides[P].manager.reject(pair.now, first, &[]).unwrap();
        pair.settle();
        pair.inject(P, from, transaction, CmMessage::Req(req));
        let (second, _) = pair.request();
        assert_ne!(first, second);
        pair.sides[P].manager.destroy_id(pair.now, second).unwrap();
        pair.settle();
        assert_eq!(pair.sides[P].events.len(), events);
    }
}

// tests [CM-44]: time-wait has forgotten the peer's names, so they are no duplicate and not stale
#[test]
fn a_peer_in_a_hurry_uses_its_names_again() {
    let (mut pair, _) = Pair::listening(config());
    let (active, _) = pair.handshake(QP_A, QP_P);
    let (transaction, req) = pair.req();
    let from = pair.sides[A].ip;
    pair.disconnect(A, active);
    pair.clear();
    pair.inject(P, from, transaction, CmMessage::Req(req));
    let (again, _) = pair.request();
    pair.sides[P].manager.reject(pair.now, again, &[]).unwrap();
    pair.settle();
    let req = Req { local_id: req.local_id ^ 1, ..req };
    pair.inject(P, from, transaction, CmMessage::Req(req));
    pair.request();
    assert_eq!(pair.names(P), ["REJ"]);
}

// tests the row "ESTABLISHED, REJ" of 9.3
#[test]
fn a_refusal_of_what_stands_ends_it() {
    let (mut pair, active, passive) = Pair::connected(config());
    let former: Vec<FormerConnection> = pair.sides[P].manager.former_connections().collect();
    let rej = Rej {
        local_id: former[0].local_id,
        remote_id: former[0].remote_id,
        answered: bowline_wire::roce::cm::Answered::OTHER,
        reason: 3,
        info_len: 0,
        info: [0; 72],
        private_data: [1; 148],
    };
    let from = pair.sides[P].ip;
    pair.inject(A, from, 1, CmMessage::Rej(Rej { local_id: 0, ..rej }));
    assert!(pair.sides[A].events.is_empty(), "both names are needed");
    pair.inject(A, from, 1, CmMessage::Rej(rej));
    let private_data = vec![1; 148];
    let event = CmEvent::Rejected { id: active, reason: RejectReason(3), private_data };
    assert_eq!(pair.sides[A].events, [event]);
    assert_eq!(pair.states(A), [QpState::Err]);
    assert!(pair.sides[A].manager.reserves(QP_A));
    let _ = passive;
}

#[test]
fn destroyed_names_are_silent_in_every_state() {
    // Undecided request.
    let (mut pair, listener) = Pair::listening(config());
    pair.connect(&param(QP_A));
    pair.sides[P].events.clear();
    pair.sides[P].manager.destroy_id(pair.now, listener).unwrap();
    pair.settle();
    assert_eq!(pair.last_rej(P).reason, 28);
    assert!(pair.sides[P].events.is_empty());
    pair.assert_nothing_left();

    // Established, and REP sent.
    for lost in ["", "RTU"] {
        let (mut pair, _) = Pair::listening(config());
        pair.lose(lost);
        let (active, passive) = pair.accepted(QP_A, QP_P);
        pair.clear();
        pair.sides[P].manager.destroy_id(pair.now, passive).unwrap();
        pair.settle();
        assert_eq!(pair.names(P), ["DREQ"]);
        assert_eq!(pair.states(P), [QpState::Err]);
        pair.pass(Duration::from_secs(1));
        assert!(pair.sides[P].events.is_empty());
        let over = [disconnected(active), CmEvent::TimewaitExit { id: active }];
        assert_eq!(pair.sides[A].events, over);
        pair.assert_nothing_left();
    }
}

#[test]
fn a_thousand_connections_leave_nothing() {
    let (mut pair, listener) = Pair::listening(CmConfig::default());
    for round in 0..1000u32 {
        let (active, passive) = pair.handshake(Qpn(1000 + round), Qpn(5000 + round));
        let (by, id) = if round % 2 == 0 { (A, active) } else { (P, passive) };
        pair.disconnect(by, id);
        pair.clear();
        pair.pass(Duration::from_millis(10));
    }
    pair.pass(Duration::from_secs(1));
    assert!(pair.sides.iter().all(|side| side.manager.poll_timeout().is_none()));
    pair.assert_nothing_left();
    pair.sides[P].manager.destroy_id(pair.now, listener).unwrap();
}
