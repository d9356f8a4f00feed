//! Connecting, accepting, refusing.

use bowline_verbs::{Access, Error, InvalidReason, Object, RequestPart, Resource};
use bowline_wire::roce::cm::{Answered, Ids, VENDOR_BOWLINE, VENDOR_BOWLINE_REP};
use bowline_wire::roce::{CmaHeader, flow_label};

use super::*;

// tests [CM-30] [CM-31] [CM-33] [CM-35] [CM-39] [CM-55] [CMA-11] [CMA-8] [CMA-9] [CMA-10] [CMA-12]
// [CMA-14] [CMA-16] [GSI-4]
#[test]
fn numbers_go_where_they_belong() {
    let (mut pair, listener) = Pair::listening(config());
    let ours = ConnParam {
        qpn: QP_A,
        is_led: false,
        private_data: vec![7; 56],
        responder_resources: 4,
        initiator_depth: 9,
        retry_count: 5,
        rnr_retry_count: 3,
        min_rnr_timer: 14,
        tos: 32,
        ack_timeout: Some(21),
    };
    let active = pair.connect(&ours);
    let (passive, request) = pair.request();
    assert_eq!(request.listener, listener);
    assert_eq!(request.private_data, [7; 56]);
    assert_eq!((request.responder_resources, request.initiator_depth), (4, 9));
    assert_eq!(request.remote_qpn, QP_A);
    assert_eq!(request.local, SocketAddr::new(pair.sides[P].ip, PORT));
    assert_eq!(pair.states(A), [QpState::Init]);
    assert!(pair.sides[P].steps.is_empty());

    let theirs = ConnParam {
        qpn: QP_P,
        is_led: false,
        private_data: vec![9; 196],
        responder_resources: 6,
        initiator_depth: 6,
        retry_count: 1,
        rnr_retry_count: 6,
        min_rnr_timer: 2,
        tos: 0,
        ack_timeout: None,
    };
    pair.accept(passive, &theirs);
    assert_eq!(pair.names(A), ["REQ", "RTU"]);
    assert_eq!(pair.names(P), ["REP"]);
    let (transaction, req) = pair.req();
    let (repeated, rep) = pair.rep();
    assert_eq!(transaction, repeated);
    assert_eq!(pair.last(A).mad.transaction, transaction);
    assert_ne!(req.local_id, 0);
    assert_eq!((req.local_gid, req.remote_gid), (pair.sides[A].ip.into(), pair.sides[P].ip.into()));
    assert_ne!(req.starting_psn, rep.starting_psn);
    assert_eq!((req.remote_timeout, req.local_timeout, req.max_retries), (20, 20, 15));
    assert_eq!((req.ack_timeout, req.pkey, req.traffic_class), (17, 0xffff, 32));
    let label = flow_label(request.remote.port(), PORT);
    assert_eq!(req.flow_label, label);
    assert_eq!((rep.ack_delay, rep.local_id != 0), (15, true));
    // What the passive side was offered bounds what it takes [CM-32].
    assert_eq!((rep.initiator_depth, rep.responder_resources), (4, 6));

    assert_eq!(pair.states(P), [QpState::Init, QpState::Rtr, QpState::Rts]);
    assert!(pair.sides[P].steps.iter().all(|(_, _, sent)| *sent == 0), "before the REP");
    assert_eq!(pair.states(A), [QpState::Init, QpState::Rtr, QpState::Rts]);
    assert!(pair.sides[A].steps.iter().all(|(_, _, sent)| *sent <= 1), "before the RTU");

    let all = Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::FLUSH_GLOBAL
        | Access::FLUSH_PERSISTENT;
    assert_eq!(pair.step(A, QpState::Init).access, Some(all));
    let (rtr, rts) = (pair.step(A, QpState::Rtr), pair.step(A, QpState::Rts));
    let av = rtr.av.unwrap();
    assert_eq!((av.local, av.remote), (pair.sides[A].ip, pair.sides[P].ip));
    assert_eq!((av.flow_label, av.tos), (label, 32));
    assert_eq!((rtr.dest_qpn, rtr.path_mtu), (Some(QP_P), Some(Mtu::M1024)));
    assert_eq!((rtr.rq_psn, rts.sq_psn), (Some(req.starting_psn), Some(rep.starting_psn)));
    assert_eq!((rtr.max_dest_rd_atomic, rts.max_rd_atomic), (Some(4), Some(6)));
    assert_eq!((rts.retry_cnt, rts.rnr_retry, rts.timeout), (Some(5), Some(6), Some(21)), "chosen");
    assert_eq!(rtr.min_rnr_timer, Some(14));

    let (rtr, rts) = (pair.step(P, QpState::Rtr), pair.step(P, QpState::Rts));
    let av = rtr.av.unwrap();
    assert_eq!((av.local, av.remote), (pair.sides[P].ip, pair.sides[A].ip));
    assert_eq!((av.flow_label, av.tos), (label, 32));
    assert_eq!((rtr.dest_qpn, rtr.path_mtu), (Some(QP_A), Some(Mtu::M1024)));
    assert_eq!((rtr.rq_psn, rts.sq_psn), (Some(rep.starting_psn), Some(req.starting_psn)));
    assert_eq!((rtr.max_dest_rd_atomic, rts.max_rd_atomic), (Some(6), Some(4)));
    assert_eq!((rts.retry_cnt, rts.rnr_retry, rts.timeout), (Some(5), Some(3), Some(17)));
    assert_eq!(rtr.min_rnr_timer, Some(2));

    let established = |id, private_data: &[u8], responder_resources, initiator_depth| {
        let private_data = private_data.to_vec();
        CmEvent::Established { id, private_data, responder_resources, initiator_depth }
    };
    assert_eq!(pair.sides[A].events, [established(active, &[9; 196], 4, 6)]);
    assert_eq!(pair.sides[P].events, [established(passive, &[], 6, 4)]);
    assert_eq!(pair.sides[A].manager.poll_timeout(), None);
    assert_eq!(pair.sides[P].manager.poll_timeout(), None);
    assert!(pair.sides[A].manager.holds(QP_A) && pair.sides[P].manager.holds(QP_P));
}

