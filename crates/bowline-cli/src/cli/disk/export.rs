//! `bowline rnbd export`: a server of disks.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bowline_block::backend::{self, BackendSpec};
use bowline_ctl::{Sys, Tree};
use bowline_rnbd::Errno;
use bowline_rnbd_driver::{
    server::{ExportServer, Exports, FileOptions, Grant, Moved, ServerConfig},
    tree as rnbd_tree,
};
use bowline_rtrs_driver::{
    Geometry, HbConfig,
    server::{AllowRule, ServerConfig as RtrsConfig, ServerLimits},
    tree as rtrs_tree,
};
use bowline_verbs::DeviceAttr;
use bowline_wire::rnbd::Access;

use super::{clients, lost::Lost, serving::Controls, side::Side};
use crate::cli::{
    Failure, Outcome,
    common::{
        args::{number, number32},
        out::{Duty, stamp},
        stop::{Stop, hangups},
        supervisor::Supervisor,
    },
    metrics,
};

/// How often the process checks whether its input has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Default block size of exports in bytes.
const BLOCK: &str = "512";

/// Serve disks to RNBD clients, those of the Linux kernel included.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The first line of the output is `listening on ADDRESS:PORT, ..`, then there is one line per \
                  export. A client that opens a file or block device gets the size it has then. On SIGHUP all sizes \
                  are looked at again, and `export NAME bytes=N` is printed for each that has changed; IO of clients \
                  that have it open is judged by the new size, but they use more only after `rnbd resize` there, or \
                  when they open it again. A file of --file that is deleted, or replaced by another of its name, is \
                  served as it was opened until the end; SIGHUP has that told on standard error. Sessions that come and go, what \
                  they open and close or may not open, and paths that are lost or back are told there, too, with the time \
                  (unless the journal has it), at most 100 lines at once and 10 a second. Ends with SIGINT or SIGTERM."
)]
pub(super) struct Args {
    /// An export of memory, zero at first and lost at the end; repeat it for more
    #[arg(long, value_name = "NAME=BYTES", value_parser = named)]
    memory: Vec<(String, String)>,
    /// An export of a file or block device; repeat it for more
    #[arg(long, value_name = "NAME=PATH", value_parser = named)]
    file: Vec<(String, String)>,
    /// Every file and block device below a folder is an export; %SESSNAME% in the name stands for
    /// that of the session
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// No client may write to any export
    #[arg(long)]
    ro: bool,
    /// Allow sessions of this name to open an export in this mode (* stands for anything; without
    /// @SESSION, all sessions); repeat it for more. An export with grants is open to no other
    /// session, one without to every session. Below --dir, EXPORT is the name that clients use for
    /// the file. A grant applies to the file under its other names too
    #[arg(long, value_name = "EXPORT=ro|rw|migration[@SESSION]", value_parser = granted)]
    grant: Vec<Grant>,
    /// Go through the page cache of files
    #[arg(long)]
    buffered: bool,
    /// Logical block size of exports
    #[arg(long, value_name = "BYTES", default_value = BLOCK, value_parser = block)]
    block: u32,
    /// Address to listen on; repeat it for more paths; without it, all addresses but loopback
    #[arg(short = 'I', long, value_name = "ADDRESS")]
    address: Vec<String>,
    /// Do not withdraw keys while requests are carried out: faster, for trusted clients
    #[arg(long)]
    no_invalidate: bool,
    /// Queue depth of a session
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..))]
    queue_depth: u16,
    /// Largest request in bytes, its message included
    #[arg(long, value_name = "BYTES", default_value = "128k", value_parser = number32)]
    chunk: u32,
    /// Memory for the requests of all sessions together. A session needs its queue depth times its
    /// largest request, 64 MiB by default, and takes it as it is used; a session that does not fit
    /// is refused
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = number)]
    session_memory: u64,
    /// Clients that are admitted: an address or a network, and a pattern of their session names;
    /// without it, all
    #[arg(long, value_name = "ADDRESS[/BITS][=SESSION]", value_parser = allowed)]
    allow: Vec<AllowRule>,
    /// End when the standard input ends, for programs that start this one
    #[arg(long)]
    until_input_ends: bool,
    #[command(flatten)]
    side: Side,
    #[command(flatten)]
    controls: Controls,
}

