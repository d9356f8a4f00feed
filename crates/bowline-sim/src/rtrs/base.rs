//! What every part of a run needs: the time, what is due, chance, and the record.

use bowline_roce::{Device, Instant};

use super::sabotage::Sabotage;
use super::stats::Stats;
use super::world::Step;
use crate::engine::coverage::Coverage;
use crate::engine::queue::Queue;
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;
use crate::roce::net::Datagram;

/// Something due at one moment of virtual time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A datagram arrives.
    Arrive { host: usize, datagram: Datagram },
    /// A timer of a device may be due.
    Timer { host: usize, boot: u32 },
    /// A driver sends what there is and hands out events.
    Turn { host: usize, boot: u32 },
    /// A program looks at what its devices have told it.
    Look { node: usize, boot: u32 },
    /// A timer of a program's cores may be due.
    Wake { node: usize, boot: u32 },
    /// A program begins a session.
    Begin { client: usize, boot: u32 },
    /// A program goes on.
    Go { client: usize, boot: u32 },
    /// A program gives a disk up, or takes it again.
    Swap { client: usize, boot: u32 },
    /// Storage has finished an operation.
    Stored { boot: u32, number: u64 },
    /// The server has opened an export, or not.
    Opened { boot: u32, ticket: u32 },
    /// The next fault of one kind.
    Fault(usize),
    /// A machine starts again.
    Boot(usize),
    /// A line is whole again.
    Mend(usize, usize),
    /// The faulty part of the run ends.
    Calm,
    /// Programs set right what faults have left.
    Repair,
    /// Looks whether everything is done.
    Check,
    /// What the run has to stand goes on.
    Trial(Step),
}

/// What every part of a run needs.
pub(crate) struct Base {
    pub(crate) now: u64,
    pub(crate) queue: Queue<Event>,
    pub(crate) rng: Rng,
    /// Chance for what came to runs later, so that seeds stay what they were.
    pub(crate) extra: Rng,
    pub(crate) trace: Trace,
    pub(crate) stats: Stats,
    pub(crate) coverage: Coverage,
    /// The first broken promise.
    pub(crate) failure: Option<String>,
    pub(crate) sabotage: Option<Sabotage>,
    /// Fresh work has begun.
    pub(crate) fresh: bool,
}

impl Base {
    /// Puts `event` into the queue, `delay` from now.
    pub(crate) fn schedule(&mut self, delay: u64, event: Event) {
        self.queue.push(self.now.saturating_add(delay), event);
    }

    /// The same after a time drawn up to `most`.
    pub(crate) fn schedule_within(&mut self, most: u64, event: Event) {
        let delay = self.rng.below(most + 1);
        self.schedule(delay, event);
    }

    /// Records the first broken promise; later ones follow from it.
    pub(crate) fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.failure.is_none() {
            self.failure = Some(what());
        }
    }

    /// Records a broken promise, if it is one.
    pub(crate) fn judge<T>(&mut self, result: Result<T, String>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(what) => {
                self.fail(|| what);
                None
            }
        }
    }

    /// Adds to the record.
    pub(crate) fn note(&mut self, facts: [u64; 3], text: impl FnOnce() -> String) {
        self.trace.note(self.now, facts, text);
    }

    pub(crate) fn instant(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    /// Tells whether this wrong is to be done, so often of a thousand.
    pub(crate) fn wrongs(&mut self, how: Sabotage, permille: u64) -> bool {
        self.sabotage == Some(how) && self.rng.chance(permille)
    }
}

/// What of a device is left, though nobody should have left anything.
pub(crate) fn left(device: &Device) -> Option<String> {
    let held = device.in_use();
    (held != bowline_roce::InUse::default()).then(|| format!("{held:?}"))
}
