//! The start of a run as text. A seed that failed is kept as the plan it drew, so that the run
//! stays the same when seeds later draw other plans.

use serde::{Deserialize, Serialize};

use super::rng::Rng;

/// The start of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start<P> {
    /// The run's random generators, in the state in which they were left when the plan was drawn.
    pub(crate) chance: Vec<Rng>,
    pub(crate) plan: P,
}

/// A start with its history, as it is kept in a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept<P> {
    /// Name of the simulator: `rds`, `roce`, `rtrs` or `host`.
    pub(crate) simulator: String,
    /// The fault that the run showed.
    pub(crate) about: String,
    /// The seed that drew the start.
    pub(crate) seed: u64,
    pub(crate) start: Start<P>,
}

/// Error of a text that is not a kept plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAPlan(pub(crate) String);

impl std::fmt::Display for NotAPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "not a plan of this simulator: {}", self.0)
    }
}

impl std::error::Error for NotAPlan {}

/// Returns the simulator of the text of a kept plan: `rds`, `roce`, `rtrs` or
/// `host`.
///
/// # Errors
/// When the text is no kept plan.
pub fn simulator_of(text: &str) -> Result<String, NotAPlan> {
    #[derive(Deserialize)]
    struct Named {
        simulator: String,
    }
    let named: Result<Named, _> = serde_json::from_str(text);
    named.map(|n| n.simulator).map_err(|error| NotAPlan(error.to_string()))
}
