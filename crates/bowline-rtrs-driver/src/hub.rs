//! What runs a core: its lock, the lock of its devices, and the order in which they are used.
//!
//! ```text
//!   any thread    state ── input or request ──> dirty
//!                   │
//!   who gets it   exec ── orders and batch of the core ──> devices ── inputs ──> state
//! ```
//! Locks, in the order in which they are taken: `exec`, which data paths only try, and `state`.
//! While one thread carries out what the core wants, others leave what they add to it: under load
//! requests of many threads go out with one call. The state is never locked while a device is
//! called, nor while a program's function runs.

use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use bowline_base::clock;
use bowline_rtrs::bind::Binding;
use bowline_rtrs::{Batch, Input, Instant, Order, PortId};
use bowline_verbs::{CmEvent, CmId, Qpn};

use crate::port::{Port, PortSet};
use crate::stats::Stats;

/// What both cores have in common.
pub(crate) trait Core: Send {
    fn handle(&mut self, now: Instant, input: Input);
    fn handle_timeout(&mut self, now: Instant);
    fn poll_timeout(&self) -> Option<Instant>;
    fn poll_order(&mut self) -> Option<Order>;
    fn take_batch(&mut self, into: &mut Batch);
}

macro_rules! is_core {
    ($core:ty) => {
        impl Core for $core {
            fn handle(&mut self, now: Instant, input: Input) {
                Self::handle(self, now, input);
            }

            fn handle_timeout(&mut self, now: Instant) {
                Self::handle_timeout(self, now);
            }

            fn poll_timeout(&self) -> Option<Instant> {
                Self::poll_timeout(self)
            }

            fn poll_order(&mut self) -> Option<Order> {
                Self::poll_order(self)
            }

            fn take_batch(&mut self, into: &mut Batch) {
                Self::take_batch(self, into);
            }
        }
    };
}

is_core!(bowline_rtrs::client::Session);
is_core!(bowline_rtrs::server::Server);

/// A core, with what the driver keeps beside it under the same lock.
pub(crate) trait Side: Send {
    type Core: Core;
    fn core(&mut self) -> &mut Self::Core;
    /// What carries out the core's orders on so many ports.
    fn binding(ports: usize) -> Binding;
}

/// What is needed to carry out what a core wants.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) binding: Binding,
    pub(crate) ports: PortSet,
    orders: Vec<Order>,
    batch: Batch,
    inputs: Vec<Input>,
}

/// A core and its devices.
#[derive(Debug)]
pub(crate) struct Hub<S> {
    state: Mutex<S>,
    exec: Mutex<Exec>,
    /// There may be something to carry out.
    dirty: AtomicBool,
    /// A thread runs functions of the program, and carries out what they add when they are done.
    calling: AtomicBool,
    pub(crate) ports: Vec<Arc<Port>>,
    pub(crate) stats: Arc<Stats>,
}

