//! An allocator that counts, for tests that assert how often memory is allocated, or how much of it
//! is in use.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

/// The system's allocator, with a count. A test program that asserts counts makes it its own:
///
/// ```
/// use bowline_testkit::allocations::{self, Counting};
///
/// #[global_allocator]
/// static ALLOCATOR: Counting = Counting;
///
/// let before = allocations::count();
/// drop(vec![1, 2, 3]);
/// assert_eq!(allocations::count() - before, 1);
/// ```
///
/// The count is one for the process, so one such test runs at a time.
#[derive(Debug)]
pub struct Counting;

/// Returns how often memory was allocated, or moved to a larger place, since the program began.
pub fn count() -> u64 {
    COUNT.load(Relaxed)
}

/// Returns how many bytes are in use.
pub fn bytes() -> i64 {
    BYTES.load(Relaxed)
}

#[allow(unsafe_code)]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        BYTES.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        BYTES.fetch_add(size as i64 - layout.size() as i64, Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}
