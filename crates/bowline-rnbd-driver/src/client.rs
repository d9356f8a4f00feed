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

mod aside;
mod disk;
mod link;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bowline_rnbd::Errno;
use bowline_rnbd::client::{Config, Outage};
use bowline_rtrs_driver::client::{PathEv, ReadKeys, Session, SessionBuilder};
use bowline_rtrs_driver::tree::is_on_link;
use bowline_rtrs_driver::{Engine, HbConfig, PORT, Policy};
use bowline_wire::rnbd::Access;

use crate::error::Error;
use crate::tree::{self, DiskInfo, DiskState, MapPath, MapSpec, Traffic};
use link::Link;

pub use bowline_rnbd::client::DiskStats;
pub use disk::Disk;

/// How a disk is mapped. What concerns the session counts only when the session is not there yet.
#[derive(Clone, Debug)]
pub struct MapOptions {
    /// Name of the session; disks of one session share its paths and its queue.
    pub session: String,
    /// Paths of a new session: own address or any, and the server's, with its port there if that is
    /// another than `port`.
    pub paths: Vec<(Option<IpAddr>, IpAddr, Option<u16>)>,
    /// The server's port, also for paths that are added later.
    pub port: u16,
    /// How the disk is opened.
    pub access: Access,
    /// What becomes of requests while the session is away, and how long one may take.
    pub io: Config,
    /// How paths are chosen.
    pub policy: Policy,
    /// How the server's silence is noticed.
    pub heartbeat: HbConfig,
    /// Time between attempts to connect a lost path, as kernels have it; `None`: at once, then ever
    /// longer [RT-91].
    pub reconnect_delay: Option<Duration>,
    /// Attempts to connect a lost path; -1: for ever.
    pub max_reconnects: i16,
    /// Longest time of each step of connecting.
    pub connect_timeout: Duration,
    /// Under which keys the server writes what is read.
    pub read_keys: ReadKeys,
    /// Connections of each path for IO; `None`: as many as suit the device
    /// ([`SessionBuilder::io_connections`]).
    pub io_connections: Option<u16>,
    /// Connections of each path for polled IO. A session that has some is for one disk only
    /// [NB-35]; as with kernels nothing is sent over them [RS-31].
    pub poll_queues: u16,
    /// Who is told what happens to the paths.
    pub on_path: Option<OnPath>,
}

/// A function that is told of paths.
type PathFn = dyn Fn(&str, PathEv) + Send + Sync;

/// Who is told of paths.
#[derive(Clone)]
pub struct OnPath(Arc<PathFn>);

impl std::fmt::Debug for OnPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("OnPath").finish_non_exhaustive()
    }
}

impl MapOptions {
    /// Makes options for a session of that name: writable, port 1234, and requests fail while the
    /// session is away.
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
            on_path: None,
        }
    }

    /// Adds a path.
    #[must_use]
    pub fn path(mut self, src: Option<IpAddr>, dst: IpAddr) -> Self {
        self.paths.push((src, dst, None));
        self
    }

    /// Says what becomes of requests while the session is away.
    #[must_use]
    pub const fn outage(mut self, outage: Outage) -> Self {
        self.io.outage = outage;
        self
    }

    /// Is told what happens to paths, with the name of their session: see
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
}

/// All disks mapped through one engine.
pub struct Client {
    engine: Arc<Engine>,
    /// Sessions are opened and closed by one thread at a time.
    changing: Mutex<()>,
    state: Mutex<State>,
    defaults: MapOptions,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("disks", &self.lock().disks).finish_non_exhaustive()
    }
}

