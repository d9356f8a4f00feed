//! Keys that are good for one READ only.

use bowline_rtrs::client::{ClientConfig, Event, Permit, PermitKind, ReadKeys};
use bowline_rtrs::{Errno, Input, MemRef, PathId, PortAttr, RegionId};
use bowline_verbs::Access;
use bowline_wire::rtrs::{Desc, Dir, Imm, IoHdr};

use crate::peer::{ATTR, Connects, Io, Rig, addr, config};

fn per_request() -> ClientConfig {
    ClientConfig { read_keys: ReadKeys::PerRequest, ..config() }
}

fn pieces(region: RegionId) -> [MemRef; 3] {
    let piece = |offset, len| MemRef { region, offset, len };
    [piece(4096, 512), piece(9, 4000), piece(8192, 1)]
}

impl Rig {
    fn read(&mut self, permit: &Permit, data: &[MemRef], tag: u64) -> Result<(), Errno> {
        let asked = self.session.request(self.now, Dir::Read, permit, b"get", data, tag);
        self.pump();
        asked
    }

    /// Returns the key that a request has sent to the server.
    fn told(&self, io: &Io) -> Option<Desc> {
        match io.req.hdr {
            IoHdr::Read { need_inval, desc, .. } => desc.filter(|_| need_inval),
            IoHdr::Write { .. } => None,
        }
    }
}

// tests [RT-12], [RT-42], [RT-43], [RT-54]
#[test]
fn a_read_into_pieces_has_a_key_of_its_own() {
    for refresh in [false, true] {
        let mut rig = Rig::opened(refresh, 1);
        assert!(rig.made.is_empty(), "nobody needs any yet");
        let memory = rig.region(16_384, Access::LOCAL_WRITE);
        let permit = rig.permit();
        let data = pieces(memory);
        for round in 0..3_u32 {
            rig.read(&permit, &data, u64::from(round)).unwrap();
            let io = rig.ios[0].clone();
            let key = 1 << 16 | (0xff + round) & 0xff;
            let desc = rig.told(&io).expect("one descriptor");
            assert_eq!(desc, Desc { addr: 0, key, len: 4513 });
            assert_eq!(rig.granted[&(io.conn.path, key)], (0, data.to_vec()));
            assert_eq!(rig.take_completed(), []);
            rig.reply_all();
            assert!(rig.granted.is_empty());
            assert_eq!(rig.take_completed(), [(round.into(), 0)]);
        }
        // Adjacent pieces are one, for which the memory's own key suffices.
        let shared = rig.memory();
        let piece = |offset| MemRef { region: shared, offset, len: 512 };
        rig.read(&permit, &[piece(512), piece(1024)], 9).unwrap();
        let hdr = rig.ios[0].req.hdr;
        let desc = Desc { addr: 512, key: (shared.0 + 1) << 8, len: 1024 };
        assert_eq!(hdr, IoHdr::Read { usr_len: 3, need_inval: false, desc: Some(desc) });
        rig.reply_all();
    }
}

// tests [RT-43], [RT-69]: memory of which the server knows no key.
#[test]
fn every_read_may_have_a_key_of_its_own() {
    let mut rig = Rig::opened_with(per_request(), true, 1);
    assert_eq!(rig.made.len(), 1);
    let memory = rig.region(8192, Access::LOCAL_WRITE);
    let (one, two) = (rig.permit(), rig.permit());
    let data = [MemRef { region: memory, offset: 100, len: 1000 }];
    rig.read(&one, &data, 1).unwrap();
    rig.read(&two, &[], 2).unwrap();
    let told: Vec<_> = rig.ios.iter().map(|io| rig.told(io)).collect();
    assert_eq!(told, [Some(Desc { addr: 0, key: 0x1_00ff, len: 1000 }), None]);
    rig.reply_all();
    assert_eq!(rig.take_completed(), [(1, 0), (2, 0)]);
    let sealed = rig.region(8192, Access::empty());
    let data = [MemRef { region: sealed, offset: 0, len: 8 }];
    assert_eq!(rig.read(&one, &data, 3), Err(Errno::EINVAL));
}

