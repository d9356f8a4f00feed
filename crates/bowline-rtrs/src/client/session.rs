//! The session: the calls of the program, and the dispatch of inputs.

use std::collections::VecDeque;
use std::sync::Arc;

use bowline_base::SplitMix64;
use bowline_verbs::{Access, Buffer};
use bowline_wire::rtrs::{PathLife, Uuid};

use super::incarnation::{HEARTBEAT_RESERVE, Incarnation, Phase, Table};
use super::keys::{OwnKey, PIECES_MAX};
use super::lingering::Lingering;
use super::path::Path;
use super::permits::Permits;
use super::regions::Regions;
use super::request::Request;
use super::{ClientConfig, PathAddr, PathInfo, PathState, Permit, PermitKind, Refusal, StatsFile};
use crate::{
    Batch, ConnId, Done, Errno, HeartbeatAction, Input, Instant, MemRef, Order, PathId, Policy,
    PortAttr, PortId, RegionId, RegionPorts, Tag,
};

/// The limits of a session [RS-24].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attrs {
    /// Permits that IO can hold at a time.
    pub queue_depth: u16,
    /// Most bytes of data in a request.
    pub max_io: u32,
    /// Most bytes of user message and header together: the server's limit, or less if the session
    /// allocates less ([`ClientConfig::max_usr`](super::ClientConfig::max_usr)). The header takes 4
    /// bytes for a WRITE and up to 24 for a READ, so a user message that is 24 bytes shorter always
    /// fits.
    pub max_hdr: u32,
    /// Most pieces of data in a WRITE.
    pub max_segments: usize,
    /// Most pieces of data in a READ, after merging adjacent ones: 1 if a device has no own_key
    /// registration [RT-42].
    pub max_read_segments: usize,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The tag given with the request.
    pub tag: u64,
    /// 0, or a negative errno.
    pub errno: i32,
}

/// An event of a session or its paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `open` has finished. After an error nothing is left of the session.
    Opened(Result<(), Errno>),
    /// `close` has finished: nothing is left of the session.
    Closed,
    /// The last path is lost [RS-17].
    Disconnected,
    /// The first path is connected again [RS-16].
    Reconnected,
    /// `add_path` has finished. After an error the path is removed.
    PathAdded {
        /// The path.
        path: PathId,
        /// The outcome.
        result: Result<(), Errno>,
    },
    /// A path is closed, by command or because its attempts are used up.
    PathClosed {
        /// The path.
        path: PathId,
    },
    /// A path is removed. [`PathClosed`](Self::PathClosed) came before.
    PathRemoved {
        /// The path.
        path: PathId,
    },
    /// `reconnect_path` has finished.
    PathReconnected {
        /// The path.
        path: PathId,
        /// The outcome.
        result: Result<(), Errno>,
    },
    /// A path's state has changed.
    PathState {
        /// The path.
        path: PathId,
        /// Its addresses.
        addr: PathAddr,
        /// The new state.
        state: PathState,
    },
    /// A permit is free, and callers were refused one before. Comes once for all of them.
    PermitFree,
}

/// The state of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionState {
    /// Not opened.
    New,
    /// Paths are being connected, one after the other.
    Opening,
    /// Open.
    Open,
    /// Opening failed; what was made is being torn down.
    Failing(Errno),
    /// Being closed.
    Closing,
    /// Nothing is left of it.
    Closed,
}

/// The limits that apply to all paths of the session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed {
    pub(super) depth: u16,
    /// The smallest value announced so far [RT-30].
    pub(super) max_io: u32,
    pub(super) max_hdr: u32,
}

/// Memory for user messages and headers of requests, one slot for each permit.
#[derive(Debug)]
pub(super) struct Headers {
    pub(super) region: RegionId,
    pub(super) buffer: Arc<Buffer>,
    pub(super) slot: u32,
}

