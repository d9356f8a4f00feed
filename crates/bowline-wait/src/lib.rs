//! Who reads the network while threads wait: the part of it that needs no network, in one place,
//! and checked by running it in thousands of orders (`cargo xtask model`).
//!
//! The thread that waits reads the network for all (`docs/decisions/0002`); ARCHITECTURE.md has the
//! picture ("Waiting"). Three drivers do that, and differ in this:
//!
//! | | RDS | RoCE | RTRS |
//! |---|---|---|---|
//! | the lead is | a value: [`Lead`] | a value: [`Lead`] | a lock: [`DeviceLeads`] |
//! | followers | [`Waiter`], first come | condition variable | [`Followers`], last come |
//! | a leader's sleep ends by | an event descriptor | an event descriptor | completions |
//! | polling before it | while that pays: [`PollBudget`] | the same | as the provider does |
//!
//! - **The lead.** RDS and RoCE read into one core, whose lock they hold when they decide who
//!   leads. RTRS takes completions of each device without the core's lock.
//! - **Followers.** A message of RDS is for the readers of one socket: only these are woken, and
//!   the lead goes to the one that has waited longest. A queue of RoCE may be anyone's, so all
//!   look. A request of RTRS is one thread's; the lead goes to the one whose data is still in the
//!   cache.
//! - **A sleeping leader.** RDS notes until the leader has run that it has been woken, RoCE takes
//!   it for awake at once. In RTRS all work for a leader comes through its device.

#![forbid(unsafe_code)]

mod device_leads;
mod followers;
mod lead;
mod poll_budget;
mod processors;
mod sync;
mod waiter;

pub use device_leads::{DeviceGone, DeviceLeads, Devices, WaitFor, Waits};
pub use followers::Followers;
pub use lead::{Lead, Leader, Others};
pub use poll_budget::PollBudget;
pub use processors::has_one_processor;
pub use waiter::Waiter;
