//! Random histories of the server, drawn from bytes: clients that follow and break the rules, a
//! device that fails, an upper layer that is slow. Used by the test on random bytes and by the fuzz
//! target `rtrs_server`.

use std::collections::BTreeSet;
use std::time::Duration;

use bowline_rtrs::server::{ServerConfig, ServerEvent, SessId};
use bowline_rtrs::{ConnId, Done, Errno, Input, PathId, Tag, WrKind};
use bowline_verbs::{Status, WcOpcode, next_key};
use bowline_wire::rtrs::{
    ConReq, Imm, PathLife, RkeyRsp, SessionName, emit_given_up, emit_info_req, parse_info_rsp,
};

use super::rig::{Answer, Path, Rig, con_req, config, done, uuid};

const ADDRS: [&str; 4] = ["10.0.0.2", "10.0.0.3", "::ffff:10.0.0.2", "fd00::2"];
const NAMES: [&str; 3] = ["s1", "s2", "other"];
/// Paths remembered, dead ones included.
const PATHS: usize = 24;
const STATUSES: [Status; 3] = [Status::WrFlushErr, Status::RetryExcErr, Status::LocProtErr];

/// Numbers taken from the input; zeros after its end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound.max(1)
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    fn one_in(&mut self, bound: u8) -> bool {
        self.byte() % bound == 1
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// Returns a path generation for a notice; the path need not exist.
fn generation(input: &mut Bytes<'_>) -> PathLife {
    PathLife::new(&uuid(1 + input.below(6) as u8), 1)
}

struct Play {
    rig: Rig,
    paths: Vec<Path>,
    /// Sessions that the upper layer has accepted and that have not ended for it.
    taken: BTreeSet<SessId>,
}

/// Plays an input. Panics when the server contradicts itself or leaves something behind. Returns
/// how many requests there were.
pub(crate) fn play(input: &[u8]) -> u64 {
    let mut input = Bytes(input);
    let always_invalidate = !input.one_in(3);
    let mut play = Play {
        rig: Rig::with(ServerConfig { always_invalidate, ..config() }),
        paths: Vec::new(),
        taken: BTreeSet::new(),
    };
    while !input.0.is_empty() {
        play.step(&mut input);
        play.look();
    }
    play.end();
    play.rig.server.counters().requests
}

impl Play {
    fn step(&mut self, input: &mut Bytes<'_>) {
        // Mostly what clients should do; otherwise no path would last.
        match input.byte() % 64 {
            0 | 1 => self.connect(input),
            2..=9 => self.establish(input),
            10 => self.info(input),
            11..=34 => self.request(input),
            35 => self.misuse(input),
            36..=56 => self.respond(input),
            57 | 58 => self.rig.pass(Duration::from_millis(u64::from(input.byte()) * 50)),
            59 => self.fail(input),
            60 => self.tell(input),
            61 | 62 => self.switch(input),
            _ => {
                let Some(path) = self.path(input) else { return };
                self.rig.server.disconnect_path(self.rig.now, path.id);
                self.rig.settle();
            }
        }
    }

    fn path(&mut self, input: &mut Bytes<'_>) -> Option<Path> {
        self.paths.get(input.below(self.paths.len())).cloned()
    }

    /// A request to connect, sometimes with a byte that is wrong.
    fn connect(&mut self, input: &mut Bytes<'_>) {
        let (session, path) = (1 + input.below(3) as u8, 1 + input.below(6) as u8);
        let (cid, cid_num) = (input.below(4) as u16, 1 + input.below(3) as u16);
        let mut request = con_req(session, path, cid, cid_num);
        request.first = !input.one_in(4);
        request.counts_keys = input.one_in(2);
        request.gives_notice = input.one_in(2);
        let mut bytes = request.emit();
        if input.one_in(8) {
            bytes[input.below(56)] = input.byte();
        }
        let from = input.of(&ADDRS);
        let to = if from.contains("fd") { "fd00::1" } else { "10.0.0.1" };
        let id = self.rig.ask_at(bowline_rtrs::PortId(0), from, to, &bytes);
        self.rig.settle();
        // Without memory the answer may come later or not at all.
        if let Some(Answer::Accepted(conn, rsp)) = self.rig.answers.get(&id).copied() {
            self.remember(Path::new(conn.path, &rsp));
        }
    }

    fn remember(&mut self, path: Path) {
        if let Some(known) = self.paths.iter().find(|known| known.id == path.id) {
            let told = |path: &Path| (path.new_rkey, path.counted_keys, path.accepts_notice);
            let what = "as the first connection was told [RT-99, RT-101]";
            assert_eq!(told(known), told(&path), "{what}");
            return;
        }
        if self.paths.len() == PATHS {
            self.paths.remove(0);
        }
        self.paths.push(path);
    }

    /// A whole path as it should be, unless it exists.
    fn establish(&mut self, input: &mut Bytes<'_>) {
        let (session, path) = (1 + input.below(3) as u8, 1 + input.below(6) as u8);
        let (cid_num, from) = (1 + input.below(3) as u16, input.of(&ADDRS[..2]));
        let (counts_keys, gives_notice) = (input.one_in(2), input.one_in(2));
        for cid in 0..cid_num {
            let request = con_req(session, path, cid, cid_num);
            let bytes = ConReq { counts_keys, gives_notice, ..request }.emit();
            let id = self.rig.ask_at(bowline_rtrs::PortId(0), from, "10.0.0.1", &bytes);
            self.rig.settle();
            let Some(Answer::Accepted(conn, rsp)) = self.rig.answers.get(&id).copied() else {
                return;
            };
            self.remember(Path::new(conn.path, &rsp));
            if cid + 1 == cid_num && self.has_receive(conn) {
                let name = SessionName::new(NAMES[usize::from(session - 1)]).unwrap();
                let conn = ConnId { path: conn.path, cid: 0 };
                let done = self.rig.message(conn, &emit_info_req(&name));
                self.rig.deliver(&[done]);
            }
        }
    }

    fn has_receive(&self, conn: ConnId) -> bool {
        let conn = ConnId { cid: 0, ..conn };
        // No message arrives on a closed connection.
        let open = !self.rig.closed.contains(&conn);
        open && self.rig.recvs.get(&conn).is_some_and(|posted| !posted.is_empty())
    }

    /// INFO_REQ, sometimes wrong.
    fn info(&mut self, input: &mut Bytes<'_>) {
        let Some(path) = self.path(input) else { return };
        if !self.has_receive(path.conn(0)) {
            return;
        }
        let mut bytes = emit_info_req(&SessionName::new(input.of(&NAMES)).unwrap()).to_vec();
        if input.one_in(4) {
            bytes[input.below(256)] = input.byte();
        }
        if input.one_in(6) {
            bytes.truncate(input.below(256));
        } else if input.one_in(3) {
            let lives: Vec<PathLife> = (0..input.below(4)).map(|_| generation(input)).collect();
            emit_given_up(&lives, &mut bytes);
        }
        let done = self.rig.message(path.conn(0), &bytes);
        self.rig.deliver(&[done]);
    }

    fn conn_with_receive(&mut self, path: &Path, input: &mut Bytes<'_>) -> Option<ConnId> {
        let conn = path.conn(input.below(3) as u16);
        let posted = self.rig.recvs.get(&conn)?;
        (!posted.is_empty() && !self.rig.closed.contains(&conn)).then_some(conn)
    }

    /// A valid request, in a chunk the client has a key for.
    fn request(&mut self, input: &mut Bytes<'_>) {
        let Some(path) = self.path(input).filter(|path| !path.chunks.is_empty()) else { return };
        let Some(conn) = self.conn_with_receive(&path, input) else { return };
        let (chunk, usr) = (input.below(path.chunks.len()) as u16, [7; 64]);
        let usr = &usr[..input.below(64)];
        // The client cannot write there while the server has the chunk.
        if !self.rig.put(&path, chunk, 0, &[1]) {
            return;
        }
        let len = input.below(200) as u32;
        let io = path.io(chunk).cid(conn.cid).usr(usr);
        let data = vec![3; len as usize];
        let io = match (input.one_in(2), len) {
            (true, _) => io.data(&data),
            (false, 0) => io.reads(0),
            (false, _) => io.reads(len).to(1 + len / 2).invalidate(input.one_in(2)),
        };
        self.rig.receive(io);
    }

    /// Any bytes in a chunk and any immediate.
    fn misuse(&mut self, input: &mut Bytes<'_>) {
        let Some(path) = self.path(input) else { return };
        let Some(conn) = self.conn_with_receive(&path, input) else { return };
        let geometry = self.rig.geometry();
        let (chunk, at) = (input.below(9) as u16, input.below(40) as u32);
        if usize::from(chunk) < path.chunks.len() {
            let bytes: Vec<u8> = (0..24).map(|_| input.byte() % 6).collect();
            self.rig.put(&path, chunk, at.into(), &bytes);
        }
        let imm = match input.byte() % 5 {
            0 => input.word(),
            1 => Imm::Done { id: chunk.into(), errno: 0, invalidated: false }.to_u32(),
            2 => input.of(&[0x8000_0000, 0x9000_0000, 0x3000_0000]),
            3 => Imm::GivenUp(generation(input)).to_u32(),
            _ => Imm::Request(geometry.request_payload(chunk, at)).to_u32(),
        };
        let done = self.rig.imm(conn, imm, input.byte().into());
        self.rig.deliver(&[done]);
    }

    fn respond(&mut self, input: &mut Bytes<'_>) {
        if self.rig.requests.is_empty() {
            return;
        }
        let at = input.below(self.rig.requests.len());
        let request = self.rig.requests.swap_remove(at);
        let errno = if input.one_in(3) { -i32::from(input.byte()) * 4 } else { 0 };
        self.rig.respond(request.op, errno, None);
        if input.one_in(8) {
            // A second answer means nothing.
            self.rig.respond(request.op, 0, None);
        }
    }

    /// Something fails on a connection.
    fn fail(&mut self, input: &mut Bytes<'_>) {
        let Some(path) = self.path(input) else { return };
        let Some(conn) = self.conn_with_receive(&path, input) else { return };
        let mut failed = self.rig.imm(conn, 0, 0);
        failed.status = input.of(&STATUSES);
        failed.imm = None;
        self.rig.deliver(&[failed]);
    }

    /// An event of a connection, which may not exist any more.
    fn tell(&mut self, input: &mut Bytes<'_>) {
        let generation = PathId { slot: input.below(8) as u16, generation: input.byte() };
        let path = self.path(input).filter(|_| !input.one_in(3)).map_or(generation, |path| path.id);
        let conn = ConnId { path, cid: input.below(4) as u16 };
        let private = Vec::new();
        match input.byte() % 4 {
            0 => self.rig.server.handle(self.rig.now, Input::Disconnected { conn }),
            1 => {
                let errno = Errno::EHOSTUNREACH;
                self.rig.server.handle(self.rig.now, Input::Failed { conn, errno });
            }
            2 => self.rig.server.handle(self.rig.now, Input::Established { conn, private }),
            _ => {
                // A completion of another generation.
                let conn = ConnId {
                    path: PathId { generation: path.generation.wrapping_sub(1), ..path },
                    ..conn
                };
                let opcode = WcOpcode::RecvRdmaWithImm;
                let tag = Tag::new(Tag::RECV, 0);
                self.rig.deliver(&[Done { tag, opcode, imm: Some(0x40), ..done(conn) }]);
            }
        }
        self.rig.settle();
    }

    fn switch(&mut self, input: &mut Bytes<'_>) {
        let on = input.one_in(2);
        match input.byte() % 6 {
            0 => self.rig.hold_drain = on,
            1 => self.rig.silent = on,
            2 => self.rig.no_memory = on,
            3 => self.rig.link = Some(!on),
            4 => self.rig.drain_all(),
            _ => {
                // The device cannot invalidate the key of a chunk.
                if let Some((_, key)) = self.path(input).and_then(|p| p.chunks.first().copied()) {
                    self.rig.stuck.push(key);
                }
            }
        }
    }

    /// Checks what clients and the upper layer are told.
    fn look(&mut self) {
        for sent in std::mem::take(&mut self.rig.sent) {
            let of = |path: &&mut Path| path.id == sent.conn.path;
            let Some(path) = self.paths.iter_mut().find(of) else { continue };
            let chunk = match sent.kind {
                WrKind::Send if sent.tag.kind() == Tag::INFO => {
                    let read = parse_info_rsp(&sent.bytes, &self.rig.geometry(), &mut path.chunks);
                    read.expect("what a server sends");
                    continue;
                }
                WrKind::SendImm(_) => {
                    let new = RkeyRsp::parse(&sent.bytes).expect("what a server sends");
                    assert!(path.new_rkey, "not announced [RT-50]");
                    path.chunks[usize::from(new.id)].1 = new.key;
                    new.id
                }
                WrKind::WriteImm(_, imm) => {
                    let Imm::Done { id, .. } = Imm::from_u32(imm) else { continue };
                    assert!(!path.new_rkey, "an answer without the new key [RT-50]");
                    if path.counted_keys {
                        let chunk = &mut path.chunks[id as usize];
                        chunk.1 = next_key(chunk.1);
                    }
                    id as u16
                }
                _ => continue,
            };
            let ends = self.rig.closed.contains(&sent.conn);
            assert!(ends || self.rig.put(path, chunk, 0, &[1]), "not the key of chunk {chunk}");
        }
        for event in std::mem::take(&mut self.rig.events) {
            match event {
                ServerEvent::Up { session, first, .. } => {
                    // A refused session ends without an event.
                    let taken = first && self.rig.link == Some(true);
                    assert!(!taken || self.taken.insert(session), "up twice");
                }
                ServerEvent::Down { session } => {
                    assert!(self.taken.remove(&session), "down without having been up");
                    let left = self.rig.requests.iter().any(|request| request.session == session);
                    assert!(!left, "down with operations unanswered [RS-19]");
                }
                _ => {}
            }
        }
        let geometry = self.rig.geometry();
        for request in &self.rig.requests {
            assert!(request.data.len <= geometry.max_io() && request.room <= request.data.len);
            assert_eq!(request.data.offset % u64::from(geometry.chunk()), 0);
        }
    }

    /// Everything ends: nothing is left.
    fn end(&mut self) {
        self.rig.no_memory = false;
        self.rig.silent = false;
        self.rig.drain_all();
        self.look();
        self.rig.server.close(self.rig.now);
        self.rig.settle();
        while let Some(request) = self.rig.requests.pop() {
            self.rig.respond(request.op, 0, None);
        }
        self.look();
        self.rig.pass(Duration::from_secs(100));
        self.look();
        assert!(self.taken.is_empty(), "sessions whose end was not told");
        self.rig.assert_empty();
    }
}
