//! Coverage: names for every situation that runs can reach, so that one that no seed reaches shows.

use crate::engine::coverage::Coverage;

/// What a process that is killed is at.
const KILLED: [&str; 20] = [
    "running",
    "greeting",
    "open",
    "bind",
    "attach",
    "connect",
    "option",
    "name",
    "name behind many requests",
    "send",
    "send at once",
    "send on a channel",
    "receive",
    "receive from the node",
    "poll",
    "poll for room",
    "flush",
    "time",
    "a node",
    "the end of a socket",
];

pub(super) fn declare(coverage: &mut Coverage) {
    coverage.declare("killed", &KILLED);
    coverage.declare("a program has", &["its quota", "no node"]);
    let does = [
        "close a socket",
        "send many requests at once",
        "fork",
        "interrupt a call",
        "connect a socket",
        "change a buffer",
        "write past the library",
    ];
    coverage.declare("a program does", &does);
    coverage.declare("a send is", &["refused", "given up", "interrupted"]);
    coverage.declare("a node", &["is killed", "hands over", "resumes", "starts again"]);
    coverage.declare("at rest", &["pushed and stalled", "a sender waits", "nothing"]);
}
