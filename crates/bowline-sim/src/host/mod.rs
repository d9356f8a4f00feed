//! Simulator of a host: the real server of a node, and programs that use its sockets.
//!
//! A seed draws one or two nodes, and processes of several users that open sockets, send and
//! receive through the rings of shared memory and by requests, fork, and end. Each process takes
//! one step at a time, and others go on between any two, also in the middle of what a node does.
//! Faults: processes are killed between any two steps, nodes are killed, nodes hand over, programs
//! write to shared memory what they must not, readers are slow, users want more than they may have.
//! The judge checks that
//!
//! - every message comes once, as it was sent and in order, to whoever still has the socket;
//! - nobody sleeps while there is something for it, nor the server while something is pushed;
//! - a send is refused for congestion where something waits, and only there, and no more waits
//!   than buffers are large;
//! - a request that waits for nothing is answered within a few rounds of the node, whatever others
//!   do;
//! - no user has more than its quota, and who has nothing costs nothing.
//!
//! ```text
//!   program -- rings (bowline-host-wire) -- host::core::Core -- RDS core == network == ...
//!      |                                          |
//!      +-- channel, descriptors: kernel.rs -------+
//! ```
//!
//! ```
//! use bowline_sim::host;
//! let outcome = host::run(1, &host::Options::default());
//! assert!(outcome.failure.is_none(), "{}", outcome.report());
//! ```

mod client;
mod judge;
mod kernel;
mod net;
mod node;
mod plan;
mod process;
mod program;
mod push;
mod reach;
mod run;
mod sabotage;
mod shared;
mod stats;
mod world;

pub use plan::Scenario;
pub use run::{Options, Outcome, Summary, keep, run, run_kept, run_many};
pub use stats::Stats;
