//! The options of the daemon, of `bowline node` and of `bowline-node`, and the program of that
//! name.

#![allow(rustdoc::broken_intra_doc_links, reason = "in help texts, brackets are no links")]

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use clap::{Args as _, Command, FromArgMatches, error::ErrorKind};

use crate::{
    Outcome,
    background::{self, InBackground},
    config::{
        Config, EXAMPLE, Poll,
        access::{Name, Network, network},
    },
    daemon::Daemon,
    impair::ImpairOptions,
    log,
    metrics::{Settings, host_name},
    over_rdma::DeviceName,
    values::{Address, Size, number, own, setting},
};

/// The name of the program.
const PROGRAM: &str = "bowline-node";

/// Run a node until SIGINT or SIGTERM.
///
/// It answers pings of other hosts at once; --echo and --sink give them sockets to talk to.
///
/// Events of peers are logged to standard output with the time (unless the journal has it), at most
/// 100 lines at once and 10 a second. If the log cannot be written, lines are dropped and counted;
/// the node keeps running.
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
pub struct Args {
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
    #[command(flatten)]
    impair: ImpairOptions,
    /// Do not acknowledge end to end, as a kernel does not
    #[arg(long)]
    no_end_to_end: bool,
    /// Change a setting, named as the kernel's sysctl; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting)]
    sysctl: Vec<(String, i64)>,
    /// Send everything that comes to this port back; may be repeated. At most 8 MiB or 16384
    /// replies are queued for a slow client, or 1/32 of --send-buffer; more are dropped
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
    /// End when no program of `bowline run` is left, which has started this node
    #[arg(long, hide = true, conflicts_with = "no_programs")]
    until_unused: bool,
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
    /// Return as soon as the node is ready, which then runs in the background until SIGTERM. Its
    /// log goes to the output of this command if that is a file or a terminal; it closes pipes and
    /// sockets when it is ready, and what it says later is lost: `> FILE 2>&1` keeps it
    #[arg(long, conflicts_with_all = ["until_unused", "example_config"])]
    background: bool,
    #[command(flatten)]
    in_background: InBackground,
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

/// The option of commands that serve metrics.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct MetricsOptions {
    /// Serve metrics for Prometheus over HTTP at this address and port, as 127.0.0.1:9465, below
    /// /metrics. There is no authentication: whoever reaches the address can read the names of
    /// peers, sessions and disks, so keep it on loopback or behind a proxy. Requests must name an
    /// IP address, localhost, the name of this host, or a name given with --metrics-host
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// Also accept requests for metrics with this host name; may be repeated. Requests with other
    /// names are refused, because a web page could point its own name here (DNS rebinding) and read
    /// the reply in a browser
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    metrics_host: Vec<String>,
}

impl MetricsOptions {
    /// Returns what these options say.
    pub fn settings(&self) -> Settings {
        Settings { place: self.metrics, hosts: self.metrics_host.clone() }
    }
}

/// Lays an option that was given over what the file says.
fn lay<T>(given: Option<T>, file: &mut Option<T>) {
    if given.is_some() {
        *file = given;
    }
}

/// Does so for one that may be repeated.
fn lay_all<T>(given: Vec<T>, file: &mut Vec<T>) {
    if !given.is_empty() {
        *file = given;
    }
}

impl Args {
    /// Lays these options over what a file says.
    fn over(self, mut file: Config) -> Config {
        let names = |given: &[String]| given.iter().map(|name| Name::from(&**name)).collect();
        lay_all(self.address, &mut file.address);
        lay_all(self.rdma, &mut file.rdma);
        lay(self.paths, &mut file.paths);
        lay(self.send_buffer.map(Size), &mut file.send_buffer);
        lay(self.recv_buffer.map(Size), &mut file.recv_buffer);
        lay(self.max_message.map(Size), &mut file.max_message);
        lay(self.memory.map(Size), &mut file.memory);
        lay(self.poll, &mut file.poll);
        lay(self.congestion_control, &mut file.congestion_control);
        self.impair.over(&mut file.impair, &mut file.impair_seed);
        lay(self.no_end_to_end.then_some(false), &mut file.end_to_end);
        lay_all(self.echo, &mut file.echo);
        lay_all(self.sink, &mut file.sink);
        lay(self.control, &mut file.control);
        lay(self.programs, &mut file.programs);
        lay_all(names(&self.allow_user), &mut file.access.users);
        lay_all(names(&self.allow_group), &mut file.access.groups);
        lay_all(self.allow_peer, &mut file.allow_peer);
        lay_all(self.deny_peer, &mut file.deny_peer);
        lay(self.tree, &mut file.tree);
        lay(self.metrics.metrics, &mut file.metrics);
        lay_all(self.metrics.metrics_host, &mut file.metrics_host);
        lay(self.drain, &mut file.drain);
        lay(self.no_sandbox.then_some(false), &mut file.sandbox);
        file.sysctl_after = self.sysctl;
        file.no_control = self.no_control;
        file.no_programs = self.no_programs;
        file.replace = self.replace;
        file.keep_programs = self.keep_programs;
        file.until_unused = self.until_unused;
        file
    }
}

