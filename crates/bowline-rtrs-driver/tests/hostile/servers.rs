//! Servers that break the rules: the session loses its path to them and reports it; the program's
//! memory and other sessions are unchanged [RT-69].

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bowline_roce_driver::SoftDevice;
use bowline_rtrs_driver::client::{
    Completed, Completer, Done, PathState, Permit, PermitKind, ReadKeys, Region, Session,
    SessionBuilder, Wait,
};
use bowline_rtrs_driver::server::{Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Engine, Errno, PORT};
use bowline_verbs::{Device, RecvWr, Remote, SendOp, Status};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, Desc, Geometry, Imm, IoHdr, RkeyRsp, emit_info_rsp, parse_info_req,
    parse_io,
};

use crate::common::{Store, device, engine, eventually, ip, write_and_read};
use crate::raw::{Conn, Raw, raw};
use crate::scene::{Turn, quiet};

const DEPTH: u16 = 8;
const CHUNK: u32 = 8192;
/// Offset of the chunks in the raw peer's buffer.
const CHUNKS: usize = 700 << 10;
/// Offset of the receive for INFO_REQ.
const INFO: usize = 512 << 10;

/// A client with a session to an honest server, and a raw peer that plays a hostile one.
struct Stage {
    net: u8,
    /// Of the next session with the hostile server; each has one of its own [RS-24].
    name: &'static str,
    device: Arc<SoftDevice>,
    engine: Arc<Engine>,
    honest: Arc<Session>,
    honest_region: Region,
    raw: Raw,
    _server: (Arc<Engine>, Arc<Server>),
    _turn: Turn,
}

fn geometry() -> Geometry {
    Geometry::of_chunk(DEPTH, CHUNK, 4096).unwrap()
}

fn answer(new_rkey: bool) -> [u8; 56] {
    ConAnswer::Accepted(ConRsp {
        geometry: geometry(),
        new_rkey,
        counted_keys: false,
        accepts_notice: false,
    })
    .emit()
}

impl Stage {
    fn new(net: u8) -> Self {
        let _turn = Turn::beside();
        let (near, far) = (device(&[ip(net, 1)]), device(&[ip(net, 101)]));
        let (near_engine, far_engine) = (engine(&near), engine(&far));
        let at = [SocketAddr::new(ip(net, 101), PORT)];
        let server =
            Server::open(&far_engine, &at, ServerConfig::default(), Store::new() as _).unwrap();
        let builder = SessionBuilder::new("honest").unwrap().heartbeat(quiet());
        let builder = builder.path(Some(ip(net, 1)), ip(net, 101));
        let honest = Session::open(&near_engine, builder).unwrap();
        let honest_region = honest.region(65_536).unwrap();
        honest_region.buffer().write(0, &[0x11; 65_536]);
        let raw = raw(ip(net, 66));
        raw.dev.listen((ip(net, 66), PORT).into()).unwrap();
        let _server = (far_engine, server);
        let name = "prey";
        Self {
            net,
            name,
            device: near,
            engine: near_engine,
            honest,
            honest_region,
            raw,
            _server,
            _turn,
        }
    }

    fn builder(&self) -> SessionBuilder {
        let builder = SessionBuilder::new(self.name).unwrap().heartbeat(quiet()).max_reconnects(0);
        builder.path(Some(ip(self.net, 1)), ip(self.net, 66))
    }

    /// Asserts that the honest session is unchanged.
    fn check(&self, what: &str) {
        let paths = self.honest.paths();
        assert_eq!(paths[0].state, PathState::Connected, "{what}");
        assert_eq!((paths[0].stats.reconnects, paths[0].stats.failovers), (0, 0), "{what}");
        let mut bytes = vec![0; 65_536];
        self.honest_region.buffer().read(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0x11), "{what}: its memory has changed");
        write_and_read(&self.honest, 0, 4096);
    }

    /// Opens a session, to which the hostile server replies in the same way each time: a client
    /// that is reset tries again several times. Returns the result of the open.
    fn refused(&mut self, play: impl Fn(&mut Raw) -> Vec<Conn>) -> Errno {
        let (engine, builder) = (Arc::clone(&self.engine), self.builder());
        std::thread::scope(|scope| {
            let opening = scope.spawn(move || Session::open(&engine, builder));
            while !opening.is_finished() {
                if self.raw.is_asked() {
                    let conns = play(&mut self.raw);
                    assert!(self.raw.is_dropped(conns[0]), "the client has left");
                    self.raw.leave(&conns);
                }
            }
            opening.join().unwrap().unwrap_err().errno()
        })
    }

    /// Opens a session to the hostile server, which runs `play` meanwhile.
    fn open<T>(
        &mut self,
        play: impl FnOnce(&mut Raw) -> T,
    ) -> (Result<Arc<Session>, bowline_rtrs_driver::Error>, T) {
        self.open_with(self.builder(), play)
    }

    fn open_with<T>(
        &mut self,
        builder: SessionBuilder,
        play: impl FnOnce(&mut Raw) -> T,
    ) -> (Result<Arc<Session>, bowline_rtrs_driver::Error>, T) {
        let engine = Arc::clone(&self.engine);
        std::thread::scope(|scope| {
            let opening = scope.spawn(move || Session::open(&engine, builder));
            let played = play(&mut self.raw);
            (opening.join().unwrap(), played)
        })
    }
}

