//! Verified load: random reads and writes of all sizes on a disk, each read compared with what was
//! written, and flushes and durable writes between them.
//!
//! Every block of the disk has a version, and its contents follow from its number, its version and
//! the seed. A write that failed leaves a block in its old or its new version, and either is
//! accepted from then on; everything else must be exactly the last version that was acknowledged.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bowline_base::{Errno, SplitMix64, mix};
use bowline_block::{BlockDevice, DeviceMem, DiskDone, DiskIo, IoOp};

use crate::cli::common::histogram::Histogram;

/// Largest request in bytes: more than servers accept at once, so some are split.
const REQUEST_MAX: usize = 256 << 10;
/// Smallest range of a load in bytes.
pub(crate) const BYTES_MIN: u64 = 64 << 10;
/// Of this many random writes, one is a flush instead and [`DURABLE`] are FUA writes.
const SYNC_ROUND: u64 = 32;
const DURABLE: u64 = 3;
/// Most candidate versions of a block, after as many failed writes in a row; beyond that its
/// contents are unknown.
const CANDIDATES_MAX: usize = 64;
/// Attempts to find blocks that no other request touches.
const TRIES: u32 = 8;
/// Longest wait before the caller is asked whether to go on.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Most problems whose texts are kept.
const PROBLEMS_MAX: usize = 5;
/// How long requests may take to end once no more are sent.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same after a stop signal.
const STOP_PATIENCE: Duration = Duration::from_secs(1);

/// Options of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Bytes from the start of the disk that are used.
    pub(crate) bytes: u64,
    /// Queue depth.
    pub(crate) depth: usize,
    /// Percentage of reads.
    pub(crate) reads_percent: u64,
    /// Tells whether there are flushes and durable writes.
    pub(crate) syncs: bool,
    /// Seed of all random choices.
    pub(crate) seed: u64,
}

/// Results of a load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    /// Reads that were answered.
    pub(crate) reads: u64,
    /// Writes that were answered.
    pub(crate) writes: u64,
    /// Writes among them that were FUA.
    pub(crate) durable: u64,
    /// Flushes that were answered.
    pub(crate) flushes: u64,
    /// Bytes of reads and writes.
    pub(crate) bytes: u64,
    /// Requests that failed.
    pub(crate) failed: u64,
    /// Blocks whose contents were not as written.
    pub(crate) damaged: u64,
    /// Texts of the first problems.
    pub(crate) problems: Vec<String>,
    /// Longest time without an answer.
    pub(crate) pause: Duration,
    /// Time from submission to answer, nanoseconds.
    pub(crate) times: Histogram,
    /// Duration of the load.
    pub(crate) elapsed: Duration,
}

impl Report {
    /// Returns requests of all kinds.
    pub(crate) fn operations(&self) -> u64 {
        self.reads + self.writes + self.flushes
    }

    fn problem(&mut self, text: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(text);
        }
    }
}

#[derive(Default)]
struct Answers {
    list: Mutex<Vec<(u64, i32)>>,
    some: Condvar,
}

impl DiskDone for Answers {
    fn done(&self, results: &[(u64, i32)]) {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(results);
        self.some.notify_one();
    }
}

impl Answers {
    fn wait(&self, limit: Duration, into: &mut Vec<(u64, i32)>) {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.some.wait_timeout_while(list, limit, |list| list.is_empty());
        let (mut list, _) = waited.unwrap_or_else(PoisonError::into_inner);
        into.append(&mut list);
    }
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum What {
    Read,
    Write,
    DurableWrite,
    Flush,
}

impl What {
    const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write | Self::DurableWrite => "write",
            Self::Flush => "flush",
        }
    }

    const fn op(self) -> IoOp {
        match self {
            Self::Read => IoOp::Read,
            Self::Write | Self::DurableWrite => IoOp::Write,
            Self::Flush => IoOp::Flush,
        }
    }
}

/// A request for `count` blocks from `first`; a flush has none.
#[derive(Clone, Copy)]
struct Ask {
    what: What,
    first: u64,
    count: u64,
}

impl Ask {
    const fn range(&self) -> Range<usize> {
        self.first as usize..(self.first + self.count) as usize
    }
}

/// A request in flight.
#[derive(Clone, Copy)]
struct Slot {
    ask: Ask,
    /// Version of its blocks once it is written.
    version: u32,
    since: Instant,
}

