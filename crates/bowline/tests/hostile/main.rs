//! Peers that mean harm, over real connections: each costs itself at most its connection, is
//! counted, holds a bounded amount of memory, and does not keep others from each other.

#[path = "../common/mod.rs"]
mod common;

mod crowds;
mod deaf;
mod descriptors;
mod floods;
mod frames;
mod memory;
mod raw;
mod scene;
