//! Shared memory of the RDS sockets of this process, by number of the descriptor.
//!
//! Calls use it while other threads close descriptors.

use core::ffi::c_int;
use core::ptr::NonNull;

use bowline_host_client::memory;
use bowline_host_wire::Area;

use crate::slot::Slot;
use crate::sparse::{Sparse, Zeroed};

// SAFETY: all zeroes are no users, and null pointers.
unsafe impl Zeroed for Slot {}

static SLOTS: Sparse<Slot> = Sparse::new();

fn slot(fd: c_int) -> Option<&'static Slot> {
    SLOTS.get(usize::try_from(fd).ok()?)
}

fn new_slot(fd: c_int) -> Option<&'static Slot> {
    SLOTS.get_or_map(usize::try_from(fd).ok()?)
}

/// Unmaps memory that a slot has done with.
fn unmap(base: NonNull<u8>) {
    // SAFETY: as in `of`.
    let area = unsafe { Area::new(base) };
    // SAFETY: `map` has mapped it, and it has no users any more.
    unsafe { memory::unmap(area) };
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
            Some(slot) => slot.leave(unmap),
            // SAFETY: `map_for_call` has mapped it, for nobody else.
            None => unsafe { memory::unmap(self.area) },
        }
    }
}

/// The memory of a descriptor, if it is mapped.
pub(crate) fn of(fd: c_int) -> Option<InUse> {
    let slot = slot(fd)?;
    let base = slot.enter(unmap)?;
    // SAFETY: it was mapped with the length of an area, and is not unmapped while it has users.
    // Only areas access it.
    let area = unsafe { Area::new(base) };
    Some(InUse { slot: Some(slot), area })
}

/// Maps memory for one call; closes `memory`.
pub(crate) fn map_for_call(memory: c_int) -> Result<InUse, c_int> {
    memory::map(memory).map(|area| InUse { slot: None, area })
}

/// Maps the memory of a descriptor; closes `memory`.
pub(crate) fn map(fd: c_int, memory: c_int) -> Result<(), c_int> {
    let area = memory::map(memory)?;
    if !new_slot(fd).is_some_and(|slot| slot.install(area.base())) {
        // Another thread was faster, or the number is beyond the table.
        // SAFETY: nobody else has it.
        unsafe { memory::unmap(area) };
    }
    if slot(fd).is_some() { Ok(()) } else { Err(libc::EMFILE) }
}

/// Called when a descriptor was closed or replaced.
pub(crate) fn retire(fd: c_int) {
    if let Some(slot) = slot(fd) {
        slot.retire(unmap);
    }
}
