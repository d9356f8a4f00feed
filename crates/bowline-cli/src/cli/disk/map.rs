//! `bowline rnbd map`: a client of disks.

use std::{
    ffi::OsString,
    net::IpAddr,
    path::{self, PathBuf},
    sync::{
        Arc,
        mpsc::{self, Receiver, TryRecvError},
    },
    thread,
    time::{Duration, Instant},
};

use bowline_ctl::{Successor, Sys};
use bowline_node::{
    Failure, Outcome,
    background::{self, InBackground},
    disks::{
        DeviceConfig, DiskFrontEnds, ENDING_PATIENCE, FREE_POLL, FREE_WAIT, FailingDisks,
        FrontEndConfig, HandedFrontEnds, Heir, MapConfig, Mapping, Predecessor, Route, Service,
        Unserved, client_classes, kept, map_patiently, refused, report_all, say_what_is_cut_off,
        unmap_all, watch,
    },
    log::Duty,
    metrics, namespaces,
    service_manager::Supervisor,
    signals::Stop,
};
use bowline_rnbd_driver::{
    client::{Client, Disk},
    tree::disks_node,
};
use bowline_rtrs_driver::client::PathEv;

use super::{
    command::{self, PrivateFolder, nbd_uri},
    options::{DeviceArgs, FrontEndArgs, Further, MapArgs, RouteArgs},
    serving::Controls,
};

/// How often the process checks whether it still has disks.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Number of consecutive checks without disks after which it ends. Commands such as remap unmap
/// disks and map them again, and the process must live on meanwhile.
const IDLE_CHECKS: u32 = 10;
/// How long another process that takes over waits for requests in progress.
const HAND_OVER_WAIT: Duration = Duration::from_secs(5);
/// How often a disk that was handed over, and taken back, is tried.
const MAP_AGAIN: Duration = Duration::from_millis(500);
/// How long front ends that could not be taken back at once are tried again: the process that was
/// to continue with them closes all that it has within that time, if it runs, since it knows that
/// it may not begin. What a process that hangs has is not free however long this one waits.
const REGAIN_TIME: Duration = ENDING_PATIENCE;
/// How long a process that replaces another one may need beside mapping the disk.
const READY_TIME: Duration = Duration::from_secs(10);
/// How long a process that was asked to stop tries to map a disk that it has to end in order.
const LAST_MAP_TIME: Duration = Duration::from_secs(5);
/// How often a service manager hears that the start takes longer.
const EXTEND_INTERVAL: Duration = Duration::from_secs(10);
/// How often it checks whether the server has answered.
const ANSWER_POLL: Duration = Duration::from_millis(1);

/// Map a disk of a server: with --from in this process, with the word from in the client that runs
/// here.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The first line of the output is `mapped DEVICE bytes=N at rnbd0, ..` with the front ends that were \
                  opened; each disk that a command maps later has such a line, too. Each change of a disk is one \
                  line, such as `rnbd0 offline`: offline, online, bytes=N, gone (it will not come back), unmapped. \
                  Paths that are lost or back are logged on standard error. Ends with SIGINT or SIGTERM, or when no \
                  disk has been mapped for a second. At the end it names the processes that it cuts off, answers \
                  what they have asked for (within 5 s) and flushes what was written; a second signal ends it at \
                  once, and it says what was not flushed. With --run it ends when the command does. Exit status 1: not all of that was possible. Under a service manager that keeps descriptors \
                  (FileDescriptorStoreMax= of systemd 254) a process that is killed and started again with the \
                  same options resumes: the file of --fuse stays open, and its requests wait (Linux 6.9; they do \
                  not come by io_uring then); clients of --nbd connect again. Unmount file systems on the disks first, or data that was not \
                  written back is lost."
)]
pub(super) struct Args {
    /// Name of the disk on the server
    #[arg(value_name = "DEVICE")]
    device: Option<String>,
    /// from SERVER [PATH..] [ro|rw|migration]: map it in the client that runs here
    #[arg(value_name = "WORD", conflicts_with = "from")]
    words: Vec<String>,
    #[command(flatten)]
    route: RouteArgs,
    #[command(flatten)]
    further: Further,
    #[command(flatten)]
    how: MapArgs,
    #[command(flatten)]
    front_ends: FrontEndArgs,
    /// Keep running when no disk is mapped, and wait for commands that map one
    #[arg(long)]
    stay: bool,
    /// Return as soon as the disk is mapped, and keep it in a process in the background. Its log
    /// goes to the output of this command if that is a file or a terminal; it closes pipes and
    /// sockets when it is ready, and what it says later is lost: `> FILE 2>&1` keeps it
    #[arg(long, requires = "from", conflicts_with = "run")]
    background: bool,
    #[command(flatten)]
    in_background: InBackground,
    /// Take the place of the process that has this disk mapped, which ends: clients of its --nbd
    /// and users of its --fuse and --ublk keep their connections and files, and notice a pause;
    /// machines of its --vhost-user connect again. Give all other options as that one has them; it
    /// is found by its control socket
    #[arg(long, requires = "from", conflicts_with = "no_control")]
    replace: bool,
    /// Run COMMAND by /bin/sh once the disk is mapped, and end with it and its exit status (128 and
    /// the number of the signal that has ended it). For it $uri and $unixsocket are the address and
    /// the socket of the disk as an NBD server, at a socket of its own without --nbd; $dev is the
    /// block device of --ublk, or the file of --fuse. Signals are passed on to the command, and
    /// standard output is the command's alone
    #[arg(long, value_name = "COMMAND", requires = "from", conflicts_with_all = ["stay", "replace"])]
    run: Option<String>,
    #[command(flatten)]
    device_options: DeviceArgs,
    #[command(flatten)]
    controls: Controls,
}

