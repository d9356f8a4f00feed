//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;

use crate::cell::{Subject, Wait};
use crate::peers::PEERS;
use crate::{net, page, sys};

/// How a run ends.
pub(crate) const EXIT: &str = "Exit status: 0 all required targets are met, 1 one is not, 3 some are \
                               undecided, 2 usage, or the machine is not suitable.";

/// Measure this machine: bowline beside bare TCP and other message libraries.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    word: Word,
}

#[derive(Debug, clap::Subcommand)]
enum Word {
    Rds(RdsArgs),
    Roce(RoceArgs),
    Rtrs(RtrsArgs),
    Rnbd(RnbdArgs),
    Net(net::Args),
    Report(page::Args),
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Job {
    /// To measure this suite.
    Suite(Suite, Box<Options>),
    Net(net::Options),
    Report(page::Options),
}

impl Args {
    /// Returns what is to be done.
    ///
    /// # Errors
    /// Says what does not go together.
    pub(crate) fn job(self) -> Result<Job, String> {
        let suite = |suite, options| Job::Suite(suite, Box::new(options));
        Ok(match self.word {
            Word::Rds(args) => suite(Suite::Rds, args.options()),
            Word::Roce(args) => suite(Suite::Roce, args.options()),
            Word::Rtrs(args) => suite(Suite::Rtrs, args.options()),
            Word::Rnbd(args) => {
                let of = if args.doors { Suite::Doors } else { Suite::Rnbd };
                suite(of, args.options(of)?)
            }
            Word::Net(args) => Job::Net(args.options()?),
            Word::Report(args) => Job::Report(args.options()),
        })
    }
}

/// What all suites have.
#[derive(Debug, clap::Args)]
struct Common {
    /// 1 round, and less of everything; below 30 seconds
    #[arg(long)]
    quick: bool,
    /// Rounds, each of which measures everything once [default: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Length of a window in seconds [default: 0.25; 2 with --doors]
    #[arg(long, value_name = "S", value_parser = seconds(0.05, 60.0))]
    secs: Option<Duration>,
    /// Only cells whose names begin with one of these; --list prints all names
    #[arg(long, value_name = "CELL", value_delimiter = ',')]
    only: Vec<String>,
    /// Before each measurement, wait up to S seconds for a quiet machine
    #[arg(long, value_name = "S", value_parser = seconds(0.0, 600.0))]
    quiet_wait: Option<Duration>,
    /// Write every raw measurement to FILE (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page of plots to FILE
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write every raw measurement into DIR, in a file named by date, commit and suite
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Print the names of all cells and end
    #[arg(long)]
    list: bool,
}

impl Common {
    /// Returns the options, with what is quick about this suite.
    fn options(self, suite: Suite, peers: Option<PeerChoice>) -> Options {
        let all = Options::defaults();
        let is_doors = suite == Suite::Doors;
        let window = match (is_doors, self.quick) {
            (true, true) => Duration::from_millis(500),
            (true, false) => Duration::from_secs(2),
            (false, _) => all.window,
        };
        let default = match suite {
            _ if !self.quick => PeerChoice::Auto,
            Suite::Rds | Suite::Roce => PeerChoice::List(Vec::new()),
            Suite::Rtrs | Suite::Rnbd | Suite::Doors => PeerChoice::List(vec![Subject::Nbdkit]),
        };
        Options {
            quick: self.quick,
            rounds: self.rounds.unwrap_or(if self.quick { 1 } else { all.rounds }),
            window: self.secs.unwrap_or(window),
            only: self.only,
            peers: peers.unwrap_or(default),
            quiet_wait: self.quiet_wait.unwrap_or(all.quiet_wait),
            json: self.json,
            svg: self.svg,
            save: self.save,
            list: self.list,
            ..all
        }
    }
}

/// Which CPUs.
#[derive(Debug, clap::Args)]
struct Pinned {
    /// CPUs of receiver and sender, or none [default: the first two allowed]
    #[arg(long, value_name = "RX,TX", value_parser = pin)]
    pin: Option<Pin>,
}

#[derive(Clone, Copy, Debug)]
struct Pin(Option<(usize, usize)>);

impl Pinned {
    fn lay(self, options: &mut Options) {
        options.pin = self.pin.map_or(options.pin, |Pin(cpus)| cpus);
    }
}

/// How threads wait, and TCP.
#[derive(Debug, clap::Args)]
struct Sockets {
    /// How bowline's threads wait in streams [default: adaptive]
    #[arg(long, value_name = "MODE", value_parser = ["adaptive", "spin", "sleep"])]
    poll: Option<String>,
    /// Congestion control of TCP: default (the system's), cubic, reno. Without it bowline chooses
    /// for RDS, and the anchors use what it chooses here; the anchor of roce has cubic where the
    /// kernel has it
    #[arg(long, value_name = "NAME")]
    cc: Option<String>,
}

impl Sockets {
    fn lay(self, options: &mut Options) {
        options.poll = self.poll.and_then(|mode| Wait::parse(&mode)).unwrap_or(options.poll);
        options.cc = match self.cc {
            None => Congestion::Own,
            Some(name) if name == "default" => Congestion::System,
            Some(name) => Congestion::Named(name),
        };
    }
}

/// RDS beside bare sockets and other message libraries.
///
/// Names of cells begin with stream, many, rtt-spin, rtt-sleep, paths, slow, cc, sockets, nodes,
/// idle, host or rdma; in full a name is stream/64. --quick measures 3 sizes, and no library peers.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT)]
struct RdsArgs {
    #[command(flatten)]
    common: Common,
    /// auto (those that are installed), none, or some of zmq,nanomsg,ofi-net,ofi-rxm,ucx
    #[arg(long, value_name = "LIST", value_parser = peers(Suite::Rds))]
    peers: Option<PeerChoice>,
    #[command(flatten)]
    sockets: Sockets,
    /// RDS paths per connection [default: bowline's]
    #[arg(long, value_name = "N", value_parser = ["1", "8"])]
    paths: Option<String>,
    #[command(flatten)]
    pinned: Pinned,
    /// Measure programs on plain RDS sockets, too: on nodes of this host beside nodes of their own,
    /// unix sockets, a futex, TCP from Python, and a pipe with and without the preloaded library
    #[arg(long)]
    host: bool,
    /// Measure RDS over RDMA, too, on soft devices: messages and round trips beside the same over
    /// TCP, remote writes beside those of bare verbs
    #[arg(long)]
    rdma: bool,
}

impl RdsArgs {
    fn options(self) -> Options {
        let mut options = self.common.options(Suite::Rds, self.peers);
        self.sockets.lay(&mut options);
        self.pinned.lay(&mut options);
        let paths = self.paths.and_then(|paths| paths.parse().ok());
        options.paths = paths.unwrap_or(options.paths);
        options.host = self.host;
        options.rdma = self.rdma;
        options
    }
}

/// RDMA over RoCEv2 in user space beside bare sockets.
///
/// Names of cells begin with bulk, send, ping, loss, write or atomic; in full a name is bulk/4096.
/// --quick measures the cells of the targets only.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT)]
struct RoceArgs {
    #[command(flatten)]
    common: Common,
    /// Path MTU of all cells (without it 4096, and 1024 in a cell of its own); targets are not
    /// judged then
    #[arg(long, value_name = "BYTES", value_parser = ["256", "512", "1024", "2048", "4096"])]
    mtu: Option<String>,
    /// Each side drops this share of the packets it receives, at random, in all cells; targets are
    /// not judged then
    #[arg(long, value_name = "PERCENT", value_parser = loss)]
    loss: Option<u32>,
    #[command(flatten)]
    sockets: Sockets,
    #[command(flatten)]
    pinned: Pinned,
}

impl RoceArgs {
    fn options(self) -> Options {
        let mut options = self.common.options(Suite::Roce, None);
        self.sockets.lay(&mut options);
        self.pinned.lay(&mut options);
        options.mtu = self.mtu.and_then(|mtu| mtu.parse().ok());
        options.drop_one_in = self.loss.unwrap_or(options.drop_one_in);
        options
    }
}

/// Reads and writes of memory over RTRS beside bare sockets and nbdkit.
///
/// Names of cells begin with read, write, ping-spin, ping-sleep or failover; in full a name is
/// read/4096x32. --quick measures the cells of most targets only, of the peers nbdkit. Other
/// servers are measured if they are installed, with the processor time of their processes, and with
/// a client of this program.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT)]
struct RtrsArgs {
    #[command(flatten)]
    common: Common,
    /// auto (those that are installed), none, or nbdkit
    #[arg(long, value_name = "LIST", value_parser = peers(Suite::Rtrs))]
    peers: Option<PeerChoice>,
    #[command(flatten)]
    pinned: Pinned,
}

impl RtrsArgs {
    fn options(self) -> Options {
        let mut options = self.common.options(Suite::Rtrs, self.peers);
        self.pinned.lay(&mut options);
        options
    }
}

/// A disk mapped over RNBD beside RTRS alone, nbdkit, qemu-nbd and tgtd.
///
/// Through the library, which is faster than what other programs see; with --doors as these see it.
/// Names of cells begin with read, write, ping-spin, ping-sleep or door-write; in full a name is
/// read/4096x32. --quick measures the cells of the targets only, of the peers nbdkit. Other servers
/// are measured if they are installed, with the processor time of their processes; nbdkit and
/// qemu-nbd with a client of this program, tgtd with iscsi-perf.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT)]
struct RnbdArgs {
    #[command(flatten)]
    common: Common,
    /// auto (those that are installed), none, or some of nbdkit,qemu-nbd,tgt; with --doors some of
    /// nbdkit,nbdfuse,qemu-nbd
    #[arg(long, value_name = "LIST")]
    peers: Option<String>,
    #[command(flatten)]
    pinned: Pinned,
    /// Measure fio on the doors of a mapped disk instead: its NBD socket, its file by FUSE, the
    /// same by io_uring (needs root and Linux 6.14), beside the same fio on nbdkit, nbdfuse and
    /// qemu-nbd over TCP. Random reads and writes of 4 KiB, 1 and 32 outstanding, and of 128 KiB,
    /// 16 outstanding; names of cells begin as doors/read/4096x32. Everything runs on this machine
    /// as everybody starts it: `bowline rnbd export --memory`, `bowline rnbd map`, nbdkit with its
    /// plugin memory, qemu-nbd with a file in memory. Ratios are to nbdkit in the same round. What
    /// is not installed is skipped, and the output says which package has it
    #[arg(long, conflicts_with = "pin")]
    doors: bool,
    /// Processes of fio that ask at a time, such as 1,4 [default: 1]
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "doors",
        value_parser = RangedU64ValueParser::<usize>::new().range(1..=16))]
    clients: Vec<usize>,
    /// Loops that never sleep beside them, such as 0,4 [default: 0]
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "doors",
        value_parser = RangedU64ValueParser::<usize>::new().range(0..=64))]
    busy: Vec<usize>,
    /// Bytes of each disk, such as 256m [default: 1g]
    #[arg(long, value_name = "SIZE", requires = "doors", value_parser = size)]
    size: Option<u64>,
}

