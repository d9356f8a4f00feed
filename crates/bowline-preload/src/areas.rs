//! Shared memory of the RDS sockets of this process, by number of the descriptor.
//!
//! Calls use it while other threads close descriptors: the last to use memory that was retired
//! unmaps it.

use core::ffi::c_int;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use bowline_host_client::memory;
use bowline_host_wire::Area;

use crate::sparse::{Sparse, Zeroed};

struct Slot {
    users: AtomicU32,
    mapped: AtomicPtr<u8>,
    /// Mapped for a descriptor that was closed.
    retired: AtomicPtr<u8>,
}

// SAFETY: no users, and null pointers.
unsafe impl Zeroed for Slot {}

static SLOTS: Sparse<Slot> = Sparse::new();

fn slot(fd: c_int) -> Option<&'static Slot> {
    SLOTS.get(usize::try_from(fd).ok()?)
}

fn new_slot(fd: c_int) -> Option<&'static Slot> {
    SLOTS.get_or_map(usize::try_from(fd).ok()?)
}

impl Slot {
    fn leave(&self) {
        if self.users.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.unmap_retired();
        }
    }

    fn unmap_retired(&self) {
        loop {
            // Whoever uses it has counted itself before it was retired.
            let retired = self.retired.swap(ptr::null_mut(), Ordering::SeqCst);
            let Some(base) = NonNull::new(retired) else { return };
            if self.users.load(Ordering::SeqCst) == 0 {
                // SAFETY: as in `of`.
                let area = unsafe { Area::new(base) };
                // SAFETY: `map` has mapped it, and it has no users any more.
                return unsafe { memory::unmap(area) };
            }
            self.retired.store(retired, Ordering::SeqCst);
            // The last of them may have left meanwhile.
            if self.users.load(Ordering::SeqCst) != 0 {
                return;
            }
        }
    }
}

/// Memory that stays mapped while this is there.
pub(crate) struct InUse {
    /// `None`: it is mapped for this alone.
    slot: Option<&'static Slot>,
    area: Area,
}

impl core::ops::Deref for InUse {
    type Target = Area;

    fn deref(&self) -> &Area {
        &self.area
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        match self.slot {
            Some(slot) => slot.leave(),
            // SAFETY: `map_for_call` has mapped it, for nobody else.
            None => unsafe { memory::unmap(self.area) },
        }
    }
}

/// The memory of a descriptor, if it is mapped.
pub(crate) fn of(fd: c_int) -> Option<InUse> {
    let slot = slot(fd)?;
    // Whoever retires it sees this user, or this user sees that it is retired.
    slot.users.fetch_add(1, Ordering::SeqCst);
    match NonNull::new(slot.mapped.load(Ordering::SeqCst)) {
        Some(base) => {
            // SAFETY: it was mapped with the length of an area, and is not unmapped while it has
            // users. Only areas access it.
            let area = unsafe { Area::new(base) };
            Some(InUse { slot: Some(slot), area })
        }
        None => {
            slot.leave();
            None
        }
    }
}

/// Maps memory that came, until it is not used any more; `memory` is closed.
pub(crate) fn map_for_call(memory: c_int) -> Result<InUse, c_int> {
    memory::map(memory).map(|area| InUse { slot: None, area })
}

/// Maps the memory that came for a descriptor; `memory` is closed.
pub(crate) fn map(fd: c_int, memory: c_int) -> Result<(), c_int> {
    let area = memory::map(memory)?;
    let installed = new_slot(fd).is_some_and(|slot| {
        let (none, base) = (ptr::null_mut(), area.base().as_ptr());
        slot.mapped.compare_exchange(none, base, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    });
    if !installed {
        // Another thread was quicker, or the number is above all that are known.
        // SAFETY: nobody else has it.
        unsafe { memory::unmap(area) };
    }
    if slot(fd).is_some() { Ok(()) } else { Err(libc::EMFILE) }
}

/// A descriptor was closed or replaced.
pub(crate) fn retire(fd: c_int) {
    let Some(slot) = slot(fd) else { return };
    if slot.mapped.load(Ordering::Relaxed).is_null() {
        return;
    }
    let base = slot.mapped.swap(ptr::null_mut(), Ordering::SeqCst);
    // What was retired before and still has users stays mapped to the end of the process.
    slot.retired.store(base, Ordering::SeqCst);
    if slot.users.load(Ordering::SeqCst) == 0 {
        slot.unmap_retired();
    }
}
