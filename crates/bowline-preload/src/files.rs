//! What a program may do with any descriptor: read and write it as a file. The system adds MSG_EOR
//! to what is written to a socket of packets, which RDS does not take, so that nothing is ever sent
//! so.
//!
//! Calls that fail alike on unix sockets are not here: those with a place in the file, `vmsplice`,
//! `tee` and `copy_file_range`.
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

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::ptr;

use bowline_host_client::system;
use libc::{iovec, off_t, ssize_t};

use crate::calls::{piece, read_pieces, read_vector, size, vector};
use crate::pointers::read_quickly;
use crate::real::{fail, functions, hidden};
use crate::table::{self, Rds};

/// Flag of `preadv2`: not to wait.
const RWF_NOWAIT: c_int = 8;
/// Flags of `preadv2` and `pwritev2` that the system takes for a socket: RWF_HIPRI, RWF_DSYNC,
/// RWF_SYNC, RWF_NOWAIT, RWF_APPEND.
const RWF_KNOWN: c_int = 0x1f;
/// Bytes that `splice` takes at most: what a pipe holds.
const SPLICE_MAX: usize = 64 << 10;

functions! {
    fn read(fd, to: *mut c_void, len: usize) -> ssize_t =
        |rds| size(unsafe { read_pieces(&rds, 0, &[piece(to, len)]) });
    fn __read_chk(fd, to: *mut c_void, len: usize, room: usize) -> ssize_t =
        |rds| size(unsafe { read_pieces(&rds, 0, &[piece(to, len.min(room))]) });
    fn readv(fd, to: *const iovec, count: c_int) -> ssize_t =
        |rds| size(unsafe { read_vector(&rds, 0, to, count) });
    fn preadv2(fd, to: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t =
        |rds| size(unsafe { read_at(&rds, to, count, at, flags) });
    fn preadv64v2(fd, to: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t =
        |rds| size(unsafe { read_at(&rds, to, count, at, flags) });

    fn write(fd, from: *const c_void, len: usize) -> ssize_t =
        |_| fail(libc::EOPNOTSUPP) as ssize_t;
    fn writev(fd, from: *const iovec, count: c_int) -> ssize_t =
        |_| size(unsafe { write_at(from, count, -1) });
    fn pwritev2(fd, from: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t =
        |_| size(unsafe { write_at(from, count, at) });
    fn pwritev64v2(fd, from: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t =
        |_| size(unsafe { write_at(from, count, at) });
    fn sendfile(fd, from: c_int, at: *mut off_t, len: usize) -> ssize_t =
        |rds| size(unsafe { send_file(&rds, from, at, len) });
    fn sendfile64(fd, from: c_int, at: *mut off_t, len: usize) -> ssize_t =
        |rds| size(unsafe { send_file(&rds, from, at, len) });
    // What is printed is no matter: none of it goes out.
    fn vdprintf(fd, format: *const c_char, list: *mut c_void) -> c_int =
        |_| fail(libc::EOPNOTSUPP);
    fn __vdprintf_chk(fd, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int =
        |_| fail(libc::EOPNOTSUPP);
}

/// # Safety
/// As `preadv2` wants.
unsafe fn read_at(
    rds: &Rds,
    to: *const iovec,
    count: c_int,
    at: off_t,
    flags: c_int,
) -> Result<usize, c_int> {
    if at != -1 {
        return Err(if at < 0 { libc::EINVAL } else { libc::ESPIPE });
    }
    if flags & !RWF_KNOWN != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let flags = if flags & RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
    unsafe { read_vector(rds, flags, to, count) }
}

/// # Safety
/// As `pwritev2` wants.
unsafe fn write_at(from: *const iovec, count: c_int, at: off_t) -> Result<usize, c_int> {
    if at != -1 {
        return Err(if at < 0 { libc::EINVAL } else { libc::ESPIPE });
    }
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    let from = unsafe { vector(from, count, libc::EINVAL) }?;
    let is_empty = from.pieces().iter().all(|piece| piece.iov_len == 0);
    if is_empty { Ok(0) } else { Err(libc::EOPNOTSUPP) }
}

/// What is refused before anything is sent.
fn check_splice(rds: &Rds) -> Result<(), c_int> {
    if system::flags(rds.fd)? & libc::O_APPEND != 0 { Err(libc::EINVAL) } else { Ok(()) }
}

/// # Safety
/// As `sendfile` wants.
unsafe fn send_file(rds: &Rds, from: c_int, at: *const off_t, len: usize) -> Result<usize, c_int> {
    let at = if at.is_null() { 0 } else { unsafe { read_quickly(at) }? };
    let mode = system::flags(from)? & libc::O_ACCMODE;
    if mode == libc::O_WRONLY {
        return Err(libc::EBADF);
    }
    if at < 0 {
        return Err(libc::EINVAL);
    }
    check_splice(rds)?;
    if len == 0 { Ok(0) } else { Err(libc::EOPNOTSUPP) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    len: usize,
    flags: c_uint,
) -> ssize_t {
    let found = [table::find(from), table::find(to)];
    let are_ours = [&found[0], &found[1]].map(|found| matches!(found, Some(Ok(_))));
    let done = match found {
        [None, None] => {
            return hidden!(
                splice(
                    from: c_int,
                    from_at: *mut off_t,
                    to: c_int,
                    to_at: *mut off_t,
                    len: usize,
                    flags: c_uint,
                ) -> ssize_t
            );
        }
        [Some(Err(errno)), _] | [_, Some(Err(errno))] => return fail(errno) as ssize_t,
        // One of both has to be a pipe.
        [Some(Ok(_)), Some(Ok(_))] => fail(libc::EINVAL) as ssize_t,
        [Some(Ok(rds)), None] => size(splice_from(&rds, to, !to_at.is_null(), len, flags)),
        [None, Some(Ok(rds))] => size(splice_to(from, !from_at.is_null(), &rds, len, flags)),
    };
    let is_other = |(fd, is_ours): (c_int, bool)| is_ours && table::is_something_else(fd);
    if done < 0 && [from, to].into_iter().zip(are_ours).any(is_other) {
        // It is forgotten.
        return unsafe { splice(from, from_at, to, to_at, len, flags) };
    }
    done
}

/// Checks the other descriptor of a splice, in the order of the system: that it is a pipe, without
/// a place, and not opened for the other direction alone.
fn check_pipe(pipe: c_int, has_place: bool, wrong: c_int, flags: c_uint) -> Result<(), c_int> {
    /// SPLICE_F_MOVE, SPLICE_F_NONBLOCK, SPLICE_F_MORE, SPLICE_F_GIFT.
    const KNOWN: c_uint = 0xf;
    if flags & !KNOWN != 0 {
        return Err(libc::EINVAL);
    }
    let opened = system::flags(pipe)?;
    let room = system::pipe_room(pipe);
    if has_place && room.is_ok() {
        return Err(libc::ESPIPE);
    }
    if opened & libc::O_PATH != 0 || opened & libc::O_ACCMODE == wrong {
        return Err(libc::EBADF);
    }
    room.map(drop)
}

/// Waits for a pipe; EAGAIN if the call may not.
fn wait_for_pipe(pipe: c_int, event: i16, flags: c_uint) -> Result<(), c_int> {
    let may_wait =
        flags & libc::SPLICE_F_NONBLOCK == 0 && system::flags(pipe)? & libc::O_NONBLOCK == 0;
    let ready = system::wait_for(pipe, event, may_wait)?;
    if ready { Ok(()) } else { Err(libc::EAGAIN) }
}

fn splice_to(
    pipe: c_int,
    has_place: bool,
    rds: &Rds,
    len: usize,
    flags: c_uint,
) -> Result<usize, c_int> {
    if len == 0 {
        return Ok(0);
    }
    check_pipe(pipe, has_place, libc::O_WRONLY, flags)?;
    check_splice(rds)?;
    wait_for_pipe(pipe, libc::POLLIN, flags)?;
    Err(libc::EOPNOTSUPP)
}

fn splice_from(
    rds: &Rds,
    pipe: c_int,
    has_place: bool,
    len: usize,
    flags: c_uint,
) -> Result<usize, c_int> {
    if len == 0 {
        return Ok(0);
    }
    check_pipe(pipe, has_place, libc::O_RDONLY, flags)?;
    wait_for_pipe(pipe, libc::POLLOUT, flags)?;
    let room = system::pipe_room(pipe)?.min(len).min(SPLICE_MAX);
    let mut bytes = vec![0; room];
    let may_wait = flags & libc::SPLICE_F_NONBLOCK == 0;
    let flags = if may_wait { 0 } else { libc::MSG_DONTWAIT };
    let to = piece(bytes.as_mut_ptr().cast(), room);
    let got = unsafe { read_pieces(rds, flags, &[to]) }?;
    system::write(pipe, &bytes[..got])
}

/// Where a call goes whose arguments nobody knows but the C library: to its function of this name,
/// or nowhere.
macro_rules! variadic {
    ($name:ident, $target:ident) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> c_int {
            crate::real::jump_or_fail!($target)
        }

        /// The C library's function; null if the descriptor is an RDS socket.
        extern "C" fn $target(fd: c_int) -> *const c_void {
            static HIDDEN: crate::real::Hidden =
                crate::real::Hidden::named(concat!(stringify!($name), "\0"));
            match table::find(fd) {
                None => HIDDEN.address().cast_const(),
                Some(found) => {
                    fail(found.err().unwrap_or(libc::EOPNOTSUPP));
                    ptr::null()
                }
            }
        }
    };
}

variadic!(dprintf, dprintf_target);
variadic!(__dprintf_chk, dprintf_chk_target);
