//! The disks of a node: one RDMA device at its addresses, with a server of exports and a client of
//! disks on it. Device, server and client are started when the first of them is needed: by the
//! configuration file, or by a command.
//!
//! ```text
//! [[export]], rnbd export --> Served        --.
//!                                             +--> Engine --> device (UDP port 4791)
//! [[map]], rnbd map       --> DiskFrontEnds --'
//! ```
//!
//! Each disk of the file is mapped by a thread of its own, since a server that does not answer must
//! delay neither the node nor other disks.

mod objects;

use std::{
    io,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use bowline_ctl::{Errno, Place, Server, create_folder_of, folder, sweep};
use bowline_rnbd_driver::{
    client::{Client, MapOptions},
    server::Exports,
};
use bowline_rtrs_driver::{Engine, tree::ClientSession};
use bowline_verbs::Device;

use super::{
    client::{report_all, say_what_is_cut_off, unmap_all},
    ending::{ENDING_PATIENCE, Unserved},
    exported::Export,
    failing::FailingDisks,
    front_ends::{DiskFrontEnds, DiskNotice, FrontEndConfig, Mapping},
    mapping::{MapConfig, map_patiently, refused},
    served::Served,
    settings::{Map, Settings},
    watch::{self, Watch},
};
use crate::{
    Failure, Outcome,
    metrics::{self, Exposition},
    signals::Stop,
    values::Address,
};

/// Longest time in which the node is not ready because its disks are being mapped.
const READY_MAX: Duration = Duration::from_secs(60);
/// How often it checks whether they are.
const READY_POLL: Duration = Duration::from_millis(10);
/// Pauses between attempts to map a disk: the first, and the longest that doubling leads to.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// The disks of a node.
pub(crate) struct HostDisks {
    settings: Settings,
    /// Addresses of the node; none stands for all.
    node: Vec<Address>,
    /// Addresses of the soft device of the node's RDS, which no other one can have.
    taken: Vec<Address>,
    is_confined: bool,
    /// Options of disks that commands map without saying more.
    defaults: MapOptions,
    /// First of the locks here; held while device, server or client are started.
    parts: Mutex<Parts>,
    /// Set at the end; maps that wait for their next attempt are woken.
    ended: Mutex<bool>,
    ending: Condvar,
    /// Maps of the file whose first attempt is not over.
    untried: AtomicUsize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    told: Mutex<Told>,
    notices: mpsc::Sender<(String, DiskNotice)>,
}

/// What has been started.
#[derive(Default)]
struct Parts {
    /// The share of disks in the soft device of the node's RDS.
    of_rds: Option<Arc<dyn Device>>,
    engine: Option<Arc<Engine>>,
    /// Addresses of the device.
    addresses: Vec<Address>,
    served: Option<Arc<Served>>,
    disks: Option<Arc<DiskFrontEnds>>,
}

/// Events of disks and paths that have not been told of.
struct Told {
    notices: mpsc::Receiver<(String, DiskNotice)>,
    paths: Watch,
    failing: FailingDisks,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Settings {
    /// Listens where the commands look for disks of this machine. A node at these addresses whose
    /// file names no disks does without, if it may not have a socket there.
    pub(crate) fn listen(&self, node: &[Address]) -> Option<Place> {
        let name = node.first().map_or_else(|| "any".to_owned(), Address::to_string);
        let path = folder().join(format!("node-{name}-{}.sock", std::process::id()));
        sweep(&folder());
        let listening = create_folder_of(&path).and_then(|()| Place::listen(&path));
        listening.inspect_err(|error| self.no_control(&path, error)).ok()
    }

    fn no_control(&self, path: &Path, error: &io::Error) {
        if !(self.exports.is_empty() && self.maps.is_empty()) {
            note!(
                "bowline node: cannot listen on {}: {error}; give commands for disks the \
                 node's own socket with --control",
                path.display()
            );
        }
    }
}

impl HostDisks {
    /// Makes the disks of a node with these addresses; nothing is started.
    ///
    /// `taken` are those that the node's RDS has a soft RDMA device at. A node that `is_confined`
    /// can neither open files nor mount.
    pub(crate) fn new(
        settings: Settings,
        node: &[Address],
        taken: &[Address],
        is_confined: bool,
    ) -> Outcome<Arc<Self>> {
        let (tell, paths) = watch::new();
        let (notices, receiver) = mpsc::channel();
        let port = settings.shared.device.port;
        let defaults = MapConfig::default().options("", port).on_path(tell);
        let untried = AtomicUsize::new(settings.maps.len());
        Ok(Arc::new(Self {
            settings,
            node: node.to_vec(),
            taken: taken.to_vec(),
            is_confined,
            defaults,
            parts: Mutex::default(),
            ended: Mutex::default(),
            ending: Condvar::new(),
            untried,
            threads: Mutex::default(),
            told: Mutex::new(Told { notices: receiver, paths, failing: FailingDisks::default() }),
            notices,
        }))
    }

    /// Gives the disks a share in the soft device of the node's RDS.
    pub(crate) fn share(&self, device: Arc<dyn Device>) {
        lock(&self.parts).of_rds = Some(device);
    }

    /// Serves the exports and maps the disks of the file; waits until each of these was tried once,
    /// for a limited time. An export or a disk that fails is told of, and stops no other.
    pub(crate) fn start(self: &Arc<Self>, stop: &Stop) -> Outcome {
        if !self.settings.exports.is_empty() {
            self.serve_file()?;
        }
        if !self.settings.maps.is_empty() {
            self.client()?;
        }
        for (number, map) in (0..).zip(&self.settings.maps) {
            let (me, map) = (Arc::clone(self), map.clone());
            let thread = thread::Builder::new()
                .name("map".to_owned())
                .spawn(move || me.keep_mapping(&map, number))
                .map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
            lock(&self.threads).push(thread);
        }
        let end = Instant::now() + READY_MAX;
        // Acquire: pairs with the end of an attempt, whose notices are reported next.
        while self.untried.load(Ordering::Acquire) > 0
            && Instant::now() < end
            && !stop.wait(Some(READY_POLL))
        {}
        self.log();
        Ok(())
    }

    /// Opens the server with the exports of the file.
    fn serve_file(&self) -> Outcome {
        let (mut exports, mut said) = (Exports::new(), Vec::new());
        for export in &self.settings.exports {
            let mut with = exports.clone();
            match export.add_to(&mut with) {
                Ok(()) => {
                    exports = with;
                    said.push(export.clone());
                }
                Err(trouble) => note!("bowline node: not exported: {trouble}"),
            }
        }
        let mut parts = lock(&self.parts);
        let served = self.open_server(&mut parts, exports, said)?;
        served.announce();
        Ok(())
    }

    fn open_server(
        &self,
        parts: &mut Parts,
        exports: Exports,
        said: Vec<Export>,
    ) -> Outcome<Arc<Served>> {
        let engine = self.engine(parts)?;
        let shared = &self.settings.shared;
        let places = shared.device.with_port(&parts.addresses);
        let config = self.settings.config.clone();
        let served = Served::open(&engine, &places, config, exports, said)?;
        let names: Vec<String> = places.iter().map(ToString::to_string).collect();
        say!("disks are served at {}", names.join(", "));
        parts.served = Some(Arc::clone(&served));
        Ok(served)
    }

    /// Returns the server of exports, started if need be.
    fn server(&self) -> Outcome<Arc<Served>> {
        let mut parts = lock(&self.parts);
        match &parts.served {
            Some(served) => Ok(Arc::clone(served)),
            None => self.open_server(&mut parts, Exports::new(), Vec::new()),
        }
    }

    /// Returns the client of disks, started if need be.
    fn client(&self) -> Outcome<Arc<DiskFrontEnds>> {
        let mut parts = lock(&self.parts);
        if let Some(disks) = &parts.disks {
            return Ok(Arc::clone(disks));
        }
        let client = Client::new(self.engine(&mut parts)?, self.defaults.clone());
        let disks = DiskFrontEnds::new(client, FrontEndConfig::default(), self.notices.clone());
        parts.disks = Some(Arc::clone(&disks));
        Ok(disks)
    }

    fn engine(&self, parts: &mut Parts) -> Outcome<Arc<Engine>> {
        if *lock(&self.ended) {
            return Err(Failure::failed("the node is stopping"));
        }
        if self.is_confined {
            let hint = "this node is restricted and cannot open files: start it with [disks] in \
                        its configuration file, or with --no-sandbox";
            return Err(Failure::Errno(Errno::EPERM, hint.to_owned()));
        }
        if let Some(engine) = &parts.engine {
            return Ok(Arc::clone(engine));
        }
        let shared = &self.settings.shared;
        let addresses = if shared.address.is_empty() && !self.node.is_empty() {
            self.node.clone()
        } else {
            shared.device.places(&shared.address)?
        };
        let is_taken = |address: &&Address| self.taken.contains(address);
        let engine = match (addresses.iter().find(is_taken), &parts.of_rds) {
            (Some(_), Some(device))
                if shared.device.is_soft() && addresses.iter().all(|a| is_taken(&a)) =>
            {
                shared.device.engine_on(vec![Arc::clone(device)])?
            }
            (Some(both), _) if shared.device.is_soft() => {
                return Err(Failure::failed(format!(
                    "RDS over RDMA of this node uses UDP port 4791 of {both}, but not of all addresses \
                     of its disks: set address of [disks] in its configuration file, either to \
                     addresses with RDS over RDMA or to addresses without it"
                )));
            }
            _ => shared.device.engine(&addresses)?,
        };
        parts.engine = Some(Arc::clone(&engine));
        parts.addresses = addresses;
        Ok(engine)
    }

    /// Body of the thread that maps a disk of the file.
    fn keep_mapping(&self, map: &Map, number: u32) {
        let mut told = None;
        let mut pause = RETRY_MIN;
        let mut first = true;
        loop {
            let failure = match self.map_once(map, number) {
                // A command was faster.
                Ok(()) | Err(Failure::Errno(Errno::EEXIST, _)) => None,
                Err(failure) => Some(failure.to_string()),
            };
            if let Some(text) = failure.as_ref().filter(|text| told.as_ref() != Some(*text)) {
                let then = if map.stay { "; trying again" } else { "" };
                note!(
                    "bowline node: not mapped: {} from {}: {text}{then}",
                    map.device,
                    map.route.server()
                );
                told.clone_from(&failure);
            }
            if std::mem::take(&mut first) {
                // Release: the notices of this attempt come before it.
                self.untried.fetch_sub(1, Ordering::Release);
            }
            if failure.is_none() || !map.stay || self.ends_within(pause) {
                return;
            }
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    /// Maps a disk of the file, and opens its front ends.
    fn map_once(&self, map: &Map, number: u32) -> Outcome {
        let disks = self.client()?;
        let route = map.route.route()?;
        let own = lock(&self.parts).addresses.clone();
        if let Some(other) = route.own.iter().find(|one| own.iter().all(|own| own.ip != one.ip)) {
            return Err(Failure::failed(format!(
                "{other} is not an address of the node's disks; give one of these in path, as \
                 \"SOURCE@DESTINATION\", or add it to address of [disks]"
            )));
        }
        let device = &self.settings.shared.device;
        let options = MapOptions {
            number: Some(number),
            on_path: self.defaults.on_path.clone(),
            ..map.how.options(&route.session, device.port)
        };
        let client = disks.client();
        let options_here = route.on(options.clone());
        let sleep = |time| !self.ends_within(time);
        let disk = map_patiently(client, &map.device, &options_here, sleep).map_err(|error| {
            refused(&map.device, &route, &map.how, device, client.engine(), &error)
        })?;
        disks.remember(&disk, Mapping { options, front_ends: map.front_ends.clone() });
        disks.open(&disk, &map.front_ends).map_err(|trouble| {
            // Without its front ends the disk is of no use.
            let _ = client.unmap(&disk);
            trouble.into()
        })
    }

    /// Waits for the end of the node, at most this long; returns whether it has come.
    fn ends_within(&self, time: Duration) -> bool {
        let ended = lock(&self.ended);
        let waited = self.ending.wait_timeout_while(ended, time, |ended| !*ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn served(&self) -> Option<Arc<Served>> {
        lock(&self.parts).served.clone()
    }

    fn disks(&self) -> Option<Arc<DiskFrontEnds>> {
        lock(&self.parts).disks.clone()
    }

    /// Prints what has happened to exports, disks and paths since the last call.
    pub(crate) fn log(&self) {
        if let Some(served) = self.served() {
            served.log();
        }
        let engine = lock(&self.parts).engine.clone();
        let Some(engine) = engine else { return };
        let Told { notices, paths, failing } = &mut *lock(&self.told);
        report_all(notices);
        paths.report(|own, server| engine.fault(own, server));
        if let Some(disks) = self.disks() {
            failing.report(disks.client());
        }
    }

    /// Reads the sizes of all exports anew.
    pub(crate) fn resize(&self) {
        if let Some(served) = self.served() {
            served.resize();
        }
    }

    /// Returns how many disks there are, as part of a line; nothing where there are none.
    pub(crate) fn status(&self) -> String {
        let mapped = bowline_rnbd_driver::tree::Disks::disks(self).len();
        let exports = bowline_rnbd_driver::tree::Exports::exports(self).len();
        let all = self.settings.maps.len().max(mapped);
        let maps = (all > 0).then(|| format!(", {mapped} of {all} disks mapped"));
        let exports = (exports > 0).then(|| format!(", {exports} exported"));
        maps.into_iter().chain(exports).collect()
    }

    /// Serves the control tree of the disks.
    pub(crate) fn control(self: &Arc<Self>, place: &Place) -> Option<Server> {
        place
            .serve(self.tree())
            .inspect_err(|error| self.settings.no_control(place.path(), error))
            .ok()
    }

    /// Writes the metrics of what was started.
    pub(crate) fn metrics(&self, out: &mut Exposition) {
        let parts = lock(&self.parts);
        let Some(engine) = parts.engine.clone() else { return };
        let (served, disks) = (parts.served.clone(), parts.disks.clone());
        drop(parts);
        metrics::engine(out, &engine);
        if let Some(served) = served {
            metrics::exports_of(out, served.server());
        }
        if let Some(disks) = disks {
            metrics::disks_of(out, &disks.client().sessions(), &*disks);
        }
    }

    /// Returns the longest time that [`close`](Self::close) waits for servers.
    pub(crate) fn patience(&self) -> Duration {
        if self.disks().is_some() { ENDING_PATIENCE } else { Duration::ZERO }
    }

    /// Unmaps all disks, and closes the sessions of all clients. Returns what was not served, which
    /// was printed.
    pub(crate) fn close(&self, stop: &Stop) -> Unserved {
        *lock(&self.ended) = true;
        self.ending.notify_all();
        let mut unserved = Unserved::default();
        if let Some(disks) = self.disks() {
            say_what_is_cut_off(&disks, stop);
            unserved = disks.finish();
            unmap_all(disks.client(), stop, || disks.close(&mut unserved));
            unserved.tell();
        }
        if let Some(served) = self.served() {
            served.log();
            served.close();
        }
        let engine = lock(&self.parts).engine.clone();
        if let Some(engine) = engine {
            engine.close();
        }
        // Their attempts have failed by now, since the engine is closed.
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            // The panic of a thread was printed on standard error.
            let _ = thread.join();
        }
        self.log();
        // The device is closed with its last user.
        drop(std::mem::take(&mut *lock(&self.parts)));
        unserved
    }
}
