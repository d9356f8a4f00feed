//! The client: sessions with servers, and the disks mapped through them.
//!
//! ```text
//!   Client   map, unmap            sessions by name, disks rnbd0, rnbd1, ..
//!     |
//!   Disk     submit --.            a BlockDevice
//!     |               |
//!   Link     client::Core --> Session::request_batch     one per session
//!               ^    |
//!               |    '--> DiskDone::done, on_change
//!     completed, on_link, timer
//! ```

mod bounce;
mod disk;
mod link;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bowline_block::BlockDevice;
use bowline_ctl::Refused;
use bowline_rnbd::Errno;
use bowline_rnbd::client::{Config, Outage};
use bowline_rtrs_driver::client::{PathEv, ReadKeys, Session, SessionBuilder};
use bowline_rtrs_driver::tree::is_on_link;
use bowline_rtrs_driver::{Engine, HbConfig, PORT, Policy};
use bowline_wire::rnbd::Access;

use crate::error::Error;
use crate::tree::{self, DiskInfo, DiskState, MapPath, MapSpec, Queue, Traffic};
use link::Link;

pub use bowline_rnbd::client::DiskStats;
pub use disk::Disk;

/// Options of mapping a disk. Options of the session are used only if the mapping opens it.
#[derive(Clone, Debug)]
pub struct MapOptions {
    /// Name of the session; disks of one session share its paths and its queue.
    pub session: String,
    /// Paths of a new session: the local address (`None`: any), the server's address, and the
    /// server's port on this path (`None`: `port`).
    pub paths: Vec<(Option<IpAddr>, IpAddr, Option<u16>)>,
    /// The server's port, also for paths that are added later.
    pub port: u16,
    /// Access mode the disk is opened with.
    pub access: Access,
    /// Outage handling and timeout of requests.
    pub io: Config,
    /// Policy that chooses the path of each request.
    pub policy: Policy,
    /// Heartbeats, which detect a silent server.
    pub heartbeat: HbConfig,
    /// Fixed delay between attempts to connect a lost path, as in kernels. `None`: the first
    /// attempt at once, then growing delays [RT-91].
    pub reconnect_delay: Option<Duration>,
    /// Most attempts to connect a lost path; -1: no limit.
    pub max_reconnects: i16,
    /// Timeout of each step of connecting.
    pub connect_timeout: Duration,
    /// Kind of remote keys under which the server writes the data of reads.
    pub read_keys: ReadKeys,
    /// Connections of each path for IO; `None`: a number that suits the device
    /// ([`SessionBuilder::io_connections`]).
    pub io_connections: Option<u16>,
    /// Connections of each path for polled IO. A session that has some serves one disk only
    /// [NB-35]; as with kernels, nothing is sent over them [RS-31].
    pub poll_queues: u16,
    /// Number in the local name, 0 for `rnbd0`, unless another disk has it; `None`: the lowest free
    /// one [NB-33].
    pub number: Option<u32>,
    /// Callback for events of the paths.
    pub on_path: Option<OnPath>,
}

/// A callback for events of paths: name of the session, event.
type PathFn = dyn Fn(&str, PathEv) + Send + Sync;

/// A callback for events of paths.
#[derive(Clone)]
pub struct OnPath(Arc<PathFn>);

impl std::fmt::Debug for OnPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("OnPath").finish_non_exhaustive()
    }
}

impl MapOptions {
    /// Makes options for a session of that name: writable, port 1234, and requests fail while the
    /// session is lost.
    pub fn new(session: impl Into<String>) -> Self {
        Self {
            session: session.into(),
            paths: Vec::new(),
            port: PORT,
            access: Access::Rw,
            io: Config::default(),
            policy: Policy::default(),
            heartbeat: HbConfig::default(),
            reconnect_delay: None,
            max_reconnects: -1,
            connect_timeout: Duration::from_secs(30),
            read_keys: ReadKeys::default(),
            io_connections: None,
            poll_queues: 0,
            number: None,
            on_path: None,
        }
    }

    /// Adds paths, each from a local address to one of the server: a disk with two of them outlives
    /// the loss of either.
    #[must_use]
    pub fn paths(mut self, paths: impl IntoIterator<Item = (IpAddr, IpAddr)>) -> Self {
        self.paths.extend(paths.into_iter().map(|(src, dst)| (Some(src), dst, None)));
        self
    }

