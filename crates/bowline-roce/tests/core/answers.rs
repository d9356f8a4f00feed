//! How the requester handles answers that are lost, repeated or not meant for it [REQ-9], [REQ-10],
//! [REQ-13].

use std::time::Duration;

use crate::common::{Fate, Pair, Setup, pattern};
use bowline_verbs::{Access, Mtu, Piece, QpState, SendOp, Sge, Status};
use bowline_wire::roce::{Aeth, Bth, NakCode, Opcode, Packet, Psn, Syndrome};

const FIRST: u32 = 0xff_fffd;

fn setup() -> Setup {
    Setup { mtu: Mtu::M256, psns: [FIRST; 2], ..Setup::default() }
}

/// A pair whose side 1 receives everything and whose packets are all lost.
fn mute() -> Pair {
    let mut pair = Pair::new(&setup());
    pair.fate = Box::new(|_, seen| if seen.from == 1 { Fate::Drop } else { Fate::Pass });
    pair
}

/// Gives side 0 an acknowledgement or NAK of the packet `after` packets behind the first.
fn answer(pair: &mut Pair, after: u32, syndrome: Syndrome) {
    let (dest_qpn, psn) = (pair.nodes[0].qp.0, Psn::new(FIRST) + after);
    let mut packet = Packet::new(Opcode::Acknowledge, Bth { dest_qpn, psn, ..Bth::default() });
    packet.aeth = Some(Aeth { syndrome, msn: 0 });
    let mut bytes = Vec::new();
    packet.emit(&mut bytes);
    pair.inject(0, &mut bytes);
    pair.settle();
}

/// Posts three writes of one packet each.
fn three_writes(pair: &mut Pair) {
    for id in 0..3 {
        let (remote, sges) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 10)]);
        pair.post(0, id, SendOp::Write(remote), &sges);
    }
    pair.settle();
}

/// [REQ-9 a], [REQ-9 c]: acknowledgements of packets never sent, and of packets acknowledged
/// before.
#[test]
fn answers_to_nothing_are_ignored() {
    let mut pair = mute();
    answer(&mut pair, 0, Syndrome::ACK);
    three_writes(&mut pair);
    answer(&mut pair, 1, Syndrome::ACK);
    let good = [(0, Status::Success), (1, Status::Success)];
    let access = Syndrome::Nak(NakCode::RemoteAccess);
    let gap = Syndrome::Nak(NakCode::PsnSequence);
    for syndrome in [Syndrome::ACK, access, gap, Syndrome::Rnr(1), Syndrome::Reserved(0xff)] {
        for after in [0, 1, 3, 4, 1 << 22, 1 << 23, (1 << 24) - 1] {
            answer(&mut pair, after, syndrome);
            assert_eq!(pair.outcomes(0), good, "{syndrome:?} {after}");
        }
    }
    assert_eq!(pair.nodes[0].state(), QpState::Rts);
    assert_eq!(pair.nodes[0].dev.counters().go_backs, 0);
    assert_eq!(pair.nodes[0].dev.counters().responses_ignored, 1 + 5 * 7);
    answer(&mut pair, 2, Syndrome::ACK);
    assert_eq!(pair.outcomes(0).len(), 3);
}

/// [REQ-11]: a loss is repaired once, however many NAKs report it; after progress, the next loss
/// is. A peer that misses one packet after the other gets all of them.
#[test]
fn the_same_nak_again_sends_nothing_again() {
    let mut pair = mute();
    for _ in 0..2 {
        three_writes(&mut pair);
    }
    for (after, times, expected) in [(0, 3, (1, 0, 1)), (1, 2, (2, 0, 2)), (2, 4, (2, 1, 6))] {
        for _ in 0..times {
            answer(&mut pair, after, Syndrome::Nak(NakCode::PsnSequence));
        }
        let counters = pair.nodes[0].dev.counters();
        let sent = (counters.repairs, counters.go_backs, counters.packets_resent);
        assert_eq!(sent, expected, "{after}");
    }
    assert_eq!(pair.outcomes(0).len(), 2);
}