impl RnbdArgs {
    /// Returns the options of this suite, `Rnbd` or `Doors`.
    fn options(self, suite: Suite) -> Result<Options, String> {
        let chosen = |list: String| {
            peers(suite)(&list).map_err(|expected| format!("--peers {list}: {expected}"))
        };
        let mut options = self.common.options(suite, self.peers.map(chosen).transpose()?);
        self.pinned.lay(&mut options);
        if !self.clients.is_empty() {
            options.clients = self.clients;
        }
        if !self.busy.is_empty() {
            options.busy = self.busy;
        }
        options.disk = self.size.unwrap_or(options.disk);
        Ok(options)
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suite {
    /// Messages of RDS.
    Rds,
    /// RDMA verbs over RoCEv2 in userspace.
    Roce,
    /// Requests of RTRS.
    Rtrs,
    /// Block devices over RTRS, used through the library.
    Rnbd,
    /// The same as other programs use them: `rnbd --doors`.
    Doors,
}

impl Suite {
    /// Every suite, in the order of the page.
    pub(crate) const ALL: [Self; 5] = [Self::Rds, Self::Roce, Self::Rtrs, Self::Rnbd, Self::Doors];

    /// Finds a suite by its name.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|suite| suite.name() == name)
    }

    /// What its result files are called by.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Doors => "doors",
            Self::Rds => "rds",
            Self::Roce => "roce",
            Self::Rtrs => "rtrs",
            Self::Rnbd => "rnbd",
        }
    }

    /// Says whether somebody else is compared in this suite.
    pub(crate) const fn has_peer(self, peer: Subject) -> bool {
        match self {
            Self::Rds => peer.is_peer() && !peer.is_peer_of_storage(),
            Self::Roce => false,
            Self::Rtrs => matches!(peer, Subject::Nbdkit),
            Self::Rnbd => matches!(peer, Subject::Nbdkit | Subject::QemuNbd | Subject::Tgt),
            Self::Doors => matches!(peer, Subject::Nbdkit | Subject::QemuNbd | Subject::Nbdfuse),
        }
    }
}

