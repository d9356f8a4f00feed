//! Requests of a file executed by threads with blocking calls, where there is no io_uring.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use bowline_verbs::catch_callback_panic;

use super::file::Facts;
use super::job::Job;
use super::sys;

/// Number of threads, which is the most calls at a time.
const THREADS: usize = 4;

/// Threads of one file. Dropping it waits for calls in progress.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    stop: bool,
}

struct Shared {
    facts: Arc<Facts>,
    queue: Mutex<Queue>,
    more: Condvar,
}

impl Pool {
    pub(super) fn new(facts: &Arc<Facts>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            facts: facts.clone(),
            queue: Mutex::default(),
            more: Condvar::new(),
        });
        let mut pool = Self { shared, threads: Vec::new() };
        for _ in 0..THREADS {
            let shared = pool.shared.clone();
            pool.threads.push(
                std::thread::Builder::new()
                    .name("bowline-file".into())
                    .spawn(move || shared.serve())?,
            );
        }
        Ok(pool)
    }

    /// Queues jobs; [`kick`](Self::kick) begins them.
    pub(super) fn submit(&self, jobs: impl Iterator<Item = Job>) {
        self.shared.lock().jobs.extend(jobs);
    }

    /// Begins what was queued.
    pub(super) fn kick(&self) {
        self.shared.more.notify_all();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            if thread.thread().id() != std::thread::current().id() {
                // A panic of the thread was printed when it happened.
                let _ = thread.join();
            }
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        // Nothing in a critical section panics.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        loop {
            let mut queue = self.lock();
            let mut job = loop {
                match queue.jobs.pop_front() {
                    Some(job) => break job,
                    None if queue.stop => return,
                    None => {
                        queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(queue);
            let result = loop {
                let step = job.step(&self.facts.zeroes);
                if let Some(result) = job.advance(sys::execute(self.facts.fd(), step)) {
                    break result;
                }
            };
            catch_callback_panic(move || job.done.done(&[result]));
        }
    }
}
