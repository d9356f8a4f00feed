//! Storage that fails behind an export: only the request concerned gets the error, with its number,
//! and the session stays up [NB-23] [NB-26].

mod common;
use bowline_testkit::skipped;

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult};
use bowline_block::front::nbd::{self, NbdOptions};
use bowline_block::sync::{self, Durable};
use bowline_block::{BlockDevice, Errno, IoOp, Limits};
use bowline_rnbd_driver::{Disk, Exports, FileOptions};
use common::{Rig, pattern};

const MIB: u64 = 1 << 20;

/// A directory of the test, gone at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("bowline-fails-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.0.join(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The system clears its temporary files where this fails.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn write(disk: &Disk, offset: u64, len: usize, seed: u64) -> Result<(), Errno> {
    sync::write_at(disk, offset, &pattern(len, seed), Durable::Later)
}

fn holds(disk: &Disk, offset: u64, len: usize, seed: u64) {
    let mut bytes = vec![0; len];
    sync::read_at(disk, offset, &mut bytes).unwrap();
    assert!(bytes == pattern(len, seed), "at {offset}");
}

fn read(disk: &Disk, offset: u64, len: usize) -> Result<(), Errno> {
    sync::read_at(disk, offset, &mut vec![0; len])
}

/// Checks that the session was not affected.
fn lives(disk: &Disk, rig: &Rig) {
    let info = disk.info().unwrap();
    assert_eq!((info.state.to_string().as_str(), info.stats.resent), ("open", 0));
    assert_eq!(rig.server.in_flight(), 0);
    assert_eq!(rig.server.rtrs().sessions().len(), 1);
    assert_eq!(rig.server.rtrs().counters().paths_closed, 0);
}

/// Runs a test with direct IO, and through the page cache.
fn both_ways(net: u8, name: &str, test: impl Fn(&Scratch, &Path, &Rig, &Disk)) {
    for (net, direct) in [(net, true), (net + 1, false)] {
        let scratch = Scratch::new(&format!("{name}-{direct}"));
        let path = scratch.file("disk0", 4 * MIB);
        let mut exports = Exports::new();
        let options = FileOptions { direct, ..FileOptions::default() };
        exports.file("disk0", &path, options).unwrap();
        exports.directory(&scratch.0, options).unwrap();
        let rig = Rig::new(net, exports);
        let disk = rig.map("disk0", &rig.options("fails")).unwrap();
        test(&scratch, &path, &rig, &disk);
    }
}

#[test]
fn a_file_serves_every_operation() {
    both_ways(51, "serves", |_, path, rig, disk| {
        for (n, len) in [512, 4096, 65_536, 126_976, 1 << 20].into_iter().enumerate() {
            let n = n as u64;
            write(disk, n * 512 * 1024 + 512, len.min(523_776), n).unwrap();
            holds(disk, n * 512 * 1024 + 512, len.min(523_776), n);
        }
        sync::write_at(disk, 4 * MIB - 512, &pattern(512, 9), Durable::Now).unwrap();
        sync::flush(disk).unwrap();
        let file = std::fs::read(path).unwrap();
        assert!(
            file[4 * MIB as usize - 512..] == pattern(512, 9),
            "what is durable is in the file"
        );
        sync::write_zeroes(disk, 0, 8192).unwrap();
        sync::discard(disk, MIB, MIB as u32).unwrap();
        assert!(
            std::fs::read(path).unwrap()[MIB as usize..][..MIB as usize].iter().all(|b| *b == 0)
        );
        lives(disk, rig);
    });
}

#[test]
fn reads_past_the_end_of_a_shortened_file_fail() {
    both_ways(53, "short", |_, path, rig, disk| {
        write(disk, 0, 65_536, 1).unwrap();
        write(disk, 2 * MIB, 65_536, 2).unwrap();
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(MIB + 4096).unwrap();
        assert_eq!(read(disk, 2 * MIB, 65_536), Err(Errno::EIO), "behind its end");
        assert_eq!(read(disk, MIB, 65_536), Err(Errno::EIO), "across its end");
        assert_eq!(read(disk, MIB + 4096, 512), Err(Errno::EIO), "at its end");
        holds(disk, 0, 65_536, 1);
        write(disk, 4096, 4096, 3).unwrap();
        holds(disk, 4096, 4096, 3);
        lives(disk, rig);
        // As long as before: the data cut off is lost, all other data is there.
        file.set_len(4 * MIB).unwrap();
        read(disk, 2 * MIB, 65_536).unwrap();
        write(disk, 2 * MIB, 65_536, 4).unwrap();
        holds(disk, 2 * MIB, 65_536, 4);
        holds(disk, 4096, 4096, 3);
        lives(disk, rig);
    });
}

