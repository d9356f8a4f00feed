//! RDMA writes and atomic operations.

use super::*;

/// Checklist 11; [RSP-15].
#[test]
fn writes_of_every_length_arrive() {
    for mtu in [256, 512, 1024, 2048, 4096] {
        let mut side = Side::with(mtu, 0, FIRST);
        for (i, len) in [0, 1, 3, 4, mtu - 1, mtu, mtu + 1, 2 * mtu, 1 << 20].iter().enumerate() {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let region = side.region(len + 2, access);
            let bytes = pattern(*len);
            assert_eq!(
                side.write_message(region.va + 1, region.key, &bytes),
                PacketOutcome::Continue
            );
            assert_eq!(side.replies(), [Answer::ack(side.psn.previous().get(), i as u32 + 1)]);
            assert_eq!(region.bytes(), [&[0], &bytes[..], &[0]].concat());
        }
        assert_eq!(side.done, []);
    }
}

/// [RSP-7], [RSP-8], checklist 11.
#[test]
fn a_write_with_immediate_takes_a_receive_and_does_not_write_it() {
    for len in [0, 1, 3, 4, MTU - 1, MTU, MTU + 1, 2 * MTU, 1 << 20] {
        let mut side = Side::new();
        let region = side.region(len.max(1), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let receive = side.post_len(9, 5);
        let bytes = pattern(len);
        assert_eq!(side.write_imm_message(region.va, region.key, &bytes), PacketOutcome::Continue);
        assert_eq!(region.bytes()[..len], bytes);
        assert_eq!(receive.bytes(), [0; 5]);
        let expected = Completion {
            wr_id: 9,
            opcode: WcOpcode::RecvRdmaWithImm,
            byte_len: len as u32,
            imm: Some(0xabcd),
            qpn: Qpn(0x42),
            ..Completion::default()
        };
        assert_eq!(side.completions(), [expected]);
    }
}

/// [RSP-7], [RSP-12]: the data before the last packet is in place when the RNR NAK is sent, and the
/// last packet alone comes again.
#[test]
fn a_write_with_immediate_waits_for_a_receive() {
    let mut side = Side::new();
    let region = side.region(1024, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let bytes = pattern(MTU + 10);
    side.write_imm_message(region.va, region.key, &bytes);
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 1, 0x20 | 12, 0)]);
    assert_eq!(region.bytes()[..MTU], bytes[..MTU]);
    assert_eq!(region.bytes()[MTU..], [0; 1024 - MTU]);
    side.post_len(1, 0);
    let mut last = side.next(Opcode::WriteLastImm, &bytes[MTU..]);
    last.bth.psn = Psn::new(FIRST + 1);
    last.bth.ack_req = true;
    side.feed(&last);
    assert_eq!(side.replies(), [Answer::ack(FIRST + 1, 1)]);
    assert_eq!(region.bytes()[..bytes.len()], bytes);
    assert_eq!(side.completions()[0].byte_len, bytes.len() as u32);

    let mut side = Side::new();
    let region = side.region(8, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    side.write_imm_message(region.va, region.key, b"12345678");
    assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x20 | 12, 0)]);
    assert_eq!(region.bytes(), [0; 8]);
}

/// [RSP-9], [HDR-12]: what is said and what is sent do not agree.
#[test]
fn writes_of_a_wrong_length_are_refused() {
    use Opcode::*;
    let bytes = [7; MTU + 4];
    let mtu = MTU as u32;
    type Case<'c> = (u32, &'c [(Opcode, usize)], u32);
    let cases: [Case<'_>; 12] = [
        (3, &[(WriteOnly, 4)], 0),
        (3, &[(WriteOnly, 2)], 0),
        (0, &[(WriteOnly, 1)], 0),
        (mtu + 1, &[(WriteOnly, MTU)], 0),
        (mtu + 4, &[(WriteOnly, MTU + 4)], 0),
        (mtu, &[(WriteFirst, MTU)], 0),
        (3 * mtu, &[(WriteFirst, MTU - 4)], 0),
        (3 * mtu, &[(WriteFirst, MTU), (WriteLast, MTU)], 1),
        (3 * mtu, &[(WriteFirst, MTU), (WriteMiddle, MTU), (WriteMiddle, MTU)], 2),
        (2 * mtu - 1, &[(WriteFirst, MTU), (WriteLast, MTU)], 1),
        (mtu + 1, &[(WriteFirst, MTU), (WriteLast, 0)], 1),
        ((1 << 31) + 1, &[(WriteFirst, MTU)], 0),
    ];
    for (len, packets, bad) in cases {
        let mut side = Side::new();
        let region = side.region(3 * MTU, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        for (i, (op, size)) in packets.iter().enumerate() {
            let mut packet = side.next(*op, &bytes[..*size]);
            packet.reth = Some(Reth { va: region.va, rkey: region.key, len });
            assert_eq!(
                side.feed(&packet) == PacketOutcome::Fatal,
                i as u32 == bad,
                "{len} {packets:?}"
            );
        }
        assert_eq!(side.replies(), [Answer::syndrome(FIRST + bad, 0x61, 0)]);
        assert!(region.bytes()[bad as usize * MTU..].iter().all(|b| *b == 0));
    }
}

