//! Simulators of whole bowline clusters: real cores, real framing, one thread, virtual time.
//!
//! | module | simulates | judges |
//! | --- | --- | --- |
//! | [`rds`] | RDS nodes and kernel peers, over TCP and RDMA | messages: once, in order, none lost |
//! | [`roce`] | RoCEv2 devices and programs that use verbs | requests, memory byte for byte |
//! | [`host`] | nodes and the programs of their hosts | messages, wake-ups, quotas, answers |
//! | [`rtrs`] | RTRS sessions and RNBD disks over RoCEv2 | requests, chunks, data of disks |
//!
//! A *seed* draws a *plan*: who there is, the network between them, what users do and which faults
//! strike. The run moves from event to event, and after every step the judges check what the
//! protocol promises. The same seed gives the same run on every machine; a seed that failed is kept
//! as the plan it drew ([`rds::run_kept`]).
#![forbid(unsafe_code)]

mod engine;
pub mod host;
pub mod rds;
pub mod roce;
pub mod rtrs;

pub use engine::coverage::{Coverage, Reach};
pub use engine::kept::{NotAPlan, simulator_of};
pub use engine::numbers::Numbers;
pub use engine::run::{Failure, Options, Outcome, SearchEvent, Summary};
pub use engine::trace::TraceMode;