/// Accepts a connection, with any answer.
fn accept(raw: &mut Raw, private: &[u8]) -> (Conn, ConReq) {
    let (id, request) = raw.asked();
    let asked = ConReq::parse(&request.private_data).unwrap();
    let qp = raw.queue_pair();
    let conn = Conn { qp, id };
    if asked.cid == 0 {
        raw.post_recv(conn, 1, INFO, 272);
    }
    raw.dev.accept(id, &raw.param(qp, private)).unwrap();
    (conn, asked)
}

/// Accepts all connections of a path and waits for INFO_REQ.
fn accept_path(raw: &mut Raw, private: &[u8]) -> Vec<Conn> {
    let mut conns = Vec::new();
    loop {
        let (conn, asked) = accept(raw, private);
        assert!(raw.established(conn));
        conns.push(conn);
        if asked.cid + 1 == asked.cid_num {
            break;
        }
    }
    assert_eq!(raw.recv(1).unwrap().status, Status::Success);
    let mut bytes = [0; 272];
    raw.buffer.read(INFO, &mut bytes);
    assert!(parse_info_req(&bytes).unwrap().as_str().starts_with("prey"));
    for conn in &conns {
        let empty: Vec<_> = (0..64).map(|_| RecvWr { id: 1, sges: &[] }).collect();
        raw.dev.post_recv(conn.qp, &empty).unwrap();
    }
    conns
}

fn good_info(raw: &Raw) -> Vec<u8> {
    let mut bytes = Vec::new();
    let desc = |n: u16| Desc {
        addr: CHUNKS as u64 + u64::from(n) * u64::from(CHUNK),
        key: raw.keys.rkey,
        len: CHUNK,
    };
    emit_info_rsp((0..DEPTH).map(desc), &mut bytes);
    bytes
}

struct Ended(Mutex<Vec<i32>>);

impl Completer for Ended {
    fn completed(&self, done: &[Completed]) {
        self.0.lock().unwrap().extend(done.iter().map(|done| done.errno));
    }
}

/// A session to the hostile server, with a READ in flight.
struct Prey {
    session: Arc<Session>,
    conns: Vec<Conn>,
    region: Region,
    permit: Permit,
    ended: Arc<Ended>,
    /// Where the answer is wanted.
    desc: Desc,
    /// Chunk of the request, and the connection it came by.
    id: u16,
    io: Conn,
}

impl Prey {
    fn new(stage: &mut Stage, refresh: bool) -> Self {
        Self::of(stage, refresh, ReadKeys::LongLived)
    }

    fn of(stage: &mut Stage, refresh: bool, keys: ReadKeys) -> Self {
        let builder = stage.builder().read_keys(keys);
        let (session, conns) = stage.open_with(builder, |raw| {
            let conns = accept_path(raw, &answer(refresh));
            let info = good_info(raw);
            raw.send(conns[0], 2, &info);
            assert_eq!(raw.sent(2), Status::Success);
            conns
        });
        let session = session.unwrap();
        let region = session.region(65_536).unwrap();
        region.buffer().write(0, &[0x22; 65_536]);
        let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
        let ended = Arc::new(Ended(Mutex::default()));
        let done = Done { to: Arc::clone(&ended) as _, tag: 0 };
        let piece = [region.piece(8192, 512)];
        session.request(Dir::Read, &permit, b"read", &piece, done).unwrap();
        let got = stage.raw.recv(1).expect("a request");
        let io = *conns.iter().find(|conn| conn.qp == got.qpn).expect("its connection");
        let Imm::Request(payload) = Imm::from_u32(got.imm.unwrap()) else { panic!("{got:?}") };
        let (id, off) = geometry().split(payload).unwrap();
        let mut tail = [0; 24];
        let at = CHUNKS + usize::from(id) * CHUNK as usize + off as usize;
        stage.raw.buffer.read(at, &mut tail);
        let request = parse_io(&geometry(), off, &tail).unwrap();
        let IoHdr::Read { desc: Some(desc), .. } = request.hdr else { panic!("{request:?}") };
        assert_eq!(desc.len, 512);
        Self { session, conns, region, permit, ended, desc, id, io }
    }

