//! Congestion: real devices at a switch whose ports have a rate, a short queue and a delay, in
//! virtual time, and what comes of it: goodput, fairness, percentiles, drops.
//!
//! A *cell* is one such network with its programs, and what is expected there. Rates of 400 Gb/s
//! need no such machine, only patience: a cell's time is bounded by the packets it may take.
//!
//! | module | |
//! | --- | --- |
//! | `link` | rate, queue with a limit and an ECN threshold, delay, faults |
//! | `station` | a host: a device, and programs that keep requests posted |
//! | `cubic` | a foreign TCP flow |
//! | `world` | the run |
//! | `cells` | which cells there are, and what is expected in them |
//! | `floors` | what each of them keeps |
//! | `measure` | fairness, percentiles |
//!
//! What is moved is checked as well: requests complete once, in order, with success, and the memory
//! they concern is the same on both sides at the end.

mod cells;
mod cubic;
mod floors;
mod link;
mod measure;
mod station;
mod world;

pub use self::cells::{Cell, Change, Operation, cells};
pub use self::link::LinkPlan;
pub use self::world::{Report, run};
