//! A session as the program holds it.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bowline_base::clock;
use bowline_rtrs::client::{
    Attrs, ClientStats, PathAddr, PathState, PermitKind, ReadKeys, Session as Core, StatsFile,
};
use bowline_rtrs::{Errno, Instant, MemRef, PathId, Policy, PortAttr, PortId};
use bowline_verbs::{Access, Buffer};
use bowline_wire::rtrs::{Dir, Uuid};

use super::builder::{SessionBuilder, connections, refused, resolve};
use super::calls::{CallId, Until};
use super::future::{Call, Cell, GetPermit, ended};
use super::names::Claim;
use super::permit::Permit;
use super::region::Region;
use super::shared::Shared;
use super::state::{Done, State};
use crate::engine::{Engine, Inner, Member};
use crate::executor::Executor;
use crate::port::port_id;
use crate::{Error, random};

/// Connections of a path, the service connection included [RT-24].
const MAX_CONNECTIONS: u32 = 4096;
/// Attempts to find a local port for a path, if other programs use those tried.
const PORTS_TRIED: usize = 8;
/// Number of further attempts, and the pause before each, at a server that resets the first
/// connections. A server resets them while it still has a session of an earlier process of this
/// client, whose end it has just noticed [RT-91], [RT-92], [RS-48].
const RESETS_MAX: u32 = 5;
const RESET_PAUSE: Duration = Duration::from_millis(200);

/// How long to wait for a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// As long as it takes.
    Forever,
    /// No longer than this.
    For(Duration),
}

/// A request.
#[derive(Debug)]
pub struct Req<'a> {
    /// Read or write.
    pub dir: Dir,
    /// The right to have the request in flight.
    pub permit: &'a Permit,
    /// The user message; copied.
    pub usr: &'a [u8],
    /// Memory that is sent, or that receives the response; at most as many pieces as [`Attrs`]
    /// allows.
    pub data: &'a [MemRef],
    /// The completer called at its end.
    pub done: Done,
}

/// The state of a path, for display.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PathView {
    /// Id of the path.
    pub id: PathId,
    /// Id of its device.
    pub port: PortId,
    /// Local address.
    pub src: SocketAddr,
    /// The server's address.
    pub dst: SocketAddr,
    /// State of the path.
    pub state: PathState,
    /// Round-trip time of the last heartbeat; 0 before the first answer.
    pub latency: Duration,
    /// Requests in flight.
    pub inflight: u32,
    /// Counters.
    pub stats: ClientStats,
}

/// A session with a server, over any number of paths.
///
/// All methods may be called from any thread. Those that wait for requests do the work of taking
/// completions themselves, in an engine of several devices with [`Poll::Spin`](crate::Poll::Spin)
/// only; while none waits or polls, background threads do. Dropping a session closes it without
/// waiting.
pub struct Session {
    shared: Arc<Shared>,
    name: String,
    /// Reserves the name until the session is closed.
    claim: Mutex<Option<Claim>>,
    port: u16,
    /// Access rights that memory of the program is registered with.
    access: Access,
}

