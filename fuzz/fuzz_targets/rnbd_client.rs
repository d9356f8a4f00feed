//! The devices of an RNBD client driven by bytes: the program, outages, and a server that says what
//! it likes.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-rnbd/tests/random_client.rs"]
mod random;

fuzz_target!(|bytes: &[u8]| {
    random::play(bytes);
});
