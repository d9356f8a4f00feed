//! What tests of several crates share: skipping with a reason, processes of their own, namespaces
//! without the nodes of this machine, counting allocations, system calls that a confined process
//! should not have, and, by features, peers of tests that are not bowline.
//!
//! Every crate may use it for its tests, so it uses other crates of the workspace by features only,
//! and none that has a feature of it in turn.
#![deny(unsafe_code)]

pub mod allocations;
pub mod apart;
#[cfg(feature = "wire")]
pub mod cm;
pub mod headers;
pub mod processes;
#[cfg(feature = "verbs")]
pub mod rtrs_peer;
pub mod skipped;
pub mod system_calls;
