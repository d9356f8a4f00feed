use std::fs::{File as StdFile, OpenOptions};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::*;

#[cfg(feature = "fuse")]
mod flush;

/// A file that is gone at the end of the test.
struct Temp(PathBuf);

impl Temp {
    fn new(name: &str, bytes: u64) -> (Self, StdFile) {
        Self::at(std::env::temp_dir(), name, bytes)
    }

    fn at(dir: PathBuf, name: &str, bytes: u64) -> (Self, StdFile) {
        // Tests run at the same time, and some use the same names.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("bowline-block-{name}-{}-{number}", std::process::id()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        file.set_len(bytes).unwrap();
        (Self(path), file)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

struct Answers {
    sender: Mutex<Sender<BackendResult>>,
}

impl BackendDone for Answers {
    fn done(&self, results: &[BackendResult]) {
        for result in results {
            let _ = self.sender.lock().unwrap().send(*result);
        }
    }
}

/// A store and its answers.
struct Store {
    backend: Arc<dyn Backend>,
    done: Arc<dyn BackendDone>,
    answers: Receiver<BackendResult>,
    buffer: Arc<Buffer>,
}

impl Store {
    fn new(backend: Arc<dyn Backend>) -> Self {
        let (sender, answers) = channel();
        let done = Arc::new(Answers { sender: Mutex::new(sender) });
        Self { backend, done, answers, buffer: Arc::new(Buffer::new(4 << 20).unwrap()) }
    }

    fn io(&self, op: IoOp, offset: u64, len: u32, mem_at: usize) -> BackendIo {
        let mem = Mem { buffer: self.buffer.clone(), offset: mem_at, len: len as usize };
        BackendIo {
            token: offset,
            op,
            offset,
            len,
            fua: false,
            nounmap: false,
            prio: 0x4004,
            user: 0,
            mem: op.has_data().then_some(mem),
        }
    }

    fn run(&self, io: BackendIo) -> BackendResult {
        let token = io.token;
        self.backend.submit(&mut vec![io], &self.done);
        self.backend.kick();
        let result = self.answers.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(result.token, token);
        result
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> i32 {
        self.buffer.write(0, bytes);
        self.run(self.io(IoOp::Write, offset, bytes.len() as u32, 0)).errno
    }

    fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, i32> {
        let at = 2 << 20;
        self.buffer.write(at, &vec![0xee; len]);
        let result = self.run(self.io(IoOp::Read, offset, len as u32, at));
        if result.errno != 0 {
            return Err(result.errno);
        }
        let mut out = Vec::new();
        match result.direct {
            Some(from) => {
                self.backend.region().unwrap().append_to(from as usize, len, &mut out);
            }
            None => self.buffer.append_to(at, len, &mut out),
        }
        Ok(out)
    }

    fn op(&self, op: IoOp, offset: u64, len: u32) -> i32 {
        self.run(self.io(op, offset, len, 0)).errno
    }
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) ^ (i >> 8) as u8).collect()
}

fn memory(bytes: u64) -> Store {
    Store::new(open(BackendSpec::Memory { bytes, block: 512 }).unwrap())
}

/// Every kind of store that keeps what is written.
fn stores(bytes: u64) -> Vec<(&'static str, Store, Option<Temp>)> {
    let file = |name, direct| {
        let (temp, file) = Temp::new(name, bytes);
        let spec = BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct };
        (name, Store::new(open(spec).unwrap()), Some(temp))
    };
    let (temp, threads) = Temp::new("threads", bytes);
    let threads = file::File::by_threads(threads.into(), 512, true).unwrap();
    vec![
        ("memory", memory(bytes), None),
        file("direct", true),
        file("buffered", false),
        ("threads", Store::new(Arc::new(threads)), Some(temp)),
    ]
}

#[test]
fn every_store_keeps_what_is_written() {
    for (name, store, _temp) in stores(8 << 20) {
        let data = pattern(3, 300 * 512);
        assert_eq!(store.write(512 * 7, &data), 0, "{name}");
        assert_eq!(store.read(512 * 7, data.len()).unwrap(), data, "{name}");
        let around = store.read(512 * 6, 512 * 2).unwrap();
        assert_eq!((&around[..512], &around[512..]), (&[0; 512][..], &data[..512]), "{name}");
        assert_eq!(
            store.op(IoOp::Flush, u64::MAX, 0),
            0,
            "{name}: the sector of a flush is ignored"
        );
        assert_eq!(store.op(IoOp::WriteZeroes, 512 * 10, 1 << 20), 0, "{name}");
        let left = store.read(512 * 7, data.len()).unwrap();
        assert_eq!(&left[..512 * 3], &data[..512 * 3], "{name}");
        assert!(left[512 * 3..].iter().all(|byte| *byte == 0), "{name}");
        let last = pattern(9, 512);
        assert_eq!(store.write((8 << 20) - 512, &last), 0, "{name}");
        assert_eq!(store.read((8 << 20) - 512, 512).unwrap(), last, "{name}");
        assert_eq!(store.write(0, &pattern(5, 65536)), 0, "{name}");
        assert_eq!(store.op(IoOp::Discard, 0, 65536), 0, "{name}");
        assert_eq!(store.read(0, 65536).unwrap(), vec![0; 65536], "{name}: holes read as zeroes");
    }
}

