//! The file front end, used by common programs. Where nothing can be mounted, the tests report a
//! skip.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bowline_block::backend::{self, Backend, BackendDone, BackendIo, BackendResult, BackendSpec};
use bowline_block::front::fuse::{self, FuseOptions, Handed, Mount};
use bowline_block::{BlockDevice, Limits, LocalDevice};
use io_uring::{IoUring, opcode, types};

use bowline_testkit::skipped;

#[path = "common/offer.rs"]
mod offer;

use offer::Offer;

/// Two programs have these tests: in one of them, requests come by io_uring.
const BY_RING: bool = matches!(env!("CARGO_CRATE_NAME").as_bytes(), b"fuse_ring");

/// A mounted disk; its directory is removed at the end.
struct Mounted {
    mount: Option<Mount>,
    dir: PathBuf,
    file: PathBuf,
    disk: Arc<LocalDevice>,
    /// The store behind the disk.
    store: File,
    _offer: Option<Offer>,
}

fn mount(name: &str, bytes: u64, options: FuseOptions) -> Option<Mounted> {
    let offer = if BY_RING {
        match Offer::take() {
            Ok(offer) => Some(offer),
            Err(error) => {
                skipped::because(format_args!("FUSE by io_uring cannot be offered here: {error}"));
                return None;
            }
        }
    } else {
        None
    };
    let dir = std::env::temp_dir().join(format!("bowline-{name}-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a directory");
    let path = dir.with_extension("store");
    let store = File::create_new(&path).expect("a store");
    store.set_len(bytes).expect("its size");
    let store = OpenOptions::new().read(true).write(true).open(&path).expect("again");
    std::fs::remove_file(&path).expect("unlinked");
    let same = store.try_clone().expect("the same file");
    let spec = BackendSpec::File { fd: store.into(), read_only: false, block: 512, direct: true };
    let disk = LocalDevice::new("disk", backend::open(spec).expect("opened"));
    match fuse::mount(disk.clone(), &dir, "disk.img", options) {
        Ok(mount) => {
            let file = dir.join("disk.img");
            let by_ring = BY_RING && !options.one_descriptor;
            assert!(!by_ring || offer::is_used(), "nobody serves a ring");
            Some(Mounted { mount: Some(mount), dir, file, disk, store: same, _offer: offer })
        }
        Err(error) => {
            skipped::without_fuse(error);
            std::fs::remove_dir(&dir).expect("removed");
            None
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(self.mount.take());
        std::fs::remove_dir(&self.dir).expect("nothing is mounted there any more");
    }
}

fn run(program: &str, args: &[&str]) -> Option<(i32, String)> {
    let out = Command::new("timeout").arg("60").arg(program).args(args).output().ok()?;
    let code = out.status.code().unwrap_or(-1);
    if code == 127 {
        skipped::without(program);
        return None;
    }
    let text = [out.stdout, out.stderr].concat();
    Some((code, String::from_utf8_lossy(&text).into_owned()))
}

#[test]
fn it_behaves_as_a_file_of_fixed_size() {
    let Some(mounted) = mount("file", 8 << 20, FuseOptions::default()) else { return };
    let names: Vec<_> = std::fs::read_dir(&mounted.dir)
        .expect("listed")
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    assert_eq!(names, ["disk.img"]);
    assert_eq!(std::fs::metadata(&mounted.file).expect("there").len(), mounted.disk.limits().bytes);
    // O_TRUNC and times change nothing; another size is refused.
    let mut file = File::options()
        .read(true)
        .write(true)
        .truncate(true)
        .create(true)
        .open(&mounted.file)
        .expect("opened");
    assert_eq!(file.metadata().expect("there").len(), 8 << 20);
    file.set_len(8 << 20).expect("its own size");
    for other in [0, 1] {
        assert_eq!(file.set_len(other).map_err(|e| e.kind()), Err(ErrorKind::InvalidInput));
    }
    // Unaligned offsets and lengths, and the end of the file.
    file.write_all_at(b"hello", 1_000_001).expect("written");
    file.sync_data().expect("flushed");
    let mut out = [1; 9];
    file.read_exact_at(&mut out, 999_999).expect("read");
    assert_eq!(&out, b"\0\0hello\0\0");
    file.seek(SeekFrom::End(-3)).expect("seek");
    assert_eq!(file.write(b"abcdef").expect("a part"), 3);
    let full = file.write(b"d").map_err(|e| e.raw_os_error());
    assert_eq!(full, Err(Some(libc::ENOSPC)));
    file.seek(SeekFrom::End(-3)).expect("seek");
    let mut end = Vec::new();
    file.read_to_end(&mut end).expect("read");
    assert_eq!(end, b"abc");
    let missing = File::open(mounted.dir.join("other")).map_err(|e| e.kind());
    assert_eq!(missing.err(), Some(ErrorKind::NotFound));
    let made = File::create_new(mounted.dir.join("new")).map_err(|e| e.raw_os_error());
    let refused = Err(Some(libc::EPERM));
    // Users other than root are refused by the mode of the folder.
    if rustix::process::geteuid().is_root() {
        assert_eq!(made.map(drop), refused, "no other files");
        let other = mounted.dir.join("other");
        let errno = |done: std::io::Result<()>| done.map_err(|e| e.raw_os_error());
        assert_eq!(errno(std::fs::create_dir(&other)), refused);
        assert_eq!(errno(std::fs::rename(&mounted.file, &other)), refused);
        assert_eq!(errno(std::fs::remove_file(&mounted.file)), refused);
    }
}

#[test]
fn holes_are_zeroes_and_synchronous_writes_work() {
    let Some(mounted) = mount("holes", 8 << 20, FuseOptions::default()) else { return };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT | libc::O_DSYNC)
        .open(&mounted.file)
        .expect("opened");
    // Direct IO of the file's users wants aligned memory on some systems: a page of a large piece.
    let mut memory = vec![0x5a_u8; (1 << 20) + 4096];
    let at = memory.as_ptr().align_offset(4096);
    let page = &mut memory[at..at + (1 << 20)];
    file.write_all_at(page, 1 << 20).expect("written");
    for mode in [
        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
    ] {
        file.write_all_at(page, 1 << 20).expect("written");
        let flags = rustix::fs::FallocateFlags::from_bits_retain(mode as u32);
        rustix::fs::fallocate(&file, flags, (1 << 20) + 4096, 8192).expect("a hole");
        file.read_exact_at(page, 1 << 20).expect("read");
        let zero = |range: std::ops::Range<usize>| page[range].iter().all(|byte| *byte == 0);
        assert!(zero(4096..12288) && page[4095] == 0x5a && page[12288] == 0x5a);
        page.fill(0x5a);
    }
    let whole = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&file, whole, 0, 8 << 20).expect("room is there");
    let more = rustix::fs::fallocate(&file, whole, 0, 9 << 20);
    assert_eq!(more.map_err(|e| e.raw_os_error()), Err(libc::ENOSPC));
}

