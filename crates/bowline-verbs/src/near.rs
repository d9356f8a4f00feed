//! Having memory brought near before it is used: that changes nothing but speed.

/// Bytes that come from memory together.
pub(crate) const CACHE_LINE: usize = 64;

/// Has the beginning of a value brought near, as much of it as a processor takes at once.
#[inline]
pub fn prefetch<T>(value: &T) {
    prefetch_line(core::ptr::from_ref(value).cast());
}

/// The same of any address; it need not be one that may be read.
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
