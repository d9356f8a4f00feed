//! The function `syscall`, by which a program makes calls on descriptors that the library hides
//! otherwise. Calls of the system that the processor makes for a program itself go past everything
//! here.
//!
//! SAFETY of every block here: as in [`calls`](crate::calls).
#![allow(
    clippy::missing_safety_doc,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    unreachable_pub,
    reason = "the C library documents it, with its conditions"
)]

use core::ffi::{c_int, c_long, c_uint, c_void};
use core::ptr;

use crate::real::Hidden;
use crate::{calls, files, filters};

#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall() -> c_long {
    crate::real::jump_or_fail!(target)
}

/// The function that makes a system call: ours, or the C library's.
extern "C" fn target(number: c_long) -> *const c_void {
    static HIDDEN: Hidden = Hidden::named("syscall\0");
    if is_ours(number) {
        return ours as *const c_void;
    }
    HIDDEN.address().cast_const()
}

/// System calls, and the functions for them.
macro_rules! calls {
    ($($number:ident => $function:path { $($arg:ident),* })*) => {
        const fn is_ours(number: c_long) -> bool {
            matches!(number, $(libc::$number)|*) || is_old(number)
        }

        unsafe extern "C-unwind" fn ours(
            number: c_long,
            a: usize,
            b: usize,
            c: usize,
            d: usize,
            e: usize,
            f: usize,
        ) -> c_long {
            let args = [a, b, c, d, e, f];
            match number {
                $(libc::$number => {
                    let mut at = args.into_iter();
                    $(let $arg = at.next().unwrap_or(0);)*
                    unsafe { $function($(Argument::of($arg)),*) as c_long }
                })*
                _ => unsafe { old(number, args) },
            }
        }
    };
}

/// What a function takes, out of a register.
trait Argument {
    fn of(word: usize) -> Self;
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl Argument for $type {
            fn of(word: usize) -> Self {
                word as Self
            }
        }
    )*};
}

numbers! { c_int c_uint usize u64 i64 }

impl<T> Argument for *const T {
    fn of(word: usize) -> Self {
        ptr::with_exposed_provenance(word)
    }
}

impl<T> Argument for *mut T {
    fn of(word: usize) -> Self {
        ptr::with_exposed_provenance_mut(word)
    }
}

calls! {
    SYS_socket => calls::socket { a, b, c }
    SYS_socketpair => calls::socketpair { a, b, c, d }
    SYS_bind => calls::bind { a, b, c }
    SYS_connect => calls::connect { a, b, c }
    SYS_getsockname => calls::getsockname { a, b, c }
    SYS_getpeername => calls::getpeername { a, b, c }
    SYS_listen => calls::listen { a, b }
    SYS_accept => calls::accept { a, b, c }
    SYS_accept4 => calls::accept4 { a, b, c, d }
    SYS_shutdown => calls::shutdown { a, b }
    SYS_sendto => calls::sendto { a, b, c, d, e, f }
    SYS_sendmsg => calls::sendmsg { a, b, c }
    SYS_sendmmsg => calls::sendmmsg { a, b, c, d }
    SYS_recvfrom => calls::recvfrom { a, b, c, d, e, f }
    SYS_recvmsg => calls::recvmsg { a, b, c }
    SYS_recvmmsg => calls::recvmmsg { a, b, c, d, e }
    SYS_setsockopt => calls::setsockopt { a, b, c, d, e }
    SYS_getsockopt => calls::getsockopt { a, b, c, d, e }
    SYS_ioctl => calls::ioctl { a, b, c }
    SYS_fcntl => calls::fcntl { a, b, c }
    SYS_dup => calls::dup { a }
    SYS_dup3 => calls::dup3 { a, b, c }
    SYS_close => calls::close { a }
    SYS_close_range => calls::close_range { a, b, c }
    SYS_read => files::read { a, b, c }
    SYS_readv => files::readv { a, b, c }
    SYS_write => files::write { a, b, c }
    SYS_writev => files::writev { a, b, c }
    SYS_preadv2 => read_at { a, b, c, d, e, f }
    SYS_pwritev2 => write_at { a, b, c, d, e, f }
    SYS_sendfile => files::sendfile { a, b, c, d }
    SYS_splice => files::splice { a, b, c, d, e, f }
    SYS_prctl => filters::prctl { a, b, c, d, e }
    SYS_seccomp => filters::seccomp { a, b, c }
}

/// The place in the file comes in two halves, of which the upper one counts for nothing.
unsafe fn read_at(
    fd: c_int,
    to: *const libc::iovec,
    count: c_int,
    at: i64,
    _upper: usize,
    flags: c_int,
) -> isize {
    unsafe { files::preadv2(fd, to, count, at, flags) }
}

unsafe fn write_at(
    fd: c_int,
    from: *const libc::iovec,
    count: c_int,
    at: i64,
    _upper: usize,
    flags: c_int,
) -> isize {
    unsafe { files::pwritev2(fd, from, count, at, flags) }
}

/// Calls that only older machines have.
const fn is_old(number: c_long) -> bool {
    cfg!(target_arch = "x86_64") && number == SYS_DUP2
}

/// `dup2` of x86-64.
const SYS_DUP2: c_long = 33;

unsafe fn old(_number: c_long, [from, to, ..]: [usize; 6]) -> c_long {
    unsafe { calls::dup2(from as c_int, to as c_int) }.into()
}
