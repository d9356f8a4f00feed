//! The client: one session with its paths as a state machine.
//!
//! ```text
//!             +--------- failed ---------+       +----- remove ----> gone
//!             v                          |       |
//!  start -> Connecting -> ConnectingErr -+-> Closed <- Closing <- (any, on order)
//!             ^  |                           |
//!             |  +--> Connected              | reconnect
//!             |           | error            v
//!             +------- Reconnecting <--------+
//! ```
//!
//! A *path* is a pair of addresses and lives as long as the program wants it to. What carries IO is
//! a *link*: one attempt to connect a path, with its connections, the server's chunk keys and the
//! receives posted. Every attempt is a new link, so that an old one can be taken down in the
//! background while the next one is made [RT-91]. A [`ConnId`](crate::ConnId) names a connection of
//! a link; the `path` within it is the link's place and life, not the [`PathId`](crate::PathId) of
//! the path.
//!
//! The driving loop: give [`Session::handle`] the inputs, [`Session::handle_done`] the completions
//! and [`Session::handle_timeout`] the time, then carry out [`Session::poll_order`] until `None`
//! and [`Session::take_batch`], and look at [`Session::take_completed`] and
//! [`Session::poll_event`].
//!
//! Spec: `docs/spec/rtrs.md`.

mod config;
mod control;
mod establish;
mod keys;
mod lingering;
mod link;
mod notices;
mod path;
mod permits;
mod receive;
mod reconnect;
mod refusal;
mod regions;
mod request;
mod session;
mod stats;
mod teardown;

pub use config::{ClientConfig, ClientLimits, PathAddr, ReadKeys};
pub use path::{PathInfo, PathState};
pub use permits::{Permit, PermitKind};
pub use refusal::Refusal;
pub use session::{Attrs, Completed, Event, Session};
pub use stats::{ClientStats, Latencies, StatsFile};
