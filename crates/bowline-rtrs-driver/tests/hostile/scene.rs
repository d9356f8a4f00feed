//! A server with an honest client, which has a request in flight while another peer misbehaves.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use bowline_rtrs_driver::client::{
    Completed, Completer, Done, PathState, Permit, PermitKind, Region, Session, SessionBuilder,
    Wait,
};
use bowline_rtrs_driver::server::{
    Handler, LinkEv, Request, Server, ServerConfig, ServerCounters, SessionInfo,
};
use bowline_rtrs_driver::{Dir, Engine, Errno, Geometry, HbConfig, PORT};

use bowline_wire::rtrs::write_hdr;

use crate::common::{Store, at, device, engine, eventually, ip, write_and_read};
use crate::raw::{Conn, Ids, Path, Raw, raw};

/// Chunks of a session: 4 bits of number, of which 12 to 15 name none.
pub(crate) const DEPTH: u16 = 12;
/// Bytes of a chunk.
pub(crate) const CHUNK: u32 = 16_384;
/// The user message of requests that are kept.
const HOLD: [u8; 8] = *b"hold it!";
/// What the honest client writes with the request that is kept.
const BYTES: usize = 9000;
/// Offset in the store that others may write to.
pub(crate) const ELSEWHERE: usize = 1 << 20;

/// Memory is measured for the whole process: a test that measures it runs alone.
static MEASURED: RwLock<()> = RwLock::new(());

/// Guard that a test holds while it runs.
pub(crate) enum Turn {
    Beside { _of: RwLockReadGuard<'static, ()> },
    Alone { _of: RwLockWriteGuard<'static, ()> },
}

impl Turn {
    /// Together with other tests that measure nothing.
    pub(crate) fn beside() -> Self {
        Self::Beside { _of: MEASURED.read().unwrap_or_else(PoisonError::into_inner) }
    }

    fn alone() -> Self {
        Self::Alone { _of: MEASURED.write().unwrap_or_else(PoisonError::into_inner) }
    }
}

/// No heartbeats: the honest client's path carries only the test's own messages.
pub(crate) const fn quiet() -> HbConfig {
    HbConfig {
        interval: Duration::from_secs(3600),
        missed_max: 5,
        fast_path_detection: false,
        probe_interval: Duration::from_secs(3600),
        path_dead: Duration::from_secs(3),
    }
}

pub(crate) fn config(always_invalidate: bool) -> ServerConfig {
    ServerConfig {
        geometry: Geometry::of_chunk(DEPTH, CHUNK, 4096).unwrap(),
        always_invalidate,
        heartbeat: quiet(),
        ..ServerConfig::default()
    }
}

/// Serves from a store, and keeps some requests.
pub(crate) struct Guard {
    pub(crate) store: Store,
    pub(crate) held: Mutex<Vec<Request>>,
}

impl Guard {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { store: Store::unshared(), held: Mutex::default() })
    }
}

impl Guard {
    pub(crate) fn served(&self) -> u64 {
        self.store.served.load(SeqCst)
    }

    /// A good request over a path is served.
    pub(crate) fn serves(&self, raw: &mut Raw, path: &Path, conn: Conn, what: &str) {
        let served = self.served();
        let bytes = [at(ELSEWHERE).to_vec(), write_hdr(8).to_vec()].concat();
        raw.request(path, conn, 1, 8, &bytes);
        eventually(what, || self.served() == served + 1);
    }
}

impl Handler for Guard {
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>) {
        let is_held = |request: &mut Request| *request.usr == HOLD;
        self.held.lock().unwrap().extend(requests.extract_if(.., is_held));
        self.store.rdma_ev(server, requests);
    }

    fn link_ev(&self, server: &Server, event: LinkEv) -> Result<(), Errno> {
        self.store.link_ev(server, event)
    }
}

struct Ended(Mutex<Vec<i32>>);

impl Completer for Ended {
    fn completed(&self, done: &[Completed]) {
        self.0.lock().unwrap().extend(done.iter().map(|done| done.errno));
    }
}

