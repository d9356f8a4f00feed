//! The pages of a store in memory: small ones at first, large ones later.
//!
//! The thread that serves everybody touches a page first. A large one is cleared then, which takes
//! milliseconds where the machine is virtual and its host has to find the memory: a write to each
//! of them makes a disk that answers 200 writes a second. So a store begins with small pages. Large
//! ones are some percent faster to use, and a range that was written completely is moved to one by
//! a thread of its own: only while nobody asks for anything, since whoever uses the range
//! meanwhile waits.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use bowline_verbs::{Buffer, HUGE_PAGE};

use crate::device::{Allocation, Extent};

/// Bytes of a small page.
const PAGE: usize = 4096;
/// Words of the map for each large page.
const WORDS: usize = HUGE_PAGE / PAGE / 64;
/// For so long nobody has asked for anything before pages are moved.
const QUIET: Duration = Duration::from_millis(250);
/// Most stretches of large pages with small ones between them. Each is a mapping of its own for
/// the system, which allows a process 65,530 of all kinds.
const STRETCHES_MAX: usize = 1024;

/// The memory of a store, and what is known about its pages.
#[derive(Debug)]
pub(super) struct Pages {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    memory: Arc<Buffer>,
    /// For each small page a bit: it was written to. Relaxed, as the others: they guard no other
    /// memory.
    written: Vec<AtomicU64>,
    /// Batches of requests so far.
    batches: AtomicU64,
    stop: AtomicBool,
}

