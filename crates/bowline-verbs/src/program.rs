//! Calls of functions of the program by threads that others need too.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a function of the program. A panic of it, which has been reported on standard error by
/// then, ends here: what the thread has to do for others is done. `None` then.
pub fn contain<T>(function: impl FnOnce() -> T) -> Option<T> {
    // What the function has left half done is the program's, which may panic as it likes.
    catch_unwind(AssertUnwindSafe(function)).ok()
}
