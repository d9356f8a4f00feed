//! The lead as a lock of its own, one for each device, as RTRS has it: taking completions needs no
//! other lock, so threads that submit are not held up.
//!
//! ```text
//!   a thread that waits    takes completions itself if no other thread does: no hand-over needed
//!     if another does      sleeps until its own request has ended, or until it gets the lead
//!   one that serves a      takes them in turns with that, if no other thread does, and sleeps on
//!   descriptor as well     both; if another does, it sleeps on its descriptor
//!   the background thread  takes them if no thread of the program has since its last check
//! ```
//! A thread that fails to get the lead becomes a follower under the same lock under which it tried.
//! The leader looks for followers under that lock after it gave the lead up. So either the thread
//! gets the lead, or the leader sees the follower.
//!
//! A thread can sleep on one device at a time. With several devices a thread that waits therefore
//! takes completions itself only if it never sleeps: it polls the devices in turn. Otherwise each
//! device's background thread takes them.

use core::ops::DerefMut;
use core::sync::atomic::Ordering;
use std::sync::{OnceLock, TryLockError};
use std::time::{Duration, Instant};

use crate::followers::Followers;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Thread, park_timeout};

/// How long the background thread sleeps before it checks again whether threads of the program
/// still take completions.
const NAP: Duration = Duration::from_millis(2);
/// The longest such sleep, reached when threads of the program take completions without a break.
const NAP_MAX: Duration = Duration::from_millis(256);
/// How long a waiting thread sleeps before it checks conditions that no completion announces.
const WAIT_SLICE: Duration = Duration::from_millis(50);
/// How long a thread that serves a descriptor as well waits for the background thread's lead.
const TURN_WAIT: Duration = Duration::from_millis(1);
/// The longest sleep of a background thread that leads.
const TICK: Duration = Duration::from_millis(250);

/// The device is gone: no more completions come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceGone;

/// What the threads that wait do with the devices, which are numbered from 0.
pub trait Devices {
    /// What the thread that takes a device's completions has for itself.
    type Buffers;
    /// What the lock guards under which requests end.
    type State;

    /// Takes that lock.
    fn lock(&self) -> impl DerefMut<Target = Self::State>;

    /// Threads that sleep while another one takes completions.
    fn followers(state: &mut Self::State) -> &mut Followers;

    /// Tells whether requests are in flight whose end no thread waits for, but a callback does.
    fn has_callbacks(state: &Self::State) -> bool;

    /// Tells whether every wait is to end.
    fn is_over(&self, state: &Self::State) -> bool;

    /// Tells whether a device has no use for a background thread any more.
    fn is_gone(&self, device: usize) -> bool;

    /// Takes one batch of completions of a device and handles them, and wakes the threads whose
    /// requests have ended; returns their number. No lock is held but the lead.
    fn drive(&self, device: usize, buffers: &mut Self::Buffers) -> usize;

    /// Sleeps until the device has completions, at most for `limit`.
    ///
    /// # Errors
    /// [`DeviceGone`].
    fn sleep(&self, device: usize, limit: Duration) -> Result<(), DeviceGone>;

    /// Called for a device that is gone, by each thread that finds out.
    fn device_gone(&self, device: usize);

    /// Counts a thread that is woken.
    fn count_hand_over(&self) {}

    /// Counts a nap of a background thread.
    fn count_nap(&self) {}
}

/// Whether a thread that waits may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// It sleeps when there is nothing to do.
    Sleeping,
    /// It polls without a break.
    Polling,
}

/// What ends a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// The end of one request; the thread that handles it wakes the waiting one.
    Own,
    /// The end of any request.
    Any,
}

/// The lead of one device: whoever holds `buffers` has it.
#[derive(Debug, Default)]
struct DeviceLead<B> {
    buffers: Mutex<B>,
    /// How often a thread of the program took completions, or would have if no other thread did.
    program_polls: AtomicU64,
    /// The background thread is in a long nap and must be woken when the program stops polling.
    napping: AtomicBool,
    /// The background thread is to take completions now, even if a thread of the program has just
    /// done so.
    poll_requested: AtomicBool,
    helper: OnceLock<Thread>,
    /// The background thread has the lead.
    helper_leads: AtomicBool,
    /// Threads that wait to get it from the background thread.
    wanted: AtomicUsize,
}