/// tests [CC-12]
#[test]
fn bowlines_agree_on_reports_of_gaps_and_kernels_do_not() {
    let (mut pair, _) = Pair::listening(config());
    pair.handshake(QP_A, QP_P);
    assert_eq!((pair.req().1.vendor, pair.rep().1.vendor), (VENDOR_BOWLINE, VENDOR_BOWLINE_REP));
    assert!(pair.sides.iter().all(|side| side.gap_reports));

    // A kernel returns the vendor ID of the REQ or has none.
    for vendor in [VENDOR_BOWLINE, 0] {
        let (mut pair, _) = Pair::listening(config());
        pair.lose("REP");
        pair.accepted(QP_A, QP_P);
        let (transaction, rep) = pair.rep();
        let from = pair.sides[P].ip;
        pair.inject(A, from, transaction, CmMessage::Rep(Rep { vendor, ..rep }));
        assert_eq!(pair.states(A), [QpState::Init, QpState::Rtr, QpState::Rts]);
        assert!(!pair.sides[A].gap_reports, "with vendor {vendor:x}");
    }

    // Nor has it one as the active side.
    let (mut pair, _) = Pair::listening(config());
    pair.lose("REQ");
    pair.connect(&param(QP_A));
    let (transaction, req) = pair.req();
    let from = pair.sides[A].ip;
    pair.inject(P, from, transaction, CmMessage::Req(Req { vendor: 0, ..req }));
    let (passive, _) = pair.request();
    pair.accept(passive, &param(QP_P));
    assert_eq!(pair.rep().1.vendor, 0);
    assert!(pair.sides.iter().all(|side| !side.gap_reports));
}

