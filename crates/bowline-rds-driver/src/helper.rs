//! The background thread, which works when no application thread is in a call.
//!
//! While application threads send, receive or wait, they read the connections themselves when they
//! have to. This thread then only checks from time to time for overdue timers, for data that a
//! sender left unflushed, and whether application threads are still active. If none has been active
//! since its last check, it takes the lead and sleeps until an event happens.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bowline_base::clock;
use bowline_wait::{Leader, Others};
use rustix::event::{PollFd, PollFlags, poll};

use crate::driver::Driver;
use crate::flush::HELPER_AGE_NS;
use crate::read::PARSE_BUDGET;
use crate::shared::Shared;
use crate::sys;
use crate::todo::Scratch;

/// Interval of checks, in nanoseconds, while application threads poll.
pub(crate) const TICK_NS: u64 = 1_000_000;
/// Longest interval of checks while one thread polls without a break.
const TICK_MAX_NS: u64 = 256_000_000;
/// Longest interval of checks while threads take turns at polling, since each receive is one turn.
const TICK_BUSY_NS: u64 = 8_000_000;
/// Interval of polling the network while application threads are active but none polls.
const IDLE_POLL_NS: u64 = 10_000_000;
/// Interval of checking for unflushed data.
const FLUSH_TICK_NS: u64 = 200_000;
/// When the memory that messages occupy has shrunk by this number of bytes, the system gets it
/// back, since the heap by itself keeps freed memory. It happens at most once in `TRIM_PAUSE_NS`,
/// because it searches the whole heap, the program's part included.
const TRIM_BYTES: usize = 64 << 20;
const TRIM_PAUSE_NS: u64 = 5_000_000_000;
/// Number of checks without unflushed data after which senders have to ask for the next check.
const FLUSH_PATIENCE: u32 = 10;

/// Runs until the node stops.
pub(crate) fn run(shared: &Arc<Shared>) {
    shared.with_scratch(|sc| {
        let mut state = HelperState::default();
        while shared.help(sc, &mut state) {}
    });
}

/// State that the thread keeps between two checks.
#[derive(Debug, Default)]
struct HelperState {
    epoch: u64,
    calls: u64,
    poll_once_at: u64,
    clean_checks: u32,
    /// The most bytes that messages have occupied since memory was last returned to the system.
    most_held: usize,
    trim_at: u64,
}

impl HelperState {
    /// Tells whether to return freed memory to the system now, or else in how many nanoseconds.
    fn trim(&mut self, held: usize, now: u64) -> (bool, Option<u64>) {
        self.most_held = self.most_held.max(held);
        if self.most_held - held < TRIM_BYTES {
            return (false, None);
        }
        if now < self.trim_at {
            return (false, Some(self.trim_at - now));
        }
        self.most_held = held;
        self.trim_at = now + TRIM_PAUSE_NS;
        (true, None)
    }
}

/// The work of the background thread, for a thread of the program that never waits in a call of
/// the driver and has a loop of its own. It takes a [turn](Self::turn) in each round of that loop,
/// and wakes up when one of the [descriptors](Self::descriptors) is readable. When it is dropped,
/// there is a background thread again.
#[derive(Debug)]
pub struct Background {
    driver: Driver,
    state: HelperState,
}

/// What a turn leaves to do.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The second descriptor is to be watched.
    pub watches_network: bool,
    /// When the next turn is due at the latest; `None`: when a descriptor is readable.
    pub next: Option<Duration>,
}

impl Background {
    pub(crate) fn new(driver: Driver) -> Self {
        Self { driver, state: HelperState::default() }
    }

    /// What wakes the loop: requests of other threads, and the network.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        let shared = self.driver.shared();
        [shared.helper_kick.as_fd(), shared.epoll.as_fd()]
    }

    /// Does what there is to do, and writes what was sent and gathered.
    pub fn turn(&mut self) -> Turn {
        let shared = self.driver.shared();
        shared.with_scratch(|sc| {
            sc.is_background = true;
            sc.wants_turn = false;
            let turn = shared.turn(sc, &mut self.state, 0);
            let mut turn = turn.unwrap_or(Turn { watches_network: false, next: None });
            if sc.wants_turn {
                turn.next = Some(Duration::ZERO);
            }
            turn
        })
    }

    /// Other threads have asked for a turn.
    pub fn take_kick(&self) {
        self.driver.shared().take_kick();
    }

    /// There is something on the network.
    pub fn read_network(&self) {
        let shared = self.driver.shared();
        shared.with_scratch(|sc| shared.read_as_helper(sc));
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.driver.shared().with_scratch(|sc| sc.is_background = false);
        self.driver.resume_helper();
    }
}

impl Shared {
    fn help(&self, sc: &mut Scratch, state: &mut HelperState) -> bool {
        let Some(Turn { watches_network, next }) = self.turn(sc, state, HELPER_AGE_NS) else {
            return false;
        };
        self.help_sleep(sc, watches_network, next);
        true
    }

