//! Floods, and messages nobody should send.

use bowline_testkit::cm;
use bowline_wire::roce::cm::{Answered, Dreq, Ids, Mra, SidrRep, SidrReq, SidrStatus};
use bowline_wire::roce::{CmaHeader, datagram_service_id, service_id};
use proptest::prelude::*;

use super::*;

/// A good REQ from the active side.
fn good_req(pair: &Pair, n: u32) -> Req {
    let from = SocketAddr::new(pair.sides[A].ip, 5);
    let to = SocketAddr::new(pair.sides[P].ip, PORT);
    let req = cm::request(from, to, &[]);
    Req {
        local_id: 2 + n,
        guid: 0xa,
        qpn: 2 + n,
        responder_resources: 1,
        initiator_depth: 1,
        ..req
    }
}

fn requested(event: &CmEvent) -> bool {
    matches!(event, CmEvent::ConnectRequest { .. })
}

// tests [CM-57]
#[test]
fn the_oldest_requests_make_room_for_the_newest() {
    let (mut pair, _) = Pair::listening(CmConfig { max_pending: 10, ..config() });
    let from = pair.sides[A].ip;
    for n in 0..1000 {
        let req = good_req(&pair, n);
        pair.inject(P, from, 1, CmMessage::Req(req));
    }
    assert_eq!(pair.sides[P].manager.conns.len(), 10);
    let counters = &pair.counters[P];
    assert_eq!((counters.cm_pushed_out, counters.cm_overflow), (990, 0));
    assert!(pair.log.is_empty(), "no answer: it will come again");
    // Each end was told.
    let ended = |event: &&CmEvent| matches!(event, CmEvent::Unreachable { .. });
    assert_eq!(pair.sides[P].events.iter().filter(ended).count(), 990);
    // The newest are there, and one that was pushed out can come again.
    pair.sides[P].events.clear();
    for n in [990, 999, 0] {
        let req = good_req(&pair, n);
        pair.inject(P, from, 1, CmMessage::Req(req));
    }
    let again = pair.sides[P].events.iter().filter(|event| requested(event)).count();
    assert_eq!(again, 1, "only the last is a new one");

    // Over all listeners.
    let (mut pair, _) = Pair::listening(CmConfig { max_unproven: 5, ..config() });
    let second = ([0, 0, 0, 0], PORT + 1).into();
    pair.sides[P].manager.listen(second).unwrap();
    for n in 0..20u32 {
        let service_id = service_id(PORT + (n % 2) as u16);
        let req = Req { service_id, ..good_req(&pair, n) };
        pair.inject(P, from, 1, CmMessage::Req(req));
    }
    assert_eq!((pair.sides[P].manager.conns.len(), pair.counters[P].cm_pushed_out), (5, 15));
}

/// With as many as there may be, none of which can make room, a request is not heard.
#[test]
fn connections_are_bounded() {
    let (mut pair, _) = Pair::listening(CmConfig { max_connections: 2, ..config() });
    let first = pair.handshake(QP_A, QP_P);
    pair.handshake(Qpn(QP_A.0 + 1), Qpn(QP_P.0 + 1));
    pair.clear();
    let (from, req) = (pair.sides[A].ip, good_req(&pair, 7));
    pair.inject(P, from, 1, CmMessage::Req(req));
    assert_eq!((pair.sides[P].manager.conns.len(), pair.counters[P].cm_overflow), (2, 1));
    assert!(pair.log.is_empty() && pair.sides[P].events.is_empty());
    pair.disconnect(P, first.1);
    pair.pass(Duration::from_secs(200));
    pair.inject(P, from, 1, CmMessage::Req(req));
    assert!(requested(pair.sides[P].events.last().unwrap()), "there is room again");
}

