//! A server of disks that runs: its exports with what was said of them, its log, and its part of
//! the control tree. `rnbd export` has one, and a node with exports.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bowline_base::clock;
use bowline_ctl::{Errno, Sys};
use bowline_rnbd_driver::{
    server::{ExportServer, Exports, Moved, ServerConfig},
    tree::{self as rnbd_tree, ExportCommands, ExportInfo},
};
use bowline_rtrs_driver::{
    Engine, PathId,
    server::ServerConfig as RtrsConfig,
    tree::{self as rtrs_tree, Files, ServerSessions},
};
use bowline_verbs::DeviceAttr;

use super::{
    Trouble, clients,
    exported::{Export, left_out},
    failing::{Failing, advice},
    lost::Lost,
};
use crate::{
    Failure, Outcome,
    log::{shown, stamp},
};

/// A server and what was said of its exports.
pub struct Served {
    engine: Arc<Engine>,
    server: Arc<ExportServer>,
    exports: Mutex<Vec<Export>>,
    /// Exports came or went since the start. Relaxed: it publishes nothing but itself.
    is_changed: AtomicBool,
    log: Mutex<Log>,
}

/// What the log has told.
#[derive(Default)]
struct Log {
    offences: Offences,
    lost: Lost,
    failing: Failing,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").finish_non_exhaustive()
    }
}

impl Served {
    /// Serves exports; `said` is what was said of each of them.
    pub fn open(
        engine: &Arc<Engine>,
        places: &[SocketAddr],
        config: ServerConfig,
        exports: Exports,
        said: Vec<Export>,
    ) -> Outcome<Arc<Self>> {
        let refreshes = config.rtrs.always_invalidate;
        let server = ExportServer::open(engine, places, config, exports)
            .map_err(|error| Failure::Failed(error.to_string()))?;
        let devices = engine.devices().iter().map(|device| device.attr());
        let exposed = if refreshes { without_refresh(devices) } else { Vec::new() };
        if !exposed.is_empty() {
            note!(
                "memory keys are not invalidated while requests are executed, because {} cannot do so: serve trusted \
                 clients only, as with --no-invalidate",
                exposed.join(", ")
            );
        }
        let (exports, log) = (Mutex::new(said), Mutex::default());
        let is_changed = AtomicBool::new(false);
        Ok(Arc::new(Self { engine: Arc::clone(engine), server, exports, is_changed, log }))
    }

    /// Returns the server.
    pub const fn server(&self) -> &Arc<ExportServer> {
        &self.server
    }

    /// Closes the sessions and the storage; prints what could not be made durable.
    pub fn close(&self) {
        for error in self.server.close() {
            note!("{error}: what no client has flushed may be lost");
        }
    }

    /// Prints a line for each export.
    pub fn announce(&self) {
        for export in rnbd_tree::Exports::exports(&*self.server) {
            self.announce_one(&export);
        }
    }

    fn announce_one(&self, export: &ExportInfo) {
        let mode = if export.read_only { " ro" } else { "" };
        // Checked before the line is printed after which another program may change the file.
        if let Some(left) = self.whole(&export.name).and_then(|whole| left_out(whole, export.bytes))
        {
            note!("export {}: {left}", shown(&export.name));
        }
        say!("export {} bytes={}{mode}", shown(&export.name), export.bytes);
    }

    /// Returns the size of what an export is of in bytes, incomplete blocks included, if known.
    fn whole(&self, name: &str) -> Option<u64> {
        let exports = lock(&self.exports);
        exports.iter().find(|export| export.name.as_deref() == Some(name))?.whole()
    }

    /// Returns the file, the device or the NBD server behind an export, if it has one.
    fn place(&self, name: &str) -> Option<String> {
        let exports = lock(&self.exports);
        let named = exports.iter().find(|export| export.name.as_deref() == Some(name));
        if let Some(uri) = named.and_then(|export| export.nbd_backend.clone()) {
            return Some(uri);
        }
        let file = match exports.iter().find(|export| export.name.as_deref() == Some(name)) {
            Some(export) => export.file.clone()?,
            None => exports.iter().find_map(|export| export.dir.clone())?.join(name),
        };
        Some(file.display().to_string())
    }

    /// Tells whether an export was added or removed, or was to be, since the start.
    pub fn is_changed(&self) -> bool {
        self.is_changed.load(Ordering::Relaxed)
    }

    /// Adds an export, and prints a line for it.
    pub fn add(&self, export: Export) -> Result<(), Trouble> {
        self.is_changed.store(true, Ordering::Relaxed);
        // Before opens of other exports wait for it.
        let connected = export.connect()?;
        self.server.add(|exports| export.add_connected(connected, exports))?;
        let name = export.name.clone();
        lock(&self.exports).push(export);
        let all = rnbd_tree::Exports::exports(&*self.server);
        if let Some(info) = all.iter().find(|info| Some(&info.name) == name.as_ref()) {
            self.announce_one(info);
        }
        Ok(())
    }

