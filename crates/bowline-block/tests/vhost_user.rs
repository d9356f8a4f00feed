//! Disks of virtual machines, with the vhost-user front end of rust-vmm and with hostile ones.

#[path = "common/guest.rs"]
mod guest;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bowline_block::backend::{self, Backend, BackendDone, BackendIo, BackendResult, BackendSpec};
use bowline_block::front::vhost_user::{self, VhostUserOptions, VhostUserServer};
use bowline_block::{Errno, IoOp, Limits, LocalDevice};
use bowline_verbs::Buffer;
use guest::{
    DATA, DISCARD, Desc, DirtyLog, F_EVENT_IDX, F_FLUSH, F_LOG_ALL, F_RO, FLUSH, GET_ID, Guest, IN,
    INDIRECT, Memory, NEXT, OUT, WRITE, WRITE_ZEROES, pages,
};
use rustix::event::EventfdFlags;
use rustix::fs::SealFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

/// A server at a socket of its own.
struct Served {
    server: VhostUserServer,
    path: PathBuf,
    /// What it reported.
    reports: Arc<Mutex<Vec<String>>>,
}

fn serve(name: &str, disk: Arc<LocalDevice>, options: VhostUserOptions) -> Served {
    let path = std::env::temp_dir().join(format!("bowline-{name}-{}.sock", std::process::id()));
    let reports: Arc<Mutex<Vec<String>>> = Arc::default();
    let to = Arc::clone(&reports);
    let trouble = move |why: &str| to.lock().unwrap().push(why.to_owned());
    let server = vhost_user::serve(disk, &path, options, trouble).expect("served");
    Served { server, path, reports }
}

fn memory(bytes: u64) -> Arc<dyn Backend> {
    backend::open(BackendSpec::Memory { bytes, block: 512 }).expect("memory")
}

fn plain(name: &str) -> Served {
    serve(name, LocalDevice::new("disk", memory(16 << 20)), VhostUserOptions::default())
}