    fn answer(&self, id: u32) -> u32 {
        assert!(id < 0x8_0000);
        Imm::Done { id, errno: 0, invalidated: false }.to_u32()
    }

    /// Asserts that the request has failed, the path is lost and the memory is unchanged.
    fn ends(self, stage: &mut Stage, what: &str) {
        eventually(what, || !self.ended.0.lock().unwrap().is_empty());
        assert_eq!(*self.ended.0.lock().unwrap(), [Errno::ECONNABORTED.neg()], "{what}");
        assert_ne!(self.session.paths()[0].state, PathState::Connected, "{what}");
        self.memory_is(0x22, what);
        self.leave(stage);
        stage.check(what);
    }

    fn memory_is(&self, byte: u8, what: &str) {
        let mut bytes = vec![0; 65_536];
        self.region.buffer().read(0, &mut bytes);
        assert!(bytes.iter().all(|at| *at == byte), "{what}: memory has changed");
    }

    fn leave(self, stage: &mut Stage) {
        let Self { session, conns, region, permit, .. } = self;
        session.put_permit(permit);
        drop(region);
        stage.raw.leave(&conns);
        session.close();
    }
}

// tests [RT-30], [RT-32], [RT-69]
#[test]
fn answers_to_connecting_that_make_no_sense_are_refused() {
    let mut stage = Stage::new(90);
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = answer(true);
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let before = stage.device.in_use();
    let before = (before.qps, before.pds, before.cqs);
    // Each is tried six times, so only some of them here; the others are tests of the core.
    for (what, private) in [
        ("noise", [0xa5; 56]),
        ("an error in an acceptance", with(4, &[0xef, 0xff])),
        ("no chunks", with(6, &[0, 0])),
        ("more chunks than can be named", with(6, &[0xff, 0xff])),
        ("chunks and headers of everything", with(8, &[0xff; 8])),
    ] {
        let errno = stage.refused(|raw| vec![accept(raw, &private).0]);
        assert_eq!(errno, Errno::ECONNRESET, "{what}");
        stage.check(what);
    }
    let held = || {
        let now = stage.device.in_use();
        (now.qps, now.pds, now.cqs)
    };
    eventually(&format!("nothing is left but {before:?}: {:?}", held()), || held() == before);
}

// tests [RT-9], [RT-69]: INFO_RSP with wild addresses, lengths and numbers of chunks
#[test]
fn tables_of_chunks_that_make_no_sense_are_refused() {
    let mut stage = Stage::new(91);
    type Change = fn(&mut Vec<u8>);
    // Each is tried six times, so only some of them here; the others are tests of the core.
    let bad: [(&str, Change); 5] = [
        ("nothing", |rsp| rsp.clear()),
        ("a table cut in a descriptor", |rsp| rsp.truncate(8 + 16 * 7 + 15)),
        ("the most descriptors", |rsp| rsp[2..4].fill(0xff)),
        ("a chunk of everything", |rsp| rsp[20..24].fill(0xff)),
        // More than the client has room for.
        ("a long table", |rsp| rsp.resize(20_000, 0)),
    ];
    for (what, change) in bad {
        let errno = stage.refused(|raw| {
            let conns = accept_path(raw, &answer(true));
            let mut info = good_info(raw);
            change(&mut info);
            raw.send(conns[0], 2, &info);
            conns
        });
        assert_eq!(errno, Errno::ECONNRESET, "{what}");
        stage.check(what);
    }
    // Any address is accepted, since only the server can judge it; the client's writes there have
    // no effect.
    let (session, conns) = stage.open(|raw| {
        let conns = accept_path(raw, &answer(true));
        let mut info = good_info(raw);
        for n in 0..usize::from(DEPTH) {
            info[8 + 16 * n..][..8].copy_from_slice(&(u64::MAX - (1 << 40)).to_le_bytes());
        }
        raw.send(conns[0], 2, &info);
        conns
    });
    let session = session.unwrap();
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    let error = session.call(Dir::Read, &permit, b"wild", &[]).unwrap_err();
    assert_eq!(error.errno(), Errno::ECONNABORTED);
    session.put_permit(permit);
    stage.raw.leave(&conns);
    session.close();
    stage.check("wild addresses");
}

