//! Simulator of whole bowline clusters: real cores, real framing, one thread, virtual time.
//!
//! A *seed* draws a cluster of 2 to 16 hosts (bowline nodes of several settings, kernel peers),
//! the network between them, users who send and receive, and a set of faults. The run moves from
//! event to event; after every step the node concerned checks its own invariants and the judges
//! check the promises:
//!
//! - every message comes exactly once and in order per pair of sockets, byte for byte;
//! - nothing is lost while both sockets live, but what the rules give up to a kernel peer;
//! - nobody who can go on is left asleep;
//! - after the last fault everything comes to its end in bounded time;
//! - when all sockets are closed nothing is left.
//!
//! ```text
//!   users (world) -- send, recv, wake --> hosts: real Node + driver | kernel peer by the rules
//!        |                                        |
//!     oracle <--- what was sent, came, may be lost --- net: TCP streams, buffers, every failure
//! ```
//! The same seed gives the same run on every machine. RoCEv2 devices, and
//! sessions and disks over them, have worlds of their own: [`roce`], [`rtrs`].
//!
//! ```
//! let outcome = bowline_sim::run(1, &bowline_sim::Options::default());
//! assert!(outcome.failure.is_none(), "{}", outcome.report());
//! ```
#![forbid(unsafe_code)]

mod bowline;
mod coverage;
mod ctx;
mod host;
mod kept;
mod kernel;
mod net;
mod oracle;
mod payload;
mod plan;
mod queue;
mod rds;
mod reach;
mod rng;
pub mod roce;
pub mod rtrs;
mod run;
mod sabotage;
mod simulator;
mod stats;
mod trace;
mod world;

pub use coverage::{Coverage, Reach};
pub use kept::{NotAPlan, simulator_of};
pub use plan::Scenario;
pub use rds::{keep, run, run_kept, run_many};
pub use run::{Failure, News, Options, Outcome, Summary};
pub use stats::{Numbers, Stats};
pub use trace::TraceMode;
