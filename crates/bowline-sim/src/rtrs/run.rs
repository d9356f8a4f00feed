//! Runs of one seed and of many.

use std::ops::Range;

use super::each;
use super::plan::{Plan, Scenario};
use super::reach;
use super::sabotage::Sabotage;
use super::stats::Stats;
use super::world::World;
use crate::coverage::Coverage;
use crate::kept::{NotAPlan, Start};
use crate::rng::Rng;
use crate::simulator::{self, Simulator};
use crate::trace::{Trace, TraceMode};

/// What became of a seed.
pub type Outcome = crate::Outcome<Stats>;
/// What became of many seeds.
pub type Summary = crate::Summary<Stats>;
/// How to run.
pub type Options = crate::Options<Scenario>;

/// The simulator of RTRS sessions and RNBD disks.
pub(crate) struct Rtrs;

impl Simulator for Rtrs {
    type Plan = Plan;
    type Scenario = Scenario;
    type Stats = Stats;
    type Sabotage = Sabotage;
    type World = World;

    const NAME: &'static str = "rtrs";
    const COMMAND: &'static str = "bowline sim --rtrs";

    fn draw(seed: u64, forced: Option<Scenario>) -> Start<Plan> {
        let (plan, chance) = match forced {
            Some(Scenario::Each) => each::draw(seed),
            scenario => {
                let mut rng = Rng::new(seed ^ 0x7275);
                let mut extra = Rng::new(seed ^ 0x6b65_7973);
                let plan = Plan::draw(&mut rng, &mut extra, scenario);
                (plan, [rng, extra])
            }
        };
        Start { chance: chance.into(), plan }
    }

    fn declare(coverage: &mut Coverage) {
        reach::declare(coverage);
    }

    fn scenario(plan: &Plan) -> &'static str {
        plan.scenario.name()
    }

    fn world(start: Start<Plan>, trace: Trace, sabotage: Option<Sabotage>) -> Option<World> {
        let Start { mut chance, plan } = start;
        let (extra, rng) = (chance.pop()?, chance.pop()?);
        Some(World::new(plan, rng, extra, trace, sabotage))
    }
}

impl simulator::World<Stats> for World {
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

    fn end(mut self) -> (Stats, Coverage, Trace) {
        self.base.stats.virtual_ms = self.base.now / 1_000_000;
        (self.base.stats, self.base.coverage, self.base.trace)
    }
}

/// Runs one seed.
pub fn run(seed: u64, options: &Options) -> Outcome {
    simulator::run_seed::<Rtrs>(seed, options, None)
}

/// What a seed draws, as text for a file; [`run_kept`] runs it.
pub fn keep(seed: u64, options: &Options) -> String {
    simulator::keep::<Rtrs>(seed, options)
}

/// Runs a plan that was kept; `name` is that of its file, for reports.
///
/// # Errors
/// When the text is no plan of this simulator.
pub fn run_kept(text: &str, name: &str, trace: TraceMode) -> Result<Outcome, NotAPlan> {
    simulator::run_kept::<Rtrs>(text, name, trace)
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
    simulator::run_many::<Rtrs>(seeds, threads, options, progress)
}
