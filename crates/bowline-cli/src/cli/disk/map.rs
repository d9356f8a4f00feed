//! `bowline rnbd map`: a client of disks.

use std::{
    net::IpAddr,
    path::PathBuf,
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
    disks::{
        DeviceConfig, DiskFrontEnds, ENDING_PATIENCE, FREE_POLL, FREE_WAIT, FailingDisks,
        FrontEndConfig, HandedFrontEnds, Heir, MapConfig, Mapping, Predecessor, Route, Service,
        Unserved, client_classes, map_patiently, refused, report_all, unmap_all, watch,
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
                  once. Exit status 1: not all of that was possible. Unmount file systems on the disks first, or data that was not \
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
    /// Take the place of the process that has this disk mapped, which ends: clients of its --nbd
    /// and users of its --fuse and --ublk keep their connections and files, and notice a pause;
    /// machines of its --vhost-user connect again. Give all other options as that one has them; it
    /// is found by its control socket
    #[arg(long, requires = "from", conflicts_with = "no_control")]
    replace: bool,
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

/// Maps one disk through a new client; a stop signal ends the wait for the server.
pub(super) fn mapped(
    device: &str,
    route: Route,
    how: &MapConfig,
    local: &DeviceConfig,
    stop: &Stop,
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
            Err(TryRecvError::Empty) if !stop.wait(Some(ANSWER_POLL)) => {}
            Err(_) => return Err(Failure::failed("stopped before the disk was mapped")),
        }
    }
}

/// What this process continues with.
struct Inherited {
    front_ends: HandedFrontEnds,
    /// The process that has handed it over, unless it was this one, which has taken it back.
    predecessor: Option<Predecessor>,
}

/// Runs the command.
pub(super) fn run(args: &Args, control: Option<PathBuf>) -> Outcome {
    let stop = Stop::install_with(Duty::Service { json: false })?;
    let device = args.device.as_deref().ok_or_else(|| Failure::usage("a device is missing"))?;
    let route = args.route.route(&args.further)?;
    let wanted = FrontEndConfig::from(&args.front_ends);
    let service = Service::Map {
        device: device.to_owned(),
        session: route.session.clone(),
        servers: route.paths.iter().map(|(_, server)| *server).collect(),
        front_ends: wanted.absolute()?,
    };
    let mut inherited = None;
    if args.replace {
        let predecessor = Predecessor::find(control.as_deref(), service.clone())?;
        let front_ends = predecessor.take().and_then(|parcel| {
            HandedFrontEnds::unpack(parcel)
                .map_err(|error| Failure::failed(format!("what was handed over: {error}")))
        })?;
        inherited = Some(Inherited { front_ends, predecessor: Some(predecessor) });
    }
    let supervisor = Supervisor::of_this_process();
    let mapped = Mapped { args, control, device, route, wanted, service, stop, supervisor };
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
    service: Service,
    stop: Stop,
    supervisor: Supervisor,
}

/// How the service of a disk has ended.
enum Ended {
    /// The process ends.
    Here,
    /// Another process continues with the front ends.
    Handed(Heir, HandedFrontEnds),
}