/// [RSP-1]: the receive is taken before length and key are looked at; [RSP-18]: it tells.
#[test]
fn a_write_with_immediate_that_fails_completes_its_receive() {
    let cases = [(9, false, 0x61, Status::RemInvReqErr), (8, true, 0x62, Status::RemAccessErr)];
    for (len, wrong_key, syndrome, status) in cases {
        let mut side = Side::new();
        let region = side.region(8, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        side.post_len(3, 1);
        let mut packet = side.next(Opcode::WriteOnlyImm, b"12345678");
        let rkey = region.key ^ u32::from(wrong_key);
        packet.reth = Some(Reth { va: region.va, rkey, len });
        assert_eq!(side.feed(&packet), PacketOutcome::Fatal);
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, syndrome, 0)]);
        assert_eq!(side.statuses(), [(3, status)]);
        assert_eq!(region.bytes(), [0; 8]);
    }
}

/// [RSP-11], [RSP-3]: executed once; the saved value is sent again.
#[test]
fn atomics_are_executed_once() {
    let mut side = Side::new();
    let region = side.region(64, EVERY);
    let value = || u64::from_ne_bytes(region.bytes()[8..16].try_into().unwrap());
    region.buffer.write(8, &5_u64.to_ne_bytes());
    let (va, key) = (region.va + 8, region.key);
    let steps = [
        (Opcode::FetchAdd, (3, 0), 5, 8),
        (Opcode::CompareSwap, (100, 8), 8, 100),
        (Opcode::CompareSwap, (1, 8), 100, 100),
        (Opcode::FetchAdd, (u64::MAX, 0), 100, 99),
    ];
    for (i, (op, operands, before, after)) in steps.into_iter().enumerate() {
        let psn = FIRST + i as u32;
        assert_eq!(side.atomic(op, va, key, operands), PacketOutcome::Continue);
        assert_eq!(value(), after);
        let expected = Answer {
            op: Opcode::AtomicAcknowledge,
            psn,
            aeth: Some((0x1f, i as u32 + 1)),
            original: Some(before),
            payload: Vec::new(),
        };
        let expected = std::slice::from_ref(&expected);
        assert_eq!(side.replies(), expected);
        for _ in 0..2 {
            side.psn = Psn::new(psn);
            side.atomic(op, va, key, operands);
            side.psn = Psn::new(psn);
            side.atomic(op, va, key, operands);
            assert_eq!(side.replies(), expected);
        }
        assert_eq!(value(), after);
    }
    // The ring has two places: the first is forgotten, and its request is discarded.
    side.psn = Psn::new(FIRST);
    side.atomic(Opcode::FetchAdd, va, key, (3, 0));
    assert_eq!(side.replies(), []);
    assert_eq!(value(), 99);
    // What the duplicate of a SEND is told now [RSP-3].
    side.psn = Psn::new(FIRST);
    side.send(Opcode::SendOnly, b"");
    assert_eq!(side.replies(), [Answer::ack(FIRST + 3, 4)]);
}

/// [RSP-3]: of two that had the same number, 2^24 packets apart, the later one counts.
#[test]
fn an_atomic_of_the_turn_before_is_not_meant() {
    let mut side = Side::new();
    let region = side.region(8, EVERY);
    for _ in 0..2 {
        side.responder.expected = Psn::new(FIRST);
        side.psn = Psn::new(FIRST);
        side.atomic(Opcode::FetchAdd, region.va, region.key, (1, 0));
        side.replies();
    }
    side.psn = Psn::new(FIRST);
    side.atomic(Opcode::FetchAdd, region.va, region.key, (1, 0));
    assert_eq!(side.replies()[0].original, Some(1));
}

/// [RSP-11], [RSP-6], [RSP-5].
#[test]
fn atomics_that_cannot_be_are_refused() {
    let refused = |prepare: fn(&mut Side), offset: u64, access: Access, syndrome: u8| {
        let mut side = Side::new();
        prepare(&mut side);
        let region = side.region(64, access);
        let va = region.va + offset;
        assert_eq!(side.atomic(Opcode::FetchAdd, va, region.key, (1, 0)), PacketOutcome::Fatal);
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, syndrome, 0)]);
        assert_eq!(region.bytes(), [0; 64]);
    };
    refused(|_| {}, 4, EVERY, 0x61);
    refused(|side| side.access = Access::REMOTE_READ | Access::REMOTE_WRITE, 8, EVERY, 0x61);
    refused(|side| side.responder.start(FIRST, 0, 0), 8, EVERY, 0x61);
    refused(|_| {}, 8, Access::LOCAL_WRITE | Access::REMOTE_WRITE, 0x62);
    refused(|_| {}, 64, EVERY, 0x62);
    refused(|_| {}, 60, EVERY, 0x62);
}

/// [RSP-11]: memory need not be aligned as its addresses are.
#[test]
fn atomics_work_in_memory_that_is_not_aligned() {
    let mut side = Side::new();
    let buffer = Arc::new(Buffer::new(64).unwrap());
    let at = (&buffer, 3, 16);
    let key = side.mrs.register(
        &mut side.rng,
        PD,
        at,
        Some(0),
        Access::LOCAL_WRITE | Access::REMOTE_ATOMIC,
    );
    let key = key.unwrap().rkey;
    side.atomic(Opcode::FetchAdd, 8, key, (7, 0));
    let mut out = [0; 8];
    buffer.read(11, &mut out);
    assert_eq!(u64::from_ne_bytes(out), 7);
}

/// HDR-5: FLUSH and ATOMIC WRITE are optional.
#[test]
fn optional_operations_are_refused() {
    for op in [Opcode::Flush, Opcode::AtomicWrite] {
        let mut side = Side::new();
        let payload: &[u8] = if op == Opcode::Flush { &[] } else { &[0; 8] };
        assert_eq!(side.send(op, payload), PacketOutcome::Fatal);
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x61, 0)]);
    }
}
