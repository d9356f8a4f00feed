//! Lookups of datagram services.

use bowline_verbs::{Error, InvalidReason, Object};
use bowline_wire::roce::cm::{SidrRep, SidrReq, SidrStatus};
use bowline_wire::roce::{CmaHeader, datagram_service_id};

use super::*;

const QKEY: u32 = 0x0123_4567;

/// A pair with a service on the passive side.
fn serving(config: CmConfig) -> (Pair, CmId) {
    let mut pair = Pair::new(config);
    let any: SocketAddr = ([0, 0, 0, 0], PORT).into();
    let listener = pair.sides[P].manager.listen_datagrams(any).unwrap();
    (pair, listener)
}

fn look_up(pair: &mut Pair, data: &[u8]) -> CmId {
    let local = SocketAddr::new(pair.sides[A].ip, 0);
    let remote = SocketAddr::new(pair.sides[P].ip, PORT);
    let id = pair.sides[A].manager.look_up(pair.now, local, remote, data).unwrap();
    pair.settle();
    id
}

fn answer(pair: &mut Pair, id: CmId, data: &[u8]) {
    pair.sides[P].manager.answer_lookup(pair.now, id, QP_P, QKEY, data).unwrap();
    pair.settle();
}

/// A good question of the active side.
fn question(pair: &Pair, request_id: u32) -> SidrReq {
    let (source, destination) = (pair.sides[A].ip, pair.sides[P].ip);
    let mut private_data = [0; 216];
    let header = CmaHeader { source_port: 5, source, destination };
    private_data[..36].copy_from_slice(&header.emit());
    SidrReq { request_id, pkey: 0xffff, service_id: datagram_service_id(PORT), private_data }
}

fn ask(pair: &mut Pair, transaction: u64, question: SidrReq) {
    let from = pair.sides[A].ip;
    pair.inject(P, from, transaction, CmMessage::SidrReq(question));
    pair.settle();
}

/// The last answer.
fn last_answer(pair: &Pair) -> SidrRep {
    match pair.last(P).mad.message {
        CmMessage::SidrRep(rep) => rep,
        other => panic!("{other:?}"),
    }
}

// tests [CM-60] [CMA-20] [CMA-21] [CMA-22]
#[test]
fn a_service_is_found() {
    let (mut pair, listener) = serving(config());
    // Connections have ports of their own.
    let any: SocketAddr = ([0, 0, 0, 0], PORT).into();
    let other = pair.sides[P].manager.listen(any).unwrap();
    assert_eq!(pair.sides[P].manager.counts(), (2, 0));
    let asking = look_up(&mut pair, &[7; 180]);
    let (asked, request) = pair.request();
    assert_eq!((request.listener, request.remote_qpn), (listener, Qpn(0)));
    assert_eq!(request.private_data, [7; 180]);
    assert_eq!(request.local, SocketAddr::new(pair.sides[P].ip, PORT));
    let local = pair.sides[A].manager.local_addr(asking).unwrap();
    assert_eq!(request.remote, local);
    answer(&mut pair, asked, b"here");
    let mut private_data = vec![0; 136];
    private_data[..4].copy_from_slice(b"here");
    let found = CmEvent::Found { id: asking, private_data, qpn: QP_P, qkey: QKEY };
    assert_eq!(pair.sides[A].events, [found]);
    assert_eq!((pair.names(A), pair.names(P)), (vec!["SIDR_REQ"], vec!["SIDR_REP"]));
    assert!(pair.sides[P].events.is_empty());
    for (side, id) in [(A, asking), (P, asked), (P, other), (P, listener)] {
        pair.sides[side].manager.destroy_id(pair.now, id).unwrap();
    }
    pair.pass(Duration::from_secs(66));
    pair.assert_nothing_left();
    assert_eq!(pair.sides[P].manager.counts(), (0, 0));
}

