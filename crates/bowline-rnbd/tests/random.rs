//! Random histories of a server. Whatever sessions, storage and exports do, in any order: each
//! message is answered once, no IO is done that the disk or the access mode forbids, and each
//! opened export is released. Used by the test on random bytes and by the fuzz target
//! `rnbd_server`.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use bowline_rnbd::server::{
    Act, CheckedIo, Core, CoreLimits, ExportId, OpenId, OpenInfo, Reply, SessKey, Ticket,
};
use bowline_rnbd::{Discard, Errno, IoOp, Limits};
use bowline_wire::rnbd::{Access, Io, IoFlags, emit_close, emit_open, emit_sess_info};
use bowline_wire::rtrs::Dir;

use common::Bytes;

const SESSIONS: u64 = 4;
const EXPORTS: u32 = 5;
/// Ids soon wrap around to 0.
const FIRST_ID: u32 = u32::MAX - 5;
const NAMES: [&[u8]; 7] = [b"a", b"b", b"/b", b"c", b"a..b", b"", b"\xff"];
const ERRORS: [Errno; 3] = [Errno::ENOENT, Errno::EIO, Errno::EACCES];

fn limits(export: u32) -> Limits {
    let plain = Limits::plain(1 << 20);
    match export {
        0 => plain,
        1 => Limits { logical: 4096, write_cache: true, ..plain },
        2 => Limits { read_only: true, ..plain },
        3 => Limits {
            discard: Some(Discard { max_bytes: 65_536, granularity: 512, alignment: 0 }),
            max_write_zeroes: 8192,
            write_cache: true,
            fua: true,
            ..plain
        },
        _ => Limits::plain(4096),
    }
}

struct Play {
    core: Core,
    up: BTreeSet<SessKey>,
    /// OPENs whose export is being opened.
    opening: Vec<Ticket>,
    /// Messages that wait for an answer.
    waiting: BTreeSet<Ticket>,
    running: Vec<CheckedIo>,
    /// Opens of exports that were not released.
    held: BTreeMap<ExportId, u32>,
    limits: BTreeMap<ExportId, Limits>,
    answered: u64,
}

impl Play {
    fn step(&mut self, input: &mut Bytes<'_>) {
        match input.byte() % 32 {
            0 => self.link(input),
            1..=4 => self.opened(input),
            5..=10 => self.io_done(input),
            11 => self.force(input),
            12 => self.resize(input),
            _ => self.message(input),
        }
        self.look();
    }

    fn session(input: &mut Bytes<'_>) -> SessKey {
        SessKey(input.below(SESSIONS as usize) as u64)
    }

    fn link(&mut self, input: &mut Bytes<'_>) {
        let key = Self::session(input);
        if self.up.remove(&key) {
            self.core.link_down(key);
        } else {
            self.core.link_up(key, "name");
            self.up.insert(key);
        }
    }

    fn opened(&mut self, input: &mut Bytes<'_>) {
        if self.opening.is_empty() {
            return;
        }
        let ticket = self.opening.swap_remove(input.below(self.opening.len()));
        let result = match input.byte() % 8 {
            0 => Err(input.of(&ERRORS)),
            _ => {
                let export = ExportId(input.below(EXPORTS as usize) as u32);
                *self.held.entry(export).or_default() += 1;
                Ok((export, self.limits[&export]))
            }
        };
        self.core.opened(ticket, result);
    }

    fn io_done(&mut self, input: &mut Bytes<'_>) {
        if !self.running.is_empty() {
            let io = self.running.swap_remove(input.below(self.running.len()));
            self.core.io_done(io.open);
        }
    }

    fn force(&mut self, input: &mut Bytes<'_>) {
        let opens = &self.core.opens();
        let open = match opens.get(input.below(opens.len() + 1)) {
            Some(open) => open.id,
            None => OpenId { session: Self::session(input), device: Self::any_id(opens, input) },
        };
        // An error if it is closed already.
        let _ = self.core.force_close(open);
    }

    fn resize(&mut self, input: &mut Bytes<'_>) {
        let export = ExportId(input.below(EXPORTS as usize) as u32);
        let bytes = input.of(&[0, 4096, 1 << 20, 1 << 40]);
        let limits = Limits { bytes, ..limits(export.0) };
        self.limits.insert(export, limits);
        self.core.set_limits(export, limits);
    }

    /// An id that is open, was open, or may be later.
    fn any_id(opens: &[OpenInfo], input: &mut Bytes<'_>) -> u32 {
        let n = input.byte() % 16;
        let open = opens.get(usize::from(n)).map(|open| open.id.device);
        open.unwrap_or(FIRST_ID.wrapping_add(n.into()))
    }

    fn usr(opens: &[OpenInfo], input: &mut Bytes<'_>) -> Vec<u8> {
        let id = Self::any_id(opens, input);
        let mut usr = match input.byte() % 12 {
            0 => emit_sess_info(input.byte()).to_vec(),
            1..=3 => {
                let access = input.of(&[Access::Ro, Access::Rw, Access::Migration]);
                emit_open(access, input.of(&NAMES)).expect("short enough").to_vec()
            }
            4 => emit_close(id).to_vec(),
            5 => (0..input.below(40)).map(|_| input.byte()).collect(),
            _ => {
                let sector = match input.byte() % 4 {
                    0 => u64::from(input.word()) << 32 | u64::from(input.word()),
                    _ => u64::from(input.byte()) * u64::from(input.of(&[1_u8, 8, 32])),
                };
                let len = match input.byte() % 4 {
                    0 => input.word(),
                    _ => u32::from(input.byte()) * 512,
                };
                let flags = IoFlags::from_bits(u32::from(input.byte()) << 8);
                let op = input.byte() % 8;
                Io { device: id, sector, op, flags, len, prio: 1 }.emit().to_vec()
            }
        };
        match input.byte() {
            0 => usr.truncate(input.below(usr.len() + 1)),
            1 if !usr.is_empty() => {
                let at = input.below(usr.len());
                usr[at] = input.byte();
            }
            _ => {}
        }
        usr
    }