// tests [CM-32] [CMA-12]
#[test]
fn depths_are_agreed_in_every_combination() {
    for (offer_r, offer_i, take_r, take_i) in
        [(0, 0, 16, 16), (16, 0, 16, 16), (1, 2, 0, 0), (255, 255, 255, 255), (3, 200, 5, 1)]
    {
        let (mut pair, _) = Pair::listening(config());
        let param = |qpn, responder_resources, initiator_depth| ConnParam {
            qpn,
            responder_resources,
            initiator_depth,
            ..ConnParam::default()
        };
        pair.connect(&param(QP_A, offer_r, offer_i));
        let (passive, _) = pair.request();
        pair.accept(passive, &param(QP_P, take_r, take_i));
        let depths = |side| {
            let (rtr, rts) = (pair.step(side, QpState::Rtr), pair.step(side, QpState::Rts));
            (rtr.max_dest_rd_atomic.unwrap(), rts.max_rd_atomic.unwrap())
        };
        let ((a_answers, a_asks), (p_answers, p_asks)) = (depths(A), depths(P));
        assert_eq!((a_answers, a_asks), (p_asks, p_answers), "both agree");
        assert!(a_answers <= offer_r.min(128) && a_asks <= offer_i.min(128));
        assert!(p_answers <= take_r.min(128) && p_asks <= take_i.min(128));
        let readable = pair.step(P, QpState::Init).access.unwrap().contains(Access::REMOTE_READ);
        assert_eq!(readable, p_answers > 0);
    }
}

// tests [CMA-5] [CMA-13]
#[test]
fn private_data_has_its_limits() {
    let (mut pair, _) = Pair::listening(config());
    let local = SocketAddr::new(pair.sides[A].ip, 0);
    let remote = SocketAddr::new(pair.sides[P].ip, PORT);
    let too_long =
        |part, limit| Error::Invalid(InvalidReason::TooLong { part, limit, given: limit + 1 });
    let long = ConnParam { private_data: vec![0; 57], ..param(QP_A) };
    let refused = pair.sides[A].manager.connect(pair.now, local, remote, &long);
    assert_eq!(refused, Err(too_long(RequestPart::ConnectData, 56)));
    pair.sides[A].manager.assert_empty();

    let active = pair.connect(&param(QP_A));
    let (passive, request) = pair.request();
    assert_eq!(request.private_data, [0; 56], "always 56 bytes");
    let manager = &mut pair.sides[P].manager;
    let long = ConnParam { private_data: vec![0; 197], ..param(QP_P) };
    let refused = manager.accept(passive, &long);
    assert_eq!(refused, Err(too_long(RequestPart::AcceptData, 196)));
    let refused = manager.reject(NOW, passive, &[0; 149]);
    assert_eq!(refused, Err(too_long(RequestPart::RejectData, 148)));
    manager.reject(NOW, passive, &[3; 148]).unwrap();
    pair.settle();
    let private_data = vec![3; 148];
    let event = CmEvent::Rejected { id: active, reason: RejectReason::CONSUMER, private_data };
    assert_eq!(pair.sides[A].events, [event]);
    assert_eq!(pair.last_rej(P).answered, Answered::REQ);
    assert_eq!(pair.states(A), [QpState::Init, QpState::Err]);
    pair.assert_nothing_left();
    // The names are over, and that is no error.
    pair.sides[P].manager.destroy_id(pair.now, passive).unwrap();
    pair.sides[A].manager.destroy_id(pair.now, active).unwrap();
    pair.sides[A].manager.disconnect(pair.now, active).unwrap();
    let never = pair.sides[A].manager.destroy_id(pair.now, CmId(77));
    assert_eq!(never, Err(Error::NoSuch(Object::CmId)));
}

