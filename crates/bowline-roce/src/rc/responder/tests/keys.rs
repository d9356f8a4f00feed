//! Checklist 12: what a key does not give.

use super::*;

/// How a request comes to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Write,
    WriteImm,
    Read,
    Atomic,
}

const ALL: [How; 4] = [How::Write, How::WriteImm, How::Read, How::Atomic];

impl How {
    fn right(self) -> Access {
        match self {
            Self::Write | Self::WriteImm => Access::REMOTE_WRITE | Access::LOCAL_WRITE,
            Self::Read => Access::REMOTE_READ,
            Self::Atomic => Access::REMOTE_ATOMIC | Access::LOCAL_WRITE,
        }
    }

    fn ask(self, side: &mut Side, va: u64, key: u32, len: u32) -> PacketOutcome {
        let bytes = vec![0x77; len as usize];
        match self {
            Self::Write => side.write_message(va, key, &bytes),
            Self::WriteImm => side.write_imm_message(va, key, &bytes),
            Self::Read => side.read(va, key, len),
            Self::Atomic => side.atomic(Opcode::FetchAdd, va, key, (1, 0)),
        }
    }
}

/// Asks for `len` bytes of a region of 512 that grants exactly what is needed.
fn ask(how: How, change: impl FnOnce(&mut Side, &mut Region), offset: i64, len: u32) -> Side {
    let mut side = Side::new();
    side.post_len(1, 0);
    let buffer = Arc::new(Buffer::new(1024).unwrap());
    let at = (&buffer, 256, 512);
    let va = 0x10_0000;
    let key = side.mrs.register(&mut side.rng, PD, at, Some(va), how.right()).unwrap().rkey;
    let mut region = Region { buffer, va, key };
    change(&mut side, &mut region);
    let va = region.va.wrapping_add_signed(offset);
    let after = how.ask(&mut side, va, region.key, len);
    assert_eq!(after == PacketOutcome::Fatal, side.responder.failed());
    let whole = region.bytes();
    assert!(whole[..256].iter().chain(&whole[768..]).all(|b| *b == 0), "{how:?}");
    if after == PacketOutcome::Fatal {
        assert!(whole.iter().all(|b| *b == 0), "{how:?}");
    }
    side
}

/// [RSP-10], [MR-2], [MR-3], [MR-13].
#[test]
fn only_the_right_key_and_range_are_served() {
    let refused = |how, change: fn(&mut Side, &mut Region), offset, len| {
        let mut side = ask(how, change, offset, len);
        assert!(side.responder.failed(), "{how:?} {offset} {len}");
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x62, 0)]);
        let failed: &[_] = match (how, len <= MTU as u32) {
            (How::WriteImm, true) => &[(1, Status::RemAccessErr)],
            _ => &[],
        };
        assert_eq!(side.statuses(), failed);
    };
    for how in ALL {
        let all = if how == How::Atomic { 8 } else { 512 };
        let last = 512 - i64::from(all);
        for offset in [0, last] {
            let mut side = ask(how, |_, _| {}, offset, all);
            assert!(!side.responder.failed());
            assert_ne!(side.replies(), []);
        }
        refused(how, |_, region| region.key ^= 1, 0, 8);
        refused(how, |_, region| region.key ^= 1 << 8, 0, 8);
        refused(how, |_, region| region.key = 0, 0, 8);
        refused(how, |side, region| _ = side.mrs.deregister(region.key), 0, 8);
        let step = if how == How::Atomic { 8 } else { 1 };
        refused(how, |_, _| {}, -step, all);
        refused(how, |_, _| {}, last + step, all);
        refused(how, |_, region| region.va = u64::MAX - 7, 0, 16);
        refused(how, |_, region| region.va = u64::MAX - 7, 0, 8);
        let other_pd: fn(&mut Side, &mut Region) = |side, region| {
            let at = (&region.buffer, 256, 512);
            let keys = side.mrs.register(&mut side.rng, PdId(9), at, Some(region.va), EVERY);
            region.key = keys.unwrap().rkey;
        };
        refused(how, other_pd, 0, 8);
        let no_right: fn(&mut Side, &mut Region) = |side, region| {
            let at = (&region.buffer, 256, 512);
            let access = Access::LOCAL_WRITE | Access::MW_BIND;
            let keys = side.mrs.register(&mut side.rng, PD, at, Some(region.va), access);
            region.key = keys.unwrap().rkey;
        };
        refused(how, no_right, 0, 8);
    }
}

/// [RSP-10], [HDR-12]: the first packet of a WRITE is refused if the last one would be.
#[test]
fn the_whole_range_is_checked_at_the_first_packet() {
    let mut side = ask(How::Write, |_, _| {}, 0, 513);
    assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x62, 0)]);
}

/// [RSP-10]: length 0 with any key; [RSP-5]: but not without the right on the queue pair.
#[test]
fn nothing_needs_no_key_but_the_right() {
    for how in [How::Write, How::WriteImm, How::Read] {
        let mut side = ask(how, |_, region| region.key = 0xdead_beef, -1, 0);
        assert!(!side.responder.failed());
        assert_eq!(side.replies().len(), 1);
        let mut side = ask(how, |side, _| side.access = Access::LOCAL_WRITE, 0, 0);
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x61, 0)]);
        assert_eq!(side.statuses(), []);
    }
}

/// [RSP-5]: every right of the queue pair by itself.
#[test]
fn the_queue_pair_grants_rights_too() {
    for how in ALL {
        let needed = how.right() & !Access::LOCAL_WRITE;
        let mut side = ask(how, |side, _| side.access = needed, 0, 8);
        assert_eq!(side.replies().len(), 1);
        assert!(!side.responder.failed());
        let mut side = ask(how, |side, _| side.access = EVERY & !needed, 0, 8);
        assert_eq!(side.replies(), [Answer::syndrome(FIRST, 0x61, 0)]);
    }
}

/// [MR-11], [MR-13]: a key that goes away in the middle of a message.
#[test]
fn later_packets_of_a_write_are_checked_again() {
    let mut side = Side::new();
    let region = side.region(3 * MTU, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let mut packet = side.next(Opcode::WriteFirst, &[7; MTU]);
    packet.reth = Some(Reth { va: region.va, rkey: region.key, len: 3 * MTU as u32 });
    side.feed(&packet);
    side.mrs.deregister(region.key).unwrap();
    assert_eq!(side.send(Opcode::WriteMiddle, &[8; MTU]), PacketOutcome::Fatal);
    assert_eq!(side.replies(), [Answer::syndrome(FIRST + 1, 0x62, 0)]);
    assert_eq!(region.bytes()[MTU..], [0; 2 * MTU]);
}
