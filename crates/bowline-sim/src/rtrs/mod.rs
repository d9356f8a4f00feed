//! Simulator of RTRS sessions and RNBD disks: real cores of both sides on real RoCEv2 devices.
//!
//! A seed draws a server and clients with one to three devices each, a network, sessions of one or
//! more paths and disks, and what goes wrong: cut lines, lines that hold what they are given and
//! deliver it late, lost datagrams, machines that die, programs that stall or are silent for long,
//! storage that takes seconds, a server that is closed and started again, devices that fail without
//! a word, paths and disks that come and go, clients that write where they must not. The judges
//! check after every step that
//!
//! - every request ends once, and without an error where none is allowed: a session gives none up
//!   while a path is connected;
//! - a path to a silent peer is given up in time, and all paths when the server closes;
//! - what is read from a disk is what was written to it last, and never to another, also after
//!   failovers, and after a crash of the server what had been made durable;
//! - a chunk does not change while the server has it: that of a WRITE, since that of a READ is the
//!   server's to write; and of hostile clients only of those with one path and keys that are
//!   refreshed, since by the key of another path they can change their own data [RT-44];
//! - in the end every path is back, all of every disk can be read, every permit is returned, every
//!   session closes, and nothing is left on any device.
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

mod base;
mod client;
mod disk;
mod each;
mod fabric;
mod oracle;
mod plan;
mod process;
mod reach;
mod remote;
mod run;
mod sabotage;
mod server;
mod stats;
mod trial;
mod world;

pub use each::SEEDS_OF_STEP;
pub use plan::Scenario;
pub use run::{Options, Outcome, Summary, keep, run, run_kept, run_many};
pub use stats::Stats;
