//! What all parts of a run share: time, random numbers, the processes, the judge and the trace.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use bowline_host::core::HeapMemory;
use bowline_host_wire::SocketHandle;

use super::judge::Judge;
use super::process::Process;
use super::sabotage::Sabotage;
use super::stats::Stats;
use crate::engine::coverage::Coverage;
use crate::engine::rng::Rng;
use crate::engine::trace::Trace;

/// What all parts of a run share.
pub(super) struct Shared {
    /// Nanoseconds since the start of the run.
    pub(super) now: Cell<u64>,
    pub(super) rng: RefCell<Rng>,
    pub(super) trace: RefCell<Trace>,
    pub(super) failure: RefCell<Option<String>>,
    pub(super) coverage: RefCell<Coverage>,
    pub(super) stats: RefCell<Stats>,
    pub(super) judge: RefCell<Judge>,
    pub(super) sabotage: Option<Sabotage>,
    pub(super) processes: RefCell<Vec<Rc<Process>>>,
    /// Handle and memory of each socket.
    pub(super) memories: RefCell<BTreeMap<u32, (SocketHandle, Weak<HeapMemory>)>>,
    /// How often programs go on in the middle of what a node does, in a thousand.
    pub(super) between: u64,
    /// A program goes on in the middle of what a node does, or nothing may.
    is_between: Cell<bool>,
    numbers: Cell<u64>,
    mistakes: Cell<u64>,
}

impl Shared {
    pub(super) fn new(rng: Rng, trace: Trace, between: u64, sabotage: Option<Sabotage>) -> Self {
        Self {
            now: Cell::new(0),
            rng: RefCell::new(rng),
            trace: RefCell::new(trace),
            failure: RefCell::new(None),
            coverage: RefCell::default(),
            stats: RefCell::default(),
            judge: RefCell::default(),
            sabotage,
            processes: RefCell::default(),
            memories: RefCell::default(),
            between,
            is_between: Cell::new(false),
            numbers: Cell::new(0),
            mistakes: Cell::new(0),
        }
    }

    pub(super) fn random(&self) -> u64 {
        self.rng.borrow_mut().next()
    }

    pub(super) fn chance(&self, permille: u64) -> bool {
        self.rng.borrow_mut().chance(permille)
    }

    pub(super) fn below(&self, n: u64) -> u64 {
        self.rng.borrow_mut().below(n)
    }

    /// A number that nothing else has.
    pub(super) fn number(&self) -> u64 {
        self.numbers.set(self.numbers.get() + 1);
        self.numbers.get()
    }

    /// Each so many times the run is to make this mistake, tells whether it makes it now.
    pub(super) fn is_wrong(&self, how: Sabotage, each: u64) -> bool {
        if self.sabotage != Some(how) {
            return false;
        }
        self.mistakes.set(self.mistakes.get() + 1);
        self.mistakes.get().is_multiple_of(each)
    }

    pub(super) fn note(&self, facts: [u64; 3], text: impl FnOnce() -> String) {
        self.trace.borrow_mut().note(self.now.get(), facts, text);
    }

    pub(super) fn hit(&self, group: &'static str, name: &'static str) {
        self.coverage.borrow_mut().hit(group, name);
    }

    /// The first broken promise is kept.
    pub(super) fn fail(&self, what: impl FnOnce() -> String) {
        let mut failure = self.failure.borrow_mut();
        if failure.is_none() {
            *failure = Some(what());
        }
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut Stats)) {
        count(&mut self.stats.borrow_mut());
    }

    /// Processes that can go on, by their places.
    pub(super) fn runnable(&self) -> Vec<usize> {
        let now = self.now.get();
        let processes = self.processes.borrow();
        let can = |(at, process): (usize, &Rc<Process>)| process.can_run(now).then_some(at);
        processes.iter().enumerate().filter_map(can).collect()
    }

    /// Lets a process take one step.
    pub(super) fn step_process(self: &Rc<Self>, at: usize) {
        let process = Rc::clone(&self.processes.borrow()[at]);
        process.step();
    }

    /// In the middle of what a node does, programs may take some steps.
    pub(super) fn interleave(self: &Rc<Self>) {
        if self.is_between.get() || !self.chance(self.between) {
            return;
        }
        self.is_between.set(true);
        for _ in 0..=self.below(4) {
            let runnable = self.runnable();
            if runnable.is_empty() {
                break;
            }
            let at = runnable[self.below(runnable.len() as u64) as usize];
            self.count(|stats| stats.between += 1);
            self.step_process(at);
        }
        self.is_between.set(false);
    }
}