/// Which congestion control to ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Congestion {
    /// bowline's own choice; the anchors follow it.
    Own,
    /// The system's default, for everybody.
    System,
    /// One by name, for everybody.
    Named(String),
}

/// Which library peers to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerChoice {
    /// Those that are installed.
    Auto,
    /// These, and say so when one is missing.
    List(Vec<Subject>),
}

/// What the user asked for.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) quick: bool,
    pub(crate) rounds: u32,
    pub(crate) window: Duration,
    pub(crate) only: Vec<String>,
    pub(crate) peers: PeerChoice,
    pub(crate) poll: Wait,
    pub(crate) cc: Congestion,
    pub(crate) paths: usize,
    /// Whether programs on nodes of this host are measured.
    pub(crate) host: bool,
    /// Whether RDS over RDMA is measured.
    pub(crate) rdma: bool,
    /// Path MTU of all cells instead of each its own.
    pub(crate) mtu: Option<usize>,
    /// Both sides lose one of this many received packets, in all cells; 0: only in those of loss.
    pub(crate) drop_one_in: u32,
    /// Processes of fio that ask at a time.
    pub(crate) clients: Vec<usize>,
    /// Loops that never sleep beside them.
    pub(crate) busy: Vec<usize>,
    /// Bytes of the disk behind each door.
    pub(crate) disk: u64,
    /// CPUs of receiver and sender.
    pub(crate) pin: Option<(usize, usize)>,
    pub(crate) quiet_wait: Duration,
    pub(crate) json: Option<PathBuf>,
    pub(crate) svg: Option<PathBuf>,
    pub(crate) save: Option<PathBuf>,
    pub(crate) list: bool,
}

