//! `bowline sim`: whole clusters of nodes, RoCEv2 devices, sessions and disks over them, or nodes
//! and the programs of their hosts, in virtual time, with faults, each drawn from a seed.

mod cells;

use std::path::{Path, PathBuf};
use std::{fs, num::NonZero, ops::ControlFlow, str::FromStr, sync::Mutex, thread, time::Duration};

use bowline_node::{
    Failure, Outcome,
    log::{self, Progress, count},
    signals::Stop,
    values::number,
};
use bowline_roce::Congestion;
use bowline_sim::{
    Coverage, Numbers, Outcome as Run, Reach, SearchEvent, Summary, TraceMode, host, rds, roce,
    rtrs, simulator_of,
};

use super::common::known::known;

/// Seeds that are run where no number is given.
const SEEDS: u64 = 1_000;
/// Lines of the trace kept without `--trace`.
const LAST_LINES: usize = 60;

/// Search for bugs: run clusters in virtual time, with faults, generated from seeds.
///
/// The same seed gives the same run on every machine. A seed that fails is printed at once, with
/// the command that runs it again (at the end with --json). An interrupt ends the search and prints
/// the results so far. Without --roce, --rtrs or --host the nodes speak RDS over TCP and RDMA.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 no failure, 1 a failure or an interrupted search, 2 usage. A goal that a cell misses is not a failure."
)]
pub(crate) struct Args {
    /// Simulate RoCEv2 devices and the connections between them instead of RDS nodes
    #[arg(long)]
    roce: bool,
    /// Simulate RTRS sessions and RNBD disks over RoCEv2 devices
    #[arg(long, conflicts_with = "roce")]
    rtrs: bool,
    /// Simulate nodes and the programs of their hosts, which share memory with them
    #[arg(long, conflicts_with_all = ["roce", "rtrs"])]
    host: bool,
    /// Run this seed only
    #[arg(long, value_name = "N", value_parser = number, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Run a saved plan, of any of the simulators
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seed", "seeds", "from", "scenario", "roce", "rtrs", "host"])]
    plan: Option<PathBuf>,
    /// Save the plans of seeds that fail in this folder, for --plan; with --seed, save its plan in
    /// any case
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Run this many seeds [default: 1000, with --cells 1]
    #[arg(long, value_name = "N", value_parser = number)]
    seeds: Option<u64>,
    /// Run seeds for this many seconds instead of a number of seeds
    #[arg(long, value_name = "N", value_parser = number, conflicts_with_all = ["seeds", "seed", "plan"])]
    seconds: Option<u64>,
    /// First seed
    #[arg(long, value_name = "N", default_value = "1", value_parser = number)]
    from: u64,
    /// Use this scenario instead of the one that a seed generates
    #[arg(long, value_name = "NAME")]
    scenario: Option<String>,
    /// With --roce: run the cells of congestion control whose names contain TEXT (without it all)
    /// instead of generated clusters. A cell is a network whose ports have a rate up to 400 Gb/s, a
    /// short queue and a delay; each line has the share of the link that was used, that of a
    /// competing TCP flow, fairness, percentiles, and the goals that were missed
    #[arg(long, value_name = "TEXT", requires = "roce", num_args = 0..=1, default_missing_value = "",
        conflicts_with_all = ["keep", "seconds", "scenario", "trace", "coverage"])]
    cells: Option<String>,
    /// Congestion control in cells: delay; fixed:PACKETS in flight for each queue pair; or, for
    /// comparison, cubic or swift, as published. The goals of a cell are those for delay
    #[arg(long, value_name = "HOW", requires = "cells", default_value = "delay",
          hide_possible_values = true,
          value_parser = known(&["delay", "cubic", "swift", "fixed:240"], Congestion::from_str))]
    congestion: Congestion,
    /// Print every step (with --seed or --plan)
    #[arg(long)]
    trace: bool,
    /// Print which states, transitions and faults were reached, and by how many runs
    #[arg(long)]
    coverage: bool,
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

/// What is simulated, with the scenario forced, if any.
enum World {
    Rds(rds::Options),
    Roce(roce::Options),
    Rtrs(rtrs::Options),
    Host(host::Options),
}

