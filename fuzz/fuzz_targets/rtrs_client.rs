//! A session of RTRS driven by bytes: the program, the network and a server that says what it
//! likes.
#![no_main]
#![allow(dead_code, reason = "the tests use more of the rig")]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-rtrs/tests/client_core/peer.rs"]
mod peer;
#[path = "../../crates/bowline-rtrs/tests/client_core/random.rs"]
mod random;

fuzz_target!(|bytes: &[u8]| {
    random::play(bytes);
});
