//! `bowline node`: a node that runs until it is told to stop.

mod echo;
mod hand_over;
mod sandbox;

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use bowline::rds::{Limits, Node, Paths, PeerList, Socket};
use bowline_ctl::{Server, fusefs::Mount, passed};
use bowline_host::{HandOver, HostState, Policy, Quota};
use bowline_node::{
    Failure, Outcome,
    config::access::{self, Name, Network, network},
    log::stamp,
    metrics, node_on,
    programs::{self, Programs},
    service_manager::Supervisor,
    signals::{Stop, hangups},
    values::{Address, number, own, setting},
};
use bowline_rds::{Event, PathState, SocketId};
use bowline_verbs::{Device, SharedDevice};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use hand_over::{FormerNode, From, Keeper, Taken};
use sandbox::Places;

use super::{
    config::{self, File, Poll},
    control,
    over_rdma::{DeviceName, Devices, SoftPort},
    snapshot::NodeFacts,
    tree::tree,
};
use crate::cli::{
    confine::Confinement,
    disk::{self, HostDisks, mounted},
    metrics::MetricsOptions,
};

/// Time between looks at what happened.
const EVENT_PAUSE: Duration = Duration::from_secs(1);
/// Smallest memory limit for what peers send, in bytes: room for a few messages of the largest
/// size.
const MEMORY_MIN: usize = 16 << 20;
const DRAIN_DEFAULT: f64 = 5.0;
const BATCH: usize = 256;

