//! A mount that continues in another process: the kernel's end stays, with the requests that nobody
//! has read, and programs keep the file open.
//!
//! ```text
//!   closed        each thread parks after the request that it has; one that sleeps in a read is
//!                 woken by a request of our own
//!   open          they continue
//!   handed over   they end, and leave the rest to the kernel
//! ```

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A mount without its disk, for another process that takes it over.
#[derive(Debug)]
pub struct Handed {
    /// Where the kernel's requests come from.
    pub kernel: Arc<OwnedFd>,
    /// How often the file is open.
    pub opens: usize,
    /// Its device number, by which it is known.
    pub device: u64,
}

/// By this message the kernel is asked to send again what was read and not answered (Linux 6.9).
const RESEND: u32 = 7;

/// Has the kernel send again all requests that a process had read and has not answered: that
/// process has ended.
pub(super) fn ask_again(kernel: BorrowedFd<'_>) -> io::Result<()> {
    let mut message = Vec::new();
    for word in [16, RESEND, 0, 0] {
        message.extend(word.to_ne_bytes());
    }
    rustix::io::write(kernel, &message)?;
    Ok(())
}

#[derive(Debug, Default)]
struct State {
    /// Number of threads that wait here.
    parked: usize,
    is_handed_over: bool,
}

/// Pauses the threads of a mount.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Relaxed: a thread that sees it takes the lock.
    is_closed: AtomicBool,
}

impl Gate {
    /// A pause from the start.
    pub(super) fn closed() -> Self {
        Self { is_closed: AtomicBool::new(true), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Two plain values are always consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whether threads are to be paused.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }

    /// Waits until a pause ends, if there is one; returns whether the thread continues.
    pub(super) fn park(&self) -> bool {
        let mut state = self.lock();
        state.parked += 1;
        while self.is_closed() && !state.is_handed_over {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.parked -= 1;
        !state.is_handed_over
    }

    /// Returns how many threads are paused.
    pub(super) fn parked(&self) -> usize {
        self.lock().parked
    }

    /// Begins a pause.
    pub(super) fn close(&self) {
        let _state = self.lock();
        self.is_closed.store(true, Relaxed);
    }

    /// Ends a pause.
    pub(super) fn open(&self) {
        let _state = self.lock();
        self.is_closed.store(false, Relaxed);
        self.changed.notify_all();
    }

    /// Makes all threads end that are paused.
    pub(super) fn hand_over(&self) {
        self.lock().is_handed_over = true;
        self.changed.notify_all();
    }
}
