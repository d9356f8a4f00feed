//! Runs of one seed and of many.

use std::ops::Range;

use super::plan::{Plan, Scenario};
use super::sabotage::Sabotage;
use super::stats::Stats;
use super::world::World;
use crate::rng::Rng;
use crate::run::{Failure, play, sweep};
use crate::trace::{Trace, TraceMode};

/// What became of a seed.
pub type Outcome = crate::Outcome<Stats>;
/// What became of many seeds.
pub type Summary = crate::Summary<Stats>;

/// How to run.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Text to keep of a run.
    pub trace: TraceMode,
    /// Scenario instead of the one the seed would draw.
    pub scenario: Option<Scenario>,
    /// Something done wrong on purpose.
    pub(crate) sabotage: Option<Sabotage>,
}

impl Options {
    /// Sets how much text a run keeps.
    #[must_use]
    pub fn with_trace(mut self, trace: TraceMode) -> Self {
        self.trace = trace;
        self
    }

    /// Forces the scenario.
    #[must_use]
    pub fn with_scenario(mut self, scenario: Option<Scenario>) -> Self {
        self.scenario = scenario;
        self
    }
}

/// Runs one seed.
pub fn run(seed: u64, options: &Options) -> Outcome {
    let mut rng = Rng::new(seed ^ 0x70ce);
    let plan = Plan::draw(&mut rng, options.scenario);
    let scenario = plan.scenario;
    let trace = Trace::new(options.trace);
    let make = || {
        let mut world = World::new(plan, rng, trace, options.sabotage);
        let plan = world.plan.clone();
        world.note([0, 0, 0], || format!("{plan:#?}"));
        world
    };
    let (world, panicked) = play(make, World::step);
    let mut outcome = Outcome {
        command: "bowline sim --roce",
        seed,
        scenario: scenario.name(),
        forced: options.scenario.is_some(),
        trace_hash: 0,
        stats: Stats::default(),
        lines: Vec::new(),
        failure: None,
    };
    let Some(mut world) = world else {
        let what = panicked.err().unwrap_or_default();
        outcome.failure = Some(Failure { what, at: 0, dump: String::new() });
        return outcome;
    };
    let at = world.now;
    world.stats.virtual_ms = at / 1_000_000;
    let failure = match panicked {
        Err(what) => Some((format!("panic: {what}"), String::new())),
        Ok(()) => world.failure.take().map(|what| (what, world.dump())),
    };
    outcome.failure = failure.map(|(what, dump)| Failure { what, at, dump });
    outcome.stats = world.stats.clone();
    outcome.trace_hash = world.trace.hash();
    outcome.lines = world.trace.into_lines();
    outcome
}

/// Runs a range of seeds on `threads` threads, each seed on one of them.
///
/// `progress` is called now and then with the number of seeds done. Seeds that fail are run again
/// to show their last steps.
pub fn run_many(
    seeds: Range<u64>,
    threads: usize,
    options: &Options,
    progress: impl Fn(u64) + Sync,
) -> Summary {
    sweep(seeds, threads, progress, |seed, text| match text {
        Some(lines) if options.trace == TraceMode::Hash => {
            run(seed, &options.clone().with_trace(lines))
        }
        _ => run(seed, options),
    })
}
