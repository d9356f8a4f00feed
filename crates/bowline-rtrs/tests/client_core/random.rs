//! Random histories: whatever server, network and program do, in any order, every request ends
//! once, every permit returns, and a close leaves nothing behind. Used by the test on random
//! numbers, and by the fuzz target `rtrs_client`, whose server also breaks the rules.

use std::collections::BTreeMap;
use std::time::Duration;

use bowline_rtrs::client::{Event, Permit, PermitKind, ReadKeys};
use bowline_rtrs::{ConnId, Errno, Input, MemRef, Policy, RegionId};
use bowline_wire::rtrs::{Dir, Imm};

use crate::peer::{Connects, Rig, addr, config};

/// Source of the choices.
enum Rng {
    /// Random numbers; the server follows the rules.
    Seed(u64),
    /// A fuzz input, zeros after its end; the server may break the rules.
    Bytes(std::vec::IntoIter<u8>),
}

impl Rng {
    fn next(&mut self) -> u64 {
        let state = match self {
            Self::Seed(state) => state,
            Self::Bytes(bytes) => {
                let mut byte = || u64::from(bytes.next().unwrap_or(0));
                return byte() | byte() << 8;
            }
        };
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = *state;
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Tells whether the input is used up.
    fn is_over(&self) -> bool {
        matches!(self, Self::Bytes(bytes) if bytes.as_slice().is_empty())
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        if from.is_empty() { None } else { Some(from[self.below(from.len())]) }
    }
}

struct History {
    rig: Rig,
    rng: Rng,
    memory: RegionId,
    permits: Vec<Permit>,
    /// Permits whose request is in flight.
    running: BTreeMap<u64, Permit>,
    next_tag: u64,
    ended: u64,
}

impl History {
    fn new(mut rng: Rng) -> Self {
        let mut settings = config();
        if let Rng::Seed(seed) = rng {
            settings.seed = seed;
        }
        settings.io_connections = rng.below(3) as u16;
        settings.policy = Policy::ALL[rng.below(3)];
        settings.max_reconnects = [-1, -1, 0, 3][rng.below(4)];
        settings.read_keys = [ReadKeys::LongLived, ReadKeys::PerRequest][rng.below(2)];
        settings.reconnect_delay = [None, None, Some(Duration::from_secs(2))][rng.below(3)];
        let paths = 1 + rng.below(3) as u8;
        // Keys are kept, sent with answers, or counted.
        let (refresh, counted) = [(false, false), (true, false), (true, true)][rng.below(3)];
        let mut rig = Rig::new(settings, refresh);
        rig.counted = counted;
        rig.accepts_notice = rng.below(2) == 0;
        assert_eq!(rig.open(paths), Ok(()));
        rig.sends_complete = rng.below(4) > 0;
        let memory = rig.memory();
        let (permits, running) = (Vec::new(), BTreeMap::new());
        Self { rig, rng, memory, permits, running, next_tag: 0, ended: 0 }
    }

    fn step(&mut self) {
        let kinds = if matches!(self.rng, Rng::Bytes(_)) { 64 } else { 60 };
        match self.rng.below(kinds) {
            0..8 => self.submit(),
            8..18 => self.answer(),
            18 => self.take_permit(),
            19 => drop(self.permits.pop().map(|permit| self.rig.session.put_permit(permit))),
            20..22 => self.break_one(),
            22 => self.change_the_weather(),
            23..26 => self.drain_one(),
            26..29 => self.beat(),
            29 => self.order(),
            30..33 => {
                let ms = [1, 40, 900, 1_100, 1_100, 3_000, 31_000][self.rng.below(7)];
                self.rig.pass(Duration::from_millis(ms));
            }
            33..36 => {
                let unsent = std::mem::take(&mut self.rig.unsent);
                self.rig.session.handle_done(self.rig.now, &unsent);
            }
            36 if self.rng.below(3) == 0 => {
                self.rig.session.drop_region(self.memory);
                self.memory = self.rig.memory();
            }
            36 => self.answer_info(),
            37 => self.late_connect(),
            38..40 if !self.rig.keys_wait.is_empty() => {
                let at = self.rng.below(self.rig.keys_wait.len());
                let (path, count) = self.rig.keys_wait.swap_remove(at);
                self.rig.make_keys(path, count);
            }
            38..50 => self.submit(),
            60.. => self.lie(),
            _ => self.answer(),
        }
        if self.rig.answers_info {
            self.beat();
        }
        self.rig.pump();
        self.collect();
    }

    fn take_permit(&mut self) {
        let kind = if self.rng.below(4) == 0 { PermitKind::Service } else { PermitKind::Io };
        let cpu = self.rng.below(4) as u16;
        self.permits.extend(self.rig.session.get_permit(kind, cpu));
    }

