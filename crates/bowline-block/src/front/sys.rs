//! Socket calls by address: peers may change the memory of disk data, so no slice of it may exist.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use bowline_verbs::Mem;

/// A part of a message: a header, or data in memory.
pub(super) type Piece = libc::iovec;

/// No bytes.
pub(super) const NOTHING: Piece = Piece { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Bytes that must stay where they are until they were sent.
pub(super) fn piece_of_bytes(bytes: &[u8]) -> Piece {
    Piece { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// Memory that must be kept until it was sent.
pub(super) fn piece_of_mem(mem: &Mem) -> Piece {
    assert!(mem.offset + mem.len <= mem.buffer.len(), "memory outside of its buffer");
    Piece { iov_base: (mem.buffer.addr() + mem.offset as u64) as *mut _, iov_len: mem.len }
}

/// Sends as much as the socket accepts now; returns the number of bytes.
///
/// # Safety
/// The memory of every piece must be there.
pub(super) unsafe fn send(fd: BorrowedFd<'_>, pieces: &[Piece]) -> io::Result<usize> {
    // SAFETY: all-zero is a valid value of this plain structure.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header names `pieces`, whose memory the caller keeps; the system only reads.
    let n = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Puts bytes that are there into memory, or waits for them until it is full; 0 bytes at the end of
/// the stream.
pub(super) fn receive(fd: BorrowedFd<'_>, into: &Mem, waits: bool) -> io::Result<usize> {
    let flags = if waits { libc::MSG_WAITALL } else { libc::MSG_DONTWAIT };
    let Piece { iov_base, iov_len } = piece_of_mem(into);
    // SAFETY: `piece_of_mem` checked that the stretch lies in a buffer, which `into` keeps mapped;
    // nothing has references to a buffer's bytes.
    let n = unsafe { libc::recv(fd.as_raw_fd(), iov_base, iov_len, flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}
