//! The RNBD protocol as state machines: exports, devices, access and block IO, without I/O or transport.
#![forbid(unsafe_code)]

mod errno;
pub mod io;

pub use errno::Errno;
pub use io::{Discard, IoOp, Limits};
