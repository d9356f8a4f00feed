//! What a store of a file asks of the disk below the file system, and when. That file system is one
//! of our own, by FUSE: it has fsync and writes with `RWF_DSYNC` flush the disk behind it.

use crate::LocalDevice;
use crate::front::fuse::{self, FuseOptions, Mount};

use super::file::File;
use super::*;
use cached::{Cached, News};

#[path = "../../../tests/common/cached.rs"]
mod cached;
use bowline_testkit::skipped;

const BYTES: u64 = 1 << 20;
const BLOCK: u32 = 4096;
/// Numbers of answers.
const REQUEST: u64 = 1;
const READ: u64 = 2;

/// A store of a file on a disk.
struct OnDisk {
    disk: Arc<Cached>,
    // Goes first, then what it lies on.
    store: Store,
    _mount: Mount,
    _dir: Dir,
}

struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

struct Told(Arc<Cached>);

impl BackendDone for Told {
    fn done(&self, results: &[BackendResult]) {
        for BackendResult { token, errno, .. } in results {
            self.0.answered(*token, *errno);
        }
    }
}

impl OnDisk {
    fn new(threads: bool, direct: bool) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("bowline-flush-{}-{number}", std::process::id());
        let dir = Dir(std::env::temp_dir().join(name));
        std::fs::create_dir(&dir.0).unwrap();
        let limits =
            Limits { write_cache: true, max_write_zeroes: 1 << 20, ..Limits::plain(BYTES) };
        let disk = Cached::new(limits);
        let device = LocalDevice::new("disk", disk.clone());
        let mount = match fuse::mount(device, &dir.0, "disk.img", FuseOptions::default()) {
            Ok(mount) => mount,
            Err(error) => {
                skipped::without_fuse(error);
                return None;
            }
        };
        let fd = OpenOptions::new().read(true).write(true).open(dir.0.join("disk.img")).unwrap();
        let file = if threads {
            File::by_threads(fd.into(), 512, direct).unwrap()
        } else {
            File::new(fd.into(), false, 512, direct).unwrap()
        };
        assert_eq!((file.is_over_ring(), file.is_direct()), (!threads, direct));
        let mut store = Store::new(Arc::new(file));
        store.done = Arc::new(Told(disk.clone()));
        Some(Self { disk, store, _mount: mount, _dir: dir })
    }

    fn begin(&self, token: u64, op: IoOp, offset: u64, fua: bool) {
        let len = if op == IoOp::Flush { 0 } else { BLOCK };
        let mem_at = if op == IoOp::Read { 2 << 20 } else { 0 };
        let io = BackendIo { token, fua, ..self.store.io(op, offset, len, mem_at) };
        self.store.backend.submit(&mut vec![io], &self.store.done);
        self.store.backend.kick();
    }

    /// The disk is asked for this, and nobody is answered before it has answered `errno`.
    #[track_caller]
    fn asked(&self, what: News, errno: i32) {
        assert_eq!(self.disk.news(), what);
        // What comes later is answered, so an answer that did not wait would be there.
        self.begin(READ, IoOp::Read, 0, false);
        assert_eq!(self.disk.news(), News::Answered(READ, 0), "before {what:?} was over");
        self.disk.resume(errno);
    }
}

impl Drop for OnDisk {
    fn drop(&mut self) {
        self.disk.hold_nothing();
    }
}

/// By io_uring and by threads, around the page cache and not.
fn ways(test: impl Fn(&OnDisk)) {
    for (threads, direct) in [(false, true), (false, false), (true, true), (true, false)] {
        println!("threads: {threads}, direct: {direct}");
        let Some(store) = OnDisk::new(threads, direct) else { return };
        test(&store);
    }
}

#[test]
fn what_has_to_be_durable_is_flushed_to_the_disk_before_it_is_answered() {
    // tests [NB-47]
    ways(|on| {
        let data = pattern(3, BLOCK as usize);
        let zeroes = vec![0; BLOCK as usize];
        on.store.buffer.write(0, &data);
        let (early, late) = (8192, 65_536);
        for (offset, fua) in [(early, false), (late, true)] {
            on.begin(REQUEST, IoOp::Write, offset, fua);
            on.asked(News::write(offset, BLOCK), 0);
            if fua {
                assert_eq!(on.disk.durable(offset, BLOCK), zeroes);
                on.asked(News::flush(), 0);
            }
            assert_eq!(on.disk.news(), News::Answered(REQUEST, 0));
            let durable = on.disk.durable(offset, BLOCK);
            assert_eq!(durable, if fua { &*data } else { &*zeroes }, "durable: {fua}");
        }
        // Blocks that are freed or made zero.
        for op in [IoOp::WriteZeroes, IoOp::Discard] {
            for fua in [false, true] {
                on.begin(REQUEST, op, late, fua);
                let zero = IoOp::WriteZeroes;
                let zero = News::Asked { op: zero, offset: late, len: BLOCK, fua: false };
                on.asked(zero, 0);
                if fua {
                    on.asked(News::flush(), 0);
                }
                assert_eq!(on.disk.news(), News::Answered(REQUEST, 0));
            }
        }
        assert_eq!(on.disk.durable(late, BLOCK), zeroes);
        // And what was written before a flush.
        on.begin(REQUEST, IoOp::Write, late, false);
        on.asked(News::write(late, BLOCK), 0);
        assert_eq!(on.disk.news(), News::Answered(REQUEST, 0));
        assert_eq!(on.disk.durable(late, BLOCK), zeroes);
        on.begin(REQUEST, IoOp::Flush, 0, false);
        on.asked(News::flush(), 0);
        assert_eq!(on.disk.news(), News::Answered(REQUEST, 0));
        assert_eq!(on.disk.durable(late, BLOCK), data);
    });
}

#[test]
fn a_disk_that_cannot_flush_fails_what_has_to_be_durable() {
    ways(|on| {
        on.begin(REQUEST, IoOp::Flush, 0, false);
        on.asked(News::flush(), -libc::EIO);
        assert_eq!(on.disk.news(), News::Answered(REQUEST, -libc::EIO));
        on.begin(REQUEST, IoOp::Write, 0, true);
        on.asked(News::write(0, BLOCK), 0);
        on.asked(News::flush(), -libc::EIO);
        assert_eq!(on.disk.news(), News::Answered(REQUEST, -libc::EIO));
        on.begin(REQUEST, IoOp::Write, 0, true);
        on.asked(News::write(0, BLOCK), -libc::EIO);
        assert_eq!(on.disk.news(), News::Answered(REQUEST, -libc::EIO));
    });
}
