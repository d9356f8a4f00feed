//! Prefetching of memory into the processor's cache; affects only speed.

/// Size of a cache line in bytes.
pub(crate) const CACHE_LINE: usize = 64;

/// Prefetches the first cache line of a value.
#[inline]
pub fn prefetch<T>(value: &T) {
    prefetch_line(core::ptr::from_ref(value).cast());
}

/// Prefetches the cache line of any address, which need not be readable.
#[inline]
#[allow(unsafe_code)]
pub(crate) fn prefetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction, which takes any address, and reads
        // nothing as far as the language can tell.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
