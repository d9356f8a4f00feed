//! The server: RTRS requests in, storage behind.
//!
//! ```text
//!  engine thread:  rdma_ev --> core.message --> Backend::submit ... Backend::kick
//!                     |             |  \                |
//!                     |     answers at once   `--> bowline-rnbd-open: finds and opens exports
//!                     v                                 v
//!  any thread:     Server::respond <------------ BackendDone::done
//! ```
//!
//! One lock guards everything here. It is held for no system call; of storage only the limits are
//! asked for under it, and of the transport only, once for each session, where its memory is.

mod exports;
mod ops;
mod table;

use bowline_base::entropy::random_u64;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult};
use bowline_rnbd::server::{
    Act, CheckedIo, Core, CoreLimits, ExportId, OpenId, OpenInfo, SessKey, Ticket,
};
use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_rtrs::{MemRef, RegionId};
use bowline_rtrs_driver::Engine;
use bowline_rtrs_driver::server::{
    Handler, LinkEv, OpId, Request, Server as Rtrs, ServerConfig as RtrsConfig, SessId,
};
use bowline_verbs::{Buffer, Mem, contain};
use bowline_wire::rnbd::{Access, status_of_errno};

use crate::error::Error;
use crate::tree::{self, Traffic};
use exports::Identity;
use ops::{Op, Ops, Step};
use table::{OpenExport, Table};

pub use exports::{Exports, FileOptions, Grant, Moved};

/// Results that are answered together.
const TOGETHER: usize = 64;

/// How a server behaves.
#[derive(Clone, Debug, Default)]
pub struct ServerConfig {
    /// Of the transport: chunks, keys, who may come.
    pub rtrs: RtrsConfig,
    /// What clients can make the server keep.
    pub limits: CoreLimits,
}

/// An answer of the transport.
type Answer = (OpId, i32, Option<MemRef>);

/// A message whose answer comes later: where that goes.
struct Waiting {
    op: OpId,
    data: Option<Mem>,
    room: u32,
}

struct Session {
    name: String,
    /// The chunks, once a request has shown them.
    memory: Option<Arc<Buffer>>,
}

struct State {
    core: Core,
    sessions: BTreeMap<SessKey, Session>,
    table: Table,
    /// Exported memory, as long as this server is there.
    regions: BTreeMap<Identity, RegionId>,
    waiting: BTreeMap<Ticket, Waiting>,
    ops: Ops,
    scratch: Vec<Scratch>,
}

/// Lists that are used again.
#[derive(Default)]
struct Scratch {
    /// For each storage, in the order they were met.
    runs: Vec<(ExportId, Arc<dyn Backend>)>,
    ios: Vec<Vec<BackendIo>>,
    answers: Vec<Answer>,
}

/// Work for the thread that may block.
enum Job {
    /// Find and open an export.
    Open(Wanted),
    /// Let go of one: that waits for threads of its storage, which may wait for anybody here.
    LetGo(OpenExport),
}

/// An export that a client asked for.
struct Wanted {
    ticket: Ticket,
    session: SessKey,
    name: Vec<u8>,
    access: Access,
}

/// What storage tells results to.
struct Glue {
    state: Mutex<State>,
    exports: Exports,
    /// Bytes of one read or write that sessions allow.
    max_io: u32,
    rtrs: OnceLock<Weak<Rtrs>>,
    jobs: Mutex<Sender<Job>>,
    me: Weak<Glue>,
}

/// Hands requests to storage, which may be the program's own: what is left in the list when it
/// panics fails, and other storage goes on.
fn hand_over(backend: &dyn Backend, ios: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
    let handed = contain(|| {
        backend.submit(ios, done);
        backend.kick();
    });
    if handed.is_none() {
        let failed = |io: BackendIo| BackendResult {
            token: io.token,
            errno: Errno::EIO.neg(),
            direct: None,
        };
        let results: Vec<BackendResult> = ios.drain(..).map(failed).collect();
        done.done(&results);
    }
}

/// A server of exports. It serves until it is closed.
pub struct ExportServer {
    glue: Arc<Glue>,
    rtrs: Arc<Rtrs>,
}

