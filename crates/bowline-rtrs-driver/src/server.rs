//! The server: listens, and hands requests to a [`Handler`].

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use bowline_rtrs::bind::{Binding, withdraw};
use bowline_rtrs::server::{Server as Core, ServerEvent};
use bowline_rtrs::{Batch, Errno, Instant, MemRef, PathId, PortAttr, PortId, RegionId};
use bowline_verbs::{Access, Buffer, CmEvent, CmId, Mem, Qpn, contain};
use bowline_wire::rtrs::SessionName;

pub use bowline_rtrs::server::{
    AllowRule, CloseReason, OpId, PathInfo, PathState, PathStats, Request, ServerConfig,
    ServerCounters, ServerLimits, SessId, SessionInfo, Usr,
};

use crate::drive::Drive;
use crate::engine::{Engine, Inner, Poll, Station, TICK};
use crate::hub::{Hub, Side};
use crate::port::{PortSet, port_id};
use bowline_base::clock;

use crate::Error;

/// A thread that sleeps while requests wait for the end of others looks so often whether they can
/// begin.
const LATE: Duration = Duration::from_millis(1);

/// What happened to a session [RS-27].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEv {
    /// Its first path is there.
    Connected {
        /// The session.
        session: SessId,
        /// What the client calls it.
        name: SessionName,
    },
    /// Its last path is gone, and all its requests are answered.
    Disconnected {
        /// The session.
        session: SessId,
    },
}

/// A path that was closed because its client broke a rule, or is not one that may come [RT-64],
/// [RT-67].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offence {
    /// The client's address.
    pub remote: SocketAddr,
    /// What it did.
    pub reason: CloseReason,
}

/// What has become of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathNews {
    /// What its session is called.
    pub session: SessionName,
    /// Own address.
    pub local: SocketAddr,
    /// The client's.
    pub remote: SocketAddr,
    /// What.
    pub change: PathChange,
}

/// See [`PathNews`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChange {
    /// It is served.
    Connected,
    /// It was served, and is closed.
    Closed(CloseReason),
}

/// Changes that nobody has asked for yet.
#[derive(Debug, Default)]
struct News {
    kept: VecDeque<PathNews>,
    missed: u64,
}

impl News {
    const MOST: usize = 256;

    fn add(&mut self, session: SessionName, path: PathInfo, change: PathChange) {
        if self.kept.len() == Self::MOST {
            self.kept.pop_front();
            self.missed += 1;
        }
        let PathInfo { local, remote, .. } = path;
        self.kept.push_back(PathNews { session, local, remote, change });
    }
}

/// The layer above: what it does with requests. Its functions are called without locks held, by a
/// thread of the engine, and must not block: heartbeats wait for them too [RT-81]. A panic of one
/// is reported on standard error and ends there: the thread goes on, what was left in the list is
/// answered with `EIO`, and a session that has come is refused. What had been taken out of the list
/// by then, a `drain` takes all of it, is the layer's still: it holds its chunks, and the server's
/// end waits for it.
pub trait Handler: Send + Sync {
    /// Requests have come; it takes all of them out of the list. Each is to be answered once with
    /// [`Server::respond`], now or later, by any thread [RT-46].
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>);

    /// A session has come or gone. An error to the first closes its path.
    ///
    /// # Errors
    /// Whatever the layer above has against the session.
    fn link_ev(&self, server: &Server, event: LinkEv) -> Result<(), Errno>;

    /// Everything that came together has been handed over: requests to storage may be begun now.
    fn flushed(&self, server: &Server) {
        let _ = server;
    }
}

/// A server. It serves until it is closed, or its engine is.
pub struct Server {
    hub: Hub<State>,
    engine: Arc<Inner>,
    handler: Arc<dyn Handler>,
    listeners: Mutex<Vec<(PortId, CmId)>>,
    changed: Condvar,
    stop: AtomicBool,
    /// A request waits for another one's end, or can begin now that this has come [RS-9]: no
    /// completion tells of it.
    late: AtomicBool,
    /// Devices that are gone, and how many have nothing left.
    gone: Vec<AtomicBool>,
    lost: AtomicUsize,
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
    news: News,
    links: VecDeque<LinkEv>,
    /// A thread hands out `links`.
    linking: bool,
}

impl Side for State {
    type Core = Core;

    fn core(&mut self) -> &mut Core {
        &mut self.core
    }