// tests [RT-54], [RT-69]: whatever the server says, the key is invalid before the request ends for
// the program.
#[test]
fn a_key_the_server_left_is_invalidated_first() {
    for says in [false, true] {
        let mut rig = Rig::opened_with(per_request(), false, 1);
        let memory = rig.memory();
        let permit = rig.permit();
        rig.read(&permit, &pieces(memory), 1).unwrap();
        rig.sends_complete = false;
        let io = rig.ios.remove(0);
        let imm = Imm::Done { id: 0, errno: 5, invalidated: says };
        rig.give_imm(io.conn, imm);
        rig.session.take_completed(&mut rig.completed);
        assert_eq!(rig.granted.len(), 1);
        assert_eq!(rig.take_completed(), []);
        rig.pump();
        assert!(rig.granted.is_empty());
        assert_eq!(rig.take_completed(), [], "invalidated, but that is not known yet");
        let unsent = std::mem::take(&mut rig.unsent);
        rig.session.handle_done(rig.now, &unsent);
        rig.pump();
        assert_eq!(rig.take_completed(), [(1, -5)]);
        rig.sends_complete = true;
        rig.read(&permit, &pieces(memory), 2).unwrap();
        rig.reply_all();
        assert_eq!(rig.take_completed(), [(2, 0)]);
    }
}

// tests [RT-69]: unrequested invalidations, and answers that come twice.
#[test]
fn invalidations_that_make_no_sense_end_the_path() {
    type Wrong = fn(&mut Rig, &Io);
    let wrongs: [(&str, Wrong); 5] = [
        ("a key that is none", |rig, io| rig.give_inval(io.conn, 0x77_0000)),
        ("a key of before", |rig, io| rig.give_inval(io.conn, 0x1_00fe)),
        ("a key of a permit without a request", |rig, io| rig.give_inval(io.conn, 0x9_00fe)),
        ("a key twice", |rig, io| {
            rig.give_inval(io.conn, 0x1_00ff);
            rig.give_inval(io.conn, 0x1_00ff);
        }),
        ("an answer twice", |rig, io| {
            rig.sends_complete = false;
            let imm = Imm::Done { id: 0, errno: 0, invalidated: false };
            rig.give_imm(io.conn, imm);
            rig.give_imm(io.conn, imm);
        }),
    ];
    for (what, wrong) in wrongs {
        let mut rig = Rig::opened_with(per_request(), false, 2);
        let memory = rig.memory();
        let permit = rig.permit();
        rig.read(&permit, &pieces(memory), 1).unwrap();
        let io = rig.ios.remove(0);
        wrong(&mut rig, &io);
        rig.pump();
        assert!(rig.take_events().iter().any(|e| matches!(e, Event::PathState { .. })), "{what}");
        assert!(!rig.made.contains_key(&io.conn.path), "{what}");
        rig.sends_complete = true;
        rig.reply_all();
        assert_eq!(rig.take_completed(), [(1, 0)], "{what}");
    }
}

