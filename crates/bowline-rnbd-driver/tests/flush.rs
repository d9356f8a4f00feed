//! Flushes and FUA writes, from the message on the wire to the disk below the server: storage of
//! the program, and a file on a test file system (FUSE).

#[path = "../../bowline-block/tests/common/cached.rs"]
mod cached;
mod common;
use bowline_testkit::skipped;

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult};
use bowline_block::front::fuse::{self, FuseOptions};
use bowline_block::sync::{self, Durable};
use bowline_block::{IoOp, Limits, LocalDevice};
use bowline_rnbd_driver::{Exports, FileOptions};
use bowline_rtrs_driver::Dir;
use bowline_wire::rnbd::{Io, IoFlags, OP_FLUSH, OP_READ, OP_WRITE};
use cached::{Cached, News};
use common::raw::Raw;
use common::{Rig, pattern};

const LEN: u32 = 4096;
const EIO: i32 = 5;
/// Numbers of answers.
const REQUEST: u64 = 1;
const READ: u64 = 2;

/// Releases the requests that the disk holds back, also when a test has failed.
struct AtEnd(Arc<Cached>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        self.0.hold_nothing();
    }
}

/// Sends a request without waiting for its answer.
fn begin(
    disk: &Arc<Cached>,
    request: impl FnOnce() -> Result<(), i32> + Send + 'static,
) -> JoinHandle<()> {
    let disk = Arc::clone(disk);
    thread::spawn(move || disk.answered(REQUEST, request().map_or_else(|errno| -errno, |()| 0)))
}

/// Checks that the disk is asked for this step. A `read` sent later is answered, so an early answer
/// to the request would have arrived.
#[track_caller]
fn asked(disk: &Cached, what: News, read: impl FnOnce()) {
    assert_eq!(disk.news(), what);
    read();
    disk.answered(READ, 0);
    assert_eq!(disk.news(), News::Answered(READ, 0), "before {what:?} was over");
}

/// The steps that one message leads to, in order: each follows the success of the one before.
#[test]
fn flushes_and_data_reach_storage_one_after_the_other_and_then_comes_the_answer() {
    // tests [NB-23] [NB-24] [NB-47]
    let none = IoFlags::NONE;
    let (fua, pre) = (IoFlags::FUA, IoFlags::PREFLUSH);
    let (data, flush) = (News::write(0, LEN), News::flush());
    let durable = News::Asked { op: IoOp::Write, offset: 0, len: LEN, fua: true };
    let write = |flags, len| (OP_WRITE, flags, len);
    let plain = Limits::plain(1 << 20);
    let cached = Limits { write_cache: true, ..plain };
    let cases: [(Limits, &[_]); 3] = [
        (
            cached,
            &[
                (write(none, LEN), &[data][..]),
                (write(fua, LEN), &[data, flush]),
                (write(pre, LEN), &[flush, data]),
                (write(pre | fua, LEN), &[flush, data, flush]),
                (write(pre, 0), &[flush]),
                ((OP_FLUSH, fua, 0), &[flush]),
            ],
        ),
        (
            Limits { fua: true, ..cached },
            &[
                (write(none, LEN), &[data][..]),
                (write(fua, LEN), &[durable]),
                (write(pre | fua, LEN), &[flush, durable]),
                ((OP_FLUSH, none, 0), &[flush]),
            ],
        ),
        (plain, &[(write(pre | fua, LEN), &[data][..]), ((OP_FLUSH, fua, 0), &[])]),
    ];
    let mut exports = Exports::new();
    let disks = cases.map(|(limits, messages)| (Cached::new(limits), messages));
    for (n, (disk, _)) in disks.iter().enumerate() {
        exports.backend(&format!("disk{n}"), Arc::clone(disk) as _).unwrap();
    }
    let rig = Rig::new(110, exports);
    let raw = Arc::new(Raw::new(&rig, "flush"));
    let beside = raw.beside();
    for (n, (disk, messages)) in disks.iter().enumerate() {
        let _end = AtEnd(Arc::clone(disk));
        let device = raw.open(&format!("disk{n}")).unwrap();
        let read = Io { device, sector: 8, op: OP_READ, flags: none, len: LEN, prio: 0 };
        let read = || assert_eq!(beside.io(Dir::Read, &read, LEN), 0);
        for (m, ((op, flags, len), steps)) in messages.iter().enumerate() {
            // All goes well, or one of the steps fails.
            for fails in (0..=steps.len()).rev() {
                println!("disk {n}, message {m}, step {fails} fails");
                let bytes = pattern(LEN as usize, (n * 100 + m * 10 + fails) as u64);
                raw.region.buffer().write(0, &bytes);
                let io = Io { device, sector: 0, op: *op, flags: *flags, len: *len, prio: 0 };
                let (client, dir) =
                    (Arc::clone(&raw), if *op == OP_FLUSH { Dir::Read } else { Dir::Write });
                let sent = begin(disk, move || match client.io(dir, &io, io.len) {
                    0 => Ok(()),
                    errno => Err(errno),
                });
                for (step, what) in steps.iter().enumerate().take(fails + 1) {
                    asked(disk, *what, read);
                    disk.resume(if step == fails { -EIO } else { 0 });
                }
                let errno = if fails < steps.len() { -EIO } else { 0 };
                assert_eq!(disk.news(), News::Answered(REQUEST, errno));
                sent.join().unwrap();
                if errno == 0 && flags.contains(fua) && disk.limits().write_cache && *len > 0 {
                    assert_eq!(disk.durable(0, LEN), bytes);
                }
            }
        }
    }
    drop((raw, beside));
}