/// Expected contents of a disk, and the state to compare them.
pub(crate) struct Load {
    disk: Arc<dyn BlockDevice>,
    memory: DeviceMem,
    shape: Shape,
    /// Bytes of a block.
    block: usize,
    /// Last acknowledged version of each block; 0: the unknown contents before the load.
    versions: Vec<u32>,
    /// Versions that failed writes may have left, besides the last acknowledged.
    candidates: HashMap<u64, Vec<u32>>,
    busy: Vec<bool>,
    slots: Vec<Option<Slot>>,
    answers: Arc<Answers>,
    random: SplitMix64,
    next_version: u32,
    scratch: Vec<u8>,
    /// Set by a stop signal.
    stop: Arc<AtomicBool>,
    /// When that was noticed.
    stopped: Option<Instant>,
}

impl std::fmt::Debug for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Load").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Load {
    /// Prepares a load; the disk is not touched yet. Once `stop` is set, no more requests are sent,
    /// and the wait for those in flight is short.
    pub(crate) fn new(
        disk: Arc<dyn BlockDevice>,
        shape: Shape,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, Errno> {
        let limits = disk.limits();
        let depth = shape.depth.max(1);
        let bytes = shape.bytes.min(limits.bytes);
        if bytes < BYTES_MIN {
            return Err(Errno::EINVAL);
        }
        let blocks = (bytes / u64::from(limits.logical)) as usize;
        let memory = disk.memory(depth * REQUEST_MAX)?;
        Ok(Self {
            disk,
            memory,
            shape: Shape { depth, ..shape },
            block: limits.logical as usize,
            versions: vec![0; blocks],
            candidates: HashMap::new(),
            busy: vec![false; blocks],
            slots: vec![None; depth],
            answers: Arc::default(),
            random: SplitMix64::new(shape.seed ^ 0x9e37_79b9_7f4a_7c15),
            next_version: 1,
            scratch: Vec::new(),
            stop,
            stopped: None,
        })
    }

    /// Writes every block once, in order.
    pub(crate) fn fill(&mut self, keep_going: impl FnMut(&Report) -> bool) -> Report {
        self.in_order(What::Write, keep_going)
    }

    /// Reads every block that was written, in order, and compares.
    pub(crate) fn check(&mut self, keep_going: impl FnMut(&Report) -> bool) -> Report {
        self.in_order(What::Read, keep_going)
    }

    fn in_order(&mut self, what: What, keep_going: impl FnMut(&Report) -> bool) -> Report {
        let (mut next, end) = (0, self.versions.len() as u64);
        self.drive(keep_going, move |load| {
            let first = next;
            next = (next + load.max_blocks()).min(end);
            (first < end).then_some(Ask { what, first, count: next - first })
        })
    }

    /// Returns the number of blocks of the largest request.
    fn max_blocks(&self) -> u64 {
        (REQUEST_MAX / self.block).min(self.versions.len()) as u64
    }

    /// Reads and writes at random while `keep_going` returns true.
    pub(crate) fn random(&mut self, keep_going: impl FnMut(&Report) -> bool) -> Report {
        self.drive(keep_going, |load| Some(load.pick()))
    }

    fn pick(&mut self) -> Ask {
        let what = if self.random.next_u64() % 100 < self.shape.reads_percent {
            What::Read
        } else if !self.shape.syncs {
            What::Write
        } else {
            match self.random.next_u64() % SYNC_ROUND {
                0 => return Ask { what: What::Flush, first: 0, count: 0 },
                1..=DURABLE => What::DurableWrite,
                _ => What::Write,
            }
        };
        // Lengths of 1, 2, 3 to 4, 5 to 8 blocks and so on are equally frequent.
        let power = 1 << (self.random.next_u64() % u64::from(self.max_blocks().ilog2() + 1));
        let count = power - self.random.next_u64() % (power / 2).max(1);
        let first = self.random.next_u64() % (self.versions.len() as u64 - count + 1);
        Ask { what, first, count }
    }

    /// Keeps requests in flight until there are no more or the caller stops, then waits for the
    /// last ones.
    fn drive(
        &mut self,
        mut keep_going: impl FnMut(&Report) -> bool,
        mut next: impl FnMut(&mut Self) -> Option<Ask>,
    ) -> Report {
        let mut report = Report::default();
        let start = Instant::now();
        let (mut last, mut ended, mut over) = (start, None, false);
        let mut requests = Vec::new();
        let mut answers = Vec::new();
        loop {
            over = over || !keep_going(&report);
            // Relaxed: the flag publishes nothing but itself.
            if self.stop.load(Ordering::Relaxed) {
                over = true;
                self.stopped.get_or_insert_with(Instant::now);
            }
            while !over {
                let Some(slot) = self.slots.iter().position(Option::is_none) else { break };
                match self.claim(&mut next) {
                    Claim::Blocks(ask) => requests.push(self.request(slot, ask)),
                    Claim::Busy => break,
                    Claim::Nothing => over = true,
                }
            }
            if !requests.is_empty() {
                self.disk.submit(&mut requests);
            }
            if self.slots.iter().all(Option::is_none) && over {
                break;
            }
            self.answers.wait(CHECK_INTERVAL, &mut answers);
            let now = Instant::now();
            if over {
                let since = *ended.get_or_insert(now);
                let stopped = self.stopped.is_some_and(|at| now.duration_since(at) > STOP_PATIENCE);
                if stopped || now.duration_since(since) > PATIENCE {
                    report.problem("requests were never answered".to_owned());
                    report.failed += self.slots.iter().flatten().count() as u64;
                    break;
                }
            }
            if !answers.is_empty() {
                report.pause = report.pause.max(now.duration_since(last));
                last = now;
            }
            for (tag, errno) in answers.drain(..) {
                self.answered(tag, errno, now, &mut report);
            }
        }
        report.elapsed = start.elapsed();
        report
    }

    fn claim(&mut self, next: &mut impl FnMut(&mut Self) -> Option<Ask>) -> Claim {
        for _ in 0..TRIES {
            let Some(ask) = next(self) else { return Claim::Nothing };
            let blocks = &mut self.busy[ask.range()];
            if !blocks.iter().any(|busy| *busy) {
                blocks.fill(true);
                return Claim::Blocks(ask);
            }
        }
        Claim::Busy
    }

    fn request(&mut self, slot: usize, ask: Ask) -> DiskIo {
        let at = slot * REQUEST_MAX;
        let op = ask.what.op();
        let version = self.next_version;
        if op == IoOp::Write {
            self.next_version = self.next_version.wrapping_add(1).max(1);
            self.scratch.clear();
            for block in ask.first..ask.first + ask.count {
                contents(self.shape.seed, block, version, self.block, &mut self.scratch);
            }
            self.memory.write(at, &self.scratch);
        }
        self.slots[slot] = Some(Slot { ask, version, since: Instant::now() });
        let offset = ask.first * self.block as u64;
        let len = (ask.count as usize * self.block) as u32;
        let done = Arc::<Answers>::clone(&self.answers);
        let mut io = DiskIo::new(op, offset, len, done).tag(slot as u64);
        io.fua = ask.what == What::DurableWrite;
        io.mem = op.has_data().then_some((self.memory.region, at));
        io
    }

    fn answered(&mut self, tag: u64, errno: i32, now: Instant, report: &mut Report) {
        let index = tag as usize;
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else {
            report.damaged += 1;
            return report.problem(format!("request {tag} was answered twice"));
        };
        let Slot { ask, version, since } = slot;
        self.busy[ask.range()].fill(false);
        report.times.record(now.duration_since(since).as_nanos() as u64);
        let writes = ask.what.op() == IoOp::Write;
        if errno != 0 {
            report.failed += 1;
            if writes {
                for block in ask.first..ask.first + ask.count {
                    let versions = self.candidates.entry(block).or_default();
                    versions.push(version);
                    if versions.len() > CANDIDATES_MAX {
                        self.candidates.remove(&block);
                        self.versions[block as usize] = 0;
                    }
                }
            }
            let text = Errno(errno.unsigned_abs().cast_signed()).strerror();
            return report.problem(match ask.what {
                What::Flush => format!("a flush failed: {text}"),
                what => format!("a {} of block {} failed: {text}", what.name(), ask.first),
            });
        }
        report.bytes += ask.count * self.block as u64;
        match ask.what {
            What::Flush => report.flushes += 1,
            What::Read => {
                report.reads += 1;
                self.compare(index, ask, report);
            }
            What::Write | What::DurableWrite => {
                report.writes += 1;
                report.durable += u64::from(ask.what == What::DurableWrite);
                self.versions[ask.range()].fill(version);
                if !self.candidates.is_empty() {
                    (ask.first..ask.first + ask.count).for_each(|block| {
                        self.candidates.remove(&block);
                    });
                }
            }
        }
    }

    fn compare(&mut self, slot: usize, ask: Ask, report: &mut Report) {
        let at = slot * REQUEST_MAX;
        let (mut got, mut wanted) = (vec![0; self.block], Vec::with_capacity(self.block));
        for block in ask.first..ask.first + ask.count {
            let version = self.versions[block as usize];
            if version == 0 {
                continue;
            }
            let place = at + (block - ask.first) as usize * self.block;
            self.memory.read(place, &mut got);
            let perhaps = self.candidates.get(&block);
            let candidates = [version].into_iter().chain(perhaps.into_iter().flatten().copied());
            let same = candidates.into_iter().any(|version| {
                wanted.clear();
                contents(self.shape.seed, block, version, self.block, &mut wanted);
                wanted == got
            });
            if !same {
                report.damaged += 1;
                report.problem(described(block, version, &got));
            }
        }
    }
}

