//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use crate::cell::{Subject, Wait};
use crate::peers::PEERS;
use crate::sys;

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

    /// Finds a suite by what a command line begins with. Returns it and the arguments after that.
    pub(crate) fn from_command(name: &str, args: &[String]) -> Option<(Self, Vec<String>)> {
        let suite = Self::parse(name).filter(|suite| *suite != Self::Doors)?;
        let is_doors = |word: &String| suite == Self::Rnbd && word == "--doors";
        let rest = args.iter().filter(|word| !is_doors(word)).cloned().collect();
        Some((if args.iter().any(is_doors) { Self::Doors } else { suite }, rest))
    }

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

    /// Help text.
    pub(crate) const fn help(self) -> &'static str {
        match self {
            Self::Rds => HELP_RDS,
            Self::Roce => HELP_ROCE,
            Self::Rtrs => HELP_RTRS,
            Self::Rnbd => HELP_RNBD,
            Self::Doors => HELP_DOORS,
        }
    }
}

/// Help text of the command.
pub(crate) const HELP: &str = "\
bowline bench: measures this machine and checks its targets

Usage: bowline bench SUITE [OPTIONS]
       bowline bench report [OPTIONS]

  rds     RDS beside bare sockets and other message libraries
  roce    RDMA verbs over RoCEv2 in user space beside bare sockets
  rtrs    RTRS over it beside bare sockets and nbdkit
  rnbd    network block devices over that beside nbdkit, qemu-nbd and tgtd
  net     all of these over a network with slow ports and small buffers, beside bare TCP and
          nbdkit; needs root

  report  measures nothing: writes the tables of bench/README.md and bench/TARGETS.md out of the
          recorded runs in bench/results, and draws a recorded run as a page of plots

See bowline bench SUITE --help and bowline bench report --help.
";

const HELP_RDS: &str = "\
bowline bench rds: measures bowline beside bare sockets and other message libraries, in one run

