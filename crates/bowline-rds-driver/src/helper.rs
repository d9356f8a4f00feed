//! The background thread: it does what no application thread is there to do.
//!
//! While application threads send, receive or wait, they read the connections themselves when they
//! have to, and this thread only looks now and then: timers that are overdue, data that a sender
//! left unflushed, whether anybody is still active. When nobody has been since its last look, it
//! takes the role of the poller and sleeps until something happens.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bowline_base::clock;
use rustix::event::{PollFd, PollFlags, poll};

use crate::flush::HELPER_AGE_NS;
use crate::read::PARSE_BUDGET;
use crate::shared::{Role, Shared};
use crate::sys;
use crate::todo::Scratch;

/// Interval of looks while application threads poll.
pub(crate) const TICK_NS: u64 = 1_000_000;
/// The longest it becomes while one thread polls without a break.
const TICK_MAX_NS: u64 = 256_000_000;
/// The longest it becomes while threads take turns at polling, as each receive is one.
const TICK_BUSY_NS: u64 = 8_000_000;
/// Interval of looks at the network while application threads are active but none polls.
const GLANCE_NS: u64 = 10_000_000;
/// Interval of looks at unflushed data.
const FLUSH_TICK_NS: u64 = 200_000;
/// When what peers make this node hold has shrunk by so many bytes, the system gets them back: the
/// heap keeps freed memory by itself. Not more often than once in this time, since that looks
/// through all of the heap, which is the program's too.
const TRIM_BYTES: usize = 64 << 20;
const TRIM_PAUSE_NS: u64 = 5_000_000_000;
/// Looks without unflushed data before senders have to ask for the next one.
const FLUSH_PATIENCE: u32 = 10;

/// Runs until the node stops.
pub(crate) fn run(shared: &Arc<Shared>) {
    shared.with_scratch(|sc| {
        let mut memory = Memory::default();
        while shared.help(sc, &mut memory) {}
    });
}

/// What the thread remembers between two looks.
#[derive(Debug, Default)]
struct Memory {
    epoch: u64,
    calls: u64,
    glance_at: u64,
    clean_looks: u32,
    /// The most that peers made the node hold since memory was given back last.
    most_held: usize,
    trim_at: u64,
}

impl Memory {
    /// Tells whether freed memory is to be given back now, or else in how many nanoseconds.
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

impl Shared {
    fn help(&self, sc: &mut Scratch, memory: &mut Memory) -> bool {
        self.stats.helper_turns.inc();
        sc.reads_acks = false; // once a turn
        let mut st = self.lock();
        let now = st.at(clock::now());
        if st.stop {
            if st.role == Role::Helper {
                st.role = Role::Nobody;
            }
            return false;
        }
        if st.role == Role::Helper {
            st.sleeping = None;
            st.kicked = false;
        }
        let unchanged = st.role_epoch == memory.epoch;
        memory.epoch = st.role_epoch;
        let active = st.calls != memory.calls;
        memory.calls = st.calls;
        match st.role {
            Role::Nobody if st.watched > 0 || unchanged && !active => st.role = Role::Helper,
            // Whoever receives what this thread reads would do better to read it itself.
            Role::Helper if active && st.watched == 0 => st.role = Role::Nobody,
            _ => {}
        }
        if st.role != Role::App {
            self.run_timers(&mut st, sc);
        }
        let mut busy = false;
        if st.role == Role::Helper {
            sc.todo.read.append(&mut st.unread);
            if st.core.has_backlog() {
                busy = st.core.process(now, None, PARSE_BUDGET);
            }
            busy |= !sc.todo.read.is_empty();
            if !busy {
                st.core.idle(now);
            }
        }
        self.collect_dirty(&mut st, sc, HELPER_AGE_NS);
        if st.flush_armed {
            let clean = st.dirty.is_empty() && sc.todo.flush.is_empty();
            memory.clean_looks = if clean { memory.clean_looks + 1 } else { 0 };
            if memory.clean_looks >= FLUSH_PATIENCE {
                memory.clean_looks = 0;
                st.flush_armed = false;
            }
        }
        st.helper_tick_ns = match st.role {
            Role::App if unchanged => (st.helper_tick_ns * 2).clamp(TICK_NS, TICK_MAX_NS),
            Role::App | Role::Nobody if active && !unchanged => {
                (st.helper_tick_ns * 2).clamp(TICK_NS, TICK_BUSY_NS)
            }
            _ => TICK_NS,
        };
        let watching = st.role == Role::Helper;
        let flush = st.flush_armed.then_some(FLUSH_TICK_NS);
        let rest = if watching {
            // Timers may ask for more now than before.
            self.collect(&mut st, sc, None);
            st.next_timeout().map(|at| at.saturating_sub(now.as_nanos()))
        } else {
            // Nobody else looks after timers while no thread polls.
            let timers = if st.role == Role::Nobody { st.next_timeout() } else { None };
            let timers = timers.map(|at| at.saturating_sub(now.as_nanos()).max(TICK_NS));
            Some(timers.map_or(st.helper_tick_ns, |ns| ns.min(st.helper_tick_ns)))
        };
        let (trim, trim_in) = memory.trim(st.core.memory_held(), now.as_nanos());
        let limit = if busy { Some(0) } else { [flush, rest, trim_in].into_iter().flatten().min() };
        if watching {
            st.sleeping = Some(limit.map_or(u64::MAX, |ns| now.as_nanos().saturating_add(ns)));
        }
        let glance = st.role == Role::Nobody && memory.glance_at <= now.as_nanos();
        if glance || watching {
            memory.glance_at = now.as_nanos() + GLANCE_NS;
        }
        self.settle(st, sc);
        if trim {
            self.rx.lock().unwrap_or_else(PoisonError::into_inner).shrink();
            sys::trim_heap();
        }
        if glance {
            let mut st = self.lock();
            sc.todo.read.append(&mut st.unread);
            drop(st);
            self.look(sc, Some(Duration::ZERO));
            self.run(sc);
        }
        self.help_sleep(sc, watching, limit);
        true
    }

    /// Sleeps until called, or, when `watching`, until something happens on the network.
    fn help_sleep(&self, sc: &mut Scratch, watching: bool, limit: Option<u64>) {
        let mut fds = [
            PollFd::new(&self.helper_kick, PollFlags::IN),
            PollFd::new(&self.epoll, PollFlags::IN),
        ];
        let fds = if watching { &mut fds[..] } else { &mut fds[..1] };
        let limit = limit.map(|ns| sys::timespec(Duration::from_nanos(ns)));
        self.stats.waits.inc();
        if poll(fds, limit.as_ref()).is_err() {
            return;
        }
        if !fds[0].revents().is_empty() {
            self.stats.eventfds.inc();
            sys::unsignal(&self.helper_kick);
        }
        if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
            let mut st = self.lock();
            if st.role != Role::Helper {
                return;
            }
            st.sleeping = None;
            drop(st);
            self.look(sc, Some(Duration::ZERO));
            self.run(sc);
        }
    }
}
