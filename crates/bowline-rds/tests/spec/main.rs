//! The rules of `docs/spec/rds.md`, section by section, on the node as its driver sees it.
#[path = "../support/mod.rs"]
mod support;

mod bowline;
mod congestion;
mod connect;
mod ends;
mod info;
mod knock;
mod lend;
mod memory;
mod named_paths;
mod progress;
mod rdma;
mod rdma_hostile;
mod receive;
mod saved;
mod send;
mod sockets;
mod transmit;