/// LingeringRegion session of a client.
#[derive(Debug)]
pub struct Session {
    pub(super) config: ClientConfig,
    pub(super) ports: Vec<PortAttr>,
    pub(super) uuid: Uuid,
    /// Distinguishes this session's permits from those of other sessions.
    pub(super) owner: u64,
    pub(super) random: SplitMix64,
    pub(super) state: SessionState,
    pub(super) paths: Table<Path>,
    /// The paths in the order they were added [RS-20].
    pub(super) list: Vec<PathId>,
    pub(super) incarnations: Table<Incarnation>,
    pub(super) agreed: Option<Agreed>,
    pub(super) headers: Option<Headers>,
    pub(super) permits: Permits,
    pub(super) requests: Vec<Request>,
    pub(super) regions: Regions,
    /// Incarnations that carry IO, or whose requests have not been moved yet [RS-16].
    pub(super) up: usize,
    /// For each processor, the path that round-robin took last [RS-21].
    pub(super) last_path: Vec<Option<PathId>>,
    /// The processor on which completions are handled.
    pub(super) cpu: u16,
    pub(super) orders: VecDeque<Order>,
    pub(super) batch: Batch,
    pub(super) events: VecDeque<Event>,
    pub(super) completed: Vec<Completed>,
    /// A quiescing incarnation may have no more requests.
    pub(super) check_quiet: bool,
    pub(super) lingering: Lingering,
    /// The server's refusal of the last connection attempt.
    pub(super) refusal: Option<Refusal>,
    /// Incarnations given up with requests in flight, of which the server may still hold late
    /// requests.
    pub(super) given_up: Vec<PathLife>,
}

impl Session {
    /// Makes a session on these devices. `session` must be random.
    pub fn new(config: ClientConfig, ports: &[PortAttr], session: Uuid) -> Self {
        let (low, high) = session.0.split_at(8);
        let number = |b: &[u8]| b.iter().fold(0, |n, &b| n << 8 | u64::from(b));
        let owner = number(low).rotate_left(1) ^ number(high);
        Self {
            random: SplitMix64::new(config.seed ^ owner),
            config,
            ports: ports.to_vec(),
            uuid: session,
            owner,
            state: SessionState::New,
            paths: Table::new(),
            list: Vec::new(),
            incarnations: Table::new(),
            agreed: None,
            headers: None,
            permits: Permits::default(),
            requests: Vec::new(),
            regions: Regions::default(),
            up: 0,
            last_path: Vec::new(),
            cpu: 0,
            orders: VecDeque::new(),
            batch: Batch::default(),
            events: VecDeque::new(),
            completed: Vec::new(),
            check_quiet: false,
            lingering: Lingering::default(),
            refusal: None,
            given_up: Vec::new(),
        }
    }

    /// Returns the session's limits; `None` when no path is connected, for which callers return
    /// `ECOMM`.
    pub fn geometry(&self) -> Option<Attrs> {
        let agreed = self.agreed.filter(|_| self.up > 0 && self.state == SessionState::Open)?;
        let sges = self.ports.iter().map(|port| port.max_sge).min().unwrap_or(0);
        let fast = self.ports.iter().all(|port| port.fast_registration);
        Some(Attrs {
            queue_depth: (agreed.depth - self.reserved_permits() as u16).max(1),
            max_io: agreed.max_io,
            max_hdr: agreed.max_hdr.min(self.headers.as_ref().map_or(0, |h| h.slot)),
            max_segments: sges.saturating_sub(1).min(PIECES_MAX),
            max_read_segments: if fast { PIECES_MAX } else { 1 },
        })
    }

    /// Registers memory on all devices. It can be used at once. A failed registration shows in
    /// [`region_outcome`](Self::region_outcome) only; requests with it fail with `EINVAL`.
    pub fn add_region(&mut self, buffer: Arc<Buffer>, access: Access) -> RegionId {
        let ports = (0..self.ports.len()).map(|i| PortId(i as u8));
        let region = self.regions.add(Arc::clone(&buffer), access, ports);
        let (granule, path) = (None, None);
        let ports = RegionPorts::All;
        self.orders.push_back(Order::AddRegion { region, buffer, access, granule, ports, path });
        region
    }

    /// Returns the outcome of a registration; `None` until all devices have answered.
    pub fn region_outcome(&self, region: RegionId) -> Option<Result<(), Errno>> {
        self.regions.outcome(region)
    }

    /// Ends a registration as soon as no request in flight uses it and no packet can have to be
    /// sent again from it.
    pub fn drop_region(&mut self, region: RegionId) {
        let gone = self.regions.mark_dropped(region);
        self.order_drop(gone);
    }

    /// Returns whether the session is open and has not been closed.
    pub fn is_open(&self) -> bool {
        self.state == SessionState::Open
    }

