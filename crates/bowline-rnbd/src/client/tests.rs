mod careful;
mod hostile;
mod late;

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

/// A client, and the hand-made server's side of it.
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

    fn order(&mut self) -> Order {
        self.core.poll_order().expect("something to send")
    }

    fn answer_open(&mut self, token: Token, id: u32, limits: &Limits) {
        let data = open_rsp(id, limits).emit();
        self.core.answered(self.now, token, 0, &data);
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
        // And the same after an outage.
        (0..5).for_each(|_| rig.answer(-103));
        rig.core.link_down(rig.now);
        rig.core.link_up(rig.now, SESSION);
        rig.order();
        rig.open("a", 0, &disk);
        rig.pump();
    }
    (0..5).for_each(|_| rig.answer(0));
    assert_eq!(rig.done(), [(1, 0)]);
    // What may be given up is not sent, and others are told what must not.
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
fn what_a_disk_cannot_do_is_not_sent() {
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
    rig.core.answered(rig.now, order.token, -1, &[]);
    assert_eq!(rig.events(), [Event::Mapped { dev, result: Err(Errno::EPERM) }]);
    assert_eq!(rig.core.state(dev), None);
    let dev = rig.core.map("b", Access::Rw).unwrap();
    rig.open("b", 5, &Limits { logical: 256, ..DISK });
    assert_eq!(rig.events(), [Event::Mapped { dev, result: Err(Errno::EINVAL) }]);
    assert_eq!(wire::parse(&rig.order().usr), Ok(Request::Close { id: 5 }));
}

#[test]
fn without_a_queue_an_outage_fails_everything() {
    // tests [NB-27] [NB-32]
    let mut rig = Rig::new(Config::default(), 1);
    let dev = rig.mapped("disk0", 0, &DISK);
    rig.io(dev, IoOp::Read, 0, 512, 1);
    rig.io(dev, IoOp::Read, 0, 512, 2);
    rig.core.link_down(rig.now);
    assert_eq!(rig.done(), [(2, -5)]);
    assert_eq!(rig.events(), [Event::Offline { dev }]);
    rig.answer(-103);
    assert_eq!(rig.done(), [(1, -5)], "an application knows no such error");
    assert_eq!(rig.core.state(dev).unwrap().to_string(), "closed");
    rig.io(dev, IoOp::Read, 0, 512, 3);
    assert_eq!(rig.done(), [(3, -5)]);
}

#[test]
fn after_an_outage_everything_is_opened_again_and_waiting_requests_go_out() {
    // tests [NB-16] [NB-54] [NB-32]
    let mut rig = Rig::new(queueing(), 2);
    let (a, b) = (rig.mapped("a", 0, &DISK), rig.mapped("b", 1, &DISK));
    let pending = rig.core.map("c", Access::Rw).unwrap();
    let asked = rig.order();
    for n in 0..3 {
        rig.io(a, IoOp::Write, u64::from(n) * 512, 512, n);
    }
    rig.answer(-103);
    rig.answer(-103);
    assert_eq!(rig.done(), []);
    rig.core.answered(rig.now, asked.token, -103, &[]);
    rig.core.link_down(rig.now);
    assert_eq!(
        rig.events(),
        [
            Event::Mapped { dev: pending, result: Err(Errno::ECONNABORTED) },
            Event::Offline { dev: a },
            Event::Offline { dev: b },
        ]
    );
    rig.io(b, IoOp::Read, 0, 512, 10);
    assert!(rig.sends.is_empty());
    rig.pass(5000);
    rig.core.link_up(rig.now, SessionLimits { max_io: 4096, max_segments: 1 });
    assert_eq!(wire::parse(&rig.order().usr), Ok(Request::SessInfo { ver: 2 }));
    let (first, second) = (rig.order(), rig.order());
    assert!(rig.core.poll_order().is_none());
    rig.answer_open(second.token, 0, &DISK);
    rig.pump();
    assert_eq!(rig.sends.len(), 1, "b is back, under the id that a had");
    assert_eq!(rig.wire(0).device, 0);
    rig.answer_open(first.token, 1, &Limits { bytes: 2 << 20, ..DISK });
    assert_eq!(
        rig.events(),
        [
            Event::Online { dev: b },
            Event::Resized { dev: a, bytes: 2 << 20 },
            Event::Online { dev: a },
        ]
    );
    assert_eq!(rig.core.limits(a).unwrap().max_io, 4096);
    rig.pump();
    for _ in 0..4 {
        rig.answer(0);
    }
    let mut done = rig.done();
    done.sort_unstable();
    assert_eq!(done, [(0, 0), (1, 0), (2, 0), (10, 0)]);
    assert_eq!(rig.core.infos()[0].stats.resent, 2);
}

