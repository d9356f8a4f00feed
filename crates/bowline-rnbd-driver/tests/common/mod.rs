//! A client and a server in one process, each with its device and its engine.
#![allow(dead_code, reason = "not every test uses all of it")]

pub(crate) mod raw;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use bowline_block::Errno;
use bowline_block::sync::{self, Durable};
use bowline_rnbd_driver::{Client, Disk, Error, ExportServer, Exports, MapOptions, ServerConfig};
use bowline_roce::GiveUp;
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::client::PathState;
use bowline_rtrs_driver::{Engine, EngineConfig, HbConfig, PORT};

/// Longest wait in a test, on a machine that builds and emulates meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);
/// Path timeout for tests in which an extra path loss does no harm.
pub(crate) const SOON: Duration = Duration::from_millis(400);
/// Path timeout for tests in which it does: a machine that stalls this long loses all paths.
pub(crate) const SOON_ENOUGH: Duration = Duration::from_secs(1);

/// Client and server at addresses of one test.
pub(crate) struct Rig {
    pub(crate) client_device: Arc<SoftDevice>,
    pub(crate) client: Arc<Client>,
    pub(crate) server: Arc<ExportServer>,
    net: u8,
    paths: u8,
    engines: [Arc<Engine>; 2],
}

impl Rig {
    pub(crate) fn new(net: u8, exports: Exports) -> Self {
        Self::with_paths(net, exports, 1)
    }

    pub(crate) fn with_paths(net: u8, exports: Exports, paths: u8) -> Self {
        Self::with_config(net, exports, paths, ServerConfig::default())
    }

    pub(crate) fn with_config(net: u8, exports: Exports, paths: u8, config: ServerConfig) -> Self {
        Self::open(net, exports, paths, config, GiveUp::default())
    }

    /// Makes a rig for tests that cut paths, with this path timeout.
    pub(crate) fn hasty(net: u8, exports: Exports, paths: u8, path_dead: Duration) -> Self {
        Self::open(net, exports, paths, ServerConfig::default(), GiveUp::After(path_dead))
    }

    pub(crate) fn open(
        net: u8,
        exports: Exports,
        paths: u8,
        config: ServerConfig,
        give_up: GiveUp,
    ) -> Self {
        let side = |base: u8| {
            let addrs = (0..paths).map(|path| ip(net, base + path)).collect();
            let mut config = SoftConfig { addrs, ..SoftConfig::default() };
            config.core.give_up = give_up;
            let device = Arc::new(SoftDevice::open(config).unwrap());
            let engine = Engine::new(vec![Arc::clone(&device) as _], EngineConfig::default());
            (device, engine.unwrap())
        };
        let (client_device, client_engine) = side(1);
        let (_, server_engine) = side(101);
        let at: Vec<SocketAddr> =
            (0..paths).map(|path| SocketAddr::new(ip(net, 101 + path), PORT)).collect();
        let server = ExportServer::open(&server_engine, &at, config, exports).unwrap();
        let client = Client::new(Arc::clone(&client_engine), MapOptions::new("default"));
        let engines = [client_engine, server_engine];
        Self { client_device, client, server, net, paths, engines }
    }

    pub(crate) fn client_ip(&self, path: u8) -> IpAddr {
        ip(self.net, 1 + path)
    }

    pub(crate) fn server_ip(&self, path: u8) -> IpAddr {
        ip(self.net, 101 + path)
    }

    /// The server's engine, for servers at other ports.
    pub(crate) const fn server_engine(&self) -> &Arc<Engine> {
        &self.engines[1]
    }

    /// The client's engine, for clients of another kind.
    pub(crate) const fn client_engine(&self) -> &Arc<Engine> {
        &self.engines[0]
    }

    /// Options for a session over all paths.
    pub(crate) fn options(&self, session: &str) -> MapOptions {
        let heartbeat =
            HbConfig { probe_interval: Duration::from_millis(200), ..HbConfig::default() };
        let options = MapOptions { heartbeat, ..MapOptions::new(session) };
        (0..self.paths).fold(options, |options, path| {
            options.path(Some(self.client_ip(path)), self.server_ip(path))
        })
    }

