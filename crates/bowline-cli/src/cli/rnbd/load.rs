//! Verified load: random reads and writes on a disk, each read compared with what was written.
//!
//! Every block of 4 KiB has a version, and its contents follow from its number, its version and
//! the seed. A write that failed leaves a block in its old or its new version, and either is
//! accepted from then on; everything else must be exactly the last version that was acknowledged.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bowline_block::{BlockDevice, DeviceMem, DiskDone, DiskIo, Errno, IoOp};

use crate::cli::histogram::Histogram;

/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;
/// Blocks of the largest request.
const BLOCKS_MAX: u64 = 16;
/// Tries to find blocks that no other request touches.
const TRIES: u32 = 8;
/// Longest wait before the caller is asked whether to go on.
const SLICE: Duration = Duration::from_millis(20);
/// Texts of what went wrong that are kept.
const PROBLEMS_MAX: usize = 5;
/// How long requests may take to end once no more are sent.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a load is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Blocks from the start of the disk that are used.
    pub(crate) blocks: u64,
    /// Requests at a time.
    pub(crate) depth: usize,
    /// Reads in a hundred requests.
    pub(crate) reads_percent: u64,
    /// Start of everything that is random.
    pub(crate) seed: u64,
}

/// What became of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    /// Reads that were answered.
    pub(crate) reads: u64,
    /// Writes that were answered.
    pub(crate) writes: u64,
    /// Bytes of both.
    pub(crate) bytes: u64,
    /// Requests that failed.
    pub(crate) failed: u64,
    /// Blocks that were read and are not what was written.
    pub(crate) damaged: u64,
    /// The first problems, for people.
    pub(crate) problems: Vec<String>,
    /// The longest time in which nothing was answered.
    pub(crate) pause: Duration,
    /// Time from submission to answer, nanoseconds.
    pub(crate) times: Histogram,
    /// How long all of it took.
    pub(crate) elapsed: Duration,
}

impl Report {
    /// Returns requests of all kinds.
    pub(crate) fn operations(&self) -> u64 {
        self.reads + self.writes
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

/// A request under way.
#[derive(Clone, Copy)]
struct Slot {
    write: bool,
    first: u64,
    count: u64,
    since: Instant,
}

/// What a disk is expected to hold, and the means to compare.
pub(crate) struct Load {
    disk: Arc<dyn BlockDevice>,
    memory: DeviceMem,
    shape: Shape,
    versions: Vec<u32>,
    /// Versions that a failed write may have left, besides the last acknowledged.
    perhaps: HashMap<u64, Vec<u32>>,
    busy: Vec<bool>,
    slots: Vec<Option<Slot>>,
    answers: Arc<Answers>,
    random: u64,
    next_version: u32,
    scratch: Vec<u8>,
}

impl std::fmt::Debug for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Load").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Load {
    /// Prepares a load; the disk is not touched yet.
    pub(crate) fn new(disk: Arc<dyn BlockDevice>, shape: Shape) -> Result<Self, Errno> {
        let room = disk.limits().bytes / BLOCK as u64;
        let depth = shape.depth.max(1);
        let blocks = shape.blocks.min(room);
        if blocks < BLOCKS_MAX {
            return Err(Errno::EINVAL);
        }
        let memory = disk.memory(depth * BLOCKS_MAX as usize * BLOCK)?;
        Ok(Self {
            disk,
            memory,
            shape: Shape { blocks, depth, ..shape },
            versions: vec![0; blocks as usize],
            perhaps: HashMap::new(),
            busy: vec![false; blocks as usize],
            slots: vec![None; depth],
            answers: Arc::default(),
            random: shape.seed ^ 0x9e37_79b9_7f4a_7c15,
            next_version: 1,
            scratch: Vec::new(),
        })
    }

    /// Writes every block once, in order.
    pub(crate) fn fill(&mut self, go_on: impl FnMut(&Report) -> bool) -> Report {
        self.in_order(true, go_on)
    }

    /// Reads every block that was written, in order, and compares.
    pub(crate) fn check(&mut self, go_on: impl FnMut(&Report) -> bool) -> Report {
        self.in_order(false, go_on)
    }

    fn in_order(&mut self, write: bool, go_on: impl FnMut(&Report) -> bool) -> Report {
        let (mut next, end) = (0, self.shape.blocks);
        self.drive(go_on, move |_| {
            let first = next;
            next = (next + BLOCKS_MAX).min(end);
            (first < end).then_some((write, first, next - first))
        })
    }

    /// Reads and writes at random for as long as `go_on` says.
    pub(crate) fn random(&mut self, go_on: impl FnMut(&Report) -> bool) -> Report {
        self.drive(go_on, |load| Some(load.pick()))
    }

    fn pick(&mut self) -> (bool, u64, u64) {
        let write = self.next_random() % 100 >= self.shape.reads_percent;
        let count = self.next_random() % BLOCKS_MAX + 1;
        let first = self.next_random() % (self.shape.blocks - count + 1);
        (write, first, count)
    }

    fn next_random(&mut self) -> u64 {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.random)
    }