// tests [CM-61]
/// A question that comes again has the answer again, and the program is asked once.
#[test]
fn answers_that_are_lost_are_sent_again() {
    let (mut pair, _) = serving(CmConfig::default());
    let mut lost = 0;
    pair.delivery = Box::new(move |sent| {
        lost += usize::from(name(&sent.mad) == "SIDR_REP");
        usize::from(name(&sent.mad) != "SIDR_REP" || lost > 3)
    });
    let asking = look_up(&mut pair, &[]);
    let (asked, _) = pair.request();
    // Repetitions before the answer change nothing.
    pair.pass(Duration::from_millis(60));
    assert_eq!(pair.names(A).len(), 2);
    answer(&mut pair, asked, &[]);
    pair.pass(Duration::from_secs(10));
    assert!(matches!(pair.sides[A].events[..], [CmEvent::Found { id, .. }] if id == asking));
    assert_eq!(pair.names(P).len(), 4);
    assert!(pair.sides[P].events.is_empty());
    let answers = pair.log.iter().filter(|sent| sent.by == P).map(|sent| sent.bytes);
    assert!(answers.collect::<Vec<_>>().windows(2).all(|two| two[0] == two[1]));
}

// tests [CM-61]
#[test]
fn a_question_without_answer_is_given_up() {
    let (mut pair, _) = serving(config());
    pair.lose("SIDR_REQ");
    let asking = look_up(&mut pair, &[]);
    pair.pass(Duration::from_millis(16 * 4096 - 1));
    assert!(pair.sides[A].events.is_empty());
    pair.pass(Duration::from_millis(1));
    assert_eq!(pair.sides[A].events, [CmEvent::Unreachable { id: asking }]);
    assert_eq!(pair.names(A).len(), 16);
    assert_eq!((pair.counters[A].cm_resent, pair.counters[A].cm_timeouts), (15, 1));
    pair.assert_nothing_left();
}

// tests [CM-60] [CM-62]
#[test]
fn services_that_are_not_there_are_not_found() {
    let (mut pair, listener) = serving(config());
    let status = |pair: &Pair| last_answer(pair).status;
    let good = question(&pair, 9);
    let other_space = bowline_wire::roce::service_id(PORT);
    for service_id in [datagram_service_id(PORT + 1), other_space] {
        ask(&mut pair, 1, SidrReq { service_id, ..good });
        assert_eq!(status(&pair), SidrStatus::UNSUPPORTED);
    }
    for at in [0, 1, 19, 35] {
        let mut bad = good;
        bad.private_data[at] ^= 0x11;
        ask(&mut pair, 1, bad);
        assert_eq!(status(&pair), SidrStatus::REJECT, "byte {at}");
    }
    assert!(pair.sides[P].events.is_empty());
    // Refused by the program.
    let asking = look_up(&mut pair, &[]);
    let (asked, _) = pair.request();
    pair.sides[P].manager.reject(pair.now, asked, &[3; 136]).unwrap();
    pair.settle();
    let refused = CmEvent::NotFound { id: asking, status: 2, private_data: vec![3; 136] };
    assert_eq!(pair.sides[A].events, [refused]);
    let again = pair.sides[P].manager.reject(pair.now, asked, &[]);
    assert_eq!(again, Err(Error::Invalid(InvalidReason::NotARequest)));
    // By the end of the listener, or of the request.
    for end in [listener, CmId(0)] {
        pair.clear();
        if end == CmId(0) {
            let any: SocketAddr = ([0, 0, 0, 0], PORT).into();
            pair.sides[P].manager.listen_datagrams(any).unwrap();
        }
        look_up(&mut pair, &[]);
        let (asked, _) = pair.request();
        let end = if end == CmId(0) { asked } else { end };
        pair.sides[P].manager.destroy_id(pair.now, end).unwrap();
        pair.settle();
        assert!(matches!(pair.sides[A].events[..], [CmEvent::NotFound { status: 2, .. }]));
    }
}

#[test]
fn what_cannot_be_looked_up_or_answered() {
    let (mut pair, _) = serving(config());
    let now = pair.now;
    let [here, there] = [A, P].map(|side| SocketAddr::new(pair.sides[side].ip, PORT));
    let manager = &mut pair.sides[A].manager;
    let six: SocketAddr = "[2001:db8::1]:7".parse().unwrap();
    let mut wrong = |remote, data: &[u8]| manager.look_up(now, here, remote, data).unwrap_err();
    assert_eq!(wrong(six, &[]), Error::Invalid(InvalidReason::AddrFamilies));
    assert!(matches!(wrong(there, &[0; 181]), Error::Invalid(InvalidReason::TooLong { .. })));
    look_up(&mut pair, &[]);
    let (asked, _) = pair.request();
    let manager = &mut pair.sides[P].manager;
    for qpn in [Qpn(0), Qpn(1), Qpn::MULTICAST] {
        let answered = manager.answer_lookup(now, asked, qpn, QKEY, &[]);
        assert_eq!(answered, Err(Error::NoSuch(Object::QueuePair)));
    }
    assert!(manager.answer_lookup(now, asked, QP_P, QKEY, &[0; 137]).is_err());
    assert!(manager.accept(asked, &param(QP_P)).is_err(), "no connection");
    manager.answer_lookup(now, asked, QP_P, QKEY, &[]).unwrap();
    assert!(manager.answer_lookup(now, asked, QP_P, QKEY, &[]).is_err());
}

