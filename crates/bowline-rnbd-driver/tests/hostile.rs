//! Messages and names that break the rules, over a real session: each gets its errno, and the disk
//! of another session stays as it is [NB-22] [NB-25] [NB-46].

mod common;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_block::sync::{self, Durable};
use bowline_rnbd_driver::{Disk, Exports, FileOptions, MapOptions};
use bowline_rtrs_driver::Dir;
use bowline_rtrs_driver::client::SessionBuilder;
use bowline_wire::rnbd::{
    Access, Io, IoFlags, OP_DISCARD, OP_FLUSH, OP_READ, OP_SECURE_ERASE, OP_WRITE, OP_WRITE_ZEROES,
    emit_close, emit_open, emit_sess_info,
};
use common::raw::Raw;
use common::{Rig, pattern};

const MIB: u64 = 1 << 20;
const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EIO: i32 = 5;
const ENOTBLK: i32 = 15;
const EEXIST: i32 = 17;
const EINVAL: i32 = 22;
const ELOOP: i32 = 40;
const EOPNOTSUPP: i32 = 95;
const ENOTCONN: i32 = 107;

fn io(device: u32, op: u8, sector: u64, len: u32) -> Io {
    Io { device, sector, op, flags: IoFlags::NONE, len, prio: 0 }
}

/// An honest client with a disk of the test.
struct Victim {
    disk: Arc<Disk>,
    round: std::cell::Cell<u64>,
}

impl Victim {
    fn new(rig: &Rig) -> Self {
        let disk = rig.map("victim", &rig.options("victim")).unwrap();
        sync::write_at(&*disk, 0, &pattern(65_536, 1), Durable::Now).unwrap();
        Self { disk, round: std::cell::Cell::new(0) }
    }

    /// Checks that data written is there, and that more can be written.
    fn check(&self, what: &str) {
        let round = self.round.replace(self.round.get() + 1);
        let mut bytes = vec![0; 65_536];
        sync::read_at(&*self.disk, 0, &mut bytes).unwrap();
        assert!(bytes == pattern(65_536, 1), "{what}");
        let offset = 65_536 + round % 8 * 4096;
        sync::write_at(&*self.disk, offset, &pattern(4096, round), Durable::Later).unwrap();
        let mut bytes = vec![0; 4096];
        sync::read_at(&*self.disk, offset, &mut bytes).unwrap();
        assert!(bytes == pattern(4096, round), "{what}");
        let info = self.disk.info().unwrap();
        assert_eq!((info.state.to_string().as_str(), info.stats.resent), ("open", 0), "{what}");
    }
}

fn exports() -> Exports {
    let mut exports = Exports::new();
    exports.memory("victim", MIB, 512).unwrap();
    exports.memory("disk0", MIB, 512).unwrap();
    exports.memory("large", MIB, 4096).unwrap();
    exports
}

// tests [NB-9]
#[test]
fn no_longer_request_is_announced_than_the_session_takes() {
    let rig = Rig::new(46, exports());
    let raw = Raw::new(&rig, "reads");
    let rsp = raw.open_as(Access::Ro, b"disk0").unwrap();
    let geometry = rig.server.rtrs().config().geometry;
    assert_eq!(rsp.max_hw_sectors, geometry.max_io() / 512);
}

