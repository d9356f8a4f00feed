//! Runs the `bowline` command as a user would and looks at what it prints and returns.
//!
//! Every test has loopback addresses of its own, so that they can run at the same time.

mod access;
mod bench;
mod control;
mod disk_clients;
mod echo;
mod exposition;
mod folders;
mod hand_over;
mod links;
mod log;
mod machines;
mod metrics;
mod musl;
mod namespaces;
mod nbd;
mod node_disks;
mod nodes;
mod over_rdma;
mod own_node;
mod programs;
mod queue;
mod rdma;
mod restarts;
mod rnbd;
mod rnbd_ending;
mod rnbd_export;
mod rnbd_failing;
mod rnbd_files;
mod rnbd_kept;
mod rnbd_kills;
mod rnbd_many;
mod rnbd_memory;
mod rnbd_mistakes;
mod rnbd_replace;
mod rnbd_successors;
mod rnbd_top;
mod rnbd_use;
mod sandbox;
mod service;
mod shared_node;
mod stress;
mod support;
mod top;
mod words;