#[test]
fn a_removed_file_serves_sessions_that_have_it_open() {
    both_ways(55, "removed", |scratch, path, rig, disk| {
        write(disk, 0, 65_536, 1).unwrap();
        scratch.file("later", MIB);
        let later = rig.map("later", &rig.options("fails")).unwrap();
        write(&later, 0, 4096, 5).unwrap();
        std::fs::remove_file(path).unwrap();
        std::fs::remove_file(scratch.0.join("later")).unwrap();
        for (disk, len, seed) in [(disk, 65_536, 1), (&later, 4096, 5)] {
            holds(disk, 0, len, seed);
            write(disk, 65_536, 4096, 2).unwrap();
            holds(disk, 65_536, 4096, 2);
            sync::flush(disk).unwrap();
        }
        lives(disk, rig);
        // A file below the directory is not found any more; a named export is held open.
        rig.client.unmap(&later).unwrap();
        let again = rig.map("later", &rig.options("fails"));
        assert_eq!(again.unwrap_err().errno(), Errno::ENOENT);
        lives(disk, rig);
    });
}

#[test]
fn a_disk_may_be_unmapped_right_after_its_last_answer() {
    // tests [NB-49]: the storage thread is still delivering that answer when the export is closed
    both_ways(61, "given-up", |scratch, _, rig, _| {
        scratch.file("shortly", MIB);
        for n in 0..300 {
            let disk = rig.map("shortly", &rig.options("fails")).unwrap();
            write(&disk, 0, 4096, n).unwrap();
            rig.client.unmap(&disk).unwrap();
        }
    });
}

const FULL: &str = "BOWLINE_FULL_DISK";

/// A file on a file system of 2 MiB, in a mount namespace of its own.
#[test]
fn a_full_file_system_is_no_space_and_nothing_else() {
    let Some(dir) = std::env::var_os(FULL) else {
        let scratch = Scratch::new("full");
        let script = "mount -t tmpfs -o size=2m none \"$BOWLINE_FULL_DISK\" && exec \"$0\" \"$@\"";
        let out = Command::new("unshare")
            .args(["--mount", "--map-root-user", "sh", "-c", script])
            .arg(std::env::current_exe().unwrap())
            .args(["a_full_file_system_is_no_space_and_nothing_else", "--exact", "--nocapture"])
            .env(FULL, &scratch.0)
            .output();
        let out = match out {
            Ok(out) => out,
            Err(error) => return skipped::because(format_args!("no unshare: {error}")),
        };
        let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
        if !text.contains("running 1 test") {
            return skipped::because(format_args!("no mount namespace: {text}"));
        }
        assert!(out.status.success() && out.status.signal().is_none(), "{text}");
        return;
    };
    let path = PathBuf::from(dir).join("disk0");
    std::fs::File::create(&path).unwrap().set_len(8 * MIB).unwrap();
    for (net, direct) in [(57, true), (58, false)] {
        let mut exports = Exports::new();
        let options = FileOptions { direct, ..FileOptions::default() };
        exports.file("disk0", &path, options).unwrap();
        let rig = Rig::new(net, exports);
        let disk = rig.map("disk0", &rig.options("full")).unwrap();
        let step = 128 << 10;
        let results: Vec<_> = (0..24).map(|n| write(&disk, n * step, step as usize, n)).collect();
        let good = results.iter().take_while(|result| result.is_ok()).count() as u64;
        assert!((8..=16).contains(&good), "{results:?}");
        assert!(results[good as usize..].iter().all(|result| *result == Err(Errno::ENOSPC)));
        (0..good).for_each(|n| holds(&disk, n * step, step as usize, n));
        // Allocated ranges can still be written; other ranges can be read.
        write(&disk, 0, 65_536, 77).unwrap();
        holds(&disk, 0, 65_536, 77);
        read(&disk, 6 * MIB, 65_536).unwrap();
        lives(&disk, &rig);
        // A discard frees space, which can be written.
        sync::discard(&*disk, 0, MIB as u32).unwrap();
        write(&disk, 4 * MIB, 256 << 10, 78).unwrap();
        holds(&disk, 4 * MIB, 256 << 10, 78);
        lives(&disk, &rig);
        sync::discard(&*disk, 0, 8 << 20).unwrap();
    }
}

/// Memory with bad blocks, which can also fail as a whole.
struct Worn {
    contents: Mutex<Vec<u8>>,
    /// Errno by block of 512 bytes.
    bad: Mutex<HashMap<u64, i32>>,
    gone: AtomicBool,
    failed: AtomicU64,
}

impl Worn {
    fn run(&self, io: &BackendIo) -> i32 {
        if self.gone.load(SeqCst) {
            return -6;
        }
        let bad = self.bad.lock().unwrap();
        let blocks = io.offset / 512..(io.offset + u64::from(io.len)).div_ceil(512);
        if let Some(errno) = blocks.into_iter().find_map(|block| bad.get(&block)) {
            return -errno;
        }
        let mut contents = self.contents.lock().unwrap();
        let (at, len) = (io.offset as usize, io.len as usize);
        match (io.op, &io.mem) {
            (IoOp::Read, Some(mem)) => mem.buffer.write(mem.offset, &contents[at..at + len]),
            (IoOp::Write, Some(mem)) => {
                mem.buffer.read(mem.offset, &mut contents[at..at + len]);
            }
            _ => {}
        }
        0
    }
}

