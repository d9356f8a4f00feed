//! The server: takes RTRS requests and carries them out on storage.
//!
//! ```text
//!  engine thread:  rdma_ev --> core.message --> Backend::submit ... Backend::kick
//!                     |             |  \                |
//!                     |     answers at once   `--> bowline-rnbd-open: finds and opens exports
//!                     v                                 v
//!  any thread:     Server::respond <------------ BackendDone::done
//! ```
//!
//! One lock guards all state here. It is held for no system call. Under it, storage is asked for
//! its limits only, and the transport only for the memory of a session, once for each.

mod exports;
mod ops;
mod table;

use bowline_base::entropy::random_u64;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult};
use bowline_rnbd::server::{
    Act, CheckedIo, ClientEv, Core, CoreLimits, ExportId, OpenId, OpenInfo, SessKey, Ticket,
};
use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_rtrs::{MemRef, RegionId};
use bowline_rtrs_driver::Engine;
use bowline_rtrs_driver::server::{
    Handler, LinkEv, OpId, Request, Server as Rtrs, ServerConfig as RtrsConfig, SessId,
};
use bowline_verbs::{Buffer, Mem, catch_callback_panic};
use bowline_wire::rnbd::{Access, status_of_errno};

use crate::error::Error;
use crate::tree::{self, Traffic};
use exports::Identity;
use ops::{Op, Ops, Step};
use table::{OpenExport, Table};

pub use exports::{Exports, FailedStore, FileOptions, Grant, Moved};

/// Most results that are answered with one call.
const BATCH: usize = 64;

/// Settings of a server.
#[derive(Clone, Debug, Default)]
pub struct ServerConfig {
    /// Settings of the transport: chunks, keys, admitted peers.
    pub rtrs: RtrsConfig,
    /// Limits on what clients can make the server store.
    pub limits: CoreLimits,
}

/// An answer for the transport: request, errno, data to send.
type Answer = (OpId, i32, Option<MemRef>);

/// Where the deferred answer to a message goes.
struct PendingAnswer {
    op: OpId,
    data: Option<Mem>,
    room: u32,
}

struct Session {
    name: String,
    /// Stands for the name, for storage: a client that connects again is the same user.
    user: u64,
    /// The chunks of the session, once a request has used them.
    memory: Option<Arc<Buffer>>,
}

struct State {
    core: Core,
    sessions: BTreeMap<SessKey, Session>,
    table: Table,
    /// Registered exported memory, kept for the lifetime of the server.
    regions: BTreeMap<Identity, RegionId>,
    pending: BTreeMap<Ticket, PendingAnswer>,
    ops: Ops,
    scratch: Vec<Scratch>,
    /// Makes the numbers of users.
    users: RandomState,
}

/// Lists that are reused to save allocations.
#[derive(Default)]
struct Scratch {
    /// Exports and their storage, in the order of the requests.
    targets: Vec<(ExportId, Arc<dyn Backend>)>,
    ios: Vec<Vec<BackendIo>>,
    answers: Vec<Answer>,
}

/// Work for the thread `bowline-rnbd-open`, which may block.
enum Job {
    /// Find and open an export.
    Open(OpenJob),
    /// Drop one. Dropping waits for threads of its storage, which may wait for locks of this
    /// module.
    Release(OpenExport),
}

/// An export that a client asks to open.
struct OpenJob {
    ticket: Ticket,
    session: SessKey,
    name: Vec<u8>,
    access: Access,
}

/// The state of a server: passes requests to storage, and results to the transport.
struct Dispatcher {
    state: Mutex<State>,
    /// Held while an export is opened, added or removed. Taken before `state` and `exports`, and
    /// held over system calls.
    changing: Mutex<()>,
    /// The exports at present; a change replaces them. A copy must be dropped without the lock of
    /// `state`, since it may be the last one: dropping storage waits for its threads.
    exports: Mutex<Arc<Exports>>,
    /// Largest read or write of a session in bytes.
    max_io: u32,
    rtrs: OnceLock<Weak<Rtrs>>,
    jobs: Mutex<Sender<Job>>,
    weak_self: Weak<Dispatcher>,
}

