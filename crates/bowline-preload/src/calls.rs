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

use bowline_host_client::{Message, Pieces, agent, system};
use bowline_host_wire::{Area, CONTROL_MAX, ProgramEnd, WAKE_TOKEN_LEN};
use bowline_wire::rds::uapi::{
    AF_RDS, RDS_INFO_FIRST, RDS_INFO_LAST, RDS_RECVERR, SIOCRDSGETTOS, SIOCRDSSETTOS,
    SO_RDS_TRANSPORT, SOL_RDS,
};
use libc::{iovec, mmsghdr, msghdr, sockaddr, socklen_t, ssize_t, timespec};

use crate::closing::Closing;
use crate::pointers::{
    self, NAME_MAX, Name, Vector, load, load_quickly, read_quickly, store, store_quickly,
    write_quickly,
};
use crate::real::{fail, functions, hidden};
#[cfg(target_env = "gnu")]
use crate::streams;
use crate::table::{self, Rds};
use crate::{areas, filters, nodes, process};

/// Longest option value that is read, in bytes; all are shorter.
const OPTION_MAX: usize = 4096;
/// Flags of messages that are the system's own: it takes them off.
const MSG_INTERNAL: c_int = 0x8000000 | 0x100000 | 0x10000;
/// What the system adds to the flags of each message of `sendmmsg` but the last, which RDS does not
/// take.
const MSG_BATCH: c_int = 0x40000;

functions! {
    fn bind(fd, name: *const sockaddr, len: socklen_t) -> c_int =
        |rds| int(unsafe { Name::loaded(name, len) }.and_then(|name| bind_to(&rds, name.bytes())));
    fn connect(fd, name: *const sockaddr, len: socklen_t) -> c_int =
        |rds| int(unsafe { Name::loaded(name, len) }.and_then(|name| rds.connect(name.bytes())));
    fn getsockname(fd, name: *mut sockaddr, len: *mut socklen_t) -> c_int =
        |rds| int(rds.name(false).and_then(|found| unsafe { give_name(&found, name, len) }));
    fn getpeername(fd, name: *mut sockaddr, len: *mut socklen_t) -> c_int =
        |rds| int(rds.name(true).and_then(|found| unsafe { give_name(&found, name, len) }));
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
        let name = unsafe { Name::of(name, name_len) };
        let from = &[piece(from, len)];
        size(name.and_then(|name| unsafe { send_pieces(&rds, flags, name.bytes(), &[], from) }))
    };
    fn sendmsg(fd, msg: *const msghdr, flags: c_int) -> ssize_t =
        |rds| size(unsafe { send_one(&rds, msg, flags) });
    fn sendmmsg(fd, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int =
        |rds| unsafe { send_many(&rds, msgs, count, flags) };
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

    fn setsockopt(
        fd,
        level: c_int,
        name: c_int,
        value: *const c_void,
        len: socklen_t,
    ) -> c_int = |rds| int(unsafe { set_option(&rds, level, name, value, len) });
    fn getsockopt(
        fd,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: *mut socklen_t,
    ) -> c_int = |rds| unsafe { get_option(&rds, level, name, value, len) };
}

/// A node hears of the last `close` of a socket a moment after it, and may have held one of its
/// descriptors until then; a kernel's is closed when the call returns.
fn bind_to(rds: &Rds, name: &[u8]) -> Result<c_int, c_int> {
    const TRIES: usize = 10;
    for _ in 0..TRIES {
        match rds.bind(name) {
            Err(libc::EADDRINUSE) => system::pause(),
            done => return done,
        }
    }
    rds.bind(name)
}

pub(crate) fn int<T>(result: Result<T, c_int>) -> c_int {
    result.map_or_else(fail, |_| 0)
}

pub(crate) fn size(result: Result<usize, c_int>) -> ssize_t {
    result.map_or_else(|errno| fail(errno) as ssize_t, |n| n as ssize_t)
}

pub(crate) const fn piece(base: *const c_void, len: usize) -> iovec {
    iovec { iov_base: base.cast_mut(), iov_len: len }
}

