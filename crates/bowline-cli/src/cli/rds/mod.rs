//! RDS: the equivalents of the rds-tools commands, and commands for a node that runs.

pub(crate) mod admin;
pub(crate) mod info;
mod libc;
pub(crate) mod over_rdma;
pub(crate) mod ping;
pub(crate) mod pipe;
pub(crate) mod run;
pub(crate) mod stress;
pub(crate) mod top;
mod using;
