//! The memory that a socket shares with programs, as the node has it.

#![allow(unsafe_code, reason = "mapping memory")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use bowline_host_wire::{AREA_LEN, Area};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// First part of the name of such memory; its number follows, in hexadecimal digits.
const NAME: &str = "bowline-rds-socket-";

/// The number in the name of memory that a node has made, which nobody can change.
pub(crate) fn number_of(descriptor: &OwnedFd) -> io::Result<u64> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
    let name = link.to_str().and_then(|link| link.strip_prefix("/memfd:"));
    let digits = name.and_then(|name| name.strip_prefix(NAME)).and_then(|name| name.get(..16));
    let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    number.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no memory of a socket"))
}

/// Shared memory of one socket.
#[derive(Debug)]
pub(crate) struct Memory {
    descriptor: OwnedFd,
    area: Area,
}

impl Memory {
    /// Makes new memory. Nobody can change its length, so that access to it never fails.
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let name = format!("{NAME}{:016x}", bowline_base::entropy::random_u64());
        let descriptor = memfd_create(name, flags)?;
        ftruncate(&descriptor, AREA_LEN as u64)?;
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(descriptor)
    }

    /// Maps memory that another process of the node had made.
    pub(crate) fn resume(descriptor: OwnedFd) -> Result<Self, Errno> {
        let sealed = SealFlags::SHRINK | SealFlags::GROW;
        let is_sealed = fcntl_get_seals(&descriptor)?.contains(sealed);
        if !is_sealed || fstat(&descriptor)?.st_size != AREA_LEN as i64 {
            return Err(Errno::INVAL);
        }
        Self::map(descriptor)
    }

    /// Maps memory whose length is sealed.
    fn map(descriptor: OwnedFd) -> Result<Self, Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the system chooses.
        let base = unsafe {
            mmap(std::ptr::null_mut(), AREA_LEN, access, MapFlags::SHARED, &descriptor, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        // SAFETY: it is mapped until `self` is dropped, which is the last to go of what uses it.
        let area = unsafe { Area::new(base) };
        Ok(Self { descriptor, area })
    }

    pub(crate) fn area(&self) -> Area {
        self.area
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Bytes that were sent on a socket and that the other end has not read, with what the system
/// needs for them.
pub(crate) fn bytes_unread(socket: impl AsFd) -> Option<i32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open, and `bytes` has room for the number.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    (result == 0).then_some(bytes)
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nothing uses it any more.
        let _ = unsafe { munmap(self.area.base().as_ptr().cast(), AREA_LEN) };
    }
}
