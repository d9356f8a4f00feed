//! Storage implemented by the program: the requests it gets, its errors, and requests it does not
//! answer.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult, BackendSpec};
use bowline_block::sync::{self, Durable};
use bowline_block::{BlockDevice, DiskDone, DiskIo, Errno, IoOp, Limits};
use bowline_rnbd::client::Config;
use bowline_rnbd_driver::tree;
use bowline_rnbd_driver::{Disk, Exports, FileOptions, MapOptions};
use bowline_verbs::Buffer;
use bowline_wire::rnbd::Access;
use common::{Rig, memory, pattern, state};

const MIB: u64 = 1 << 20;

fn memory_and_file() -> Exports {
    let path = std::env::temp_dir().join(format!("bowline-storage-file-{}", std::process::id()));
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let mut exports = memory(MIB);
    let added = exports.file("file", &path, FileOptions::default());
    std::fs::remove_file(&path).unwrap();
    added.unwrap();
    exports
}

type Held = Vec<(u64, Arc<dyn BackendDone>)>;

/// Storage that fails or holds requests as the test sets it.
struct Faulty {
    errno: std::sync::atomic::AtomicI32,
    hold: std::sync::Mutex<Option<Held>>,
}

impl Faulty {
    /// Tells whether it holds `count` requests.
    fn holds(&self, count: usize) -> bool {
        self.hold.lock().unwrap().as_ref().is_some_and(|held| held.len() == count)
    }
}

impl Backend for Faulty {
    fn limits(&self) -> Limits {
        Limits { write_cache: true, ..Limits::plain(MIB) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        let errno = self.errno.load(std::sync::atomic::Ordering::SeqCst);
        for io in io.drain(..) {
            match &mut *self.hold.lock().unwrap() {
                Some(held) => held.push((io.token, Arc::clone(done))),
                None => done.done(&[BackendResult { token: io.token, errno, direct: None }]),
            }
        }
    }

    fn resize(&self) -> std::io::Result<u64> {
        Ok(MIB)
    }
}

#[test]
fn errors_of_storage_reach_the_request_they_belong_to() {
    // tests [NB-26] [NB-23]
    let faulty = Arc::new(Faulty { errno: 0.into(), hold: Default::default() });
    let mut exports = Exports::new();
    exports.backend("faulty", Arc::clone(&faulty) as Arc<dyn Backend>).unwrap();
    let rig = Rig::new(9, exports);
    let disk = rig.map("faulty", &rig.options("faulty")).unwrap();
    for (stored, seen) in [(28, 28), (61, 61), (13, 5), (95, 95)] {
        faulty.errno.store(-stored, std::sync::atomic::Ordering::SeqCst);
        let result = sync::write_at(&*disk, 0, &[0; 512], Durable::Later);
        assert_eq!(result, Err(Errno(seen)), "{stored}");
    }
    faulty.errno.store(0, std::sync::atomic::Ordering::SeqCst);
    sync::write_at(&*disk, 0, &[0; 512], Durable::Now).unwrap();
    assert_eq!(state(&disk), "open");
}

/// Storage that supports secure erase, by overwriting memory, and records the requests.
struct Eraser {
    memory: Arc<dyn Backend>,
    asked: std::sync::Mutex<Vec<(u64, u32)>>,
}

impl Backend for Eraser {
    fn limits(&self) -> Limits {
        Limits { secure_erase: true, ..self.memory.limits() }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.iter_mut().filter(|io| io.op == IoOp::SecureErase) {
            self.asked.lock().unwrap().push((io.offset, io.len));
            io.op = IoOp::WriteZeroes;
        }
        self.memory.submit(io, done);
    }

    fn region(&self) -> Option<Arc<Buffer>> {
        self.memory.region()
    }

