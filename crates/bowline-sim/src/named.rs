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

const SEEDS: &[NamedSeed] = &[
    seed(
        "partial-first-write",
        71,
        "A partial write of a link's first message left its bytes in the plan.",
    ),
    seed(
        "unowned-port-residue",
        75,
        "A connection whose source port names no free path waited while others were down.",
    ),
    seed(
        "room-during-write",
        154,
        "Room that TCP reported during a write was forgotten; the link stayed blocked for ever.",
    ),
    seed(
        "silence-is-no-kernel",
        197,
        "A stopped bowline node took its peer for a kernel, which knew better and reset it.",
    ),
    seed(
        "fewer-paths-residue",
        270,
        "The port rule took the port modulo 8 also when fewer paths are agreed.",
    ),
    seed(
        "greeting-wait-ends",
        661,
        "A map alone ended the wait for the greeting, and messages came again under other numbers.",
    ),
    seed(
        "gate-without-path",
        798,
        "A waiting connection that was given another path left the first without any.",
    ),
    seed(
        "probe-before-path",
        857,
        "A probe that came before its connection had a path was answered on one that was down.",
    ),
    seed(
        "congested-restart-path",
        1352,
        "A restarted kernel's only connection had been taken for another path.",
    ),
    seed(
        "congested-restart",
        1507,
        "A peer that restarts while a port is congested never says that it is free.",
    ),
    seed(
        "kernel-after-bowline",
        1748,
        "A kernel at an address where a bowline node had been was never let in.",
    ),
    seed(
        "stopped-half-minute",
        2096,
        "Three silent seconds of a stopped process turned end-to-end release into TCP's.",
    ),
    seed(
        "acceptor-numbers-paths",
        2166,
        "An acceptor that takes its peer for a kernel numbers paths its own way.",
    ),
    seed(
        "overtaken-by-copies",
        3376,
        "Bytes on a half-dead connection arrived after the flagged copies of later ones.",
    ),
    seed(
        "nothing-heard",
        3499,
        "A bowline peer of which nothing was heard was taken for a kernel.",
    ),
    seed(
        "lost-with-old-connections",
        4553,
        "What a restarted kernel had sent before it said so was lost.",
    ),
    seed(
        "connections-before-restart",
        6146,
        "Connections a restarted kernel had made before it said so were closed.",
    ),
    seed(
        "same-number-two-paths",
        6153,
        "Messages of two paths with the same number and content were taken for one.",
    ),
    seed("probe-names-no-path", 8550, "Silence turned a bowline peer into a kernel."),
    seed(
        "pong-opens-gate",
        12_527,
        "A pong on a path that was down kept the paths closed that would have opened it.",
    ),
    seed(
        "lost-greeting",
        14_189,
        "A map that came and a greeting that was lost looked like a kernel.",
    ),
    seed(
        "cut-drops-read-bytes",
        16_230,
        "A cut threw away bytes that had been read and that a kernel had freed.",
    ),
    seed(
        "rejected-for-ever",
        20_336,
        "A restarted kernel took one path's connection for another and rejected the other for ever.",
    ),
    seed("late-acknowledgement", 22_262, "Two paths kept each other's connections."),
    seed(
        "port-rule-learnt-late",
        31_442,
        "A link placed before the port rule was known kept the path of another.",
    ),
    seed(
        "greeting-of-the-dead",
        44_906,
        "A delayed greeting of a process that had ended made the node forget its successor.",
    ),
];

const fn seed(name: &'static str, seed: u64, about: &'static str) -> NamedSeed {
    NamedSeed { name, seed, scenario: None, about }
}
