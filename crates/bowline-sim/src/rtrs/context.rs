//! State that every part of a run uses: the time, the event queue, random numbers, and the trace.

use bowline_roce::Device;

use super::sabotage::Sabotage;
use super::stats::Stats;
use super::world::Step;
use crate::engine::base::{self, has_base};
use crate::engine::rng::Rng;
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
    pub(crate) base: base::Base<Event, Stats>,
    /// A second generator for everything added to runs later, so that old seeds keep their runs.
    pub(crate) extra: Rng,
    pub(crate) sabotage: Option<Sabotage>,
    /// Final IO has begun.
    pub(crate) final_io: bool,
}

has_base!(Base, Event, Stats);

impl Base {
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