    fn binding(ports: usize) -> Binding {
        Binding::of_server(ports)
    }
}

/// What a thread that takes completions uses again.
struct Turn {
    port: usize,
    drive: Drive,
    ports: PortSet,
    batch: Batch,
    failed: Vec<(PortId, u32)>,
    requests: Vec<Request>,
}

impl Server {
    /// Listens at some addresses of the engine's devices; an unspecified one stands for all of
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
        let core = Core::new(config, &attrs)
            .map_err(|errno| Error::new("preparing a server of these settings", errno))?;
        let (links, linking) = (VecDeque::new(), false);
        let unusable: Vec<bool> = ports.iter().map(|port| port.refusal().is_some()).collect();
        let (offence, news) = (None, News::default());
        let state = State { core, closed: false, offence, news, links, linking };
        let server = Arc::new(Self {
            hub: Hub::new(state, ports, Arc::clone(&engine.stats)),
            engine,
            handler,
            listeners: Mutex::default(),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            late: AtomicBool::new(false),
            gone: unusable.iter().map(|_| AtomicBool::new(false)).collect(),
            lost: AtomicUsize::new(0),
        });
        server.engine.add(Arc::clone(&server) as Arc<dyn Station>)?;
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
        for port in (0..self.hub.ports.len()).filter(|port| !self.is_gone(*port)) {
            let server = Arc::clone(self);
            self.engine.spawn("bowline-rtrs-srv", move || server.run(port))?;
        }
        let server = Arc::clone(self);
        self.engine.spawn("bowline-rtrs-mem", move || server.enlarge_pages())?;
        at.iter().try_for_each(|at| self.listen(*at))
    }

    /// The thread that has the memory of sessions consist of large pages: the system may have to
    /// look for them for a second and more, and no request, heartbeat or connection is to wait for
    /// that.
    fn enlarge_pages(&self) {
        while !self.stop.load(SeqCst) {
            let filled = self.hub.lock().core.take_filled();
            match filled {
                Some(Mem { buffer, offset, len }) => buffer.enlarge_pages(offset, len),
                None => std::thread::sleep(TICK),
            }
        }
    }

    fn is_gone(&self, port: usize) -> bool {
        self.gone.get(port).is_none_or(|gone| gone.load(SeqCst))
    }

    /// Listens on every device that has the address and is not gone.
    fn listen(&self, at: SocketAddr) -> Result<(), Error> {
        const WHAT: &str = "listening";
        let mut listening = false;
        let mut nowhere = Error::device(WHAT, bowline_verbs::Error::AddrNotAvailable);
        for (index, port) in self.hub.ports.iter().enumerate() {
            if self.is_gone(index) {
                if port.device().attr().addrs.contains(&at.ip()) {
                    nowhere = port.unusable_for(WHAT);
                }
                continue;
            }
            let name = port_id(index);
            // Requests wait until the binding knows the listener.
            let made = self.hub.with_exec(|exec| {
                let made = port.device().listen(at)?;
                exec.binding.listen(name, made);
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

    /// Answers requests: 0 or a negative errno, and where a READ's data is when it is not in the
    /// request's own memory. What is answered together goes out together. The iterator is asked
    /// with the server locked: it must not call it.
    pub fn respond(&self, answers: &mut dyn Iterator<Item = (OpId, i32, Option<MemRef>)>) {
        let now = clock::now();
        let mut state = self.hub.lock();
        for (op, errno, from) in answers {
            state.core.respond(now, op, errno, from);
        }
        self.look_for_late(&state);
        drop(state);
        if self.hub.ring() {
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
        let region = self.hub.lock().core.add_region(buffer, Access::LOCAL_WRITE);
        self.hub.drain_all();
        Ok(region)
    }

    /// Ends the registration. Answers from there must have been received: one that has to be sent
    /// again ends its path.
    pub fn drop_region(&self, region: RegionId) {
        self.hub.lock().core.drop_region(region);
        self.hub.drain();
    }

    /// The memory of a request: what a WRITE has brought, or where a READ's result may be put.
    /// `None` when its session is gone, which it is not before the request is answered.
    pub fn chunk(&self, request: &Request) -> Option<Mem> {
        let buffer = self.memory(request.session)?;
        let offset = usize::try_from(request.data.offset).ok()?;
        Some(Mem { buffer, offset, len: request.data.len as usize })
    }

    /// All chunks of a session, in which `Request::data` says where its data are: the same as long
    /// as the session is there. Handlers that keep it until [`LinkEv::Disconnected`] need not ask
    /// for each request's [`chunk`](Self::chunk), nor count who uses it. `None` when the session is
    /// gone.
    pub fn memory(&self, session: SessId) -> Option<Arc<Buffer>> {
        self.hub.lock().core.memory(session).map(Arc::clone)
    }

    /// What sessions and their paths are like now.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.hub.lock().core.sessions().collect()
    }

    /// What a path is like now.
    pub fn path(&self, path: PathId) -> Option<PathInfo> {
        self.hub.lock().core.path(path)
    }

    /// The engine's device of a path.
    pub fn device_name(&self, port: PortId) -> Option<String> {
        let device = self.engine.devices.get(usize::from(port.0))?;
        Some(device.attr().name)
    }

    /// Closes a path [RS-40].
    ///
    /// # Errors
    /// `ENOTCONN` when it is not there.
    pub fn disconnect_path(&self, path: PathId) -> Result<(), Error> {
        let mut state = self.hub.lock();
        if state.core.path(path).is_none() {
            return Err(Error::new("disconnecting a path", Errno::ENOTCONN));
        }
        state.core.disconnect_path(clock::now(), path);
        drop(state);
        self.hub.drain();
        self.settle();
        Ok(())
    }

    /// Sets the counts of a path's requests to 0 [RS-43].
    pub fn reset_rdma(&self, path: PathId) {
        self.hub.lock().core.reset_rdma(path);
    }

    /// Sets the counts of a path's work completions to 0 [RS-46].
    pub fn reset_completions(&self, path: PathId) {
        self.hub.lock().core.reset_completions(path);
    }

    /// Counts of the server.
    pub fn counters(&self) -> ServerCounters {
        *self.hub.lock().core.counters()
    }

    /// The last offence; [`counters`](Self::counters) tell how many there were.
    pub fn last_offence(&self) -> Option<Offence> {
        self.hub.lock().offence
    }

    /// What has become of paths since the last time, oldest first. No more than 256 changes are
    /// kept; how many more there were comes with them.
    pub fn path_news(&self) -> (Vec<PathNews>, u64) {
        let News { kept, missed } = std::mem::take(&mut self.hub.lock().news);
        (kept.into(), missed)
    }

    /// The settings.
    pub fn config(&self) -> ServerConfig {
        self.hub.lock().core.config().clone()
    }

    /// Closes all sessions and waits until they are closed: every request must be answered [RS-28].
    pub fn close(&self) {
        self.end(Duration::MAX);
        self.stop();
        self.engine.remove(self);
    }

    /// The thread that takes the completions of a device.
    fn run(&self, port: usize) {
        let mut turn = Turn {
            port,
            drive: Drive::default(),
            ports: PortSet::new(&self.hub.ports),
            batch: Batch::default(),
            failed: Vec::new(),
            requests: Vec::new(),
        };
        while !self.stop.load(SeqCst) && !self.is_gone(port) {
            let more = match self.turn(&mut turn) {
                Ok(0) if self.engine.config.poll == Poll::Spin => Ok(true),
                Ok(0) => {
                    self.hub.stats.waits.inc();
                    let limit = if self.late.load(SeqCst) { LATE } else { TICK };
                    self.hub.ports[port].wait(limit)
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

    /// Handles what has completed; returns how much.
    fn turn(&self, turn: &mut Turn) -> Result<usize, bowline_verbs::Error> {
        let stats = &self.hub.stats;
        let count = turn.drive.poll_requests(&self.hub.ports[turn.port], stats)?;
        if count == 0 && !self.late.load(SeqCst) {
            return Ok(0);
        }
        let now = clock::now();
        let mut state = self.hub.lock();
        self.late.store(false, SeqCst);
        let core = &mut state.core;
        core.handle_done(now, &turn.drive.dones);
        core.take_withdraws(&mut turn.batch);
        turn.failed.clear();
        // A change of a table, not a system call; the client cannot change after it what is read
        // now [RT-44].
        withdraw(&mut turn.ports, &mut turn.batch, &mut turn.failed);
        core.process(now, &turn.failed);
        core.take_requests(&mut turn.requests);
        let ends_first = core.ends_given_up();
        drop(state);
        if ends_first {
            // By whichever thread: also that of another device may have told of them, and not
            // closed them yet.
            self.hub.drain_all();
        }
        if turn.requests.is_empty() {
            self.hub.drain();
        } else {
            stats.served.add(turn.requests.len() as u64);
            self.hub.call(|| {
                contain(|| self.handler.rdma_ev(self, &mut turn.requests));
                contain(|| self.handler.flushed(self));
                // Whatever it has forgotten would hold its chunk for ever.
                let left = turn.requests.drain(..);
                self.respond(&mut left.map(|request| (request.op, Errno::EIO.neg(), None)));
            });
        }
        self.settle();
        Ok(count)
    }

    /// Requests that no completion brings are taken by a thread that looks for completions. Whoever
    /// has put them off looks again soon, until they have begun; it cannot be woken.
    fn look_for_late(&self, state: &State) {
        if state.core.has_requests() || state.core.has_waiting() {
            self.late.store(true, SeqCst);
        }
    }

    /// Hands on what the core has to tell, in order, by one thread at a time.
    fn settle(&self) {
        let mut state = self.hub.lock();
        self.look_for_late(&state);
        while let Some(event) = state.core.poll_event() {
            match event {
                ServerEvent::Up { session, name, first: true, .. } => {
                    state.links.push_back(LinkEv::Connected { session, name });
                }
                ServerEvent::Down { session } => {
                    state.links.push_back(LinkEv::Disconnected { session });
                }
                ServerEvent::PathConnected { name, path } => {
                    state.news.add(name, path, PathChange::Connected);
                }
                ServerEvent::PathClosed { name, path, reason, .. } => {
                    if is_offence(reason) {
                        state.offence = Some(Offence { remote: path.remote, reason });
                    }
                    if let Some(name) = name {
                        state.news.add(name, path, PathChange::Closed(reason));
                    }
                }
                ServerEvent::Closed => {
                    state.closed = true;
                    self.changed.notify_all();
                }
                _ => {}
            }
        }
        if state.linking {
            return;
        }
        state.linking = true;
        while let Some(event) = state.links.pop_front() {
            drop(state);
            let up = match &event {
                LinkEv::Connected { session, .. } => Some(*session),
                LinkEv::Disconnected { .. } => None,
            };
            let answer = contain(|| self.handler.link_ev(self, event));
            let accepted = answer.is_some_and(|answer| answer.is_ok());
            if let Some(session) = up {
                self.hub.lock().core.answer_link(clock::now(), session, accepted);
                self.hub.drain();
            }
            state = self.hub.lock();
        }
        state.linking = false;
    }
}

const fn is_offence(reason: CloseReason) -> bool {
    reason.is_violation() || reason.is_refusal()
}

impl Station for Server {
    fn cm(&self, port: PortId, event: &CmEvent) -> bool {
        let mine = self.hub.cm(port, event);
        if mine {
            self.settle();
        }
        mine
    }

    fn qp_failed(&self, port: PortId, qpn: Qpn) {
        self.hub.qp_failed(port, qpn);
        self.settle();
    }

    fn tick(&self, now: Instant) -> Option<Instant> {
        let next = self.hub.tick(now);
        self.settle();
        next
    }

    /// Its paths have ended. With the last device there is nothing left whose end could be waited
    /// for.
    fn device_gone(&self, port: PortId) {
        let Some(gone) = self.gone.get(usize::from(port.0)) else { return };
        if gone.swap(true, SeqCst) {
            return;
        }
        self.hub.device_gone(port);
        self.settle();
        if self.lost.fetch_add(1, SeqCst) + 1 == self.gone.len() {
            self.hub.lock().closed = true;
            self.changed.notify_all();
        }
    }

    fn end(&self, patience: Duration) {
        let listeners =
            std::mem::take(&mut *self.listeners.lock().unwrap_or_else(PoisonError::into_inner));
        for (port, id) in listeners {
            // Requests that wait there are refused.
            let _ = self.hub.ports[usize::from(port.0)].device().destroy_id(id);
            self.hub.forget_listener(port, id);
        }
        self.hub.lock().core.close(clock::now());
        self.hub.drain();
        self.settle();
        let state = self.hub.lock();
        let wait = self.changed.wait_timeout_while(state, patience, |state| !state.closed);
        drop(wait);
    }

    fn stop(&self) {
        self.stop.store(true, SeqCst);
    }
}
