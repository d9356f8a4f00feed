//! The state that all threads of a session share, and what they do with its devices. Which thread
//! takes completions, and who is woken when: [`bowline_wait::DeviceLeads`].

use core::ops::DerefMut;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::task::{Poll as Polling, Waker};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant as Moment};

use bowline_base::clock;
use bowline_rtrs::client::{Permit, PermitKind};
use bowline_rtrs::{Instant, Policy, PortId};
use bowline_verbs::{CmEvent, Qpn, catch_callback_panic};
use bowline_wait::{DeviceGone, DeviceLeads, Devices, Followers, WaitFor, Waits};

use super::permits::{WaiterId, WakeTarget};
use super::session::current_cpu;
use super::state::{Finished, LinkEv, PathEv, SessionEvent, State};
use crate::Error;
use crate::completions::{BATCH, CompletionBatch, batch_limit};
use crate::engine::{Inner, Member, Poll, TICK};
use crate::executor::Executor;
use crate::port::port_id;

/// Nanoseconds between two checks whether the program polls the queues of its poll connections.
const POLLED_CHECK_NANOS: u64 = 200_000_000;
/// Most batches that one such check takes from a queue. A path that ends leaves all its receives
/// there.
const POLLED_BATCHES_MAX: usize = 16;
/// How long a waiting thread sleeps before it checks conditions that no completion announces.
const WAIT_SLICE: Duration = Duration::from_millis(50);

/// Buffers and statistics of a thread that takes completions, kept from one batch to the next.
#[derive(Default)]
pub(super) struct PollState {
    drive: CompletionBatch,
    finished: Finished,
    /// Requests that were in flight when the last batch was taken.
    outstanding: usize,
    /// Number of paths over which the next requests are spread evenly; 0 or 1: they are not spread.
    spread: usize,
}

/// The completion queues, one on each device, of the poll connections with the same index.
struct Polled {
    poll_states: Vec<Mutex<PollState>>,
    /// The program has polled these queues since the engine's last check.
    polled: AtomicBool,
}

impl Polled {
    fn new(ports: usize) -> Self {
        let poll_states = std::iter::repeat_with(Mutex::default).take(ports).collect();
        Self { poll_states, polled: AtomicBool::new(false) }
    }
}

/// Callbacks of the program for events of a session.
#[derive(Default)]
pub(super) struct Listeners {
    /// Called when the last path is lost and when the first is back.
    pub(super) on_link: Option<Box<dyn Fn(LinkEv) + Send + Sync>>,
    /// Called when the state of a path changes.
    pub(super) on_path: Option<Box<dyn Fn(PathEv) + Send + Sync>>,
}

impl Listeners {
    fn call(&self, news: &SessionEvent) {
        #[cfg(feature = "tracing")]
        match news {
            SessionEvent::Link(event) => crate::log::client_link(*event),
            SessionEvent::Path(event) => crate::log::client_path(event),
        }
        match news {
            SessionEvent::Link(event) => self.on_link.as_ref().map(|on_link| on_link(*event)),
            SessionEvent::Path(event) => self.on_path.as_ref().map(|on_path| on_path(*event)),
        };
    }
}

