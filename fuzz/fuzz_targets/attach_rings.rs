//! Both sides of the rings of a socket beside two queues, and somebody who may write into their
//! memory at any time.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-host-wire/tests/checks/mod.rs"]
mod checks;

fuzz_target!(|steps: Vec<checks::Step>| {
    checks::run(&steps);
});