#[test]
fn a_guest_reads_what_it_has_written() {
    // tests [NB-66]
    let served = plain("vhost-plain");
    let mode = std::fs::metadata(&served.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let memory = Memory::new();
    for without in [0, F_EVENT_IDX] {
        let mut guest = Guest::start(&served.path, &memory, without);
        memory.put(DATA, &[7; 4096]);
        assert_eq!(guest.run(OUT, 8, &[(DATA, 4096)]), 0);
        assert_eq!(guest.run(FLUSH, 0, &[]), 0);
        assert_eq!(guest.run(IN, 8, &[(DATA + 8192, 4096)]), 0);
        assert_eq!(memory.get(DATA + 8192, 4096), [7; 4096]);
        assert_eq!(guest.run(GET_ID, 0, &[(DATA, 20)]), 0);
        assert_eq!(memory.get(DATA, 6), b"disk\0\0");
        assert_eq!(guest.run(99, 0, &[]), 2, "not supported");
        assert_eq!(guest.run(IN, (16 << 20) / 512, &[(DATA, 512)]), 1, "behind the end");
        memory.put(guest::GUEST, &[0; 128 << 10]);
    }
    assert_eq!(*served.reports.lock().unwrap(), [""; 0]);
    drop(served.server);
    assert!(!served.path.exists(), "the socket is removed");
}

/// The little-endian number at a place of the configuration.
fn number(config: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(config[at..at + 4].try_into().unwrap())
}

#[test]
fn the_configuration_says_what_the_disk_can_do() {
    // tests [NB-66]
    let served = plain("vhost-config");
    let memory = Memory::new();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    assert_eq!(guest.front.get_queue_num().unwrap(), 64);
    let config = guest.config();
    assert_eq!(number(&config, 0), (16 << 20) / 512, "capacity");
    assert_eq!((number(&config, 12), number(&config, 20)), (126, 512), "segments, block");
    assert_eq!(u16::from_le_bytes([config[34], config[35]]), 64, "queues");
    assert!(number(&config, 36) > 0 && number(&config, 48) > 0, "discards, zeroes");
    assert_eq!((number(&config, 40), number(&config, 52)), (16, 16), "ranges");
    assert_eq!(guest.features & F_RO, 0);

    let mut options = VhostUserOptions::default();
    options.read_only = true;
    let disk = LocalDevice::new("disk", self::memory(1 << 20));
    let served = serve("vhost-ro", disk, options);
    let mut guest = Guest::start(&served.path, &memory, 0);
    assert_ne!(guest.features & F_RO, 0);
    assert_eq!(guest.run(OUT, 0, &[(DATA, 512)]), 1);
    assert_eq!(guest.run(IN, 0, &[(DATA, 512)]), 0);
}

/// Writes the range of a discard or of a write of zeroes.
fn put_range(memory: &Memory, at: u64, sector: u64, sectors: u32, flags: u32) {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    memory.put(at, &bytes);
}

#[test]
fn ranges_are_discarded_and_made_zero() {
    // tests [NB-66]
    let served = plain("vhost-ranges");
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    let ranges = DATA + (1 << 20);
    let data = DATA + (2 << 20);
    for (kind, flags) in [(WRITE_ZEROES, 0), (WRITE_ZEROES, 1), (DISCARD, 0)] {
        memory.put(data, &[9; 64 << 10]);
        assert_eq!(guest.run(OUT, 0, &[(data, 64 << 10)]), 0);
        put_range(&memory, ranges, 8, 8, flags);
        put_range(&memory, ranges + 16, 32, 16, flags);
        assert_eq!(guest.run(kind, 0, &[(ranges, 32)]), 0);
        assert_eq!(guest.run(IN, 0, &[(data, 64 << 10)]), 0);
        let bytes = memory.get(data, 64 << 10);
        for (sector, bytes) in bytes.chunks(512).enumerate() {
            let is_zero = matches!(sector, 8..16 | 32..48);
            assert!(bytes.iter().all(|byte| *byte == if is_zero { 0 } else { 9 }), "{sector}");
        }
    }
    put_range(&memory, ranges, 0, 8, 1);
    assert_eq!(guest.run(DISCARD, 0, &[(ranges, 16)]), 2, "an unknown flag");
    put_range(&memory, ranges, u64::MAX, 8, 0);
    assert_eq!(guest.run(DISCARD, 0, &[(ranges, 16)]), 1, "behind the end");
    put_range(&memory, ranges, 0, u32::MAX, 0);
    assert_eq!(guest.run(WRITE_ZEROES, 0, &[(ranges, 16)]), 1, "too long");
    assert_eq!(guest.run(WRITE_ZEROES, 0, &[(ranges, 15)]), 1, "half a range");
    assert_eq!(guest.run(WRITE_ZEROES, 0, &[(ranges, 16 * 17)]), 1, "too many");
}

#[test]
fn requests_of_several_queues_and_with_tables_of_descriptors_are_done() {
    // tests [NB-66]
    let served = plain("vhost-queues");
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    // Indices that wrap, and a ring that is full of requests.
    guest.add_queue(8);
    guest.add_queue(256);
    let tables = DATA + (16 << 20);
    for round in 0..40_u8 {
        for (index, queue) in guest.queues.iter_mut().enumerate() {
            let heads: Vec<u16> = (0..8).collect();
            let at = |head: u16| DATA + (index as u64 * 8 + u64::from(head)) * 65_536;
            let sector = |head: u16| (index as u64 * 8 + u64::from(head)) * 64;
            for head in &heads {
                memory.put(at(*head), &[round ^ *head as u8 ^ index as u8; 16 << 10]);
                // The data in 1, 4 or 32 pieces.
                let count = 1 << (u64::from(head % 3) * 5 / 2);
                let len = (16 << 10) / count;
                let pieces: Vec<_> =
                    (0..count).map(|n| (at(*head) + n * len, len as u32)).collect();
                let table = tables + (index as u64 * 8 + u64::from(*head)) * 1024;
                queue.prepare_indirect(*head, OUT, sector(*head), &pieces, table);
            }
            queue.give(&heads);
            let mut done: Vec<u16> = heads.iter().map(|_| queue.wait().0).collect();
            done.sort_unstable();
            assert_eq!(done, heads);
            for head in heads {
                assert_eq!(queue.status(head), 0);
                queue.prepare_indirect(
                    head,
                    IN,
                    sector(head),
                    &[(at(head) + 32_768, 16_384)],
                    tables,
                );
                queue.give(&[head]);
                assert_eq!(queue.wait(), (head, 16_385));
                assert_eq!(memory.get(at(head) + 32_768, 16_384), memory.get(at(head), 16_384));
            }
        }
    }
    assert_eq!(*served.reports.lock().unwrap(), [""; 0]);
}

#[test]
fn a_machine_learns_of_another_size() {
    // tests [NB-66]
    let path = std::env::temp_dir().join(format!("bowline-vhost-size-{}", std::process::id()));
    let file = File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let fd = File::options().read(true).write(true).open(&path).unwrap().into();
    let spec = BackendSpec::File { fd, read_only: false, block: 512, direct: false };
    let disk = LocalDevice::new("disk", backend::open(spec).unwrap());
    let served = serve("vhost-size", Arc::clone(&disk), VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    guest.front.set_backend_request_fd(&theirs).unwrap();
    // The message was handled when a later one is answered.
    guest.config();
    file.set_len(2 << 20).unwrap();
    disk.resize().unwrap();
    let mut message = [0; 12];
    ours.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    ours.read_exact(&mut message).unwrap();
    assert_eq!((number(&message, 0), number(&message, 4), number(&message, 8)), (2, 1, 0));
    assert_eq!(number(&guest.config(), 0), (2 << 20) / 512);
    assert_eq!(guest.run(OUT, 2048, &[(DATA, 512)]), 0);
    std::fs::remove_file(path).unwrap();
}

/// Where the first used ring is for the log, which need not be memory of the guest.
const USED_LOG: u64 = 0x10_0000;

#[test]
fn every_page_that_is_written_is_logged_and_no_other() {
    // tests [NB-66]
    let served = plain("vhost-log");
    let memory = Memory::new();
    let log = DirtyLog::new();
    for without in [0, F_EVENT_IDX] {
        memory.put(guest::GUEST, &[0; 128 << 10]);
        let mut guest = Guest::connect(&served.path, &memory, without);
        guest.share();
        guest.add_queue(1024);
        assert_eq!(guest.run(IN, 0, &[(DATA, 4096)]), 0);
        guest.set_log(&log);
        assert_eq!(guest.run(IN, 0, &[(DATA, 4096)]), 0);
        assert_eq!(log.take(), [0; 0], "not yet");
        guest.log_writes(Some(USED_LOG));
        let call = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
        guest.front.set_log_fd(call.as_raw_fd()).unwrap();
        guest.config();
        log.take();
        let status = pages(guest.queues[0].header(0) + 16, 1);
        // The index and the first elements; the event index is behind all elements.
        let mut used = pages(USED_LOG, 100);
        if without == 0 {
            used.extend(pages(USED_LOG + 4 + 8 * 1024, 2));
        }
        let check = |guest: &mut Guest, kind: u32, pieces: &[(u64, u32)], written: bool| {
            assert_eq!(guest.run(kind, 0, pieces), 0);
            // The answer shows that the thread has done all that the request asked of it.
            guest.config();
            assert!(call.read().is_ok(), "the machine is notified");
            let marked = log.take();
            let pieces = pieces.iter().filter(|_| written);
            let mut data: Vec<_> =
                pieces.flat_map(|(at, len)| pages(*at, u64::from(*len))).collect();
            data.extend(status.iter().chain(&used));
            data.sort_unstable();
            data.dedup();
            assert_eq!(marked, data, "{kind} {without:x}");
        };
        check(&mut guest, IN, &[(DATA, 4096)], true);
        check(&mut guest, IN, &[(DATA + 4096 * 7 + 512, 1 << 20)], true);
        check(&mut guest, OUT, &[(DATA, 4096)], false);
        check(&mut guest, FLUSH, &[], false);
        check(&mut guest, GET_ID, &[(DATA + 4090, 20)], true);
        // Copied, since the pieces are many and short, or not whole blocks.
        let short: Vec<_> = (0..16).map(|at| (DATA + at * 16_384, 1024)).collect();
        check(&mut guest, IN, &short, true);
        check(&mut guest, IN, &[(DATA + 4000, 100), (DATA + 65_536, 412)], true);
        // Of a read that fails nothing is known; its status is written.
        assert_eq!(guest.run(IN, u64::MAX, &[(DATA, 512)]), 1);
        assert!(log.take().contains(&status[0]));

        guest.log_writes(None);
        log.take();
        assert_eq!(guest.run(IN, 0, &[(DATA, 4096)]), 0);
        guest.config();
        assert_eq!(log.take(), [0; 0], "no longer");
    }
    assert_eq!(*served.reports.lock().unwrap(), [""; 0]);
}

#[test]
fn requests_are_logged_where_writes_are_logged_when_they_end() {
    // tests [NB-66]
    let (before, log, other) = (DirtyLog::new(), DirtyLog::new(), DirtyLog::new());
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-log-ends", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    let at = |head: u16| DATA + u64::from(head) * 4096;
    for (count, head) in [(1, 0), (2, 4), (3, 8)] {
        guest.queues[0].prepare(head, IN, 0, &[(at(head), 4096)]);
        guest.queues[0].give(&[head]);
        until("it is in flight", || store.count() == count);
    }
    guest.set_log(&before);
    guest.set_log(&log);
    guest.log_writes(Some(USED_LOG));
    store.let_one_go(0);
    assert_eq!(guest.queues[0].wait().0, 0);
    assert!(log.take().contains(&pages(at(0), 1)[0]));
    guest.set_log(&other);
    store.let_one_go(0);
    assert_eq!(guest.queues[0].wait().0, 4);
    let marked = other.take();
    assert!(marked.contains(&pages(at(4), 1)[0]) && !marked.contains(&pages(at(0), 1)[0]));
    guest.log_writes(None);
    store.let_one_go(0);
    assert_eq!(guest.queues[0].wait().0, 8);
    guest.config();
    for log in [before, log, other] {
        assert_eq!(log.take(), [0; 0]);
    }
}

#[test]
fn a_copy_of_memory_that_follows_the_log_is_the_memory() {
    // tests [NB-66]
    let served = plain("vhost-log-copy");
    let memory = Memory::new();
    let log = DirtyLog::new();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    for _ in 0..4 {
        guest.add_queue(16);
    }
    guest.set_log(&log);
    guest.log_writes(Some(guest.queues[0].used()));
    let all = [7_u8, 8].map(|byte| vec![byte; 1 << 20]);
    let running = std::sync::atomic::AtomicBool::new(true);
    let mut copy = memory.get(DATA, guest::BYTES / 2);
    let follow = |copy: &mut Vec<u8>| {
        for page in log.take() {
            if let Some(at) = (page * 4096).checked_sub(DATA) {
                copy[at as usize..][..4096].copy_from_slice(&memory.get(DATA + at, 4096));
            }
        }
    };
    std::thread::scope(|threads| {
        let queues: Vec<_> = guest.queues.iter_mut().enumerate().collect();
        let mut users = Vec::new();
        for (index, queue) in queues {
            let (all, memory) = (&all, &memory);
            users.push(threads.spawn(move || {
                let base = DATA + index as u64 * (8 << 20);
                let sector = index as u64 * 8192;
                for round in 0..60_u64 {
                    let bytes = &all[round as usize % 2];
                    memory.put(base + (7 << 20), bytes);
                    assert_eq!(queue.run(OUT, sector, &[(base + (7 << 20), 1 << 20)]), 0);
                    let at = base + round % 16 * 4096;
                    let pieces: [&[(u64, u32)]; 2] =
                        [&[(at, 512 << 10)], &[(at, 100), (at + 8192, 412)]];
                    let pieces = pieces[usize::from(round % 3 == 0)];
                    assert_eq!(queue.run(IN, sector, pieces), 0);
                }
            }));
        }
        let running = &running;
        threads.spawn(move || {
            users.into_iter().for_each(|user| user.join().unwrap());
            running.store(false, SeqCst);
        });
        while running.load(SeqCst) {
            follow(&mut copy);
        }
    });
    for index in 0..4 {
        guest.front.get_vring_base(index).unwrap();
    }
    follow(&mut copy);
    for queue in 0..4 {
        let at = queue * (8 << 20);
        let same = copy[at..at + (7 << 20)] == memory.get(DATA + at as u64, 7 << 20);
        assert!(same, "memory of queue {queue}");
    }
}

#[test]
fn a_log_that_does_not_hold_what_is_written_ends_its_connection_only() {
    // tests [NB-66]
    let served = plain("vhost-log-hostile");
    let memory = Memory::new();
    let other_memory = Memory::new();
    let mut other = Guest::start(&served.path, &other_memory, 0);
    let log = DirtyLog::new();
    let end = (DirtyLog::LEN * 8 * 4096) as u64;
    type Step<'a> = (&'a str, &'a dyn Fn(&mut Guest));
    let short = || {
        let mut region = log.region();
        region.mmap_size -= 8;
        region
    };
    let all_is_logged = |guest: &mut Guest| {
        // Fails when the connection ends first.
        _ = guest.front.set_features(guest.features | F_LOG_ALL);
    };
    let steps: [Step<'_>; 5] = [
        ("a log shorter than memory", &|guest| {
            guest.front.set_log_base(0, Some(short())).unwrap();
            all_is_logged(guest);
        }),
        ("a log that becomes shorter", &|guest| {
            guest.set_log(&log);
            all_is_logged(guest);
            _ = guest.front.set_log_base(0, Some(short()));
        }),
        ("a log outside of its file", &|guest| {
            let mut region = log.region();
            region.mmap_size = u64::MAX;
            _ = guest.front.set_log_base(0, Some(region));
        }),
        ("a used ring behind the log", &|guest| {
            guest.set_log(&log);
            let mut addresses = guest.queues[0].addresses();
            (addresses.flags, addresses.log_addr) = (1, Some(end - 8));
            _ = guest.front.set_vring_addr(0, &addresses);
        }),
        ("a used ring at the end of all addresses", &|guest| {
            guest.set_log(&log);
            let mut addresses = guest.queues[0].addresses();
            (addresses.flags, addresses.log_addr) = (1, Some(u64::MAX - 1));
            _ = guest.front.set_vring_addr(0, &addresses);
        }),
    ];
    for (what, step) in steps {
        memory.put(guest::GUEST, &[0; 128 << 10]);
        let mut guest = Guest::start(&served.path, &memory, 0);
        assert_eq!(guest.run(IN, 0, &[(DATA, 512)]), 0);
        step(&mut guest);
        assert!(guest.front.get_features().is_err(), "{what}");
        assert_eq!(other.run(IN, 0, &[(DATA, 512)]), 0, "{what}");
    }
    let sealed = guest::memory(1 << 20, SealFlags::SHRINK);
    let unsealed = guest::memory(1 << 20, SealFlags::empty());
    let all: [(u32, Vec<u8>, &[&File]); 5] = [
        (6, words(&[1 << 20, 0]), &[]),
        (6, words(&[1 << 20, 0]), &[&unsealed]),
        (6, words(&[1 << 20, 4]), &[&sealed]),
        (6, words(&[0]), &[&sealed]),
        (7, vec![], &[&sealed]),
    ];
    for (request, body, fds) in all {
        assert_eq!(raw(&served, request, &body, fds), [0; 0], "{request} {body:?}");
    }
    assert_eq!(other.run(IN, 0, &[(DATA, 512)]), 0);
}

/// Memory that is plugged in, and its address in the guest.
fn plugged(at: u64, len: u64, file: &File) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: at,
        memory_size: len,
        userspace_addr: at + (1 << 40),
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

#[test]
fn memory_is_plugged_in_and_pulled_out_once_nothing_uses_it() {
    // tests [NB-66]
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-slots", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    assert_eq!(guest.front.get_max_mem_slots().unwrap(), 509);
    guest.front.add_mem_region(&memory.region()).unwrap();
    guest.add_queue(128);
    let (at, len) = (guest::GUEST * 4, 2 << 20);
    let file = guest::memory(len as usize, SealFlags::SHRINK);
    let module = plugged(at, len, &file);
    let bytes = Buffer::from_memfd(&file).unwrap();
    bytes.write(4096, &[7; 4096]);
    // Each is acknowledged from now on.
    guest.front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    for round in 0..3 {
        guest.front.add_mem_region(&module).unwrap();
        // A request to it and two to other memory, of which one ends late.
        let all: [(u16, u32, u64); 3] = [(0, OUT, at + 4096), (4, IN, DATA), (8, OUT, DATA)];
        for (count, (head, kind, data)) in (1..).zip(all) {
            guest.queues[0].prepare(head, kind, u64::from(head), &[(data, 4096)]);
            guest.queues[0].give(&[head]);
            until("it is in flight", || store.count() == count);
        }
        assert_eq!(store.memory.load(SeqCst), guest::BYTES, "registered, not copied");
        let mut front = guest.front.clone();
        let remove = module;
        let removal = std::thread::spawn(move || front.remove_mem_region(&remove).unwrap());
        store.let_one_go(1);
        assert_eq!(guest.queues[0].wait().0, 4);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!removal.is_finished(), "it is in use: {round}");
        store.let_one_go(0);
        removal.join().unwrap();
        // Who is acknowledged finds the request answered.
        assert_eq!((guest.queues[0].wait().0, guest.queues[0].status(0)), (0, 0));
        store.let_one_go(0);
        assert_eq!(guest.queues[0].wait().0, 8);
        guest.queues[0].prepare(0, IN, 0, &[(at, 512)]);
        guest.queues[0].give(&[0]);
        assert_eq!((guest.queues[0].wait().0, guest.queues[0].status(0)), (0, 1), "it is gone");
    }
    store.let_go();
    assert_eq!(guest.run(IN, 0, &[(DATA, 4096)]), 0);
    assert_eq!(memory.get(DATA, 4096), [7; 4096]);
    assert_eq!(*served.reports.lock().unwrap(), [""; 0]);
}

/// The machine's process replaces a region, in which a ring runs, by a longer one.
#[test]
fn a_ring_waits_for_its_memory_when_that_is_removed() {
    // tests [NB-66]
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-ring-memory", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    // Rings and all else, but the last page, or all of it.
    let all = memory.region();
    let short = VhostUserMemoryRegionInfo { memory_size: all.memory_size - 4096, ..all };
    guest.front.add_mem_region(&short).unwrap();
    let _kept = guest.keep(128);
    guest.add_queue(128);
    // Each is acknowledged from now on.
    guest.front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let mut regions = [short, all].into_iter().cycle();
    for round in 0..4_u16 {
        let now = regions.next().expect("endless");
        guest.queues[0].prepare(0, OUT, 8, &[(DATA, 4096)]);
        guest.queues[0].give(&[0]);
        until("it is in flight", || store.count() == 1);
        let mut front = guest.front.clone();
        let removal = std::thread::spawn(move || front.remove_mem_region(&now).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!removal.is_finished(), "its ring is in use: {round}");
        store.let_one_go(0);
        removal.join().unwrap();
        assert_eq!(guest.queues[0].take_used().map(|used| used.0), Some(0), "answered before");
        // What the guest asks for without memory waits.
        guest.queues[0].prepare(4, OUT, 16, &[(DATA, 4096)]);
        guest.queues[0].give(&[4]);
        guest.config();
        assert_eq!(store.count(), 0);
        let mut next = regions.clone();
        guest.front.add_mem_region(&next.next().expect("endless")).unwrap();
        until("the ring runs again", || store.count() == 1);
        store.let_one_go(0);
        assert_eq!((guest.queues[0].wait().0, guest.queues[0].status(4)), (4, 0));
        assert_eq!(guest.queues[0].used_index(), 2 * (round + 1), "nothing is done twice");
    }
    // A broken ring is not served with its memory either.
    let now = regions.next().expect("endless");
    let used = guest.queues[0].used_index();
    guest.queues[0].give_index(used.wrapping_add(1000));
    until("it is broken", || served.reports.lock().unwrap().len() == 1);
    guest.front.remove_mem_region(&now).unwrap();
    guest.front.add_mem_region(&now).unwrap();
    guest.config();
    assert_eq!((store.count(), served.reports.lock().unwrap().len()), (0, 1));
    // The machine stops it, which gives its place.
    assert_eq!(guest.front.get_vring_base(0).unwrap(), u32::from(used));
}

#[test]
fn a_request_spans_memory_that_was_plugged_in_one_by_one() {
    // tests [NB-66]
    let served = plain("vhost-spans");
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    let file = guest::memory(509 << 12, SealFlags::SHRINK);
    let bytes = Buffer::from_memfd(&file).unwrap();
    // In the guest, pages are in another order than in their file.
    let at = |page: u64| guest::GUEST * 4 + page * 4096;
    let page = |page: u64| {
        let user = VhostUserMemoryRegionInfo {
            mmap_offset: page * 7 % 509 * 4096,
            ..plugged(at(page), 4096, &file)
        };
        bytes.write(user.mmap_offset as usize, &[page as u8; 4096]);
        user
    };
    // Each is acknowledged.
    guest.front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    for index in (0..508).rev() {
        guest.front.add_mem_region(&page(index)).unwrap();
    }
    assert_eq!(guest.run(OUT, 0, &[(at(0), 508 << 12)]), 0);
    assert_eq!(guest.run(IN, 0, &[(DATA, 508 << 12)]), 0);
    let read = memory.get(DATA, 508 << 12);
    assert!(read.chunks(4096).enumerate().all(|(index, page)| page == [index as u8; 4096]));
    guest.front.remove_mem_region(&page(100)).unwrap();
    assert_eq!(guest.run(OUT, 0, &[(at(0), 508 << 12)]), 1);
    assert_eq!(guest.run(OUT, 0, &[(at(101), 64 << 12)]), 0);
    guest.front.add_mem_region(&page(100)).unwrap();
    assert_eq!(guest.run(OUT, 0, &[(at(0), 508 << 12)]), 0);
    guest.front.add_mem_region(&page(508)).unwrap_err();
}

/// What a guest breaks the rules of its ring with.
type Mischief = fn(&mut guest::Queue);

#[test]
fn a_guest_that_breaks_its_ring_loses_this_ring_only() {
    // tests [NB-66]
    let all: [(&str, Mischief); 10] = [
        ("a loop", |queue| {
            let desc = Desc { guest: DATA, len: 16, flags: NEXT, next: 0 };
            queue.put_desc(queue.table(), 0, desc);
            queue.give(&[0]);
        }),
        ("a descriptor outside of its table", |queue| {
            let desc = Desc { guest: DATA, len: 16, flags: NEXT, next: queue.size };
            queue.put_desc(queue.table(), 0, desc);
            queue.give(&[0]);
        }),
        ("a head outside of its descriptors", |queue| _ = queue.give(&[queue.size])),
        ("more requests than descriptors", |queue| {
            queue.give_index(queue.next.wrapping_add(queue.size + 1));
        }),
        ("a table in a table", |queue| {
            let desc = Desc { guest: DATA, len: 16, flags: INDIRECT, next: 0 };
            queue.put_desc(DATA, 0, desc);
            queue.put_desc(queue.table(), 0, desc);
            queue.give(&[0]);
        }),
        ("a table outside of memory", |queue| {
            let desc = Desc { guest: u64::MAX - 8, len: 64, flags: INDIRECT, next: 0 };
            queue.put_desc(queue.table(), 0, desc);
            queue.give(&[0]);
        }),
        ("a table of 256 MiB", |queue| {
            let desc = Desc { guest: DATA, len: 1 << 28, flags: INDIRECT, next: 0 };
            queue.put_desc(queue.table(), 0, desc);
            queue.give(&[0]);
        }),
        ("memory to read behind memory to write", |queue| {
            let desc = Desc { guest: DATA, len: 16, flags: NEXT | WRITE, next: 1 };
            queue.put_desc(queue.table(), 0, desc);
            queue.put_desc(queue.table(), 1, Desc { flags: 0, ..desc });
            queue.give(&[0]);
        }),
        ("no place for the status", |queue| {
            queue.prepare(0, OUT, 0, &[(DATA, 512)]);
            let desc = Desc { guest: DATA, len: 512, flags: 0, next: 0 };
            queue.put_desc(queue.table(), 1, desc);
            queue.give(&[0]);
        }),
        ("a status outside of memory", |queue| {
            queue.prepare(0, OUT, 0, &[(DATA, 512)]);
            let desc = Desc { guest: 0, len: 1, flags: WRITE, next: 0 };
            queue.put_desc(queue.table(), 2, desc);
            queue.give(&[0]);
        }),
    ];
    let served = plain("vhost-mischief");
    let memory = Memory::new();
    for (what, mischief) in all {
        let mut guest = Guest::connect(&served.path, &memory, 0);
        memory.put(guest::GUEST, &[0; 1 << 20]);
        guest.share();
        guest.add_queue(16);
        guest.add_queue(16);
        let error = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
        guest.front.set_vring_err(0, &error).unwrap();
        assert_eq!(guest.queues[0].run(OUT, 0, &[(DATA, 512)]), 0, "{what}");
        mischief(&mut guest.queues[0]);
        until(what, || error.read().is_ok());
        // The other ring and the connection work on; set up again, this one does too.
        assert_eq!(guest.queues[1].run(OUT, 0, &[(DATA, 512)]), 0, "{what}");
        guest.front.get_vring_base(0).unwrap();
        assert_eq!(guest.queues[0].used_index(), 1, "{what}");
    }
    assert!(served.reports.lock().unwrap()[0].starts_with("queue 0 is stopped: its guest put"));
}

#[test]
fn a_machine_that_names_its_error_descriptor_late_learns_that_a_ring_is_broken() {
    // tests [NB-66]
    let served = plain("vhost-late");
    let memory = Memory::new();
    let guest = Guest::start(&served.path, &memory, 0);
    guest.queues[0].give_index(200);
    until("it is reported", || !served.reports.lock().unwrap().is_empty());
    let flags = EventfdFlags::NONBLOCK.bits() as i32;
    let error = vmm_sys_util::eventfd::EventFd::new(flags).unwrap();
    guest.front.set_vring_err(0, &error).unwrap();
    until("it is signalled", || error.read().is_ok());
}

#[test]
fn requests_for_what_is_not_there_fail_and_others_work_on() {
    // tests [NB-66]
    let served = plain("vhost-errors");
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    let end = guest::GUEST + guest::BYTES as u64;
    let long = 1 << 31;
    type Bad<'a> = (u32, u64, &'a [(u64, u32)]);
    let bad: [Bad<'_>; 10] = [
        (OUT, 0, &[(0, 512)]),
        (OUT, 0, &[(u64::MAX - 100, 512)]),
        (IN, 0, &[(end - 256, 512)]),
        (IN, 0, &[(DATA, 512), (end, 512)]),
        (IN, u64::MAX, &[(DATA, 512)]),
        (IN, u64::MAX / 512, &[(DATA, 512)]),
        (IN, 0, &[(DATA, 511)]),
        (OUT, 0, &[(DATA, long), (DATA, long)]),
        (OUT, 32_767, &[(DATA, 1024)]),
        (DISCARD, 0, &[]),
    ];
    for (kind, sector, data) in bad {
        assert_eq!(guest.run(kind, sector, data), 1, "{kind} {sector} {data:x?}");
    }
    assert_eq!(guest.run(IN, 0, &[]), 0, "nothing to read");
    assert_eq!(guest.run(OUT, 0, &[(DATA, 100), (DATA + 100, 412)]), 0, "odd pieces of a block");
    assert_eq!(guest.run(IN, 0, &[(DATA, 512)]), 0);
}

