mod hostile;
mod late;
mod outages;
mod quiesce;

use bowline_wire::rnbd::{IoFlags, Request};
use bowline_wire::rtrs::Dir;

use super::*;
use crate::limits::open_rsp;
use crate::{Discard, IoOp};

const SESSION: SessionLimits = SessionLimits { max_io: 8192, max_segments: 128 };
const WAIT: Outage = Outage::Queue(Duration::from_secs(30));
const DISK: Limits = Limits { write_cache: true, fua: true, ..Limits::plain(1 << 20) };

fn at(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

/// A client, and a scripted server.
struct Rig {
    core: Core<u32>,
    now: Instant,
    sends: Vec<SendIo>,
}

impl Rig {
    fn new(config: Config, slots: u16) -> Self {
        let mut core = Core::new(config, slots);
        core.link_up(at(1), SESSION);
        let mut rig = Self { core, now: at(1), sends: Vec::new() };
        let hello = rig.order();
        assert_eq!(wire::parse(&hello.usr), Ok(Request::SessInfo { ver: 2 }));
        assert_eq!(hello.room, 36);
        rig
    }

    fn order(&mut self) -> ServiceMessage {
        self.core.poll_service_message().expect("something to send")
    }

    fn answer_open(&mut self, token: Token, id: u32, limits: &Limits) {
        let data = open_rsp(id, limits).emit();
        self.core.service_answer(self.now, token, 0, &data);
        self.core.check_invariants();
    }

    /// Takes the order that must be an OPEN of `name`, and answers it.
    fn open(&mut self, name: &str, id: u32, limits: &Limits) {
        let order = self.order();
        assert_eq!(order.room, 56);
        match wire::parse(&order.usr) {
            Ok(Request::Open { name: asked, .. }) => assert_eq!(asked, name.as_bytes()),
            other => panic!("{other:?}"),
        }
        self.answer_open(order.token, id, limits);
    }

    fn mapped(&mut self, name: &str, id: u32, limits: &Limits) -> DevId {
        let dev = self.core.map(name, Access::Rw).unwrap();
        self.open(name, id, limits);
        assert_eq!(self.core.poll_event(), Some(Event::Mapped { dev, result: Ok(()) }));
        dev
    }

    fn io(&mut self, dev: DevId, op: IoOp, offset: u64, len: u32, done: u32) {
        let mem = op.has_data().then_some((7, 100));
        let request = DiskRequest { op, offset, len, fua: false, nounmap: false, mem, done };
        self.core.submit(self.now, dev, request);
        self.pump();
    }

    fn pump(&mut self) {
        self.core.take_sends(&mut self.sends);
        self.core.check_invariants();
    }

    fn wire(&self, at: usize) -> wire::Io {
        match wire::parse(&self.sends[at].usr) {
            Ok(Request::Io(io)) => io,
            other => panic!("{other:?}"),
        }
    }

    /// Answers the oldest IO.
    fn answer(&mut self, errno: i32) {
        let io = self.sends.remove(0);
        self.core.io_answer(self.now, io.slot, errno);
        self.pump();
    }

    fn done(&mut self) -> Vec<(u32, i32)> {
        let mut done = Vec::new();
        self.core.take_done(&mut done);
        done.into_iter().map(|io| (io.done, io.errno)).collect()
    }

    fn ended(&mut self) -> Vec<u32> {
        let mut ended = Vec::new();
        self.core.take_ended(&mut ended);
        ended
    }

    fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.core.poll_event()).collect()
    }

    fn pass(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
        self.core.handle_timeout(self.now);
        self.pump();
    }
}

fn queueing() -> Config {
    Config { outage: WAIT, ..Config::default() }
}