fn world(args: &Args, trace: TraceMode) -> Result<World, Failure> {
    let name = args.scenario.as_deref();
    let time = args.seconds.map(Duration::from_secs);
    let choose = |names: Vec<&str>| {
        let (name, names) = (name.unwrap_or_default(), names.join(", "));
        Failure::usage(format!("--scenario {name}: choose one of {names}"))
    };
    if args.roce {
        let names = || roce::Scenario::ALL.iter().map(|s| s.name()).collect();
        let found = name.map(|n| roce::Scenario::from_name(n).ok_or_else(|| choose(names())));
        let options = roce::Options::default().with_trace(trace).with_time(time);
        Ok(World::Roce(options.with_scenario(found.transpose()?)))
    } else if args.rtrs {
        let names = || rtrs::Scenario::ALL.iter().map(|s| s.name()).collect();
        let found = name.map(|n| rtrs::Scenario::from_name(n).ok_or_else(|| choose(names())));
        let options = rtrs::Options::default().with_trace(trace).with_time(time);
        Ok(World::Rtrs(options.with_scenario(found.transpose()?)))
    } else if args.host {
        let names = || host::Scenario::ALL.iter().map(|s| s.name()).collect();
        let found = name.map(|n| host::Scenario::from_name(n).ok_or_else(|| choose(names())));
        let options = host::Options::default().with_trace(trace).with_time(time);
        Ok(World::Host(options.with_scenario(found.transpose()?)))
    } else {
        let names = || rds::Scenario::ALL.iter().map(|s| s.name()).collect();
        let found = name.map(|n| rds::Scenario::from_name(n).ok_or_else(|| choose(names())));
        let options = rds::Options::default().with_trace(trace).with_time(time);
        Ok(World::Rds(options.with_scenario(found.transpose()?)))
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    if let Some(text) = &args.cells {
        return cells::run_cells(args, text);
    }
    let mode = if args.trace { TraceMode::All } else { TraceMode::Last(LAST_LINES) };
    match (args.seed, &args.plan) {
        (Some(seed), _) => {
            let plan = match world(args, mode)? {
                World::Rds(options) => rds::keep(seed, &options),
                World::Roce(options) => roce::keep(seed, &options),
                World::Rtrs(options) => rtrs::keep(seed, &options),
                World::Host(options) => host::keep(seed, &options),
            };
            if let Some(dir) = &args.keep {
                write_plan(dir, seed, &plan)?;
            }
            match world(args, mode)? {
                World::Rds(options) => show_one(args, rds::run(seed, &options)),
                World::Roce(options) => show_one(args, roce::run(seed, &options)),
                World::Rtrs(options) => show_one(args, rtrs::run(seed, &options)),
                World::Host(options) => show_one(args, host::run(seed, &options)),
            }
        }
        (None, Some(file)) => run_plan(args, file, mode),
        (None, None) if args.trace => Err(Failure::usage("--trace needs --seed or --plan")),
        (None, None) => run_range(args),
    }
}

fn run_plan(args: &Args, file: &Path, mode: TraceMode) -> Outcome {
    let name = file.display().to_string();
    let text = fs::read_to_string(file)
        .map_err(|error| Failure::usage(format!("--plan {name}: {error}")))?;
    let wrong = |error| Failure::usage(format!("--plan {name}: {error}"));
    match simulator_of(&text).map_err(wrong)?.as_str() {
        "roce" => show_one(args, roce::run_kept(&text, &name, mode).map_err(wrong)?),
        "host" => show_one(args, host::run_kept(&text, &name, mode).map_err(wrong)?),
        "rtrs" => show_one(args, rtrs::run_kept(&text, &name, mode).map_err(wrong)?),
        _ => show_one(args, rds::run_kept(&text, &name, mode).map_err(wrong)?),
    }
}

/// Writes what a seed has drawn into a file named after its simulator and itself.
fn write_plan(dir: &Path, seed: u64, plan: &str) -> Result<(), Failure> {
    let simulator = simulator_of(plan).unwrap_or_default();
    let file = dir.join(format!("{simulator}-{seed}.json"));
    fs::create_dir_all(dir)
        .and_then(|()| fs::write(&file, plan))
        .map_err(|error| Failure::usage(format!("--keep {}: {error}", file.display())))?;
    note!("kept: {}", file.display());
    Ok(())
}

fn show_one<N: Numbers>(args: &Args, mut outcome: Run<N>) -> Outcome {
    if args.json {
        say!("{}", json(&outcome));
    } else {
        if outcome.failure.is_none() && !args.trace {
            outcome.lines.clear();
        }
        log::text(&outcome.report());
        say!("{}", numbers(&outcome.stats));
    }
    if outcome.failure.is_none() { Ok(()) } else { Err(Failure::Reported) }
}

fn run_range(args: &Args) -> Outcome {
    let end = match args.seconds {
        Some(_) => u64::MAX,
        None => args.from.checked_add(args.seeds.unwrap_or(SEEDS)).ok_or_else(|| {
            Failure::usage("--from and --seeds together are beyond the last seed")
        })?,
    };
    let world = world(args, TraceMode::Hash)?;
    let threads = args.threads.or_else(|| thread::available_parallelism().ok());
    let threads = threads.map_or(1, NonZero::get);
    let stop = Stop::install()?;
    let progress = Mutex::new(Progress::new(args.progress));
    let search = Search { args, stop, progress, unkept: Mutex::default() };
    let seeds = args.from..end;
    match world {
        World::Rds(options) => {
            search.end(&rds::run_many(seeds, threads, &options, |event| search.on_event(&event)))
        }
        World::Rtrs(options) => {
            search.end(&rtrs::run_many(seeds, threads, &options, |event| search.on_event(&event)))
        }
        World::Host(options) => {
            search.end(&host::run_many(seeds, threads, &options, |event| search.on_event(&event)))
        }
        World::Roce(options) => {
            search.end(&roce::run_many(seeds, threads, &options, |event| search.on_event(&event)))
        }
    }
}

/// A range of seeds that is being run. A failure is told, and its plan kept, at once; a signal ends
/// the search with what it has.
struct Search<'a> {
    args: &'a Args,
    stop: Stop,
    progress: Mutex<Progress>,
    /// Why a plan could not be kept.
    unkept: Mutex<Option<Failure>>,
}