/// Submits requests to storage, which the program may have implemented. If it panics, the requests
/// left in the list fail, and other storage is not affected.
fn submit_to_backend(backend: &dyn Backend, ios: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
    let submitted = catch_callback_panic(|| {
        backend.submit(ios, done);
        backend.kick();
    });
    if submitted.is_none() {
        let failed = |io: BackendIo| BackendResult::new(io.token, Err(Errno::EIO));
        let results: Vec<BackendResult> = ios.drain(..).map(failed).collect();
        done.done(&results);
    }
}

/// A server of exports. It serves until it is closed, and keeps its engine.
pub struct ExportServer {
    dispatcher: Arc<Dispatcher>,
    rtrs: Arc<Rtrs>,
    /// An engine that nobody has is closed, and its servers with it.
    _engine: Arc<Engine>,
}

impl std::fmt::Debug for ExportServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExportServer")
            .field("exports", &self.dispatcher.exports())
            .finish_non_exhaustive()
    }
}

impl ExportServer {
    /// Serves `exports` at some addresses of the engine's devices. Clients that reconnect after a
    /// restart find them at once [NB-62].
    ///
    /// # Errors
    /// Errors of listening, `EAGAIN` when no thread can be started.
    pub fn open(
        engine: &Arc<Engine>,
        at: &[SocketAddr],
        config: ServerConfig,
        exports: Exports,
    ) -> Result<Arc<Self>, Error> {
        let (jobs, todo) = channel();
        let state = State {
            core: Core::new(config.limits, random_u64() as u32),
            sessions: BTreeMap::new(),
            table: Table::default(),
            regions: BTreeMap::new(),
            pending: BTreeMap::new(),
            ops: Ops::default(),
            scratch: Vec::new(),
            users: RandomState::new(),
        };
        let dispatcher = Arc::new_cyclic(|me: &Weak<Dispatcher>| Dispatcher {
            state: Mutex::new(state),
            changing: Mutex::default(),
            exports: Mutex::new(Arc::new(exports)),
            max_io: config.rtrs.geometry.max_io(),
            rtrs: OnceLock::new(),
            jobs: Mutex::new(jobs),
            weak_self: Weak::clone(me),
        });
        let worker = Arc::downgrade(&dispatcher);
        let thread = thread::Builder::new().name("bowline-rnbd-open".to_owned());
        let started = thread.spawn(move || open_exports(&worker, &todo));
        started.map_err(|error| Error::io("starting a thread", &error))?;
        let handler = Arc::clone(&dispatcher) as Arc<dyn Handler>;
        let rtrs = Rtrs::open(engine, at, config.rtrs, handler);
        let rtrs = rtrs.map_err(|error| Error::rtrs(&error))?;
        // Set only here.
        let _ = dispatcher.rtrs.set(Arc::downgrade(&rtrs));
        Ok(Arc::new(Self { dispatcher, rtrs, _engine: Arc::clone(engine) }))
    }

    /// Returns the RTRS server, for sessions, paths and counters.
    pub const fn rtrs(&self) -> &Arc<Rtrs> {
        &self.rtrs
    }

    /// Returns the open devices, by session and id.
    pub fn opens(&self) -> Vec<OpenInfo> {
        self.dispatcher.lock().core.opens()
    }

    /// Takes what clients have done since the last call, oldest first: sessions, opens, refusals
    /// and closes. At most 256 events are kept; the number is that of older ones that were dropped.
    pub fn take_client_events(&self) -> (Vec<ClientEv>, u64) {
        self.dispatcher.lock().core.take_events()
    }