/// Run a node until SIGINT or SIGTERM.
///
/// It answers pings of other hosts at once; --echo and --sink give them sockets to talk to.
///
/// What happens to peers is logged on standard output, at most 100 lines at once and 10 a second;
/// lines have the time unless the journal adds it. If the log cannot be written, because a disk is
/// full or nobody reads a pipe, lines are dropped and the node keeps running; their number is
/// logged once writing works again.
///
/// Messages between two nodes arrive once and in order while both sockets are open. If the peer's
/// machine goes down, messages in flight to it are lost, even if its socket is bound again later.
///
/// The node also exports disks and maps those of other machines, over RDMA at its addresses (UDP
/// port 4791): [[export]] and [[map]] in the file of --config, and `bowline rnbd export`,
/// `unexport`, `map` and `unmap` while it runs. --example-config explains both. The node is ready,
/// for a service manager too, once each disk of the file is mapped or one attempt to map it has
/// failed. On SIGHUP it reads the sizes of exports again.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Read settings from a TOML file; options on the command line take precedence
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print a commented configuration file and exit
    #[arg(long)]
    example_config: bool,
    /// Address to serve, a link-local one with its interface, as fe80::1%eth0; may be repeated.
    /// Without it, every local address
    #[arg(long, value_name = "ADDRESS", value_parser = own)]
    address: Vec<Address>,
    /// Speak RDS over RDMA too; sockets at the device's addresses then use RDMA. soft is RoCEv2 in
    /// this process (UDP port 4791) at all addresses of the node; soft@ADDRESS is the same at this
    /// address only, and the other addresses use TCP; any other name is a device of rdma-core, such
    /// as rxe0, whose addresses become the node's. May be repeated
    #[arg(long, value_name = "DEVICE", num_args = 0..=1, require_equals = true, default_missing_value = "soft")]
    rdma: Vec<DeviceName>,
    /// Paths to a peer, 8 or 1
    #[arg(long, value_name = "N")]
    paths: Option<u8>,
    /// Send buffer of a new socket: bytes that peers have not acknowledged yet. A long route needs
    /// its rate times its round-trip time, 8m for 1 Gb/s at 60 ms. Without this option an echo
    /// service has 256 MiB
    #[arg(long, value_name = "BYTES", value_parser = number)]
    send_buffer: Option<u64>,
    /// Receive buffer of a new socket
    #[arg(long, value_name = "BYTES", value_parser = number)]
    recv_buffer: Option<u64>,
    /// Longest message
    #[arg(long, value_name = "BYTES", value_parser = number)]
    max_message: Option<u64>,
    /// Most memory for data that peers send, all peers together [default: 1 GiB]
    #[arg(long, value_name = "BYTES", value_parser = number)]
    memory: Option<u64>,
    /// How a waiting thread waits
    #[arg(long, value_enum, value_name = "MODE")]
    poll: Option<Poll>,
    /// TCP congestion control
    #[arg(long, value_name = "NAME")]
    congestion_control: Option<String>,
    /// Do not acknowledge end to end, as a kernel does not
    #[arg(long)]
    no_end_to_end: bool,
    /// Change a setting, named as the kernel's sysctl; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting)]
    sysctl: Vec<(String, i64)>,
    /// Send everything that is received on this port back; may be repeated. Of the replies that a
    /// slow peer socket does not accept, at most 8 MiB or 16384 are queued and the rest dropped;
    /// with --send-buffer, 1/32 of it instead of 8 MiB
    #[arg(long, value_name = "PORT")]
    echo: Vec<u16>,
    /// Receive and discard everything that is sent to this port; may be repeated
    #[arg(long, value_name = "PORT")]
    sink: Vec<u16>,
    /// Path of the control socket [default: ADDRESS.sock in $XDG_RUNTIME_DIR/bowline or
    /// /run/bowline; ADDRESS-NUMBER.sock, with the number of the network namespace, if a node of
    /// another namespace uses that name]
    #[arg(long, value_name = "PATH", conflicts_with = "no_control")]
    control: Option<PathBuf>,
    /// Run without a control socket
    #[arg(long)]
    no_control: bool,
    /// Path of the socket at which programs of `bowline run` connect [default: host-NUMBER.sock,
    /// with the number of the network namespace, in bowline/rds in $XDG_RUNTIME_DIR or /run, and
    /// host.sock there too if no other node uses that name]. A socket passed by the service manager
    /// (LISTEN_FDS) takes precedence
    #[arg(long, value_name = "PATH", conflicts_with = "no_programs")]
    programs: Option<PathBuf>,
    /// Do not serve programs
    #[arg(long)]
    no_programs: bool,
    /// Replace the running node that serves programs at the same path: it hands its programs over
    /// and ends. They keep their sockets; connections to peers are cut for a moment. If there is no
    /// such node, just start
    #[arg(long, conflicts_with = "no_programs")]
    replace: bool,
    /// At the end, store the sockets of programs with the service manager, so that programs keep
    /// them over a restart of the service. Needs FileDescriptorStoreMax= in the unit
    #[arg(long, conflicts_with = "no_programs")]
    keep_programs: bool,
    /// Also serve programs of this user, by name or number, * for all users; may be repeated.
    /// Programs of root and of the node's own user are always served
    #[arg(long, value_name = "USER")]
    allow_user: Vec<String>,
    /// Also serve programs of the users in this group; may be repeated
    #[arg(long, value_name = "GROUP")]
    allow_group: Vec<String>,
    /// Communicate with these peers only: an address or a network, as 10.0.0.0/8 or fd00::1; may be
    /// repeated
    #[arg(long, value_name = "NETWORK", value_parser = network)]
    allow_peer: Vec<Network>,
    /// Do not communicate with these peers, even if --allow-peer names them; may be repeated
    #[arg(long, value_name = "NETWORK", value_parser = network)]
    deny_peer: Vec<Network>,
    /// Show the node as files below this folder, as under /sys; needs FUSE
    #[arg(long, value_name = "FOLDER")]
    tree: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsOptions,
    /// At the end, wait at most this long until peers have acknowledged everything [default: 5]
    #[arg(long, value_name = "SECONDS")]
    drain: Option<f64>,
    /// Do not restrict this process to the files, ports, system calls and capabilities that it
    /// needs. A node with --tree is restricted less: one of root keeps access to files and the
    /// right to mount, one of another user everything, because fusermount3 needs it. A node with
    /// disks in its configuration is not restricted; a node without needs this option before
    /// commands can add disks
    #[arg(long)]
    no_sandbox: bool,
}

