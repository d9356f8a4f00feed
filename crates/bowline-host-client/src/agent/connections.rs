//! Connections to nodes, one for each node: a socket pair. This process also keeps the node's end,
//! to send it with each call.
//!
//! All accesses are in one order (SeqCst). So a call that counts itself and then looks at the state
//! (`use_for`) pairs with whoever changes the state and then looks at the users (`give_up`,
//! `close_ended`); and a state that is stored pairs with the loads of it, for the descriptors.

use core::ffi::c_int;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use super::TABLE;
use super::thread;
use crate::channel::Descriptors;
use crate::system::{self, system};

/// Most nodes of other users to which a process gives memory at a time.
const CONNECTIONS: usize = 32;

const VACANT: u32 = 0;
const MAKING: u32 = 1;
const OPEN: u32 = 2;
/// The agent closes the connection when no call uses its descriptor.
const CLOSING: u32 = 3;
/// A call checks whether the connection is still used.
const DOUBTED: u32 = 4;

/// How many milliseconds a call waits until a connection that it has given up is closed.
const WAITS: u32 = 1000;

const NONE: c_int = -1;

static ALL: [Connection; CONNECTIONS] = [const { Connection::new() }; CONNECTIONS];

/// A connection to a node.
#[derive(Debug)]
pub(super) struct Connection {
    state: AtomicU32,
    node: AtomicU64,
    /// Calls that use the descriptor of the node's end.
    users: AtomicU32,
    ours: AtomicI32,
    theirs: AtomicI32,
}

impl Connection {
    const fn new() -> Self {
        Self {
            state: AtomicU32::new(VACANT),
            node: AtomicU64::new(0),
            users: AtomicU32::new(0),
            ours: AtomicI32::new(NONE),
            theirs: AtomicI32::new(NONE),
        }
    }

    /// Counts a user of the connection, unless it belongs to another node or is ending. The order
    /// matters: the side that ends it reads the users after it has set the state.
    fn use_for(&self, node: u64) -> bool {
        self.users.fetch_add(1, SeqCst);
        let is_right = self.state.load(SeqCst) == OPEN && self.node.load(SeqCst) == node;
        if !is_right {
            self.release();
        }
        is_right
    }

    /// Removes a user of the connection.
    pub(super) fn release(&self) {
        // In the child of a fork during a call the count is 0 already.
        let _ = self.users.fetch_update(SeqCst, SeqCst, |users| users.checked_sub(1));
    }

    /// Lets the agent close the connection if it has no user. The order matters: no call begins to
    /// use a connection in this state.
    fn give_up(&self, number: usize) -> bool {
        if self.state.compare_exchange(OPEN, DOUBTED, SeqCst, Relaxed).is_err() {
            return false;
        }
        let is_used =
            self.users.load(SeqCst) > 0 || TABLE.any(|entry| entry.owner.connection == number);
        self.state.store(if is_used { OPEN } else { CLOSING }, SeqCst);
        !is_used
    }

    fn make<D: Descriptors>(&self, node: u64) -> Result<(), c_int> {
        let mut pair = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        system!(SYS_socketpair, libc::AF_UNIX, kind, 0, pair.as_mut_ptr())?;
        let [ours, theirs] = pair.map(D::opened);
        self.ours.store(ours, SeqCst);
        self.theirs.store(theirs, SeqCst);
        self.node.store(node, SeqCst);
        Ok(())
    }

    fn close<D: Descriptors>(&self) {
        for fd in [&self.ours, &self.theirs] {
            // Gone from here before its number can be another's.
            let fd = fd.swap(NONE, SeqCst);
            if fd != NONE {
                D::closes(fd);
                system::close(fd);
            }
        }
    }
}

/// Returns the connection to a node, made if necessary: its number, and the descriptor of the
/// node's end. The caller releases it.
pub(super) fn to<D: Descriptors>(node: u64) -> Result<(&'static Connection, usize, c_int), c_int> {
    let found = |(number, connection): (usize, &'static Connection)| {
        let used = connection.state.load(SeqCst) == OPEN
            && connection.node.load(Relaxed) == node
            && connection.use_for(node);
        used.then(|| (connection, number, connection.theirs.load(SeqCst)))
    };
    if let Some(found) = ALL.iter().enumerate().find_map(found) {
        return Ok(found);
    }
    let (number, connection) = vacant().ok_or(libc::EMFILE)?;
    if let Err(errno) = connection.make::<D>(node) {
        connection.state.store(VACANT, SeqCst);
        return Err(errno);
    }
    connection.users.fetch_add(1, SeqCst);
    let theirs = connection.theirs.load(SeqCst);
    connection.state.store(OPEN, SeqCst);
    thread::wake();
    Ok((connection, number, theirs))
}

/// Returns a slot for a connection. If all are full, a connection without a call and without memory
/// is closed: its node may have ended long ago, which does not show, since this process has the
/// node's end too.
fn vacant() -> Option<(usize, &'static Connection)> {
    let take = |connection: &Connection| {
        connection.state.compare_exchange(VACANT, MAKING, SeqCst, Relaxed).is_ok()
    };
    for _ in 0..WAITS {
        let found = ALL.iter().enumerate().find(|(_, connection)| take(connection));
        if found.is_some() {
            return found;
        }
        let closes = |connection: &Connection| connection.state.load(SeqCst) == CLOSING;
        if !ALL.iter().any(closes) && !ALL.iter().enumerate().any(|(n, one)| one.give_up(n)) {
            return None;
        }
        thread::wake();
        system::pause();
    }
    None
}

/// Returns the open connections: number, and descriptor of the agent's end.
pub(super) fn open() -> impl Iterator<Item = (usize, c_int)> {
    let is_open = |(number, connection): (usize, &Connection)| {
        let fd = connection.ours.load(SeqCst);
        (connection.state.load(SeqCst) == OPEN).then_some((number, fd))
    };
    ALL.iter().enumerate().filter_map(is_open)
}

/// Both descriptors of all connections, or [`NONE`].
pub(super) fn descriptors() -> impl Iterator<Item = c_int> {
    ALL.iter()
        .flat_map(|connection| [&connection.ours, &connection.theirs].map(|fd| fd.load(SeqCst)))
}

/// Ends a connection; it is closed once no call uses it. Called by the agent only.
pub(super) fn end(number: usize) {
    if let Some(connection) = ALL.get(number)
        && connection.state.compare_exchange(OPEN, CLOSING, SeqCst, Relaxed).is_ok()
    {
        system::shutdown(connection.ours.load(SeqCst));
    }
}

/// Closes the ended connections that no call uses; tells whether any are left. Called by the agent
/// only.
pub(super) fn close_ended<D: Descriptors>() -> bool {
    let mut is_left = false;
    for (number, connection) in ALL.iter().enumerate() {
        let state = connection.state.load(SeqCst);
        is_left |= state == DOUBTED;
        if state != CLOSING {
            continue;
        }
        if connection.users.load(SeqCst) > 0 {
            is_left = true;
            continue;
        }
        TABLE.take_out(|entry| entry.owner.connection == number);
        connection.close::<D>();
        connection.state.store(VACANT, SeqCst);
    }
    is_left
}

/// Closes all in the child of a fork, which has no agent.
pub(super) fn forget<D: Descriptors>() {
    for connection in &ALL {
        connection.close::<D>();
        connection.users.store(0, SeqCst);
        connection.state.store(VACANT, SeqCst);
    }
}
