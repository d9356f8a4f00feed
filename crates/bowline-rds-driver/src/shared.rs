//! What all threads of a node share, and the one lock around the core.

use core::sync::atomic::AtomicI32;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bowline_base::clock;
use bowline_rds::{CloseHow, Event, Instant, Interest, LinkId, Node, Output, RxPool, SocketId};

use crate::config::{DriverConfig, PollMode};
use crate::cut::Cuts;
use crate::link::{Link, LinkSlot};
use crate::listen::Listener;
use crate::stats::Stats;
use crate::todo::Scratch;
use crate::waiters::{Entry, How, SocketSlot, Waiter};

/// Events kept for [`Driver::events`](crate::Driver::events).
const EVENTS_KEPT: usize = 256;
/// Reads in a row from one link after which the one before it is not looked at by itself any more.
const HOT_STREAK: u32 = 64;
/// Time that a probe of a silent peer is given.
const CHECK_NS: u64 = 1_200_000_000;
/// Interval of looking how much TCP has acknowledged, towards peers that acknowledge only so.
const TCP_ACK_IDLE_NS: u64 = 10_000_000;
/// The same while somebody waits for room in a send queue, at most...
const TCP_ACK_URGENT_NS: u64 = 500_000;
/// ... and when the wait has just begun; each look doubles it.
const TCP_ACK_FIRST_NS: u64 = 5_000;

/// Who watches the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Nobody,
    Helper,
    App,
}

/// Why to come back to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Later {
    /// It has had its time to end.
    GiveUp,
    /// To see what came of a probe of its peer.
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
    pub(crate) poll: PollMode,
    pub(crate) spin_ns: u64,
    /// Whether looking before sleeping has paid lately; below zero it has not.
    pub(crate) spin_score: AtomicI32,
    pub(crate) congestion_control: Option<String>,
    pub(crate) any_address: bool,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) core: Node,
    pub(crate) now: Instant,
    pub(crate) links: Vec<Option<LinkSlot>>,
    pub(crate) next_token: u32,
    pub(crate) sockets: Vec<SocketSlot>,
    pub(crate) listeners: Vec<Arc<Listener>>,
    pub(crate) role: Role,
    /// Changes with every holder of the role.
    pub(crate) role_epoch: u64,
    pub(crate) role_since: Instant,
    /// When the holder of the role, asleep now, will look again by itself.
    pub(crate) sleeping: Option<u64>,
    /// Whether the sleeper has been told to look.
    pub(crate) kicked: bool,
    /// Threads that are parked, longest first.
    pub(crate) parked: VecDeque<Arc<Waiter>>,
    /// Sockets that rely on the background thread.
    pub(crate) watched: usize,
    /// Waiting callers that need room in a send queue.
    pub(crate) senders: usize,
    /// Links with unflushed data.
    pub(crate) dirty: Vec<LinkId>,
    /// The background thread looks after unflushed data.
    pub(crate) flush_armed: bool,
    pub(crate) helper_tick_ns: u64,
    /// Links with input that nobody will announce again.
    pub(crate) unread: Vec<Arc<Link>>,
    /// Links that delivered last.
    pub(crate) hot: [Option<Arc<Link>>; 2],
    /// Reads in a row that the first of them brought.
    hot_streak: u32,
    /// Links to come back to, and when.
    pub(crate) later: Vec<(u64, LinkId, Later)>,
    /// Links that end as soon as all is read that TCP has acknowledged.
    pub(crate) cuts: Cuts,
    /// Refused connections, to be closed at their time; oldest first.
    pub(crate) held: VecDeque<(u64, OwnedFd)>,
    /// Some link waits for acknowledgements that only TCP gives.
    pub(crate) tcp_acks: bool,
    pub(crate) next_tcp_ack: u64,
    /// Time between the look to come and the one after it.
    pub(crate) tcp_ack_step: u64,
    pub(crate) last_miss: u64,
    /// Bytes of the last read of the link that delivered last.
    pub(crate) last_read: usize,
    /// Reads that brought something.
    pub(crate) deliveries: u64,
    /// Waits begun while looking had not paid.
    pub(crate) unpaid_waits: u64,
    /// When a refused sender looked last.
    pub(crate) last_glance: u64,
    /// Calls that moved a message; an application that makes them polls by itself when it has to.
    pub(crate) calls: u64,
    pub(crate) events: VecDeque<Event>,
    pub(crate) bytes_copied: (u64, u64),
    /// The node makes no new connections.
    pub(crate) closing: bool,
    /// The node is gone; every waiter leaves.
    pub(crate) stop: bool,
}

/// Tells whether two interests have anything in common.
pub(crate) fn overlap(a: Interest, b: Interest) -> bool {
    [Interest::READ, Interest::WRITE].into_iter().any(|i| a.contains(i) && b.contains(i))
}

