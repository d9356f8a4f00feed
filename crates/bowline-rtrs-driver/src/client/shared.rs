//! A session as its threads share it, and who takes completions.
//!
//! ```text
//!   a thread that waits      takes completions itself, if no other thread does: no hand-over
//!     another does           sleeps until its own request has ended, or until it is its turn
//!   the background thread    does when no thread of the program has since its last look
//! ```
//! A thread sleeps on one device at a time, so with several it takes completions itself only if it
//! never sleeps ([`Poll::Spin`]): of one after the other. Otherwise each device's background thread
//! does.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::task::{Poll as Polling, Waker};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant as Moment};

use bowline_base::clock;
use bowline_rtrs::client::{Permit, PermitKind};
use bowline_rtrs::{Instant, Policy, PortId};
use bowline_verbs::{CmEvent, Qpn, contain};

use super::permits::{Place, Sleeper};
use super::session::current_cpu;
use super::state::{Finished, Follower, LinkEv, News, PathEv, State};
use crate::Error;
use crate::drive::{BATCH, Drive, share};
use crate::engine::{Inner, Poll, Station, TICK};
use crate::hub::Hub;
use crate::port::port_id;

/// The background thread looks so often whether the program still takes completions itself.
const NAP: Duration = Duration::from_millis(2);
/// The same, when a thread of the program waits without a break.
const LONG_NAP: Duration = Duration::from_millis(256);
/// Nanoseconds between two looks at queues that the program polls, to see that it does.
const POLLED_LOOK: u64 = 200_000_000;
/// Such a look goes on so often while it finds something: a path that ends leaves all its receives
/// there.
const POLLED_TURNS: usize = 16;
/// A waiting thread looks so often at what no completion tells it.
const SLICE: Duration = Duration::from_millis(50);

/// What a thread that takes completions uses again.
#[derive(Default)]
pub(super) struct Turn {
    drive: Drive,
    finished: Finished,
    /// Requests that were in flight when completions were last taken.
    outstanding: usize,
    /// Paths that the next ones are dealt out to evenly; 0 or 1: they are not.
    spread: usize,
}

/// Who takes the completions of a device.
#[derive(Default)]
struct Lead {
    turn: Mutex<Turn>,
    /// Times a thread of the program has, or would have.
    program: AtomicU64,
    /// The background thread naps for long.
    napping: AtomicBool,
    /// It is to take completions now, though a thread of the program has just done so.
    asked: AtomicBool,
    /// The device is: there is nothing more to take.
    gone: AtomicBool,
    helper: OnceLock<Thread>,
}

impl Lead {
    /// A thread of the program takes completions, or would if no other did.
    fn count(&self) {
        // Only told apart from what it was before; nothing is published by it.
        self.program.fetch_add(1, Ordering::Relaxed);
    }

    fn try_turn(&self) -> Option<MutexGuard<'_, Turn>> {
        match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The completion queues of the poll connections of one number, on each device.
struct Polled {
    turns: Vec<Mutex<Turn>>,
    /// The program has polled since the engine's last look.
    polled: AtomicBool,
}

impl Polled {
    fn new(ports: usize) -> Self {
        let turns = std::iter::repeat_with(Mutex::default).take(ports).collect();
        Self { turns, polled: AtomicBool::new(false) }
    }
}

/// Functions of the program that are told what happens to a session.
#[derive(Default)]
pub(super) struct Listeners {
    /// The end and return of all paths.
    pub(super) on_link: Option<Box<dyn Fn(LinkEv) + Send + Sync>>,
    /// Each path.
    pub(super) on_path: Option<Box<dyn Fn(PathEv) + Send + Sync>>,
}

impl Listeners {
    fn tell(&self, news: &News) {
        match news {
            News::Link(event) => self.on_link.as_ref().map(|on_link| on_link(*event)),
            News::Path(event) => self.on_path.as_ref().map(|on_path| on_path(*event)),
        };
    }
}

/// A session.
pub(super) struct Shared {
    pub(super) hub: Hub<State>,
    pub(super) engine: Arc<Inner>,
    leads: Vec<Lead>,
    /// Devices that are gone, and nothing is in flight on them.
    lost: AtomicUsize,
    /// Queues of poll connections, and when to look at them next, in nanoseconds.
    polled: Vec<Polled>,
    polled_at: AtomicU64,
    /// Wakes those who wait for calls to end.
    changed: Condvar,
    listeners: Arc<Listeners>,
    /// Requests that have ended, and of which the program was told.
    ended: AtomicU64,
    /// Threads that wait for more of them.
    watchers: AtomicUsize,
    stop: AtomicBool,
    /// The program has no session any more.
    dropped: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        hub: Hub<State>,
        engine: Arc<Inner>,
        polled: u16,
        listeners: Arc<Listeners>,
    ) -> Self {
        let ports = hub.ports.len();
        Self {
            polled: (0..polled).map(|_| Polled::new(ports)).collect(),
            polled_at: AtomicU64::new(0),
            leads: hub.ports.iter().map(|_| Lead::default()).collect(),
            lost: AtomicUsize::new(0),
            hub,
            engine,
            changed: Condvar::new(),
            listeners,
            ended: AtomicU64::new(0),
            watchers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            dropped: AtomicBool::new(false),
        }
    }

