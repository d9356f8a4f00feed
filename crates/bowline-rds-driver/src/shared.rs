//! State that all threads of a node share, and the one lock around the core.

use core::sync::atomic::{AtomicBool, AtomicU64};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

use bowline_base::clock;
use bowline_rds::{
    CloseHow, Event, Instant, Interest, LinkId, Node, Output, RdmaLinkId, RxPool, SocketId,
};
use bowline_wait::{Lead, Leader, PollBudget, Waiter};

use crate::config::{DriverConfig, PollMode};
use crate::cut::Cuts;
use crate::link::{Link, LinkSlot};
use crate::listen::Listener;
use crate::rdma::{Job, Pair, Port};
use crate::stats::Stats;
use crate::todo::Scratch;
use crate::waiters::{Entry, SocketSlot, WaitMode};

/// Maximum number of events kept for [`Driver::events`](crate::Driver::events).
const EVENTS_KEPT: usize = 256;
/// After this number of consecutive reads from one link, the link that delivered before it is not
/// tried any more without an event of the system.
const HOT_STREAK: u32 = 64;
/// Time in nanoseconds that a silent peer has to answer a probe.
const CHECK_NS: u64 = 1_200_000_000;
/// Interval in nanoseconds of checking how much TCP has acknowledged, for peers that acknowledge by
/// TCP alone.
const TCP_ACK_IDLE_NS: u64 = 10_000_000;
/// Longest such interval in nanoseconds while a caller waits for room in a send queue.
const TCP_ACK_URGENT_NS: u64 = 500_000;
/// The first such interval in nanoseconds of a wait; each check doubles it.
const TCP_ACK_FIRST_NS: u64 = 5_000;

/// Reason for a timer of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkTimer {
    /// The time in which the link should have ended is over.
    GiveUp,
    /// A probe of the link's peer should have been answered.
    CheckAgain,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    pub(crate) rx: Mutex<RxPool>,
    pub(crate) epoll: OwnedFd,
    /// Wakes the thread that sleeps in `epoll`.
    pub(crate) kick: OwnedFd,
    /// Wakes the background thread.
    pub(crate) helper_kick: OwnedFd,
    pub(crate) stats: Stats,
    pub(crate) poll_budget: PollBudget,
    pub(crate) congestion_control: Option<String>,
    pub(crate) any_address: bool,
    pub(crate) rdma: Vec<Port>,
    /// How often threads of the program have taken completions, and have gone to sleep since.
    pub(crate) rdma_polls: AtomicU64,
    pub(crate) rdma_sleeps: AtomicU64,
    /// The threads that take completions; they nap while threads of the program take them.
    pub(crate) rdma_nappers: Mutex<Vec<Thread>>,
    pub(crate) rdma_napping: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) core: Node,
    pub(crate) now: Instant,
    pub(crate) links: Vec<Option<LinkSlot>>,
    /// Queue pairs of connections over RDMA, by the index of the connection: while one ends, or is
    /// still being made though it was given up, a later one of that index may have its own already.
    rdma_pairs: Vec<Vec<Arc<Pair>>>,
    /// Receives that are not posted while memory is short.
    pub(crate) rdma_unposted: Vec<(RdmaLinkId, Vec<u64>)>,
    pub(crate) next_token: u32,
    pub(crate) sockets: Vec<SocketSlot>,
    pub(crate) listeners: Vec<Arc<Listener>>,
    /// Who polls the network; times are nanoseconds of the driver's clock.
    pub(crate) lead: Lead,
    /// When a thread of the program last took the lead.
    pub(crate) lead_since: Instant,
    /// The sleeping leader has been woken and has not run yet.
    pub(crate) kicked: bool,
    /// Parked threads, the one that waits longest first.
    pub(crate) parked: VecDeque<Arc<Waiter>>,
    /// Number of sockets that rely on the background thread.
    pub(crate) watched: usize,
    /// Number of waiting callers that need room in a send queue.
    pub(crate) senders: usize,
    /// Links with unflushed data.
    pub(crate) dirty: Vec<LinkId>,
    /// The background thread takes care of unflushed data.
    pub(crate) flush_armed: bool,
    pub(crate) helper_tick_ns: u64,
    /// Links with unread input of which the system sends no further event.
    pub(crate) unread: Vec<Arc<Link>>,
    /// The two links that delivered last, the latest first.
    pub(crate) hot: [Option<Arc<Link>>; 2],
    /// Number of consecutive reads that found data on the first of them.
    hot_streak: u32,
    /// Timers of links: time in nanoseconds, link, reason.
    pub(crate) link_timers: Vec<(u64, LinkId, LinkTimer)>,
    /// Links that end as soon as all bytes are read that TCP has acknowledged.
    pub(crate) cuts: Cuts,
    /// Refused connections and when to close them, oldest first.
    pub(crate) refused: VecDeque<(u64, OwnedFd)>,
    /// Listeners that are not watched, and until when.
    pub(crate) resting: Vec<(u64, Arc<Listener>)>,
    /// At least one link has unacknowledged messages that only TCP's acknowledgements release.
    pub(crate) tcp_acks: bool,
    pub(crate) next_tcp_ack: u64,
    /// Interval in nanoseconds between the next check of TCP's acknowledgements and the one after
    /// it.
    pub(crate) tcp_ack_interval: u64,
    pub(crate) last_failed_try: u64,
    /// Bytes of the last read of the link that delivered last.
    pub(crate) last_read: usize,
    /// Number of reads that found data.
    pub(crate) deliveries: u64,
    /// When a refused sender last polled the network.
    pub(crate) last_single_poll: u64,
    /// Number of calls that moved a message. An application that makes such calls polls by itself
    /// when it has to.
    pub(crate) calls: u64,
    pub(crate) events: VecDeque<Event>,
    #[cfg(feature = "tracing")]
    pub(crate) log_limits: crate::log::Limits,
    pub(crate) bytes_copied: (u64, u64),
    /// The node makes no new connections.
    pub(crate) closing: bool,
    /// The background thread is to end, since another thread does its work.
    pub(crate) helper_leaves: bool,
    /// The node is shut down; all waiting callers return.
    pub(crate) stop: bool,
}