impl core::fmt::Debug for Session {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Session").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Session {
    /// Opens a session: connects all its paths, or none [RS-24]. If the server resets the
    /// connections, retries for a second. Waits up to a second for a name that another session of
    /// the engine has.
    ///
    /// # Errors
    /// `EINVAL` without a path, or with more than 128, or with more than 4095 IO and poll
    /// connections; `EEXIST` while another session of the engine has the name, which ends when that
    /// one is closed or dropped; `EADDRNOTAVAIL` or `ENODEV` when no device of the engine has an
    /// address for a path, or [`ErrorKind::Unusable`](crate::ErrorKind::Unusable) when only one
    /// that is gone has; what kept a path from being connected.
    pub fn open(engine: &Engine, builder: SessionBuilder) -> Result<Arc<Self>, Error> {
        const WHAT: &str = "opening a session";
        let SessionBuilder { mut config, paths, connections: chosen, listeners } = builder;
        if !(1..=config.limits.paths).contains(&paths.len()) {
            return Err(Error::new(WHAT, Errno::EINVAL));
        }
        let engine = &engine.inner;
        config.io_connections = chosen.unwrap_or_else(|| connections(&engine.devices));
        let polled = config.poll_connections;
        if u32::from(config.io_connections) + u32::from(polled) >= MAX_CONNECTIONS {
            return Err(Error::new(WHAT, Errno::EINVAL));
        }
        let name = config.name.as_str().to_owned();
        let port = config.port;
        let access = match config.read_keys {
            ReadKeys::LongLived => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            ReadKeys::PerRequest => Access::LOCAL_WRITE,
        };
        let listeners = Arc::new(listeners);
        let claim = engine.names.claim(&name, RESET_PAUSE * RESETS_MAX);
        let claim = claim.ok_or(Error::new(
            "opening a session of a name that another one here has",
            Errno::EEXIST,
        ))?;
        let (mut ports_taken, mut resets) = (0, 0);
        loop {
            let ports = engine.ports(polled)?;
            let unusable: Vec<bool> = ports.iter().map(|port| port.refusal().is_some()).collect();
            let paths: Vec<(PathAddr, Uuid)> = paths
                .iter()
                .map(|&(src, dst, own)| {
                    let gone = |index: usize| unusable[index];
                    let addr = resolve(&ports, gone, (src, dst), own.unwrap_or(port))?;
                    Ok((addr, random::uuid()?))
                })
                .collect::<Result<_, Error>>()?;
            let attrs: Vec<PortAttr> = ports.iter().map(|port| port.attr()).collect();
            let core = Core::new(config.clone(), &attrs, random::uuid()?);
            let executor = Executor::new(State::new(core), ports, Arc::clone(&engine.stats));
            let (slack, of, to) =
                (config.heartbeat.slack(), Arc::clone(engine), Arc::clone(&listeners));
            let shared = Arc::new(Shared::new(executor, of, polled, slack, to));
            engine.add(Arc::clone(&shared) as Arc<dyn Member>)?;
            for (index, _) in unusable.iter().enumerate().filter(|(_, unusable)| **unusable) {
                shared.device_gone(port_id(index));
            }
            let mut session =
                Self { shared, name: name.clone(), claim: Mutex::default(), port, access };
            session.shared.start()?;
            session.shared.executor.lock().core.open(clock::now(), &paths);
            session.shared.executor.drain();
            session.shared.settle();
            let opened = session.shared.wait_control(None, |state| {
                let result = state.opened?;
                Some(result.map_err(|errno| (errno, state.core.refusal())))
            });
            match opened {
                Some(Ok(())) => {
                    session.claim = Mutex::new(Some(claim));
                    return Ok(Arc::new(session));
                }
                Some(Err((Errno::EADDRINUSE, _))) if ports_taken + 1 < PORTS_TRIED => {
                    ports_taken += 1;
                }
                Some(Err((Errno::ECONNRESET, _))) if resets < RESETS_MAX => {
                    resets += 1;
                    std::thread::sleep(RESET_PAUSE);
                }
                Some(Err((errno, how))) => {
                    let addrs: Vec<PathAddr> = paths.iter().map(|(addr, _)| *addr).collect();
                    return Err(refused(WHAT, errno, &addrs).refused(how));
                }
                None => return Err(Error::closed(WHAT)),
            }
        }
    }

    /// The session's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limits of the session [RS-24].
    ///
    /// # Errors
    /// `ECOMM` when no path is connected.
    pub fn attrs(&self) -> Result<Attrs, Error> {
        let attrs = self.shared.executor.lock().core.geometry();
        attrs.ok_or(Error::new("asking what a session offers", Errno::ECOMM))
    }

    /// Makes memory for requests, zeroed and registered.
    ///
    /// # Errors
    /// `EINVAL` for no bytes; `ENOMEM`; those of the devices.
    pub fn region(&self, len: usize) -> Result<Region, Error> {
        let buffer =
            Buffer::new(len).map_err(|error| Error::system("allocating memory", &error))?;
        self.register(Arc::new(buffer))
    }

    /// Registers memory for requests.
    ///
    /// # Errors
    /// `EINVAL` for no bytes; those of the devices.
    pub fn register(&self, buffer: Arc<Buffer>) -> Result<Region, Error> {
        const WHAT: &str = "registering memory";
        if buffer.is_empty() {
            return Err(Error::new(WHAT, Errno::EINVAL));
        }
        let mut state = self.shared.executor.lock();
        if state.closed {
            return Err(Error::closed(WHAT));
        }
        let id = state.core.add_region(Arc::clone(&buffer), self.access);
        drop(state);
        let region = Region::new(Arc::clone(&self.shared), id, buffer);
        self.shared.executor.drain_all();
        self.shared.settle();
        let outcome = self.shared.executor.lock().core.region_outcome(id);
        match outcome {
            Some(Ok(())) => Ok(region),
            Some(Err(errno)) => Err(Error::new(WHAT, errno)),
            None => Err(Error::closed(WHAT)),
        }
    }