impl Pages {
    /// Allocates `len` bytes, all zero; pages exist once they are written to.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let words = len.div_ceil(HUGE_PAGE) * WORDS;
        let shared = Arc::new(Shared {
            memory: Arc::new(Buffer::sparse(len)?),
            written: std::iter::repeat_with(AtomicU64::default).take(words).collect(),
            batches: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let thread = if len >= HUGE_PAGE {
            let for_thread = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name("bowline-memory".into());
            Some(thread.spawn(move || for_thread.enlarge_in_quiet())?)
        } else {
            None
        };
        Ok(Self { shared, thread })
    }

    pub(super) fn memory(&self) -> &Arc<Buffer> {
        &self.shared.memory
    }

    /// Notes that somebody asks for something.
    pub(super) fn note_batch(&self) {
        self.shared.batches.fetch_add(1, Relaxed);
    }

    /// Notes that bytes are written.
    pub(super) fn note_written(&self, at: usize, len: usize) {
        for page in at / PAGE..(at + len).div_ceil(PAGE) {
            let Some(word) = self.shared.written.get(page / 64) else { return };
            let bit = 1 << (page % 64);
            if word.load(Relaxed) & bit == 0 {
                word.fetch_or(bit, Relaxed);
            }
        }
    }

    /// Returns how far the pages from `at` on were all written to, or all never.
    pub(super) fn extent(&self, at: u64, len: u64) -> Extent {
        let page = PAGE as u64;
        let (first, end) = (at / page, at.saturating_add(len).div_ceil(page));
        let word = |page: u64| {
            let word = self.shared.written.get((page / 64) as usize);
            word.map_or(0, |word| word.load(Relaxed))
        };
        let is_written = word(first) >> (first % 64) & 1 == 1;
        let mut page_after = first + 1;
        while page_after < end {
            let rest = word(page_after) >> (page_after % 64);
            // A shift fills in zeroes, which count only up to the end of the word.
            let same = if is_written { rest.trailing_ones() } else { rest.trailing_zeros() };
            let left = 64 - page_after % 64;
            page_after += left.min(same.into());
            if u64::from(same) < left {
                break;
            }
        }
        let allocation = if is_written { Allocation::Unknown } else { Allocation::Hole };
        Extent { len: (page_after * page - at).min(len), allocation }
    }

    /// Zeroes bytes. Those that are zero stay as they are, so that what was never written takes no
    /// memory.
    pub(super) fn clear(&self, at: usize, len: usize) {
        const ZEROES: [u8; PAGE] = [0; PAGE];
        let memory = &self.shared.memory;
        let mut bytes = [0; PAGE];
        let (mut at, end) = (at, at + len);
        while at < end {
            let piece = (PAGE - at % PAGE).min(end - at);
            let (bytes, zeroes) = (&mut bytes[..piece], &ZEROES[..piece]);
            memory.read(at, bytes);
            if bytes != zeroes {
                memory.write(at, zeroes);
            }
            at += piece;
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Moves ranges to large pages until the store is dropped.
    fn enlarge_in_quiet(&self) {
        let mut stretches = Stretches::new(self.memory.len() / HUGE_PAGE);
        let (mut seen, mut looked_at) = (0, 0);
        while !self.stop.load(Relaxed) {
            std::thread::park_timeout(QUIET);
            let batches = self.batches.load(Relaxed);
            let quiet = std::mem::replace(&mut seen, batches) == batches;
            if quiet && looked_at != batches && self.enlarge(&mut stretches, batches) {
                looked_at = batches;
            }
        }
    }

    /// Moves ranges as long as nobody asks for anything. Returns whether none is left.
    fn enlarge(&self, stretches: &mut Stretches, batches: u64) -> bool {
        for range in 0..stretches.large.len() {
            if stretches.large[range] || !self.is_written(range) || !stretches.add(range) {
                continue;
            }
            self.memory.enlarge_pages(range * HUGE_PAGE, HUGE_PAGE);
            if self.stop.load(Relaxed) || self.batches.load(Relaxed) != batches {
                return false;
            }
        }
        true
    }

    /// Tells whether all small pages of a range were written to.
    fn is_written(&self, range: usize) -> bool {
        let words = self.written.get(range * WORDS..(range + 1) * WORDS);
        words.is_some_and(|words| words.iter().all(|word| word.load(Relaxed) == u64::MAX))
    }
}

/// The ranges that are in large pages.
#[derive(Debug)]
struct Stretches {
    large: Vec<bool>,
    /// Runs of such ranges.
    count: usize,
}

impl Stretches {
    fn new(ranges: usize) -> Self {
        Self { large: vec![false; ranges], count: 0 }
    }

    /// Adds a range, unless there are too many stretches; returns whether that was so.
    fn add(&mut self, range: usize) -> bool {
        let is_large = |at: Option<usize>| at.and_then(|at| self.large.get(at)) == Some(&true);
        let beside = [range.checked_sub(1), range.checked_add(1)];
        let count = self.count + 1 - beside.into_iter().filter(|at| is_large(*at)).count();
        if count > STRETCHES_MAX {
            return false;
        }
        self.count = count;
        self.large[range] = true;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_written_when_all_its_pages_are() {
        let pages = Pages::new(2 * HUGE_PAGE + PAGE).unwrap();
        let written = || [0, 1, 2].map(|range| pages.shared.is_written(range));
        for at in (PAGE / 2..2 * HUGE_PAGE - PAGE).step_by(PAGE).rev() {
            pages.note_written(at, 512);
            assert_eq!(written(), [at < PAGE, false, false]);
        }
        pages.note_written(2 * HUGE_PAGE - 1, 2);
        assert_eq!(written(), [true, true, false], "the last range has one page of this store");
        pages.note_written(0, 3 * HUGE_PAGE);
    }

    #[test]
    fn a_page_is_a_hole_until_it_is_written_to() {
        let page = PAGE as u64;
        let pages = Pages::new(2 * HUGE_PAGE).unwrap();
        let len = 2 * HUGE_PAGE as u64;
        let extent = |at, len| {
            let Extent { len, allocation } = pages.extent(at, len);
            (len, allocation == Allocation::Hole)
        };
        assert_eq!(extent(0, len), (len, true));
        assert_eq!(extent(512, 512), (512, true));
        // Within a word of the map, over its end, and over whole words.
        for (first, count) in [(3, 5), (60, 10), (128, 200), (400, 64)] {
            pages.note_written(first * PAGE + 512, count * PAGE - 512);
            let (at, end) = (first as u64 * page, (first + count) as u64 * page);
            assert_eq!(extent(at, len - at), (end - at, false), "{first}");
            assert_eq!(extent(at + 512, 1024), (1024, false));
            assert_eq!(extent(at - 512, len - at), (512, true));
            let (after, is_hole) = extent(end, len - end);
            assert!(after >= page && is_hole);
        }
        assert_eq!(extent(464 * page, len - 464 * page), (len - 464 * page, true));
        assert_eq!(extent(8 * page, len - 8 * page), (52 * page, true));
    }

    #[test]
    fn stretches_are_bounded_and_grow_together() {
        let mut stretches = Stretches::new(4 * STRETCHES_MAX);
        let apart = (0..2 * STRETCHES_MAX).step_by(2);
        assert!(apart.clone().all(|range| stretches.add(range)));
        assert!(!stretches.add(2 * STRETCHES_MAX), "one more");
        assert!(stretches.add(2 * STRETCHES_MAX - 1), "beside another");
        assert!(apart.skip(1).all(|range| stretches.add(range - 1)));
        assert_eq!(stretches.count, 1);
        assert!(stretches.add(4 * STRETCHES_MAX - 1), "there is room again");
    }
}