/// A session, as all its threads see it.
pub(super) struct Shared {
    pub(super) executor: Executor<State>,
    pub(super) engine: Arc<Inner>,
    leads: DeviceLeads<PollState>,
    /// Devices that are gone: no more completions come from them.
    gone: Vec<AtomicBool>,
    /// Number of devices that are gone and on which no request is in flight.
    devices_gone: AtomicUsize,
    /// Completion queues of the poll connections, by connection index.
    polled: Vec<Polled>,
    polled_check_at: AtomicU64,
    /// How late its timers may run.
    slack: Duration,
    /// Wakes threads that wait for the outcome of a control call.
    changed: Condvar,
    listeners: Arc<Listeners>,
    stop: AtomicBool,
    /// The program has dropped the session.
    dropped: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        executor: Executor<State>,
        engine: Arc<Inner>,
        polled: u16,
        slack: Duration,
        listeners: Arc<Listeners>,
    ) -> Self {
        let ports = executor.ports.len();
        Self {
            polled: (0..polled).map(|_| Polled::new(ports)).collect(),
            polled_check_at: AtomicU64::new(0),
            slack,
            leads: DeviceLeads::new(ports),
            gone: executor.ports.iter().map(|_| AtomicBool::new(false)).collect(),
            devices_gone: AtomicUsize::new(0),
            executor,
            engine,
            changed: Condvar::new(),
            listeners,
            stop: AtomicBool::new(false),
            dropped: AtomicBool::new(false),
        }
    }

    /// Starts the background threads.
    pub(super) fn start(self: &Arc<Self>) -> Result<(), Error> {
        for port in (0..self.leads.len()).filter(|port| !self.is_gone(*port)) {
            let shared = Arc::clone(self);
            let thread =
                self.engine.spawn("bowline-rtrs", move || shared.leads.help(&*shared, port))?;
            self.leads.set_helper(port, thread);
        }
        Ok(())
    }

    /// Returns whether a device is gone.
    pub(super) fn is_gone(&self, port: usize) -> bool {
        self.gone.get(port).is_none_or(|gone| gone.load(Ordering::SeqCst))
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Delivers all pending events and completions of the core.
    pub(super) fn settle(&self) {
        self.settle_with(&mut Finished::default());
    }

    /// Runs a control command on the core. Events pending before it are collected first, since they
    /// answer earlier commands.
    pub(super) fn order<T>(&self, order: impl FnOnce(&mut State) -> T) -> T {
        let mut finished = Finished::default();
        let mut state = self.executor.lock();
        let control = state.collect(&mut finished);
        let ordered = order(&mut state);
        drop(state);
        self.wake(control);
        self.executor.drain();
        self.settle_with(&mut finished);
        ordered
    }

    fn settle_with(&self, finished: &mut Finished) {
        loop {
            let mut state = self.executor.lock();
            let control = state.collect(finished);
            drop(state);
            self.wake(control);
            if finished.is_empty() {
                break;
            }
            self.notify(finished);
        }
        self.deliver_events();
        self.end_if_closed();
    }

    /// Runs completers of the program, and wakes its threads and tasks.
    fn notify(&self, finished: &mut Finished) {
        for target in finished.wake.drain(..) {
            self.executor.stats.hand_overs.inc();
            target.wake();
        }
        if finished.results.is_empty() {
            self.executor.drain();
        } else {
            self.executor.run_callbacks(|| finished.call_completers());
        }
        self.count_ended(finished);
    }

    /// Counts requests whose completers have returned, and wakes `wait_ended` callers.
    fn count_ended(&self, finished: &mut Finished) {
        self.leads.add_ended(self, std::mem::take(&mut finished.ended));
    }

    /// Number of requests that have ended and whose completers have returned.
    pub(super) fn ended(&self) -> u64 {
        self.leads.ended()
    }

    /// Takes completions until more than `seen` requests have ended, no longer than `limit`.
    pub(super) fn wait_ended(&self, seen: u64, limit: Option<Duration>) -> bool {
        self.leads.wait_ended(self, self.waits(), seen, limit)
    }

    /// Takes completions, or sleeps until there are some or `other` can be read; `None` if another
    /// thread does.
    pub(super) fn take_turn(
        &self,
        other: BorrowedFd<'_>,
        is_waiting: impl FnOnce() -> bool,
    ) -> Option<usize> {
        self.leads.take_turn(self, is_waiting, || {
            self.executor.stats.waits.inc();
            let waited = self.executor.ports[0].wait_or(other, TICK);
            waited.map(|waited| waited.is_some()).map_err(|_| DeviceGone)
        })
    }

    /// The calling thread takes no more turns for a while.
    pub(super) fn leave(&self) {
        self.leads.leave(self);
    }

    fn waits(&self) -> Waits {
        match self.engine.config.poll {
            Poll::Spin => Waits::Polling,
            Poll::Adaptive => Waits::Sleeping,
        }
    }

    fn wake(&self, control: bool) {
        if control {
            self.changed.notify_all();
        }
    }

    /// Calls the listeners for pending events of the session and its paths, in order, one thread at
    /// a time [RS-17].
    fn deliver_events(&self) {
        let mut state = self.executor.lock();
        if state.delivering || state.events.is_empty() {
            return;
        }
        state.delivering = true;
        while let Some(event) = state.events.pop_front() {
            drop(state);
            catch_callback_panic(|| self.listeners.call(&event));
            state = self.executor.lock();
        }
        state.delivering = false;
    }

    /// Ends a session that the program has dropped, once its paths are gone.
    fn end_if_closed(&self) {
        if self.dropped.load(Ordering::Relaxed) && !self.is_stopped() {
            let state = self.executor.lock();
            let over = state.closed || state.core.is_gone();
            drop(state);
            if over {
                self.stop();
                self.engine.remove(self);
            }
        }
    }

    /// Called when the program has dropped the session: starts closing it.
    pub(super) fn abandon(&self) {
        self.dropped.store(true, Ordering::Relaxed);
        self.executor.lock().core.close(clock::now());
        self.executor.drain();
        self.settle();
        if self.is_stopped() {
            // The last device was gone before, so no event of a path will do this.
            self.engine.remove(self);
        }
    }

    /// Takes one batch of completions of a device and handles them; returns their number.
    fn drive_queue(&self, port: usize, queue: u16, poll_state: &mut PollState) -> usize {
        // The program chooses when to poll a poll connection: it takes all completions.
        let max =
            if queue == 0 { batch_limit(poll_state.outstanding, poll_state.spread) } else { BATCH };
        if self.gone[port].load(Ordering::Relaxed) {
            return 0;
        }
        let count = match poll_state.drive.poll(
            &self.executor.ports[port],
            queue,
            max,
            &self.executor.stats,
        ) {
            Ok(0) => return 0,
            Ok(count) => count,
            Err(_) => {
                Devices::device_gone(self, port);
                return 0;
            }
        };
        let now = clock::now();
        let mut state = self.executor.lock();
        let inflight = || state.core.paths().map(|path| path.inflight as usize).filter(|n| *n > 0);
        poll_state.outstanding = inflight().sum();
        poll_state.spread =
            if state.core.policy() == Policy::RoundRobin { inflight().count() } else { 1 };
        state.core.set_cpu(current_cpu());
        state.core.handle_done(now, &poll_state.drive.dones);
        let control = state.collect(&mut poll_state.finished);
        let quiet = state.events.is_empty();
        drop(state);
        self.wake(control);
        let got_inputs = if poll_state.finished.results.is_empty() {
            self.executor.drain()
        } else {
            let finished = &mut poll_state.finished;
            self.executor.run_callbacks(|| finished.call_completers())
        };
        self.count_ended(&mut poll_state.finished);
        for target in poll_state.finished.wake.drain(..) {
            // The thread that polls sees the outcome itself.
            if !target.is_me() {
                self.executor.stats.hand_overs.inc();
                target.wake();
            }
        }
        if got_inputs || control || !quiet {
            self.settle_with(&mut poll_state.finished);
        }
        count
    }

    /// Takes completions that are there, without waiting; returns their number.
    pub(super) fn poll(&self) -> usize {
        self.leads.poll(self)
    }

    /// Takes completions that are there for the poll connections of this index; `None` if the
    /// session has no poll connection of this index.
    pub(super) fn poll_queue(&self, index: u16) -> Option<usize> {
        let polled = self.polled.get(usize::from(index))?;
        polled.polled.store(true, Ordering::Relaxed);
        Some(self.drive_polled(index, polled))
    }

    fn drive_polled(&self, index: u16, polled: &Polled) -> usize {
        let mut count = 0;
        for (port, poll_state) in polled.poll_states.iter().enumerate() {
            let mut poll_state = match poll_state.try_lock() {
                Ok(poll_state) => poll_state,
                Err(TryLockError::Poisoned(poll_state)) => poll_state.into_inner(),
                // Another thread polls this queue.
                Err(TryLockError::WouldBlock) => continue,
            };
            count += self.drive_queue(port, index + 1, &mut poll_state);
        }
        count
    }

    /// Polls the poll connections until `ready` returns a value, at most for `limit`; `None` on
    /// timeout or when the session is over.
    pub(super) fn poll_until<T>(
        &self,
        limit: Option<Duration>,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        if self.polled.is_empty() {
            return self.drive_until(limit, ready);
        }
        let deadline = limit.map(|limit| (Moment::now(), limit));
        loop {
            let mut count = 0;
            for index in 0..self.polled.len() as u16 {
                count += self.poll_queue(index).unwrap_or(0);
            }
            let mut state = self.executor.lock();
            if let Some(done) = ready(&mut state) {
                return Some(done);
            }
            let late = deadline.is_some_and(|(start, limit)| start.elapsed() >= limit);
            if late || state.closed || self.is_stopped() {
                return None;
            }
            drop(state);
            if count == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Takes completions of poll connections that the program has not polled since the last check:
    /// paths fail, and requests move to other paths, whether the program polls or not.
    fn drain_unpolled(&self) {
        for (index, polled) in (0..).zip(&self.polled) {
            if !polled.polled.swap(false, Ordering::Relaxed) {
                for _ in 0..POLLED_BATCHES_MAX {
                    if self.drive_polled(index, polled) == 0 {
                        break;
                    }
                }
            }
        }
    }

    /// Takes completions until `ready` returns a value, at most for `limit`; `None` on timeout or
    /// when the session is over.
    pub(super) fn drive_until<T>(
        &self,
        limit: Option<Duration>,
        ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        self.leads.wait(self, self.waits(), WaitFor::Own, limit, ready)
    }

    /// Waits for a permit. A thread that waits for one of [`PermitKind::Polled`] polls the poll
    /// connections, because requests that hold such permits end only when they are polled.
    pub(super) fn wait_permit(
        &self,
        kind: PermitKind,
        limit: Option<Duration>,
        cpu: u16,
    ) -> Option<Permit> {
        let waiter = {
            let mut state = self.executor.lock();
            if let Some(outcome) = state.take_permit(kind, cpu) {
                return outcome.ok();
            }
            state.permits.enqueue(kind, cpu, WakeTarget::Thread(std::thread::current()))
        };
        let look = |state: &mut State| state.outcome(waiter);
        let outcome = if kind == PermitKind::Polled && !self.polled.is_empty() {
            self.poll_until(limit, look)
        } else {
            self.sleep_until(limit, look)
        };
        match outcome {
            Some(outcome) => outcome.ok(),
            None => self.cancel_wait(waiter),
        }
    }

    /// Sleeps until `check` returns a value, at most for `limit`. Another thread wakes this one.
    fn sleep_until<T>(
        &self,
        limit: Option<Duration>,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let start = Moment::now();
        loop {
            let left = limit.map_or(WAIT_SLICE, |limit| limit.saturating_sub(start.elapsed()));
            if left.is_zero() {
                return None;
            }
            // Completions bring permits back.
            self.leads.request_polls(self);
            std::thread::park_timeout(left.min(WAIT_SLICE));
            if let Some(there) = look(&mut self.executor.lock()) {
                return Some(there);
            }
        }
    }

    /// Takes a permit, or queues the task to be woken when it has one. `waiter` is the task's
    /// position in the queue, if it has one.
    pub(super) fn poll_permit(
        &self,
        kind: PermitKind,
        cpu: u16,
        waiter: &mut Option<WaiterId>,
        task: &Waker,
    ) -> Polling<Result<Permit, Error>> {
        let mut target = None;
        loop {
            let mut state = self.executor.lock();
            let outcome = match *waiter {
                Some(waiter) => state.outcome(waiter),
                None => state.take_permit(kind, cpu),
            };
            if let Some(outcome) = outcome {
                *waiter = None;
                return Polling::Ready(outcome);
            }
            let Some(target) = target.take() else {
                drop(state);
                // Cloned and dropped without the session's lock: a waker is code of the program.
                target = Some(WakeTarget::Task(task.clone()));
                continue;
            };
            let former = match *waiter {
                Some(waiter) => state.permits.replace(waiter, target),
                None => {
                    *waiter = Some(state.permits.enqueue(kind, cpu, target));
                    None
                }
            };
            drop(state);
            drop(former);
            self.leads.request_polls(self);
            return Polling::Pending;
        }
    }

    /// Leaves the queue; returns the permit if one was assigned in the meantime.
    pub(super) fn cancel_wait(&self, waiter: WaiterId) -> Option<Permit> {
        let mut state = self.executor.lock();
        let given = state.permits.take(waiter);
        let former = state.permits.remove(waiter);
        drop(state);
        drop(former);
        given
    }

    /// Gives a permit back to the session, which assigns it to the first waiter.
    pub(super) fn put_permit(&self, permit: Permit) {
        let mut finished = Finished::default();
        let mut state = self.executor.lock();
        state.core.put_permit(permit);
        // A session that is closing may wait for this last permit.
        if !state.permits.has_any_waiters() && state.core.is_open() {
            return;
        }
        // Collected under the same lock, before another thread can take the permit.
        let control = state.collect(&mut finished);
        drop(state);
        self.wake(control);
        self.settle_with(&mut finished);
    }

    /// Waits until a control call has an outcome, at most for `limit`.
    pub(super) fn wait_control<T>(
        &self,
        limit: Option<Duration>,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let start = Moment::now();
        let mut state = self.executor.lock();
        loop {
            if let Some(done) = ready(&mut state) {
                return Some(done);
            }
            let left = limit.map_or(TICK, |limit| limit.saturating_sub(start.elapsed()));
            if left.is_zero() || self.is_stopped() {
                return None;
            }
            state = wait(&self.changed, state, left.min(TICK));
        }
    }
}

fn wait<'a>(
    condition: &Condvar,
    state: MutexGuard<'a, State>,
    limit: Duration,
) -> MutexGuard<'a, State> {
    condition.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
}