    /// Takes a permit, the right to have one request in flight; `None` when none is free in time,
    /// or the session is closed or being closed. Waiting threads and tasks are served in the order
    /// in which they came, before callers that do not wait. Requests with the permit take the
    /// connection of the processor on which this thread runs. A thread that waits for one of
    /// [`PermitKind::Polled`] polls all poll connections meanwhile.
    pub fn get_permit(&self, kind: PermitKind, wait: Wait) -> Option<Permit> {
        self.get_permit_on(kind, wait, current_cpu())
    }

    /// Like [`get_permit`](Self::get_permit) called on this processor; for programs that spread
    /// requests over connections themselves.
    pub fn get_permit_on(&self, kind: PermitKind, wait: Wait, cpu: u16) -> Option<Permit> {
        let permit = match wait {
            Wait::No => self.shared.executor.lock().core.get_permit(kind, cpu),
            Wait::Forever => self.shared.wait_permit(kind, None, cpu),
            Wait::For(limit) => self.shared.wait_permit(kind, Some(limit), cpu),
        };
        permit.map(|permit| Permit::new(permit, &self.shared))
    }

    /// Takes a permit as soon as one is free, without blocking the thread: for tasks of any
    /// runtime.
    ///
    /// The future may be dropped at any time: a permit it was assigned by then goes to the next
    /// waiter. Requests with the permit take the connection of the processor on which the future
    /// was first polled. A program that awaits one of [`PermitKind::Polled`] must poll meanwhile,
    /// because requests end only when it does.
    ///
    /// A program of callbacks first tries [`Wait::No`]. If no permit is free it polls this future
    /// once with its own waker, which is called when the permit is assigned: by any thread, without
    /// locks held, like a [`Completer`](super::Completer).
    ///
    /// ```no_run
    /// # use bowline_rtrs_driver::{Dir, Error, client::{PermitKind, Region, Session}};
    /// /// Reads a piece of memory; any number of tasks do so at once.
    /// async fn read(session: &Session, usr: &[u8], into: &Region) -> Result<(), Error> {
    ///     let permit = session.get_permit_async(PermitKind::Io).await?;
    ///     let call = session.call_async(Dir::Read, &permit, usr, &[into.piece(0, 4096)]);
    ///     // At once: it is free when the request has ended, even if nobody waits for it.
    ///     session.put_permit(permit);
    ///     call.await
    /// }
    /// ```
    ///
    /// # Errors
    /// `ENODEV` when the session is closed or being closed.
    pub fn get_permit_async(&self, kind: PermitKind) -> GetPermit {
        GetPermit::new(Arc::clone(&self.shared), kind, None)
    }

    /// Like [`get_permit_async`](Self::get_permit_async), first polled on this processor.
    pub fn get_permit_on_async(&self, kind: PermitKind, cpu: u16) -> GetPermit {
        GetPermit::new(Arc::clone(&self.shared), kind, Some(cpu))
    }

    /// Gives a permit back. Its request may still be in flight. Dropping the permit does the same,
    /// and takes a few nanoseconds more.
    pub fn put_permit(&self, permit: Permit) {
        permit.put(&self.shared);
    }

    /// Submits a request. `done` is told of its end exactly once if this is `Ok`, and not at all if
    /// not. `usr` is copied. The memory of a READ must not be read before its end, that of a WRITE
    /// not be changed. Pieces may have any length and begin anywhere in their regions. A READ into
    /// several that do not follow each other in memory takes a registration and two more messages,
    /// as all READs do in a session of [`ReadKeys::PerRequest`].
    ///
    /// # Errors
    /// `ECONNABORTED` without a connected path, `EMSGSIZE` for more data than [`Attrs::max_io`] or
    /// a longer user message than [`SessionBuilder::max_usr`] and the server allow
    /// ([`Attrs::max_hdr`]), `EINVAL` for memory that is not of this session or for more pieces
    /// than [`Attrs`] says, `EBUSY` for a permit whose request has not ended [RT-59].
    pub fn request(
        &self,
        dir: Dir,
        permit: &Permit,
        usr: &[u8],
        data: &[MemRef],
        done: Done,
    ) -> Result<(), Error> {
        let submitted = {
            let mut state = self.shared.executor.lock();
            let tag = state.slots.register_completer(done);
            submit(&mut state, clock::now(), dir, permit, usr, data, tag)
        };
        self.ring(1);
        submitted.map_err(Refused::into_error)
    }