/// Runs the command.
pub(super) fn run(args: &Args, control: Option<PathBuf>) -> Outcome {
    let stop = Stop::install_with(Duty::Service { json: false })?;
    let hangups = hangups()?;
    let exports = args.exports()?;
    let config = args.config()?;
    let addresses = args.side.places(&args.address)?;
    let engine = args.side.engine(&addresses)?;
    let places = args.side.with_port(&addresses);
    let server = ExportServer::open(&engine, &places, config, exports)
        .map_err(|error| Failure::Failed(error.to_string()))?;
    let devices = engine.devices().iter().map(|device| device.attr());
    let exposed = if args.no_invalidate { Vec::new() } else { without_refresh(devices) };
    if !exposed.is_empty() {
        note!(
            "keys are not withdrawn while requests are worked on: {} cannot do so; clients have to be trusted, \
             as with --no-invalidate",
            exposed.join(", ")
        );
    }
    let tree = args.tree(&server, exposed.is_empty());
    let metrics = metrics::exports(Arc::clone(&engine), Arc::clone(&server));
    let served = args.controls.serve(&tree, control.as_deref(), "export", metrics)?;
    let names: Vec<String> = places.iter().map(ToString::to_string).collect();
    say!("listening on {}", names.join(", "));
    for export in rnbd_tree::Exports::exports(&*server) {
        let mode = if export.read_only { " ro" } else { "" };
        // Checked before the line is printed after which another program may change the file.
        if let Some(left) = args.whole(&export.name).and_then(|whole| left_out(whole, export.bytes))
        {
            note!("export {}: {left}", export.name);
        }
        say!("export {} bytes={}{mode}", export.name, export.bytes);
    }
    let ended = args.until_input_ends.then(input_end).transpose()?;
    // Relaxed: the flag publishes nothing but itself.
    let input_is_there = || ended.as_ref().is_none_or(|ended| !ended.load(Ordering::Relaxed));
    let slice = if ended.is_some() { CHECK_INTERVAL } else { Duration::from_secs(1) };
    let supervisor = Supervisor::of_this_process();
    let slice = supervisor.pause(slice);
    supervisor.ready("serving disks");
    let (mut offences, mut lost) = (Offences::default(), Lost::default());
    let mut log = || {
        let now = Instant::now();
        let (news, missed) = server.rtrs().take_path_events();
        let paths = lost.lines(now, &news, missed, |own, client| engine.fault(own, client));
        let (events, missed) = server.take_client_events();
        let clients = clients::lines(&events, missed, |session| client_address(&server, session));
        for line in clients.into_iter().chain(paths).chain(offences.look(now, &server)) {
            note_of_peer!("{}{line}", stamp());
        }
    };
    while !stop.wait(Some(slice)) && input_is_there() {
        log();
        if hangups.swap(false, Ordering::Relaxed) {
            supervisor.reloading();
            resize(&server, args);
            supervisor.ready("serving disks");
        }
        supervisor.beat();
    }
    log();
    supervisor.stopping(Duration::ZERO, "closing sessions");
    drop(served);
    server.close();
    engine.close();
    Ok(())
}

/// Returns the address of the first path of a session.
fn client_address(server: &ExportServer, session: &str) -> Option<IpAddr> {
    let sessions = server.rtrs().sessions();
    let found = sessions
        .iter()
        .find(|info| info.name.as_ref().is_some_and(|name| name.as_str() == session));
    found.and_then(|info| info.paths.first()).map(|path| path.remote.ip())
}

/// Reads the sizes of all exports anew.
fn resize(server: &ExportServer, args: &Args) {
    let moved = server.moved();
    for file in &moved {
        note!("{}", moved_text(file));
    }
    // The file at the path of a moved export is another one.
    let whole = |name: &str| {
        let is_there = moved.iter().all(|file| file.export != name);
        args.whole(name).filter(|_| is_there)
    };
    for (name, bytes) in server.resize_all() {
        match bytes {
            Ok(bytes) => {
                if let Some(left) = whole(&name).and_then(|whole| left_out(whole, bytes)) {
                    note!("export {name}: {left}");
                }
                say!("export {name} bytes={bytes}");
            }
            Err(error) => note!("{error}"),
        }
    }
}