#[test]
fn reads_and_writes_are_as_long_as_their_memory() {
    for (name, mut store, _temp) in stores(16 << 20) {
        store.buffer = Arc::new(Buffer::new(16 << 20).unwrap());
        let data = pattern(7, (3 << 20) + 512);
        for at in [0, 1] {
            store.buffer.write(at, &data);
            let write = store.io(IoOp::Write, 1536, data.len() as u32, at);
            assert_eq!(store.run(write).errno, 0, "{name}: from {at}");
            let read = store.io(IoOp::Read, 1536, data.len() as u32, (8 << 20) + at);
            let result = store.run(read);
            assert_eq!(result.errno, 0, "{name}: to {at}");
            let (buffer, from) = match result.direct {
                Some(from) => (store.backend.region().unwrap(), from as usize),
                None => (store.buffer.clone(), (8 << 20) + at),
            };
            let mut back = Vec::new();
            buffer.append_to(from, data.len(), &mut back);
            assert!(back == data, "{name}: {at}");
        }
    }
}

#[test]
fn what_is_wrong_is_refused_with_the_errno_of_a_block_device() {
    // tests [NB-24] [NB-25]
    for (name, store, _temp) in stores(1 << 20) {
        let end = 1 << 20;
        assert_eq!(store.read(end, 512), Err(-libc::EIO), "{name}: past the end");
        assert_eq!(store.read(end - 512, 1024), Err(-libc::EIO), "{name}: across the end");
        assert_eq!(store.write(u64::MAX - 511, &[0; 512]), -libc::EIO, "{name}: overflow");
        assert_eq!(store.write(100, &[0; 512]), -libc::EINVAL, "{name}: offset");
        assert_eq!(store.write(512, &[0; 100]), -libc::EINVAL, "{name}: length");
        assert_eq!(store.op(IoOp::SecureErase, 0, 512), -libc::EOPNOTSUPP, "{name}");
        let mut bare = store.io(IoOp::Write, 0, 512, 0);
        bare.mem = None;
        assert_eq!(store.run(bare).errno, -libc::EINVAL, "{name}: no data");
        let mut short = store.io(IoOp::Write, 0, 512, 0);
        short.mem.as_mut().unwrap().len = 511;
        assert_eq!(store.run(short).errno, -libc::EINVAL, "{name}: less memory than data");
        let long = store.io(IoOp::Read, 0, 2 << 20, 0);
        assert_eq!(store.run(long).errno, -libc::EIO, "{name}: longer than the store");
        assert_eq!(store.read(0, 0), Ok(vec![]), "{name}: nothing is always there");
    }
}

#[test]
fn a_batch_larger_than_the_ring_is_answered_once_each() {
    for (name, store, _temp) in stores(8 << 20) {
        let mut batch: Vec<_> = (0..2000_u64)
            .map(|i| store.io(IoOp::Write, i * 4096, 4096, (i as usize % 512) * 4096))
            .collect();
        store.backend.submit(&mut batch, &store.done);
        store.backend.kick();
        assert!(batch.is_empty());
        let mut tokens: Vec<_> = (0..2000)
            .map(|_| {
                let result = store.answers.recv_timeout(Duration::from_secs(30)).unwrap();
                assert_eq!(result.errno, 0, "{name}");
                result.token
            })
            .collect();
        tokens.sort_unstable();
        assert!(tokens.iter().enumerate().all(|(i, token)| *token == i as u64 * 4096), "{name}");
        assert!(store.answers.try_recv().is_err(), "{name}: nothing twice");
    }
}

#[test]
fn requests_of_a_thread_that_ended_are_executed() {
    let (_temp, file) = Temp::new("ended", 64 << 20);
    let spec = BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct: true };
    let store = Store::new(open(spec).unwrap());
    let (backend, done) = (store.backend.clone(), store.done.clone());
    let mut batch: Vec<_> = (0..500)
        .map(|i| BackendIo { fua: true, ..store.io(IoOp::Write, i << 16, 1 << 16, 0) })
        .collect();
    std::thread::spawn(move || {
        backend.submit(&mut batch, &done);
        backend.kick();
    })
    .join()
    .unwrap();
    for _ in 0..500 {
        assert_eq!(store.answers.recv_timeout(Duration::from_secs(30)).unwrap().errno, 0);
    }
}

