//! Waiting callers of a socket, and ways to wake them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Waker;

use bowline_rds::{Interest, SocketId};
use bowline_wait::Waiter;

/// How a waiting thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// The thread is parked.
    Parked,
    /// The thread polls the network; if it sleeps, it sleeps there.
    Polling,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) waiter: Arc<Waiter>,
    pub(crate) interest: Interest,
    pub(crate) mode: WaitMode,
}

/// All waiting callers of one socket.
#[derive(Debug, Default)]
pub(crate) struct SocketSlot {
    pub(crate) id: Option<SocketId>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) wakers: Vec<(Interest, Waker)>,
    pub(crate) event_fd: Option<Arc<OwnedFd>>,
    /// The event descriptor reads as ready.
    pub(crate) signalled: bool,
    /// It was signalled for a refused send, and no call has found it in vain since.
    pub(crate) may_send: bool,
    /// A caller relies on the background thread to watch the network for this socket.
    pub(crate) watched: bool,
}
