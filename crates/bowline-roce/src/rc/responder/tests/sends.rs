//! Messages for posted receives.

use super::*;

/// Checklist 11; [HDR-11], [RSP-15], [RSP-19], [RSP-21].
#[test]
fn messages_of_every_length_arrive() {
    for mtu in [256, 512, 1024, 2048, 4096] {
        let mut side = Side::with(mtu, 0, FIRST);
        for (i, len) in [0, 1, 3, 4, mtu - 1, mtu, mtu + 1, 2 * mtu, 1 << 20].iter().enumerate() {
            let region = side.post_len(i as u64, *len);
            let bytes = pattern(*len);
            assert_eq!(side.send_message(&bytes), PacketOutcome::Continue);
            assert_eq!(side.replies(), [Answer::ack(side.psn.previous().get(), i as u32 + 1)]);
            assert_eq!(region.bytes()[..*len], bytes);
            let [done] = side.completions()[..] else { panic!() };
            let expected = Completion {
                wr_id: i as u64,
                opcode: WcOpcode::Recv,
                byte_len: *len as u32,
                qpn: Qpn(0x42),
                ..Completion::default()
            };
            assert_eq!(done, expected);
        }
    }
}

/// [RSP-7], [RSP-19]: a message fills the pieces of its receive in their order.
#[test]
fn a_receive_may_lie_in_pieces() {
    let mut side = Side::new();
    let (a, b) = (side.region(300, Access::LOCAL_WRITE), side.region(400, Access::LOCAL_WRITE));
    side.post(1, &[a.sge(100, 100), b.sge(0, 0), b.sge(7, 300), a.sge(0, 100)]);
    side.post(2, &[]);
    let bytes = pattern(450);
    side.send_message(&bytes);
    side.send_message(&[]);
    assert_eq!(a.bytes()[100..200], bytes[..100]);
    assert_eq!(b.bytes()[7..307], bytes[100..400]);
    assert_eq!(a.bytes()[..50], bytes[400..]);
    assert_eq!(a.bytes()[50..100], [0; 50]);
    assert_eq!(side.statuses(), [(1, Status::Success), (2, Status::Success)]);
}

/// [RSP-19]: a completion is written by the last packet, not before.
#[test]
fn a_message_completes_when_all_of_it_is_there() {
    let mut side = Side::new();
    side.post_len(1, 1000);
    side.send(Opcode::SendFirst, &[1; MTU]);
    side.send(Opcode::SendMiddle, &[2; MTU]);
    assert_eq!(side.done, []);
    side.send(Opcode::SendLast, &[3; 5]);
    assert_eq!(side.completions()[0].byte_len, 2 * MTU as u32 + 5);
    assert_eq!(side.replies(), []);
}

/// [RSP-20], [RSP-21]; the last packet tells [REQ-14].
#[test]
fn immediates_and_solicitation_are_passed_on() {
    let mut side = Side::new();
    let region = side.region(1024, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    for id in 0..4 {
        side.post(id, &[region.sge(0, 1024)]);
    }
    let mut first = side.next(Opcode::SendFirst, &[0; MTU]);
    first.bth.solicited = true;
    side.feed(&first);
    let mut last = side.next(Opcode::SendLastImm, b"x");
    last.imm = Some(0x0102_0304);
    side.feed(&last);
    let mut only = side.next(Opcode::SendOnlyImm, b"x");
    (only.imm, only.bth.solicited) = (Some(7), true);
    side.feed(&only);
    let mut write = side.next(Opcode::WriteOnlyImm, b"x");
    (write.imm, write.bth.solicited) = (Some(8), true);
    write.reth = Some(Reth { va: region.va, rkey: region.key, len: 1 });
    side.feed(&write);
    let got: Vec<_> = side.done.iter().map(|done| (done.completion.imm, done.wakes)).collect();
    assert_eq!(got, [(Some(0x0102_0304), false), (Some(7), true), (Some(8), true)]);
}

/// [RSP-9]: longer than the receive.
#[test]
fn a_message_too_long_is_refused() {
    let mut side = Side::new();
    let region = side.region(1024, Access::LOCAL_WRITE);
    side.post(1, &[region.sge(0, 100), region.sge(200, 200)]);
    side.post(2, &[]);
    side.send(Opcode::SendFirst, &[7; MTU]);
    assert_eq!(side.send(Opcode::SendLast, &[8; 45]), PacketOutcome::Fatal);
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 1, 0x61, 0)]);
    assert_eq!(region.bytes()[356..], [0; 668]);
    assert!(side.done[0].wakes);
    side.flush();
    assert_eq!(side.statuses(), [(1, Status::LocLenErr), (2, Status::WrFlushErr)]);
}