/// A machine's process that sends bytes of its own.
fn raw(served: &Served, request: u32, body: &[u8], fds: &[&File]) -> Vec<u8> {
    let socket = UnixStream::connect(&served.path).unwrap();
    send(&socket, request, body, fds);
    ended(socket)
}

fn send(socket: &UnixStream, request: u32, body: &[u8], fds: &[&File]) {
    let header = [request, 1, body.len() as u32].into_iter().flat_map(u32::to_ne_bytes);
    let bytes: Vec<u8> = header.chain(body.iter().copied()).collect();
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let piece = [std::io::IoSlice::new(&bytes)];
    rustix::net::sendmsg(socket, &piece, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

/// Returns what comes until the connection is ended by the other side.
fn ended(mut socket: UnixStream) -> Vec<u8> {
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut bytes = Vec::new();
    match socket.read_to_end(&mut bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        result => _ = result.expect("it is ended"),
    }
    bytes
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_ne_bytes()).collect()
}

#[test]
fn a_machine_that_breaks_the_protocol_is_disconnected_and_others_work_on() {
    // tests [NB-66]
    let served = plain("vhost-protocol");
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    let sealed = guest::memory(1 << 20, SealFlags::SHRINK);
    let unsealed = guest::memory(1 << 20, SealFlags::empty());
    let empty = guest::memory(0, SealFlags::SHRINK);
    let vast = guest::memory(1 << 46, SealFlags::SHRINK);
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    let region = |guest, len, user, offset| words(&[1, guest, len, user, offset]);
    let whole = region(0, 1 << 20, 0, 0);
    let slot = |guest, len, user, offset| words(&[0, guest, len, user, offset]);
    let all: [(u32, Vec<u8>, &[&File]); 38] = [
        (99, vec![], &[]),
        (37, slot(0, 1 << 20, 0, 0), &[]),
        (37, slot(0, 1 << 20, 0, 0), &[&sealed, &sealed]),
        (37, slot(0, 1 << 20, 0, 0), &[&unsealed]),
        (37, slot(0, 0, 0, 0), &[&sealed]),
        (37, slot(0, 1 << 20, 0, 4096), &[&sealed]),
        (37, slot(u64::MAX, 4096, 0, 0), &[&sealed]),
        (37, slot(0, 4096, u64::MAX, 0), &[&sealed]),
        (37, slot(0, 4096, 0, u64::MAX), &[&sealed]),
        (37, words(&[0, 0, 4096, 0]), &[&sealed]),
        (38, slot(0, 1 << 20, 0, 0), &[]),
        (5, words(&[2, 0, 8192, 0, 0, 4096, 8192, 8192, 8192]), &[&sealed, &sealed]),
        (36, vec![0], &[]),
        (1, vec![0], &[]),
        (5, whole.clone(), &[]),
        (5, whole.clone(), &[&sealed, &sealed]),
        (5, whole.clone(), &[&unsealed]),
        (5, whole.clone(), &[&empty]),
        (5, whole.clone(), &[&vast]),
        (5, whole.clone(), &[&null]),
        (5, whole, &[&sealed; 9]),
        (5, region(0, 1 << 20, 0, 4096), &[&sealed]),
        (5, region(0, 2, 0, u64::MAX), &[&sealed]),
        (5, region(u64::MAX, 4096, 0, 0), &[&sealed]),
        (5, region(0, 4096, u64::MAX, 0), &[&sealed]),
        (8, halves(&[0, 3]), &[]),
        (8, halves(&[0, 0]), &[]),
        (8, halves(&[0, 65_536]), &[]),
        (8, halves(&[64, 4]), &[]),
        (12, words(&[0]), &[&null]),
        (12, words(&[0]), &[]),
        (12, words(&[0x100]), &[]),
        (13, words(&[0]), &[&sealed]),
        (21, vec![], &[&null]),
        (21, vec![], &[]),
        (32, words(&[1 << 20, 0, 0xffff_ffff]), &[&sealed]),
        (32, words(&[1 << 20, 0, 0x10_0001]), &[&null]),
        (31, words(&[0, 0, 0]), &[]),
    ];
    for (request, body, fds) in all {
        assert_eq!(raw(&served, request, &body, fds), [0; 0], "{request} {body:?}");
        assert_eq!(guest.run(OUT, 0, &[(DATA, 512)]), 0);
    }
    let reports = served.reports.lock().unwrap().clone();
    assert!(
        reports[0].starts_with("disconnected from a machine: message 99 is unknown"),
        "{reports:?}"
    );
    // A message that never ends holds up its own connection only.
    let mut half = UnixStream::connect(&served.path).unwrap();
    half.write_all(&[1, 0, 0]).unwrap();
    assert_eq!(guest.run(OUT, 0, &[(DATA, 512)]), 0);
    drop(half);
}

#[test]
fn memory_that_can_become_shorter_is_refused_with_what_to_do() {
    // tests [NB-66]
    let served = plain("vhost-unsealed");
    let unsealed = guest::memory(1 << 20, SealFlags::empty());
    raw(&served, 5, &words(&[1, 0, 1 << 20, 0, 0]), &[&unsealed]);
    let reports = served.reports.lock().unwrap().clone();
    assert!(reports[0].contains("memory-backend-memfd,share=on"), "{reports:?}");
}

#[test]
fn rings_outside_of_memory_are_refused() {
    // tests [NB-66]
    let served = plain("vhost-rings");
    let sealed = guest::memory(1 << 20, SealFlags::SHRINK);
    let event = File::from(rustix::event::eventfd(0, EventfdFlags::empty()).unwrap());
    // Descriptors, used and available; the last are just behind the end, or not aligned.
    let all = [
        [0, 4096, 2 << 20],
        [1 << 21, 0, 0],
        [0, (1 << 20) - 6 - 8 * 16 + 2, 4096],
        [1, 4096, 8192],
        [0, 4097, 8192],
        [0, 4096, 8193],
        [u64::MAX - 1, 0, 0],
    ];
    for [descriptors, used, available] in all {
        let socket = UnixStream::connect(&served.path).unwrap();
        send(&socket, 5, &words(&[1, 0, 1 << 20, 0, 0]), &[&sealed]);
        send(&socket, 8, &halves(&[0, 16]), &[]);
        send(&socket, 9, &words(&[0, descriptors, used, available, 0]), &[]);
        send(&socket, 12, &words(&[0]), &[&event]);
        assert_eq!(ended(socket), [0; 0], "{descriptors:x} {used:x} {available:x}");
    }
}

/// A request, and who gets its result.
type HeldIo = (BackendIo, Arc<dyn BackendDone>);

/// A store that executes nothing until it is let go.
struct Held {
    store: Arc<dyn Backend>,
    held: Mutex<Option<Vec<HeldIo>>>,
    writes: AtomicUsize,
    flushes: AtomicUsize,
    /// Where on the disk the writes were, in the order in which they came.
    offsets: Mutex<Vec<u64>>,
    /// Bytes of the memory that the data of the last write was in.
    memory: AtomicUsize,
}

impl Held {
    fn new() -> Arc<Self> {
        let held = Mutex::new(Some(Vec::new()));
        let [writes, flushes, memory] = Default::default();
        let (store, offsets) = (self::memory(16 << 20), Mutex::default());
        Arc::new(Self { store, held, writes, flushes, offsets, memory })
    }

    fn count(&self) -> usize {
        self.held.lock().unwrap().as_ref().map_or(0, Vec::len)
    }

    fn let_one_go(&self, index: usize) {
        let (io, done) = self.held.lock().unwrap().as_mut().expect("held").remove(index);
        self.store.submit(&mut vec![io], &done);
    }

    /// Has a request fail.
    fn fail_one(&self, index: usize) {
        let (io, done) = self.held.lock().unwrap().as_mut().expect("held").remove(index);
        done.done(&[BackendResult::new(io.token, Err(Errno::EIO))]);
    }

    fn let_go(&self) {
        for (io, done) in self.held.lock().unwrap().take().into_iter().flatten() {
            self.store.submit(&mut vec![io], &done);
        }
    }
}

impl Backend for Held {
    fn limits(&self) -> Limits {
        Limits { write_cache: true, ..self.store.limits() }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        let count = |op| io.iter().filter(|io| io.op == op).count();
        self.writes.fetch_add(count(IoOp::Write), SeqCst);
        self.flushes.fetch_add(count(IoOp::Flush), SeqCst);
        let writes = io.iter().filter(|io| io.op == IoOp::Write);
        self.offsets.lock().unwrap().extend(writes.map(|io| io.offset));
        for mem in io.iter().filter_map(|io| io.mem.as_ref()) {
            self.memory.store(mem.buffer.len(), SeqCst);
        }
        let mut held = self.held.lock().unwrap();
        match &mut *held {
            Some(held) => held.extend(io.drain(..).map(|io| (io, Arc::clone(done)))),
            None => {
                drop(held);
                self.store.submit(io, done);
            }
        }
    }

    fn kick(&self) {
        self.store.kick();
    }

    fn region(&self) -> Option<Arc<Buffer>> {
        self.store.region()
    }
}

/// Waits for a condition.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn requests_in_flight_are_done_again_for_who_connects_again_once_the_old_have_ended() {
    // tests [NB-66]
    let store = Held::new();
    let served = serve(
        "vhost-again",
        LocalDevice::new("disk", Arc::clone(&store) as _),
        VhostUserOptions::default(),
    );
    let memory = Memory::new();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    let asked = VhostUserInflight { num_queues: 1, queue_size: 16, ..Default::default() };
    let (spec, file) = guest.front.get_inflight_fd(&asked).unwrap();
    guest.front.set_inflight_fd(&spec, file.as_raw_fd()).unwrap();
    // Indices that wrap while requests are in flight.
    guest.add_queue_at(16, u16::MAX);
    memory.put(DATA, &[1; 512]);
    memory.put(DATA + 512, &[2; 512]);
    // Slot 0, of which older servers did not know whether it was in use.
    guest.queues[0].prepare(0, OUT, 0, &[(DATA, 512)]);
    guest.queues[0].prepare(4, OUT, 0, &[(DATA + 512, 512)]);
    guest.queues[0].give(&[0]);
    until("one is in flight", || store.count() == 1);
    guest.queues[0].give(&[4]);
    until("both are in flight", || store.count() == 2);
    let queue = guest.queues.remove(0);
    drop(guest);

    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    guest.front.set_inflight_fd(&spec, file.as_raw_fd()).unwrap();
    guest.resume(queue);
    // An answer shows that all messages were handled.
    guest.config();
    assert_eq!((store.count(), guest.queues[0].used_index()), (2, u16::MAX), "they wait");
    store.let_go();
    let done = [guest.queues[0].wait().0, guest.queues[0].wait().0];
    assert_eq!((done, store.writes.load(SeqCst)), ([0, 4], 4));
    assert_eq!((guest.queues[0].status(0), guest.queues[0].status(4)), (0, 0));
    assert_eq!(guest.run(IN, 0, &[(DATA, 512)]), 0);
    assert_eq!(memory.get(DATA, 512), [2; 512], "in their order");
    assert_eq!(guest.queues[0].used_index(), 2);
    // Now nothing is in flight, and nothing is done again.
    let queue = guest.queues.remove(0);
    drop(guest);
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    guest.front.set_inflight_fd(&spec, file.as_raw_fd()).unwrap();
    guest.resume(queue);
    assert_eq!(guest.run(IN, 0, &[(DATA, 512)]), 0);
    assert_eq!((guest.queues[0].used_index(), store.writes.load(SeqCst)), (3, 4));
}

