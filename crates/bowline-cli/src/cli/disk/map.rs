//! `bowline rnbd map`: a client of disks.

use std::{
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, TryRecvError},
    },
    thread,
    time::Duration,
};

use bowline_block::DiskEvent;
use bowline_ctl::Sys;
use bowline_node::{
    Failure, Outcome, log::Duty, metrics, namespaces, service_manager::Supervisor, signals::Stop,
};
use bowline_rnbd::{Errno, client::Outage};
use bowline_rnbd_driver::{
    client::{Client, Disk, MapOptions},
    tree::{Disks, client_node, disks_node},
};
use bowline_rtrs_driver::{
    Engine, Policy,
    client::{PathEv, ReadKeys, Refusal},
    tree::{ClientSession, Files, client_node as sessions_node},
};
use bowline_verbs::RejectReason;
use bowline_wire::rnbd::Access;

use super::{
    front_ends::{self, DiskFrontEnds, DiskNotice, Mapping},
    serving::Controls,
    side::{Further, Route, Side, Towards, some_time},
    watch,
};

/// How often the process checks whether it still has disks.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Number of consecutive checks without disks after which it ends. Commands such as remap unmap
/// disks and map them again, and the process must live on meanwhile.
const IDLE_CHECKS: u32 = 10;
/// How often it checks whether the server has answered.
const ANSWER_POLL: Duration = Duration::from_millis(1);
/// How long the end of the process waits for a server that does not answer an unmap.
pub(super) const UNMAP_PATIENCE: Duration = Duration::from_secs(3);

/// Map a disk of a server: with --from in this process, with the word from in the client that runs
/// here.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The first line of the output is `mapped DEVICE bytes=N at rnbd0, ..` with the front ends that were \
                  opened; each disk that a command maps later has such a line, too. Each change of a disk is one \
                  line, such as `rnbd0 offline`: offline, online, bytes=N, gone (it will not come back), unmapped. \
                  Paths that are lost or back are logged on standard error. Ends with SIGINT or SIGTERM, or when no \
                  disk has been mapped for a second. Unmount file systems on the disks first, or data that was not \
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
    towards: Towards,
    #[command(flatten)]
    further: Further,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    front_ends: front_ends::Options,
    /// Keep running when no disk is mapped, and wait for commands that map one
    #[arg(long)]
    stay: bool,
    #[command(flatten)]
    side: Side,
    #[command(flatten)]
    controls: Controls,
}

/// Options of mapping a disk.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct How {
    /// Access mode: ro, rw or migration
    #[arg(long, value_name = "MODE", default_value = "rw", value_parser = access)]
    access: Access,
    /// What happens to requests while no path is connected: they fail, or wait up to TIME; a forced
    /// unmap and the end of the process end the wait. If the server's machine (not just its
    /// process) goes down during that time, data written and not flushed is lost silently
    #[arg(long, value_name = "fail|TIME", default_value = "30", value_parser = outage)]
    outage: Outage,
    /// Time limit of a request; an unmap waits at most twice as long for a server that does not
    /// answer. Without it, no limit. Costs a copy of all data
    #[arg(long, value_name = "TIME", value_parser = some_time)]
    timeout: Option<Duration>,
    /// How a path is chosen: round-robin, min-inflight or min-latency
    #[arg(long, value_name = "POLICY", default_value = "min-inflight", value_parser = policy)]
    policy: Policy,
    /// Longest wait for each step of connecting
    #[arg(long, value_name = "TIME", default_value = "30", value_parser = some_time)]
    connect_timeout: Duration,
    /// Attempts to reconnect a lost path, -1 for no limit; can be changed later, as
    /// max_reconnect_attempts
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i16).range(-1..=9999))]
    max_reconnects: i16,
    /// Fixed delay before each of these attempts, as in kernels. Without it, no delay at first,
    /// then 1, 2, 4 .. 30 s, each up to a quarter more or less, and at most about 8 s while no path
    /// is connected
    #[arg(long, value_name = "TIME", value_parser = some_time)]
    reconnect_delay: Option<Duration>,
    /// Time between heartbeats to the server; the path ends after five missed ones. Linux servers
    /// need at least 1 s
    #[arg(long, value_name = "TIME", default_value = "5", value_parser = some_time)]
    heartbeat: Duration,
    /// Memory that the server can write to: request: only the buffers of reads in flight, each with
    /// its own key; memory: all memory for requests, with one key, which is faster
    #[arg(long, value_name = "request|memory", default_value = "memory", value_parser = read_keys)]
    read_keys: ReadKeys,
    /// IO connections of each path; without it, as many as suit the device
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(..4096))]
    connections: Option<u16>,
    /// Do not send requests to write zeroes, which kernels before 5.18 do not know
    #[arg(long)]
    no_write_zeroes: bool,
    /// Send requests to write zeroes without deallocating, instead of data: for bowline servers and
    /// kernels of protocol 2.2; others would deallocate the blocks
    #[arg(long)]
    nounmap: bool,
}

