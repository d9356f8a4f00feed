//! Doors in front of a disk, by which other software reaches it.

mod memory;
pub mod nbd;
mod sys;
