//! Virtual machines whose disk `rnbd map --vhost-user` serves, and ends of that process. The
//! machine is a driver of this test.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use crate::disk_clients::{
    BLOCKS, Nbd, Shared, Stop, Written, compare, content, end, joined, with_fuse, write_file,
};
use crate::rnbd_kept::{self, Keeper};
use crate::support::{Folder, Running, start};
use guest::{DATA, Guest, IN, Kept, Memory, OUT, Queue};
use vhost::VhostBackend;

#[path = "../../../bowline-block/tests/common/guest.rs"]
mod guest;

/// Longest wait.
const PATIENCE: Duration = Duration::from_secs(60);
/// Descriptors of a ring.
const SIZE: u16 = 16;
const BLOCK: u64 = 4096;

/// A server of a file, and where a client of it serves a machine.
struct Place {
    folder: Folder,
    host: u8,
    image: PathBuf,
    socket: PathBuf,
    memory: Arc<Memory>,
}

impl Place {
    fn new(host: u8) -> Self {
        let folder = Folder::new();
        let [image, socket] = ["image", "machine"].map(|name| folder.path().join(name));
        File::create(&image).expect("a file").set_len(1 << 20).expect("its size");
        Self { folder, host, image, socket, memory: Memory::new() }
    }

    fn export(&self) -> Running {
        let address = format!("127.63.{}.1", self.host);
        let file = format!("disk0={}", self.image.display());
        let words = ["rnbd", "export", "--file", &file, "-I", &address, "--no-control"];
        let mut server = start(&self.folder, &words);
        server.expect(&format!("listening on {address}:"));
        server
    }

    fn map(&self) -> Running {
        let mut client = self.map_with(&["--no-control"]);
        client.expect("mapped disk0 ");
        client
    }

    fn map_with(&self, more: &[&str]) -> Running {
        let words = self.map_words(more);
        start(&self.folder, &words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The command that serves a machine.
    fn map_words(&self, more: &[&str]) -> Vec<String> {
        let path = format!("127.63.{0}.11@127.63.{0}.1", self.host);
        let socket = self.socket.to_str().expect("a plain path");
        let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path];
        let all = [&words[..], &["--vhost-user", socket], more].concat();
        all.into_iter().map(str::to_owned).collect()
    }

    /// Starts a machine with one ring, on which this number of requests was done.
    fn machine(&self, next: u16) -> (Guest, Kept) {
        let mut guest = Guest::connect(&self.socket, &self.memory, 0);
        guest.share();
        let kept = guest.keep(SIZE);
        guest.add_queue_at(SIZE, next);
        (guest, kept)
    }

    /// The machine connects again, with what it had.
    fn machine_again(&self, kept: &Kept, queue: Queue) -> Guest {
        let begun = Instant::now();
        let mut guest = loop {
            if let Some(guest) = Guest::try_connect(&self.socket, &self.memory, 0) {
                break guest;
            }
            assert!(begun.elapsed() < PATIENCE, "nobody listens");
            thread::sleep(Duration::from_millis(1));
        };
        guest.share();
        guest.continue_with(kept);
        guest.resume(queue);
        guest
    }

    fn block(&self, number: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK as usize];
        let file = File::open(&self.image).expect("the file");
        file.read_exact_at(&mut bytes, number * BLOCK).expect("read");
        bytes
    }
}

fn kill(part: Running) {
    part.signal("-KILL");
    assert_eq!(part.finish().code, None);
}