impl Options {
    /// What is measured when nothing else is asked for.
    pub(crate) fn defaults() -> Self {
        let cpus = sys::allowed_cpus();
        Self {
            quick: false,
            rounds: 5,
            window: Duration::from_millis(250),
            only: Vec::new(),
            peers: PeerChoice::Auto,
            poll: Wait::Adaptive,
            cc: Congestion::Own,
            paths: 0,
            host: false,
            rdma: false,
            mtu: None,
            drop_one_in: 0,
            clients: vec![1],
            busy: vec![0],
            disk: 1 << 30,
            pin: match cpus[..] {
                [tx, rx, ..] => Some((rx, tx)),
                _ => None,
            },
            quiet_wait: Duration::ZERO,
            json: None,
            svg: None,
            save: None,
            list: false,
        }
    }

    /// Says whether what is measured is what the targets are about.
    pub(crate) fn as_targets_say(&self) -> bool {
        self.mtu.is_none() && self.drop_one_in == 0
    }

    /// Says whether a cell of this name is to be measured.
    pub(crate) fn wants(&self, cell: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| cell.starts_with(only.as_str()))
    }
}

/// Reads a number of bytes.
fn size(text: &str) -> Result<u64, &'static str> {
    let (digits, unit) = match text.strip_suffix(['g', 'G']) {
        Some(digits) => (digits, 1 << 30),
        None => (text.strip_suffix(['m', 'M']).unwrap_or_default(), 1 << 20),
    };
    let bytes = digits.parse().ok().and_then(|n: u64| n.checked_mul(unit));
    bytes
        .filter(|bytes| (1 << 20..=1 << 40).contains(bytes))
        .ok_or("expected a size such as 256m or 1g")
}