impl How {
    /// Returns the options of a session without paths.
    pub(super) fn options(&self, session: &str, port: u16) -> MapOptions {
        let mut options = MapOptions::new(session).outage(self.outage);
        options.port = port;
        options.access = self.access;
        options.policy = self.policy;
        options.io.io_timeout = self.timeout;
        options.io.write_zeroes = !self.no_write_zeroes;
        options.io.nounmap = self.nounmap;
        options.connect_timeout = self.connect_timeout;
        options.max_reconnects = self.max_reconnects;
        options.reconnect_delay = self.reconnect_delay;
        options.heartbeat.interval = self.heartbeat;
        // A silent server is probed at least once per heartbeat.
        options.heartbeat.probe_interval = options.heartbeat.probe_interval.min(self.heartbeat);
        options.read_keys = self.read_keys;
        options.io_connections = self.connections;
        options
    }
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
    how: &How,
    side: &Side,
    stop: &Stop,
    on_path: impl Fn(&str, PathEv) + Send + Sync + 'static,
) -> Outcome<(Arc<Client>, Arc<Disk>)> {
    let engine = side.engine(&route.own)?;
    let defaults = how.options(&route.session, side.port).on_path(on_path);
    let options = route.on(defaults.clone());
    let client = Client::new(engine, defaults);
    let (told, answer) = mpsc::channel();
    let mapping = {
        let (client, device) = (Arc::clone(&client), device.to_owned());
        // The receiver is gone when the wait was ended.
        move || drop(told.send(client.map_with(&device, &options)))
    };
    thread::Builder::new()
        .name("map".to_owned())
        .spawn(mapping)
        .map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
    loop {
        match answer.try_recv() {
            Ok(Ok(disk)) => return Ok((client, disk)),
            Ok(Err(error)) => {
                return Err(refused(device, &route, how, side, client.engine(), &error));
            }
            Err(TryRecvError::Empty) if !stop.wait(Some(ANSWER_POLL)) => {}
            Err(_) => return Err(Failure::failed("stopped before the disk was mapped")),
        }
    }
}

/// Runs `close`, which unmaps disks. After a stop signal, the wait for a server that does not
/// answer is short.
pub(super) fn unmap_all(client: &Client, stop: &Stop, close: impl FnOnce() + Send) {
    let (ended, end) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            close();
            drop(ended);
        });
        while end.recv_timeout(ANSWER_POLL) == Err(RecvTimeoutError::Timeout) {
            if stop.asked() {
                return client.limit_unmap_wait(UNMAP_PATIENCE);
            }
        }
    });
}

