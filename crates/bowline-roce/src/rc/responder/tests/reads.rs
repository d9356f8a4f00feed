//! RDMA reads.

use super::*;

fn filled(side: &mut Side, len: usize) -> Region {
    let region = side.region(len, Access::REMOTE_READ);
    region.buffer.write(0, &pattern(len));
    region
}

fn data(answers: &[Answer]) -> Vec<u8> {
    answers.iter().flat_map(|answer| answer.payload.clone()).collect()
}

/// [RSP-14], checklist 11.
#[test]
fn reads_of_every_length_are_answered() {
    for mtu in [256, 512, 1024, 2048, 4096] {
        let mut side = Side::with(mtu, 1, FIRST);
        for (i, len) in [0, 1, 3, 4, mtu - 1, mtu, mtu + 1, 2 * mtu, 1 << 20].iter().enumerate() {
            let region = filled(&mut side, len + 2);
            let first = side.psn.get();
            assert_eq!(side.read(region.va + 1, region.key, *len as u32), PacketOutcome::Continue);
            let answers = side.replies();
            assert_eq!(answers.len(), len.div_ceil(mtu).max(1));
            assert_eq!(data(&answers), pattern(len + 2)[1..=*len]);
            let last = answers.len() - 1;
            for (k, answer) in answers.iter().enumerate() {
                assert_eq!(answer.psn, first + k as u32);
                let op = match (k == 0, k == last) {
                    (true, true) => Opcode::ReadResponseOnly,
                    (true, false) => Opcode::ReadResponseFirst,
                    (false, true) => Opcode::ReadResponseLast,
                    (false, false) => Opcode::ReadResponseMiddle,
                };
                assert_eq!(answer.op, op);
                let msn = (0x1f, i as u32 + 1);
                assert_eq!(answer.aeth, op.has_aeth().then_some(msn));
            }
        }
    }
}

/// Section 11, the recorded exchange: 3001 bytes in three packets, pad 3, MSN 1.
#[test]
fn the_recorded_read_is_answered_as_it_was() {
    let mut side = Side::with(1024, 1, 0x71_5ee4);
    let region = filled(&mut side, 3001);
    side.post_len(1, 16);
    side.read(region.va, region.key, 3001);
    let packets: Vec<_> = std::iter::from_fn(|| side.reply()).collect();
    let heads: Vec<_> = packets.iter().map(|p| (p[0], p[1] >> 4 & 3, p.len())).collect();
    assert_eq!(heads, [(0x0d, 0, 1040), (0x0e, 0, 1036), (0x0f, 3, 16 + 953 + 3)]);
    assert_eq!(packets[2][12..16], [0x1f, 0, 0, 1]);
    side.send_ack(Opcode::SendOnly, b"done");
    assert_eq!(side.replies(), [Answer::ack(0x71_5ee7, 2)]);
}

/// [RSP-3]: a READ that comes again, whole or its rest, is answered again from memory.
#[test]
fn a_read_that_comes_again_is_answered_again() {
    let mut side = Side::new();
    let region = filled(&mut side, 4 * MTU);
    side.read(region.va, region.key, 3 * MTU as u32 + 5);
    assert_eq!(side.replies().len(), 4);
    region.buffer.write(3 * MTU, b"other");
    for skip in 0..4 {
        let (psn, left) = (FIRST + skip, (3 - skip) * MTU as u32 + 5);
        side.read_at(psn, region.va + u64::from(skip) * MTU as u64, region.key, left);
        let answers = side.replies();
        assert_eq!(answers[0].psn, psn);
        assert_eq!(answers[0].aeth, Some((0x1f, 1)));
        assert_eq!(answers.len() as u32, 4 - skip);
        assert!(data(&answers).ends_with(b"other"));
        assert_eq!(data(&answers).len() as u32, left);
    }
    // What is not a part of it is discarded: other key, other memory, more packets than its rest.
    let (va, key, mtu) = (region.va, region.key, MTU as u32);
    let other = filled(&mut side, 4 * MTU).key;
    for (psn, va, key, len) in [
        (FIRST, va, key ^ 1, 5),
        (FIRST, va, other, 5),
        (FIRST, va - 1, key, 5),
        (FIRST, va + 3 * u64::from(mtu), key, 6),
        (FIRST + 3, va, key, mtu + 1),
        (FIRST, va, key, 0),
        (FIRST - 1, va, key, 5),
        (FIRST, va, key, u32::MAX),
    ] {
        side.read_at(psn, va, key, len);
        assert_eq!(side.replies(), []);
    }
    assert_eq!(side.counters.requests_discarded, 8);
}

/// [RSP-3]: an impatient peer gets each packet once, and one that lost some gets them again.
#[test]
fn a_read_being_answered_goes_on_or_back() {
    let mut side = Side::new();
    let region = filled(&mut side, 4 * MTU);
    let (va, key, len) = (region.va, region.key, 4 * MTU as u32);
    side.read(va, key, len);
    for skip in [0, 0, 1, 2] {
        side.read_at(FIRST + skip, va + u64::from(skip) * MTU as u64, key, len / 2);
    }
    side.reply();
    side.reply();
    side.read_at(FIRST + 2, va + 2 * MTU as u64, key, len / 2);
    let got: Vec<_> = side.replies().iter().map(|a| (a.op, a.psn - FIRST)).collect();
    assert_eq!(got, [(Opcode::ReadResponseMiddle, 2), (Opcode::ReadResponseLast, 3)]);

    side.psn = Psn::new(FIRST + 4);
    side.read(va, key, len);
    side.reply();
    side.reply();
    side.reply();
    side.read_at(FIRST + 5, va + MTU as u64, key, len - MTU as u32);
    let got: Vec<_> = side.replies().iter().map(|a| (a.op, a.psn - FIRST)).collect();
    let expected = [
        (Opcode::ReadResponseFirst, 5),
        (Opcode::ReadResponseMiddle, 6),
        (Opcode::ReadResponseLast, 7),
    ];
    assert_eq!(got, expected);
}

