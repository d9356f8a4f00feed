//! Simulator of RoCEv2 devices: real cores, their programs, and everything between them.
//!
//! A seed draws 2 to 4 devices, a network that loses, repeats, reorders, damages and cuts, and
//! connections over which programs post every kind of request, right and wrong ones. After every
//! step the oracle checks that
//!
//! - every request completes once, in order, with its operation carried out, or with a failure that
//!   has a reason;
//! - datagrams arrive unchanged, or not at all, and messages of unreliable connections in order
//!   besides;
//! - messages arrive once, in order, whole, in the receive whose turn it is;
//! - the results of requests that a side saw succeed are in the peer's memory, and atomics are
//!   carried out once;
//! - no other byte of any memory ever changes;
//! - at the end every connection ends, and no timer, queue pair, region or connection is left.
//!
//! ```text
//!   programs (app, connections) -- verbs --> devices (host: real core + driver) -- net --> devices
//!        |                                                                            |
//!      oracle: sides <--- completions, memory byte for byte ------------------------- +
//! ```
//!
//! ```
//! use bowline_sim::roce;
//! let outcome = roce::run(1, &roce::Options::default());
//! assert!(outcome.failure.is_none(), "{}", outcome.report());
//! ```

mod app;
pub mod congestion;
mod connections;
mod datagrams;
pub(crate) mod host;
mod memory;
pub(crate) mod mute;
pub(crate) mod net;
mod oracle;
pub(crate) mod plan;
pub(crate) mod reach;
mod remote;
mod run;
mod sabotage;
mod side;
mod stats;
mod streams;
mod world;

pub use plan::Scenario;
pub use run::{Options, Outcome, Summary, keep, run, run_kept, run_many};
pub use stats::Stats;