    /// Keeps requests under way until there are no more or the caller has enough, then waits for
    /// the last ones.
    fn drive(
        &mut self,
        mut go_on: impl FnMut(&Report) -> bool,
        mut next: impl FnMut(&mut Self) -> Option<(bool, u64, u64)>,
    ) -> Report {
        let mut report = Report::default();
        let start = Instant::now();
        let (mut last, mut ended, mut over) = (start, None, false);
        let mut requests = Vec::new();
        let mut answers = Vec::new();
        loop {
            over = over || !go_on(&report);
            while !over {
                let Some(slot) = self.slots.iter().position(Option::is_none) else { break };
                match self.claim(&mut next) {
                    Claim::Blocks(write, first, count) => {
                        requests.push(self.request(slot, write, first, count));
                    }
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
            self.answers.wait(SLICE, &mut answers);
            let now = Instant::now();
            if over {
                let since = *ended.get_or_insert(now);
                if now.duration_since(since) > PATIENCE {
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

    fn claim(&mut self, next: &mut impl FnMut(&mut Self) -> Option<(bool, u64, u64)>) -> Claim {
        for _ in 0..TRIES {
            let Some((write, first, count)) = next(self) else { return Claim::Nothing };
            let range = first as usize..(first + count) as usize;
            if !self.busy[range.clone()].iter().any(|busy| *busy) {
                self.busy[range].fill(true);
                return Claim::Blocks(write, first, count);
            }
        }
        Claim::Busy
    }

    fn request(&mut self, slot: usize, write: bool, first: u64, count: u64) -> DiskIo {
        let at = slot * BLOCKS_MAX as usize * BLOCK;
        if write {
            let version = self.next_version;
            self.next_version = self.next_version.wrapping_add(1).max(1);
            self.scratch.clear();
            for block in first..first + count {
                contents(self.shape.seed, block, version, &mut self.scratch);
                // Not known until the answer is there; see `answered`.
                let old = self.versions[block as usize];
                self.perhaps.entry(block).or_default().push(old);
                self.versions[block as usize] = version;
            }
            self.memory.mem.buffer.write(self.memory.mem.offset + at, &self.scratch);
        }
        self.slots[slot] = Some(Slot { write, first, count, since: Instant::now() });
        DiskIo {
            op: if write { IoOp::Write } else { IoOp::Read },
            offset: first * BLOCK as u64,
            len: count as u32 * BLOCK as u32,
            fua: false,
            nounmap: false,
            mem: Some((self.memory.region, at)),
            tag: slot as u64,
            done: Arc::<Answers>::clone(&self.answers),
        }
    }

    fn answered(&mut self, tag: u64, errno: i32, now: Instant, report: &mut Report) {
        let index = tag as usize;
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else {
            report.damaged += 1;
            return report.problem(format!("request {tag} was answered twice"));
        };
        let Slot { write, first, count, since } = slot;
        self.busy[first as usize..(first + count) as usize].fill(false);
        report.times.record(now.duration_since(since).as_nanos() as u64);
        if errno != 0 {
            report.failed += 1;
            let what = if write { "write" } else { "read" };
            let text = bowline_ctl::errno::text(errno.unsigned_abs().cast_signed());
            return report.problem(format!("a {what} of block {first} failed: {text}"));
        }
        report.bytes += count * BLOCK as u64;
        if write {
            report.writes += 1;
            for block in first..first + count {
                self.perhaps.remove(&block);
            }
        } else {
            report.reads += 1;
            self.compare(index, first, count, report);
        }
    }

    fn compare(&mut self, slot: usize, first: u64, count: u64, report: &mut Report) {
        let at = self.memory.mem.offset + slot * BLOCKS_MAX as usize * BLOCK;
        let mut got = [0; BLOCK];
        for block in first..first + count {
            let version = self.versions[block as usize];
            let perhaps = self.perhaps.get(&block);
            // Version 0 is what was there before, which nobody knows.
            let unknown = version == 0 || perhaps.is_some_and(|list| list.contains(&0));
            if unknown {
                continue;
            }
            self.memory.mem.buffer.read(at + (block - first) as usize * BLOCK, &mut got);
            let candidates = [version].into_iter().chain(perhaps.into_iter().flatten().copied());
            let mut wanted = Vec::with_capacity(BLOCK);
            let same = candidates.into_iter().any(|version| {
                wanted.clear();
                contents(self.shape.seed, block, version, &mut wanted);
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
    Blocks(bool, u64, u64),
    Busy,
    Nothing,
}

fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Adds the contents of a block: its number, its version, then words that follow from both.
fn contents(seed: u64, block: u64, version: u32, into: &mut Vec<u8>) {
    let mut state = mixed(seed ^ mixed(block ^ (u64::from(version) << 40)));
    into.extend_from_slice(&block.to_le_bytes());
    into.extend_from_slice(&u64::from(version).to_le_bytes());
    for _ in 2..BLOCK / 8 {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        into.extend_from_slice(&(state ^ (state >> 33)).to_le_bytes());
    }
}

/// Says what was read instead.
fn described(block: u64, version: u32, got: &[u8]) -> String {
    let word = |at: usize| {
        let bytes = got.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    format!(
        "block {block} version {version} was read as what claims to be block {} version {}",
        word(0),
        word(8)
    )
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
        Shape { blocks: 1 << 20, depth: 8, reads_percent: 50, seed: 7 }
    }

    #[test]
    fn a_good_disk_passes() {
        let mut load = Load::new(disk(), shape()).unwrap();
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

    #[test]
    fn a_block_that_changes_is_noticed() {
        let disk = disk();
        let mut load = Load::new(Arc::clone(&disk), shape()).unwrap();
        load.fill(|_| true);
        bowline_block::sync::write_at(
            &*disk,
            40 * 4096,
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
        let mut load = Load::new(Arc::clone(&disk), shape()).unwrap();
        load.fill(|_| true);
        let mut old = vec![0; 4096];
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
        assert_eq!(Load::new(disk, shape()).err(), Some(Errno::EINVAL));
    }
}
