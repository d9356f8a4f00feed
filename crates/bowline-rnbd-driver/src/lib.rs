//! RNBD over RTRS: exports served to clients, and disks of other machines as block devices.
#![forbid(unsafe_code)]

pub mod client;
mod error;
#[cfg(feature = "tracing")]
mod log;
pub mod server;
pub mod tree;

pub use client::{Client, Disk, MapOptions};
pub use error::{Error, ErrorKind};
pub use server::{ExportServer, Exports, FileOptions, Grant, ServerConfig};

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