// tests [NB-22] [NB-3] [NB-11]
#[test]
fn malformed_messages_are_invalid() {
    let rig = Rig::new(41, exports());
    let victim = Victim::new(&rig);
    let raw = Raw::new(&rig, "hostile");
    let id = raw.open("disk0").unwrap();
    let open = emit_open(Access::Rw, b"disk0").unwrap();
    let sess = emit_sess_info(2);
    let cut = |bytes: &[u8], len: usize| bytes[..len].to_vec();
    let typed = |kind: u16, len: usize| {
        let mut bytes = vec![0; len];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes
    };
    let mut no_end = open;
    no_end[6..].fill(b'x');
    let mut mode = open;
    mode[4] = 3;
    // The mode is checked when a device is opened, not when it is open already.
    mode[6..12].copy_from_slice(b"large\0");
    let good = io(id, OP_READ, 0, 512).emit();
    let bad: Vec<(&str, Vec<u8>, u32)> = vec![
        ("nothing", vec![], 512),
        ("a byte", vec![0], 512),
        ("half a header", vec![0, 0], 512),
        ("not quite a header", vec![0, 0, 0], 512),
        ("SESS_INFO without a version", cut(&sess, 4), 512),
        ("SESS_INFO without room for the answer", sess.to_vec(), 35),
        ("SESS_INFO without data", sess.to_vec(), 0),
        ("OPEN without a name", cut(&open, 6), 512),
        ("OPEN of a name that does not end", no_end.to_vec(), 512),
        ("OPEN cut in the name", cut(&open, 9), 512),
        ("OPEN without room for the answer", open.to_vec(), 55),
        ("OPEN without data", open.to_vec(), 0),
        ("OPEN in no known mode", mode.to_vec(), 512),
        ("CLOSE cut short", cut(&emit_close(id), 7), 0),
        ("IO cut short", cut(&good, 23), 512),
        ("an answer to SESS_INFO", typed(1, 36), 512),
        ("an answer to OPEN", typed(3, 56), 512),
        ("a type after the last", typed(6, 64), 512),
        ("the last of all types", typed(0xffff, 264), 512),
    ];
    for (what, message, data) in bad {
        for dir in [Dir::Read, Dir::Write] {
            assert_eq!(raw.send(dir, &message, data), EINVAL, "{what} {dir:?}");
        }
        victim.check(what);
    }
    // The answer to a WRITE carries no data.
    assert_eq!(raw.send(Dir::Write, &sess, 512), EINVAL);
    assert_eq!(raw.send(Dir::Write, &emit_open(Access::Rw, b"large").unwrap(), 512), EINVAL);
    assert_eq!(rig.server.opens().len(), 2, "nothing else was opened");
    // Lengths that suffice, and longer ones.
    assert_eq!(raw.send(Dir::Read, &cut(&good, 24), 512), 0);
    assert_eq!(raw.send(Dir::Read, &[&good[..], &[0xff; 200]].concat(), 512), 0);
    assert_eq!(raw.send(Dir::Read, &cut(&sess, 5), 36), 0);
    assert_eq!(raw.open("disk0"), Ok(id));
    victim.check("good messages");
    assert_eq!(raw.session.paths()[0].stats.reconnects, 0, "all of it in one life of the path");
}