/// What is given, or else what is in the file.
fn pick<T>(given: Vec<T>, file: Vec<T>) -> Vec<T> {
    if given.is_empty() { file } else { given }
}

/// Settings after file and options were put together.
#[derive(Debug)]
struct Settings {
    addresses: Vec<Address>,
    rdma: Devices,
    paths: Option<u8>,
    send_buffer: Option<u64>,
    recv_buffer: Option<u64>,
    max_message: Option<u32>,
    poll: Option<Poll>,
    congestion_control: Option<String>,
    end_to_end: bool,
    sysctl: Vec<(String, i64)>,
    echo: Vec<u16>,
    sink: Vec<u16>,
    /// There is a control socket, at this path or at the default one.
    control: Option<Option<PathBuf>>,
    /// Programs are served at this path, or at the default one.
    programs: Option<Option<PathBuf>>,
    peers: PeerList,
    policy: Policy,
    /// Limits and buffers of the node.
    limits: Limits,
    usual: Quota,
    tree: Option<PathBuf>,
    metrics: metrics::Settings,
    drain: Duration,
    /// Whether the node gives up what it does not need.
    sandbox: bool,
    disks: disk::Settings,
}

impl Settings {
    fn merge(args: Args, file: File) -> Outcome<Self> {
        let size = |given: Option<u64>, file: Option<bowline_node::values::Size>| {
            given.or(file.map(|s| s.0))
        };
        let mut addresses = if args.address.is_empty() { file.address } else { args.address };
        let mut seen = Vec::new();
        addresses.retain(|address| {
            let new = !seen.contains(address);
            seen.push(*address);
            new
        });
        let rdma = Devices::new(pick(args.rdma, file.rdma), &mut addresses)?;
        let twice = |a: &Address| addresses.iter().find(|b| a.ip == b.ip && a.link != b.link);
        if let Some((one, other)) = addresses.iter().find_map(|a| Some((a, twice(a)?))) {
            return Err(Failure::usage(format!(
                "{one} and {other} are one address on two links: start one node for each link"
            )));
        }
        let paths = args.paths.or(file.paths);
        if paths.is_some_and(|paths| paths != 1 && paths != 8) {
            return Err(Failure::usage("paths must be 8 or 1"));
        }
        let max_message = match size(args.max_message, file.max_message).map(u32::try_from) {
            None => None,
            Some(Ok(bytes)) if bytes > 0 => Some(bytes),
            Some(_) => return Err(Failure::usage("the longest message must be 1 byte to 4 GiB")),
        };
        let memory = match size(args.memory, file.memory).map(usize::try_from) {
            None => None,
            Some(Ok(bytes)) if bytes >= MEMORY_MIN => Some(bytes),
            Some(_) => return Err(Failure::usage("the memory must be 16 MiB or more")),
        };
        let drain = args.drain.or(file.drain).unwrap_or(DRAIN_DEFAULT);
        if !(0.0..=86_400.0).contains(&drain) {
            return Err(Failure::usage("the drain time must be 0 to 86400 seconds"));
        }
        let echo = pick(args.echo, file.echo);
        let sink = pick(args.sink, file.sink);
        if addresses.is_empty() && !(echo.is_empty() && sink.is_empty()) {
            return Err(Failure::usage("echo and sink need an address: give the node --address"));
        }
        let mut sysctl: Vec<_> = file.sysctl.into_iter().collect();
        sysctl.extend(args.sysctl);
        let mut access = file.access;
        let names = |given: &[String]| given.iter().map(|name| Name::from(&**name)).collect();
        access.users = pick(names(&args.allow_user), access.users);
        access.groups = pick(names(&args.allow_group), access.groups);
        let peers = access::peers(
            &pick(args.allow_peer, file.allow_peer),
            &pick(args.deny_peer, file.deny_peer),
        );
        let (send_buffer, recv_buffer) =
            (size(args.send_buffer, file.send_buffer), size(args.recv_buffer, file.recv_buffer));
        let mut limits = memory.map_or_else(Limits::default, Limits::with_memory);
        if !echo.is_empty() {
            limits.send_messages_per_socket = echo::MESSAGES_TOTAL;
        }
        let usual = usual_quota(&limits, send_buffer, recv_buffer);
        let policy = access.policy(usual)?;
        Ok(Self {
            paths,
            send_buffer,
            recv_buffer,
            max_message,
            peers,
            policy,
            limits,
            usual,
            poll: args.poll.or(file.poll),
            congestion_control: args.congestion_control.or(file.congestion_control),
            end_to_end: !args.no_end_to_end && file.end_to_end.unwrap_or(true),
            sysctl,
            echo,
            sink,
            control: (!args.no_control).then_some(args.control.or(file.control)),
            programs: (!args.no_programs).then_some(args.programs.or(file.programs)),
            tree: args.tree.or(file.tree),
            metrics: args.metrics.or(file.metrics, file.metrics_host)?,
            drain: Duration::from_secs_f64(drain),
            sandbox: !args.no_sandbox && file.sandbox.unwrap_or(true),
            disks: file.services.map_or_else(disk::Settings::none, Ok)?,
            addresses,
            rdma,
        })
    }

