//! Runs a core: owns its lock and the lock of its devices, and fixes the order in which they are
//! used.
//!
//! ```text
//!   any thread        state ── input or request ──> dirty
//!                       │
//!   the lock holder   devices ── carry out the core's orders and batch ── inputs ──> state
//! ```
//! Locks, in the order in which they are taken: `devices`, which data paths only try, then `state`.
//! While one thread carries out the core's orders, other threads leave the work they add to it:
//! under load the requests of many threads go out with one call. The state is never locked while a
//! callback of the program runs, nor while a device is called, with one exception: a server
//! invalidates the keys of requests under it, which changes a table and waits for nothing [RT-44].

use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use bowline_base::clock;
use bowline_rtrs::bind::Binding;
use bowline_rtrs::{Batch, Input, Instant, Order, PortId};
use bowline_verbs::{CmEvent, CmId, Qpn};

use crate::port::{Port, PortSet};
use crate::stats::Stats;

/// The interface that client and server core share.
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

/// A core, with the data the driver keeps beside it under the same lock.
pub(crate) trait CoreState: Send {
    type Core: Core;
    fn core(&mut self) -> &mut Self::Core;
    /// The binding that carries out the core's orders on this many ports.
    fn binding(ports: usize) -> Binding;
}

/// The devices of a core, and buffers to carry out its orders and batches.
#[derive(Debug)]
pub(crate) struct Devices {
    pub(crate) binding: Binding,
    pub(crate) ports: PortSet,
    orders: Vec<Order>,
    batch: Batch,
    inputs: Vec<Input>,
}

/// A core and its devices.
#[derive(Debug)]
pub(crate) struct Executor<S> {
    state: Mutex<S>,
    devices: Mutex<Devices>,
    /// The core may have orders or a batch to carry out.
    dirty: AtomicBool,
    /// A thread runs callbacks of the program, and will carry out the work they add when they
    /// return.
    calling: AtomicBool,
    pub(crate) ports: Vec<Arc<Port>>,
    pub(crate) stats: Arc<Stats>,
}

impl<S: CoreState> Executor<S> {
    pub(crate) fn new(state: S, ports: Vec<Arc<Port>>, stats: Arc<Stats>) -> Self {
        let devices = Devices {
            binding: S::binding(ports.len()),
            ports: PortSet::new(&ports),
            orders: Vec::new(),
            batch: Batch::default(),
            inputs: Vec::new(),
        };
        Self {
            state: Mutex::new(state),
            devices: Mutex::new(devices),
            dirty: AtomicBool::new(false),
            calling: AtomicBool::new(false),
            ports,
            stats,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, S> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out the core's orders and batches, unless another thread is doing so and will take
    /// these too. Returns whether the core got inputs, and so may have new events.
    pub(crate) fn drain(&self) -> bool {
        let mut got_inputs = false;
        // Paired with the swap of the thread that holds the lock: a thread that fails to get the
        // lock has set the flag before, and the holder checks the flag again after unlocking.
        self.dirty.store(true, SeqCst);
        while self.dirty.load(SeqCst) {
            let mut devices = match self.devices.try_lock() {
                Ok(devices) => devices,
                Err(TryLockError::Poisoned(devices)) => devices.into_inner(),
                Err(TryLockError::WouldBlock) => break,
            };
            got_inputs |= self.run_until_clean(&mut devices);
        }
        got_inputs
    }

    /// Like [`drain`](Self::drain), but returns only when all work that this thread has added is
    /// carried out.
    pub(crate) fn drain_all(&self) {
        self.dirty.store(true, SeqCst);
        self.with_devices(|_| ());
    }

    /// Runs `work` on the devices, then carries out the core's orders and batches.
    pub(crate) fn with_devices<T>(&self, work: impl FnOnce(&mut Devices) -> T) -> T {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let done = work(&mut devices);
        self.run_until_clean(&mut devices);
        drop(devices);
        if self.dirty.load(SeqCst) {
            self.drain();
        }
        done
    }

    /// Carries out new work of the core. Does nothing while a thread runs callbacks of the program:
    /// that thread carries it out soon, with the work the callbacks add. Returns what
    /// [`drain`](Self::drain) returns.
    pub(crate) fn drain_unless_calling(&self) -> bool {
        self.dirty.store(true, SeqCst);
        !self.calling.load(SeqCst) && self.drain()
    }

    /// Runs callbacks of the program, then carries out the work they have added. Returns what
    /// [`drain`](Self::drain) returns.
    pub(crate) fn run_callbacks(&self, functions: impl FnOnce()) -> bool {
        self.calling.store(true, SeqCst);
        functions();
        self.calling.store(false, SeqCst);
        self.drain()
    }

    fn run_until_clean(&self, devices: &mut Devices) -> bool {
        let mut got_inputs = false;
        while self.dirty.swap(false, SeqCst) {
            while self.run_once(devices, &mut got_inputs) {}
        }
        got_inputs
    }

    /// Carries out the pending orders and the batch once; returns whether there were any.
    fn run_once(&self, devices: &mut Devices, got_inputs: &mut bool) -> bool {
        let mut state = self.lock();
        let core = state.core();
        while let Some(order) = core.poll_order() {
            devices.orders.push(order);
        }
        core.take_batch(&mut devices.batch);
        drop(state);
        if devices.orders.is_empty() && devices.batch.is_empty() {
            return false;
        }
        for order in devices.orders.drain(..) {
            devices.binding.run_order(&mut devices.ports, order, &mut devices.inputs);
        }
        if !devices.batch.is_empty() {
            self.stats.batches.inc();
            self.stats.sends.add(devices.batch.wrs.len() as u64);
            self.stats.receives.add(devices.batch.recvs.len() as u64);
            devices.binding.run_batch(&mut devices.ports, &mut devices.batch, &mut devices.inputs);
        }
        if !devices.inputs.is_empty() {
            *got_inputs = true;
            let now = clock::now();
            let mut state = self.lock();
            for input in devices.inputs.drain(..) {
                state.core().handle(now, input);
            }
        }
        true
    }

    /// Gives the core an event of the connection manager; returns whether the event belongs to it.
    pub(crate) fn cm(&self, port: PortId, event: &CmEvent) -> bool {
        self.with_devices(|devices| {
            if !devices.binding.is_for(port, event) {
                return false;
            }
            if let Some(input) = devices.binding.cm(port, event.clone()) {
                self.lock().core().handle(clock::now(), input);
                self.dirty.store(true, SeqCst);
            }
            true
        })
    }

    /// Handles the failure of a queue pair, which the device has reported.
    pub(crate) fn qp_failed(&self, port: PortId, qpn: Qpn) {
        self.with_devices(|devices| {
            if let Some(input) = devices.binding.qp_failed(port, qpn) {
                self.lock().core().handle(clock::now(), input);
                self.dirty.store(true, SeqCst);
            }
        });
    }

    /// Handles that a device is gone, and with it all its connections.
    pub(crate) fn device_gone(&self, port: PortId) {
        self.with_devices(|devices| {
            devices.binding.device_gone(&mut devices.ports, port, &mut devices.inputs);
            let now = clock::now();
            let mut state = self.lock();
            for input in devices.inputs.drain(..) {
                state.core().handle(now, input);
            }
            self.dirty.store(true, SeqCst);
        });
    }

    /// Runs the core's timers that are due; returns when the next one is.
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
        self.with_devices(|devices| devices.binding.forget_listener(port, listener));
    }
}