/// Explains why a disk could not be mapped, and what to check.
pub(super) fn refused(
    device: &str,
    route: &Route,
    how: &How,
    side: &Side,
    engine: &Engine,
    error: &bowline_rnbd_driver::Error,
) -> Failure {
    let errno = error.errno();
    let servers: Vec<String> = route.paths.iter().map(|(_, dst)| dst.to_string()).collect();
    // If one path cannot be connected, the session is not opened.
    let one_of = if servers.len() > 1 { "one of " } else { "" };
    let (servers, session, port) = (servers.join(", "), &route.session, side.port);
    let text = match errno {
        Errno::ETIMEDOUT => {
            let fault = route.paths.iter().find_map(|(src, dst)| engine.fault((*src)?, *dst));
            let why = fault.map_or_else(
                || "is a server running there, and does a firewall block UDP port 4791?".to_owned(),
                |fault| fault.to_string(),
            );
            format!(
                "no answer from {one_of}{servers} within {}: {why}",
                seconds(how.connect_timeout)
            )
        }
        Errno::ECONNRESET => format!(
            "{one_of}{servers} refused the connection: {}",
            match error.refusal() {
                Some(Refusal::Manager(RejectReason::INVALID_SERVICE_ID)) => {
                    format!("no server on port {port}")
                }
                Some(Refusal::Manager(RejectReason::STALE_CONNECTION)) => {
                    "it still has an earlier connection of this machine; try again".to_owned()
                }
                Some(Refusal::Manager(RejectReason::INVALID_MTU)) => {
                    "the path MTU is too large for it; give a smaller --mtu".to_owned()
                }
                Some(Refusal::Manager(reason)) => reason.to_string(),
                Some(Refusal::Answer(why)) =>
                    format!("port {port} is not an RTRS server of version 2: {why}"),
                Some(Refusal::Server(_)) => format!(
                    "the server on port {port} has not noticed yet that an earlier path of this session is lost, or it \
                     is ending, or it has another protocol version"
                ),
                None => format!(
                    "it does not accept a session {session} from here: another machine or another client of this one \
                     uses the name (choose another with --from NAME --path {}), or its --allow does not include it",
                    route.path_text()
                ),
            }
        ),
        Errno::ENOENT => format!("{servers} has no disk {device} for session {session}"),
        Errno::EPERM if error.is_of_session() => format!(
            "{one_of}{servers} does not accept clients from the source address of this path: its --allow does not \
             include it"
        ),
        Errno::EPERM => format!(
            "{servers} does not open {device} for {}: another session has it open for writing",
            how.access
        ),
        Errno::EACCES => format!(
            "{servers} does not open {device} for {} to session {session}: it is read-only there, or no --grant \
             allows it{}",
            how.access,
            if how.access == Access::Ro { "" } else { "; try --access ro" }
        ),
        _ => error.to_string(),
    };
    Failure::Errno(errno, text)
}

fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

/// Runs the command.
pub(super) fn run(args: &Args, control: Option<PathBuf>) -> Outcome {
    let stop = Stop::install_with(Duty::Service { json: false })?;
    let device = args.device.as_deref().ok_or_else(|| Failure::usage("a device is missing"))?;
    let (on_path, mut paths) = watch::new();
    let mut route = args.towards.route()?;
    args.further.add_to(&mut route)?;
    let (client, disk) = mapped(device, route, &args.how, &args.side, &stop, on_path)?;
    let (sender, notices) = mpsc::channel();
    let front_ends = DiskFrontEnds::new(Arc::clone(&client), args.front_ends.clone(), sender);
    let mapping =
        Mapping { options: client.defaults().clone(), front_ends: args.front_ends.clone() };
    front_ends.remember(&disk, mapping);
    let opened = front_ends.open(&disk, &args.front_ends);
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
    let result =
        opened.map_err(|error| Failure::failed(format!("a front end of {device}: {error}")));
    let result = result.and(served);
    let result = result.map(|served| {
        drop(disk);
        report_all(&notices);
        let why = |own: IpAddr, server: IpAddr| client.engine().fault(own, server);
        let supervisor = Supervisor::of_this_process();
        supervisor.ready(&format!("{device} is mapped"));
        let mut idle = 0;
        while idle < IDLE_CHECKS && !stop.wait(Some(CHECK_INTERVAL)) {
            report_all(&notices);
            paths.report(why);
            idle = if args.stay || front_ends.is_needed() { 0 } else { idle + 1 };
            supervisor.beat();
        }
        supervisor.stopping(UNMAP_PATIENCE, "unmapping");
        report_all(&notices);
        paths.report(why);
        // An unmap in progress may wait for a lost session.
        front_ends.fail_fast();
        // Answers requests in progress, such as the command that unmapped the last disk.
        drop(served);
    });
    unmap_all(&client, &stop, || front_ends.close());
    result
}

/// Prints what has happened to disks since the last call.
pub(super) fn report_all(notices: &mpsc::Receiver<(String, DiskNotice)>) {
    for (name, notice) in notices.try_iter() {
        report(&name, notice);
    }
}

