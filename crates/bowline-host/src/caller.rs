//! Who a process is, as the kernel says of the other end of a unix socket.

#![allow(unsafe_code, reason = "rustix does not have these options of unix sockets")]

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Most supplementary groups that the kernel lets a process have (NGROUPS_MAX).
const GROUPS_MAX: usize = 65_536;
/// Groups for which there is room at first.
const GROUPS_USUAL: usize = 64;

/// Who a process is, in one moment.
///
/// What the system tells, as its `struct ucred`. The one of `rustix` has a number of a process that
/// cannot be 0, and so no value for a process that this one cannot see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// 0 stands for every process outside the PID namespace of this one.
    pub process: i32,
    /// The effective user.
    pub user: u32,
    /// The effective group.
    pub group: u32,
}

impl Credentials {
    /// What stands beside something that was sent before its receiver asked for credentials tells
    /// of nobody.
    pub(crate) const fn is_told(&self) -> bool {
        /// The user that the system tells if it does not know any.
        const NOBODY: u32 = 65_534;
        self.process != 0 || self.user != NOBODY
    }

    /// Who was at the other end of a unix socket when it was connected, made, or listened.
    pub(crate) fn of_peer(socket: impl AsFd) -> Result<Self, Errno> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of_val(&peer) as libc::socklen_t;
        let fd = socket.as_fd().as_raw_fd();
        let to = (&raw mut peer).cast();
        // SAFETY: the descriptor is open, `to` points to `len` bytes that may be written.
        let result =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len) };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        }
        Ok(Self { process: peer.pid, user: peer.uid, group: peer.gid })
    }
}

/// The user and groups of a process when it connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// As in [`Credentials`].
    pub process: i32,
    /// The effective user.
    pub user: u32,
    /// The effective group, and the supplementary ones.
    pub groups: Vec<u32>,
}

impl Caller {
    /// Asks for the other end of a connected socket. Without SO_PEERGROUPS, before Linux 4.13, the
    /// supplementary groups are missing.
    pub(crate) fn of(socket: impl AsFd) -> Result<Self, Errno> {
        let peer = Credentials::of_peer(&socket)?;
        let mut groups = vec![peer.group];
        groups.extend(supplementary(&socket));
        Ok(Self { process: peer.process, user: peer.user, groups })
    }

    /// Who offers one end of a pair of sockets, by the credentials that came along: the process
    /// that has made the pair. `None` when it is not, or when the socket is not of such a pair: its
    /// other end may be somebody else's, who has not asked for anything. Processes that this one
    /// cannot see are told apart by user and group only.
    pub(crate) fn of_offer(socket: impl AsFd, sender: Credentials) -> Option<Self> {
        use rustix::net::sockopt::{socket_domain, socket_type};
        use rustix::net::{AddressFamily, SocketType, getpeername, getsockname};
        let is_pair = socket_domain(&socket) == Ok(AddressFamily::UNIX)
            && socket_type(&socket) == Ok(SocketType::STREAM)
            && getsockname(&socket).is_ok_and(|name| is_unnamed(&name))
            && getpeername(&socket).is_ok_and(|name| name.as_ref().is_none_or(is_unnamed));
        let made_it = is_pair && Credentials::of_peer(&socket) == Ok(sender);
        if made_it { Self::of(socket).ok() } else { None }
    }
}

/// Tells whether an end of a socket has no name.
pub(crate) fn is_unnamed(name: &rustix::net::SocketAddrAny) -> bool {
    let family = size_of::<libc::sa_family_t>();
    usize::try_from(name.addr_len()).is_ok_and(|len| len <= family)
}

/// Has the system refuse descriptors that are sent to a socket, and to those that a listener
/// accepts (Linux 6.16), or take them.
pub(crate) fn take_descriptors(socket: impl AsFd, takes: bool) {
    const SO_PASSRIGHTS: libc::c_int = 83;
    let value = libc::c_int::from(takes);
    let fd = socket.as_fd().as_raw_fd();
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the descriptor is open, and the value is there.
    unsafe {
        libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const value).cast(), len)
    };
}

fn supplementary(socket: impl AsFd) -> Vec<u32> {
    let mut groups = vec![0u32; GROUPS_USUAL];
    loop {
        let mut len = size_of_val(groups.as_slice()) as libc::socklen_t;
        let fd = socket.as_fd().as_raw_fd();
        let to = groups.as_mut_ptr().cast();
        // SAFETY: the descriptor is open, `to` points to `len` bytes that may be written.
        let result =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, to, &mut len) };
        let count = len as usize / size_of::<u32>();
        if result == 0 {
            groups.truncate(count);
            return groups;
        }
        // With ERANGE the kernel has said how much room it needs.
        if count <= groups.len() || count > GROUPS_MAX {
            return Vec::new();
        }
        groups.resize(count, 0);
    }
}