#[test]
fn messages_are_those_of_the_kernel() {
    // tests [NB-10] [NB-12] [NB-13] [NB-2]
    let mut rig = Rig::new(Config::default(), 8);
    let discard = Discard { max_bytes: 1 << 16, granularity: 4096, alignment: 0 };
    let limits = Limits { discard: Some(discard), max_write_zeroes: 1 << 16, ..DISK };
    let dev = rig.mapped("disk0", 3, &limits);
    rig.io(dev, IoOp::Write, 4096, 4096, 1);
    rig.io(dev, IoOp::Read, 0, 512, 2);
    rig.io(dev, IoOp::Flush, 0, 0, 3);
    rig.io(dev, IoOp::Discard, 0, 4096, 4);
    rig.io(dev, IoOp::WriteZeroes, 512, 4096, 5);
    let seen: Vec<_> = (0..5)
        .map(|n| {
            let io = rig.wire(n);
            (rig.sends[n].dir, u32::from(io.op) | io.flags.bits(), io.sector, io.len)
        })
        .collect();
    assert_eq!(
        seen,
        [
            (Dir::Write, 0x101, 8, 4096),
            (Dir::Read, 0x100, 0, 512),
            (Dir::Read, 0x302, u64::MAX, 0),
            (Dir::Write, 0x103, 0, 4096),
            (Dir::Write, 0x105, 1, 4096),
        ]
    );
    assert_eq!(rig.wire(0).device, 3);
    assert_eq!(rig.sends[0].data, Some(Piece { region: 7, offset: 100, len: 4096 }));
    assert_eq!(rig.sends[2].data, None);
    let fua = DiskRequest {
        op: IoOp::Write,
        offset: 0,
        len: 512,
        fua: true,
        nounmap: false,
        mem: Some((7, 0)),
        done: 6,
    };
    rig.core.submit(rig.now, dev, fua);
    rig.pump();
    assert_eq!(rig.wire(5).flags, IoFlags::SYNC | IoFlags::FUA);
}

#[test]
fn zeroes_that_must_stay_allocated_are_data_to_servers_that_do_not_know_the_flag() {
    // tests [NB-57] [NB-12] [NB-51]
    let disk = Limits { max_write_zeroes: 1 << 20, ..DISK };
    let zeroes = |rig: &mut Rig, dev, fua| {
        let (op, mem, nounmap) = (IoOp::WriteZeroes, None, true);
        let request = DiskRequest { op, offset: 512, len: 20_480, fua, nounmap, mem, done: 1 };
        rig.core.submit(rig.now, dev, request);
        rig.pump();
    };
    let mut rig = Rig::new(queueing(), 8);
    let dev = rig.mapped("a", 0, &disk);
    zeroes(&mut rig, dev, false);
    assert_eq!(rig.done(), [(1, -95)], "not without zeroes to send");
    rig.core.set_zeroes(9, 4096);
    zeroes(&mut rig, dev, true);
    for _ in 0..2 {
        let sent: Vec<_> = (0..5).map(|n| (rig.wire(n), rig.sends[n])).collect();
        let mut sectors: Vec<_> = sent.iter().map(|(io, _)| io.sector).collect();
        sectors.sort_unstable();
        assert_eq!(sectors, [1, 9, 17, 25, 33]);
        for (io, send) in sent {
            assert_eq!((io.op, io.flags), (wire::OP_WRITE, IoFlags::SYNC | IoFlags::FUA));
            assert_eq!(send.data, Some(Piece { region: 9, offset: 0, len: 4096 }));
            assert_eq!((send.dir, io.len), (Dir::Write, 4096));
        }
        // After an outage the same data are sent again.
        (0..5).for_each(|_| rig.answer(-103));
        rig.core.link_down(rig.now);
        rig.core.link_up(rig.now, SESSION);
        rig.order();
        rig.open("a", 0, &disk);
        rig.pump();
    }
    (0..5).for_each(|_| rig.answer(0));
    assert_eq!(rig.done(), [(1, 0)]);
    // Zeroes that may be deallocated need no data; a server that knows NOUNMAP gets the flag for
    // the others.
    rig.io(dev, IoOp::WriteZeroes, 0, 20_480, 2);
    assert_eq!((rig.wire(0).op, rig.sends[0].data), (wire::OP_WRITE_ZEROES, None));
    let mut rig = Rig::new(Config { nounmap: true, ..Config::default() }, 8);
    let dev = rig.mapped("a", 0, &disk);
    zeroes(&mut rig, dev, false);
    let flags = IoFlags::SYNC | IoFlags::NOUNMAP;
    assert_eq!((rig.wire(0).op, rig.wire(0).flags), (wire::OP_WRITE_ZEROES, flags));
}

