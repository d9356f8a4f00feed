//! State shared by all threads, and the leader, which reads the network.
//!
//! Locks: `rx` (reading and handling, so that packets are handled in the order they arrived) or
//! `tx` (sending, so that packets leave in the order they were made), then `state` (the core). No
//! thread waits for one of the first two while it has the other, and data paths only try them. The
//! last is never held over a system call, with three exceptions: a write to an event descriptor; a
//! receive without waiting
//! into memory that peers write, which must not be taken back from them during the call; and a copy
//! to or from memory of another process (`bowline_verbs::ForeignMemory`), which takes as long as
//! its implementation lets that process take.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bowline_roce::{Burst, Device as Core, Event, Instant};
use bowline_verbs::{AsyncEvent, CmEvent};
use bowline_wait::{Lead, Leader, PollBudget};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::capture::Capture;
use crate::config::PollMode;
use crate::connection_files::ConnectionFiles;
use crate::cuts::Cuts;
use crate::fault::Faults;
use crate::followers::{Followers, Following, Ready};
use crate::line::Line;
use crate::receive::Rx;
use crate::share::Among;
use crate::stats::Stats;
use crate::udp::Endpoint;
use crate::watch::Watch;

/// Most asynchronous events kept for a program that does not fetch them; the oldest is dropped.
const ASYNC_EVENTS_MAX: usize = 1024;
/// A waiting thread that stops waiting wakes the background thread if that would check later than
/// this, in nanoseconds.
const HELPER_POLLS_SOON_NS: u64 = 5_000_000;

/// State guarded by the lock of the core.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) core: Core,
    pub(crate) cm_events: VecDeque<CmEvent>,
    pub(crate) async_events: VecDeque<AsyncEvent>,
    pub(crate) stop: bool,
    /// Who reads the network; while nobody leads, threads that poll do.
    pub(crate) lead: Lead,
    /// Threads that wait for completions and are not the leader.
    pub(crate) following: Following,
    /// Number of threads that wait for events.
    pub(crate) listeners: usize,
    /// When the background thread has its next turn, in nanoseconds.
    pub(crate) helper_polls_at: u64,
    /// Faults of the settings or the network.
    pub(crate) faults: Faults,
    /// The files of established connections are out of date.
    pub(crate) connections_changed: bool,
    /// A thread of the program has said that it does not read the network from now on.
    pub(crate) program_sleeps: bool,
}

/// Buffers for sending.
#[derive(Debug, Default)]
pub(crate) struct Tx {
    /// Bursts, reused for every send.
    pub(crate) bursts: Vec<Burst>,
}

/// A device as shared by its threads.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) endpoints: Vec<Endpoint>,
    pub(crate) stats: Stats,
    pub(crate) poll_budget: PollBudget,
    pub(crate) capture: Option<Mutex<Capture>>,
    pub(crate) connection_files: Option<ConnectionFiles>,
    state: Mutex<State>,
    /// A network that is bad by choice.
    pub(crate) line: Option<Line>,
    pub(crate) cuts: Cuts,
    pub(crate) rx: Mutex<Rx>,
    pub(crate) tx: Mutex<Tx>,
    /// There may be something to send.
    pub(crate) unsent: AtomicBool,
    /// Packets handled since everything was last sent.
    pub(crate) unanswered: AtomicU64,
    /// How often an application thread has polled the network without waiting.
    pub(crate) polls: AtomicU64,
    /// Number of consecutive polls that found nothing.
    pub(crate) empty_polls: AtomicU32,
    /// Wakes threads that wait for completions.
    pub(crate) followers: Followers,
    /// Wakes threads that wait for events.
    pub(crate) events: Condvar,
    /// Wakes the leader, when that is a waiting thread.
    pub(crate) leader_kick: OwnedFd,
    /// Wakes the background thread.
    pub(crate) helper_kick: OwnedFd,
    /// Notified of what has happened, under the lock of the core.
    pub(crate) watcher: OnceLock<Arc<dyn Watch>>,
    /// Other processes with the same addresses.
    pub(crate) among: Among,
}

impl State {
    /// Queues an event for the program. If a connection request ends before the program has seen
    /// it, both events are dropped, so that a peer cannot make the queue grow.
    fn queue_cm_event(&mut self, event: CmEvent) {
        let ended = match &event {
            CmEvent::Rejected { id, .. }
            | CmEvent::Unreachable { id }
            | CmEvent::Disconnected { id }
            | CmEvent::TimewaitExit { id } => Some(*id),
            _ => None,
        };
        let unseen = self.cm_events.iter().position(
            |known| matches!(known, CmEvent::ConnectRequest { id, .. } if Some(*id) == ended),
        );
        match unseen {
            Some(at) => drop(self.cm_events.remove(at)),
            None => self.cm_events.push_back(event),
        }
    }

    /// Tells whether the background thread has its next turn before a peer gets impatient.
    pub(crate) const fn helper_polls_soon(&self, now: Instant) -> bool {
        self.helper_polls_at <= now.as_nanos().saturating_add(HELPER_POLLS_SOON_NS)
    }
}