    /// Takes an export away, and prints a line for it.
    fn remove(&self, name: &str, force: bool) -> Result<(), Errno> {
        self.is_changed.store(true, Ordering::Relaxed);
        self.server.remove(name, force).map_err(|error| error.errno())?;
        lock(&self.exports).retain(|export| export.name.as_deref() != Some(name));
        say!("export {} removed", shown(name));
        Ok(())
    }

    /// Reads the sizes of all exports anew.
    pub fn resize(&self) {
        let moved = self.server.moved();
        for file in &moved {
            note!("{}", moved_text(file));
        }
        // The file at the path of a moved export is another one.
        let whole = |name: &str| {
            let is_there = moved.iter().all(|file| file.export != name);
            self.whole(name).filter(|_| is_there)
        };
        for (name, bytes) in self.server.resize_all() {
            match bytes {
                Ok(bytes) => {
                    if let Some(left) = whole(&name).and_then(|whole| left_out(whole, bytes)) {
                        note!("export {}: {left}", shown(&name));
                    }
                    say!("export {} bytes={bytes}", shown(&name));
                }
                Err(error) => note!("{error}"),
            }
        }
    }

    /// Prints what clients have done since the last call, and what became of their paths.
    pub fn log(&self) {
        let now = Instant::now();
        let server = &self.server;
        let mut log = lock(&self.log);
        let (news, missed) = server.rtrs().take_path_events();
        let why = |own, client| self.engine.fault(own, client);
        let paths = log.lost.lines(now, &news, missed, why);
        let (events, missed) = server.take_client_events();
        let clients = clients::lines(&events, missed, |session| client_address(server, session));
        let failing = self.failing(clock::now(), &mut log.failing);
        let notices = server.take_notices().into_iter();
        let notices = notices.map(|(name, text)| format!("export {}: {text}", shown(&name)));
        let lines = clients.into_iter().chain(paths).chain(log.offences.look(now, server));
        for line in lines.chain(failing).chain(notices) {
            note_of_peer!("{}{line}", stamp());
        }
    }

    /// Returns the lines about stores that fail requests. Those of one name are kept apart: an
    /// export may have been removed, and another one have its name since.
    fn failing(&self, now: bowline_base::Instant, failing: &mut Failing) -> Vec<String> {
        let stores = self.server.failures();
        let failures = stores.iter().map(|failed| (&*failed.store, failed.failures));
        let about = |store: &str, errno| {
            let failed = stores.iter().find(|failed| failed.store == store);
            let name = failed.map_or(store, |failed| &*failed.name);
            let place = match failed {
                Some(failed) if !failed.is_current => Some(store.to_owned()),
                _ => self.place(name),
            };
            let place = place.map_or(String::new(), |place| format!(" ({place})"));
            (format!("export {name}{place}"), advice(errno).to_owned())
        };
        failing.lines(now, failures, about)
    }

    /// Tells whether keys are withdrawn while requests are worked on.
    pub fn invalidates(&self) -> bool {
        let devices = self.engine.devices().iter().map(|device| device.attr());
        self.server.rtrs().config().always_invalidate && without_refresh(devices).is_empty()
    }
}

/// Adds the parameters of a server's modules to a tree.
pub fn server_modules(
    sys: Sys,
    config: RtrsConfig,
    invalidates: bool,
    dir: Option<&Path>,
    port: u16,
) -> Sys {
    let transport = rtrs_tree::ServerParameters {
        always_invalidate: invalidates,
        max_chunk_size: config.geometry.chunk(),
        sess_queue_depth: config.geometry.queue_depth(),
    };
    let dev_search_path = dir.map_or_else(String::new, |dir| dir.display().to_string());
    let exports = rnbd_tree::Parameters { dev_search_path, port_nr: port };
    sys.module("rtrs_server", Arc::new(transport)).module("rnbd_server", Arc::new(exports))
}

/// Adds the classes of a server to a tree; [`Files::Linux612`] leaves out the files by which
/// exports come and go [NB-64].
pub fn server_classes<T>(sys: Sys, server: &Arc<T>, files: Files) -> Sys
where
    T: rnbd_tree::Exports + ExportCommands + ServerSessions + 'static,
{
    let exports: Arc<dyn rnbd_tree::Exports> = Arc::<T>::clone(server);
    let sessions: Arc<dyn ServerSessions> = Arc::<T>::clone(server);
    let commands: Arc<dyn ExportCommands> = Arc::<T>::clone(server);
    let commands = (files != Files::Linux612).then_some(commands);
    sys.class("rtrs-server", rtrs_tree::server_node(sessions, files))
        .class("rnbd-server", rnbd_tree::server_node(exports, commands))
}

