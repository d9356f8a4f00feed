//! The server: listens, and hands requests to a [`Handler`].

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use bowline_rtrs::bind::{Binding, withdraw};
use bowline_rtrs::server::{Server as Core, ServerEvent};
use bowline_rtrs::{Batch, Errno, Instant, MemRef, PathId, PortAttr, PortId, RegionId};
use bowline_verbs::{Access, Buffer, CmEvent, CmId, Mem, Qpn, catch_callback_panic};
use bowline_wire::rtrs::SessionName;

pub use bowline_rtrs::server::{
    AllowRule, CloseReason, OpId, PathInfo, PathState, PathStats, Request, ServerConfig,
    ServerCounters, ServerLimits, SessId, SessionInfo, Usr,
};

use crate::completions::CompletionBatch;
use crate::engine::{Engine, Inner, Member, Poll, TICK};
use crate::executor::{CoreState, Executor};
use crate::port::{PortSet, port_id};
use bowline_base::clock;

use crate::Error;

/// How long a thread sleeps before it checks whether deferred requests can begin.
const DEFERRED_CHECK: Duration = Duration::from_millis(1);

/// A session has come or gone [RS-27].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEv {
    /// The first path of a session is connected.
    Connected {
        /// The session.
        session: SessId,
        /// The name the client gave the session.
        name: SessionName,
    },
    /// The last path of a session is gone, and all its requests are answered.
    Disconnected {
        /// The session.
        session: SessId,
    },
}

/// A path that was closed because its client broke a rule, or was refused access [RT-64], [RT-67].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Offence {
    /// The client's address.
    pub remote: SocketAddr,
    /// Why the path was closed.
    pub reason: CloseReason,
}

/// A change of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathEv {
    /// The name of the path's session.
    pub session: SessionName,
    /// Local address.
    pub local: SocketAddr,
    /// The client's address.
    pub remote: SocketAddr,
    /// The change.
    pub change: PathChange,
}

impl PathEv {
    /// Makes one, for tests of programs that take such events.
    pub const fn new(
        session: SessionName,
        local: SocketAddr,
        remote: SocketAddr,
        change: PathChange,
    ) -> Self {
        Self { session, local, remote, change }
    }
}

/// The kind of a change in [`PathEv`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChange {
    /// The path is served.
    Connected,
    /// The path was served, and is closed.
    Closed(CloseReason),
}

/// Changes that the program has not taken yet.
#[derive(Debug, Default)]
struct PathEvents {
    kept: VecDeque<PathEv>,
    missed: u64,
}

impl PathEvents {
    const MAX: usize = 256;

    fn add(&mut self, session: SessionName, path: PathInfo, change: PathChange) {
        if self.kept.len() == Self::MAX {
            self.kept.pop_front();
            self.missed += 1;
        }
        let PathInfo { local, remote, .. } = path;
        self.kept.push_back(PathEv::new(session, local, remote, change));
    }
}

/// The layer above, which handles requests. Its functions are called without locks held, by a
/// thread of the engine, and must not block: heartbeats would be delayed too [RT-81]. A panic is
/// reported on standard error and ends there: the thread goes on, requests left in the list are
/// answered with `EIO`, and a new session is refused. Requests that the function had already taken
/// out of the list (a `drain` takes all of them) still belong to the layer above: they hold their
/// chunks, and closing the server waits for them.
pub trait Handler: Send + Sync {
    /// Requests have come; the function takes all of them out of the list. Each must be answered
    /// once with [`Server::respond`], now or later, by any thread [RT-46].
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>);

    /// A session has come or gone. An error for [`LinkEv::Connected`] closes its path.
    ///
    /// # Errors
    /// Any error refuses the session.
    fn link_ev(&self, server: &Server, event: LinkEv) -> Result<(), Errno>;

    /// All requests that came together have been handed over: storage requests can be submitted
    /// now.
    fn flushed(&self, server: &Server) {
        let _ = server;
    }
}

/// A server. It serves until it or its engine is closed.
pub struct Server {
    executor: Executor<State>,
    engine: Arc<Inner>,
    handler: Arc<dyn Handler>,
    listeners: Mutex<Vec<(PortId, CmId)>>,
    changed: Condvar,
    stop: AtomicBool,
    /// A request is deferred until another one has ended, or can begin because that one has [RS-9]:
    /// no completion announces it.
    deferred: AtomicBool,
    /// For each device: whether it is gone.
    gone: Vec<AtomicBool>,
    lost: AtomicUsize,
    /// How late its timers may run.
    slack: Duration,
}

