//! Sequence numbers, duplicates and acknowledgements.

use super::*;

const ONLY: Opcode = Opcode::SendOnly;

fn with_receives(count: u64) -> Side {
    let mut side = Side::new();
    let region = side.region(4096, Access::LOCAL_WRITE);
    for id in 0..count {
        side.post(id, &[region.sge(0, 4096)]);
    }
    side
}

/// A SEND of one byte with any number.
fn only(psn: u32, ack_req: bool) -> Packet<'static> {
    let bth = Bth { dest_qpn: 0x42, psn: Psn::new(psn), ack_req, ..Bth::default() };
    let mut packet = Packet::new(ONLY, bth);
    packet.payload = b"x";
    packet
}

/// [RSP-2], [RSP-3], section 12: rows 1 to 4.
#[test]
fn one_nak_for_a_gap_and_an_acknowledgement_for_every_duplicate() {
    let mut side = with_receives(9);
    assert_eq!(side.feed(&only(FIRST + 5, true)), PacketOutcome::Continue);
    assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x60, 0)]);
    side.feed(&only(FIRST + 6, true));
    assert_eq!(side.replies(), []);
    assert_eq!(side.done, []);
    // The gap goes on with what comes next.
    side.feed(&only(FIRST, true));
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 1, 0x60, 1)]);
    for ack_req in [true, false] {
        side.feed(&only(FIRST, ack_req));
        assert_eq!(side.replies(), [Answer::ack(FIRST, 1)]);
    }
    side.feed(&only(FIRST + 1, false));
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 2, 0x60, 2)]);
    side.feed(&only(FIRST + 3, false));
    assert_eq!(side.replies(), []);
    assert_eq!(side.completions().len(), 2);
    assert_eq!(side.counters.naks_sequence_sent, 3);
    assert_eq!(side.counters.requests_duplicate, 2);
}

/// [RSP-3]: a duplicate before anything was executed, and half a turn away at most.
#[test]
fn a_duplicate_of_a_former_life_is_answered_harmlessly() {
    let mut side = with_receives(1);
    for psn in [FIRST - 1, FIRST.wrapping_sub(1 << 23)] {
        side.feed(&only(psn, true));
        assert_eq!(side.replies(), [Answer::ack(FIRST - 1, 0)]);
    }
    side.feed(&only(FIRST + (1 << 23) - 1, true));
    assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x60, 0)]);
    assert_eq!(side.done, []);
}

/// [RSP-16], [RSP-15].
#[test]
fn acknowledgements_of_a_batch_are_one() {
    let mut side = with_receives(64);
    for psn in FIRST..FIRST + 64 {
        side.feed(&only(psn, psn % 16 == 0));
    }
    let last = (FIRST..FIRST + 64).rev().find(|psn| psn % 16 == 0).unwrap();
    assert_eq!(side.replies(), [Answer::ack(last, last - FIRST + 1)]);
    assert_eq!(side.completions().len(), 64);
}

/// [RSP-16]: not beyond a READ that is not answered; [RSP-14]: in order.
#[test]
fn acknowledgements_do_not_overtake_a_read() {
    let mut side = with_receives(4);
    let region = side.region(3 * MTU, Access::REMOTE_READ);
    side.send_ack(ONLY, b"a");
    side.read(region.va, region.key, 2 * MTU as u32);
    side.send_ack(ONLY, b"b");
    side.send_ack(ONLY, b"c");
    side.feed(&only(FIRST, true));
    let got: Vec<_> = side.replies().iter().map(|a| (a.op, a.psn - FIRST)).collect();
    let expected = [
        (Opcode::Acknowledge, 0),
        (Opcode::ReadResponseFirst, 1),
        (Opcode::ReadResponseLast, 2),
        (Opcode::Acknowledge, 4),
    ];
    assert_eq!(got, expected);
    // A duplicate acknowledges what was executed last, and no READ after that.
    side.read(region.va, region.key, 1);
    side.replies();
    side.feed(&only(FIRST, true));
    assert_eq!(side.replies(), [Answer::ack(FIRST + 4, 5)]);
}

/// [RSP-2], [RSP-16]: a NAK acknowledges what is before it, so it comes alone; nothing is said of a
/// gap that was filled meanwhile.
#[test]
fn a_nak_stands_for_acknowledgements_before_it() {
    let mut side = with_receives(9);
    side.feed(&only(FIRST, true));
    side.feed(&only(FIRST + 2, true));
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 1, 0x60, 1)]);
    side.feed(&only(FIRST + 1, false));
    side.feed(&only(FIRST + 4, true));
    side.feed(&only(FIRST + 3, true));
    assert_eq!(side.replies(), [Answer::ack(FIRST + 4, 5)]);
}