    /// Starts the node, with what was handed over to it.
    fn build(&self, former: Option<FormerNode<'_>>) -> Outcome<Built> {
        let mut builder = Node::builder().end_to_end(self.end_to_end);
        if let Some(paths) = self.paths {
            builder = builder.paths(Paths::try_from(paths)?);
        }
        // Those of programs stay as a kernel's, whatever the longest message is.
        let usual = bowline_rds::Config::default();
        let bytes = |asked: Option<u64>, usual| asked.map_or(usual, |bytes| bytes as usize);
        builder = builder
            .default_send_buffer(bytes(self.send_buffer, usual.send_buffer))
            .default_recv_buffer(bytes(self.recv_buffer, usual.recv_buffer));
        if let Some(bytes) = self.max_message {
            builder = builder.max_message_bytes(bytes);
        }
        builder = builder.limits(self.limits.clone()).peers(self.peers.clone());
        if let Some(poll) = self.poll {
            builder = builder.poll(poll.into());
        }
        if self.congestion_control.is_some() {
            builder = builder.congestion_control(self.congestion_control.clone());
        }
        // Before anything else is given up for this node.
        let mut trial = bowline_rds::Node::new(bowline_rds::Config::default());
        for (name, value) in &self.sysctl {
            trial.set_sysctl(bowline_rds::Instant::default(), name, *value).map_err(|error| {
                Failure::usage(format!("cannot set {name} to {value}: {error}"))
            })?;
        }
        // A former node has closed its device by now.
        let may_have_disks = !sandbox::is_wanted(self);
        let soft = self.rdma.open_soft(|config| {
            if may_have_disks {
                self.disks.configure(config);
            }
        })?;
        let port = SoftPort::of(soft.as_ref());
        let soft = soft.map(|device| device as Arc<dyn Device>);
        let (of_rds, of_disks) = match soft {
            Some(device) if may_have_disks => {
                let [rds, disks] = SharedDevice::split(device);
                (Some(Arc::new(rds) as Arc<dyn Device>), Some(Arc::new(disks) as Arc<dyn Device>))
            }
            soft => (soft, None),
        };
        let builder = self.rdma.add_to(builder, of_rds);
        let node = node_on(builder, &self.addresses, |builder| match former {
            Some(FormerNode { state, listeners, commit }) => {
                builder.resume(state, listeners, commit)
            }
            None => builder.build(),
        })?;
        for (name, value) in &self.sysctl {
            node.set_sysctl(name, *value)?;
        }
        Ok(Built { node, port, of_disks })
    }