impl core::fmt::Debug for Server {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Server").field("stop", &self.stop).finish_non_exhaustive()
    }
}

struct State {
    core: Core,
    closed: bool,
    offence: Option<Offence>,
    path_events: PathEvents,
    #[cfg(feature = "tracing")]
    log_limit: bowline_base::RateLimit,
    links: VecDeque<LinkEv>,
    /// A thread is delivering `links`.
    delivering: bool,
}

impl CoreState for State {
    type Core = Core;

    fn core(&mut self) -> &mut Core {
        &mut self.core
    }

    fn binding(ports: usize) -> Binding {
        Binding::of_server(ports)
    }
}

/// Buffers of a thread that takes completions, kept from one batch to the next.
struct PollState {
    port: usize,
    drive: CompletionBatch,
    ports: PortSet,
    batch: Batch,
    failed: Vec<(PortId, u32)>,
    requests: Vec<Request>,
}

impl Server {
    /// Listens at these addresses of the engine's devices; an unspecified address stands for all of
    /// them. Devices that are gone are left out.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` when no device has an address,
    /// [`ErrorKind::Unusable`](crate::ErrorKind::Unusable) when only one that is gone has it,
    /// `EADDRINUSE`, `EINVAL` for settings that make no sense; those of the devices.
    pub fn open(
        engine: &Engine,
        at: &[SocketAddr],
        config: ServerConfig,
        handler: Arc<dyn Handler>,
    ) -> Result<Arc<Self>, Error> {
        let engine = Arc::clone(&engine.inner);
        let ports = engine.ports(0)?;
        let attrs: Vec<PortAttr> = ports.iter().map(|port| port.attr()).collect();
        let slack = config.heartbeat.slack();
        let core = Core::new(config, &attrs)
            .map_err(|errno| Error::new("preparing a server of these settings", errno))?;
        let (links, delivering) = (VecDeque::new(), false);
        let unusable: Vec<bool> = ports.iter().map(|port| port.refusal().is_some()).collect();
        let (offence, path_events) = (None, PathEvents::default());
        let state = State {
            core,
            closed: false,
            offence,
            path_events,
            #[cfg(feature = "tracing")]
            log_limit: crate::log::LIMIT,
            links,
            delivering,
        };
        let server = Arc::new(Self {
            executor: Executor::new(state, ports, Arc::clone(&engine.stats)),
            engine,
            handler,
            listeners: Mutex::default(),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            deferred: AtomicBool::new(false),
            gone: unusable.iter().map(|_| AtomicBool::new(false)).collect(),
            lost: AtomicUsize::new(0),
            slack,
        });
        server.engine.add(Arc::clone(&server) as Arc<dyn Member>)?;
        for (index, _) in unusable.iter().enumerate().filter(|(_, unusable)| **unusable) {
            server.device_gone(port_id(index));
        }
        let started = server.start(at);
        if started.is_err() {
            server.close();
        }
        started.map(|()| server)
    }

    fn start(self: &Arc<Self>, at: &[SocketAddr]) -> Result<(), Error> {
        for port in (0..self.executor.ports.len()).filter(|port| !self.is_gone(*port)) {
            let server = Arc::clone(self);
            self.engine.spawn("bowline-rtrs-srv", move || server.run(port))?;
        }
        let server = Arc::clone(self);
        self.engine.spawn("bowline-rtrs-mem", move || server.enlarge_pages())?;
        at.iter().try_for_each(|at| self.listen(*at))
    }

    /// Runs the thread that moves the memory of sessions to large pages. The system may have to
    /// search for such pages for more than a second; no request, heartbeat or connection may wait
    /// for that.
    fn enlarge_pages(&self) {
        while !self.stop.load(SeqCst) {
            let filled = self.executor.lock().core.take_filled();
            match filled {
                Some(Mem { buffer, offset, len }) => buffer.enlarge_pages(offset, len),
                None => std::thread::sleep(TICK),
            }
        }
    }

    fn is_gone(&self, port: usize) -> bool {
        self.gone.get(port).is_none_or(|gone| gone.load(SeqCst))
    }

