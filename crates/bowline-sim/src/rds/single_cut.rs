//! Runs in which one connection is lost, at every work request in turn: the seed enumerates work
//! requests, ways to lose the connection and base runs instead of drawing them.
//!
//! A base run is that of two nodes over RDMA, from the first request for a connection on; in one of
//! them messages have RDMA operations. Up to the loss all seeds of a base run are identical.

use serde::{Deserialize, Serialize};

use super::ops::OpsPlan;
use super::plan::{NodeKind, Plan, Scenario};
use crate::engine::queue::{MS, SEC, US};
use crate::engine::rng::Rng;

/// The place where a work request is when its connection is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Place {
    /// It was posted, and nothing of it is sent.
    Posted,
    /// The peer's NIC has taken it or carried it out, and has not acknowledged it.
    Done,
}

/// The end that a connection is lost at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    Both,
    /// The end that sends the request; it tells the other, or does not.
    Sender {
        tells: bool,
    },
    Receiver {
        tells: bool,
    },
}

const PLACES: [Place; 2] = [Place::Posted, Place::Done];
const ENDS: [End; 5] = [
    End::Both,
    End::Sender { tells: true },
    End::Sender { tells: false },
    End::Receiver { tells: true },
    End::Receiver { tells: false },
];

/// The loss of a connection at one work request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct CutCase {
    /// Number of work requests that have come to the place before.
    pub(crate) after: u64,
    pub(crate) place: Place,
    pub(crate) end: End,
}

/// Base runs: without operations and with them.
const BASE_RUNS: u64 = 2;
/// Seeds of each work request in [`Scenario::RdmaStep`]: each way in each base run. Seeds of work
/// requests after the end of a base run show it undisturbed.
pub const SEEDS_OF_REQUEST: u64 = BASE_RUNS * (PLACES.len() * ENDS.len()) as u64;

/// Returns the plan of a seed, and the random generator of its base run.
pub(super) fn draw(seed: u64) -> (Plan, Rng) {
    let (after, rest) = (seed / SEEDS_OF_REQUEST, seed % SEEDS_OF_REQUEST);
    let (base_run, way) = (rest % BASE_RUNS, (rest / BASE_RUNS) as usize);
    let mut plan = base_run_plan(base_run);
    if let Some(rdma) = &mut plan.rdma {
        let (place, end) = (PLACES[way % PLACES.len()], ENDS[way / PLACES.len()]);
        rdma.cut = Some(CutCase { after, place, end });
    }
    (plan, Rng::new(base_run))
}

fn base_run_plan(base_run: u64) -> Plan {
    let operations = base_run == 1;
    let mut rng = Rng::new(base_run);
    let fits = |plan: &Plan| {
        let small = plan.nodes.len() == 2 && (2..=4).contains(&plan.senders.len());
        let free = plan.nodes.iter().all(|node| {
            matches!(node.kind, NodeKind::Bowline { recv_limit: None, tight: None, .. })
        });
        let answered = plan.rdma.as_ref().is_some_and(|rdma| rdma.ops.is_some());
        let all = (0..plan.slots.len()).all(|slot| plan.over_rdma(slot));
        small && free && all && answered == operations && plan.senders.iter().all(|s| !s.pings)
    };
    let mut plan = loop {
        let plan = Plan::draw(&mut rng, Some(Scenario::Rdma));
        if fits(&plan) {
            break plan;
        }
    };
    plan.scenario = Scenario::RdmaStep;
    plan.faults.clear();
    (plan.net.loss_permille, plan.net.cut_permille, plan.net.port_permille) = (0, 0, 0);
    (plan.active, plan.net.delay) = (2 * SEC, (10 * US, 300 * US));
    for sender in &mut plan.senders {
        sender.messages = 30;
        sender.size_max = sender.size_max.min(12 << 10);
        (sender.burst, sender.gap, sender.start) = (2, MS, 0);
    }
    if let Some(rdma) = &mut plan.rdma {
        (rdma.break_permille, rdma.late_permille) = (0, 0);
        // A loss that nobody tells of shows soon.
        (rdma.retries, rdma.timeout, rdma.cm_timeout) = (1, 50 * MS, 200 * MS);
        for node in &mut rdma.nodes {
            node.deaf_permille = 0;
            node.solicited = false;
        }
        if operations {
            rdma.ops = Some(OpsPlan {
                announce: 300,
                share: 900,
                once: 300,
                free: 0,
                bad: 0,
                notify: 1000,
                recverr: 500,
                silent: 200,
                fence: 300,
                breaks: 0,
                refuse: 0,
                size_max: 4096,
            });
        }
    }
    plan
}
