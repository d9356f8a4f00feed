//! What the configuration of a node says.

pub mod access;
pub(crate) mod entry;
mod file;

pub use file::{Config, EXAMPLE, Poll};
