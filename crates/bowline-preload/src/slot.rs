//! Memory that threads use while another one takes it away: the last to use memory that was retired
//! unmaps it.

use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering;

use crate::sync::{AtomicPtr, AtomicU32};

/// The memory of one descriptor.
///
/// A user counts itself and then looks what is mapped; who retires memory takes it from there and
/// then looks who uses it. All accesses are in one order, so one of the two sees the other: the
/// user that nothing is mapped any more, or the other that there is a user.
pub(crate) struct Slot {
    pub(crate) users: AtomicU32,
    pub(crate) mapped: AtomicPtr<u8>,
    /// Mapped for a descriptor that was closed.
    pub(crate) retired: AtomicPtr<u8>,
}

impl Slot {
    /// Begins to use what is mapped, if anything is; it stays mapped until [`leave`](Self::leave).
    pub(crate) fn enter(&self, unmap: impl FnOnce(NonNull<u8>)) -> Option<NonNull<u8>> {
        // Pairs with `retire`: a user counted here is seen there, or sees here that nothing is
        // mapped.
        self.users.fetch_add(1, Ordering::SeqCst);
        let mapped = NonNull::new(self.mapped.load(Ordering::SeqCst));
        if mapped.is_none() {
            self.leave(unmap);
        }
        mapped
    }

    /// A user is done. `unmap` is called for what nobody uses any more.
    pub(crate) fn leave(&self, unmap: impl FnOnce(NonNull<u8>)) {
        // Pairs with the look at users in `unmap_retired`: what this one did comes before.
        if self.users.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.unmap_retired(unmap);
        }
    }

    /// Maps memory, unless some is mapped. It was written to before: pairs with `enter`.
    pub(crate) fn install(&self, base: NonNull<u8>) -> bool {
        let none = ptr::null_mut();
        let installed =
            self.mapped.compare_exchange(none, base.as_ptr(), Ordering::SeqCst, Ordering::Relaxed);
        installed.is_ok()
    }

    /// Takes away what is mapped, if anything is. `unmap` is called for it here if nobody uses it.
    pub(crate) fn retire(&self, unmap: impl FnOnce(NonNull<u8>)) {
        // Relaxed: nothing is done with what is found.
        if self.mapped.load(Ordering::Relaxed).is_null() {
            return;
        }
        // Pairs with `enter`, as the look at users below.
        let base = self.mapped.swap(ptr::null_mut(), Ordering::SeqCst);
        // Another may have taken it meanwhile.
        if base.is_null() {
            return;
        }
        // What was retired before and still has users stays mapped to the end of the process.
        self.retired.swap(base, Ordering::SeqCst);
        if self.users.load(Ordering::SeqCst) == 0 {
            self.unmap_retired(unmap);
        }
    }

    fn unmap_retired(&self, unmap: impl FnOnce(NonNull<u8>)) {
        loop {
            // Whoever uses it has counted itself before it was retired.
            let retired = self.retired.swap(ptr::null_mut(), Ordering::SeqCst);
            let Some(base) = NonNull::new(retired) else { return };
            if self.users.load(Ordering::SeqCst) == 0 {
                return unmap(base);
            }
            // Pairs with the last user's `leave`: it finds this, or is seen below to have left.
            self.retired.swap(retired, Ordering::SeqCst);
            if self.users.load(Ordering::SeqCst) != 0 {
                return;
            }
        }
    }
}
