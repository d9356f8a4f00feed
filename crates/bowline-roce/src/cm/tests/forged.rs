//! Messages from one address in the name of another [CM-37] [CM-53] [CM-56]: whoever knows
//! everything about a connection but cannot send from its peer's address neither ends it nor keeps
//! it from coming up.

use bowline_wire::roce::CmaHeader;
use bowline_wire::roce::cm::{Answered, Dreq, Ids, Mra};

use super::*;

fn stranger() -> IpAddr {
    IpAddr::from([192, 0, 2, 50])
}

/// The same request as if its sender had another address; all else in it is right.
fn from_elsewhere(req: Req, from: IpAddr) -> Req {
    let header = CmaHeader::parse(req.private_data.first_chunk().unwrap()).unwrap();
    let mut private_data = req.private_data;
    private_data[..36].copy_from_slice(&CmaHeader { source: from, ..header }.emit());
    Req { local_gid: from.into(), private_data, ..req }
}

/// Every message that could mean a side's connection, of a sender who knows the peer's names.
fn all(peers: Ids, guid: u64, qpns: (Qpn, Qpn), rep: Rep) -> Vec<CmMessage> {
    let mut info = [0; 72];
    info[..8].copy_from_slice(&guid.to_be_bytes());
    let rej = |local_id, remote_id, reason, info_len| {
        CmMessage::Rej(Rej {
            local_id,
            remote_id,
            answered: Answered::OTHER,
            reason,
            info_len,
            info,
            private_data: [0; 148],
        })
    };
    let mra = |answered| {
        let Ids { local: local_id, remote: remote_id } = peers;
        CmMessage::Mra(Mra { local_id, remote_id, answered, service_timeout: 24 })
    };
    let rep = Rep { local_id: peers.local, remote_id: peers.remote, guid, qpn: qpns.0.0, ..rep };
    vec![
        CmMessage::Rep(rep),
        CmMessage::Rtu(peers),
        mra(Answered::REQ),
        mra(Answered::REP),
        rej(peers.local, peers.remote, 28, 0),
        rej(0, peers.remote, 10, 0),
        rej(peers.local, peers.remote, 4, 8),
        rej(peers.local, 0, 4, 8),
        CmMessage::Dreq(Dreq { ids: peers, remote_qpn: qpns.1.0 }),
        CmMessage::Drep(peers),
    ]
}

/// Sends side `to` everything a stranger could, whatever state its connection is in. While the side
/// does not know its peer's name, a DREQ with it is one for no connection, and confirmed as that
/// [CM-44].
fn attack(pair: &mut Pair, to: usize, peers: Ids, rep: Rep) {
    let knows = pair.sides[to].manager.conns.values().any(|conn| conn.matches_ids(peers));
    let (guid, qpns) = [(0xb, (QP_P, QP_A)), (0xa, (QP_A, QP_P))][to];
    let before = pair.sides[to].manager.poll_timeout();
    let (messages, events) = (pair.log.len(), pair.sides[to].events.len());
    let ignored = pair.counters[to].cm_ignored;
    let mut all = all(peers, guid, qpns, rep);
    all.retain(|message| knows || !matches!(message, CmMessage::Dreq(_)));
    let count = all.len() as u64;
    for message in all {
        pair.inject(to, stranger(), 7, message);
        assert_eq!(pair.sides[to].events.len(), events, "{message:?}");
        assert_eq!(pair.log.len(), messages, "not even answered: {message:?}");
        assert_eq!(pair.sides[to].manager.poll_timeout(), before, "{message:?}");
    }
    assert_eq!(pair.counters[to].cm_ignored, ignored + count);
}

#[test]
fn no_message_of_another_address_touches_a_connection() {
    // Of the whole life: once the REQ is out, the REP is out, it stands, and it is being ended.
    let (mut pair, _) = Pair::listening(config());
    pair.delivery = Box::new(|_| 0);
    let active = pair.connect(&param(QP_A));
    let (transaction, req) = pair.req();
    let (a, p) = (pair.sides[A].ip, pair.sides[P].ip);
    pair.inject(P, a, transaction, CmMessage::Req(req));
    let (passive, _) = pair.request();
    let comm_id = pair.sides[P].manager.conns[&passive].comm_id;
    let (of_a, of_p) = (
        Ids { local: req.local_id, remote: comm_id },
        Ids { local: comm_id, remote: req.local_id },
    );
    let mut rep = None;
    for step in 0..4 {
        match step {
            0 => {}
            1 => {
                pair.accept(passive, &param(QP_P));
                rep = Some(pair.rep());
            }
            2 => {
                let (transaction, rep) = rep.unwrap();
                pair.inject(A, p, transaction, CmMessage::Rep(rep));
                pair.inject(P, a, transaction, CmMessage::Rtu(of_a));
                for side in &pair.sides {
                    assert!(matches!(side.events[..], [CmEvent::Established { .. }]));
                }
            }
            _ => {
                pair.disconnect(A, active);
                pair.disconnect(P, passive);
                assert_eq!(pair.names(A).last(), Some(&"DREQ"));
            }
        }
        // Before there is a REP, one that would have been right.
        let forged = rep.map_or_else(|| forged_rep(of_p), |(_, rep)| rep);
        attack(&mut pair, A, of_p, forged);
        attack(&mut pair, P, of_a, forged);
    }
    pair.inject(A, p, 1, CmMessage::Drep(of_p));
    pair.inject(P, a, 1, CmMessage::Drep(of_a));
    assert_eq!(pair.sides[A].events[1..], [disconnected(active)]);
    assert_eq!(pair.sides[P].events[1..], [disconnected(passive)]);
    pair.pass(Duration::from_millis(512));
    pair.assert_nothing_left();
}