    /// Number of permits reserved from IO [RT-37].
    pub(super) fn reserved_permits(&self) -> u32 {
        let depth = self.agreed.map_or(0, |agreed| agreed.depth);
        u32::from(self.config.reserve_service_permit && depth > 1)
    }

    /// Takes a permit; `None` when none is free for this kind, or the session is not open. An
    /// [`Event::PermitFree`] follows when one is free again.
    pub fn get_permit(&mut self, kind: PermitKind, cpu: u16) -> Option<Permit> {
        if self.state != SessionState::Open {
            return None;
        }
        let keep = if kind == PermitKind::Service { 0 } else { self.reserved_permits() };
        let index = self.permits.take(keep)?;
        if let Some(request) = self.requests.get_mut(usize::from(index)) {
            request.cpu = cpu;
        }
        Some(Permit { owner: self.owner, index, kind })
    }

    /// Assigns a permit to another processor, whose connection its requests take from now on: for
    /// programs that keep permits [RT-37].
    pub fn set_cpu_of(&mut self, permit: &Permit, cpu: u16) {
        if permit.owner == self.owner
            && let Some(request) = self.requests.get_mut(usize::from(permit.index))
            && !request.running
        {
            request.cpu = cpu;
        }
    }

    /// Number of requests in flight with a key of their own that is still valid for the server.
    pub fn valid_own_keys(&self) -> usize {
        self.requests.iter().filter(|request| request.key_state == OwnKey::Valid).count()
    }

    /// Gives a permit back. If its request is still in flight, the index becomes free when that
    /// ends.
    pub fn put_permit(&mut self, permit: Permit) {
        if permit.owner != self.owner || !self.permits.is_out(permit.index) {
            return;
        }
        match self.requests.get_mut(usize::from(permit.index)) {
            Some(request) if request.running => request.put = true,
            _ => self.free_permit(permit.index),
        }
    }

    pub(super) fn free_permit(&mut self, index: u16) {
        self.permits.put(index);
        if self.permits.take_refused() {
            self.events.push_back(Event::PermitFree);
        }
        self.settle();
    }

    /// Changes how paths are chosen.
    pub fn set_policy(&mut self, policy: Policy) {
        self.config.policy = policy;
    }

    /// How paths are chosen.
    pub fn policy(&self) -> Policy {
        self.config.policy
    }

    /// Changes the number of attempts; takes effect at the next one [RS-13].
    pub fn set_max_reconnects(&mut self, attempts: i16) {
        self.config.max_reconnects = attempts;
    }

    /// Number of attempts; -1: no limit.
    pub fn max_reconnects(&self) -> i16 {
        self.config.max_reconnects
    }

    /// Sets the processor on which completions are handled from now on, for the migration counters.
    pub fn set_cpu(&mut self, cpu: u16) {
        self.cpu = cpu;
    }

    /// Returns the server's refusal of the last connection attempt; `None` if it was not refused.
    pub const fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    /// Resets counters of a path to 0. `false` if there is no such path.
    pub fn reset_stats(&mut self, path: PathId, file: StatsFile) -> bool {
        let path = self.paths.get_mut(path);
        path.map(|path| path.stats.reset(file)).is_some()
    }