#[test]
fn waiting_ends_when_time_is_up() {
    // tests [NB-54]
    let mut rig = Rig::new(queueing(), 2);
    let dev = rig.mapped("a", 0, &DISK);
    rig.core.link_down(rig.now);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    assert_eq!(rig.core.poll_timeout(), Some(rig.now + Duration::from_secs(30)));
    rig.pass(29_999);
    assert_eq!(rig.done(), []);
    rig.pass(1);
    assert_eq!(rig.done(), [(1, -5)]);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    assert_eq!(rig.done(), [(2, -5)], "and later ones do not begin to wait");
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.open("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 3);
    rig.answer(0);
    assert_eq!(rig.done(), [(3, 0)]);
}

#[test]
fn a_path_that_is_lost_before_the_session_says_so_makes_no_busy_loop() {
    let mut rig = Rig::new(queueing(), 2);
    let dev = rig.mapped("a", 0, &DISK);
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.answer(-103);
    assert!(rig.sends.is_empty(), "held for a while");
    rig.pass(100);
    assert_eq!(rig.sends.len(), 1);
    rig.answer(-103);
    for _ in 0..400 {
        rig.pass(100);
        if !rig.sends.is_empty() {
            rig.answer(-103);
        }
    }
    assert_eq!(rig.done(), [(1, -5)]);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    rig.pass(100);
    rig.core.send_failed(rig.now, rig.sends.remove(0).slot, Errno::ENOMEM);
    rig.pump();
    assert!(rig.sends.is_empty());
    rig.pass(10);
    rig.answer(0);
    assert_eq!(rig.done(), [(2, 0)]);
}

#[test]
fn a_server_that_lost_its_table_never_sees_an_old_id_after_a_new_open() {
    // tests [NB-16] [NB-21] [NB-23]: a restart behind one of two paths
    let mut rig = Rig::new(queueing(), 4);
    let (a, b) = (rig.mapped("a", 0, &DISK), rig.mapped("b", 1, &DISK));
    rig.io(b, IoOp::Write, 0, 512, 1);
    rig.io(a, IoOp::Write, 0, 512, 2);
    rig.answer(-107);
    assert_eq!(rig.events(), [Event::Offline { dev: b }]);
    rig.pass(1000);
    assert!(rig.core.poll_order().is_none(), "an IO is under way");
    rig.io(a, IoOp::Write, 512, 512, 3);
    assert_eq!(rig.sends.len(), 1, "and no more begin");
    rig.answer(0);
    assert_eq!(rig.done(), [(2, 0)]);
    // The new server gives b the id that a thinks it has.
    rig.open("b", 0, &DISK);
    assert_eq!(rig.events(), [Event::Online { dev: b }, Event::Offline { dev: a }]);
    rig.pump();
    assert_eq!(rig.sends.len(), 1, "only of b: {:?}", rig.sends);
    rig.answer(0);
    rig.pass(1000);
    rig.open("a", 1, &DISK);
    rig.pump();
    assert_eq!(rig.wire(0).device, 1);
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0), (3, 0)]);
}

#[test]
fn a_closed_device_is_remapped_by_hand() {
    // tests [NB-37] [NB-21]
    let mut rig = Rig::new(Config::default(), 4);
    let dev = rig.mapped("a", 0, &DISK);
    assert_eq!(rig.core.remap(rig.now, dev), Err(Errno::EALREADY));
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.answer(-107);
    assert_eq!(rig.done(), [(1, -5)]);
    assert_eq!(rig.events(), [Event::Offline { dev }]);
    rig.pass(60_000);
    assert!(rig.core.poll_order().is_none(), "not by itself");
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
    rig.core.answered(rig.now, order.token, -2, &[]);
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
    assert!(rig.core.poll_order().is_none());
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
    let close = rig.order();
    assert_eq!((wire::parse(&close.usr), close.room), (Ok(Request::Close { id: 6 }), 0));
    assert_eq!(rig.events(), []);
    rig.core.answered(rig.now, close.token, -103, &[]);
    assert_eq!(rig.events(), [Event::Unmapped { dev }]);
    assert_eq!(rig.core.infos(), []);
    rig.io(dev, IoOp::Write, 0, 512, 3);
    assert_eq!(rig.done(), [(3, -5)]);
}

