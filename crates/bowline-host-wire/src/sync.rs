//! Atomics, the shared memory they are in, and the length of its rings. `model/` has those of its
//! checkers in their place.

#![allow(unsafe_code, reason = "memory that is shared between processes")]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

pub(crate) use core::hint::spin_loop;
pub(crate) use core::sync::atomic::fence;

/// Length of each ring in bytes.
pub(crate) const RING_LEN: usize = 256 << 10;

/// Destinations for which a program may have credit.
pub(crate) const DESTINATIONS: usize = 8;

/// A number of 8 bytes in the memory.
pub(crate) type U64<'a> = &'a AtomicU64;
/// A number of 4 bytes.
pub(crate) type U32<'a> = &'a AtomicU32;
/// A byte.
pub(crate) type U8<'a> = &'a AtomicU8;

/// The number so many bytes behind the start of the memory.
///
/// # Safety
/// The number lies in the memory, which is mapped for `'a`, and is aligned. Every access to it is
/// atomic.
pub(crate) const unsafe fn u64<'a>(base: NonNull<u8>, at: usize) -> U64<'a> {
    // SAFETY: as the caller promises.
    let number = unsafe { base.add(at) }.cast::<AtomicU64>();
    // SAFETY: as the caller promises.
    unsafe { number.as_ref() }
}

/// # Safety
/// As for [`u64()`].
pub(crate) const unsafe fn u32<'a>(base: NonNull<u8>, at: usize) -> U32<'a> {
    // SAFETY: as the caller promises.
    let number = unsafe { base.add(at) }.cast::<AtomicU32>();
    // SAFETY: as the caller promises.
    unsafe { number.as_ref() }
}

/// # Safety
/// As for [`u64()`].
pub(crate) const unsafe fn u8<'a>(base: NonNull<u8>, at: usize) -> U8<'a> {
    // SAFETY: as the caller promises.
    let byte = unsafe { base.add(at) }.cast::<AtomicU8>();
    // SAFETY: as the caller promises.
    unsafe { byte.as_ref() }
}
