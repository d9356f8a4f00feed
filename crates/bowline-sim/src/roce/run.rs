//! Runs of one seed and of many.

use std::ops::Range;

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

/// The simulator of RoCEv2 devices.
pub(crate) struct Roce;

impl Simulator for Roce {
    type Plan = Plan;
    type Scenario = Scenario;
    type Stats = Stats;
    type Sabotage = Sabotage;
    type World = World;

    const NAME: &'static str = "roce";
    const COMMAND: &'static str = "bowline sim --roce";

    fn draw(seed: u64, forced: Option<Scenario>) -> Start<Plan> {
        let mut rng = Rng::new(seed ^ 0x70ce);
        let plan = Plan::draw(&mut rng, forced);
        Start { chance: vec![rng], plan }
    }

    fn declare(coverage: &mut Coverage) {
        reach::declare(coverage);
    }

    fn scenario(plan: &Plan) -> &'static str {
        plan.scenario.name()
    }

    fn world(start: Start<Plan>, trace: Trace, sabotage: Option<Sabotage>) -> Option<World> {
        let Start { mut chance, plan } = start;
        let mut world = World::new(plan, chance.pop()?, trace, sabotage);
        let plan = world.plan.clone();
        world.note([0, 0, 0], || format!("{plan:#?}"));
        Some(world)
    }
}

impl simulator::World<Stats> for World {
    fn step(&mut self) -> bool {
        Self::step(self)
    }

    fn now(&self) -> u64 {
        self.now
    }

    fn failure(&mut self) -> Option<String> {
        self.failure.take()
    }

    fn dump(&self) -> String {
        Self::dump(self)
    }

    fn end(mut self) -> (Stats, Coverage, Trace) {
        self.stats.virtual_ms = self.now / 1_000_000;
        self.reached.tell(&mut self.coverage);
        (self.stats, self.coverage, self.trace)
    }
}

/// Runs one seed.
pub fn run(seed: u64, options: &Options) -> Outcome {
    simulator::run_seed::<Roce>(seed, options, None)
}

/// What a seed draws, as text for a file; [`run_kept`] runs it.
pub fn keep(seed: u64, options: &Options) -> String {
    simulator::keep::<Roce>(seed, options)
}

/// Runs a plan that was kept; `name` is that of its file, for reports.
///
/// # Errors
/// When the text is no plan of this simulator.
pub fn run_kept(text: &str, name: &str, trace: TraceMode) -> Result<Outcome, NotAPlan> {
    simulator::run_kept::<Roce>(text, name, trace)
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
    simulator::run_many::<Roce>(seeds, threads, options, progress)
}
