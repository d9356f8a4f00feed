//! Processes that serve disks and are replaced, or killed and started again, while their clients
//! write: nothing fails, nothing is lost.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::{fs::FileExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use bowline_testkit::skipped;

use crate::rnbd_successors::Successor;
use crate::support::{Folder, Running, run, start};

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
const WRITE: u16 = 1;

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
    pub(crate) fn write_and_reconnect(
        place: &Path,
        shared: &Shared,
    ) -> (BTreeMap<u64, u64>, Duration) {
        let (mut written, mut flying) = (BTreeMap::new(), BTreeMap::new());
        let (mut next, mut longest, mut last) = (0, Duration::ZERO, Instant::now());
        loop {
            assert!(last.elapsed() < PATIENCE, "no connection");
            let Ok(mut nbd) = Self::connect(place) else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            if flying.iter().any(|(block, generation)| nbd.send(*block, *generation).is_err()) {
                continue;
            }
            loop {
                while flying.len() < DEPTH && !shared.stop.load(SeqCst) {
                    let (block, generation) = (next % BLOCKS, 1 + next / BLOCKS);
                    if flying.contains_key(&block) {
                        // One request at a time for each block.
                        break;
                    }
                    next += 1;
                    flying.insert(block, generation);
                    // The next answer tells, or does not come.
                    let _ = nbd.send(block, generation);
                }
                if flying.is_empty() {
                    return (written, longest);
                }
                let Ok(block) = nbd.try_reply() else { break };
                written.insert(block, flying.remove(&block).expect("a request of ours"));
                longest = longest.max(last.elapsed());
                last = Instant::now();
                shared.answers.fetch_add(1, SeqCst);
            }
        }
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
    fn write_until(&mut self, writer: u64, shared: &Shared) -> (BTreeMap<u64, u64>, Duration) {
        let (mut written, mut flying) = (BTreeMap::new(), BTreeMap::new());
        let (mut next, mut longest, mut last) = (0, Duration::ZERO, Instant::now());
        loop {
            while flying.len() < DEPTH && !shared.stop.load(SeqCst) {
                let (block, generation) = (writer * BLOCKS + next % BLOCKS, 1 + next / BLOCKS);
                if flying.contains_key(&block) {
                    // One request at a time for each block.
                    break;
                }
                next += 1;
                self.send(block, generation).expect("asked");
                flying.insert(block, generation);
            }
            if flying.is_empty() {
                return (written, longest);
            }
            let block = self.reply();
            written.insert(block, flying.remove(&block).expect("a request of ours"));
            longest = longest.max(last.elapsed());
            last = Instant::now();
            shared.answers.fetch_add(1, SeqCst);
        }
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

/// Starts a process that replaces the former one, which ends.
fn replace(folder: &Folder, host: u8, more: &[&str], process: &mut Running) {
    let mut next = map(folder, host, &[more, &["--replace"]].concat());
    next.expect("mapped disk0 ");
    let former = std::mem::replace(process, next).finish().exits(0);
    assert!(former.out.contains("handed over\n"), "{former:?}");
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

#[test]
fn clients_of_nbd_stay_connected_when_their_process_is_replaced() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, image) = export(&folder, 1, &[]);
    let place = folder.path().join("nbd.sock");
    let doors = ["--nbd", place.to_str().expect("a plain path")];
    let mut client = map(&folder, 1, &doors);
    client.expect("mapped disk0 ");

    let shared = Shared::default();
    let far = WRITERS * BLOCKS;
    // One is idle, one has sent a part of a request, one does not read what it has asked for.
    let mut idle = Nbd::connect(&place).expect("connected");
    let mut half = Nbd::connect(&place).expect("connected");
    let mut ask = header(WRITE, 7, far * BLOCK as u64, 100 * BLOCK);
    let (first, second) = (content(1, 1), (1..100).flat_map(|n| content(1, n)).collect::<Vec<_>>());
    ask.extend(&first);
    half.0.write_all(&ask).expect("half a request");
    let mut slow = Nbd::connect(&place).expect("connected");
    let big = 256 * BLOCK;
    for n in 0..16 {
        slow.0.write_all(&header(READ, n, 2 << 20, big)).expect("asked");
    }
    let (written, gaps) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (shared, place) = (&shared, &place);
                scope.spawn(move || {
                    let _stop = Stop(shared);
                    Nbd::connect(place).expect("connected").write_until(writer, shared)
                })
            })
            .collect();
        for _ in 0..3 {
            shared.advance();
            replace(&folder, 1, &doors, &mut client);
        }
        shared.advance();
        drop(stop);
        let ended = writers.into_iter().map(|writer| writer.join().expect("no request fails"));
        let (written, gaps): (Vec<_>, Vec<_>) = ended.unzip();
        (written.into_iter().flatten().collect::<BTreeMap<_, _>>(), gaps)
    });
    println!("longest times without an answer: {gaps:?}");
    half.0.write_all(&second).expect("the rest of the request");
    assert_eq!(half.reply(), 7);
    assert!(idle.read(far) == first);
    assert!(idle.read(far + 99) == content(1, 99));
    for _ in 0..16 {
        assert!(slow.reply() < 16);
        slow.0.read_exact(&mut vec![0; big]).expect("data");
    }
    compare(&written, &image, |block| idle.read(block));
    end(client);
    assert!(!place.exists());
    end(server);
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

