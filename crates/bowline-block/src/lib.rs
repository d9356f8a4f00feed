//! Storage behind exports, and front ends of disks.
//!
//! A [`Backend`](backend::Backend) stores the blocks of an RNBD server: memory, a file, a block
//! device. A [`BlockDevice`] is the interface of a mapped disk, for programs and for the front ends
//! by which other software uses it: NBD, a file under FUSE, ublk.
#![deny(unsafe_code)]

pub mod backend;
mod device;
pub mod front;
mod handle;
mod local;
pub mod sync;

pub use bowline_rnbd::{Discard, Errno, IoOp, Limits};
pub use bowline_verbs::Mem;
pub use device::{
    Allocation, BlockDevice, DeviceMem, DiskDone, DiskEvent, DiskIo, Durable, Extent,
};
pub use handle::DiskHandle;
pub use local::LocalDevice;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