impl<B> DeviceLead<B> {
    /// Notes that a thread of the program takes completions, or would if no other thread did.
    fn count(&self) {
        // The value is only compared with an earlier one; it publishes no other memory.
        self.program_polls.fetch_add(1, Ordering::Relaxed);
    }

    fn try_lead(&self) -> Option<MutexGuard<'_, B>> {
        match self.buffers.try_lock() {
            Ok(buffers) => Some(buffers),
            Err(TryLockError::Poisoned(buffers)) => Some(buffers.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Gets the lead from the background thread, if that has it, once that has taken completions.
    fn take_from_helper<D: Devices<Buffers = B>>(
        &self,
        devices: &D,
        is_waiting: impl FnOnce() -> bool,
    ) -> Option<MutexGuard<'_, B>> {
        let mut state = devices.lock();
        let lead = self.try_lead();
        // Relaxed: a background thread that has just changed its mind is noticed at the next turn.
        if lead.is_some() || !self.helper_leads.load(Ordering::Relaxed) {
            return lead;
        }
        D::followers(&mut state).add_me(false);
        drop(state);
        // Before the caller looks at its requests: either it sees that the last has ended, or the
        // background thread, which ends one and then looks here, that its lead is wanted.
        self.wanted.fetch_add(1, Ordering::SeqCst);
        if is_waiting() {
            park_timeout(TURN_WAIT);
        }
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        let mut state = devices.lock();
        D::followers(&mut state).remove_me();
        // Under that lock, as before: otherwise the lead may have been passed on to this thread.
        self.try_lead()
    }
}

/// The leads of all devices of a session.
#[derive(Debug)]
pub struct DeviceLeads<B> {
    leads: Vec<DeviceLead<B>>,
    /// Requests that have ended and whose callbacks have returned.
    ended: AtomicU64,
    /// Threads in [`wait_ended`](Self::wait_ended).
    any_waiters: AtomicUsize,
}

impl<B: Default> DeviceLeads<B> {
    /// Leads of this many devices, which nobody has.
    pub fn new(devices: usize) -> Self {
        Self {
            leads: (0..devices).map(|_| DeviceLead::default()).collect(),
            ended: AtomicU64::new(0),
            any_waiters: AtomicUsize::new(0),
        }
    }
}

impl<B> DeviceLeads<B> {
    /// Number of devices.
    pub const fn len(&self) -> usize {
        self.leads.len()
    }

    /// Tells whether there are no devices.
    pub const fn is_empty(&self) -> bool {
        self.leads.is_empty()
    }

    /// Says which thread runs [`help`](Self::help) for a device; once for each.
    pub fn set_helper(&self, device: usize, thread: Thread) {
        let _ = self.leads[device].helper.set(thread);
    }

    /// Takes completions that are there, without waiting; returns their number.
    pub fn poll(&self, devices: &impl Devices<Buffers = B>) -> usize {
        let mut count = 0;
        for (device, lead) in self.leads.iter().enumerate() {
            lead.count();
            if let Some(mut buffers) = lead.try_lead() {
                count += devices.drive(device, &mut buffers);
            }
        }
        count
    }

