//! A server of a disk that is killed while it is written to, and started again at the same
//! addresses.

use std::fs::File;
use std::net::IpAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use bowline_block::sync::{self, Durable};
use bowline_rnbd::client::Outage;
use bowline_rnbd_driver::{Client, Disk, MapOptions};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::{Engine, EngineConfig};

use crate::support::{Folder, Running, start};

const BLOCK: usize = 4096;
/// Unit that a disk writes atomically, in bytes.
const SECTOR: usize = 512;
/// Each writer has its own blocks, so that none reads what another is writing.
const WRITERS: u64 = 4;
const BLOCKS: u64 = 64;
const KILLS: u64 = 5;
/// Longest wait of a test, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn words(block: u64, generation: u64) -> impl Iterator<Item = u64> {
    (0..BLOCK as u64 / 8).map(move |word| block << 48 | generation << 16 | word)
}

fn content(block: u64, generation: u64) -> Vec<u8> {
    words(block, generation).flat_map(u64::to_le_bytes).collect()
}

/// Returns what is wrong with a block whose generation `flushed` was flushed. Later generations may
/// have reached the file unacknowledged, each sector independently.
fn wrong(bytes: &[u8], block: u64, flushed: u64) -> Option<String> {
    for (sector, found) in bytes.chunks(SECTOR).enumerate() {
        let first = u64::from_le_bytes(found[..8].try_into().expect("eight bytes"));
        let generation = first >> 16 & 0xffff_ffff;
        let at = sector * SECTOR;
        // No generation 0 was ever written: the file was new.
        let whole = match generation {
            0 => found.iter().all(|byte| *byte == 0),
            _ => found == &content(block, generation)[at..][..SECTOR],
        };
        if generation < flushed || !whole {
            return Some(format!(
                "block {block}, sector {sector}: {first:#x}, flushed was {flushed}"
            ));
        }
    }
    None
}

/// State that the writers share with the thread that kills the server.
struct Shared {
    /// Newest generation of each block that a flush has acknowledged.
    flushed: Vec<AtomicU64>,
    flushes: AtomicU64,
    /// Number of restarts of the server. A writer that sees a new one reads all its blocks.
    lives: AtomicU64,
    /// Restart after which each writer last read all its blocks.
    compared: [AtomicU64; WRITERS as usize],
    stop: AtomicBool,
}

impl Shared {
    fn flushed(&self, block: u64) -> u64 {
        self.flushed[block as usize].load(SeqCst)
    }

    /// Compares the blocks of a writer with what was flushed, as the disk has them.
    fn compare(&self, disk: &Disk, writer: u64) {
        let mut bytes = [0; BLOCK];
        for block in writer * BLOCKS..(writer + 1) * BLOCKS {
            let flushed = self.flushed(block);
            sync::read_at(disk, block * BLOCK as u64, &mut bytes).expect("no request fails");
            assert_eq!(wrong(&bytes, block, flushed), None, "on the disk");
        }
    }

    /// Writes and flushes all the time; every third block is durable by itself.
    fn write(&self, disk: &Disk, writer: u64) {
        let compared = &self.compared[writer as usize];
        let mut generation = 0;
        while !self.stop.load(SeqCst) {
            generation += 1;
            let count = 1 + (generation * 7 + writer) % 16;
            let written: Vec<u64> =
                (0..count).map(|n| writer * BLOCKS + (generation * 11 + n) % BLOCKS).collect();
            for &block in &written {
                let durable = if block % 3 == 0 { Durable::Now } else { Durable::Later };
                let bytes = content(block, generation);
                sync::write_at(disk, block * BLOCK as u64, &bytes, durable)
                    .expect("no request fails");
                if durable == Durable::Now {
                    self.flushed[block as usize].store(generation, SeqCst);
                }
            }
            sync::flush(disk).expect("no request fails");
            for &block in &written {
                self.flushed[block as usize].store(generation, SeqCst);
            }
            self.flushes.fetch_add(1, SeqCst);
            let life = self.lives.load(SeqCst);
            if life != compared.load(SeqCst) {
                self.compare(disk, writer);
                compared.store(life, SeqCst);
            }
        }
    }

