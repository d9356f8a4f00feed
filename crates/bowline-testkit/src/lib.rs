//! What tests of several crates share: skipping with a reason, processes of their own, counting
//! allocations, and system calls that a confined process should not have.
//!
//! Every crate may use it for its tests, so it uses no other crate of the workspace.
#![deny(unsafe_code)]

pub mod allocations;
pub mod processes;
pub mod skipped;
pub mod system_calls;