// tests [RS-8], [RT-69]
#[test]
fn a_request_that_moves_gets_another_key() {
    let mut rig = Rig::opened_with(per_request(), true, 2);
    let memory = rig.memory();
    let permits = [rig.permit(), rig.permit()];
    for (tag, permit) in (0..).zip(&permits) {
        rig.read(permit, &pieces(memory), tag).unwrap();
    }
    let (dead, other) = (rig.live(1)[1], rig.live(2)[1]);
    let lost = rig.ios.iter().find(|io| io.conn == dead).unwrap().clone();
    rig.ios.retain(|io| io.conn != dead);
    rig.drains = false;
    rig.lose(dead);
    // All of the path's keys are invalid before its queues are empty, and the request has not moved
    // yet.
    assert!(rig.granted.keys().all(|(path, _)| *path == other.path));
    assert_eq!((rig.ios.len(), rig.take_completed().len()), (1, 0));
    for conn in rig.conns.keys().filter(|conn| conn.path == dead.path).copied().collect::<Vec<_>>()
    {
        rig.drain(conn);
    }
    rig.pump();
    let moved = rig.ios[1].clone();
    assert_eq!((moved.id, moved.conn), (lost.id, other));
    assert!(rig.granted.contains_key(&(other.path, rig.told(&moved).unwrap().key)));
    rig.reply_all();
    assert_eq!(rig.take_completed(), [(1, 0), (0, 0)]);
    assert!(rig.granted.is_empty());
}

// tests [RS-8]: an answer that came before the loss counts once the key is invalid, also when the
// server's invalidation is noticed only after the loss.
#[test]
fn an_answer_before_the_loss_counts() {
    for invalidated in [false, true] {
        let mut rig = Rig::opened_with(per_request(), false, 2);
        let memory = rig.memory();
        let permit = rig.permit();
        rig.read(&permit, &pieces(memory), 1).unwrap();
        let io = rig.ios.remove(0);
        let key = rig.told(&io).unwrap().key;
        rig.drains = false;
        rig.break_conn(io.conn);
        if invalidated {
            rig.give_inval(io.conn, key);
        }
        rig.give_imm(io.conn, Imm::Done { id: 0, errno: 0, invalidated });
        rig.session.take_completed(&mut rig.completed);
        assert_eq!(rig.take_completed(), [], "its key is not known to be dead");
        rig.pump();
        let all: Vec<_> = rig.conns.keys().filter(|c| c.path == io.conn.path).copied().collect();
        all.into_iter().for_each(|conn| rig.drain(conn));
        rig.pump();
        assert_eq!(rig.take_completed(), [(1, 0)]);
        assert!(rig.ios.is_empty() && rig.granted.is_empty());
    }
}

// tests [RS-25], [RS-38]: a close invalidates the keys, also with requests in flight.
#[test]
fn nothing_is_left_of_keys() {
    let mut rig = Rig::opened_with(per_request(), true, 1);
    let memory = rig.memory();
    let permit = rig.permit();
    rig.read(&permit, &pieces(memory), 1).unwrap();
    rig.session.put_permit(permit);
    rig.ios.clear();
    rig.session.close(rig.now);
    rig.pump();
    assert_eq!(rig.granted.len(), 1, "it may end by itself for a second");
    rig.pass(std::time::Duration::from_secs(2));
    assert_eq!(rig.take_completed(), [(1, Errno::ECONNABORTED.neg())]);
    rig.assert_empty();
    assert_eq!(rig.take_events().last(), Some(&Event::Closed));
}

// tests [RT-42], [RT-43]: a device that makes no keys, and one that has no more of them.
#[test]
fn keys_may_not_be_had() {
    let slow = PortAttr { fast_registration: false, ..ATTR };
    let mut rig = Rig::of_device(per_request(), true, slow, 1);
    rig.session.open(rig.now, &[addr(1)]);
    rig.pump();
    assert_eq!(rig.take_events(), [Event::Opened(Err(Errno::EOPNOTSUPP))]);
    let mut rig = Rig::of_device(config(), true, slow, 1);
    rig.session.open(rig.now, &[addr(1)]);
    rig.pump();
    assert_eq!(rig.session.geometry().unwrap().max_read_segments, 1);
    let memory = rig.memory();
    let permit = rig.permit();
    assert_eq!(rig.read(&permit, &pieces(memory), 1), Err(Errno::EINVAL));
    assert_eq!(rig.read(&permit, &pieces(memory)[..1], 1), Ok(()));
    // Keys cannot be made: a session that needs them for all requests gets no path.
    let mut rig = Rig::new(per_request(), true);
    rig.no_keys = true;
    rig.session.open(rig.now, &[addr(1)]);
    rig.pump();
    assert_eq!(rig.take_events().last(), Some(&Event::Opened(Err(Errno::ENOMEM))));
    rig.assert_empty();
    // In others the requests that need them fail.
    let mut rig = Rig::opened(true, 1);
    rig.no_keys = true;
    let memory = rig.memory();
    let permit = rig.permit();
    assert_eq!(rig.read(&permit, &pieces(memory), 1), Ok(()));
    assert_eq!(rig.take_completed(), [(1, Errno::ENOMEM.neg())]);
    assert_eq!(rig.read(&permit, &pieces(memory), 2), Err(Errno::ENOMEM));
    rig.write(&permit, memory, 3).unwrap();
    rig.reply_all();
    assert_eq!(rig.take_completed(), [(3, 0)]);
}

