//! RTRS: a server that keeps a store in memory, and a client of its library API.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bowline_rtrs_driver::client::{
    Completed, Completer, Done, Permit, PermitKind, Region, Req, Session, SessionBuilder,
    Wait as Permits,
};
use bowline_rtrs_driver::server::{Handler, LinkEv, OpId, Request, Server, ServerConfig, SessId};
use bowline_rtrs_driver::{Dir, Engine, Errno, Geometry, MemRef, PORT, Policy, RegionId};
use bowline_verbs::Buffer;

use super::{Ended, Gauge, Load, NAP, addresses, counters, engine, fill, probe, succeeded};
use crate::cell::{Cell, Kind, Subject, Wait};
use crate::role::{Role, Side, done, done_with, stopping};

/// Bytes of a chunk kept for user message and header, as with default settings.
const HEADER: u32 = 4096;
/// Bits of a chunk's number and of an offset in it together, and largest number of chunks.
const BITS: u32 = 28;
const CHUNKS: u16 = 512;

/// The chunks of a server that takes requests of `size` bytes: the default ones if those are
/// enough.
pub(super) fn geometry(size: usize) -> Result<Geometry, String> {
    let default = ServerConfig::default().geometry;
    if size <= default.max_io() as usize {
        return Ok(default);
    }
    let chunk = (size as u32 + HEADER).next_power_of_two();
    let chunks = CHUNKS.min(1 << (BITS - chunk.ilog2()).min(15));
    Geometry::of_chunk(chunks, chunk, HEADER).map_err(|e| e.to_string())
}

/// Says what chunks the cells with large requests have.
pub(crate) fn large_chunks() -> String {
    let text = |(size, name): (usize, &str)| match geometry(size) {
        Ok(of) => format!("{name} in {} chunks of {} KiB", of.queue_depth(), of.chunk() >> 10),
        Err(why) => format!("{name}: {why}"),
    };
    [(128 << 10, "128 KiB"), (1 << 20, "1 MiB")].map(text).join(", ")
}

/// A request's answer.
type Answer = (OpId, i32, Option<MemRef>);

struct Store {
    memory: Arc<Buffer>,
    region: OnceLock<RegionId>,
    state: Mutex<State>,
    /// Requests so far.
    served: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Chunks of the sessions that are there.
    chunks: BTreeMap<SessId, Arc<Buffer>>,
    answers: Vec<Answer>,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `chunks`: of the request's session.
    fn execute(&self, chunks: &Buffer, request: &Request) -> Result<Option<MemRef>, Errno> {
        let offset: [u8; 8] = request.usr[..].try_into().map_err(|_| Errno::EINVAL)?;
        let offset = u64::from_le_bytes(offset);
        let region = *self.region.get().ok_or(Errno::EIO)?;
        let len = if request.dir == Dir::Read { request.room } else { request.data.len };
        if offset.checked_add(len.into()).is_none_or(|end| end > self.memory.len() as u64) {
            return Err(Errno::EIO);
        }
        if request.dir == Dir::Read {
            return Ok(Some(MemRef { region, offset, len }));
        }
        chunks.copy_to(request.data.offset as usize, &self.memory, offset as usize, len as usize);
        Ok(None)
    }
}

impl Handler for Store {
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>) {
        // A number for people; nothing is published by it.
        self.served.fetch_add(requests.len() as u64, Relaxed);
        let State { chunks, answers } = &mut *self.lock();
        answers.extend(requests.drain(..).map(|request| {
            let chunks = chunks.get(&request.session).ok_or(Errno::EIO);
            match chunks.and_then(|chunks| self.execute(chunks, &request)) {
                Ok(from) => (request.op, 0, from),
                Err(errno) => (request.op, errno.neg(), None),
            }
        }));
        server.respond(&mut answers.drain(..));
    }

    fn link_ev(&self, server: &Server, event: LinkEv) -> Result<(), Errno> {
        match event {
            LinkEv::Connected { session, .. } => {
                let memory = server.memory(session).ok_or(Errno::EIO)?;
                self.lock().chunks.insert(session, memory);
            }
            LinkEv::Disconnected { session } => {
                self.lock().chunks.remove(&session);
            }
        }
        Ok(())
    }
}

pub(super) fn serve(mut role: Role) -> Result<(), String> {
    let (device, engine) = engine(&role)?;
    let memory = Arc::new(Buffer::new(role.cell.store()).map_err(|e| format!("memory: {e}"))?);
    fill(&memory);
    let store = Arc::new(Store {
        memory,
        region: OnceLock::new(),
        state: Mutex::default(),
        served: AtomicU64::new(0),
    });
    let at: Vec<SocketAddr> =
        addresses(&role.cell, Side::Rx).into_iter().map(|ip| SocketAddr::new(ip, PORT)).collect();
    let always_invalidate = role.cell.subject != Subject::RtrsKept;
    let geometry = geometry(role.cell.size)?;
    let config = ServerConfig { always_invalidate, geometry, ..ServerConfig::default() };
    let server = Server::open(&engine, &at, config, Arc::clone(&store) as Arc<dyn Handler>);
    let server = server.map_err(|e| e.to_string())?;
    let region = server.add_region(Arc::clone(&store.memory)).map_err(|e| e.to_string())?;
    store.region.get_or_init(|| region);
    role.ready("")?;
    if role.cell.kind == Kind::IoReset {
        reset_a_path(&role.cell, &server, &store)?;
    }
    while !stopping() {
        std::thread::sleep(NAP);
    }
    done_with(store.served.load(Relaxed), &counters(&device));
    Ok(())
}