/// [MR-4], [RSP-18].
#[test]
fn a_receive_with_a_useless_key_fails() {
    let mut side = Side::new();
    let read_only = side.region(100, Access::REMOTE_READ);
    let good = side.region(100, Access::LOCAL_WRITE);
    let bad = [
        Sge { lkey: 0, ..good.sge(0, 100) },
        good.sge(1, 100),
        read_only.sge(0, 100),
        Sge { addr: u64::MAX, ..good.sge(0, 100) },
    ];
    for sge in bad {
        side.responder.start(FIRST, 0, 0);
        side.psn = Psn::new(FIRST);
        side.post(5, &[sge]);
        assert_eq!(side.send(Opcode::SendOnly, &[1; 100]), PacketOutcome::Fatal);
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x63, 0)]);
        assert_eq!(side.statuses(), [(5, Status::LocProtErr)]);
    }
    assert_eq!(read_only.bytes(), [0; 100]);
}

/// [RSP-4], section 12: a SEND MIDDLE without FIRST.
#[test]
fn operations_out_of_sequence_are_refused() {
    use Opcode::*;
    let starts = [SendFirst, SendOnly, WriteFirst, WriteOnly, ReadRequest, CompareSwap, FetchAdd];
    let sends = [SendMiddle, SendLast, SendLastImm, SendLastInvalidate];
    let writes = [WriteMiddle, WriteLast, WriteLastImm];
    let cases = [
        (None, [&sends[..], &writes].concat()),
        (Some(SendFirst), [&starts[..], &writes].concat()),
        (Some(WriteFirst), [&starts[..], &sends].concat()),
    ];
    for (before, refused) in cases {
        for op in refused {
            let mut side = Side::new();
            let region = side.region(1024, EVERY);
            side.post_len(1, 1024);
            side.post_len(2, 1024);
            if let Some(before) = before {
                let mut packet = side.next(before, &[0; MTU]);
                packet.reth = Some(Reth { va: region.va, rkey: region.key, len: 1024 });
                assert_eq!(side.feed(&packet), PacketOutcome::Continue);
            }
            let psn = side.psn.get();
            let payload: &[u8] = match op.payload_rule().allows(0, MTU) {
                true => &[],
                false => &[1; MTU],
            };
            let mut packet = side.next(op, payload);
            packet.reth = Some(Reth { va: region.va, rkey: region.key, len: 0 });
            packet.atomic =
                Some(AtomicEth { va: region.va, rkey: region.key, ..AtomicEth::default() });
            assert_eq!(side.feed(&packet), PacketOutcome::Fatal, "{before:?} {op}");
            assert_eq!(side.replies(), [Answer::syndrome(psn, 0x61, 0)]);
            let taken = before == Some(SendFirst);
            let failed: &[_] = if taken { &[(1, Status::RemInvReqErr)] } else { &[] };
            assert_eq!(side.statuses(), failed);
        }
    }
}

/// [RSP-9], [HDR-11], [HDR-3].
#[test]
fn packets_of_a_wrong_length_are_refused() {
    use Opcode::*;
    let long = [0; MTU + 4];
    let cases: [(&[(Opcode, usize)], usize); 7] = [
        (&[(SendFirst, MTU - 1)], 0),
        (&[(SendFirst, 0)], 0),
        (&[(SendFirst, MTU), (SendMiddle, MTU - 4)], 1),
        (&[(SendFirst, MTU), (SendLast, 0)], 1),
        (&[(SendFirst, MTU), (SendLast, MTU + 1)], 1),
        (&[(SendOnly, MTU + 1)], 0),
        (&[(SendFirst, MTU + 4)], 0),
    ];
    for (packets, bad) in cases {
        let mut side = Side::new();
        side.post_len(1, 4096);
        for (i, (op, len)) in packets.iter().enumerate() {
            let after = side.send(*op, &long[..*len]);
            assert_eq!(after == PacketOutcome::Fatal, i == bad, "{packets:?}");
        }
        assert_eq!(side.replies(), [Answer::syndrome(FIRST + bad as u32, 0x61, 0)]);
        assert_eq!(side.statuses(), [(1, Status::RemInvReqErr)]);
    }
}

