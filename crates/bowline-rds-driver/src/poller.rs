//! Waiting: the thread that waits for a message, or for room, reads the connections itself.
//!
//! ```text
//!            recv finds nothing
//!                   |
//!        role free? (or the helper's)      role taken by another thread
//!                   |                               |
//!      take it: look, sleep in epoll,        register, park;
//!      read, parse, until satisfied          woken by a message or by
//!                   |                        being handed the role
//!      leave it: hand it to a parked
//!      thread, or leave it to the helper
//! ```
//! Every look at the core and the registration that follows it happen under one lock, so that no
//! wake-up falls between them.

use core::sync::atomic::Ordering::Relaxed;
use std::sync::MutexGuard;
use std::time::Duration;

use bowline_base::clock;
use bowline_rds::{Instant, Interest, SocketId};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags, poll};

use crate::config::PollMode;
use crate::error::Error;
use crate::flush::HELPER_AGE_NS;
use crate::helper::TICK_NS;
use crate::read::PARSE_BUDGET;
use crate::shared::{Role, Shared, State};
use crate::sys;
use crate::todo::Scratch;
use crate::waiters::How;

/// Event names; links have an index in the upper half, these do not.
pub(crate) const TOKEN_KICK: u64 = u64::MAX;
pub(crate) const TOKEN_LISTENER: u64 = 0xffff_ffff_0000_0000;
/// Waits shorter than this need a call that does not round up to milliseconds as epoll does.
const FINE: Duration = Duration::from_millis(4);
/// Tries of direct reads between two looks at everything else.
const TRIES: u32 = 16;
/// Rounds of reading links directly between two looks at everything.
const ROUNDS_MAX: u32 = 16;
/// Bounds of the memory of whether anything came while looking.
const SCORE_MAX: i32 = 8;
/// When looking has not paid, it is tried again once in so many times.
const RETRY_EVERY: u64 = 16;
/// After a read of so many bytes, another is tried before sleeping.
const STREAM_READ: usize = 32 << 10;
/// Least time between two looks of refused senders.
const GLANCE_GAP_NS: u64 = 50_000;
/// Two empty-handed calls within this time are one program polling.
const POLLING_GAP_NS: u64 = 500_000;
/// A holder of the role for longer than this lets the background thread know when it leaves.
const LONG_HOLD_NS: u64 = 5_000_000;

/// What one attempt under the lock gave.
pub(crate) enum Attempt<T> {
    Done(T),
    /// Nothing yet; look again after a wake-up.
    Again,
}

/// What a caller waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub(crate) id: SocketId,
    pub(crate) interest: Interest,
    /// Nanoseconds of the driver's clock.
    pub(crate) deadline: Option<u64>,
}

impl Want {
    fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|at| at <= now.as_nanos())
    }

    /// A reader needs no more than its own message.
    fn until(&self) -> Option<SocketId> {
        (self.interest == Interest::READ).then_some(self.id)
    }
}