impl Mapped<'_> {
    /// Maps the disk. One that clients wait for is tried again: for a while, should what the other
    /// process had not be free yet, or for as long as this process runs.
    fn map(
        &self,
        inherited: Option<&Inherited>,
    ) -> Outcome<(Arc<Client>, Arc<Disk>, watch::Watch)> {
        let (how, local) =
            (MapConfig::from(&self.args.how), DeviceConfig::from(&self.args.device_options));
        let began = Instant::now();
        loop {
            let (on_path, paths) = watch::new();
            let found = mapped(self.device, self.route.clone(), &how, &local, &self.stop, on_path);
            let pause = match inherited {
                Some(Inherited { predecessor: None, .. }) => Some(MAP_AGAIN),
                Some(_) if began.elapsed() < FREE_WAIT => Some(FREE_POLL),
                _ => None,
            };
            match (found, pause) {
                (Err(_), Some(pause)) if !self.stop.wait(Some(pause)) => {}
                (found, _) => return found.map(|(client, disk)| (client, disk, paths)),
            }
        }
    }

    /// Maps the disk and serves it. Returns its front ends if another process was to continue with
    /// them, and did not.
    fn serve(&self, inherited: Option<Inherited>) -> Outcome<Option<HandedFrontEnds>> {
        match self.serve_to_end(inherited)? {
            Ended::Here => Ok(None),
            Ended::Handed(heir, front_ends) if heir.serves(&self.stop) => {
                say!("handed over");
                self.supervisor.stopping(Duration::ZERO, "handed over");
                drop(front_ends);
                Ok(None)
            }
            Ended::Handed(_, front_ends) => Ok(Some(front_ends)),
        }
    }

    fn serve_to_end(&self, inherited: Option<Inherited>) -> Outcome<Ended> {
        let Self { args, control, device, stop, wanted, supervisor, .. } = self;
        let (client, disk, mut paths) = self.map(inherited.as_ref())?;
        let (sender, notices) = mpsc::channel();
        let front_ends = DiskFrontEnds::new(Arc::clone(&client), wanted.clone(), sender);
        let mapping = Mapping { options: client.defaults().clone(), front_ends: wanted.clone() };
        front_ends.remember(&disk, mapping);
        let (handed, predecessor) = inherited.map_or_else(Default::default, |inherited| {
            (inherited.front_ends, inherited.predecessor)
        });
        let opened = front_ends.open_with(&disk, wanted, handed);
        let result =
            opened.map_err(|error| Failure::failed(format!("a front end of {device}: {error}")));
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
        let mut served = result.and(served);
        // All is open here; the other process cannot take anything back from now on.
        if served.is_ok()
            && let Some(predecessor) = &predecessor
            && let Err(failure) = predecessor.dismiss()
        {
            served = Err(failure);
        }
        if served.is_ok() {
            front_ends.own(disk.local_name());
        }
        let result = served.map(|served| {
            let name = disk.local_name().to_owned();
            drop(disk);
            report_all(&notices);
            let why = |own: IpAddr, server: IpAddr| client.engine().fault(own, server);
            supervisor.ready(&format!("{device} is mapped"));
            let mut failing = FailingDisks::default();
            let (mut idle, mut ended) = (0, Ended::Here);
            while idle < IDLE_CHECKS && !stop.wait(Some(CHECK_INTERVAL)) {
                report_all(&notices);
                paths.report(why);
                failing.report(&client);
                idle = if args.stay || front_ends.is_needed() { 0 } else { idle + 1 };
                supervisor.beat();
                if let Some(handed) = self.hand_over(&front_ends, &name, &asking) {
                    ended = handed;
                    break;
                }
            }
            if let Ended::Here = ended {
                supervisor.stopping(ENDING_PATIENCE, "unmapping");
            }
            report_all(&notices);
            paths.report(why);
            match ended {
                Ended::Here => unserved = front_ends.finish(),
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
        unmap_all(&client, stop, || front_ends.close(&mut unserved));
        unserved.tell();
        if result.is_err() && predecessor.is_some() {
            // It takes everything back when its connection ends: nothing is in use here by then.
            drop(front_ends);
            client.engine().close();
        }
        drop(predecessor);
        let ended = result?;
        if unserved.is_nothing() {
            Ok(ended)
        } else {
            Err(Failure::failed("not everything was served"))
        }
    }

    /// Hands the front ends over if another process asks for them and may have them.
    fn hand_over(
        &self,
        front_ends: &DiskFrontEnds,
        disk: &str,
        asking: &Receiver<Successor>,
    ) -> Option<Ended> {
        let asks = asking.try_recv().ok()?;
        let heir = Heir::of(asks, &self.service, || front_ends.cannot_hand_over(disk))?;
        say!("handing over to another process");
        let handed = match front_ends.hand_over(disk, HAND_OVER_WAIT) {
            Ok(handed) => handed,
            Err(trouble) => {
                note!("not handed over: {trouble}");
                heir.refuse(&trouble.text);
                return None;
            }
        };
        let sent = handed.pack().and_then(|parcel| heir.send(&parcel));
        if let Err(error) = sent {
            note!("not handed over: {error}");
        }
        Some(Ended::Handed(heir, handed))
    }
}