fn report(name: &str, notice: DiskNotice) {
    match notice {
        DiskNotice::Mapped { device, bytes, places } => {
            say!("mapped {device} bytes={bytes} at {}", places.join(", "));
        }
        DiskNotice::Changed(DiskEvent::Resized(bytes)) => say_of_peer!("{name} bytes={bytes}"),
        DiskNotice::Changed(DiskEvent::Offline) => say_of_peer!("{name} offline"),
        DiskNotice::Changed(DiskEvent::Online) => say_of_peer!("{name} online"),
        DiskNotice::Changed(DiskEvent::Gone) => say_of_peer!("{name} gone"),
        DiskNotice::Changed(other) => say_of_peer!("{name} {other:?}"),
        DiskNotice::Unmapped => say!("{name} unmapped"),
    }
}

/// The disks of a process, and the sessions that carry them.
pub(super) trait ClientObjects: Disks {
    /// Returns the sessions.
    fn sessions(&self) -> Vec<Arc<dyn ClientSession>>;
}

/// Adds the classes of a client to a tree.
pub(super) fn client_classes<T>(sys: Sys, client: &Arc<T>, files: Files) -> Sys
where
    T: ClientObjects + 'static,
{
    let of = Arc::clone(client);
    let disks: Arc<dyn Disks> = Arc::<T>::clone(client);
    sys.class("rtrs-client", sessions_node(move || of.sessions(), files))
        .class("rnbd-client", client_node(disks))
}

fn access(text: &str) -> Result<Access, String> {
    let all = [Access::Ro, Access::Rw, Access::Migration];
    let found = all.into_iter().find(|access| access.name() == text);
    found.ok_or_else(|| format!("\"{text}\" is not ro, rw or migration"))
}

fn outage(text: &str) -> Result<Outage, String> {
    if text == "fail" { Ok(Outage::FailFast) } else { some_time(text).map(Outage::Queue) }
}

fn read_keys(text: &str) -> Result<ReadKeys, String> {
    match text {
        "request" => Ok(ReadKeys::PerRequest),
        "memory" => Ok(ReadKeys::LongLived),
        _ => Err(format!("\"{text}\" is not request or memory")),
    }
}

fn policy(text: &str) -> Result<Policy, String> {
    let bad = |_| format!("\"{text}\" is not round-robin, min-inflight or min-latency");
    text.parse().map_err(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outages_are_bridged_for_a_time_or_not() {
        assert_eq!(outage("fail"), Ok(Outage::FailFast));
        assert_eq!(outage("1.5"), Ok(Outage::Queue(Duration::from_millis(1500))));
        for text in ["", "0", "x", "-1"] {
            assert!(outage(text).is_err(), "{text}");
        }
        assert_eq!(access("migration"), Ok(Access::Migration));
        assert!(access("w").is_err() && policy("x").is_err());
        assert_eq!(policy("rr"), Ok(Policy::RoundRobin));
        assert_eq!(read_keys("request"), Ok(ReadKeys::PerRequest));
        assert_eq!(read_keys("memory"), Ok(ReadKeys::LongLived));
        assert!(read_keys("").is_err());
    }

    #[test]
    fn reconnecting_and_heartbeats_are_as_said() {
        // tests [RS-10] [RS-13] [RT-63]
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            how: How,
        }
        let parse = |words: &str| <Line as clap::Parser>::try_parse_from(words.split(' '));
        let options = |words: &str| parse(words).unwrap().how.options("s1", 1234);
        let (usual, library) = (options("map"), MapOptions::new("s1"));
        assert_eq!((usual.max_reconnects, usual.reconnect_delay), (-1, None));
        assert_eq!(usual.heartbeat, library.heartbeat);
        let said = options("map --max-reconnects 3 --reconnect-delay 2 --heartbeat 500ms");
        assert_eq!((said.max_reconnects, said.reconnect_delay), (3, Some(Duration::from_secs(2))));
        assert_eq!(said.heartbeat.interval, Duration::from_millis(500));
        assert_eq!(said.heartbeat.probe_interval, Duration::from_millis(500));
        assert_eq!(options("map --max-reconnects -1").max_reconnects, -1);
        for words in ["--max-reconnects -2", "--max-reconnects 10000", "--heartbeat 0"] {
            assert!(parse(&format!("map {words}")).is_err(), "{words}");
        }
    }
}