impl State {
    pub(crate) fn new(core: Node) -> Self {
        Self {
            core,
            now: Instant::from_nanos(0),
            links: Vec::new(),
            next_token: 0,
            sockets: Vec::new(),
            listeners: Vec::new(),
            role: Role::Nobody,
            role_epoch: 0,
            role_since: Instant::from_nanos(0),
            sleeping: None,
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
            later: Vec::new(),
            cuts: Cuts::default(),
            held: VecDeque::new(),
            tcp_acks: false,
            next_tcp_ack: 0,
            tcp_ack_step: TCP_ACK_IDLE_NS,
            last_miss: 0,
            last_read: 0,
            deliveries: 0,
            unpaid_waits: 0,
            last_glance: 0,
            calls: 0,
            events: VecDeque::new(),
            bytes_copied: (0, 0),
            closing: false,
            stop: false,
        }
    }

    /// Notes the time, which never goes back.
    #[inline]
    pub(crate) fn at(&mut self, now: Instant) -> Instant {
        self.now = self.now.max(now);
        self.now
    }

    /// Notes that a link delivered. The one before it is looked at as well, but not for ever: each
    /// look costs what a look at the other would.
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
        self.later.retain(|(_, link, _)| *link != id);
        self.cuts.remove(id);
        slot
    }

    /// Notes that the probe of a link's peer is to be looked after.
    pub(crate) fn check_later(&mut self, id: LinkId, now: Instant) {
        let known =
            |(_, link, what): &(u64, LinkId, Later)| *link == id && *what == Later::CheckAgain;
        if !self.later.iter().any(known) {
            self.later.push((now.as_nanos() + CHECK_NS, id, Later::CheckAgain));
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

    /// Who is interested in a socket, if anybody ever was and it is still open.
    pub(crate) fn find_socket(&mut self, id: SocketId) -> Option<&mut SocketSlot> {
        self.sockets.get_mut(id.index()).filter(|slot| slot.id == Some(id))
    }

    /// The same, made if need be. Only for a socket that the core has just said is open.
    pub(crate) fn socket_slot(&mut self, id: SocketId) -> &mut SocketSlot {
        let index = id.index();
        if self.sockets.len() <= index {
            self.sockets.resize_with(index + 1, SocketSlot::default);
        }
        let slot = &mut self.sockets[index];
        if slot.id != Some(id) {
            // The number was used by a socket that is closed; whoever waited has been told.
            *slot = SocketSlot { id: Some(id), ..SocketSlot::default() };
        }
        slot
    }

    /// Puts a waiter on a socket's list and asks the core to tell of changes. The caller has just
    /// found nothing, under the same lock, so no change can be missed.
    pub(crate) fn enlist(
        &mut self,
        id: SocketId,
        interest: Interest,
        waiter: &Arc<Waiter>,
        how: How,
    ) {
        waiter.arm();
        let entry = Entry { waiter: Arc::clone(waiter), interest, how };
        self.socket_slot(id).entries.push(entry);
        if how == How::Parked {
            self.parked.push_back(Arc::clone(waiter));
        }
        if interest.contains(Interest::WRITE) {
            self.senders += 1;
        }
        // A socket that is closed meanwhile has no news; the caller's next look says so.
        let _ = self.core.register(id, interest);
    }

    /// Takes a waiter off the lists again.
    pub(crate) fn delist(&mut self, id: SocketId, interest: Interest, waiter: &Arc<Waiter>) {
        if interest.contains(Interest::WRITE) {
            self.senders -= 1;
        }
        if let Some(slot) = self.find_socket(id) {
            slot.entries.retain(|entry| !Arc::ptr_eq(&entry.waiter, waiter));
        }
        self.parked.retain(|parked| !Arc::ptr_eq(parked, waiter));
    }

    /// Has it looked at soon, and often at first, how much TCP has acknowledged: somebody waits for
    /// room in a send queue.
    pub(crate) fn hurry_tcp_acks(&mut self) {
        if self.tcp_acks {
            self.tcp_ack_step = TCP_ACK_FIRST_NS;
            self.next_tcp_ack = self.next_tcp_ack.min(self.now.as_nanos());
        }
    }

    /// When something has to be done although nothing arrives.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        let core = self.core.poll_timeout().map(Instant::as_nanos);
        let later = self.later.iter().map(|(at, ..)| *at).min();
        let held = self.held.front().map(|(at, _)| *at);
        let ack = self.tcp_acks.then_some(self.next_tcp_ack);
        let cuts = self.cuts.next_look();
        [core, later, cuts, held, ack].into_iter().flatten().min()
    }
}

impl Shared {
    pub(crate) fn new(config: &DriverConfig, core: Node, fds: [OwnedFd; 3]) -> Self {
        let [epoll, kick, helper_kick] = fds;
        Self {
            state: Mutex::new(State::new(core)),
            rx: Mutex::new(RxPool::default()),
            epoll,
            kick,
            helper_kick,
            stats: Stats::default(),
            poll: on_these_processors(config.poll),
            spin_ns: u64::try_from(config.spin.as_nanos()).unwrap_or(u64::MAX),
            spin_score: AtomicI32::new(0),
            congestion_control: config.congestion_control.clone(),
            any_address: config.core.addrs.is_empty(),
        }
    }

