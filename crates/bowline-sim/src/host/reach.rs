//! Coverage: names for every situation that runs can reach, so that one that no seed reaches shows.

use crate::engine::coverage::Coverage;

/// What a process that is killed is at.
const KILLED: [&str; 12] = [
    "running",
    "greeting",
    "open",
    "bind",
    "send",
    "send at once",
    "receive",
    "receive from the node",
    "poll",
    "poll for room",
    "flush",
    "time",
];

pub(super) fn declare(coverage: &mut Coverage) {
    coverage.declare("killed", &KILLED);
    coverage.declare("a program has", &["its quota", "no node"]);
    coverage.declare("a program does", &["close a socket", "send many requests at once", "fork"]);
    coverage.declare("a send is", &["refused", "given up"]);
    coverage.declare("a node", &["is killed", "hands over", "resumes", "starts again"]);
    coverage.declare("at rest", &["pushed and stalled", "a sender waits", "nothing"]);
}