/// Tells whether two interests have an event in common.
pub(crate) fn overlap(a: Interest, b: Interest) -> bool {
    [Interest::READ, Interest::WRITE].into_iter().any(|i| a.contains(i) && b.contains(i))
}

impl State {
    pub(crate) fn new(core: Node) -> Self {
        Self {
            core,
            now: Instant::from_nanos(0),
            links: Vec::new(),
            rdma_pairs: Vec::new(),
            rdma_unposted: Vec::new(),
            next_token: 0,
            sockets: Vec::new(),
            listeners: Vec::new(),
            lead: Lead::default(),
            lead_since: Instant::from_nanos(0),
            kicked: false,
            parked: VecDeque::new(),
            watched: 0,
            senders: 0,
            dirty: Vec::new(),
            flush_armed: false,
            helper_tick_ns: 0,
            unread: Vec::new(),
            hot: [None, None],
            hot_streak: 0,
            link_timers: Vec::new(),
            cuts: Cuts::default(),
            refused: VecDeque::new(),
            resting: Vec::new(),
            tcp_acks: false,
            next_tcp_ack: 0,
            tcp_ack_interval: TCP_ACK_IDLE_NS,
            last_failed_try: 0,
            last_read: 0,
            deliveries: 0,
            last_single_poll: 0,
            calls: 0,
            events: VecDeque::new(),
            #[cfg(feature = "tracing")]
            log_limits: crate::log::Limits::new(),
            bytes_copied: (0, 0),
            closing: false,
            helper_leaves: false,
            stop: false,
        }
    }

    /// Stores the time, which never goes back.
    #[inline]
    pub(crate) fn at(&mut self, now: Instant) -> Instant {
        self.now = self.now.max(now);
        self.now
    }