#[test]
fn a_long_request_is_cut_and_answered_once_with_its_first_error() {
    // tests [NB-51]
    let mut rig = Rig::new(Config::default(), 2);
    let dev = rig.mapped("disk0", 0, &DISK);
    rig.io(dev, IoOp::Read, 0, 20_480, 1);
    assert_eq!(rig.sends.len(), 2, "no more slots");
    assert_eq!(rig.sends[1].data, Some(Piece { region: 7, offset: 100 + 8192, len: 8192 }));
    rig.answer(0);
    assert_eq!(rig.wire(1).sector, 32);
    rig.answer(-61);
    assert_eq!(rig.done(), []);
    rig.answer(0);
    assert_eq!(rig.done(), [(1, -61)]);
}

#[test]
fn fua_without_support_is_a_flush_after_the_data() {
    // tests [NB-30]
    let mut rig = Rig::new(Config::default(), 4);
    let dev = rig.mapped("disk0", 0, &Limits { fua: false, ..DISK });
    let request = DiskRequest {
        op: IoOp::Write,
        offset: 0,
        len: 16_384,
        fua: true,
        nounmap: false,
        mem: Some((1, 0)),
        done: 9,
    };
    rig.core.submit(rig.now, dev, request);
    rig.pump();
    assert!(!rig.wire(0).flags.contains(IoFlags::FUA));
    rig.answer(0);
    rig.answer(0);
    assert_eq!(rig.done(), []);
    assert_eq!(rig.wire(0).op, wire::OP_FLUSH);
    rig.answer(0);
    assert_eq!(rig.done(), [(9, 0)]);
}

#[test]
fn operations_a_disk_lacks_are_not_sent() {
    // tests [NB-24] [NB-30] [NB-59]
    let mut rig = Rig::new(Config::default(), 4);
    let dev = rig.mapped("disk0", 0, &Limits::plain(1 << 20));
    rig.io(dev, IoOp::Read, 100, 512, 1);
    rig.io(dev, IoOp::Read, (1 << 20) - 512, 1024, 2);
    rig.io(dev, IoOp::Discard, 0, 512, 3);
    rig.io(dev, IoOp::WriteZeroes, 0, 512, 4);
    rig.io(dev, IoOp::SecureErase, 0, 512, 5);
    rig.io(dev, IoOp::Flush, 0, 0, 6);
    rig.io(dev, IoOp::Write, 0, 0, 7);
    assert!(rig.sends.is_empty());
    let results = [(1, -22), (2, -5), (3, -95), (4, -95), (5, -95), (6, 0), (7, 0)];
    assert_eq!(rig.done(), results);
    let ro = rig.core.map("disk1", Access::Ro).unwrap();
    rig.open("disk1", 1, &DISK);
    rig.io(ro, IoOp::Write, 0, 512, 8);
    assert_eq!(rig.done(), [(8, -1)]);
}

#[test]
fn a_name_is_mapped_once_and_a_refused_one_not_at_all() {
    // tests [NB-35] [NB-58] [NB-30]
    let mut rig = Rig::new(Config::default(), 4);
    rig.mapped("a", 0, &DISK);
    assert_eq!(rig.core.map("a", Access::Ro), Err(Errno::EEXIST));
    assert_eq!(rig.core.map(&"x".repeat(255), Access::Ro), Err(Errno::EINVAL));
    let dev = rig.core.map("b", Access::Rw).unwrap();
    let order = rig.order();
    rig.core.service_answer(rig.now, order.token, -1, &[]);
    assert_eq!(rig.events(), [Event::Mapped { dev, result: Err(Errno::EPERM) }]);
    assert_eq!(rig.core.state(dev), None);
    let dev = rig.core.map("b", Access::Rw).unwrap();
    rig.open("b", 5, &Limits { logical: 256, ..DISK });
    assert_eq!(rig.events(), [Event::Mapped { dev, result: Err(Errno::EINVAL) }]);
    assert_eq!(wire::parse(&rig.order().usr), Ok(Request::Close { id: 5 }));
}

