//! Servers that give invalid answers.

use super::*;

fn rsp(id: u32) -> OpenRsp {
    open_rsp(id, &DISK)
}

/// A client with a disk `a`, which has request 100 in flight.
fn busy() -> (Rig, DevId) {
    let mut rig = Rig::new(Config::default(), 8);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 100);
    (rig, dev)
}

impl Rig {
    /// Maps `b` and answers its OPEN. Returns the result of the mapping.
    fn map_b(&mut self, errno: i32, data: &[u8]) -> Result<DevId, Errno> {
        let dev = self.core.map("b", Access::Rw).unwrap();
        let order = self.order();
        self.core.service_answer(self.now, order.token, errno, data);
        self.core.check_invariants();
        match self.events()[..] {
            [Event::Mapped { dev: of, result }] if of == dev => result.map(|()| dev),
            ref other => panic!("{other:?}"),
        }
    }

    fn closes(&mut self, id: u32) {
        let close = self.order();
        assert_eq!(wire::parse(&close.usr), Ok(Request::Close { id }));
        self.core.service_answer(self.now, close.token, 0, &[]);
    }

    /// Checks that the session and its disk `a` work as before.
    fn goes_on(mut self, dev: DevId) {
        assert!(self.core.poll_service_message().is_none(), "more is asked");
        assert_eq!(self.done(), []);
        assert_eq!(self.core.state(dev), Some(State::Open));
        self.io(dev, IoOp::Read, 4096, 512, 101);
        self.answer(0);
        self.answer(0);
        assert_eq!(self.done(), [(100, 0), (101, 0)]);
        assert_eq!(self.events(), []);
    }
}

#[test]
fn an_open_that_succeeds_without_an_answer_is_no_disk() {
    // tests [NB-9] [NB-3]
    let mut other = rsp(1).emit();
    other[0] = 1;
    let hello = wire::emit_sess_info_rsp(2);
    for data in [&[][..], &[3, 0], &rsp(1).emit()[..55], &[0; 56], &other, &hello, &[0xff; 56]] {
        let (mut rig, dev) = busy();
        assert_eq!(rig.map_b(0, data), Err(Errno::EINVAL), "{data:?}");
        assert_eq!(rig.core.infos().len(), 1);
        rig.goes_on(dev);
    }
}

#[test]
fn a_disk_larger_than_any_can_be_is_refused_and_given_back() {
    // tests [NB-30]
    for nsectors in [1 << 54, 1 << 55, 1 << 63, u64::MAX] {
        let (mut rig, dev) = busy();
        let data = OpenRsp { nsectors, ..rsp(1) }.emit();
        assert_eq!(rig.map_b(0, &data), Err(Errno::EOVERFLOW), "{nsectors}");
        rig.closes(1);
        rig.goes_on(dev);
    }
    let (mut rig, dev) = busy();
    let nsectors = (1 << 54) - 1;
    let largest = rig.map_b(0, &OpenRsp { nsectors, ..rsp(1) }.emit()).unwrap();
    rig.io(largest, IoOp::Read, (nsectors - 1) * 512, 512, 1);
    assert_eq!((rig.wire(1).sector, rig.wire(1).len), (nsectors - 1, 512));
    rig.io(largest, IoOp::Read, u64::MAX - 511, 1024, 2);
    assert_eq!(rig.done(), [(2, -5)]);
    assert_eq!(rig.core.resize(largest, 1 << 63), Err(Errno::EOVERFLOW));
    assert_eq!(rig.core.resize(dev, u64::MAX), Err(Errno::EOVERFLOW));
    assert_eq!(rig.core.limits(largest).unwrap().bytes, nsectors * 512);
}

#[test]
fn a_disk_of_nothing_has_nothing_to_read() {
    for nsectors in [0, 7] {
        let (mut rig, dev) = busy();
        let data = OpenRsp { nsectors, logical_block_size: 4096, ..rsp(1) }.emit();
        let empty = rig.map_b(0, &data).unwrap();
        assert_eq!(rig.core.limits(empty).unwrap().bytes, 0);
        rig.io(empty, IoOp::Read, 0, 4096, 1);
        assert_eq!(rig.done(), [(1, -5)]);
        rig.goes_on(dev);
    }
}