/// Reads seconds within these bounds.
pub(crate) fn seconds(
    min: f64,
    max: f64,
) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    move |text| {
        let seconds = text.parse::<f64>().ok().filter(|s| (min..=max).contains(s));
        let seconds = seconds.map(Duration::from_secs_f64);
        seconds.ok_or_else(|| format!("expected seconds from {min} to {max}"))
    }
}

/// Reads a loss in percent; returns in how many packets one is lost.
fn loss(text: &str) -> Result<u32, &'static str> {
    let text = text.strip_suffix('%').unwrap_or(text);
    let percent = text.parse::<f64>().ok().filter(|percent| (0.001..=50.0).contains(percent));
    let packets = percent.map(|percent| (100.0 / percent).round() as u32);
    packets.ok_or("expected percent from 0.001 to 50")
}

fn pin(text: &str) -> Result<Pin, String> {
    if text == "none" {
        return Ok(Pin(None));
    }
    let allowed = sys::allowed_cpus();
    let cpu = |text: &str| text.parse().ok().filter(|cpu| allowed.contains(cpu));
    let cpus = text.split_once(',').and_then(|(rx, tx)| Some((cpu(rx)?, cpu(tx)?)));
    let cpus = cpus.ok_or_else(|| format!("expected none, or two of the CPUs {allowed:?}"))?;
    Ok(Pin(Some(cpus)))
}

/// Reads a choice of the peers of a suite.
fn peers(
    suite: Suite,
) -> impl Fn(&str) -> Result<PeerChoice, String> + Clone + Send + Sync + 'static {
    move |text| {
        let known = || PEERS.into_iter().filter(|peer| suite.has_peer(*peer));
        let named = |name| known().find(|peer| peer.name() == name);
        let list = match text {
            "auto" => return Ok(PeerChoice::Auto),
            "none" => Some(Vec::new()),
            list => list.split(',').map(named).collect(),
        };
        list.map(PeerChoice::List).ok_or_else(|| {
            let names: Vec<&str> = known().map(Subject::name).collect();
            format!("expected auto, none, {}", names.join(","))
        })
    }
}

/// Reads a command line that begins with the name of a suite.
#[cfg(test)]
pub(crate) fn parsed(line: &str) -> Result<Job, String> {
    use clap::FromArgMatches as _;
    let command = <Args as clap::Args>::augment_args(clap::Command::new("bench"));
    let words = ["bench"].into_iter().chain(line.split_whitespace());
    let matches = command.try_get_matches_from(words).map_err(|error| error.to_string())?;
    Args::from_arg_matches(&matches).map_err(|error| error.to_string())?.job()
}

