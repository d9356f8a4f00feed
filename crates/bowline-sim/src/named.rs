//! Seeds with a history: each showed the bug it is named after.
//!
//! A change of what seeds draw makes them show something else; such a seed is found again by putting
//! the bug back and running many.

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

/// All of them, oldest bug first.
pub fn named_seeds() -> &'static [NamedSeed] {
    SEEDS
}

const fn named(name: &'static str, seed: u64, about: &'static str) -> NamedSeed {
    NamedSeed { name, seed, scenario: None, about }
}

const SEEDS: &[NamedSeed] = &[
    named("unplan-from-zero", 9, "a partial write of a path's first message left it in the plan"),
    named("room-during-write", 60, "room reported during a write that found none was forgotten"),
    named("resume-at-budget", 291, "a link was not read again when its buffer ended a turn"),
    named("greet-first", 446, "a bowline node took another for a kernel, or a kernel for one"),
    named("overtaken", 7038, "bytes late on a dying connection came after their copies"),
    named("remembered-congestion", 2347, "a sender waited for a map and nobody connected"),
    named("waiting-after-placing", 3610, "a connection that had got its path was never read"),
    named("lost-address", 92, "a late connection brought an address back that had moved away"),
    named("same-content", 6153, "equal messages of two paths were taken for one"),
    named("closing-greeting", 39239, "data on a connection being closed looked like misbehaviour"),
    named("late-last-words", 44906, "the greeting of a dead process made its successor forgotten"),
    named(
        "numbers-by-path",
        43450,
        "numbers that differed by path were dropped by a kernel as old",
    ),
    named(
        "accepted-after-its-successor",
        1416,
        "a dead process's connection, accepted late, made messages of its successor come twice",
    ),
    named("dialled-lane", 3080, "what an acceptor repeated on another path came twice"),
];
