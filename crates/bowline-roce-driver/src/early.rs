//! Sockets that are made before their device is opened.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, io};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};

use crate::sys::{self, Opt};
use crate::udp;

/// Sockets for a device that is opened by a process with fewer rights than now: buffers beyond the
/// system's limit (`net.core.rmem_max`) need a capability. They have no address yet, since another
/// process may have the port until the device is opened. Each serves one device; another gets new
/// ones.
#[derive(Clone, Default)]
pub struct EarlySockets(Arc<Mutex<Vec<(AddressFamily, OwnedFd)>>>, Arc<Mutex<Bound>>);

/// Sockets that have their address and all options.
type Bound = Vec<(IpAddr, OwnedFd)>;

impl EarlySockets {
    /// Makes a socket for each address, with buffers of this many bytes. What cannot be made is
    /// made when the device is opened, which says why that fails.
    pub fn new(addrs: &[IpAddr], buffer: usize) -> Self {
        let one = |ip: &IpAddr| {
            let socket = make(family_of(*ip)).ok()?;
            udp::enlarge(socket.as_fd(), buffer);
            Some((family_of(*ip), socket))
        };
        Self(Arc::new(Mutex::new(addrs.iter().filter_map(one).collect())), Arc::default())
    }

    /// Returns the bytes of receive buffer that a socket gets when `buffer` bytes are asked for.
    ///
    /// # Errors
    /// No socket can be made: `EMFILE` and the like.
    pub fn receive_buffer(buffer: usize) -> io::Result<usize> {
        let socket = make(AddressFamily::INET)?;
        udp::enlarge(socket.as_fd(), buffer);
        // The system counts twice what was asked for, as it keeps more than the data.
        Ok(usize::try_from(sys::get(socket.as_fd(), Opt::RecvBuf)?).unwrap_or(0) / 2)
    }

    /// Sockets of an address that several processes share, which are ready.
    pub(crate) fn bound(all: Vec<(IpAddr, OwnedFd)>) -> Self {
        Self(Arc::default(), Arc::new(Mutex::new(all)))
    }

    /// Returns the socket that is bound to an address already.
    pub(crate) fn take_bound(&self, ip: IpAddr) -> Option<OwnedFd> {
        let mut all = self.1.lock().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|(of, _)| *of == ip)?;
        Some(all.swap_remove(at).1)
    }

    /// Returns a socket for an address, one of before if there is one.
    pub(crate) fn take(&self, ip: IpAddr) -> Result<OwnedFd, Errno> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.iter().position(|(family, _)| *family == family_of(ip)) {
            Some(at) => Ok(all.swap_remove(at).1),
            None => make(family_of(ip)),
        }
    }
}

impl fmt::Debug for EarlySockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EarlySockets").finish_non_exhaustive()
    }
}

fn family_of(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn make(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP))
}
