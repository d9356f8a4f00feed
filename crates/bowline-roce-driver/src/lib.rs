//! RoCEv2 over UDP sockets: the soft provider of the verbs in `bowline-verbs`.
//!
//! A [`SoftDevice`] is a NIC in userspace: one core of `bowline-roce` under one lock, one UDP
//! socket for each address, and one background thread. The data path has no thread hand-over:
//!
//! ```text
//!   application thread            core (under the lock)        sockets
//!   post_send -- request --------> queue pair
//!        \---------- bursts of packets <-- poll_transmit ---- no lock ---> sendmsg, UDP_SEGMENT
//!   poll_cq <--- completion ------ completion queue
//!        \--- nothing there: reads itself --- recvmmsg, UDP_GRO ---> handle_datagram
//!                                             within a long message: recvmsg into place
//!                                             and sends the acknowledgements of the batch, or has
//!                                             the program's next sends take them along
//!   wait_cq  polls for 25 us, then sleeps on the sockets
//!
//!   between processes of one host: rings in memory in the place of the sockets
//!   background thread: timers, and the sockets while no application thread polls or waits
//! ```
//!
//! Spec: `docs/spec/roce.md`, sections 1, 3 and 10.
#![deny(unsafe_code)]

mod by_ring;
mod capture;
mod config;
mod connection_files;
mod cuts;
mod device;
mod early;
mod fault;
mod followers;
mod groups;
mod helper;
mod identity;
mod impair;
mod line;
mod receive;
mod send;
mod share;
mod shared;
mod stats;
mod sys;
#[cfg(test)]
mod tests;
mod udp;
mod wait;
mod watch;

pub use bowline_roce::InUse;
pub use bowline_wire::roce::IcrcPolicy;
pub use config::{FormerConnections, PollMode, SoftConfig};
pub use device::SoftDevice;
pub use early::EarlySockets;
pub use identity::node_guid;
pub use impair::{Impairment, ImpairmentError, Impairments};
pub use share::{Guest, Host, Joined, PortSpace, Seen};
pub use stats::DriverStats;
pub use sys::{interface, machine_addrs};
pub use udp::ROCE_PORT;
pub use watch::Watch;
