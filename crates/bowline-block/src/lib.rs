//! Storage behind exports, and doors in front of disks.
//!
//! A [`Backend`](backend::Backend) is what an RNBD server keeps its blocks in: memory, a file, a
//! block device. A [`BlockDevice`] is what a mapped disk looks like to programs and to the doors
//! that lead other software to it: NBD, a file under FUSE, ublk.
#![deny(unsafe_code)]

pub mod backend;
mod device;
pub mod front;
mod local;
pub mod sync;

pub use bowline_rnbd::{Discard, Errno, IoOp, Limits};
pub use bowline_verbs::Mem;
pub use device::{BlockDevice, DeviceMem, DiskDone, DiskEvent, DiskIo};
pub use local::LocalDevice;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
