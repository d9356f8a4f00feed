//! Front ends of a disk, by which other software uses it.

#[cfg(feature = "fuse")]
pub mod fuse;
pub mod nbd;
mod range_alloc;
mod sys;
mod turns;
pub mod ublk;
pub mod vhost_user;
