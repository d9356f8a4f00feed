//! The sessions of an RNBD server driven by bytes: messages, storage and exports in any order.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-rnbd/tests/random.rs"]
mod random;

fuzz_target!(|bytes: &[u8]| {
    random::play(bytes);
});
