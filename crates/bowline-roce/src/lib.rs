//! RoCEv2 as a state machine: queue pairs, memory keys, completions and the connection manager.
//!
//! [`Device`] takes datagrams, requests and the time, and returns datagrams and events; it has no
//! sockets, threads or clocks. Spec: `docs/spec/roce.md`.
//!
//! A complete driver, except for waiting:
//!
//! ```
//! use bowline_roce::{Burst, Config, Device, Event, IdentHint, Instant};
//! # fn now() -> Instant { Instant::from_nanos(1) }
//! # fn random() -> [u8; 32] { [7; 32] }
//! # fn receive() -> Option<(std::net::SocketAddr, std::net::IpAddr, Vec<u8>)> { None }
//! # fn send(_: &Burst) {}
//! # fn tell(_: Event) {}
//! # fn wait_until(_: Option<Instant>) {}
//!
//! let config = Config { addrs: vec!["10.0.0.1".parse()?], ..Config::default() };
//! let mut device = Device::new(config, random());
//! let mut burst = Burst::new();
//! // For ever:
//! while let Some((from, to, payload)) = receive() {
//!     device.handle_datagram(now(), from, to, IdentHint::Unknown, &payload);
//! }
//! device.handle_timeout(now());
//! while device.poll_transmit(now(), &mut burst) {
//!     send(&burst); // all of it at once, to port 4791 of `burst.to`
//! }
//! while let Some(event) = device.poll_event() {
//!     tell(event);
//! }
//! wait_until(device.poll_timeout());
//! # Ok::<(), std::net::AddrParseError>(())
//! ```
#![forbid(unsafe_code)]

// Test helpers shared with `tests/` refer to this crate by its name.
#[cfg(test)]
extern crate self as bowline_roce;

mod burst;
mod cm;
mod config;
mod congestion;
mod counters;
mod cq;
mod delayed_ack;
mod device;
mod gso_loss;
mod incoming_write;
mod mr;
mod mw;
mod qp;
mod rc;
mod recvq;
mod rng;
mod sendq;
mod srq;
mod table;
mod uc;
mod ucsend;
mod ud;
mod udsend;

pub use bowline_base::Instant;
pub use burst::{BURST_BYTES_MAX, BURST_SEGMENTS_MAX, Burst, burst_payload};
pub use cm::{CmConfig, FormerConnection};
pub use config::{Config, GiveUp, Limits};
pub use congestion::Congestion;
pub use counters::Counters;
pub use device::{
    Device, DirectPlacement, Event, GroBuffer, IdentHint, InUse, OpenMessage, PLACEMENT_GAP,
    PLACEMENT_HEAD, PLACEMENT_PACKETS_MAX, PlacementOutcome,
};