    fn submit(&mut self) {
        self.take_permit();
        let Some(permit) = self.permits.pop() else { return };
        let piece =
            MemRef { region: self.memory, offset: 512, len: 1 + self.rng.next() as u32 % 9_999 };
        let other = MemRef { offset: 100_000, ..piece };
        let data = match self.rng.below(8) {
            0 | 1 => vec![],
            2 | 3 => vec![piece, other],
            _ => vec![piece],
        };
        let dir = if self.rng.below(2) == 0 { Dir::Read } else { Dir::Write };
        let usr = vec![7; self.rng.below(100)];
        let tag = self.next_tag;
        self.next_tag += 1;
        match self.rig.session.request(self.rig.now, dir, &permit, &usr, &data, tag) {
            Ok(()) => assert!(self.running.insert(tag, permit).is_none()),
            Err(errno) => {
                assert_eq!(errno, Errno::ECONNABORTED);
                self.permits.push(permit);
            }
        }
    }

    fn answer(&mut self) {
        if self.rig.ios.is_empty() {
            return;
        }
        let at = self.rng.below(self.rig.ios.len());
        let io = self.rig.ios.swap_remove(at);
        let stands = |conn: &crate::peer::Conn| conn.established && !conn.closed;
        if self.rig.conns.get(&io.conn).is_some_and(stands) {
            self.rig.reply(&io, if self.rng.below(9) == 0 { 5 } else { 0 });
        }
    }

    fn live(&self) -> Vec<ConnId> {
        let stands = self.rig.conns.iter().filter(|(_, conn)| conn.established && !conn.closed);
        stands.map(|(conn, _)| *conn).collect()
    }

    fn break_one(&mut self) {
        let live = self.live();
        let Some(conn) = self.rng.pick(&live) else { return };
        match self.rng.below(3) {
            0 => self.rig.break_conn(conn),
            1 => self.rig.session.handle(self.rig.now, Input::Disconnected { conn }),
            _ => {
                let errno = Errno::ENOMEM;
                self.rig.session.handle(self.rig.now, Input::Failed { conn, errno });
            }
        }
    }

    fn change_the_weather(&mut self) {
        let rng = &mut self.rng;
        self.rig.connects = [
            Connects::Accept,
            Connects::Accept,
            Connects::Accept,
            Connects::Refuse(104),
            Connects::Refuse(17),
            Connects::Fail(Errno::EHOSTUNREACH),
            Connects::Ignore,
            Connects::Until(0),
        ][rng.below(8)];
        self.rig.parts = rng.below(4) > 0;
        self.rig.drains = rng.below(4) > 0;
        self.rig.answers_info = rng.below(6) > 0;
        self.rig.invalidates = rng.below(3) > 0;
        self.rig.keys_late = rng.below(3) == 0;
    }

    fn drain_one(&mut self) {
        let closed: Vec<_> =
            self.rig.conns.iter().filter(|(_, conn)| conn.closed).map(|(conn, _)| *conn).collect();
        // A device may report late what is not waited for any more.
        let late = self.rng.pick(&self.rig.forgotten).filter(|_| self.rng.below(4) == 0);
        if let Some(conn) = late.or_else(|| self.rng.pick(&closed)) {
            self.rig.drain(conn);
            self.rig.session.handle(self.rig.now, Input::Disconnected { conn });
        }
    }

    /// The server sends something it should not, or not now [RT-56], [RT-69].
    fn lie(&mut self) {
        let live: Vec<_> = self.live().into_iter().filter(|conn| self.takes(*conn)).collect();
        let Some(conn) = self.rng.pick(&live) else { return };
        let id = self.rng.below(70) as u32;
        let imm = match self.rng.below(6) {
            0 => Imm::Request(id),
            1 => Imm::HbMsg,
            2 => Imm::HbAck,
            3 => Imm::Unknown(0x7000_0000 | id),
            kind => Imm::Done { id, errno: self.rng.below(512) as u16, invalidated: kind == 5 },
        };
        let room = self.rig.conns[&conn].recvs[0].mem.map(|mem| mem.len as usize);
        match room.filter(|_| self.rng.below(3) > 0) {
            None => self.rig.give_imm(conn, imm),
            Some(room) => {
                let len = self.rng.below(room.min(300) + 1);
                let bytes: Vec<u8> = (0..len).map(|_| self.rng.next() as u8).collect();
                let imm = (self.rng.below(4) > 0).then(|| imm.to_u32());
                self.rig.give_message(conn, &bytes, imm);
            }
        }
    }

    /// Whether a message would find a receive.
    fn takes(&self, conn: ConnId) -> bool {
        self.rig.conns.get(&conn).is_some_and(|conn| !conn.recvs.is_empty())
    }

