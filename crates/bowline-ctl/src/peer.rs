//! Who is at the other end of a unix socket.
#![allow(unsafe_code, reason = "rustix has no value for a process that this one cannot see")]

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// The process at the other end of a unix socket, as of when it connected, made it or listened.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Peer {
    /// Its number; 0 stands for every process outside of the PID namespace of this one.
    pub process: i32,
    /// Its effective user.
    pub user: u32,
}

impl Peer {
    /// Asks the system.
    ///
    /// # Errors
    /// Not a unix socket.
    pub fn at(socket: impl AsFd) -> io::Result<Self> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of_val(&peer) as libc::socklen_t;
        let fd = socket.as_fd().as_raw_fd();
        let to = (&raw mut peer).cast();
        // SAFETY: the descriptor is open, and `to` points to `len` bytes that may be written.
        let result =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { process: peer.pid, user: peer.uid })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_other_end_is_who_made_it() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        let user = rustix::process::geteuid().as_raw();
        let process = std::process::id() as i32;
        assert_eq!(Peer::at(&one).expect("an answer"), Peer { process, user });
        let file = std::fs::File::open("/dev/null").expect("opened");
        assert!(Peer::at(&file).is_err());
    }
}
