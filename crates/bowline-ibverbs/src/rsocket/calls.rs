//! The calls of rsocket.h but for those that poll.

use core::ffi::{c_int, c_long, c_void};
use core::{mem, ptr, slice};
use std::net::SocketAddr;
use std::sync::Arc;

use super::options::Value;
use super::socket::{Socket, State, add, device, find, leave, remove};
use super::transfer::Received;
use crate::cm::addr;
use crate::fails;

/// Longest memory of a call, which says by a signed number how much of it was used.
const LEN_MAX: usize = isize::MAX.cast_unsigned();

/// What these calls return when they fail.
fn failed(errno: c_int) -> c_int {
    fails(errno);
    -1
}

fn outcome(result: Result<(), c_int>) -> c_int {
    result.map_or_else(failed, |()| 0)
}

fn number(result: Result<usize, c_int>) -> isize {
    result.map_or_else(|errno| failed(errno) as isize, usize::cast_signed)
}

fn socket(fd: c_int) -> Result<Arc<Socket>, c_int> {
    find(fd).ok_or(libc::EBADF)
}

/// An address that a program gives to a socket.
///
/// # Safety
/// The address has `len` bytes.
unsafe fn given(
    of: &Socket,
    at: *const libc::sockaddr,
    len: libc::socklen_t,
) -> Result<SocketAddr, c_int> {
    let least =
        if of.is_v4 { size_of::<libc::sockaddr_in>() } else { size_of::<libc::sockaddr_in6>() };
    if at.is_null() || (len as usize) < least {
        return Err(libc::EINVAL);
    }
    // SAFETY: long enough for the family of the socket, which the longer one of the two has too.
    let family = unsafe { at.cast::<libc::sa_family_t>().read_unaligned() };
    let is_v4 = i32::from(family) == libc::AF_INET;
    if is_v4 != of.is_v4 {
        return Err(libc::EAFNOSUPPORT);
    }
    // SAFETY: of the family of the socket, for which it is long enough.
    let at = unsafe { addr::given(at) }.ok_or(libc::EAFNOSUPPORT)?;
    Ok(match at {
        // Of a mapped address, the one that it stands for.
        SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some() => {
            SocketAddr::new(at.ip().to_canonical(), at.port())
        }
        at => at,
    })
}

/// Writes an address, cut to the room that a program has, and its whole length.
///
/// # Safety
/// The program's length is that of its room.
unsafe fn give(of: &Socket, at: SocketAddr, room: *mut libc::sockaddr, len: *mut libc::socklen_t) {
    if room.is_null() || len.is_null() {
        return;
    }
    let at = match at {
        SocketAddr::V4(v4) if !of.is_v4 => {
            SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
        }
        at => at,
    };
    let whole =
        if at.is_ipv4() { size_of::<libc::sockaddr_in>() } else { size_of::<libc::sockaddr_in6>() };
    let storage = addr::storage(at);
    // SAFETY: as this function's.
    let has = unsafe { len.read() } as usize;
    // SAFETY: no more than there is room for, and than a storage has.
    unsafe {
        ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), room.cast(), has.min(whole));
    }
    // SAFETY: as this function's.
    unsafe { len.write(whole as libc::socklen_t) };
}

/// Bytes of the program.
///
/// # Safety
/// There are `len`.
unsafe fn bytes<'a>(at: *const c_void, len: usize) -> Result<&'a [u8], c_int> {
    match len {
        0 => Ok(&[]),
        _ if at.is_null() => Err(libc::EFAULT),
        _ if len > LEN_MAX => Err(libc::EINVAL),
        // SAFETY: as this function's.
        _ => Ok(unsafe { slice::from_raw_parts(at.cast(), len) }),
    }
}

/// Room of the program.
///
/// # Safety
/// There are `len` bytes.
unsafe fn room<'a>(at: *mut c_void, len: usize) -> Result<&'a mut [u8], c_int> {
    match len {
        0 => Ok(&mut []),
        _ if at.is_null() => Err(libc::EFAULT),
        _ if len > LEN_MAX => Err(libc::EINVAL),
        // SAFETY: as this function's.
        _ => Ok(unsafe { slice::from_raw_parts_mut(at.cast(), len) }),
    }
}