    /// Sets the access mode; by default the disk is opened for writing.
    #[must_use]
    pub const fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Adds a path to this address of the server, from a local address; `None` chooses the most
    /// suitable one.
    #[must_use]
    pub fn path(mut self, src: Option<IpAddr>, dst: IpAddr) -> Self {
        self.paths.push((src, dst, None));
        self
    }

    /// Sets what happens to requests while the session is lost.
    #[must_use]
    pub const fn outage(mut self, outage: Outage) -> Self {
        self.io.outage = outage;
        self
    }

    /// Sets a callback for events of paths, called with the name of their session: see
    /// [`SessionBuilder::on_path`].
    #[must_use]
    pub fn on_path(mut self, on_path: impl Fn(&str, PathEv) + Send + Sync + 'static) -> Self {
        self.on_path = Some(OnPath(Arc::new(on_path)));
        self
    }

    fn builder(&self) -> Result<SessionBuilder, Error> {
        let bridges = self.io.outage != Outage::FailFast;
        let builder = SessionBuilder::new(&self.session).map_err(|error| Error::rtrs(&error))?;
        let builder = match self.io_connections {
            Some(connections) => builder.io_connections(connections),
            None => builder,
        };
        let builder = self.paths.iter().fold(builder, |builder, (src, dst, port)| match port {
            Some(port) => builder.path_to(*src, SocketAddr::new(*dst, *port)),
            None => builder.path(*src, *dst),
        });
        let builder = match self.on_path.clone() {
            Some(OnPath(on_path)) => {
                let session = self.session.clone();
                builder.on_path(move |event| on_path(&session, event))
            }
            None => builder,
        };
        Ok(builder
            .read_keys(self.read_keys)
            .poll_connections(self.poll_queues)
            .port(self.port)
            .policy(self.policy)
            .heartbeat(self.heartbeat)
            .reconnect_delay(self.reconnect_delay)
            .max_reconnects(self.max_reconnects)
            .connect_timeout(self.connect_timeout)
            .bridges_outages(bridges))
    }
}

#[derive(Default)]
struct State {
    links: BTreeMap<String, Arc<Link>>,
    disks: BTreeMap<u32, Arc<Disk>>,
    /// Numbers of disks that are being mapped.
    reserved: BTreeSet<u32>,
    /// For each session that is being opened or closed, or whose disks are being mapped: its lock.
    changing: BTreeMap<String, Weak<Mutex<()>>>,
}

impl State {
    /// Reserves the number of a new disk: the one wanted if it is free, else the lowest free one
    /// [NB-33].
    fn reserve(&mut self, wanted: Option<u32>) -> u32 {
        let is_free = |n: &u32| !self.disks.contains_key(n) && !self.reserved.contains(n);
        // A client has fewer disks than there are numbers.
        let number = wanted.filter(is_free).or_else(|| (0..=u32::MAX).find(is_free)).unwrap_or(0);
        self.reserved.insert(number);
        number
    }
}

/// All disks mapped through one engine.
pub struct Client {
    engine: Arc<Engine>,
    state: Mutex<State>,
    defaults: MapOptions,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("disks", &self.lock().disks).finish_non_exhaustive()
    }
}