#[test]
fn a_read_only_file_is_not_written() {
    let mut options = FuseOptions::default();
    options.read_only = true;
    let Some(mounted) = mount("ro", 1 << 20, options) else { return };
    let refused = OpenOptions::new().write(true).open(&mounted.file).map_err(|e| e.raw_os_error());
    // The mode says so to users, EROFS to root.
    assert!(matches!(refused, Err(Some(libc::EROFS | libc::EACCES))), "{refused:?}");
    let mut bytes = Vec::new();
    File::open(&mounted.file).expect("opened").read_to_end(&mut bytes).expect("read");
    assert_eq!(bytes.len(), 1 << 20);
}

#[test]
fn a_file_system_is_made_and_checked_on_it() {
    let Some(mounted) = mount("mkfs", 64 << 20, FuseOptions::default()) else { return };
    let file = mounted.file.display().to_string();
    // The sources of this crate, as files to copy.
    let source = env!("CARGO_MANIFEST_DIR");
    let Some((code, text)) = run("mkfs.ext4", &["-q", "-F", "-d", source, &file]) else { return };
    assert_eq!(code, 0, "{text}");
    let (code, text) = run("fsck.ext4", &["-f", "-n", &file]).expect("it comes with mkfs");
    assert_eq!(code, 0, "{text}");
    let (code, text) = run("debugfs", &["-R", "cat /Cargo.toml", &file]).expect("it too");
    assert!(code == 0 && text.contains("name = \"bowline-block\""), "{text}");
}

#[test]
fn dd_and_fio_verify_what_they_write() {
    verify_with_dd_and_fio("fio", 1);
}