#[unsafe(no_mangle)]
extern "C" fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let is_non_blocking = kind & libc::SOCK_NONBLOCK != 0;
    let kind = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    let is_v4 = match domain {
        libc::AF_INET => true,
        libc::AF_INET6 => false,
        _ => return failed(libc::EAFNOSUPPORT),
    };
    let is_datagram = match (kind, protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => false,
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => true,
        (libc::SOCK_STREAM | libc::SOCK_DGRAM, _) => return failed(libc::EPROTONOSUPPORT),
        _ => return failed(libc::ESOCKTNOSUPPORT),
    };
    let made = device().and_then(|_| Socket::new(is_v4, is_datagram));
    made.map_or_else(failed, |socket| {
        socket.lock().non_blocking = is_non_blocking;
        add(socket)
    })
}

/// # Safety
/// The address has `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn rbind(fd: c_int, at: *const libc::sockaddr, len: libc::socklen_t) -> c_int {
    outcome(socket(fd).and_then(|socket| {
        // SAFETY: as this function's.
        let at = unsafe { given(&socket, at, len) }?;
        socket.bind(at)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn rlisten(fd: c_int, backlog: c_int) -> c_int {
    outcome(socket(fd).and_then(|socket| {
        if socket.is_datagram { Err(libc::EOPNOTSUPP) } else { socket.listen(backlog) }
    }))
}

/// # Safety
/// The length is that of the room.
#[unsafe(no_mangle)]
unsafe extern "C" fn raccept(
    fd: c_int,
    room: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
) -> c_int {
    let accepted = socket(fd).and_then(|socket| {
        if socket.is_datagram { Err(libc::EOPNOTSUPP) } else { socket.accept() }
    });
    accepted.map_or_else(failed, |socket| {
        let remote = socket.lock().remote;
        if let Some(remote) = remote {
            // SAFETY: as this function's.
            unsafe { give(&socket, remote, room, len) };
        }
        add(socket)
    })
}

/// # Safety
/// The address has `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn rconnect(fd: c_int, at: *const libc::sockaddr, len: libc::socklen_t) -> c_int {
    outcome(socket(fd).and_then(|socket| {
        // SAFETY: as this function's.
        let at = unsafe { given(&socket, at, len) }?;
        if socket.is_datagram { socket.find_peer(at) } else { socket.connect(at) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn rshutdown(fd: c_int, how: c_int) -> c_int {
    outcome(socket(fd).and_then(|socket| socket.shutdown(how)))
}

#[unsafe(no_mangle)]
extern "C" fn rclose(fd: c_int) -> c_int {
    // The number is free for another socket only when this one has ended.
    let closed = match find(fd) {
        Some(socket) => {
            socket.close();
            remove(fd).is_some()
        }
        None => leave(fd),
    };
    outcome(if closed { Ok(()) } else { Err(libc::EBADF) })
}

/// # Safety
/// There are `len` bytes of room.
#[unsafe(no_mangle)]
unsafe extern "C" fn rrecv(fd: c_int, at: *mut c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: as this function's.
    unsafe { rrecvfrom(fd, at, len, flags, ptr::null_mut(), ptr::null_mut()) }
}

/// What a receive returns: with `MSG_TRUNC` the whole length of a datagram.
fn length(of: &Received, flags: c_int) -> usize {
    if flags & libc::MSG_TRUNC != 0 { of.whole } else { of.len }
}

/// # Safety
/// There are `len` bytes of room, and the address's length is that of its room.
#[unsafe(no_mangle)]
unsafe extern "C" fn rrecvfrom(
    fd: c_int,
    at: *mut c_void,
    len: usize,
    flags: c_int,
    from: *mut libc::sockaddr,
    from_len: *mut libc::socklen_t,
) -> isize {
    number(socket(fd).and_then(|socket| {
        // SAFETY: as this function's.
        let received = socket.receive(unsafe { room(at, len) }?, flags)?;
        if let Some(at) = received.from {
            // SAFETY: as this function's.
            unsafe { give(&socket, at, from, from_len) };
        }
        Ok(length(&received, flags))
    }))
}

/// Copies the bytes of a list to one place.
///
/// # Safety
/// The list has `count` entries, each of which has its bytes.
unsafe fn gather(list: *const libc::iovec, count: usize) -> Result<Vec<u8>, c_int> {
    let mut out = Vec::new();
    // SAFETY: as this function's.
    let (list, _) = unsafe { pieces(list, count) }?;
    for piece in list {
        // SAFETY: as this function's.
        out.extend_from_slice(unsafe { bytes(piece.iov_base, piece.iov_len) }?);
    }
    Ok(out)
}

/// A list, and the bytes that all of it has.
///
/// # Safety
/// The list has `count` entries.
unsafe fn pieces<'a>(
    list: *const libc::iovec,
    count: usize,
) -> Result<(&'a [libc::iovec], usize), c_int> {
    let list = match count {
        0 => &[],
        _ if list.is_null() => return Err(libc::EFAULT),
        _ if count > libc::UIO_MAXIOV as usize => return Err(libc::EINVAL),
        // SAFETY: as this function's.
        _ => unsafe { slice::from_raw_parts(list, count) },
    };
    let add = |sum: usize, piece: &libc::iovec| sum.checked_add(piece.iov_len);
    let whole = list.iter().try_fold(0, add).filter(|whole| *whole <= LEN_MAX);
    Ok((list, whole.ok_or(libc::EINVAL)?))
}

/// Copies bytes into a list, from its byte `at` on.
///
/// # Safety
/// Each entry has its room.
unsafe fn place(list: &[libc::iovec], mut at: usize, mut bytes: &[u8]) -> Result<(), c_int> {
    for piece in list {
        let before = at.min(piece.iov_len);
        at -= before;
        let (now, later) = bytes.split_at(bytes.len().min(piece.iov_len - before));
        // SAFETY: as this function's.
        let room = unsafe { room(piece.iov_base, before + now.len()) }?;
        room[before..].copy_from_slice(now);
        bytes = later;
    }
    Ok(())
}

/// Receives into a list; returns what was received too.
///
/// # Safety
/// The list has `count` entries, each of which has its room.
unsafe fn scatter(
    socket: &Socket,
    list: *const libc::iovec,
    count: usize,
    flags: c_int,
) -> Result<Received, c_int> {
    // SAFETY: as this function's.
    let (list, whole) = unsafe { pieces(list, count) }?;
    if let [one] = list {
        // SAFETY: as this function's.
        return socket.receive(unsafe { room(one.iov_base, one.iov_len) }?, flags);
    }
    // No more comes at once.
    let mut part = vec![0; whole.min(socket.receive_ring())];
    let wants_all = flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK == 0;
    let mut all = Received::default();
    loop {
        let len = part.len().min(whole - all.len);
        let one = match socket.receive(&mut part[..len], flags) {
            Ok(one) => one,
            Err(_) if all.len > 0 => return Ok(all),
            Err(errno) => return Err(errno),
        };
        // SAFETY: as this function's.
        unsafe { place(list, all.len, &part[..one.len]) }?;
        all = Received { len: all.len + one.len, whole: all.len + one.whole, from: one.from };
        if socket.is_datagram || !wants_all || one.len < len || all.len == whole {
            return Ok(all);
        }
    }
}

/// # Safety
/// The message is as C has it.
#[unsafe(no_mangle)]
unsafe extern "C" fn rrecvmsg(
    fd: c_int,
    message: Option<&mut libc::msghdr>,
    flags: c_int,
) -> isize {
    number(socket(fd).and_then(|socket| {
        let message = message.ok_or(libc::EFAULT)?;
        // SAFETY: as this function's.
        let received = unsafe { scatter(&socket, message.msg_iov, message.msg_iovlen, flags) }?;
        message.msg_flags = if received.whole > received.len { libc::MSG_TRUNC } else { 0 };
        message.msg_controllen = 0;
        if let Some(at) = received.from {
            let len = &raw mut message.msg_namelen;
            // SAFETY: as this function's.
            unsafe { give(&socket, at, message.msg_name.cast(), len) };
        }
        Ok(length(&received, flags))
    }))
}

/// # Safety
/// There are `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn rsend(fd: c_int, at: *const c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: as this function's.
    unsafe { rsendto(fd, at, len, flags, ptr::null(), 0) }
}

/// # Safety
/// There are `len` bytes, and the address has as many as its length says.
#[unsafe(no_mangle)]
unsafe extern "C" fn rsendto(
    fd: c_int,
    at: *const c_void,
    len: usize,
    flags: c_int,
    to: *const libc::sockaddr,
    to_len: libc::socklen_t,
) -> isize {
    number(socket(fd).and_then(|socket| {
        let to = if socket.is_datagram && !to.is_null() {
            // SAFETY: as this function's.
            Some(unsafe { given(&socket, to, to_len) }?)
        } else {
            None
        };
        // SAFETY: as this function's.
        socket.send(unsafe { bytes(at, len) }?, flags, to)
    }))
}

/// # Safety
/// The message is as C has it.
#[unsafe(no_mangle)]
unsafe extern "C" fn rsendmsg(fd: c_int, message: Option<&libc::msghdr>, flags: c_int) -> isize {
    number(socket(fd).and_then(|socket| {
        let message = message.ok_or(libc::EFAULT)?;
        if !message.msg_control.is_null() && message.msg_controllen > 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let to = if socket.is_datagram && !message.msg_name.is_null() {
            // SAFETY: as this function's.
            Some(unsafe { given(&socket, message.msg_name.cast(), message.msg_namelen) }?)
        } else {
            None
        };
        // SAFETY: as this function's.
        socket.send(&unsafe { gather(message.msg_iov, message.msg_iovlen) }?, flags, to)
    }))
}

/// # Safety
/// There are `len` bytes of room.
#[unsafe(no_mangle)]
unsafe extern "C" fn rread(fd: c_int, at: *mut c_void, len: usize) -> isize {
    // SAFETY: as this function's.
    unsafe { rrecv(fd, at, len, 0) }
}

/// # Safety
/// The list is as C has it.
#[unsafe(no_mangle)]
unsafe extern "C" fn rreadv(fd: c_int, list: *const libc::iovec, count: c_int) -> isize {
    number(socket(fd).and_then(|socket| {
        let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
        // SAFETY: as this function's.
        unsafe { scatter(&socket, list, count, 0) }.map(|received| received.len)
    }))
}

/// # Safety
/// There are `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn rwrite(fd: c_int, at: *const c_void, len: usize) -> isize {
    // SAFETY: as this function's.
    unsafe { rsend(fd, at, len, 0) }
}

/// # Safety
/// The list is as C has it.
#[unsafe(no_mangle)]
unsafe extern "C" fn rwritev(fd: c_int, list: *const libc::iovec, count: c_int) -> isize {
    number(socket(fd).and_then(|socket| {
        let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
        // SAFETY: as this function's.
        socket.send(&unsafe { gather(list, count) }?, 0, None)
    }))
}

/// # Safety
/// The length is that of the room.
#[unsafe(no_mangle)]
unsafe extern "C" fn rgetpeername(
    fd: c_int,
    room: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
) -> c_int {
    outcome(socket(fd).and_then(|socket| {
        let at = socket.lock().remote.ok_or(libc::ENOTCONN)?;
        // SAFETY: as this function's.
        unsafe { give(&socket, at, room, len) };
        Ok(())
    }))
}

/// # Safety
/// The length is that of the room.
#[unsafe(no_mangle)]
unsafe extern "C" fn rgetsockname(
    fd: c_int,
    room: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
) -> c_int {
    outcome(socket(fd).map(|socket| {
        let at = socket.lock().local;
        let at = at.unwrap_or_else(|| SocketAddr::new(socket.unspecified(), 0));
        // SAFETY: as this function's.
        unsafe { give(&socket, at, room, len) };
    }))
}

/// # Safety
/// The value has `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn rsetsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: libc::socklen_t,
) -> c_int {
    outcome(socket(fd).and_then(|socket| {
        // SAFETY: as this function's.
        let bytes = unsafe { bytes(value, len as usize) }?;
        let (numbers, _) = bytes.as_chunks::<{ size_of::<c_int>() }>();
        let numbers: Vec<c_int> = numbers.iter().map(|n| c_int::from_ne_bytes(*n)).collect();
        let mut inner = socket.lock();
        let is_open = match &inner.state {
            State::New | State::Listening(_) => true,
            State::Datagrams(datagrams) => !datagrams.is_bound(),
            _ => false,
        };
        inner.options.set(level, name, &numbers, is_open)
    }))
}

/// # Safety
/// The length is that of the room.
#[unsafe(no_mangle)]
unsafe extern "C" fn rgetsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut libc::socklen_t,
) -> c_int {
    outcome(socket(fd).and_then(|socket| {
        if value.is_null() || len.is_null() {
            return Err(libc::EFAULT);
        }
        let mut inner = socket.lock();
        socket.progress(&mut inner, None);
        let found = if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR) {
            Value::One(mem::take(&mut inner.error))
        } else {
            inner.options.get(level, name)?
        };
        let (numbers, count) = match found {
            Value::One(one) => ([one, 0], 1),
            Value::Two(two) => (two, 2),
        };
        let whole = count * size_of::<c_int>();
        // SAFETY: as this function's.
        if (unsafe { len.read() } as usize) < whole {
            return Err(libc::EINVAL);
        }
        // SAFETY: there is room, as was just seen.
        unsafe { ptr::copy_nonoverlapping(numbers.as_ptr().cast::<u8>(), value.cast(), whole) };
        // SAFETY: as this function's.
        unsafe { len.write(whole as libc::socklen_t) };
        Ok(())
    }))
}

/// The third argument is in the same place as one of a function with a fixed number of them.
#[unsafe(no_mangle)]
extern "C" fn rfcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    let flags = socket(fd).and_then(|socket| {
        let mut inner = socket.lock();
        match command {
            libc::F_GETFL => {
                let non_blocking = if inner.non_blocking { libc::O_NONBLOCK } else { 0 };
                Ok(libc::O_RDWR | non_blocking)
            }
            libc::F_SETFL => {
                inner.non_blocking = argument & c_long::from(libc::O_NONBLOCK) != 0;
                Ok(0)
            }
            _ => Err(libc::EOPNOTSUPP),
        }
    });
    flags.unwrap_or_else(failed)
}