Usage: bowline bench rds [OPTIONS]

  --quick             1 round, 3 sizes, no library peers; below 30 seconds
  --rounds N          rounds, each of which measures everything once (default 5)
  --secs S            length of a window in seconds (default 0.25)
  --only CELL[,CELL]  only cells whose names begin with: stream, many, rtt-spin, rtt-sleep, paths,
                      slow, cc, sockets, nodes, idle, host, rdma; or in full:
                      stream/64
  --peers LIST        auto (default), none, or some of zmq,nanomsg,ofi-net,ofi-rxm,ucx
  --poll MODE         how bowline's threads wait in streams: adaptive (default), spin, sleep
  --cc NAME           congestion control of anchors and bowline: default (the system's), cubic, reno;
                      without it bowline chooses, and the anchors use what it chooses here
  --paths N           RDS paths per connection, 1 or 8 (default: bowline's)
  --pin RX,TX         CPUs of receiver and sender, or none (default: the first two allowed)
  --host              measure programs on plain RDS sockets, too: on nodes of this host beside
                      nodes of their own, unix sockets, a futex, TCP from Python, and a pipe with
                      and without the preloaded library
  --rdma              measure RDS over RDMA, too, on soft devices: messages and round trips beside
                      the same over TCP, remote writes beside those of bare verbs
  --size SIZE         bytes of each disk, such as 256m (default 1g)
  --quiet-wait S      before each measurement, wait up to S seconds for a quiet machine
  --json FILE         write every raw measurement to FILE (- for standard output)
  --svg FILE          write a page of plots to FILE
  --save DIR          write every raw measurement into DIR, in a file named by date and commit
  --list              print the names of all cells and end

Exit status: 0 all required targets are met, 1 one is not, 3 some are undecided, 2 usage, or the
machine is not suitable.
";

const HELP_ROCE: &str = "\
bowline bench roce: measures RDMA over RoCEv2 in userspace beside bare sockets, in one run

Usage: bowline bench roce [OPTIONS]

  --quick             1 round, the cells of the targets only; below 30 seconds
  --rounds N          rounds, each of which measures everything once (default 5)
  --secs S            length of a window in seconds (default 0.25)
  --only CELL[,CELL]  only cells whose names begin with: bulk, send, ping, loss, write, atomic;
                      or in full: bulk/4096
  --mtu BYTES         path MTU of all cells: 256, 512, 1024, 2048 or 4096 (default: 4096, and
                      1024 in a cell of its own); targets are not judged then
  --loss PERCENT      each side drops this share of the packets it receives, at random, in
                      all cells; targets are not judged then
  --poll MODE         how bowline's threads wait in streams: adaptive (default), spin, sleep
  --cc NAME           congestion control of the TCP anchor: default (the system's), cubic, reno;
                      without it cubic where the kernel has it
  --pin RX,TX         CPUs of receiver and sender, or none (default: the first two allowed)
  --quiet-wait S      before each measurement, wait up to S seconds for a quiet machine
  --json FILE         write every raw measurement to FILE (- for standard output)
  --svg FILE          write a page of plots to FILE
  --save DIR          write every raw measurement into DIR, in a file named by date, commit
                      and suite
  --list              print the names of all cells and end

Exit status: 0 all required targets are met, 1 one is not, 3 some are undecided, 2 usage, or the
machine is not suitable.
";

const HELP_RTRS: &str = "\
bowline bench rtrs: measures reads and writes of memory over RTRS beside bare sockets and
nbdkit, in one run

Usage: bowline bench rtrs [OPTIONS]

  --quick             1 round, the cells of most targets only, of the peers nbdkit; below 30 seconds
  --rounds N          rounds, each of which measures everything once (default 5)
  --secs S            length of a window in seconds (default 0.25)
  --only CELL[,CELL]  only cells whose names begin with: read, write, ping-spin, ping-sleep, failover;
                      or in full: read/4096x32
  --peers LIST        auto (default), none, or nbdkit
  --pin RX,TX         CPUs of receiver and sender, or none (default: the first two allowed)
  --quiet-wait S      before each measurement, wait up to S seconds for a quiet machine
  --json FILE         write every raw measurement to FILE (- for standard output)
  --svg FILE          write a page of plots to FILE
  --save DIR          write every raw measurement into DIR, in a file named by date, commit
                      and suite
  --list              print the names of all cells and end

Other servers are measured if they are installed, with the processor time of their processes;
nbdkit and qemu-nbd with a client of this program.

Exit status: 0 all required targets are met, 1 one is not, 3 some are undecided, 2 usage, or the
machine is not suitable.
";

const HELP_RNBD: &str = "\
bowline bench rnbd: measures a disk mapped over RNBD beside RTRS alone, nbdkit, qemu-nbd
and tgtd, in one run: through the library, which is faster than what other programs see

Usage: bowline bench rnbd [OPTIONS]
       bowline bench rnbd --doors [OPTIONS]

  --doors             measures fio on the NBD socket and the file (FUSE) of a mapped disk instead, see
                      bowline bench rnbd --doors --help
  --quick             1 round, the cells of the targets only, of the peers nbdkit; below 30 seconds
  --rounds N          rounds, each of which measures everything once (default 5)
  --secs S            length of a window in seconds (default 0.25)
  --only CELL[,CELL]  only cells whose names begin with: read, write, ping-spin, ping-sleep,
                      door-write; or in full: read/4096x32
  --peers LIST        auto (default), none, or some of nbdkit,qemu-nbd,tgt
  --pin RX,TX         CPUs of receiver and sender, or none (default: the first two allowed)
  --quiet-wait S      before each measurement, wait up to S seconds for a quiet machine
  --json FILE         write every raw measurement to FILE (- for standard output)
  --svg FILE          write a page of plots to FILE
  --save DIR          write every raw measurement into DIR, in a file named by date, commit
                      and suite
  --list              print the names of all cells and end

Other servers are measured if they are installed, with the processor time of their processes;
nbdkit and qemu-nbd with a client of this program, tgtd with iscsi-perf.

Exit status: 0 all required targets are met, 1 one is not, 3 some are undecided, 2 usage, or the
machine is not suitable.
";

const HELP_DOORS: &str = "\
bowline bench rnbd --doors: measures fio on the doors of a mapped disk (its NBD socket, its file by
FUSE, the same by io_uring), beside the same fio on nbdkit, nbdfuse and qemu-nbd over TCP

Usage: bowline bench rnbd --doors [OPTIONS]

  --quick             1 round, windows of half a second, of the peers nbdkit; below 30 seconds
  --rounds N          rounds, each of which measures everything once (default 5)
  --secs S            how long an fio asks, in seconds (default 2)
  --only CELL[,CELL]  only cells whose names begin so, as doors/read/4096x32
  --peers LIST        auto (default), none, or some of nbdkit,nbdfuse,qemu-nbd
  --clients LIST      processes of fio that ask at a time, such as 1,4 (default 1)
  --busy LIST         loops that never sleep beside them, such as 0,4 (default 0)
  --quiet-wait S      before each measurement, wait up to S seconds for a quiet machine
  --json FILE         write every raw measurement to FILE (- for standard output)
  --svg FILE          write a page of plots to FILE
  --save DIR          write every raw measurement into DIR, in a file named by date and commit
  --list              print the names of all cells and end

Random reads and writes of 4 KiB, 1 and 32 outstanding, and of 128 KiB, 16 outstanding. Everything
runs on this machine as everybody starts it: `bowline rnbd export --memory`, `bowline rnbd map`,
nbdkit with its plugin memory, qemu-nbd with a file in memory. Ratios are to nbdkit in the same
round. What is not installed is skipped, and the output says which package has it. io_uring needs
root and Linux 6.14.

Exit status: 0 all required targets are met, 1 one is not, 3 some are undecided, 2 usage, or the
machine is not suitable.
";

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

    /// Reads the arguments after the name of a suite.
    ///
    /// # Errors
    ///
    /// Says which argument is wrong.
    pub(crate) fn parse(suite: Suite, args: &[String]) -> Result<Self, String> {
        let (rds, roce, doors) = (suite == Suite::Rds, suite == Suite::Roce, suite == Suite::Doors);
        let mut options = Self::defaults();
        if doors {
            options.window = Duration::from_secs(2);
        }
        each_option(args, |word, name, value| {
            match name {
                "--quick" => {
                    options.quick = true;
                    options.rounds = 1;
                    let block = matches!(suite, Suite::Rtrs | Suite::Rnbd | Suite::Doors);
                    if doors {
                        options.window = Duration::from_millis(500);
                    }
                    let peers = if block { vec![Subject::Nbdkit] } else { Vec::new() };
                    options.peers = PeerChoice::List(peers);
                }
                "--list" => options.list = true,
                "--host" if rds => options.host = true,
                "--rdma" if rds => options.rdma = true,
                "--rounds" => options.rounds = number(name, &value()?, 1, 100)? as u32,
                "--secs" => options.window = seconds(name, &value()?, 0.05, 60.0)?,
                "--only" => {
                    options.only.extend(value()?.split(',').map(str::to_owned));
                }
                "--peers" if !roce => options.peers = peers(suite, &value()?)?,
                "--poll" if rds || roce => {
                    let value = value()?;
                    options.poll = Wait::parse(&value)
                        .ok_or_else(|| bad(name, &value, "adaptive, spin, sleep"))?;
                }
                "--cc" if rds || roce => {
                    options.cc = match value()?.as_str() {
                        "default" => Congestion::System,
                        other => Congestion::Named(other.to_owned()),
                    };
                }
                "--paths" if rds => options.paths = paths(&value()?)?,
                "--mtu" if roce => options.mtu = Some(mtu(&value()?)?),
                "--loss" if roce => options.drop_one_in = loss(&value()?)?,
                "--clients" if doors => options.clients = counts(name, &value()?, 1, 16)?,
                "--busy" if doors => options.busy = counts(name, &value()?, 0, 64)?,
                "--size" if doors => options.disk = size(name, &value()?)?,
                "--pin" if !doors => options.pin = pin(&value()?)?,
                "--quiet-wait" => options.quiet_wait = seconds(name, &value()?, 0.0, 600.0)?,
                "--json" => options.json = Some(value()?.into()),
                "--svg" => options.svg = Some(value()?.into()),
                "--save" => options.save = Some(value()?.into()),
                _ => {
                    let suite = if doors { "rnbd --doors" } else { suite.name() };
                    return Err(format!("unknown option {word}; see bowline bench {suite} --help"));
                }
            }
            Ok(())
        })?;
        Ok(options)
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

/// Reads the value of an argument.
type Value<'a> = dyn FnMut() -> Result<String, String> + 'a;

/// Hands each argument to `take`: as it is, its name, and what reads its value, which follows `=`
/// or is the next argument.
pub(crate) fn each_option(
    args: &[String],
    mut take: impl FnMut(&str, &str, &mut Value<'_>) -> Result<(), String>,
) -> Result<(), String> {
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let (name, inline) = match word.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
            _ => (word.as_str(), None),
        };
        let mut value = || {
            let next = inline.clone().or_else(|| words.next().cloned());
            next.ok_or_else(|| format!("{name} needs a value"))
        };
        take(word, name, &mut value)?;
    }
    Ok(())
}

pub(crate) fn bad(name: &str, value: &str, expected: &str) -> String {
    format!("{name} {value}: expected {expected}")
}

pub(crate) fn number(name: &str, value: &str, min: u64, max: u64) -> Result<u64, String> {
    let number = value.parse().ok().filter(|n| (min..=max).contains(n));
    number.ok_or_else(|| bad(name, value, &format!("a number from {min} to {max}")))
}

/// Reads a number of bytes.
fn size(name: &str, value: &str) -> Result<u64, String> {
    let (digits, unit) = match value.strip_suffix(['g', 'G']) {
        Some(digits) => (digits, 1 << 30),
        None => (value.strip_suffix(['m', 'M']).unwrap_or_default(), 1 << 20),
    };
    let bytes = digits.parse().ok().and_then(|n: u64| n.checked_mul(unit));
    bytes
        .filter(|bytes| (1 << 20..=1 << 40).contains(bytes))
        .ok_or_else(|| bad(name, value, "a size such as 256m or 1g"))
}

/// Reads a list of numbers.
fn counts(name: &str, value: &str, min: u64, max: u64) -> Result<Vec<usize>, String> {
    value.split(',').map(|word| Ok(number(name, word, min, max)? as usize)).collect()
}

pub(crate) fn seconds(name: &str, value: &str, min: f64, max: f64) -> Result<Duration, String> {
    let seconds = value.parse::<f64>().ok().filter(|s| (min..=max).contains(s));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| bad(name, value, &format!("seconds from {min} to {max}")))
}

fn paths(value: &str) -> Result<usize, String> {
    match value {
        "1" => Ok(1),
        "8" => Ok(8),
        other => Err(bad("--paths", other, "1 or 8")),
    }
}

fn mtu(value: &str) -> Result<usize, String> {
    let known = [256, 512, 1024, 2048, 4096];
    let mtu = value.parse().ok().filter(|mtu| known.contains(mtu));
    mtu.ok_or_else(|| bad("--mtu", value, "256, 512, 1024, 2048 or 4096"))
}

/// Reads a loss in percent; returns in how many packets one is lost.
fn loss(value: &str) -> Result<u32, String> {
    let text = value.strip_suffix('%').unwrap_or(value);
    let percent = text.parse::<f64>().ok().filter(|percent| (0.001..=50.0).contains(percent));
    percent
        .map(|percent| (100.0 / percent).round() as u32)
        .ok_or_else(|| bad("--loss", value, "percent from 0.001 to 50"))
}

fn pin(value: &str) -> Result<Option<(usize, usize)>, String> {
    if value == "none" {
        return Ok(None);
    }
    let allowed = sys::allowed_cpus();
    let cpu = |text: &str| text.parse().ok().filter(|cpu| allowed.contains(cpu));
    value
        .split_once(',')
        .and_then(|(rx, tx)| Some((cpu(rx)?, cpu(tx)?)))
        .map(Some)
        .ok_or_else(|| bad("--pin", value, &format!("none, or two of the CPUs {allowed:?}")))
}

fn peers(suite: Suite, value: &str) -> Result<PeerChoice, String> {
    let known = || PEERS.into_iter().filter(|peer| suite.has_peer(*peer));
    match value {
        "auto" => Ok(PeerChoice::Auto),
        "none" => Ok(PeerChoice::List(Vec::new())),
        list => list
            .split(',')
            .map(|name| known().find(|peer| peer.name() == name))
            .collect::<Option<Vec<_>>>()
            .map(PeerChoice::List)
            .ok_or_else(|| {
                let names: Vec<&str> = known().map(Subject::name).collect();
                bad("--peers", list, &format!("auto, none, {}", names.join(",")))
            }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(Suite::Rds, &words)
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
        let words = ["--paths".to_owned(), "8".to_owned()];
        let error = Options::parse(Suite::Roce, &words).unwrap_err();
        assert!(error.contains("--paths") && error.contains("bench roce --help"), "{error}");
        assert!(Options::parse(Suite::Rds, &words).is_ok());
        let words = ["--mtu=1024", "--loss", "0.1%"].map(str::to_owned);
        let options = Options::parse(Suite::Roce, &words).unwrap();
        assert_eq!((options.mtu, options.drop_one_in), (Some(1024), 1000));
        assert!(Options::parse(Suite::Rds, &words).is_err());
        for words in [["--mtu", "1500"], ["--loss", "0"], ["--loss", "51"], ["--loss", "x"]] {
            let error = Options::parse(Suite::Roce, &words.map(str::to_owned)).unwrap_err();
            assert!(error.contains(words[0]) && error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn quick_is_one_round_without_peers_unless_asked_otherwise() {
        let o = parse("--quick").unwrap();
        assert!(o.quick && o.rounds == 1 && o.peers == PeerChoice::List(Vec::new()));
        assert_eq!(parse("--quick --rounds 3").unwrap().rounds, 3);
    }

    #[test]
    fn doors_are_a_suite_of_their_own_behind_an_option() {
        let of = |line: &str| {
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            Suite::from_command(&words[0], &words[1..])
        };
        let (suite, rest) = of("rnbd --clients 1,4 --doors --busy=0,4").unwrap();
        assert_eq!((suite, rest.len()), (Suite::Doors, 3));
        let options = Options::parse(suite, &rest).unwrap();
        assert_eq!((&options.clients[..], &options.busy[..]), (&[1, 4][..], &[0, 4][..]));
        assert_eq!((options.window, options.disk), (Duration::from_secs(2), 1 << 30));
        for (text, bytes) in [("256m", Ok(256 << 20)), ("2G", Ok(2 << 30)), ("64", Err(()))] {
            let words = ["--size", text].map(str::to_owned);
            let read = Options::parse(Suite::Doors, &words).map(|options| options.disk);
            assert_eq!(read.map_err(drop), bytes, "{text}");
        }
        assert!(of("doors").is_none(), "there is one way to ask for them");
        let (suite, rest) = of("rds --doors").unwrap();
        assert!(Options::parse(suite, &rest).unwrap_err().contains("unknown option --doors"));
        for line in ["rnbd --doors --clients 0", "rnbd --doors --pin none", "rnbd --busy 4"] {
            let (suite, rest) = of(line).unwrap();
            assert!(Options::parse(suite, &rest).is_err(), "{line}");
        }
    }

    #[test]
    fn every_suite_has_its_own_peers() {
        let parse =
            |suite, list: &str| Options::parse(suite, &["--peers", list].map(str::to_owned));
        let chosen = parse(Suite::Rnbd, "nbdkit,tgt").unwrap().peers;
        assert_eq!(chosen, PeerChoice::List(vec![Subject::Nbdkit, Subject::Tgt]));
        assert!(parse(Suite::Rtrs, "tgt").unwrap_err().contains("auto, none, nbdkit"));
        assert!(parse(Suite::Rds, "nbdkit").is_err() && parse(Suite::Roce, "none").is_err());
        let quick = Options::parse(Suite::Rtrs, &["--quick".to_owned()]).unwrap();
        assert_eq!(quick.peers, PeerChoice::List(vec![Subject::Nbdkit]));
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
