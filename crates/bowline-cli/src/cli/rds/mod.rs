//! RDS: a node as a service, its control tree and socket, and the equivalents of the rds-tools
//! commands.

pub(crate) mod admin;
pub(crate) mod config;
pub(crate) mod info;
mod libc;
pub(crate) mod node;
pub(crate) mod over_rdma;
pub(crate) mod ping;
pub(crate) mod pipe;
pub(crate) mod run;
pub(crate) mod stress;
pub(crate) mod top;