// tests [CM-57]: with requests forged from addresses where nobody is, however many, and a program
// that accepts them all, somebody who is there connects, and keeps its connection.
#[test]
fn forged_requests_keep_nobody_out() {
    let limits = CmConfig { max_unproven: 20, max_connections: 24, ..config() };
    let (mut pair, _) = Pair::listening(limits);
    let flood = |pair: &mut Pair, numbers: std::ops::Range<u32>| {
        for n in numbers {
            let mut req = good_req(pair, n);
            let from = IpAddr::from([203, 0, (n >> 8) as u8, n as u8]);
            let (source, destination) = (from, pair.sides[P].ip);
            let header = CmaHeader { source_port: 5, source, destination };
            req.private_data[..36].copy_from_slice(&header.emit());
            req.local_gid = from.into();
            pair.inject(P, from, 1, CmMessage::Req(req));
            let (id, _) = pair.request();
            pair.accept(id, &param(Qpn(0x1000 + n)));
        }
    };
    flood(&mut pair, 0..1000);
    let (active, passive) = pair.handshake(QP_A, QP_P);
    pair.clear();
    flood(&mut pair, 1000..2000);
    // Neither the flood nor the ends of its connections take the place of one that stands.
    let unproven: Vec<CmId> = pair.sides[P].manager.unproven.iter().map(|(_, id)| *id).collect();
    assert_eq!(unproven.len(), 20);
    unproven.into_iter().for_each(|id| pair.disconnect(P, id));
    flood(&mut pair, 2000..3000);
    let state = |side: usize, id| &pair.sides[side].manager.conns[&id].state;
    assert!(matches!(state(A, active), State::Established));
    assert!(matches!(state(P, passive), State::Established));
    assert_eq!(pair.counters[P].cm_overflow, 0);
    assert!(pair.counters[P].cm_pushed_out > 2900);
    // Those that never said a word are gone at last.
    pair.disconnect(A, active);
    pair.pass(Duration::from_secs(400));
    pair.assert_nothing_left();
}

// tests [CM-53]: names cannot be guessed
#[test]
fn names_are_spread_over_all_numbers() {
    let (mut pair, _) = Pair::listening(CmConfig { max_pending: 1000, ..config() });
    let from = pair.sides[A].ip;
    for n in 0..1000 {
        let req = good_req(&pair, n);
        pair.inject(P, from, 1, CmMessage::Req(req));
    }
    let names: Vec<u32> = pair.sides[P].manager.by_comm_id.keys().copied().collect();
    assert_eq!(names.len(), 1000);
    assert!(!names.contains(&0));
    for quarter in 0..4u32 {
        let inside = names.iter().filter(|name| **name >> 30 == quarter).count();
        assert!((150..350).contains(&inside), "{inside} of 1000 in quarter {quarter}");
    }
}

#[test]
fn a_device_connects_to_itself() {
    let mut pair = Pair::new(config());
    let ip = pair.sides[A].ip;
    let manager = &mut pair.sides[A].manager;
    manager.listen(SocketAddr::new(ip, PORT)).unwrap();
    let to = SocketAddr::new(ip, PORT);
    let active = manager.connect(pair.now, SocketAddr::new(ip, 0), to, &param(QP_A)).unwrap();
    pair.settle();
    let [CmEvent::ConnectRequest { id: passive, .. }] = pair.sides[A].events[..] else {
        panic!("{:?}", pair.sides[A].events)
    };
    pair.sides[A].events.clear();
    pair.sides[A].manager.accept(passive, &param(QP_P)).unwrap();
    pair.settle();
    assert_eq!(pair.sides[A].events.len(), 2);
    pair.sides[A].manager.disconnect(pair.now, active).unwrap();
    pair.settle();
    pair.pass(Duration::from_secs(1));
    assert_eq!(pair.sides[A].events.len(), 6);
    pair.assert_nothing_left();
}

/// What a test does next.
#[derive(Clone, Debug)]
enum Act {
    /// Hands a message to a side, its names picked from those seen (or made up).
    Message {
        to: usize,
        kind: u8,
        pick: u8,
        other: u8,
        value: u8,
        stranger: bool,
    },
    /// Repeats an old message.
    Replay(u8),
    Connect,
    LookUp,
    Accept(u8),
    Reject(u8),
    Disconnect(usize, u8),
    Destroy(usize, u8),
    Pass(u16),
    Data(u8),
    Garbage(Vec<u8>),
}