/// The pieces of memory of a call; `Err` for more than there may be.
///
/// # Safety
/// As [`Vector::load`].
pub(crate) unsafe fn vector(
    from: *const iovec,
    count: usize,
    over: c_int,
) -> Result<Vector, c_int> {
    /// Most pieces that the system takes (`UIO_MAXIOV`).
    const PIECES_MAX: usize = 1024;
    if count > PIECES_MAX {
        return Err(over);
    }
    let vector = unsafe { Vector::load(from, count) }?;
    for piece in vector.pieces() {
        if piece.iov_len > isize::MAX as usize {
            return Err(libc::EINVAL);
        }
        pointers::check(piece.iov_base, piece.iov_len)?;
    }
    Ok(vector)
}

/// Copies a name to the caller, cut to the caller's room; stores the whole length.
///
/// # Safety
/// Pointers are null, or valid as for `getsockname`.
unsafe fn give_name(name: &[u8], to: *mut sockaddr, len: *mut socklen_t) -> Result<(), c_int> {
    let mut room = [0; size_of::<socklen_t>()];
    unsafe { load(len.cast(), &mut room) }?;
    let room = usize::try_from(c_int::from_ne_bytes(room)).map_err(|_| libc::EINVAL)?;
    unsafe { store(to.cast(), &name[..name.len().min(room)]) }?;
    unsafe { store(len.cast(), &(name.len() as socklen_t).to_ne_bytes()) }
}

/// The same with a message, where another system call would be felt.
///
/// # Safety
/// As [`give_name`].
unsafe fn give_name_quickly(
    name: &[u8],
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<(), c_int> {
    let room = unsafe { read_quickly(len.cast_const()) }?;
    let room = usize::try_from(room.cast_signed()).map_err(|_| libc::EINVAL)?;
    unsafe { store_quickly(to.cast(), &name[..name.len().min(room)]) }?;
    unsafe { store_quickly(len.cast(), &(name.len() as socklen_t).to_ne_bytes()) }
}

/// The memory of a socket.
fn area_of(rds: &Rds) -> Result<areas::InUse, c_int> {
    if process::is_visitor() {
        return table::memory_for_call(rds.fd);
    }
    areas::of(rds.fd).ok_or(libc::EBADF)
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
    let is_nowhere = |piece: &iovec| pointers::check(piece.iov_base, piece.iov_len).is_err();
    let sent = if payload.iter().any(is_nowhere) {
        Err(libc::EFAULT)
    } else {
        let area = area_of(rds)?;
        unsafe { rds.send(&area, flags & !MSG_INTERNAL, name, control, payload) }
    };
    match sent {
        Err(libc::EFAULT) if !payload.iter().any(is_kernels) => Err(fault(rds, !name.is_empty())),
        done => done,
    }
}

fn is_kernels(piece: &iovec) -> bool {
    piece.iov_len > 0 && pointers::is_kernels(piece.iov_base)
}

/// The error for a message that is nowhere: its names come first.
#[cold]
fn fault(rds: &Rds, has_name: bool) -> c_int {
    let is_bound = rds.name(false).is_ok_and(|name| name.iter().skip(2).any(|byte| *byte != 0));
    if is_bound && (has_name || rds.name(true).is_ok()) { libc::EFAULT } else { libc::ENOTCONN }
}

/// # Safety
/// What the pieces point at is writable.
unsafe fn receive(
    rds: &Rds,
    flags: c_int,
    control_room: usize,
    to: &[iovec],
) -> Result<Message, c_int> {
    if to.iter().any(is_kernels) {
        return Err(libc::EFAULT);
    }
    if to.iter().any(|piece| pointers::check(piece.iov_base, piece.iov_len).is_err()) {
        // Where there is nothing to copy, it does not matter where to.
        let message = unsafe { receive(rds, flags | libc::MSG_PEEK | libc::MSG_TRUNC, 0, &[]) }?;
        if message.len > 0 {
            return Err(libc::EFAULT);
        }
        return unsafe { receive(rds, flags, control_room, &[]) };
    }
    let may_wait = flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) == 0;
    let mut is_awake = false;
    let mut token = None;
    loop {
        let area = area_of(rds)?;
        // Where there is nothing, no system call is made before the wait: a signal that comes
        // between the two does not end it.
        if area.has_nothing()
            && let Some(token) = token.take()
        {
            area.took_wake_token(rds, token);
        }
        if !may_wait || !area.has_nothing() {
            match unsafe { receive_now(rds, &area, flags, control_room, to, token.take()) } {
                Err(libc::EAGAIN) if may_wait => {}
                done => return done,
            }
        }
        if let Some(token) = token.take() {
            area.took_wake_token(rds, token);
        }
        let has_more = area.has_more();
        drop(area); // nothing is left to do if the thread is cancelled
        if is_awake && has_more {
            // What there is is nothing for this call.
            system::pause();
        }
        token = Some(wait_for_token(rds)?);
        is_awake = true;
    }
}

