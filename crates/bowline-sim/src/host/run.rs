//! Runs of one seed and of many.

use super::plan::{Plan, Scenario};
use super::reach;
use super::sabotage::Sabotage;
use super::stats::Stats;
use super::world::World;
use crate::engine::coverage::Coverage;
use crate::engine::kept::Start;
use crate::engine::rng::Rng;
use crate::engine::simulator::{self, Simulator};
use crate::engine::trace::{Trace, TraceMode};

/// The outcome of a seed.
pub type Outcome = crate::Outcome<Stats>;
/// The summary of many seeds.
pub type Summary = crate::Summary<Stats>;
/// Options of a run.
pub type Options = crate::Options<Scenario>;

/// The simulator of nodes and the programs of their hosts.
pub(crate) struct Host;

impl Simulator for Host {
    type Plan = Plan;
    type Scenario = Scenario;
    type Stats = Stats;
    type Sabotage = Sabotage;
    type World = World;

    const NAME: &'static str = "host";
    const COMMAND: &'static str = "bowline sim --host";

    fn draw(seed: u64, forced: Option<Scenario>) -> Start<Plan> {
        let mut rng = Rng::new(seed ^ 0x686f_7374);
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
        Some(World::new(&plan, chance.pop()?, trace, sabotage))
    }
}

impl simulator::World<Stats> for World {
    fn step(&mut self) -> bool {
        Self::step(self)
    }

    fn now(&self) -> u64 {
        self.shared.now.get()
    }

    fn failure(&mut self) -> Option<String> {
        self.shared.failure.take()
    }

    fn dump(&self) -> String {
        Self::dump(self)
    }

    fn end(self) -> (Stats, Coverage, Trace) {
        self.shared.count(|stats| stats.virtual_ms = self.shared.now.get() / 1_000_000);
        let shared = &self.shared;
        (
            shared.stats.take(),
            shared.coverage.take(),
            shared.trace.replace(Trace::new(TraceMode::Hash)),
        )
    }
}

simulator::runs_of!(Host);