fn act() -> impl Strategy<Value = Act> {
    let message = (0..2usize, 0..9u8, any::<u8>(), any::<u8>(), any::<u8>(), any::<bool>());
    prop_oneof![
        8 => message.prop_map(|(to, kind, pick, other, value, stranger)| {
            Act::Message { to, kind, pick, other, value, stranger: stranger && value % 4 == 0 }
        }),
        4 => any::<u8>().prop_map(Act::Replay),
        3 => Just(Act::Connect),
        2 => Just(Act::LookUp),
        3 => any::<u8>().prop_map(Act::Accept),
        1 => any::<u8>().prop_map(Act::Reject),
        1 => (0..2usize, any::<u8>()).prop_map(|(side, pick)| Act::Disconnect(side, pick)),
        1 => (0..2usize, any::<u8>()).prop_map(|(side, pick)| Act::Destroy(side, pick)),
        2 => any::<u16>().prop_map(Act::Pass),
        1 => any::<u8>().prop_map(Act::Data),
        1 => prop::collection::vec(any::<u8>(), 0..300).prop_map(Act::Garbage),
    ]
}

fn pick<T: Copy>(list: &[T], at: u8) -> Option<T> {
    (!list.is_empty()).then(|| list[usize::from(at) % list.len()])
}

/// Names of connections that may mean something to a side.
fn names(pair: &Pair) -> Vec<u32> {
    let keys = |side: &Side| side.manager.by_comm_id.keys().copied().collect::<Vec<_>>();
    let mut names: Vec<u32> = pair.sides.iter().flat_map(keys).collect();
    names.extend(pair.sides.iter().flat_map(|side| side.manager.lookups.request_ids()));
    names.extend([0, 1, 2, u32::MAX]);
    names
}

/// Private data of a lookup of the active side, or of nobody.
fn good_question(pair: &Pair, is_forged: bool) -> [u8; 216] {
    let source = if is_forged { [0, 0, 0, 0].into() } else { pair.sides[A].ip };
    let header = CmaHeader { source_port: 5, source, destination: pair.sides[P].ip };
    let mut private_data = [0; 216];
    private_data[..36].copy_from_slice(&header.emit());
    private_data
}

fn made_up(pair: &Pair, kind: u8, at: u8, other: u8, value: u8) -> CmMessage {
    let names = names(pair);
    let (local, remote) = (pick(&names, at).unwrap_or(0), pick(&names, other).unwrap_or(0));
    let qpn = [QP_A.0, QP_P.0, 0, 1, u32::from(value)][usize::from(value) % 5];
    let ids = Ids { local, remote };
    match kind {
        0 => {
            let req = good_req(pair, u32::from(value));
            let service_id = service_id(PORT + u16::from(value % 8 == 7));
            CmMessage::Req(Req {
                local_id: local,
                qpn,
                guid: u64::from(value % 3),
                service_id,
                ..req
            })
        }
        1 => CmMessage::Mra(Mra {
            local_id: local,
            remote_id: remote,
            answered: Answered(value & 3),
            service_timeout: value >> 3,
        }),
        2 => {
            let mut info = [0; 72];
            info[7] = value % 12;
            CmMessage::Rej(Rej {
                local_id: local,
                remote_id: remote,
                answered: Answered(value & 3),
                reason: [4, 10, 28, u16::from(value)][usize::from(value) % 4],
                info_len: value % 73,
                info,
                private_data: [value; 148],
            })
        }
        3 => CmMessage::Rep(Rep {
            local_id: local,
            remote_id: remote,
            vendor: 0,
            qpn,
            starting_psn: 1,
            responder_resources: value,
            initiator_depth: value,
            ack_delay: value & 31,
            flow_control: false,
            rnr_retry_count: value & 7,
            srq: false,
            guid: u64::from(value % 12),
            private_data: [value; 196],
        }),
        4 => CmMessage::Rtu(ids),
        5 => CmMessage::Dreq(Dreq { ids, remote_qpn: qpn }),
        6 => CmMessage::Drep(ids),
        7 => {
            let service_id = datagram_service_id(PORT + u16::from(value % 8 == 7));
            let private_data = good_question(pair, value % 5 == 4);
            CmMessage::SidrReq(SidrReq {
                request_id: local,
                pkey: 0xffff,
                service_id,
                private_data,
            })
        }
        _ => CmMessage::SidrRep(SidrRep {
            request_id: remote,
            status: SidrStatus(value % 4),
            info_len: 0,
            qpn,
            service_id: datagram_service_id(PORT),
            qkey: 1,
            info: [0; 72],
            private_data: [value; 136],
        }),
    }
}

