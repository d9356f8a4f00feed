//! Descriptors that the programs which a process starts inherit.

#![allow(unsafe_code, reason = "rustix does not have close_range; descriptors known by number")]

use std::fs;
use std::io;

/// Highest number of the standard streams.
const STANDARD_ERROR: libc::c_int = libc::STDERR_FILENO;

/// Has the programs that this process starts inherit the standard streams only.
///
/// # Errors
/// Errors of reading /proc/self/fd, before Linux 5.11.
pub fn keep_standard_streams() -> io::Result<()> {
    mark_range().or_else(|_| mark_each())
}

/// Marks all others to be closed in a new program (Linux 5.11).
fn mark_range() -> io::Result<()> {
    let (first, last) = (STANDARD_ERROR as libc::c_uint + 1, libc::c_uint::MAX);
    let flags = libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: the call takes numbers, and with this flag it closes nothing.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Marks one after the other.
fn mark_each() -> io::Result<()> {
    let names = fs::read_dir("/proc/self/fd")?.flatten().map(|entry| entry.file_name());
    let numbers = names.filter_map(|name| name.to_str()?.parse::<libc::c_int>().ok());
    for number in numbers.filter(|number| *number > STANDARD_ERROR) {
        // SAFETY: the call takes numbers, and closes nothing. It fails for one that has gone.
        unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::io::{FdFlags, dup, fcntl_getfd};

    use super::*;

    #[test]
    fn what_is_no_standard_stream_is_not_inherited() {
        for mark in [mark_range, mark_each, keep_standard_streams] {
            let open = dup(io::stderr()).unwrap();
            assert!(fcntl_getfd(&open).unwrap().is_empty());
            if mark().is_ok() {
                assert_eq!(fcntl_getfd(&open).unwrap(), FdFlags::CLOEXEC);
                assert!(fcntl_getfd(io::stderr()).unwrap().is_empty());
            } else {
                bowline_testkit::skipped::because("this system has no close_range");
            }
        }
    }
}
