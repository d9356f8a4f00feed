//! The server: all sessions of one listener as a state machine.
//!
//! Connection requests of clients come in as [`Input::ConnectRequest`], their messages as
//! [`Done`]s; the upper layer gets [`Request`]s and answers each with [`Server::respond`]. One
//! iteration of a driver:
//!
//! ```text
//! poll completions -> handle_done -> take_withdraws -> (withdraw the keys) -> process
//!   -> take_requests -> upper layer -> respond -> poll_order*, take_batch -> (carry them out)
//! ```
//! While [`Server::ends_given_up`] returns true, the last step is also done before the upper layer
//! is called.
//!
//! | module | what |
//! | --- | --- |
//! | `config` | settings, limits, who may come |
//! | `accept` | connection requests, INFO_REQ, until the client knows its chunks |
//! | `request` | completions; requests are read, judged and handed on |
//! | `reply` | answers, heartbeats |
//! | `strangers` | paths of clients that may not be there |
//! | `close` | the end of paths and sessions |
//! | `given_up` | paths whose end the client tells over another one |
//! | `session`, `path`, `chunks`, `sendq` | the tables |
//!
//! Spec: `docs/spec/rtrs.md`. Memory: each session that has been joined has its chunks, of which
//! only what was used is really there; each path some 850 bytes, and for each chunk 16 bytes, 32
//! with refresh; each connection about 100 bytes. Everything a client can make grow has a limit in
//! [`ServerLimits`] [RT-66].

mod accept;
mod chunks;
mod close;
mod config;
mod given_up;
mod path;
mod reply;
mod request;
mod sendq;
mod session;
mod stats;
mod strangers;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use bowline_verbs::{Access, Buffer, Mem};
use bowline_wire::rtrs::SessionName;

use crate::{
    Batch, ConnId, Done, Errno, Input, Instant, Order, PathId, PortAttr, RegionId, RegionPorts,
};
pub use close::CloseReason;
pub use config::{AllowRule, ServerConfig, ServerLimits, name_fits};
pub use path::PathState;
pub use request::{OpId, Request, Usr};
pub use stats::{PathInfo, PathStats, ServerCounters, SessionInfo};

use chunks::Ops;
use path::Paths;
use request::Arrived;
use session::Sessions;

/// A session of a server. When a slot is reused it gets another generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessId {
    /// Index in the server's table.
    pub slot: u32,
    /// How often the slot was used before, wrapping.
    pub generation: u32,
}

impl SessId {
    /// Packs it in 64 bits.
    pub const fn pack(self) -> u64 {
        (self.generation as u64) << 32 | self.slot as u64
    }
}

/// An event for the upper layer, besides requests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerEvent {
    /// A path of the session is ready. If it is the `first`, it is not served before
    /// [`Server::answer_link`]; otherwise no action is needed.
    Up {
        /// The session.
        session: SessId,
        /// The name the client gave the session.
        name: SessionName,
        /// The path.
        path: PathId,
        /// Whether the session is new.
        first: bool,
    },
    /// The last path of a session is gone and all its operations are answered. Comes for each
    /// session accepted with [`Server::answer_link`], and for no other.
    Down {
        /// The session.
        session: SessId,
    },
    /// A path is served from now on.
    PathConnected {
        /// The name of its session.
        name: SessionName,
        /// The path.
        path: PathInfo,
    },
    /// A path was closed, whether it had been reported before or not. Its operations must still be
    /// answered.
    PathClosed {
        /// The session.
        session: SessId,
        /// The name of the session, if the path was connected.
        name: Option<SessionName>,
        /// The path's last state.
        path: PathInfo,
        /// The reason.
        reason: CloseReason,
    },
    /// Everything is gone, after [`Server::close`].
    Closed,
}