#[test]
fn discards_stay_within_the_disk_whatever_the_granularity() {
    // tests [NB-59] [NB-30]
    let wild = [(0, 512), (1, 512), (777, 512), (3 << 20, 3 << 20), (1 << 31, 1 << 31)];
    for (granularity, taken) in [&wild[..], &[(u32::MAX, 512)]].concat() {
        for alignment in [0, 1, 512, 1 << 31, u32::MAX] {
            for most in [1, 24, 8_388_607, u32::MAX] {
                let mut rig = Rig::new(Config::default(), 512);
                let data = OpenRsp {
                    max_discard_sectors: most,
                    discard_granularity: granularity,
                    discard_alignment: alignment,
                    ..rsp(1)
                };
                let dev = rig.map_b(0, &data.emit()).unwrap();
                let discard = rig.core.limits(dev).unwrap().discard.unwrap();
                assert_eq!((discard.granularity, discard.alignment), (taken, alignment % taken));
                rig.io(dev, IoOp::Discard, 4096, 98_304, 1);
                let mut at = 4096;
                while !rig.sends.is_empty() {
                    let io = rig.wire(0);
                    assert_eq!(io.sector * 512, at, "{data:?}");
                    assert!(io.len > 0 && io.len.is_multiple_of(512) && io.len / 512 <= most);
                    at += u64::from(io.len);
                    rig.answer(0);
                }
                assert_eq!((at, rig.done()), (4096 + 98_304, vec![(1, 0)]), "{data:?}");
            }
        }
    }
}

#[test]
fn the_store_limit_of_one_io_does_not_concern_the_client() {
    // tests [NB-30]
    for (max_hw_sectors, max_segments) in [(0, 0), (1, 1), (u32::MAX, u16::MAX)] {
        let mut rig = Rig::new(Config::default(), 8);
        let dev = rig.map_b(0, &OpenRsp { max_hw_sectors, max_segments, ..rsp(1) }.emit()).unwrap();
        let limits = rig.core.limits(dev).unwrap();
        assert_eq!((limits.max_io, limits.max_segments), (8192, 128));
        rig.io(dev, IoOp::Write, 0, 12_288, 1);
        assert_eq!((rig.wire(0).len, rig.wire(1).len), (8192, 4096));
    }
}

#[test]
fn of_two_disks_with_one_id_the_later_keeps_it() {
    // tests [NB-16]
    let (mut rig, a) = busy();
    rig.io(a, IoOp::Write, 8192, 512, 1);
    let b = rig.core.map("b", Access::Rw).unwrap();
    rig.open("b", 0, &DISK);
    let wanted = [Event::Offline { dev: a }, Event::Mapped { dev: b, result: Ok(()) }];
    assert_eq!(rig.events(), wanted);
    rig.io(a, IoOp::Write, 0, 512, 2);
    assert_eq!(rig.done(), [(2, -5)], "not to what is b now");
    rig.io(b, IoOp::Write, 0, 512, 3);
    rig.answer(0);
    rig.answer(-5);
    rig.answer(0);
    // The server has another table of ids: it may have restarted and lost unflushed writes.
    assert_eq!(rig.done(), [(100, -5), (1, -5), (3, 0)]);
    rig.core.unmap(a).unwrap();
    assert_eq!(rig.events(), [Event::Unmapped { dev: a }]);
    assert!(
        rig.core.poll_service_message().is_none(),
        "the id is not closed, since it is that of b"
    );
    assert_eq!(rig.core.state(b), Some(State::Open));
}

