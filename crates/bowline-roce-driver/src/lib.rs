//! RoCEv2 over UDP sockets: the soft provider of the verbs in `bowline-verbs`.
#![deny(unsafe_code)]

mod capture;
mod clock;
mod stats;
mod sys;
mod udp;

pub use stats::DriverStats;
pub use udp::ROCE_PORT;