    /// Starts the node, with what was taken over. What a manager has kept may be of no use: then
    /// programs have lost their sockets.
    fn begin(&self, taken: Option<Taken>, supervisor: &Supervisor) -> Outcome<Begun> {
        let Some(Taken { host, listeners, state, from }) =
            taken.filter(|_| self.programs.is_some())
        else {
            return Ok(Begun::Anew(self.build(None)?));
        };
        let is_stored = matches!(from, From::Store);
        let commit = Box::new(|| from.commit(supervisor));
        let former = FormerNode { state, listeners, commit };
        match self.build(Some(former)) {
            Err(failure) if is_stored => {
                note!("bowline node: programs have lost their sockets: {failure}");
                hand_over::forget(supervisor);
                Ok(Begun::Without(host.listener().ok(), self.build(None)?))
            }
            node => Ok(Begun::On(host, node?)),
        }
    }
}

/// How a node begins.
enum Begun {
    /// With nothing of another.
    Anew(Built),
    /// In another's place, with its programs.
    On(HostState, Built),
    /// With no more than the socket at which another served programs.
    Without(Option<UnixListener>, Built),
}

/// A node that was started.
struct Built {
    node: Node,
    port: SoftPort,
    /// The share of disks in the soft RDMA device.
    of_disks: Option<Arc<dyn Device>>,
}

/// What a user may have of a node with these limits.
fn usual_quota(limits: &Limits, send_buffer: Option<u64>, recv_buffer: Option<u64>) -> Quota {
    let mut config = bowline_rds::Config { limits: limits.clone(), ..Default::default() };
    config.send_buffer = send_buffer.map_or(config.send_buffer, |bytes| bytes as usize);
    config.recv_buffer = recv_buffer.map_or(config.recv_buffer, |bytes| bytes as usize);
    Quota::default_for(&config)
}

/// Lets the node have as many descriptors as it may: each program and each socket takes some.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // Where it fails, there are fewer.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    if args.example_config {
        bowline_node::log::text(config::EXAMPLE);
        return Ok(());
    }
    // First, before anything else could get its number.
    let passed = passed(&hand_over::STORED).map_err(|error| {
        Failure::failed(format!("cannot use the socket that the service manager passed: {error}"))
    })?;
    let file = args.config.as_deref().map(File::read).transpose()?.unwrap_or_default();
    raise_descriptors();
    let (replace, keep_programs) = (args.replace, args.keep_programs);
    let mut settings = Settings::merge(args, file)?;
    let supervisor = Supervisor::of_this_process();
    let mut taken = hand_over::stored(passed.stored);
    if taken.is_none() && replace && settings.programs.is_some() {
        let place = settings.programs.as_ref().and_then(Option::as_deref);
        taken = hand_over::receive(place)?;
    }
    let is_managers = passed.listener.is_some();
    let mut listener = passed.listener;
    let mut places = Places::listen(&settings, listener.is_some(), taken.as_mut())?;
    settings.rdma.make_sockets();
    let confinement = sandbox::enter(&settings);
    let stop = Stop::install_with(bowline_node::log::Duty::Service { json: false })?;
    let hangups = hangups()?;
    let run = Run { settings, confinement, supervisor, stop, hangups };
    taken.iter().for_each(Taken::announce);
    let mut keep = keep_programs && run.supervisor.is_there();
    // A hand-over that fails leaves everything here, and the node goes on.
    while let Some(back) =
        run.serve(&mut places, listener.take(), is_managers, taken.take(), keep)?
    {
        taken = Some(hand_over::taken_back(back)?);
        keep = false;
    }
    Ok(())
}