    fn resize(&self) -> std::io::Result<u64> {
        self.memory.resize()
    }
}

#[test]
fn secure_erase_reaches_storage_that_supports_it() {
    // tests [NB-9] [NB-12] [NB-25] [NB-30] [NB-59]
    let spec = BackendSpec::Memory { bytes: 16 * MIB, block: 512 };
    let memory = bowline_block::backend::open(spec).unwrap();
    let eraser = Arc::new(Eraser { memory, asked: Default::default() });
    let mut exports = memory_and_file();
    exports.backend("eraser", Arc::clone(&eraser) as Arc<dyn Backend>).unwrap();
    let rig = Rig::new(27, exports);
    let options = rig.options("erase");
    let erase = |disk: &Disk, offset, len| {
        sync::call(disk, IoOp::SecureErase, offset, len, None, Durable::Later)
    };
    let disk = rig.map("eraser", &options).unwrap();
    assert!(disk.limits().secure_erase);
    sync::write_at(&*disk, 0, &pattern(16 << 20, 5), Durable::Later).unwrap();
    erase(&disk, MIB, 10 << 20).unwrap();
    let mut out = vec![1; 16 << 20];
    sync::read_at(&*disk, 0, &mut out).unwrap();
    let (mut wanted, (from, to)) = (pattern(16 << 20, 5), (1 << 20, 11 << 20));
    wanted[from..to].fill(0);
    assert!(out == wanted, "all of that, and nothing else");
    let mut asked = std::mem::take(&mut *eraser.asked.lock().unwrap());
    asked.sort_unstable();
    assert_eq!(asked, [(MIB, 4 << 20), (5 * MIB, 4 << 20), (9 * MIB, 2 << 20)]);
    assert_eq!(erase(&disk, 100, 512), Err(Errno::EINVAL));
    assert_eq!(erase(&disk, 16 * MIB - 512, 1024), Err(Errno::EIO));
    rig.client.unmap(&disk).unwrap();
    let ro = rig.map("eraser", &MapOptions { access: Access::Ro, ..options.clone() }).unwrap();
    assert_eq!(erase(&ro, 0, 512), Err(Errno::EPERM));
    // Memory may have been swapped out, and file blocks moved: neither offers secure erase.
    for name in ["disk0", "file"] {
        let disk = rig.map(name, &options).unwrap();
        assert!(disk.limits().discard.is_some() && !disk.limits().secure_erase, "{name}");
        assert_eq!(erase(&disk, 0, 512), Err(Errno::EOPNOTSUPP), "{name}");
    }
    assert_eq!(*eraser.asked.lock().unwrap(), []);
}

#[test]
fn zeroes_that_must_stay_allocated_stay_so() {
    // tests [NB-57] [NB-47]: written as data, or by a server that knows the flag
    struct Answers(std::sync::mpsc::Sender<i32>);
    impl DiskDone for Answers {
        fn done(&self, results: &[(u64, i32)]) {
            results.iter().for_each(|(_, errno)| self.0.send(*errno).unwrap());
        }
    }
    let path = std::env::temp_dir().join(format!("bowline-zeroes-{}", std::process::id()));
    std::fs::write(&path, pattern(4 << 20, 1)).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let mut exports = Exports::new();
    exports.file("disk0", &path, FileOptions::default()).unwrap();
    let rig = Rig::new(25, exports);
    std::fs::remove_file(&path).unwrap();
    file.sync_all().unwrap();
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
    let full = blocks();
    for (n, nounmap) in [(0, false), (1, true)] {
        let io = Config { nounmap, io_timeout: Some(Duration::from_secs(20)), ..Config::default() };
        let disk = rig.map("disk0", &MapOptions { io, ..rig.options("zeroes") }).unwrap();
        let (told, answers) = std::sync::mpsc::channel();
        let mut io = DiskIo::write_zeroes(n * MIB, 1 << 20, Arc::new(Answers(told)));
        io.nounmap = true;
        disk.submit(&mut vec![io]);
        assert_eq!(answers.recv_timeout(Duration::from_secs(20)), Ok(0));
        sync::flush(&*disk).unwrap();
        let mut out = vec![1; 1 << 20];
        sync::read_at(&*disk, n * MIB, &mut out).unwrap();
        assert!(out.iter().all(|byte| *byte == 0));
        assert_eq!(blocks(), full, "with the flag: {nounmap}");
        rig.client.unmap(&disk).unwrap();
    }
}

#[test]
fn every_remap_ends() {
    // tests [NB-37] [NB-16]: while storage holds a request
    let faulty = Arc::new(Faulty { errno: 0.into(), hold: Some(Vec::new()).into() });
    let mut exports = memory(MIB);
    exports.memory("disk1", MIB, 512).unwrap();
    exports.backend("slow", Arc::clone(&faulty) as Arc<dyn Backend>).unwrap();
    let rig = Rig::new(26, exports);
    let options = rig.options("beside");
    let [slow, gone, back] =
        ["slow", "disk0", "disk1"].map(|name| rig.map(name, &options).unwrap());
    let reads = |disk: &Disk| sync::read_at(disk, 0, &mut [0; 512]);
    for disk in [&gone, &back] {
        tree::Exports::force_close(&*rig.server, disk.name(), "beside").unwrap();
        assert_eq!(reads(disk), Err(Errno::EIO));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| reads(&slow).unwrap());
        rig.until("storage has the request", || faulty.holds(1));
        let (told, answers) = std::sync::mpsc::channel();
        for _ in 0..2 {
            let (told, gone) = (told.clone(), &gone);
            scope.spawn(move || told.send(gone.remap()).unwrap());
        }
        let answer = || answers.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(answer(), Err(Errno::EBUSY), "the other one is under way");
        rig.client.unmap(&gone).unwrap();
        assert_eq!(answer(), Err(Errno::ENODEV));
        assert_eq!(back.remap(), Err(Errno::EBUSY), "the request does not end");
        let held = faulty.hold.lock().unwrap().take().unwrap();
        for (token, done) in held {
            done.done(&[BackendResult { token, errno: 0, direct: None }]);
        }
    });
    back.remap().unwrap();
    reads(&back).unwrap();
}

