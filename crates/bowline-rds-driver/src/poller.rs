//! Waiting: the thread that waits for a message, or for room, reads the connections itself.
//!
//! ```text
//!            recv finds nothing
//!                   |
//!        lead free? (or the helper's)      another thread leads
//!                   |                               |
//!      take it: spin, sleep in epoll,        register, park;
//!      read, parse, until satisfied          woken by a message or by
//!                   |                        being handed the lead
//!      leave it: hand it to a parked
//!      thread, or leave it to the helper
//! ```
//! Every attempt at the core and the registration that follows it happen under one lock, so that no
//! wake-up is missed between them.

use std::sync::MutexGuard;
use std::time::Duration;

use bowline_base::clock;
use bowline_rds::{Instant, Interest, SocketId};
use bowline_wait::Leader;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags, poll};

use crate::error::Error;
use crate::flush::HELPER_AGE_NS;
use crate::helper::TICK_NS;
use crate::read::PARSE_BUDGET;
use crate::shared::{Shared, State};
use crate::sys;
use crate::todo::Scratch;
use crate::waiters::WaitMode;

/// Tokens of events. The token of a link has the link's index in the upper half; these do not.
pub(crate) const TOKEN_KICK: u64 = u64::MAX;
pub(crate) const TOKEN_LISTENER: u64 = 0xffff_ffff_0000_0000;
/// Waits shorter than this use a call that, unlike epoll, does not round up to milliseconds.
const FINE: Duration = Duration::from_millis(4);
/// Number of direct reads of links between two polls of all descriptors.
const TRIES: u32 = 16;
/// Number of rounds of direct reads between two polls of all descriptors.
const ROUNDS_MAX: u32 = 16;
/// After a read of this many bytes, another is tried before sleeping.
const STREAM_READ: usize = 32 << 10;
/// Shortest time in nanoseconds between two polls by refused senders.
const SINGLE_POLL_GAP_NS: u64 = 50_000;
/// Two calls in vain within this time, in nanoseconds, show that the program polls.
const POLLING_GAP_NS: u64 = 500_000;
/// A thread that held the lead for longer than this, in nanoseconds, informs the background thread
/// when it leaves the lead.
const LONG_HOLD_NS: u64 = 5_000_000;

/// Result of one attempt under the lock.
pub(crate) enum Attempt<T> {
    Done(T),
    /// Not possible yet; try again after a wake-up.
    Again,
}

/// The event for which a caller waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitRequest {
    pub(crate) id: SocketId,
    pub(crate) interest: Interest,
    /// Deadline in nanoseconds of the driver's clock.
    pub(crate) deadline: Option<u64>,
}

impl WaitRequest {
    fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|at| at <= now.as_nanos())
    }

    /// Returns the socket whose first message ends parsing: a reader needs only that message.
    fn until(&self) -> Option<SocketId> {
        (self.interest == Interest::READ).then_some(self.id)
    }
}

impl Shared {
    /// Makes one attempt, and if it fails, another after parsing received bytes.
    fn attempt<T>(
        &self,
        st: &mut State,
        until: Option<SocketId>,
        attempt: &mut impl FnMut(&mut State, Instant) -> Attempt<T>,
    ) -> Attempt<T> {
        let now = st.now;
        if let Attempt::Done(done) = attempt(st, now) {
            return Attempt::Done(done);
        }
        if !st.core.has_backlog() {
            return Attempt::Again;
        }
        let until = until.filter(|_| st.parked.is_empty());
        st.core.process(now, until, PARSE_BUDGET);
        attempt(st, now)
    }