    /// Notes that a link delivered. The link that delivered before is tried as well, but only for a
    /// while, since each attempt costs a system call.
    pub(crate) fn note_hot(&mut self, link: &Arc<Link>) {
        if self.hot[0].as_ref().is_some_and(|hot| hot.id == link.id) {
            self.hot_streak = self.hot_streak.saturating_add(1);
            if self.hot_streak == HOT_STREAK {
                self.hot[1] = None;
            }
        } else {
            self.hot.swap(0, 1);
            self.hot[0] = Some(Arc::clone(link));
            self.hot_streak = 0;
        }
    }

    pub(crate) fn slot(&mut self, id: LinkId) -> Option<&mut LinkSlot> {
        self.links.get_mut(id.index())?.as_mut().filter(|slot| slot.id == id)
    }

    pub(crate) fn take_slot(&mut self, id: LinkId) -> Option<LinkSlot> {
        self.slot(id)?;
        let slot = self.links.get_mut(id.index())?.take();
        for hot in &mut self.hot {
            if hot.as_ref().is_some_and(|link| link.id == id) {
                *hot = None;
            }
        }
        self.unread.retain(|link| link.id != id);
        self.link_timers.retain(|(_, link, _)| *link != id);
        self.cuts.remove(id);
        slot
    }

    pub(crate) fn rdma_pair(&self, id: RdmaLinkId) -> Option<Arc<Pair>> {
        self.rdma_pairs.get(id.index())?.iter().find(|pair| pair.link == id).cloned()
    }

    pub(crate) fn put_rdma_pair(&mut self, pair: &Arc<Pair>) {
        let index = pair.link.index();
        if self.rdma_pairs.len() <= index {
            self.rdma_pairs.resize(index + 1, Vec::new());
        }
        self.rdma_pairs[index].push(Arc::clone(pair));
    }

    pub(crate) fn take_rdma_pair(&mut self, id: RdmaLinkId) -> Option<Arc<Pair>> {
        let pairs = self.rdma_pairs.get_mut(id.index())?;
        let at = pairs.iter().position(|pair| pair.link == id)?;
        Some(pairs.swap_remove(at))
    }

    /// Forgets all queue pairs.
    pub(crate) fn take_rdma_pairs(&mut self) -> Vec<Vec<Arc<Pair>>> {
        core::mem::take(&mut self.rdma_pairs)
    }

    /// Tells whether a connection is left, over TCP or RDMA.
    pub(crate) fn has_links(&self) -> bool {
        self.links.iter().any(Option::is_some)
            || self.rdma_pairs.iter().any(|pairs| !pairs.is_empty())
    }

    /// Sets the timer that checks the result of a probe of a link's peer.
    pub(crate) fn schedule_check(&mut self, id: LinkId, now: Instant) {
        let known = |(_, link, what): &(u64, LinkId, LinkTimer)| {
            *link == id && *what == LinkTimer::CheckAgain
        };
        if !self.link_timers.iter().any(known) {
            self.link_timers.push((now.as_nanos() + CHECK_NS, id, LinkTimer::CheckAgain));
        }
    }

    /// Makes room for a link in the table; its connection comes later.
    pub(crate) fn put_slot(&mut self, id: LinkId) -> &mut LinkSlot {
        let index = id.index();
        if self.links.len() <= index {
            self.links.resize_with(index + 1, || None);
        }
        self.next_token = self.next_token.wrapping_add(1);
        self.links[index].insert(LinkSlot::new(id, self.next_token))
    }

    /// Returns the waiters of a socket, if it ever had any and is still open.
    pub(crate) fn find_socket(&mut self, id: SocketId) -> Option<&mut SocketSlot> {
        self.sockets.get_mut(id.index()).filter(|slot| slot.id == Some(id))
    }

    /// Returns the waiters of a socket, and makes the entry if it is missing. The core must have
    /// just confirmed that the socket is open.
    pub(crate) fn socket_slot(&mut self, id: SocketId) -> &mut SocketSlot {
        let index = id.index();
        if self.sockets.len() <= index {
            self.sockets.resize_with(index + 1, SocketSlot::default);
        }
        let slot = &mut self.sockets[index];
        if slot.id != Some(id) {
            // The slot's earlier socket is closed, and its waiters have been woken.
            *slot = SocketSlot { id: Some(id), ..SocketSlot::default() };
        }
        slot
    }