/// State that must not change.
#[derive(PartialEq)]
struct Snapshot {
    info: SessionInfo,
    chunks: Vec<u8>,
    store: Vec<u8>,
    held: usize,
    ended: usize,
    reconnects: Vec<(i64, i64, u64)>,
}

pub(crate) struct Scene {
    pub(crate) net: u8,
    pub(crate) server: Arc<Server>,
    pub(crate) guard: Arc<Guard>,
    pub(crate) victim: Arc<Session>,
    pub(crate) raw: Raw,
    ended: Arc<Ended>,
    permit: Option<Permit>,
    before: Option<Snapshot>,
    _region: Region,
    engines: [Arc<Engine>; 2],
    _turn: Turn,
}

/// Outcome of an attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The path is closed, and counted as one that broke a rule.
    Violated,
    /// The path is closed.
    Closed,
    /// No effect: the path stays connected.
    Ignored,
}

impl Scene {
    /// The server is host 101, the honest client host 1, the hostile one host 66.
    pub(crate) fn new(net: u8, config: ServerConfig) -> Self {
        Self::in_turn(Turn::beside(), net, config)
    }

    /// For a test that measures how much memory is in use.
    pub(crate) fn measured(net: u8, config: ServerConfig) -> Self {
        Self::in_turn(Turn::alone(), net, config)
    }

    fn in_turn(turn: Turn, net: u8, config: ServerConfig) -> Self {
        let (server_device, victim_device) = (device(&[ip(net, 101)]), device(&[ip(net, 1)]));
        let engines = [engine(&server_device), engine(&victim_device)];
        let guard = Guard::new();
        let at_port = [SocketAddr::new(ip(net, 101), PORT)];
        let server = Server::open(&engines[0], &at_port, config, Arc::clone(&guard) as _).unwrap();
        let builder = SessionBuilder::new("victim").unwrap();
        let builder = builder.path(Some(ip(net, 1)), ip(net, 101)).heartbeat(quiet());
        let victim = Session::open(&engines[1], builder).unwrap();
        write_and_read(&victim, 0, 4096);
        let region = victim.region(BYTES).unwrap();
        let pattern: Vec<u8> = (0..BYTES).map(|n| (n * 7 + n / 251) as u8).collect();
        region.buffer().write(0, &pattern);
        let permit = victim.get_permit(PermitKind::Io, Wait::No).unwrap();
        let ended = Arc::new(Ended(Mutex::default()));
        let done = Done { to: Arc::clone(&ended) as _, tag: 0 };
        let piece = [region.piece(0, BYTES as u32)];
        victim.request(Dir::Write, &permit, &HOLD, &piece, done).unwrap();
        eventually("the request has come", || guard.held.lock().unwrap().len() == 1);
        let raw = raw(ip(net, 66));
        let mut scene = Self {
            net,
            server,
            guard,
            victim,
            raw,
            ended,
            permit: Some(permit),
            before: None,
            _region: region,
            engines,
            _turn: turn,
        };
        let before = scene.look();
        assert_eq!(before.chunks[..BYTES], pattern);
        scene.before = Some(before);
        scene
    }

    pub(crate) fn to(&self) -> IpAddr {
        ip(self.net, 101)
    }

    pub(crate) fn counters(&self) -> ServerCounters {
        self.server.counters()
    }

    /// What the server knows of the honest client.
    pub(crate) fn session(&self) -> SessionInfo {
        let is = |info: &SessionInfo| info.name.as_ref().is_some_and(|n| n.as_str() == "victim");
        self.server.sessions().into_iter().find(is).expect("the honest client's session")
    }