// tests [NB-23] [NB-24] [NB-25] [NB-20]
#[test]
fn invalid_io_gets_its_error() {
    let rig = Rig::new(42, exports());
    let victim = Victim::new(&rig);
    let raw = Raw::new(&rig, "hostile");
    let id = raw.open("disk0").unwrap();
    let large = raw.open("large").unwrap();
    raw.region.buffer().write(0, &[0x77; 65_536]);
    let (read, write) = (Dir::Read, Dir::Write);
    let last = MIB / 512 - 1;
    let bad: Vec<(&str, Dir, Io, u32, i32)> = vec![
        ("an operation there is not", read, io(id, 6, 0, 512), 512, EOPNOTSUPP),
        ("the last of all operations", write, io(id, 255, 0, 512), 512, EOPNOTSUPP),
        ("a read of nothing given", read, io(id, OP_READ, 0, 512), 0, EINVAL),
        ("a write of nothing given", write, io(id, OP_WRITE, 0, 512), 0, EINVAL),
        ("a discard with data", write, io(id, OP_DISCARD, 0, 512), 512, EINVAL),
        ("zeroes with data", write, io(id, OP_WRITE_ZEROES, 0, 512), 512, EINVAL),
        ("a flush with data", write, io(id, OP_FLUSH, 0, 512), 512, EINVAL),
        ("a read by a write", write, io(id, OP_READ, 0, 512), 512, EINVAL),
        ("a write by a read", read, io(id, OP_WRITE, 0, 512), 512, EINVAL),
        ("more data than is written", write, io(id, OP_WRITE, 0, 512), 1024, EINVAL),
        ("less data than is written", write, io(id, OP_WRITE, 0, 1024), 512, EINVAL),
        ("less room than is read", read, io(id, OP_READ, 0, 1024), 512, EINVAL),
        ("less than a block", write, io(id, OP_WRITE, 0, 100), 100, EINVAL),
        ("a block and a bit", read, io(id, OP_READ, 0, 513), 513, EINVAL),
        ("less than a large block", write, io(large, OP_WRITE, 0, 512), 512, EINVAL),
        ("not at a large block", read, io(large, OP_READ, 1, 4096), 4096, EINVAL),
        ("past the end", read, io(id, OP_READ, last + 1, 512), 512, EIO),
        ("across the end", write, io(id, OP_WRITE, last, 1024), 1024, EIO),
        ("far past the end", write, io(id, OP_WRITE, 1 << 54, 512), 512, EIO),
        ("at the end of all sectors", read, io(id, OP_READ, u64::MAX, 512), 512, EINVAL),
        ("around the end of all bytes", write, io(id, OP_WRITE, u64::MAX / 512, 512), 512, EINVAL),
        ("a discard past the end", write, io(id, OP_DISCARD, last, 1024), 0, EIO),
        ("zeroes past the end", write, io(id, OP_WRITE_ZEROES, last, 1024), 0, EIO),
        ("a discard of everything", write, io(id, OP_DISCARD, 0, u32::MAX), 0, EINVAL),
        ("an erasure", write, io(id, OP_SECURE_ERASE, 0, 512), 0, EOPNOTSUPP),
        ("an id never given", read, io(id.wrapping_add(7), OP_READ, 0, 512), 512, ENOTCONN),
        ("an id of before", write, io(id.wrapping_sub(1), OP_WRITE, 0, 512), 512, ENOTCONN),
        (
            "a flush of an id never given",
            read,
            io(id.wrapping_add(7), OP_FLUSH, u64::MAX, 0),
            0,
            ENOTCONN,
        ),
    ];
    for (what, dir, io, data, errno) in bad {
        assert_eq!(raw.io(dir, &io, data), errno, "{what}");
        victim.check(what);
    }
    let fua = Io { flags: IoFlags::FUA, ..io(id, OP_READ, 0, 512) };
    assert_eq!(raw.io(read, &fua, 512), EIO, "durable reads");
    let every = Io { flags: IoFlags::from_bits(!0xff), ..io(id, OP_WRITE, 0, 512) };
    assert_eq!(raw.io(write, &every, 512), 0, "flags nobody knows");
    // None of the above has written anything: all blocks but the first are unchanged.
    assert_eq!(raw.io(read, &io(id, OP_READ, 1, 65_024), 65_024), 0);
    let mut bytes = vec![1; 65_024];
    raw.region.buffer().read(0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0), "written after all");

    // Closed ids, repeatedly; and ids of another session.
    assert_eq!(raw.send(write, &emit_close(id), 0), 0);
    assert_eq!(raw.io(read, &io(id, OP_READ, 0, 512), 512), ENOTCONN);
    for unknown in [id, 99, u32::MAX] {
        assert_eq!(raw.send(write, &emit_close(unknown), 0), 0, "closing what is not open");
    }
    let fresh = Raw::new(&rig, "fresh");
    for open in rig.server.opens() {
        let id = open.id.device;
        assert_eq!(fresh.io(read, &io(id, OP_READ, 0, 512), 512), ENOTCONN, "of others");
        assert_eq!(fresh.io(write, &io(id, OP_WRITE, 0, 512), 512), ENOTCONN, "of others");
        assert_eq!(fresh.send(write, &emit_close(id), 0), 0);
    }
    assert_eq!(fresh.open("victim"), Err(EPERM), "a writer is there");
    victim.check("ids of others");
    assert_eq!(rig.server.opens().len(), 2);

    // A read-only open refuses all operations that write.
    let ro = fresh.open_as(Access::Ro, b"victim").unwrap().device_id;
    for (op, data) in [(OP_WRITE, 512), (OP_DISCARD, 0), (OP_WRITE_ZEROES, 0), (OP_SECURE_ERASE, 0)]
    {
        assert_eq!(fresh.io(write, &io(ro, op, 0, 512), data), EPERM, "operation {op}");
    }
    // A second open for writing keeps the first mode.
    assert_eq!(fresh.open("victim"), Ok(ro));
    assert_eq!(fresh.io(write, &io(ro, OP_WRITE, 0, 512), 512), EPERM);
    assert_eq!(fresh.io(read, &io(ro, OP_READ, 0, 512), 512), 0);
    victim.check("a reader");
    assert_eq!(rig.server.in_flight(), 0);
}

