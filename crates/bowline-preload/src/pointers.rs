//! What a program points at. A kernel says EFAULT where there is nothing; here an access would end
//! the program.
//!
//! Calls that ask the node have the system copy, which says the same. Those that send and receive
//! look at the address alone, which costs nothing: null, what lies beside it, and addresses that no
//! program has. The rest, memory that is not mapped, ends the program there.

use core::ffi::{c_int, c_void};

use bowline_host_client::system;
use libc::{sockaddr, socklen_t};

/// Longest name that is looked at, bytes: a `sockaddr_storage`.
pub(crate) const NAME_MAX: usize = 128;

/// Addresses below are never mapped (`vm.mmap_min_addr`).
const LEAST: usize = 4096;
/// Addresses from here on are the kernel's.
const END: usize = if cfg!(target_arch = "x86_64") { 1 << 47 } else { usize::MAX >> 1 };

/// # Errors
/// EFAULT for memory that no program has.
#[inline]
pub(crate) fn check(at: *const c_void, len: usize) -> Result<(), c_int> {
    let at = at.addr();
    let is_there = (LEAST..END).contains(&at) && len <= END - at;
    if is_there || len == 0 { Ok(()) } else { Err(libc::EFAULT) }
}

/// Tells whether an address is the kernel's: calls look at that before anything else.
pub(crate) fn is_kernels(at: *const c_void) -> bool {
    at.addr() >= END
}

/// Copies from where a program points.
///
/// # Safety
/// As for [`system::read_of_program`].
///
/// # Errors
/// EFAULT where there is nothing.
pub(crate) unsafe fn load(at: *const c_void, to: &mut [u8]) -> Result<(), c_int> {
    check(at, to.len())?;
    // SAFETY: as the caller promises.
    if to.is_empty() { Ok(()) } else { unsafe { system::read_of_program(at, to) } }
}

/// Copies to where a program points.
///
/// # Safety
/// As for [`system::write_to_program`].
///
/// # Errors
/// EFAULT where there is no room.
pub(crate) unsafe fn store(at: *mut c_void, from: &[u8]) -> Result<(), c_int> {
    check(at, from.len())?;
    // SAFETY: as the caller promises.
    if from.is_empty() { Ok(()) } else { unsafe { system::write_to_program(at, from) } }
}

/// A name that a program gives.
pub(crate) struct Name {
    bytes: [u8; NAME_MAX],
    len: usize,
}

impl Name {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn len(len: socklen_t) -> Result<usize, c_int> {
        let len = usize::try_from(len.cast_signed()).map_err(|_| libc::EINVAL)?;
        if len > NAME_MAX { Err(libc::EINVAL) } else { Ok(len) }
    }

    /// The name of a call that asks the node.
    ///
    /// # Safety
    /// As for [`load`].
    ///
    /// # Errors
    /// EINVAL for a length that no name has; EFAULT where there is nothing.
    pub(crate) unsafe fn loaded(name: *const sockaddr, len: socklen_t) -> Result<Self, c_int> {
        let len = Self::len(len)?;
        let mut bytes = [0; NAME_MAX];
        // SAFETY: as the caller promises.
        unsafe { load(name.cast(), &mut bytes[..len]) }?;
        Ok(Self { bytes, len })
    }

    /// The name of a message.
    ///
    /// # Safety
    /// The name is readable for `len` bytes, unless [`check`] finds that it is nowhere.
    ///
    /// # Errors
    /// As [`loaded`](Self::loaded).
    pub(crate) unsafe fn of(name: *const sockaddr, len: socklen_t) -> Result<Self, c_int> {
        let len = if name.is_null() { 0 } else { Self::len(len)? };
        check(name.cast(), len)?;
        let mut bytes = [0; NAME_MAX];
        // SAFETY: as the caller promises.
        unsafe { core::ptr::copy_nonoverlapping(name.cast(), bytes.as_mut_ptr(), len) };
        Ok(Self { bytes, len })
    }
}
