//! `bowline probe`: asks a peer what the specifications say it does; `bowline-probe` has the rules.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use bowline_node::{
    Failure, Outcome,
    rdma_device::{Purpose, not_opened, soft_config},
    values::{Address, Family, address, joined, route_to, some_time},
};
use bowline_probe::{Error, Finding, Options, Other, Part, Profile, Report, ask_rds, ask_rtrs};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use clap::builder::PossibleValue;
use serde_json::{Value, json};

/// A wait for a peer from which on the user is to know of it.
const NOTED_WAIT: Duration = Duration::from_secs(1);

/// Ask a peer what the specifications say it does, and show where it does otherwise.
///
/// The peer may be a kernel, bowline or any other: only its address is needed. It sees some
/// connections, and messages to ports that no program should have; a disk is opened only where
/// --disk names one, and never written.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 the peer keeps every rule, 1 it does not or cannot be reached, 2 usage."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    protocol: Protocol,
}

#[derive(Debug, clap::Subcommand)]
enum Protocol {
    /// RDS over TCP
    Rds(Common),
    /// What an RTRS server answers to requests to connect
    Cm(Common),
    /// RTRS: paths, heartbeats, requests
    Rtrs(Common),
    /// RNBD: sessions and disks
    Rnbd {
        /// A disk of the server that may be opened, and read from
        #[arg(long, value_name = "NAME")]
        disk: Option<String>,
        #[command(flatten)]
        common: Common,
    },
}

/// Options of every protocol.
#[derive(Debug, clap::Args)]
struct Common {
    /// Whose behaviour is expected where implementations differ; without it, what the peer shows to
    /// be when it is connected to
    #[arg(long, value_name = "PROFILE")]
    profile: Option<Expected>,
    /// Local address that no other program uses for this protocol; without it, the one that the
    /// route has. Of RDS, a second one on the other side of the peer's in numerical order shows how
    /// the peer connects
    #[arg(short = 'I', long = "address", value_name = "ADDRESS")]
    local: Vec<String>,
    /// Longest wait for one answer
    #[arg(short = 'W', long, value_name = "TIME", default_value = "2", value_parser = some_time)]
    timeout: Duration,
    /// Ask this rule only; may be repeated
    #[arg(long = "rule", value_name = "RULE")]
    rules: Vec<String>,
    /// Write captures of what the peer does otherwise into this folder: of RDS a file for each
    /// rule, else one of all packets
    #[arg(long, value_name = "DIR")]
    capture: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Address of the peer, or host name
    peer: String,
}

/// A profile on the command line.
#[derive(Clone, Copy, Debug)]
struct Expected(Profile);

impl clap::ValueEnum for Expected {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [Expected; 3] =
            [Expected(Profile::Linux612), Expected(Profile::Linux72), Expected(Profile::Bowline)];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    match &args.protocol {
        Protocol::Rds(common) => {
            let (peer, locals) = common.addresses()?;
            let locals: Vec<IpAddr> = locals.iter().map(|local| local.ip).collect();
            let ask = || ask_rds(peer.ip, &locals, &common.options());
            let report = noted(&common.peer, ask).map_err(failure)?;
            common.print("RDS over TCP", &report)
        }
        Protocol::Cm(common) => common.over_rdma(Part::Connections, None),
        Protocol::Rtrs(common) => common.over_rdma(Part::Paths, None),
        Protocol::Rnbd { disk, common } => common.over_rdma(Part::Disks, disk.as_deref()),
    }
}

/// A rule that does not exist is a mistake of the command line.
fn failure(error: Error) -> Failure {
    match error {
        Error::NoRule(..) => Failure::usage(error.to_string()),
        _ => Failure::failed(error.to_string()),
    }
}

/// Asks a peer; says so where that takes its time.
fn noted<T>(peer: &str, ask: impl FnOnce() -> T) -> T {
    let (answered, answer) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if answer.recv_timeout(NOTED_WAIT) == Err(RecvTimeoutError::Timeout) {
                note!("waiting for {peer}; the findings follow when all is asked");
            }
        });
        let found = ask();
        drop(answered);
        found
    })
}

impl Common {
    fn options(&self) -> Options {
        Options {
            profile: self.profile.map(|profile| profile.0),
            patience: self.timeout,
            rules: self.rules.clone(),
            capture: self.capture.clone(),
        }
    }