/// # Safety
/// As [`receive`].
unsafe fn receive_now(
    rds: &Rds,
    area: &Area,
    flags: c_int,
    control_room: usize,
    to: &[iovec],
    token: Option<[u8; WAKE_TOKEN_LEN]>,
) -> Result<Message, c_int> {
    let to = &mut unsafe { Pieces::new(to) };
    rds.receive(area, flags | libc::MSG_DONTWAIT, control_room, to, token)
}

/// Waits for a wake token, if the descriptor lets calls wait, and as long as the socket's limit
/// allows. A thread that waits here can be cancelled, as in any `recv`: nothing on its stack has
/// something left to do.
fn wait_for_token(rds: &Rds) -> Result<[u8; WAKE_TOKEN_LEN], c_int> {
    const LEN: ssize_t = WAKE_TOKEN_LEN as ssize_t;
    let mut token = [0; WAKE_TOKEN_LEN];
    let (to, len, flags) = (token.as_mut_ptr().cast::<c_void>(), WAKE_TOKEN_LEN, 0);
    let fd = rds.fd;
    let taken = if filters::is_filtered() {
        // The program may not call `recv`; no thread is cancelled here.
        rds.take_token(true)
    } else {
        match hidden!(recv(fd: c_int, to: *mut c_void, len: usize, flags: c_int) -> ssize_t) {
            LEN => Ok(token),
            // The node has closed its end, which may have had unread tokens.
            0.. => Err(libc::ENETDOWN),
            _ => Err(crate::real::errno()),
        }
    };
    taken.map_err(|errno| match errno {
        libc::EAGAIN if !rds.is_nonblocking(0) => libc::ETIMEDOUT,
        libc::ECONNRESET => libc::ENETDOWN,
        errno => errno,
    })
}

/// As `read` has it: no message is taken where there is no room at all.
///
/// # Safety
/// As [`receive`].
pub(crate) unsafe fn read_pieces(rds: &Rds, flags: c_int, to: &[iovec]) -> Result<usize, c_int> {
    if to.iter().all(|piece| piece.iov_len == 0) {
        return Ok(0);
    }
    unsafe { receive(rds, flags, 0, to) }.map(|message| message.len)
}

/// # Safety
/// As [`receive`].
pub(crate) unsafe fn read_vector(
    rds: &Rds,
    flags: c_int,
    to: *const iovec,
    count: c_int,
) -> Result<usize, c_int> {
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    let to = unsafe { vector(to, count, libc::EINVAL) }?;
    unsafe { read_pieces(rds, flags, to.pieces()) }
}