#[test]
fn a_file_stays_open_when_its_process_is_replaced() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, image) = export(&folder, 2, &[]);
    let dir = folder.path().join("files");
    let doors = ["--fuse", dir.to_str().expect("a plain path")];
    let mut client = map(&folder, 2, &doors);
    if !client.hears("mapped disk0 ") {
        let done = client.finish();
        assert!(done.err.contains("FUSE") || done.err.contains("fusermount"), "{done:?}");
        return skipped::without_fuse(done.err.trim());
    }
    let place = dir.join("rnbd0");
    let file = OpenOptions::new().read(true).write(true).open(&place).expect("the disk");
    let shared = Shared::default();
    let write = |writer: u64| {
        let _stop = Stop(&shared);
        let (mut written, mut longest) = (BTreeMap::new(), Duration::ZERO);
        for next in 0.. {
            if shared.stop.load(SeqCst) {
                break;
            }
            let (block, generation) = (writer * BLOCKS + next % BLOCKS, 1 + next / BLOCKS);
            let begun = Instant::now();
            file.write_all_at(&content(block, generation), block * BLOCK as u64).expect("written");
            if next % 16 == 0 {
                file.sync_data().expect("flushed");
            }
            longest = longest.max(begun.elapsed());
            written.insert(block, generation);
            shared.answers.fetch_add(1, SeqCst);
        }
        (written, longest)
    };
    let (written, gaps) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let write = &write;
        let writers: Vec<_> =
            (0..WRITERS).map(|writer| scope.spawn(move || write(writer))).collect();
        for _ in 0..3 {
            shared.advance();
            replace(&folder, 2, &doors, &mut client);
        }
        shared.advance();
        drop(stop);
        let ended = writers.into_iter().map(|writer| writer.join().expect("no request fails"));
        let (written, gaps): (Vec<_>, Vec<_>) = ended.unzip();
        (written.into_iter().flatten().collect::<BTreeMap<_, _>>(), gaps)
    });
    println!("longest requests: {gaps:?}");
    compare(&written, &image, |block| {
        let mut bytes = vec![0; BLOCK];
        file.read_exact_at(&mut bytes, block * BLOCK as u64).expect("read");
        bytes
    });
    // The process that has the mount knows that the file is open, and unmounts it at its end.
    let unmap = run(&folder, &["rnbd", "unmap", "rnbd0"]);
    assert_ne!(unmap.code, Some(0), "{unmap:?}");
    drop(file);
    end(client);
    assert!(!place.exists());
    end(server);
}