/// [RSP-18], [REQ-17], [MR-7].
#[test]
fn a_send_may_invalidate_a_key() {
    let mut side = Side::new();
    let buffer = Arc::new(Buffer::new(64).unwrap());
    let key = side.mrs.allocate(&mut side.rng, PD).unwrap().rkey;
    let pieces = vec![Piece { buffer, offset: 0, len: 64 }];
    side.mrs.bind(PD, key, pieces, 0, Access::REMOTE_WRITE).unwrap();
    side.post_len(1, 10);
    let received = side.post_len(2, 10);
    side.write_message(0, key, b"abc");
    for after in [PacketOutcome::Continue, PacketOutcome::Fatal] {
        let mut packet = side.next(Opcode::SendOnlyInvalidate, b"bye");
        packet.ieth = Some(key ^ u32::from(after == PacketOutcome::Fatal));
        packet.bth.ack_req = true;
        assert_eq!(side.feed(&packet), after);
    }
    // As rxe has it: the data is there, the message acknowledged, and the queue pair in error.
    assert_eq!(side.replies(), [Answer::ack(FIRST + 2, 3)]);
    assert_eq!(received.bytes()[..3], *b"bye");
    let done = side.completions();
    assert_eq!((done[0].status, done[0].invalidated), (Status::Success, Some(key)));
    assert_eq!((done[1].wr_id, done[1].status), (2, Status::RemInvReqErr));
    let gone = side.mrs.check(PD, key, 0, 1, Access::REMOTE_WRITE);
    assert!(gone.is_err());
}

/// [QP-4], checklist 10: after a fault nothing is taken, and what is posted is flushed in order
/// after the error.
#[test]
fn after_a_fault_there_is_silence() {
    let mut side = Side::new();
    for id in 1..=3 {
        side.post_len(id, 1024);
    }
    side.send(Opcode::SendFirst, &[0; MTU]);
    assert_eq!(side.send(Opcode::SendOnly, b"x"), PacketOutcome::Fatal);
    assert!(side.responder.failed());
    side.psn = Psn::new(FIRST + 1);
    assert_eq!(side.send_ack(Opcode::SendLast, b"x"), PacketOutcome::Fatal);
    side.psn = Psn::new(FIRST);
    assert_eq!(side.send_ack(Opcode::SendFirst, &[0; MTU]), PacketOutcome::Fatal);
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 1, 0x61, 0)]);
    side.flush();
    side.post_len(4, 10);
    side.flush();
    let flushed = Status::WrFlushErr;
    let expected = [(1, Status::RemInvReqErr), (2, flushed), (3, flushed), (4, flushed)];
    assert_eq!(side.statuses(), expected);
    assert_eq!(side.replies(), []);
}

/// [QP-4]: a message half way is flushed first.
#[test]
fn a_receive_taken_is_flushed_too() {
    let mut side = Side::new();
    side.post_len(1, 1024);
    side.post_len(2, 1024);
    side.send_ack(Opcode::SendFirst, &[0; MTU]);
    side.flush();
    assert_eq!(side.statuses(), [(1, Status::WrFlushErr), (2, Status::WrFlushErr)]);
    assert!(!side.responder.has_reply());
}

/// The queue of receives has an end.
#[test]
fn as_many_receives_as_allowed_are_posted() {
    let mut responder = Responder::new();
    let sge = Sge::default();
    for id in 0..3 {
        responder.post_recv(&RecvWr { id, sges: &[sge; 3] }, 3).unwrap();
    }
    assert_eq!(responder.post_recv(&RecvWr { id: 3, sges: &[] }, 3), Err(Error::QueueFull));
}