impl Shared {
    pub(crate) fn new(
        core: Core,
        endpoints: Vec<Endpoint>,
        capture: Option<Capture>,
        connection_files: Option<ConnectionFiles>,
        line: Option<Line>,
        poll: PollMode,
        spin: Duration,
    ) -> Result<Self, Errno> {
        let poll_budget = match poll {
            PollMode::Adaptive => PollBudget::while_they_pay(spin),
            PollMode::Spin => PollBudget::without_end(),
            PollMode::Sleep => PollBudget::never(),
        };
        let state = State {
            core,
            cm_events: VecDeque::new(),
            async_events: VecDeque::new(),
            stop: false,
            lead: Lead::default(),
            following: Following::default(),
            listeners: 0,
            helper_polls_at: 0,
            faults: Faults::default(),
            connections_changed: false,
            program_sleeps: false,
        };
        Ok(Self {
            rx: Mutex::new(Rx::new(endpoints.len())),
            endpoints,
            stats: Stats::default(),
            poll_budget,
            capture: capture.map(Mutex::new),
            connection_files,
            line,
            cuts: Cuts::default(),
            state: Mutex::new(state),
            tx: Mutex::new(Tx::default()),
            unsent: AtomicBool::new(false),
            unanswered: AtomicU64::new(0),
            polls: AtomicU64::new(0),
            empty_polls: AtomicU32::new(0),
            followers: Followers::new(),
            events: Condvar::new(),
            leader_kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            helper_kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            watcher: OnceLock::new(),
            among: Among::default(),
        })
    }

    /// Makes a device for tests, without a background thread.
    #[cfg(test)]
    pub(crate) fn unshared(addrs: &[IpAddr]) -> Self {
        let config = bowline_roce::Config { addrs: addrs.to_vec(), ..Default::default() };
        let endpoints =
            addrs.iter().map(|ip| Endpoint::open(*ip, None, 1 << 20).unwrap()).collect();
        let core = Core::new(config, [1; 32]);
        Self::new(core, endpoints, None, None, None, PollMode::Spin, Duration::ZERO).unwrap()
    }

    /// Locks the core. The core's own checks can deal with the state that a thread left when it
    /// panicked with the lock held.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the socket of a local address.
    pub(crate) fn endpoint(&self, ip: IpAddr) -> Option<&Endpoint> {
        self.endpoints.iter().find(|endpoint| endpoint.at().ip() == ip)
    }

    /// Distributes the core's events and wakes the threads they are for. Must be called after every
    /// change of the core. Threads that do not sleep check for themselves.
    pub(crate) fn settle(&self, st: &mut State) {
        let (mut completions, mut events) = (Ready::default(), false);
        let watcher = self.watcher.get();
        while let Some(event) = st.core.poll_event() {
            match event {
                Event::CqReady(cq) => {
                    completions.add(cq);
                    if let Some(watcher) = watcher {
                        watcher.completion(cq);
                    }
                }
                Event::Cm(event) => {
                    match watcher {
                        Some(watcher) => watcher.connection(event),
                        None => {
                            st.queue_cm_event(event);
                            events = true;
                        }
                    }
                    if self.connection_files.is_some() && !st.connections_changed {
                        st.connections_changed = true;
                        self.signal(&self.helper_kick);
                    }
                }
                Event::Async(event) => {
                    if let Some(watcher) = watcher {
                        watcher.event(event);
                        continue;
                    }
                    if st.async_events.len() == ASYNC_EVENTS_MAX {
                        st.async_events.pop_front();
                    }
                    st.async_events.push_back(event);
                    events = true;
                }
                _ => {}
            }
        }
        if events && st.listeners > 0 {
            self.stats.hand_overs.inc();
            self.events.notify_all();
        }
        if completions.is_any() && self.followers.wake(&st.following, completions) {
            self.stats.hand_overs.inc();
        }
        if !st.lead.is_asleep() {
            return;
        }
        let earlier = st.lead.sleeps_past(st.core.poll_timeout().map(Instant::as_nanos));
        let kick = match st.lead.leader() {
            Leader::Application if completions.is_any() || earlier => &self.leader_kick,
            Leader::Helper if earlier => &self.helper_kick,
            _ => return,
        };
        st.lead.wake_up();
        self.signal(kick);
    }

    /// Stops being the leader, in favour of another waiting thread or the background thread.
    pub(crate) fn leave_lead(&self, st: &mut State, now: Instant) {
        st.lead.leave();
        if self.followers.wake_one(&st.following) {
            self.stats.hand_overs.inc();
        } else if !st.helper_polls_soon(now) {
            st.helper_polls_at = now.as_nanos();
            self.signal(&self.helper_kick);
        }
    }

    /// Has the background thread read the network from now on: a thread of the program that did is
    /// about to sleep elsewhere.
    pub(crate) fn hand_to_helper(&self, st: &mut State, now: Instant) {
        st.program_sleeps = true;
        if st.lead.leader() == Leader::Nobody {
            st.helper_polls_at = now.as_nanos();
            self.signal(&self.helper_kick);
        }
    }

    /// Stops everything: every wait ends, and the background thread too.
    pub(crate) fn stop(&self) {
        let mut st = self.lock();
        st.stop = true;
        st.lead.wake_up();
        self.events.notify_all();
        self.followers.wake_all();
        self.signal(&self.leader_kick);
        self.signal(&self.helper_kick);
    }

    /// Adds one to an event descriptor. A full counter wakes as well.
    fn signal(&self, fd: &OwnedFd) {
        self.stats.eventfds.inc();
        self.stats.hand_overs.inc();
        let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
    }

    /// Empties an event descriptor.
    pub(crate) fn unsignal(&self, fd: &OwnedFd) {
        self.stats.eventfds.inc();
        let mut count = [0; 8];
        let _ = rustix::io::read(fd, &mut count[..]);
    }

    /// Marks that there may be something to send.
    pub(crate) fn mark_unsent(&self) {
        // Paired with the swap in the sending thread: a thread that fails to get the right to send
        // has set the mark before, and the thread that has the right checks the mark again after
        // giving it up.
        self.unsent.store(true, Ordering::SeqCst);
    }
}
