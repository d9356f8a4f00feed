//! Servers that break the rules lose their path; nothing else happens.

use bowline_rtrs::client::PathState;
use bowline_rtrs::{ConnId, Done, MemRef, Tag};
use bowline_verbs::{Status, WcOpcode};
use bowline_wire::rtrs::{ConAnswer, ConRsp, Dir, Imm, RkeyRsp};

use crate::peer::{Connects, Rig, addr, config, done};

/// A session with a request in flight on each of its two paths.
struct Scene {
    rig: Rig,
    service: ConnId,
    io: ConnId,
}

impl Scene {
    fn new(refresh: bool) -> Self {
        let mut rig = Rig::opened(refresh, 2);
        let memory = rig.memory();
        for tag in 0..2 {
            let permit = rig.permit();
            rig.write(&permit, memory, tag).unwrap();
            rig.session.put_permit(permit);
        }
        rig.connects = Connects::Ignore;
        let conns = rig.live(1);
        Self { rig, service: conns[0], io: conns[1] }
    }

    /// The first path is lost and its request moved; no request has ended, and the other path is
    /// unaffected.
    fn check(mut self, what: &str) {
        self.rig.pump();
        assert_eq!(self.rig.state(0), PathState::Connecting, "{what}");
        assert_eq!(self.rig.state(1), PathState::Connected, "{what}");
        assert_eq!(self.rig.take_completed(), [], "{what}");
        let other = self.rig.live(2)[1];
        self.rig.ios.retain(|io| io.conn == other);
        self.rig.reply_all();
        let mut ended = self.rig.take_completed();
        ended.sort_unstable();
        assert_eq!(ended, [(0, 0), (1, 0)], "{what}");
    }
}

fn answer(id: u32) -> Imm {
    Imm::Done { id, errno: 0, invalidated: false }
}

// tests [RT-56], [RT-69], [RT-54], [RT-67]
#[test]
fn immediates_that_make_no_sense_end_the_path() {
    let tries: [(&str, Imm); 5] = [
        ("a number beyond the depth", answer(64)),
        ("a number beyond 16 bits", answer(0x1_0000)),
        ("a request that is not in flight", answer(40)),
        ("a request of another path", answer(1)),
        ("a request to a client", Imm::Request(0)),
    ];
    for (what, imm) in tries {
        let mut scene = Scene::new(false);
        scene.rig.give_imm(scene.io, imm);
        scene.check(what);
    }
    let mut scene = Scene::new(false);
    scene.rig.give_imm(scene.service, answer(0));
    scene.check("an answer on another connection");
}

// tests [RT-50], [RT-56]
#[test]
fn key_messages_that_make_no_sense_end_the_path() {
    let rsp = |id, key| RkeyRsp { id, key }.emit().to_vec();
    let mut wrong_type = rsp(0, 0x301);
    wrong_type[0] = 2;
    let tries = [
        ("short", rsp(0, 0x301)[..7].to_vec(), answer(0)),
        ("of another type", wrong_type, answer(0)),
        ("of another chunk", rsp(1, 0x301), answer(0)),
        ("of a chunk that does not exist", rsp(64, 0x301), answer(64)),
        ("of a request of another path", rsp(1, 0x401), answer(1)),
        ("with a heartbeat's immediate", rsp(0, 0x301), Imm::Request(3)),
    ];
    for (what, bytes, imm) in tries {
        let mut scene = Scene::new(true);
        let io = scene.io;
        scene.rig.give_message(io, &bytes, Some(imm.to_u32()));
        scene.check(what);
    }
    let mut scene = Scene::new(true);
    scene.rig.give_imm(scene.io, answer(0));
    scene.check("no key message at all");
    let mut scene = Scene::new(true);
    let io = scene.io;
    scene.rig.give_message(io, &rsp(0, 0x301), None);
    scene.check("no immediate");
}

// tests [RT-69], [RS-8]: after a violation nothing the server sends counts any more, also while its
// connections end.
#[test]
fn what_a_liar_said_after_the_lie_does_not_count() {
    let mut scene = Scene::new(false);
    scene.rig.drains = false;
    scene.rig.give_imm(scene.io, answer(63));
    scene.rig.give_imm(scene.io, answer(0));
    scene.rig.pump();
    assert_eq!(scene.rig.take_completed(), []);
    // Messages that arrived before a queue pair failed do count.
    let mut scene = Scene::new(false);
    scene.rig.drains = false;
    scene.rig.break_conn(scene.service);
    scene.rig.give_imm(scene.io, answer(0));
    scene.rig.pump();
    assert_eq!(scene.rig.take_completed(), [(0, 0)]);
}

// tests [RT-54]
#[test]
fn an_answer_counts_once() {
    let mut scene = Scene::new(false);
    scene.rig.give_imm(scene.io, answer(0));
    scene.rig.pump();
    assert_eq!(scene.rig.take_completed(), [(0, 0)]);
    scene.rig.give_imm(scene.io, answer(0));
    scene.rig.pump();
    assert_eq!(scene.rig.take_completed(), []);
    assert_eq!(scene.rig.state(0), PathState::Connecting);
}

// tests [RT-14]: undefined kinds of messages are ignored.
#[test]
fn unknown_kinds_are_passed_over() {
    let mut scene = Scene::new(false);
    for kind in [3, 7, 10, 15] {
        scene.rig.give_imm(scene.io, Imm::Unknown(kind << 28 | 5));
    }
    scene.rig.pump();
    assert_eq!(scene.rig.state(0), PathState::Connected);
}

