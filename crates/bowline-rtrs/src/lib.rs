//! The RTRS protocol as state machines: client and server sessions of several paths, without I/O.
//!
//! Both cores order work of a device and are told what came of it, in the words of this module;
//! they know no sockets, threads or clocks. Rules are those of `docs/spec/rtrs.md` (`[RT-1]`,
//! `[RS-1]`).
#![forbid(unsafe_code)]

pub mod bind;
pub mod client;
mod config;
mod hb;
mod ids;
mod policy;
pub mod server;
mod wr;

pub use bowline_base::{Errno, Instant};
pub use config::{HbConfig, PortAttr};
pub use hb::{Heartbeat, HeartbeatAction};
pub use ids::{ConnId, MemRef, PATHS_MAX, PathId, PortId, RegionId, RequestId, Tag};
pub use policy::Policy;
pub use wr::{Batch, Done, Input, Order, QpShape, RecvSlot, RegionKeys, RegionPorts, Wr, WrKind};

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
