//! A table by number of the descriptor, of which only those parts are mapped that are in use: one
//! for all numbers that there may be is larger than what a program may lock, which locks all.

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use bowline_host_client::system;

use crate::table::KNOWN_MAX;

/// Entries of a part.
const PART: usize = 1 << 10;

/// What may be all zeroes, which is how it comes.
///
/// # Safety
/// All zeroes are a value.
pub(crate) unsafe trait Zeroed {}

// SAFETY: 0 is one.
unsafe impl Zeroed for core::sync::atomic::AtomicU64 {}

/// The table. Its parts are never unmapped.
pub(crate) struct Sparse<T: 'static> {
    parts: [AtomicPtr<[T; PART]>; KNOWN_MAX / PART],
}

impl<T: Zeroed + Sync> Sparse<T> {
    pub(crate) const fn new() -> Self {
        Self { parts: [const { AtomicPtr::new(ptr::null_mut()) }; KNOWN_MAX / PART] }
    }

    /// An entry; `None` where nothing was ever written.
    #[inline]
    pub(crate) fn get(&self, at: usize) -> Option<&'static T> {
        let part = self.parts.get(at / PART)?.load(Ordering::Acquire);
        // SAFETY: it was mapped, whole and zeroed, for ever.
        unsafe { part.as_ref() }.map(|part| &part[at % PART])
    }

    /// An entry; `None` for one that the table does not have, or where there is no memory.
    pub(crate) fn get_or_map(&self, at: usize) -> Option<&'static T> {
        self.get(at).or_else(|| {
            let place = self.parts.get(at / PART)?;
            let new = system::map_zeroed(size_of::<[T; PART]>())?;
            let (none, part) = (ptr::null_mut(), new.as_ptr().cast());
            let placed = place.compare_exchange(none, part, Ordering::AcqRel, Ordering::Relaxed);
            if placed.is_err() {
                // SAFETY: it was just mapped, with this length, and nobody else has it.
                unsafe { system::unmap(new, size_of::<[T; PART]>()) };
            }
            self.get(at)
        })
    }
}