impl Args {
    /// Returns the arguments of the tool command, if the disk is to be mapped in the client that
    /// runs here.
    pub(super) fn words(&self) -> Option<Vec<String>> {
        if self.words.is_empty() {
            return None;
        }
        let head = ["map".to_owned()].into_iter().chain(self.device.clone());
        Some(head.chain(self.words.iter().cloned()).collect())
    }
}

/// Maps one disk through a new client. While the server has not answered, `waits` sleeps a moment
/// and returns whether to wait longer.
pub(super) fn mapped(
    device: &str,
    route: Route,
    how: &MapConfig,
    local: &DeviceConfig,
    mut waits: impl FnMut(Duration) -> bool,
    on_path: impl Fn(&str, PathEv) + Send + Sync + 'static,
) -> Outcome<(Arc<Client>, Arc<Disk>)> {
    let engine = local.engine(&route.own)?;
    let defaults = how.options(&route.session, local.port).on_path(on_path);
    let options = route.on(defaults.clone());
    let client = Client::new(engine, defaults);
    let (done, answer) = mpsc::channel();
    let mapping = {
        let (client, device) = (Arc::clone(&client), device.to_owned());
        let sleep = |time| {
            thread::sleep(time);
            true
        };
        // The receiver is gone when the wait was ended.
        move || drop(done.send(map_patiently(&client, &device, &options, sleep)))
    };
    thread::Builder::new()
        .name("map".to_owned())
        .spawn(mapping)
        .map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
    loop {
        match answer.try_recv() {
            Ok(Ok(disk)) => return Ok((client, disk)),
            Ok(Err(error)) => {
                return Err(refused(device, &route, how, local, client.engine(), &error));
            }
            Err(TryRecvError::Empty) if waits(ANSWER_POLL) => {}
            Err(_) => return Err(Failure::failed("stopped before the disk was mapped")),
        }
    }
}

/// What this process continues with.
struct Inherited {
    front_ends: HandedFrontEnds,
    /// The process that has handed it over, unless it was this one, which has taken it back, or one
    /// that was killed.
    predecessor: Option<Predecessor>,
}