    /// Listens on every usable device that has the address.
    fn listen(&self, at: SocketAddr) -> Result<(), Error> {
        const WHAT: &str = "listening";
        let mut listening = false;
        let mut nowhere = Error::device(WHAT, bowline_verbs::Error::AddrNotAvailable);
        for (index, port) in self.executor.ports.iter().enumerate() {
            if self.is_gone(index) {
                if port.device().attr().addrs.contains(&at.ip()) {
                    nowhere = port.unusable_for(WHAT);
                }
                continue;
            }
            let name = port_id(index);
            // Connection requests wait until the binding knows the listener.
            let made = self.executor.with_devices(|devices| {
                let made = port.device().listen(at)?;
                devices.binding.listen(name, made);
                Ok(made)
            });
            match made {
                Ok(id) => {
                    self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push((name, id));
                    listening = true;
                }
                Err(bowline_verbs::Error::AddrNotAvailable) => {}
                Err(error) => return Err(Error::device(WHAT, error)),
            }
        }
        listening.then_some(()).ok_or(nowhere)
    }

    /// Answers requests. The number is 0 or a negative errno; the memory is where a READ's data is
    /// if not in the request's chunk. Responses given together go out together. The iterator is
    /// called with the server locked: it must not call the server.
    pub fn respond(&self, answers: &mut dyn Iterator<Item = (OpId, i32, Option<MemRef>)>) {
        let now = clock::now();
        let mut state = self.executor.lock();
        for (op, errno, from) in answers {
            state.core.respond(now, op, errno, from);
        }
        self.check_deferred(&state);
        drop(state);
        if self.executor.drain_unless_calling() {
            self.settle();
        }
    }

    /// Registers memory from which READs can be answered.
    ///
    /// # Errors
    /// `EINVAL` for memory of no length.
    pub fn add_region(&self, buffer: Arc<Buffer>) -> Result<RegionId, Error> {
        if buffer.is_empty() {
            return Err(Error::new("registering memory", Errno::EINVAL));
        }
        let region = self.executor.lock().core.add_region(buffer, Access::LOCAL_WRITE);
        self.executor.drain_all();
        Ok(region)
    }

    /// Ends the registration. Responses from this memory must have been received: one that would
    /// have to be sent again ends its path.
    pub fn drop_region(&self, region: RegionId) {
        self.executor.lock().core.drop_region(region);
        self.executor.drain();
    }

    /// The memory of a request: the data of a WRITE, or the place for a READ's result. `None` when
    /// its session is gone, which cannot happen before the request is answered.
    pub fn chunk(&self, request: &Request) -> Option<Mem> {
        let buffer = self.memory(request.session)?;
        let offset = usize::try_from(request.data.offset).ok()?;
        Some(Mem { buffer, offset, len: request.data.len as usize })
    }

    /// All chunks of a session; `Request::data` locates a request's data in it. The memory stays
    /// the same as long as the session exists. A handler that keeps it until
    /// [`LinkEv::Disconnected`] need not call [`chunk`](Self::chunk) for each request, nor count
    /// references. `None` when the session is gone.
    pub fn memory(&self, session: SessId) -> Option<Arc<Buffer>> {
        self.executor.lock().core.memory(session).map(Arc::clone)
    }