impl std::fmt::Debug for ExportServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExportServer").field("exports", &self.glue.exports).finish_non_exhaustive()
    }
}

impl ExportServer {
    /// Offers `exports` at some addresses of the engine's devices. Clients that come back after a
    /// restart find them at once [NB-62].
    ///
    /// # Errors
    /// What listening comes to, `EAGAIN` when no thread can be started.
    pub fn open(
        engine: &Engine,
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
            waiting: BTreeMap::new(),
            ops: Ops::default(),
            scratch: Vec::new(),
        };
        let glue = Arc::new_cyclic(|me: &Weak<Glue>| Glue {
            state: Mutex::new(state),
            exports,
            max_io: config.rtrs.geometry.max_io(),
            rtrs: OnceLock::new(),
            jobs: Mutex::new(jobs),
            me: Weak::clone(me),
        });
        let worker = Arc::downgrade(&glue);
        let thread = thread::Builder::new().name("bowline-rnbd-open".to_owned());
        let started = thread.spawn(move || open_exports(&worker, &todo));
        started.map_err(|error| Error::io("starting a thread", &error))?;
        let handler = Arc::clone(&glue) as Arc<dyn Handler>;
        let rtrs = Rtrs::open(engine, at, config.rtrs, handler);
        let rtrs = rtrs.map_err(|error| Error::rtrs(&error))?;
        // Nobody else sets it.
        let _ = glue.rtrs.set(Arc::downgrade(&rtrs));
        Ok(Arc::new(Self { glue, rtrs }))
    }

    /// Returns the transport's side: sessions, paths, counts.
    pub const fn rtrs(&self) -> &Arc<Rtrs> {
        &self.rtrs
    }

    /// Returns what is open, by session and id.
    pub fn opens(&self) -> Vec<OpenInfo> {
        self.glue.lock().core.opens()
    }

    /// Closes a device under its client, whose IO fails from now on [NB-21].
    ///
    /// # Errors
    /// `ENODEV` when it is not open.
    pub fn force_close(&self, open: OpenId) -> Result<(), Error> {
        let closed = self.glue.lock().core.force_close(open);
        self.glue.settle(&self.rtrs);
        closed.map_err(|errno| Error::new("closing an open device by force", errno))
    }

    /// Looks again how big the storage of an export is; returns its bytes. Every open looks too.
    ///
    /// IO of those who have it open is judged by the new size at once. The protocol has no word to
    /// tell them: they learn of it when they open it again, or are told so there [NB-37].
    ///
    /// # Errors
    /// `ENOENT` for a name that is not offered by itself, and what looking comes to.
    pub fn resize(&self, name: &str) -> Result<u64, Error> {
        let store = self.glue.exports.store(name);
        let (identity, backend) =
            store.ok_or_else(|| Error::new(format!("resizing export {name}"), Errno::ENOENT))?;
        self.glue.resize(name, identity, &*backend)
    }

    /// Looks again how big everything is that is offered by itself or open; returns those whose
    /// size is another now, and those that could not be looked at.
    pub fn resize_all(&self) -> Vec<(String, Result<u64, Error>)> {
        let exports = &self.glue.exports;
        let named = exports.names().filter_map(|name| {
            let name = String::from_utf8_lossy(name).into_owned();
            let (identity, backend) = exports.store(&name)?;
            Some((name, identity, backend))
        });
        let mut all: Vec<_> = named.collect();
        for (identity, export) in self.glue.lock().table.stores() {
            if all.iter().all(|(_, known, _)| *known != identity) {
                all.push((export.label.to_string(), identity, Arc::clone(&export.backend)));
            }
        }
        let look = |(name, identity, backend): (String, _, Arc<dyn Backend>)| {
            let before = backend.limits().bytes;
            let bytes = self.glue.resize(&name, identity, &*backend);
            (!matches!(bytes, Ok(now) if now == before)).then_some((name, bytes))
        };
        all.into_iter().filter_map(look).collect()
    }

    /// Looks where the files are now that were offered by their paths ([`Exports::file`]); returns
    /// those whose path is gone, or leads to another file: what was opened at first is served until
    /// the end.
    pub fn moved(&self) -> Vec<Moved> {
        self.glue.exports.moved()
    }

    /// Returns how many requests are in the hands of storage.
    pub fn in_flight(&self) -> usize {
        self.glue.lock().ops.count()
    }

    /// Closes all sessions, and waits until they are closed and storage has answered.
    pub fn close(&self) {
        self.rtrs.close();
    }
}

