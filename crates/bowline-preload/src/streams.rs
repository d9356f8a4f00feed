//! Streams of the C library on RDS sockets. glibc makes the system calls of its streams itself, so
//! these are streams of functions of ours, with the number of the descriptor all the same.
//!
//! SAFETY of every block here: as in [`calls`](crate::calls).
#![allow(
    clippy::missing_safety_doc,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    unreachable_pub,
    reason = "the C library documents them, with their conditions"
)]

use core::ffi::{c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::real::{fail, hidden};
use crate::{calls, files, table};

/// Most streams of sockets that a program may have.
const STREAMS_MAX: usize = 256;

static STREAMS: [AtomicPtr<libc::FILE>; STREAMS_MAX] =
    [const { AtomicPtr::new(ptr::null_mut()) }; STREAMS_MAX];

/// Puts one stream in the place of another; `false` if that is not there.
fn replace(one: *mut libc::FILE, other: *mut libc::FILE) -> bool {
    STREAMS.iter().any(|place| {
        place.compare_exchange(one, other, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    })
}

/// A stream is about to be closed; tells whether it is one of a socket.
pub(crate) fn forget(file: *mut libc::FILE) -> bool {
    !file.is_null() && replace(file, ptr::null_mut())
}

unsafe extern "C-unwind" fn read_stream(fd: *mut c_void, to: *mut c_char, len: usize) -> isize {
    unsafe { files::read(fd.addr() as c_int, to.cast(), len) }
}

unsafe extern "C-unwind" fn write_stream(
    fd: *mut c_void,
    from: *const c_char,
    len: usize,
) -> isize {
    // Such a function says that nothing was written, where others return an error.
    unsafe { files::write(fd.addr() as c_int, from.cast(), len) }.max(0)
}

unsafe extern "C-unwind" fn close_stream(fd: *mut c_void) -> c_int {
    unsafe { calls::close(fd.addr() as c_int) }
}

/// As `fopencookie` takes them.
#[repr(C)]
struct Functions {
    read: unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, usize) -> isize,
    write: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, usize) -> isize,
    seek: *const c_void,
    close: unsafe extern "C-unwind" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(
        cookie: *mut c_void,
        mode: *const c_char,
        functions: Functions,
    ) -> *mut libc::FILE;
}

/// Where a `FILE` of glibc has the number of its descriptor, which never changes.
const NUMBER_AT: usize = 112;

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE {
    let Some(found) = table::find(fd) else {
        return hidden!(fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE);
    };
    let file = match found {
        Err(errno) => Err(errno),
        Ok(_) => Ok(unsafe { open(fd, mode) }),
    };
    file.unwrap_or_else(|errno| {
        fail(errno);
        ptr::null_mut()
    })
}

/// # Safety
/// As `fdopen` wants.
unsafe fn open(fd: c_int, mode: *const c_char) -> *mut libc::FILE {
    let functions = Functions {
        read: read_stream,
        write: write_stream,
        seek: ptr::null(),
        close: close_stream,
    };
    let cookie = ptr::without_provenance_mut(fd as usize);
    let file = unsafe { fopencookie(cookie, mode, functions) };
    if !file.is_null() {
        unsafe { file.byte_add(NUMBER_AT).cast::<c_int>().write(fd) };
        // One that has no place is not known when it is opened again, which is all it is for.
        replace(ptr::null_mut(), file);
    }
    file
}
