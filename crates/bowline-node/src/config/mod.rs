//! What the configuration of a node says.

pub mod access;
pub(crate) mod entry;