impl Glue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers what the core has ready, and lets go of what nobody has open.
    fn settle(&self, rtrs: &Rtrs) {
        loop {
            let mut answers = Vec::new();
            let mut left = Vec::new();
            let mut state = self.lock();
            while let Some(answer) = state.core.poll_answer() {
                let Some(waiting) = state.waiting.remove(&answer.ticket) else { continue };
                let op = waiting.op;
                let written = write_reply(waiting.data.as_ref(), waiting.room, answer.data.bytes());
                let errno = if written { answer.errno } else { Errno::EINVAL.neg() };
                answers.push((op, errno, None));
            }
            while let Some(export) = state.core.poll_release() {
                for export in state.table.release(export) {
                    let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
                    // At the end of the server nobody takes it.
                    left.extend(jobs.send(Job::LetGo(export)).err());
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

    /// Returns the limits under which an export is offered: no request is longer than sessions
    /// allow, whatever storage could do.
    fn limits(&self, backend: &dyn Backend, read_only: bool) -> Limits {
        let limits = backend.limits();
        Limits {
            read_only: limits.read_only || read_only,
            max_io: limits.max_io.min(self.max_io),
            ..limits
        }
    }

    fn rtrs(&self) -> Option<Arc<Rtrs>> {
        // Set before `ExportServer::open` returns; storage may be quicker.
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
    /// Returns the place of a request's data.
    fn memory(&mut self, rtrs: &Rtrs, request: &Request) -> Option<Mem> {
        let session = self.sessions.get_mut(&key(request.session))?;
        let offset = usize::try_from(request.data.offset).ok()?;
        let len = request.data.len as usize;
        if session.memory.is_none() {
            session.memory = rtrs.memory(request.session);
        }
        Some(Mem { buffer: session.memory.clone()?, offset, len })
    }

    /// Puts an IO into the list of its storage.
    fn add_io(
        &mut self,
        scratch: &mut Scratch,
        request: &Request,
        export: ExportId,
        io: &CheckedIo,
        mem: Option<Mem>,
    ) -> Result<(), Errno> {
        let run = scratch.runs.iter().position(|(id, _)| *id == export);
        let open = self.table.get(export).ok_or(Errno::ENODEV)?;
        let run = run.unwrap_or_else(|| {
            scratch.runs.push((export, Arc::clone(&open.backend)));
            if scratch.ios.len() < scratch.runs.len() {
                scratch.ios.push(Vec::new());
            }
            scratch.runs.len() - 1
        });
        let token = self.ops.insert(Op {
            op: request.op,
            open: io.open,
            export,
            what: io.op,
            len: io.len,
            room: request.room,
            region: open.region,
            then: None,
        });
        let flush = |token| BackendIo {
            token,
            op: IoOp::Flush,
            offset: 0,
            len: 0,
            fua: false,
            nounmap: false,
            prio: 0,
            mem: None,
        };
        let mut first = BackendIo {
            token,
            op: io.op,
            offset: io.offset,
            len: io.len,
            fua: io.fua,
            nounmap: io.nounmap,
            prio: io.prio,
            mem: mem.filter(|_| io.op.has_data()),
        };
        if io.preflush || io.fua {
            let mut then = None;
            let backend = &open.backend;
            let step = |io, then| Some(Box::new(Step { backend: Arc::clone(backend), io, then }));
            if io.fua && !backend.limits().fua {
                first.fua = false;
                then = step(flush(token), None);
            }
            if io.preflush {
                then = step(first, then);
                first = flush(token);
            }
            if let Some(op) = self.ops.get_mut(token) {
                op.then = then;
            }
        }
        scratch.ios[run].push(first);
        Ok(())
    }
}

impl Handler for Glue {
    fn rdma_ev(&self, rtrs: &Rtrs, requests: &mut Vec<Request>) {
        let Some(done) = self.me.upgrade().map(|glue| glue as Arc<dyn BackendDone>) else {
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
                    state.waiting.insert(ticket, Waiting { op: request.op, data, room });
                    let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
                    if jobs.send(Job::Open(Wanted { ticket, session, name, access })).is_err() {
                        // The thread lives as long as this does.
                        state.core.opened(ticket, Err(Errno::ENOMEM));
                    }
                    continue;
                }
                Act::Later { ticket } => {
                    let data = state.memory(rtrs, &request);
                    state.waiting.insert(ticket, Waiting { op: request.op, data, room });
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
        for ((_, backend), ios) in scratch.runs.iter().zip(&mut scratch.ios) {
            hand_over(&**backend, ios, &done);
        }
        scratch.runs.clear();
        self.lock().scratch.push(scratch);
        self.settle(rtrs);
    }

    fn link_ev(&self, rtrs: &Rtrs, event: LinkEv) -> Result<(), Errno> {
        let mut state = self.lock();
        match event {
            LinkEv::Connected { session, name } => {
                let name = name.as_str().to_owned();
                state.core.link_up(key(session), &name);
                state.sessions.insert(key(session), Session { name, memory: None });
            }
            LinkEv::Disconnected { session } => {
                state.core.link_down(key(session));
                state.sessions.remove(&key(session));
            }
        }
        drop(state);
        self.settle(rtrs);
        Ok(())
    }
}

impl BackendDone for Glue {
    fn done(&self, results: &[BackendResult]) {
        for together in results.chunks(TOGETHER) {
            self.done_together(together);
        }
    }
}

impl Glue {
    fn done_together(&self, results: &[BackendResult]) {
        let mut answers: [Option<Answer>; TOGETHER] = [None; TOGETHER];
        let mut steps = Vec::new();
        let mut count = 0;
        let mut state = self.lock();
        for result in results {
            if result.errno == 0 {
                let then = state.ops.get_mut(result.token).and_then(|op| op.then.take());
                if let Some(step) = then {
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
            // What travels is the status of the block layer [NB-23] [NB-26].
            let magnitude = u16::try_from(result.errno.unsigned_abs()).unwrap_or(u16::MAX);
            let errno = -i32::from(status_of_errno(magnitude));
            if errno == 0 {
                state.table.count(op.export, op.what, op.len);
            }
            answers[count] = Some((op.op, errno, from));
            count += 1;
        }
        for (token, step) in &mut steps {
            if let Some(op) = state.ops.get_mut(*token) {
                op.then = step.then.take();
            }
        }
        drop(state);
        let Some(rtrs) = self.rtrs() else { return };
        rtrs.respond(&mut answers[..count].iter().copied().flatten());
        self.settle(&rtrs);
        let Some(done) = self.me.upgrade().map(|glue| glue as Arc<dyn BackendDone>) else {
            return;
        };
        for (_, step) in steps {
            let Step { backend, io, .. } = *step;
            hand_over(&*backend, &mut vec![io], &done);
        }
    }

    /// Looks how big a store is now, and judges the IO of those who have it open by that.
    fn resize(&self, name: &str, of: Identity, backend: &dyn Backend) -> Result<u64, Error> {
        let failed = |error: io::Error| Error::io(format!("resizing export {name}"), &error);
        let bytes = backend.resize().map_err(failed)?;
        let open = self.lock().table.by_identity(of);
        if let Some((id, export)) = open {
            // It was perhaps opened by another name, and then the store is another.
            export.backend.resize().map_err(failed)?;
            let limits = self.limits(&*export.backend, export.read_only);
            self.lock().core.set_limits(id, limits);
        }
        Ok(bytes)
    }

    /// Returns the limits of a store that is being opened, with the size it has now.
    fn limits_now(&self, backend: &dyn Backend, read_only: bool) -> Limits {
        // One that cannot tell keeps the size it had: its IO says more about it.
        let _ = backend.resize();
        self.limits(backend, read_only)
    }

    /// Opens what a client asked for.
    fn find(&self, rtrs: &Rtrs, job: &Wanted) -> Result<(ExportId, Limits), Errno> {
        let session = self.lock().sessions.get(&job.session).map(|session| session.name.clone());
        let session = session.ok_or(Errno::ENODEV)?;
        let found = self.exports.find(&job.name, &session, job.access)?;
        // By this name, whatever other names of the same say.
        if found.read_only && job.access != Access::Ro {
            return Err(Errno::EACCES);
        }
        let again = self.lock().table.again(found.identity, job.access);
        if let Some((id, export)) = again {
            let limits = self.limits_now(&*export.backend, export.read_only);
            self.lock().core.set_limits(id, limits);
            return Ok((id, limits));
        }
        // One thread does this, so nobody else opens the same now.
        let read_only = found.read_only;
        let backend = found.store.backend(read_only)?;
        let limits = self.limits_now(&*backend, read_only);
        let region = match backend.region().filter(|buffer| !buffer.is_empty()) {
            Some(buffer) => Some(self.region(rtrs, found.identity, buffer)?),
            None => None,
        };
        let export = OpenExport { backend, region, label: found.label.into(), read_only };
        let id = self.lock().table.insert(found.identity, export, &self.exports)?;
        // Others may have it open already, for reading.
        self.lock().core.set_limits(id, limits);
        Ok((id, limits))
    }
}

impl Glue {
    /// Registers memory that is exported, once: answers that were sent from it may have to be sent
    /// again when nobody has it open any more.
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

/// The thread that opens exports: it may block, and nothing else waits for it [NB-49].
fn open_exports(glue: &Weak<Glue>, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        let Some(glue) = glue.upgrade() else { return };
        let Some(rtrs) = glue.rtrs() else { return };
        match job {
            Job::Open(wanted) => {
                let found = glue.find(&rtrs, &wanted);
                glue.lock().core.opened(wanted.ticket, found);
                glue.settle(&rtrs);
            }
            Job::LetGo(export) => drop(export),
        }
    }
}

impl tree::Exports for ExportServer {
    fn exports(&self) -> Vec<tree::ExportInfo> {
        let state = self.glue.lock();
        let mut all = Vec::new();
        for name in self.glue.exports.names() {
            let name = String::from_utf8_lossy(name).into_owned();
            let store = self.glue.exports.store(&name);
            let Some((identity, backend)) = store else { continue };
            if state.table.by_identity(identity).is_none() {
                let read_only = backend.limits().read_only || self.glue.exports.read_only(&name);
                all.push(tree::ExportInfo {
                    name,
                    bytes: backend.limits().bytes,
                    read_only,
                    traffic: Traffic::default(),
                    opens: Vec::new(),
                });
            }
        }
        let opens = state.core.opens();
        for (id, export, traffic) in state.table.iter() {
            let limits = self.glue.limits(&*export.backend, export.read_only);
            let of_it = opens.iter().filter(|open| open.export == id);
            let inflight: u32 = of_it.clone().map(|open| open.in_flight).sum();
            let opens = of_it.map(|open| tree::OpenInfo {
                session: open.session_name.clone(),
                access: open.access,
                mapping_path: String::from_utf8_lossy(&open.mapping_path).into_owned(),
            });
            all.push(tree::ExportInfo {
                name: export.label.to_string(),
                bytes: limits.bytes,
                read_only: limits.read_only,
                traffic: Traffic { inflight: inflight.into(), ..*traffic },
                opens: opens.collect(),
            });
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn force_close(&self, export: &str, session: &str) -> Result<(), Errno> {
        let mut state = self.glue.lock();
        let id = state.table.iter().find(|(_, open, _)| &*open.label == export);
        let id = id.map(|(id, ..)| id).ok_or(Errno::ENOENT)?;
        let opens = state.core.opens();
        let open = opens.iter().find(|open| open.export == id && open.session_name == session);
        let open = open.ok_or(Errno::ENOENT)?.id;
        let closed = state.core.force_close(open);
        drop(state);
        self.glue.settle(&self.rtrs);
        closed
    }
}