impl rnbd_tree::Exports for Served {
    fn exports(&self) -> Vec<ExportInfo> {
        rnbd_tree::Exports::exports(&*self.server)
    }

    /// Logs devices that are closed by force [NB-50].
    fn force_close(&self, export: &str, session: &str) -> Result<(), Errno> {
        rnbd_tree::Exports::force_close(&*self.server, export, session)?;
        note!("export {} closed by force for session {}", shown(export), shown(session));
        Ok(())
    }
}

impl ExportCommands for Served {
    fn export(&self, text: &str) -> Result<(), Errno> {
        let export = Export::of_words(text).map_err(|_| Errno::EINVAL)?;
        self.add(export).map_err(|trouble| {
            note!("{trouble}");
            trouble.errno
        })
    }

    fn unexport(&self, export: &str, force: bool) -> Result<(), Errno> {
        self.remove(export, force)
    }
}

impl ServerSessions for Served {
    fn sessions(&self) -> Vec<rtrs_tree::ServerSession> {
        ServerSessions::sessions(&**self.server.rtrs())
    }

    fn disconnect(&self, path: PathId) -> Result<(), Errno> {
        ServerSessions::disconnect(&**self.server.rtrs(), path)
    }

    fn reset(&self, path: PathId, what: rtrs_tree::Stats) {
        ServerSessions::reset(&**self.server.rtrs(), path, what);
    }
}

/// Returns the address of the first path of a session.
fn client_address(server: &ExportServer, session: &str) -> Option<IpAddr> {
    let sessions = server.rtrs().sessions();
    let found = sessions
        .iter()
        .find(|info| info.name.as_ref().is_some_and(|name| name.as_str() == session));
    found.and_then(|info| info.paths.first()).map(|path| path.remote.ip())
}

/// Returns a text about an export whose file has moved, and what that means.
fn moved_text(file: &Moved) -> String {
    let Moved { export, path, missing } = file;
    let what = match missing {
        None => "was replaced by another file".to_owned(),
        Some(Errno::ENOENT | Errno::ENOTDIR) => "is gone".to_owned(),
        Some(errno) => format!("cannot be read: {errno}"),
    };
    format!(
        "export {export}: {} {what}; the file opened at the start is still served",
        path.display()
    )
}

/// Clients that break rules, or are not admitted: logged at intervals, and counted in between, so
/// that they cannot fill the log.
#[derive(Default)]
struct Offences {
    told: Option<Instant>,
    /// Paths of clients that broke rules, paths of those not admitted, connection requests that
    /// were refused, and those among them for which there was no room.
    counted: [u64; 4],
}

impl Offences {
    /// Shortest time between two lines.
    const PAUSE: Duration = Duration::from_secs(10);

    fn look(&mut self, now: Instant, server: &ExportServer) -> Option<String> {
        let counters = server.rtrs().counters();
        let now_counted = [
            counters.paths_violated,
            counters.paths_refused,
            counters.refused,
            counters.refused_full,
        ];
        if now_counted == self.counted || self.told.is_some_and(|told| now - told < Self::PAUSE) {
            return None;
        }
        self.told = Some(now);
        let before = std::mem::replace(&mut self.counted, now_counted);
        let [violated, paths, requests, full] =
            std::array::from_fn(|at| now_counted[at] - before[at]);
        let config = server.rtrs().config();
        let full = (full > 0).then(|| {
            format!(
                " ({full} of them because --session-memory is full: it has room for {} of {} MiB)",
                config.sessions_max(),
                config.session_bytes() >> 20
            )
        });
        let last = server.rtrs().last_offence().filter(|_| violated + paths > 0);
        let last = last.map(|last| format!("; the last: {}: {}", last.remote, last.reason));
        Some(format!(
            "clients: {violated} paths closed for protocol violations, {paths} not accepted, {requests} connections \
             refused{}{}",
            full.unwrap_or_default(),
            last.unwrap_or_default()
        ))
    }
}

