//! Doors in front of a disk, by which other software reaches it.

#[cfg(feature = "fuse")]
pub mod fuse;
pub mod nbd;
mod stretches;
mod sys;
pub mod ublk;
