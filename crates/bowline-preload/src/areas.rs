//! Shared memory of the RDS sockets of this process, by number of the descriptor.
//!
//! Calls use it while other threads close descriptors; the last user of retired memory unmaps it.

use core::ffi::c_int;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use bowline_host_client::memory;
use bowline_host_wire::Area;

use crate::table::KNOWN_MAX;

struct Slot {
    users: AtomicU32,
    mapped: AtomicPtr<u8>,
    /// Still mapped for a closed descriptor.
    retired: AtomicPtr<u8>,
}

static SLOTS: [Slot; KNOWN_MAX] = [const {
    Slot {
        users: AtomicU32::new(0),
        mapped: AtomicPtr::new(ptr::null_mut()),
        retired: AtomicPtr::new(ptr::null_mut()),
    }
}; KNOWN_MAX];

fn slot(fd: c_int) -> Option<&'static Slot> {
    SLOTS.get(usize::try_from(fd).ok()?)
}

impl Slot {
    fn leave(&self) {
        if self.users.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.unmap_retired();
        }
    }

    fn unmap_retired(&self) {
        loop {
            // Every user was counted before the memory was retired.
            let retired = self.retired.swap(ptr::null_mut(), Ordering::SeqCst);
            let Some(base) = NonNull::new(retired) else { return };
            if self.users.load(Ordering::SeqCst) == 0 {
                // SAFETY: as in `of`.
                let area = unsafe { Area::new(base) };
                // SAFETY: `map` has mapped it, and it has no users any more.
                return unsafe { memory::unmap(area) };
            }
            self.retired.store(retired, Ordering::SeqCst);
            // The last user may have left in the meantime.
            if self.users.load(Ordering::SeqCst) != 0 {
                return;
            }
        }
    }
}

/// Memory that stays mapped while this is there.
pub(crate) struct InUse {
    slot: &'static Slot,
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
        self.slot.leave();
    }
}

/// The memory of a descriptor, if it is mapped.
pub(crate) fn of(fd: c_int) -> Option<InUse> {
    let slot = slot(fd)?;
    // Either the retiring thread sees this user, or this user sees that the memory is retired.
    slot.users.fetch_add(1, Ordering::SeqCst);
    match NonNull::new(slot.mapped.load(Ordering::SeqCst)) {
        Some(base) => {
            // SAFETY: it was mapped with the length of an area, and is not unmapped while it has
            // users. Only areas access it.
            let area = unsafe { Area::new(base) };
            Some(InUse { slot, area })
        }
        None => {
            slot.leave();
            None
        }
    }
}

/// Maps the memory of a descriptor; closes `memory`.
pub(crate) fn map(fd: c_int, memory: c_int) -> Result<(), c_int> {
    let area = memory::map(memory)?;
    let installed = slot(fd).is_some_and(|slot| {
        let (none, base) = (ptr::null_mut(), area.base().as_ptr());
        slot.mapped.compare_exchange(none, base, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    });
    if !installed {
        // Another thread was faster, or the number is beyond the table. SAFETY: nobody else has it.
        unsafe { memory::unmap(area) };
    }
    if slot(fd).is_some() { Ok(()) } else { Err(libc::EMFILE) }
}

/// Called when a descriptor was closed or replaced.
pub(crate) fn retire(fd: c_int) {
    let Some(slot) = slot(fd) else { return };
    if slot.mapped.load(Ordering::Relaxed).is_null() {
        return;
    }
    let base = slot.mapped.swap(ptr::null_mut(), Ordering::SeqCst);
    // Memory retired before that still has users stays mapped until the process ends.
    slot.retired.store(base, Ordering::SeqCst);
    if slot.users.load(Ordering::SeqCst) == 0 {
        slot.unmap_retired();
    }
}