#[test]
fn several_threads_answer_what_several_programs_write() {
    verify_with_dd_and_fio("threads", 3);
}

/// Checks what programs write, one for each of `threads`, which answer them.
fn verify_with_dd_and_fio(name: &str, threads: usize) {
    let mut options = FuseOptions::default();
    options.threads = threads;
    let Some(mounted) = mount(name, 64 << 20, options) else { return };
    let file = mounted.file.display().to_string();
    let of = format!("of={file}");
    let (code, text) =
        run("dd", &["if=/dev/zero", &of, "bs=777", "count=1000", "conv=fsync"]).expect("dd");
    assert_eq!(code, 0, "{text}");
    for engine in ["--ioengine=psync", "--ioengine=io_uring", "--ioengine=libaio"] {
        let filename = format!("--filename={file}");
        let Some((code, text)) = run(
            "fio",
            &[
                "--name=verify",
                engine,
                &filename,
                "--direct=1",
                "--rw=randrw",
                "--bssplit=512/20:4k/50:64k/20:512k/10",
                // The programs share the file, each its own part of it.
                &format!("--numjobs={threads}"),
                &format!("--size={}m", 48 / (threads + 1)),
                &format!("--offset_increment={}m", 48 / (threads + 1)),
                "--iodepth=16",
                "--verify=crc32c",
                "--verify_state_save=0",
                "--fsync=32",
            ],
        ) else {
            return;
        };
        assert!(code == 0 && text.contains("err= 0"), "{engine}: {text}");
    }
}