/// Returns a text about the remainder of `whole` bytes that is not exported, if there is one.
fn left_out(whole: u64, bytes: u64) -> Option<String> {
    // More than a block is no remainder: the file has grown since.
    let left = whole.checked_sub(bytes).filter(|left| (1..BLOCK_MAX).contains(left))?;
    Some(format!(
        "its last {left} of {whole} bytes are left out, since disks consist of whole blocks (--block)"
    ))
}

/// Returns a text about an export whose file has moved, and what that means.
fn moved_text(file: &Moved) -> String {
    let Moved { export, path, missing } = file;
    let what = match missing {
        None => "is another file now".to_owned(),
        Some(Errno::ENOENT | Errno::ENOTDIR) => "is gone".to_owned(),
        Some(errno) => format!("cannot be looked at: {errno}"),
    };
    format!("export {export}: {} {what}; the one opened at the start is served", path.display())
}

/// The exports for the control tree; logs devices that are closed by force there [NB-50].
struct LoggedExports(Arc<ExportServer>);

impl rnbd_tree::Exports for LoggedExports {
    fn exports(&self) -> Vec<rnbd_tree::ExportInfo> {
        self.0.exports()
    }

    fn force_close(&self, export: &str, session: &str) -> Result<(), Errno> {
        rnbd_tree::Exports::force_close(&*self.0, export, session)?;
        note!("export {export} closed by force for session {session}");
        Ok(())
    }
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
                " ({full} of them for want of room: --session-memory is for {} of {} MiB)",
                config.sessions_max(),
                config.session_bytes() >> 20
            )
        });
        let last = server.rtrs().last_offence().filter(|_| violated + paths > 0);
        let last = last.map(|last| format!("; the last: {}: {}", last.remote, last.reason));
        Some(format!(
            "clients: {violated} paths closed for breaking rules, {paths} not admitted, {requests} connections \
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

/// Returns a flag that is set when the standard input ends.
fn input_end() -> Outcome<Arc<AtomicBool>> {
    let ended = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ended);
    let read = move || {
        // The input is ignored, and an error counts as its end.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        flag.store(true, Ordering::Relaxed);
    };
    thread::Builder::new()
        .name("input".to_owned())
        .spawn(read)
        .map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
    Ok(ended)
}

impl Args {
    /// Returns the size of an export's file in bytes, incomplete blocks included, if known.
    fn whole(&self, export: &str) -> Option<u64> {
        let of = |all: &[(String, String)]| {
            all.iter().find(|(name, _)| name == export).map(|(_, value)| value.clone())
        };
        let file = |path: String| fs::metadata(path).ok().filter(fs::Metadata::is_file);
        match of(&self.memory) {
            Some(size) => number(&size).ok(),
            None => of(&self.file).and_then(file).map(|meta| meta.len()),
        }
    }

    fn exports(&self) -> Outcome<Exports> {
        let options = FileOptions { read_only: self.ro, block: self.block, direct: !self.buffered };
        let failed = |error: bowline_rnbd_driver::Error| Failure::Failed(error.to_string());
        let mut exports = Exports::new();
        for (name, size) in &self.memory {
            let bytes = number(size).map_err(Failure::Usage)?;
            if bytes < u64::from(self.block) {
                return Err(Failure::usage(format!(
                    "{name} of {bytes} bytes is less than a block of {}",
                    self.block
                )));
            }
            let spec = BackendSpec::Memory { bytes, block: self.block };
            let backend = backend::open(spec)
                .map_err(|error| Failure::failed(format!("memory for {name}: {error}")))?;
            exports.backend(name, backend, self.ro).map_err(failed)?;
        }
        for (name, path) in &self.file {
            exports.file(name, Path::new(path), options).map_err(failed)?;
        }
        if let Some(dir) = &self.dir {
            exports.directory(dir, options).map_err(failed)?;
        }
        if self.memory.is_empty() && self.file.is_empty() && self.dir.is_none() {
            return Err(Failure::usage("nothing to export; say --memory, --file or --dir"));
        }
        for grant in &self.grant {
            exports.grant(grant.clone()).map_err(|_| {
                Failure::usage(format!("--grant {}: there is no such export", grant.export))
            })?;
        }
        Ok(exports)
    }

    fn config(&self) -> Outcome<ServerConfig> {
        let defaults = ServerConfig::default();
        let header = defaults.rtrs.geometry.max_hdr();
        let max_io = self.chunk.saturating_sub(header);
        let geometry = Geometry::new(self.queue_depth, max_io, header).map_err(|error| {
            Failure::usage(format!(
                "--queue-depth {} with --chunk {}: {error}; chunks have 8192 bytes at least, and all \
                 of a session 256 MiB at most",
                self.queue_depth, self.chunk
            ))
        })?;
        let memory = usize::try_from(self.session_memory).unwrap_or(usize::MAX);
        let rtrs = RtrsConfig {
            geometry,
            always_invalidate: !self.no_invalidate,
            allow: self.allow.clone(),
            heartbeat: HbConfig { path_dead: self.side.path_dead, ..defaults.rtrs.heartbeat },
            limits: ServerLimits { memory, ..defaults.rtrs.limits },
            ..defaults.rtrs
        };
        if rtrs.sessions_max() == 0 {
            return Err(Failure::usage(format!(
                "--session-memory of {memory} bytes is less than the {} of one session: --queue-depth {} times \
                 --chunk {}",
                rtrs.session_bytes(),
                self.queue_depth,
                self.chunk
            )));
        }
        Ok(ServerConfig { rtrs, ..defaults })
    }

    /// Returns the control tree; `refreshes`: the devices can renew keys.
    fn tree(&self, server: &Arc<ExportServer>, refreshes: bool) -> Tree {
        let exports: Arc<dyn rnbd_tree::Exports> = Arc::new(LoggedExports(Arc::clone(server)));
        let sessions: Arc<dyn rtrs_tree::ServerSessions> = Arc::clone(server.rtrs()) as _;
        let config = server.rtrs().config();
        let transport = rtrs_tree::ServerParameters {
            always_invalidate: config.always_invalidate && refreshes,
            max_chunk_size: config.geometry.chunk(),
            sess_queue_depth: config.geometry.queue_depth(),
        };
        let dir = self.dir.as_deref().unwrap_or(Path::new(""));
        let parameters = rnbd_tree::Parameters {
            dev_search_path: dir.display().to_string(),
            port_nr: self.side.port,
        };
        Sys::new()
            .class("rtrs-server", rtrs_tree::server_node(sessions, self.controls.files()))
            .class("rnbd-server", rnbd_tree::server_node(Arc::clone(&exports), None))
            .blocks(rnbd_tree::exports_node(exports))
            .module("rtrs_server", Arc::new(transport))
            .module("rnbd_server", Arc::new(parameters))
            .tree()
    }
}

/// Parses `NAME=VALUE`.
fn named(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(name, value)| !name.is_empty() && !value.is_empty());
    parts
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .ok_or_else(|| format!("\"{text}\" is not NAME=VALUE such as disk0=1GiB"))
}