#[test]
fn flushes_of_a_client_reach_the_disk_below_the_file_system_of_an_exported_file() {
    for (net, direct) in [(111, true), (112, false)] {
        let dir = std::env::temp_dir().join(format!("bowline-below-{net}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let disk = Cached::new(Limits { write_cache: true, ..Limits::plain(1 << 20) });
        let device = LocalDevice::new("disk", Arc::clone(&disk) as _);
        match fuse::mount(device, &dir, "disk.img", FuseOptions::default()) {
            Ok(mount) => {
                let mut exports = Exports::new();
                let options = FileOptions { direct, ..FileOptions::default() };
                exports.file("file", &dir.join("disk.img"), options).unwrap();
                reach_the_disk(net, exports, &disk);
                drop(mount);
            }
            Err(error) => skipped::without_fuse(error),
        }
        std::fs::remove_dir(&dir).unwrap();
    }
}

fn reach_the_disk(net: u8, exports: Exports, below: &Arc<Cached>) {
    let rig = Rig::new(net, exports);
    let disk = rig.map("file", &rig.options("below")).unwrap();
    let _end = AtEnd(Arc::clone(below));
    let read = || sync::read_at(&*disk, 0, &mut [0; 512]).unwrap();
    let done = |sent: JoinHandle<()>| {
        assert_eq!(below.news(), News::Answered(REQUEST, 0));
        sent.join().unwrap();
    };
    let bytes = pattern(LEN as usize, net.into());
    let write = |offset, durable| {
        let (disk, bytes) = (Arc::clone(&disk), bytes.clone());
        begin(below, move || {
            sync::write_at(&*disk, offset, &bytes, durable).map_err(|errno| errno.0)
        })
    };
    let (early, late) = (8192, 65_536);
    let sent = write(early, Durable::Later);
    asked(below, News::write(early, LEN), read);
    below.resume(0);
    done(sent);
    assert_eq!(below.durable(early, LEN), vec![0; LEN as usize]);
    let flusher = Arc::clone(&disk);
    let sent = begin(below, move || sync::flush(&*flusher).map_err(|errno| errno.0));
    asked(below, News::flush(), read);
    below.resume(0);
    done(sent);
    assert_eq!(below.durable(early, LEN), bytes);

    let sent = write(late, Durable::Now);
    asked(below, News::write(late, LEN), read);
    below.resume(0);
    asked(below, News::flush(), read);
    below.resume(0);
    done(sent);
    assert_eq!(below.durable(late, LEN), bytes);
    rig.client.unmap(&disk).unwrap();
}
