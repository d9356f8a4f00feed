//! Hostile peers, over real connections: each loses at most its own connection, is counted, uses a
//! bounded amount of memory, and does not disturb others.
#![cfg(feature = "rdma")]

#[path = "../common/mod.rs"]
mod common;

mod crowds;
mod deaf;
mod descriptors;
mod floods;
mod frames;
mod memory;
mod raw;
mod rdma;
mod scene;
