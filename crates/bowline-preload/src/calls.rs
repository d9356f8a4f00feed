//! The C library's functions on descriptors. Each checks whether its descriptor is an RDS socket,
//! and calls the replaced function if not.
//!
//! SAFETY of every block here: pointers and lengths come from the caller of a C function, who
//! promises the conditions of that function.
#![allow(
    clippy::missing_safety_doc,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    clippy::unnecessary_cast,
    missing_docs,
    unreachable_pub,
    reason = "the C library documents them, with their conditions; some sizes differ in musl"
)]

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::time::Duration;
use std::time::Instant;

use bowline_host_client::{Message, Pieces, agent};
use bowline_wire::rds::uapi::{AF_RDS, SIOCRDSGETTOS, SIOCRDSSETTOS};
use libc::{iovec, mmsghdr, msghdr, sockaddr, socklen_t, ssize_t, timespec};

use crate::closing::Closing;
use crate::real::{fail, hidden};
use crate::table::{self, Rds};
use crate::{areas, nodes};

/// Longest option value that is read, in bytes; all are shorter.
const OPTION_MAX: usize = 4096;
/// Longest name that is read, in bytes: a `sockaddr_storage`.
const NAME_MAX: usize = 128;

/// Functions whose first argument is a descriptor, and what they do when it is an RDS socket.
macro_rules! functions {
    ($(
        fn $name:ident($fd:ident $(, $arg:ident: $type:ty)* $(,)?) -> $ret:ty = |$rds:pat_param| $body:expr;
    )*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($fd: c_int $(, $arg: $type)*) -> $ret {
            match table::find($fd) {
                None => hidden!($name($fd: c_int $(, $arg: $type)*) -> $ret),
                Some(Err(errno)) => fail(errno) as $ret,
                Some(Ok($rds)) => $body,
            }
        }
    )*};
}

