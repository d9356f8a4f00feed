//! Runs of one seed and of many.

use std::ops::Range;

use super::each;
use super::plan::{Plan, Scenario};
use super::sabotage::Sabotage;
use super::stats::Stats;
use super::world::World;
use crate::rng::Rng;
use crate::run::{Simulated, sweep};
use crate::trace::Trace;

/// What became of a seed.
pub type Outcome = crate::Outcome<Stats>;
/// What became of many seeds.
pub type Summary = crate::Summary<Stats>;
/// How to run.
pub type Options = crate::Options<Scenario>;

/// Runs one seed.
pub fn run(seed: u64, options: &Options) -> Outcome {
    run_with(seed, options, None)
}

/// Runs one seed, with something done wrong on purpose.
pub(crate) fn run_with(seed: u64, options: &Options, sabotage: Option<Sabotage>) -> Outcome {
    let (plan, [rng, extra]) = match options.scenario {
        Some(Scenario::Each) => each::draw(seed),
        scenario => {
            let mut rng = Rng::new(seed ^ 0x7275);
            let mut extra = Rng::new(seed ^ 0x6b65_7973);
            let plan = Plan::draw(&mut rng, &mut extra, scenario);
            (plan, [rng, extra])
        }
    };
    let outcome = Outcome::new("bowline sim --rtrs", seed, plan.scenario.name(), options);
    let trace = Trace::new(options.trace);
    outcome.play(|| World::new(plan, rng, extra, trace, sabotage))
}

impl Simulated<Stats> for World {
    fn step(&mut self) -> bool {
        Self::step(self)
    }

    fn now(&self) -> u64 {
        self.base.now
    }

    fn failure(&mut self) -> Option<String> {
        self.base.failure.take()
    }

    fn dump(&self) -> String {
        Self::dump(self)
    }

    fn end(mut self) -> (Stats, Trace) {
        self.base.stats.virtual_ms = self.base.now / 1_000_000;
        (self.base.stats, self.base.trace)
    }
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
    sweep(seeds, threads, options, progress, run)
}
