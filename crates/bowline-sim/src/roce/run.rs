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
use crate::engine::trace::Trace;

/// Result of one seed.
pub type Outcome = crate::Outcome<Stats>;
/// Result of many seeds.
pub type Summary = crate::Summary<Stats>;
/// Options of a run.
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
        let mut plan = Plan::draw(&mut rng, forced);
        plan.draw_apart(&mut Rng::new(seed ^ 0x5290));
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
        self.reached.report(&mut self.base.coverage);
        self.base.end()
    }
}

simulator::runs_of!(Roce);