/// [RSP-6], [QP-5].
#[test]
fn as_many_reads_as_agreed_are_outstanding() {
    for (depth, ring) in [(0, 0), (1, 1), (2, 2), (3, 4), (16, 16), (128, 128)] {
        let mut side = Side::with(MTU, depth, FIRST);
        let region = filled(&mut side, MTU);
        for _ in 0..ring {
            assert_eq!(side.read(region.va, region.key, 1), PacketOutcome::Continue);
        }
        assert_eq!(side.read(region.va, region.key, 1), PacketOutcome::Fatal);
        let answers = side.replies();
        assert_eq!(answers.len(), ring + 1);
        assert_eq!(answers[ring], Answer::syndrome(FIRST + ring as u32, 0x61, ring as u32));
    }
    let mut side = Side::with(MTU, 1, FIRST);
    let region = filled(&mut side, MTU);
    for i in 0..10 {
        assert_eq!(side.read(region.va, region.key, 1), PacketOutcome::Continue);
        // The answer to the one before, asked for again, is not wanted when the next one comes.
        let [answer] = &side.replies()[..] else { panic!() };
        assert_eq!(answer.psn, FIRST + i);
        side.read_at(FIRST + i, region.va, region.key, 1);
        assert_eq!(side.responder.replies.len(), 1);
    }
}

/// [RSP-10], section 12: no key is looked at for no bytes.
#[test]
fn a_read_of_nothing_needs_no_key() {
    let mut side = Side::new();
    for i in 0..3 {
        assert_eq!(side.read(u64::MAX, 0xdead_beef, 0), PacketOutcome::Continue);
        let expected = Answer {
            op: Opcode::ReadResponseOnly,
            psn: FIRST + i,
            aeth: Some((0x1f, i + 1)),
            original: None,
            payload: Vec::new(),
        };
        let expected = std::slice::from_ref(&expected);
        assert_eq!(side.replies(), expected);
        side.read_at(FIRST + i, 1, 2, 0);
        assert_eq!(side.replies(), expected);
    }
}

/// [MR-10]: memory taken away while it is being read.
#[test]
fn a_read_ends_when_its_key_does() {
    let mut side = Side::new();
    let region = filled(&mut side, 4 * MTU);
    side.post_len(1, 1);
    side.read(region.va, region.key, 4 * MTU as u32);
    side.send_ack(Opcode::SendOnly, b"x");
    side.reply();
    side.mrs.deregister(region.key).unwrap();
    assert!(!side.responder.failed());
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 1, 0x62, 1)]);
    assert!(side.responder.failed());
}

/// A key that is withdrawn is refused from then on, and READs before that are answered, again if
/// they are repeated.
#[test]
fn a_read_goes_on_when_its_key_is_withdrawn() {
    let mut side = Side::new();
    let region = filled(&mut side, 4 * MTU);
    side.post_len(1, 1);
    side.read(region.va, region.key, 4 * MTU as u32);
    side.send_ack(Opcode::SendOnly, b"x");
    side.reply();
    side.mrs.withdraw_keys(&[region.key]).unwrap();
    let rest = side.replies();
    assert_eq!(
        (data(&rest[..3]), &rest[3..]),
        (pattern(4 * MTU)[MTU..].to_vec(), &[Answer::ack(FIRST + 4, 2)][..])
    );
    side.read_at(FIRST + 1, region.va + MTU as u64, region.key, 3 * MTU as u32);
    assert_eq!(data(&side.replies()), pattern(4 * MTU)[MTU..]);
    assert!(!side.responder.failed());
    side.read(region.va, region.key, 1);
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 5, 0x62, 2)]);
}

/// A request that the network has kept until the memory is gone does no harm to a peer that has its
/// answer (checklist 7).
#[test]
fn a_late_duplicate_of_a_read_whose_key_is_gone_is_discarded() {
    let mut side = Side::new();
    let region = filled(&mut side, 4 * MTU);
    side.post_len(1, 1);
    side.read(region.va, region.key, 4 * MTU as u32);
    assert_eq!(side.replies().len(), 4);
    side.mrs.deregister(region.key).unwrap();
    side.read_at(FIRST, region.va, region.key, 4 * MTU as u32);
    side.send_ack(Opcode::SendOnly, b"x");
    assert_eq!(side.replies(), [Answer::ack(FIRST + 4, 2)]);
    assert!(!side.responder.failed());
}

/// [RSP-9], [HDR-12]: 2^31 bytes are the most, and take 2^23 numbers at the least MTU.
#[test]
fn the_longest_read_takes_half_of_all_numbers() {
    let mut side = Side::new();
    let buffer = Arc::new(Buffer::new(1 << 20).unwrap());
    let key = side.mrs.allocate(&mut side.rng, PD).unwrap().rkey;
    let piece = Piece { buffer, offset: 0, len: 1 << 20 };
    side.mrs.bind(PD, key, vec![piece; 1 << 12], 0, Access::REMOTE_READ).unwrap();
    assert_eq!(side.read(0, key, 1 << 31), PacketOutcome::Continue);
    side.reply();
    side.read_at(FIRST, 0, key, 1 << 31);
    let first = side.reply().unwrap();
    assert_eq!(Packet::parse(&first).unwrap().bth.psn, Psn::new(FIRST));
    assert_eq!(side.read(0, key, (1 << 31) + 1), PacketOutcome::Fatal);
}