    /// Waits until the condition holds; fails if a writer has given up.
    fn until(&self, what: &str, so: impl Fn() -> bool) {
        let begin = Instant::now();
        while !so() {
            assert!(!self.stop.load(SeqCst), "a writer has given up");
            assert!(begin.elapsed() < PATIENCE, "never: {what}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Ends the writers, also when a check fails.
struct Stop<'a>(&'a Shared);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, SeqCst);
    }
}

fn serve(folder: &Folder, image: &Path) -> Running {
    let disk = format!("disk0={}", image.display());
    let words = ["rnbd", "export", "--file", &disk, "-I", "127.45.1.1", "-I", "127.45.1.2"];
    let mut server = start(folder, &[&words[..], &["--no-control"]].concat());
    server.expect("listening on 127.45.1.1:1234, 127.45.1.2:1234");
    server
}

/// What was flushed is in the file when the server is dead, and on the disk when it is back.
/// Writing goes on over all of it, and no request fails.
// tests [NB-54], [NB-62]
#[test]
fn what_was_flushed_outlives_kill_9_of_the_server() {
    let folder = Folder::new();
    let image = folder.path().join("disk0");
    let file = File::create_new(&image).expect("a new file");
    file.set_len(WRITERS * BLOCKS * BLOCK as u64).expect("its size");
    let file = File::open(&image).expect("again, to look at");
    let mut server = Some(serve(&folder, &image));

    let own = |path: u8| IpAddr::from([127, 45, 1, 10 + path]);
    let theirs = |path: u8| IpAddr::from([127, 45, 1, path]);
    let config = SoftConfig { addrs: vec![own(1), own(2)], ..SoftConfig::default() };
    let device = Arc::new(SoftDevice::open(config).expect("a device"));
    let engine = Engine::new(vec![device], EngineConfig::default()).expect("an engine");
    let options = MapOptions::new("kills").outage(Outage::Queue(PATIENCE));
    let options = options.path(Some(own(1)), theirs(1)).path(Some(own(2)), theirs(2));
    let client = Client::new(Arc::clone(&engine), options.clone());
    let disk = client.map_with("disk0", &options).expect("mapped");

    let shared = Shared {
        flushed: (0..WRITERS * BLOCKS).map(|_| AtomicU64::new(0)).collect(),
        flushes: AtomicU64::new(0),
        lives: AtomicU64::new(0),
        compared: Default::default(),
        stop: AtomicBool::new(false),
    };
    let begun = Barrier::new(WRITERS as usize + 1);
    thread::scope(|scope| {
        let stop = Stop(&shared);
        for writer in 0..WRITERS {
            let (shared, disk, begun) = (&shared, &disk, &begun);
            scope.spawn(move || {
                let _stop = Stop(shared);
                begun.wait();
                shared.write(disk, writer);
            });
        }
        begun.wait();
        for kill in 1..=KILLS {
            // The third kill comes while the client is still connecting again.
            if kill != 3 {
                let enough = shared.flushes.load(SeqCst) + 8 * WRITERS;
                shared.until("flushes", || shared.flushes.load(SeqCst) >= enough);
                thread::sleep(Duration::from_millis(37 * kill));
            }
            let dying = server.take().expect("it runs");
            dying.signal("-KILL");
            assert_eq!(dying.finish().code, None, "it was killed");
            // No flush of that life can be acknowledged any more but those that are on their way.
            let flushed: Vec<u64> =
                (0..WRITERS * BLOCKS).map(|block| shared.flushed(block)).collect();
            let mut bytes = [0; BLOCK];
            let lost = (0..).zip(flushed).find_map(|(block, flushed)| {
                file.read_exact_at(&mut bytes, block * BLOCK as u64).expect("read");
                wrong(&bytes, block, flushed)
            });
            server = Some(serve(&folder, &image));
            assert_eq!(lost, None, "in the file");
            shared.lives.store(kill, SeqCst);
            if kill != 2 {
                let all = || shared.compared.iter().all(|life| life.load(SeqCst) == kill);
                shared.until("every block compared", all);
            }
        }
        drop(stop);
    });

    (0..WRITERS).for_each(|writer| shared.compare(&disk, writer));
    let info = disk.info().expect("a mapped disk");
    assert!(info.stats.resent > 0, "requests were under way: {:?}", info.stats);
    client.unmap(&disk).expect("unmapped");
    client.close();
    engine.close();
}