/// What comes after a gap is carried out once, in order, when the gap is filled, and acknowledged
/// as far as it goes though only the first of it asked for that [RSP-2], [RSP-16], [RSP-19].
#[test]
fn what_comes_after_a_gap_is_kept() {
    let mut side = with_receives(9);
    for ahead in [3, 1, 6, 2, 1, 3] {
        side.feed(&only(FIRST + ahead, false));
    }
    assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x60, 0)]);
    assert_eq!(side.done, []);
    assert_eq!(side.responder.reorder.len(), 4);
    assert!(side.reorder_budget.used() > 0);
    side.feed(&only(FIRST, true));
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 4, 0x60, 4)]);
    let ids =
        |side: &mut Side| -> Vec<_> { side.completions().iter().map(|done| done.wr_id).collect() };
    assert_eq!(ids(&mut side), [0, 1, 2, 3]);
    side.feed(&only(FIRST + 4, false));
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 5, 0x60, 5)]);
    side.feed(&only(FIRST + 5, true));
    assert_eq!(side.replies(), [Answer::ack(FIRST + 6, 7)]);
    assert_eq!(ids(&mut side), [4, 5, 6]);
    assert_eq!(side.reorder_budget.used(), 0);
    assert_eq!((side.counters.requests_kept, side.counters.requests_replayed), (6, 4));
    assert_eq!(side.counters.requests_discarded, 0);
}

/// What a peer makes this side keep is bounded by number and by bytes, and given back.
#[test]
fn little_is_kept_for_a_peer() {
    let mut side = with_receives(9);
    for ahead in (1..20_000).rev() {
        side.feed(&only(FIRST + ahead, false));
    }
    assert_eq!(side.responder.reorder.len(), 1 << 14);
    assert_eq!(side.counters.requests_discarded, 19_999 - (1 << 14));
    side.flush();
    assert_eq!(side.reorder_budget.used(), 0);
    let mut side = with_receives(9);
    side.reorder_budget = ReorderBudget::new(100);
    for ahead in 1..100 {
        side.feed(&only(FIRST + ahead, false));
    }
    assert!(side.reorder_budget.used() <= 100 && side.responder.reorder.len() > 1);
    let budget = side.reorder_budget.clone();
    drop(side);
    assert_eq!(budget.used(), 0);
}

/// [RSP-12]: while a receive is missing, nothing is kept; a receive missing for what was kept makes
/// the peer send it again.
#[test]
fn nothing_is_kept_while_a_receive_is_missing() {
    let mut side = with_receives(2);
    for ahead in [1, 2, 3] {
        side.feed(&only(FIRST + ahead, false));
    }
    side.replies();
    side.feed(&only(FIRST, true));
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 2, 0x20 | 12, 2)]);
    side.feed(&only(FIRST + 3, true));
    assert_eq!(side.replies(), []);
    assert_eq!(side.responder.reorder.len(), 0);
    side.post_len(7, 10);
    side.feed(&only(FIRST + 2, true));
    assert_eq!(side.replies(), [Answer::ack(FIRST + 2, 3)]);
}

/// [RSP-18]: after a fault nothing of what was kept is carried out.
#[test]
fn a_fault_among_what_was_kept_ends_it() {
    let mut side = with_receives(9);
    side.feed(&only(FIRST + 1, true));
    let mut bad = only(FIRST + 2, true);
    bad.opcode = Opcode::SendLast;
    side.feed(&bad);
    side.feed(&only(FIRST + 3, true));
    side.replies();
    assert_eq!(side.feed(&only(FIRST, true)), PacketOutcome::Fatal);
    assert_eq!(side.replies().last(), Some(&Answer::syndrome(FIRST + 2, 0x61, 2)));
    assert_eq!(side.reorder_budget.used(), 0);
}

/// [RSP-12], [RSP-13], [RSP-23], section 12: row 6.
#[test]
fn without_a_receive_the_peer_is_asked_to_wait() {
    for code in [0, 1, 12, 31] {
        let mut side = Side::new();
        side.responder.set_rnr_timer(code);
        side.feed(&only(FIRST, true));
        side.feed(&only(FIRST + 1, true));
        side.feed(&only(FIRST + 2, true));
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x20 | code, 0)]);
        // Again, and there is still none.
        side.feed(&only(FIRST, true));
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x20 | code, 0)]);
        side.post_len(7, 1);
        side.feed(&only(FIRST + 1, true));
        assert_eq!(side.replies(), []);
        side.feed(&only(FIRST, true));
        assert_eq!(side.replies(), [Answer::ack(FIRST, 1)]);
        assert_eq!(side.statuses(), [(7, Status::Success)]);
        assert_eq!(side.counters.rnr_naks_sent, 2);
    }
}