    /// Takes completions until `ready` returns a value, at most for `limit`; `None` on timeout or
    /// when the wait is to end. Each thread that calls this is woken by [`Devices::drive`] when
    /// what it waits for has come.
    pub fn wait<D: Devices<Buffers = B>, T>(
        &self,
        devices: &D,
        waits: Waits,
        wait_for: WaitFor,
        limit: Option<Duration>,
        mut ready: impl FnMut(&mut D::State) -> Option<T>,
    ) -> Option<T> {
        let deadline = limit.map(|limit| (Instant::now(), limit));
        let any = wait_for == WaitFor::Any;
        let mut next = 0;
        let mut waited = false;
        let outcome = loop {
            let mut state = devices.lock();
            if waited {
                D::followers(&mut state).remove_me();
                waited = false;
            }
            if let Some(done) = ready(&mut state) {
                break Some(done);
            }
            let left =
                deadline.map_or(WAIT_SLICE, |(start, limit)| limit.saturating_sub(start.elapsed()));
            if left.is_zero() || devices.is_over(&state) {
                break None;
            }
            let may_lead = waits == Waits::Polling || self.leads.len() == 1;
            let leads = if may_lead { &self.leads[..] } else { &[] };
            // A background thread that has the lead yields it at its next check.
            leads.iter().for_each(DeviceLead::count);
            // Tried under the state's lock: the thread that has the lead looks for followers after
            // it gave the lead up.
            let in_turn = (0..leads.len()).map(|at| (next + at) % leads.len());
            let lead =
                in_turn.into_iter().find_map(|device| Some((device, leads[device].try_lead()?)));
            let Some((device, mut buffers)) = lead else {
                D::followers(&mut state).add_me(any);
                waited = true;
                drop(state);
                park_timeout(left.min(WAIT_SLICE));
                continue;
            };
            drop(state);
            next = device + 1;
            if devices.drive(device, &mut buffers) == 0
                && waits == Waits::Sleeping
                && devices.sleep(device, left.min(WAIT_SLICE)).is_err()
            {
                devices.device_gone(device);
            }
        };
        self.pass_on(devices, any);
        outcome
    }

    /// Takes one batch of completions of the only device. If nothing has completed yet, calls
    /// `sleep` first, which sleeps until the device has some, or for a reason of the caller's, who
    /// comes back soon, or [leaves](Self::leave); false: it cannot. Returns their number; `None` if
    /// another thread has the lead, or there are several devices: then the caller may sleep
    /// elsewhere.
    ///
    /// The background thread passes its lead on once it has taken completions; `is_waiting` tells
    /// whether any of the caller's are still to come.
    pub fn take_turn<D: Devices<Buffers = B>>(
        &self,
        devices: &D,
        is_waiting: impl FnOnce() -> bool,
        sleep: impl FnOnce() -> Result<bool, DeviceGone>,
    ) -> Option<usize> {
        let [lead] = &self.leads[..] else { return None };
        let mut buffers = lead.try_lead().or_else(|| lead.take_from_helper(devices, is_waiting))?;
        lead.count();
        let mut count = devices.drive(0, &mut buffers);
        if count == 0 {
            match sleep() {
                Ok(true) => count = devices.drive(0, &mut buffers),
                Ok(false) => {
                    drop(buffers);
                    self.leave(devices);
                    return None;
                }
                Err(DeviceGone) => {
                    drop(buffers);
                    devices.device_gone(0);
                    self.leave(devices);
                    return None;
                }
            }
        }
        drop(buffers);
        self.pass_on(devices, true);
        Some(count)
    }

    /// The calling thread takes no more [turns](Self::take_turn) for a while: others do.
    pub fn leave<D: Devices<Buffers = B>>(&self, devices: &D) {
        self.pass_on(devices, false);
    }

    /// Hands the lead on when no thread takes a device's completions: to a follower, if one waits.
    /// Without a follower, the background thread takes over if callbacks are outstanding. `soon`
    /// says that the calling thread comes back soon to take completions for these: then the
    /// background thread takes over later, and only if the caller did not. Returns whether the lead
    /// of a device was free.
    fn pass_on<D: Devices<Buffers = B>>(&self, devices: &D, soon: bool) -> bool {
        if self.leads.iter().all(|lead| lead.try_lead().is_none()) {
            return false;
        }
        let mut state = devices.lock();
        let next = D::followers(&mut state).pop();
        let asks = !soon && D::has_callbacks(&state);
        drop(state);
        if let Some(next) = next {
            devices.count_hand_over();
            next.thread.unpark();
            // With several devices it may only sleep: then a background thread that naps leads.
            if self.leads.len() == 1 {
                return true;
            }
        }
        for lead in &self.leads {
            // Pairs with the store in `help`, behind which that looks at followers and the lead:
            // either it finds something to do, or it is seen to nap.
            if lead.napping.swap(false, Ordering::SeqCst) || asks {
                // Another thread may have set the flag; do not clear it.
                lead.poll_requested.fetch_or(asks, Ordering::SeqCst);
                Self::wake_helper(devices, lead);
            }
        }
        true
    }