    /// Returns the peer's address and the local ones, and makes the folder of captures.
    fn addresses(&self) -> Outcome<(Address, Vec<Address>)> {
        let mut peer = address(&self.peer, Family::Any)?;
        let given = self.local.iter().map(|local| address(local, Family::Any));
        let mut locals = given.collect::<Outcome<Vec<_>>>()?;
        if locals.is_empty() {
            locals.push(route_to(peer)?);
        }
        for local in &mut locals {
            joined(local, &mut peer)?;
            if local.ip == peer.ip {
                return Err(Failure::usage(format!(
                    "{peer} is the local address, too: give another one with -I"
                )));
            }
            if local.ip.is_ipv4() != peer.ip.is_ipv4() {
                return Err(Failure::usage(format!(
                    "{local} and {peer} are of different address families"
                )));
            }
        }
        if let Some(folder) = &self.capture {
            std::fs::create_dir_all(folder)
                .map_err(|error| Failure::failed(format!("{}: {error}", folder.display())))?;
        }
        Ok((peer, locals))
    }

    /// Asks an RTRS server, from a soft device at the local address.
    fn over_rdma(&self, part: Part, disk: Option<&str>) -> Outcome {
        let name = match part {
            Part::Connections => "cm",
            Part::Paths => "rtrs",
            Part::Disks => "rnbd",
        };
        let (peer, locals) = self.addresses()?;
        let [local] = locals.as_slice() else {
            return Err(Failure::usage("-I more than once is for rds"));
        };
        let capture = self.capture.as_ref().map(|folder| folder.join(format!("{name}.pcapng")));
        let config = SoftConfig { capture: capture.clone(), ..soft_config(&locals) };
        let device = SoftDevice::open(config)
            .map_err(|error| not_opened(&locals, Purpose::Connections, error))?;
        let device = Arc::new(device);
        let ask = || ask_rtrs(device, local.ip, peer.ip, part, disk, &self.options());
        let asked = noted(&self.peer, ask);
        let agrees = asked.as_ref().is_ok_and(|report| report.findings.iter().all(is_kept));
        if let Some(path) = capture.filter(|_| agrees) {
            remove(&path)?;
        }
        self.print(&name.to_uppercase(), &asked.map_err(failure)?)
    }

    /// Prints all findings and a summary; fails if the peer does otherwise anywhere.
    fn print(&self, protocol: &str, report: &Report) -> Outcome {
        let Report { profile, findings, .. } = report;
        let count = |wanted| findings.iter().filter(|finding| verdict(finding).0 == wanted).count();
        let [agrees, deviates, skipped] = ["agrees", "deviates", "skipped"].map(count);
        if self.json {
            let rules: Vec<Value> = findings.iter().map(object).collect();
            let summary = json!({
                "protocol": protocol,
                "peer": self.peer,
                "profile": profile.name(),
                "agrees": agrees,
                "deviates": deviates,
                "skipped": skipped,
                "rules": rules,
            });
            say!("{summary}");
        } else {
            findings.iter().for_each(line);
            say_of_peer!(
                "{}, {protocol}, as {}: {agrees} rules kept, {deviates} not, {skipped} not asked",
                self.peer,
                profile.name()
            );
        }
        if deviates > 0 { Err(Failure::Reported) } else { Ok(()) }
    }
}

/// A capture that shows nothing.
fn remove(path: &Path) -> Outcome {
    std::fs::remove_file(path)
        .map_err(|error| Failure::failed(format!("{}: {error}", path.display())))
}

fn is_kept(finding: &Finding) -> bool {
    !matches!(finding.answer, Err(Other::Deviates(_)))
}

fn verdict(finding: &Finding) -> (&'static str, &str) {
    match &finding.answer {
        Ok(came) => ("agrees", came),
        Err(Other::Deviates(came)) => ("deviates", came),
        Err(Other::Skipped(why)) => ("skipped", why),
    }
}

fn object(finding: &Finding) -> Value {
    let (verdict, came) = verdict(finding);
    json!({
        "rule": finding.id,
        "verdict": verdict,
        "asked": finding.asked,
        "expected": finding.expected,
        "came": came,
    })
}

/// One line for what agrees, three for what does not.
fn line(finding: &Finding) {
    let Finding { id, asked, expected, .. } = finding;
    match verdict(finding) {
        ("agrees", came) => say_of_peer!("{id:<14} agrees    {asked}: {came}"),
        ("skipped", why) => say_of_peer!("{id:<14} skipped   {asked}: {why}"),
        (_, came) => {
            say!("{id:<14} DEVIATES  {asked}");
            say!("{:<14} expected  {expected}", "");
            say_of_peer!("{:<14} came      {came}", "");
        }
    }
}