#[test]
fn a_closed_device_is_remapped_on_request() {
    // tests [NB-37] [NB-21]
    let mut rig = Rig::new(Config::default(), 4);
    let dev = rig.mapped("a", 0, &DISK);
    assert_eq!(rig.core.remap(rig.now, dev), Err(Errno::EALREADY));
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.answer(-107);
    assert_eq!(rig.done(), [(1, -5)]);
    assert_eq!(rig.events(), [Event::Offline { dev }]);
    rig.pass(60_000);
    assert!(rig.core.poll_service_message().is_none(), "not by itself");
    rig.core.remap(rig.now, dev).unwrap();
    assert_eq!(rig.core.remap(rig.now, dev), Err(Errno::EBUSY));
    rig.open("a", 4, &DISK);
    let wanted = [Event::Online { dev }, Event::Remapped { dev, result: Ok(()) }];
    assert_eq!(rig.events(), wanted);
    rig.core.link_down(rig.now);
    assert_eq!(rig.core.remap(rig.now, dev), Err(Errno::ECONNABORTED));
    rig.core.unmap(dev).unwrap();
    assert_eq!(rig.core.remap(rig.now, dev), Err(Errno::ENODEV));
}

#[test]
fn a_remap_that_is_refused_gives_requests_no_more_time() {
    // tests [NB-54] [NB-37]
    let mut rig = Rig::new(queueing(), 4);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Read, 0, 512, 1);
    rig.answer(-107);
    rig.core.remap(rig.now, dev).unwrap();
    let order = rig.order();
    rig.core.service_answer(rig.now, order.token, -2, &[]);
    rig.pass(10_000);
    rig.io(dev, IoOp::Read, 0, 512, 2);
    assert_eq!(rig.done(), []);
    rig.pass(20_000);
    assert_eq!(rig.done(), [(1, -5), (2, -5)]);
    rig.core.link_down(rig.now);
    rig.io(dev, IoOp::Read, 0, 512, 3);
    assert_eq!(rig.done(), [(3, -5)]);
}

