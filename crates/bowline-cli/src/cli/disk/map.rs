//! `bowline rnbd map`: a client of disks.

use std::{
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{self, TryRecvError},
    },
    thread,
    time::Duration,
};

use bowline_ctl::Sys;
use bowline_node::{
    Failure, Outcome,
    disks::{
        DeviceConfig, DiskFrontEnds, ENDING_PATIENCE, FailingDisks, FrontEndConfig, MapConfig,
        Mapping, Route, Unserved, client_classes, map_patiently, refused, report_all, unmap_all,
        watch,
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

/// Runs the command.
pub(super) fn run(args: &Args, control: Option<PathBuf>) -> Outcome {
    let stop = Stop::install_with(Duty::Service { json: false })?;
    let device = args.device.as_deref().ok_or_else(|| Failure::usage("a device is missing"))?;
    let (on_path, mut paths) = watch::new();
    let route = args.route.route(&args.further)?;
    let (how, local) = (MapConfig::from(&args.how), DeviceConfig::from(&args.device_options));
    let (client, disk) = mapped(device, route, &how, &local, &stop, on_path)?;
    let (sender, notices) = mpsc::channel();
    let wanted = FrontEndConfig::from(&args.front_ends);
    let front_ends = DiskFrontEnds::new(Arc::clone(&client), wanted.clone(), sender);
    let mapping = Mapping { options: client.defaults().clone(), front_ends: wanted.clone() };
    front_ends.remember(&disk, mapping);
    let opened = front_ends.open(&disk, &wanted);
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
    let served = args.controls.serve(&tree, control.as_deref(), "map", metrics);
    let mut unserved = Unserved::default();
    let result =
        opened.map_err(|error| Failure::failed(format!("a front end of {device}: {error}")));
    let result = result.and(served);
    let result = result.map(|served| {
        drop(disk);
        report_all(&notices);
        let why = |own: IpAddr, server: IpAddr| client.engine().fault(own, server);
        let supervisor = Supervisor::of_this_process();
        supervisor.ready(&format!("{device} is mapped"));
        let mut failing = FailingDisks::default();
        let mut idle = 0;
        while idle < IDLE_CHECKS && !stop.wait(Some(CHECK_INTERVAL)) {
            report_all(&notices);
            paths.report(why);
            failing.report(&client);
            idle = if args.stay || front_ends.is_needed() { 0 } else { idle + 1 };
            supervisor.beat();
        }
        supervisor.stopping(ENDING_PATIENCE, "unmapping");
        report_all(&notices);
        paths.report(why);
        unserved = front_ends.finish();
        // Answers requests in progress, such as the command that unmapped the last disk.
        drop(served);
    });
    unmap_all(&client, &stop, || front_ends.close(&mut unserved));
    unserved.tell();
    result?;
    if unserved.is_nothing() { Ok(()) } else { Err(Failure::failed("not everything was served")) }
}
