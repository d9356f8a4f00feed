//! Runs in which a single fault is injected at every step in turn: the seed enumerates steps,
//! faults and base runs instead of drawing them.
//!
//! A base run covers everything from the first connection request to the end of the session:
//! connections, the exchange of INFO messages, mapping a disk, IO, its verification, and an orderly
//! end. Its steps are the arrivals of datagrams. Up to the faulty step all seeds of a base run are
//! identical.

use serde::{Deserialize, Serialize};

use super::plan::{Plan, Scenario};
use crate::engine::queue::{MS, SEC};
use crate::engine::rng::Rng;

/// The fault injected when a datagram arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SingleFault {
    /// The datagram is lost.
    Loss,
    /// The datagram and its line are cut for a while, in both directions.
    Cut,
    /// The line is cut in the datagram's direction only.
    CutThere,
    /// The datagram arrives, and the line back is cut for a while.
    CutBack,
    /// The receiving machine dies.
    ReceiverDies,
    /// The sending machine dies.
    SenderDies,
    /// The receiving program stalls for a while.
    ReceiverStalls,
    /// The line delays everything in both directions from the next datagram on.
    Hold,
    /// The line delays everything in the datagram's direction.
    HoldThere,
}

impl SingleFault {
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

/// A fault injected at one step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct FaultCase {
    #[serde(rename = "mishap")]
    pub(crate) fault: SingleFault,
    /// Number of datagrams that have arrived before.
    pub(crate) after: u64,
    /// Duration of the fault in nanoseconds; for a dying machine the upper limit.
    pub(crate) lasts: u64,
}

/// Base runs: one path and two, with chunk keys refreshed and not.
const BASE_RUNS: u64 = 4;
/// Seeds of each step in [`Scenario::SingleFault`], counted from step 0: each fault in each base
/// run. Seeds of steps after the end of a base run show it undisturbed.
pub const SEEDS_OF_STEP: u64 = BASE_RUNS * SingleFault::ALL.len() as u64;

/// Returns the plan of a seed, and the random generators of its base run, which all seeds of that
/// run share.
pub(crate) fn draw(seed: u64) -> (Plan, [Rng; 2]) {
    let (step, rest) = (seed / SEEDS_OF_STEP, seed % SEEDS_OF_STEP);
    let (base_run, fault) = (rest % BASE_RUNS, rest / BASE_RUNS);
    let mut plan = base_run_plan(base_run);
    let (fault, mut rng) = (SingleFault::ALL[fault as usize], Rng::new(seed));
    let lasts = match fault {
        SingleFault::Hold | SingleFault::HoldThere => hold_length(&mut rng),
        _ => rng.magnitude(MS, 10 * SEC),
    };
    plan.single_fault = Some(FaultCase { fault, after: step, lasts });
    (plan, [Rng::new(base_run), Rng::new(base_run + BASE_RUNS)])
}

/// Draws how long a line delays what it carries: a little longer than one of the times after which
/// a device gives up. So the datagrams arrive when requests have moved to another path, before the
/// server has given up the first.
pub(crate) fn hold_length(rng: &mut Rng) -> u64 {
    rng.pick(&[500 * MS, 3 * SEC]) + rng.below(1400 * MS)
}

fn base_run_plan(base_run: u64) -> Plan {
    let (paths, invalidate) = (1 + base_run as usize % 2, base_run < 2);
    let mut rng = Rng::new(base_run);
    let mut plan = loop {
        let mut extra = Rng::new(rng.next());
        let plan = Plan::draw(&mut rng, &mut extra, Some(Scenario::Calm));
        if plan.clients[0].paths.len() == paths && plan.invalidate == invalidate {
            break plan;
        }
    };
    plan.scenario = Scenario::SingleFault;
    plan.nodes.truncate(2);
    plan.clients.truncate(1);
    let client = &mut plan.clients[0];
    client.disks.truncate(1);
    client.disks[0].takes = (20_000, MS);
    client.leaves = 0;
    (client.requests, client.request_max, client.gap, client.swap) = (10, 8192, MS, 0);
    (client.io_connections, client.queues) = (1, true);
    // Keeps the number of heartbeats low.
    plan.heartbeat.0 = 5 * SEC;
    plan.active = 12 * SEC;
    // A fault may come when other runs are already past their last fault.
    plan.final_io = false;
    plan
}