    /// Adds a waiter to a socket's list and registers for changes at the core. The caller has just
    /// tried in vain under the same lock, so no change can be missed.
    pub(crate) fn add_waiter(
        &mut self,
        id: SocketId,
        interest: Interest,
        waiter: &Arc<Waiter>,
        mode: WaitMode,
    ) {
        waiter.arm();
        let entry = Entry { waiter: Arc::clone(waiter), interest, mode };
        self.socket_slot(id).entries.push(entry);
        if mode == WaitMode::Parked {
            self.parked.push_back(Arc::clone(waiter));
        }
        if interest.contains(Interest::WRITE) {
            self.senders += 1;
        }
        // A socket that was closed meanwhile changes no more; the caller's next attempt fails.
        let _ = self.core.register(id, interest);
    }

    /// Removes a waiter from the lists.
    pub(crate) fn remove_waiter(&mut self, id: SocketId, interest: Interest, waiter: &Arc<Waiter>) {
        if interest.contains(Interest::WRITE) {
            self.senders -= 1;
        }
        if let Some(slot) = self.find_socket(id) {
            slot.entries.retain(|entry| !Arc::ptr_eq(&entry.waiter, waiter));
        }
        self.parked.retain(|parked| !Arc::ptr_eq(parked, waiter));
    }

    /// Checks TCP's acknowledgements soon, and often at first, because a caller waits for room in a
    /// send queue.
    pub(crate) fn check_tcp_acks_soon(&mut self) {
        if self.tcp_acks {
            self.tcp_ack_interval = TCP_ACK_FIRST_NS;
            self.next_tcp_ack = self.next_tcp_ack.min(self.now.as_nanos());
        }
    }

    /// Returns when a timer is due next, in nanoseconds of the driver's clock.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        let core = self.core.poll_timeout().map(Instant::as_nanos);
        let later = self.link_timers.iter().map(|(at, ..)| *at).min();
        let refused = self.refused.front().map(|(at, _)| *at);
        let resting = self.resting.iter().map(|(until, _)| *until).min();
        let ack = self.tcp_acks.then_some(self.next_tcp_ack);
        let cuts = self.cuts.next_check();
        [core, later, cuts, refused, resting, ack].into_iter().flatten().min()
    }
}

impl Shared {
    pub(crate) fn new(
        config: &DriverConfig,
        core: Node,
        fds: [OwnedFd; 3],
        rdma: Vec<Port>,
    ) -> Self {
        let [epoll, kick, helper_kick] = fds;
        Self {
            state: Mutex::new(State::new(core)),
            rx: Mutex::new(RxPool::default()),
            epoll,
            kick,
            helper_kick,
            stats: Stats::default(),
            poll_budget: match config.poll {
                PollMode::Adaptive => PollBudget::while_they_pay(config.spin),
                PollMode::Spin => PollBudget::without_end(),
                PollMode::Sleep => PollBudget::never(),
            },
            congestion_control: config.congestion_control.clone(),
            any_address: config.core.addrs.is_empty(),
            rdma,
            rdma_polls: AtomicU64::new(0),
            rdma_sleeps: AtomicU64::new(0),
            rdma_nappers: Mutex::default(),
            rdma_napping: AtomicBool::new(false),
        }
    }

    /// Takes the lock. If another thread panicked while it held the lock, the core has a bug. Its
    /// state is then no worse than a peer could make it; going on is better than ending every
    /// thread of the application.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f` with the core and the time, then carries out the core's requests.
    pub(crate) fn with_core<R>(&self, f: impl FnOnce(&mut Node, Instant) -> R) -> R {
        self.with_scratch(|sc| {
            let mut st = self.lock();
            let now = st.at(clock::now());
            let result = f(&mut st.core, now);
            self.release_and_run(st, sc);
            result
        })
    }