/// Waits until the region says of this number of requests that they are in flight.
fn until_in_flight(kept: &Kept, count: usize) {
    let end = Instant::now() + PATIENCE;
    let marked = || {
        let mut region = vec![0; kept.0.mmap_size as usize];
        kept.1.read_exact_at(&mut region, kept.0.mmap_offset).expect("a region");
        (0..usize::from(SIZE)).filter(|head| region[16 + 16 * head] != 0).count()
    };
    while marked() != count {
        assert!(Instant::now() < end, "{count} are in flight");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_machine_sees_no_error_when_its_disk_is_stopped_while_the_server_is_lost() {
    // tests [NB-54] [NB-66]
    let place = Place::new(1);
    let server = place.export();
    let mut client = place.map();
    let (mut guest, kept) = place.machine(0);
    assert_eq!(guest.run(OUT, 0, &[(DATA, 512)]), 0);
    kill(server);
    client.expect("rnbd0 offline");
    place.memory.put(DATA, &[7; BLOCK as usize]);
    guest.queues[0].prepare(0, OUT, 8, &[(DATA, BLOCK as u32)]);
    guest.queues[0].give(&[0]);
    until_in_flight(&kept, 1);
    client.signal("-TERM");
    let done = client.finish().exits(0);
    let line = "rnbd0: what was written was not made durable: its server is not connected; its \
                machine has yet to flush it";
    assert!(done.err.contains(line), "{done:?}");
    assert_eq!((guest.queues[0].used_index(), guest.queues[0].status(0)), (1, 0xff));
    assert!(guest.front.get_features().is_err(), "the machine is disconnected");
    // What it asks for in the meantime waits, too.
    guest.queues[0].prepare(4, IN, 8, &[(DATA + BLOCK, BLOCK as u32)]);
    guest.queues[0].give(&[4]);
    let queue = guest.queues.remove(0);

    let (server, client) = (place.export(), place.map());
    let mut guest = place.machine_again(&kept, queue);
    let mut done = [guest.queues[0].wait().0, guest.queues[0].wait().0];
    done.sort_unstable();
    assert_eq!((done, guest.queues[0].used_index()), ([0, 4], 3));
    assert_eq!((guest.queues[0].status(0), guest.queues[0].status(4)), (0, 0));
    assert_eq!(place.block(1), [7; BLOCK as usize]);
    end(client);
    end(server);
}

#[test]
fn a_request_in_the_first_slot_is_done_once_when_its_server_is_killed() {
    // tests [NB-66]
    let place = Place::new(2);
    let server = place.export();
    let mut client = place.map();
    // The first request has the number 65535, the next 0, and so on.
    let (mut guest, kept) = place.machine(u16::MAX);
    for round in 0..3_u16 {
        // The server of the disk is stopped, so that the request stays in flight.
        server.signal("-STOP");
        let data = vec![round as u8 + 1; BLOCK as usize];
        place.memory.put(DATA, &data);
        guest.queues[0].prepare(0, OUT, u64::from(round) * 8, &[(DATA, BLOCK as u32)]);
        guest.queues[0].give(&[0]);
        until_in_flight(&kept, 1);
        kill(client);
        let used = u16::MAX.wrapping_add(round);
        assert_eq!((guest.queues[0].used_index(), guest.queues[0].status(0)), (used, 0xff));
        let queue = guest.queues.remove(0);
        server.signal("-CONT");

        client = place.map();
        guest = place.machine_again(&kept, queue);
        assert_eq!(guest.queues[0].wait().0, 0);
        assert_eq!(guest.queues[0].status(0), 0);
        assert_eq!(place.block(round.into()), data, "nothing is lost");
        until_in_flight(&kept, 0);
        // An answer shows that the rings were looked at: nothing is done twice.
        guest.config();
        assert_eq!(guest.queues[0].used_index(), used.wrapping_add(1));
        assert_eq!(guest.queues[0].take_used(), None);
    }
    end(client);
    end(server);
}

/// Requests in flight of the machine of the next tests.
const DEPTH: u16 = 4;
/// Descriptors of each request.
const EACH: u16 = SIZE / DEPTH;

/// A machine that writes all the time. Its process connects again when the connection ends.
struct Writer<'a> {
    place: &'a Place,
    guest: Guest,
    kept: Kept,
    /// Block and generation of the request at each place of the ring.
    flying: [Option<(u64, u64)>; DEPTH as usize],
    /// Generation of each block that was written.
    written: BTreeMap<u64, u64>,
    next: u64,
    longest: Duration,
}

impl<'a> Writer<'a> {
    fn new(place: &'a Place) -> Self {
        let (guest, kept) = place.machine(0);
        Self {
            place,
            guest,
            kept,
            flying: [None; DEPTH as usize],
            written: BTreeMap::new(),
            next: 0,
            longest: Duration::ZERO,
        }
    }

    fn give(&mut self) {
        for at in 0..DEPTH {
            let (block, generation) = (self.next % BLOCKS, 1 + self.next / BLOCKS);
            let is_flying = |one: &Option<(u64, u64)>| one.is_some_and(|(other, _)| other == block);
            // One request at a time for each block.
            if self.flying[usize::from(at)].is_some() || self.flying.iter().any(is_flying) {
                continue;
            }
            let data = DATA + u64::from(at) * BLOCK;
            self.place.memory.put(data, &content(block, generation));
            let queue = &mut self.guest.queues[0];
            queue.prepare(at * EACH, OUT, block * BLOCK / 512, &[(data, BLOCK as u32)]);
            queue.give(&[at * EACH]);
            self.flying[usize::from(at)] = Some((block, generation));
            self.next += 1;
        }
    }

    /// Takes answers, of which none is an error.
    fn take(&mut self) -> usize {
        let mut count = 0;
        while let Some((head, _)) = self.guest.queues[0].take_used() {
            assert_eq!(self.guest.queues[0].status(head), 0, "no request fails");
            let flying = self.flying[usize::from(head / EACH)].take();
            let (block, generation) = flying.expect("a request that was not answered");
            self.written.insert(block, generation);
            count += 1;
        }
        count
    }

    /// Writes until it is to stop and all was answered.
    fn run(mut self, answers: &AtomicU64, stop: &AtomicBool) -> Self {
        let mut last = Instant::now();
        loop {
            if !stop.load(SeqCst) {
                self.give();
            } else if self.flying.iter().all(Option::is_none) {
                return self;
            }
            let count = self.take();
            if count > 0 {
                answers.fetch_add(count as u64, SeqCst);
                self.longest = self.longest.max(last.elapsed());
                last = Instant::now();
                continue;
            }
            assert!(last.elapsed() < PATIENCE, "no answers");
            if last.elapsed() > Duration::from_millis(10)
                && self.guest.front.get_features().is_err()
            {
                let queue = self.guest.queues.remove(0);
                self.guest = self.place.machine_again(&self.kept, queue);
            }
            thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Runs a machine that writes while `change` is called a few times, compares each block, and
/// returns the longest time without an answer.
fn while_written(place: &Place, mut change: impl FnMut()) -> Duration {
    let (answers, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut done = thread::scope(|scope| {
        let writer = scope.spawn(|| Writer::new(place).run(&answers, &stop));
        let advance = || {
            let (enough, begun) = (answers.load(SeqCst) + 200, Instant::now());
            while answers.load(SeqCst) < enough {
                assert!(!writer.is_finished() && begun.elapsed() < PATIENCE, "no answers");
                thread::sleep(Duration::from_millis(1));
            }
        };
        for _ in 0..3 {
            advance();
            change();
        }
        advance();
        stop.store(true, SeqCst);
        writer.join().expect("no request fails")
    });
    assert_eq!(done.written.len() as u64, BLOCKS);
    for (block, generation) in &done.written {
        let wanted = content(*block, *generation);
        assert!(place.block(*block) == wanted, "block {block} of the file");
        assert_eq!(done.guest.run(IN, block * BLOCK / 512, &[(DATA, BLOCK as u32)]), 0);
        assert!(place.memory.get(DATA, BLOCK as usize) == wanted, "block {block} of the disk");
    }
    done.longest
}

#[test]
fn a_machine_writes_on_when_its_process_is_replaced() {
    // tests [NB-66] [NB-70]
    let place = Place::new(3);
    let server = place.export();
    let mut client = place.map_with(&[]);
    client.expect("mapped disk0 ");
    let gap = while_written(&place, || {
        let mut next = place.map_with(&["--replace"]);
        next.expect("mapped disk0 ");
        let former = std::mem::replace(&mut client, next).finish().exits(0);
        assert!(former.out.contains("handed over\n"), "{former:?}");
    });
    println!("longest time without an answer: {gap:?}");
    end(client);
    assert!(!place.socket.exists());
    end(server);
}

#[test]
fn a_machine_writes_on_when_its_process_is_killed_and_started_again() {
    // tests [NB-66]
    let place = Place::new(4);
    let server = place.export();
    let mut client = Some(place.map());
    let gap = while_written(&place, || {
        kill(client.take().expect("it runs"));
        client = Some(place.map());
    });
    println!("longest time without an answer: {gap:?}");
    end(client.expect("it runs"));
    end(server);
}

/// Runs a machine, a client of NBD and, where there is one, a writer of a file, all of one disk,
/// while `change` is called a few times; compares each block.
fn while_all_write(
    place: &Place,
    write_nbd: impl FnOnce(&Shared) -> Written + Send,
    file: Option<&File>,
    nbd: &Path,
    mut change: impl FnMut(),
) {
    let shared = Shared::default();
    let (written, gaps) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let shared = &shared;
        let mut writers = vec![scope.spawn(move || {
            let _stop = Stop(shared);
            write_nbd(shared)
        })];
        writers.extend(file.map(|file| scope.spawn(|| write_file(file, 2, BLOCKS, true, shared))));
        let gap = while_written(place, || {
            shared.advance();
            change();
        });
        println!("longest time without an answer, of the machine: {gap:?}");
        shared.advance();
        drop(stop);
        joined(writers)
    });
    println!("longest times without an answer, of the others: {gaps:?}");
    let mut reader = Nbd::connect(nbd).expect("connected");
    compare(&written, &place.image, |block| reader.read(block));
}

/// All that a process may serve at once and hand over, each with a client.
#[test]
fn clients_of_every_kind_notice_a_pause_when_their_process_is_replaced() {
    // tests [NB-66] [NB-70]
    let place = Place::new(5);
    let server = place.export();
    let [nbd, dir] = ["nbd.sock", "files"].map(|name| place.folder.path().join(name));
    let text = |path: &Path| path.to_str().expect("a plain path").to_owned();
    let (nbd_text, dir_text) = (text(&nbd), text(&dir));
    let mut more = vec!["--nbd", &nbd_text, "--fuse", &dir_text];
    let found = with_fuse(place.map_with(&more), "mapped disk0 ");
    let mut client = found.unwrap_or_else(|| {
        more.truncate(2);
        let mut client = place.map_with(&more);
        client.expect("mapped disk0 ");
        client
    });
    let open = || File::options().read(true).write(true).open(dir.join("rnbd0"));
    let file = (more.len() > 2).then(|| open().expect("the disk"));
    more.push("--replace");
    let write = |shared: &Shared| Nbd::connect(&nbd).expect("connected").write_until(1, shared);
    while_all_write(&place, write, file.as_ref(), &nbd, || {
        let mut next = place.map_with(&more);
        next.expect("mapped disk0 ");
        let former = std::mem::replace(&mut client, next).finish().exits(0);
        assert!(former.out.contains("handed over\n"), "{former:?}");
    });
    drop(file);
    end(client);
    assert!(!place.socket.exists() && !nbd.exists());
    end(server);
}

/// The same, when it is killed: what a service manager has kept, and what clients do by themselves.
#[test]
fn clients_of_every_kind_notice_a_pause_when_their_process_is_killed_and_resumed() {
    // tests [NB-66] [NB-72]
    let place = Place::new(6);
    let server = place.export();
    let [nbd, dir] = ["nbd.sock", "files"].map(|name| place.folder.path().join(name));
    let text = |path: &Path| path.to_str().expect("a plain path").to_owned();
    let words = place.map_words(&["--nbd", &text(&nbd), "--fuse", &text(&dir)]);
    let words = [env!("CARGO_BIN_EXE_bowline")].into_iter().chain(words.iter().map(String::as_str));
    let mut keeper = Keeper::start_as(&place.folder, &words.collect::<Vec<_>>());
    let mut process = keeper.started();
    let Some(mut keeper) = keeper.with_fuse("stored bowline-disk") else { return };
    keeper.0.expect("ready");
    let file = File::options().read(true).write(true).open(dir.join("rnbd0")).expect("the disk");
    let write = |shared: &Shared| Nbd::write_and_reconnect(&nbd, 1, shared);
    while_all_write(&place, write, Some(&file), &nbd, || {
        rnbd_kept::kill(process);
        keeper.0.expect("ended -9, has 3");
        process = keeper.started();
        keeper.0.expect("ready");
    });
    drop(file);
    keeper.0.signal("-TERM");
    let done = keeper.0.finish().exits(0);
    assert!(done.out.ends_with("ended 0, has 0\n"), "{done:?}");
    assert!(!place.socket.exists() && !nbd.exists());
    end(server);
}