#[test]
fn an_open_file_survives_its_directory() {
    let Some(mounted) = mount("lazy", 1 << 20, FuseOptions::default()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(&mounted.file).expect("opened");
    let dir = mounted.dir.clone();
    drop(mounted);
    assert!(!dir.exists());
    file.write_all_at(b"still here", 100).expect("written");
    let mut out = [0; 10];
    file.read_exact_at(&mut out, 100).expect("read");
    assert_eq!(&out, b"still here");
}

/// Waits until the condition holds.
fn until(what: &str, so: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !so() {
        assert!(start.elapsed().as_secs() < 20, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn a_file_stays_open_while_another_mount_continues() {
    // tests [NB-70]
    for threads in [1, 3] {
        let mut options = FuseOptions::default();
        options.threads = threads;
        let Some(mut mounted) = mount("continued", 8 << 20, options) else { return };
        let mut mount = mounted.mount.take().expect("mounted");
        if BY_RING {
            let why = mount.cannot_hand_over().expect("a reason");
            assert!(why.contains("enable_uring"), "{why}");
            mounted.mount = Some(mount);
            return;
        }
        assert_eq!(mount.cannot_hand_over(), None);
        let file = OpenOptions::new().read(true).write(true).open(&mounted.file).expect("opened");
        let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
        let writes = || written.load(Ordering::SeqCst);
        mount = std::thread::scope(|scope| {
            let _end = Stop(&stop);
            for writer in 0..threads as u64 + 1 {
                let (file, stop, written) = (&file, &stop, &written);
                scope.spawn(move || {
                    let mut count = 0_u64;
                    while !stop.load(Ordering::Relaxed) {
                        count += 1;
                        // Not whole blocks: each is read and written.
                        let (bytes, at) = ([count as u8; 700], writer * 100_000 + 7);
                        file.write_all_at(&bytes, at).expect("written");
                        let mut out = [0; 700];
                        file.read_exact_at(&mut out, at).expect("read");
                        assert_eq!(out, bytes);
                        written.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for round in 0..6 {
                let before = writes();
                until("programs write", || writes() > before);
                mount.pause();
                until("it is paused", || mount.is_paused());
                if round % 2 == 0 {
                    // Nobody continues: this one does.
                    mount.unpause();
                    continue;
                }
                let handed = mount.hand_over();
                assert_eq!(handed.opens, 1);
                let disk = Arc::<LocalDevice>::clone(&mounted.disk);
                let name = "disk.img";
                mount = fuse::resume(disk, &mounted.dir, name, options, handed).expect("resumed");
                mount.unpause();
            }
            let before = writes();
            until("programs write", || writes() > before);
            mount
        });
        drop(file);
        // One that sleeps is woken, too.
        until("nobody uses it", || mount.opens() == 0);
        mount.pause();
        until("it is paused", || mount.is_paused());
        let handed = mount.hand_over();
        let disk = Arc::<LocalDevice>::clone(&mounted.disk);
        let mount = fuse::resume(disk, &mounted.dir, "disk.img", options, handed).expect("resumed");
        mount.unpause();
        mounted.mount = Some(mount);
    }
}

#[test]
fn a_mount_that_is_resumed_touches_nothing_before_it_begins() {
    // tests [NB-70]
    let Some(mut mounted) = mount("unbegun", 1 << 20, FuseOptions::default()) else { return };
    let mount = mounted.mount.take().expect("mounted");
    if BY_RING {
        mounted.mount = Some(mount);
        return;
    }
    let file = OpenOptions::new().read(true).write(true).open(&mounted.file).expect("opened");
    mount.pause();
    until("it is paused", || mount.is_paused());
    let handed = mount.hand_over();
    let resume = |handed: Handed| {
        let disk = Arc::<LocalDevice>::clone(&mounted.disk);
        fuse::resume(disk, &mounted.dir, "disk.img", FuseOptions::default(), handed)
    };
    let mount = std::thread::scope(|scope| {
        let write = scope.spawn(|| file.write_all_at(&[7; 4096], 0));
        // Processes that fail before they begin.
        for _ in 0..3 {
            let (kernel, device) = (Arc::clone(&handed.kernel), handed.device);
            let mount = resume(Handed { kernel, opens: 1, device }).expect("resumed");
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!write.is_finished(), "nobody takes requests");
            drop(mount);
        }
        let mount = resume(handed).expect("resumed");
        mount.unpause();
        write.join().unwrap().expect("written");
        mount
    });
    let mut out = [0; 4096];
    file.read_exact_at(&mut out, 0).expect("read");
    assert_eq!(out, [7; 4096]);
    drop(file);
    mounted.mount = Some(mount);
}

#[test]
fn a_mount_that_is_to_be_kept_has_one_descriptor_and_writes_how_often_it_is_open() {
    // tests [NB-72]
    let mut options = FuseOptions::default();
    (options.one_descriptor, options.threads) = (true, 3);
    // Even where a ring is offered.
    let Some(mounted) = mount("kept", 1 << 20, options) else { return };
    let mount = mounted.mount.as_ref().expect("mounted");
    assert_eq!(mount.cannot_hand_over(), None);
    let path = mounted.dir.with_extension("opens");
    let keeper = File::create_new(&path).expect("a file");
    mount.keep_opens(Arc::new(keeper.into()));
    let opens = || std::fs::read(&path).expect("read");
    assert_eq!(opens(), 0_u64.to_ne_bytes());
    let files = [(); 2].map(|()| File::open(&mounted.file).expect("opened"));
    assert_eq!(opens(), 2_u64.to_ne_bytes());
    drop(files);
    until("it is closed", || opens() == 0_u64.to_ne_bytes());
    std::fs::remove_file(&path).expect("removed");
}

#[test]
fn a_file_that_is_open_is_in_use() {
    // tests [NB-37]
    let Some(mounted) = mount("use", 1 << 20, FuseOptions::default()) else { return };
    let mount = mounted.mount.as_ref().expect("mounted");
    // Listings and stat do not count as uses.
    assert_eq!(std::fs::read_dir(&mounted.dir).expect("listed").count(), 1);
    assert_eq!(std::fs::metadata(&mounted.file).expect("there").len(), 1 << 20);
    assert_eq!(mount.opens(), 0);
    let files = [(); 2].map(|()| File::open(&mounted.file).expect("opened"));
    assert_eq!(mount.opens(), 2);
    assert!(!mount.disable_if_unused());
    let [first, second] = files;
    let again = second.try_clone().expect("the same open file");
    drop((first, second));
    until("one is closed", || mount.opens() == 1);
    assert!(!mount.disable_if_unused());
    // A refused `disable_if_unused` changes nothing: the file can still be opened.
    drop(File::open(&mounted.file).expect("opened"));
    drop(again);
    until("nobody uses it", || mount.disable_if_unused());
    let refused = File::open(&mounted.file).map_err(|error| error.raw_os_error());
    assert_eq!(refused.err(), Some(Some(libc::ENODEV)));
    assert!(mount.disable_if_unused(), "it is disabled already");
    mount.enable();
    drop(File::open(&mounted.file).expect("opened"));
}

/// A file that is read past the page cache, by requests that are answered later.
struct Direct {
    file: File,
    ring: IoUring,
}

impl Direct {
    /// `None` where the system has no such requests.
    fn open(path: &Path) -> Option<Self> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
        match IoUring::new(2) {
            Ok(ring) => Some(Self { file: file.expect("opened"), ring }),
            Err(error) => {
                eprintln!("skipped: no io_uring: {error}");
                None
            }
        }
    }

    /// Reads 4096 bytes; returns the number read.
    fn read(&mut self, offset: u64) -> i32 {
        let mut memory = vec![0_u8; 8192];
        let at = memory.as_ptr().align_offset(4096);
        let fd = types::Fd(self.file.as_raw_fd());
        let read = opcode::Read::new(fd, memory[at..].as_mut_ptr(), 4096).offset(offset).build();
        // SAFETY: the memory is there until the request was answered, which is waited for.
        unsafe { self.ring.submission().push(&read) }.expect("room");
        self.ring.submit_and_wait(1).expect("answered");
        self.ring.completion().next().expect("an answer").result()
    }
}

#[test]
fn who_truncates_the_file_takes_nothing_from_those_who_read() {
    let Some(mounted) = mount("trunc", 8 << 20, FuseOptions::default()) else { return };
    let Some(mut direct) = Direct::open(&mounted.file) else { return };
    let end = (8 << 20) - 4096;
    assert_eq!((direct.read(0), direct.read(end)), (4096, 4096));
    let mut truncate = OpenOptions::new();
    truncate.write(true).truncate(true);
    let file = truncate.open(&mounted.file).expect("opened");
    assert_eq!((direct.read(0), direct.read(end)), (4096, 4096), "while it is open");
    drop(file);
    assert_eq!((direct.read(0), direct.read(end)), (4096, 4096), "and after");
    // Common programs that write the file.
    let image = mounted.dir.with_extension("image");
    std::fs::write(&image, [9; 100_000]).expect("an image");
    let (from, to) = (image.display().to_string(), mounted.file.display().to_string());
    let (code, text) = run("cp", &[&from, &to]).expect("cp");
    assert_eq!(code, 0, "{text}");
    let (from, to) = (format!("if={from}"), format!("of={to}"));
    let (code, text) = run("dd", &[&from, &to, "bs=4k", "status=none"]).expect("dd");
    assert_eq!(code, 0, "{text}");
    std::fs::remove_file(&image).expect("removed");
    assert_eq!((direct.read(0), direct.read(end)), (4096, 4096), "after cp and dd");
    let mut out = [0; 2];
    File::open(&mounted.file).expect("opened").read_exact_at(&mut out, 99_999).expect("read");
    assert_eq!(out, [9, 0]);
    // Readers are not delayed by many threads that open and close the file.
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let _end = Stop(&stop);
        threads.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                drop(truncate.open(&mounted.file).expect("opened"));
            }
        });
        let short = (0..2000).filter(|_| direct.read(0) != 4096).count();
        assert_eq!(short, 0, "reads that ended at the first byte");
    });
}

#[test]
fn a_mount_that_finishes_takes_no_more_changes() {
    let Some(mounted) = mount("finishes", 1 << 20, FuseOptions::default()) else { return };
    let file = File::options().read(true).write(true).open(&mounted.file).expect("opened");
    let mount = mounted.mount.as_ref().expect("mounted");
    let written = AtomicU64::new(0);
    let errno = std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            loop {
                match file.write_at(&[7; 4096], 0) {
                    Ok(_) => written.fetch_add(1, Ordering::SeqCst),
                    Err(error) => return error.raw_os_error(),
                };
            }
        });
        while written.load(Ordering::SeqCst) < 10 {
            std::thread::yield_now();
        }
        mount.finish();
        while !mount.is_unchanging() {
            std::thread::yield_now();
        }
        writer.join().expect("it ends")
    });
    assert_eq!(errno, Some(libc::EIO));
    // Parts of blocks take memory, which is free again after a refusal.
    for n in 0..10_000 {
        let error = file.write_at(&[1; 700], n % 100).expect_err("refused");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    file.sync_data().expect("flushed");
    let mut out = [0; 4096];
    file.read_exact_at(&mut out, 0).expect("read");
    assert_eq!(out, [7; 4096]);
    let error = File::open(&mounted.file).expect_err("no more opens");
    assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
}

