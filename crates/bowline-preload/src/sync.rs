//! Atomics of memory that threads take from one another. `model/` has those of its checkers in
//! their place.

pub(crate) use core::sync::atomic::{AtomicPtr, AtomicU32};