impl Backend for Worn {
    fn limits(&self) -> Limits {
        Limits { write_cache: true, ..Limits::plain(MIB) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            let errno = self.run(&io);
            self.failed.fetch_add(u64::from(errno != 0), SeqCst);
            done.done(&[BackendResult { token: io.token, errno, direct: None }]);
        }
    }

    fn resize(&self) -> std::io::Result<u64> {
        Ok(MIB)
    }
}

fn worn() -> (Arc<Worn>, Exports) {
    let worn = Arc::new(Worn {
        contents: Mutex::new(vec![0; MIB as usize]),
        bad: Mutex::default(),
        gone: AtomicBool::new(false),
        failed: AtomicU64::new(0),
    });
    let mut exports = Exports::new();
    exports.backend("disk0", Arc::clone(&worn) as Arc<dyn Backend>).unwrap();
    (worn, exports)
}

/// Errors of storage, among many requests at once: each gets its own, and the others none.
#[test]
fn bad_places_fail_alone() {
    let (worn, exports) = worn();
    let rig = Rig::new(59, exports);
    let disk = rig.map("disk0", &rig.options("worn")).unwrap();
    // The client sees each error as the block layer's status for it.
    let errors = [(5, 5), (61, 61), (28, 28), (121, 121), (84, 84), (19, 19), (1, 5), (512, 5)];
    std::thread::scope(|threads| {
        for (n, (stored, seen)) in errors.into_iter().enumerate() {
            let (disk, worn) = (&disk, &worn);
            threads.spawn(move || {
                let place = n as u64 * 65_536;
                for round in 0..20 {
                    write(disk, place, 32_768, round).unwrap();
                    worn.bad.lock().unwrap().insert((place + 8192) / 512, stored);
                    assert_eq!(read(disk, place, 32_768), Err(Errno(seen)), "{stored}");
                    assert_eq!(write(disk, place + 8192, 512, 1), Err(Errno(seen)), "{stored}");
                    read(disk, place, 8192).unwrap();
                    write(disk, place + 8704, 512, round).unwrap();
                    worn.bad.lock().unwrap().remove(&((place + 8192) / 512));
                    holds(disk, place + 8704, 512, round);
                }
            });
        }
    });
    assert_eq!(worn.failed.load(SeqCst), errors.len() as u64 * 20 * 2);
    lives(&disk, &rig);
    // A device that is gone fails every request, and works again when it is back.
    worn.gone.store(true, SeqCst);
    assert_eq!(read(&disk, 0, 4096), Err(Errno::EIO));
    assert_eq!(write(&disk, 0, 4096, 1), Err(Errno::EIO));
    assert_eq!(sync::flush(&*disk), Err(Errno::EIO));
    worn.gone.store(false, SeqCst);
    write(&disk, 0, 4096, 3).unwrap();
    holds(&disk, 0, 4096, 3);
    lives(&disk, &rig);
}

/// Through NBD, with a common NBD program.
#[test]
fn errors_reach_nbd_clients() {
    let (worn, exports) = worn();
    let rig = Rig::new(60, exports);
    let disk = rig.map("disk0", &rig.options("door")).unwrap();
    let socket = std::env::temp_dir().join(format!("bowline-fails-{}.sock", std::process::id()));
    let server =
        nbd::serve(Arc::clone(&disk) as Arc<dyn BlockDevice>, &socket, NbdOptions::default());
    let server = server.unwrap();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    worn.bad.lock().unwrap().extend([(128, 5), (256, 28)]);
    let out = Command::new("timeout")
        .args(["30", "qemu-io", "-f", "raw", &uri])
        .args(["-c", "write -P 1 0 64k", "-c", "write -P 2 64k 4k", "-c", "write -P 3 128k 4k"])
        .args(["-c", "read -P 1 0 64k", "-c", "read 64k 4k", "-c", "write -P 4 132k 4k"])
        .args(["-c", "read -P 4 132k 4k"])
        .output()
        .unwrap();
    if out.status.code() == Some(127) {
        return skipped::without("qemu-io");
    }
    let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
    let count = |what: &str| text.matches(what).count();
    assert_eq!(count("write failed: Input/output error"), 1, "{text}");
    assert_eq!(count("write failed: No space left on device"), 1, "{text}");
    assert_eq!(count("read failed: Input/output error"), 1, "{text}");
    assert_eq!(count("wrote 65536/65536 bytes") + count("wrote 4096/4096 bytes"), 2, "{text}");
    assert_eq!(count("read 65536/65536 bytes") + count("read 4096/4096 bytes"), 2, "{text}");
    assert_eq!(count("Pattern verification failed"), 0, "{text}");
    drop(server);
    lives(&disk, &rig);
}
