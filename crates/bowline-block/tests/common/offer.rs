//! FUSE by io_uring, which the kernel's module offers if its parameter says so.

use std::fs;
use std::io;
use std::sync::{Mutex, PoisonError};

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// How many hold the offer, and what the parameter was before.
static HELD: Mutex<(usize, String)> = Mutex::new((0, String::new()));

/// Holds the offer for the whole machine; dropped by the last, it is as before.
#[derive(Debug)]
pub(crate) struct Offer(());

impl Offer {
    /// # Errors
    /// Where the kernel cannot offer it, or this user cannot tell it to.
    pub(crate) fn take() -> io::Result<Self> {
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        if held.0 == 0 {
            held.1 = fs::read_to_string(PARAMETER)?;
            fs::write(PARAMETER, "Y")?;
        }
        held.0 += 1;
        Ok(Self(()))
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        held.0 -= 1;
        if held.0 == 0 {
            fs::write(PARAMETER, &held.1).expect("it was written before");
        }
    }
}

/// Tells whether a thread of this process serves a ring.
pub(crate) fn is_used() -> bool {
    let tasks = fs::read_dir("/proc/self/task").expect("threads").filter_map(Result::ok);
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    // The kernel cuts names off behind fifteen bytes.
    names.into_iter().any(|name| name.trim() == "bowline-fuse-ri")
}
