//! What of this process's memory a node of another user may use: the ranges that calls have named,
//! and nothing else.
//!
//! A node of root's or of the program's own user, who could look at its memory in any case, gets a
//! descriptor of `/proc/self/mem`. Any other gets one end of a pair of sockets whose other end a
//! thread of this process has, its *agent*. The node asks it for bytes, and the agent looks for
//! each request whether they lie in a range that a call has given, for reading or for writing.
//!
//! ```text
//!   table      the ranges, and to whom they were given
//!   own        bytes of this process, without a signal where there are none
//!   thread     the agent
//! ```
//!
//! How long a range is the node's:
//!
//! | range | until |
//! |---|---|
//! | where a key is stored, a vector of pieces | the call returns |
//! | a region | RDS_FREE_MR of its key |
//! | local memory of an operation | the operation has ended: the node says so |
//!
//! and each of them at most until this process has closed its last descriptor of the socket, or the
//! node ends the connection, or gives the range back. Which socket, and which key, the system and
//! the program's memory say, never the node. The calls that take a range back return when nothing
//! is written there any more; what was read before and not sent yet is not sent.
//!
//! There is no lock, and the child of a `fork` begins anew: it has no agent until it needs one, and
//! the memory that it has copies of is given by its parent alone.

mod connections;
pub(crate) mod own;
mod table;
mod thread;

use core::cell::Cell;
use core::ffi::c_int;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::SeqCst;

use self::connections::Connection;
use self::table::{Owner, Table};
use crate::channel::Descriptors;
use crate::system;

pub use crate::reach::{Access, Range, Reach, Stays};

/// Most ranges that a process has given at a time.
const RANGES_MAX: usize = 16 << 10;

static TABLE: Table<RANGES_MAX> = Table::new();
static GRANTS: AtomicU64 = AtomicU64::new(1);

/// Memory that was given to a node for one call. When this is dropped the call is over, and has
/// failed unless [`accept`](Self::accept) was called: then nothing of it is the node's any more.
#[derive(Debug)]
pub struct Given {
    connection: &'static Connection,
    descriptor: c_int,
    owner: Owner,
    key_at: Option<u64>,
    is_accepted: bool,
}

impl Given {
    /// The descriptor for the node. It is the library's and stays open for as long as this is here.
    pub const fn descriptor(&self) -> c_int {
        self.descriptor
    }

    /// The number by which the node gives the memory back.
    pub const fn number(&self) -> u64 {
        self.owner.grant
    }

    /// The node has accepted the call: what outlives it stays given. The key of a region is what
    /// the program finds, since that is what it will free; the node writes there no more. A region
    /// that was to have a key and has none, which nobody could free, is not given.
    pub fn accept(&mut self) {
        self.is_accepted = true;
        let grant = self.owner.grant;
        take_out(|entry| entry.owner.grant == grant && entry.stays == Stays::Call);
        let Some(at) = self.key_at else { return };
        let mut key = [0; 8];
        let found = own::read(system::getpid(), at, &mut key);
        match found.map(|()| u64::from_ne_bytes(key)) {
            Ok(key) if key != 0 => TABLE.set_key(grant, key as u32),
            _ => take_out(|entry| entry.owner.grant == grant && entry.stays == Stays::Region),
        }
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        let grant = self.owner.grant;
        if !self.is_accepted {
            take_out(|entry| entry.owner.grant == grant);
        }
        self.connection.release();
    }
}

fn take_out(which: impl Fn(&table::Entry) -> bool) {
    if TABLE.take_out(which) {
        thread::wait_for_access();
    }
}

/// Gives a node the memory that a call is about. `node` is which it is by the system's word, not by
/// the node's, and `socket` which socket of this process ([`socket_of`]).
///
/// # Errors
/// EFAULT where the system does not let a process read its own memory by address
/// (`process_vm_readv`; some seccomp filters); EAGAIN when there are too many ranges, or no thread
/// can be started; EMFILE when there are no descriptors, or connections to too many nodes;
/// EOPNOTSUPP in a process that has the memory of another (`vfork`).
pub fn give<D: Descriptors>(node: u64, socket: u64, reach: &Reach) -> Result<Given, c_int> {
    thread::start::<D>()?;
    let (connection, number, descriptor) = connections::to::<D>(node)?;
    let grant = GRANTS.fetch_add(1, SeqCst);
    let owner = Owner { connection: number, socket, grant };
    let key_at = reach.key_at();
    let given = Given { connection, descriptor, owner, key_at, is_accepted: false };
    // What is there of it goes with `given`.
    if TABLE.add(owner, reach.ranges()) { Ok(given) } else { Err(libc::EAGAIN) }
}

/// The number by which this module knows a socket, whatever its node calls it: the system gives
/// each one of its own, which all descriptors of the socket have. `None` for what is no socket.
pub fn socket_of(fd: c_int) -> Option<u64> {
    system::cookie(fd)
}

/// Takes memory back of a socket: with `cookie` the regions with its key (RDS_FREE_MR, before the
/// node is asked); without, all that was given for the socket, which this process closes.
pub fn take_back(socket: u64, cookie: Option<u64>) {
    if !thread::is_running() {
        return;
    }
    take_out(|entry| {
        let is_meant = cookie.is_none_or(|cookie| entry.key == Some(cookie as u32));
        entry.owner.socket == socket && is_meant
    });
}

/// Tells whether memory may be given: otherwise it does not matter what is closed.
pub fn may_give() -> bool {
    thread::is_running()
}

/// This process has closed a descriptor of a socket. With the last one all is taken back that is
/// given for the socket.
pub fn has_closed(socket: u64) {
    let is_given = || TABLE.any(|entry| entry.owner.socket == socket);
    if thread::is_running() && is_given() && !system::has_descriptor(socket) {
        take_back(socket, None);
    }
}

/// This process has closed descriptors, whichever they were. All is taken back that is given for
/// sockets of which it has none any more.
pub fn has_closed_some() {
    /// Places for sockets that were found to be there, so as to look for few of them twice.
    const KEPT: usize = 64;
    if !thread::is_running() {
        return;
    }
    let kept = [const { Cell::new(0) }; KEPT];
    take_out(|entry| {
        let socket = entry.owner.socket;
        let last = &kept[socket as usize % KEPT];
        let is_there = last.get() == socket || system::has_descriptor(socket);
        if is_there {
            last.set(socket);
        }
        !is_there
    });
}

/// Takes everything back and closes the descriptors of this module, if one of them has a number of
/// this range: before calls that would close it behind our back, after which it would be the
/// program's.
pub fn make_way(first: u32, last: u32) {
    let is_in = |fd: c_int| u32::try_from(fd).is_ok_and(|fd| (first..=last).contains(&fd));
    if thread::is_running() && thread::descriptors().any(is_in) {
        thread::end();
    }
}