impl Search<'_> {
    fn on_event<N: Numbers>(&self, event: &SearchEvent<'_, N>) -> ControlFlow<()> {
        let Ok(mut progress) = self.progress.lock() else { return ControlFlow::Break(()) };
        match event {
            SearchEvent::Failed(outcome) => {
                progress.clear();
                if !self.args.json {
                    log::text(&outcome.report());
                    say!("");
                }
                if let Some(dir) = &self.args.keep {
                    let plan = outcome.plan.as_deref().unwrap_or_default();
                    if let (Err(why), Ok(mut unkept)) =
                        (write_plan(dir, outcome.seed, plan), self.unkept.lock())
                    {
                        *unkept = Some(why);
                        return ControlFlow::Break(());
                    }
                }
            }
            SearchEvent::Done(done) => match self.args.seconds {
                Some(seconds) => {
                    progress.show(format_args!("{} seeds in up to {seconds} s", count(*done)));
                }
                None => {
                    let all = count(self.args.seeds.unwrap_or(SEEDS));
                    progress.show(format_args!("{} of {all} seeds", count(*done)));
                }
            },
            _ => {}
        }
        if self.stop.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn end<N: Numbers>(&self, summary: &Summary<N>) -> Outcome {
        if let Ok(mut progress) = self.progress.lock() {
            progress.clear();
        }
        let shown = show_many(self.args, summary);
        if let Some(why) = self.unkept.lock().ok().and_then(|mut unkept| unkept.take()) {
            return Err(why);
        }
        if self.stop.asked() {
            return Err(Failure::failed(format!(
                "interrupted after {} seeds",
                count(summary.runs)
            )));
        }
        shown
    }
}

fn show_many<N: Numbers>(args: &Args, summary: &Summary<N>) -> Outcome {
    if args.json {
        let object = serde_json::json!({
            "runs": summary.runs,
            "failed": summary.failed,
            "failures": summary.failures.iter().map(json).collect::<Vec<_>>(),
            "stats": stats(&summary.stats),
            "coverage": coverage_json(&summary.coverage),
        });
        say!("{object}");
    } else {
        if args.coverage {
            log::text(&coverage_table(&summary.coverage));
        }
        say!(
            "{} seeds from {} on, {} failed",
            count(summary.runs),
            args.from,
            count(summary.failed)
        );
        say!("{}", numbers(&summary.stats));
        let missed = summary.coverage.iter().filter(|(.., reach)| reach.runs == 0).count();
        let all = summary.coverage.iter().count();
        say!("{} of {all} states, transitions and faults reached", all - missed);
    }
    if summary.failed == 0 { Ok(()) } else { Err(Failure::Reported) }
}

/// A line for each thing that can be reached: how many runs came to it, and how often.
fn coverage_table(coverage: &Coverage) -> String {
    let names = coverage.iter().map(|(group, name, _)| group.len() + name.len() + 2);
    let width = names.max().unwrap_or(0);
    let line = |(group, name, reach): (&str, &str, Reach)| {
        let label = format!("{group}: {name}");
        format!(
            "{label:<width$}  {:>12} runs  {:>15} times\n",
            count(reach.runs),
            count(reach.times)
        )
    };
    coverage.iter().map(line).collect()
}

fn coverage_json(coverage: &Coverage) -> serde_json::Value {
    let mut groups = serde_json::Map::new();
    for (group, name, reach) in coverage.iter() {
        let group = groups.entry(group).or_insert_with(|| serde_json::json!({}));
        group[name] = serde_json::json!({ "runs": reach.runs, "times": reach.times });
    }
    groups.into()
}

fn stats<N: Numbers>(stats: &N) -> serde_json::Value {
    let fields = stats.fields().into_iter().map(|(name, value)| (name.to_owned(), value.into()));
    serde_json::Value::Object(fields.collect())
}

fn numbers<N: Numbers>(stats: &N) -> String {
    let fields = stats.fields().into_iter().map(|(name, value)| format!("{name} {}", count(value)));
    fields.collect::<Vec<_>>().join(", ")
}

fn json<N: Numbers>(outcome: &Run<N>) -> serde_json::Value {
    serde_json::json!({
        "seed": outcome.seed,
        "scenario": outcome.scenario,
        "hash": format!("{:016x}", outcome.trace_hash),
        "stats": stats(&outcome.stats),
        "failure": outcome.failure.as_ref().map(|failure| {
            serde_json::json!({ "what": failure.what, "at_ns": failure.at })
        }),
        "lines": outcome.lines,
        "replay": outcome.replay,
    })
}
