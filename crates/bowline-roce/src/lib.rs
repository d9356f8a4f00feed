//! RoCEv2 as a state machine: queue pairs, memory keys, completions and the connection manager.
//!
//! [`Device`](crate) takes datagrams, requests and the time, and returns datagrams and events; it
//! knows no sockets, threads or clocks. Spec: `docs/spec/roce.md`.
#![forbid(unsafe_code)]

mod time;

pub use time::Instant;