// tests [RT-54], [RT-56], [RT-69]
#[test]
fn answers_that_make_no_sense_end_the_path() {
    let mut stage = Stage::new(92);
    type Act = fn(&Raw, &Prey);
    let plain: [(&str, Act); 8] = [
        ("a number beyond the depth", |raw, prey| raw.imm(prey.io, prey.answer(8))),
        ("a number beyond all depths", |raw, prey| raw.imm(prey.io, prey.answer(0x7_ffff))),
        ("a request not in flight", |raw, prey| {
            raw.imm(prey.io, prey.answer(u32::from(prey.id) ^ 1));
        }),
        ("another connection", |raw, prey| {
            raw.imm(prey.conns[0], prey.answer(prey.id.into()));
        }),
        ("a request to a client", |raw, prey| raw.imm(prey.io, Imm::Request(0).to_u32())),
        ("a message", |raw, prey| raw.send(prey.io, 3, &[0; 8])),
        ("a long message", |raw, prey| raw.send(prey.io, 3, &[0; 4000])),
        ("an answer that is sent", |raw, prey| {
            let imm = prey.answer(prey.id.into());
            raw.post(prey.io, 3, SendOp::SendImm(imm), &RkeyRsp { id: prey.id, key: 1 }.emit());
        }),
    ];
    for (what, act) in plain {
        let prey = Prey::new(&mut stage, false);
        act(&stage.raw, &prey);
        prey.ends(&mut stage, what);
    }
    fn rkey(raw: &Raw, prey: &Prey, bytes: &[u8]) {
        raw.post(prey.io, 3, SendOp::SendImm(prey.answer(prey.id.into())), bytes);
    }
    let refresh: [(&str, Act); 7] = [
        ("a key of another chunk", |raw, prey| {
            rkey(raw, prey, &RkeyRsp { id: prey.id ^ 1, key: 1 }.emit());
        }),
        ("a key of no chunk", |raw, prey| rkey(raw, prey, &RkeyRsp { id: 999, key: 1 }.emit())),
        ("a key cut short", |raw, prey| {
            rkey(raw, prey, &RkeyRsp { id: prey.id, key: 1 }.emit()[..7]);
        }),
        ("a key and more", |raw, prey| rkey(raw, prey, &[4, 0, 0, 0, 0, 0, 0, 0, 0])),
        ("a message of another type", |raw, prey| rkey(raw, prey, &[2; 8])),
        ("no key at all", |raw, prey| raw.imm(prey.io, prey.answer(prey.id.into()))),
        ("a key for nothing", |raw, prey| {
            let bytes = RkeyRsp { id: prey.id, key: 1 }.emit();
            raw.post(prey.io, 3, SendOp::Send, &bytes);
        }),
    ];
    for (what, act) in refresh {
        let prey = Prey::new(&mut stage, true);
        act(&stage.raw, &prey);
        prey.ends(&mut stage, what);
    }
    // Answers of all chunks, again and again: the second of each is one too many.
    let prey = Prey::new(&mut stage, true);
    for n in 0..200_u16 {
        let id = (prey.id + 1 + n % (DEPTH - 1)) % DEPTH;
        let imm = prey.answer(id.into());
        stage.raw.post(prey.io, 3, SendOp::SendImm(imm), &RkeyRsp { id, key: n.into() }.emit());
    }
    prey.ends(&mut stage, "a flood of keys");
}

