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
//! A *path* is a pair of addresses and exists as long as the program wants it to. IO is carried by
//! an *incarnation* of the path: one attempt to connect it, with its connections, the server's
//! chunk keys and the posted receives. Every attempt is a new incarnation, so that an old one can
//! be torn down in the background while the next one is connected [RT-91]. A
//! [`ConnId`](crate::ConnId) names a connection of an incarnation; the `path` within it is the
//! incarnation's id, not the [`PathId`](crate::PathId) of the path.
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
mod incarnation;
mod keys;
mod lingering;
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