/// All sessions of one listener.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    ports: Vec<PortAttr>,
    sessions: Sessions,
    paths: Paths,
    ops: Ops,
    /// Number of operations that wait for chunks.
    waiting: usize,
    /// The number of the next region.
    region: u32,
    /// Requests whose keys are being withdrawn.
    arrived: Vec<Arrived>,
    /// Spare allocation for [`process`](Self::process).
    arrived_spare: Vec<Arrived>,
    requests: Vec<Request>,
    batch: Batch,
    orders: VecDeque<Order>,
    events: VecDeque<ServerEvent>,
    /// A lower bound of all deadlines; `None` if there are none.
    next: Option<Instant>,
    /// Number of calls of [`handle_done`](Self::handle_done), to count completions per call.
    turn: u64,
    /// Connecting paths whose client is not proven to exist, oldest first.
    strangers: VecDeque<PathId>,
    /// Number of closing paths that the client has given up.
    given_up: usize,
    closing: bool,
    /// Ranges of chunks may wait for [`take_filled`](Self::take_filled).
    filled: bool,
    counters: ServerCounters,
}

impl Server {
    /// Makes a server on these devices; a [`PortId`](crate::PortId) is an index in the list.
    ///
    /// # Errors
    /// [`Errno::EINVAL`] for no device or more than 256, for chunks whose size is not a power of
    /// two [RT-16], for limits that leave room for no session, and for a device whose queues hold
    /// fewer than 16 work requests.
    pub fn new(config: ServerConfig, ports: &[PortAttr]) -> Result<Self, Errno> {
        let fits = (1..=256).contains(&ports.len())
            && config.geometry.chunk().is_power_of_two()
            && config.sessions_max() > 0
            && ports.iter().all(|port| port.max_qp_wr >= accept::QUEUE_MIN);
        if !fits {
            return Err(Errno::EINVAL);
        }
        Ok(Self {
            config,
            ports: ports.to_vec(),
            sessions: Sessions::default(),
            paths: Paths::default(),
            ops: Ops::new(),
            waiting: 0,
            region: 0,
            arrived: Vec::new(),
            arrived_spare: Vec::new(),
            requests: Vec::new(),
            batch: Batch::default(),
            orders: VecDeque::new(),
            events: VecDeque::new(),
            next: None,
            turn: 0,
            strangers: VecDeque::new(),
            given_up: 0,
            closing: false,
            filled: false,
            counters: ServerCounters::default(),
        })
    }

