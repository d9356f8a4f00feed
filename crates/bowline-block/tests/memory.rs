//! What a store in memory takes of the system. A test of its own process: what counts is what the
//! whole process has in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bowline_block::IoOp;
use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult, BackendSpec, open};
use bowline_verbs::{Buffer, HUGE_PAGE, Mem};

const MIB: usize = 1 << 20;
const RANGES: usize = 32;
/// Longest wait for something that happens some time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of this process that are in memory, and those of them that are large pages.
fn resident() -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
    };
    (bytes("Rss:"), bytes("AnonHugePages:"))
}

/// Tells whether the system makes large pages of memory that is used.
fn has_large_pages() -> bool {
    let before = resident().1;
    let buffer = Buffer::sparse(HUGE_PAGE).unwrap();
    buffer.write(0, &vec![1; buffer.len()]);
    buffer.enlarge_pages(0, buffer.len());
    resident().1 > before
}

#[derive(Default)]
struct Count(AtomicUsize);

impl BackendDone for Count {
    fn done(&self, results: &[BackendResult]) {
        assert!(results.iter().all(|result| result.errno == 0));
        self.0.fetch_add(results.len(), Ordering::Relaxed);
    }
}

struct Disk {
    store: Arc<dyn Backend>,
    data: Arc<Buffer>,
    count: Arc<Count>,
}

impl Disk {
    fn request(&self, op: IoOp, offset: usize, len: usize) {
        let before = self.count.0.load(Ordering::Relaxed);
        let mut io = BackendIo::new(1, op, offset as u64, len as u32);
        if op.has_data() {
            io.mem = Some(Mem { buffer: Arc::clone(&self.data), offset: 0, len });
        }
        let done = Arc::clone(&self.count) as Arc<dyn BackendDone>;
        self.store.submit(&mut vec![io], &done);
        assert_eq!(self.count.0.load(Ordering::Relaxed), before + 1);
    }
}

#[test]
fn a_store_takes_memory_by_small_pages_and_large_ones_in_quiet() {
    let has_large_pages = has_large_pages();
    let bytes = (RANGES * HUGE_PAGE) as u64;
    let disk = Disk {
        store: open(BackendSpec::Memory { bytes, block: 512 }).unwrap(),
        data: Arc::new(Buffer::new(MIB).unwrap()),
        count: Arc::default(),
    };
    disk.data.write(0, &vec![7; MIB]);
    let (before, large_before) = resident();
    let more = || resident().0.saturating_sub(before);

    // A disk that is discarded before it is used, as by mkfs, takes nothing.
    for op in [IoOp::Discard, IoOp::WriteZeroes] {
        (0..RANGES).for_each(|range| disk.request(op, range * HUGE_PAGE, HUGE_PAGE));
    }
    (0..RANGES).for_each(|range| disk.request(IoOp::Read, range * HUGE_PAGE, MIB));
    assert!(more() < MIB, "{} for zeroes", more());

    // A small write all over it takes little.
    (0..RANGES).for_each(|range| disk.request(IoOp::Write, range * HUGE_PAGE + 4096, 4096));
    assert!(more() < 2 * MIB, "{} for one page of each range", more());

    // The first range is used completely, and all of the second but for a page.
    for at in (0..2 * HUGE_PAGE - 4096).step_by(4096) {
        disk.request(IoOp::Write, at, 4096);
    }
    if has_large_pages {
        let large = || resident().1.saturating_sub(large_before);
        let begin = Instant::now();
        while large() == 0 {
            assert!(begin.elapsed() < PATIENCE, "no large page in quiet");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(600));
        assert_eq!(large(), HUGE_PAGE, "of what is not used completely");
    }
    disk.request(IoOp::WriteZeroes, 512, 4096);
    let mut read = vec![1; 8192];
    disk.store.region().unwrap().read(0, &mut read);
    let zero = |at: &usize| (512..512 + 4096).contains(at);
    assert!(read.iter().enumerate().all(|(at, byte)| *byte == if zero(&at) { 0 } else { 7 }));
}
