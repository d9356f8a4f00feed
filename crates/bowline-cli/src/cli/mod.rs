//! Words of the command line, and what they run.
//!
//! ```text
//! argv -> Cli (clap) -> one module per word -> Outcome -> exit status
//! ```
//!
//! Exit status: 0 when the work was done, 1 when it failed, 2 when the command line was wrong
//! (`info` gives 1 for that as well, because `rds-info` does). Results go to standard output;
//! errors and progress go to standard error, an error in one line that says what to do.

use std::{ffi::OsString, path::Path, process::ExitCode};

use bowline_node::{Failure, Outcome, options};
use clap::{CommandFactory, Parser, Subcommand};

mod common;
mod disk;
mod probe;
mod quickstart;
mod rdma;
mod rds;
mod rtrs;
#[cfg(feature = "sim")]
mod sim;
mod tool;

/// RDS, RTRS and RNBD in user space: datagrams and disks by the protocols of the Linux kernel.
#[derive(Debug, Parser)]
#[command(
    name = "bowline",
    version,
    after_help = "Start with `bowline quickstart`. Exit status: 0 done, 1 failed, 2 usage."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Quickstart(quickstart::Args),
    #[command(hide = true)]
    QuickstartPeer(quickstart::PeerArgs),
    Node(Box<options::Args>),
    Run(rds::run::Args),
    #[command(hide = true)]
    RunNode(rds::run::started::Args),
    Info(rds::info::Args),
    Top(rds::top::Args),
    Ping(rds::ping::Args),
    Probe(probe::Args),
    Stress(rds::stress::Args),
    Sysctl(rds::admin::SysctlArgs),
    Drop(rds::admin::DropArgs),
    Send(rds::pipe::SendArgs),
    Recv(rds::pipe::RecvArgs),
    Devices(rdma::DevicesArgs),
    Rping(rdma::RpingArgs),
    Perf(rdma::PerfArgs),
    CmListen(rdma::CmListenArgs),
    Rnbd(Box<disk::Args>),
    Rtrs(rtrs::Args),
    #[command(hide = true)]
    RdmaCore(rdma::OthersArgs),
    #[cfg(feature = "bench")]
    Bench(bowline_bench::Args),
    #[cfg(feature = "sim")]
    Sim(sim::Args),
    #[command(hide = true)]
    Man(common::manual::ManArgs),
    #[command(hide = true)]
    Completions(common::manual::CompletionArgs),
}

impl Command {
    fn word(&self) -> &'static str {
        match self {
            Self::Quickstart(_) => "quickstart",
            Self::QuickstartPeer(_) => "quickstart-peer",
            Self::Node(_) => "node",
            Self::Run(_) => "run",
            Self::RunNode(_) => "run-node",
            Self::Info(_) => "info",
            Self::Top(_) => "top",
            Self::Ping(_) => "ping",
            Self::Probe(_) => "probe",
            Self::Stress(_) => "stress",
            Self::Sysctl(_) => "sysctl",
            Self::Drop(_) => "drop",
            Self::Send(_) => "send",
            Self::Recv(_) => "recv",
            Self::Devices(_) => "devices",
            Self::Rping(_) => "rping",
            Self::Perf(_) => "perf",
            Self::CmListen(_) => "cm-listen",
            Self::Rnbd(_) => "rnbd",
            Self::Rtrs(_) => "rtrs",
            Self::RdmaCore(_) => "rdma-core",
            #[cfg(feature = "bench")]
            Self::Bench(_) => "bench",
            #[cfg(feature = "sim")]
            Self::Sim(_) => "sim",
            Self::Man(_) => "man",
            Self::Completions(_) => "completions",
        }
    }

    fn run(self) -> Outcome {
        match self {
            Self::Quickstart(args) => quickstart::run(&args),
            Self::QuickstartPeer(args) => quickstart::run_peer(&args),
            Self::Node(args) => options::run(*args),
            Self::Run(args) => rds::run::run(&args),
            Self::RunNode(args) => rds::run::started::run(&args),
            Self::Info(args) => rds::info::run(&args),
            Self::Top(args) => rds::top::run(&args),
            Self::Ping(args) => rds::ping::run(&args),
            Self::Probe(args) => probe::run(&args),
            Self::Stress(args) => rds::stress::run(args),
            Self::Sysctl(args) => rds::admin::run_sysctl(&args),
            Self::Drop(args) => rds::admin::run_drop(&args),
            Self::Send(args) => rds::pipe::run_send(&args),
            Self::Recv(args) => rds::pipe::run_recv(&args),
            Self::Devices(args) => rdma::run_devices(&args),
            Self::Rping(args) => rdma::run_rping(&args),
            Self::Perf(args) => rdma::run_perf(&args),
            Self::CmListen(args) => rdma::run_cm_listen(&args),
            Self::Rnbd(args) => disk::run(*args, definition),
            Self::Rtrs(args) => rtrs::run(args, definition),
            Self::RdmaCore(args) => rdma::run_others(&args),
            #[cfg(feature = "bench")]
            Self::Bench(args) => std::process::exit(bowline_bench::run(args)),
            #[cfg(feature = "sim")]
            Self::Sim(args) => sim::run(&args),
            Self::Man(args) => common::manual::run_man(&args, definition()),
            Self::Completions(args) => common::manual::run_completions(&args, definition()),
        }
    }
}

