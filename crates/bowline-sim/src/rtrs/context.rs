//! State that every part of a run uses: the time, the event queue, random numbers, and the trace.

use bowline_roce::{Device, Instant};

use super::sabotage::Sabotage;
use super::stats::Stats;
use super::world::Step;
use crate::engine::coverage::Coverage;
use crate::engine::queue::Queue;
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;
use crate::roce::net::Datagram;

/// An event at a moment of virtual time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A datagram arrives.
    Arrive { host: usize, datagram: Datagram },
    /// A timer of a device may be due.
    Timer { host: usize, boot: u32 },
    /// A driver sends what its device has ready, and hands out the device's events.
    Turn { host: usize, boot: u32 },
    /// A program takes events from its inbox.
    Poll { node: usize, boot: u32 },
    /// A timer of a program's cores may be due.
    Wake { node: usize, boot: u32 },
    /// A program begins a session.
    Begin { client: usize, boot: u32 },
    /// A program continues.
    Go { client: usize, boot: u32 },
    /// A program unmaps a disk, or maps one again.
    Swap { client: usize, boot: u32 },
    /// Storage has finished an operation.
    Stored { boot: u32, number: u64 },
    /// The server's attempt to open an export is over.
    Opened { boot: u32, ticket: u32 },
    /// The next fault of this kind, an index into the plan's faults.
    Fault(usize),
    /// A machine starts again.
    Boot(usize),
    /// A cut line is connected again.
    Mend(usize, usize),
    /// The faulty part of the run ends.
    Calm,
    /// Programs repair what faults have left.
    Repair,
    /// Checks whether everything is done.
    Check,
    /// A trial continues.
    Trial(Step),
}

/// State that every part of a run uses.
pub(crate) struct Base {
    pub(crate) now: u64,
    pub(crate) queue: Queue<Event>,
    pub(crate) rng: Rng,
    /// A second generator for everything added to runs later, so that old seeds keep their runs.
    pub(crate) extra: Rng,
    pub(crate) trace: Trace,
    pub(crate) stats: Stats,
    pub(crate) coverage: Coverage,
    /// The first broken invariant.
    pub(crate) failure: Option<String>,
    pub(crate) sabotage: Option<Sabotage>,
    /// Final IO has begun.
    pub(crate) final_io: bool,
}

impl Base {
    /// Schedules `event` in `delay` nanoseconds.
    pub(crate) fn schedule(&mut self, delay: u64, event: Event) {
        self.queue.push(self.now.saturating_add(delay), event);
    }

    /// Schedules `event` after a random delay of at most `most` nanoseconds.
    pub(crate) fn schedule_within(&mut self, most: u64, event: Event) {
        let delay = self.rng.below(most + 1);
        self.schedule(delay, event);
    }

    /// Records a broken invariant if it is the first; later ones follow from it.
    pub(crate) fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.failure.is_none() {
            self.failure = Some(what());
        }
    }

    /// Records the error of a check, if it failed.
    pub(crate) fn judge<T>(&mut self, result: Result<T, String>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(what) => {
                self.fail(|| what);
                None
            }
        }
    }

    /// Adds to the trace.
    pub(crate) fn note(&mut self, facts: [u64; 3], text: impl FnOnce() -> String) {
        self.trace.note(self.now, facts, text);
    }

    pub(crate) fn instant(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    /// Returns whether to commit this sabotage now, with a probability of `permille` in a thousand.
    pub(crate) fn sabotages(&mut self, how: Sabotage, permille: u64) -> bool {
        self.sabotage == Some(how) && self.rng.chance(permille)
    }
}

/// Describes objects that are left on a device; `None` if there are none.
pub(crate) fn left(device: &Device) -> Option<String> {
    let held = device.in_use();
    (held != bowline_roce::InUse::default()).then(|| format!("{held:?}"))
}
