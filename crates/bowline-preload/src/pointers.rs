//! What a program points at. A kernel says EFAULT where there is nothing; here an access would end
//! the program.
//!
//! Calls that ask the node have the system copy, which says the same. Those that send and receive
//! look at the address, which costs nothing: null, what lies beside it, and addresses that no
//! program has. The rest, memory that is not mapped, ends the copy ([`guarded`]).

use core::ffi::{c_int, c_void};

use core::mem::MaybeUninit;

use bowline_host_client::{guarded, system};
use libc::{iovec, sockaddr, socklen_t};

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

/// Copies from where a program points, for a message: without a system call.
///
/// # Safety
/// As for [`guarded::copy`].
///
/// # Errors
/// EFAULT where there is nothing.
pub(crate) unsafe fn load_quickly(at: *const c_void, to: &mut [u8]) -> Result<(), c_int> {
    check(at, to.len())?;
    // SAFETY: as the caller promises.
    let is_there = unsafe { guarded::copy(to.as_mut_ptr(), at.cast(), to.len()) };
    if is_there { Ok(()) } else { Err(libc::EFAULT) }
}

/// Copies a structure of the C library's from where a program points, for a message.
///
/// # Safety
/// As for [`load_quickly`]; any bytes are a value of it.
///
/// # Errors
/// EFAULT where there is nothing.
pub(crate) unsafe fn read_quickly<T: Copy>(at: *const T) -> Result<T, c_int> {
    check(at.cast(), size_of::<T>())?;
    let mut found = MaybeUninit::<T>::uninit();
    // SAFETY: as the caller promises; it has room for one.
    let is_there = unsafe { guarded::copy(found.as_mut_ptr().cast(), at.cast(), size_of::<T>()) };
    // SAFETY: all of it was copied.
    if is_there { Ok(unsafe { found.assume_init() }) } else { Err(libc::EFAULT) }
}

/// Copies several to where there is one of each already.
///
/// # Safety
/// As for [`read_quickly`].
///
/// # Errors
/// EFAULT where there is nothing.
pub(crate) unsafe fn read_all_quickly<T: Copy>(at: *const T, to: &mut [T]) -> Result<(), c_int> {
    check(at.cast(), size_of_val(to))?;
    // SAFETY: as the caller promises; there is room for all of them.
    let is_there = unsafe { guarded::copy(to.as_mut_ptr().cast(), at.cast(), size_of_val(to)) };
    if is_there { Ok(()) } else { Err(libc::EFAULT) }
}

/// Copies a structure of the C library's to where a program points, for a message.
///
/// # Safety
/// As for [`store_quickly`].
///
/// # Errors
/// EFAULT where there is no room.
pub(crate) unsafe fn write_quickly<T: Copy>(at: *mut T, from: &T) -> Result<(), c_int> {
    check(at.cast(), size_of::<T>())?;
    let from = core::ptr::from_ref(from).cast();
    // SAFETY: as the caller promises.
    let is_there = unsafe { guarded::copy(at.cast(), from, size_of::<T>()) };
    if is_there { Ok(()) } else { Err(libc::EFAULT) }
}

/// Copies to where a program points, for a message.
///
/// # Safety
/// As for [`guarded::copy`].
///
/// # Errors
/// EFAULT where there is no room.
pub(crate) unsafe fn store_quickly(at: *mut c_void, from: &[u8]) -> Result<(), c_int> {
    check(at, from.len())?;
    // SAFETY: as the caller promises.
    let is_there = unsafe { guarded::copy(at.cast(), from.as_ptr(), from.len()) };
    if is_there { Ok(()) } else { Err(libc::EFAULT) }
}

/// Pieces of memory that a call names.
pub(crate) struct Vector {
    few: [iovec; Self::FEW],
    many: Vec<iovec>,
    count: usize,
}

impl Vector {
    const FEW: usize = 8;
    const NOTHING: iovec = iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };

    /// Copies them from where a program points.
    ///
    /// # Safety
    /// As for [`load_quickly`].
    ///
    /// # Errors
    /// EFAULT where there is nothing.
    pub(crate) unsafe fn load(from: *const iovec, count: usize) -> Result<Self, c_int> {
        let mut vector = Self { few: [Self::NOTHING; Self::FEW], many: Vec::new(), count };
        if count > Self::FEW {
            vector.many = vec![Self::NOTHING; count];
        }
        let to = if count > Self::FEW { &mut vector.many[..] } else { &mut vector.few[..count] };
        // SAFETY: as the caller promises.
        unsafe { read_all_quickly(from, to) }?;
        Ok(vector)
    }

    pub(crate) fn pieces(&self) -> &[iovec] {
        if self.count > Self::FEW { &self.many } else { &self.few[..self.count] }
    }
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
    /// As for [`load_quickly`].
    ///
    /// # Errors
    /// As [`loaded`](Self::loaded).
    pub(crate) unsafe fn of(name: *const sockaddr, len: socklen_t) -> Result<Self, c_int> {
        let len = if name.is_null() { 0 } else { Self::len(len)? };
        let mut bytes = [0; NAME_MAX];
        // SAFETY: as the caller promises.
        unsafe { load_quickly(name.cast(), &mut bytes[..len]) }?;
        Ok(Self { bytes, len })
    }
}
