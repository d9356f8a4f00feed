//! The bytes of all protocols: examples of the specification, captures of kernels, random ones.

#[path = "../checks/mod.rs"]
mod checks;
mod cm;
mod golden;
mod properties;
mod rds_rdma;
mod rds_rdma_captures;
mod roce;
#[path = "../checks/roce.rs"]
mod roce_checks;
mod rtrs;
#[path = "../checks/rtrs.rs"]
mod rtrs_checks;
mod uapi;
mod vectors;