    /// Waits until an attempt succeeds.
    #[cold]
    pub(crate) fn wait<T>(
        &self,
        request: WaitRequest,
        mut attempt: impl FnMut(&mut State, Instant) -> Attempt<T>,
    ) -> Result<T, Error> {
        self.with_scratch(|sc| {
            loop {
                let mut st = self.lock();
                let now = st.at(clock::now());
                if let Attempt::Done(done) = self.attempt(&mut st, request.until(), &mut attempt) {
                    self.pass_lead_on(&mut st, sc);
                    self.release_and_run(st, sc);
                    return Ok(done);
                }
                if st.stop || request.is_late(now) {
                    let error = if st.stop { Error::ShutDown } else { Error::TimedOut };
                    self.pass_lead_on(&mut st, sc);
                    self.release_and_run(st, sc);
                    return Err(error);
                }
                self.collect_dirty(&mut st, sc, 0);
                if request.interest.contains(Interest::WRITE) {
                    st.check_tcp_acks_soon();
                }
                if self.take_lead(&mut st, sc) {
                    sc.until = request.until();
                    let done = self.poll_until_done(st, sc, request, &mut attempt);
                    sc.until = None;
                    return done;
                }
                st.add_waiter(request.id, request.interest, &sc.me, WaitMode::Parked);
                if st.lead.leader() == Leader::Nobody {
                    sc.todo.wake_helper = true;
                }
                self.release_and_run(st, sc);
                let left = request.deadline.map(|at| at.saturating_sub(now.as_nanos()));
                sc.me.park(left.map(Duration::from_nanos));
                let mut st = self.lock();
                st.remove_waiter(request.id, request.interest, &sc.me);
            }
        })
    }

    /// Takes the lead if that is possible. The background thread gives it up unless a socket relies
    /// on it.
    fn take_lead(&self, st: &mut State, sc: &mut Scratch) -> bool {
        if st.watched > 0 {
            return false;
        }
        let Some(former) = st.lead.take() else { return false };
        if former == Leader::Helper {
            st.kicked = false;
            sc.todo.wake_helper = true;
        }
        st.lead_since = st.now;
        true
    }

    /// Gives the lead back.
    fn leave_lead(&self, st: &mut State, sc: &mut Scratch) {
        st.lead.leave();
        let held = st.now.saturating_since(st.lead_since).as_nanos();
        if st.parked.is_empty()
            && u64::try_from(held).unwrap_or(u64::MAX) > LONG_HOLD_NS
            && st.helper_tick_ns > 4 * TICK_NS
        {
            sc.todo.wake_helper = true;
        }
        self.pass_lead_on(st, sc);
    }

    /// If no thread polls but some wait, makes the one that waits longest the next poller.
    pub(crate) fn pass_lead_on(&self, st: &mut State, sc: &mut Scratch) {
        if st.lead.leader() != Leader::Nobody {
            return;
        }
        if st.watched > 0 {
            sc.todo.wake_helper = true;
        } else if let Some(next) = st.parked.pop_front() {
            if next.mark() {
                sc.todo.unpark.push(next);
            } else {
                // The thread is awake; it passes the lead on if it does not need it.
            }
        }
    }