    /// Submits requests, which go out together; returns their number, which is smaller if one
    /// failed. The iterator is called with the session locked: it must not call the session, nor
    /// drop a permit of it.
    ///
    /// # Errors
    /// As [`request`](Self::request), if the first request failed.
    pub fn request_batch(
        &self,
        requests: &mut dyn Iterator<Item = Req<'_>>,
    ) -> Result<usize, Error> {
        self.submit_batch(requests, None)
    }

    /// Like [`request_batch`](Self::request_batch), but first assigns the permits to the processor
    /// on which this thread runs: for programs that keep permits.
    ///
    /// # Errors
    /// As [`request_batch`](Self::request_batch).
    pub fn request_batch_here(
        &self,
        requests: &mut dyn Iterator<Item = Req<'_>>,
    ) -> Result<usize, Error> {
        self.submit_batch(requests, Some(current_cpu()))
    }

    fn submit_batch(
        &self,
        requests: &mut dyn Iterator<Item = Req<'_>>,
        cpu: Option<u16>,
    ) -> Result<usize, Error> {
        let mut count = 0;
        let mut failed = None;
        {
            let mut state = self.shared.executor.lock();
            let now = clock::now();
            for Req { dir, permit, usr, data, done } in requests {
                if let Some(cpu) = cpu {
                    state.core.set_cpu_of(permit.core(), cpu);
                }
                let tag = state.slots.register_completer(done);
                match submit(&mut state, now, dir, permit, usr, data, tag) {
                    Ok(()) => count += 1,
                    Err(refused) => {
                        failed = Some(refused);
                        break;
                    }
                }
            }
        }
        self.ring(count);
        match failed {
            Some(refused) if count == 0 => Err(refused.into_error()),
            _ => Ok(count),
        }
    }

    /// Submits a request and waits for its end; the thread takes completions meanwhile.
    ///
    /// # Errors
    /// As [`request`](Self::request), and the request's own error.
    pub fn call(
        &self,
        dir: Dir,
        permit: &Permit,
        usr: &[u8],
        data: &[MemRef],
    ) -> Result<(), Error> {
        let (tag, submitted) = {
            let mut state = self.shared.executor.lock();
            let tag = state.slots.register_thread(std::thread::current());
            (tag, submit(&mut state, clock::now(), dir, permit, usr, data, tag))
        };
        submitted.map_err(Refused::into_error)?;
        self.ring(1);
        let ready = |state: &mut State| state.slots.ended(tag);
        let outcome = match permit.kind() {
            PermitKind::Polled => self.shared.poll_until(None, ready),
            PermitKind::Io | PermitKind::Service => self.shared.drive_until(None, ready),
        };
        match outcome {
            Some(errno) => ended(errno),
            None => Err(Error::closed("a request")),
        }
    }

    /// Submits a request and returns a future of its result. A background thread takes the
    /// completion, so any runtime will do, or none.
    pub fn call_async(&self, dir: Dir, permit: &Permit, usr: &[u8], data: &[MemRef]) -> Call {
        let cell = Arc::new(Cell::default());
        let done = Done { to: Arc::clone(&cell) as _, tag: 0 };
        Call::new(self.request(dir, permit, usr, data, done).map(|()| cell))
    }

    /// Takes completions that are there and handles them; returns their number. With many requests
    /// outstanding it does not take all, so that the program can send the next requests while the
    /// server still works on others; to take all, call it until it returns 0. Other threads that
    /// poll at the same time find none.
    pub fn poll(&self) -> usize {
        self.shared.poll()
    }

    /// Takes completions that are there for the poll connections of this index, counted from 0, on
    /// all paths, and handles them; returns their number. `None` when no path is connected or the
    /// session has no poll connection of this index [RS-31].
    pub fn poll_queue(&self, index: u16) -> Option<usize> {
        let count = self.shared.poll_queue(index)?;
        let connected = self.shared.executor.lock().core.geometry().is_some();
        connected.then_some(count)
    }

    /// Number of requests that have ended and whose completers have returned. See
    /// [`wait`](Self::wait).
    pub fn ended(&self) -> u64 {
        self.shared.ended()
    }

