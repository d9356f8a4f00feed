//! Tests of the core over wires in memory: one program, because linking each file takes longer
//! than running it.

mod answers;
mod batches;
mod bursts;
mod cm;
#[path = "../common/mod.rs"]
mod common;
mod data;
mod datagrams;
mod direct_placement;
mod drain;
mod errors;
mod hostile;
mod joined;
mod late;
mod loss;
mod multicast;
mod notifications;
mod overdue;
mod placed;
mod shared_receives;
mod states;
mod unreliable;
mod windows;