    /// Does the background thread's work of a turn, and writes data that were gathered for longer
    /// than `age_ns` nanoseconds. `None`: the thread is to end.
    fn turn(&self, sc: &mut Scratch, state: &mut HelperState, age_ns: u64) -> Option<Turn> {
        self.stats.helper_turns.inc();
        sc.reads_acks = false; // once a turn
        let mut st = self.lock();
        let now = st.at(clock::now());
        if st.stop || st.helper_leaves && !sc.is_background {
            if st.lead.leader() == Leader::Helper {
                st.lead.leave();
            }
            return None;
        }
        if st.lead.leader() == Leader::Helper {
            st.kicked = false;
        }
        let unchanged = st.lead.epoch() == state.epoch;
        state.epoch = st.lead.epoch();
        let active = st.calls != state.calls;
        state.calls = st.calls;
        // The thread that receives the messages should read them itself, but a task cannot.
        let silent = sc.is_background || st.watched > 0 || unchanged && !active;
        let leader = st.lead.take_turn(if silent { Others::Silent } else { Others::Active });
        if leader != Leader::Application {
            self.run_timers(&mut st, sc);
        }
        let mut busy = false;
        if leader == Leader::Helper {
            sc.todo.read.append(&mut st.unread);
            if st.core.has_backlog() {
                busy = st.core.process(now, None, PARSE_BUDGET);
            }
            busy |= !sc.todo.read.is_empty();
            if !busy {
                st.core.idle(now);
            }
        }
        self.collect_dirty(&mut st, sc, age_ns);
        if st.flush_armed {
            let clean = st.dirty.is_empty() && sc.todo.flush.is_empty();
            state.clean_checks = if clean { state.clean_checks + 1 } else { 0 };
            if state.clean_checks >= FLUSH_PATIENCE {
                state.clean_checks = 0;
                st.flush_armed = false;
            }
        }
        st.helper_tick_ns = match leader {
            Leader::Application if unchanged => (st.helper_tick_ns * 2).clamp(TICK_NS, TICK_MAX_NS),
            Leader::Application | Leader::Nobody if active && !unchanged => {
                (st.helper_tick_ns * 2).clamp(TICK_NS, TICK_BUSY_NS)
            }
            _ => TICK_NS,
        };
        let watching = leader == Leader::Helper;
        let flush = st.flush_armed.then_some(FLUSH_TICK_NS);
        let rest = if watching {
            // Timers may have more requests now than before.
            self.collect(&mut st, sc, None);
            st.next_timeout().map(|at| at.saturating_sub(now.as_nanos()))
        } else {
            // While no thread polls, only this thread runs timers.
            let timers = if leader == Leader::Nobody { st.next_timeout() } else { None };
            let timers = timers.map(|at| at.saturating_sub(now.as_nanos()).max(TICK_NS));
            Some(timers.map_or(st.helper_tick_ns, |ns| ns.min(st.helper_tick_ns)))
        };
        let (trim, trim_in) = state.trim(st.core.memory_held(), now.as_nanos());
        let limit = if busy { Some(0) } else { [flush, rest, trim_in].into_iter().flatten().min() };
        if watching {
            st.lead.fall_asleep(limit.map_or(u64::MAX, |ns| now.as_nanos().saturating_add(ns)));
        }
        let poll_once = leader == Leader::Nobody && state.poll_once_at <= now.as_nanos();
        if poll_once || watching {
            state.poll_once_at = now.as_nanos() + IDLE_POLL_NS;
        }
        self.release_and_run(st, sc);
        if trim {
            self.rx.lock().unwrap_or_else(PoisonError::into_inner).shrink();
            sys::trim_heap();
        }
        if poll_once {
            let mut st = self.lock();
            sc.todo.read.append(&mut st.unread);
            drop(st);
            self.poll_events(sc, Some(Duration::ZERO));
            self.run(sc);
        }
        Some(Turn { watches_network: watching, next: limit.map(Duration::from_nanos) })
    }

    fn take_kick(&self) {
        self.stats.eventfds.inc();
        sys::unsignal(&self.helper_kick);
    }

    /// Sleeps until it is woken or, if `watching`, until an event on the network.
    fn help_sleep(&self, sc: &mut Scratch, watching: bool, limit: Option<Duration>) {
        let mut fds = [
            PollFd::new(&self.helper_kick, PollFlags::IN),
            PollFd::new(&self.epoll, PollFlags::IN),
        ];
        let fds = if watching { &mut fds[..] } else { &mut fds[..1] };
        let limit = limit.map(sys::timespec);
        self.stats.waits.inc();
        if poll(fds, limit.as_ref()).is_err() {
            return;
        }
        if !fds[0].revents().is_empty() {
            self.take_kick();
        }
        if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
            self.read_as_helper(sc);
        }
    }

    /// Does what is due and reads what has come, for the background thread while it waits for the
    /// end of the node in a call of its own.
    pub(crate) fn read_network(&self) {
        self.with_scratch(|sc| {
            let mut st = self.lock();
            self.run_timers(&mut st, sc);
            sc.todo.read.append(&mut st.unread);
            self.release_and_run(st, sc);
            self.poll_events(sc, Some(Duration::ZERO));
            self.run(sc);
        });
    }

    /// Reads the network, unless a thread of the program has taken the lead meanwhile.
    fn read_as_helper(&self, sc: &mut Scratch) {
        let mut st = self.lock();
        if st.lead.leader() != Leader::Helper {
            return;
        }
        st.lead.wake_up();
        drop(st);
        self.poll_events(sc, Some(Duration::ZERO));
        self.run(sc);
    }
}