    fn look(&self) -> Snapshot {
        let held = self.guard.held.lock().unwrap();
        let chunk = self.server.chunk(&held[0]).expect("memory of a request that is not answered");
        let mut chunks = Vec::new();
        // The chunk of the request first, then all of them.
        chunk.buffer.append_to(chunk.offset, CHUNK as usize, &mut chunks);
        chunk.buffer.append_to(0, chunk.buffer.len(), &mut chunks);
        let mut store = vec![0; ELSEWHERE];
        self.guard.store.memory.read(0, &mut store);
        let paths = self.victim.paths();
        let reconnects = paths.iter().map(|view| {
            let stats = &view.stats;
            assert_eq!(view.state, PathState::Connected);
            (stats.reconnects, stats.reconnects_failed, stats.failovers)
        });
        Snapshot {
            info: self.session(),
            chunks,
            store,
            held: held.len(),
            ended: self.ended.0.lock().unwrap().len(),
            reconnects: reconnects.collect(),
        }
    }

    /// Asserts that nothing of the honest client has changed.
    pub(crate) fn check(&self, what: &str) {
        let (now, before) = (self.look(), self.before.as_ref().unwrap());
        assert_eq!(now.info, before.info, "{what}");
        assert_eq!((now.held, now.ended), (before.held, before.ended), "{what}");
        assert_eq!(now.reconnects, before.reconnects, "{what}");
        assert!(now.chunks == before.chunks, "{what}: a chunk has changed");
        assert!(now.store == before.store, "{what}: the store has changed");
    }

    /// Waits until the honest client is the server's only one.
    pub(crate) fn alone(&self, what: &str) {
        eventually(what, || self.server.sessions().len() == 1);
    }

    /// Waits until the honest client is alone, and asserts that nothing of it has changed.
    pub(crate) fn settles(&self, what: &str) {
        self.alone(what);
        self.check(what);
    }

    /// The same at the end of a test.
    pub(crate) fn ends(self, what: &str) {
        self.settles(what);
        self.finish();
    }

    /// A client connects normally and does something; checks the outcome.
    pub(crate) fn attack(
        &mut self,
        what: &str,
        expected: End,
        act: impl FnOnce(&mut Raw, &Path) -> Conn,
    ) {
        let ids = Ids::new();
        let path = self.raw.path(self.to(), &ids, 2, "hostile");
        path.conns.iter().for_each(|conn| self.raw.post_recvs(*conn, 64));
        let (before, served) = (self.counters(), self.served());
        let conn = act(&mut self.raw, &path);
        if expected == End::Ignored {
            self.works(&path, conn, what);
        } else {
            let dropped = self.raw.is_dropped(conn);
            assert!(
                dropped,
                "{what}: not dropped; {conn:?} {:?} {:?}",
                path.conns, self.raw.events
            );
            assert_eq!(self.served(), served, "{what}: carried out");
        }
        self.raw.leave(&path.conns);
        self.alone(what);
        let after = self.counters();
        let violated = after.paths_violated - before.paths_violated;
        assert_eq!(violated, u64::from(expected == End::Violated), "{what}");
        assert_eq!(after.paths_closed - before.paths_closed, 1, "{what}");
        if expected == End::Violated {
            let offence = self.server.last_offence().expect("it is told of");
            assert_eq!(offence.remote.ip(), self.raw.ip, "{what}");
            assert!(offence.reason.is_violation(), "{what}: {}", offence.reason);
        }
        self.check(what);
    }

    pub(crate) fn served(&self) -> u64 {
        self.guard.served()
    }

    /// A good request over a path of the hostile client is served.
    pub(crate) fn works(&mut self, path: &Path, conn: Conn, what: &str) {
        self.guard.serves(&mut self.raw, path, conn, what);
    }

    /// The honest client's request completes normally.
    pub(crate) fn answer(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        let held = self.guard.held.lock().unwrap().pop().expect("the request");
        self.server.respond(&mut std::iter::once((held.op, 0, None)));
        eventually("the request ends", || *self.ended.0.lock().unwrap() == [0]);
        self.victim.put_permit(permit);
    }

    /// It ends, and so do others.
    pub(crate) fn finish(mut self) {
        self.answer();
        for n in 0..20 {
            write_and_read(&self.victim, n * 9000, 8000);
        }
        assert_eq!(self.victim.paths()[0].stats.reconnects, 0);
        self.engines.iter().rev().for_each(|engine| engine.close());
    }
}
