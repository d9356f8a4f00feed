//! What AddressSanitizer asks each program at its start.

use core::ffi::{CStr, c_char};

/// It wants to be the first library of a program, to hide the C library's functions for those that
/// come after it. This one is made to come before: it calls what it hides.
const OPTIONS: &CStr = c"verify_asan_link_order=0";

#[unsafe(no_mangle)]
extern "C" fn __asan_default_options() -> *const c_char {
    OPTIONS.as_ptr()
}