fn forged_rep(ids: Ids) -> Rep {
    Rep {
        local_id: ids.local,
        remote_id: ids.remote,
        vendor: 0,
        qpn: QP_P.0,
        starting_psn: 1,
        responder_resources: 1,
        initiator_depth: 1,
        ack_delay: 15,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        guid: 0xb,
        private_data: [0; 196],
    }
}

/// A request with another node's GUID, name and queue pair is a connection of its own: it is
/// neither taken for a repetition of the other's nor makes it stale, in whichever order they come.
#[test]
fn a_request_in_anothers_name_stands_beside_it() {
    for forged_first in [true, false] {
        let (mut pair, _) = Pair::listening(config());
        pair.delivery =
            Box::new(move |sent| usize::from(!forged_first || name(&sent.mad) != "REQ"));
        let active = pair.connect(&param(QP_A));
        let (transaction, req) = pair.req();
        pair.delivery = Box::new(|_| 1);
        let victim = pair.sides[A].ip;
        let forged = from_elsewhere(req, stranger());
        let inject_forged = |pair: &mut Pair| {
            pair.inject(P, stranger(), transaction, CmMessage::Req(forged));
            pair.request().0
        };
        let (passive, other) = if forged_first {
            let other = inject_forged(&mut pair);
            pair.inject(P, victim, transaction, CmMessage::Req(req));
            (pair.request().0, other)
        } else {
            let passive = pair.request().0;
            (passive, inject_forged(&mut pair))
        };
        pair.accept(other, &param(Qpn(0x999)));
        pair.accept(passive, &param(QP_P));
        assert!(
            matches!(pair.sides[A].events[..], [CmEvent::Established { id, .. }] if id == active)
        );
        assert!(!pair.names(P).contains(&"REJ"), "{:?}", pair.names(P));
        pair.clear();

        // Another of the same queue pair, once the victim's connection stands, ends only the
        // forger's.
        let third = Req { local_id: forged.local_id ^ 1, ..forged };
        pair.inject(P, stranger(), transaction, CmMessage::Req(third));
        assert_eq!(pair.names(P), ["DREQ", "REJ"]);
        assert!(pair.log.iter().all(|sent| sent.to == stranger()));
        assert_eq!(pair.last_rej(P).reason, 10);
        assert!(pair.sides.iter().all(|side| side.events.is_empty()));

        // The end of the forger's leaves the names of the other in place.
        pair.sides[P].manager.destroy_id(pair.now, other).unwrap();
        pair.settle();
        pair.pass(Duration::from_secs(200));
        pair.clear();
        pair.inject(P, victim, transaction, CmMessage::Req(req));
        assert!(pair.sides[P].events.is_empty(), "still known as a repetition");
        pair.disconnect(P, passive);
        assert_eq!(pair.sides[A].events, [disconnected(active)]);
        pair.pass(Duration::from_millis(512));
        pair.assert_nothing_left();
    }
}

/// A node that is connected to says it is another one, with which this side has a connection.
#[test]
fn a_rep_in_anothers_name_stands_beside_it() {
    let (mut pair, active, passive) = Pair::connected(config());
    let peer = pair.sides[A].manager.conns[&active].peer.unwrap();
    let local = SocketAddr::new(pair.sides[A].ip, 0);
    let to = SocketAddr::new(stranger(), PORT);
    let second = pair.sides[A].manager.connect(pair.now, local, to, &param(Qpn(0x112))).unwrap();
    pair.settle();
    let (transaction, req) = pair.req();
    let ids = Ids { local: peer.comm_id, remote: req.local_id };
    pair.inject(A, stranger(), transaction, CmMessage::Rep(forged_rep(ids)));
    assert_eq!(pair.names(A), ["REQ", "RTU"]);
    assert!(matches!(pair.sides[A].events[..], [CmEvent::Established { id, .. }] if id == second));
    pair.clear();
    let dreq = Dreq { ids, remote_qpn: 0x112 };
    pair.inject(A, stranger(), transaction, CmMessage::Dreq(dreq));
    assert_eq!(pair.sides[A].events, [disconnected(second)]);
    assert!(pair.sides[P].events.is_empty());
    pair.clear();
    pair.disconnect(A, active);
    assert_eq!(pair.sides[P].events, [disconnected(passive)]);
}