/// Ends the threads that check this flag, also when the test fails, which would hang otherwise.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_disk_that_grew_is_read_to_its_end() {
    let Some(mounted) = mount("grown", 4 << 20, FuseOptions::default()) else { return };
    let Some(mut direct) = Direct::open(&mounted.file) else { return };
    assert_eq!((direct.read(0), direct.read(4 << 20)), (4096, 0));
    mounted.store.set_len(8 << 20).expect("grown");
    mounted.disk.resize().expect("looked at");
    // The system notices a moment later.
    let start = std::time::Instant::now();
    while direct.read(4 << 20) == 0 {
        assert!(start.elapsed().as_secs() < 20, "it never grew");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert_eq!(direct.read((8 << 20) - 4096), 4096);
    assert_eq!(direct.read(8 << 20), 0);
}

/// A disk that loses its last half while it is written.
struct Shrinking(AtomicU64);

impl Backend for Shrinking {
    fn limits(&self) -> Limits {
        Limits::plain(self.0.load(Ordering::SeqCst))
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            self.0.store(1 << 20, Ordering::SeqCst);
            done.done(&[BackendResult { token: io.token, errno: 0, direct: None }]);
        }
    }

    fn resize(&self) -> std::io::Result<u64> {
        Ok(self.0.load(Ordering::SeqCst))
    }
}