/// Runs a node until a signal or another node ends it, or prints the example of a configuration.
///
/// # Errors
///
/// Why the node could not start, or did not end in good order.
pub fn run(args: Args) -> Outcome {
    if args.example_config {
        log::text(EXAMPLE);
        return Ok(());
    }
    if args.background {
        return background::start();
    }
    args.in_background.begin()?;
    let file = args.config.as_deref().map(Config::read).transpose()?.unwrap_or_default();
    Daemon::start(args.over(file))?.run()
}

/// Returns the definition of the program `bowline-node`, for its page and completions.
pub fn definition() -> Command {
    let program = Command::new(PROGRAM).version(env!("CARGO_PKG_VERSION"));
    Args::augment_args(program.after_help("Exit status: 0 done, 1 failed, 2 usage."))
}

/// Runs the program `bowline-node` with the options of this process.
pub fn main() -> ExitCode {
    let parsed = definition().try_get_matches().and_then(|given| Args::from_arg_matches(&given));
    let code = match parsed {
        Ok(args) => match run(args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => ExitCode::from(failure.report(PROGRAM)),
        },
        Err(error)
            if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) =>
        {
            say!("{}", error.render().to_string().trim_end());
            ExitCode::SUCCESS
        }
        Err(error) => {
            note!("{PROGRAM}: {}; see `{PROGRAM} --help`", mistake(&error));
            ExitCode::from(2)
        }
    };
    log::finish();
    code
}

/// Returns what clap has to say of a mistake before it shows how a command is used, in one line:
/// with what may be meant instead.
pub fn mistake(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first: Vec<&str> =
        text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let mut whole = first.join(" ");
    // Others say how to pass the word on as a value.
    let is_hint = |line: &&str| line.starts_with("tip: ") && line.contains("similar");
    if let Some(hint) = text.lines().map(str::trim).find(is_hint) {
        whole = format!("{whole}; {}", hint.trim_start_matches("tip: "));
    }
    whole.strip_prefix("error: ").unwrap_or(&whole).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &str) -> Args {
        let given = definition().get_matches_from(words.split(' '));
        Args::from_arg_matches(&given).expect("options")
    }

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn options_win_over_the_file() {
        let file = || {
            let text = "address = [\"10.0.0.1\"]\npaths = 8\nsandbox = true\nend-to-end = true\n\
                        sysctl = { \"net.rds.ping_enable\" = 1 }\ndrain = 2.0\n";
            toml::from_str::<Config>(text).expect("a file")
        };
        let none = parsed("bowline-node").over(file());
        assert_eq!(format!("{none:?}"), format!("{:?}", file()));
        let words = "bowline-node --address 10.0.0.2 --paths 1 --no-sandbox --no-end-to-end \
                     --sysctl net.rds.ping_enable=0 --no-control --memory 1g --allow-user 7";
        let both = parsed(words).over(file());
        assert_eq!(both.address, ["10.0.0.2".parse().expect("an address")]);
        assert_eq!(
            (both.paths, both.sandbox, both.end_to_end),
            (Some(1), Some(false), Some(false))
        );
        assert_eq!((both.memory, both.drain), (Some(Size(1 << 30)), Some(2.0)));
        assert_eq!(both.sysctl_after, [("net.rds.ping_enable".to_owned(), 0)]);
        assert!(both.no_control && !both.no_programs && both.sysctl.len() == 1);
        assert_eq!(both.access.users, [Name::from("7")]);
    }
}
