//! Calls of program callbacks on threads that also serve others.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a callback of the program, and catches its panic, which has been reported on standard error
/// by then, so that the thread can go on serving others. Returns `None` after a panic.
pub fn catch_callback_panic<T>(function: impl FnOnce() -> T) -> Option<T> {
    // State that the callback left inconsistent belongs to the program, which may panic as it
    // likes.
    catch_unwind(AssertUnwindSafe(function)).ok()
}
