//! What tests of several crates share: skipping with a reason, and counting allocations.
//!
//! Every crate may use it for its tests, so it uses no other crate of the workspace.
#![deny(unsafe_code)]

pub mod allocations;
pub mod skipped;
