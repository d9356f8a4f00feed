//! Memory of this process that a node of another user may use: only the ranges that calls have
//! named.
//!
//! A node of root or of the program's own user, which could read the program's memory in any case,
//! gets a descriptor of `/proc/self/mem`. Any other node gets one end of a socket pair; a thread of
//! this process, the *agent*, has the other end. The node asks the agent to read and write bytes,
//! and the agent checks for each request whether they lie in a range that a call has given for that
//! access.
//!
//! ```text
//!   table      the ranges, and to whom they were given
//!   own        bytes of this process, without a signal where there are none
//!   thread     the agent
//! ```
//!
//! How long the node may use a range:
//!
//! | range | until |
//! |---|---|
//! | where a key is stored, a vector of pieces | the call returns |
//! | a region | RDS_FREE_MR of its key |
//! | local memory of an operation | the operation has ended: the node says so |
//!
//! Each range ends at the latest when this process closes its last descriptor of the socket, when
//! the node ends the connection, or when the node returns the range. The kernel and the program's
//! memory, never the node, decide which socket and which key that is. A call that withdraws a range
//! returns after the last write to it; bytes that were read and not sent yet are not sent.
//!
//! There is no lock, and the child of a `fork` starts without an agent: it makes one when it needs
//! it, and ranges that its parent gave stay the parent's.

mod connections;
pub(crate) mod own;
mod table;
mod thread;

use core::cell::Cell;
use core::ffi::c_int;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::SeqCst;

use bowline_host_wire::watch::Room;

use self::connections::Connection;
use self::table::{Owner, Table};
use crate::channel::Descriptors;
use crate::{system, watch};

pub use crate::reach::{Access, Range, Reach, Stays};

/// Most ranges that a process may have given at a time.
const RANGES_MAX: usize = 16 << 10;

static TABLE: Table<RANGES_MAX> = Table::new();
static GRANTS: AtomicU64 = AtomicU64::new(1);

/// Memory given to a node for one call. Dropping it ends the call; unless [`accept`](Self::accept)
/// was called, the call has failed and the memory is withdrawn.
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

    /// Number with which the node returns the memory.
    pub const fn number(&self) -> u64 {
        self.owner.grant
    }

    /// Records that the node has accepted the call: ranges that outlive the call stay given. The
    /// key of a region is read from the program's memory, because the program will free that key;
    /// the node cannot write there any more. A region without the key it should have, which could
    /// not be freed, is withdrawn.
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

/// Gives a node the memory that a call refers to. `node` is the kernel's identity of the node,
/// `socket` that of the socket ([`socket_of`]).
///
/// # Errors
/// EFAULT where the system does not let a process read its own memory by address
/// (`process_vm_readv`; some seccomp filters); EAGAIN when there are too many ranges, or no thread
/// can be started; EBUSY when memory cannot be watched, since the program changes mappings and does
/// not read the events about it that it has asked for; EMFILE when there are no descriptors, or
/// connections to too many nodes;
/// EOPNOTSUPP in a process that has the memory of another (`vfork`).
pub fn give<D: Descriptors>(node: u64, socket: u64, reach: &Reach) -> Result<Given, c_int> {
    thread::start::<D>()?;
    let (connection, number, descriptor) = connections::to::<D>(node)?;
    let grant = next_grant();
    let owner = Owner { connection: number, socket, grant };
    let key_at = reach.key_at();
    let given = Given { connection, descriptor, owner, key_at, is_accepted: false };
    // Ranges added so far are withdrawn when `given` is dropped.
    let watch = watch::own::<D>();
    let is_watched = |range: &Range| {
        let own = watch.filter(|_| range.stays != Stays::Call);
        own.map_or(Ok(false), |watch| watch_from_now(watch, range))
    };
    let watched = reach.ranges().iter().map(is_watched).collect::<Result<Vec<bool>, c_int>>()?;
    let is_watched = |n: usize| watched[n];
    if TABLE.add(owner, reach.ranges(), is_watched) { Ok(given) } else { Err(libc::EAGAIN) }
}

/// A number whose lower half, which nodes name, is not 0.
fn next_grant() -> u64 {
    let next = || GRANTS.fetch_add(1, SeqCst);
    Some(next()).filter(|grant| *grant as u32 != 0).unwrap_or_else(next)
}

/// Watches a range. Ranges with which it shares pages and whose memory is gone are withdrawn: from
/// here on it would not show.
fn watch_from_now(watch: c_int, range: &Range) -> Result<bool, c_int> {
    let Some(room) = Room::of(range.at, range.len) else { return Ok(false) };
    let room = Cell::new(room);
    // Pieces are often in the same pages.
    let last = Cell::new((None, false));
    take_out(|entry| {
        let mut rest = room.get();
        let shared = entry.shared_pages(&mut rest);
        room.set(rest);
        let Some([at, len, _]) = shared else { return false };
        if last.get().0 != shared {
            last.set((shared, !watch::is_there(watch, at, len)));
        }
        last.get().1
    });
    watch::begin(watch, &room.get())
}

/// Withdraws memory that this process is about to unmap or to map again, which is whole pages. What
/// the calls of the program do that this library does not see, the watch tells.
pub fn goes_away(at: usize, len: usize) {
    if thread::is_running() && len > 0 {
        let page = system::page();
        let begin = at - at % page;
        let len = (at - begin).saturating_add(len).checked_next_multiple_of(page);
        take_out(|entry| entry.overlaps(begin as u64, len.map_or(u64::MAX, |len| len as u64)));
    }
}

/// Returns this module's identity of a socket: the kernel's unique number, which all descriptors of
/// the socket share. `None` if the descriptor is not a socket.
pub fn socket_of(fd: c_int) -> Option<u64> {
    system::cookie(fd)
}

/// Withdraws memory of a socket: with `cookie` the regions with its key (RDS_FREE_MR, before the
/// request to the node); without, all ranges of the socket, which this process closes.
pub fn take_back(socket: u64, cookie: Option<u64>) {
    if !thread::is_running() {
        return;
    }
    take_out(|entry| {
        let is_meant = cookie.is_none_or(|cookie| entry.key == Some(cookie as u32));
        entry.owner.socket == socket && is_meant
    });
}

/// Tells whether ranges may be given: otherwise closing descriptors has no effect here.
pub fn may_give() -> bool {
    thread::is_running()
}

/// Called after this process has closed a descriptor of a socket. The last one withdraws all ranges
/// of the socket.
pub fn has_closed(socket: u64) {
    let is_given = || TABLE.any(|entry| entry.owner.socket == socket);
    if thread::is_running() && is_given() && !system::has_descriptor(socket) {
        take_back(socket, None);
    }
}

/// Called after this process has closed any descriptors. Withdraws the ranges of sockets without a
/// descriptor.
pub fn has_closed_some() {
    /// Sockets known to have a descriptor, so that few are searched twice.
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

/// Withdraws everything and closes the descriptors of this module if one of them is in this range.
/// Called before calls that close the range, after which the number would belong to the program.
pub fn make_way<D: Descriptors>(first: u32, last: u32) {
    let is_in = |fd: c_int| u32::try_from(fd).is_ok_and(|fd| (first..=last).contains(&fd));
    if thread::is_running() && thread::descriptors().any(is_in) {
        thread::end();
    }
    watch::make_way::<D>(is_in);
}
