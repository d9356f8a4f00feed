//! A store in front of another one that fails, delays and slows down requests, for tests of who
//! uses it.
//!
//! ```text
//!   submit --fails by lot--> answered EIO
//!          --due now-------> the store behind
//!          --due later-----> waiting, by time --bowline-filter--> the store behind
//! ```

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::io;
use std::num::NonZeroU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bowline_base::mix;
use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::{Buffer, catch_callback_panic};

use super::{Backend, BackendDone, BackendIo, BackendResult};
use crate::device::Extent;

/// Number of requests of which [`Filters::errors`] fail.
const MILLION: u64 = 1_000_000;

/// Faults and limits that a store is given for tests. Flushes have none of them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Filters {
    /// How many of a million requests fail with `EIO`, and are not executed.
    pub errors: u32,
    /// Draws which requests fail: those with the same numbers, counted from the first one.
    pub seed: u64,
    /// How long each read is held back.
    pub delay_read: Duration,
    /// How long each request that changes something is held back.
    pub delay_write: Duration,
    /// Bytes that are read in a second, and as many that are changed: what is above waits.
    pub rate: Option<NonZeroU64>,
}

impl Filters {
    /// Tells whether requests pass as they are.
    fn do_nothing(&self) -> bool {
        let Self { errors, delay_read, delay_write, rate, seed: _ } = *self;
        errors == 0 && delay_read.is_zero() && delay_write.is_zero() && rate.is_none()
    }

    /// Tells whether the request with this number fails.
    fn fails(&self, number: u64) -> bool {
        mix(self.seed ^ mix(number)) % MILLION < u64::from(self.errors)
    }
}

/// Puts filters in front of a store.
///
/// # Errors
/// Errors of starting a thread.
pub fn filtered(backend: Arc<dyn Backend>, filters: Filters) -> io::Result<Arc<dyn Backend>> {
    if filters.do_nothing() {
        return Ok(backend);
    }
    let (state, changed) = (Mutex::default(), Condvar::new());
    let shared = Arc::new(Shared { backend, filters, state, changed });
    let sends = Arc::clone(&shared);
    let thread = thread::Builder::new()
        .name("bowline-filter".to_owned())
        .spawn(move || sends.send_when_due())?;
    Ok(Arc::new(Filter { shared, thread: Some(thread) }))
}

/// The store in front. Its end sends what waits at once.
struct Filter {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    backend: Arc<dyn Backend>,
    filters: Filters,
    state: Mutex<State>,
    /// Something waits that is due first, or the end.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Requests so far.
    count: u64,
    waiting: BinaryHeap<Waiting>,
    /// When the bytes that were read, and those that were changed, are paid for.
    paid: [Option<Instant>; 2],
    is_over: bool,
}

/// A request that is held back. The first one that is due is the greatest.
struct Waiting {
    due: Instant,
    number: u64,
    io: BackendIo,
    done: Arc<dyn BackendDone>,
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Eq for Waiting {}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl State {
    /// Returns when a request is due, and has it paid for.
    fn due(&mut self, filters: &Filters, io: &BackendIo, now: Instant) -> Instant {
        let changes = io.op.changes();
        let begins = match filters.rate {
            None => now,
            Some(rate) => {
                let paid = &mut self.paid[usize::from(changes)];
                let begins = paid.map_or(now, |paid| paid.max(now));
                let seconds = f64::from(io.len) / rate.get() as f64;
                *paid = Some(begins + Duration::from_secs_f64(seconds.min(MONTH)));
                begins
            }
        };
        begins + if changes { filters.delay_write } else { filters.delay_read }
    }
}

/// Seconds that one request takes at most, whatever the rate: a point in time has to exist.
const MONTH: f64 = 30.0 * 86_400.0;

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in a critical section panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on nothing is held back.
    fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_one();
    }

    /// Sends requests to the store behind when they are due.
    fn send_when_due(&self) {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let left = state.waiting.peek().map(|first| first.due.saturating_duration_since(now));
            let is_over = state.is_over;
            match left {
                None if is_over => return,
                None => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Some(left) if !is_over && !left.is_zero() => {
                    let waited = self.changed.wait_timeout(state, left);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                Some(_) => {
                    let first = state.waiting.pop();
                    drop(state);
                    if let Some(Waiting { io, done, .. }) = first {
                        catch_callback_panic(|| {
                            self.backend.submit(&mut vec![io], &done);
                            self.backend.kick();
                        });
                    }
                    state = self.lock();
                }
            }
        }
    }
}