#[test]
fn a_request_that_storage_holds_is_answered_by_the_timeout() {
    // tests [NB-28] [NB-20]
    let hold = std::sync::Mutex::new(Some(Vec::new()));
    let faulty = Arc::new(Faulty { errno: 0.into(), hold });
    let mut exports = Exports::new();
    exports.backend("slow", Arc::clone(&faulty) as Arc<dyn Backend>).unwrap();
    let rig = Rig::new(10, exports);
    // Longer than any stall of a busy machine: the next request must not time out.
    let io = Config { io_timeout: Some(Duration::from_secs(1)), ..Config::default() };
    let disk = rig.map("slow", &MapOptions { io, ..rig.options("slow") }).unwrap();
    assert_eq!(sync::call(&*disk, IoOp::Flush, 0, 0, None, Durable::Later), Err(Errno::ETIMEDOUT));
    rig.until("storage has the request", || faulty.holds(1));
    let held = faulty.hold.lock().unwrap().take().unwrap();
    assert_eq!((held.len(), rig.server.in_flight()), (1, 1));
    for (token, done) in held {
        done.done(&[BackendResult { token, errno: 0, direct: None }]);
    }
    sync::flush(&*disk).unwrap();
    rig.client.unmap(&disk).unwrap();
    assert_eq!(rig.server.in_flight(), 0);
}

