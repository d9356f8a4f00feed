//! What comes on a unix socket from a program: bytes, descriptors, and who sends them.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::fstatfs;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketType, UCred, recvmsg,
};

/// Most descriptors that the system passes with one message. There is room for all: it would close
/// others itself, in the thread that receives.
const DESCRIPTORS_MAX: usize = 253;
/// What `fstatfs` says of a file of procfs.
pub(crate) const PROC_SUPER_MAGIC: i128 = 0x9fa0;

/// What came.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) len: usize,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Who has sent it, if the socket asks for that.
    pub(crate) sender: Option<UCred>,
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
    let mut space = [MaybeUninit::uninit(); ROOM];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(socket, pieces, &mut control, flags)?;
    let mut arrival = Arrival { len: got.bytes, descriptors: Vec::new(), sender: None };
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(came) => arrival.descriptors.extend(came),
            RecvAncillaryMessage::ScmCredentials(sender) => arrival.sender = Some(sender),
            _ => {}
        }
    }
    Ok(arrival)
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
