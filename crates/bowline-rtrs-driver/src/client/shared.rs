//! The state of a session that all its threads batch_limit, and the choice of the thread that takes
//! completions.
//!
//! ```text
//!   a thread that waits    takes completions itself if no other thread does: no hand-over needed
//!     if another does      sleeps until its own request has ended, or until it gets the role
//!   the background thread  takes them if no thread of the program has since its last check
//! ```
//! A thread can sleep on one device at a time. In an engine of several devices a thread that waits
//! therefore takes completions itself only if it never sleeps ([`Poll::Spin`]): it polls the
//! devices in poll_state. Otherwise each device's background thread takes them.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::task::{Poll as Polling, Waker};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant as Moment};

use bowline_base::clock;
use bowline_rtrs::client::{Permit, PermitKind};
use bowline_rtrs::{Instant, Policy, PortId};
use bowline_verbs::{CmEvent, Qpn, catch_callback_panic};

use super::permits::{WaiterId, WakeTarget};
use super::session::current_cpu;
use super::state::{Finished, Follower, LinkEv, PathEv, SessionEvent, State};
use crate::Error;
use crate::completions::{BATCH, CompletionBatch, batch_limit};
use crate::engine::{Inner, Member, Poll, TICK};
use crate::executor::Executor;
use crate::port::port_id;

/// How long the background thread sleeps before it checks again whether threads of the program
/// still take completions.
const NAP: Duration = Duration::from_millis(2);
/// The longest such sleep, reached when threads of the program take completions without a break.
const NAP_MAX: Duration = Duration::from_millis(256);
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

/// The role of the thread that takes a device's completions: whoever holds `poll_state` has it.
#[derive(Default)]
struct Leader {
    poll_state: Mutex<PollState>,
    /// How often a thread of the program took completions, or would have if no other thread did.
    program_polls: AtomicU64,
    /// The background thread is in a long nap and must be woken when the program stops polling.
    napping: AtomicBool,
    /// The background thread is to take completions now, even if a thread of the program has just
    /// done so.
    poll_requested: AtomicBool,
    /// The device is gone: no more completions come from it.
    gone: AtomicBool,
    helper: OnceLock<Thread>,
}

impl Leader {
    /// Notes that a thread of the program takes completions, or would if no other thread did.
    fn count(&self) {
        // The value is only compared with an earlier one; it publishes no other memory.
        self.program_polls.fetch_add(1, Ordering::Relaxed);
    }

    fn try_lead(&self) -> Option<MutexGuard<'_, PollState>> {
        match self.poll_state.try_lock() {
            Ok(poll_state) => Some(poll_state),
            Err(TryLockError::Poisoned(poll_state)) => Some(poll_state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
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
        match news {
            SessionEvent::Link(event) => self.on_link.as_ref().map(|on_link| on_link(*event)),
            SessionEvent::Path(event) => self.on_path.as_ref().map(|on_path| on_path(*event)),
        };
    }
}

/// A session, as all its threads batch_limit it.
pub(super) struct Shared {
    pub(super) executor: Executor<State>,
    pub(super) engine: Arc<Inner>,
    leaders: Vec<Leader>,
    /// Number of devices that are gone and on which no request is in flight.
    devices_gone: AtomicUsize,
    /// Completion queues of the poll connections, by connection index.
    polled: Vec<Polled>,
    polled_check_at: AtomicU64,
    /// Wakes threads that wait for the outcome of a control call.
    changed: Condvar,
    listeners: Arc<Listeners>,
    /// Requests that have ended and whose completers have returned.
    ended: AtomicU64,
    /// Threads in `wait_ended`.
    any_waiters: AtomicUsize,
    stop: AtomicBool,
    /// The program has dropped the session.
    dropped: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        executor: Executor<State>,
        engine: Arc<Inner>,
        polled: u16,
        listeners: Arc<Listeners>,
    ) -> Self {
        let ports = executor.ports.len();
        Self {
            polled: (0..polled).map(|_| Polled::new(ports)).collect(),
            polled_check_at: AtomicU64::new(0),
            leaders: executor.ports.iter().map(|_| Leader::default()).collect(),
            devices_gone: AtomicUsize::new(0),
            executor,
            engine,
            changed: Condvar::new(),
            listeners,
            ended: AtomicU64::new(0),
            any_waiters: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            dropped: AtomicBool::new(false),
        }
    }