/// [REQ-13]: an RNR pause lasts its time, whatever else the peer sends meanwhile.
#[test]
fn a_pause_is_not_begun_twice_nor_cut_short() {
    let mut pair = Pair::new(&Setup { rnr_retry: 1, ..setup() });
    pair.fate = Box::new(|_, seen| if seen.from == 1 { Fate::Drop } else { Fate::Pass });
    three_writes(&mut pair);
    let sent = pair.packets();
    for _ in 0..3 {
        answer(&mut pair, 1, Syndrome::Rnr(20));
        answer(&mut pair, 1, Syndrome::Nak(NakCode::PsnSequence));
    }
    pair.run(Duration::from_micros(10_239), |_| false);
    assert_eq!(pair.log[sent..].iter().filter(|seen| seen.from == 0).count(), 0);
    pair.run(Duration::from_micros(2), |_| false);
    let again: Vec<_> = pair.log[sent..].iter().filter(|seen| seen.from == 0).collect();
    assert_eq!(again.len(), 2);
    assert_eq!(again[0].packet().bth.psn, Psn::new(FIRST) + 1);
    assert_eq!(pair.outcomes(0), [(0, Status::Success)]);
    assert_eq!(pair.nodes[0].dev.counters().go_backs, 0);
    // The single retry has been used.
    answer(&mut pair, 1, Syndrome::Rnr(20));
    assert_eq!(pair.outcomes(0)[1], (1, Status::RnrRetryExcErr));
}

/// [REQ-12]: an answer resets the retry counter.
#[test]
fn progress_renews_patience() {
    let mut pair = Pair::new(&Setup { rnr_retry: 1, ..setup() });
    for id in 0..3 {
        let (sges, room) = ([pair.nodes[0].sge(0, 10)], [pair.nodes[1].sge(0, 10)]);
        pair.post(0, id, SendOp::Send, &sges);
        pair.settle();
        pair.post_recv(1, id, &room);
        pair.finish(0, id as usize + 1);
    }
    assert_eq!(pair.nodes[0].dev.counters().rnr_naks_received, 3);
}

/// [REQ-9 b], [REQ-10]: after the answer to a READ was lost, a NAK of a later request is not one of
/// the READ: the READ is sent again.
#[test]
fn a_refusal_is_of_the_request_it_names() {
    let mut pair = mute();
    pair.nodes[1].fill(0, 300, 5);
    let (remote, room) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 300)]);
    let from = [pair.nodes[0].sge(1000, 10)];
    pair.post(0, 1, SendOp::Read(remote), &room);
    pair.post(0, 2, SendOp::Write(remote), &from);
    pair.settle();
    pair.fate = Box::new(|_, _| Fate::Pass);
    answer(&mut pair, 2, Syndrome::Nak(NakCode::RemoteAccess));
    assert_eq!(pair.outcomes(0)[0], (1, Status::Success));
    assert_eq!(pair.nodes[0].bytes(10, 290), pattern(300, 5)[10..]);
}

/// [REQ-9 b]: the acknowledgement of a later request shows at once that the answer to a READ was
/// lost.
#[test]
fn a_lost_answer_is_noticed_by_the_next_acknowledgement() {
    let mut pair = Pair::new(&setup());
    let (remote, room) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 8)]);
    pair.lose(&[2]);
    pair.post(0, 1, SendOp::Read(remote), &room);
    pair.post(0, 2, SendOp::Write(remote), &[]);
    pair.settle();
    assert_eq!(pair.outcomes(0), [(1, Status::Success), (2, Status::Success)]);
    assert_eq!(pair.nodes[0].dev.counters().timeouts, 0);
}

/// [REQ-9 d], [REQ-11]: the missing part of an answer is requested once.
#[test]
fn a_gap_in_an_answer_costs_one_request() {
    let mut pair = Pair::new(&setup());
    pair.nodes[1].fill(0, 256 * 40, 3);
    let (remote, room) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, 256 * 40)]);
    pair.lose(&[10]);
    pair.post(0, 1, SendOp::Read(remote), &room);
    pair.settle();
    assert_eq!(pair.outcomes(0), [(1, Status::Success)]);
    assert_eq!(pair.nodes[0].bytes(0, 256 * 40), pattern(256 * 40, 3));
    let counters = pair.nodes[0].dev.counters();
    assert_eq!((counters.repairs, counters.packets_resent, counters.timeouts), (1, 1, 0));
    assert_eq!(counters.go_backs, 0);
    assert_eq!(pair.packets(), 1 + 40 + 1 + 1);
}