#[test]
fn an_error_is_an_error_whatever_its_number() {
    // tests [NB-26]
    let numbers = [(-22, 22), (22, 22), (-4095, 4095), (-4096, 5), (i32::MAX, 5), (i32::MIN, 5)];
    for (said, seen) in numbers {
        let (mut rig, dev) = busy();
        assert_eq!(rig.map_b(said, &rsp(1).emit()), Err(Errno(seen)), "{said}");
        rig.goes_on(dev);
    }
    for (said, seen) in [(-28, -28), (28, -28), (-4096, -5), (i32::MAX, -5), (i32::MIN, -5)] {
        let (mut rig, _) = busy();
        rig.answer(said);
        assert_eq!(rig.done(), [(100, seen)], "{said}");
    }
    let (mut rig, dev) = busy();
    rig.answer(107);
    assert_eq!(rig.events(), [Event::Offline { dev }], "it says that the disk is not open");
}

#[test]
fn the_answer_to_sess_info_changes_nothing() {
    // tests [NB-14]
    let short = &wire::emit_sess_info_rsp(2)[..4];
    let version = wire::emit_sess_info_rsp(0);
    for (errno, data) in [(0, &[][..]), (0, short), (0, &version), (0, &rsp(1).emit()), (-22, &[])]
    {
        let mut core = Core::<u32>::new(Config::default(), 8);
        core.link_up(at(1), SESSION);
        let hello = core.poll_service_message().unwrap();
        core.service_answer(at(1), hello.token, errno, data);
        assert!(core.poll_service_message().is_none() && core.poll_event().is_none());
        let mut rig = Rig { core, now: at(1), sends: Vec::new() };
        let dev = rig.mapped("a", 0, &DISK);
        rig.io(dev, IoOp::Write, 0, 512, 100);
        rig.goes_on(dev);
    }
}

#[test]
fn answers_to_unknown_tokens_are_ignored() {
    let (mut rig, dev) = busy();
    let slot = rig.sends[0].slot;
    for token in [0, 1, 7, u32::MAX] {
        rig.core.service_answer(rig.now, Token(token), 0, &rsp(0).emit());
        rig.core.service_answer(rig.now, Token(token), -107, &[]);
    }
    for other in (0..8).chain([8, u16::MAX]).filter(|other| *other != slot) {
        rig.core.io_answer(rig.now, other, -107);
        rig.core.send_failed(rig.now, other, Errno::ENOMEM);
        rig.core.check_invariants();
    }
    assert_eq!(rig.events(), []);
    let gone = rig.map_b(0, &rsp(1).emit()).unwrap();
    rig.core.unmap(gone).unwrap();
    rig.closes(1);
    assert_eq!(rig.events(), [Event::Unmapped { dev: gone }]);
    assert_eq!(rig.core.resize(gone, 4096), Err(Errno::ENOENT));
    assert_eq!(rig.core.remap(rig.now, gone), Err(Errno::ENODEV));
    assert_eq!(rig.core.unmap(gone), Err(Errno::ENODEV));
    rig.goes_on(dev);
}

#[test]
fn a_session_that_carries_less_than_a_block_has_no_disks() {
    // tests [NB-30] [NB-51]
    for max_io in [0, 511] {
        let mut rig = Rig::new(queueing(), 8);
        let dev = rig.mapped("a", 0, &DISK);
        rig.core.link_down(rig.now);
        rig.io(dev, IoOp::Write, 0, 512, 1);
        rig.core.link_up(rig.now, SessionLimits { max_io, max_segments: 0 });
        rig.order();
        rig.open("a", 4, &DISK);
        rig.closes(4);
        assert_eq!(rig.events(), [Event::Offline { dev }]);
        assert_eq!(rig.map_b(0, &rsp(5).emit()).unwrap_err(), Errno::EINVAL);
        rig.closes(5);
        rig.pump();
        assert!(rig.sends.is_empty());
        rig.core.link_down(rig.now);
        rig.core.link_up(rig.now, SESSION);
        rig.order();
        rig.open("a", 0, &DISK);
        rig.pump();
        rig.answer(0);
        assert_eq!(rig.done(), [(1, 0)]);
    }
}

impl Rig {
    /// The session is lost, and back with `disk` in place of what was there.
    fn back_with(&mut self, disk: &Limits) {
        self.core.link_down(self.now);
        self.core.link_up(self.now, SESSION);
        self.order();
        self.open("a", 0, disk);
        self.pump();
    }
}