proptest! {
    /// Any messages in any order: no panic, every limit holds (checked after every input), no
    /// event of a name that has ended, and in the end nothing is left.
    #[test]
    fn any_messages_in_any_order(acts in prop::collection::vec(act(), 1..120)) {
        let limits = CmConfig {
            max_pending: 4, max_unproven: 6, max_connections: 12, ..CmConfig::default()
        };
        let (mut pair, _) = Pair::listening(limits);
        let any: SocketAddr = ([0, 0, 0, 0], PORT).into();
        pair.sides[P].manager.listen_datagrams(any).unwrap();
        let stranger_ip = IpAddr::from([192, 0, 2, 50]);
        let mut requests: Vec<CmId> = Vec::new();
        let mut next_qpn = 0x1000;
        for act in acts {
            let now = pair.now;
            let ids = |pair: &Pair, side: usize| {
                let manager = &pair.sides[side].manager;
                manager.conns.keys().copied().chain(manager.lookups.ids()).collect::<Vec<_>>()
            };
            next_qpn += 1;
            match act {
                Act::Message { to, kind, pick, other, value, stranger } => {
                    let message = made_up(&pair, kind, pick, other, value);
                    let from = if stranger { stranger_ip } else { pair.sides[1 - to].ip };
                    pair.inject(to, from, u64::from(value), message);
                }
                Act::Replay(at) => if !pair.log.is_empty() {
                    let old = pair.log[usize::from(at) % pair.log.len()].clone();
                    let from = pair.sides[old.by].ip;
                    pair.inject_bytes(1 - old.by, from, &old.bytes);
                },
                Act::Connect => {
                    let local = SocketAddr::new(pair.sides[A].ip, 0);
                    let remote = SocketAddr::new(pair.sides[P].ip, PORT);
                    let _ = pair.sides[A].manager.connect(now, local, remote, &param(Qpn(next_qpn)));
                }
                Act::LookUp => {
                    let local = SocketAddr::new(pair.sides[A].ip, 0);
                    let remote = SocketAddr::new(pair.sides[P].ip, PORT);
                    let _ = pair.sides[A].manager.look_up(now, local, remote, &[]);
                }
                Act::Accept(at) => if let Some(id) = pick(&requests, at) {
                    let manager = &mut pair.sides[P].manager;
                    let _ = manager.accept(id, &param(Qpn(next_qpn)));
                    let _ = manager.answer_lookup(now, id, Qpn(next_qpn), 1, &[]);
                },
                Act::Reject(at) => if let Some(id) = pick(&requests, at) {
                    let _ = pair.sides[P].manager.reject(pair.now, id, &[at]);
                },
                Act::Disconnect(side, at) => if let Some(id) = pick(&ids(&pair, side), at) {
                    let _ = pair.sides[side].manager.disconnect(now, id);
                },
                Act::Destroy(side, at) => if let Some(id) = pick(&ids(&pair, side), at) {
                    pair.sides[side].manager.destroy_id(now, id).unwrap();
                },
                Act::Pass(time) => pair.pass(Duration::from_millis(u64::from(time))),
                Act::Data(at) => pair.sides[P].manager.data_arrived(Qpn(0x1000 + u32::from(at))),
                Act::Garbage(bytes) => pair.inject_bytes(P, stranger_ip, &bytes),
            }
            pair.settle();
            requests.extend(pair.sides[P].events.iter().filter_map(|event| match event {
                CmEvent::ConnectRequest { id, .. } => Some(*id),
                _ => None,
            }));
            for side in &mut pair.sides {
                side.events.clear();
            }
        }
        for side in [A, P] {
            let manager = &pair.sides[side].manager;
            let left = manager.conns.keys().copied().chain(manager.lookups.ids());
            for id in left.collect::<Vec<CmId>>() {
                pair.sides[side].manager.destroy_id(pair.now, id).unwrap();
            }
        }
        pair.settle();
        pair.pass(Duration::from_secs(400));
        pair.assert_nothing_left();
        prop_assert!(pair.sides.iter().all(|side| side.events.is_empty()));
    }
}

