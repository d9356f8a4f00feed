//! The daemon of bowline as a library: a node that serves programs and disks until it is told to
//! stop. It parses no command line; what its configuration says are values of its own types.

#![forbid(unsafe_code)]

// First, since its macros are used by all others.
#[macro_use]
pub mod log;
pub mod background;
pub mod config;
pub mod confine;
pub mod control;
pub mod daemon;
pub mod disks;
mod failure;
pub mod holder;
pub mod impair;
pub mod leases;
pub mod metrics;
pub mod mount;
pub mod namespaces;
#[cfg(feature = "options")]
pub mod options;
pub mod over_rdma;
pub mod programs;
pub mod rdma_device;
pub mod service_manager;
pub mod shares;
pub mod signals;
pub mod tentative;
pub mod values;
pub mod verbs;

pub use failure::{Failure, Outcome, node_on, start_node};
