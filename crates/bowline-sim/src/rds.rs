//! Runs of clusters of RDS nodes.

use std::ops::Range;

use crate::coverage::Coverage;
use crate::kept::{NotAPlan, Start};
use crate::plan::{Plan, Scenario};
use crate::reach;
use crate::rng::Rng;
use crate::run::{Options, Outcome, Summary};
use crate::sabotage::Sabotage;
use crate::simulator::{self, Simulator};
use crate::stats::Stats;
use crate::trace::{Trace, TraceMode};
use crate::world::World;

/// The simulator of RDS nodes.
pub(crate) struct Rds;

impl Simulator for Rds {
    type Plan = Plan;
    type Scenario = Scenario;
    type Stats = Stats;
    type Sabotage = Sabotage;
    type World = World;

    const NAME: &'static str = "rds";
    const COMMAND: &'static str = "bowline sim";

    fn draw(seed: u64, forced: Option<Scenario>) -> Start<Plan> {
        let mut rng = Rng::new(seed);
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
        let Start { mut chance, mut plan } = start;
        if sabotage.is_some_and(Sabotage::needs_room) {
            plan.widen();
        }
        let mut world = World::new(plan, chance.pop()?, trace, sabotage);
        let plan = &world.plan;
        world.ctx.note([0, 0, 0], || format!("{plan:#?}"));
        Some(world)
    }
}

impl simulator::World<Stats> for World {
    fn step(&mut self) -> bool {
        Self::step(self)
    }

    fn now(&self) -> u64 {
        self.ctx.now
    }

    fn failure(&mut self) -> Option<String> {
        self.ctx.failure.take()
    }

    fn dump(&self) -> String {
        Self::dump(self)
    }

    fn end(mut self) -> (Stats, Coverage, Trace) {
        self.tell_reached();
        self.ctx.stats.virtual_ms = self.ctx.now / 1_000_000;
        (self.ctx.stats, self.ctx.coverage, self.ctx.trace)
    }
}

/// Runs one seed.
pub fn run(seed: u64, options: &Options) -> Outcome {
    simulator::run_seed::<Rds>(seed, options, None)
}

/// What a seed draws, as text for a file; [`run_kept`] runs it.
pub fn keep(seed: u64, options: &Options) -> String {
    simulator::keep::<Rds>(seed, options)
}

/// Runs a plan that was kept; `name` is that of its file, for reports.
///
/// # Errors
/// When the text is no plan of this simulator.
pub fn run_kept(text: &str, name: &str, trace: TraceMode) -> Result<Outcome, NotAPlan> {
    simulator::run_kept::<Rds>(text, name, trace)
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
    simulator::run_many::<Rds>(seeds, threads, options, progress)
}