#[test]
fn requests_of_a_disk_may_stop_waiting_for_the_session() {
    // tests [NB-54] [NB-37]
    let mut rig = Rig::new(queueing(), 4);
    let [dev, other] = [("a", 0), ("b", 1)].map(|(name, id)| rig.mapped(name, id, &DISK));
    // While the session is there nothing changes.
    rig.io(dev, IoOp::Write, 0, 512, 1);
    rig.core.fail_fast(dev);
    rig.io(dev, IoOp::Write, 0, 512, 2);
    assert_eq!(rig.done(), []);
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
    // What was under way when it was lost does not wait, nor does what comes later.
    rig.io(other, IoOp::Write, 0, 512, 3);
    rig.answer(-103);
    rig.answer(-103);
    rig.core.link_down(rig.now);
    rig.io(dev, IoOp::Read, 0, 512, 4);
    rig.io(other, IoOp::Read, 0, 512, 5);
    let failed = rig.done();
    assert_eq!(failed.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [2, 4]);
    assert!(failed.iter().all(|(_, errno)| *errno < 0), "{failed:?}");
    // What waits already fails at once, each time it is said so.
    rig.core.fail_fast(other);
    rig.core.fail_fast(other);
    rig.pump();
    assert_eq!(rig.done(), [(3, -5), (5, -5)]);
    rig.pass(100);
    assert_eq!(rig.core.poll_timeout(), None, "nobody waits for anything");
    // The session comes back before they are unmapped: they are open as before.
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.open("a", 6, &DISK);
    rig.open("b", 7, &DISK);
    rig.io(other, IoOp::Write, 0, 512, 6);
    rig.answer(0);
    assert_eq!(rig.done(), [(6, 0)]);
    rig.core.unmap(dev).unwrap();
    rig.core.fail_fast(dev);
    rig.io(dev, IoOp::Write, 0, 512, 7);
    assert_eq!(rig.done(), [(7, -5)]);
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
    rig.core.answered(rig.now, close.token, 0, &[]);
    assert_eq!(rig.events(), [Event::Unmapped { dev }]);
    let dev = rig.core.map("a", Access::Rw).unwrap();
    rig.core.unmap(dev).unwrap();
    let open = rig.order();
    rig.core.answered(rig.now, open.token, -2, &[]);
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
    assert!(rig.core.poll_order().is_none());
}

#[test]
fn a_refused_open_is_tried_again_while_requests_may_wait() {
    // tests [NB-61] [NB-62]
    let mut rig = Rig::new(queueing(), 4);
    let dev = rig.mapped("a", 0, &DISK);
    rig.core.link_down(rig.now);
    rig.core.link_up(rig.now, SESSION);
    rig.order();
    rig.io(dev, IoOp::Write, 0, 512, 1);
    for _ in 0..3 {
        let order = rig.order();
        rig.core.answered(rig.now, order.token, -1, &[]);
        assert!(rig.core.poll_order().is_none());
        rig.pass(1000);
    }
    rig.open("a", 0, &DISK);
    rig.pump();
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
}

