//! What comes on a unix socket from a program: bytes, descriptors, and who sends them.

#![allow(unsafe_code, reason = "rustix drops messages that it does not know, with descriptors")]

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::fstatfs;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

use crate::caller::Credentials;

/// Most descriptors that the system passes with one message. There is room for all: it would close
/// others itself, in the thread that receives.
const DESCRIPTORS_MAX: usize = 253;
/// The message with a descriptor of the process that sends, which comes to a socket whose flags its
/// other holders have set so (Linux 6.5). Nobody asks for it here.
const SCM_PIDFD: libc::c_int = 4;
/// What `fstatfs` says of a file of procfs.
pub(crate) const PROC_SUPER_MAGIC: i128 = 0x9fa0;

/// What came.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) len: usize,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Who has sent it, if the socket asks for that.
    pub(crate) sender: Option<Credentials>,
}

/// Receives what is there, without waiting.
pub(crate) fn receive(socket: impl AsFd, to: &mut [u8]) -> Result<Arrival, Errno> {
    receive_pieces(socket, &mut [IoSliceMut::new(to)])
}

/// The same, into several pieces.
pub(crate) fn receive_pieces(
    socket: impl AsFd,
    pieces: &mut [IoSliceMut<'_>],
) -> Result<Arrival, Errno> {
    const ROOM: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX), ScmCredentials(1));
    let mut space = [0_u64; ROOM.div_ceil(8)];
    // SAFETY: a structure of integers and pointers, for which all zeroes are a value.
    let mut msg: libc::msghdr = unsafe { core::mem::zeroed() };
    // An `IoSliceMut` is laid out as an `iovec`.
    msg.msg_iov = pieces.as_mut_ptr().cast();
    msg.msg_iovlen = pieces.len() as _;
    msg.msg_control = space.as_mut_ptr().cast();
    msg.msg_controllen = size_of_val(&space) as _;
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and the buffers are there with the lengths given.
    let len = unsafe { libc::recvmsg(fd, &raw mut msg, flags) };
    let Ok(len) = usize::try_from(len) else {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    };
    let mut arrival = Arrival { len, descriptors: Vec::new(), sender: None };
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
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => arrival.sender = sender(numbers),
            // SAFETY: the system has made them for this process, and nobody else has them.
            (libc::SOL_SOCKET, libc::SCM_RIGHTS | SCM_PIDFD) => arrival
                .descriptors
                .extend(numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) })),
            _ => {}
        }
        // SAFETY: as above.
        next = unsafe { libc::CMSG_NXTHDR(&raw const msg, next) };
    }
    Ok(arrival)
}

/// Who sends, by numbers of the system.
fn sender(mut numbers: impl Iterator<Item = i32>) -> Option<Credentials> {
    let process = numbers.next()?;
    let [user, group] = [numbers.next()?, numbers.next()?].map(i32::cast_unsigned);
    Some(Credentials { process, user, group })
}

/// Tells whether a descriptor is of the kind that a socket of a node has.
pub(crate) fn may_be_socket_of_node(descriptor: &OwnedFd) -> bool {
    socket_domain(descriptor) == Ok(AddressFamily::UNIX)
        && socket_type(descriptor) == Ok(SocketType::SEQPACKET)
}

/// Tells whether there is a request that takes such a descriptor: a socket of a node, or memory.
pub(crate) fn may_be_wanted(descriptor: &OwnedFd) -> bool {
    let is_of_proc =
        || fstatfs(descriptor).is_ok_and(|found| i128::from(found.f_type) == PROC_SUPER_MAGIC);
    may_be_socket_of_node(descriptor) || is_of_proc()
}