#[test]
fn requests_wait_while_a_server_is_replaced() {
    // tests [NB-71]
    let folder = Folder::new();
    let (mut server, image) = export(&folder, 3, &[]);
    let place = folder.path().join("nbd.sock");
    let mut client = map(&folder, 3, &["--nbd", place.to_str().expect("a plain path")]);
    client.expect("mapped disk0 ");
    while_written(&place, &image, |shared| {
        for _ in 0..2 {
            let (next, _) = export(&folder, 3, &["--replace"]);
            let former = std::mem::replace(&mut server, next).finish().exits(0);
            assert!(former.out.contains("handed over\n"), "{former:?}");
            shared.advance();
        }
    });
    end(client);
    end(server);
}

#[test]
fn a_process_continues_when_the_next_one_does_not() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, image) = export(&folder, 4, &[]);
    let place = folder.path().join("nbd.sock");
    let text = place.to_str().expect("a plain path");
    let doors = ["--nbd", text];

    let none = map(&folder, 4, &["--nbd", text, "--replace"]).finish().exits(254);
    none.complains(&["nothing to replace", "disk0", "leave out --replace"]);

    let mut client = map(&folder, 4, &doors);
    client.expect("mapped disk0 ");
    while_written(&place, &image, |shared| {
        let others = map(&folder, 4, &["--replace"]).finish().exits(1);
        others.complains(&["other front ends", "--nbd"]);
        // The same names elsewhere are another disk.
        let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", "127.75.4.11@127.75.4.9"];
        let words = [&words[..], &doors, &["--replace"]].concat();
        run(&folder, &words).exits(1).complains(&["a server at other addresses"]);
        shared.advance();

        // One that is killed after it was given everything.
        let mut next = Successor::connect(&folder, &client);
        next.ask(4, Some(&place), None, PATIENCE);
        next.take_all();
        drop(next);
        client.until_logged("this one does");
        shared.advance();
    });
    // It can be replaced still.
    while_written(&place, &image, |_| replace(&folder, 4, &doors, &mut client));
    let done =
        run(&folder, &["rnbd", "export", "--memory", "m=1MiB", "-I", "127.75.4.9", "--replace"]);
    done.exits(2);
    end(client);
    end(server);
    assert!(!fs::exists(place).expect("a folder"));
}

/// The name of a disk that commands have unmapped and mapped may be another one's by now.
#[test]
fn what_commands_have_mapped_goes_to_no_other_process() {
    let folder = Folder::new();
    let (server, _) = export(&folder, 6, &[]);
    let place = folder.path().join("nbd.sock");
    let doors = ["--nbd", place.to_str().expect("a plain path"), "--stay"];
    let mut client = map(&folder, 6, &doors);
    client.expect("mapped disk0 ");
    run(&folder, &["rnbd", "unmap", "rnbd0"]).exits(0);
    let path = "127.75.6.11@127.75.6.1";
    run(&folder, &["rnbd", "map", "disk0", "from", "s2", path]).exits(0);
    let refused = map(&folder, 6, &[&doors[..], &["--replace"]].concat()).finish().exits(1);
    refused.complains(&["a command has mapped or unmapped disks"]);
    end(client);
    end(server);
}

#[test]
fn clients_of_nbd_come_back_to_a_process_that_was_killed() {
    // tests [NB-70] [RT-92]
    let folder = Folder::new();
    let (server, image) = export(&folder, 5, &[]);
    let place = folder.path().join("nbd.sock");
    let doors = ["--nbd", place.to_str().expect("a plain path")];
    let begin = || {
        let mut client = map(&folder, 5, &doors);
        client.expect("mapped disk0 ");
        client
    };
    let mut client = Some(begin());
    let shared = Shared::default();
    let (written, gap) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let writer = scope.spawn(|| {
            let _stop = Stop(&shared);
            Nbd::write_and_reconnect(&place, &shared)
        });
        for _ in 0..3 {
            shared.advance();
            let dying = client.take().expect("it runs");
            dying.signal("-KILL");
            assert_eq!(dying.finish().code, None, "it was killed");
            client = Some(begin());
        }
        shared.advance();
        drop(stop);
        writer.join().expect("no request fails")
    });
    println!("longest time without an answer: {gap:?}");
    let mut reader = Nbd::connect(&place).expect("connected");
    compare(&written, &image, |block| reader.read(block));
    end(client.expect("it runs"));
    end(server);
}
