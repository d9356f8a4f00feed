//! Locks, counters and threads. `model/` has those of its scheduler in their place.

pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize,
};
pub(crate) use std::sync::{Mutex, MutexGuard};
pub(crate) use std::thread::{Thread, current, park, park_timeout};
