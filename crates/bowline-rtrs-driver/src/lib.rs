//! RTRS over any verbs: runs the state machines of `bowline-rtrs` and offers the library API.
//!
//! ```text
//!   client::Session   requests ──┐                          ┌── server::Handler
//!                                │  core, under its lock    │   (rdma_ev, link_ev)
//!   call, wait, poll: the thread │  Executor ── Binding     │  bowline-rtrs-srv: a thread takes
//!   that waits takes completions │   │                      │  completions and runs the handler
//!                                └── bowline_verbs::Device ─┘
//! ```
//! An [`Engine`] holds the devices and the threads. Nothing is allocated for a request, once queues
//! have grown to their size.
#![deny(unsafe_code)]

pub mod client;
mod completions;
mod engine;
mod error;
mod executor;
#[cfg(feature = "tracing")]
mod log;
mod port;
mod random;
pub mod server;
mod stats;
pub mod tree;

pub use bowline_rtrs::{Errno, HbConfig, MemRef, PathId, Policy, PortId, RegionId};
pub use bowline_wire::rtrs::{Dir, Geometry, PORT, SessionName};
pub use engine::{Engine, EngineConfig, Poll};
pub use error::{Error, ErrorKind};
pub use stats::DriverStats as EngineStats;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
