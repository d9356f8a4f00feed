//! One RDS header with its extensions, from any bytes: the checks of the property tests.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-wire/tests/checks/mod.rs"]
mod checks;

fuzz_target!(|bytes: &[u8]| checks::header(bytes));
