//! Withdraws memory that was given for sockets when their descriptors are closed.
//!
//! All descriptors count, whether or not the table has them: an unused copy may be the last one.
//! The memory is withdrawn after the close, because another thread may be giving some at that
//! moment; that thread checks afterwards whether the process still has the socket.

use core::ffi::c_int;

use bowline_host_client::agent;

use crate::real::KeptErrno;
use crate::{process, table};

/// Descriptors that a call is about to close.
pub(crate) enum Closing {
    /// No descriptor of a socket with given memory.
    Nothing,
    /// A descriptor of this socket.
    Socket(u64),
    /// Any.
    Some,
}

impl Closing {
    /// For a call that closes or replaces one descriptor.
    pub(crate) fn one(fd: c_int) -> Self {
        let _kept = KeptErrno::new();
        let may_matter = table::is_rds(fd) || agent::may_give();
        let socket = if may_matter && process::is_owner() { agent::socket_of(fd) } else { None };
        socket.map_or(Self::Nothing, Self::Socket)
    }

    /// For a call that closes several, or finds the descriptor itself.
    pub(crate) fn some() -> Self {
        if process::is_owner() { Self::Some } else { Self::Nothing }
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        let _kept = KeptErrno::new();
        match self {
            Self::Nothing => {}
            Self::Socket(socket) => agent::has_closed(*socket),
            Self::Some => agent::has_closed_some(),
        }
    }
}