#[test]
fn a_local_resize_is_told_and_kept() {
    // tests [NB-37]
    let mut rig = Rig::new(Config::default(), 1);
    let dev = rig.mapped("a", 0, &DISK);
    rig.core.resize(dev, 1000).unwrap();
    assert_eq!(rig.events(), [Event::Resized { dev, bytes: 512 }]);
    rig.io(dev, IoOp::Read, 512, 512, 1);
    assert_eq!(rig.done(), [(1, -5)]);
    rig.core.link_down(rig.now);
    assert_eq!(rig.core.resize(dev, 1024), Err(Errno::ENOENT));
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
fn what_was_under_way_goes_out_again_in_its_slot() {
    // tests [RS-9] [NB-54]
    let mut rig = Rig::new(queueing(), 4);
    let dev = rig.mapped("disk0", 3, &DISK);
    for n in 0..6 {
        rig.io(dev, IoOp::Write, u64::from(n) * 4096, 4096, n);
    }
    let slots: Vec<_> = (0..4).map(|at| (rig.wire(at).sector, rig.sends[at].slot)).collect();
    rig.answer(0);
    assert_eq!(rig.sends.len(), 4, "the fifth took its place");
    let fifth = rig.sends[3].slot;
    assert_eq!(fifth, slots[0].1);
    for _ in 0..4 {
        rig.answer(Errno::ECONNABORTED.neg());
    }
    rig.core.link_down(rig.now);
    rig.core.link_up(rig.now, SESSION);
    let _hello = rig.order();
    rig.open("disk0", 4, &DISK);
    rig.pump();
    let again: Vec<_> = (0..4).map(|at| (rig.wire(at).sector, rig.sends[at].slot)).collect();
    let mut expected = slots[1..].to_vec();
    expected.push((32, fifth));
    expected.reverse();
    assert_eq!(again, expected);
    for _ in 0..5 {
        rig.answer(0);
    }
    assert_eq!(rig.done().len(), 6);
}

#[test]
fn slots_of_a_disk_that_does_not_come_back_are_not_lost_to_others() {
    // tests [NB-54]
    let mut rig = Rig::new(queueing(), 2);
    let gone = rig.mapped("gone", 3, &DISK);
    let other = rig.mapped("other", 4, &DISK);
    rig.io(gone, IoOp::Write, 0, 512, 1);
    rig.io(gone, IoOp::Write, 512, 512, 2);
    rig.answer(Errno::ECONNABORTED.neg());
    rig.answer(Errno::ECONNABORTED.neg());
    rig.core.link_down(rig.now);
    rig.io(other, IoOp::Write, 0, 512, 3);
    rig.core.link_up(rig.now, SESSION);
    let _hello = rig.order();
    let open = rig.order();
    rig.core.answered(rig.now, open.token, Errno::ENOENT.neg(), &[]);
    rig.open("other", 4, &DISK);
    rig.pump();
    assert_eq!(rig.sends.len(), 1);
    rig.answer(0);
    assert_eq!(rig.done(), [(3, 0)]);
    rig.core.unmap(gone).unwrap();
    rig.pump();
    assert_eq!(rig.done(), [(2, -5), (1, -5)]);
}

#[test]
fn what_a_server_may_have_lost_is_sent_again_as_a_whole() {
    // tests [NB-54]: parts acknowledged before an outage count for nothing when there is a write cache,
    // also when the end of the session is told before them.
    for (cache, again, down_first) in [(true, 3, false), (false, 2, false), (true, 3, true)] {
        let disk = Limits { write_cache: cache, ..DISK };
        let mut rig = Rig::new(queueing(), 8);
        let dev = rig.mapped("disk0", 3, &disk);
        rig.io(dev, IoOp::Write, 0, 3 * 8192, 1);
        rig.io(dev, IoOp::Read, 65_536, 3 * 8192, 2);
        assert_eq!(rig.sends.len(), 6);
        if down_first {
            rig.core.link_down(rig.now);
        }
        rig.answer(0);
        for _ in 0..2 {
            rig.answer(Errno::ECONNABORTED.neg());
        }
        rig.answer(0);
        for _ in 0..2 {
            rig.answer(Errno::ECONNABORTED.neg());
        }
        if !down_first {
            rig.core.link_down(rig.now);
        }
        rig.core.link_up(rig.now, SESSION);
        let _hello = rig.order();
        rig.open("disk0", 3, &disk);
        rig.pump();
        let (mut writes, mut reads) = (Vec::new(), 0);
        while !rig.sends.is_empty() {
            let io = rig.wire(0);
            match io.op {
                wire::OP_WRITE => writes.push(io.sector),
                _ => reads += 1,
            }
            rig.answer(0);
        }
        writes.sort_unstable();
        assert_eq!(reads, 2, "what was read was read");
        assert_eq!(rig.done().len(), 2);
        match again {
            3 => assert_eq!(writes, [0, 16, 16, 32, 32], "the rest, then all of it"),
            _ => assert_eq!(writes, [16, 32]),
        }
    }
}

#[test]
fn a_flush_after_data_that_may_be_lost_has_the_data_again() {
    // tests [NB-54] [NB-26]
    let limits = Limits { fua: false, ..DISK };
    let mut rig = Rig::new(queueing(), 8);
    let dev = rig.mapped("disk0", 3, &limits);
    let request = DiskRequest {
        op: IoOp::Write,
        offset: 0,
        len: 512,
        fua: true,
        nounmap: false,
        mem: Some((7, 0)),
        done: 1,
    };
    rig.core.submit(rig.now, dev, request);
    rig.pump();
    rig.answer(0);
    assert_eq!(rig.wire(0).op, wire::OP_FLUSH);
    rig.answer(Errno::ENOTCONN.neg());
    rig.pass(60_000);
    rig.open("disk0", 9, &limits);
    rig.pump();
    let mut ops = Vec::new();
    while !rig.sends.is_empty() {
        ops.push(rig.wire(0).op);
        rig.answer(0);
    }
    assert_eq!(ops, [wire::OP_FLUSH, wire::OP_WRITE, wire::OP_FLUSH]);
    assert_eq!(rig.done(), [(1, 0)]);
}

#[test]
fn what_must_be_durable_is_so_on_the_server_that_does_it() {
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
fn who_was_told_that_there_is_no_cache_never_needs_to_flush() {
    // tests [NB-16] [NB-47]: a door that was opened while the store had none
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
    rig.core.answered(rig.now, close.token, 0, &[]);
    assert_eq!(rig.events(), [Event::Unmapped { dev }]);
}