    fn beat(&mut self) {
        for (conn, beat) in std::mem::take(&mut self.rig.beats) {
            let stands = self.rig.conns.get(&conn).is_some_and(|conn| !conn.closed);
            if beat == Imm::HbMsg && stands {
                self.rig.give_imm_anyhow(conn, Imm::HbAck);
            }
        }
    }

    fn answer_info(&mut self) {
        let waiting: Vec<_> = self
            .rig
            .conns
            .iter()
            .filter(|(id, conn)| {
                let waits = conn.recvs.front().and_then(|slot| slot.mem).is_some_and(|m| m.len > 8);
                id.cid == 0 && waits && !conn.closed
            })
            .map(|(id, _)| *id)
            .collect();
        if let Some(conn) = self.rng.pick(&waiting) {
            let rsp = self.rig.info_rsp(conn.path);
            self.rig.give_message(conn, &rsp, None);
        }
    }

    /// A connect that was not answered is refused after all.
    fn late_connect(&mut self) {
        let open: Vec<_> = self
            .rig
            .conns
            .iter()
            .filter(|(_, conn)| !conn.established)
            .map(|(conn, _)| *conn)
            .collect();
        if let Some(conn) = self.rng.pick(&open) {
            let input = Input::Refused {
                conn,
                reason: bowline_verbs::RejectReason::TIMEOUT,
                private: vec![],
            };
            self.rig.session.handle(self.rig.now, input);
        }
    }

    fn order(&mut self) {
        let now = self.rig.now;
        let paths: Vec<_> = self.rig.session.paths().map(|path| path.id).collect();
        let path = self.rng.pick(&paths);
        let session = &mut self.rig.session;
        // The call may be refused at this moment.
        let _ = match (self.rng.below(6), path) {
            (0, Some(path)) => session.disconnect_path(now, path),
            (1, Some(path)) if paths.len() > 1 => session.remove_path(now, path),
            (2..4, Some(path)) => session.reconnect_path(now, path),
            (choice, _) => {
                let (addr, uuid) = addr(choice as u8 + 1);
                session.add_path(now, addr, uuid).map(drop)
            }
        };
    }

    fn collect(&mut self) {
        for (tag, _) in self.rig.take_completed() {
            let permit = self.running.remove(&tag);
            self.permits.push(permit.unwrap_or_else(|| panic!("request {tag} ended twice")));
            self.ended += 1;
        }
        // [RT-69]: the server reaches memory of requests in flight only.
        for (index, _) in self.rig.granted.values() {
            let running = self.running.values().any(|permit| permit.index() == *index);
            assert!(running, "the server may still write for {index}");
        }
    }

    fn finish(mut self) -> u64 {
        // The devices may leave their queues undrained here too [RT-100].
        let mute = self.rng.below(4) == 0;
        self.rig.drains &= !mute;
        self.rig.session.close(self.rig.now);
        self.rig.pump();
        for _ in 0..6 {
            self.rig.pass(Duration::from_secs(1));
            if mute {
                continue;
            }
            let closed: Vec<_> = self.rig.conns.keys().copied().collect();
            for conn in closed {
                if self.rig.conns.get(&conn).is_some_and(|conn| conn.closed) {
                    self.rig.drain(conn);
                }
            }
            self.rig.pump();
        }
        self.collect();
        assert!(self.running.is_empty(), "{:?} never ended", self.running);
        self.permits.into_iter().for_each(|permit| self.rig.session.put_permit(permit));
        self.rig.pump();
        assert_eq!(self.rig.take_events().last(), Some(&Event::Closed));
        self.rig.assert_empty();
        self.ended
    }
}

// tests [RS-1], [RS-8], [RS-16], [RS-25], [RS-26], [RT-59], [RT-99]
#[test]
fn every_request_ends_once() {
    let mut ended = 0;
    for seed in 0..400 {
        // Shown when it fails.
        println!("seed {seed}");
        let mut history = History::new(Rng::Seed(seed));
        for _ in 0..400 {
            history.step();
        }
        ended += history.finish();
    }
    assert!(ended > 15_000, "{ended}");
}

/// Plays an input. Panics when the session contradicts itself, a request ends twice or never, or
/// something is left.
pub(crate) fn play(input: &[u8]) {
    let bytes = input.to_vec();
    let mut history = History::new(Rng::Bytes(bytes.into_iter()));
    while !history.rng.is_over() {
        history.step();
    }
    history.finish();
}

// tests [RT-56], [RT-69], [RS-1]: the same with servers that break the rules
#[test]
fn every_request_ends_once_whatever_a_server_says() {
    for seed in 0..200 {
        println!("seed {seed}");
        let mut rng = Rng::Seed(seed ^ 0xa5a5);
        let input: Vec<u8> = (0..3000).map(|_| rng.next() as u8).collect();
        play(&input);
    }
}