    /// The current state of all sessions and their paths.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.executor.lock().core.sessions().collect()
    }

    /// The current state of a path.
    pub fn path(&self, path: PathId) -> Option<PathInfo> {
        self.executor.lock().core.path(path)
    }

    /// The name of the engine's device with this id.
    pub fn device_name(&self, port: PortId) -> Option<String> {
        let device = self.engine.devices.get(usize::from(port.0))?;
        Some(device.attr().name)
    }

    /// The engine's devices.
    pub(crate) fn devices(&self) -> &[Arc<dyn bowline_verbs::Device>] {
        &self.engine.devices
    }

    /// Closes a path [RS-40].
    ///
    /// # Errors
    /// `ENOTCONN` when it is not there.
    pub fn disconnect_path(&self, path: PathId) -> Result<(), Error> {
        let mut state = self.executor.lock();
        if state.core.path(path).is_none() {
            return Err(Error::new("disconnecting a path", Errno::ENOTCONN));
        }
        state.core.disconnect_path(clock::now(), path);
        drop(state);
        self.executor.drain();
        self.settle();
        Ok(())
    }

    /// Sets the counts of a path's requests to 0 [RS-43].
    pub fn reset_rdma(&self, path: PathId) {
        self.executor.lock().core.reset_rdma(path);
    }

    /// Sets the counts of a path's work completions to 0 [RS-46].
    pub fn reset_completions(&self, path: PathId) {
        self.executor.lock().core.reset_completions(path);
    }

    /// The server's counters.
    pub fn counters(&self) -> ServerCounters {
        *self.executor.lock().core.counters()
    }

    /// The last offence; [`counters`](Self::counters) count all of them.
    pub fn last_offence(&self) -> Option<Offence> {
        self.executor.lock().offence
    }

    /// Takes the changes of paths since the last call, oldest first. At most 256 changes are kept;
    /// the number is that of older changes that were dropped.
    pub fn take_path_events(&self) -> (Vec<PathEv>, u64) {
        let PathEvents { kept, missed } = std::mem::take(&mut self.executor.lock().path_events);
        (kept.into(), missed)
    }

    /// The server's settings.
    pub fn config(&self) -> ServerConfig {
        self.executor.lock().core.config().clone()
    }

    /// Closes all sessions and waits until they are closed: every request must be answered first
    /// [RS-28].
    pub fn close(&self) {
        self.end(Duration::MAX);
        self.stop();
        self.engine.remove(self);
    }

    /// The thread that takes the completions of a device.
    fn run(&self, port: usize) {
        let mut poll_state = PollState {
            port,
            drive: CompletionBatch::default(),
            ports: PortSet::new(&self.executor.ports),
            batch: Batch::default(),
            failed: Vec::new(),
            requests: Vec::new(),
        };
        while !self.stop.load(SeqCst) && !self.is_gone(port) {
            let more = match self.poll_once(&mut poll_state) {
                Ok(0) if self.engine.config.poll == Poll::Spin => Ok(true),
                Ok(0) => {
                    self.executor.stats.waits.inc();
                    let limit = if self.deferred.load(SeqCst) { DEFERRED_CHECK } else { TICK };
                    self.executor.ports[port].wait(limit)
                }
                Ok(_) => Ok(true),
                Err(error) => Err(error),
            };
            if more.is_err() {
                self.device_gone(port_id(port));
                return;
            }
        }
    }

    /// Takes one batch of completions and handles it; returns their number.
    fn poll_once(&self, poll_state: &mut PollState) -> Result<usize, bowline_verbs::Error> {
        let stats = &self.executor.stats;
        let count = poll_state.drive.poll_requests(&self.executor.ports[poll_state.port], stats)?;
        if count == 0 && !self.deferred.load(SeqCst) {
            return Ok(0);
        }
        let now = clock::now();
        let mut state = self.executor.lock();
        self.deferred.store(false, SeqCst);
        let core = &mut state.core;
        core.handle_done(now, &poll_state.drive.dones);
        core.take_withdraws(&mut poll_state.batch);
        poll_state.failed.clear();
        // Invalidation changes a table and makes no system call. After it the client cannot change
        // the headers that are read now [RT-44].
        withdraw(&mut poll_state.ports, &mut poll_state.batch, &mut poll_state.failed);
        core.process(now, &poll_state.failed);
        core.take_requests(&mut poll_state.requests);
        let ends_first = core.ends_given_up();
        drop(state);
        if ends_first {
            // Run by whichever thread gets there: a thread of another device may have received the
            // notices too, and not have closed those paths yet.
            self.executor.drain_all();
        }
        if poll_state.requests.is_empty() {
            self.executor.drain();
        } else {
            stats.served.add(poll_state.requests.len() as u64);
            self.executor.run_callbacks(|| {
                catch_callback_panic(|| self.handler.rdma_ev(self, &mut poll_state.requests));
                catch_callback_panic(|| self.handler.flushed(self));
                // A request that the handler left in the list would hold its chunk for ever.
                let left = poll_state.requests.drain(..);
                self.respond(&mut left.map(|request| (request.op, Errno::EIO.neg(), None)));
            });
        }
        self.settle();
        Ok(count)
    }

    /// Makes a thread that polls completions check for deferred requests, since no completion
    /// brings these. The thread checks again soon, until they have begun; it cannot be woken.
    fn check_deferred(&self, state: &State) {
        if state.core.has_requests() || state.core.has_waiting() {
            self.deferred.store(true, SeqCst);
        }
    }

    /// Delivers the core's events in order, one thread at a time.
    fn settle(&self) {
        let mut state = self.executor.lock();
        self.check_deferred(&state);
        #[cfg(feature = "tracing")]
        let mut told = crate::log::Told::default();
        while let Some(event) = state.core.poll_event() {
            match event {
                ServerEvent::Up { session, name, first: true, .. } => {
                    state.links.push_back(LinkEv::Connected { session, name });
                }
                ServerEvent::Down { session } => {
                    state.links.push_back(LinkEv::Disconnected { session });
                }
                ServerEvent::PathConnected { name, path } => {
                    #[cfg(feature = "tracing")]
                    told.path(name.clone(), &path, PathChange::Connected);
                    state.path_events.add(name, path, PathChange::Connected);
                }
                ServerEvent::PathClosed { name, path, reason, .. } => {
                    if is_offence(reason) {
                        state.offence = Some(Offence { remote: path.remote, reason });
                        #[cfg(feature = "tracing")]
                        told.offence(Offence { remote: path.remote, reason }, &mut state.log_limit);
                    }
                    if let Some(name) = name {
                        #[cfg(feature = "tracing")]
                        told.path(name.clone(), &path, PathChange::Closed(reason));
                        state.path_events.add(name, path, PathChange::Closed(reason));
                    }
                }
                ServerEvent::Closed => {
                    state.closed = true;
                    self.changed.notify_all();
                }
                _ => {}
            }
        }
        #[cfg(feature = "tracing")]
        if !told.is_empty() {
            drop(state);
            told.tell();
            state = self.executor.lock();
        }
        if state.delivering {
            return;
        }
        state.delivering = true;
        while let Some(event) = state.links.pop_front() {
            drop(state);
            let up = match &event {
                LinkEv::Connected { session, .. } => Some(*session),
                LinkEv::Disconnected { .. } => None,
            };
            let answer = catch_callback_panic(|| self.handler.link_ev(self, event));
            let accepted = answer.is_some_and(|answer| answer.is_ok());
            if let Some(session) = up {
                self.executor.lock().core.answer_link(clock::now(), session, accepted);
                self.executor.drain();
            }
            state = self.executor.lock();
        }
        state.delivering = false;
    }
}

