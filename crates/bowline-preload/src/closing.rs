//! Memory that was given for sockets, when descriptors of theirs are closed.
//!
//! All descriptors count, whether the table knows them or not: a copy that nobody has used yet may
//! be the last. It is taken back after they were closed, since another thread may just be giving
//! some: that one looks afterwards whether it still has the socket.

use core::ffi::c_int;

use bowline_host_client::agent;

use crate::real::KeptErrno;
use crate::{process, table};

/// Descriptors that a call closes, until it has.
pub(crate) enum Closing {
    /// None of sockets that memory is given for.
    Nothing,
    /// One of this socket.
    Socket(u64),
    /// Any.
    Some,
}

impl Closing {
    /// A call that closes or replaces one.
    pub(crate) fn one(fd: c_int) -> Self {
        let _kept = KeptErrno::new();
        let may_matter = table::is_rds(fd) || agent::may_give();
        let socket = if may_matter && process::is_owner() { agent::socket_of(fd) } else { None };
        socket.map_or(Self::Nothing, Self::Socket)
    }

    /// A call that closes several, or one that it has found out itself.
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