    pub(crate) fn map(&self, device: &str, options: &MapOptions) -> Result<Arc<Disk>, Error> {
        self.client.map_with(device, options)
    }

    /// Cuts or mends a path.
    pub(crate) fn cut(&self, path: u8, yes: bool) {
        self.client_device.cut(self.client_ip(path), Some(self.server_ip(path)), yes);
    }

    /// Cuts some paths of a session for a time, and until their loss is noticed.
    pub(crate) fn cut_for(&self, session: &str, paths: &[u8], time: Duration) {
        let session = self.client.session(session).unwrap();
        paths.iter().for_each(|path| self.cut(*path, true));
        std::thread::sleep(time);
        self.until("the loss is noticed", || {
            let all = session.paths();
            paths.iter().all(|path| all[usize::from(*path)].state != PathState::Connected)
        });
        paths.iter().for_each(|path| self.cut(*path, false));
    }

    /// Whether all paths of a session are connected.
    pub(crate) fn is_connected(&self, session: &str) -> bool {
        let session = self.client.session(session).unwrap();
        session.paths().iter().all(|path| path.state == PathState::Connected)
    }

    /// Waits until a condition holds.
    pub(crate) fn until(&self, what: &str, mut so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !so() {
            assert!(start.elapsed() < PATIENCE, "never: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.client.close();
            self.server.close();
            self.engines.iter().for_each(|engine| engine.close());
        }
    }
}

/// A disk of memory, `disk0`.
pub(crate) fn memory(bytes: u64) -> Exports {
    let mut exports = Exports::new();
    exports.memory("disk0", bytes, 512).unwrap();
    exports
}

/// Returns the state of a disk as text.
pub(crate) fn state(disk: &Disk) -> String {
    disk.info().unwrap().state.to_string()
}

/// Sets a flag that ends threads, also when the test fails, which would hang otherwise.
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn ip(net: u8, host: u8) -> IpAddr {
    IpAddr::from([127, 80, net, host])
}

/// Returns bytes that differ for each seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// The results of a load.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) verified: u64,
    pub(crate) failed: u64,
    pub(crate) longest: Duration,
    pub(crate) error: Option<Errno>,
}

/// Fewest requests of a load, even if they are slow.
const MANY: u64 = 100;

/// Writes and reads back for a time, and until `MANY` requests were made: each thread in its part
/// of the first 16 MiB. `meanwhile` runs concurrently.
pub(crate) fn load(
    disk: &Arc<Disk>,
    threads: u64,
    time: Duration,
    meanwhile: impl FnOnce() + Send,
) -> Report {
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let part = (16 << 20) / threads;
    let work = |thread: u64| {
        let mut report = Report::default();
        let mut round = thread;
        while !stop.load(SeqCst) {
            round += threads;
            let len = 512 << (round % 8);
            let offset = thread * part + (round * 7919 * 512) % (part - 65_536);
            let offset = offset - offset % 512;
            let begun = Instant::now();
            let bytes = pattern(len, round);
            let mut out = vec![0; len];
            let done = sync::write_at(&**disk, offset, &bytes, Durable::Later)
                .and_then(|()| sync::read_at(&**disk, offset, &mut out));
            match done {
                Ok(()) => {
                    assert_eq!(out, bytes, "at {offset}");
                    report.verified += 1;
                }
                Err(errno) => {
                    report.failed += 1;
                    report.error = Some(errno);
                }
            }
            count.fetch_add(1, SeqCst);
            report.longest = report.longest.max(begun.elapsed());
        }
        report
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        scope.spawn(meanwhile);
        let begun = Instant::now();
        let few = || count.load(SeqCst) < MANY && begun.elapsed() < PATIENCE;
        while begun.elapsed() < time || few() {
            std::thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, SeqCst);
        workers.into_iter().map(|worker| worker.join().unwrap()).fold(Report::default(), |a, b| {
            Report {
                verified: a.verified + b.verified,
                failed: a.failed + b.failed,
                longest: a.longest.max(b.longest),
                error: a.error.or(b.error),
            }
        })
    })
}