const fn is_offence(reason: CloseReason) -> bool {
    reason.is_violation() || reason.is_refusal()
}

impl Member for Server {
    fn cm(&self, port: PortId, event: &CmEvent) -> bool {
        let mine = self.executor.cm(port, event);
        if mine {
            self.settle();
        }
        mine
    }

    fn qp_failed(&self, port: PortId, qpn: Qpn) {
        self.executor.qp_failed(port, qpn);
        self.settle();
    }

    fn tick(&self, now: Instant) -> Option<Instant> {
        let next = self.executor.tick(now);
        self.settle();
        next
    }

    fn slack(&self) -> Duration {
        self.slack
    }

    /// The paths on the device have ended. After the last device is gone there is no path left to
    /// wait for.
    fn device_gone(&self, port: PortId) {
        let Some(gone) = self.gone.get(usize::from(port.0)) else { return };
        if gone.swap(true, SeqCst) {
            return;
        }
        self.executor.device_gone(port);
        self.settle();
        if self.lost.fetch_add(1, SeqCst) + 1 == self.gone.len() {
            self.executor.lock().closed = true;
            self.changed.notify_all();
        }
    }

    fn end(&self, timeout: Duration) {
        let listeners =
            std::mem::take(&mut *self.listeners.lock().unwrap_or_else(PoisonError::into_inner));
        for (port, id) in listeners {
            // Connection requests waiting at the listener are refused.
            let _ = self.executor.ports[usize::from(port.0)].device().destroy_id(id);
            self.executor.forget_listener(port, id);
        }
        self.executor.lock().core.close(clock::now());
        self.executor.drain();
        self.settle();
        let state = self.executor.lock();
        let wait = self.changed.wait_timeout_while(state, timeout, |state| !state.closed);
        drop(wait);
    }

    fn stop(&self) {
        self.stop.store(true, SeqCst);
    }
}