#[test]
fn what_was_done_out_of_order_is_not_done_again_and_what_was_not_is() {
    // tests [NB-66]
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-order", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    let asked = VhostUserInflight { num_queues: 1, queue_size: 16, ..Default::default() };
    let (spec, file) = guest.front.get_inflight_fd(&asked).unwrap();
    guest.front.set_inflight_fd(&spec, file.as_raw_fd()).unwrap();
    guest.add_queue(16);
    for (head, count) in [(0, 1), (4, 2)] {
        guest.queues[0].prepare(head, OUT, 0, &[(DATA, 512)]);
        guest.queues[0].give(&[head]);
        until("it is in flight", || store.count() == count);
    }
    store.let_one_go(1);
    assert_eq!(guest.queues[0].wait().0, 4);
    let queue = guest.queues.remove(0);
    drop(guest);
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    guest.front.set_inflight_fd(&spec, file.as_raw_fd()).unwrap();
    guest.resume(queue);
    store.let_go();
    assert_eq!(guest.queues[0].wait().0, 0);
    assert_eq!((guest.queues[0].used_index(), store.writes.load(SeqCst)), (2, 3));
}

#[test]
fn requests_are_done_again_in_the_order_in_which_they_were_taken() {
    // tests [NB-66]
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-taken", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    let kept = guest.keep(16);
    guest.add_queue_at(16, u16::MAX - 1);
    // Neither the order of their slots nor that of their places on the disk.
    let heads = [8, 0, 12, 4];
    for (count, head) in (1..).zip(heads) {
        guest.queues[0].prepare(head, OUT, u64::from(head ^ 4), &[(DATA, 512)]);
        guest.queues[0].give(&[head]);
        until("it is in flight", || store.count() == count);
    }
    let offsets = heads.map(|head| u64::from(head ^ 4) * 512);
    assert_eq!(*store.offsets.lock().unwrap(), offsets);
    let queue = guest.queues.remove(0);
    drop(guest);
    store.offsets.lock().unwrap().clear();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    guest.continue_with(&kept);
    guest.resume(queue);
    store.let_go();
    for _ in heads {
        let head = guest.queues[0].wait().0;
        assert_eq!(guest.queues[0].status(head), 0);
    }
    assert_eq!(*store.offsets.lock().unwrap(), offsets);
    assert_eq!((guest.queues[0].used_index(), guest.queues[0].take_used()), (2, None));
}

