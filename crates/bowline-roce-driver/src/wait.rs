//! Waiting: the thread that waits for a completion reads the network itself.
//!
//! ```text
//!          nothing there yet
//!                 |
//!      nobody leads, or the            another thread leads,
//!      background thread does          or it is an event that is waited for
//!                 |                               |
//!      lead: poll while that pays,      sleep until woken by the thread
//!      sleep on the sockets             that handles the awaited packet
//! ```
//! Checking the core and recording that a thread is about to sleep happen under one lock, so that
//! no wake-up is lost. Threads that wait for events never become the leader: a program has a thread
//! that does nothing else, and that thread must not be woken by every packet.

use core::sync::atomic::Ordering;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use bowline_base::clock;
use bowline_roce::Instant;
use bowline_verbs::{CqId, Error};
use bowline_wait::Leader;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::receive::PumpResult;
use crate::share::Rings;
use crate::shared::{Shared, State};

/// Most descriptors a thread sleeps on without allocating.
const FEW_FDS: usize = 9;
/// Looks at the network of a thread that polls, for one at its other descriptor.
const LOOKS_PER_OTHER: u32 = 4;
/// A timer at least this far away may be left to the background thread, which may run it some
/// milliseconds late.
const HELPER_TIMER_MIN: Duration = Duration::from_millis(4);

/// What a thread waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitFor<'a> {
    /// A completion of this queue; or that this can be read, which only a thread that leads
    /// notices: the wait ends where another one does.
    Completion(CqId, Option<BorrowedFd<'a>>),
    Event,
}

/// What has ended a sleep.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Woken {
    /// A packet has arrived.
    pub(crate) arrived: bool,
    /// The other descriptor can be read.
    pub(crate) other: bool,
    /// The bell of the rings has rung: whoever leads silences it.
    pub(crate) rang: bool,
}

pub(crate) fn timespec(nanos: u64) -> Timespec {
    let time = Duration::from_nanos(nanos);
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// Tells whether something can be read, without waiting.
fn can_read(other: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(other, PollFlags::IN)];
    poll(&mut fds, Some(&timespec(0))).is_ok_and(|count| count > 0)
}

fn nanos_between(begun: Instant, now: Instant) -> u64 {
    now.as_nanos().saturating_sub(begun.as_nanos())
}

impl Shared {
    /// Waits until `attempt` returns a value, at most `limit`. `None`: the thread has another
    /// descriptor, and may not lead.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Closed`], those of `attempt`.
    pub(crate) fn wait<T>(
        &self,
        what: WaitFor<'_>,
        limit: Option<Duration>,
        mut attempt: impl FnMut(&mut State) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        let other = match what {
            WaitFor::Completion(_, other) => other,
            WaitFor::Event => None,
        };
        let mut other_is_ready = false;
        let mut looks = 0_u32;
        let mut leading = false;
        let mut followed = false;
        let mut flushed = false;
        let start = clock::now();
        let deadline = limit.map(|limit| start + limit);
        // When to stop polling and sleep; 0: at once.
        let mut poll_end = self.poll_budget.begin(start.as_nanos());
        let mut poll_begun = start;
        // A thread that sleeps at once notices arrivals when it tries to sleep.
        let sleeps = poll_end == 0 && limit.is_none_or(|limit| !limit.is_zero());
        let mut polled = matches!(what, WaitFor::Event) || sleeps;
        loop {
            let mut st = self.lock();
            let now = clock::now();
            let late = polled && (other_is_ready || deadline.is_some_and(|at| at <= now));
            let outcome = match attempt(&mut st) {
                _ if st.stop => Some(Err(Error::Closed)),
                Ok(Some(done)) => Some(Ok(Some(done))),
                Err(error) => Some(Err(error)),
                Ok(None) => late.then_some(Err(Error::TimedOut)),
            };
            self.settle(&mut st);
            if let Some(outcome) = outcome {
                // A follower may have been woken to become the leader just when it got its result.
                if leading || (followed && st.lead.leader() == Leader::Nobody) {
                    self.leave_lead(&mut st, now);
                }
                return outcome;
            }
            if !leading {
                let is_event = matches!(what, WaitFor::Event);
                if is_event || st.lead.take().is_none() {
                    if other.is_some() {
                        return Ok(None);
                    }
                    self.follow(st, what, now, deadline);
                    followed = !is_event;
                    // The leader polls for it.
                    polled = true;
                    continue;
                }
                leading = true;
            }
            st.lead.wake_up();
            // Only once: another thread that is sending continues with the rest.
            if !flushed && self.unsent.load(Ordering::Relaxed) {
                drop(st);
                self.flush(now);
                flushed = true;
                continue;
            }
            flushed = false;
            let timer = st.core.poll_timeout();
            if timer.is_some_and(|at| at <= now) {
                drop(st);
                self.run_timers();
                continue;
            }
            if !polled || now.as_nanos() < poll_end {
                drop(st);
                polled = true;
                looks = looks.wrapping_add(1);
                let turn = looks.is_multiple_of(LOOKS_PER_OTHER);
                other_is_ready = turn && other.is_some_and(can_read);
                match self.pump() {
                    PumpResult::Nothing | PumpResult::Rested => self.poll_budget.give_way(),
                    PumpResult::Busy => std::thread::yield_now(),
                    PumpResult::Received => {
                        let came = clock::now();
                        if poll_end > 0 {
                            self.poll_budget.note(true, nanos_between(poll_begun, came));
                        }
                        poll_begun = came;
                        poll_end = self.poll_budget.begin(came.as_nanos());
                    }
                }
                continue;
            }
            if std::mem::take(&mut poll_end) > 0 {
                self.poll_budget.note(false, nanos_between(poll_begun, now));
            }
            let until = [timer, deadline].into_iter().flatten().min();
            st.lead.fall_asleep(until.map_or(u64::MAX, Instant::as_nanos));
            // A sleep without a limit is cheaper, and the background thread runs the timer too.
            let helper_runs_timer = st.helper_polls_soon(now)
                && timer.is_some_and(|at| at >= now + HELPER_TIMER_MIN)
                && deadline.is_none_or(|at| at >= now + HELPER_TIMER_MIN);
            drop(st);
            let until = if helper_runs_timer { deadline } else { until };
            let limit = until.map(|at| at.saturating_since(now));
            let woken = self.sleep(&self.leader_kick, true, other, limit);
            self.lock().lead.wake_up();
            self.silence(woken);
            other_is_ready = woken.other;
            if woken.arrived {
                match self.pump() {
                    PumpResult::Nothing | PumpResult::Rested => {}
                    // The thread that handles the packets may wait for this processor.
                    PumpResult::Busy => std::thread::yield_now(),
                    PumpResult::Received => {
                        poll_begun = clock::now();
                        poll_end = self.poll_budget.begin(poll_begun.as_nanos());
                    }
                }
            }
        }
    }