#[test]
fn unmap_waits_for_io_then_closes_then_ends() {
    // tests [NB-37] [NB-32] [NB-20]
    let mut rig = Rig::new(Config::default(), 1);
    let dev = rig.mapped("a", 6, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    rig.core.unmap(dev).unwrap();
    assert_eq!(rig.core.unmap(dev), Err(Errno::EALREADY));
    assert_eq!(rig.done(), [(2, -5)]);
    assert!(rig.core.poll_service_message().is_none());
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
    let close = rig.order();
    assert_eq!((wire::parse(&close.usr), close.room), (Ok(Request::Close { id: 6 }), 0));
    assert_eq!(rig.events(), []);
    rig.core.service_answer(rig.now, close.token, -103, &[]);
    assert_eq!(rig.events(), [Event::Unmapped { dev }]);
    assert_eq!(rig.core.infos(), []);
    rig.io(dev, IoOp::Write, 0, 512, 3);
    assert_eq!(rig.done(), [(3, -5)]);
}

#[test]
fn an_open_answered_after_the_unmap_is_answered_with_a_close() {
    // tests [NB-32]
    let mut rig = Rig::new(Config::default(), 1);
    let dev = rig.core.map("a", Access::Rw).unwrap();
    let open = rig.order();
    rig.core.unmap(dev).unwrap();
    rig.answer_open(open.token, 2, &DISK);
    let close = rig.order();
    assert_eq!(wire::parse(&close.usr), Ok(Request::Close { id: 2 }));
    rig.core.service_answer(rig.now, close.token, 0, &[]);
    assert_eq!(rig.events(), [Event::Unmapped { dev }]);
    let dev = rig.core.map("a", Access::Rw).unwrap();
    rig.core.unmap(dev).unwrap();
    let open = rig.order();
    rig.core.service_answer(rig.now, open.token, -2, &[]);
    assert_eq!(rig.events(), [Event::Unmapped { dev }]);
}

#[test]
fn other_blocks_take_the_device_offline_for_good() {
    // tests [NB-55]
    let mut rig = Rig::new(queueing(), 4);
    let dev = rig.mapped("a", 0, &DISK);
    rig.core.link_down(rig.now);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.open("a", 0, &Limits { logical: 4096, ..DISK });
    assert_eq!(rig.events(), [Event::Offline { dev }, Event::Gone { dev }]);
    assert_eq!(rig.done(), [(1, -5)]);
    assert_eq!(wire::parse(&rig.order().usr), Ok(Request::Close { id: 0 }));
    rig.pass(10_000);
    assert!(rig.core.poll_service_message().is_none());
}

#[test]
fn a_local_resize_is_reported_and_kept() {
    // tests [NB-37]
    let mut rig = Rig::new(Config::default(), 1);
    let dev = rig.mapped("a", 0, &DISK);
    assert_eq!(rig.core.resize(dev, 1000), Err(Errno::EINVAL), "part of a block");
    assert_eq!(rig.events(), []);
    rig.core.resize(dev, 512).unwrap();
    assert_eq!(rig.events(), [Event::Resized { dev, bytes: 512 }]);
    rig.io(dev, IoOp::Read, 512, 512, 1);
    assert_eq!(rig.done(), [(1, -5)]);
    rig.core.link_down(rig.now);
    assert_eq!(rig.core.resize(dev, 1024), Err(Errno::ENOENT));
}

#[test]
fn a_probe_is_sent_beyond_the_end_and_counted_nowhere() {
    // tests [NB-74]
    let mut rig = Rig::new(Config::default(), 1);
    let dev = rig.mapped("a", 0, &DISK);
    let probe = |rig: &mut Rig, offset, done| {
        let (op, mem) = (IoOp::Read, Some((7, 0)));
        let request = DiskRequest { op, offset, len: 512, fua: false, nounmap: false, mem, done };
        rig.core.probe(rig.now, dev, request);
        rig.pump();
    };
    for (done, answer) in [(1, -5), (2, 0)] {
        probe(&mut rig, 2 << 20, done);
        let io = rig.wire(0);
        assert_eq!((io.op, io.sector, io.len), (wire::OP_READ, 4096, 512));
        rig.answer(answer);
        assert_eq!(rig.done(), [(done, answer)]);
    }
    let info = rig.core.info(dev).unwrap();
    assert_eq!((info.stats, info.failures), Default::default());
    rig.core.link_down(rig.now);
    probe(&mut rig, 0, 3);
    assert_eq!(rig.done(), [(3, -5)]);
}

#[test]
fn changes_are_unflushed_until_a_flush_that_was_sent_after_them_succeeds() {
    let mut rig = Rig::new(Config::default(), 8);
    let dev = rig.mapped("a", 0, &DISK);
    let is_unflushed = |rig: &Rig| rig.core.info(dev).unwrap().is_unflushed;
    rig.io(dev, IoOp::Read, 0, 512, 1);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    rig.answer(0);
    assert!(!is_unflushed(&rig), "the write is not answered");
    rig.io(dev, IoOp::Flush, 0, 0, 3);
    rig.answer(0);
    assert!(is_unflushed(&rig));
    rig.answer(0);
    assert!(is_unflushed(&rig), "the flush was sent before the write was answered");
    rig.io(dev, IoOp::Flush, 0, 0, 4);
    rig.answer(-5);
    assert!(is_unflushed(&rig), "the flush has failed");
    rig.io(dev, IoOp::Flush, 0, 0, 5);
    rig.answer(0);
    assert!(!is_unflushed(&rig));
    let (fua, done) = (true, 6);
    let (op, mem) = (IoOp::Write, Some((7, 100)));
    let request = DiskRequest { op, offset: 0, len: 512, fua, nounmap: false, mem, done };
    rig.core.submit(rig.now, dev, request);
    rig.pump();
    rig.answer(0);
    assert!(!is_unflushed(&rig), "the write was durable by itself");
    rig.io(dev, IoOp::Write, 0, 512, 7);
    rig.answer(0);
    rig.core.link_down(rig.now);
    assert!(is_unflushed(&rig), "the session is lost before a flush");
    let through = Limits { write_cache: false, fua: false, ..DISK };
    let mut plain = Rig::new(Config::default(), 8);
    let dev = plain.mapped("b", 1, &through);
    plain.io(dev, IoOp::Write, 0, 512, 1);
    plain.answer(0);
    assert!(!plain.core.info(dev).unwrap().is_unflushed, "there is no cache");
}

#[test]
fn devices_share_the_slots_by_turns() {
    let mut rig = Rig::new(Config::default(), 2);
    let (a, b) = (rig.mapped("a", 0, &DISK), rig.mapped("b", 1, &DISK));
    for n in 0..3 {
        rig.io(a, IoOp::Write, 0, 512, n);
    }
    rig.io(b, IoOp::Write, 0, 512, 9);
    rig.answer(0);
    assert_eq!(rig.wire(1).device, 1, "b does not wait for all of a");
}

#[test]
fn fua_writes_are_durable_on_the_server_that_carries_them_out() {
    // tests [NB-16] [NB-47]: after an outage the store may have another cache
    let mut rig = Rig::new(queueing(), 4);
    let through = Limits { write_cache: false, fua: false, ..DISK };
    let a = rig.mapped("a", 0, &DISK);
    let b = rig.mapped("b", 1, &through);
    for (dev, fua, done) in [(a, true, 1), (b, false, 2)] {
        let (op, mem) = (IoOp::Write, Some((7, 0)));
        let request = DiskRequest { op, offset: 0, len: 512, fua, nounmap: false, mem, done };
        rig.core.submit(rig.now, dev, request);
    }
    rig.core.link_down(rig.now);
    rig.core.link_up(rig.now, SESSION);
    let cached = Limits { fua: false, ..DISK };
    rig.order();
    rig.open("a", 0, &cached);
    rig.open("b", 1, &cached);
    rig.pump();
    let ops = |rig: &Rig| -> Vec<_> {
        let all = (0..rig.sends.len()).map(|at| rig.wire(at));
        all.map(|io| (io.device, io.op, io.flags.contains(IoFlags::FUA))).collect()
    };
    assert_eq!(ops(&rig), [(0, wire::OP_WRITE, false), (1, wire::OP_WRITE, false)]);
    rig.answer(0);
    rig.answer(0);
    assert_eq!(rig.done(), []);
    assert_eq!(ops(&rig), [(0, wire::OP_FLUSH, true), (1, wire::OP_FLUSH, true)]);
    rig.answer(0);
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0), (2, 0)]);
}