    /// Returns the stores that have failed requests, also those that are closed by now. The last
    /// 1024 of them are remembered.
    pub fn failures(&self) -> Vec<FailedStore> {
        let exports = self.dispatcher.exports();
        let state = self.dispatcher.lock();
        let failed = state.table.failed().map(|(identity, failed)| {
            let offered = exports.store(&failed.label).map(|(offered, _)| offered);
            let is_open = || state.table.by_identity(identity).is_some();
            FailedStore {
                name: Arc::clone(&failed.label),
                store: identity.to_string(),
                is_current: offered.map_or_else(is_open, |offered| offered == identity),
                failures: failed.failures,
            }
        });
        failed.collect()
    }

    /// Closes a device by force: IO of its client fails from now on [NB-21].
    ///
    /// # Errors
    /// `ENODEV` when it is not open.
    pub fn force_close(&self, open: OpenId) -> Result<(), Error> {
        let closed = self.dispatcher.lock().core.force_close(open);
        self.dispatcher.flush_answers(&self.rtrs);
        closed.map_err(|errno| Error::new("closing an open device by force", errno))
    }

    /// Reads the size of an export's storage anew and returns it in bytes. Every open does so too.
    ///
    /// IO of clients that have it open is checked against the new size at once. The protocol has no
    /// message for a new size: clients learn of it when they open the export again, or by a resize
    /// on their side [NB-37].
    ///
    /// # Errors
    /// `ENOENT` for a name without an export of its own, and errors of reading the size.
    pub fn resize(&self, name: &str) -> Result<u64, Error> {
        let store = self.dispatcher.exports().store(name);
        let (identity, backend) =
            store.ok_or_else(|| Error::new(format!("resizing export {name}"), Errno::ENOENT))?;
        self.dispatcher.resize(name, identity, &*backend)
    }

    /// Reads the sizes of all named and all open exports anew. Returns the exports whose size has
    /// changed, and those whose size could not be read.
    pub fn resize_all(&self) -> Vec<(String, Result<u64, Error>)> {
        let exports = self.dispatcher.exports();
        let named = exports.names().filter_map(|name| {
            let name = String::from_utf8_lossy(name).into_owned();
            let (identity, backend) = exports.store(&name)?;
            Some((name, identity, backend))
        });
        let mut all: Vec<_> = named.collect();
        for (identity, export) in self.dispatcher.lock().table.stores() {
            if all.iter().all(|(_, known, _)| *known != identity) {
                all.push((export.label.to_string(), identity, Arc::clone(&export.backend)));
            }
        }
        let look = |(name, identity, backend): (String, _, Arc<dyn Backend>)| {
            let before = backend.limits().bytes;
            let bytes = self.dispatcher.resize(&name, identity, &*backend);
            (!matches!(bytes, Ok(now) if now == before)).then_some((name, bytes))
        };
        all.into_iter().filter_map(look).collect()
    }

    /// Checks the paths of exported files ([`Exports::file`]). Returns the exports whose path is
    /// gone or leads to another file; the file opened first is served until the end.
    pub fn moved(&self) -> Vec<Moved> {
        self.dispatcher.exports().moved()
    }

    /// Adds exports, and grants of theirs, while clients are served; all or, after an error, none
    /// of them.
    ///
    /// # Errors
    /// Those of `add`.
    pub fn add<E>(&self, add: impl FnOnce(&mut Exports) -> Result<(), E>) -> Result<(), E> {
        let _changing = self.dispatcher.lock_changes();
        let mut exports = Exports::clone(&self.dispatcher.exports());
        add(&mut exports)?;
        self.dispatcher.replace_exports(exports);
        Ok(())
    }