/// Runs the command.
pub(super) fn run(args: &Args, control: Option<PathBuf>) -> Outcome {
    if args.background {
        return background::start();
    }
    args.in_background.begin()?;
    // Before anything is opened.
    let passed = bowline_ctl::passed(&kept::STORED).map_err(|error| {
        Failure::failed(format!("what the service manager passed cannot be used: {error}"))
    })?;
    let stop = Stop::install_with(Duty::Service { json: false })?;
    let device = args.device.as_deref().ok_or_else(|| Failure::usage("a device is missing"))?;
    let route = args.route.route(&args.further)?;
    let mut wanted = FrontEndConfig::from(&args.front_ends);
    let command = args.run.as_deref().map(command::Wanted::new).transpose()?;
    let mut private = None;
    if command.is_some() && wanted.nbd.is_none() {
        wanted.nbd = Some(private.insert(PrivateFolder::new()?).socket());
    }
    let service = Service::Map {
        device: device.to_owned(),
        session: route.session.clone(),
        servers: route.paths.iter().map(|(_, server)| *server).collect(),
        front_ends: wanted.absolute()?,
    };
    let mut supervisor = Supervisor::of_this_process();
    let mut inherited = None;
    let was_killed = !passed.stored.is_empty();
    if let Some(front_ends) = kept::resumed(passed.stored, &service) {
        say!("resuming what an earlier process of this service has left");
        inherited = Some(Inherited { front_ends, predecessor: None });
    } else if was_killed {
        kept::give_up(&supervisor);
    } else if args.replace {
        let ready_within = MapConfig::from(&args.how).connect_timeout + FREE_WAIT + READY_TIME;
        let predecessor =
            Predecessor::find(control.as_deref(), service.clone(), ready_within, &supervisor)?;
        let parcel = predecessor.take()?;
        let has_own = parcel.manager.as_ref().is_none_or(|manager| {
            supervisor = Supervisor::of(manager);
            false
        });
        let mut front_ends = HandedFrontEnds::unpack(parcel)
            .map_err(|error| Failure::failed(format!("what was handed over: {error}")))?;
        if has_own {
            // What the other one's manager keeps is not for this service.
            front_ends.kept = None;
        }
        inherited = Some(Inherited { front_ends, predecessor: Some(predecessor) });
    }
    let mapped =
        Mapped { args, control, device, route, wanted, command, service, stop, supervisor };
    loop {
        let Some(front_ends) = mapped.serve(inherited)? else { return Ok(()) };
        note!("the process that was to replace this one has not continued: this one does");
        inherited = Some(Inherited { front_ends, predecessor: None });
    }
}

/// The command, with what its options mean.
struct Mapped<'a> {
    args: &'a Args,
    control: Option<PathBuf>,
    device: &'a str,
    route: Route,
    wanted: FrontEndConfig,
    command: Option<command::Wanted<'a>>,
    service: Service,
    stop: Stop,
    supervisor: Supervisor,
}

/// How the service of a disk has ended.
enum Ended {
    /// The process ends.
    Here,
    /// Another process continues with the front ends, if it was given them.
    Handed(Option<Heir>, HandedFrontEnds),
}