// tests [CM-10] [CM-36] [GSI-5] and section 12: REQ to a port without listener
#[test]
fn nobody_listens() {
    let mut pair = Pair::new(config());
    let active = pair.connect(&param(QP_A));
    let rej = pair.last_rej(P);
    assert_eq!((rej.local_id, rej.reason, rej.answered), (0, 8, Answered::REQ));
    assert_eq!(pair.last(P).to, pair.sides[A].ip);
    assert_eq!(pair.last(P).mad.transaction, pair.req().0);
    let private_data = vec![0; 148];
    let reason = RejectReason::INVALID_SERVICE_ID;
    assert_eq!(pair.sides[A].events, [CmEvent::Rejected { id: active, reason, private_data }]);
    pair.assert_nothing_left();
}

// tests [CM-58]
#[test]
fn a_request_waits_for_its_listener_if_it_may() {
    let patience = Duration::from_millis(500);
    let may = CmConfig { listener_patience: patience, ..config() };
    let mut pair = Pair::new(may.clone());
    pair.connect(&param(QP_A));
    pair.pass(Duration::from_millis(90));
    assert_eq!(pair.names(A), ["REQ"; 5], "one in 20 ms");
    assert!(pair.sides[A].events.is_empty());
    pair.sides[P].manager.listen(([0, 0, 0, 0], PORT).into()).unwrap();
    pair.pass(Duration::from_millis(20));
    let (passive, _) = pair.request();
    pair.accept(passive, &param(QP_P));
    let established = |event: &CmEvent| matches!(event, CmEvent::Established { .. });
    assert!(pair.sides.iter().all(|side| side.events.iter().any(established)));

    // A program that does not answer is waited for as ever.
    let mut pair = Pair::new(may.clone());
    pair.connect(&param(QP_A));
    pair.sides[P].manager.listen(([0, 0, 0, 0], PORT).into()).unwrap();
    pair.pass(Duration::from_millis(4700));
    assert_eq!(pair.names(A), ["REQ"; 3], "another one after 4608 ms");

    let mut pair = Pair::new(may);
    let active = pair.connect(&param(QP_A));
    pair.pass(patience - Duration::from_millis(1));
    assert!(pair.sides[A].events.is_empty());
    pair.pass(Duration::from_millis(1));
    let (reason, private_data) = (RejectReason::INVALID_SERVICE_ID, vec![0; 148]);
    assert_eq!(pair.sides[A].events, [CmEvent::Rejected { id: active, reason, private_data }]);
    pair.assert_nothing_left();
}