#[test]
fn memory_of_a_timed_out_request_returns_to_the_program() {
    // tests [NB-28]
    struct Answers(std::sync::mpsc::Sender<i32>);
    impl DiskDone for Answers {
        fn done(&self, results: &[(u64, i32)]) {
            results.iter().for_each(|(_, errno)| self.0.send(*errno).unwrap());
        }
    }
    let hold = std::sync::Mutex::new(Some(Vec::new()));
    let faulty = Arc::new(Faulty { errno: 0.into(), hold });
    let mut exports = Exports::new();
    exports.backend("slow", Arc::clone(&faulty) as Arc<dyn Backend>).unwrap();
    let rig = Rig::new(21, exports);
    // Longer than any stall of a busy machine: the next request must not time out.
    let io = Config { io_timeout: Some(Duration::from_secs(1)), ..Config::default() };
    let disk = rig.map("slow", &MapOptions { io, ..rig.options("slow") }).unwrap();
    let memory = disk.memory(8192).unwrap();
    let (told, answers) = std::sync::mpsc::channel();
    let done: Arc<dyn DiskDone> = Arc::new(Answers(told));
    let read = |at| DiskIo::read(0, &memory, at..at + 4096, Arc::clone(&done));
    disk.submit(&mut vec![read(4096)]);
    assert_eq!(answers.recv_timeout(Duration::from_secs(20)), Ok(Errno::ETIMEDOUT.neg()));
    memory.mem.buffer.write(memory.mem.offset, &[7; 8192]);
    rig.until("storage has the request", || faulty.holds(1));
    let held = faulty.hold.lock().unwrap().take().unwrap();
    assert_eq!(held.len(), 1, "the server has it still");
    for (token, done) in held {
        done.done(&[BackendResult { token, errno: 0, direct: None }]);
    }
    // A read that ends in time fills only its own range.
    disk.submit(&mut vec![read(0)]);
    assert_eq!(answers.recv_timeout(Duration::from_secs(20)), Ok(0));
    let mut bytes = [0; 8192];
    memory.mem.buffer.read(memory.mem.offset, &mut bytes);
    assert!(bytes[..4096].iter().all(|byte| *byte != 7), "read in time");
    assert!(bytes[4096..].iter().all(|byte| *byte == 7), "what came late went elsewhere");
    // Memory of another disk, or memory that is too short, is refused.
    let mut elsewhere = read(0);
    elsewhere.mem = Some((9999, 0));
    disk.submit(&mut vec![read(8192 - 512), elsewhere]);
    for _ in 0..2 {
        assert_eq!(answers.recv_timeout(Duration::from_secs(20)), Ok(Errno::EINVAL.neg()));
    }
    rig.client.unmap(&disk).unwrap();
}

/// Storage that records what it is asked, for whom, and what becomes of it.
#[derive(Default)]
struct Recorder(std::sync::Mutex<Vec<(&'static str, u64)>>);

impl Recorder {
    fn take(&self) -> Vec<(&'static str, u64)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Backend for Recorder {
    fn limits(&self) -> Limits {
        Limits { write_cache: true, ..Limits::plain(MIB) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            let what = if io.op == IoOp::Flush { "flush" } else { "write" };
            self.0.lock().unwrap().push((what, io.user));
            done.done(&[BackendResult::new(io.token, Ok(()))]);
        }
    }

    fn begin_close(&self) {
        self.0.lock().unwrap().push(("begin", 0));
    }

    fn close(&self) -> std::io::Result<()> {
        self.0.lock().unwrap().push(("close", 0));
        Err(std::io::ErrorKind::TimedOut.into())
    }

    fn take_notices(&self) -> Vec<String> {
        vec!["it is slow".to_owned()]
    }
}

#[test]
fn storage_knows_its_users_by_their_sessions_and_is_closed_at_the_end() {
    // tests [NB-77]
    let recorder = Arc::new(Recorder::default());
    let mut exports = Exports::new();
    exports.backend("disk", Arc::clone(&recorder) as Arc<dyn Backend>).unwrap();
    let rig = Rig::new(34, exports);
    let user = |session: &str| {
        let disk = rig.map("disk", &rig.options(session)).unwrap();
        // Without FUA, this is a write and a flush.
        sync::write_at(&*disk, 0, &[0; 512], Durable::Now).unwrap();
        rig.client.unmap(&disk).unwrap();
        let got = recorder.take();
        let [("write", user), ("flush", flusher)] = got[..] else { panic!("{got:?}") };
        assert_eq!(user, flusher);
        user
    };
    let (one, other) = (user("one"), user("other"));
    assert_ne!(one, other);
    assert_eq!(user("one"), one, "it has connected again");
    assert_eq!(rig.server.take_notices(), [("disk".to_owned(), "it is slow".to_owned())]);
    rig.client.close();
    let errors = rig.server.close();
    assert_eq!(recorder.take(), [("begin", 0), ("close", 0)]);
    assert!(errors[0].to_string().contains("closing export disk"), "{errors:?}");
}