#[test]
fn operations_a_disk_has_lost_are_not_sent() {
    // tests [NB-55] [NB-24]: requests were submitted when the disk was larger and supported more
    let discard = Discard { max_bytes: 1 << 16, granularity: 4096, alignment: 0 };
    let (max_write_zeroes, secure_erase) = (1 << 16, true);
    let rich = Limits { discard: Some(discard), max_write_zeroes, secure_erase, ..DISK };
    let mut rig = Rig::new(queueing(), 1);
    let dev = rig.mapped("a", 0, &rich);
    rig.io(dev, IoOp::Write, 1 << 19, 512, 1);
    for (op, offset, done) in [
        (IoOp::Read, 0, 2),
        (IoOp::Read, (1 << 19) - 4096, 3),
        (IoOp::Discard, 0, 4),
        (IoOp::WriteZeroes, 0, 5),
        (IoOp::SecureErase, 0, 6),
        (IoOp::Write, 4096, 7),
    ] {
        rig.io(dev, op, offset, 8192, done);
    }
    rig.answer(-103);
    rig.back_with(&Limits { bytes: 1 << 19, ..DISK });
    let mut done = rig.done();
    assert_eq!((rig.wire(0).op, rig.wire(0).sector), (wire::OP_READ, 0));
    rig.answer(0);
    assert_eq!((rig.wire(0).op, rig.wire(0).sector), (wire::OP_WRITE, 8));
    rig.answer(0);
    done.extend(rig.done());
    assert!(rig.sends.is_empty());
    assert_eq!(done, [(1, -5), (2, 0), (3, -5), (4, -95), (5, -95), (6, -95), (7, 0)]);
}

#[test]
fn a_disk_erases_for_good_if_it_says_so_in_pieces_as_it_discards() {
    // tests [NB-9] [NB-12] [NB-30] [NB-59]
    let discard = Discard { max_bytes: 65_536, granularity: 16_384, alignment: 4096 };
    let limits = Limits { discard: Some(discard), secure_erase: true, ..DISK };
    let mut rig = Rig::new(Config::default(), 8);
    let data = OpenRsp { secure_discard: 0x8000, ..open_rsp(1, &limits) };
    let dev = rig.map_b(0, &data.emit()).unwrap();
    assert_eq!(rig.core.limits(dev).unwrap().discard, Some(discard));
    rig.io(dev, IoOp::SecureErase, 8192, 139_264, 1);
    let sent: Vec<_> = (0..rig.sends.len()).map(|at| (rig.sends[at], rig.wire(at))).collect();
    for (send, io) in &sent {
        assert_eq!((send.dir, send.data), (Dir::Write, None));
        assert_eq!((io.op, io.flags), (wire::OP_SECURE_ERASE, IoFlags::SYNC));
    }
    let pieces: Vec<_> = sent.iter().map(|(_, io)| (io.sector, io.len)).collect();
    assert_eq!(pieces, [(16, 61_440), (136, 65_536), (264, 12_288)]);
    rig.answer(0);
    rig.answer(-121);
    rig.answer(0);
    assert_eq!(rig.done(), [(1, -121)], "what is not erased is said");
    rig.io(dev, IoOp::SecureErase, 0, 0, 2);
    rig.io(dev, IoOp::SecureErase, 0, 100, 3);
    rig.io(dev, IoOp::SecureErase, (1 << 20) - 512, 1024, 4);
    assert_eq!(rig.done(), [(2, 0), (3, -22), (4, -5)]);
    let ro = rig.core.map("c", Access::Ro).unwrap();
    rig.open("c", 2, &limits);
    rig.io(ro, IoOp::SecureErase, 0, 512, 5);
    // A disk without discards does not say how much it can erase at once.
    let none = rig.core.map("d", Access::Rw).unwrap();
    rig.open("d", 3, &Limits { discard: None, ..limits });
    rig.io(none, IoOp::SecureErase, 0, 512, 6);
    assert_eq!(rig.done(), [(5, -1), (6, -95)]);
}
