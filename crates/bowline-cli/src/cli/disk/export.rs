//! `bowline rnbd export`: a server of disks.

use std::{
    ffi::OsString,
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use bowline_block::backend::{self, Backend, BackendSpec, Filters, NbdUri};
use bowline_ctl::{Sys, Tree};
use bowline_node::{
    Failure, Outcome,
    background::{self, InBackground},
    disks::{
        DeviceConfig, Export, FREE_POLL, FREE_WAIT, Heir, Packed, Predecessor, Served, Service,
        ServingConfig, server_classes, server_modules,
        values::{filter, granted},
    },
    log::Duty,
    metrics, namespaces,
    service_manager::Supervisor,
    signals::{Stop, hangups},
    values::{Address, number},
};
use bowline_rnbd_driver::{
    server::{Exports, Grant, ServerConfig},
    tree::{self as rnbd_tree, exports_node},
};
use bowline_rtrs_driver::Engine;

use super::{
    command,
    options::{DeviceArgs, ServingArgs, StorageArgs},
    serving::Controls,
};

/// How often the process checks whether its input has ended, or another process asks for its place.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// How long a process that replaces another one may need to open what it exports.
const READY_TIME: Duration = Duration::from_secs(30);
/// How often it prints what clients have done.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Serve disks to RNBD clients, including those of the Linux kernel.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The first line of the output is `listening on ADDRESS:PORT, ..`; then there is one line per \
                  export. A client that opens a file or block device gets its size at that time. On SIGHUP all \
                  sizes are read again, and `export NAME bytes=N` is printed for each that has changed. Requests of \
                  clients that have it open are then checked against the new size, but these clients use more space \
                  only after `rnbd resize` there, or when they open it again. `rnbd export NAME file=PATH` adds an \
                  export, `rnbd unexport NAME` removes one. A file of --file that is deleted or replaced is served as \
                  it was opened until the process ends; SIGHUP logs that on standard error. Logged there, too: \
                  sessions that connect and disconnect, exports that they open, close or may not open, and paths that \
                  are lost or back, with the time (unless the journal adds it), at most 100 lines at once and 10 a \
                  second. Ends with SIGINT or SIGTERM."
)]
pub(super) struct Args {
    /// Name of an export to add to the running server; see `rnbd --help`
    #[arg(value_name = "NAME", requires = "words", conflicts_with_all = ["memory", "file", "dir", "nbd_backend"])]
    name: Option<String>,
    /// file=PATH, memory=BYTES or nbd-backend=URI, and options of the export
    #[arg(value_name = "OPTION=VALUE")]
    words: Vec<String>,
    /// Export memory, zero at the start and lost at the end; may be repeated
    #[arg(long, value_name = "NAME=BYTES", value_parser = named)]
    memory: Vec<(String, String)>,
    /// Export a file or block device; may be repeated
    #[arg(long, value_name = "NAME=PATH", value_parser = named)]
    file: Vec<(String, String)>,
    /// Export every file and block device below a folder; %SESSNAME% in the path stands for the
    /// session name
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Export what an NBD server serves, as nbd://HOST[:PORT]/EXPORT or
    /// nbd+unix:///EXPORT?socket=PATH, under the name of its export or as NAME; may be repeated. So
    /// all formats and plug-ins of qemu-nbd and nbdkit can be exported. When the server goes,
    /// requests wait for it up to 30 s; one that it does not answer fails after 180 s, or after 60
    /// s in which it sends nothing
    #[arg(long, value_name = "[NAME=]URI", value_parser = nbd_backend)]
    nbd_backend: Vec<(String, String)>,
    #[command(flatten)]
    storage: StorageArgs,
    /// For tests: faults and limits of all exports, with commas in between or repeated: error=RATE
    /// (1% or 0.01: that share of requests fails with EIO, chosen by seed=NUMBER), delay-read=TIME,
    /// delay-write=TIME (5ms), rate=BYTES/s for reading and as much for writing
    #[arg(long, value_name = "FILTER=VALUE", value_parser = filter_text)]
    filter: Vec<String>,
    /// Allow sessions of this name to open an export in this mode (* matches anything; without
    /// @SESSION, all sessions); may be repeated. An export with grants is closed to other sessions,
    /// one without is open to all. For a file below --dir, EXPORT is the name that clients use; the
    /// grant applies to the file's other names too
    #[arg(long, value_name = "EXPORT=ro|rw|migration[@SESSION]", value_parser = granted)]
    grant: Vec<Grant>,
    /// Address to listen on; may be repeated, for more paths. Without it, all addresses except
    /// loopback
    #[arg(short = 'I', long, value_name = "ADDRESS")]
    address: Vec<String>,
    #[command(flatten)]
    serving: ServingArgs,
    /// Take the place of the process that serves at these addresses, which ends: clients lose their
    /// paths for a moment, and their requests wait. Give all other options as that one has them;
    /// it is found by its control socket
    #[arg(long, conflicts_with_all = ["no_control", "memory"])]
    replace: bool,
    /// Return as soon as the disks are served, which a process in the background does then until
    /// SIGTERM. Its log goes to the output of this command if that is a file or a terminal; it
    /// closes pipes and sockets when it is ready, and what it says later is lost: `> FILE 2>&1`
    /// keeps it
    #[arg(long, conflicts_with_all = ["until_input_ends", "name", "run"])]
    background: bool,
    #[command(flatten)]
    in_background: InBackground,
    /// Exit at the end of standard input, for programs that start this one
    #[arg(long)]
    until_input_ends: bool,
    /// Run COMMAND by /bin/sh once the disks are served, and end with it and its exit status, as
    /// `rnbd map --run` does. For it $address and $port are those of the server
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["replace", "until_input_ends"])]
    run: Option<String>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    controls: Controls,
}