// tests [RT-69]: where a server may write
#[test]
fn writes_elsewhere_are_refused() {
    let mut stage = Stage::new(93);
    let length = 65_536;
    type Place = fn(&Desc, u64) -> Remote;
    let bad: [(&str, Place); 7] = [
        ("past the end of the memory", |desc, len| Remote { addr: len - 100, rkey: desc.key }),
        ("far past it", |desc, _| Remote { addr: 1 << 40, rkey: desc.key }),
        ("around the end of all addresses", |desc, _| Remote {
            addr: u64::MAX - 10,
            rkey: desc.key,
        }),
        ("with another byte of the key", |desc, _| Remote { addr: 0, rkey: desc.key ^ 1 }),
        ("with another key", |desc, _| Remote { addr: 0, rkey: desc.key ^ 0x100 }),
        ("with no key", |_, _| Remote { addr: 0, rkey: 0 }),
        ("with the highest key", |_, _| Remote { addr: 0, rkey: u32::MAX }),
    ];
    for (what, remote) in bad {
        let prey = Prey::new(&mut stage, true);
        let op = SendOp::Write(remote(&prey.desc, length));
        stage.raw.post(prey.io, 3, op, &[0xee; 512]);
        assert_eq!(stage.raw.sent(3), Status::RemAccessErr, "{what}");
        prey.ends(&mut stage, what);
    }
    // Another session of the same program has another protection domain: its keys open nothing
    // here.
    let other = Prey::new(&mut stage, true);
    stage.name = "prey too";
    let prey = Prey::new(&mut stage, true);
    let remote = Remote { addr: 0, rkey: other.desc.key };
    stage.raw.post(prey.io, 3, SendOp::Write(remote), &[0xee; 512]);
    assert_eq!(stage.raw.sent(3), Status::RemAccessErr);
    prey.ends(&mut stage, "a key of another session");
    other.memory_is(0x22, "a key of another session");
    // The other session continues.
    let remote = Remote { addr: other.desc.addr, rkey: other.desc.key };
    stage.raw.post(other.io, 3, SendOp::Write(remote), &[0x22; 512]);
    let imm = SendOp::SendImm(other.answer(other.id.into()));
    assert_eq!(stage.raw.sent(3), Status::Success);
    stage.raw.post(other.io, 3, imm, &RkeyRsp { id: other.id, key: 1 }.emit());
    eventually("the request ends", || *other.ended.0.lock().unwrap() == [0]);
    other.leave(&mut stage);
    stage.check("a key of another session");
}

// tests [RT-62], [RT-66]
#[test]
fn a_flood_of_heartbeats_is_borne() {
    let mut stage = Stage::new(94);
    let prey = Prey::new(&mut stage, false);
    // No receive is posted for the answers.
    for _ in 0..20_000 {
        stage.raw.imm(prey.conns[0], Imm::HbMsg.to_u32());
        assert_eq!(stage.raw.sent(4), Status::Success);
    }
    assert_eq!(prey.session.paths()[0].state, PathState::Connected);
    stage.raw.imm(prey.io, prey.answer(prey.id.into()));
    eventually("the request ends", || *prey.ended.0.lock().unwrap() == [0]);
    prey.memory_is(0x22, "heartbeats");
    prey.leave(&mut stage);
    stage.check("a flood of heartbeats");
}

// tests [RT-43], [RT-54], [RT-69]: a key that is good for one READ is good for nothing after its
// answer, whether the server has invalidated it, or not, or only says so.
#[test]
fn a_key_of_one_read_is_dead_after_its_answer() {
    let mut stage = Stage::new(95);
    for (what, inval, says) in
        [("invalidated", true, true), ("left", false, false), ("not as it says", false, true)]
    {
        let prey = Prey::of(&mut stage, false, ReadKeys::PerRequest);
        let raw = &mut stage.raw;
        let place = Remote { addr: prey.desc.addr, rkey: prey.desc.key };
        raw.post(prey.io, 20, SendOp::Write(place), &[0x77; 512]);
        assert_eq!(raw.sent(20), Status::Success, "{what}: while it is asked for");
        if inval {
            raw.post(prey.io, 21, SendOp::SendInv(prey.desc.key), &[]);
            assert_eq!(raw.sent(21), Status::Success);
        }
        let imm = Imm::Done { id: prey.id.into(), errno: 0, invalidated: says };
        raw.imm(prey.io, imm.to_u32());
        eventually(what, || !prey.ended.0.lock().unwrap().is_empty());
        assert_eq!(*prey.ended.0.lock().unwrap(), [0], "{what}");
        let mut bytes = vec![0; 512];
        prey.region.buffer().read(8192, &mut bytes);
        assert_eq!(bytes, [0x77; 512], "{what}: the answer");
        prey.region.buffer().write(8192, &[0x22; 512]);
        raw.post(prey.io, 22, SendOp::Write(place), &[0x99; 512]);
        assert_eq!(raw.sent(22), Status::RemAccessErr, "{what}");
        prey.memory_is(0x22, what);
        eventually(what, || prey.session.paths()[0].state != PathState::Connected);
        prey.leave(&mut stage);
        stage.check(what);
    }
    // The program's other memory has no key that a server could know.
    let prey = Prey::of(&mut stage, false, ReadKeys::PerRequest);
    let beside = Remote { addr: prey.desc.addr + 1, rkey: prey.desc.key };
    stage.raw.post(prey.io, 23, SendOp::Write(beside), &[0x99; 512]);
    assert_eq!(stage.raw.sent(23), Status::RemAccessErr);
    prey.ends(&mut stage, "a byte beyond what is asked for");
}