/// # Safety
/// The pointers are the caller's, as for `setsockopt`.
unsafe fn set_option(
    rds: &Rds,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<c_int, c_int> {
    let len = usize::try_from(len.cast_signed()).map_err(|_| libc::EINVAL)?;
    let mut all = [0; OPTION_MAX];
    let copy = &mut all[..len.min(OPTION_MAX)];
    if unsafe { load(value, copy) }.is_err() {
        return Err(match level {
            libc::SOL_SOCKET if len < size_of::<c_int>() => libc::EINVAL,
            libc::SOL_SOCKET => libc::EFAULT,
            SOL_RDS if is_option_of_rds(name) => libc::EFAULT,
            _ => libc::ENOPROTOOPT,
        });
    }
    rds.set_option(level, name, copy)
}

/// Tells whether an option is one whose value RDS looks at.
const fn is_option_of_rds(name: c_int) -> bool {
    matches!(name, 1..=3 | 5..=8 | 10 | libc::SO_TIMESTAMP)
}

/// # Safety
/// `msg` is the caller's, as for `sendmsg`.
unsafe fn send_one(rds: &Rds, msg: *const msghdr, flags: c_int) -> Result<usize, c_int> {
    let msg = unsafe { read_quickly(msg) }?;
    let name = unsafe { Name::of(msg.msg_name.cast(), name_room(&msg)?) }?;
    let payload = unsafe { vector(msg.msg_iov, msg.msg_iovlen as usize, libc::EMSGSIZE) }?;
    let control = unsafe { control_of(&msg) }?;
    unsafe { send_pieces(rds, flags, name.bytes(), &control, payload.pieces()) }
}

/// Length of the name of a message, or of the room for one, as the system takes it.
fn name_room(msg: &msghdr) -> Result<socklen_t, c_int> {
    if msg.msg_name.is_null() {
        return Ok(0);
    }
    if msg.msg_namelen.cast_signed() < 0 {
        return Err(libc::EINVAL);
    }
    Ok(msg.msg_namelen.min(NAME_MAX as socklen_t))
}

/// The control messages of a message; of too many, the first.
///
/// # Safety
/// As [`load_quickly`].
unsafe fn control_of(msg: &msghdr) -> Result<Vec<u8>, c_int> {
    /// Most bytes that the system copies (`net.core.optmem_max`, as it is by default).
    const COPIED_MAX: usize = 128 << 10;
    let len = msg.msg_controllen as usize;
    if len > COPIED_MAX {
        return Err(libc::ENOBUFS);
    }
    pointers::check(msg.msg_control, len)?;
    let mut control = vec![0; len.min(CONTROL_MAX + 1)];
    unsafe { load_quickly(msg.msg_control, &mut control) }?;
    Ok(control)
}

/// # Safety
/// As [`store_quickly`].
unsafe fn tell_length(msg: *mut mmsghdr, len: usize) -> Result<(), c_int> {
    let to = unsafe { &raw mut (*msg).msg_len };
    unsafe { store_quickly(to.cast(), &(len as c_uint).to_ne_bytes()) }
}

/// # Safety
/// `msgs` are the caller's, as for `sendmmsg`.
unsafe fn send_many(rds: &Rds, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    for n in 0..count {
        let msg = msgs.wrapping_add(n as usize);
        let own = if n + 1 < count { flags | MSG_BATCH } else { flags };
        let sent = unsafe { send_one(rds, (&raw const (*msg).msg_hdr).cast(), own) };
        match sent.and_then(|len| unsafe { tell_length(msg, len) }) {
            Ok(()) => {}
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
        unsafe { give_name_quickly(&message.name, name, name_len) }?;
    }
    Ok(message.len)
}

/// # Safety
/// `msg` is the caller's, as for `recvmsg`.
unsafe fn receive_one(rds: &Rds, msg: *mut msghdr, flags: c_int) -> Result<usize, c_int> {
    let at = msg;
    let mut msg = unsafe { read_quickly(at.cast_const()) }?;
    let name_room = name_room(&msg)? as usize;
    let to = unsafe { vector(msg.msg_iov, msg.msg_iovlen as usize, libc::EMSGSIZE) }?;
    let room = if msg.msg_control.is_null() { 0 } else { msg.msg_controllen as usize };
    let asked = flags & libc::MSG_CMSG_CLOEXEC;
    let Message { len, flags, name, control } = unsafe { receive(rds, flags, room, to.pieces()) }?;
    if msg.msg_name.is_null() {
        msg.msg_namelen = 0;
    } else {
        unsafe { store_quickly(msg.msg_name, &name[..name.len().min(name_room)]) }?;
        msg.msg_namelen = name.len() as socklen_t;
    }
    // Where no control message comes, it does not matter where it would go.
    let n = control.len().min(room);
    unsafe { store_quickly(msg.msg_control, &control[..n]) }?;
    msg.msg_controllen = n as _;
    msg.msg_flags = flags | asked;
    unsafe { write_quickly(at, &msg) }?;
    Ok(len)
}

/// The limit of a call; `None` for none.
///
/// # Safety
/// As [`load_quickly`].
unsafe fn limit_of(at: *const timespec) -> Result<Option<Duration>, c_int> {
    const SECOND: u32 = 1_000_000_000;
    if at.is_null() {
        return Ok(None);
    }
    let limit = unsafe { read_quickly(at) }?;
    let seconds = u64::try_from(limit.tv_sec).map_err(|_| libc::EINVAL)?;
    let rest = u32::try_from(limit.tv_nsec).ok().filter(|rest| *rest < SECOND);
    Ok(Some(Duration::new(seconds, rest.ok_or(libc::EINVAL)?)))
}

/// Tells the caller what is left of a limit.
///
/// # Safety
/// As [`store_quickly`].
unsafe fn tell_left(at: *mut timespec, left: Duration) -> Result<(), c_int> {
    let left =
        timespec { tv_sec: left.as_secs().cast_signed() as _, tv_nsec: left.subsec_nanos() as _ };
    unsafe { write_quickly(at, &left) }
}

/// # Safety
/// The pointers are the caller's, as for `recvmmsg`.
unsafe fn receive_limited(
    rds: &Rds,
    msgs: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    limit_at: *mut timespec,
) -> c_int {
    let limit = match unsafe { limit_of(limit_at) } {
        Ok(Some(limit)) => limit,
        Ok(None) => return unsafe { receive_many(rds, msgs, count, flags, &|| false) },
        Err(errno) => return fail(errno),
    };
    let begun = Instant::now();
    let is_over = || begun.elapsed() >= limit;
    let got = unsafe { receive_many(rds, msgs, count, flags, &is_over) };
    if got <= 0 {
        return got;
    }
    match unsafe { tell_left(limit_at, limit.saturating_sub(begun.elapsed())) } {
        Ok(()) => got,
        Err(errno) => fail(errno),
    }
}

/// # Safety
/// `msgs` are the caller's, as for `recvmmsg`.
unsafe fn receive_many(
    rds: &Rds,
    msgs: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    is_over: &dyn Fn() -> bool,
) -> c_int {
    let mut own = flags & !libc::MSG_WAITFORONE;
    for n in 0..count {
        let msg = msgs.wrapping_add(n as usize);
        let received = unsafe { receive_one(rds, &raw mut (*msg).msg_hdr, own) };
        match received.and_then(|len| unsafe { tell_length(msg, len) }) {
            Ok(()) => {}
            Err(errno) if n == 0 => return fail(errno),
            Err(_) => return n as c_int,
        }
        if flags & libc::MSG_WAITFORONE != 0 {
            own |= libc::MSG_DONTWAIT;
        }
        // As in the kernel, the limit is checked only after each message.
        if is_over() {
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
    let mut room = [0; size_of::<socklen_t>()];
    if ![libc::SOL_SOCKET, SOL_RDS].contains(&level) {
        return fail(libc::ENOPROTOOPT);
    }
    if unsafe { load(len.cast(), &mut room) }.is_err() {
        return fail(libc::EFAULT);
    }
    let room = c_int::from_ne_bytes(room);
    let room = match (level, name) {
        // RDS has a negative room for a very large one.
        (SOL_RDS, RDS_RECVERR | SO_RDS_TRANSPORT) if room < 0 => size_of::<c_int>(),
        (SOL_RDS, RDS_INFO_FIRST..=RDS_INFO_LAST) | (libc::SOL_SOCKET, _) if room < 0 => {
            return fail(libc::EINVAL);
        }
        _ => usize::try_from(room).unwrap_or(0),
    };
    let (found, needed, returned) = match rds.get_option(level, name, room) {
        Ok(found) => found,
        Err(errno) => return fail(errno),
    };
    let given = unsafe { store(value, &found[..found.len().min(room)]) }
        .and_then(|()| unsafe { store(len.cast(), &needed.to_ne_bytes()) });
    match given {
        Err(errno) => fail(errno),
        Ok(()) if returned < 0 => fail(-returned),
        Ok(()) => returned,
    }
}

// The functions below have work for other descriptors, too.

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain == AF_RDS {
        return nodes::socket(kind, protocol).unwrap_or_else(fail);
    }
    hidden!(socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socketpair(
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
        for fd in unsafe { core::slice::from_raw_parts(pair, 2) } {
            // Its number may be that of a socket that was closed past this library.
            table::forget(*fd);
            // The receiver of the other end may give it a name like that of a node.
            table::set_other(*fd);
        }
    }
    made
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    if let Some(found) = table::find(fd) {
        let is_rds = found.is_ok();
        let got = size(found.and_then(|rds| unsafe { receive_one(&rds, msg, flags) }));
        if got >= 0 || !is_rds || !table::is_something_else(fd) {
            return got;
        }
    }
    let got = hidden!(recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t);
    if got >= 0 {
        unsafe { forget_descriptors(msg) };
    }
    got
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    msgs: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    limit: *mut timespec,
) -> c_int {
    match table::find(fd) {
        Some(Err(errno)) => return fail(errno),
        Some(Ok(rds)) => {
            let got = unsafe { receive_limited(&rds, msgs, count, flags, limit) };
            if got >= 0 || !table::is_something_else(fd) {
                return got;
            }
        }
        None => {}
    }
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

/// Requests that a unix socket answers and an RDS socket does not: FIONREAD, SIOCOUTQ, SIOCATMARK.
const UNIX_ONLY: [c_int; 3] = [0x541b, 0x5411, 0x8905];

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ioctl(
    fd: c_int,
    request: libc::c_ulong,
    arg: *mut c_void,
) -> c_int {
    let number = request as c_int;
    let done = match table::find(fd) {
        Some(Err(errno)) => return fail(errno),
        Some(Ok(_)) if UNIX_ONLY.contains(&number) => Some(fail(libc::ENOTTY)),
        Some(Ok(rds)) if [SIOCRDSSETTOS, SIOCRDSGETTOS].contains(&number) => {
            Some(int(unsafe { type_of_service(&rds, number, arg) }))
        }
        // What the system has for sockets of any kind, as the requests about interfaces.
        _ => None,
    };
    match done {
        Some(done) if done >= 0 || !table::is_something_else(fd) => done,
        _ => hidden!(ioctl(fd: c_int, request: libc::c_ulong, arg: *mut c_void) -> c_int),
    }
}

/// # Safety
/// The pointer is the caller's, as for `ioctl`.
unsafe fn type_of_service(rds: &Rds, number: c_int, arg: *mut c_void) -> Result<(), c_int> {
    let mut byte = [0];
    if number == SIOCRDSSETTOS {
        unsafe { load(arg, &mut byte) }?;
    }
    let got = rds.ioctl(number, byte[0])?;
    match got.filter(|_| number == SIOCRDSGETTOS) {
        Some(got) => unsafe { store(arg, &[got]) },
        None => Ok(()),
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
    if process::is_owner() {
        agent::make_way::<nodes::Hidden>(first, last);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int {
    let result = hidden!(fcntl(fd: c_int, command: c_int, arg: *mut c_void) -> c_int);
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) { is_copy(result) } else { result }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, arg: *mut c_void) -> c_int {
    unsafe { fcntl(fd, command, arg) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    is_copy(hidden!(dup(fd: c_int) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    let _closing = make_way(to);
    is_copy(hidden!(dup2(fd: c_int, to: c_int) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    let _closing = make_way(to);
    is_copy(hidden!(dup3(fd: c_int, to: c_int, flags: c_int) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    if table::is_ours(fd) {
        // The program does not have such a descriptor.
        return fail(libc::EBADF);
    }
    let _closing = Closing::one(fd);
    table::forget(fd);
    hidden!(close(fd: c_int) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let _closing = Closing::some();
    nodes::close_idle();
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0 {
        make_way_of_agent(first, last);
    }
    table::forget_range(first as usize, last as usize);
    hidden!(close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    let _closing = Closing::some();
    nodes::close_idle();
    make_way_of_agent(c_uint::try_from(first).unwrap_or(0), c_uint::MAX);
    table::forget_range(usize::try_from(first).unwrap_or(0), usize::MAX - 1);
    // A C library without it has no callers of it either.
    let _: *mut c_void = hidden!(closefrom(first: c_int) -> *mut c_void);
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fclose(file: *mut libc::FILE) -> c_int {
    let fd = unsafe { libc::fileno(file) };
    #[cfg(target_env = "gnu")]
    streams::forget(file);
    let _closing = Closing::one(fd);
    table::forget(fd);
    hidden!(fclose(file: *mut libc::FILE) -> c_int)
}

/// Functions that close the descriptor of a file and open another, which may get the same number.
macro_rules! reopening {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            path: *const c_char,
            mode: *const c_char,
            file: *mut libc::FILE,
        ) -> *mut libc::FILE {
            #[cfg(target_env = "gnu")]
            if streams::forget(file) {
                // It is one of functions, which glibc cannot make one of a file.
                unsafe { fclose(file) };
                fail(libc::EBADF);
                return core::ptr::null_mut();
            }
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
