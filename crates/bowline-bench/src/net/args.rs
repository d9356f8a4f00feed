//! The command line of `bowline bench net`.

use std::path::PathBuf;
use std::time::Duration;

use bowline_roce::Congestion;

use super::plan::{Beside, CLIENTS, LINKS, MTUS, USUAL_LINK, WORKS, Work};
use crate::args::seconds;

/// All of these over a network with slow ports and small buffers, beside bare TCP and nbdkit.
///
/// Needs root: it makes a server, a router and clients out of network namespaces, which are gone
/// when it ends, however it ends. Without root every cell is skipped. Nothing outside is touched.
///
/// What is measured in turn in a round, everybody for a window of its own in a network of its own:
/// RDMA and RDS beside bare TCP, RNBD disks (the library's figures) and fio on doors of disks
/// beside nbdkit (skipped where it is not installed).
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 every figure that must be reached is, 1 one is not, 3 some could not be decided, \
                  2 the command line or the machine is not right."
)]
pub(crate) struct Args {
    /// All links, MTUs and numbers of clients, everything beside a TCP flow, too, and writes of 4
    /// KiB beside busy loops: about an hour a round
    #[arg(long)]
    full: bool,
    /// Rounds, each of which measures everything once
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Length of a window in seconds; a warm-up of a second goes before
    #[arg(long, value_name = "S", default_value = "2", value_parser = seconds(0.05, 60.0))]
    secs: Duration,
    /// End after M minutes, between two measurements [default: 10; with --full 180]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u64).range(1..=24 * 60))]
    minutes: Option<u64>,
    /// Links: bits per second and bytes that a port of the router queues [default: 1g-256k]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = LINKS.each_ref().map(|link| link.name))]
    link: Vec<String>,
    /// MTUs [default: 1500]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = ["1500", "9000"])]
    mtu: Vec<String>,
    /// Numbers of clients [default: 1]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = ["1", "2", "4"])]
    clients: Vec<String>,
    /// Load during the measurement [default: all of them for writes of 4 KiB, tcp for RDMA WRITE of
    /// 1 MiB, nothing and busy for fio]; busy are two loops that never sleep, beside fio four
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = Beside::ALL.map(Beside::name))]
    beside: Vec<String>,
    /// Only what begins with one of these: rdma-write, rdma-read, rnbd-write, rnbd-read, rds; or in
    /// full: rnbd-write/4096x32. Only when they are named: door-nbd and door-fuse, fio on the NBD
    /// socket and on the file of a mapped disk, needs fio
    #[arg(long, value_name = "WORK", value_delimiter = ',')]
    only: Vec<String>,
    /// Congestion control of TCP, nbdkit and RDS
    #[arg(long, value_name = "NAME", default_value = "cubic")]
    cc: String,
    /// What limits the packets of RDMA and RNBD in flight: auto, delay, fixed:PACKETS or, for
    /// comparison, cubic, swift
    #[arg(long, value_name = "HOW", default_value = "auto")]
    congestion: Congestion,
    /// Write every raw measurement to FILE (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print the names of the cells and end
    #[arg(long)]
    list: bool,
}

/// What the user asked for.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) rounds: u32,
    pub(crate) warm: Duration,
    pub(crate) window: Duration,
    /// After this nothing new is begun.
    pub(crate) limit: Duration,
    pub(crate) links: Vec<&'static str>,
    pub(crate) mtus: Vec<u32>,
    pub(crate) clients: Vec<usize>,
    /// Nothing: what is usual for each work.
    pub(crate) beside: Option<Vec<Beside>>,
    only: Vec<String>,
    pub(crate) cc: String,
    pub(crate) congestion: Congestion,
    pub(crate) json: Option<PathBuf>,
    pub(crate) list: bool,
    full: bool,
}

impl Args {
    /// Returns what is asked for.
    ///
    /// # Errors
    /// There is no such work.
    pub(crate) fn options(self) -> Result<Options, String> {
        let full = self.full;
        let minutes = self.minutes.unwrap_or(if full { 180 } else { 10 });
        let links = LINKS.iter().map(|link| link.name);
        let named = |word: &String| Beside::ALL.into_iter().find(|beside| beside.name() == word);
        let options = Options {
            rounds: self.rounds,
            warm: Duration::from_secs(1),
            window: self.secs,
            limit: Duration::from_secs(60 * minutes),
            links: match &self.link[..] {
                [] if full => links.collect(),
                [] => vec![USUAL_LINK],
                some => links.filter(|link| some.iter().any(|word| word == link)).collect(),
            },
            mtus: match &self.mtu[..] {
                [] if full => MTUS.to_vec(),
                [] => vec![MTUS[0]],
                some => some.iter().filter_map(|word| word.parse().ok()).collect(),
            },
            clients: match &self.clients[..] {
                [] if full => CLIENTS.to_vec(),
                [] => vec![CLIENTS[0]],
                some => some.iter().filter_map(|word| word.parse().ok()).collect(),
            },
            beside: match &self.beside[..] {
                [] => None,
                some => Some(some.iter().filter_map(named).collect()),
            },
            only: self.only,
            cc: self.cc,
            congestion: self.congestion,
            json: self.json,
            list: self.list,
            full,
        };
        match WORKS.iter().any(|work| options.wants(work)) {
            true => Ok(options),
            false => {
                let works = WORKS.map(|work| work.name).join(", ");
                Err(format!("--only {}: there are {works}", options.only.join(",")))
            }
        }
    }
}

impl Options {
    /// Says whether a work is to be measured. What fio does takes long and is asked for by name.
    pub(crate) fn wants(&self, work: &Work) -> bool {
        let named = || self.only.iter().any(|only| work.name.starts_with(only.as_str()));
        if self.only.is_empty() { !work.is_by_fio() } else { named() }
    }

    /// Says whether everything is asked for.
    pub(crate) const fn is_full(&self) -> bool {
        self.full
    }
}

/// Reads a command line after `net`.
#[cfg(test)]
pub(crate) fn parsed(line: &str) -> Result<Options, String> {
    match crate::args::parsed(&format!("net {line}"))? {
        crate::args::Job::Net(options) => Ok(options),
        other => Err(format!("{other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_run_has_more_time_and_single_options_win() {
        let full = parsed("--mtu 9000 --full").unwrap();
        assert_eq!((full.mtus, full.clients), (vec![9000], vec![1, 2, 4]));
        assert!(full.limit > parsed("").unwrap().limit);
        let beside = parsed("--beside=busy,tcp").unwrap().beside;
        assert_eq!(beside, Some(vec![Beside::Busy, Beside::Tcp]));
        assert_eq!(parsed("--congestion swift").unwrap().congestion, Congestion::Swift);
    }

    #[test]
    fn says_what_is_wrong() {
        for (line, expected) in [
            ("--link 10g", "200m-128k, 1g-256k, 1g-64k"),
            ("--mtu 4096", "1500, 9000"),
            ("--clients 3", "1, 2, 4"),
            ("--beside udp", "nothing, tcp, busy"),
            ("--only rdma-send", "rdma-write/1048576"),
            ("--congestion reno", "auto, delay, cubic, swift"),
            ("--rounds 0", "1..=100"),
            ("--frobnicate", "--frobnicate"),
        ] {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