/// What the passive side sends after one forged request, whatever its program does with it.
// tests [CM-57]
#[test]
fn a_request_of_nobody_draws_few_messages() {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Program {
        Waits,
        Ends,
        Destroys,
        Refuses,
    }
    for (program, drawn) in [
        (Program::Waits, &["REP", "REP", "REP", "REP", "REP", "REP", "REJ"][..]),
        (Program::Ends, &["REP", "REP", "REP", "REP", "REP", "REP", "DREQ"]),
        (Program::Destroys, &["REP", "REP", "REP", "REP", "REP", "REP", "DREQ"]),
        (Program::Refuses, &["REJ"]),
    ] {
        let (mut pair, _) = Pair::listening(CmConfig::default());
        // Nothing that is sent there arrives, and nothing else comes from there.
        pair.delivery = Box::new(|_| 0);
        let (from, req) = (pair.sides[A].ip, good_req(&pair, 0));
        pair.inject(P, from, 7, CmMessage::Req(req));
        let (id, _) = pair.request();
        if program == Program::Refuses {
            pair.sides[P].manager.reject(pair.now, id, &[]).unwrap();
            pair.settle();
        } else {
            pair.accept(id, &param(QP_P));
        }
        pair.pass(Duration::from_secs(10));
        match program {
            Program::Ends => pair.disconnect(P, id),
            Program::Destroys => pair.sides[P].manager.destroy_id(pair.now, id).unwrap(),
            Program::Waits | Program::Refuses => {}
        }
        pair.settle();
        pair.pass(Duration::from_secs(400));
        assert_eq!(pair.names(P), drawn, "{program:?}");
        assert_eq!(pair.sides[P].manager.counts().1, 0, "{program:?}: nothing is left");
    }
}

/// A peer that is there and gets no REP repeats its request: it is answered each time, also when
/// the REP is not repeated by itself any more.
// tests [CM-57] [CM-44]
#[test]
fn a_repeated_request_is_answered_when_the_rep_is_not_repeated_any_more() {
    let (mut pair, _) = Pair::listening(config());
    pair.delivery = Box::new(|sent| usize::from(name(&sent.mad) == "REQ"));
    let (active, passive) = pair.accepted(QP_A, QP_P);
    // REQs every 4.6 s come while the REP is repeated, every 4.1 s up to 20.5 s, or after that.
    pair.pass(Duration::from_millis(23_000));
    assert_eq!(pair.names(P), ["REP"; 6]);
    pair.pass(Duration::from_millis(500));
    assert_eq!(pair.names(P), ["REP"; 7]);
    pair.delivery = Box::new(|_| 1);
    pair.pass(Duration::from_millis(4_608));
    for (side, id) in [(A, active), (P, passive)] {
        let up =
            |event: &CmEvent| matches!(event, CmEvent::Established { id: of, .. } if *of == id);
        assert!(pair.sides[side].events.iter().any(up), "{:?}", pair.sides[side].events);
    }
}