/// What a node has from its start to its end.
struct Run {
    settings: Settings,
    confinement: Confinement,
    supervisor: Supervisor,
    stop: Stop,
    hangups: Arc<AtomicBool>,
}

impl Run {
    /// Serves until a stop is requested, or until everything is handed over. Returns what could not
    /// be handed over.
    fn serve(
        &self,
        places: &mut Places,
        mut listener: Option<UnixListener>,
        is_managers: bool,
        taken: Option<Taken>,
        keep_programs: bool,
    ) -> Outcome<Option<HandOver>> {
        let Self { settings, confinement, supervisor, stop, hangups } = self;
        let disks = {
            let is_confined = sandbox::is_wanted(settings);
            let taken = settings.rdma.soft();
            HostDisks::new(settings.disks.clone(), &settings.addresses, taken, is_confined)?
        };
        let (former, Built { node, port, of_disks }) = match settings.begin(taken, supervisor)? {
            Begun::Anew(built) => (None, built),
            Begun::On(host, built) => (Some(host), built),
            Begun::Without(lost, built) => {
                listener = listener.or(lost);
                (None, built)
            }
        };
        of_disks.into_iter().for_each(|device| disks.share(device));
        let over = Arc::new(AtomicBool::new(false));
        let mut services = Vec::new();
        for (ports, service) in [(&settings.echo, Service::Echo), (&settings.sink, Service::Sink)] {
            for port in ports {
                for address in &settings.addresses {
                    let place = address.at(*port);
                    let send_buffer = settings.send_buffer;
                    services.push(Running::start(&node, place, service, send_buffer, &over)?);
                }
            }
        }
        let facts = NodeFacts {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            addresses: settings.addresses.clone(),
        };
        let tree = tree(node.clone(), facts, &disks);
        let server = places.control.as_ref().map(|place| control::serve(place, tree.clone()));
        let server = server.transpose()?;
        let of_disks = places.disks.as_ref().and_then(|place| disks.control(place));
        let files = settings.tree.as_deref().map(|dir| mounted(&tree, dir)).transpose()?;
        let (policy, usual) = (settings.policy.clone(), settings.usual);
        let programs = match (former, listener, places.programs.take()) {
            _ if settings.programs.is_none() => None,
            (Some(former), listener, _) => {
                Some(Programs::resume(&node, listener, is_managers, former, policy, usual)?)
            }
            (None, Some(listener), _) => {
                Some(Programs::start_passed(&node, listener, policy, usual)?)
            }
            (None, None, Some(place)) => Some(Programs::start(&node, place, policy, usual)?),
            (None, None, None) => None,
        };
        let shown = Arc::clone(&disks);
        let metrics = metrics::node(node.clone(), move |out| shown.metrics(out));
        let metrics = settings.metrics.serve(metrics)?;
        announce(settings, &services, server.as_ref(), files.as_ref(), programs.as_ref());
        sandbox::announce(confinement);
        let looks =
            Looks { node: &node, services: &services, programs: programs.as_ref(), disks: &disks };
        let started = disks.start(stop);
        let mut keeper = None;
        if started.is_ok() {
            say!("ready; ask with `bowline ping` and `bowline info`, stop with SIGINT or SIGTERM");
            keeper = watch(&looks, stop, hangups, supervisor).map(Keeper::Node);
            if keep_programs && keeper.is_none() {
                keeper = Some(Keeper::Manager(supervisor));
            }
        }
        let programs = match (keeper, programs) {
            (Some(keeper), Some(programs)) => {
                if matches!(keeper, Keeper::Manager(_)) {
                    // Perhaps nobody goes on.
                    supervisor.stopping(settings.drain + disks.patience(), "draining");
                    node.driver().drain(settings.drain);
                }
                over.store(true, Ordering::Relaxed);
                services.into_iter().for_each(|service| service.close(&node));
                // The next process maps the disks of its file.
                drop((server, of_disks, files, metrics, tree));
                disks.close(stop);
                drop(disks);
                return hand_over::send(node, port, programs, places, keeper);
            }
            (_, programs) => programs,
        };

        let patience = settings.drain.as_secs_f64();
        let last = format!("stopping: waiting up to {patience} s for acknowledgements of peers");
        supervisor.stopping(settings.drain + disks.patience(), &last);
        say!("{last}");
        over.store(true, Ordering::Relaxed);
        drop(programs);
        disks.close(stop);
        let drained = node.shutdown(settings.drain);
        for service in services {
            // The panic of a service was printed on standard error.
            let _ = service.thread.join();
        }
        drop((server, of_disks, files, metrics));
        started?;
        if drained {
            say!("stopped; peers have acknowledged everything");
            return Ok(None);
        }
        Err(Failure::failed(format!(
            "stopped after {} s before peers had acknowledged everything; allow more time with --drain",
            settings.drain.as_secs_f64()
        )))
    }
}

