//! The memory of a socket.

use core::ffi::c_int;

use bowline_host_wire::{AREA_LEN, Area};

use crate::system;

/// Maps the memory of a socket and closes its descriptor.
///
/// # Errors
/// EPROTO for an invalid memory file; those of `mmap(2)`.
pub fn map(memory: c_int) -> Result<Area, c_int> {
    let mapped = map_area(memory);
    system::close(memory);
    mapped
}

fn map_area(memory: c_int) -> Result<Area, c_int> {
    // An access to memory that is shorter, shrinks later or cannot be allocated would kill the
    // program (SIGBUS).
    if !system::is_whole_memory(memory, AREA_LEN) {
        return Err(libc::EPROTO);
    }
    let base = system::map_shared(memory, AREA_LEN)?;
    // SAFETY: it was just mapped with this length, and stays so until `unmap`.
    let area = unsafe { Area::new(base) };
    if area.is_marked() {
        return Ok(area);
    }
    // SAFETY: nobody else has it.
    unsafe { unmap(area) };
    Err(libc::EPROTO)
}

/// Unmaps memory.
///
/// # Safety
/// The memory came from [`map`], and nothing uses it or a copy of it any more.
pub unsafe fn unmap(area: Area) {
    // SAFETY: it was mapped with this length, and as the caller promises.
    unsafe { system::unmap(area.base(), AREA_LEN) };
}
