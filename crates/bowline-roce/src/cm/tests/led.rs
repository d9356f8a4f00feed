//! Connections whose queue pairs the program leads through their states.

use bowline_verbs::{Error, InvalidReason};

use super::*;

fn led(qpn: Qpn) -> ConnParam {
    ConnParam { is_led: true, responder_resources: 3, initiator_depth: 5, ..param(qpn) }
}

/// A pair whose active side has the answer, and the connection's name on either side.
fn responded(config: CmConfig) -> (Pair, CmId, CmId) {
    let (mut pair, _) = Pair::listening(config);
    let (active, passive) = {
        let active = pair.connect(&led(QP_A));
        let (passive, _) = pair.request();
        pair.accept(passive, &led(QP_P));
        (active, passive)
    };
    assert!(matches!(pair.sides[A].events[..], [CmEvent::Responded { .. }]));
    (pair, active, passive)
}

fn attr(pair: &Pair, side: usize, id: CmId, to: QpState) -> QpAttr {
    let attr = pair.sides[side].manager.connection_attr(id, to).unwrap();
    assert_eq!(attr.state, Some(to));
    attr
}

// tests [CM-31] [CM-32] [CMA-12]
/// Each side's attributes are the other's, crosswise, and the device orders nothing.
#[test]
fn a_program_leads_both_queue_pairs() {
    let (mut pair, _) = Pair::listening(config());
    let active = pair.connect(&led(QP_A));
    let unknown = |to| Err(Error::Invalid(InvalidReason::NoConnectionAttr(to)));
    let manager = &pair.sides[A].manager;
    for to in [QpState::Rtr, QpState::Rts] {
        assert_eq!(manager.connection_attr(active, to), unknown(to));
    }
    let (passive, _) = pair.request();
    // Before it accepts, with what the peer allows.
    let early = [QpState::Rtr, QpState::Rts].map(|to| attr(&pair, P, passive, to));
    assert_eq!((early[0].max_dest_rd_atomic, early[1].max_rd_atomic), (Some(5), Some(3)));
    let param = ConnParam { responder_resources: 4, initiator_depth: 2, ..led(QP_P) };
    pair.accept(passive, &param);
    assert_eq!(pair.names(A), ["REQ"]);
    let [CmEvent::Responded { id, responder_resources, initiator_depth, remote_qpn, .. }] =
        pair.sides[A].events[..]
    else {
        panic!("{:?}", pair.sides[A].events);
    };
    assert_eq!((id, remote_qpn), (active, QP_P));
    assert_eq!((responder_resources, initiator_depth), (2, 4));
    for (side, id, peer, other, qpn) in
        [(A, active, P, passive, QP_P), (P, passive, A, active, QP_A)]
    {
        assert!(attr(&pair, side, id, QpState::Init).access.is_some());
        let [rtr, rts] = [QpState::Rtr, QpState::Rts].map(|to| attr(&pair, side, id, to));
        assert_eq!(rtr.dest_qpn, Some(qpn));
        assert_eq!(rtr.av.unwrap().remote, pair.sides[peer].ip);
        assert_eq!(rtr.rq_psn, attr(&pair, peer, other, QpState::Rts).sq_psn);
        let answers = attr(&pair, peer, other, QpState::Rtr).max_dest_rd_atomic;
        assert_eq!(rts.max_rd_atomic, answers);
        let none = pair.sides[side].manager.connection_attr(id, QpState::Sqd);
        assert_eq!(none, unknown(QpState::Sqd));
    }
    let manager = &mut pair.sides[A].manager;
    manager.establish(active).unwrap();
    assert_eq!(manager.establish(active), Err(Error::Invalid(InvalidReason::NotResponded)));
    pair.settle();
    assert!(matches!(pair.sides[P].events[..], [CmEvent::Established { .. }]));
    assert_eq!(pair.sides[A].events.len(), 1, "who completes it knows");
    for (side, qpn) in [(A, QP_A), (P, QP_P)] {
        let manager = &pair.sides[side].manager;
        assert!(!manager.holds(qpn) && manager.reserves(qpn));
    }
    pair.disconnect(P, passive);
    assert!(pair.sides.iter().all(|side| side.steps.is_empty() && !side.gap_reports));
    pair.pass(Duration::from_secs(1));
    pair.assert_nothing_left();
}

// tests [CM-50]
#[test]
fn a_program_says_that_a_message_has_come() {
    let (mut pair, active, passive) = responded(config());
    let early = pair.sides[A].manager.note_established(active);
    assert_eq!(early, Err(Error::Invalid(InvalidReason::NotEstablished)));
    assert_eq!(pair.sides[P].manager.note_established(passive), Ok(true));
    assert_eq!(pair.sides[P].manager.note_established(passive), Ok(false));
    pair.settle();
    assert!(matches!(pair.sides[P].events[..], [CmEvent::Established { .. }]));
    pair.sides[A].manager.establish(active).unwrap();
    pair.settle();
    assert_eq!(pair.sides[P].events.len(), 1);
}

// tests [CM-43]
/// A program that takes long to lead its queue pair has the peer wait.
#[test]
fn a_peer_waits_for_the_program() {
    let (mut pair, active, passive) = responded(config());
    pair.pass(Duration::from_secs(60));
    assert_eq!(pair.names(A), ["REQ", "MRA"], "and one MRA is enough");
    pair.sides[A].manager.establish(active).unwrap();
    pair.settle();
    assert!(matches!(pair.sides[P].events[..], [CmEvent::Established { id, .. }] if id == passive));
}

/// What ends a connection that the program has not completed.
#[test]
fn connections_end_before_they_are_complete() {
    // The peer goes.
    let (mut pair, active, passive) = responded(config());
    pair.sides[P].manager.destroy_id(pair.now, passive).unwrap();
    pair.settle();
    assert_eq!(pair.sides[A].events[1..], [disconnected(active)]);
    // The peer has given up.
    let (mut pair, active, _) = responded(config());
    pair.lose("MRA");
    pair.pass(Duration::from_secs(100));
    let [CmEvent::Rejected { id, reason, .. }] = pair.sides[A].events[1..2] else { panic!() };
    assert_eq!((id, reason), (active, RejectReason::TIMEOUT));
    // The program refuses the answer.
    let (mut pair, active, passive) = responded(config());
    let manager = &mut pair.sides[A].manager;
    manager.reject_for(NOW, active, RejectReason::VENDOR_OPTION, b"no").unwrap();
    pair.settle();
    let [CmEvent::Rejected { id, reason, .. }] = pair.sides[P].events[..] else { panic!() };
    assert_eq!((id, reason), (passive, RejectReason::VENDOR_OPTION));
    // The program ends it, or destroys its id.
    let (mut pair, active, _) = responded(config());
    pair.disconnect(A, active);
    assert!(matches!(pair.sides[P].events[..], [CmEvent::Disconnected { .. }]));
    let (mut pair, active, _) = responded(config());
    pair.sides[A].manager.destroy_id(pair.now, active).unwrap();
    pair.settle();
    assert!(matches!(pair.sides[P].events[..], [CmEvent::Rejected { .. }]));
    pair.pass(Duration::from_secs(10));
    pair.assert_nothing_left();
}