impl<S: Side> Hub<S> {
    pub(crate) fn new(side: S, ports: Vec<Arc<Port>>, stats: Arc<Stats>) -> Self {
        let exec = Exec {
            binding: S::binding(ports.len()),
            ports: PortSet::new(&ports),
            orders: Vec::new(),
            batch: Batch::default(),
            inputs: Vec::new(),
        };
        Self {
            state: Mutex::new(side),
            exec: Mutex::new(exec),
            dirty: AtomicBool::new(false),
            calling: AtomicBool::new(false),
            ports,
            stats,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, S> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out what the core wants, unless another thread is at it: that one goes on. Tells
    /// whether the core was told of anything, so that it may have something to tell.
    pub(crate) fn drain(&self) -> bool {
        let mut told = false;
        // Paired with the swap of the thread at it: whoever fails to get the lock has marked
        // before, and the one that has it looks again after giving it up.
        self.dirty.store(true, SeqCst);
        while self.dirty.load(SeqCst) {
            let mut exec = match self.exec.try_lock() {
                Ok(exec) => exec,
                Err(TryLockError::Poisoned(exec)) => exec.into_inner(),
                Err(TryLockError::WouldBlock) => break,
            };
            told |= self.turns(&mut exec);
        }
        told
    }

    /// The same, and comes back when everything is carried out that this thread has added.
    pub(crate) fn drain_all(&self) {
        self.dirty.store(true, SeqCst);
        self.with_exec(|_| ());
    }

    /// Does something with the devices, and carries out what the core wants.
    pub(crate) fn with_exec<T>(&self, work: impl FnOnce(&mut Exec) -> T) -> T {
        let mut exec = self.exec.lock().unwrap_or_else(PoisonError::into_inner);
        let done = work(&mut exec);
        self.turns(&mut exec);
        drop(exec);
        if self.dirty.load(SeqCst) {
            self.drain();
        }
        done
    }

    /// The core has something to carry out. Nothing is done when a thread runs functions of the
    /// program: it does it soon, together with what they add. Tells what [`drain`](Self::drain)
    /// does.
    pub(crate) fn ring(&self) -> bool {
        self.dirty.store(true, SeqCst);
        !self.calling.load(SeqCst) && self.drain()
    }

    /// Runs functions of the program, then carries out what they have added. Tells what
    /// [`drain`](Self::drain) does.
    pub(crate) fn call(&self, functions: impl FnOnce()) -> bool {
        self.calling.store(true, SeqCst);
        functions();
        self.calling.store(false, SeqCst);
        self.drain()
    }

    fn turns(&self, exec: &mut Exec) -> bool {
        let mut told = false;
        while self.dirty.swap(false, SeqCst) {
            while self.turn(exec, &mut told) {}
        }
        told
    }

    /// Carries out what there is; tells whether there was anything.
    fn turn(&self, exec: &mut Exec, told: &mut bool) -> bool {
        let mut state = self.lock();
        let core = state.core();
        while let Some(order) = core.poll_order() {
            exec.orders.push(order);
        }
        core.take_batch(&mut exec.batch);
        drop(state);
        if exec.orders.is_empty() && exec.batch.is_empty() {
            return false;
        }
        for order in exec.orders.drain(..) {
            exec.binding.run_order(&mut exec.ports, order, &mut exec.inputs);
        }
        if !exec.batch.is_empty() {
            self.stats.batches.inc();
            self.stats.sends.add(exec.batch.wrs.len() as u64);
            self.stats.receives.add(exec.batch.recvs.len() as u64);
            exec.binding.run_batch(&mut exec.ports, &mut exec.batch, &mut exec.inputs);
        }
        if !exec.inputs.is_empty() {
            *told = true;
            let now = clock::now();
            let mut state = self.lock();
            for input in exec.inputs.drain(..) {
                state.core().handle(now, input);
            }
        }
        true
    }

    /// Gives the core an event of the connection manager; tells whether it was for it.
    pub(crate) fn cm(&self, port: PortId, event: &CmEvent) -> bool {
        self.with_exec(|exec| {
            if !exec.binding.is_for(port, event) {
                return false;
            }
            if let Some(input) = exec.binding.cm(port, event.clone()) {
                self.lock().core().handle(clock::now(), input);
                self.dirty.store(true, SeqCst);
            }
            true
        })
    }

    /// The device says that a queue pair has failed.
    pub(crate) fn qp_failed(&self, port: PortId, qpn: Qpn) {
        self.with_exec(|exec| {
            if let Some(input) = exec.binding.qp_failed(port, qpn) {
                self.lock().core().handle(clock::now(), input);
                self.dirty.store(true, SeqCst);
            }
        });
    }

    /// A device is gone, and all connections with it.
    pub(crate) fn device_gone(&self, port: PortId) {
        self.with_exec(|exec| {
            exec.binding.device_gone(&mut exec.ports, port, &mut exec.inputs);
            let now = clock::now();
            let mut state = self.lock();
            for input in exec.inputs.drain(..) {
                state.core().handle(now, input);
            }
            self.dirty.store(true, SeqCst);
        });
    }

    /// Looks at the clock; returns when to look again.
    pub(crate) fn tick(&self, now: Instant) -> Option<Instant> {
        let mut state = self.lock();
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if !due(state.core().poll_timeout()) {
            return state.core().poll_timeout();
        }
        state.core().handle_timeout(now);
        drop(state);
        self.drain();
        self.lock().core().poll_timeout()
    }

    pub(crate) fn forget_listener(&self, port: PortId, listener: CmId) {
        self.with_exec(|exec| exec.binding.forget_listener(port, listener));
    }
}