    /// Removes a named export, and its grants. Nobody can open it from now on. With `force`, what
    /// clients have open by this name is closed, as by [`force_close`](Self::force_close).
    ///
    /// # Errors
    /// `ENOENT` for a name without an export of its own, `EBUSY` when a client has it open by this
    /// name and `force` is not given.
    pub fn remove(&self, name: &str, force: bool) -> Result<(), Error> {
        let failed = |errno| Error::new(format!("removing export {name}"), errno);
        // No open of the export is under way while this is held.
        let changing = self.dispatcher.lock_changes();
        let before = self.dispatcher.exports();
        let (identity, backend) = before.store(name).ok_or_else(|| failed(Errno::ENOENT))?;
        let mut exports = Exports::clone(&before);
        exports.remove(name);
        let mut state = self.dispatcher.lock();
        let export = state.table.by_identity(identity).map(|(id, _)| id);
        let is_of_it =
            |open: &OpenInfo| Some(open.export) == export && open.mapping_path == name.as_bytes();
        let opens: Vec<OpenInfo> = state.core.opens().into_iter().filter(is_of_it).collect();
        if !opens.is_empty() && !force {
            return Err(failed(Errno::EBUSY));
        }
        for open in opens {
            // It was found open with the same lock.
            let _ = state.core.force_close(open.id);
        }
        // Answers of an export that was just open may have to be sent again from its memory.
        let unused = if export.is_none() { state.regions.remove(&identity) } else { None };
        drop(state);
        self.dispatcher.replace_exports(exports);
        drop(changing);
        self.dispatcher.flush_answers(&self.rtrs);
        if let Some(region) = unused {
            self.rtrs.drop_region(region);
        }
        drop((before, backend));
        Ok(())
    }

    /// Returns how many requests storage is working on.
    pub fn in_flight(&self) -> usize {
        self.dispatcher.lock().ops.count()
    }

    /// Takes what storage has to say of itself since the last call, with the names of exports: the
    /// connection to a server is lost, for example.
    pub fn take_notices(&self) -> Vec<(String, String)> {
        let notices = |(name, store): (String, Arc<dyn Backend>)| {
            store.take_notices().into_iter().map(move |text| (name.clone(), text))
        };
        self.dispatcher.stores().into_iter().flat_map(notices).collect()
    }

    /// Closes all sessions, and waits until they are closed and storage has answered; then closes
    /// the storage. Storage that does not answer is waited for, unless it has a limit of its own:
    /// see [`Backend::begin_close`].
    ///
    /// # Errors
    /// The exports whose storage could not be closed, so that changes may be lost that no client
    /// has flushed.
    pub fn close(&self) -> Vec<Error> {
        let stores = self.dispatcher.stores();
        stores.iter().for_each(|(_, store)| store.begin_close());
        self.rtrs.close();
        let close = |(name, store): (String, Arc<dyn Backend>)| {
            let error = store.close().err()?;
            Some(Error::io(format!("closing export {name}"), &error))
        };
        stores.into_iter().filter_map(close).collect()
    }
}

