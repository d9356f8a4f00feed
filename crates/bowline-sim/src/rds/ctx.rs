//! What every part of a run shares: the clock, the queue of events, the dice, the network, the
//! record and the judges.

use std::collections::VecDeque;

use super::net::{EndId, Net, NetEvent, Notice};
use super::oracle::Oracle;
use super::stats::Stats;
use crate::engine::coverage::Coverage;
use crate::engine::queue::{Queue, SEC};
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;

/// Index of a host.
pub(crate) type HostId = usize;

/// Something due at one moment of virtual time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A packet arrives or a TCP timer is due.
    Net(NetEvent),
    /// A host has something to do; void if it was restarted since.
    Host { host: HostId, boot: u32, what: HostEvent },
    /// The workload goes on.
    App(AppEvent),
    /// The next fault of one kind strikes.
    Fault { kind: usize },
    /// A fault ends.
    Heal(Heal),
}

/// What a host can have to do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostEvent {
    /// Reads a TCP connection.
    Read(EndId),
    /// Goes on parsing what was read.
    Process,
    /// The timer armed as number `.0` is due.
    Timer(u64),
    /// Writes what was gathered.
    Flush(EndId),
    /// Reports a write made earlier.
    FinishWrite(EndId),
    /// Asks TCP how much is acknowledged.
    TcpAcks,
    /// A drained connection took too long.
    DrainLimit(EndId),
    /// Takes a connection from the listener.
    Accept,
    /// Kernel peer: finishes the shutdown of a path.
    Shutdown { conn: usize, path: usize },
    /// Kernel peer: connects a path.
    Connect { conn: usize, path: usize },
}

/// What the workload can do next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AppEvent {
    /// A sender goes on.
    Send(usize),
    /// The reader of a socket goes on.
    Read(usize),
    /// A socket is opened again.
    Reopen(usize),
    /// A stopped reader reads on.
    ReadOn(usize),
    /// A kernel peer tries again what waits.
    Nudge(HostId),
    /// Looks whether everything is done.
    Check,
    /// The faulty part of the run ends.
    Calm,
}

/// How a fault ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Heal {
    /// Packets from one host reach the other again.
    Route { from: HostId, to: HostId },
    /// A host comes up.
    Boot(HostId),
    /// A node that was told to end is gone.
    Ended(HostId),
    /// A process that did nothing goes on.
    Resume(HostId),
    /// An address is back where it belongs.
    Address { host: HostId, index: usize },
    /// Delays are as before.
    Delay,
}

/// The shared part of a run.
pub(crate) struct Ctx {
    pub(crate) now: u64,
    queue: Queue<Event>,
    pub(crate) rng: Rng,
    pub(crate) net: Net,
    pub(crate) oracle: Oracle,
    pub(crate) trace: Trace,
    pub(crate) stats: Stats,
    pub(crate) coverage: Coverage,
    /// What TCP has to tell hosts; emptied before the step ends.
    pub(crate) notices: VecDeque<(EndId, Notice)>,
    /// Sockets somebody waits for and that are ready, as (slot, readable, writable).
    pub(crate) wakes: VecDeque<(usize, bool, bool)>,
    /// The first broken promise.
    pub(crate) failure: Option<String>,
}

impl Ctx {
    pub(crate) fn new(rng: Rng, net: Net, trace: Trace) -> Self {
        Self {
            now: SEC,
            queue: Queue::default(),
            rng,
            net,
            oracle: Oracle::default(),
            trace,
            stats: Stats::default(),
            coverage: Coverage::default(),
            notices: VecDeque::new(),
            wakes: VecDeque::new(),
            failure: None,
        }
    }

    /// Puts `event` into the queue, `delay` from now.
    pub(crate) fn schedule(&mut self, delay: u64, event: Event) {
        self.schedule_at(self.now.saturating_add(delay), event);
    }

    /// Puts `event` into the queue at a moment that has not passed.
    pub(crate) fn schedule_at(&mut self, at: u64, event: Event) {
        self.queue.push(at.max(self.now), event);
    }

    /// Takes the next event and moves the clock to it.
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        let (at, event) = self.queue.pop()?;
        self.now = at;
        Some(event)
    }

    /// Schedules work of a host in its present life.
    pub(crate) fn schedule_host(&mut self, delay: u64, host: HostId, what: HostEvent) {
        let boot = self.net.hosts[host].boot;
        self.schedule(delay, Event::Host { host, boot, what });
    }

    /// Records the first broken promise; later ones follow from it.
    pub(crate) fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.failure.is_none() {
            self.failure = Some(what());
        }
    }

    /// Adds to the record.
    pub(crate) fn note(&mut self, facts: [u64; 3], text: impl FnOnce() -> String) {
        self.trace.note(self.now, facts, text);
    }
}
