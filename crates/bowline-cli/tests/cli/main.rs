//! Runs the `bowline` command as a user would and looks at what it prints and returns.
//!
//! Every test has loopback addresses of its own, so that they can run at the same time.

mod access;
mod control;
mod echo;
mod exposition;
mod folders;
mod links;
mod log;
mod metrics;
mod musl;
mod nodes;
mod programs;
mod queue;
mod rdma;
mod restarts;
mod rnbd;
mod rnbd_export;
mod rnbd_files;
mod rnbd_kills;
mod rnbd_memory;
mod rnbd_mistakes;
mod rnbd_use;
mod service;
mod stress;
mod support;
mod top;
mod words;
