//! The session: what the program calls, and how inputs find their way.

use std::collections::VecDeque;
use std::sync::Arc;

use bowline_base::SplitMix64;
use bowline_verbs::{Access, Buffer};
use bowline_wire::rtrs::{PathLife, Uuid};

use super::keys::{Grant, PIECES_MAX};
use super::lingering::Lingering;
use super::link::{HEARTBEAT_RESERVE, Link, Phase, Table};
use super::path::Path;
use super::permits::Permits;
use super::regions::Regions;
use super::request::Request;
use super::{ClientConfig, PathAddr, PathInfo, PathState, Permit, PermitKind, Refusal, StatsFile};
use crate::{
    Batch, ConnId, Done, Errno, HbDo, Input, Instant, MemRef, On, Order, PathId, Policy, PortAttr,
    PortId, RegionId, Tag,
};

/// What a session offers [RS-24].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attrs {
    /// Permits an IO user can have at a time.
    pub queue_depth: u16,
    /// Most bytes of data in a request.
    pub max_io: u32,
    /// Most bytes of user message and header together, which is 4 bytes long for a WRITE and up to
    /// 24 for a READ: what the server takes, or less if the session keeps no room for that
    /// ([`ClientConfig::max_usr`](super::ClientConfig::max_usr)). A user message that is 24 bytes
    /// shorter always fits.
    pub max_hdr: u32,
    /// Most pieces of data in a WRITE.
    pub max_segments: usize,
    /// Most pieces of data in a READ, not counting those that follow each other in memory: 1 when a
    /// device has no fast registration [RT-42].
    pub max_read_segments: usize,
}

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The request's.
    pub tag: u64,
    /// 0, or a negative errno.
    pub errno: i32,
}

/// What happened to a session or its paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `open` is over. After an error nothing is left of the session.
    Opened(Result<(), Errno>),
    /// `close` is over: nothing is left of the session.
    Closed,
    /// The last path is lost [RS-17].
    Disconnected,
    /// The first path is back [RS-16].
    Reconnected,
    /// `add_path` is over. After an error the path is gone.
    PathAdded {
        /// The path.
        path: PathId,
        /// How it went.
        result: Result<(), Errno>,
    },
    /// A path is closed, on order or because its attempts are used up.
    PathClosed {
        /// The path.
        path: PathId,
    },
    /// A path is gone. It was told before that it is closed.
    PathRemoved {
        /// The path.
        path: PathId,
    },
    /// `reconnect_path` is over.
    PathReconnected {
        /// The path.
        path: PathId,
        /// How it went.
        result: Result<(), Errno>,
    },
    /// A path's state has changed.
    PathState {
        /// The path.
        path: PathId,
        /// Its addresses.
        addr: PathAddr,
        /// To this.
        state: PathState,
    },
    /// Somebody was refused a permit, and one can be had now. Told once for all who were.
    PermitFree,
}

/// Where the session is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// Not opened.
    New,
    /// Paths are being connected, one after the other.
    Opening,
    /// Open.
    Open,
    /// Could not be opened; what there is of it is being taken down.
    Failing(Errno),
    /// Being closed.
    Closing,
    /// Nothing is left.
    Closed,
}

/// What all paths of the session agree on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed {
    pub(super) depth: u16,
    /// The least that was ever announced [RT-30].
    pub(super) max_io: u32,
    pub(super) max_hdr: u32,
}

/// User messages and headers of the requests, a slot for each permit.
#[derive(Debug)]
pub(super) struct Headers {
    pub(super) region: RegionId,
    pub(super) buffer: Arc<Buffer>,
    pub(super) slot: u32,
}

/// One session of a client.
#[derive(Debug)]
pub struct Session {
    pub(super) config: ClientConfig,
    pub(super) ports: Vec<PortAttr>,
    pub(super) uuid: Uuid,
    /// Tells this session's permits from those of others.
    pub(super) owner: u64,
    pub(super) random: SplitMix64,
    pub(super) life: Life,
    pub(super) paths: Table<Path>,
    /// The paths in the order they were added [RS-20].
    pub(super) list: Vec<PathId>,
    pub(super) links: Table<Link>,
    pub(super) agreed: Option<Agreed>,
    pub(super) headers: Option<Headers>,
    pub(super) permits: Permits,
    pub(super) requests: Vec<Request>,
    pub(super) regions: Regions,
    /// Paths that carry IO, or whose requests have not been moved yet [RS-16].
    pub(super) up: usize,
    /// For each processor, the path that was taken last [RS-21].
    pub(super) last_path: Vec<Option<PathId>>,
    /// The processor completions are handled on.
    pub(super) cpu: u16,
    pub(super) orders: VecDeque<Order>,
    pub(super) batch: Batch,
    pub(super) events: VecDeque<Event>,
    pub(super) completed: Vec<Completed>,
    /// A link may be quiet now.
    pub(super) look_quiet: bool,
    pub(super) lingering: Lingering,
    /// How the last connection was refused, if it was.
    pub(super) refusal: Option<Refusal>,
    /// Paths that were given up with requests in flight, and of which the server may have something
    /// still.
    pub(super) given_up: Vec<PathLife>,
}

