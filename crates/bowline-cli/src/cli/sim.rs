//! `bowline sim`: whole clusters of nodes in virtual time, with faults, each drawn from a seed.

use std::{num::NonZero, thread};

use bowline_sim::{
    Numbers, Options, Outcome as Run, Scenario, Stats, TraceMode, run as run_seed, run_many,
};

use super::{
    Failure, Outcome,
    args::number,
    out::{self, Progress, count},
};

/// Lines of the trace kept without `--trace`.
const LAST_LINES: usize = 60;

/// Search for mistakes: clusters in virtual time, with faults, drawn from seeds.
///
/// The same seed gives the same run on every machine. A seed that fails is printed with the
/// command that runs it again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 every promise was kept, 1 one was broken, 2 usage.")]
pub(crate) struct Args {
    /// Run this seed only
    #[arg(long, value_name = "N", value_parser = number, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Run this many seeds
    #[arg(long, value_name = "N", default_value = "1000", value_parser = number)]
    seeds: u64,
    /// First of the seeds
    #[arg(long, value_name = "N", default_value = "1", value_parser = number)]
    from: u64,
    /// Force a scenario instead of the one a seed draws
    #[arg(long, value_name = "NAME", value_parser = scenario)]
    scenario: Option<Scenario>,
    /// Print every step (with --seed)
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Threads [default: one per processor]
    #[arg(long, value_name = "N")]
    threads: Option<NonZero<usize>>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Show progress even when standard error is not a terminal
    #[arg(long)]
    progress: bool,
}

fn scenario(text: &str) -> Result<Scenario, String> {
    Scenario::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = Scenario::ALL.iter().map(|scenario| scenario.name()).collect();
        format!("choose one of {}", names.join(", "))
    })
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    match args.seed {
        Some(seed) => run_one(args, seed),
        None => run_range(args),
    }
}

fn run_one(args: &Args, seed: u64) -> Outcome {
    let mode = if args.trace { TraceMode::All } else { TraceMode::Last(LAST_LINES) };
    let options = Options::default().with_trace(mode).with_scenario(args.scenario);
    let mut outcome = run_seed(seed, &options);
    if args.json {
        say!("{}", json(&outcome));
    } else {
        if outcome.failure.is_none() && !args.trace {
            outcome.lines.clear();
        }
        out::text(&outcome.report());
        say!("{}", numbers(&outcome.stats));
    }
    if outcome.failure.is_none() { Ok(()) } else { Err(Failure::Reported) }
}

fn run_range(args: &Args) -> Outcome {
    let end = args
        .from
        .checked_add(args.seeds)
        .ok_or_else(|| Failure::usage("--from and --seeds together are beyond the last seed"))?;
    let threads = args.threads.or_else(|| thread::available_parallelism().ok());
    let options = Options::default().with_scenario(args.scenario);
    let progress = std::sync::Mutex::new(Progress::new(args.progress));
    let show = |done: u64| {
        if let Ok(mut progress) = progress.lock() {
            progress.show(format_args!("{} of {} seeds", count(done), count(args.seeds)));
        }
    };
    let summary = run_many(args.from..end, threads.map_or(1, NonZero::get), &options, show);
    drop(progress);
    if args.json {
        let object = serde_json::json!({
            "runs": summary.runs,
            "failed": summary.failed,
            "failures": summary.failures.iter().map(json).collect::<Vec<_>>(),
            "stats": stats(&summary.stats),
        });
        say!("{object}");
    } else {
        for failure in &summary.failures {
            out::text(&failure.report());
            say!("");
        }
        say!("{} seeds, {} failed", count(summary.runs), count(summary.failed));
        say!("{}", numbers(&summary.stats));
    }
    if summary.failed == 0 { Ok(()) } else { Err(Failure::Reported) }
}

fn stats(stats: &Stats) -> serde_json::Value {
    let fields = stats.fields().into_iter().map(|(name, value)| (name.to_owned(), value.into()));
    serde_json::Value::Object(fields.collect())
}

fn numbers(stats: &Stats) -> String {
    let fields = stats.fields().into_iter().map(|(name, value)| format!("{name} {}", count(value)));
    fields.collect::<Vec<_>>().join(", ")
}

fn json(outcome: &Run) -> serde_json::Value {
    serde_json::json!({
        "seed": outcome.seed,
        "scenario": outcome.scenario,
        "hash": format!("{:016x}", outcome.trace_hash),
        "stats": stats(&outcome.stats),
        "failure": outcome.failure.as_ref().map(|failure| {
            serde_json::json!({ "what": failure.what, "at_ns": failure.at })
        }),
        "lines": outcome.lines,
        "replay": outcome.replay_command(),
    })
}