    /// Handles an input from the binding.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Region { region, port, keys } => self.on_region(now, region, port, keys),
            Input::Established { conn, private } => self.on_established(now, conn, &private),
            Input::Refused { conn, reason, private } => {
                self.on_refused(now, conn, reason, &private);
            }
            Input::Failed { conn, errno } => self.on_failed(now, conn, errno),
            Input::Keys { path, keys } => self.on_keys(now, path, keys),
            Input::Drained { conn } => self.on_drained(now, conn, 2),
            Input::Disconnected { conn } => self.on_disconnected(now, conn),
            // A client has no listener.
            Input::ConnectRequest { request, .. } => {
                self.orders.push_back(Order::Reject { request, private: [0; 56] });
            }
        }
        self.settle();
    }

    /// Handles completions, in the order of their completion queues.
    pub fn handle_done(&mut self, now: Instant, done: &[Done]) {
        for one in done {
            let Some(incarnation) = self.incarnations.get_mut(one.conn.path) else { continue };
            if usize::from(one.conn.cid) >= incarnation.conns.len() {
                continue;
            }
            incarnation.handled += 1;
            match one.tag.kind() {
                Tag::DRAIN => self.on_drained(now, one.conn, 1),
                Tag::RECV => self.on_recv(now, one),
                Tag::INFO if one.tag.index() == 0 => self.on_info_rsp(now, one),
                _ => self.on_sent(now, one),
            }
        }
        self.count_handled();
        self.end_quiescing(now);
        self.settle();
    }

    fn count_handled(&mut self) {
        for at in 0..self.list.len() {
            let Some(path) = self.paths.get_mut(self.list[at]) else { continue };
            let Some(incarnation) =
                path.incarnation.and_then(|incarnation| self.incarnations.get_mut(incarnation))
            else {
                continue;
            };
            if incarnation.handled > 0 {
                path.stats.handled(std::mem::take(&mut incarnation.handled));
            }
        }
    }

    /// Runs timers that are due.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|at| now < at) {
            return;
        }
        for id in self.incarnations.ids() {
            self.incarnation_timeout(now, id);
            if !self.lingering.is_empty() {
                self.post_fences(id);
            }
        }
        for at in (0..self.list.len()).rev() {
            let Some(&id) = self.list.get(at) else { continue };
            let Some(path) = self.paths.get_mut(id) else { continue };
            if path.retry_at.is_some_and(|at| at <= now) {
                path.retry_at = None;
                self.retry(now, id);
            }
        }
        self.settle();
    }

    fn incarnation_timeout(&mut self, now: Instant, id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(id) else { return };
        if let Some(heartbeat) = incarnation.heartbeat.as_mut().filter(|hb| hb.next() <= now) {
            match heartbeat.tick(now) {
                // A client's heartbeats never report silence.
                HeartbeatAction::Nothing | HeartbeatAction::Silent => {}
                HeartbeatAction::SendMsg => self.send_heartbeat(id),
                HeartbeatAction::Dead => return self.fail(now, id, Errno::ETIMEDOUT),
            }
        }
        let Some(incarnation) = self.incarnations.get_mut(id) else { return };
        if incarnation.release_at.is_some_and(|at| at <= now)
            && incarnation.phase == Phase::Disconnecting
        {
            self.release(now, id);
        }
        let Some(incarnation) = self.incarnations.get_mut(id) else { return };
        if incarnation.deadline.is_none_or(|at| now < at) {
            return;
        }
        incarnation.deadline = None;
        match incarnation.phase {
            Phase::Connecting(_) | Phase::Info => self.fail(now, id, Errno::ETIMEDOUT),
            Phase::Quiescing => self.take_down(now, id),
            Phase::Draining => self.give_up_draining(id),
            Phase::Disconnecting => self.forget(now, id),
            Phase::Up => {}
        }
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Instant> {
        let incarnations = self.incarnations.iter().filter_map(|(_, incarnation)| {
            let release =
                incarnation.release_at.filter(|_| incarnation.phase == Phase::Disconnecting);
            let beat = incarnation.heartbeat.as_ref().map(|hb| hb.next());
            [incarnation.deadline, release, beat].into_iter().flatten().min()
        });
        let paths = self.paths.iter().filter_map(|(_, path)| path.retry_at);
        incarnations.chain(paths).min()
    }

    /// Returns the next order.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Takes the batch of work requests. `into` must be empty; its allocations are reused.
    pub fn take_batch(&mut self, into: &mut Batch) {
        debug_assert!(into.is_empty(), "a batch that was not carried out");
        into.clear();
        std::mem::swap(&mut self.batch, into);
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Appends the results of requests that have ended. Call it before `poll_event`.
    pub fn take_completed(&mut self, into: &mut Vec<Completed>) {
        into.append(&mut self.completed);
    }

    /// Returns the paths, in the order they were added.
    pub fn paths(&self) -> impl Iterator<Item = PathInfo<'_>> {
        self.list.iter().filter_map(|&id| {
            let path = self.paths.get(id)?;
            let incarnation =
                path.incarnation.and_then(|incarnation| self.incarnations.get(incarnation));
            Some(PathInfo {
                id,
                addr: path.addr,
                state: path.state,
                latency: path.latency,
                inflight: incarnation.map_or(0, |incarnation| incarnation.inflight),
                stats: &path.stats,
            })
        })
    }

    /// Number of requests in flight.
    pub fn inflight(&self) -> usize {
        self.requests.iter().filter(|request| request.running).count()
    }

    pub(super) fn on_region(
        &mut self,
        now: Instant,
        region: RegionId,
        port: PortId,
        keys: Result<Vec<crate::RegionKeys>, Errno>,
    ) {
        let keys = keys.and_then(|keys| keys.first().copied().ok_or(Errno::EINVAL));
        if keys.is_err() {
            self.internal_region_failed(now, region);
        }
        let gone = self.regions.answer(region, port, keys);
        self.order_drop(gone);
    }

    /// Fails the incarnations that need a region of the session itself.
    fn internal_region_failed(&mut self, now: Instant, region: RegionId) {
        let of_session = self.headers.as_ref().is_some_and(|headers| headers.region == region);
        for id in self.incarnations.ids() {
            let of_incarnation =
                self.incarnations.get(id).and_then(|incarnation| incarnation.memory.as_ref());
            if of_session || of_incarnation.is_some_and(|(of, _)| *of == region) {
                self.fail(now, id, Errno::ENOMEM);
            }
        }
    }

    /// A random number.
    pub(super) fn random(&mut self) -> u64 {
        self.random.next_u64()
    }

    /// The incarnation of a connection, if both exist.
    pub(super) fn incarnation_of(&mut self, conn: ConnId) -> Option<&mut Incarnation> {
        let incarnation = self.incarnations.get_mut(conn.path)?;
        if usize::from(conn.cid) < incarnation.conns.len() { Some(incarnation) } else { None }
    }

    /// Checks the invariants. For tests and the simulator.
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn check_invariants(&self) {
        let mut up = 0;
        for (id, incarnation) in self.incarnations.iter() {
            let of_incarnation = |r: &&Request| r.running && r.incarnation == id;
            let running = self.requests.iter().filter(of_incarnation).count();
            assert_eq!(incarnation.inflight as usize, running, "requests in flight of {id:?}");
            for (cid, conn) in incarnation.conns.iter().enumerate() {
                let of_conn = |r: &&Request| of_incarnation(r) && usize::from(r.cid) == cid;
                let running = self.requests.iter().filter(of_conn).count();
                assert_eq!(conn.inflight as usize, running, "requests in flight of {id:?} {cid}");
                let late = incarnation.phase == Phase::Up && conn.has_room(HEARTBEAT_RESERVE);
                assert!(!late || conn.notices.is_empty(), "notices not posted on {id:?} {cid}");
                assert!(conn.waiting.len() <= running, "waiting requests of {id:?} {cid}");
                let with_own_key = |r: &&Request| of_conn(r) && r.key_state != OwnKey::None;
                let with_own_key = self.requests.iter().filter(with_own_key).count();
                assert_eq!(conn.with_own_key as usize, with_own_key, "keys given on {id:?} {cid}");
            }
            up += usize::from(incarnation.counted);
            let owner = incarnation.path.and_then(|path| self.paths.get(path));
            let owned = owner.is_some_and(|path| path.incarnation == Some(id));
            assert!(incarnation.path.is_none() || owned, "{id:?} has no path");
            assert!(
                incarnation.phase != Phase::Up
                    || owner.is_some_and(|p| p.state == PathState::Connected),
                "{id:?} is up, its path is not"
            );
        }
        assert_eq!(self.up, up, "paths up");
        for (index, request) in self.requests.iter().enumerate() {
            assert!(
                request.running || request.key_state == OwnKey::None,
                "{index}: a key outlives it"
            );
            if request.running {
                assert!(self.permits.is_out(index as u16), "request {index} without a permit");
                assert!(
                    self.incarnations.get(request.incarnation).is_some(),
                    "request {index} without an incarnation"
                );
            }
        }
        for (id, path) in self.paths.iter() {
            assert!(self.list.contains(&id), "{id:?} is not listed");
            let incarnation = path.incarnation.map(|incarnation| {
                self.incarnations.get(incarnation).map(|incarnation| incarnation.path)
            });
            assert!(
                incarnation.is_none_or(|of| of == Some(Some(id))),
                "{id:?} has a stranger's incarnation"
            );
        }
        if self.state == SessionState::Closed {
            assert!(
                self.incarnations.is_empty() && self.list.is_empty(),
                "closed with something left"
            );
        }
    }

    /// Counts the uses of the regions of a request that is in flight.
    pub(super) fn use_regions(&mut self, data: &[MemRef]) {
        for piece in data {
            if let Some(region) = self.regions.get_mut(piece.region) {
                region.uses += 1;
            }
        }
    }
}
