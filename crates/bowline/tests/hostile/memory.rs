//! How much memory the process has in use: one test at a time, as all of them share it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

/// Counts the bytes in use, and the most there were.
struct Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);
/// Memory is that of the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[allow(unsafe_code)]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size = layout.size() as i64;
        PEAK.fetch_max(LIVE.fetch_add(size, Relaxed) + size, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

pub(crate) const KIB: i64 = 1024;

/// Waits until no other test runs.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// Runs something and returns by how much the memory in use grew at most meanwhile.
pub(crate) fn growth<T>(of: impl FnOnce() -> T) -> (T, i64) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = of();
    (result, PEAK.load(Relaxed) - before)
}