functions! {
    fn bind(fd, name: *const sockaddr, len: socklen_t) -> c_int =
        |rds| int(rds.bind(unsafe { name_of(name, len) }));
    fn connect(fd, name: *const sockaddr, len: socklen_t) -> c_int =
        |rds| int(rds.connect(unsafe { name_of(name, len) }));
    fn getsockname(fd, name: *mut sockaddr, len: *mut socklen_t) -> c_int =
        |rds| int(rds.name(false).map(|found| unsafe { give_name(&found, name, len) }));
    fn getpeername(fd, name: *mut sockaddr, len: *mut socklen_t) -> c_int =
        |rds| int(rds.name(true).map(|found| unsafe { give_name(&found, name, len) }));
    fn listen(fd, backlog: c_int) -> c_int = |_| fail(libc::EOPNOTSUPP);
    fn accept(fd, name: *mut sockaddr, len: *mut socklen_t) -> c_int = |_| fail(libc::EOPNOTSUPP);
    fn accept4(fd, name: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int =
        |_| fail(libc::EOPNOTSUPP);
    fn shutdown(fd, how: c_int) -> c_int = |_| fail(libc::EOPNOTSUPP);

    fn send(fd, from: *const c_void, len: usize, flags: c_int) -> ssize_t =
        |rds| size(unsafe { send_pieces(&rds, flags, &[], &[], &[piece(from, len)]) });
    fn sendto(
        fd,
        from: *const c_void,
        len: usize,
        flags: c_int,
        name: *const sockaddr,
        name_len: socklen_t,
    ) -> ssize_t = |rds| {
        let name = unsafe { name_of(name, name_len) };
        size(unsafe { send_pieces(&rds, flags, name, &[], &[piece(from, len)]) })
    };
    fn sendmsg(fd, msg: *const msghdr, flags: c_int) -> ssize_t =
        |rds| size(unsafe { send_one(&rds, msg, flags) });
    fn sendmmsg(fd, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int =
        |rds| unsafe { send_many(&rds, msgs, count, flags) };
    // The kernel adds MSG_EOR to a write on a packet socket, a flag that RDS refuses.
    fn write(fd, from: *const c_void, len: usize) -> ssize_t =
        |_| fail(libc::EOPNOTSUPP) as ssize_t;
    fn writev(fd, from: *const iovec, count: c_int) -> ssize_t =
        |_| fail(libc::EOPNOTSUPP) as ssize_t;

    fn recv(fd, to: *mut c_void, len: usize, flags: c_int) -> ssize_t =
        |rds| size(unsafe { receive(&rds, flags, 0, &[piece(to, len)]) }.map(|m| m.len));
    fn __recv_chk(fd, to: *mut c_void, len: usize, room: usize, flags: c_int) -> ssize_t =
        |rds| size(unsafe { receive(&rds, flags, 0, &[piece(to, len.min(room))]) }.map(|m| m.len));
    fn recvfrom(
        fd,
        to: *mut c_void,
        len: usize,
        flags: c_int,
        name: *mut sockaddr,
        name_len: *mut socklen_t,
    ) -> ssize_t = |rds| size(unsafe { receive_from(&rds, to, len, flags, name, name_len) });
    fn __recvfrom_chk(
        fd,
        to: *mut c_void,
        len: usize,
        room: usize,
        flags: c_int,
        name: *mut sockaddr,
        name_len: *mut socklen_t,
    ) -> ssize_t =
        |rds| size(unsafe { receive_from(&rds, to, len.min(room), flags, name, name_len) });
    fn read(fd, to: *mut c_void, len: usize) -> ssize_t =
        |rds| size(unsafe { receive(&rds, 0, 0, &[piece(to, len)]) }.map(|m| m.len));
    fn __read_chk(fd, to: *mut c_void, len: usize, room: usize) -> ssize_t =
        |rds| size(unsafe { receive(&rds, 0, 0, &[piece(to, len.min(room))]) }.map(|m| m.len));
    fn readv(fd, to: *const iovec, count: c_int) -> ssize_t = |rds| {
        let to = unsafe { pieces(to, usize::try_from(count).unwrap_or(0)) };
        size(unsafe { receive(&rds, 0, 0, to) }.map(|m| m.len))
    };

    fn setsockopt(
        fd,
        level: c_int,
        name: c_int,
        value: *const c_void,
        len: socklen_t,
    ) -> c_int = |rds| match usize::try_from(len.cast_signed()) {
        Err(_) => fail(libc::EINVAL),
        Ok(len) => int(rds.set_option(level, name, unsafe { bytes(value, len.min(OPTION_MAX)) })),
    };
    fn getsockopt(
        fd,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: *mut socklen_t,
    ) -> c_int = |rds| unsafe { get_option(&rds, level, name, value, len) };
}

fn int<T>(result: Result<T, c_int>) -> c_int {
    result.map_or_else(fail, |_| 0)
}

fn size(result: Result<usize, c_int>) -> ssize_t {
    result.map_or_else(|errno| fail(errno) as ssize_t, |n| n as ssize_t)
}

/// # Safety
/// `from` is readable for `len` bytes, or null.
unsafe fn bytes<'a>(from: *const c_void, len: usize) -> &'a [u8] {
    if from.is_null() || len == 0 {
        return &[];
    }
    unsafe { core::slice::from_raw_parts(from.cast(), len) }
}

/// # Safety
/// As [`bytes`].
unsafe fn name_of<'a>(name: *const sockaddr, len: socklen_t) -> &'a [u8] {
    unsafe { bytes(name.cast(), (len as usize).min(NAME_MAX)) }
}

/// # Safety
/// As [`bytes`].
unsafe fn pieces<'a>(from: *const iovec, len: usize) -> &'a [iovec] {
    if from.is_null() || len == 0 {
        return &[];
    }
    unsafe { core::slice::from_raw_parts(from, len) }
}

const fn piece(base: *const c_void, len: usize) -> iovec {
    iovec { iov_base: base.cast_mut(), iov_len: len }
}

/// Copies a name to the caller, cut to the caller's room; stores the whole length.
///
/// # Safety
/// Pointers are null, or valid as for `getsockname`.
unsafe fn give_name(name: &[u8], to: *mut sockaddr, len: *mut socklen_t) {
    if len.is_null() {
        return;
    }
    let room = unsafe { *len } as usize;
    if !to.is_null() {
        let n = name.len().min(room);
        unsafe { core::ptr::copy_nonoverlapping(name.as_ptr(), to.cast::<u8>(), n) };
    }
    unsafe { *len = name.len() as socklen_t };
}

/// # Safety
/// What the pieces of the payload point at is readable.
unsafe fn send_pieces(
    rds: &Rds,
    flags: c_int,
    name: &[u8],
    control: &[u8],
    payload: &[iovec],
) -> Result<usize, c_int> {
    let area = areas::of(rds.fd).ok_or(libc::EBADF)?;
    unsafe { rds.send(&area, flags, name, control, payload) }
}

/// # Safety
/// What the pieces point at is writable.
unsafe fn receive(
    rds: &Rds,
    flags: c_int,
    control_room: usize,
    to: &[iovec],
) -> Result<Message, c_int> {
    let area = areas::of(rds.fd).ok_or(libc::EBADF)?;
    rds.receive(&area, flags, control_room, &mut unsafe { Pieces::new(to) })
}

/// # Safety
/// `msg` is the caller's, as for `sendmsg`.
unsafe fn send_one(rds: &Rds, msg: *const msghdr, flags: c_int) -> Result<usize, c_int> {
    let msg = unsafe { &*msg };
    let name = unsafe { name_of(msg.msg_name.cast(), msg.msg_namelen) };
    let control = unsafe { bytes(msg.msg_control, msg.msg_controllen as usize) };
    let payload = unsafe { pieces(msg.msg_iov, msg.msg_iovlen as usize) };
    unsafe { send_pieces(rds, flags, name, control, payload) }
}

/// # Safety
/// `msgs` are the caller's, as for `sendmmsg`.
unsafe fn send_many(rds: &Rds, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    for n in 0..count {
        let msg = unsafe { &mut *msgs.add(n as usize) };
        match unsafe { send_one(rds, &raw const msg.msg_hdr, flags) } {
            Ok(len) => msg.msg_len = len as c_uint,
            Err(errno) if n == 0 => return fail(errno),
            Err(_) => return n as c_int,
        }
    }
    count as c_int
}

/// # Safety
/// The pointers are the caller's, as for `recvfrom`.
unsafe fn receive_from(
    rds: &Rds,
    to: *mut c_void,
    len: usize,
    flags: c_int,
    name: *mut sockaddr,
    name_len: *mut socklen_t,
) -> Result<usize, c_int> {
    let message = unsafe { receive(rds, flags, 0, &[piece(to, len)]) }?;
    if !name.is_null() {
        unsafe { give_name(&message.name, name, name_len) };
    }
    Ok(message.len)
}

/// # Safety
/// `msg` is the caller's, as for `recvmsg`.
unsafe fn receive_one(rds: &Rds, msg: *mut msghdr, flags: c_int) -> Result<usize, c_int> {
    let msg = unsafe { &mut *msg };
    let to = unsafe { pieces(msg.msg_iov, msg.msg_iovlen as usize) };
    let room = if msg.msg_control.is_null() { 0 } else { msg.msg_controllen as usize };
    let Message { len, flags, name, control } = unsafe { receive(rds, flags, room, to) }?;
    if msg.msg_name.is_null() {
        msg.msg_namelen = 0;
    } else {
        unsafe { give_name(&name, msg.msg_name.cast(), &raw mut msg.msg_namelen) };
    }
    let n = control.len().min(room);
    if n > 0 {
        unsafe { core::ptr::copy_nonoverlapping(control.as_ptr(), msg.msg_control.cast(), n) };
    }
    msg.msg_controllen = n as _;
    msg.msg_flags = flags;
    Ok(len)
}

/// # Safety
/// `msgs` are the caller's, as for `recvmmsg`.
unsafe fn receive_many(
    rds: &Rds,
    msgs: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    limit: Option<Duration>,
) -> c_int {
    let begun = Instant::now();
    let mut own = flags & !libc::MSG_WAITFORONE;
    for n in 0..count {
        let msg = unsafe { &mut *msgs.add(n as usize) };
        match unsafe { receive_one(rds, &raw mut msg.msg_hdr, own) } {
            Ok(len) => msg.msg_len = len as c_uint,
            Err(errno) if n == 0 => return fail(errno),
            Err(_) => return n as c_int,
        }
        if flags & libc::MSG_WAITFORONE != 0 {
            own |= libc::MSG_DONTWAIT;
        }
        // As in the kernel, the limit is checked only after each message.
        if limit.is_some_and(|limit| begun.elapsed() >= limit) {
            return n as c_int + 1;
        }
    }
    count as c_int
}

/// # Safety
/// The pointers are the caller's, as for `getsockopt`.
unsafe fn get_option(
    rds: &Rds,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    if len.is_null() {
        return fail(libc::EFAULT);
    }
    let Ok(room) = usize::try_from(unsafe { *len }.cast_signed()) else {
        return fail(libc::EINVAL);
    };
    let (found, needed, returned) = match rds.get_option(level, name, room) {
        Ok(found) => found,
        Err(errno) => return fail(errno),
    };
    let n = found.len().min(room);
    if n > 0 && !value.is_null() {
        unsafe { core::ptr::copy_nonoverlapping(found.as_ptr(), value.cast(), n) };
    }
    unsafe { *len = needed.cast_unsigned() };
    if returned < 0 { fail(-returned) } else { returned }
}

// The functions below have work for other descriptors, too.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain == AF_RDS {
        return nodes::socket(kind, protocol).unwrap_or_else(fail);
    }
    hidden!(socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socketpair(
    domain: c_int,
    kind: c_int,
    protocol: c_int,
    pair: *mut c_int,
) -> c_int {
    if domain == AF_RDS {
        return fail(libc::EOPNOTSUPP);
    }
    let made: c_int =
        hidden!(socketpair(domain: c_int, kind: c_int, protocol: c_int, pair: *mut c_int) -> c_int);
    if made == 0 {
        // The receiver of the other end may give it a name like that of a node.
        unsafe { core::slice::from_raw_parts(pair, 2) }.iter().for_each(|fd| table::set_other(*fd));
    }
    made
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    match table::find(fd) {
        Some(Err(errno)) => fail(errno) as ssize_t,
        Some(Ok(rds)) => size(unsafe { receive_one(&rds, msg, flags) }),
        None => {
            let got = hidden!(recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t);
            if got >= 0 {
                unsafe { forget_descriptors(msg) };
            }
            got
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    msgs: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    limit: *mut timespec,
) -> c_int {
    match table::find(fd) {
        Some(Err(errno)) => fail(errno),
        Some(Ok(rds)) => {
            let limit = unsafe { limit.as_ref() };
            let limit = limit.map(|at| Duration::new(at.tv_sec as u64, at.tv_nsec as u32));
            unsafe { receive_many(&rds, msgs, count, flags, limit) }
        }
        None => {
            let got = hidden!(
                recvmmsg(
                    fd: c_int,
                    msgs: *mut mmsghdr,
                    count: c_uint,
                    flags: c_int,
                    limit: *mut timespec,
                ) -> c_int
            );
            for n in 0..got.max(0) {
                unsafe { forget_descriptors(&raw mut (*msgs.add(n as usize)).msg_hdr) };
            }
            got
        }
    }
}

/// Forgets the table entries of descriptors that came with a message.
///
/// # Safety
/// `msg` was filled in by the system.
unsafe fn forget_descriptors(msg: *mut msghdr) {
    let mut cmsg = unsafe { libc::CMSG_FIRSTHDR(msg) };
    while !cmsg.is_null() {
        let head = unsafe { &*cmsg };
        if (head.cmsg_level, head.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let front = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (head.cmsg_len as usize).saturating_sub(front) / size_of::<c_int>();
            let data = unsafe { libc::CMSG_DATA(cmsg) }.cast::<c_int>();
            for n in 0..count {
                table::forget(unsafe { data.add(n).read_unaligned() });
            }
        }
        cmsg = unsafe { libc::CMSG_NXTHDR(msg, cmsg) };
    }
}

/// Requests that are about the descriptor: FIOCLEX, FIONCLEX, FIOASYNC, FIONBIO.
const OF_DESCRIPTORS: [c_int; 4] = [0x5451, 0x5450, 0x5452, 0x5421];

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: libc::c_ulong, arg: *mut c_void) -> c_int {
    let number = request as c_int;
    let rds = match table::find(fd) {
        Some(Err(errno)) => return fail(errno),
        Some(Ok(rds)) if !OF_DESCRIPTORS.contains(&number) => rds,
        _ => return hidden!(ioctl(fd: c_int, request: libc::c_ulong, arg: *mut c_void) -> c_int),
    };
    let byte = arg.cast::<u8>();
    if [SIOCRDSSETTOS, SIOCRDSGETTOS].contains(&number) && byte.is_null() {
        return fail(libc::EFAULT);
    }
    let given = if number == SIOCRDSSETTOS { unsafe { *byte } } else { 0 };
    match rds.ioctl(number, given) {
        Err(errno) => fail(errno),
        Ok(got) => {
            if let Some(got) = got.filter(|_| number == SIOCRDSGETTOS) {
                unsafe { *byte = got };
            }
            0
        }
    }
}

/// Called when a descriptor was duplicated: forgets the previous meaning of its number.
fn is_copy(made: c_int) -> c_int {
    if made >= 0 {
        table::forget(made);
    }
    made
}

/// Called before the program takes a number that may belong to a channel or a socket.
fn make_way(fd: c_int) -> Closing {
    if table::is_ours(fd) {
        nodes::close_idle();
        make_way_of_agent(fd as c_uint, fd as c_uint);
    }
    Closing::one(fd)
}

/// Called before the program takes or closes numbers that the agent may use.
fn make_way_of_agent(first: c_uint, last: c_uint) {
    if table::is_this_process() {
        agent::make_way(first, last);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int {
    let result = hidden!(fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int);
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) { is_copy(result) } else { result }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, arg: *mut c_void) -> c_int {
    unsafe { fcntl(fd, command, arg) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    is_copy(hidden!(dup(fd: c_int) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    let _closing = make_way(to);
    is_copy(hidden!(dup2(fd: c_int, to: c_int) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    let _closing = make_way(to);
    is_copy(hidden!(dup3(fd: c_int, to: c_int, flags: c_int) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if table::is_ours(fd) {
        // The program does not have such a descriptor.
        return fail(libc::EBADF);
    }
    let _closing = Closing::one(fd);
    table::forget(fd);
    hidden!(close(fd: c_int) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let _closing = Closing::some();
    nodes::close_idle();
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0 {
        make_way_of_agent(first, last);
    }
    table::forget_range(first as usize, last as usize);
    hidden!(close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    let _closing = Closing::some();
    nodes::close_idle();
    make_way_of_agent(c_uint::try_from(first).unwrap_or(0), c_uint::MAX);
    table::forget_range(usize::try_from(first).unwrap_or(0), usize::MAX - 1);
    // A C library without it has no callers of it either.
    let _: *mut c_void = hidden!(closefrom(first: c_int) -> *mut c_void);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fclose(file: *mut libc::FILE) -> c_int {
    let fd = unsafe { libc::fileno(file) };
    let _closing = Closing::one(fd);
    table::forget(fd);
    hidden!(fclose(file: *mut libc::FILE) -> c_int)
}

/// Functions that close the descriptor of a file and open another, which may get the same number.
macro_rules! reopening {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            path: *const c_char,
            mode: *const c_char,
            file: *mut libc::FILE,
        ) -> *mut libc::FILE {
            let fd = unsafe { libc::fileno(file) };
            let _closing = Closing::one(fd);
            table::forget(fd);
            hidden!(
                $name(
                    path: *const c_char,
                    mode: *const c_char,
                    file: *mut libc::FILE,
                ) -> *mut libc::FILE
            )
        }
    )*};
}

reopening! { freopen freopen64 }