/// Reads the options of a suite.
#[cfg(test)]
pub(crate) fn parsed_suite(line: &str) -> Result<(Suite, Options), String> {
    match parsed(line)? {
        Job::Suite(suite, options) => Ok((suite, *options)),
        other => Err(format!("{other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        parsed_suite(&format!("rds {line}")).map(|(_, options)| options)
    }

    fn of(line: &str) -> Result<Options, String> {
        parsed_suite(line).map(|(_, options)| options)
    }

    #[test]
    fn the_definition_is_consistent() {
        <Args as clap::Args>::augment_args(clap::Command::new("bench")).debug_assert();
    }

    #[test]
    fn reads_every_option() {
        let o = parse(
            "--rounds 7 --secs=0.5 --only stream/64,rtt --peers zmq,ucx --poll spin --cc default \
             --paths 8 --pin none --quiet-wait 3 --json - --svg a.svg --save d --list",
        )
        .unwrap();
        assert_eq!((o.rounds, o.window, o.paths), (7, Duration::from_millis(500), 8));
        assert_eq!(o.peers, PeerChoice::List(vec![Subject::Zmq, Subject::Ucx]));
        assert_eq!((o.poll, o.cc.clone(), o.pin), (Wait::Spin, Congestion::System, None));
        assert!(o.wants("stream/64") && o.wants("rtt-spin/64") && !o.wants("stream/1024"));
        assert!(o.list && o.json.is_some() && o.svg.is_some() && o.save.is_some());
        assert_eq!(parse("--cc cubic").unwrap().cc, Congestion::Named("cubic".into()));
    }

    #[test]
    fn options_without_a_meaning_are_refused() {
        let error = of("roce --paths 8").unwrap_err();
        assert!(error.contains("--paths"), "{error}");
        assert!(of("rds --paths 8").is_ok());
        let options = of("roce --mtu=1024 --loss 0.1%").unwrap();
        assert_eq!((options.mtu, options.drop_one_in), (Some(1024), 1000));
        assert!(of("rds --mtu=1024").is_err());
        for words in ["--mtu 1500", "--loss 0", "--loss 51", "--loss x"] {
            let error = of(&format!("roce {words}")).unwrap_err();
            assert!(error.contains(words.split(' ').next().unwrap()), "{error}");
        }
    }

    #[test]
    fn quick_is_one_round_without_peers_unless_asked_otherwise() {
        let o = parse("--quick").unwrap();
        assert!(o.quick && o.rounds == 1 && o.peers == PeerChoice::List(Vec::new()));
        assert_eq!(parse("--rounds 3 --quick").unwrap().rounds, 3);
    }

    #[test]
    fn doors_are_a_suite_of_their_own_behind_an_option() {
        let (suite, options) =
            parsed_suite("rnbd --clients 1,4 --doors --busy=0,4 --size 256m").unwrap();
        assert_eq!(suite, Suite::Doors);
        assert_eq!((&options.clients[..], &options.busy[..]), (&[1, 4][..], &[0, 4][..]));
        assert_eq!((options.window, options.disk), (Duration::from_secs(2), 256 << 20));
        assert_eq!(of("rnbd --doors").unwrap().disk, 1 << 30);
        assert_eq!((size("2G"), size("64").is_err()), (Ok(2 << 30), true));
        assert!(parsed_suite("doors").is_err(), "there is one way to ask for them");
        let wrong =
            ["rds --doors", "rnbd --doors --clients 0", "rnbd --doors --pin none", "rnbd --busy 4"];
        for line in wrong {
            assert!(of(line).is_err(), "{line}");
        }
    }

    #[test]
    fn every_suite_has_its_own_peers() {
        let chosen = of("rnbd --peers nbdkit,tgt").unwrap().peers;
        assert_eq!(chosen, PeerChoice::List(vec![Subject::Nbdkit, Subject::Tgt]));
        assert!(of("rnbd --doors --peers tgt").unwrap_err().contains("auto, none, nbdkit"));
        assert!(of("rtrs --peers tgt").unwrap_err().contains("auto, none, nbdkit"));
        assert!(of("rds --peers nbdkit").is_err() && of("roce --peers none").is_err());
        assert_eq!(of("rtrs --quick").unwrap().peers, PeerChoice::List(vec![Subject::Nbdkit]));
    }

    #[test]
    fn says_what_is_wrong() {
        for line in [
            "--rounds 0",
            "--rounds",
            "--secs x",
            "--peers kafka",
            "--peers tcpb",
            "--poll wait",
            "--paths 9",
            "--pin 0",
            "--pin 0,99999",
            "--frobnicate",
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(line.split(' ').next().unwrap()), "{line}: {error}");
        }
    }
}