    /// Sleeps until the thread that handles the awaited packet wakes this one.
    fn follow(
        &self,
        mut st: MutexGuard<'_, State>,
        what: WaitFor<'_>,
        now: Instant,
        deadline: Option<Instant>,
    ) {
        self.stats.sleeps.inc();
        let limit = deadline.map(|at| at.saturating_since(now));
        if let WaitFor::Completion(cq, _) = what {
            drop(self.followers.sleep(st, cq, limit));
            return;
        }
        st.listeners += 1;
        let mut st = match limit {
            None => self.events.wait(st).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                self.events.wait_timeout(st, limit).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        st.listeners -= 1;
    }

    /// Waits for a completion in a queue, and tells whether there is one; `None` as for
    /// [`wait`](Self::wait).
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::NoSuch`].
    pub(crate) fn wait_cq(
        &self,
        cq: CqId,
        other: Option<BorrowedFd<'_>>,
        solicited: bool,
        limit: Option<Duration>,
    ) -> Result<Option<bool>, Error> {
        let waited = self.wait(WaitFor::Completion(cq, other), limit, |st| {
            let armed = st.core.arm_cq(cq, solicited)?;
            Ok((!armed).then_some(()))
        });
        match waited {
            Ok(done) => Ok(done.map(|()| true)),
            Err(Error::TimedOut) => Ok(Some(false)),
            Err(error) => Err(error),
        }
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Closed`].
    pub(crate) fn wait_event<T>(
        &self,
        limit: Duration,
        take: impl Fn(&mut State) -> Option<T>,
    ) -> Result<T, Error> {
        let waited = self.wait(WaitFor::Event, Some(limit), |st| Ok(take(st)));
        waited?.ok_or(Error::TimedOut)
    }

    /// Silences a bell that has rung. Only the leader does: another thread that the bell has woken
    /// reads no rings, and the leader would sleep on.
    pub(crate) fn silence(&self, woken: Woken) {
        if let Some(rings) = self.among.rings.as_ref().filter(|_| woken.rang) {
            rings.silence();
        }
    }

    /// Sleeps until woken by `kick`, or until `other` can be read or, when `watching`, until a
    /// packet arrives, at most `limit`.
    pub(crate) fn sleep(
        &self,
        kick: &OwnedFd,
        watching: bool,
        other: Option<BorrowedFd<'_>>,
        limit: Option<Duration>,
    ) -> Woken {
        let watched = if watching { self.endpoints.as_slice() } else { &[] };
        let rings = self.among.rings.as_deref().filter(|_| watching);
        // Then it only looks.
        let is_some = rings.is_some_and(Rings::fall_asleep);
        let own = 1 + usize::from(other.is_some());
        let first_bell = own + watched.len();
        let count = first_bell + usize::from(rings.is_some());
        let fd = |at: usize| match (at.checked_sub(own).and_then(|at| watched.get(at)), other) {
            (Some(endpoint), _) => PollFd::new(endpoint, PollFlags::IN),
            (None, Some(other)) if at == 1 => PollFd::from_borrowed_fd(other, PollFlags::IN),
            (None, _) if at == first_bell && rings.is_some() => {
                PollFd::from_borrowed_fd(rings.map_or(kick.as_fd(), Rings::bell), PollFlags::IN)
            }
            (None, _) => PollFd::new(kick, PollFlags::IN),
        };
        // Sleeping is part of the data path: nothing is allocated for a usual number of addresses.
        let mut few: [PollFd<'_>; FEW_FDS];
        let mut many: Vec<PollFd<'_>>;
        let fds = if count <= FEW_FDS {
            few = core::array::from_fn(fd);
            &mut few[..count]
        } else {
            many = (0..count).map(fd).collect();
            many.as_mut_slice()
        };
        let limit = if is_some { Some(Duration::ZERO) } else { limit };
        let limit =
            limit.map(|limit| timespec(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)));
        self.stats.sleeps.inc();
        if poll(fds, limit.as_ref()).is_err() {
            return Woken { arrived: is_some, ..Woken::default() };
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (own, watched) = fds.split_at(own);
        if own.first().is_some_and(is_ready) {
            self.unsignal(kick);
        }
        Woken {
            arrived: is_some || watched.iter().any(is_ready),
            other: own.get(1).is_some_and(is_ready),
            rang: rings.is_some() && watched.last().is_some_and(is_ready),
        }
    }
}