#[test]
fn a_machine_that_is_detached_sees_what_ends_well_and_nothing_that_fails() {
    // tests [NB-66]
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-detached", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    let kept = guest.keep(16);
    guest.add_queue(16);
    for (count, head) in (1..).zip([0, 4, 8]) {
        guest.queues[0].prepare(head, OUT, u64::from(head), &[(DATA, 512)]);
        guest.queues[0].give(&[head]);
        until("it is in flight", || store.count() == count);
    }
    served.server.detach();
    guest.queues[0].prepare(12, IN, 0, &[(DATA, 512)]);
    guest.queues[0].give(&[12]);
    store.let_one_go(1);
    assert_eq!(guest.queues[0].wait().0, 4);
    store.fail_one(0);
    assert_eq!(served.server.connections(), 1, "one is in flight still");
    store.fail_one(0);
    until("it is disconnected", || guest.front.get_features().is_err());
    let status = |guest: &Guest| [0, 4, 8, 12].map(|head| guest.queues[0].status(head));
    assert_eq!((guest.queues[0].used_index(), status(&guest)), (1, [0xff, 0, 0xff, 0xff]));
    // Nobody is let in, also after a command has asked for that.
    served.server.enable();
    let mut late = UnixStream::connect(&served.path).unwrap();
    assert!(matches!(late.read(&mut [0]), Ok(0) | Err(_)));
    let queue = guest.queues.remove(0);
    drop(served);

    store.let_go();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-detached", disk, VhostUserOptions::default());
    let mut guest = Guest::connect(&served.path, &memory, 0);
    guest.share();
    guest.continue_with(&kept);
    guest.resume(queue);
    for _ in 0..3 {
        guest.queues[0].wait();
    }
    assert_eq!((guest.queues[0].used_index(), status(&guest)), (4, [0; 4]));
    assert_eq!(store.writes.load(SeqCst), 5);
}