fn announce(
    settings: &Settings,
    services: &[Running],
    server: Option<&Server>,
    files: Option<&Mount>,
    programs: Option<&Programs>,
) {
    let port = 16385;
    if settings.addresses.is_empty() {
        say!("node on every local address, RDS over TCP, port {port}");
    }
    for address in &settings.addresses {
        let also = if settings.rdma.covers(*address) { "RDMA and " } else { "" };
        say!("node on {address}, RDS over {also}TCP, port {port}");
    }
    for Running { place, service, .. } in services {
        say!("{} on {place}", service.name());
    }
    if let Some(server) = server {
        say!("control socket {}", server.path().display());
    }
    if let Some(files) = files {
        say!("control tree {}", files.dir().display());
    }
    match programs {
        Some(programs) => {
            say!("programs of `bowline run` are served at {}", programs.path().display());
        }
        None if settings.programs.is_some() => {
            let place = programs::default_path();
            say!("programs of `bowline run` are served by another node, at {}", place.display());
        }
        None => {}
    }
}

/// What is looked at while the node runs.
struct Looks<'a> {
    node: &'a Node,
    services: &'a [Running],
    programs: Option<&'a Programs>,
    disks: &'a HostDisks,
}

/// Tells of the node until a stop is requested, or until another node asks for its place: returns
/// the connection to it. Reads sizes of exports anew when asked to. The watchdog hears of it after
/// each look, for which the node has to answer: one that is stuck is not kept alive.
fn watch(
    looks: &Looks<'_>,
    stop: &Stop,
    hangups: &AtomicBool,
    supervisor: &Supervisor,
) -> Option<UnixStream> {
    let mut told = looks.status();
    supervisor.ready(&told);
    loop {
        let time = supervisor.pause(EVENT_PAUSE);
        match looks.programs {
            // What fails here is tried again.
            Some(programs) => {
                let _ = stop.wait_for_any([programs.successor_bell()], time);
            }
            None => {
                stop.wait(Some(time));
            }
        }
        looks.log();
        if stop.asked() {
            return None;
        }
        if let Some(successor) = looks.programs.and_then(Programs::take_successor) {
            return Some(successor);
        }
        // Relaxed: the flag publishes nothing but itself.
        if hangups.swap(false, Ordering::Relaxed) {
            supervisor.reloading();
            looks.disks.resize();
            supervisor.ready(&told);
        }
        let status = looks.status();
        if told != status {
            supervisor.status(&status);
            told = status;
        }
        supervisor.beat();
    }
}

