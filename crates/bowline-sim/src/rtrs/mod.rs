//! Simulator of RTRS sessions and RNBD disks: real cores of both sides on real RoCEv2 devices.
//!
//! A seed draws a server and clients with one to three devices each, a network, sessions of one or
//! more paths and disks, and faults: cut lines, lines that delay what they carry, lost datagrams,
//! machines that die, programs that stall or are silent for long, storage that takes seconds, a
//! server that is closed and started again, devices that fail silently, paths and disks that come
//! and go, clients that write where they must not. The judges check after every step that
//!
//! - every request ends once, and without an error unless one is allowed: a session fails no
//!   request while a path is connected;
//! - a path to a silent peer is given up in time, and all paths when the server closes;
//! - a read returns what was last written to that disk, and no other disk's data, also after
//!   failovers; and after a crash of the server it returns what had been made durable;
//! - a chunk of a WRITE does not change while the server has it (that of a READ is the server's to
//!   write); for hostile clients only if they have one path and keys are refreshed, since with the
//!   key of another path they can change their own data [RT-44];
//! - in the end every path is connected, all of every disk can be read, every permit is returned,
//!   every session closes, and nothing is left on any device.
//!
//! ```text
//!  program -- rnbd client core -- rtrs client core -- binding -- devices == net == devices
//!     |                                                                              |
//!   oracle <--- what is read                disks -- rnbd server core -- rtrs server core
//! ```
//!
//! ```
//! use bowline_sim::rtrs;
//! let outcome = rtrs::run(1, &rtrs::Options::default());
//! assert!(outcome.failure.is_none(), "{}", outcome.report());
//! ```

mod client;
mod context;
mod disk;
mod fabric;
mod oracle;
mod plan;
mod process;
mod reach;
mod run;
mod sabotage;
mod serde_defs;
mod server;
mod single_fault;
mod stats;
mod trial;
mod world;

pub use plan::Scenario;
pub use run::{Options, Outcome, Summary, keep, run, run_kept, run_many};
pub use single_fault::SEEDS_OF_STEP;
pub use stats::Stats;
