//! Who a process is, as the kernel says of the other end of a unix socket.

#![allow(unsafe_code, reason = "rustix does not have SO_PEERGROUPS")]

use std::os::fd::{AsFd, AsRawFd};

use rustix::net::sockopt::socket_peercred;

/// Most supplementary groups that the kernel lets a process have (NGROUPS_MAX).
const GROUPS_MAX: usize = 65_536;
/// Groups for which there is room at first.
const GROUPS_USUAL: usize = 64;

/// The user and groups of a process when it connected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) user: u32,
    /// The effective group, and the supplementary ones.
    pub(crate) groups: Vec<u32>,
}

impl Caller {
    /// Asks for the other end of a connected socket. Without SO_PEERGROUPS, before Linux 4.13, the
    /// supplementary groups are missing.
    pub(crate) fn of(socket: impl AsFd) -> Result<Self, rustix::io::Errno> {
        let peer = socket_peercred(&socket)?;
        let mut groups = vec![peer.gid.as_raw()];
        groups.extend(supplementary(&socket));
        Ok(Self { user: peer.uid.as_raw(), groups })
    }
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