#[test]
fn data_in_few_pieces_is_not_copied() {
    // tests [NB-66]
    let store = Held::new();
    store.let_go();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-direct", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    let copy = 8 << 20;
    let short: Vec<_> = (0..16).map(|at| (DATA + at * 8192, 4096)).collect();
    let long: Vec<_> = (0..4).map(|at| (DATA + at * 131_072, 65_536)).collect();
    let all: [(&[(u64, u32)], usize); 5] = [
        (&[(DATA, 4096)], guest::BYTES),
        (&[(DATA, 4096), (DATA + 65_536, 4096)], guest::BYTES),
        (&long, guest::BYTES),
        (&short, copy),
        // Pieces that are not whole blocks.
        (&[(DATA, 100), (DATA + 8192, 412)], copy),
    ];
    for (pieces, bytes) in all {
        assert_eq!(guest.run(OUT, 0, pieces), 0);
        assert_eq!(store.memory.load(SeqCst), bytes, "{pieces:?}");
    }
}

#[test]
fn a_guest_that_does_not_flush_has_its_writes_flushed() {
    // tests [NB-66]
    let store = Held::new();
    store.let_go();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-flush", disk, VhostUserOptions::default());
    let memory = Memory::new();
    for (without, flushes) in [(0, 0), (F_FLUSH, 1)] {
        memory.put(guest::GUEST, &[0; 128 << 10]);
        let mut guest = Guest::start(&served.path, &memory, without);
        assert_eq!(guest.run(OUT, 0, &[(DATA, 512)]), 0);
        assert_eq!(guest.run(IN, 0, &[(DATA, 512)]), 0);
        assert_eq!(store.flushes.load(SeqCst), flushes);
    }
}

