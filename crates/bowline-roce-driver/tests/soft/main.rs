//! Soft devices of one process. Tests that count what the process uses, or want it for themselves,
//! are programs of their own.

#[path = "../common/mod.rs"]
mod common;
mod direct_placement;
mod groups;
mod loss;
mod share;
mod verbs;
