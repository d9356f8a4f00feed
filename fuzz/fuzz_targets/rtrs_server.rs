//! A server of RTRS driven by bytes: the clients, the device and the upper layer of the tests.
#![no_main]
#![allow(dead_code, reason = "the tests use more of the rig")]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-rtrs/tests/server/random.rs"]
mod random;
#[path = "../../crates/bowline-rtrs/tests/server/rig.rs"]
mod rig;

fuzz_target!(|bytes: &[u8]| {
    random::play(bytes);
});
