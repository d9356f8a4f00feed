//! System calls by address: peers may change the memory, so no slice of it may exist.
#![allow(unsafe_code)]

use std::os::fd::RawFd;

use io_uring::{IoUring, opcode, squeue, types};

use super::job::Step;

/// Reads into memory at `to`, which the caller keeps mapped for `len` bytes. Returns bytes, or a
/// negative errno.
pub(super) fn read(fd: RawFd, to: u64, len: u32, offset: u64) -> i32 {
    // SAFETY: the system writes at most `len` bytes from `to` on, which belong to a `Buffer` that
    // the caller holds; nothing has references to a buffer's bytes.
    let n = unsafe { libc::pread(fd, to as *mut _, len as usize, offset.cast_signed()) };
    returned(n)
}

/// Executes one call of a job, which keeps the memory that the step names. Returns bytes, or a
/// negative errno.
pub(super) fn execute(fd: RawFd, step: Step) -> i32 {
    match step {
        Step::Read { to, len, offset } => read(fd, to, len, offset),
        Step::Write { from, len, offset, dsync } => {
            let piece = libc::iovec { iov_base: from as *mut _, iov_len: len as usize };
            let flags = if dsync { libc::RWF_DSYNC } else { 0 };
            // The offset in two words; where one holds it, the system ignores the other.
            let (low, high) = (offset as libc::c_long, (offset >> 32) as libc::c_long);
            // By its number: the musl of Rust before 1.93 has no `pwritev2`.
            // SAFETY: `piece` is one valid descriptor, of memory in a `Buffer` that the job holds.
            let n = unsafe {
                libc::syscall(libc::SYS_pwritev2, fd, &raw const piece, 1_usize, low, high, flags)
            };
            returned(n as isize)
        }
        Step::PunchHole { len, offset } => allocate(fd, PUNCH_HOLE, offset, len),
        Step::Discard { len, offset } => {
            let range = [offset, u64::from(len)];
            // SAFETY: the call reads two numbers, which are there.
            let n = unsafe { libc::ioctl(fd, BLKDISCARD, range.as_ptr()) };
            returned(n as isize)
        }
        Step::ZeroRange { len, offset } => allocate(fd, ZERO_RANGE, offset, len),
        // SAFETY: no memory is involved.
        Step::Sync => returned(unsafe { libc::fdatasync(fd) } as isize),
    }
}

/// Discards a range of a block device: first byte, and bytes.
const BLKDISCARD: libc::Ioctl = libc::_IO(0x12, 119);
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

fn allocate(fd: RawFd, mode: i32, offset: u64, len: u32) -> i32 {
    // SAFETY: no memory is involved.
    let n = unsafe { libc::fallocate(fd, mode, offset.cast_signed(), len.into()) };
    returned(n as isize)
}

/// Converts the result of a call to the convention of io_uring.
fn returned(n: isize) -> i32 {
    if n < 0 {
        -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
    } else {
        i32::try_from(n).unwrap_or(i32::MAX)
    }
}

/// A call as an entry of a ring.
pub(super) fn entry(fd: RawFd, step: Step, priority: u16, user_data: u64) -> squeue::Entry {
    let fd = types::Fd(fd);
    let entry = match step {
        Step::Read { to, len, offset } => {
            opcode::Read::new(fd, to as *mut _, len).offset(offset).ioprio(priority).build()
        }
        Step::Write { from, len, offset, dsync } => opcode::Write::new(fd, from as *const _, len)
            .offset(offset)
            .ioprio(priority)
            .rw_flags(if dsync { libc::RWF_DSYNC } else { 0 })
            .build(),
        // Not reached with discards: threads have them. This would free the same blocks.
        Step::PunchHole { len, offset } | Step::Discard { len, offset } => {
            opcode::Fallocate::new(fd, len.into()).offset(offset).mode(PUNCH_HOLE).build()
        }
        Step::ZeroRange { len, offset } => {
            opcode::Fallocate::new(fd, len.into()).offset(offset).mode(ZERO_RANGE).build()
        }
        Step::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
    };
    entry.user_data(user_data)
}

/// Puts an entry into the submission queue; tells whether there was room.
///
/// # Safety
/// No other thread may be at the submission queue, and the memory that the entry names must stay
/// until its completion was seen.
pub(super) unsafe fn push(ring: &IoUring, entry: &squeue::Entry) -> bool {
    // SAFETY: the caller is alone at this queue.
    let mut queue = unsafe { ring.submission_shared() };
    // SAFETY: the caller keeps the memory.
    unsafe { queue.push(entry) }.is_ok()
}

/// Takes all completions that are there: user data and result.
///
/// # Safety
/// No other thread may be at the completion queue.
pub(super) unsafe fn completions(ring: &IoUring, into: &mut Vec<(u64, i32)>) {
    // SAFETY: the caller is alone at this queue.
    let queue = unsafe { ring.completion_shared() };
    into.extend(queue.map(|entry| (entry.user_data(), entry.result())));
}