#[test]
fn a_user_of_a_disk_without_cache_never_needs_to_flush() {
    // tests [NB-16] [NB-47]: a front end that was opened while the store had no cache
    let mut rig = Rig::new(queueing(), 4);
    let dev = rig.mapped("a", 0, &DISK);
    for disk in [Limits { write_cache: false, fua: false, ..DISK }, DISK] {
        rig.core.link_down(rig.now);
        rig.core.link_up(rig.now, SESSION);
        rig.order();
        rig.open("a", 0, &disk);
    }
    rig.io(dev, IoOp::Write, 0, 512, 1);
    assert!(rig.wire(0).flags.contains(IoFlags::FUA));
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
}

#[test]
fn a_flush_that_would_follow_an_unmap_is_an_error() {
    // tests [NB-37]
    let limits = Limits { fua: false, ..DISK };
    let mut rig = Rig::new(queueing(), 8);
    let dev = rig.mapped("disk0", 3, &limits);
    let (op, offset, len, fua) = (IoOp::Write, 0, 512, true);
    let request = DiskRequest { op, offset, len, fua, nounmap: false, mem: Some((7, 0)), done: 1 };
    rig.core.submit(rig.now, dev, request);
    rig.pump();
    rig.core.unmap(dev).unwrap();
    rig.answer(0);
    assert_eq!(rig.done(), [(1, -5)]);
    let close = rig.order();
    rig.core.service_answer(rig.now, close.token, 0, &[]);
    assert_eq!(rig.events(), [Event::Unmapped { dev }]);
}