/// # Safety
/// The memory stays mapped until it is unmapped here, or the socket is closed.
#[unsafe(no_mangle)]
unsafe extern "C" fn riomap(
    fd: c_int,
    at: *mut c_void,
    len: usize,
    rights: c_int,
    flags: c_int,
    offset: libc::off_t,
) -> libc::off_t {
    let mapped = socket(fd).and_then(|socket| {
        let is_known = matches!(rights, libc::PROT_NONE | libc::PROT_WRITE) && flags == 0;
        if !is_known || at.is_null() {
            return Err(libc::EINVAL);
        }
        let offset = match offset {
            -1 => None,
            offset => Some(u64::try_from(offset).map_err(|_| libc::EINVAL)?),
        };
        // SAFETY: as this function's.
        unsafe { socket.map(at.cast(), len, rights == libc::PROT_WRITE, offset) }
    });
    mapped.map_or_else(|errno| failed(errno).into(), u64::cast_signed)
}

#[unsafe(no_mangle)]
extern "C" fn riounmap(fd: c_int, at: *const c_void, len: usize) -> c_int {
    outcome(socket(fd).and_then(|socket| socket.unmap(at.addr() as u64, len)))
}

/// # Safety
/// There are `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn riowrite(
    fd: c_int,
    at: *const c_void,
    len: usize,
    offset: libc::off_t,
    flags: c_int,
) -> isize {
    number(socket(fd).and_then(|socket| {
        // SAFETY: as this function's.
        let bytes = unsafe { bytes(at, len) }?;
        socket.write_mapped(bytes, offset.cast_unsigned(), flags)
    }))
}