impl Client {
    /// Makes a client without disks. [`map`](Self::map) takes its options from `defaults`. So do
    /// disks mapped through the control tree, which names only a session, its paths and perhaps
    /// ports.
    pub fn new(engine: Arc<Engine>, defaults: MapOptions) -> Arc<Self> {
        Arc::new(Self { engine, state: Mutex::default(), defaults })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lock under which one thread at a time opens or closes a session, or maps its
    /// disks. Each session has its own, so that a server that does not answer delays no other.
    fn changing(&self, session: &str) -> Arc<Mutex<()>> {
        let mut state = self.lock();
        state.changing.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = state.changing.get(session).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        state.changing.insert(session.to_owned(), Arc::downgrade(&lock));
        lock
    }

    /// Maps a disk with the options that the client was made with, as [`map_with`](Self::map_with).
    ///
    /// # Errors
    /// As [`map_with`](Self::map_with).
    pub fn map(&self, device: &str) -> Result<Arc<Disk>, Error> {
        self.map_with(device, &self.defaults)
    }

    /// Maps a disk and waits until it is open; opens its session if need be [NB-35]. Options of the
    /// session are used only if this opens it.
    ///
    /// # Errors
    /// `EEXIST` when the session has it already, `EINVAL` for an existing session when it or
    /// `options` have poll queues, `ENXIO` for a new session without paths; errors of opening the
    /// session; errors of the server: `ENOENT`, `EPERM` when another session writes, `EACCES`.
    pub fn map_with(&self, device: &str, options: &MapOptions) -> Result<Arc<Disk>, Error> {
        let what = || format!("mapping {device} of session {}", options.session);
        let changing = self.changing(&options.session);
        let _changing = changing.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.lock().links.get(&options.session).cloned();
        let (link, new) = match known {
            Some(link) if options.poll_queues > 0 || link.poll_queues() > 0 => {
                let is_mapped = |disk: &Disk| {
                    let info = disk.info();
                    disk.session_name() == options.session
                        && info.is_some_and(|info| info.mapping_path == device)
                };
                let mapped = self.disks().iter().any(|disk| is_mapped(disk));
                let errno = if mapped { Errno::EEXIST } else { Errno::EINVAL };
                return Err(Error::new(what(), errno));
            }
            Some(link) => (link, false),
            None if options.paths.is_empty() => return Err(Error::new(what(), Errno::ENXIO)),
            None => {
                let link =
                    Link::open(&self.engine, options.builder()?, options.io, options.poll_queues)?;
                self.lock().links.insert(options.session.clone(), Arc::clone(&link));
                (link, true)
            }
        };
        let number = self.lock().reserve(options.number);
        let mapped = Disk::map(&link, device, options.access, number);
        let mut state = self.lock();
        state.reserved.remove(&number);
        match mapped {
            Ok(disk) => {
                state.disks.insert(number, Arc::clone(&disk));
                Ok(disk)
            }
            Err(errno) => {
                if new {
                    state.links.remove(&options.session);
                    drop(state);
                    link.close();
                }
                Err(Error::open(what(), errno, options.access))
            }
        }
    }

    /// Maps the disk that a command names, and waits until it is open. What the command does not
    /// say is as in `defaults`; [`MapSpec::options`] are left to the caller.
    ///
    /// # Errors
    /// As [`map_with`](Self::map_with); `ENODEV` for a path from an interface that no device has.
    pub fn map_spec(&self, spec: &MapSpec, defaults: &MapOptions) -> Result<Arc<Disk>, Error> {
        let has_device = |path: &MapPath| is_on_link(self.engine.devices(), &path.addresses);
        if !spec.paths.iter().all(has_device) {
            let what = format!("mapping {} of session {}", spec.device, spec.session);
            return Err(Error::new(what, Errno::ENODEV));
        }
        let paths = spec.paths.iter().map(|path| {
            let MapPath { addresses, port } = path;
            (addresses.src, addresses.dst, Some(port.unwrap_or(defaults.port)))
        });
        let options = MapOptions {
            session: spec.session.clone(),
            paths: paths.collect(),
            port: spec.port.unwrap_or(defaults.port),
            access: spec.access,
            poll_queues: spec.poll_connections(),
            ..defaults.clone()
        };
        self.map_with(&spec.device, &options)
    }

    /// Returns the options of disks that commands map without saying more.
    pub const fn defaults(&self) -> &MapOptions {
        &self.defaults
    }

    /// Returns the engine.
    pub const fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns a disk by its local name.
    pub fn disk(&self, name: &str) -> Option<Arc<Disk>> {
        self.lock().disks.values().find(|disk| disk.local_name() == name).cloned()
    }

    /// Returns all disks, in the order of their numbers.
    pub fn disks(&self) -> Vec<Arc<Disk>> {
        self.lock().disks.values().cloned().collect()
    }

    /// Returns the session of that name, for its state and to change its paths.
    pub fn session(&self, name: &str) -> Option<Arc<Session>> {
        let link = self.lock().links.get(name).cloned();
        link.map(|link| Arc::clone(link.session()))
    }

    /// Returns all sessions.
    pub fn sessions(&self) -> Vec<Arc<Session>> {
        let links: Vec<_> = self.lock().links.values().cloned().collect();
        links.iter().map(|link| Arc::clone(link.session())).collect()
    }

    /// Unmaps a disk and waits until that is done. The session ends with its last disk [NB-38]. The
    /// wait for a server that does not answer has no limit, unless there is an IO timeout (then
    /// twice that) or [`limit_unmap_wait`](Self::limit_unmap_wait) sets one; the server then learns
    /// of it by the end of the session.
    ///
    /// # Errors
    /// `ENODEV` when it is not mapped here, `EALREADY` when it is being unmapped.
    pub fn unmap(&self, disk: &Disk) -> Result<(), Error> {
        let what = || format!("unmapping {}", disk.local_name());
        let is_mapped = |state: &State| {
            let found = state.disks.get(&disk.number());
            found.is_some_and(|found| std::ptr::eq(Arc::as_ptr(found), disk))
        };
        if !is_mapped(&self.lock()) {
            return Err(Error::new(what(), Errno::ENODEV));
        }
        disk.unmap().map_err(|errno| Error::new(what(), errno))?;
        let session = disk.session_name().to_owned();
        let changing = self.changing(&session);
        let _changing = changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.lock();
        if is_mapped(&state) {
            state.disks.remove(&disk.number());
        }
        let last = !state.disks.values().any(|disk| disk.session_name() == session);
        let link = if last { state.links.remove(&session) } else { None };
        drop(state);
        if let Some(link) = link {
            link.close();
        }
        Ok(())
    }

    /// Limits how long unmapping the disks of all present sessions waits for a server that does not
    /// answer.
    pub fn limit_unmap_wait(&self, patience: Duration) {
        let links: Vec<_> = self.lock().links.values().cloned().collect();
        links.iter().for_each(|link| link.limit_unmap_wait(patience));
    }

    /// Unmaps all disks, as [`unmap`](Self::unmap) does.
    pub fn close(&self) {
        for disk in self.disks() {
            // An unmap that another thread has begun serves as well.
            let _ = self.unmap(&disk);
        }
    }
}

impl Drop for Client {
    /// Ends the sessions without waiting.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.disks.clear();
        for (_, link) in std::mem::take(&mut state.links) {
            link.abandon();
        }
    }
}

