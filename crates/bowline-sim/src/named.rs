//! Seeds with a history: each once showed a bug, or covers something worth keeping.

use crate::plan::Scenario;

/// One seed worth running always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedSeed {
    /// A few words.
    pub name: &'static str,
    /// The seed.
    pub seed: u64,
    /// The scenario it is forced into, if any.
    pub scenario: Option<Scenario>,
    /// What it showed.
    pub about: &'static str,
}

/// All of them, oldest first.
pub fn named_seeds() -> &'static [NamedSeed] {
    SEEDS
}

const SEEDS: &[NamedSeed] = &[];