enum Claim {
    Blocks(Ask),
    Busy,
    Nothing,
}

/// Appends the contents of a block: its number, its version, then words derived from both.
fn contents(seed: u64, block: u64, version: u32, bytes: usize, into: &mut Vec<u8>) {
    let mut state = mix(seed ^ mix(block ^ (u64::from(version) << 40)));
    into.extend_from_slice(&block.to_le_bytes());
    into.extend_from_slice(&u64::from(version).to_le_bytes());
    for _ in 2..bytes / 8 {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        into.extend_from_slice(&(state ^ (state >> 33)).to_le_bytes());
    }
}

/// Describes the contents that were read instead.
fn described(block: u64, version: u32, got: &[u8]) -> String {
    let word = |at: usize| {
        let bytes = got.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    format!("block {block} version {version} was read as block {} version {}", word(0), word(8))
}

#[cfg(test)]
mod tests {
    use bowline_block::{
        LocalDevice,
        backend::{BackendSpec, open},
    };

    use super::*;

    fn disk() -> Arc<dyn BlockDevice> {
        let backend = open(BackendSpec::Memory { bytes: 4 << 20, block: 512 }).unwrap();
        LocalDevice::new("ram", backend)
    }

    fn shape() -> Shape {
        Shape { bytes: 1 << 30, depth: 8, reads_percent: 50, syncs: true, seed: 7 }
    }

    fn prepared(disk: Arc<dyn BlockDevice>, shape: Shape) -> Result<Load, Errno> {
        Load::new(disk, shape, Arc::default())
    }

    #[test]
    fn a_good_disk_passes() {
        let mut load = prepared(disk(), shape()).unwrap();
        let filled = load.fill(|_| true);
        assert_eq!((filled.bytes, filled.failed), (4 << 20, 0));
        let report = load.random(|report| report.operations() < 2000);
        assert!(report.operations() >= 2000 && report.reads > 0 && report.writes > 0);
        let last = load.check(|_| true);
        assert_eq!(last.bytes, 4 << 20);
        for report in [filled, report, last] {
            assert_eq!((report.failed, report.damaged), (0, 0), "{:?}", report.problems);
        }
    }

    /// Records the requests to a disk, and may fail every seventh write: alternately after carrying
    /// it out, and without doing so.
    struct RecordingDisk {
        disk: Arc<dyn BlockDevice>,
        seen: Mutex<Vec<(IoOp, u32, bool)>>,
        fails: bool,
    }

    /// Reports a carried out request as failed.
    struct FailAfter(Arc<dyn DiskDone>);

    impl DiskDone for FailAfter {
        fn done(&self, results: &[(u64, i32)]) {
            let denied: Vec<_> = results.iter().map(|(tag, _)| (*tag, Errno::EIO.neg())).collect();
            self.0.done(&denied);
        }
    }

    fn watched(disk: Arc<dyn BlockDevice>, fails: bool) -> Arc<RecordingDisk> {
        Arc::new(RecordingDisk { disk, seen: Mutex::default(), fails })
    }

    impl BlockDevice for RecordingDisk {
        fn limits(&self) -> bowline_block::Limits {
            self.disk.limits()
        }

        fn name(&self) -> &str {
            self.disk.name()
        }

        fn memory(&self, len: usize) -> Result<DeviceMem, Errno> {
            self.disk.memory(len)
        }

        fn submit(&self, reqs: &mut Vec<DiskIo>) {
            for mut io in reqs.drain(..) {
                let mut seen = self.seen.lock().unwrap();
                seen.push((io.op, io.len, io.fua));
                let writes = seen.iter().filter(|(op, ..)| *op == IoOp::Write).count();
                drop(seen);
                if self.fails && io.op == IoOp::Write && writes % 7 == 0 {
                    if writes % 2 == 0 {
                        io.done.done(&[(io.tag, Errno::EIO.neg())]);
                        continue;
                    }
                    io.done = Arc::new(FailAfter(io.done));
                }
                self.disk.submit(&mut vec![io]);
            }
        }

        fn on_change(&self, f: Box<dyn Fn(bowline_block::DiskEvent) + Send + Sync>) {
            self.disk.on_change(f);
        }
    }

    #[test]
    fn a_load_has_requests_of_all_sizes_and_kinds() {
        // tests [NB-12] [NB-13]
        for (block, syncs) in [(512, true), (4096, false)] {
            let disk = LocalDevice::new(
                "ram",
                open(BackendSpec::Memory { bytes: 4 << 20, block }).unwrap(),
            );
            let watched = watched(disk, false);
            let disk: Arc<dyn BlockDevice> = Arc::<RecordingDisk>::clone(&watched);
            let mut load = prepared(disk, Shape { syncs, ..shape() }).unwrap();
            let report = load.random(|report| report.operations() < 4000);
            assert_eq!((report.failed, report.damaged), (0, 0), "{:?}", report.problems);
            let seen = watched.seen.lock().unwrap();
            let some = |what: &dyn Fn(IoOp, u32, bool) -> bool| {
                seen.iter().filter(|(op, len, fua)| what(*op, *len, *fua)).count() as u64
            };
            for op in [IoOp::Read, IoOp::Write] {
                for len in [block, 2 * block, 3 * block] {
                    assert!(some(&|o, l, _| (o, l) == (op, len)) > 0, "no {op:?} of {len}");
                }
                assert!(some(&|o, l, _| o == op && l > 128 << 10) > 0, "no large {op:?}");
            }
            assert!(some(&|_, len, _| len > 256 << 10 || len % block != 0) == 0);
            assert_eq!((report.durable > 0, report.flushes > 0), (syncs, syncs));
            assert_eq!(report.durable, some(&|op, _, fua| op == IoOp::Write && fua));
            assert_eq!(report.flushes, some(&|op, len, _| op == IoOp::Flush && len == 0));
            assert_eq!(some(&|op, _, fua| op != IoOp::Write && fua), 0);
        }
    }

    #[test]
    fn a_write_that_failed_may_have_been_done_or_not() {
        let plain = disk();
        let failing = watched(Arc::clone(&plain), true);
        let mut load = prepared(failing, shape()).unwrap();
        load.fill(|_| true);
        let report = load.random(|report| report.operations() < 2000);
        assert!(report.failed > 50, "{report:?}");
        let last = load.check(|_| true);
        assert_eq!((report.damaged, last.damaged), (0, 0), "{:?}", last.problems);
        // Neither the old version nor the new one.
        let (&block, _) =
            load.candidates.iter().find(|(block, _)| load.versions[**block as usize] > 0).unwrap();
        let durable = bowline_block::sync::Durable::Later;
        bowline_block::sync::write_at(&*plain, block * 512, &[1; 512], durable).unwrap();
        assert_eq!(load.check(|_| true).damaged, 1);
    }

    #[test]
    fn what_a_block_may_hold_is_kept_for_so_many_failed_writes() {
        let mut load = prepared(disk(), shape()).unwrap();
        load.fill(|_| true);
        let (now, ask) = (Instant::now(), Ask { what: What::Write, first: 3, count: 1 });
        let mut fail = |version| {
            load.slots[0] = Some(Slot { ask, version, since: now });
            load.answered(0, -5, now, &mut Report::default());
            (load.candidates.get(&3).map(Vec::len), load.versions[3] == 0)
        };
        for count in 1..=CANDIDATES_MAX {
            assert_eq!(fail(9000 + count as u32), (Some(count), false));
        }
        assert_eq!(fail(1), (None, true), "then nobody knows");
    }

    #[test]
    fn a_block_that_changes_is_noticed() {
        let disk = disk();
        let mut load = prepared(Arc::clone(&disk), shape()).unwrap();
        load.fill(|_| true);
        bowline_block::sync::write_at(
            &*disk,
            40 * 512,
            &[1; 512],
            bowline_block::sync::Durable::Later,
        )
        .unwrap();
        let report = load.check(|_| true);
        assert_eq!(report.damaged, 1);
        assert!(report.problems[0].contains("block 40"));
    }

    #[test]
    fn an_old_version_is_damage() {
        let disk = disk();
        let mut load = prepared(Arc::clone(&disk), shape()).unwrap();
        load.fill(|_| true);
        let mut old = vec![0; 512];
        bowline_block::sync::read_at(&*disk, 0, &mut old).unwrap();
        load.fill(|_| true);
        bowline_block::sync::write_at(&*disk, 0, &old, bowline_block::sync::Durable::Later)
            .unwrap();
        assert_eq!(load.check(|_| true).damaged, 1);
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused() {
        let backend = open(BackendSpec::Memory { bytes: 4096, block: 512 }).unwrap();
        let disk = LocalDevice::new("ram", backend);
        assert_eq!(prepared(disk, shape()).err(), Some(Errno::EINVAL));
    }
}
