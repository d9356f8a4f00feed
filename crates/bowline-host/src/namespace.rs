//! Network namespaces: that of this process, and those of the nodes that serve programs.

#![allow(unsafe_code, reason = "rustix does not have SO_NETNS_COOKIE")]

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use bowline_host_wire::{Frame, Greeting, HEAD_LEN, Head, Op, VERSION};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// How long a node may take to say of which namespace it is.
const PATIENCE: Duration = Duration::from_secs(2);

/// The network namespace of this thread, by the number that the system gives to each once; 0 where
/// it does not tell (before Linux 5.14).
pub fn network_namespace() -> u64 {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let Ok((socket, _)) = UnixStream::pair() else { return 0 };
    let mut cookie = 0_u64;
    let mut len = size_of_val(&cookie) as libc::socklen_t;
    let to = (&raw mut cookie).cast();
    let fd = socket.as_raw_fd();
    // SAFETY: the descriptor is open, `to` points to `len` bytes that may be written.
    let result =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, to, &raw mut len) };
    if result == 0 { cookie } else { 0 }
}

/// Connects to a unix socket, in whose queue there may be no place: whoever listens there stands
/// still, or others connect faster than it accepts.
///
/// # Errors
/// Those of `connect(2)`; `TimedOut` when there was no place for so long.
pub fn connect_within(place: &Path, limit: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
    let address = SocketAddrUnix::new(place)?;
    match rustix::io::retry_on_intr(|| connect(&socket, &address)) {
        Ok(()) => {}
        Err(rustix::io::Errno::AGAIN) => {
            let text = format!("it has accepted no connection for {} s", limit.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        Err(error) => return Err(error.into()),
    }
    // The limit was that of the wait for a place.
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket.into())
}

/// A connection to the node that serves programs at a place, to ask what it is.
#[derive(Debug)]
pub struct NodeConnection(UnixStream);

impl NodeConnection {
    /// Connects to a node.
    ///
    /// # Errors
    /// Those of [`connect_within`], with a limit of two seconds.
    pub fn open(place: &Path) -> io::Result<Self> {
        let stream = connect_within(place, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(stream))
    }

    /// Asks the node for its network namespace, once; 0 if it does not say, and `None` if it
    /// refuses this user and ends the connection.
    ///
    /// # Errors
    /// Nobody answers within two seconds, or the node ends.
    pub fn namespace(&mut self) -> io::Result<Option<u64>> {
        let hello = Head { op: Op::Hello, value: 0, a: VERSION, b: 0 };
        let hello = hello.emit(0, 0, 0).ok_or(io::ErrorKind::InvalidData)?;
        // Whoever is turned away has been answered, perhaps before it has asked.
        let _ = self.0.write_all(&hello);
        let mut answer = [0; HEAD_LEN + Greeting::LEN];
        let (head, rest) = answer.split_at_mut(HEAD_LEN);
        self.0.read_exact(head)?;
        // The answer to one that is turned away is shorter.
        let _ = self.0.read_exact(rest);
        Ok(match Frame::parse(&answer) {
            Ok(Some((frame, _))) if frame.head.value > 0 => {
                Some(Greeting::parse(frame.payload).map_or(0, |greeting| greeting.namespace))
            }
            _ => None,
        })
    }

    /// Tells whether the node has ended the connection, as it does when it ends.
    pub fn has_ended(&self) -> bool {
        let mut end = [PollFd::new(&self.0, PollFlags::empty())];
        let ready = poll(&mut end, Some(&Timespec::default()));
        ready.is_ok() && end[0].revents().contains(PollFlags::HUP)
    }
}