impl Devices for Shared {
    type Buffers = PollState;
    type State = State;

    fn lock(&self) -> impl DerefMut<Target = State> {
        self.executor.lock()
    }

    fn followers(state: &mut State) -> &mut Followers {
        &mut state.followers
    }

    fn has_callbacks(state: &State) -> bool {
        state.slots.has_completers()
    }

    fn is_over(&self, state: &State) -> bool {
        state.closed || self.is_stopped()
    }

    fn is_gone(&self, device: usize) -> bool {
        self.is_stopped() || self.gone[device].load(Ordering::Relaxed)
    }

    fn drive(&self, device: usize, poll_state: &mut PollState) -> usize {
        self.drive_queue(device, 0, poll_state)
    }

    fn sleep(&self, device: usize, limit: Duration) -> Result<(), DeviceGone> {
        self.executor.stats.waits.inc();
        self.executor.ports[device].wait(limit).map(drop).map_err(|_| DeviceGone)
    }

    fn device_gone(&self, device: usize) {
        Member::device_gone(self, port_id(device));
    }

    fn count_hand_over(&self) {
        self.executor.stats.hand_overs.inc();
    }

    fn count_nap(&self) {
        self.executor.stats.naps.inc();
    }
}

impl Member for Shared {
    fn cm(&self, port: PortId, event: &CmEvent) -> bool {
        let mine = self.executor.cm(port, event);
        if mine {
            self.settle();
        }
        mine
    }

