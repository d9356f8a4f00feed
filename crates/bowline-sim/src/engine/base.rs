//! What the worlds of all simulators have: the time, the queue of events, random numbers, the trace
//! and the verdict.

use bowline_base::Instant;

use super::coverage::Coverage;
use super::queue::{Queue, SEC};
use super::rng::Rng;
use super::trace::Trace;

/// The state of a run whose events are `E` and whose counters are `S`.
pub(crate) struct Base<E, S> {
    /// Virtual time in nanoseconds.
    pub(crate) now: u64,
    queue: Queue<E>,
    pub(crate) rng: Rng,
    pub(crate) trace: Trace,
    pub(crate) stats: S,
    pub(crate) coverage: Coverage,
    /// The first broken promise.
    pub(crate) failure: Option<String>,
}

impl<E, S: Default> Base<E, S> {
    pub(crate) fn new(rng: Rng, trace: Trace) -> Self {
        Self {
            now: SEC,
            queue: Queue::default(),
            rng,
            trace,
            stats: S::default(),
            coverage: Coverage::default(),
            failure: None,
        }
    }

    /// Puts `event` into the queue, due after `delay` nanoseconds.
    pub(crate) fn schedule(&mut self, delay: u64, event: E) {
        self.schedule_at(self.now.saturating_add(delay), event);
    }

    /// Puts `event` into the queue, due at a time that has not passed.
    pub(crate) fn schedule_at(&mut self, at: u64, event: E) {
        self.queue.push(at.max(self.now), event);
    }

    /// Puts `event` into the queue, due after a random time of at most `most` nanoseconds.
    pub(crate) fn schedule_within(&mut self, most: u64, event: E) {
        let delay = self.rng.below(most + 1);
        self.schedule(delay, event);
    }

    /// Takes the next event and moves the clock to it. An empty queue is a broken promise.
    pub(crate) fn next_event(&mut self) -> Option<E> {
        let Some((at, event)) = self.queue.pop() else {
            self.fail(|| "nothing left to happen".into());
            return None;
        };
        self.now = at;
        Some(event)
    }

    /// Records the first broken promise; later ones are its consequences.
    pub(crate) fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.failure.is_none() {
            self.failure = Some(what());
        }
    }

    /// Records a broken promise, if `result` is one.
    pub(crate) fn judge<T>(&mut self, result: Result<T, String>) -> Option<T> {
        result.map_err(|what| self.fail(|| what)).ok()
    }

    /// Adds an event to the trace.
    pub(crate) fn note(&mut self, facts: [u64; 3], text: impl FnOnce() -> String) {
        self.trace.note(self.now, facts, text);
    }

    /// Returns the counters, the coverage and the trace.
    pub(crate) fn end(self) -> (S, Coverage, Trace) {
        (self.stats, self.coverage, self.trace)
    }

    pub(crate) fn instant(&self) -> Instant {
        Instant::from_nanos(self.now)
    }
}

/// Lets the state of a simulator be used as the base that it adds to.
macro_rules! has_base {
    ($state:ty, $event:ty, $stats:ty) => {
        impl std::ops::Deref for $state {
            type Target = $crate::engine::base::Base<$event, $stats>;

            fn deref(&self) -> &Self::Target {
                &self.base
            }
        }

        impl std::ops::DerefMut for $state {
            fn deref_mut(&mut self) -> &mut Self::Target {
                &mut self.base
            }
        }
    };
}
pub(crate) use has_base;