    /// Takes what the binding has to tell.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::ConnectRequest { request, port, local, remote, private } => {
                self.on_connect_request(now, request, port, local, remote, &private);
            }
            Input::Region { region, port, keys } => self.registered(now, region, port, keys),
            Input::Established { conn, .. } => {
                if let Some(conn) = self.conn_mut(conn) {
                    conn.established = true;
                    conn.request = None;
                }
                self.prove(now, conn.path);
            }
            // A server connects to nobody.
            Input::Refused { conn, .. } => {
                self.close_path(now, conn.path, CloseReason::Failed(Errno::ECONNRESET));
            }
            Input::Failed { conn, errno } => self.failed(now, conn, errno),
            Input::Drained { conn } => self.on_drained(now, conn),
            Input::Disconnected { conn } => self.on_disconnected(now, conn),
            // A server orders none.
            Input::Keys { .. } => {}
        }
    }

    /// Takes completions. Requests among them are not looked at before [`process`](Self::process);
    /// what comes of a path that is gone means nothing any more.
    pub fn handle_done(&mut self, now: Instant, done: &[Done]) {
        self.turn += 1;
        for done in done {
            self.completion(now, done);
        }
    }

    /// Looks at the clock: due from [`poll_timeout`](Self::poll_timeout) on.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.next.is_none_or(|next| now < next) {
            return;
        }
        self.next = None;
        for slot in 0..self.paths.slots() {
            let Some(path) = self.paths.at(slot) else { continue };
            let id = path.id;
            match path.state {
                PathState::Connecting if now >= path.deadline => {
                    self.close_path(now, id, CloseReason::NotEstablished);
                }
                PathState::Connected => self.beat(now, id),
                PathState::Closing if now >= path.drain_by => self.give_up_draining(id),
                PathState::Closed if now >= path.deadline => self.give_up_waiting(id),
                PathState::Connecting | PathState::Closing | PathState::Closed => {}
            }
            // The path may be gone, or wait for something else now.
            if let Some(path) = self.paths.get(id) {
                let at = match path.state {
                    // No later than the other one.
                    PathState::Closing if now < path.drain_by => path.drain_by,
                    _ => path.heartbeat.as_ref().map_or(path.deadline, |hb| hb.next()),
                };
                self.wake_at(at);
            }
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub const fn poll_timeout(&self) -> Option<Instant> {
        self.next
    }

    /// The next order. They come in order, and before the batch.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Takes all work there is for the devices, in exchange for an empty batch.
    pub fn take_batch(&mut self, into: &mut Batch) {
        debug_assert!(into.is_empty(), "a batch that was not carried out");
        std::mem::swap(&mut self.batch, into);
    }

    /// Takes only the keys to be withdrawn. To be carried out before [`process`](Self::process).
    pub fn take_withdraws(&mut self, into: &mut Batch) {
        debug_assert!(into.is_empty(), "a batch that was not carried out");
        std::mem::swap(&mut self.batch.withdraw, &mut into.withdraw);
    }

    /// What the upper layer is to know next.
    pub fn poll_event(&mut self) -> Option<ServerEvent> {
        self.events.pop_front()
    }

    /// Registers memory from which answers may be given, on all devices.
    pub fn add_region(&mut self, buffer: Arc<Buffer>, access: Access) -> RegionId {
        let region = self.next_region();
        let (granule, path) = (None, None);
        self.orders.push_back(Order::AddRegion {
            region,
            buffer,
            access,
            granule,
            ports: RegionPorts::All,
            path,
        });
        region
    }

    /// Ends the registration of memory of [`add_region`](Self::add_region).
    pub fn drop_region(&mut self, region: RegionId) {
        self.orders.push_back(Order::DropRegion { region });
    }

    /// The chunks of a session, one after the other: what [`Request::data`] is in. There as long as
    /// an operation of the session is not answered.
    pub fn memory(&self, session: SessId) -> Option<&Arc<Buffer>> {
        self.sessions.find(session).map(|session| &session.buffer)
    }

    /// Takes memory of a session that would be as well in large pages, since all of it is used:
    /// [`Buffer::enlarge_pages`]. That may take long, so it is not for a thread on which requests
    /// wait.
    pub fn take_filled(&mut self) -> Option<Mem> {
        if !self.filled {
            return None;
        }
        let filled = self.sessions.take_filled();
        self.filled = filled.is_some();
        filled
    }

    /// What sessions and paths are like now.
    pub fn sessions(&self) -> impl Iterator<Item = SessionInfo> {
        self.sessions.iter().map(|session| SessionInfo {
            session: session.id,
            name: session.name.clone(),
            uuid: session.uuid,
            paths: session.paths.iter().filter_map(|&slot| self.paths.at(slot)).map(info).collect(),
            operations: session.running + session.waiting,
        })
    }

    /// What a path is like now.
    pub fn path(&self, path: PathId) -> Option<PathInfo> {
        self.paths.get(path).map(info)
    }

    /// Sets the counts of a path's requests to 0, but for those in flight [RS-43].
    pub fn reset_rdma(&mut self, path: PathId) {
        if let Some(path) = self.paths.get_mut(path) {
            let PathStats { inflight, wc_max, wc_total, wc_calls, .. } = path.stats;
            path.stats = PathStats { inflight, wc_max, wc_total, wc_calls, ..PathStats::default() };
        }
    }

    /// Sets the counts of a path's work completions to 0 [RS-46].
    pub fn reset_completions(&mut self, path: PathId) {
        if let Some(path) = self.paths.get_mut(path) {
            path.stats = PathStats { wc_max: 0, wc_total: 0, wc_calls: 0, ..path.stats };
        }
    }

    /// Counts of the server.
    pub const fn counters(&self) -> &ServerCounters {
        &self.counters
    }

    /// Settings.
    pub const fn config(&self) -> &ServerConfig {
        &self.config
    }

    fn next_region(&mut self) -> RegionId {
        self.region = self.region.wrapping_add(1);
        RegionId(self.region)
    }

    fn conn_mut(&mut self, id: ConnId) -> Option<&mut path::Conn> {
        self.paths.get_mut(id.path)?.conns.get_mut(id.cid)
    }

    fn wake_at(&mut self, at: Instant) {
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }

    /// Panics when the tables contradict each other.
    pub fn check_invariants(&self) {
        let all: usize = self.sessions.iter().map(|session| session.waiting).sum();
        assert_eq!(self.waiting, all, "operations that wait");
        for request in &self.requests {
            let op = self.ops.peek(request.op.slot);
            assert_eq!(
                (op.generation, op.state),
                (request.op.generation, chunks::OpState::Running)
            );
            assert_eq!(op.session, request.session.slot, "a request of another's operation");
            let start = u64::from(op.chunk) * u64::from(self.config.geometry.chunk());
            assert_eq!(request.data.offset, start, "a request of another's chunk");
        }
        for session in self.sessions.iter() {
            let (mut running, mut waiting) = (0, 0);
            let (mut unanswered, mut old) = (0, 0);
            let mut count = |op: &chunks::Op| {
                unanswered += 1;
                old += usize::from(op.epoch != session.epoch);
            };
            for (index, chunk) in session.chunks.iter().enumerate() {
                assert!(
                    chunk.holder != chunks::NONE || chunk.waiting == chunks::NONE,
                    "a wait for a free chunk"
                );
                if chunk.holder != chunks::NONE {
                    running += 1;
                    let op = self.ops.peek(chunk.holder);
                    assert_eq!((op.session, usize::from(op.chunk)), (session.id.slot, index));
                    assert!(!matches!(op.state, chunks::OpState::Free | chunks::OpState::Waiting));
                    if op.state == chunks::OpState::Running {
                        count(op);
                    }
                }
                let mut slot = chunk.waiting;
                while slot != chunks::NONE {
                    waiting += 1;
                    let op = self.ops.peek(slot);
                    assert_eq!(op.state, chunks::OpState::Waiting);
                    count(op);
                    assert!(op.held.is_some() && self.paths.get(op.path).is_some());
                    slot = op.next;
                }
            }
            assert_eq!((running, waiting), (session.running, session.waiting), "operations");
            assert_eq!((unanswered, old), (session.unanswered, session.old), "unanswered");
            for &slot in &session.paths {
                let path = self.paths.at(slot).expect("a listed path exists");
                assert_ne!(path.state, PathState::Closed, "a path that is gone is listed");
            }
        }
        let ending = |path: &&path::Path| path.given_up && path.state == PathState::Closing;
        assert_eq!(self.paths.iter().filter(ending).count(), self.given_up, "given up");
        for path in self.paths.iter() {
            path.conns.iter().for_each(|(_, conn)| conn.queue.check_invariants());
            let listed = self.sessions.get(path.session).is_some_and(|session| {
                session.paths.contains(&path.id.slot) && path.state != PathState::Closed
            });
            assert!(listed || path.state == PathState::Closed, "a path of no session");
        }
        let promised: usize = self.paths.iter().map(path::Path::promised).sum();
        assert_eq!(promised, self.paths.connections, "connections promised");
        assert!(self.strangers.len() <= self.config.limits.strangers, "too many strangers");
        let known =
            self.paths.iter().filter(|path| !path.proven && path.state == PathState::Connecting);
        assert!(
            known.map(|path| path.id).collect::<BTreeSet<_>>()
                == self.strangers.iter().copied().collect(),
            "strangers"
        );
    }
}

fn info(path: &path::Path) -> PathInfo {
    PathInfo {
        path: path.id,
        port: path.port,
        local: path.local,
        remote: path.remote,
        state: path.state,
        connections: path.conns.len(),
        refresh: path.refresh,
        stats: path.stats,
    }
}