#[test]
fn what_a_disk_that_shrinks_did_not_take_is_not_reported() {
    let dir = std::env::temp_dir().join(format!("bowline-shrinks-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a directory");
    let store = Arc::new(Shrinking(AtomicU64::new(0)));
    let disk = LocalDevice::new("disk", store.clone());
    match fuse::mount(disk, &dir, "disk.img", FuseOptions::default()) {
        Ok(mount) => {
            let file = OpenOptions::new().write(true).open(dir.join("disk.img")).expect("opened");
            let write = |offset| {
                store.0.store(2 << 20, Ordering::SeqCst);
                file.write_at(&[1; 8192], offset).map_err(|error| error.raw_os_error())
            };
            assert_eq!(write(0), Ok(8192));
            assert_eq!(write((1 << 20) - 4096), Ok(4096));
            assert_eq!(write(1 << 20), Err(Some(libc::ENOSPC)));
            drop((file, mount));
        }
        Err(error) => skipped::without_fuse(error),
    }
    std::fs::remove_dir(&dir).expect("removed");
}

/// A disk of any size that stores nothing.
struct Vast(u64);

impl Backend for Vast {
    fn limits(&self) -> Limits {
        Limits { logical: 4096, write_cache: true, ..Limits::plain(self.0) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            let errno = if self.limits().holds(io.offset, io.len.into()) { 0 } else { -libc::EIO };
            done.done(&[BackendResult { token: io.token, errno, direct: None }]);
        }
    }

    fn resize(&self) -> std::io::Result<u64> {
        Ok(self.0)
    }
}

#[test]
fn the_largest_disk_is_a_file_and_so_is_an_empty_one() {
    // tests [NB-30]
    let largest = Limits::BYTES_MAX - Limits::BYTES_MAX % 4096;
    for bytes in [largest, 0] {
        let dir = std::env::temp_dir().join(format!("bowline-vast-{}", std::process::id()));
        std::fs::create_dir(&dir).expect("a directory");
        let disk = LocalDevice::new("disk", Arc::new(Vast(bytes)));
        match fuse::mount(disk, &dir, "disk.img", FuseOptions::default()) {
            Ok(mount) => {
                let path = dir.join("disk.img");
                let file = OpenOptions::new().read(true).write(true).open(path).expect("opened");
                assert_eq!(file.metadata().expect("looked at").len(), bytes);
                // The system takes no request that ends beyond the largest offset.
                let mut out = [1; 100];
                let from = bytes.saturating_sub(100);
                let there = bytes.min(100) as usize;
                assert_eq!(file.read_at(&mut out, from).expect("read"), there);
                if bytes > 0 {
                    file.write_all_at(&[1; 100], from).expect("written");
                    file.sync_all().expect("flushed");
                } else {
                    let error = file.write_at(&[1; 100], 0).expect_err("no room");
                    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
                }
                drop((file, mount));
            }
            Err(error) => skipped::without_fuse(error),
        }
        std::fs::remove_dir(&dir).expect("removed");
    }
}