/// Parses `EXPORT=MODE[@SESSION]`.
fn granted(text: &str) -> Result<Grant, String> {
    let bad =
        || format!("\"{text}\" is not EXPORT=ro|rw|migration[@SESSION] such as disk0=rw@host*");
    let (export, how) = text.split_once('=').ok_or_else(bad)?;
    // Names of sessions may contain @ too, as in client@server.
    let (mode, session) = match how.split_once('@') {
        Some((mode, session)) => (mode, Some(session.to_owned())),
        None => (how, None),
    };
    let all = [Access::Ro, Access::Rw, Access::Migration];
    let most = all.into_iter().find(|access| access.name() == mode).ok_or_else(bad)?;
    if export.is_empty() || session.as_ref().is_some_and(String::is_empty) {
        return Err(bad());
    }
    Ok(Grant { export: export.to_owned(), max_access: most, session })
}

/// Largest block size in bytes.
const BLOCK_MAX: u64 = 4096;

/// Parses a block size.
fn block(text: &str) -> Result<u32, String> {
    match number32(text)? {
        size @ (512 | 1024 | 2048 | 4096) => Ok(size),
        size => Err(format!("{size} is not 512, 1024, 2048 or 4096")),
    }
}

/// Parses `ADDRESS[/BITS][=SESSION]`.
fn allowed(text: &str) -> Result<AllowRule, String> {
    let bad = || format!("\"{text}\" is not ADDRESS[/BITS][=SESSION] such as 10.1.0.0/16=host*");
    let (network, name) = match text.split_once('=') {
        Some((network, name)) => (network, Some(name.to_owned())),
        None => (text, None),
    };
    let (addr, bits) = match network.split_once('/') {
        Some((addr, bits)) => (addr, Some(bits)),
        None => (network, None),
    };
    let addr: IpAddr = addr.parse().map_err(|_| bad())?;
    let most = if addr.is_ipv4() { 32 } else { 128 };
    let prefix = match bits {
        Some(bits) => bits.parse().ok().filter(|bits| *bits <= most).ok_or_else(bad)?,
        None => most,
    };
    Ok(AllowRule { addr, prefix, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_name_networks_and_sessions() {
        // tests [RT-64]
        let rule = allowed("10.1.0.0/16=host*").unwrap();
        assert_eq!((rule.prefix, rule.name.as_deref()), (16, Some("host*")));
        assert_eq!(allowed("fd00::1").unwrap().prefix, 128);
        for text in ["", "host", "10.0.0.1/33", "10.0.0.1/x", "/8"] {
            assert!(allowed(text).is_err(), "{text}");
        }
    }

    #[test]
    fn grants_name_exports_modes_and_sessions() {
        // tests [NB-50]
        let grant = granted("disk0=rw@vm*@host").unwrap();
        assert_eq!((grant.export.as_str(), grant.max_access), ("disk0", Access::Rw));
        assert_eq!(grant.session.as_deref(), Some("vm*@host"));
        assert_eq!(granted("a/b=migration").unwrap().session, None);
        for text in ["", "disk0", "=ro", "disk0=", "disk0=w", "disk0=ro@"] {
            assert!(granted(text).is_err(), "{text}");
        }
    }

    #[test]
    fn exports_have_names_and_blocks_sizes() {
        assert_eq!(named("disk0=1GiB"), Ok(("disk0".to_owned(), "1GiB".to_owned())));
        assert_eq!(named("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        for text in ["", "disk0", "=1", "disk0="] {
            assert!(named(text).is_err(), "{text}");
        }
        assert!(block("4k").is_ok() && block("1000").is_err());
    }

    #[test]
    fn the_parameter_says_what_devices_do_about_keys() {
        // tests [RS-29] [RT-73]
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
            #[arg(id = "control")]
            _control: Option<PathBuf>,
        }
        let words = ["export", "--memory", "d=1MiB", "-I", "127.47.5.1"];
        let args = <Line as clap::Parser>::parse_from(words).args;
        let addresses = args.side.places(&args.address).unwrap();
        let engine = args.side.engine(&addresses).unwrap();
        let can = engine.devices()[0].attr();
        let cannot = DeviceAttr { name: "rxe0".to_owned(), key_refresh: false, ..can.clone() };
        assert_eq!(without_refresh([can, cannot].into_iter()), ["rxe0"]);
        let (places, config) = (args.side.with_port(&addresses), args.config().unwrap());
        let server = ExportServer::open(&engine, &places, config, args.exports().unwrap()).unwrap();
        let shown = |refreshes| {
            let path = "/module/rtrs_server/parameters/always_invalidate";
            args.tree(&server, refreshes).read(path).unwrap().to_string()
        };
        assert_eq!((shown(true), shown(false)), ("Y\n".to_owned(), "N\n".to_owned()));
        server.close();
        engine.close();
    }
}