#[test]
fn a_ring_is_stopped_when_its_requests_have_ended() {
    // tests [NB-66]
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-stop", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    guest.queues[0].prepare(0, OUT, 0, &[(DATA, 512)]);
    guest.queues[0].give(&[0]);
    until("it is in flight", || store.count() == 1);
    let front = guest.front.clone();
    let stopping = std::thread::spawn(move || front.get_vring_base(0).unwrap());
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((stopping.is_finished(), guest.queues[0].used_index()), (false, 0));
    store.let_go();
    assert_eq!((stopping.join().unwrap(), guest.queues[0].used_index()), (1, 1));
}

#[test]
fn a_server_ends_though_the_disk_does_not_answer() {
    // tests [NB-66]
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-end", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    assert_eq!((served.server.connections(), served.server.disable_if_unused()), (1, false));
    guest.queues[0].prepare(0, OUT, 0, &[(DATA, 512)]);
    guest.queues[0].give(&[0]);
    until("it is in flight", || store.count() == 1);
    drop(served.server);
    assert!(guest.front.get_features().is_err(), "disconnected");
    store.let_go();
    assert_eq!(guest.queues[0].used_index(), 0, "nothing reaches the guest after the end");
}

#[test]
fn more_requests_than_there_is_memory_for_wait_and_are_done() {
    // tests [NB-66]
    let store = Held::new();
    let disk = LocalDevice::new("disk", Arc::clone(&store) as _);
    let served = serve("vhost-stall", disk, VhostUserOptions::default());
    let memory = Memory::new();
    let mut guest = Guest::start(&served.path, &memory, 0);
    // 2 MiB in short pieces, which are copied, of which 8 MiB have room for four.
    let pieces: Vec<_> = (0..128).map(|at| (DATA + at * 32_768, 16_384)).collect();
    let queue = &mut guest.queues[0];
    for head in 0..8 {
        let table = DATA + (16 << 20) + u64::from(head) * 4096;
        queue.prepare_indirect(head, OUT, u64::from(head) * 512, &pieces, table);
    }
    queue.give(&[0, 1, 2, 3, 4, 5, 6, 7]);
    until("there is no more room", || store.count() == 4);
    store.let_go();
    for _ in 0..8 {
        let head = queue.wait().0;
        assert_eq!(queue.status(head), 0);
    }
    assert_eq!(store.writes.load(SeqCst), 8);
}