impl Backend for Filter {
    fn limits(&self) -> Limits {
        self.shared.backend.limits()
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        let Shared { backend, filters, changed, .. } = &*self.shared;
        let (now, mut failed) = (Instant::now(), Vec::new());
        let mut state = self.shared.lock();
        io.retain(|io| {
            if io.op == IoOp::Flush {
                return true;
            }
            let number = state.count;
            state.count += 1;
            if filters.fails(number) {
                failed.push(BackendResult::new(io.token, Err(Errno::EIO)));
                return false;
            }
            let due = if state.is_over { now } else { state.due(filters, io, now) };
            if due > now {
                let (io, done) = (io.clone(), Arc::clone(done));
                state.waiting.push(Waiting { due, number, io, done });
            }
            due <= now
        });
        let waits = !state.waiting.is_empty();
        drop(state);
        if waits {
            changed.notify_one();
        }
        if !failed.is_empty() {
            done.done(&failed);
        }
        backend.submit(io, done);
    }

    fn kick(&self) {
        self.shared.backend.kick();
    }

    fn region(&self) -> Option<Arc<Buffer>> {
        self.shared.backend.region()
    }

    fn extent(&self, offset: u64, len: u64) -> Extent {
        self.shared.backend.extent(offset, len)
    }

    fn resize(&self) -> io::Result<u64> {
        self.shared.backend.resize()
    }

    fn begin_close(&self) {
        self.shared.end();
        self.shared.backend.begin_close();
    }

    fn close(&self) -> io::Result<()> {
        self.shared.end();
        self.shared.backend.close()
    }

