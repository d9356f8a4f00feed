//! What some runs have to stand besides their faults: a program that is silent for so long that its
//! peers must notice, a server that is closed and started again in the midst of everything, and a
//! device that fails and says nothing.

use serde::{Deserialize, Serialize};

use super::plan::Scenario;
use crate::engine::queue::{MS, SEC, US};
use crate::engine::rng::Rng;

/// Something a run has to stand, once.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Trial {
    pub(crate) what: Ordeal,
    /// Since the start of the run.
    pub(crate) at: u64,
}

/// What it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ordeal {
    /// The program of this machine does nothing at all, while its devices answer: only heartbeats
    /// tell.
    Silence { node: usize },
    /// The server closes all sessions and ends; its machine starts again after so long.
    Restart { away: u64 },
    /// A device of this machine does no more what it is told, until everything there was on it is
    /// removed.
    Mute { node: usize, device: usize },
}

/// Draws them.
pub(crate) fn draw(rng: &mut Rng, scenario: Scenario, nodes: usize, active: u64) -> Vec<Trial> {
    use Scenario as S;
    let mut trials = Vec::new();
    let mut add = |rng: &mut Rng, what| trials.push(Trial { what, at: rng.below(active) });
    let silence = match scenario {
        S::Stalls => 500,
        S::Swarm => 100,
        _ => 0,
    };
    if rng.chance(silence) {
        let node = if rng.chance(500) { 0 } else { 1 + rng.index(nodes - 1) };
        add(rng, Ordeal::Silence { node });
    }
    let restart = match scenario {
        S::Crash | S::Slow | S::Paths => 300,
        S::Swarm => 100,
        _ => 0,
    };
    if rng.chance(restart) {
        let away = rng.magnitude(US, 5 * SEC).max(MS);
        add(rng, Ordeal::Restart { away });
    }
    let mute = match scenario {
        S::Cuts | S::Keys | S::Paths => 300,
        S::Swarm => 100,
        _ => 0,
    };
    if rng.chance(mute) {
        let node = rng.index(nodes);
        let device = rng.index(8);
        add(rng, Ordeal::Mute { node, device });
    }
    trials
}