    fn wake_helper(devices: &impl Devices<Buffers = B>, lead: &DeviceLead<B>) {
        if let Some(helper) = lead.helper.get() {
            devices.count_hand_over();
            helper.unpark();
        }
    }

    /// Wakes the background threads, for instance to let them end.
    pub fn wake_helpers(&self, devices: &impl Devices<Buffers = B>) {
        for lead in &self.leads {
            Self::wake_helper(devices, lead);
        }
    }

    /// Makes the background threads take completions now.
    pub fn request_polls(&self, devices: &impl Devices<Buffers = B>) {
        for lead in &self.leads {
            // Pairs with the exchange in `help`; `unpark` follows, so that it does not wait.
            lead.poll_requested.store(true, Ordering::SeqCst);
            Self::wake_helper(devices, lead);
        }
    }

    /// The background thread of a device; returns when the device is gone.
    pub fn help<D: Devices<Buffers = B>>(&self, devices: &D, device: usize) {
        let lead = &self.leads[device];
        let mut seen = 0;
        let mut nap = NAP;
        let mut led = false;
        while !devices.is_gone(device) {
            // Relaxed, as in `count`. What follows pairs with `pass_on` and `request_polls`.
            let program = lead.program_polls.load(Ordering::Relaxed);
            let poll_requested = lead.poll_requested.swap(false, Ordering::SeqCst);
            let wanted = lead.wanted.load(Ordering::SeqCst) > 0;
            let active = wanted || program != seen && !poll_requested;
            seen = program;
            let buffers = if active { None } else { lead.try_lead() };
            let Some(mut buffers) = buffers else {
                lead.helper_leads.store(false, Ordering::Relaxed);
                // The last thread of the program that stops taking completions wakes this one.
                nap = if active { NAP } else { (nap * 2).min(NAP_MAX) };
                // Before `pass_on`, which looks at the leads; pairs with the exchange there.
                lead.napping.store(nap > NAP, Ordering::SeqCst);
                led = led && !self.pass_on(devices, true);
                // Another thread may have held the lead only to see whether it is free, and have
                // looked for naps before this one.
                if !active && lead.try_lead().is_some() {
                    continue;
                }
                devices.count_nap();
                park_timeout(nap);
                continue;
            };
            nap = NAP;
            led = true;
            // It does not nap: one that wakes it all the same costs a call.
            lead.napping.store(false, Ordering::SeqCst);
            lead.helper_leads.store(true, Ordering::Relaxed);
            if devices.drive(device, &mut buffers) == 0 && devices.sleep(device, TICK).is_err() {
                drop(buffers);
                devices.device_gone(device);
                return;
            }
        }
    }

    /// Number of requests that have ended and whose callbacks have returned.
    pub fn ended(&self) -> u64 {
        // Pairs with `add_ended`.
        self.ended.load(Ordering::SeqCst)
    }

    /// Counts requests whose callbacks have returned, and wakes [`wait_ended`](Self::wait_ended).
    pub fn add_ended<D: Devices<Buffers = B>>(&self, devices: &D, count: u64) {
        if count == 0 {
            return;
        }
        // Paired with the accesses in `wait_ended`: either that thread sees the new count, or this
        // one sees the waiter.
        self.ended.fetch_add(count, Ordering::SeqCst);
        if self.any_waiters.load(Ordering::SeqCst) > 0 {
            let mut state = devices.lock();
            for thread in D::followers(&mut state).waiting_for_any() {
                devices.count_hand_over();
                thread.unpark();
            }
        }
    }

    /// Takes completions until more than `seen` requests have ended, no longer than `limit`.
    pub fn wait_ended(
        &self,
        devices: &impl Devices<Buffers = B>,
        waits: Waits,
        seen: u64,
        limit: Option<Duration>,
    ) -> bool {
        // Before the looks at `ended`, in one order with `add_ended`.
        self.any_waiters.fetch_add(1, Ordering::SeqCst);
        let more = |_: &mut _| (self.ended() != seen).then_some(());
        let more = self.wait(devices, waits, WaitFor::Any, limit, more).is_some();
        // One that is still counted is woken once in vain.
        self.any_waiters.fetch_sub(1, Ordering::SeqCst);
        more
    }
}
