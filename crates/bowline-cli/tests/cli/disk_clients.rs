//! Clients of a mapped disk which write all the time, and the processes that serve them: for tests
//! in which these processes are replaced, or killed and started again.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Write},
    os::unix::{fs::FileExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use bowline_testkit::skipped;

use crate::support::{Folder, Running, start};

pub(crate) const BLOCK: usize = 4096;
/// Blocks of each writer.
pub(crate) const BLOCKS: u64 = 64;
/// Requests in flight of each writer.
const DEPTH: usize = 8;
pub(crate) const WRITERS: u64 = 3;
/// Longest wait of a client, on the slowest machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn content(block: u64, generation: u64) -> Vec<u8> {
    (0..BLOCK as u64 / 8)
        .flat_map(|word| (block << 48 | generation << 16 | word).to_le_bytes())
        .collect()
}

/// A client of NBD.
pub(crate) struct Nbd(pub(crate) UnixStream);

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
const FLUSH: u16 = 3;

pub(crate) fn header(command: u16, cookie: u64, offset: u64, len: usize) -> Vec<u8> {
    let mut out = 0x2560_9513_u32.to_be_bytes().to_vec();
    out.extend(0_u16.to_be_bytes());
    out.extend(command.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend((len as u32).to_be_bytes());
    out
}

impl Nbd {
    pub(crate) fn connect(place: &Path) -> io::Result<Self> {
        let socket = UnixStream::connect(place)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Self::begin(socket)
    }

    /// Chooses the export.
    pub(crate) fn begin(mut socket: UnixStream) -> io::Result<Self> {
        socket.read_exact(&mut [0; 18])?;
        // No zeroes; the export of the empty name.
        let mut wish = 3_u32.to_be_bytes().to_vec();
        wish.extend(b"IHAVEOPT");
        wish.extend([1_u32, 0].map(u32::to_be_bytes).concat());
        socket.write_all(&wish)?;
        socket.read_exact(&mut [0; 10])?;
        Ok(Self(socket))
    }

    /// Reads the header of a reply to a request that must have succeeded.
    pub(crate) fn reply(&mut self) -> u64 {
        self.try_reply().expect("an answer")
    }

    fn try_reply(&mut self) -> io::Result<u64> {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply)?;
        assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "no error");
        Ok(u64::from_be_bytes(reply[8..].try_into().expect("eight bytes")))
    }

    pub(crate) fn send(&mut self, block: u64, generation: u64) -> io::Result<()> {
        let mut ask = header(WRITE, block, block * BLOCK as u64, BLOCK);
        ask.extend(content(block, generation));
        self.0.write_all(&ask)
    }

    /// Writes as [`write_until`](Self::write_until), but connects again when the connection ends,
    /// and sends again what was not answered.
    pub(crate) fn write_and_reconnect(place: &Path, writer: u64, shared: &Shared) -> Written {
        let mut requests = Requests::new(writer, shared);
        loop {
            assert!(requests.last.elapsed() < PATIENCE, "no connection");
            let Ok(mut nbd) = Self::connect(place) else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            let mut flying = requests.flying.iter();
            if flying.any(|(block, generation)| nbd.send(*block, *generation).is_err()) {
                continue;
            }
            loop {
                // After an error there is no answer.
                let _ = requests.send(&mut nbd);
                if requests.flying.is_empty() {
                    return (requests.written, requests.longest);
                }
                let Ok(block) = nbd.try_reply() else { break };
                requests.take(block);
            }
        }
    }

    pub(crate) fn flush(&mut self) {
        self.0.write_all(&header(FLUSH, 1, 0, 0)).expect("asked");
        assert_eq!(self.reply(), 1);
    }

    pub(crate) fn read(&mut self, block: u64) -> Vec<u8> {
        let ask = header(READ, block, block * BLOCK as u64, BLOCK);
        self.0.write_all(&ask).expect("asked");
        assert_eq!(self.reply(), block);
        let mut bytes = vec![0; BLOCK];
        self.0.read_exact(&mut bytes).expect("data");
        bytes
    }

    /// Writes all the time, `DEPTH` requests at once, until it is to stop; returns the generation
    /// of each block, and the longest time without an answer.
    pub(crate) fn write_until(&mut self, writer: u64, shared: &Shared) -> Written {
        let mut requests = Requests::new(writer, shared);
        loop {
            requests.send(self).expect("asked");
            if requests.flying.is_empty() {
                return (requests.written, requests.longest);
            }
            requests.take(self.reply());
        }
    }
}

/// What a client of NBD writes.
struct Requests<'a> {
    writer: u64,
    shared: &'a Shared,
    /// Number of the next request.
    next: u64,
    /// Generation of each block that was sent and not answered.
    flying: BTreeMap<u64, u64>,
    written: BTreeMap<u64, u64>,
    last: Instant,
    longest: Duration,
}

impl<'a> Requests<'a> {
    fn new(writer: u64, shared: &'a Shared) -> Self {
        let (flying, written) = (BTreeMap::new(), BTreeMap::new());
        let (last, longest) = (Instant::now(), Duration::ZERO);
        Self { writer, shared, next: 0, flying, written, last, longest }
    }

    /// Sends as many as may be in flight, unless it is to stop.
    fn send(&mut self, nbd: &mut Nbd) -> io::Result<()> {
        while self.flying.len() < DEPTH && !self.shared.stop.load(SeqCst) {
            let (block, generation) =
                (self.writer * BLOCKS + self.next % BLOCKS, 1 + self.next / BLOCKS);
            if self.flying.contains_key(&block) {
                // One request at a time for each block.
                break;
            }
            self.next += 1;
            self.flying.insert(block, generation);
            nbd.send(block, generation)?;
        }
        Ok(())
    }