    /// Starts the background threads.
    pub(super) fn start(self: &Arc<Self>) -> Result<(), Error> {
        for port in (0..self.leaders.len()).filter(|port| !self.is_gone(*port)) {
            let shared = Arc::clone(self);
            let thread = self.engine.spawn("bowline-rtrs", move || shared.help(port))?;
            // Set once, here.
            let _ = self.leaders[port].helper.set(thread);
        }
        Ok(())
    }

    /// Returns whether a device is gone.
    pub(super) fn is_gone(&self, port: usize) -> bool {
        self.leaders.get(port).is_none_or(|leader| leader.gone.load(Ordering::SeqCst))
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
        let count = std::mem::take(&mut finished.ended);
        if count == 0 {
            return;
        }
        // Paired with the accesses in `wait_ended`: either that thread sees the new count, or this
        // one sees the waiter.
        self.ended.fetch_add(count, Ordering::SeqCst);
        if self.any_waiters.load(Ordering::SeqCst) > 0 {
            let me = std::thread::current().id();
            let state = self.executor.lock();
            let any = state.followers.iter().filter(|follower| follower.any);
            for follower in any.filter(|follower| follower.thread.id() != me) {
                self.executor.stats.hand_overs.inc();
                follower.thread.unpark();
            }
        }
    }

    /// Number of requests that have ended and whose completers have returned.
    pub(super) fn ended(&self) -> u64 {
        self.ended.load(Ordering::SeqCst)
    }