impl Mapped<'_> {
    /// Maps the disk. One that clients wait for is tried again: for a while, should what the other
    /// process had not be free yet, or for as long as this process runs and for a while after it
    /// was asked to stop.
    fn map(
        &self,
        inherited: Option<&Inherited>,
    ) -> Outcome<(Arc<Client>, Arc<Disk>, watch::Watch)> {
        let (how, local) =
            (MapConfig::from(&self.args.how), DeviceConfig::from(&self.args.device_options));
        let began = Instant::now();
        let is_own = matches!(inherited, Some(Inherited { predecessor: None, .. }));
        let (mut beats, mut stopped) = (self.supervisor.beats(), None);
        let mut extended: Option<Instant> = None;
        let mut waits = |time: Duration| {
            if is_own {
                beats.tick();
                if extended.is_none_or(|last| last.elapsed() >= EXTEND_INTERVAL) {
                    // However long the server is away: users of the disk wait for it.
                    extended = Some(Instant::now());
                    self.supervisor.extend(EXTEND_INTERVAL * 3, "waiting for the server");
                }
            }
            if !self.stop.wait(Some(time)) {
                return true;
            }
            if !is_own {
                return false;
            }
            let stopped = *stopped.get_or_insert_with(|| {
                self.supervisor.stopping(LAST_MAP_TIME + ENDING_PATIENCE, "unmapping");
                Instant::now()
            });
            thread::sleep(time);
            stopped.elapsed() < LAST_MAP_TIME
        };
        loop {
            let (on_path, paths) = watch::new();
            let found = mapped(self.device, self.route.clone(), &how, &local, &mut waits, on_path);
            let pause = match inherited {
                Some(Inherited { predecessor: None, .. }) => Some(MAP_AGAIN),
                Some(_) if began.elapsed() < FREE_WAIT => Some(FREE_POLL),
                _ => None,
            };
            match (found, pause) {
                (Err(_), Some(pause)) if waits(pause) => {}
                (found, _) => return found.map(|(client, disk)| (client, disk, paths)),
            }
        }
    }

    /// Maps the disk and serves it. Returns its front ends if another process was to continue with
    /// them, and did not.
    fn serve(&self, inherited: Option<Inherited>) -> Outcome<Option<HandedFrontEnds>> {
        match self.serve_to_end(inherited)? {
            Ended::Here => Ok(None),
            Ended::Handed(Some(heir), front_ends) => {
                let mut beats = self.supervisor.beats();
                if !heir.begins(&mut || beats.tick()) {
                    return Ok(Some(front_ends));
                }
                // The other process has them.
                drop(front_ends);
                say!("handed over");
                heir.succeeds(&self.supervisor, &self.stop);
                Ok(None)
            }
            Ended::Handed(None, front_ends) => Ok(Some(front_ends)),
        }
    }

    fn serve_to_end(&self, inherited: Option<Inherited>) -> Outcome<Ended> {
        let Self { args, control, device, stop, wanted, supervisor, .. } = self;
        let is_taken_back = matches!(inherited, Some(Inherited { predecessor: None, .. }));
        let former = inherited.as_ref().map(|inherited| &inherited.front_ends);
        let nbd = former.and_then(|front_ends| front_ends.nbd.as_ref());
        let listener = nbd.map(|nbd| Arc::clone(&nbd.listener));
        let ublk = former.and_then(|front_ends| front_ends.ublk);
        let may_be_unflushed = former.is_some_and(HandedFrontEnds::may_be_unflushed);
        let (client, disk, mut paths) = match self.map(inherited.as_ref()) {
            Err(failure) if is_taken_back => {
                // Nobody continues with them.
                self.service.end_front_ends(listener.as_deref(), ublk);
                kept::forget(supervisor);
                if may_be_unflushed {
                    note!("what was written may not be durable: the server was not reached again");
                }
                return Err(failure);
            }
            found => found?,
        };
        let (sender, notices) = mpsc::channel();
        // A command ends with the process that runs it, so nobody continues with its disk.
        let keeps = supervisor.keeps() && self.command.is_none();
        let new = if keeps { DiskFrontEnds::new_keepable } else { DiskFrontEnds::new };
        let front_ends = new(Arc::clone(&client), wanted.clone(), sender);
        let mapping = Mapping { options: client.defaults().clone(), front_ends: wanted.clone() };
        front_ends.remember(&disk, mapping);
        let (handed, predecessor) = inherited.map_or_else(Default::default, |inherited| {
            (inherited.front_ends, inherited.predecessor)
        });
        let failed = |error| Failure::failed(format!("a front end of {device}: {error}"));
        let prepared = front_ends.prepare(&disk, wanted, handed, is_taken_back).map_err(failed);
        let of = Arc::clone(&client);
        let metrics = metrics::mapped(
            Arc::clone(client.engine()),
            move || of.sessions(),
            Arc::<DiskFrontEnds>::clone(&front_ends),
        );
        let tree =
            client_classes(Sys::new().proc(namespaces::proc()), &front_ends, args.controls.files())
                .blocks(disks_node(Arc::<DiskFrontEnds>::clone(&front_ends)))
                .tree();
        let (successors, asking) = mpsc::channel();
        let served = args.controls.serve(&tree, control.as_deref(), "map", metrics, successors);
        let mut unserved = Unserved::default();
        // All is open here, and nobody is served. The other process takes nothing back from the
        // moment on at which this one may begin.
        let open = prepared.and_then(|prepared| {
            let served = served?;
            predecessor.as_ref().map_or(Ok(()), Predecessor::lets_begin)?;
            Ok((prepared, served))
        });
        if open.is_err() {
            front_ends.abandon(&disk);
        }
        let has_begun = open.is_ok();
        let listener = listener.filter(|_| !has_begun);
        let begun = open.and_then(|(prepared, served)| {
            let file = prepared.file(disk.local_name());
            front_ends.begin(&disk, prepared).map(|()| (served, file)).map_err(failed)
        });
        let mut status = Ok(None);
        let result = begun.map(|(served, file)| {
            let name = disk.local_name().to_owned();
            front_ends.regain(&disk, REGAIN_TIME);
            drop(disk);
            report_all(&notices);
            let mut is_kept = keeps;
            if is_kept && let Err(error) = front_ends.keep(&name, &self.service, supervisor) {
                note!("the service manager does not keep the disk: {error}");
            }
            let why = |own: IpAddr, server: IpAddr| client.engine().fault(own, server);
            if *wanted == FrontEndConfig::default() && self.command.is_none() {
                note!(
                    "bowline rnbd map: no program can use {name} yet: --nbd SOCKET, --fuse FOLDER, \
                     --ublk or --vhost-user SOCKET make it usable, --run COMMAND uses it at once"
                );
            }
            supervisor.ready(&format!("{device} is mapped"));
            let mut failing = FailingDisks::default();
            let (mut idle, mut ended) = (0, Ended::Here);
            let mut running = self.command.as_ref().map(|command| {
                self.variables(file).and_then(|variables| command.start(variables, stop))
            });
            let mut is_over = |idle| match &mut running {
                Some(Ok(running)) => {
                    status = running.ended(stop);
                    !matches!(status, Ok(None))
                }
                Some(Err(_)) => true,
                None => idle >= IDLE_CHECKS || stop.wait(Some(CHECK_INTERVAL)),
            };
            while !is_over(idle) && (self.command.is_some() || !front_ends.has_lost_all(&name)) {
                report_all(&notices);
                paths.report(why);
                failing.report(&client);
                front_ends.note_durable(&name);
                if is_kept && !front_ends.has(&name) {
                    kept::forget(supervisor);
                    is_kept = false;
                }
                idle = if args.stay || front_ends.is_needed() { 0 } else { idle + 1 };
                supervisor.beat();
                if let Some(handed) = self.hand_over(&front_ends, &name, &asking) {
                    ended = handed;
                    break;
                }
            }
            if let Some(Err(failure)) = running {
                status = Err(failure);
            }
            if let Ended::Here = ended {
                supervisor.stopping(ENDING_PATIENCE, "unmapping");
            }
            report_all(&notices);
            paths.report(why);
            match ended {
                Ended::Here => {
                    say_what_is_cut_off(&front_ends, stop);
                    unserved = front_ends.finish();
                }
                // An unmap in progress may wait for a lost session.
                Ended::Handed(..) => front_ends.fail_fast(),
            }
            // Answers requests in progress, such as the command that unmapped the last disk.
            drop(served);
            ended
        });
        if let Ok(Ended::Handed(..)) = result {
            unmap_all(&client, stop, || front_ends.leave());
            // The next process needs the device's addresses.
            client.engine().close();
            return result;
        }
        if !has_begun && predecessor.is_some() {
            // The other process takes everything back when its connection ends: nothing is in use
            // here by then.
            unmap_all(&client, stop, || front_ends.leave());
            drop(front_ends);
            client.engine().close();
            return result;
        }
        unmap_all(&client, stop, || front_ends.close(&mut unserved));
        if keeps {
            kept::forget(supervisor);
        }
        unserved.tell();
        if !has_begun && is_taken_back {
            self.service.end_front_ends(listener.as_deref(), ublk);
        }
        let ended = result?;
        match status? {
            None | Some(0) => unserved.outcome().map(|()| ended),
            Some(status) => Err(Failure::Ended(status)),
        }
    }

    /// What the command has of the disk, whose block device or file this is.
    fn variables(&self, file: Option<PathBuf>) -> Outcome<Vec<(&'static str, OsString)>> {
        let absolute = |place: Option<PathBuf>| {
            let made = place.map(path::absolute).transpose();
            made.map_err(|error| Failure::failed(format!("the place of a front end: {error}")))
        };
        let (socket, file) = (absolute(self.wanted.nbd.clone())?, absolute(file)?);
        let uri = socket.as_deref().map(|socket| ("uri", nbd_uri(socket).into()));
        let socket = socket.map(|socket| ("unixsocket", socket.into()));
        let dev = file.map(|file| ("dev", file.into()));
        Ok(uri.into_iter().chain(socket).chain(dev).collect())
    }

    /// Hands the front ends over if another process asks for them and may have them.
    fn hand_over(
        &self,
        front_ends: &DiskFrontEnds,
        disk: &str,
        asking: &Receiver<Successor>,
    ) -> Option<Ended> {
        let asks = asking.try_recv().ok()?;
        let heir = Heir::of(asks, &self.service, || {
            let runs = self.command.as_ref().map(|_| "it ends with the command that it runs");
            runs.map(str::to_owned).or_else(|| front_ends.cannot_hand_over(disk))
        })?;
        say!("handing over to another process");
        let mut beats = self.supervisor.beats();
        let handed = match front_ends.hand_over(disk, HAND_OVER_WAIT, &mut || beats.tick()) {
            Ok(handed) => handed,
            Err(trouble) => {
                note!("not handed over: {trouble}");
                heir.refuse(&trouble.text);
                return None;
            }
        };
        let sent = handed.pack().and_then(|parcel| heir.send(&parcel, &self.supervisor));
        if let Err(error) = sent {
            note!("not handed over: {error}");
            return Some(Ended::Handed(None, handed));
        }
        Some(Ended::Handed(Some(heir), handed))
    }
}