/// A directory of the test, gone at its end.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let dir =
            std::env::temp_dir().join(format!("bowline-hostile-{name}-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("exports/in")).unwrap();
        let tree = Self(dir);
        for file in ["secret.img", "exports/a.img", "exports/in/b.img", "exports/victim"] {
            std::fs::write(tree.0.join(file), vec![0x5a; 1 << 20]).unwrap();
        }
        tree
    }

    fn root(&self) -> PathBuf {
        self.0.join("exports")
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // The system clears its temporary files where this fails.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn fifo(path: &Path) {
    let status = std::process::Command::new("mkfifo").arg(path).status().unwrap();
    assert!(status.success());
}

// tests [NB-17] [NB-18] [NB-46] [NB-58]
#[test]
fn names_do_not_lead_out_of_the_directory() {
    let tree = Tree::new("names");
    let root = tree.root();
    symlink("../secret.img", root.join("up")).unwrap();
    symlink(tree.0.join("secret.img"), root.join("away")).unwrap();
    symlink("/proc/self/fd/0", root.join("magic")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    symlink("in/b.img", root.join("within")).unwrap();
    symlink("..", root.join("in/parent")).unwrap();
    fifo(&root.join("fifo"));
    let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let mut exports = Exports::new();
    exports.directory(&root, FileOptions::default()).unwrap();
    let rig = Rig::new(43, exports);
    let victim = Victim::new(&rig);
    let raw = Raw::new(&rig, "hostile");
    let long = "x".repeat(254);
    let deep = "a/".repeat(127);
    let bad: [(&str, i32); 24] = [
        ("", ENOTBLK),
        ("/", ENOTBLK),
        (".", ENOTBLK),
        ("in", ENOTBLK),
        ("in/", ENOTBLK),
        ("fifo", ENOTBLK),
        ("socket", ENOTBLK),
        ("..", EINVAL),
        ("../secret.img", EINVAL),
        ("in/../../secret.img", EINVAL),
        ("in/..", EINVAL),
        ("a..b", EINVAL),
        ("in/parent/../secret.img", EINVAL),
        ("up", ENOENT),
        ("away", ENOENT),
        ("magic", ENOENT),
        ("loop", ELOOP),
        ("none", ENOENT),
        ("/etc/passwd", ENOENT),
        ("/proc/self/mem", ENOENT),
        ("%SESSNAME%", ENOENT),
        ("%SESSNAME%/a.img", ENOENT),
        (&long, ENOENT),
        (&deep, ENOENT),
    ];
    let start = Instant::now();
    for (name, errno) in bad {
        assert_eq!(raw.open(name), Err(errno), "{name:?}");
        assert_eq!(raw.open_as(Access::Ro, name.as_bytes()).map(drop), Err(errno), "{name:?}");
        victim.check(name);
    }
    assert!(start.elapsed() < Duration::from_secs(20), "something has waited");
    assert_eq!(raw.open_as(Access::Rw, b"\xff\xfe").map(drop), Err(ENOENT), "no text");
    // Bytes after the NUL are not part of the name.
    let mut message = emit_open(Access::Rw, b"a.img").unwrap();
    message[12..24].copy_from_slice(b"../secret.im");
    assert_eq!(raw.send(Dir::Read, &message, 56), 0);
    // Other names of an open file.
    for name in ["/a.img", "//a.img", "./a.img", "in/parent/a.img", "in//parent/./a.img"] {
        assert_eq!(raw.open(name), Err(EPERM), "{name}: a writer is there");
        for access in [Access::Migration, Access::Ro] {
            let opened = raw.open_as(access, name.as_bytes());
            assert_eq!(opened.map(drop), Err(EEXIST), "{name}: it is this one");
        }
    }
    raw.open("within").unwrap();
    victim.check("what is within");
    assert_eq!(std::fs::read(tree.0.join("secret.img")).unwrap(), vec![0x5a; 1 << 20]);
    assert_eq!(rig.server.opens().len(), 3);
}

// tests [NB-18]: a session reaches only its own directory
#[test]
fn sessions_stay_in_their_directories() {
    let tree = Tree::new("sessions");
    let dir = tree.0.join("by");
    std::fs::create_dir_all(dir.join("s1")).unwrap();
    std::fs::create_dir_all(dir.join("victim")).unwrap();
    std::fs::write(dir.join("s1/own.img"), vec![0; 1 << 20]).unwrap();
    std::fs::write(dir.join("victim/victim"), vec![0; 1 << 20]).unwrap();
    symlink("../victim/victim", dir.join("s1/theirs")).unwrap();
    let mut exports = Exports::new();
    exports.directory(&dir.join("%SESSNAME%"), FileOptions::default()).unwrap();
    let rig = Rig::new(44, exports);
    let victim = Victim::new(&rig);
    let raw = Raw::new(&rig, "s1");
    raw.open("own.img").unwrap();
    for name in ["victim", "victim/victim", "/victim/victim", "s1/own.img", "%SESSNAME%/own.img"] {
        assert_eq!(raw.open(name), Err(ENOENT), "{name}");
    }
    assert_eq!(raw.open("../victim/victim"), Err(EINVAL));
    // A link between the directories stays below the exported one, so it is followed.
    assert_eq!(raw.open("theirs"), Err(EPERM), "a writer is there");
    let nobody = Raw::new(&rig, "s2");
    assert_eq!(nobody.open("own.img"), Err(ENOENT), "no directory of this name");
    for name in ["a/b", "..", ".", "", "a.b"] {
        assert!(SessionBuilder::new(name).is_err(), "{name:?} is no name of a session");
    }
    victim.check("directories of sessions");
    let options = MapOptions { access: Access::Ro, ..rig.options("s3") };
    assert_eq!(rig.map("own.img", &options).unwrap_err().errno().0, ENOENT);
}
