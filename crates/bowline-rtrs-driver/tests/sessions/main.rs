//! Sessions between a client and a server of one process. Tests that count what the process uses
//! are programs of their own.

#[path = "../common/mod.rs"]
mod common;
mod connections;
mod devices;
mod dropped;
mod failover;
mod io;
mod keys;
mod late;
mod paths;
mod permits;
mod spin;