/// Ends a path when the client is in the midst of its window.
fn reset_a_path(cell: &Cell, server: &Server, store: &Store) -> Result<(), String> {
    while store.served.load(Relaxed) == 0 && !stopping() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(until_loss(cell));
    let sessions = server.sessions();
    let paths = sessions.first().map_or(&[][..], |session| &session.paths);
    let [path, _] = paths else { return Err(format!("{} paths instead of 2", paths.len())) };
    server.disconnect_path(path.path).map_err(|e| e.to_string())
}

/// Time from the first request to the loss of a path.
pub(super) fn until_loss(cell: &Cell) -> Duration {
    Duration::from_millis(cell.warm_ms + cell.window_ms / 4)
}

impl Completer for Ended {
    fn completed(&self, done: &[Completed]) {
        self.extend(done.iter().map(|done| (done.tag, done.errno)));
    }
}

/// A session and the requests of a cell.
pub(super) struct Client {
    session: Arc<Session>,
    region: Region,
    permits: Vec<Permit>,
    load: Load,
    dir: Dir,
    size: usize,
    wait: Wait,
    ended: Arc<Ended>,
    offsets: Vec<[u8; 8]>,
}

impl Client {
    pub(super) fn open(cell: &Cell, engine: &Engine) -> Result<Self, String> {
        let (size, depth) = (cell.size, cell.depth);
        let near = addresses(cell, Side::Tx).into_iter().map(Some);
        let paths: Vec<_> = near.zip(addresses(cell, Side::Rx)).collect();
        let policy = Policy::ALL.get(usize::from(cell.policy)).copied().unwrap_or_default();
        let builder = SessionBuilder::new("bench").map_err(|e| e.to_string())?;
        let session = Session::open(engine, builder.paths(&paths).policy(policy));
        let session = session.map_err(|e| e.to_string())?;
        let region = session.region(depth * size).map_err(|e| e.to_string())?;
        let permits: Vec<Permit> =
            (0..depth).map_while(|_| session.get_permit(PermitKind::Io, Permits::No)).collect();
        if permits.len() < depth {
            return Err(format!("{} permits instead of {depth}", permits.len()));
        }
        let load = Load::new(cell);
        let dir = if load.write { Dir::Write } else { Dir::Read };
        let (ended, offsets) = (Arc::default(), vec![[0; 8]; depth]);
        Ok(Self { session, region, permits, load, dir, size, wait: cell.wait, ended, offsets })
    }

    /// Sends a request for each of some free slots.
    pub(super) fn send(&mut self, free: &[(u64, i32)]) -> Result<(), String> {
        for (slot, _) in free {
            let offset = self.load.next().to_le_bytes();
            self.offsets[*slot as usize] = offset;
            if self.load.write {
                self.region.buffer().write(*slot as usize * self.size, &offset);
            }
        }
        let piece = |slot: u64| self.region.piece(slot as usize * self.size, self.size as u32);
        let pieces: Vec<MemRef> = free.iter().map(|(slot, _)| piece(*slot)).collect();
        let mut requests = free.iter().zip(&pieces).map(|((slot, _), piece)| Req {
            dir: self.dir,
            permit: &self.permits[*slot as usize],
            usr: &self.offsets[*slot as usize],
            data: std::slice::from_ref(piece),
            done: Done { to: Arc::clone(&self.ended) as Arc<dyn Completer>, tag: *slot },
        });
        let sent = self.session.request_batch(&mut requests).map_err(|e| e.to_string())?;
        if sent < pieces.len() {
            return Err(format!("{sent} of {} requests could be sent", pieces.len()));
        }
        Ok(())
    }

    /// Waits until some have ended; none have when the parent asks for an end.
    pub(super) fn take(&self, free: &mut Vec<(u64, i32)>) {
        loop {
            let seen = self.session.ended();
            self.ended.take(free);
            if !free.is_empty() || stopping() {
                return;
            }
            if self.wait == Wait::Spin {
                self.session.poll();
            } else {
                self.session.wait(seen, Some(NAP));
            }
        }
    }

    /// Checks what was read by requests that have ended well.
    pub(super) fn check(&self, ended: &[(u64, i32)]) -> Result<(), String> {
        for (slot, _) in ended.iter().filter(|(_, errno)| !self.load.write && *errno == 0) {
            let mut first = [0; 8];
            self.region.buffer().read(*slot as usize * self.size, &mut first);
            self.load.check(u64::from_le_bytes(self.offsets[*slot as usize]), first)?;
        }
        Ok(())
    }
}

/// All slots, free.
pub(super) fn slots(cell: &Cell) -> Vec<(u64, i32)> {
    (0..cell.depth as u64).map(|slot| (slot, 0)).collect()
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let (device, engine) = engine(&role)?;
    role.ready("")?;
    let mut client = Client::open(&role.cell, &engine)?;
    let mut gauge = Gauge::new(&role, Some(probe(&device)));
    let mut free = slots(&role.cell);
    let mut answers = 0;
    while !stopping() {
        client.send(&free)?;
        client.take(&mut free);
        succeeded(&free)?;
        client.check(&free)?;
        answers += free.len() as u64;
        if gauge.add(free.len()) {
            break;
        }
    }
    done(answers, device.stats().udp_syscalls());
    std::process::exit(0); // what is on its way matters to nobody any more
}
