//! Runs a sans-IO RDS node over real TCP connections.
//!
//! One [`Driver`] is one node: listeners on port 16385, the TCP connections the core asks for, one
//! lock around the core, and one background thread. The data path has no thread hand-over:
//!
//! ```text
//!   application thread            core (under the lock)        sockets
//!   send ---- copy into log -----> Node::send
//!        \--- 64 KiB or idle ----> poll_transmit ----- no lock -----> write
//!   recv <--- message ------------ Node::recv
//!        \--- nothing there -----> takes the lead, reads the connections itself
//!
//!   helper thread: timers, unflushed rests, and the lead while no application thread waits
//! ```
//!
//! The lock is never held over a system call that waits for somebody. A few are made under it:
//! reading how much TCP has acknowledged, writes to event descriptors, closing what ends with the
//! node, and what ends with the last use of memory for RDMA (its registration at the device, and a
//! message to the program that owns it). A node that hands over writes its state down under it.
//! ARCHITECTURE.md, "Threads and locks", has the order of all locks.
//!
//! A process must not `fork` and go on using a driver in the child: the background thread exists
//! only in the parent.

#![deny(unsafe_code)]

mod calls;
mod config;
mod cut;
mod dial;
mod driver;
mod error;
mod flush;
mod helper;
mod link;
mod listen;
#[cfg(feature = "tracing")]
mod log;
mod poller;
mod rdma;
mod read;
mod shared;
mod stats;
mod sys;
mod todo;
mod waiters;

pub use config::{DriverConfig, PollMode};
pub use driver::{Blocking, Driver, Lender};
pub use error::Error;
pub use helper::{Background, Turn};
pub use rdma::{RdmaDevices, RdmaMemory};
pub use stats::DriverStats;

pub use bowline_verbs::{ForeignMemory, ProcessFile};

/// TCP port of RDS, the same on every node [spec 2.1].
pub const RDS_TCP_PORT: u16 = 16_385;