// tests [RS-9]: a READ whose path is lost, and for which the other path has no key. The server may
// still carry it out, so its chunk is not reused over another path before that has ended.
#[test]
fn a_chunk_given_up_is_not_used_over_a_path_that_joined_before() {
    for known in [false, true] {
        let mut rig = Rig::opened(false, 2);
        let memory = rig.memory();
        let (permit, other) = (rig.permit(), rig.permit());
        rig.read(&permit, &pieces(memory), 1).unwrap();
        let before: Vec<_> = rig.conns.keys().copied().collect();
        rig.no_keys = true;
        if known {
            rig.read(&other, &pieces(memory), 2).unwrap();
            assert_eq!(rig.take_completed(), [(2, Errno::ENOMEM.neg())]);
            rig.write(&other, memory, 3).unwrap();
            assert_eq!(rig.ios.len(), 2, "never sent, so nothing is in the way");
            let io = rig.ios.remove(1);
            rig.reply(&io, 0);
            rig.pump();
            assert_eq!(rig.take_completed(), [(3, 0)]);
        }
        let io = rig.ios.remove(0);
        rig.connects = Connects::Fail(Errno::ETIMEDOUT);
        rig.lose(io.conn);
        assert_eq!(rig.take_completed(), [(1, Errno::ENOMEM.neg())]);
        assert_eq!(rig.write(&permit, memory, 4), Err(Errno::ECONNABORTED));
        rig.connects = Connects::Accept;
        rig.pass(std::time::Duration::from_secs(3));
        rig.write(&permit, memory, 5).unwrap();
        let conn = rig.ios[0].conn;
        assert!(!before.contains(&conn), "{conn:?} had joined before");
        rig.reply_all();
        assert_eq!(rig.take_completed(), [(5, 0)]);
    }
}

/// Requests wait for keys, in order, and for receives: an answer may take two.
#[test]
fn requests_wait_for_their_keys() {
    let mut rig = Rig::new(config(), false);
    rig.keys_late = true;
    rig.session.open(rig.now, &[addr(1)]);
    rig.pump();
    let memory = rig.memory();
    let permits: Vec<_> =
        std::iter::from_fn(|| rig.session.get_permit(PermitKind::Io, 0)).collect();
    for (tag, permit) in (0..).zip(&permits) {
        rig.read(permit, &pieces(memory), tag).unwrap();
    }
    assert!(rig.ios.is_empty());
    let [(path, count)] = rig.keys_wait[..] else { panic!("{:?}", rig.keys_wait) };
    rig.make_keys(path, count);
    rig.pump();
    let posted = rig.ios.len();
    assert!(posted > 20 && posted < permits.len(), "{posted}");
    let mut ended = 0;
    while !rig.ios.is_empty() {
        rig.reply_all();
        ended += rig.take_completed().len();
    }
    assert_eq!(ended, permits.len());
    // Keys of a former link.
    let path = PathId { slot: 99, generation: 3 };
    rig.session.handle(rig.now, Input::Keys { path, keys: Ok(vec![1]) });
    rig.pump();
}
