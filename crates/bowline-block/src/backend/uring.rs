//! Requests of a file over io_uring: the submitting thread makes one system call for a batch, and
//! one thread handles completions.
//!
//! ```text
//!   submit: slab slot, entry of the ring      (under `state`)
//!   kick:   io_uring_enter, no lock
//!   bowline-uring: waits in io_uring_enter -> Job::advance -> next call, or BackendDone::done
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

use super::file::Facts;
use super::job::Job;
use super::{BackendDone, BackendResult, sys};

/// Most calls in flight; the submission queue has as many entries, so it is never full.
const DEPTH: u32 = 512;
/// User data of the entry that only wakes the thread.
const WAKE: u64 = u64::MAX;
/// How often the thread submits entries again that the kernel refused for want of memory.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The ring of one file. Dropping it waits for calls in flight.
pub(super) struct Ring {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    ring: IoUring,
    facts: Arc<Facts>,
    state: Mutex<State>,
    stop: AtomicBool,
}

struct State {
    /// By user data. A slot holds its job, and with it the memory, until its completion was seen.
    jobs: Vec<Option<Job>>,
    free: Vec<u32>,
    /// Jobs for which there was no slot.
    waiting: VecDeque<Job>,
    /// Entries were queued that no system call has submitted yet.
    rung: bool,
}

impl Ring {
    pub(super) fn new(facts: &Arc<Facts>) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(DEPTH + 1)?;
        if !ring.params().is_feature_nodrop() || !ring.params().is_feature_ext_arg() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let state = State {
            jobs: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH).rev().collect(),
            waiting: VecDeque::new(),
            rung: true,
        };
        let shared = Arc::new(Shared {
            ring,
            facts: facts.clone(),
            state: Mutex::new(state),
            stop: AtomicBool::new(false),
        });
        let for_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("bowline-uring".into())
            .spawn(move || for_thread.reap())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Queues jobs; [`kick`](Self::kick) begins them.
    pub(super) fn submit(&self, jobs: impl Iterator<Item = Job>) {
        let mut state = self.shared.lock();
        for job in jobs {
            state.add(&self.shared, job);
        }
    }

    /// Begins what was queued.
    pub(super) fn kick(&self) {
        self.shared.kick();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        {
            let _alone = self.shared.lock();
            let wake = opcode::Nop::new().build().user_data(WAKE);
            // SAFETY: the lock is held; the entry names no memory. There is one entry more than
            // there are slots.
            #[allow(unsafe_code)]
            unsafe {
                sys::push(&self.shared.ring, &wake)
            };
        }
        // If this fails, the thread submits it later.
        let _ = self.shared.ring.submit();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl State {
    fn add(&mut self, shared: &Shared, job: Job) {
        match self.free.pop() {
            Some(slot) => self.begin(shared, slot, job),
            None => self.waiting.push_back(job),
        }
    }

    /// Queues the entry of a job's next call, and stores the job in `slot`, which is free.
    fn begin(&mut self, shared: &Shared, slot: u32, job: Job) {
        let step = job.step(&shared.facts.zeroes);
        let entry = sys::entry(shared.facts.fd(), step, job.priority(), slot.into());
        self.jobs[slot as usize] = Some(job);
        self.rung = false;
        // SAFETY: `self` is what the lock protects, so no other thread is here; the job in its slot
        // keeps the memory until the completion. There is room: one entry for each slot.
        #[allow(unsafe_code)]
        let there_was_room = unsafe { sys::push(&shared.ring, &entry) };
        assert!(there_was_room, "more entries than slots");
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Only a bug panics in a critical section; the panic was printed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kick(&self) {
        let rung = std::mem::replace(&mut self.lock().rung, true);
        // The kernel may lack memory, or completions must be handled first. The entries stay
        // queued, and the thread that handles completions tries again.
        if !rung && self.ring.submit().is_err() {
            self.lock().rung = false;
        }
    }

    fn reap(&self) {
        let mut completed = Vec::new();
        let mut results = Vec::new();
        let mut finished: Vec<(Arc<dyn BackendDone>, BackendResult)> = Vec::new();
        loop {
            let limit = types::Timespec::from(LOOK_AGAIN);
            // Fails after the timeout, by a signal, or when completions are pending.
            let _ = self
                .ring
                .submitter()
                .submit_with_args(1, &types::SubmitArgs::new().timespec(&limit));
            // SAFETY: only this thread takes completions.
            #[allow(unsafe_code)]
            unsafe {
                sys::completions(&self.ring, &mut completed);
            }
            let mut state = self.lock();
            for (slot, returned) in completed.drain(..).filter(|(slot, _)| *slot != WAKE) {
                let Some(mut job) = state.jobs.get_mut(slot as usize).and_then(Option::take) else {
                    continue;
                };
                let slot = slot as u32;
                match job.advance(returned) {
                    None => state.begin(self, slot, job),
                    Some(result) => {
                        finished.push((job.done, result));
                        state.free.push(slot);
                    }
                }
            }
            while !state.free.is_empty()
                && let Some(job) = state.waiting.pop_front()
            {
                state.add(self, job);
            }
            let idle = state.free.len() == DEPTH as usize;
            drop(state);
            self.kick();
            super::deliver(&mut finished, &mut results);
            if idle && self.stop.load(Ordering::Acquire) {
                return;
            }
        }
    }
}