    /// Takes the lock. A panic of another thread under it is a bug in the core, whose state is then
    /// not worse than what a peer could bring about: going on is better than taking every thread
    /// of the application down.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what time asks for; the caller is about to settle.
    pub(crate) fn run_timers(&self, st: &mut State, sc: &mut Scratch) {
        let now = st.at(clock::now());
        let ns = now.as_nanos();
        if st.core.poll_timeout().is_some_and(|at| at <= now) {
            st.core.handle_timeout(now);
        }
        while st.held.front().is_some_and(|(at, _)| *at <= ns)
            && let Some((_, fd)) = st.held.pop_front()
        {
            sc.todo.forget.push(fd);
        }
        while let Some(at) = st.later.iter().position(|(at, ..)| *at <= ns) {
            let (_, id, what) = st.later.swap_remove(at);
            sc.todo.due.push((id, what));
        }
        sc.todo.end_cuts |= st.cuts.run_timer(ns);
        if st.tcp_acks && st.next_tcp_ack <= ns {
            st.next_tcp_ack = ns + st.tcp_ack_step;
            let most = if st.senders > 0 { TCP_ACK_URGENT_NS } else { TCP_ACK_IDLE_NS };
            st.tcp_ack_step = (st.tcp_ack_step * 2).min(most);
            sc.ids.clear();
            st.core.links_wanting_tcp_ack(&mut sc.ids);
            st.tcp_acks = !sc.ids.is_empty();
            while let Some(id) = sc.ids.pop() {
                self.check_tcp_ack(st, id, now);
            }
        }
    }

    /// Tells the core how much TCP has acknowledged on a link. This one system call (0.15 us) is
    /// made under the lock: a write counted between the look and its report would be taken for
    /// acknowledged.
    pub(crate) fn check_tcp_ack(&self, st: &mut State, id: LinkId, now: Instant) {
        let Some(slot) = st.slot(id) else { return };
        let Some(link) = &slot.link else { return };
        self.stats.ioctls.inc();
        if let Ok(unacked) = crate::sys::unacked_bytes(&link.fd) {
            st.core.handle_tcp_acked(now, id, unacked);
        }
    }

    /// Moves what the core wants done to the to-do list. `own` is a link the caller flushes, or
    /// leaves unflushed, by its own rule.
    pub(crate) fn collect(&self, st: &mut State, sc: &mut Scratch, own: Option<LinkId>) {
        while let Some(output) = st.core.poll_output() {
            self.collect_one(st, sc, own, output);
        }
        if let Some(until) = st.sleeping
            && !st.kicked
            && st.next_timeout().is_some_and(|at| at < until)
        {
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
            Output::Event(event) => {
                if st.events.len() == EVENTS_KEPT {
                    st.events.pop_front();
                }
                st.events.push_back(event);
            }
            // The list may grow; what this driver does not know it cannot do.
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
                match entry.how {
                    How::Parked => sc.todo.unpark.push(Arc::clone(&entry.waiter)),
                    How::Polling => kick |= !Arc::ptr_eq(&entry.waiter, &sc.me),
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
        if let Some(fd) = &slot.event_fd
            && !slot.signalled
        {
            slot.signalled = true;
            sc.todo.signal.push(Arc::clone(fd));
        }
        if let Some(rest) = rest {
            let _ = st.core.register(socket, rest);
        }
        if kick && st.sleeping.is_some() && !st.kicked {
            self.wake_sleeper(st, sc);
        }
    }

    /// Has the thread that sleeps on the network take up what this thread leaves over: nothing will
    /// announce it again.
    pub(crate) fn hand_over(&self, st: &mut State, sc: &mut Scratch) {
        if st.sleeping.is_some() && !st.kicked {
            self.wake_sleeper(st, sc);
        }
    }

    /// Makes the thread that sleeps on the network look again.
    fn wake_sleeper(&self, st: &mut State, sc: &mut Scratch) {
        st.kicked = true;
        if st.role == Role::Helper {
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
            // What is read at the end of a link may have the core close it that is gone already.
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

/// On a machine with one processor, who looks keeps from running whoever it waits for. One
/// processor for this process says nothing: its peers may have others.
fn on_these_processors(poll: PollMode) -> PollMode {
    let alone = match std::fs::read_to_string("/sys/devices/system/cpu/online") {
        Ok(list) => list.trim().parse::<u32>().is_ok(), // else a range or a list
        Err(_) => std::thread::available_parallelism().is_ok_and(|n| n.get() == 1),
    };
    if poll == PollMode::Adaptive && alone { PollMode::Sleep } else { poll }
}