    /// Waits until more than `seen` requests have ended, at most for `limit`; returns whether they
    /// have. The thread takes completions meanwhile. Read `seen` from [`ended`](Self::ended) before
    /// checking whether to wait at all: then the call does not miss a request that ends in between.
    pub fn wait(&self, seen: u64, limit: Option<Duration>) -> bool {
        self.shared.wait_ended(seen, limit)
    }

    /// Takes completions that are there and handles them; without any, sleeps until there are some
    /// or `other` can be read: for a thread that serves both, until it [leaves](Self::leave).
    /// Returns their number; `None` if another thread takes them, or the session uses several
    /// devices: the caller may then sleep on `other` alone. `is_waiting` tells whether requests of
    /// the caller's are in flight.
    pub fn take_turn(
        &self,
        other: BorrowedFd<'_>,
        is_waiting: impl FnOnce() -> bool,
    ) -> Option<usize> {
        self.shared.take_turn(other, is_waiting)
    }

    /// The calling thread [takes no more turns](Self::take_turn) for a while, so that others take
    /// completions. Without this they notice after some milliseconds.
    pub fn leave(&self) {
        self.shared.leave();
    }

    fn ring(&self, requests: usize) {
        self.shared.executor.stats.requests.add(requests as u64);
        if self.shared.executor.drain_unless_calling() {
            self.shared.settle();
        }
    }

    /// Adds a path and waits until it is connected [RS-34]. A server of Linux takes no path of
    /// another address family than the session's [RT-28].
    ///
    /// # Errors
    /// As [`open`](Self::open) when no device has an address for the path; the error that kept the
    /// path from being connected: the path is removed then.
    pub fn add_path(&self, src: Option<IpAddr>, dst: IpAddr) -> Result<PathId, Error> {
        const WHAT: &str = "adding a path";
        for tries in 1.. {
            let gone = |index| self.shared.is_gone(index);
            let addr = resolve(&self.shared.executor.ports, gone, (src, dst), self.port)?;
            let uuid = random::uuid()?;
            let add = |core: &mut Core, now| core.add_path(now, addr, uuid);
            let (path, call_id) = self.order(WHAT, Until::Added, add)?;
            match self.wait_outcome(call_id) {
                Some(Ok(())) => return Ok(path),
                Some(Err(Errno::EADDRINUSE)) if tries < PORTS_TRIED => {}
                Some(Err(errno)) => {
                    let state = self.shared.executor.lock();
                    let others = state.core.paths().filter(|other| other.id != path);
                    let addrs: Vec<_> = others.map(|other| other.addr).chain([addr]).collect();
                    return Err(refused(WHAT, errno, &addrs));
                }
                None => return Err(Error::closed(WHAT)),
            }
        }
        Err(Error::new(WHAT, Errno::EADDRINUSE))
    }

    /// Closes a path, forgets it, and waits until it is gone [RS-39].
    ///
    /// # Errors
    /// `ENOTCONN` when there is no such path.
    pub fn remove_path(&self, path: PathId) -> Result<(), Error> {
        self.command("removing a path", path, Until::Removed, Core::remove_path)
    }

    /// Closes a path and waits until it is closed; it is not connected again by itself [RS-38].
    ///
    /// # Errors
    /// `ENOTCONN` when there is no such path.
    pub fn disconnect_path(&self, path: PathId) -> Result<(), Error> {
        self.command("disconnecting a path", path, Until::Closed, Core::disconnect_path)
    }

    /// Connects a path anew and waits for the outcome [RS-37].
    ///
    /// # Errors
    /// `EBUSY` while the path is being connected or closed; `ENOTCONN` when there is no such path,
    /// or it could not be connected.
    pub fn reconnect_path(&self, path: PathId) -> Result<(), Error> {
        self.command("reconnecting a path", path, Until::Reconnected, Core::reconnect_path)
    }

    /// Gives the core a command about a path. The id is for [`wait_outcome`](Self::wait_outcome).
    fn order(
        &self,
        what: &'static str,
        until: Until,
        order: impl FnOnce(&mut Core, Instant) -> Result<PathId, Errno>,
    ) -> Result<(PathId, CallId), Error> {
        self.shared.order(|state| {
            if state.closed {
                return Err(Error::closed(what));
            }
            let path = order(&mut state.core, clock::now());
            let path = path.map_err(|errno| Error::new(what, errno))?;
            Ok((path, state.calls.begin(path, until)))
        })
    }