// tests [CMA-6] [CMA-7] [CMA-18] [HDR-9] [CM-11]
#[test]
fn a_bad_request_is_refused_with_its_reason() {
    let (mut pair, _) = Pair::listening(config());
    let active = pair.connect(&param(QP_A));
    let (passive, _) = pair.request();
    pair.sides[P].manager.reject(pair.now, passive, &[]).unwrap();
    pair.settle();
    assert!(matches!(pair.sides[A].events[0], CmEvent::Rejected { id, .. } if id == active));
    let (transaction, good) = pair.req();
    let (from, own) = (pair.sides[A].ip, pair.sides[P].ip);
    let other: IpAddr = "192.0.2.9".parse().unwrap();
    let header = CmaHeader::parse(good.private_data.first_chunk().unwrap()).unwrap();
    let with_header = |header: CmaHeader| {
        let mut req = good;
        req.private_data[..36].copy_from_slice(&header.emit());
        req
    };
    let with_byte = |at: usize, byte: u8| {
        let mut req = good;
        req.private_data[at] = byte;
        req
    };
    let cases = [
        (Req { transport: 1, ..good }, 9),
        (Req { transport: 3, ..good }, 9),
        (Req { qpn: 0, ..good }, 1),
        (Req { qpn: 1, ..good }, 1),
        (Req { service_id: good.service_id + 1, ..good }, 8),
        (Req { service_id: good.service_id | 1 << 32, ..good }, 8),
        (Req { mtu: 4, ..good }, 26),
        (Req { mtu: 0, ..good }, 26),
        (Req { mtu: 6, ..good }, 26),
        (with_byte(0, 1), 28),
        (with_byte(1, 0x50), 28),
        (Req { local_gid: other.into(), ..good }, 12),
        (Req { remote_gid: other.into(), ..good }, 12),
        (with_header(CmaHeader { source: other, ..header }), 12),
        (with_header(CmaHeader { destination: other, ..header }), 12),
    ];
    for (req, reason) in cases {
        pair.inject(P, from, transaction, CmMessage::Req(req));
        let rej = pair.last_rej(P);
        assert_eq!((rej.reason, rej.local_id, rej.remote_id), (reason, 0, req.local_id), "{req:?}");
        if reason == 12 {
            assert_eq!(rej.info(), bowline_wire::roce::Gid::from(own).0);
        }
        pair.sides[P].manager.assert_empty();
    }
    for mtu in 1..=3 {
        let local_id = good.local_id + u32::from(mtu);
        let req = Req { mtu, local_id, qpn: 900 + u32::from(mtu), ..good };
        pair.inject(P, from, transaction, CmMessage::Req(req));
        let (id, _) = pair.request();
        pair.accept(id, &param(Qpn(500 + u32::from(mtu))));
        let step = pair.sides[P].steps.iter().rev().find_map(|(_, step, _)| step.path_mtu);
        assert_eq!(step, Mtu::from_code(mtu), "used as it is [HDR-9]");
    }
    let count = pair.log.len();
    pair.inject(P, from, transaction, CmMessage::Req(Req { local_id: 0, ..good }));
    assert_eq!(pair.log.len(), count, "no name, no answer");
}

// tests [CMA-15]
#[test]
fn the_listener_of_the_address_comes_first() {
    let mut pair = Pair::new(config());
    let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), PORT);
    let manager = &mut pair.sides[P].manager;
    let elsewhere = manager.listen(at("192.0.2.77")).unwrap();
    pair.connect(&param(QP_A));
    assert_eq!(pair.last_rej(P).reason, 28, "another address listens");

    let manager = &mut pair.sides[P].manager;
    let any6 = manager.listen(at("::")).unwrap();
    assert!(matches!(manager.listen(at("::")), Err(Error::AddrInUse(_))));
    let listener = |pair: &mut Pair| {
        pair.connect(&param(QP_A));
        let (id, request) = pair.request();
        pair.sides[P].manager.reject(pair.now, id, &[]).unwrap();
        pair.settle();
        request.listener
    };
    assert_eq!(listener(&mut pair), any6);
    let manager = &mut pair.sides[P].manager;
    let any4 = manager.listen(at("0.0.0.0")).unwrap();
    let own = manager.listen(at("192.0.2.2")).unwrap();
    assert_eq!(listener(&mut pair), own);
    pair.sides[P].manager.destroy_id(pair.now, own).unwrap();
    assert_eq!(listener(&mut pair), any4);
    let manager = &mut pair.sides[P].manager;
    for id in [any4, any6, elsewhere] {
        manager.destroy_id(pair.now, id).unwrap();
    }
    pair.connect(&param(QP_A));
    assert_eq!(pair.last_rej(P).reason, 8);
    let some = pair.sides[P].manager.listen(SocketAddr::new(pair.sides[P].ip, 0)).unwrap();
    assert_ne!(pair.sides[P].manager.local_addr(some).unwrap().port(), 0);
}

// tests [CM-50]
#[test]
fn the_first_data_stands_for_the_rtu() {
    let (mut pair, _) = Pair::listening(config());
    pair.lose("RTU");
    let (_, passive) = pair.accepted(QP_A, QP_P);
    let manager = &mut pair.sides[P].manager;
    assert!(manager.awaits_data());
    manager.data_arrived(Qpn(5));
    assert!(manager.poll_output().is_none());
    manager.data_arrived(QP_P);
    assert!(!manager.awaits_data());
    pair.settle();
    assert!(matches!(pair.sides[P].events[0], CmEvent::Established { id, .. } if id == passive));
    assert_eq!(pair.sides[P].manager.poll_timeout(), None, "the REP rests");
}