/// How the service has ended.
enum Ended {
    /// The process ends.
    Here,
    /// Another process serves the exports next, if it knows of that.
    Handed(Option<Heir>),
}

/// Runs the command.
pub(super) fn run(args: &Args, control: Option<PathBuf>) -> Outcome {
    if args.background {
        return background::start();
    }
    args.in_background.begin()?;
    let stop = Stop::install_with(Duty::Service { json: false })?;
    let hangups = hangups()?;
    // A process that replaces another one connects to NBD servers once that one has left them.
    let exports = match args.replace {
        true => args.check().map(|()| None)?,
        false => Some(args.exports()?),
    };
    let device = DeviceConfig::from(&args.device);
    let config = ServingConfig::from(&args.serving).config(device.path_dead)?;
    let addresses = device.places(&args.address)?;
    let places = device.with_port(&addresses);
    let service = Service::Export { places: places.iter().map(ToString::to_string).collect() };
    let ended = args.until_input_ends.then(input_end).transpose()?;
    let command = args.run.as_deref().map(command::Wanted::new).transpose()?;
    let mut serving = Serving {
        args,
        control,
        device,
        config,
        addresses,
        places,
        service,
        stop,
        hangups,
        ended,
        command,
        supervisor: Supervisor::of_this_process(),
    };
    let mut predecessor = None;
    if args.replace {
        let found = Predecessor::find(
            serving.control.as_deref(),
            serving.service.clone(),
            READY_TIME,
            &serving.supervisor,
        )?;
        if let Some(manager) = found.take()?.manager {
            serving.supervisor = Supervisor::of(&manager);
        }
        predecessor = Some(found);
    }
    let mut exports = exports;
    let mut again = false;
    loop {
        match serving.serve(predecessor.take(), exports.take(), again)? {
            Ended::Here => return Ok(()),
            Ended::Handed(heir) => {
                let mut beats = serving.supervisor.beats();
                if heir.is_some_and(|heir| {
                    let begins = heir.begins(&mut || beats.tick());
                    if begins {
                        say!("handed over");
                        heir.succeeds(&serving.supervisor, &serving.stop);
                    }
                    begins
                }) {
                    return Ok(());
                }
                if serving.stop.asked() {
                    // All sessions have ended in order.
                    return Ok(());
                }
                note!("the process that was to replace this one has not continued: this one does");
                again = true;
            }
        }
    }
}

/// The command, with what its options mean.
struct Serving<'a> {
    args: &'a Args,
    control: Option<PathBuf>,
    device: DeviceConfig,
    config: ServerConfig,
    addresses: Vec<Address>,
    places: Vec<SocketAddr>,
    service: Service,
    stop: Stop,
    hangups: Arc<AtomicBool>,
    ended: Option<Arc<AtomicBool>>,
    command: Option<command::Wanted<'a>>,
    supervisor: Supervisor,
}

