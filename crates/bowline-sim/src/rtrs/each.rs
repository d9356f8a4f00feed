//! Stories in which one thing goes wrong once, at every step in turn: what a seed stands for is
//! counted here, not drawn.
//!
//! A story is all that happens on the network from the first request for a connection to the end of
//! the session: connections, exchange of what both sides have, a disk that is mapped, IO, its
//! verification, and an orderly end. Its steps are the arrivals of its datagrams. Up to the step a
//! run is the same whatever goes wrong then.

use serde::{Deserialize, Serialize};

use super::plan::{Plan, Scenario};
use crate::engine::queue::{MS, SEC};
use crate::engine::rng::Rng;

/// What goes wrong when a datagram arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mishap {
    /// It is lost, and nothing else.
    Loss,
    /// Its line is cut for a while.
    Cut,
    /// The same in its direction only.
    CutThere,
    /// It is the last for a while that its receiver can answer.
    CutBack,
    /// The machine it comes to dies.
    ReceiverDies,
    /// The machine it comes from dies.
    SenderDies,
    /// The program it comes to does nothing for a while.
    ReceiverStalls,
    /// What its line is given from then on comes later, and what the line back is given too.
    Hold,
    /// The same in its direction only.
    HoldThere,
}

impl Mishap {
    const ALL: [Self; 9] = [
        Self::Loss,
        Self::Cut,
        Self::CutThere,
        Self::CutBack,
        Self::ReceiverDies,
        Self::SenderDies,
        Self::ReceiverStalls,
        Self::Hold,
        Self::HoldThere,
    ];
}

/// Something that goes wrong at one step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) mishap: Mishap,
    /// Datagrams that have arrived before.
    pub(crate) after: u64,
    /// How long it lasts, at most where a machine dies.
    pub(crate) lasts: u64,
}

/// Stories: one path and two, keys that are refreshed and that are not.
const STORIES: u64 = 4;
/// Seeds of each step in [`Scenario::Each`], counted from step 0 on: each mishap in each story.
/// Seeds of steps after the end of a story show it undisturbed.
pub const SEEDS_OF_STEP: u64 = STORIES * Mishap::ALL.len() as u64;

/// What this seed stands for, and all chance of its story, which is the same for all its seeds.
pub(crate) fn draw(seed: u64) -> (Plan, [Rng; 2]) {
    let (step, rest) = (seed / SEEDS_OF_STEP, seed % SEEDS_OF_STEP);
    let (story, mishap) = (rest % STORIES, rest / STORIES);
    let mut plan = story_plan(story);
    let (mishap, mut rng) = (Mishap::ALL[mishap as usize], Rng::new(seed));
    let lasts = match mishap {
        Mishap::Hold | Mishap::HoldThere => hold_length(&mut rng),
        _ => rng.magnitude(MS, 10 * SEC),
    };
    plan.each = Some(Case { mishap, after: step, lasts });
    (plan, [Rng::new(story), Rng::new(story + STORIES)])
}

/// How long a line holds what it is given: a little longer than one of the times after which a
/// device gives up, so that it comes when requests have moved to another path, and before the
/// server has given up the first.
pub(crate) fn hold_length(rng: &mut Rng) -> u64 {
    rng.pick(&[500 * MS, 3 * SEC]) + rng.below(1400 * MS)
}

fn story_plan(story: u64) -> Plan {
    let (paths, invalidate) = (1 + story as usize % 2, story < 2);
    let mut rng = Rng::new(story);
    let mut plan = loop {
        let mut extra = Rng::new(rng.next());
        let plan = Plan::draw(&mut rng, &mut extra, Some(Scenario::Calm));
        if plan.clients[0].paths.len() == paths && plan.invalidate == invalidate {
            break plan;
        }
    };
    plan.scenario = Scenario::Each;
    plan.nodes.truncate(2);
    plan.clients.truncate(1);
    let client = &mut plan.clients[0];
    client.disks.truncate(1);
    client.disks[0].takes = (20_000, MS);
    client.leaves = 0;
    (client.requests, client.request_max, client.gap, client.swap) = (10, 8192, MS, 0);
    (client.io_connections, client.queues) = (1, true);
    // Few datagrams tell nothing but that there is somebody.
    plan.heartbeat.0 = 5 * SEC;
    plan.active = 12 * SEC;
    // What goes wrong may do so when other runs are calm already.
    plan.fresh = false;
    plan
}
