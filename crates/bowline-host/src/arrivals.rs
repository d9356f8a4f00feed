//! What comes on a unix socket from a program: bytes, descriptors, and who sends them.

#![allow(unsafe_code, reason = "rustix drops messages that it does not know, with descriptors")]

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::fstatfs;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

use crate::caller::Credentials;
use crate::closer::{self, Owner, Passed};
use crate::core::Arrival;
use crate::watch;

/// Most descriptors that the system passes with one message. There is room for all: it would close
/// others itself, in the thread that receives.
const DESCRIPTORS_MAX: usize = 253;
/// Bytes for all control messages.
const ROOM: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX), ScmCredentials(1));
/// The message with a descriptor of the process that sends, which comes to a socket whose flags its
/// other holders have set so (Linux 6.5). Nobody asks for it here.
const SCM_PIDFD: libc::c_int = 4;
/// What `fstatfs` says of a file of procfs.
pub(crate) const PROC_SUPER_MAGIC: i128 = 0x9fa0;

/// Receives what is there, without waiting. Where the system does not say who has sent it, that was
/// `otherwise`.
///
/// # Errors
/// EDQUOT for what a user sends who is [behind](closer::is_behind), which stays there; those of the
/// system.
pub(crate) fn receive(
    socket: impl AsFd,
    to: &mut [u8],
    otherwise: Owner,
) -> Result<Arrival<Passed>, Errno> {
    receive_pieces(socket, &mut [IoSliceMut::new(to)], otherwise)
}

/// The same, into several pieces.
pub(crate) fn receive_pieces(
    socket: impl AsFd,
    pieces: &mut [IoSliceMut<'_>],
    otherwise: Owner,
) -> Result<Arrival<Passed>, Errno> {
    if closer::is_any_behind()
        && let Some(sender) = next(&socket, otherwise)?
        && closer::is_behind(owner(sender, otherwise))
    {
        return Err(Errno::DQUOT);
    }
    let Taken { len, descriptors, sender } = take(socket, pieces, ROOM, 0)?;
    let mut arrival = Arrival { len, descriptors: Vec::new(), sender };
    if !descriptors.is_empty() {
        let owner = owner(sender, otherwise);
        arrival.descriptors.extend(descriptors.into_iter().map(|one| Passed::new(owner, one)));
    }
    Ok(arrival)
}

/// Whose lane it is for what somebody has sent.
fn owner(sender: Option<Credentials>, otherwise: Owner) -> Owner {
    let known = sender.filter(Credentials::is_told);
    known.map_or(otherwise, |sender| closer::owner_of(sender.user))
}

/// Whose is what comes next on a socket; `None` if nothing does.
pub(crate) fn waiting(socket: impl AsFd, otherwise: Owner) -> Option<Owner> {
    /// An error that is kept for a socket is reported once, instead of what is there.
    const TRIES: u32 = 3;
    let next = (0..TRIES).find_map(|_| match next(&socket, otherwise) {
        Ok(next) => Some(next),
        Err(Errno::AGAIN) => Some(None),
        Err(_) => None,
    });
    next.flatten().map(|sender| owner(sender, otherwise))
}

/// Takes what comes next, and closes the descriptors in this thread.
pub(crate) fn discard(socket: impl AsFd) {
    let _ = take(socket, &mut [IoSliceMut::new(&mut [0; 4096])], ROOM, 0);
}

/// Who has sent what comes next; `None` if nothing does. It stays there.
fn next(socket: impl AsFd, otherwise: Owner) -> Result<Option<Option<Credentials>>, Errno> {
    const ROOM: usize = rustix::cmsg_space!(ScmCredentials(1));
    let mut byte = [0];
    let pieces = &mut [IoSliceMut::new(&mut byte)];
    let Taken { len, descriptors, sender } = take(&socket, pieces, ROOM, libc::MSG_PEEK)?;
    // Without credentials there is room for others of some descriptors. Closing one may take long,
    // also if it is not the last.
    let is_end = len == 0
        && descriptors.is_empty()
        && (sender.is_none() || socket_type(&socket) == Ok(SocketType::STREAM));
    descriptors.into_iter().for_each(|one| drop(Passed::new(otherwise, one)));
    Ok((!is_end).then_some(sender))
}

/// What came, as the system has it.
struct Taken {
    len: usize,
    descriptors: Vec<OwnedFd>,
    sender: Option<Credentials>,
}

fn take(
    socket: impl AsFd,
    pieces: &mut [IoSliceMut<'_>],
    room: usize,
    flags: libc::c_int,
) -> Result<Taken, Errno> {
    let mut space = [0_u64; ROOM.div_ceil(8)];
    // SAFETY: a structure of integers and pointers, for which all zeroes are a value.
    let mut msg: libc::msghdr = unsafe { core::mem::zeroed() };
    // An `IoSliceMut` is laid out as an `iovec`.
    msg.msg_iov = pieces.as_mut_ptr().cast();
    msg.msg_iovlen = pieces.len() as _;
    msg.msg_control = space.as_mut_ptr().cast();
    msg.msg_controllen = room.min(size_of_val(&space)) as _;
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT | flags;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and the buffers are there with the lengths given.
    let len = unsafe { libc::recvmsg(fd, &raw mut msg, flags) };
    let Ok(len) = usize::try_from(len) else {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    };
    let mut taken = Taken { len, descriptors: Vec::new(), sender: None };
    // SAFETY: the system has filled the control buffer and says how much of it.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const msg) };
    while !next.is_null() {
        // SAFETY: it lies in the control buffer, which is aligned.
        let head = unsafe { *next };
        // SAFETY: as above.
        let data = unsafe { libc::CMSG_DATA(next) };
        let bytes = head.cmsg_len as usize - (data.addr() - next.addr());
        // SAFETY: the message is as long as it says.
        let data = unsafe { core::slice::from_raw_parts(data, bytes) };
        let numbers = data.chunks_exact(4).map(|n| i32::from_ne_bytes([n[0], n[1], n[2], n[3]]));
        match (head.cmsg_level, head.cmsg_type) {
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => taken.sender = sender(numbers),
            // SAFETY: the system has made them for this process, and nobody else has them.
            (libc::SOL_SOCKET, libc::SCM_RIGHTS | SCM_PIDFD) => taken
                .descriptors
                .extend(numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) })),
            _ => {}
        }
        // SAFETY: as above.
        next = unsafe { libc::CMSG_NXTHDR(&raw const msg, next) };
    }
    Ok(taken)
}

/// Who sends, by numbers of the system.
fn sender(mut numbers: impl Iterator<Item = i32>) -> Option<Credentials> {
    let process = numbers.next()?;
    let [user, group] = [numbers.next()?, numbers.next()?].map(i32::cast_unsigned);
    Some(Credentials { process, user, group })
}

/// Tells whether a descriptor is of the kind that a socket of a node has.
pub(crate) fn may_be_socket_of_node(descriptor: impl AsFd) -> bool {
    socket_domain(&descriptor) == Ok(AddressFamily::UNIX)
        && socket_type(&descriptor) == Ok(SocketType::SEQPACKET)
}

/// Tells whether there is a request that takes such a descriptor: a socket of a node, memory, or
/// what watches memory.
pub(crate) fn may_be_wanted(descriptor: &Passed) -> bool {
    let is_of_proc =
        || fstatfs(descriptor).is_ok_and(|found| i128::from(found.f_type) == PROC_SUPER_MAGIC);
    may_be_socket_of_node(descriptor) || is_of_proc() || watch::may_be_one(descriptor)
}