    /// Tells whether a connection is left on which something is under way: bytes that the peer's
    /// TCP has not acknowledged, this side's FIN included, or that this node has not read. Without
    /// them, closing it loses nothing, whether the peer has closed its side or not.
    pub(crate) fn is_any_busy(&self) -> bool {
        let st = self.lock();
        if st.rdma_pairs.iter().any(|pairs| !pairs.is_empty()) {
            return true;
        }
        let links: Vec<_> =
            st.links.iter().flatten().filter_map(|slot| slot.link.clone()).collect();
        drop(st);
        links.iter().any(|link| crate::sys::has_unread_or_unacked(&link.fd))
    }

    /// Runs timers that are due. The caller is about to release the lock and do what the core
    /// requests.
    pub(crate) fn run_timers(&self, st: &mut State, sc: &mut Scratch) {
        let now = st.at(clock::now());
        let ns = now.as_nanos();
        if st.core.poll_timeout().is_some_and(|at| at <= now) {
            st.core.handle_timeout(now);
        }
        while st.refused.front().is_some_and(|(at, _)| *at <= ns)
            && let Some((_, fd)) = st.refused.pop_front()
        {
            sc.todo.forget.push(fd);
        }
        self.wake_listeners(st, ns);
        while let Some(at) = st.link_timers.iter().position(|(at, ..)| *at <= ns) {
            let (_, id, what) = st.link_timers.swap_remove(at);
            sc.todo.due.push((id, what));
        }
        sc.todo.end_cuts |= st.cuts.run_timer(ns);
        if st.tcp_acks && st.next_tcp_ack <= ns {
            st.next_tcp_ack = ns + st.tcp_ack_interval;
            let most = if st.senders > 0 { TCP_ACK_URGENT_NS } else { TCP_ACK_IDLE_NS };
            st.tcp_ack_interval = (st.tcp_ack_interval * 2).min(most);
            sc.ids.clear();
            st.core.links_wanting_tcp_ack(&mut sc.ids);
            st.tcp_acks = !sc.ids.is_empty();
            while let Some(id) = sc.ids.pop() {
                self.check_tcp_ack(st, id, now);
            }
        }
    }

    /// Tells the core how much TCP has acknowledged on a link. This one system call (0.15 us) is
    /// made under the lock: otherwise a write could be counted between the call and its report, and
    /// would be taken for acknowledged.
    pub(crate) fn check_tcp_ack(&self, st: &mut State, id: LinkId, now: Instant) {
        let Some(slot) = st.slot(id) else { return };
        let Some(link) = &slot.link else { return };
        self.stats.ioctls.inc();
        if let Ok(unacked) = crate::sys::unacked_bytes(&link.fd) {
            st.core.handle_tcp_acked(now, id, unacked);
        }
    }

    /// Moves the core's requests to the to-do list. `own` is a link for which the caller decides
    /// itself when to flush.
    pub(crate) fn collect(&self, st: &mut State, sc: &mut Scratch, own: Option<LinkId>) {
        while let Some(output) = st.core.poll_output() {
            self.collect_one(st, sc, own, output);
        }
        if st.lead.is_asleep() && !st.kicked && st.lead.sleeps_past(st.next_timeout()) {
            self.wake_sleeper(st, sc);
        }
    }