// tests [CM-56] [CM-62]
#[test]
fn answers_of_others_are_no_answers() {
    let (mut pair, _) = serving(config());
    let asking = look_up(&mut pair, &[]);
    let CmMessage::SidrReq(question) = pair.last(A).mad.message else { panic!() };
    let (asked, _) = pair.request();
    answer_is_kept(&mut pair, asked);
    let rep = last_answer(&pair);
    pair.sides[A].events.clear();
    let again = look_up(&mut pair, &[]);
    let CmMessage::SidrReq(second) = pair.last(A).mad.message else { panic!() };
    assert_ne!(question.request_id, second.request_id);
    let good = SidrRep { request_id: second.request_id, ..rep };
    let stranger = IpAddr::from([203, 0, 113, 9]);
    pair.inject(A, stranger, 1, CmMessage::SidrRep(good));
    let from = pair.sides[P].ip;
    for bad in [
        SidrRep { request_id: question.request_id, ..good },
        SidrRep { request_id: 0, ..good },
        SidrRep { service_id: 7, ..good },
        SidrRep { qpn: 0, ..good },
        SidrRep { qpn: 1, ..good },
        SidrRep { qpn: 0xff_ffff, ..good },
    ] {
        pair.inject(A, from, 1, CmMessage::SidrRep(bad));
    }
    assert!(pair.sides[A].events.is_empty());
    assert_eq!(pair.counters[A].cm_ignored, 7);
    pair.inject(A, from, 1, CmMessage::SidrRep(good));
    assert!(matches!(pair.sides[A].events[..], [CmEvent::Found { id, .. }] if id == again));
    assert_ne!(asking, again);
}

fn answer_is_kept(pair: &mut Pair, asked: CmId) {
    answer(pair, asked, &[]);
    assert_eq!(pair.sides[P].manager.counts(), (1, 1));
}

// tests [CM-57] [CM-63]
#[test]
fn lookups_of_peers_are_bounded() {
    let limits = CmConfig { max_pending: 10, max_unproven: 20, ..config() };
    let (mut pair, _) = serving(limits);
    let ids: Vec<CmId> = (0..100)
        .map(|n| {
            let question = question(&pair, n);
            ask(&mut pair, 1, question);
            pair.request().0
        })
        .collect();
    assert_eq!(pair.sides[P].manager.counts(), (1, 10));
    let pushed: Vec<CmId> = pair.sides[P].events.iter().map(CmEvent::id).collect();
    assert_eq!(pushed, ids[..90], "the oldest, and each is reported");
    // Answered ones make room as well, without a word.
    pair.sides[P].events.clear();
    for id in &ids[90..] {
        answer(&mut pair, *id, &[]);
    }
    for n in 100..200 {
        let question = question(&pair, n);
        ask(&mut pair, 1, question);
        let (id, _) = pair.request();
        answer(&mut pair, id, &[]);
        assert!(pair.sides[P].manager.counts().1 <= 20);
    }
    assert!(pair.sides[P].events.is_empty());
    pair.pass(Duration::from_secs(66));
    pair.assert_nothing_left();
}

/// The answer comes to the part that has asked.
#[test]
fn the_number_of_a_lookup_begins_with_the_part() {
    let port = Port { guid: 1, mtu: Mtu::M1024, max_rd_atomic: 1, part: Some(9) };
    let mut manager = Manager::new(config(), port, Rng::new(&[1; 32]));
    let [local, remote] = [1, 2].map(|n| SocketAddr::from(([192, 0, 2, n], PORT)));
    for _ in 0..10 {
        manager.look_up(NOW, local, remote, &[]).unwrap();
        let Some(Output::Mad(sent)) = manager.poll_output() else { panic!() };
        let CmMessage::SidrReq(req) = CmMad::parse(&*sent.mad).unwrap().message else { panic!() };
        assert_eq!(req.request_id >> 24, 9);
    }
}