impl Client {
    /// Makes a client without disks. What is mapped through the control tree, which says no more
    /// than a session, its paths and perhaps ports, is mapped as `defaults` say.
    pub fn new(engine: Arc<Engine>, defaults: MapOptions) -> Arc<Self> {
        let (changing, state) = (Mutex::default(), Mutex::default());
        Arc::new(Self { engine, changing, state, defaults })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a disk and waits until it is there; opens its session if need be [NB-35].
    ///
    /// # Errors
    /// `EEXIST` when the session has it already, `EINVAL` for a session that is there when it or
    /// `options` have poll queues, `ENXIO` for a session that is not there and has no
    /// paths; what opening the session comes to; the server's: `ENOENT`, `EPERM` when somebody else
    /// writes, `EACCES`.
    pub fn map(&self, device: &str, options: &MapOptions) -> Result<Arc<Disk>, Error> {
        let what = || format!("mapping {device} of session {}", options.session);
        let _alone = self.change();
        let known = self.lock().links.get(&options.session).cloned();
        let (link, new) = match known {
            Some(link) if options.poll_queues > 0 || link.poll_queues() > 0 => {
                let there = |disk: &Disk| {
                    let info = disk.info();
                    disk.session_name() == options.session
                        && info.is_some_and(|info| info.mapping_path == device)
                };
                let there = self.disks().iter().any(|disk| there(disk));
                let errno = if there { Errno::EEXIST } else { Errno::EINVAL };
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
        let mut number = 0;
        {
            let state = self.lock();
            while state.disks.contains_key(&number) {
                number += 1;
            }
        }
        match Disk::map(&link, device, options.access, number) {
            Ok(disk) => {
                self.lock().disks.insert(number, Arc::clone(&disk));
                Ok(disk)
            }
            Err(errno) => {
                if new {
                    self.lock().links.remove(&options.session);
                    link.close();
                }
                Err(Error::new(what(), errno))
            }
        }
    }

    /// Returns the engine.
    pub const fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns a disk by its name here.
    pub fn disk(&self, name: &str) -> Option<Arc<Disk>> {
        self.lock().disks.values().find(|disk| disk.local_name() == name).cloned()
    }

    /// Returns all disks, in the order of their numbers.
    pub fn disks(&self) -> Vec<Arc<Disk>> {
        self.lock().disks.values().cloned().collect()
    }

    /// Returns the session of that name, to look at it and to change its paths.
    pub fn session(&self, name: &str) -> Option<Arc<Session>> {
        let link = self.lock().links.get(name).cloned();
        link.map(|link| Arc::clone(link.session()))
    }

    /// Returns all sessions.
    pub fn sessions(&self) -> Vec<Arc<Session>> {
        let links: Vec<_> = self.lock().links.values().cloned().collect();
        links.iter().map(|link| Arc::clone(link.session())).collect()
    }

    /// Gives a disk up and waits until it is gone. The session ends with its last disk [NB-38]. A
    /// server that does not answer is waited for for ever, or twice the longest time of a request,
    /// if there is one, or until [`hurry`](Self::hurry) says so; the end of the session then tells
    /// it.
    ///
    /// # Errors
    /// `ENODEV` when it is not mapped here, `EALREADY` when this is under way.
    pub fn unmap(&self, disk: &Disk) -> Result<(), Error> {
        let what = || format!("unmapping {}", disk.local_name());
        let ours = |state: &State| {
            let found = state.disks.get(&disk.number());
            found.is_some_and(|found| std::ptr::eq(Arc::as_ptr(found), disk))
        };
        if !ours(&self.lock()) {
            return Err(Error::new(what(), Errno::ENODEV));
        }
        disk.unmap().map_err(|errno| Error::new(what(), errno))?;
        let _alone = self.change();
        let mut state = self.lock();
        if ours(&state) {
            state.disks.remove(&disk.number());
        }
        let session = disk.session_name().to_owned();
        let last = !state.disks.values().any(|disk| disk.session_name() == session);
        let link = if last { state.links.remove(&session) } else { None };
        drop(state);
        if let Some(link) = link {
            link.close();
        }
        Ok(())
    }

    /// No longer than that a server is waited for that does not answer when disks of the sessions
    /// there are now are given up.
    pub fn hurry(&self, patience: Duration) {
        let links: Vec<_> = self.lock().links.values().cloned().collect();
        links.iter().for_each(|link| link.hurry(patience));
    }

    /// Gives all disks up, as [`unmap`](Self::unmap) does.
    pub fn close(&self) {
        for disk in self.disks() {
            // What is under way already is what is wanted.
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
        let usual = self.defaults.port;
        let is_there = |path: &MapPath| is_on_link(self.engine.devices(), &path.addresses);
        if !spec.paths.iter().all(is_there) {
            return Err(Errno::ENODEV);
        }
        let paths = spec.paths.iter().map(|path| {
            let MapPath { addresses, port } = path;
            (addresses.src, addresses.dst, Some(port.unwrap_or(usual)))
        });
        let options = MapOptions {
            session: spec.session.clone(),
            paths: paths.collect(),
            port: spec.port.unwrap_or(usual),
            access: spec.access,
            poll_queues: spec.poll_connections(),
            ..self.defaults.clone()
        };
        let mapped = Self::map(self, &spec.device, &options);
        mapped.map(drop).map_err(|error| error.errno())
    }

    fn disks(&self) -> Vec<DiskInfo> {
        let all = Self::disks(self).into_iter();
        all.filter_map(|disk| {
            let info = disk.info()?;
            let stats = info.stats;
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
                    inflight: u64::from(info.in_flight) + info.waiting as u64,
                    discards: stats.discards,
                    discard_bytes: stats.discarded_bytes,
                    flushes: stats.flushes,
                },
            })
        })
        .collect()
    }

    /// Does it whether the disk is in use or not: who uses a disk is known to those who put doors
    /// in front of it, and they refuse with `EBUSY` before they ask here [NB-37].
    fn unmap(&self, disk: &str, _force: bool) -> Result<(), Errno> {
        let disk = self.disk(disk).ok_or(Errno::ENODEV)?;
        Self::unmap(self, &disk).map_err(|error| error.errno())
    }

    fn resize(&self, disk: &str, sectors: u64) -> Result<(), Errno> {
        let disk = self.disk(disk).ok_or(Errno::ENODEV)?;
        let bytes = sectors.checked_mul(512).ok_or(Errno::EOVERFLOW)?;
        disk.resize(bytes)
    }

    fn remap(&self, disk: &str) -> Result<(), Errno> {
        let disk = self.disk(disk).ok_or(Errno::ENODEV)?;
        disk.remap()
    }
}
