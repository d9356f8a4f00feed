//! Waiting callers of a socket, and ways to wake them.

use core::sync::atomic::{AtomicU8, Ordering};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Waker;
use std::thread::Thread;
use std::time::Duration;

use bowline_rds::{Interest, SocketId};

const WAITING: u8 = 0;
const WOKEN: u8 = 1;

/// A waiting thread. Its state changes under the node's lock; the thread is made runnable after the
/// lock is released.
#[derive(Debug)]
pub(crate) struct Waiter {
    thread: Thread,
    state: AtomicU8,
}

impl Waiter {
    pub(crate) fn new() -> Self {
        Self { thread: std::thread::current(), state: AtomicU8::new(WOKEN) }
    }

    /// Begins to count wake-ups.
    pub(crate) fn arm(&self) {
        self.state.store(WAITING, Ordering::Release);
    }

    /// Notes a wake-up; tells whether it is the first since [`arm`](Self::arm).
    pub(crate) fn mark(&self) -> bool {
        self.state.swap(WOKEN, Ordering::AcqRel) == WAITING
    }

    pub(crate) fn is_woken(&self) -> bool {
        self.state.load(Ordering::Acquire) == WOKEN
    }

    pub(crate) fn unpark(&self) {
        self.thread.unpark();
    }

    /// Sleeps until a wake-up, or until `limit` has passed.
    pub(crate) fn park(&self, limit: Option<Duration>) {
        // `park` may return early; the callers try again and come back.
        if !self.is_woken() {
            match limit {
                Some(limit) => std::thread::park_timeout(limit),
                None => std::thread::park(),
            }
        }
    }
}

/// How a waiting thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// The thread is parked.
    Parked,
    /// The thread polls the network; if it sleeps, it sleeps there.
    Polling,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) waiter: Arc<Waiter>,
    pub(crate) interest: Interest,
    pub(crate) mode: WaitMode,
}

/// All waiting callers of one socket.
#[derive(Debug, Default)]
pub(crate) struct SocketSlot {
    pub(crate) id: Option<SocketId>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) wakers: Vec<(Interest, Waker)>,
    pub(crate) event_fd: Option<Arc<OwnedFd>>,
    /// The event descriptor reads as ready.
    pub(crate) signalled: bool,
    /// A caller relies on the background thread to watch the network for this socket.
    pub(crate) watched: bool,
}
