//! Simulator of clusters of RDS nodes: real cores and framing, kernel peers by the rules.
//!
//! A seed draws a cluster of 2 to 16 hosts (bowline nodes of several settings, kernel peers), the
//! network between them, users who send and receive, and a set of faults. The run moves from event
//! to event. After every step the node concerned checks its own invariants, and the oracle checks
//! the promises:
//!
//! - every message arrives exactly once and in order per pair of sockets, byte for byte;
//! - no message is lost while both sockets exist, except those that the rules let a kernel peer
//!   lose;
//! - no waiting user who can continue is left asleep;
//! - after the last fault all work ends in bounded time;
//! - when all sockets are closed nothing is left.
//!
//! ```text
//!   users (world) -- send, recv, wake --> hosts: real Node + driver | kernel peer by the rules
//!        |                                        |
//!     oracle <--- what was sent, came, may be lost --- net: TCP streams, buffers, every failure
//! ```
//!
//! ```
//! use bowline_sim::rds;
//! let outcome = rds::run(1, &rds::Options::default());
//! assert!(outcome.failure.is_none(), "{}", outcome.report());
//! ```

mod bowline;
mod ctx;
mod host;
mod kernel;
mod net;
mod ops;
mod oracle;
mod payload;
mod plan;
mod rdma;
mod reach;
mod run;
mod sabotage;
mod single_cut;
mod stats;
mod world;

pub use plan::Scenario;
pub use run::{Options, Outcome, Summary, keep, run, run_kept, run_many};
pub use single_cut::SEEDS_OF_REQUEST;
pub use stats::Stats;
