//! A thread that waits until another one wakes it.

use core::sync::atomic::Ordering;
use core::time::Duration;

use crate::sync::{AtomicU8, Thread, current, park, park_timeout};

const WAITING: u8 = 0;
const WOKEN: u8 = 1;

/// A waiting thread. Its state changes under the driver's lock; the thread is made runnable after
/// the lock is released.
#[derive(Debug)]
pub struct Waiter {
    thread: Thread,
    state: AtomicU8,
}

impl Waiter {
    /// Returns the calling thread, which does not wait yet.
    pub fn current() -> Self {
        Self { thread: current(), state: AtomicU8::new(WOKEN) }
    }

    /// Begins to count wake-ups.
    pub fn arm(&self) {
        // Pairs with `mark`, mostly under the driver's lock, which orders them as well.
        self.state.store(WAITING, Ordering::Release);
    }

    /// Notes a wake-up; tells whether it is the first since [`arm`](Self::arm).
    pub fn mark(&self) -> bool {
        // Pairs with `is_woken`, which a thread asks without the lock: it sees what it is woken
        // for.
        self.state.swap(WOKEN, Ordering::AcqRel) == WAITING
    }

    /// Tells whether a wake-up has been noted since [`arm`](Self::arm).
    pub fn is_woken(&self) -> bool {
        // Pairs with `mark`.
        self.state.load(Ordering::Acquire) == WOKEN
    }

    /// Makes the thread runnable, after [`mark`](Self::mark).
    pub fn unpark(&self) {
        self.thread.unpark();
    }

    /// Sleeps until a wake-up, or until `limit` has passed.
    pub fn park(&self, limit: Option<Duration>) {
        // `park` may return early; the callers try again and come back.
        if !self.is_woken() {
            match limit {
                Some(limit) => park_timeout(limit),
                None => park(),
            }
        }
    }
}
