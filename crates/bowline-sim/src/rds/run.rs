//! Runs of clusters of RDS nodes.

use super::plan::{Plan, Scenario};
use super::reach;
use super::sabotage::Sabotage;
use super::single_cut;
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
        if forced == Some(Scenario::RdmaStep) {
            let (plan, rng) = single_cut::draw(seed);
            return Start { chance: vec![rng], plan };
        }
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
        self.report_coverage();
        self.ctx.stats.virtual_ms = self.ctx.now / 1_000_000;
        self.ctx.base.end()
    }
}

simulator::runs_of!(Rds);