impl Looks<'_> {
    /// Returns how many peers and disks there are, in one line.
    fn status(&self) -> String {
        let info = self.node.driver().with_core(|core, _| core.info_without_messages());
        let up = info.paths.iter().filter(|path| path.state == PathState::Up);
        let up: BTreeSet<_> = up.map(|path| path.remote).collect();
        let all: BTreeSet<_> = info.paths.iter().map(|path| path.remote).collect();
        let disks = self.disks.status();
        format!("serving; {} of {} peers connected{disks}", up.len(), all.len())
    }

    /// Prints what happened since the last look: to peers, one line for all paths to a peer, and to
    /// disks, and what services dropped.
    fn log(&self) {
        self.disks.log();
        if let Some(programs) = self.programs {
            programs.log();
        }
        for Running { place, service, dropped, .. } in self.services {
            let count = dropped.swap(0, Ordering::Relaxed);
            if count > 0 {
                say!(
                    "{} on {place}: {count} replies dropped: the peer does not read them",
                    service.name()
                );
            }
        }
        let mut lines: Vec<(String, u32)> = Vec::new();
        for event in self.node.events() {
            let line = match event {
                Event::PathUp { remote, .. } => format!("peer {remote}: paths up"),
                Event::PathDown { remote, .. } => format!("peer {remote}: paths down"),
                Event::CannotConnect { remote, why, .. } => {
                    format!("peer {remote}: cannot connect, {why}")
                }
                Event::Misbehaved { remote, what } => format!("peer {remote} broke a rule: {what}"),
                Event::PeerRestarted { remote } => format!("peer {remote} has restarted"),
                Event::PeerEnded { remote, .. } => format!("peer {remote} has shut down"),
                Event::Refused { remote, why } => {
                    format!("peer {remote}: connection refused, {why}")
                }
                _ => continue,
            };
            match lines.iter_mut().find(|(known, _)| *known == line) {
                Some((_, count)) => *count += 1,
                None => lines.push((line, 1)),
            }
        }
        for (line, count) in lines {
            say_of_peer!("{}{line} ({count})", stamp());
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Service {
    Echo,
    Sink,
}

impl Service {
    fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Sink => "sink",
        }
    }
}

/// A service that runs in a thread of its own.
struct Running {
    place: SocketAddr,
    socket: SocketId,
    service: Service,
    /// Answers dropped since the last report.
    dropped: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Running {
    fn start(
        node: &Node,
        place: SocketAddr,
        service: Service,
        send_buffer: Option<u64>,
        over: &Arc<AtomicBool>,
    ) -> Outcome<Self> {
        let open = || {
            let socket = node.bind(place)?;
            if service == Service::Echo && send_buffer.is_none() {
                socket.set_send_buffer(echo::SEND_BUFFER)?;
            }
            Ok(socket)
        };
        let socket = open().map_err(|error: bowline::rds::Error| {
            Failure::failed(format!("cannot start {} on {place}: {error}", service.name()))
        })?;
        let id = socket.id();
        let (node, over, dropped) = (node.clone(), Arc::clone(over), Arc::default());
        let counter = Arc::clone(&dropped);
        let body = move || {
            let result = match service {
                Service::Echo => echo::serve(&node, &socket, &over, &counter),
                Service::Sink => sink(&socket, &over),
            };
            if let Err(error) = result
                && !over.load(Ordering::Relaxed)
            {
                note!("bowline node: {} on {place} ended: {error}", service.name());
            }
        };
        let thread = thread::Builder::new()
            .name(service.name().into())
            .spawn(body)
            .map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
        Ok(Self { place, socket: id, service, dropped, thread })
    }
}

impl Running {
    /// Ends the service while its node lives.
    fn close(self, node: &Node) {
        node.driver().close(self.socket);
        // The panic of a service was printed on standard error.
        let _ = self.thread.join();
    }
}

/// Receives all messages and discards them.
fn sink(socket: &Socket, over: &AtomicBool) -> Result<(), bowline::rds::Error> {
    let mut inbox = Vec::with_capacity(BATCH);
    while !over.load(Ordering::Relaxed) {
        inbox.clear();
        socket.recv_batch(&mut inbox, BATCH)?;
    }
    Ok(())
}
