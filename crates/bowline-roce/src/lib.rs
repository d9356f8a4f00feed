//! RoCEv2 as a state machine: queue pairs, memory keys, completions and the connection manager.
//!
//! The device takes datagrams, requests and the time, and returns datagrams and events; it knows no
//! sockets, threads or clocks. Spec: `docs/spec/roce.md`.
#![forbid(unsafe_code)]

mod cm;
mod counters;
mod mr;
mod rc;
mod recvq;
mod rng;
mod table;
mod time;
mod ud;

pub use cm::{CmConfig, FormerLife};
pub use counters::Counters;
pub use time::Instant;