#[test]
fn whatever_a_guest_puts_in_its_ring_the_server_works_on() {
    // tests [NB-66]
    let served = plain("vhost-chaos");
    let memory = Memory::new();
    let mut random = 11_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        random >> 33
    };
    for _ in 0..300 {
        let mut guest = Guest::connect(&served.path, &memory, 0);
        memory.put(guest::GUEST, &[0; 1 << 20]);
        guest.share();
        guest.add_queue(16);
        let queue = &mut guest.queues[0];
        for round in 0..20 {
            for index in 0..16 {
                let place = [DATA, queue.header(index), queue.table(), guest::GUEST - 8, next()];
                let flags = [0, NEXT, WRITE, NEXT | WRITE, INDIRECT, next() as u16];
                let desc = Desc {
                    guest: place[next() as usize % 5],
                    len: [16, 1, 512, 64, next() as u32][next() as usize % 5],
                    flags: flags[next() as usize % 6],
                    next: next() as u16 % 18,
                };
                queue.put_desc(queue.table(), index, desc);
                queue.put_header(index, next() as u32 % 14, next() % 64);
            }
            // One ring has a few good requests between.
            if round % 4 == 0 {
                queue.prepare(3, OUT, 0, &[(DATA, 512)]);
            }
            queue.give(&[next() as u16 % 17, 3, next() as u16 % 16]);
            while queue.take_used().is_some() {}
        }
        assert_eq!(guest.config().len(), 60, "it answers");
    }
    let mut guest = Guest::connect(&served.path, &memory, 0);
    memory.put(guest::GUEST, &[0; 1 << 20]);
    guest.share();
    guest.add_queue(16);
    assert_eq!(guest.run(OUT, 0, &[(DATA, 512)]), 0);
}