/// [REQ-9 d], [REQ-11]: answers to several reads and atomics, some lost or late: each missing one
/// is requested once, and no others are sent again.
#[test]
fn only_missing_answers_are_asked_for() {
    for late in [false, true] {
        let mut pair = Pair::new(&Setup { depth: 8, ..setup() });
        pair.nodes[1].fill(0, 256 * 30, 4);
        pair.nodes[1].buffer.write(9000, &7_u64.to_ne_bytes());
        // Requests are packets 0 to 4, the answers are 5 to 14, 15, 16 to 25, the acknowledgement
        // of the write, and 10 more.
        let hit = [8, 9, 14, 15, 18, 30];
        pair.fate = Box::new(move |n, _| match hit.contains(&n) {
            true if late => Fate::Late,
            true => Fate::Drop,
            false => Fate::Pass,
        });
        let (remote, nodes) = (pair.nodes[1].remote(0), &pair.nodes);
        let add = SendOp::FetchAdd { remote: nodes[1].remote(9000), add: 1 };
        let at = |n: usize| [nodes[0].sge(n * 2560, 2560)];
        let eight = [nodes[0].sge(20_000, 8)];
        let reads = [at(0), at(1), at(2)];
        let second = nodes[1].remote(2560);
        let third = nodes[1].remote(5120);
        pair.post(0, 1, SendOp::Read(remote), &reads[0]);
        pair.post(0, 2, add, &eight);
        pair.post(0, 3, SendOp::Read(second), &reads[1]);
        pair.post(0, 4, SendOp::Write(remote), &[]);
        pair.post(0, 5, SendOp::Read(third), &reads[2]);
        pair.finish(0, 5);
        assert_eq!(pair.nodes[0].bytes(0, 7680), pattern(7680, 4), "{late}");
        assert_eq!(pair.nodes[0].bytes(20_000, 8), 7_u64.to_ne_bytes());
        assert_eq!(pair.nodes[1].bytes(9000, 8), 8_u64.to_ne_bytes());
        let counters = pair.nodes[0].dev.counters();
        assert_eq!(counters.timeouts, 0);
        let again = pair.log[5..].iter().filter(|seen| seen.from == 1).count();
        assert!(again <= 32 + 20, "{late}: {again} {counters:?}");
    }
}

/// [REQ-5], [REQ-20]: a region is not invalidated before all data sent from it is acknowledged,
/// since it may have to be sent again.
#[test]
fn an_invalidation_waits_until_it_is_alone() {
    for lost in 0..4 {
        let mut pair = Pair::new(&setup());
        let node = &mut pair.nodes[0];
        let key = node.dev.alloc_mr(node.pd).unwrap().rkey;
        node.fill(0, 700, 9);
        let piece = Piece { buffer: node.buffer.clone(), offset: 0, len: 700 };
        let access = Access::empty();
        let bind = SendOp::RegMr { key, pieces: vec![piece], iova: 0, access };
        let remote = pair.nodes[1].remote(5000);
        pair.lose(&[lost]);
        pair.post(0, 0, bind, &[]);
        pair.post(0, 1, SendOp::Write(remote), &[Sge { addr: 0, len: 700, lkey: key }]);
        pair.post(0, 2, SendOp::LocalInv(key), &[]);
        pair.finish(0, 3);
        assert_eq!(pair.nodes[1].bytes(5000, 700), pattern(700, 9));
    }
}

/// [MR-4], [RSP-18]: the memory of a posted receive is gone.
#[test]
fn a_receive_without_memory_fails_on_both_sides() {
    let mut pair = Pair::new(&setup());
    let room = [pair.nodes[1].sge(0, 100)];
    for id in 0..2 {
        pair.post_recv(1, id, &room);
    }
    let lkey = pair.nodes[1].keys.lkey;
    pair.nodes[1].dev.dereg_mr(lkey).unwrap();
    let from = [pair.nodes[0].sge(0, 100)];
    pair.post(0, 7, SendOp::Send, &from);
    pair.post(0, 8, SendOp::Send, &from);
    pair.settle();
    assert_eq!(pair.outcomes(0), [(7, Status::RemOpErr), (8, Status::WrFlushErr)]);
    let ended: Vec<_> = pair.nodes[1].received.iter().map(|done| done.status).collect();
    assert_eq!(ended, [Status::LocProtErr, Status::WrFlushErr]);
    assert_eq!(pair.nodes[1].state(), QpState::Err);
}

/// [REQ-22]: an RNR pause is not measured as a round trip, so the next loss is noticed as soon as
/// before.
#[test]
fn a_pause_is_not_taken_for_a_slow_path() {
    let mut pair = Pair::new(&Setup { min_rnr_timer: 0, ..setup() });
    let (sges, room) = ([pair.nodes[0].sge(0, 10)], [pair.nodes[1].sge(0, 10)]);
    pair.post(0, 0, SendOp::Send, &sges);
    pair.settle();
    pair.post_recv(1, 0, &room);
    pair.post_recv(1, 1, &room);
    pair.finish(0, 1);
    let start = pair.now;
    pair.lose(&[pair.packets()]);
    pair.post(0, 1, SendOp::Send, &sges);
    pair.finish(0, 2);
    assert!(pair.now.saturating_since(start) < Duration::from_millis(20));
}
