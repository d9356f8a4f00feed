//! A virtual machine that is served by vhost-user, driven by bytes: messages of its process, and
//! the memory of its guest.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/bowline-block/tests/vhost_user_random.rs"]
mod random;

/// Looks for no leaks at the end: a thread of the server that ends at that moment has memory which
/// the search takes for lost.
#[unsafe(no_mangle)]
extern "C" fn __lsan_is_turned_off() -> i32 {
    1
}

fuzz_target!(|bytes: &[u8]| {
    random::play(bytes);
});
