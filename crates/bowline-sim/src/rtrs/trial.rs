//! Trials: events some runs must survive besides their faults. A program is silent for so long that
//! its peers must notice; a server is closed and started again while it is in use; a device fails
//! without reporting it.

use serde::{Deserialize, Serialize};

use super::plan::Scenario;
use crate::engine::queue::{MS, SEC, US};
use crate::engine::rng::Rng;

/// A trial of a run; it happens once.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Trial {
    pub(crate) what: TrialKind,
    /// Nanoseconds since the start of the run.
    pub(crate) at: u64,
}

/// The kinds of trials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TrialKind {
    /// The program of this machine does nothing while its devices still respond: only heartbeats
    /// reveal it.
    Silence { node: usize },
    /// The server closes all sessions and ends; its machine starts again `away` nanoseconds later.
    Restart { away: u64 },
    /// A device of this machine ignores commands for its present queue pairs, until these are
    /// destroyed.
    Mute { node: usize, device: usize },
}

/// Draws the trials of a run.
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
        add(rng, TrialKind::Silence { node });
    }
    let restart = match scenario {
        S::Crash | S::Slow | S::Paths => 300,
        S::Swarm => 100,
        _ => 0,
    };
    if rng.chance(restart) {
        let away = rng.magnitude(US, 5 * SEC).max(MS);
        add(rng, TrialKind::Restart { away });
    }
    let mute = match scenario {
        S::Cuts | S::Keys | S::Paths => 300,
        S::Swarm => 100,
        _ => 0,
    };
    if rng.chance(mute) {
        let node = rng.index(nodes);
        let device = rng.index(8);
        add(rng, TrialKind::Mute { node, device });
    }
    trials
}