impl Shared {
    /// One attempt, with everything parsed that the attempt may need.
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
        want: Want,
        mut attempt: impl FnMut(&mut State, Instant) -> Attempt<T>,
    ) -> Result<T, Error> {
        self.with_scratch(|sc| {
            loop {
                let mut st = self.lock();
                let now = st.at(clock::now());
                if let Attempt::Done(done) = self.attempt(&mut st, want.until(), &mut attempt) {
                    self.pass_on(&mut st, sc);
                    self.settle(st, sc);
                    return Ok(done);
                }
                if st.stop || want.is_late(now) {
                    let error = if st.stop { Error::ShutDown } else { Error::TimedOut };
                    self.pass_on(&mut st, sc);
                    self.settle(st, sc);
                    return Err(error);
                }
                self.collect_dirty(&mut st, sc, 0);
                if want.interest.contains(Interest::WRITE) {
                    st.hurry_tcp_acks();
                }
                if self.take_role(&mut st, sc) {
                    sc.until = want.until();
                    let done = self.lead(st, sc, want, &mut attempt);
                    sc.until = None;
                    return done;
                }
                st.enlist(want.id, want.interest, &sc.me, How::Parked);
                if st.role == Role::Nobody {
                    sc.todo.wake_helper = true;
                }
                self.settle(st, sc);
                let left = want.deadline.map(|at| at.saturating_sub(now.as_nanos()));
                sc.me.park(left.map(Duration::from_nanos));
                let mut st = self.lock();
                st.delist(want.id, want.interest, &sc.me);
            }
        })
    }

    /// Takes the role of the poller if that is possible. From the background thread it is taken
    /// unless somebody relies on that thread.
    fn take_role(&self, st: &mut State, sc: &mut Scratch) -> bool {
        match st.role {
            Role::App => return false,
            _ if st.watched > 0 => return false,
            Role::Nobody => {}
            Role::Helper => {
                st.sleeping = None;
                st.kicked = false;
                sc.todo.wake_helper = true;
            }
        }
        st.role = Role::App;
        st.role_epoch += 1;
        st.role_since = st.now;
        true
    }

    /// Gives the role back.
    fn leave_role(&self, st: &mut State, sc: &mut Scratch) {
        st.role = Role::Nobody;
        st.sleeping = None;
        let held = st.now.saturating_since(st.role_since).as_nanos();
        if st.parked.is_empty()
            && u64::try_from(held).unwrap_or(u64::MAX) > LONG_HOLD_NS
            && st.helper_tick_ns > 4 * TICK_NS
        {
            sc.todo.wake_helper = true;
        }
        self.pass_on(st, sc);
    }

    /// When nobody polls but somebody waits, makes the longest waiter the next poller.
    pub(crate) fn pass_on(&self, st: &mut State, sc: &mut Scratch) {
        if st.role != Role::Nobody {
            return;
        }
        if st.watched > 0 {
            sc.todo.wake_helper = true;
        } else if let Some(next) = st.parked.pop_front() {
            if next.mark() {
                sc.todo.unpark.push(next);
            } else {
                // Awake already; it passes the role on if it does not need it.
            }
        }
    }

    /// Polls until an attempt succeeds. The caller has the role and has just found nothing.
    fn lead<'a, T>(
        &'a self,
        mut st: MutexGuard<'a, State>,
        sc: &mut Scratch,
        want: Want,
        attempt: &mut impl FnMut(&mut State, Instant) -> Attempt<T>,
    ) -> Result<T, Error> {
        // Until when to look without sleeping; 0: not at all.
        let mut spin_end = self.spin_end(&mut st);
        let mut seen = st.deliveries;
        let mut rounds = 0;
        loop {
            self.run_timers(&mut st, sc);
            sc.todo.read.append(&mut st.unread);
            self.collect(&mut st, sc, None);
            let now = st.now;
            if core::mem::replace(&mut seen, st.deliveries) != st.deliveries {
                // More is on its way, mostly: a long message, or a stream for other sockets.
                if spin_end > 0 {
                    self.note_spin(true);
                }
                spin_end = self.spin_end(&mut st);
            } else if spin_end > 0 && now.as_nanos() >= spin_end {
                self.note_spin(false);
                spin_end = 0;
            }
            let result = match self.attempt(&mut st, want.until(), attempt) {
                Attempt::Done(done) => Some(Ok(done)),
                Attempt::Again if st.stop => Some(Err(Error::ShutDown)),
                Attempt::Again if want.is_late(now) => Some(Err(Error::TimedOut)),
                Attempt::Again => None,
            };
            if let Some(result) = result {
                self.leave_role(&mut st, sc);
                self.settle(st, sc);
                return result;
            }
            let busy = st.core.has_backlog();
            if !busy {
                // Nothing is left to do for now: peers that asked get their acknowledgements.
                st.core.idle(now);
            }
            rounds += 1;
            let others = st.hot[1].is_some();
            if rounds == ROUNDS_MAX || (busy && others) {
                // One busy link must not hide the others.
                rounds = 0;
                self.settle(st, sc);
                self.look(sc, Some(Duration::ZERO));
                self.run(sc);
                st = self.lock();
                continue;
            }
            if spin_end > 0 || busy {
                let hot = st.hot.clone();
                self.settle(st, sc);
                if !busy {
                    self.look_closely(sc, &hot);
                }
                st = self.lock();
                continue;
            }
            if core::mem::take(&mut st.last_read) >= STREAM_READ {
                // The rest of what the peer wrote in one go has come meanwhile, mostly.
                let hot = st.hot[0].clone();
                self.settle(st, sc);
                if let Some(link) = hot {
                    self.try_read(sc, &link);
                    self.run(sc);
                }
                st = self.lock();
                continue;
            }
            st.enlist(want.id, want.interest, &sc.me, How::Polling);
            let wake_at = [want.deadline, st.next_timeout()].into_iter().flatten().min();
            st.sleeping = Some(wake_at.unwrap_or(u64::MAX));
            self.settle(st, sc);
            sc.sleeps = true;
            // What was just done may have brought what this thread waits for.
            let now = clock::now().as_nanos();
            let limit = match wake_at {
                _ if sc.me.is_woken() => Some(0),
                wake_at => wake_at.map(|at| at.saturating_sub(now)),
            };
            self.look(sc, limit.map(Duration::from_nanos));
            self.run(sc);
            sc.sleeps = false;
            st = self.lock();
            st.sleeping = None;
            st.delist(want.id, want.interest, &sc.me);
        }
    }

    /// Until when to look before sleeping, if looking has paid lately; else 0.
    fn spin_end(&self, st: &mut State) -> u64 {
        match self.poll {
            PollMode::Sleep => 0,
            PollMode::Spin => u64::MAX,
            PollMode::Adaptive => {
                let mut look = self.spin_score.load(Relaxed) >= 0;
                if !look {
                    st.unpaid_waits += 1;
                    look = st.unpaid_waits.is_multiple_of(RETRY_EVERY);
                }
                if look { st.now.as_nanos().saturating_add(self.spin_ns) } else { 0 }
            }
        }
    }

    fn note_spin(&self, paid: bool) {
        let score = self.spin_score.load(Relaxed) + if paid { 2 } else { -1 };
        self.spin_score.store(score.clamp(-SCORE_MAX, SCORE_MAX), Relaxed);
    }

    /// Reads the links that delivered last, some times, then looks at everything once.
    fn look_closely(&self, sc: &mut Scratch, hot: &[Option<std::sync::Arc<crate::link::Link>>; 2]) {
        for _ in 0..TRIES {
            for link in hot.iter().flatten() {
                if self.try_read(sc, link) {
                    return self.run(sc);
                }
            }
            core::hint::spin_loop();
        }
        self.look(sc, Some(Duration::ZERO));
        self.run(sc);
    }

    /// Waits for events, and puts what they ask for on the to-do list.
    pub(crate) fn look(&self, sc: &mut Scratch, limit: Option<Duration>) {
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
        // Only the sleeper is awake now. The background thread may look while another sleeps, which
        // then has to be woken for what this look brings.
        if core::mem::take(&mut sc.sleeps) {
            st.sleeping = None;
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

    /// Tells whether a refused sender that does not wait may look at the network: not each time, or
    /// one congested destination would make a program that serves many send each message alone.
    pub(crate) fn may_glance(&self, st: &mut State) -> bool {
        let now = clock::now().as_nanos();
        let due = now.saturating_sub(st.last_glance) >= GLANCE_GAP_NS;
        if due {
            st.last_glance = now;
        }
        due
    }

    /// Looks at the network once, for a caller that does not wait; then tries again.
    #[cold]
    pub(crate) fn glance<T>(
        &self,
        want: Want,
        mut attempt: impl FnMut(&mut State, Instant) -> Attempt<T>,
    ) -> Attempt<T> {
        self.with_scratch(|sc| {
            let mut st = self.lock();
            let now = st.at(clock::now()).as_nanos();
            if let Attempt::Done(done) = self.attempt(&mut st, want.until(), &mut attempt) {
                self.settle(st, sc);
                return Attempt::Done(done);
            }
            // A program that looks for answers wants its questions out; one that just found a queue
            // full does not.
            let age = if want.until().is_some() { 0 } else { HELPER_AGE_NS };
            self.collect_dirty(&mut st, sc, age);
            let polling = now.saturating_sub(st.last_miss) < POLLING_GAP_NS;
            st.last_miss = now;
            if (st.role == Role::Helper && !polling) || !self.take_role(&mut st, sc) {
                self.settle(st, sc);
                return Attempt::Again;
            }
            if want.interest.contains(Interest::WRITE) {
                st.hurry_tcp_acks();
            }
            sc.until = want.until();
            self.run_timers(&mut st, sc);
            sc.todo.read.append(&mut st.unread);
            let hot = st.hot.clone();
            self.settle(st, sc);
            if !hot.iter().flatten().any(|link| self.try_read(sc, link)) {
                self.look(sc, Some(Duration::ZERO));
            }
            self.run(sc);
            sc.until = None;
            let mut st = self.lock();
            let result = self.attempt(&mut st, want.until(), &mut attempt);
            self.leave_role(&mut st, sc);
            self.settle(st, sc);
            result
        })
    }
}
