//! What a run begins with, as text: a seed that failed is kept as the plan it drew, and stays what
//! it was when seeds come to draw something else.

use serde::{Deserialize, Serialize};

use super::rng::Rng;

/// What a run begins with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Start<P> {
    /// The run's generators of chance, in the state in which drawing the plan left them.
    pub(crate) chance: Vec<Rng>,
    pub(crate) plan: P,
}

/// A start with its history, as it is kept in a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept<P> {
    /// Which simulator it is for: `rds`, `roce` or `rtrs`.
    pub(crate) simulator: String,
    /// What it showed.
    pub(crate) about: String,
    /// The seed that drew it.
    pub(crate) seed: u64,
    pub(crate) start: Start<P>,
}

/// A text that is not a kept plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAPlan(pub(crate) String);

impl std::fmt::Display for NotAPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "not a plan of this simulator: {}", self.0)
    }
}

impl std::error::Error for NotAPlan {}

/// The simulator that the text of a kept plan is for: `rds`, `roce` or `rtrs`.
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
