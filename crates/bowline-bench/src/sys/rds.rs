//! Plain RDS sockets, as any program has them.

use std::io;
use std::mem;
use std::net::SocketAddrV4;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::{check, check_len};

/// The family of RDS sockets.
const AF_RDS: libc::c_int = 21;

/// An RDS socket of the kernel, or of the library that this process was started with.
#[derive(Debug)]
pub(crate) struct RdsSocket(OwnedFd);

impl RdsSocket {
    /// Opens a socket and binds it.
    pub(crate) fn bind(at: SocketAddrV4) -> io::Result<Self> {
        // SAFETY: socket takes plain integers.
        let fd = check(unsafe { libc::socket(AF_RDS, libc::SOCK_SEQPACKET, 0) })?;
        // SAFETY: `fd` was just returned by socket and nobody else owns it.
        let socket = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        let name = name(at);
        let len = size_of_val(&name) as libc::socklen_t;
        // SAFETY: pointer and length describe `name`.
        check(unsafe { libc::bind(fd, ptr::from_ref(&name).cast(), len) })?;
        Ok(socket)
    }

    /// Sends one message.
    pub(crate) fn send_to(&self, buf: &[u8], to: SocketAddrV4) -> io::Result<usize> {
        let name = name(to);
        let (fd, at) = (self.0.as_raw_fd(), ptr::from_ref(&name).cast());
        let len = size_of_val(&name) as libc::socklen_t;
        // SAFETY: the pointers and lengths describe `buf` and `name`.
        check_len(unsafe { libc::sendto(fd, buf.as_ptr().cast(), buf.len(), 0, at, len) })
    }
}

impl AsRawFd for RdsSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn name(of: SocketAddrV4) -> libc::sockaddr_in {
    // SAFETY: all zero is a valid, empty sockaddr_in.
    let mut name: libc::sockaddr_in = unsafe { mem::zeroed() };
    name.sin_family = libc::AF_INET as libc::sa_family_t;
    name.sin_port = of.port().to_be();
    name.sin_addr.s_addr = u32::from(*of.ip()).to_be();
    name
}