/// Returns the definition of the whole command line, for pages and completions.
pub(crate) fn definition() -> clap::Command {
    Cli::command()
}

/// Runs the command line of this process.
pub(crate) fn main() -> ExitCode {
    #[cfg(feature = "bench")]
    if let Some(status) = bowline_bench::side() {
        std::process::exit(status);
    }
    let (words, tool) = with_alias(std::env::args_os().collect());
    let cli = match Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error, &words, tool),
    };
    let word = cli.command.word();
    let code = exit_code(word, cli.command.run());
    bowline_node::log::finish();
    code
}

/// Says why a command failed, if it did.
fn exit_code(word: &str, outcome: Outcome) -> ExitCode {
    let Err(failure) = outcome else { return ExitCode::SUCCESS };
    let code = failure.report(&format!("bowline {word}"));
    let is_usage = matches!(failure, Failure::Usage(_));
    ExitCode::from(if word == "info" && is_usage { 1 } else { code })
}

/// Tools that the command is when it was started by their names, their words here, and what of them
/// is known.
const TOOLS: [(&str, &str, &str); 4] = [
    ("rds-ping", "ping", "has the options of rds-ping of rds-tools 2.0.7 and 2.3"),
    ("rds-info", "info", "has the options of rds-info of rds-tools 2.0.7, and -p for paths"),
    ("rds-stress", "stress", "has the options of rds-stress of rds-tools 2.0.7"),
    ("rnbd", "rnbd", "has the commands of rnbd 1.2"),
];

/// Turns `rds-ping ...` into `bowline ping ...` when the program was started by that name; returns
/// then, too, what of the original is known.
fn with_alias(mut words: Vec<OsString>) -> (Vec<OsString>, Option<&'static str>) {
    let name = words.first().and_then(|word| Path::new(word).file_name()).and_then(|n| n.to_str());
    let Some((_, word, known)) = TOOLS.iter().find(|(tool, ..)| Some(*tool) == name) else {
        return (words, None);
    };
    // The first one is what usage lines begin with.
    words.splice(..1, ["bowline".into(), word.into()]);
    if *word == "info" {
        words.insert(2, "--original".into());
    }
    (words, Some(*known))
}

/// Prints what clap has to say: help and version as they are, a mistake in one line. Of an option
/// that is not known it says which ones of the original `tool` are.
fn refuse(error: &clap::Error, words: &[OsString], tool: Option<&str>) -> ExitCode {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let text = error.render().to_string();
            say!("{}", text.trim_end());
            return ExitCode::SUCCESS;
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            note!("{}", error.render().to_string().trim_end());
            return ExitCode::from(2);
        }
        _ => {}
    }
    let text = options::mistake(error);
    let mut place = String::from("bowline");
    let definition = Cli::command();
    let mut here = &definition;
    // The words that are known, as far as they go: `rnbd export`.
    for word in words.iter().skip(1).filter_map(|word| word.to_str()) {
        let Some(below) = here.get_subcommands().find(|known| known.get_name() == word) else {
            break;
        };
        here = below;
        place = format!("{place} {word}");
    }
    let unknown = error.kind() == ErrorKind::UnknownArgument;
    let known = tool.filter(|_| unknown).map_or(String::new(), |known| format!("; this {known}"));
    note!("{place}: {text}{known}; see `{place} --help`");
    ExitCode::from(if place == "bowline info" { 1 } else { 2 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_names_of_the_original_tools_select_the_word() {
        let (words, tool) = with_alias(vec!["/usr/bin/rds-info".into(), "-c".into()]);
        assert_eq!(words, ["bowline", "info", "--original", "-c"].map(OsString::from));
        assert!(tool.is_some());
        let (words, tool) = with_alias(vec!["bowline".into(), "info".into()]);
        assert_eq!(words, ["bowline", "info"].map(OsString::from));
        assert_eq!(tool, None);
    }
}