impl Serving<'_> {
    /// Opens the exports and listens. Where `again`, that is tried for a while: another process
    /// has had the addresses.
    fn open(
        &self,
        mut exports: Option<(Exports, Vec<Export>)>,
        again: bool,
    ) -> Outcome<(Arc<Engine>, Arc<Served>)> {
        let began = Instant::now();
        let mut open = || {
            let (exports, said) = exports.take().map_or_else(|| self.args.exports(), Ok)?;
            let engine = self.device.engine(&self.addresses)?;
            let served = Served::open(&engine, &self.places, self.config.clone(), exports, said)?;
            Ok((engine, served))
        };
        loop {
            match open() {
                Err(_) if again && began.elapsed() < FREE_WAIT && !self.stop.asked() => {
                    thread::sleep(FREE_POLL);
                }
                opened => return opened,
            }
        }
    }

    fn serve(
        &self,
        predecessor: Option<Predecessor>,
        exports: Option<(Exports, Vec<Export>)>,
        again: bool,
    ) -> Outcome<Ended> {
        let Self { args, stop, hangups, supervisor, .. } = self;
        let (engine, served) = self.open(exports, again || predecessor.is_some())?;
        let metrics = metrics::exports(Arc::clone(&engine), Arc::clone(served.server()));
        let (successors, asking) = mpsc::channel();
        let controlled = args.controls.serve(
            &args.tree(&served, self.device.port),
            self.control.as_deref(),
            "export",
            metrics,
            successors,
        )?;
        if let Some(predecessor) = &predecessor
            && let Err(failure) = predecessor.lets_begin()
        {
            // The other process needs the addresses again.
            drop(controlled);
            served.close();
            engine.close();
            return Err(failure);
        }
        let names: Vec<String> = self.places.iter().map(ToString::to_string).collect();
        say!("listening on {}", names.join(", "));
        if args.address.is_empty() && args.grant.is_empty() {
            note!(
                "bowline rnbd export: every host that reaches these addresses may open the \
                 exports: -I or --grant restrict that"
            );
        }
        served.announce();
        let exported = export_names(&served);
        // Relaxed: the flag publishes nothing but itself.
        let input_is_there =
            || self.ended.as_ref().is_none_or(|ended| !ended.load(Ordering::Relaxed));
        let slice = supervisor.pause(CHECK_INTERVAL);
        supervisor.ready("serving disks");
        let (mut logged, mut heir) = (Instant::now(), None);
        let command = self.command.as_ref();
        let mut running = command.map(|command| command.start(self.variables(), stop));
        let mut status = Ok(None);
        let mut is_over = || match &mut running {
            Some(Ok(running)) => {
                status = running.ended(stop);
                !matches!(status, Ok(None))
            }
            Some(Err(_)) => true,
            None => stop.wait(Some(slice)) || !input_is_there(),
        };
        while heir.is_none() && !is_over() {
            // What clients do is logged once a second.
            if logged.elapsed() >= LOG_INTERVAL {
                logged = Instant::now();
                served.log();
            }
            if hangups.swap(false, Ordering::Relaxed) {
                supervisor.reloading();
                served.resize();
                supervisor.ready("serving disks");
            }
            supervisor.beat();
            if let Ok(asks) = asking.try_recv() {
                heir = Heir::of(asks, &self.service, || self.cannot_hand_over(&served, &exported));
            }
        }
        if let Some(Err(failure)) = running {
            status = Err(failure);
        }
        served.log();
        if heir.is_none() {
            supervisor.stopping(Duration::ZERO, "closing sessions");
        } else {
            say!("handing over to another process");
        }
        drop(controlled);
        served.close();
        engine.close();
        let Some(heir) = heir else {
            return match status? {
                None | Some(0) => Ok(Ended::Here),
                Some(status) => Err(Failure::Ended(status)),
            };
        };
        let sent = heir.send(&Packed::default(), supervisor);
        let heir = sent.map(|()| heir).inspect_err(|error| note!("not handed over: {error}"));
        Ok(Ended::Handed(heir.ok()))
    }

    /// What a command has of this server.
    fn variables(&self) -> Vec<(&'static str, OsString)> {
        let first = self.places.first();
        let address = first.map(|place| ("address", place.ip().to_string().into()));
        let port = first.map(|place| ("port", place.port().to_string().into()));
        address.into_iter().chain(port).collect()
    }

    /// Tells why another process with the same options cannot serve the exports.
    fn cannot_hand_over(&self, served: &Served, exported: &[String]) -> Option<String> {
        if self.command.is_some() {
            return Some("it ends with the command that it runs".to_owned());
        }
        if !self.args.memory.is_empty() {
            return Some("an export of --memory ends with its process".to_owned());
        }
        let text = "a command has added or removed exports, which its options do not say";
        let is_changed = served.is_changed() || export_names(served) != exported;
        let text_of_moved = "the file of an export is gone or another one has its name";
        let moved = || !served.server().moved().is_empty();
        is_changed.then(|| text.to_owned()).or_else(|| moved().then(|| text_of_moved.to_owned()))
    }
}