// tests [CM-44] [CM-43] and section 12: duplicate REQ while the listener is busy
#[test]
fn a_busy_program_is_excused_once_the_peer_asks_again() {
    let (mut pair, _) = Pair::listening(config());
    pair.connect(&param(QP_A));
    let (passive, _) = pair.request();
    assert!(pair.names(P).is_empty());
    let ((transaction, req), from) = (pair.req(), pair.sides[A].ip);
    pair.inject(P, from, transaction, CmMessage::Req(req));
    assert!(pair.names(P).is_empty(), "too early to make the peer wait");
    pair.pass(Duration::from_millis(4608));
    let CmMessage::Mra(mra) = pair.last(P).mad.message else { panic!("an MRA") };
    assert_eq!((mra.answered, mra.service_timeout), (Answered::REQ, 24));
    assert_eq!((mra.remote_id, mra.local_id != 0), (pair.req().1.local_id, true));
    // The wait is now 65536 + 512 ms.
    pair.pass(Duration::from_millis(66_047));
    assert_eq!(pair.names(A), ["REQ"; 2]);
    pair.pass(Duration::from_millis(1));
    assert_eq!(pair.names(A), ["REQ"; 3]);
    assert_eq!(pair.names(P), ["MRA"; 2]);
    // The second does not count any more.
    pair.pass(Duration::from_millis(4608));
    assert_eq!(pair.names(A), ["REQ"; 4]);
    pair.accept(passive, &param(QP_P));
    assert!(matches!(pair.sides[A].events[0], CmEvent::Established { .. }));
    assert!(pair.sides[P].events.len() == 1, "one request was seen: {:?}", pair.sides[P].events);
}

// tests the rows "QP set-up fails" of 9.3, and [CM-45] [CM-56] [QP-6]
#[test]
fn queue_pairs_that_cannot_be_made_ready() {
    let (mut pair, _) = Pair::listening(config());
    let active = pair.connect(&param(QP_A));
    let (passive, _) = pair.request();
    pair.sides[P].broken = true;
    pair.accept(passive, &param(QP_P));
    assert!(pair.names(P).is_empty(), "no REP");
    assert_eq!(pair.states(P).last(), Some(&QpState::Err), "not left half-way");
    assert!(!pair.sides[P].manager.reserves(QP_P), "the peer has never heard of it");
    pair.sides[P].broken = false;
    pair.sides[A].broken = true;
    pair.accept(passive, &param(QP_P));
    let rej = pair.last_rej(A);
    assert_eq!((rej.reason, rej.answered), (28, Answered::REP));
    assert_eq!(pair.sides[A].events, [rejected(active, RejectReason::CONSUMER)]);
    let [CmEvent::Rejected { id, reason, .. }] = &pair.sides[P].events[..] else {
        panic!("{:?}", pair.sides[P].events)
    };
    assert_eq!((*id, *reason), (passive, RejectReason::CONSUMER));
    // Both have told their queue pairs to the other.
    pair.pass(Duration::from_millis(511));
    for (side, qp) in [(A, QP_A), (P, QP_P)] {
        assert_eq!(pair.states(side).last(), Some(&QpState::Err));
        let manager = &pair.sides[side].manager;
        assert!(!manager.holds(qp) && manager.reserves(qp));
    }
    pair.pass(Duration::from_millis(1));
    for (side, id) in [(A, active), (P, passive)] {
        assert_eq!(pair.sides[side].events[1..], [CmEvent::TimewaitExit { id }]);
    }
    pair.assert_nothing_left();
}