    fn message(&mut self, input: &mut Bytes<'_>) {
        let key = Self::session(input);
        let usr = Self::usr(&self.core.opens(), input);
        let dir = input.of(&[Dir::Read, Dir::Write]);
        let said = usr.get(20..24).map_or(512, |len| u32::from_le_bytes(len.try_into().unwrap()));
        let data_len = input.of(&[said, said, 0, 56, 512]);
        let room = if dir == Dir::Read { data_len } else { 0 };
        match self.core.message(key, dir, room, data_len, &usr) {
            Act::Reply { errno, data } => self.answer(errno, data),
            Act::Open { ticket, name, .. } => {
                assert!(!name.windows(2).any(|two| two == b".."));
                assert!(self.up.contains(&key) && self.waiting.insert(ticket));
                self.opening.push(ticket);
            }
            Act::Later { ticket } => assert!(self.waiting.insert(ticket)),
            Act::Io { export, io } => self.io(export, io, data_len),
            other => panic!("{other:?}"),
        }
    }

    /// Checks that storage supports the IO and that the open allows it.
    fn io(&mut self, export: ExportId, io: CheckedIo, data_len: u32) {
        assert!(self.held[&export] > 0, "not open");
        let opens = self.core.opens();
        let open = opens.iter().find(|open| open.id == io.open).expect("it is open");
        assert_eq!(open.export, export);
        assert!(self.up.contains(&open.id.session));
        // An export may have changed between being found and being opened: IO is checked against
        // limits only after `set_limits`. Kinds of exports do not change.
        let limits = self.limits[&export];
        let changes = !matches!(io.op, IoOp::Read | IoOp::Flush);
        assert!(!changes || (open.access != Access::Ro && !limits.read_only), "{io:?}");
        let end = io.offset.checked_add(io.len.into()).expect("no overflow");
        assert!(end <= limits.bytes, "{io:?} of {limits:?}");
        let unit = u64::from(limits.logical);
        assert!(io.offset.is_multiple_of(unit) && u64::from(io.len).is_multiple_of(unit));
        let with_data = matches!(io.op, IoOp::Read | IoOp::Write);
        assert_eq!(data_len, if with_data { io.len } else { 0 });
        self.running.push(io);
    }

    fn answer(&mut self, errno: i32, data: Reply) {
        assert!((-511..=0).contains(&errno), "{errno}");
        assert!(errno == 0 || data == Reply::None, "{errno} with {data:?}");
        self.answered += 1;
    }

    fn look(&mut self) {
        while let Some(answer) = self.core.poll_answer() {
            assert!(self.waiting.remove(&answer.ticket), "answered twice");
            self.answer(answer.errno, answer.data);
        }
        while let Some(export) = self.core.poll_release() {
            let held = self.held.get_mut(&export).expect("opened before");
            *held = held.checked_sub(1).expect("given back twice");
        }
        self.core.check_invariants();
    }

    fn end(mut self) -> u64 {
        for io in std::mem::take(&mut self.running) {
            self.core.io_done(io.open);
            self.look();
        }
        for ticket in std::mem::take(&mut self.opening) {
            self.core.opened(ticket, Err(Errno::ENOENT));
            self.look();
        }
        for key in std::mem::take(&mut self.up) {
            self.core.link_down(key);
            self.look();
        }
        assert!(self.waiting.is_empty(), "{:?} never answered", self.waiting);
        assert!(self.held.values().all(|held| *held == 0), "{:?} kept", self.held);
        assert_eq!(self.core.opens(), []);
        self.answered
    }
}

/// Plays an input. Returns how many messages were answered.
pub(crate) fn play(input: &[u8]) -> u64 {
    let mut input = Bytes(input);
    let mut play = Play {
        core: Core::new(CoreLimits { devices_per_session: 4 }, FIRST_ID),
        up: BTreeSet::new(),
        opening: Vec::new(),
        waiting: BTreeSet::new(),
        running: Vec::new(),
        held: BTreeMap::new(),
        limits: (0..EXPORTS).map(|export| (ExportId(export), limits(export))).collect(),
        answered: 0,
    };
    for key in 0..SESSIONS - 1 {
        play.core.link_up(SessKey(key), "name");
        play.up.insert(SessKey(key));
    }
    while !input.0.is_empty() {
        play.step(&mut input);
    }
    play.end()
}

// tests [NB-15] [NB-17] [NB-20] [NB-21] [NB-22] [NB-25] [NB-50]
#[test]
fn random_clients_are_answered_once_and_kept_within_bounds() {
    let mut answered = 0;
    for seed in 0..300_u64 {
        // Shown when it fails.
        println!("seed {seed}");
        answered += play(&common::noise(seed, 4000));
    }
    assert!(answered > 20_000, "{answered}");
}