// tests [RT-9], [RT-7], [RT-69]
#[test]
fn tables_of_chunks_that_make_no_sense_are_refused() {
    type Change = fn(&mut Vec<u8>);
    let tries: [(&str, Change); 6] = [
        ("short", |rsp| rsp.truncate(20)),
        ("of another type", |rsp| rsp[0] = 2),
        ("without descriptors", |rsp| rsp[2..4].fill(0)),
        ("with too many descriptors", |rsp| rsp[2..4].copy_from_slice(&128_u16.to_le_bytes())),
        ("with a short descriptor", |rsp| rsp[20..24].copy_from_slice(&4096_u32.to_le_bytes())),
        ("with a wrapping address", |rsp| rsp[8..16].fill(0xff)),
    ];
    for (what, change) in tries {
        let mut rig = Rig::new(config(), true);
        rig.answers_info = false;
        rig.session.open(rig.now, &[addr(1)]);
        rig.pump();
        let service = rig.live(1)[0];
        let mut rsp = rig.info_rsp(service.path);
        change(&mut rsp);
        rig.give_message(service, &rsp, None);
        rig.pump();
        let failed = bowline_rtrs::client::Event::Opened(Err(bowline_rtrs::Errno::ECONNRESET));
        assert!(rig.take_events().contains(&failed), "{what}");
        rig.assert_empty();
    }
}

// tests [RT-30], [RT-32], [RT-99]
#[test]
fn answers_to_a_connect_that_make_no_sense_are_refused() {
    let geometry = Rig::new(config(), false).geometry;
    let answer = |new_rkey, counted_keys| {
        ConAnswer::Accepted(ConRsp { geometry, new_rkey, counted_keys, accepts_notice: false })
            .emit()
            .to_vec()
    };
    let spoiled = |at: usize, byte| {
        let mut private = answer(false, false);
        private[at] = byte;
        private
    };
    let tries = [
        ("another magic", spoiled(0, 0)),
        ("another version", spoiled(3, 9)),
        ("an error", spoiled(4, 1)),
        ("no chunks", spoiled(6, 0)),
        ("much too long headers", spoiled(15, 0xff)),
        ("much too long IO", spoiled(11, 0xff)),
        ("keys that are told and counted", answer(true, true)),
    ];
    for (what, private) in tries {
        let mut rig = Rig::new(config(), false);
        rig.connects = Connects::Ignore;
        rig.session.open(rig.now, &[addr(1)]);
        rig.pump();
        let conn = rig.live(1)[0];
        rig.conns.get_mut(&conn).unwrap().established = true;
        rig.session.handle(rig.now, bowline_rtrs::Input::Established { conn, private });
        rig.pump();
        let failed = bowline_rtrs::client::Event::Opened(Err(bowline_rtrs::Errno::ECONNRESET));
        assert!(rig.take_events().contains(&failed), "{what}");
        rig.assert_empty();
    }
}

// tests [RT-58]: completions of a connection of another generation, or of an unknown one, have no
// effect.
#[test]
fn strangers_completions_are_ignored() {
    let mut scene = Scene::new(true);
    let mut stale = scene.io;
    stale.path.generation = stale.path.generation.wrapping_add(1);
    let beyond = ConnId { cid: 9, ..scene.io };
    let nowhere = ConnId { path: bowline_rtrs::PathId { slot: 4095, generation: 0 }, cid: 0 };
    for conn in [stale, beyond, nowhere] {
        for kind in 0..16 {
            let one = done(conn, Tag::new(kind, 3), WcOpcode::Recv);
            let failed = Done { status: Status::WrFlushErr, ..one };
            scene.rig.session.handle_done(scene.rig.now, &[one, failed]);
        }
        let errno = bowline_rtrs::Errno::EIO;
        for input in [
            bowline_rtrs::Input::Drained { conn },
            bowline_rtrs::Input::Disconnected { conn },
            bowline_rtrs::Input::Failed { conn, errno },
            bowline_rtrs::Input::Established { conn, private: vec![] },
            bowline_rtrs::Input::Refused {
                conn,
                reason: bowline_verbs::RejectReason::CONSUMER,
                private: vec![],
            },
        ] {
            scene.rig.session.handle(scene.rig.now, input);
        }
    }
    scene.rig.pump();
    assert_eq!(
        (scene.rig.state(0), scene.rig.state(1)),
        (PathState::Connected, PathState::Connected)
    );
}

// tests [RT-58]: the first failed work request ends the path, whichever it is.
#[test]
fn any_failed_completion_ends_the_path() {
    for status in [Status::WrFlushErr, Status::RemAccessErr, Status::LocProtErr] {
        for kind in [Tag::IO, Tag::HEARTBEAT, Tag::RECV, Tag::REPLY] {
            let mut scene = Scene::new(true);
            let one = done(scene.io, Tag::new(kind, 0), WcOpcode::Send);
            scene.rig.session.handle_done(scene.rig.now, &[Done { status, ..one }]);
            scene.check("a failed completion");
        }
    }
}

// tests [RT-69]: only requests that were submitted can end, whatever memory they name.
#[test]
fn reads_of_a_dead_path_are_asked_for_with_the_key_of_the_next() {
    let mut rig = Rig::opened(true, 2);
    let memory = rig.memory();
    let permit = rig.permit();
    let data = [MemRef { region: memory, offset: 0, len: 512 }];
    rig.session.request(rig.now, Dir::Read, &permit, b"r", &data, 4).unwrap();
    rig.pump();
    let first = rig.ios.remove(0);
    rig.lose(first.conn);
    assert_eq!(rig.ios[0].req, first.req);
    assert_ne!(rig.ios[0].conn.path, first.conn.path);
}