impl Session {
    /// Makes a session that uses these devices. `session` is random.
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
            life: Life::New,
            paths: Table::new(),
            list: Vec::new(),
            links: Table::new(),
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
            look_quiet: false,
            lingering: Lingering::default(),
            refusal: None,
            given_up: Vec::new(),
        }
    }

    /// Returns what the session offers; `None` when no path is connected, `ECOMM` to a caller.
    pub fn geometry(&self) -> Option<Attrs> {
        let agreed = self.agreed.filter(|_| self.up > 0 && self.life == Life::Open)?;
        let sges = self.ports.iter().map(|port| port.max_sge).min().unwrap_or(0);
        let fast = self.ports.iter().all(|port| port.fast_registration);
        Some(Attrs {
            queue_depth: (agreed.depth - self.kept_permits() as u16).max(1),
            max_io: agreed.max_io,
            max_hdr: agreed.max_hdr.min(self.headers.as_ref().map_or(0, |h| h.slot)),
            max_segments: sges.saturating_sub(1).min(PIECES_MAX),
            max_read_segments: if fast { PIECES_MAX } else { 1 },
        })
    }

    /// Registers memory on all devices. It can be used at once, but a registration that fails is
    /// seen only in [`region_outcome`](Self::region_outcome); requests with it fail with `EINVAL`.
    pub fn add_region(&mut self, buffer: Arc<Buffer>, access: Access) -> RegionId {
        let ports = (0..self.ports.len()).map(|i| PortId(i as u8));
        let region = self.regions.add(Arc::clone(&buffer), access, ports);
        let (granule, path) = (None, None);
        let ports = On::All;
        self.orders.push_back(Order::AddRegion { region, buffer, access, granule, ports, path });
        region
    }

    /// Tells how the registration of a region went; `None` while it has not on every device.
    pub fn region_outcome(&self, region: RegionId) -> Option<Result<(), Errno>> {
        self.regions.outcome(region)
    }

    /// Ends a registration, as soon as no request in flight uses it and nothing is to be sent again
    /// from it.
    pub fn drop_region(&mut self, region: RegionId) {
        let gone = self.regions.unwant(region);
        self.order_drop(gone);
    }

    /// Tells whether it is open: it was opened, and nobody has closed it since.
    pub fn is_open(&self) -> bool {
        self.life == Life::Open
    }

    /// How many permits IO cannot have [RT-37].
    pub(super) fn kept_permits(&self) -> u32 {
        let depth = self.agreed.map_or(0, |agreed| agreed.depth);
        u32::from(self.config.reserve_service_permit && depth > 1)
    }

    /// Takes a permit; `None` when there is none for this kind, or the session is not open. An
    /// [`Event::PermitFree`] tells when there is one again.
    pub fn get_permit(&mut self, kind: PermitKind, cpu: u16) -> Option<Permit> {
        if self.life != Life::Open {
            return None;
        }
        let keep = if kind == PermitKind::Service { 0 } else { self.kept_permits() };
        let index = self.permits.take(keep)?;
        if let Some(request) = self.requests.get_mut(usize::from(index)) {
            request.cpu = cpu;
        }
        Some(Permit { owner: self.owner, index, kind })
    }

    /// Requests of this permit take the connection of another processor from now on, as if it had
    /// been taken there: for programs that keep permits [RT-37].
    pub fn set_cpu_of(&mut self, permit: &Permit, cpu: u16) {
        if permit.owner == self.owner
            && let Some(request) = self.requests.get_mut(usize::from(permit.index))
            && !request.running
        {
            request.cpu = cpu;
        }
    }

    /// Tells how many requests in flight have keys of their own that the server can use still.
    pub fn keys_given(&self) -> usize {
        self.requests.iter().filter(|request| request.grant == Grant::Given).count()
    }

    /// Gives a permit back. If its request is still in flight, the index is free when that ends.
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
        if self.permits.take_wanted() {
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

    /// Changes the number of attempts; heeded at the next one [RS-13].
    pub fn set_max_reconnects(&mut self, attempts: i16) {
        self.config.max_reconnects = attempts;
    }

    /// Number of attempts; -1: for ever.
    pub fn max_reconnects(&self) -> i16 {
        self.config.max_reconnects
    }

    /// Tells on which processor completions are handled from now on, for the counters of migration.
    pub fn set_cpu(&mut self, cpu: u16) {
        self.cpu = cpu;
    }

    /// How the connection that was made last was refused; `None`: it was not, whatever else became
    /// of it.
    pub const fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    /// Sets counters of a path to zero. `false` if there is no such path.
    pub fn reset_stats(&mut self, path: PathId, file: StatsFile) -> bool {
        let path = self.paths.get_mut(path);
        path.map(|path| path.stats.reset(file)).is_some()
    }

    /// Takes what a binding tells.
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
            // A client listens nowhere.
            Input::Asked { request, .. } => {
                self.orders.push_back(Order::Reject { request, private: [0; 56] });
            }
        }
        self.settle();
    }

    /// Takes completions, in the order of their completion queues.
    pub fn handle_done(&mut self, now: Instant, done: &[Done]) {
        for one in done {
            let Some(link) = self.links.get_mut(one.conn.path) else { continue };
            if usize::from(one.conn.cid) >= link.conns.len() {
                continue;
            }
            link.handled += 1;
            match one.tag.kind() {
                Tag::DRAIN => self.on_drained(now, one.conn, 1),
                Tag::RECV => self.on_recv(now, one),
                Tag::INFO if one.tag.index() == 0 => self.on_info_rsp(now, one),
                _ => self.on_sent(now, one),
            }
        }
        self.count_handled();
        self.look_at_quiet(now);
        self.settle();
    }

    fn count_handled(&mut self) {
        for at in 0..self.list.len() {
            let Some(path) = self.paths.get_mut(self.list[at]) else { continue };
            let Some(link) = path.link.and_then(|link| self.links.get_mut(link)) else { continue };
            if link.handled > 0 {
                path.stats.handled(std::mem::take(&mut link.handled));
            }
        }
    }

    /// Looks at the clock.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|at| now < at) {
            return;
        }
        for id in self.links.ids() {
            self.link_timeout(now, id);
            if !self.lingering.is_empty() {
                self.end_fences(id);
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

    fn link_timeout(&mut self, now: Instant, id: PathId) {
        let Some(link) = self.links.get_mut(id) else { return };
        if let Some(heartbeat) = link.heartbeat.as_mut().filter(|hb| hb.next() <= now) {
            match heartbeat.tick(now) {
                // A client's are not patient.
                HbDo::Nothing | HbDo::Silent => {}
                HbDo::SendMsg => self.send_heartbeat(id),
                HbDo::Dead => return self.fail(now, id, Errno::ETIMEDOUT),
            }
        }
        let Some(link) = self.links.get_mut(id) else { return };
        if link.release_at.is_some_and(|at| at <= now) && link.phase == Phase::Parting {
            self.release(now, id);
        }
        let Some(link) = self.links.get_mut(id) else { return };
        if link.deadline.is_none_or(|at| now < at) {
            return;
        }
        link.deadline = None;
        match link.phase {
            Phase::Connecting(_) | Phase::Info => self.fail(now, id, Errno::ETIMEDOUT),
            Phase::Quiet => self.take_down(now, id),
            Phase::Draining => self.give_up_draining(id),
            Phase::Parting => self.forget(now, id),
            Phase::Up => {}
        }
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Instant> {
        let links = self.links.iter().filter_map(|(_, link)| {
            let release = link.release_at.filter(|_| link.phase == Phase::Parting);
            let beat = link.heartbeat.as_ref().map(|hb| hb.next());
            [link.deadline, release, beat].into_iter().flatten().min()
        });
        let paths = self.paths.iter().filter_map(|(_, path)| path.retry_at);
        links.chain(paths).min()
    }

    /// Returns the next order.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Takes the work that has collected. `into` must be empty; its memory is used again.
    pub fn take_batch(&mut self, into: &mut Batch) {
        debug_assert!(into.is_empty(), "a batch that was not carried out");
        into.clear();
        std::mem::swap(&mut self.batch, into);
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Appends the requests that have ended. To be looked at before the events.
    pub fn take_completed(&mut self, into: &mut Vec<Completed>) {
        into.append(&mut self.completed);
    }

    /// Returns the paths, in the order they were added.
    pub fn paths(&self) -> impl Iterator<Item = PathInfo<'_>> {
        self.list.iter().filter_map(|&id| {
            let path = self.paths.get(id)?;
            let link = path.link.and_then(|link| self.links.get(link));
            Some(PathInfo {
                id,
                addr: path.addr,
                state: path.state,
                latency: path.latency,
                inflight: link.map_or(0, |link| link.inflight),
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
            self.own_region_failed(now, region);
        }
        let gone = self.regions.answer(region, port, keys);
        self.order_drop(gone);
    }

    /// Ends what cannot be without a region of the session itself.
    fn own_region_failed(&mut self, now: Instant, region: RegionId) {
        let of_session = self.headers.as_ref().is_some_and(|headers| headers.region == region);
        for id in self.links.ids() {
            let of_link = self.links.get(id).and_then(|link| link.memory.as_ref());
            if of_session || of_link.is_some_and(|(of, _)| *of == region) {
                self.fail(now, id, Errno::ENOMEM);
            }
        }
    }

    /// A random number.
    pub(super) fn random(&mut self) -> u64 {
        self.random.next_u64()
    }

    /// A connection of a link, if the link is there and the connection is one of its.
    pub(super) fn link_of(&mut self, conn: ConnId) -> Option<&mut Link> {
        let link = self.links.get_mut(conn.path)?;
        if usize::from(conn.cid) < link.conns.len() { Some(link) } else { None }
    }

    /// Checks what must always hold. For tests and the simulator.
    ///
    /// # Panics
    /// When it does not.
    pub fn check_invariants(&self) {
        let mut up = 0;
        for (id, link) in self.links.iter() {
            let of_link = |r: &&Request| r.running && r.link == id;
            let running = self.requests.iter().filter(of_link).count();
            assert_eq!(link.inflight as usize, running, "requests in flight of {id:?}");
            for (cid, conn) in link.conns.iter().enumerate() {
                let of_conn = |r: &&Request| of_link(r) && usize::from(r.cid) == cid;
                let running = self.requests.iter().filter(of_conn).count();
                assert_eq!(conn.inflight as usize, running, "requests in flight of {id:?} {cid}");
                let late = link.phase == Phase::Up && conn.has_room(HEARTBEAT_RESERVE);
                assert!(!late || conn.notices.is_empty(), "notices not posted on {id:?} {cid}");
                assert!(conn.waiting.len() <= running, "waiting requests of {id:?} {cid}");
                let granted = |r: &&Request| of_conn(r) && r.grant != Grant::None;
                let granted = self.requests.iter().filter(granted).count();
                assert_eq!(conn.granted as usize, granted, "keys given on {id:?} {cid}");
            }
            up += usize::from(link.counted);
            let owner = link.path.and_then(|path| self.paths.get(path));
            let owned = owner.is_some_and(|path| path.link == Some(id));
            assert!(link.path.is_none() || owned, "{id:?} has no path");
            assert!(
                link.phase != Phase::Up || owner.is_some_and(|p| p.state == PathState::Connected),
                "{id:?} is up, its path is not"
            );
        }
        assert_eq!(self.up, up, "paths up");
        for (index, request) in self.requests.iter().enumerate() {
            assert!(request.running || request.grant == Grant::None, "{index}: a key outlives it");
            if request.running {
                assert!(self.permits.is_out(index as u16), "request {index} without a permit");
                assert!(self.links.get(request.link).is_some(), "request {index} without a link");
            }
        }
        for (id, path) in self.paths.iter() {
            assert!(self.list.contains(&id), "{id:?} is not listed");
            let link = path.link.map(|link| self.links.get(link).map(|link| link.path));
            assert!(link.is_none_or(|of| of == Some(Some(id))), "{id:?} has a stranger's link");
        }
        if self.life == Life::Closed {
            assert!(self.links.is_empty() && self.list.is_empty(), "closed with something left");
        }
    }

    /// Pieces of data of a request, for those who submit it again.
    pub(super) fn use_regions(&mut self, data: &[MemRef]) {
        for piece in data {
            if let Some(region) = self.regions.get_mut(piece.region) {
                region.uses += 1;
            }
        }
    }
}