impl tree::Disks for Client {
    fn map(&self, spec: &MapSpec) -> Result<(), Errno> {
        if !spec.options.is_empty() {
            return Err(Errno::EINVAL);
        }
        self.map_spec(spec, &self.defaults).map(drop).map_err(|error| error.errno())
    }

    fn disks(&self) -> Vec<DiskInfo> {
        let all = Self::disks(self).into_iter();
        all.filter_map(|disk| {
            let info = disk.info()?;
            let stats = info.stats;
            let in_flight = u64::from(info.in_flight);
            let waiting = info.waiting as u64;
            Some(DiskInfo {
                name: disk.local_name().to_owned(),
                mapping_path: info.mapping_path,
                session: disk.session_name().to_owned(),
                access: info.access,
                state: match info.state {
                    bowline_rnbd::client::State::Init => DiskState::Init,
                    bowline_rnbd::client::State::Open => DiskState::Open,
                    bowline_rnbd::client::State::Closed => DiskState::Closed,
                    bowline_rnbd::client::State::Unmapped => DiskState::Unmapped,
                },
                poll_queues: disk.poll_queues().into(),
                bytes: info.limits.map_or(0, |limits| limits.bytes),
                traffic: Traffic {
                    reads: stats.reads,
                    read_bytes: stats.read_bytes,
                    writes: stats.writes,
                    write_bytes: stats.written_bytes,
                    inflight: in_flight + waiting,
                    discards: stats.discards,
                    discard_bytes: stats.discarded_bytes,
                    flushes: stats.flushes,
                },
                failures: info.failures,
                queue: Queue { in_flight, waiting },
                read_latencies: info.read_latencies,
                write_latencies: info.write_latencies,
            })
        })
        .collect()
    }

    /// Unmaps the disk whether it is in use or not: only the owner of its front ends knows that,
    /// and refuses with `EBUSY` before it calls this [NB-37].
    fn unmap(&self, disk: &str, _force: bool) -> Result<(), Errno> {
        let disk = self.disk(disk).ok_or(Errno::ENODEV)?;
        Self::unmap(self, &disk).map_err(|error| error.errno())
    }

    /// Changes the size whether the disk is in use or not, as [`unmap`](tree::Disks::unmap) does.
    fn resize(&self, disk: &str, sectors: u64, _force: bool) -> Result<(), Refused> {
        let disk = self.disk(disk).ok_or(Errno::ENODEV)?;
        let bytes = sectors.checked_mul(512).ok_or(Errno::EOVERFLOW)?;
        let present = disk.limits().bytes;
        if bytes > present && !disk.holds(bytes)? {
            let present = present / 512;
            let why = format!(
                "the server cannot read the last of {sectors} sectors: its export ends before that \
                 (the disk has {present}); one that has grown is looked at again after a SIGHUP of \
                 the server"
            );
            return Err(Refused { errno: Errno::EINVAL, why: Some(why) });
        }
        Ok(disk.resize(bytes)?)
    }

    fn remap(&self, disk: &str) -> Result<(), Errno> {
        let disk = self.disk(disk).ok_or(Errno::ENODEV)?;
        disk.remap()
    }
}