/// Returns the names of the devices that cannot invalidate and renew keys [RT-73].
fn without_refresh(devices: impl Iterator<Item = DeviceAttr>) -> Vec<String> {
    devices.filter(|attr| !attr.key_refresh).map(|attr| attr.name).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use bowline_block::{
        Limits,
        backend::{Backend, BackendDone, BackendIo, BackendResult},
        sync::{self, Durable},
    };
    use bowline_rnbd_driver::client::{Client, MapOptions};
    use bowline_roce_driver::{SoftConfig, SoftDevice};
    use bowline_rtrs_driver::{EngineConfig, PORT};

    use super::*;

    /// Storage that fails all that is written.
    struct Broken;

    impl Backend for Broken {
        fn limits(&self) -> Limits {
            Limits::plain(1 << 20)
        }

        fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
            for io in io.drain(..) {
                done.done(&[BackendResult::new(io.token, Err(Errno::EIO))]);
            }
        }

        fn resize(&self) -> std::io::Result<u64> {
            Ok(1 << 20)
        }
    }

    fn engine_at(host: u8) -> (IpAddr, Arc<Engine>) {
        let ip = IpAddr::from([127, 47, 6, host]);
        let config = SoftConfig { addrs: vec![ip], ..SoftConfig::default() };
        let device = Arc::new(SoftDevice::open(config).unwrap());
        (ip, Engine::new(vec![device], EngineConfig::default()).unwrap())
    }

    #[test]
    fn stores_that_have_one_name_after_another_are_reported_apart() {
        // tests [NB-67]
        let (there, engine) = engine_at(1);
        let (places, config) = ([SocketAddr::new(there, PORT)], ServerConfig::default());
        let served = Served::open(&engine, &places, config, Exports::new(), Vec::new()).unwrap();
        let (here, engine_here) = engine_at(11);
        let client = Client::new(Arc::clone(&engine_here), MapOptions::new("s"));
        let options = MapOptions::new("s").path(Some(here), there);
        let mut failing = Failing::default();
        let mut reported = Vec::new();
        for failures in [5, 1] {
            served.server().add(|exports| exports.backend("a", Arc::new(Broken))).unwrap();
            let disk = client.map_with("a", &options).unwrap();
            for _ in 0..failures {
                let written = sync::write_at(&*disk, 0, &[0; 512], Durable::Later);
                assert_eq!(written, Err(Errno::EIO));
            }
            reported.extend(served.failing(clock::now(), &mut failing));
            client.unmap(&disk).unwrap();
            served.server().remove("a", false).unwrap();
        }
        let begins = ["export a: 5 requests failed, ", "export a: 1 request failed, "];
        assert!(reported.iter().zip(begins).all(|(line, begin)| line.starts_with(begin)));
        assert_eq!(reported.len(), 2, "{reported:?}");
        // Nothing has failed since, so there is nothing more to say, at any time.
        for minutes in 1..5 {
            let later = clock::now() + Duration::from_secs(60 * minutes);
            assert_eq!(served.failing(later, &mut failing), [""; 0]);
        }
        // One that fails when its name is another's has its own words.
        let before = served.server().failures();
        served.server().add(|exports| exports.backend("a", Arc::new(Broken))).unwrap();
        let disk = client.map_with("a", &options).unwrap();
        sync::write_at(&*disk, 0, &[0; 512], Durable::Later).unwrap_err();
        let stores = served.server().failures();
        let current: Vec<bool> = stores.iter().map(|failed| failed.is_current).collect();
        assert_eq!(current, [false, false, true]);
        let known = |store: &str| before.iter().any(|failed| failed.store == store);
        assert!(!known(&stores[2].store) && stores[0].store != stores[1].store);
        let lines = served.failing(clock::now(), &mut Failing::default());
        assert!(lines[0].starts_with(&format!("export a ({}): 5 requests", stores[0].store)));
        assert!(lines[2].starts_with("export a: 1 request failed"), "{lines:?}");
        client.close();
        served.close();
        [engine, engine_here].iter().for_each(|engine| engine.close());
    }

    #[test]
    fn the_parameter_says_what_devices_do_about_keys() {
        // tests [RS-29] [RT-73]
        let ip = IpAddr::from([127, 47, 5, 1]);
        let config = SoftConfig { addrs: vec![ip], ..SoftConfig::default() };
        let device = Arc::new(SoftDevice::open(config).unwrap());
        let engine = Engine::new(vec![device], EngineConfig::default()).unwrap();
        let can = engine.devices()[0].attr();
        let cannot = DeviceAttr { name: "rxe0".to_owned(), key_refresh: false, ..can.clone() };
        assert_eq!(without_refresh([can, cannot].into_iter()), ["rxe0"]);
        let (places, config) = ([SocketAddr::new(ip, PORT)], ServerConfig::default());
        let served = Served::open(&engine, &places, config, Exports::new(), Vec::new()).unwrap();
        let shown = |invalidates| {
            let path = "/module/rtrs_server/parameters/always_invalidate";
            let config = served.server().rtrs().config();
            let tree = server_modules(Sys::new(), config, invalidates, None, PORT).tree();
            tree.read(path).unwrap().to_string()
        };
        assert!(served.invalidates());
        assert_eq!((shown(true), shown(false)), ("Y\n".to_owned(), "N\n".to_owned()));
        served.close();
        engine.close();
    }
}
