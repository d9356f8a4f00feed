//! RoCEv2 as a state machine: queue pairs, memory keys, completions and the connection manager.
//!
//! [`Device`] takes datagrams, requests and the time, and returns datagrams and events; it knows no
//! sockets, threads or clocks. Spec: `docs/spec/roce.md`.
#![forbid(unsafe_code)]

mod burst;
mod cm;
mod config;
mod counters;
mod cq;
mod device;
mod mr;
mod qp;
mod rc;
mod recvq;
mod rng;
mod sendq;
mod table;
mod time;
mod ud;
mod udsend;

pub use burst::{BURST_BYTES_MAX, BURST_SEGMENTS_MAX, Burst};
pub use cm::{CmConfig, FormerLife};
pub use config::{Config, GiveUp, Limits};
pub use counters::Counters;
pub use device::{Device, Event, IdentHint, InUse};
pub use time::Instant;