    pub(crate) fn collect_one(
        &self,
        st: &mut State,
        sc: &mut Scratch,
        own: Option<LinkId>,
        output: Output,
    ) {
        let todo = &mut sc.todo;
        match output {
            Output::Transmit { link } if own == Some(link) => {}
            Output::Transmit { link } => todo.flush.push(link),
            Output::Wake { socket, ready } => self.collect_wake(st, sc, socket, ready),
            Output::Connect { .. } if st.closing => {}
            Output::Connect { link, local, remote, port_mod8 } => {
                st.put_slot(link).connecting = true;
                todo.connect.push((link, local, remote, port_mod8));
            }
            Output::Close { link, how } => collect_close(st, sc, link, how),
            Output::Resume { link } => {
                if let Some(link) = st.slot(link).and_then(|slot| slot.link.clone()) {
                    link.set_paused(false);
                    todo.read.push(link);
                }
            }
            Output::CheckAlive { link } => {
                todo.probe.extend(st.slot(link).and_then(|slot| slot.link.clone()));
            }
            Output::RdmaConnect { link, local, remote, shape } => {
                let port = self.rdma.iter().find(|port| port.addrs().contains(&local.ip()));
                if let Some(port) = port.filter(|_| !st.closing) {
                    port.send_job(Job::Connect(link, local, remote, shape));
                }
            }
            Output::RdmaSend { link } => todo.post.push(link),
            Output::RdmaUsed { tag } => todo.used.push(tag),
            Output::RdmaRelease { tag } => todo.release.push(tag),
            Output::RdmaResume { link } => todo.resume.push(link),
            Output::RdmaClose { link } => {
                let port = st.rdma_pair(link).map_or(0, |pair| pair.port);
                if let Some(port) = self.rdma.get(port) {
                    port.send_job(Job::Close(link));
                }
            }
            Output::Event(event) => {
                #[cfg(feature = "tracing")]
                if let Some(left_out) = st.log_limits.admit(&event, st.now) {
                    todo.log.push((event.clone(), left_out));
                }
                if st.events.len() == EVENTS_KEPT {
                    st.events.pop_front();
                }
                st.events.push_back(event);
            }
            // The enum may grow; this driver cannot carry out a request it does not know.
            _ => {}
        }
    }

    fn collect_wake(&self, st: &mut State, sc: &mut Scratch, socket: SocketId, ready: Interest) {
        let Some(slot) = st.sockets.get_mut(socket.index()).filter(|s| s.id == Some(socket)) else {
            return;
        };
        let mut kick = false;
        let mut rest = None;
        for entry in &slot.entries {
            if !overlap(entry.interest, ready) {
                rest = Some(rest.map_or(entry.interest, |rest| entry.interest | rest));
            } else if entry.waiter.mark() {
                match entry.mode {
                    WaitMode::Parked => sc.todo.unpark.push(Arc::clone(&entry.waiter)),
                    WaitMode::Polling => kick |= !Arc::ptr_eq(&entry.waiter, &sc.me),
                }
            }
        }
        let mut at = 0;
        while let Some((interest, _)) = slot.wakers.get(at) {
            if overlap(*interest, ready) {
                sc.todo.wakers.push(slot.wakers.swap_remove(at).1);
            } else {
                rest = Some(rest.map_or(*interest, |rest| *interest | rest));
                at += 1;
            }
        }
        if let Some(fd) = &slot.event_fd {
            slot.may_send |= ready.contains(Interest::WRITE);
            if !core::mem::replace(&mut slot.signalled, true) {
                sc.todo.signal.push(Arc::clone(fd));
            }
        }
        if let Some(rest) = rest {
            let _ = st.core.register(socket, rest);
        }
        if kick && st.lead.is_asleep() && !st.kicked {
            self.wake_sleeper(st, sc);
        }
    }

    /// Wakes the thread that sleeps on the network to take over work that this thread leaves. No
    /// event of the system announces that work again.
    pub(crate) fn hand_over(&self, st: &mut State, sc: &mut Scratch) {
        if st.lead.is_asleep() && !st.kicked {
            self.wake_sleeper(st, sc);
        }
    }

    /// Wakes the thread that sleeps on the network.
    fn wake_sleeper(&self, st: &mut State, sc: &mut Scratch) {
        st.kicked = true;
        if st.lead.leader() == Leader::Helper {
            sc.todo.wake_helper = true;
        } else {
            sc.todo.kick = true;
        }
    }
}

fn collect_close(st: &mut State, sc: &mut Scratch, id: LinkId, how: CloseHow) {
    match how {
        CloseHow::Drain => sc.todo.drain.push(id),
        CloseHow::Cut => {
            // The core may close a link again while the rest of its input is read.
            if st.slot(id).is_some() && st.cuts.push(id) {
                sc.todo.cut.push(id);
            }
        }
        CloseHow::Reset | CloseHow::Fin => {
            let link = st.take_slot(id).and_then(|slot| slot.link);
            sc.todo.close.extend(link.map(|link| (link, how)));
        }
    }
}