#[test]
fn direct_io_takes_a_way_round_for_memory_at_odd_addresses() {
    let (_temp, file) = Temp::new("odd", 1 << 20);
    let backend = Arc::new(file::File::new(file.into(), false, 512, true).unwrap());
    assert!(
        backend.is_direct() && backend.is_over_ring(),
        "the file system of TMPDIR has direct IO"
    );
    let store = Store::new(backend);
    let data = pattern(1, 8192);
    store.buffer.write(1, &data);
    assert_eq!(store.run(store.io(IoOp::Write, 0, 8192, 1)).errno, 0);
    assert_eq!(store.run(store.io(IoOp::Read, 0, 8192, 100_003)).errno, 0);
    let mut back = vec![0; 8192];
    store.buffer.read(100_003, &mut back);
    assert_eq!(back, data);
}

#[test]
fn a_file_cut_short_gives_eio_and_the_session_goes_on() {
    for direct in [true, false] {
        let (temp, file) = Temp::new(if direct { "short-d" } else { "short-b" }, 1 << 20);
        let spec = BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct };
        let store = Store::new(open(spec).unwrap());
        assert_eq!(store.write(0, &pattern(1, 65536)), 0);
        // Someone else cuts the file, within a sector.
        OpenOptions::new().write(true).open(&temp.0).unwrap().set_len(4096 + 100).unwrap();
        assert_eq!(store.read(0, 65536), Err(-libc::EIO));
        assert_eq!(store.read(512 << 8, 4096), Err(-libc::EIO));
        assert_eq!(store.read(0, 4096).unwrap(), pattern(1, 65536)[..4096]);
        // Once that is looked at, the size is that of whole blocks.
        assert_eq!(store.backend.resize().unwrap(), 4096);
        assert_eq!(store.backend.limits().bytes, 4096);
        assert_eq!(store.write(8192, &[0; 512]), -libc::EIO);
    }
}

#[test]
fn a_file_that_disappears_serves_until_it_is_closed() {
    let (temp, file) = Temp::new("unlinked", 1 << 20);
    let spec = BackendSpec::File { fd: file.into(), read_only: false, block: 4096, direct: true };
    let store = Store::new(open(spec).unwrap());
    drop(temp);
    assert_eq!(store.write(4096, &pattern(2, 4096)), 0);
    assert_eq!(store.read(4096, 4096).unwrap(), pattern(2, 4096));
    assert_eq!(store.op(IoOp::Flush, 0, 0), 0);
}

#[test]
fn read_only_files_are_not_written_and_wrong_ones_not_opened() {
    let (temp, file) = Temp::new("ro", 1 << 20);
    let open_as = |read_only, block, fd: StdFile| {
        open(BackendSpec::File { fd: fd.into(), read_only, block, direct: true })
            .map_err(|e| e.raw_os_error())
    };
    let store = Store::new(open_as(true, 512, StdFile::open(&temp.0).unwrap()).unwrap());
    assert!(store.backend.limits().read_only);
    for op in [IoOp::Write, IoOp::Discard, IoOp::WriteZeroes] {
        assert_eq!(store.op(op, 0, 512), -libc::EPERM);
    }
    assert_eq!(store.read(0, 512).unwrap(), vec![0; 512]);
    assert_eq!(store.op(IoOp::Flush, 0, 0), 0);
    let refused = |result: Result<Arc<dyn Backend>, Option<i32>>| result.err().flatten();
    let read = StdFile::open(&temp.0).unwrap();
    assert_eq!(refused(open_as(false, 512, read)), Some(libc::EACCES));
    assert_eq!(refused(open_as(false, 1000, file)), Some(libc::EINVAL));
    let dir = StdFile::open(std::env::temp_dir()).unwrap();
    assert_eq!(refused(open_as(true, 512, dir)), Some(libc::ENOTBLK));
    let null = StdFile::open("/dev/null").unwrap();
    assert_eq!(refused(open_as(true, 512, null)), Some(libc::ENOTBLK));
}