    fn take_notices(&self) -> Vec<String> {
        self.shared.backend.take_notices()
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::backend::{BackendSpec, open};
    use crate::sync::{self, Durable};
    use crate::{BlockDevice, LocalDevice};

    fn disk(filters: Filters) -> Arc<LocalDevice> {
        let memory = open(BackendSpec::Memory { bytes: 1 << 20, block: 512 }).unwrap();
        LocalDevice::new("disk", filtered(memory, filters).unwrap())
    }

    #[test]
    fn the_seed_decides_which_requests_fail() {
        let failed = |seed| -> Vec<usize> {
            let disk = disk(Filters { errors: 100_000, seed, ..Filters::default() });
            let fails = |number: &usize| {
                let written = sync::write_at(&*disk, 0, &[*number as u8; 512], Durable::Later);
                assert!(matches!(written, Ok(()) | Err(Errno::EIO)));
                written.is_err()
            };
            (0..1000).filter(fails).collect()
        };
        let (first, second) = (failed(1), failed(2));
        assert!((50..150).contains(&first.len()), "{}", first.len());
        assert!(first == failed(1) && first != second);
    }

    #[test]
    fn what_fails_is_not_executed_and_flushes_do_not_fail() {
        let disk = disk(Filters { errors: 1_000_000, ..Filters::default() });
        assert_eq!(sync::write_at(&*disk, 0, &[7; 512], Durable::Later), Err(Errno::EIO));
        assert_eq!(sync::flush(&*disk), Ok(()));
        assert_eq!(disk.extent(0, 512).allocation, crate::Allocation::Hole);
    }

    #[test]
    fn reads_and_writes_are_held_back_each_for_its_own_time() {
        let (delay_read, delay_write) = (Duration::from_millis(40), Duration::from_millis(120));
        let disk = disk(Filters { delay_read, delay_write, ..Filters::default() });
        let began = Instant::now();
        sync::write_at(&*disk, 512, &[7; 512], Durable::Later).unwrap();
        assert!(began.elapsed() >= delay_write);
        let mut out = [0; 512];
        let began = Instant::now();
        sync::read_at(&*disk, 512, &mut out).unwrap();
        assert!(began.elapsed() >= delay_read);
        assert_eq!(out, [7; 512]);
    }

    #[test]
    fn bytes_beyond_the_rate_wait() {
        let rate = NonZeroU64::new(1 << 20);
        let disk = disk(Filters { rate, ..Filters::default() });
        let began = Instant::now();
        // The first one waits for nobody; each of the others for those before it.
        for _ in 0..4 {
            sync::write_at(&*disk, 0, &[1; 64 << 10], Durable::Later).unwrap();
        }
        assert!(began.elapsed() >= Duration::from_millis(3 * 62), "{:?}", began.elapsed());
    }

    #[test]
    fn reads_and_changes_have_a_rate_each() {
        let filters = Filters { rate: NonZeroU64::new(1000), ..Filters::default() };
        let (mut state, now) = (State::default(), Instant::now());
        let mut due = |op, len| state.due(&filters, &BackendIo::new(0, op, 0, len), now) - now;
        assert_eq!(due(IoOp::Write, 500), Duration::ZERO);
        assert_eq!(due(IoOp::Discard, 1000), Duration::from_millis(500));
        assert_eq!(due(IoOp::Read, 2000), Duration::ZERO);
        assert_eq!(due(IoOp::WriteZeroes, 1), Duration::from_millis(1500));
        assert_eq!(due(IoOp::Read, 1), Duration::from_secs(2));
    }

    #[test]
    fn what_waits_is_answered_when_the_store_is_dropped() {
        struct Answers(Mutex<Vec<i32>>);
        impl BackendDone for Answers {
            fn done(&self, results: &[BackendResult]) {
                self.0.lock().unwrap().extend(results.iter().map(|result| result.errno));
            }
        }
        let memory = open(BackendSpec::Memory { bytes: 1 << 20, block: 512 }).unwrap();
        let delay_write = Duration::from_secs(3600);
        let filter = filtered(memory, Filters { delay_write, ..Filters::default() }).unwrap();
        let answers = Arc::new(Answers(Mutex::default()));
        let done: Arc<dyn BackendDone> = answers.clone();
        filter.submit(&mut vec![BackendIo::new(1, IoOp::WriteZeroes, 0, 512)], &done);
        assert!(answers.0.lock().unwrap().is_empty());
        drop(filter);
        assert_eq!(*answers.0.lock().unwrap(), [0]);
    }

    /// A server that ends waits for its requests, while it still has the store.
    #[test]
    fn what_waits_is_answered_when_the_end_begins() {
        struct Answers(Mutex<mpsc::Sender<i32>>);
        impl BackendDone for Answers {
            fn done(&self, results: &[BackendResult]) {
                let sender = self.0.lock().unwrap();
                results.iter().for_each(|result| sender.send(result.errno).unwrap());
            }
        }
        let memory = open(BackendSpec::Memory { bytes: 1 << 20, block: 512 }).unwrap();
        let delay_write = Duration::from_secs(3600);
        let filter = filtered(memory, Filters { delay_write, ..Filters::default() }).unwrap();
        let (sender, errors) = mpsc::channel();
        let done: Arc<dyn BackendDone> = Arc::new(Answers(Mutex::new(sender)));
        let submit =
            || filter.submit(&mut vec![BackendIo::new(1, IoOp::WriteZeroes, 0, 512)], &done);
        submit();
        filter.begin_close();
        assert_eq!(errors.recv_timeout(Duration::from_secs(60)), Ok(0));
        // Nor is what comes later.
        submit();
        assert_eq!(errors.recv_timeout(Duration::from_secs(60)), Ok(0));
    }
}