impl Dispatcher {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_changes(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the exports at present.
    fn exports(&self) -> Arc<Exports> {
        Arc::clone(&self.exports.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the storage of all exports, and what of other exports clients have open.
    fn stores(&self) -> Vec<(String, Arc<dyn Backend>)> {
        let exports = self.exports();
        let named = exports.names().filter_map(|name| {
            let name = String::from_utf8_lossy(name).into_owned();
            exports.store(&name).map(|(_, store)| (name, store))
        });
        let mut all: Vec<(String, Arc<dyn Backend>)> = named.collect();
        for (_, export) in self.lock().table.stores() {
            if all.iter().all(|(_, known)| !Arc::ptr_eq(known, &export.backend)) {
                all.push((export.label.to_string(), Arc::clone(&export.backend)));
            }
        }
        all
    }

    /// Serves other exports from now on. The caller holds `changing`, and not the lock of `state`.
    fn replace_exports(&self, exports: Exports) {
        let mut served = self.exports.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *served, Arc::new(exports));
        drop(served);
        drop(before);
    }

    /// Sends the answers that the core has ready, and releases exports that no client has open.
    fn flush_answers(&self, rtrs: &Rtrs) {
        loop {
            let mut answers = Vec::new();
            let mut left = Vec::new();
            let mut state = self.lock();
            while let Some(answer) = state.core.poll_answer() {
                let Some(pending) = state.pending.remove(&answer.ticket) else { continue };
                let op = pending.op;
                let written = write_reply(pending.data.as_ref(), pending.room, answer.data.bytes());
                let errno = if written { answer.errno } else { Errno::EINVAL.neg() };
                answers.push((op, errno, None));
            }
            while let Some(export) = state.core.poll_release() {
                for export in state.table.release(export) {
                    let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
                    // No thread receives it when the server ends.
                    left.extend(jobs.send(Job::Release(export)).err());
                }
            }
            drop(state);
            drop(left);
            if answers.is_empty() {
                return;
            }
            rtrs.respond(&mut answers.into_iter());
        }
    }

    /// Returns the limits of an export as served: requests are no longer than sessions allow.
    fn limits(&self, backend: &dyn Backend, read_only: bool) -> Limits {
        let limits = backend.limits();
        Limits {
            read_only: limits.read_only || read_only,
            max_io: limits.max_io.min(self.max_io),
            ..limits
        }
    }

    fn rtrs(&self) -> Option<Arc<Rtrs>> {
        // Set before `ExportServer::open` returns; results of storage may come earlier.
        self.rtrs.wait().upgrade()
    }
}

/// Writes an answer into the data area of a request, and zeroes behind it.
fn write_reply(data: Option<&Mem>, room: u32, bytes: &[u8]) -> bool {
    if bytes.is_empty() {
        return true;
    }
    let room = room as usize;
    let Some(data) = data.filter(|data| bytes.len() <= room && room <= data.len) else {
        return false;
    };
    data.buffer.write(data.offset, bytes);
    const ZEROES: [u8; 512] = [0; 512];
    for at in (bytes.len()..room).step_by(ZEROES.len()) {
        let len = ZEROES.len().min(room - at);
        data.buffer.write(data.offset + at, &ZEROES[..len]);
    }
    true
}

fn key(session: SessId) -> SessKey {
    SessKey(session.pack())
}

impl State {
    /// Returns the memory of a request's data.
    fn memory(&mut self, rtrs: &Rtrs, request: &Request) -> Option<Mem> {
        let session = self.sessions.get_mut(&key(request.session))?;
        let offset = usize::try_from(request.data.offset).ok()?;
        let len = request.data.len as usize;
        if session.memory.is_none() {
            session.memory = rtrs.memory(request.session);
        }
        Some(Mem { buffer: session.memory.clone()?, offset, len })
    }

    /// Adds an IO to the list of its storage.
    fn add_io(
        &mut self,
        scratch: &mut Scratch,
        request: &Request,
        export: ExportId,
        io: &CheckedIo,
        mem: Option<Mem>,
    ) -> Result<(), Errno> {
        let user = self.sessions.get(&key(request.session)).map_or(0, |session| session.user);
        let target = scratch.targets.iter().position(|(id, _)| *id == export);
        let open = self.table.get(export).ok_or(Errno::ENODEV)?;
        let target = target.unwrap_or_else(|| {
            scratch.targets.push((export, Arc::clone(&open.backend)));
            if scratch.ios.len() < scratch.targets.len() {
                scratch.ios.push(Vec::new());
            }
            scratch.targets.len() - 1
        });
        let token = self.ops.insert(Op {
            op: request.op,
            open: io.open,
            export,
            kind: io.op,
            len: io.len,
            room: request.room,
            region: open.region,
            next: None,
        });
        let new_io = |op, offset, len| {
            let mut io = BackendIo::new(token, op, offset, len);
            io.user = user;
            io
        };
        let flush = || new_io(IoOp::Flush, 0, 0);
        let mut first = new_io(io.op, io.offset, io.len);
        first.fua = io.fua;
        first.nounmap = io.nounmap;
        first.prio = io.prio;
        first.mem = mem.filter(|_| io.op.has_data());
        if io.preflush || io.fua {
            let mut next = None;
            let backend = &open.backend;
            let step = |io, next| Some(Box::new(Step { backend: Arc::clone(backend), io, next }));
            if io.fua && !backend.limits().fua {
                first.fua = false;
                next = step(flush(), None);
            }
            if io.preflush {
                next = step(first, next);
                first = flush();
            }
            if let Some(op) = self.ops.get_mut(token) {
                op.next = next;
            }
        }
        scratch.ios[target].push(first);
        Ok(())
    }
}

impl Handler for Dispatcher {
    fn rdma_ev(&self, rtrs: &Rtrs, requests: &mut Vec<Request>) {
        let Some(done) =
            self.weak_self.upgrade().map(|dispatcher| dispatcher as Arc<dyn BackendDone>)
        else {
            return;
        };
        let mut state = self.lock();
        let mut scratch = state.scratch.pop().unwrap_or_default();
        for request in requests.drain(..) {
            let session = key(request.session);
            let (room, data_len) = (request.room, request.data.len);
            let act = state.core.message(session, request.dir, room, data_len, &request.usr);
            let (op, errno) = match act {
                Act::Io { export, io } => {
                    let mem = state.memory(rtrs, &request);
                    match state.add_io(&mut scratch, &request, export, &io, mem) {
                        Ok(()) => continue,
                        Err(errno) => {
                            state.core.io_done(io.open);
                            (request.op, errno.neg())
                        }
                    }
                }
                Act::Reply { errno, data } => {
                    let bytes = data.bytes();
                    let mem = if bytes.is_empty() { None } else { state.memory(rtrs, &request) };
                    let written = write_reply(mem.as_ref(), room, bytes);
                    (request.op, if written { errno } else { Errno::EINVAL.neg() })
                }
                Act::Open { ticket, name, access } => {
                    let data = state.memory(rtrs, &request);
                    state.pending.insert(ticket, PendingAnswer { op: request.op, data, room });
                    let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
                    if jobs.send(Job::Open(OpenJob { ticket, session, name, access })).is_err() {
                        // The thread lives as long as the dispatcher.
                        state.core.opened(ticket, Err(Errno::ENOMEM));
                    }
                    continue;
                }
                Act::Later { ticket } => {
                    let data = state.memory(rtrs, &request);
                    state.pending.insert(ticket, PendingAnswer { op: request.op, data, room });
                    continue;
                }
                _ => (request.op, Errno::EINVAL.neg()),
            };
            scratch.answers.push((op, errno, None));
        }
        drop(state);
        if !scratch.answers.is_empty() {
            rtrs.respond(&mut scratch.answers.drain(..));
        }
        for ((_, backend), ios) in scratch.targets.iter().zip(&mut scratch.ios) {
            submit_to_backend(&**backend, ios, &done);
        }
        scratch.targets.clear();
        self.lock().scratch.push(scratch);
        self.flush_answers(rtrs);
    }

    fn link_ev(&self, rtrs: &Rtrs, event: LinkEv) -> Result<(), Errno> {
        let mut state = self.lock();
        match event {
            LinkEv::Connected { session, name } => {
                let name = name.as_str().to_owned();
                state.core.link_up(key(session), &name);
                let user = state.users.hash_one(&name);
                state.sessions.insert(key(session), Session { name, user, memory: None });
            }
            LinkEv::Disconnected { session } => {
                state.core.link_down(key(session));
                state.sessions.remove(&key(session));
            }
        }
        drop(state);
        self.flush_answers(rtrs);
        Ok(())
    }
}

impl BackendDone for Dispatcher {
    fn done(&self, results: &[BackendResult]) {
        for batch in results.chunks(BATCH) {
            self.complete_batch(batch);
        }
    }
}

impl Dispatcher {
    fn complete_batch(&self, results: &[BackendResult]) {
        let mut answers: [Option<Answer>; BATCH] = [None; BATCH];
        let mut steps = Vec::new();
        let mut count = 0;
        let mut state = self.lock();
        for result in results {
            if result.errno == 0 {
                let next = state.ops.get_mut(result.token).and_then(|op| op.next.take());
                if let Some(step) = next {
                    steps.push((result.token, step));
                    continue;
                }
            }
            let Some(op) = state.ops.remove(result.token) else { continue };
            state.core.io_done(op.open);
            let from = match (result.direct, op.region) {
                (Some(offset), Some(region)) if result.errno == 0 && op.room > 0 => {
                    Some(MemRef { region, offset, len: op.len.min(op.room) })
                }
                _ => None,
            };
            // The answer carries a status of the block layer [NB-23] [NB-26].
            let magnitude = u16::try_from(result.errno.unsigned_abs()).unwrap_or(u16::MAX);
            let errno = -i32::from(status_of_errno(magnitude));
            if errno == 0 {
                state.table.count(op.export, op.kind, op.len);
            } else {
                let why = Errno(i32::from(magnitude));
                state.table.fail(op.export, op.kind, why);
            }
            answers[count] = Some((op.op, errno, from));
            count += 1;
        }
        for (token, step) in &mut steps {
            if let Some(op) = state.ops.get_mut(*token) {
                op.next = step.next.take();
            }
        }
        drop(state);
        let Some(rtrs) = self.rtrs() else { return };
        rtrs.respond(&mut answers[..count].iter().copied().flatten());
        self.flush_answers(&rtrs);
        let Some(done) =
            self.weak_self.upgrade().map(|dispatcher| dispatcher as Arc<dyn BackendDone>)
        else {
            return;
        };
        for (_, step) in steps {
            let Step { backend, io, .. } = *step;
            submit_to_backend(&*backend, &mut vec![io], &done);
        }
    }

    /// Reads the size of a store anew, and checks IO of its open devices against that from now on.
    fn resize(&self, name: &str, of: Identity, backend: &dyn Backend) -> Result<u64, Error> {
        let failed = |error: io::Error| Error::io(format!("resizing export {name}"), &error);
        let bytes = backend.resize().map_err(failed)?;
        let open = self.lock().table.by_identity(of);
        if let Some((id, export)) = open {
            // If it was opened by another name, the open store is another one.
            export.backend.resize().map_err(failed)?;
            let limits = self.limits(&*export.backend, export.read_only);
            self.lock().core.set_limits(id, limits);
        }
        Ok(bytes)
    }

    /// Returns the limits of a store that is being opened, with its present size.
    fn current_limits(&self, backend: &dyn Backend, read_only: bool) -> Limits {
        // If the size cannot be read, the last one stays: IO shows what is wrong.
        let _ = backend.resize();
        self.limits(backend, read_only)
    }

    /// Finds and opens the export that a client asked for.
    fn find(&self, rtrs: &Rtrs, job: &OpenJob) -> Result<(ExportId, Limits), Errno> {
        let session = self.lock().sessions.get(&job.session).map(|session| session.name.clone());
        let session = session.ok_or(Errno::ENODEV)?;
        let exports = self.exports();
        let found = exports.find(&job.name, &session, job.access)?;
        // Decided by this name, whatever other names of the same store allow.
        if found.read_only && job.access != Access::Ro {
            return Err(Errno::EACCES);
        }
        let reopened = self.lock().table.reopen(found.identity, job.access);
        if let Some((id, export)) = reopened {
            let limits = self.current_limits(&*export.backend, export.read_only);
            self.lock().core.set_limits(id, limits);
            return Ok((id, limits));
        }
        // Only this thread opens exports, so no other open of the same store runs now.
        let read_only = found.read_only;
        let backend = found.store.backend(read_only)?;
        let limits = self.current_limits(&*backend, read_only);
        let region = match backend.region().filter(|buffer| !buffer.is_empty()) {
            Some(buffer) => Some(self.region(rtrs, found.identity, buffer)?),
            None => None,
        };
        let export = OpenExport { backend, region, label: found.label.into(), read_only };
        let inserted = self.lock().table.insert(found.identity, export, &exports);
        // Dropped without the lock.
        let id = inserted.map_err(|(errno, _refused)| errno)?;
        // Other clients may have it open already, for reading.
        self.lock().core.set_limits(id, limits);
        Ok((id, limits))
    }
}

impl Dispatcher {
    /// Registers exported memory, once. It stays registered after the last close, since answers
    /// sent from it may have to be retransmitted.
    fn region(
        &self,
        rtrs: &Rtrs,
        identity: Identity,
        buffer: Arc<Buffer>,
    ) -> Result<RegionId, Errno> {
        if let Some(region) = self.lock().regions.get(&identity) {
            return Ok(*region);
        }
        let region = rtrs.add_region(buffer).map_err(|error| error.errno())?;
        self.lock().regions.insert(identity, region);
        Ok(region)
    }
}

/// Body of the thread that opens exports: it may block, and no other thread waits for it [NB-49].
fn open_exports(dispatcher: &Weak<Dispatcher>, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        let Some(dispatcher) = dispatcher.upgrade() else { return };
        let Some(rtrs) = dispatcher.rtrs() else { return };
        match job {
            Job::Open(job) => {
                let changing = dispatcher.lock_changes();
                let found = dispatcher.find(&rtrs, &job);
                dispatcher.lock().core.opened(job.ticket, found);
                drop(changing);
                dispatcher.flush_answers(&rtrs);
            }
            Job::Release(export) => drop(export),
        }
    }
}

impl tree::Exports for ExportServer {
    fn exports(&self) -> Vec<tree::ExportInfo> {
        let served = self.dispatcher.exports();
        let state = self.dispatcher.lock();
        let mut all = Vec::new();
        for name in served.names() {
            let name = String::from_utf8_lossy(name).into_owned();
            let store = served.store(&name);
            let Some((identity, backend)) = store else { continue };
            if state.table.by_identity(identity).is_none() {
                let read_only = backend.limits().read_only || served.read_only(&name);
                all.push(tree::ExportInfo {
                    name,
                    bytes: backend.limits().bytes,
                    read_only,
                    traffic: Traffic::default(),
                    failures: state.table.failures(identity),
                    opens: Vec::new(),
                });
            }
        }
        let opens = state.core.opens();
        for (id, export, traffic, failures) in state.table.iter() {
            let limits = self.dispatcher.limits(&*export.backend, export.read_only);
            let its_opens = opens.iter().filter(|open| open.export == id);
            let inflight: u32 = its_opens.clone().map(|open| open.in_flight).sum();
            let opens = its_opens.map(|open| tree::OpenInfo {
                session: open.session_name.clone(),
                access: open.access,
                mapping_path: String::from_utf8_lossy(&open.mapping_path).into_owned(),
            });
            all.push(tree::ExportInfo {
                name: export.label.to_string(),
                bytes: limits.bytes,
                read_only: limits.read_only,
                traffic: Traffic { inflight: inflight.into(), ..*traffic },
                failures,
                opens: opens.collect(),
            });
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn force_close(&self, export: &str, session: &str) -> Result<(), Errno> {
        let mut state = self.dispatcher.lock();
        let id = state.table.iter().find(|(_, open, ..)| &*open.label == export);
        let id = id.map(|(id, ..)| id).ok_or(Errno::ENOENT)?;
        let opens = state.core.opens();
        let open = opens.iter().find(|open| open.export == id && open.session_name == session);
        let open = open.ok_or(Errno::ENOENT)?.id;
        let closed = state.core.force_close(open);
        drop(state);
        self.dispatcher.flush_answers(&self.rtrs);
        closed
    }
}
