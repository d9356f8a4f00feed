//! The command line of `bowline bench net`.

use std::path::PathBuf;
use std::time::Duration;

use bowline_roce::Congestion;

use super::plan::{Beside, CLIENTS, LINKS, MTUS, USUAL_LINK, WORKS, Work};
use crate::args::{bad, each_option, number, seconds};

/// Help text.
pub(crate) const HELP: &str = "\
bowline bench net: measures bowline over a network with slow ports and small buffers, beside
bare TCP and nbdkit

Usage: bowline bench net [OPTIONS]

Needs root: it makes a server, a router and clients out of network namespaces, which are gone
when it ends, however it ends. Without root every cell is skipped. Nothing outside is touched.

  --full              all links, MTUs and numbers of clients, everything beside a TCP flow, too,
                      and writes of 4 KiB beside busy loops: about an hour a round
  --rounds N          rounds, each of which measures everything once (default 3)
  --secs S            length of a window in seconds (default 2); a warm-up of a second goes before
  --minutes M         ends after M minutes, between two measurements (default 10; with --full 180)
  --link LIST         some of 200m-128k, 1g-256k, 1g-64k: bits per second and bytes that a port of
                      the router queues (default 1g-256k)
  --mtu LIST          some of 1500, 9000 (default 1500)
  --clients LIST      some of 1, 2, 4 (default 1)
  --beside LIST       load during the measurement, some of nothing, tcp, busy (default: all of them for
                      writes of 4 KiB, tcp for RDMA WRITE of 1 MiB, nothing and busy for fio); busy
                      are two loops that never sleep, beside fio four
  --only WORK[,WORK]  only what begins so: rdma-write, rdma-read, rnbd-write, rnbd-read, rds; or in
                      full: rnbd-write/4096x32. Only when they are named: door-nbd and door-fuse, fio on
                      the NBD socket and on the file of a mapped disk, needs fio
  --cc NAME           congestion control of TCP, nbdkit and RDS (default cubic)
  --congestion HOW    what limits the packets of RDMA and RNBD in flight: auto, delay, fixed:PACKETS
                      or, for comparison, cubic, swift (default auto)
  --json FILE         write every raw measurement to FILE (- for standard output)
  --list              print the names of the cells and end

What is measured in turn in a round, everybody for a window of its own in a network of its own:
RDMA and RDS beside bare TCP, RNBD disks (the library's figures) and fio on doors of disks beside nbdkit
(skipped where it is not installed).

Exit status: 0 every figure that must be reached is, 1 one is not, 3 some could not be decided,
2 the command line or the machine is not right.
";

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

impl Options {
    fn defaults(full: bool) -> Self {
        let minutes = if full { 180 } else { 10 };
        Self {
            rounds: 3,
            warm: Duration::from_secs(1),
            window: Duration::from_secs(2),
            limit: Duration::from_secs(60 * minutes),
            links: if full { LINKS.iter().map(|l| l.name).collect() } else { vec![USUAL_LINK] },
            mtus: if full { MTUS.to_vec() } else { vec![MTUS[0]] },
            clients: if full { CLIENTS.to_vec() } else { vec![CLIENTS[0]] },
            beside: None,
            only: Vec::new(),
            cc: "cubic".into(),
            congestion: Congestion::default(),
            json: None,
            list: false,
            full,
        }
    }

    /// Reads the arguments after `net`.
    ///
    /// # Errors
    /// Says which argument is wrong.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self::defaults(args.iter().any(|word| word == "--full"));
        each_option(args, |word, name, value| {
            match name {
                "--full" => {}
                "--list" => options.list = true,
                "--rounds" => options.rounds = number(name, &value()?, 1, 100)? as u32,
                "--secs" => options.window = seconds(name, &value()?, 0.05, 60.0)?,
                "--minutes" => {
                    let minutes = number(name, &value()?, 1, 24 * 60)?;
                    options.limit = Duration::from_secs(60 * minutes);
                }
                "--link" => {
                    let known = LINKS.each_ref().map(|link| (link.name, link.name));
                    options.links = some(name, &value()?, &known)?;
                }
                "--mtu" => options.mtus = some(name, &value()?, &[("1500", 1500), ("9000", 9000)])?,
                "--clients" => {
                    options.clients = some(name, &value()?, &[("1", 1), ("2", 2), ("4", 4)])?;
                }
                "--beside" => {
                    let known = Beside::ALL.map(|beside| (beside.name(), beside));
                    options.beside = Some(some(name, &value()?, &known)?);
                }
                "--only" => options.only.extend(value()?.split(',').map(str::to_owned)),
                "--cc" => options.cc = value()?,
                "--congestion" => {
                    let text = value()?;
                    options.congestion = text.parse().map_err(|known| bad(name, &text, known))?;
                }
                "--json" => options.json = Some(value()?.into()),
                _ => {
                    return Err(format!("unknown option {word}; see bowline bench net --help"));
                }
            }
            Ok(())
        })?;
        match WORKS.iter().any(|work| options.wants(work)) {
            true => Ok(options),
            false => {
                let works = WORKS.map(|work| work.name).join(", ");
                Err(format!("--only {}: there are {works}", options.only.join(",")))
            }
        }
    }

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

/// Reads a list of some of the words that there are.
fn some<T: Copy>(name: &str, value: &str, known: &[(&str, T)]) -> Result<Vec<T>, String> {
    let find = |word: &str| known.iter().find(|(known, _)| *known == word).map(|(_, it)| *it);
    value.split(',').map(find).collect::<Option<Vec<T>>>().ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        bad(name, value, &format!("some of {}", names.join(",")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words)
    }

    #[test]
    fn a_full_run_has_more_time_and_single_options_win() {
        let full = parse("--mtu 9000 --full").unwrap();
        assert_eq!((full.mtus, full.clients), (vec![9000], vec![1, 2, 4]));
        assert!(full.limit > parse("").unwrap().limit);
        let beside = parse("--beside=busy,tcp").unwrap().beside;
        assert_eq!(beside, Some(vec![Beside::Busy, Beside::Tcp]));
        assert_eq!(parse("--congestion swift").unwrap().congestion, Congestion::Swift);
    }

    #[test]
    fn says_what_is_wrong() {
        for (line, expected) in [
            ("--link 10g", "some of 200m-128k,1g-256k,1g-64k"),
            ("--mtu 4096", "some of 1500,9000"),
            ("--clients 3", "some of 1,2,4"),
            ("--beside udp", "some of nothing,tcp,busy"),
            ("--only rdma-send", "rdma-write/1048576"),
            ("--congestion reno", "auto, delay, cubic, swift"),
            ("--rounds 0", "a number from 1"),
            ("--frobnicate", "bench net --help"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