/// Checklist 5: nothing changes where the numbers begin again.
#[test]
fn numbers_wrap() {
    let mut side = Side::with(MTU, 4, 0xff_fffe);
    let region = side.region(1024, EVERY);
    side.post(1, &[region.sge(0, 1024)]);
    side.send_message(&pattern(3 * MTU));
    assert_eq!(side.replies(), [Answer::ack(0, 1)]);
    side.psn = Psn::new(0xff_fffe);
    side.send_message(&pattern(3 * MTU));
    assert_eq!(side.replies(), [Answer::ack(0, 1)]);
    let mut side = Side::with(MTU, 4, 0xff_fffe);
    let region = side.region(1024, EVERY);
    side.read(region.va, region.key, 1024);
    let psns = |side: &mut Side| side.replies().iter().map(|a| a.psn).collect::<Vec<_>>();
    assert_eq!(psns(&mut side), [0xff_fffe, 0xff_ffff, 0, 1]);
    side.read_at(0, region.va + 512, region.key, 512);
    assert_eq!(psns(&mut side), [0, 1]);
    side.atomic(Opcode::FetchAdd, region.va, region.key, (1, 0));
    assert_eq!(psns(&mut side), [2]);
    side.responder.msn = 0xff_ffff;
    side.write_message(region.va, region.key, b"x");
    assert_eq!(side.replies(), [Answer::ack(3, 0)]);
}

/// [RSP-24].
#[test]
fn the_last_acknowledgement_is_repeated_twice() {
    let mut side = with_receives(4);
    side.feed(&only(FIRST, true));
    assert_eq!(side.responder.poll_timeout(), None);
    assert_eq!(side.replies().len(), 1);
    side.sleep(49);
    assert!(!side.responder.has_reply());
    side.sleep(1);
    assert_eq!(side.replies(), [Answer::ack(FIRST, 1)]);
    side.sleep(199);
    assert!(!side.responder.has_reply());
    side.sleep(1);
    assert_eq!(side.replies(), [Answer::ack(FIRST, 1)]);
    assert_eq!(side.responder.poll_timeout(), None);
    assert_eq!((side.counters.acks_sent, side.counters.acks_repeated), (3, 2));
    // A NAK ends it, a new acknowledgement begins it again.
    side.feed(&only(FIRST + 1, true));
    side.replies();
    side.feed(&only(FIRST + 3, true));
    side.replies();
    assert_eq!(side.responder.poll_timeout(), None);
    side.feed(&only(FIRST + 2, true));
    side.replies();
    assert!(side.responder.poll_timeout().is_some());
    side.flush();
    assert_eq!(side.responder.poll_timeout(), None);
}

/// Bytes of the vectors V1 and V12 to V15, without ICRC.
#[test]
fn replies_are_those_of_the_vectors() {
    let reply = |side: &mut Side, qpn: u32| {
        let mut out = Burst::new();
        assert!(side.ctx(|responder, ctx| responder.fill_reply(ctx, Qpn(qpn), &mut out)));
        out.bytes.iter().map(|b| format!("{b:02x}")).collect::<String>()
    };
    let mut side = Side::with(MTU, 1, 0xb2_98ce);
    side.post_len(1, 16);
    side.send_ack(ONLY, &[0; 16]);
    assert_eq!(reply(&mut side, 0x11), "1100ffff0000001100b298ce1f000001"); // V1

    let mut side = Side::with(MTU, 1, 0xda_47bf);
    side.feed(&only(0xda_47c4, true));
    assert_eq!(reply(&mut side, 0x82_8724), "1100ffff0082872400da47bf60000000"); // V12

    let mut side = Side::with(MTU, 1, 0xda_47bf);
    side.responder.set_rnr_timer(0);
    for _ in 0..4 {
        side.post_len(1, 1);
        side.send(ONLY, b"x");
    }
    side.send_ack(ONLY, b"x");
    assert_eq!(reply(&mut side, 0x82_8724), "1100ffff0082872400da47c320000004"); // V13

    let mut side = Side::with(MTU, 1, 0xcf_5f31);
    assert_eq!(side.write_message(0, 77, b"x"), PacketOutcome::Fatal);
    assert_eq!(reply(&mut side, 0x91_f25f), "1100ffff0091f25f00cf5f3162000000"); // V14

    let mut side = Side::with(MTU, 1, 0x43_bfa4);
    side.write_message(0, 0, b"");
    side.reply();
    side.read(0, 0, 0);
    assert_eq!(reply(&mut side, 0x2f_27a4), "1000ffff002f27a40043bfa51f000002"); // V15
}

/// [CC-10], [CC-14]: gaps are reported once, and how far packets have come when they ask.
#[test]
fn gaps_and_progress_are_reported_to_a_peer_that_takes_reports() {
    let mut side = with_receives(9);
    side.responder.report_gaps();
    side.feed(&only(FIRST + 2, false));
    let gap = |psn, count| Answer::syndrome(psn, 0x40, count);
    assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x60, 0), gap(FIRST, 2)]);
    side.feed(&only(FIRST + 3, false));
    assert_eq!(side.replies(), [], "nobody asked");
    side.feed(&only(FIRST + 5, true));
    side.feed(&only(FIRST + 6, true));
    assert_eq!(side.replies(), [gap(FIRST + 4, 1), gap(FIRST + 7, 0)], "the last one says all");
    side.feed(&only(FIRST + 6, true));
    assert_eq!(side.replies(), [gap(FIRST + 7, 0)], "a duplicate asks as well");
    assert_eq!(side.counters.gaps_reported, 2);
}