    /// Takes completions until more than `seen` requests have ended, no longer than `limit`.
    pub(super) fn wait_ended(&self, seen: u64, limit: Option<Duration>) -> bool {
        self.any_waiters.fetch_add(1, Ordering::SeqCst);
        let more = |_: &mut State| (self.ended() != seen).then_some(());
        let more = self.drive_until(limit, true, more).is_some();
        self.any_waiters.fetch_sub(1, Ordering::SeqCst);
        more
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
    fn drive(&self, port: usize, queue: u16, poll_state: &mut PollState) -> usize {
        // The program chooses when to poll a poll connection: it takes all completions.
        let max =
            if queue == 0 { batch_limit(poll_state.outstanding, poll_state.spread) } else { BATCH };
        if self.leaders[port].gone.load(Ordering::Relaxed) {
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
                self.device_gone(port_id(port));
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
        let mut count = 0;
        for (port, leader) in self.leaders.iter().enumerate() {
            leader.count();
            if let Some(mut poll_state) = leader.try_lead() {
                count += self.drive(port, 0, &mut poll_state);
            }
        }
        count
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
            count += self.drive(port, index + 1, &mut poll_state);
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
            return self.drive_until(limit, false, ready);
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
    /// when the session is over. With `any_completion` every completion can make it ready, without
    /// only that of a request this thread waits for.
    pub(super) fn drive_until<T>(
        &self,
        limit: Option<Duration>,
        any: bool,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let deadline = limit.map(|limit| (Moment::now(), limit));
        let me = std::thread::current().id();
        let spins = self.engine.config.poll == Poll::Spin;
        let mut next = 0;
        let mut waited = false;
        let outcome = loop {
            let mut state = self.executor.lock();
            if waited {
                state.followers.retain(|follower| follower.thread.id() != me);
                waited = false;
            }
            if let Some(done) = ready(&mut state) {
                break Some(done);
            }
            let left =
                deadline.map_or(WAIT_SLICE, |(start, limit)| limit.saturating_sub(start.elapsed()));
            if left.is_zero() || state.closed || self.is_stopped() {
                break None;
            }
            let leaders = if spins || self.leaders.len() == 1 { &self.leaders[..] } else { &[] };
            // A background thread that holds the role yields it at its next check.
            leaders.iter().for_each(Leader::count);
            // Tried under the state's lock: the thread that has the role looks for followers after
            // it gave the role up.
            let poll_states = (0..leaders.len()).map(|at| (next + at) % leaders.len());
            let poll_state =
                poll_states.into_iter().find_map(|port| Some((port, leaders[port].try_lead()?)));
            let Some((port, mut poll_state)) = poll_state else {
                state.followers.push(Follower { thread: std::thread::current(), any });
                waited = true;
                drop(state);
                std::thread::park_timeout(left.min(WAIT_SLICE));
                continue;
            };
            drop(state);
            next = port + 1;
            if self.drive(port, 0, &mut poll_state) == 0 && !spins {
                self.executor.stats.waits.inc();
                if self.executor.ports[port].wait(left.min(WAIT_SLICE)).is_err() {
                    self.device_gone(port_id(port));
                }
            }
        };
        self.pass_on(any);
        outcome
    }

    /// Hands the role on when no thread takes a device's completions: to a follower, if one waits.
    /// Without a follower, the background thread takes over if completers are outstanding. `soon`
    /// says that the calling thread comes back soon to take completions for these: then the
    /// background thread takes over later, and only if the caller did not. Returns whether the role
    /// of a device was free.
    fn pass_on(&self, soon: bool) -> bool {
        if self.leaders.iter().all(|leader| leader.try_lead().is_none()) {
            return false;
        }
        let mut state = self.executor.lock();
        let next = state.followers.pop();
        let asks = !soon && state.slots.has_completers();
        drop(state);
        if let Some(next) = next {
            self.executor.stats.hand_overs.inc();
            next.thread.unpark();
            return true;
        }
        for leader in &self.leaders {
            if leader.napping.swap(false, Ordering::SeqCst) || asks {
                // Another thread may have set the flag; do not clear it.
                leader.poll_requested.fetch_or(asks, Ordering::SeqCst);
                self.wake_helper(leader);
            }
        }
        true
    }

    fn wake_helper(&self, leader: &Leader) {
        if let Some(helper) = leader.helper.get() {
            self.executor.stats.hand_overs.inc();
            helper.unpark();
        }
    }

    /// The background thread of a device.
    fn help(&self, port: usize) {
        let leader = &self.leaders[port];
        let mut seen = 0;
        let mut nap = NAP;
        let mut led = false;
        while !self.is_stopped() && !leader.gone.load(Ordering::Relaxed) {
            let program = leader.program_polls.load(Ordering::Relaxed);
            let poll_requested = leader.poll_requested.swap(false, Ordering::SeqCst);
            let active = program != seen && !poll_requested;
            seen = program;
            let poll_state = if active { None } else { leader.try_lead() };
            let Some(mut poll_state) = poll_state else {
                // The last thread of the program that stops taking completions wakes this one.
                nap = if active { NAP } else { (nap * 2).min(NAP_MAX) };
                leader.napping.store(nap > NAP, Ordering::SeqCst);
                led = led && !self.pass_on(true);
                self.executor.stats.naps.inc();
                std::thread::park_timeout(nap);
                continue;
            };
            nap = NAP;
            led = true;
            leader.napping.store(false, Ordering::SeqCst);
            if self.drive(port, 0, &mut poll_state) == 0 {
                self.executor.stats.waits.inc();
                if self.executor.ports[port].wait(TICK).is_err() {
                    drop(poll_state);
                    self.device_gone(port_id(port));
                    return;
                }
            }
        }
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
            self.wake_all_helpers();
            std::thread::park_timeout(left.min(WAIT_SLICE));
            if let Some(there) = look(&mut self.executor.lock()) {
                return Some(there);
            }
        }
    }

    /// Makes the background threads take completions: these bring permits back.
    fn wake_all_helpers(&self) {
        for leader in &self.leaders {
            leader.poll_requested.store(true, Ordering::SeqCst);
            self.wake_helper(leader);
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
            self.wake_all_helpers();
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

    /// Requests on the device's paths move to paths of other devices. The session ends with its
    /// last device.
    fn device_gone(&self, port: PortId) {
        let Some(leader) = self.leaders.get(usize::from(port.0)) else { return };
        if leader.gone.swap(true, Ordering::SeqCst) {
            return;
        }
        self.executor.device_gone(port);
        self.settle();
        if self.devices_gone.fetch_add(1, Ordering::SeqCst) + 1 == self.leaders.len() {
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
        for leader in &self.leaders {
            self.wake_helper(leader);
        }
        let mut finished = Finished::default();
        self.executor.lock().give_up(&mut finished);
        self.notify(&mut finished);
    }
}