// tests [CM-37] [CM-53] [CM-56]: stale connections
#[test]
fn a_queue_pair_that_comes_again_ends_its_old_connection() {
    let (mut pair, active, passive) = Pair::connected(config());
    let (from, stranger) = (pair.sides[A].ip, IpAddr::from([192, 0, 2, 50]));
    // The active side restarts with the same GUID and queue pair.
    pair.sides[A].manager = manager(config(), 0xa);
    pair.sides[A].manager.rng = Rng::new(&[0x5a; 32]);
    let again = pair.connect(&param(QP_A));
    assert_eq!(pair.names(P), ["DREQ", "REJ"]);
    assert_eq!(pair.last_rej(P).reason, 10);
    let [CmEvent::Rejected { id, reason, .. }] = &pair.sides[A].events[..] else { panic!("a REJ") };
    assert_eq!((*id, *reason), (again, RejectReason::STALE_CONNECTION));
    // The new life answers the DREQ although it knows nothing of it.
    assert_eq!(pair.names(A), ["REQ", "DREP"]);
    assert_eq!(pair.sides[P].events, [disconnected(passive)]);
    assert!(pair.sides[A].manager.reserves(QP_A), "time-wait after a stale connection");
    let _ = active;
    pair.pass(Duration::from_millis(512));
    pair.assert_nothing_left();

    // What would be refused anyway ends nothing, and neither does a stranger.
    pair.clear();
    pair.handshake(QP_A, QP_P);
    let (transaction, req) = pair.req();
    pair.clear();
    let req = Req { local_id: req.local_id ^ 1, ..req };
    let mut without_header = req;
    without_header.private_data[0] = 1;
    for (from, req, reason) in [
        (stranger, req, 12),
        (from, Req { service_id: req.service_id + 1, ..req }, 8),
        (from, Req { mtu: 0, ..req }, 26),
        (from, Req { local_gid: stranger.into(), ..req }, 12),
        (from, without_header, 28),
    ] {
        pair.inject(P, from, transaction, CmMessage::Req(req));
        assert_eq!(pair.last_rej(P).reason, reason);
        assert!(pair.sides[P].events.is_empty());
    }
    assert_eq!(pair.names(P), ["REJ"; 5]);
    pair.inject(P, from, transaction, CmMessage::Req(req));
    assert_eq!(pair.names(P)[5..], ["DREQ", "REJ"]);
    assert_eq!(pair.last_rej(P).reason, 10);
}

// tests [CM-36] [CM-52]: names decide
#[test]
fn a_rep_for_another_connection_changes_nothing() {
    let (mut pair, _) = Pair::listening(config());
    pair.lose("REP");
    pair.accepted(QP_A, QP_P);
    let (transaction, rep) = pair.rep();
    let from = pair.sides[P].ip;
    let stranger = IpAddr::from([192, 0, 2, 50]);
    let names = Ids { local: rep.local_id, remote: rep.remote_id };
    for (from, message) in [
        (from, CmMessage::Rep(Rep { remote_id: rep.remote_id ^ 1, ..rep })),
        (from, CmMessage::Rep(Rep { local_id: 0, ..rep })),
        (from, CmMessage::Rep(Rep { qpn: 0, ..rep })),
        (stranger, CmMessage::Rep(rep)),
        (from, CmMessage::Rtu(names)),
        (from, CmMessage::Drep(names)),
    ] {
        pair.inject(A, from, transaction, message);
        assert!(pair.sides[A].events.is_empty(), "{message:?}");
    }
    assert_eq!(pair.counters[A].cm_ignored, 6);
    pair.inject(A, from, transaction, CmMessage::Rep(rep));
    assert!(matches!(pair.sides[A].events[0], CmEvent::Established { .. }));
    // A REP of another name after that is not answered.
    let count = pair.log.len();
    pair.inject(A, from, transaction, CmMessage::Rep(Rep { local_id: 5, ..rep }));
    assert_eq!(pair.log.len(), count);
}