fn export_names(served: &Served) -> Vec<String> {
    let exports = rnbd_tree::Exports::exports(served);
    exports.into_iter().map(|export| export.name).collect()
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
    /// Returns the words of the tool's command, if the export is for the server that runs here.
    pub(super) fn words(&self) -> Option<Vec<String>> {
        let name = self.name.clone()?;
        Some(["export".to_owned(), name].into_iter().chain(self.words.iter().cloned()).collect())
    }

    /// Opens everything that is to be exported; returns it, and what was said of it.
    fn exports(&self) -> Outcome<(Exports, Vec<Export>)> {
        self.exports_with(Export::connect)
    }

    /// Checks all that can be checked without connecting to NBD servers, which may serve one client
    /// at a time.
    fn check(&self) -> Outcome {
        let stands_in = || backend::open(BackendSpec::Null).map_err(|error| error.to_string());
        let connect = |export: &Export| match export.nbd_backend {
            Some(_) => stands_in().map(Some).map_err(Failure::Failed),
            None => Ok(None),
        };
        self.exports_with(connect).map(drop)
    }

    fn exports_with<E: Into<Failure>>(
        &self,
        connect: impl Fn(&Export) -> Result<Option<Arc<dyn Backend>>, E>,
    ) -> Outcome<(Exports, Vec<Export>)> {
        let StorageArgs { ro, buffered, block } = self.storage;
        let filter = self.filter.clone();
        let empty = Export { ro, buffered, block, filter, ..Export::default() };
        let mut said = Vec::new();
        for (name, size) in &self.memory {
            let bytes = number(size).map_err(Failure::Usage)?;
            said.push(Export { name: Some(name.clone()), memory: Some(bytes), ..empty.clone() });
        }
        for (name, path) in &self.file {
            let file = Some(PathBuf::from(path));
            said.push(Export { name: Some(name.clone()), file, ..empty.clone() });
        }
        for (name, uri) in &self.nbd_backend {
            let (name, nbd_backend) = (Some(name.clone()), Some(uri.clone()));
            said.push(Export { name, nbd_backend, ..empty.clone() });
        }
        said.extend(self.dir.clone().map(|dir| Export { dir: Some(dir), ..empty.clone() }));
        if said.is_empty() {
            return Err(Failure::usage(
                "nothing to export; say --memory, --file, --dir or --nbd-backend",
            ));
        }
        let mut exports = Exports::new();
        for export in &said {
            export.grants().map_err(Failure::Usage)?;
            export.add_connected(connect(export).map_err(Into::into)?, &mut exports)?;
        }
        for grant in &self.grant {
            exports.grant(grant.clone()).map_err(|_| {
                Failure::usage(format!("--grant {}: there is no such export", grant.export))
            })?;
        }
        Ok((exports, said))
    }

    fn tree(&self, served: &Arc<Served>, port: u16) -> Tree {
        let sys =
            server_classes(Sys::new().proc(namespaces::proc()), served, self.controls.files());
        let config = served.server().rtrs().config();
        server_modules(sys, config, served.invalidates(), self.dir.as_deref(), port)
            .blocks(exports_node(Arc::<Served>::clone(served)))
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

/// Parses `[NAME=]URI`.
fn nbd_backend(text: &str) -> Result<(String, String), String> {
    if text.starts_with("nbd:") || text.starts_with("nbd+unix:") {
        let uri: NbdUri = text.parse()?;
        if uri.export().is_empty() {
            return Err("this export has no name there: give it one, as NAME=URI".to_owned());
        }
        return Ok((uri.export().to_owned(), text.to_owned()));
    }
    let (name, uri) = named(text).map_err(|_| format!("\"{text}\" is not URI or NAME=URI"))?;
    uri.parse::<NbdUri>().map(|_| (name, uri))
}

/// Checks a filter.
fn filter_text(text: &str) -> Result<String, String> {
    filter(text, &mut Filters::default()).map(|()| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_nbd_server_has_the_name_of_its_export_or_another_one() {
        let parsed = |text: &str| nbd_backend(text);
        let unix = "nbd+unix:///?socket=/run/a=b";
        assert_eq!(parsed("nbd://host/a").unwrap().0, "a");
        let wanted = ("disk0".to_owned(), unix.to_owned());
        assert_eq!(parsed(&format!("disk0={unix}")), Ok(wanted));
        assert!(parsed(unix).unwrap_err().contains("NAME=URI"));
        for text in ["host", "=nbd://host/a", "disk0=host", "disk0="] {
            assert!(parsed(text).is_err(), "{text}");
        }
    }

    #[test]
    fn exports_have_names() {
        assert_eq!(named("disk0=1GiB"), Ok(("disk0".to_owned(), "1GiB".to_owned())));
        assert_eq!(named("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        for text in ["", "disk0", "=1", "disk0="] {
            assert!(named(text).is_err(), "{text}");
        }
    }
}