    /// Starts the background threads.
    pub(super) fn start(self: &Arc<Self>) -> Result<(), Error> {
        for port in (0..self.leads.len()).filter(|port| !self.is_gone(*port)) {
            let shared = Arc::clone(self);
            let thread = self.engine.spawn("bowline-rtrs", move || shared.help(port))?;
            // Set once, here.
            let _ = self.leads[port].helper.set(thread);
        }
        Ok(())
    }

    /// Tells whether a device is gone.
    pub(super) fn is_gone(&self, port: usize) -> bool {
        self.leads.get(port).is_none_or(|lead| lead.gone.load(Ordering::SeqCst))
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Hands on what the core has to tell.
    pub(super) fn settle(&self) {
        self.settle_with(&mut Finished::default());
    }

    /// Gives the core an order, after what it had to tell before: that answers earlier orders.
    pub(super) fn order<T>(&self, order: impl FnOnce(&mut State) -> T) -> T {
        let mut finished = Finished::default();
        let mut state = self.hub.lock();
        let control = state.collect(&mut finished);
        let ordered = order(&mut state);
        drop(state);
        self.wake(control);
        self.hub.drain();
        self.settle_with(&mut finished);
        ordered
    }

    fn settle_with(&self, finished: &mut Finished) {
        loop {
            let mut state = self.hub.lock();
            let control = state.collect(finished);
            drop(state);
            self.wake(control);
            if finished.is_empty() {
                break;
            }
            self.tell(finished);
        }
        self.tell_news();
        self.end_if_closed();
    }

    /// Runs functions of the program, and wakes its threads and tasks.
    fn tell(&self, finished: &mut Finished) {
        for sleeper in finished.wake.drain(..) {
            self.hub.stats.hand_overs.inc();
            sleeper.wake();
        }
        if finished.told.is_empty() {
            self.hub.drain();
        } else {
            self.hub.call(|| finished.tell());
        }
        self.count_ended(finished);
    }

    /// The program has been told of what has ended: threads that wait for anything look again.
    fn count_ended(&self, finished: &mut Finished) {
        let count = std::mem::take(&mut finished.ended);
        if count == 0 {
            return;
        }
        // Paired with those of `wait_ended`: either it sees the count, or this the watcher.
        self.ended.fetch_add(count, Ordering::SeqCst);
        if self.watchers.load(Ordering::SeqCst) > 0 {
            let me = std::thread::current().id();
            let state = self.hub.lock();
            let any = state.followers.iter().filter(|follower| follower.any);
            for follower in any.filter(|follower| follower.thread.id() != me) {
                self.hub.stats.hand_overs.inc();
                follower.thread.unpark();
            }
        }
    }

    /// Requests that have ended so far, and of which the program was told.
    pub(super) fn ended(&self) -> u64 {
        self.ended.load(Ordering::SeqCst)
    }

    /// Takes completions until more than `seen` requests have ended, no longer than `limit`.
    pub(super) fn wait_ended(&self, seen: u64, limit: Option<Duration>) -> bool {
        self.watchers.fetch_add(1, Ordering::SeqCst);
        let more = |_: &mut State| (self.ended() != seen).then_some(());
        let more = self.drive_until(limit, true, more).is_some();
        self.watchers.fetch_sub(1, Ordering::SeqCst);
        more
    }

    fn wake(&self, control: bool) {
        if control {
            self.changed.notify_all();
        }
    }

    /// Tells what happened to the session and its paths, in order, by one thread at a time [RS-17].
    fn tell_news(&self) {
        let mut state = self.hub.lock();
        if state.telling || state.news.is_empty() {
            return;
        }
        state.telling = true;
        while let Some(news) = state.news.pop_front() {
            drop(state);
            contain(|| self.listeners.tell(&news));
            state = self.hub.lock();
        }
        state.telling = false;
    }

    /// A session that nobody has any more ends when its paths are gone.
    fn end_if_closed(&self) {
        if self.dropped.load(Ordering::Relaxed) && !self.is_stopped() {
            let state = self.hub.lock();
            let over = state.closed || state.core.is_gone();
            drop(state);
            if over {
                self.stop();
                self.engine.remove(self);
            }
        }
    }

    /// Nobody has the session any more.
    pub(super) fn abandon(&self) {
        self.dropped.store(true, Ordering::Relaxed);
        self.hub.lock().core.close(clock::now());
        self.hub.drain();
        self.settle();
        if self.is_stopped() {
            // Its last device had gone before.
            self.engine.remove(self);
        }
    }

    /// Takes completions, and does what they lead to; returns how many there were.
    fn drive(&self, port: usize, queue: u16, turn: &mut Turn) -> usize {
        // A poll connection is looked at when its program chooses to.
        let max = if queue == 0 { share(turn.outstanding, turn.spread) } else { BATCH };
        if self.leads[port].gone.load(Ordering::Relaxed) {
            return 0;
        }
        let count = match turn.drive.poll(&self.hub.ports[port], queue, max, &self.hub.stats) {
            Ok(0) => return 0,
            Ok(count) => count,
            Err(_) => {
                self.device_gone(port_id(port));
                return 0;
            }
        };
        let now = clock::now();
        let mut state = self.hub.lock();
        let inflight = || state.core.paths().map(|path| path.inflight as usize).filter(|n| *n > 0);
        turn.outstanding = inflight().sum();
        turn.spread =
            if state.core.policy() == Policy::RoundRobin { inflight().count() } else { 1 };
        state.core.set_cpu(current_cpu());
        state.core.handle_done(now, &turn.drive.dones);
        let control = state.collect(&mut turn.finished);
        let quiet = state.news.is_empty();
        drop(state);
        self.wake(control);
        let told = if turn.finished.told.is_empty() {
            self.hub.drain()
        } else {
            let finished = &mut turn.finished;
            self.hub.call(|| finished.tell())
        };
        self.count_ended(&mut turn.finished);
        for sleeper in turn.finished.wake.drain(..) {
            // Whoever drives knows by itself.
            if !sleeper.is_me() {
                self.hub.stats.hand_overs.inc();
                sleeper.wake();
            }
        }
        if told || control || !quiet {
            self.settle_with(&mut turn.finished);
        }
        count
    }

    /// Takes completions that are there; returns how many.
    pub(super) fn poll(&self) -> usize {
        let mut count = 0;
        for (port, lead) in self.leads.iter().enumerate() {
            lead.count();
            if let Some(mut turn) = lead.try_turn() {
                count += self.drive(port, 0, &mut turn);
            }
        }
        count
    }

    /// Takes completions of poll connections that are there; `None` if there are none of this
    /// number.
    pub(super) fn poll_queue(&self, index: u16) -> Option<usize> {
        let polled = self.polled.get(usize::from(index))?;
        polled.polled.store(true, Ordering::Relaxed);
        Some(self.drive_polled(index, polled))
    }

    fn drive_polled(&self, index: u16, polled: &Polled) -> usize {
        let mut count = 0;
        for (port, turn) in polled.turns.iter().enumerate() {
            let mut turn = match turn.try_lock() {
                Ok(turn) => turn,
                Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
                // Another thread is at it.
                Err(TryLockError::WouldBlock) => continue,
            };
            count += self.drive(port, index + 1, &mut turn);
        }
        count
    }

    /// Polls the poll connections until something is there, no longer than `limit`; `None` when it
    /// is not, or the session is over.
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
            let mut state = self.hub.lock();
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

    /// Takes the completions of poll connections that the program has not polled since the last
    /// time: paths are lost, and requests of theirs move, without it.
    fn look_at_polled(&self) {
        for (index, polled) in (0..).zip(&self.polled) {
            if !polled.polled.swap(false, Ordering::Relaxed) {
                for _ in 0..POLLED_TURNS {
                    if self.drive_polled(index, polled) == 0 {
                        break;
                    }
                }
            }
        }
    }

    /// Takes completions until something is there, no longer than `limit`; `None` when it is not,
    /// or the session is over. `any`: it may be there after any completion, else after that of a
    /// request this thread waits for.
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
            let mut state = self.hub.lock();
            if waited {
                state.followers.retain(|follower| follower.thread.id() != me);
                waited = false;
            }
            if let Some(done) = ready(&mut state) {
                break Some(done);
            }
            let left =
                deadline.map_or(SLICE, |(start, limit)| limit.saturating_sub(start.elapsed()));
            if left.is_zero() || state.closed || self.is_stopped() {
                break None;
            }
            let leads = if spins || self.leads.len() == 1 { &self.leads[..] } else { &[] };
            // If a background thread is at it, it stands back the next time.
            leads.iter().for_each(Lead::count);
            // Tried under the lock of the state: who has it looks for followers after giving it up.
            let turns = (0..leads.len()).map(|at| (next + at) % leads.len());
            let turn = turns.into_iter().find_map(|port| Some((port, leads[port].try_turn()?)));
            let Some((port, mut turn)) = turn else {
                state.followers.push(Follower { thread: std::thread::current(), any });
                waited = true;
                drop(state);
                std::thread::park_timeout(left.min(SLICE));
                continue;
            };
            drop(state);
            next = port + 1;
            if self.drive(port, 0, &mut turn) == 0 && !spins {
                self.hub.stats.waits.inc();
                if self.hub.ports[port].wait(left.min(SLICE)).is_err() {
                    self.device_gone(port_id(port));
                }
            }
        };
        self.pass_on(any);
        outcome
    }

    /// If nobody takes completions of a device, another thread that waits does from now on. If none
    /// waits, but functions of the program are to be told of requests, the background thread does;
    /// where it is these that this thread waits for, it comes back `soon`, and the background
    /// thread sees to it later if it does not. Tells whether nobody did.
    fn pass_on(&self, soon: bool) -> bool {
        if self.leads.iter().all(|lead| lead.try_turn().is_none()) {
            return false;
        }
        let mut state = self.hub.lock();
        let next = state.followers.pop();
        let asks = !soon && state.slots.has_told();
        drop(state);
        if let Some(next) = next {
            self.hub.stats.hand_overs.inc();
            next.thread.unpark();
            return true;
        }
        for lead in &self.leads {
            if lead.napping.swap(false, Ordering::SeqCst) || asks {
                // Somebody else may have asked.
                lead.asked.fetch_or(asks, Ordering::SeqCst);
                self.wake_helper(lead);
            }
        }
        true
    }

    fn wake_helper(&self, lead: &Lead) {
        if let Some(helper) = lead.helper.get() {
            self.hub.stats.hand_overs.inc();
            helper.unpark();
        }
    }

    /// The background thread of a device.
    fn help(&self, port: usize) {
        let lead = &self.leads[port];
        let mut seen = 0;
        let mut nap = NAP;
        let mut led = false;
        while !self.is_stopped() && !lead.gone.load(Ordering::Relaxed) {
            let program = lead.program.load(Ordering::Relaxed);
            let asked = lead.asked.swap(false, Ordering::SeqCst);
            let active = program != seen && !asked;
            seen = program;
            let turn = if active { None } else { lead.try_turn() };
            let Some(mut turn) = turn else {
                // Whoever leaves when nothing else is there to take completions calls.
                nap = if active { NAP } else { (nap * 2).min(LONG_NAP) };
                lead.napping.store(nap > NAP, Ordering::SeqCst);
                led = led && !self.pass_on(true);
                self.hub.stats.naps.inc();
                std::thread::park_timeout(nap);
                continue;
            };
            nap = NAP;
            led = true;
            lead.napping.store(false, Ordering::SeqCst);
            if self.drive(port, 0, &mut turn) == 0 {
                self.hub.stats.waits.inc();
                if self.hub.ports[port].wait(TICK).is_err() {
                    drop(turn);
                    self.device_gone(port_id(port));
                    return;
                }
            }
        }
    }

    /// Waits for a permit. Who waits for one of [`PermitKind::Polled`] polls: the requests that
    /// have the permits end when somebody does.
    pub(super) fn wait_permit(
        &self,
        kind: PermitKind,
        limit: Option<Duration>,
        cpu: u16,
    ) -> Option<Permit> {
        let place = {
            let mut state = self.hub.lock();
            if let Some(outcome) = state.take_permit(kind, cpu) {
                return outcome.ok();
            }
            state.permits.join(kind, cpu, Sleeper::Thread(std::thread::current()))
        };
        let look = |state: &mut State| state.outcome(place);
        let outcome = if kind == PermitKind::Polled && !self.polled.is_empty() {
            self.poll_until(limit, look)
        } else {
            self.sleep_until(limit, look)
        };
        match outcome {
            Some(outcome) => outcome.ok(),
            None => self.leave(place),
        }
    }

    /// Sleeps until something is there of which this thread is told, no longer than `limit`.
    fn sleep_until<T>(
        &self,
        limit: Option<Duration>,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let start = Moment::now();
        loop {
            let left = limit.map_or(SLICE, |limit| limit.saturating_sub(start.elapsed()));
            if left.is_zero() {
                return None;
            }
            self.wake_helpers();
            std::thread::park_timeout(left.min(SLICE));
            if let Some(there) = look(&mut self.hub.lock()) {
                return Some(there);
            }
        }
    }

    /// Permits come back with completions: somebody has to take them.
    fn wake_helpers(&self) {
        for lead in &self.leads {
            lead.asked.store(true, Ordering::SeqCst);
            self.wake_helper(lead);
        }
    }

    /// Takes a permit, or sees to it that the task is woken when it has one. `place` is its own.
    pub(super) fn poll_permit(
        &self,
        kind: PermitKind,
        cpu: u16,
        place: &mut Option<Place>,
        task: &Waker,
    ) -> Polling<Result<Permit, Error>> {
        let mut sleeper = None;
        loop {
            let mut state = self.hub.lock();
            let outcome = match *place {
                Some(place) => state.outcome(place),
                None => state.take_permit(kind, cpu),
            };
            if let Some(outcome) = outcome {
                *place = None;
                return Polling::Ready(outcome);
            }
            let Some(sleeper) = sleeper.take() else {
                drop(state);
                // Not while the session is locked: it is the program's. The same of the former one.
                sleeper = Some(Sleeper::Task(task.clone()));
                continue;
            };
            let former = match *place {
                Some(place) => state.permits.replace(place, sleeper),
                None => {
                    *place = Some(state.permits.join(kind, cpu, sleeper));
                    None
                }
            };
            drop(state);
            drop(former);
            self.wake_helpers();
            return Polling::Pending;
        }
    }

    /// Gives up a place; returns what it was given in the last moment.
    pub(super) fn leave(&self, place: Place) -> Option<Permit> {
        let mut state = self.hub.lock();
        let given = state.permits.take(place);
        let former = state.permits.leave(place);
        drop(state);
        drop(former);
        given
    }

    /// Gives a permit back, to whoever waits for one.
    pub(super) fn put_permit(&self, permit: Permit) {
        let mut finished = Finished::default();
        let mut state = self.hub.lock();
        state.core.put_permit(permit);
        // The last one may be what the end of the session waits for.
        if !state.permits.is_any_awaited() && state.core.is_open() {
            return;
        }
        // Before anybody else can take it.
        let control = state.collect(&mut finished);
        drop(state);
        self.wake(control);
        self.settle_with(&mut finished);
    }

    /// Waits until a call has ended, at most `limit`.
    pub(super) fn wait_control<T>(
        &self,
        limit: Option<Duration>,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let start = Moment::now();
        let mut state = self.hub.lock();
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

impl Station for Shared {
    fn cm(&self, port: PortId, event: &CmEvent) -> bool {
        let mine = self.hub.cm(port, event);
        if mine {
            self.settle();
        }
        mine
    }

    fn qp_failed(&self, port: PortId, qpn: Qpn) {
        self.hub.qp_failed(port, qpn);
        self.settle();
    }

    fn tick(&self, now: Instant) -> Option<Instant> {
        let next = self.hub.tick(now);
        self.settle();
        if self.polled.is_empty() {
            return next;
        }
        let now = now.as_nanos();
        let due = self.polled_at.load(Ordering::Relaxed);
        if now >= due {
            self.polled_at.store(now + POLLED_LOOK, Ordering::Relaxed);
            self.look_at_polled();
        }
        next
    }

    /// Requests of its paths move to those of other devices. The session ends with the last one.
    fn device_gone(&self, port: PortId) {
        let Some(lead) = self.leads.get(usize::from(port.0)) else { return };
        if lead.gone.swap(true, Ordering::SeqCst) {
            return;
        }
        self.hub.device_gone(port);
        self.settle();
        if self.lost.fetch_add(1, Ordering::SeqCst) + 1 == self.leads.len() {
            self.hub.lock().core.close(clock::now());
            self.hub.drain();
            self.settle();
            self.stop();
        }
    }

    fn end(&self, patience: Duration) {
        self.hub.lock().core.close(clock::now());
        self.hub.drain();
        self.settle();
        let limit = (patience < Duration::MAX).then_some(patience);
        // Whoever closes the engine does not wait for permits, which are good for nothing then.
        let over = |state: &State| state.closed || limit.is_some() && state.core.is_gone();
        self.wait_control(limit, |state| over(state).then_some(()));
        self.hub.lock().closed = true;
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        for lead in &self.leads {
            self.wake_helper(lead);
        }
        let mut finished = Finished::default();
        self.hub.lock().give_up(&mut finished);
        self.tell(&mut finished);
    }
}