    fn command(
        &self,
        what: &'static str,
        path: PathId,
        until: Until,
        command: impl FnOnce(&mut Core, Instant, PathId) -> Result<(), Errno>,
    ) -> Result<(), Error> {
        let command = |core: &mut Core, now| match command(core, now, path) {
            // The core's error for a path it does not have.
            Err(Errno::EINVAL) => Err(Errno::ENOTCONN),
            done => done.map(|()| path),
        };
        let (_, call_id) = self.order(what, until, command)?;
        match self.wait_outcome(call_id) {
            Some(outcome) => outcome.map_err(|errno| Error::new(what, errno)),
            None => Err(Error::closed(what)),
        }
    }

    /// Waits for the outcome of a path command; `None` when the session ended first.
    fn wait_outcome(&self, call_id: CallId) -> Option<Result<(), Errno>> {
        self.shared.wait_control(None, |state| state.calls.take(call_id))
    }

    /// The paths, in the order they were added.
    pub fn paths(&self) -> Vec<PathView> {
        let state = self.shared.executor.lock();
        let view = |path: bowline_rtrs::client::PathInfo<'_>| PathView {
            id: path.id,
            port: path.addr.port,
            src: path.addr.src,
            dst: path.addr.dst,
            state: path.state,
            latency: path.latency,
            inflight: path.inflight,
            stats: path.stats.clone(),
        };
        state.core.paths().map(view).collect()
    }

    /// Requests in flight. A request that is no longer counted has ended; its completer may still
    /// run.
    pub fn inflight(&self) -> usize {
        self.shared.executor.lock().core.inflight()
    }

    /// How paths are chosen.
    pub fn policy(&self) -> Policy {
        self.shared.executor.lock().core.policy()
    }

    /// Changes how paths are chosen.
    pub fn set_policy(&self, policy: Policy) {
        self.shared.executor.lock().core.set_policy(policy);
    }

    /// Attempts to reconnect a lost path; -1: no limit.
    pub fn max_reconnects(&self) -> i16 {
        self.shared.executor.lock().core.max_reconnects()
    }

    /// Changes [`max_reconnects`](Self::max_reconnects).
    pub fn set_max_reconnects(&self, attempts: i16) {
        self.shared.executor.lock().core.set_max_reconnects(attempts);
    }

    /// Sets counters of a path to 0; `false` if there is no such path.
    pub fn reset_stats(&self, path: PathId, file: StatsFile) -> bool {
        self.shared.executor.lock().core.reset_stats(path, file)
    }

    /// The name of the engine's device with this id.
    pub fn device_name(&self, port: PortId) -> Option<String> {
        let Inner { devices, .. } = &*self.shared.engine;
        devices.get(usize::from(port.0)).map(|device| device.attr().name)
    }

    /// The engine's devices.
    pub(crate) fn devices(&self) -> &[Arc<dyn bowline_verbs::Device>] {
        &self.shared.engine.devices
    }

    /// Closes all paths and waits until they are closed and all permits are returned [RS-25]:
    /// threads that hold a permit must drop it. Requests in flight that cannot be answered end with
    /// an error.
    pub fn close(self: Arc<Self>) {
        self.shared.end(Duration::MAX);
        self.shared.stop();
        self.shared.engine.remove(&*self.shared);
        self.claim.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.abandon();
    }
}

/// A request that was not taken: its error, and its completer, to be dropped without the lock.
struct Refused {
    errno: Errno,
    _done: Option<Done>,
}

impl Refused {
    fn into_error(self) -> Error {
        Error::new("submitting a request", self.errno)
    }
}

/// Gives the core a request; frees its slot if the core refuses it.
fn submit(
    state: &mut State,
    now: Instant,
    dir: Dir,
    permit: &Permit,
    usr: &[u8],
    data: &[MemRef],
    tag: u64,
) -> Result<(), Refused> {
    let submitted = state.core.request(now, dir, permit.core(), usr, data, tag);
    submitted.map_err(|errno| Refused { errno, _done: state.slots.free(tag) })
}

/// The processor on which this thread runs, by which requests are spread over connections [RT-37].
/// Takes a few nanoseconds on x86-64.
pub(super) fn current_cpu() -> u16 {
    u16::try_from(rustix::thread::sched_getcpu()).unwrap_or(u16::MAX)
}