// tests [CM-36] [CM-40] [CM-11]: REJ 4 finds the request by GUID and name
#[test]
fn giving_up_tells_the_peer() {
    let (mut pair, _) = Pair::listening(config());
    let active = pair.connect(&param(QP_A));
    let (passive, _) = pair.request();
    pair.sides[A].manager.destroy_id(pair.now, active).unwrap();
    pair.settle();
    let rej = pair.last_rej(A);
    assert_eq!((rej.reason, rej.remote_id), (4, 0));
    assert_eq!(rej.info(), 0xau64.to_be_bytes());
    let [CmEvent::Rejected { id, reason, .. }] = &pair.sides[P].events[..] else { panic!("gone") };
    assert_eq!((*id, *reason), (passive, RejectReason::TIMEOUT));
    assert!(pair.sides[A].events.is_empty(), "its name was destroyed");
    pair.assert_nothing_left();
    assert_eq!(
        pair.sides[P].manager.accept(passive, &param(QP_P)),
        Err(Error::NoSuch(Object::Connection))
    );
}

// tests [CM-36]: a request nobody has answered is withdrawn, whatever the reason
#[test]
fn a_request_is_withdrawn() {
    for reason in [4, 10, 28] {
        let (mut pair, _) = Pair::listening(config());
        pair.connect(&param(QP_A));
        let (passive, _) = pair.request();
        let own = pair.sides[P].manager.conns[&passive].ids();
        let from = pair.sides[A].ip;
        let rej = Rej {
            local_id: own.remote,
            remote_id: own.local,
            answered: Answered::OTHER,
            reason,
            info_len: 0,
            info: [0; 72],
            private_data: [0; 148],
        };
        pair.inject(P, from, 1, CmMessage::Rej(rej));
        assert!(matches!(pair.sides[P].events[..], [CmEvent::Rejected { .. }]));
        pair.sides[P].manager.assert_empty();
    }
}

// tests the limits of the interface
#[test]
fn what_cannot_be_connected() {
    let (mut pair, listener) = Pair::listening(CmConfig { max_connections: 1, ..config() });
    let now = pair.now;
    let (v4, v6): (SocketAddr, SocketAddr) =
        ("192.0.2.1:0".parse().unwrap(), "[2001:db8::1]:7".parse().unwrap());
    let remote = SocketAddr::new(pair.sides[P].ip, PORT);
    let manager = &mut pair.sides[A].manager;
    let mut connect = |remote, qpn| manager.connect(now, v4, remote, &param(qpn)).unwrap_err();
    assert_eq!(connect(v6, QP_A), Error::Invalid(InvalidReason::AddrFamilies));
    for nowhere in ["192.0.2.2:0", "224.0.0.1:7"] {
        let refused = connect(nowhere.parse().unwrap(), QP_A);
        assert_eq!(refused, Error::Invalid(InvalidReason::RemoteAddr), "{nowhere}");
    }
    assert_eq!(connect(remote, Qpn(0)), Error::NoSuch(Object::QueuePair));
    assert_eq!(connect(remote, Qpn(1 << 24)), Error::NoSuch(Object::QueuePair));
    let active = pair.connect(&param(QP_A));
    let manager = &mut pair.sides[A].manager;
    let mut connect = |qpn| manager.connect(now, v4, remote, &param(qpn)).unwrap_err();
    assert_eq!(connect(QP_A), Error::Busy(Object::QueuePair));
    assert_eq!(connect(QP_P), Error::Limit(Resource::Connections));
    let early = Err(Error::Invalid(InvalidReason::NotEstablished));
    assert_eq!(manager.disconnect(now, active), early);
    let own = Err(Error::Invalid(InvalidReason::NotARequest));
    assert_eq!(manager.accept(active, &param(QP_P)), own);
    assert_eq!(manager.reject(NOW, active, &[]), own);
    let manager = &mut pair.sides[P].manager;
    assert_eq!(manager.disconnect(now, listener), Err(Error::NoSuch(Object::Connection)));
}
