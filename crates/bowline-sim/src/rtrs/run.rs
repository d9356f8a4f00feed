//! Runs of one seed and of many.

use super::plan::{Plan, Scenario};
use super::reach;
use super::sabotage::Sabotage;
use super::single_fault;
use super::stats::Stats;
use super::world::World;
use crate::engine::coverage::Coverage;
use crate::engine::kept::Start;
use crate::engine::rng::Rng;
use crate::engine::simulator::{self, Simulator};
use crate::engine::trace::Trace;

/// The outcome of a seed.
pub type Outcome = crate::Outcome<Stats>;
/// The summary of many seeds.
pub type Summary = crate::Summary<Stats>;
/// Options of a run.
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
            Some(Scenario::SingleFault) => single_fault::draw(seed),
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
        self.base.base.end()
    }
}

simulator::runs_of!(Rtrs);