#[test]
fn zeroes_are_written_where_the_file_system_has_no_other_way() {
    // The job alone: a file system that refuses both calls, and gives short writes.
    let (sender, _answers) = channel();
    let done: Arc<dyn BackendDone> = Arc::new(Answers { sender: Mutex::new(sender) });
    let zeroes = Buffer::new(1 << 16).unwrap();
    let io = BackendIo {
        token: 9,
        op: IoOp::WriteZeroes,
        offset: 4096,
        len: 100_352,
        fua: true,
        nounmap: false,
        prio: 0x2001,
        user: 0,
        mem: None,
    };
    let mut job = job::Job::new(io, &done, 512, true).unwrap();
    assert_eq!(job.priority(), 0, "real-time priority is not passed on");
    assert_eq!(job.step(&zeroes), job::Step::PunchHole { len: 100_352, offset: 4096 });
    assert_eq!(job.advance(-libc::EOPNOTSUPP), None);
    assert_eq!(job.step(&zeroes), job::Step::ZeroRange { len: 100_352, offset: 4096 });
    assert_eq!(job.advance(-libc::EINTR), None);
    assert_eq!(job.advance(-libc::EOPNOTSUPP), None);
    let from = zeroes.addr();
    let write = |len, offset| job::Step::Write { from, len, offset, dsync: false };
    assert_eq!(job.step(&zeroes), write(65536, 4096));
    assert_eq!(job.advance(61_440), None);
    assert_eq!(job.step(&zeroes), write(38_912, 65_536));
    assert_eq!(job.advance(38_912), None);
    assert_eq!(job.step(&zeroes), job::Step::Sync, "the zeroes have to be durable");
    assert_eq!(job.advance(0), Some(BackendResult { token: 9, errno: 0, direct: None }));
    // What the system keeps breaking off fails in the end.
    let mut job = job::Job::new(flush(), &done, 1, false).unwrap();
    let tries = (0..1000).take_while(|_| job.advance(-libc::EINTR).is_none()).count();
    assert_eq!(tries, 100);
}

#[test]
fn a_block_device_discards_and_a_file_gets_holes() {
    // The job alone: a device may discard and not know how to write zeroes, which a hole would be.
    let (sender, _answers) = channel();
    let done: Arc<dyn BackendDone> = Arc::new(Answers { sender: Mutex::new(sender) });
    let zeroes = Buffer::new(4096).unwrap();
    let (len, offset) = (65_536, 4096);
    for (device, step) in
        [(true, job::Step::Discard { len, offset }), (false, job::Step::PunchHole { len, offset })]
    {
        let io = BackendIo { op: IoOp::Discard, offset, len, fua: true, ..flush() };
        let mut job = job::Job::new(io, &done, 512, device).unwrap();
        assert_eq!((job.step(&zeroes), job.blocks()), (step, device));
        assert_eq!(job.advance(0), None);
        assert_eq!((job.step(&zeroes), job.blocks()), (job::Step::Sync, false));
        let io = BackendIo { op: IoOp::Discard, offset, len, ..flush() };
        let mut job = job::Job::new(io, &done, 512, device).unwrap();
        let refused = Some(BackendResult { token: 0, errno: -libc::EOPNOTSUPP, direct: None });
        assert_eq!(job.advance(-libc::EOPNOTSUPP), refused, "it is nothing else then");
    }
}

#[test]
fn a_store_knows_what_of_it_was_never_written() {
    let len = 1 << 20;
    for (name, store, _temp) in stores(len) {
        let extent = |at: u64| {
            let Extent { len, allocation } = store.backend.extent(at, len - at);
            (len, allocation == Allocation::Hole)
        };
        // A file system that cannot tell has no holes.
        if extent(0) == (len, true) {
            assert_eq!(store.write(65_536, &pattern(1, 65_536)), 0);
            assert_eq!(extent(0), (65_536, true), "{name}");
            assert_eq!(extent(65_536), (65_536, false), "{name}");
            assert_eq!(extent(69_632), (61_440, false), "{name}");
            assert_eq!(extent(131_072), (len - 131_072, true), "{name}");
            assert_eq!(store.backend.extent(0, 4096).len, 4096, "{name}");
        } else {
            assert_eq!(extent(0), (len, false), "{name}");
        }
    }
}

#[test]
fn a_file_that_became_shorter_has_no_hole_beyond_its_end() {
    let (_temp, file) = Temp::new("shorter", 1 << 20);
    let fd = file.try_clone().unwrap().into();
    let spec = BackendSpec::File { fd, read_only: false, block: 512, direct: false };
    let store = open(spec).unwrap();
    file.set_len(4096).unwrap();
    let beyond = store.extent(8192, 4096);
    assert_eq!(beyond, Extent { len: 4096, allocation: Allocation::Unknown });
}

fn flush() -> BackendIo {
    let (token, offset, len) = (0, 0, 0);
    let (fua, nounmap) = (false, false);
    BackendIo { token, op: IoOp::Flush, offset, len, fua, nounmap, prio: 0, mem: None, user: 0 }
}