    fn qp_failed(&self, port: PortId, qpn: Qpn) {
        self.executor.qp_failed(port, qpn);
        self.settle();
    }

    fn tick(&self, now: Instant) -> Option<Instant> {
        let next = self.executor.tick(now);
        self.settle();
        if self.polled.is_empty() {
            return next;
        }
        let now = now.as_nanos();
        let due = self.polled_check_at.load(Ordering::Relaxed);
        if now >= due {
            self.polled_check_at.store(now + POLLED_CHECK_NANOS, Ordering::Relaxed);
            self.drain_unpolled();
        }
        next
    }

    fn slack(&self) -> Duration {
        self.slack
    }

    /// Requests on the device's paths move to paths of other devices. The session ends with its
    /// last device.
    fn device_gone(&self, port: PortId) {
        let Some(gone) = self.gone.get(usize::from(port.0)) else { return };
        if gone.swap(true, Ordering::SeqCst) {
            return;
        }
        self.executor.device_gone(port);
        self.settle();
        if self.devices_gone.fetch_add(1, Ordering::SeqCst) + 1 == self.gone.len() {
            self.executor.lock().core.close(clock::now());
            self.executor.drain();
            self.settle();
            self.stop();
        }
    }

    fn end(&self, timeout: Duration) {
        self.executor.lock().core.close(clock::now());
        self.executor.drain();
        self.settle();
        let limit = (timeout < Duration::MAX).then_some(timeout);
        // Closing the engine does not wait for permits of the program: they are useless from then
        // on.
        let over = |state: &State| state.closed || limit.is_some() && state.core.is_gone();
        self.wait_control(limit, |state| over(state).then_some(()));
        self.executor.lock().closed = true;
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        self.leads.wake_helpers(self);
        let mut finished = Finished::default();
        self.executor.lock().give_up(&mut finished);
        self.notify(&mut finished);
    }
}
