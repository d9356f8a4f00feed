//! Messages of RNBD from any bytes: the checks of the tests.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-wire/tests/checks/rtrs.rs"]
mod checks;

fuzz_target!(|bytes: &[u8]| checks::rnbd(bytes));
