//! The rules of `docs/spec/rds.md`, section by section, on the node as its driver sees it.
#[path = "../support/mod.rs"]
mod support;

mod congestion;
mod connect;
mod send;
mod sockets;
mod transmit;