    fn take(&mut self, block: u64) {
        let generation = self.flying.remove(&block).expect("a request of ours");
        self.written.insert(block, generation);
        self.longest = self.longest.max(self.last.elapsed());
        self.last = Instant::now();
        self.shared.answers.fetch_add(1, SeqCst);
    }
}

#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) answers: AtomicU64,
    pub(crate) stop: AtomicBool,
}

impl Shared {
    /// Waits until clients have got more answers.
    pub(crate) fn advance(&self) {
        let enough = self.answers.load(SeqCst) + 200;
        let begun = Instant::now();
        while self.answers.load(SeqCst) < enough {
            assert!(!self.stop.load(SeqCst), "a client has given up");
            assert!(begun.elapsed() < PATIENCE, "no answers");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Ends the clients, also when a check fails.
pub(crate) struct Stop<'a>(pub(crate) &'a Shared);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, SeqCst);
    }
}

/// A server of a new file.
pub(crate) fn export(folder: &Folder, host: u8, more: &[&str]) -> (Running, PathBuf) {
    let image = folder.path().join("disk0.img");
    if !image.exists() {
        let file = File::create_new(&image).expect("a new file");
        file.set_len(4 << 20).expect("its size");
    }
    let (disk, address) = (format!("disk0={}", image.display()), format!("127.75.{host}.1"));
    let words = ["rnbd", "export", "--file", &disk, "-I", &address];
    let mut server = start(folder, &[&words[..], more].concat());
    server.expect("export disk0 ");
    (server, image)
}

pub(crate) fn map(folder: &Folder, host: u8, more: &[&str]) -> Running {
    let path = format!("127.75.{host}.11@127.75.{host}.1");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path];
    start(folder, &[&words[..], more].concat())
}

pub(crate) fn end(process: Running) {
    process.signal("-TERM");
    process.finish().exits(0);
}

/// Compares all blocks with what was written last.
pub(crate) fn compare(
    written: &BTreeMap<u64, u64>,
    image: &Path,
    mut read: impl FnMut(u64) -> Vec<u8>,
) {
    let file = File::open(image).expect("the image");
    let mut stored = vec![0; BLOCK];
    for (block, generation) in written {
        let wanted = content(*block, *generation);
        assert!(read(*block) == wanted, "block {block} of the disk, generation {generation}");
        file.read_exact_at(&mut stored, block * BLOCK as u64).expect("read");
        assert!(stored == wanted, "block {block} of the file, generation {generation}");
    }
}

/// Runs a writer of NBD while `change` happens, and compares.
pub(crate) fn while_written(place: &Path, image: &Path, change: impl FnOnce(&Shared)) {
    let shared = Shared::default();
    let (written, gap) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let writer = scope.spawn(|| {
            let _stop = Stop(&shared);
            Nbd::connect(place).expect("connected").write_until(0, &shared)
        });
        shared.advance();
        change(&shared);
        shared.advance();
        drop(stop);
        writer.join().expect("no request fails")
    });
    println!("longest time without an answer: {gap:?}");
    let mut reader = Nbd::connect(place).expect("connected");
    compare(&written, image, |block| reader.read(block));
}

/// What a writer has written last to each block, and its longest time without an answer.
pub(crate) type Written = (BTreeMap<u64, u64>, Duration);

/// Writes to the first `blocks` blocks of a writer's through a file, again and again, until it is
/// to stop; with `syncs` it flushes now and then.
pub(crate) fn write_file(
    file: &File,
    writer: u64,
    blocks: u64,
    syncs: bool,
    shared: &Shared,
) -> Written {
    let _stop = Stop(shared);
    let (mut written, mut longest) = (BTreeMap::new(), Duration::ZERO);
    for next in 0.. {
        if shared.stop.load(SeqCst) {
            break;
        }
        let (block, generation) = (writer * BLOCKS + next % blocks, 1 + next / blocks);
        let begun = Instant::now();
        file.write_all_at(&content(block, generation), block * BLOCK as u64).expect("written");
        if syncs && next % 16 == 0 {
            file.sync_data().expect("flushed");
        }
        longest = longest.max(begun.elapsed());
        written.insert(block, generation);
        shared.answers.fetch_add(1, SeqCst);
    }
    (written, longest)
}

pub(crate) fn read_file(file: &File, block: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    file.read_exact_at(&mut bytes, block * BLOCK as u64).expect("read");
    bytes
}

/// Waits for the ends of writers.
pub(crate) fn joined(
    writers: Vec<ScopedJoinHandle<'_, Written>>,
) -> (BTreeMap<u64, u64>, Vec<Duration>) {
    let ended = writers.into_iter().map(|writer| writer.join().expect("no request fails"));
    let (written, gaps): (Vec<_>, Vec<_>) = ended.unzip();
    (written.into_iter().flatten().collect(), gaps)
}

/// Waits for a line of a process that mounts its disk; `None` where nothing can be mounted.
pub(crate) fn with_fuse(mut process: Running, line: &str) -> Option<Running> {
    if process.hears(line) {
        return Some(process);
    }
    let done = process.finish();
    assert!(done.err.contains("FUSE") || done.err.contains("fusermount"), "{done:?}");
    skipped::without_fuse(done.err.trim());
    None
}