    /// Polls until an attempt succeeds. The caller leads, and its last attempt failed.
    fn poll_until_done<'a, T>(
        &'a self,
        mut st: MutexGuard<'a, State>,
        sc: &mut Scratch,
        request: WaitRequest,
        attempt: &mut impl FnMut(&mut State, Instant) -> Attempt<T>,
    ) -> Result<T, Error> {
        // When to stop spinning and sleep; 0: at once.
        let mut spin_begun = st.now.as_nanos();
        let mut spin_end = self.poll_budget.begin(spin_begun);
        let mut seen = st.deliveries;
        let mut rounds = 0;
        loop {
            if !self.rdma.is_empty() {
                drop(st);
                self.take_completions(sc);
                st = self.lock();
                st.at(clock::now());
            }
            self.run_timers(&mut st, sc);
            sc.todo.read.append(&mut st.unread);
            self.collect(&mut st, sc, None);
            let now = st.now;
            let spent = now.as_nanos().saturating_sub(spin_begun);
            if core::mem::replace(&mut seen, st.deliveries) != st.deliveries {
                // More bytes usually follow: of a long message, or of a stream for other sockets.
                if spin_end > 0 {
                    self.poll_budget.note(true, spent);
                }
                spin_begun = now.as_nanos();
                spin_end = self.poll_budget.begin(spin_begun);
            } else if spin_end > 0 && now.as_nanos() >= spin_end {
                self.poll_budget.note(false, spent);
                spin_end = 0;
            }
            let result = match self.attempt(&mut st, request.until(), attempt) {
                Attempt::Done(done) => Some(Ok(done)),
                Attempt::Again if st.stop => Some(Err(Error::ShutDown)),
                Attempt::Again if request.is_late(now) => Some(Err(Error::TimedOut)),
                Attempt::Again => None,
            };
            if let Some(result) = result {
                self.leave_lead(&mut st, sc);
                self.release_and_run(st, sc);
                return result;
            }
            let busy = st.core.has_backlog();
            if !busy {
                // This thread has no more work for now: peers that asked for acknowledgements get
                // them.
                st.core.idle(now);
            }
            rounds += 1;
            let others = st.hot[1].is_some();
            if rounds == ROUNDS_MAX || (busy && others) {
                // One busy link must not keep the others from being polled.
                rounds = 0;
                self.release_and_run(st, sc);
                self.poll_events(sc, Some(Duration::ZERO));
                self.run(sc);
                st = self.lock();
                continue;
            }
            if spin_end > 0 || busy {
                let hot = st.hot.clone();
                self.release_and_run(st, sc);
                if !busy {
                    self.read_hot_links(sc, &hot);
                }
                st = self.lock();
                continue;
            }
            if core::mem::take(&mut st.last_read) >= STREAM_READ {
                // The rest of the peer's write has usually come meanwhile.
                let hot = st.hot[0].clone();
                self.release_and_run(st, sc);
                if let Some(link) = hot {
                    self.try_read(sc, &link);
                    self.run(sc);
                }
                st = self.lock();
                continue;
            }
            st.add_waiter(request.id, request.interest, &sc.me, WaitMode::Polling);
            let wake_at = [request.deadline, st.next_timeout()].into_iter().flatten().min();
            st.lead.fall_asleep(wake_at.unwrap_or(u64::MAX));
            self.release_and_run(st, sc);
            if !self.rdma.is_empty() {
                self.leave_completions();
            }
            sc.sleeps = true;
            // The work just done may have brought the event that this thread waits for.
            let now = clock::now().as_nanos();
            let limit = match wake_at {
                _ if sc.me.is_woken() => Some(0),
                wake_at => wake_at.map(|at| at.saturating_sub(now)),
            };
            self.poll_events(sc, limit.map(Duration::from_nanos));
            self.run(sc);
            sc.sleeps = false;
            st = self.lock();
            st.lead.wake_up();
            st.remove_waiter(request.id, request.interest, &sc.me);
        }
    }

    /// Tries to read the links that delivered last, several times, then polls all descriptors once.
    fn read_hot_links(
        &self,
        sc: &mut Scratch,
        hot: &[Option<std::sync::Arc<crate::link::Link>>; 2],
    ) {
        for _ in 0..TRIES {
            for link in hot.iter().flatten() {
                if self.try_read(sc, link) {
                    return self.run(sc);
                }
            }
            self.poll_budget.give_way();
        }
        self.poll_events(sc, Some(Duration::ZERO));
        self.run(sc);
    }

    /// Waits for events, and puts the work they announce on the to-do list.
    pub(crate) fn poll_events(&self, sc: &mut Scratch, limit: Option<Duration>) {
        sc.events.clear();
        let mut limit = limit;
        if let Some(short) = limit.filter(|limit| !limit.is_zero() && *limit < FINE) {
            let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
            self.stats.waits.inc();
            if poll(&mut fds, Some(&sys::timespec(short))) == Ok(0) {
                return;
            }
            limit = Some(Duration::ZERO);
        }
        self.stats.waits.inc();
        let limit = limit.map(sys::timespec);
        let found = epoll::wait(&self.epoll, spare_capacity(&mut sc.events), limit.as_ref());
        if found.is_err() || sc.events.is_empty() {
            if limit.is_some_and(|limit| limit.tv_sec == 0 && limit.tv_nsec == 0) {
                self.stats.empty_looks.inc();
            }
            return;
        }
        let mut st = self.lock();
        // Only the thread that slept is awake. When the background thread polls while another
        // thread sleeps, that thread has to be woken for the events found here.
        if core::mem::take(&mut sc.sleeps) {
            st.lead.wake_up();
        }
        let now = st.at(clock::now());
        for at in 0..sc.events.len() {
            let event = sc.events[at];
            self.note_event(&mut st, sc, now, event.data.u64(), event.flags);
        }
        self.collect(&mut st, sc, None);
    }

    fn note_event(
        &self,
        st: &mut State,
        sc: &mut Scratch,
        now: Instant,
        token: u64,
        flags: EventFlags,
    ) {
        if token == TOKEN_KICK {
            st.kicked = false;
            self.stats.eventfds.inc();
            sys::unsignal(&self.kick);
            return;
        }
        let (index, low) = ((token >> 32) as usize, token as u32);
        if token >= TOKEN_LISTENER {
            sc.todo.accept.extend(st.listeners.get(low as usize).cloned());
            return;
        }
        let Some(slot) = st.links.get_mut(index).and_then(Option::as_mut) else { return };
        if slot.token != low {
            return;
        }
        let Some(link) = slot.link.clone() else { return };
        let over = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        if slot.connecting {
            if over || flags.contains(EventFlags::OUT) {
                sc.todo.connected.push(link);
            }
            return;
        }
        if flags.contains(EventFlags::OUT) {
            slot.writable_events = slot.writable_events.wrapping_add(1);
            if core::mem::take(&mut slot.blocked) {
                st.core.handle_writable(now, link.id);
            }
        }
        if over {
            link.set_ending();
        }
        if over || flags.contains(EventFlags::IN) {
            sc.todo.read.push(link);
        }
    }

    /// Tells whether a refused sender that does not wait may poll the network. It may not each
    /// time: otherwise one congested destination would make a program that serves many send each
    /// message in a separate write.
    pub(crate) fn may_poll_once(&self, st: &mut State) -> bool {
        let now = clock::now().as_nanos();
        let due = now.saturating_sub(st.last_single_poll) >= SINGLE_POLL_GAP_NS;
        if due {
            st.last_single_poll = now;
        }
        due
    }

    /// Polls the network once, for a caller that does not wait, and then tries again.
    #[cold]
    pub(crate) fn poll_once<T>(
        &self,
        request: WaitRequest,
        mut attempt: impl FnMut(&mut State, Instant) -> Attempt<T>,
    ) -> Attempt<T> {
        self.with_scratch(|sc| {
            let mut st = self.lock();
            let now = st.at(clock::now()).as_nanos();
            if let Attempt::Done(done) = self.attempt(&mut st, request.until(), &mut attempt) {
                self.release_and_run(st, sc);
                return Attempt::Done(done);
            }
            // A program that tries to receive answers needs its questions sent; a program that
            // found a send queue full does not.
            let age = if request.until().is_some() { 0 } else { HELPER_AGE_NS };
            self.collect_dirty(&mut st, sc, age);
            let polling = now.saturating_sub(st.last_failed_try) < POLLING_GAP_NS;
            st.last_failed_try = now;
            if (st.lead.leader() == Leader::Helper && !polling) || !self.take_lead(&mut st, sc) {
                self.release_and_run(st, sc);
                return Attempt::Again;
            }
            if request.interest.contains(Interest::WRITE) {
                st.check_tcp_acks_soon();
            }
            sc.until = request.until();
            self.run_timers(&mut st, sc);
            sc.todo.read.append(&mut st.unread);
            let hot = st.hot.clone();
            self.release_and_run(st, sc);
            if !hot.iter().flatten().any(|link| self.try_read(sc, link)) {
                self.poll_events(sc, Some(Duration::ZERO));
            }
            self.run(sc);
            self.take_completions(sc);
            sc.until = None;
            let mut st = self.lock();
            let result = self.attempt(&mut st, request.until(), &mut attempt);
            self.leave_lead(&mut st, sc);
            self.release_and_run(st, sc);
            result
        })
    }
}
