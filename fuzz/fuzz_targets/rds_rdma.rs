//! A node on RDMA driven by bytes: calls of a driver and of applications, and what peers send.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-rds/tests/checks/mod.rs"]
mod checks;

fuzz_target!(|bytes: &[u8]| checks::rdma(bytes));
