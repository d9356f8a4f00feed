//! Which descriptors of this process are RDS sockets.
//!
//! The table has one word for each descriptor number, so that a call on another descriptor costs
//! one load. An entry is forgotten when its descriptor is closed or replaced, and determined again
//! at the next use: an RDS socket has a peer with a certain name, and was made, as the kernel says,
//! by a user whom this process trusts. Its node is asked through the socket itself.

use core::ffi::{c_char, c_int};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bowline_host_client::{
    Channel, Socket, agent, is_like_those_of_nodes, is_socket_of_node, system,
};
use bowline_host_wire::{NAME_PREFIX, SocketHandle};

use crate::nodes::{self, Hidden, Node};
use crate::real::KeptErrno;
use crate::sparse::Sparse;
use crate::{areas, process};

/// Descriptors from this number on cannot be RDS sockets.
pub(crate) const KNOWN_MAX: usize = 1 << 20;

const UNKNOWN: u64 = 0;
/// Not an RDS socket.
const OTHER: u64 = 1;
/// A channel of this library, hidden from the program.
const OURS: u64 = 2;
/// An RDS socket: handle in the upper 48 bits, number of the node in 8 bits, this below.
const RDS: u64 = 3;

/// A word is stored Release, when the node that it names is claimed and the memory is mapped, and
/// loaded Acquire where these are used. Relaxed are looks whether anything is known.
static TABLE: Sparse<AtomicU64> = Sparse::new();

/// The system's unique number of each RDS socket, by descriptor. Relaxed: it is of use only to who
/// has loaded the word.
static SOCKETS: Sparse<AtomicU64> = Sparse::new();

/// No descriptor at or above has been looked at. Relaxed: who closes a range of descriptors while
/// others find out about some of them gets either order.
static END: AtomicUsize = AtomicUsize::new(0);

/// An RDS socket of this process.
pub(crate) type Rds = Socket<'static, Hidden>;

fn cell(fd: c_int) -> Option<&'static AtomicU64> {
    TABLE.get(usize::try_from(fd).ok()?)
}

/// The word of a descriptor that is being determined.
fn new_cell(fd: c_int) -> Option<&'static AtomicU64> {
    if process::is_visitor() {
        return None;
    }
    let at = usize::try_from(fd).ok()?;
    let cell = TABLE.get_or_map(at)?;
    END.fetch_max(at + 1, Ordering::Relaxed);
    Some(cell)
}

/// Returns the RDS socket of a descriptor; `None` if the descriptor is something else.
///
/// `Err`: it is an RDS socket whose node cannot be reached; the error number for the caller.
#[inline]
pub(crate) fn find(fd: c_int) -> Option<Result<Rds, c_int>> {
    if process::is_visitor() {
        return find_for_call(fd);
    }
    let word = cell(fd).map_or(UNKNOWN, |cell| cell.load(Ordering::Acquire));
    if word == OTHER { None } else { find_slowly(fd, word) }
}

#[cold]
fn find_slowly(fd: c_int, word: u64) -> Option<Result<Rds, c_int>> {
    if word == OURS {
        return None;
    }
    process::notice();
    if word & 0xff == RDS {
        let node = nodes::get((word >> 8) as u8)?;
        return Some(Ok(Rds { fd, node, handle: SocketHandle(word >> 16) }));
    }
    let _kept = KeptErrno::new();
    if !has_name_of_node(fd) || !is_socket_of_node(fd) {
        set_other(fd);
        return None;
    }
    match attach(fd) {
        Err(libc::ENOTSOCK) => {
            set_other(fd);
            None
        }
        Err(errno) => Some(Err(errno)),
        Ok(rds) => {
            set(fd, rds.node, rds.handle);
            Some(Ok(rds))
        }
    }
}

/// Tells whether a number that was an RDS socket's has become something else's by a system call
/// that this library did not see, when a call has failed; it is forgotten then.
#[cold]
pub(crate) fn is_something_else(fd: c_int) -> bool {
    let kept = KeptErrno::new();
    // Errors of sockets that are well.
    let harmless = [libc::EAGAIN, libc::EINTR, libc::ETIMEDOUT, libc::ENOBUFS];
    // Whether its node is trusted does not matter any more.
    let is_one_of_a_node = || has_name_of_node(fd) && is_like_those_of_nodes(fd);
    let is_same = || is_socket_that_was_set(fd) || is_one_of_a_node();
    if harmless.contains(&kept.value()) || is_same() {
        return false;
    }
    forget(fd);
    true
}

/// Records that an open descriptor is not an RDS socket.
pub(crate) fn set_other(fd: c_int) {
    if let Some(cell) = new_cell(fd).filter(|_| system::flags(fd).is_ok()) {
        // Another thread may just have recorded an RDS socket.
        let _ = cell.compare_exchange(UNKNOWN, OTHER, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The same, by what the system and the node say alone.
#[cold]
fn find_for_call(fd: c_int) -> Option<Result<Rds, c_int>> {
    let _kept = KeptErrno::new();
    if !has_name_of_node(fd) || !is_socket_of_node(fd) {
        return None;
    }
    match ask(fd) {
        Err(libc::ENOTSOCK) => None,
        asked => Some(asked.map(|(rds, memory)| {
            system::close(memory);
            rds
        })),
    }
}

/// The memory of a socket, for as long as the call that wants it.
pub(crate) fn memory_for_call(fd: c_int) -> Result<areas::InUse, c_int> {
    areas::map_for_call(ask(fd)?.1)
}

/// Asks the node of a socket about it.
fn attach(fd: c_int) -> Result<Rds, c_int> {
    let (rds, memory) = ask(fd)?;
    areas::map(fd, memory)?;
    Ok(rds)
}

/// The same; returns a descriptor of the socket's memory as well.
fn ask(fd: c_int) -> Result<(Rds, c_int), c_int> {
    let (channel, welcome) = Channel::offer(fd)?;
    let node = nodes::of(&welcome)?;
    node.keep(channel);
    let (handle, memory) = node.attach(fd)?;
    Ok((Rds { fd, node, handle }, memory))
}

/// Tells whether the peer of a descriptor has a name like those of nodes; this is a hint only.
fn has_name_of_node(fd: c_int) -> bool {
    // SAFETY: a structure of integers, for which all zeroes are a value.
    let mut name: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    let Ok(len) = system::peer_name(fd, &mut name) else { return false };
    let path = len.checked_sub(2).and_then(|len| name.sun_path.get(..len));
    let begins = |path: &[c_char]| {
        path.len() > NAME_PREFIX.len()
            && path.iter().zip(NAME_PREFIX).all(|(c, byte)| c.to_ne_bytes() == [*byte])
    };
    i32::from(name.sun_family) == libc::AF_UNIX && path.is_some_and(begins)
}

/// Tells whether a descriptor is the RDS socket that was recorded for its number.
fn is_socket_that_was_set(fd: c_int) -> bool {
    let known = usize::try_from(fd).ok().and_then(|at| SOCKETS.get(at));
    let known = known.map(|known| known.load(Ordering::Relaxed));
    known.is_some_and(|known| known != 0 && agent::socket_of(fd) == Some(known))
}

/// Records an RDS socket.
pub(crate) fn set(fd: c_int, node: &'static Node, handle: SocketHandle) {
    if let Some(cell) = new_cell(fd).filter(|_| handle.0 < 1 << 48) {
        if let Some(socket) = usize::try_from(fd).ok().and_then(|at| SOCKETS.get_or_map(at)) {
            socket.store(agent::socket_of(fd).unwrap_or(0), Ordering::Relaxed);
        }
        let word = handle.0 << 16 | u64::from(nodes::index(node)) << 8 | RDS;
        cell.store(word, Ordering::Release);
    }
}

/// Records a descriptor of this library.
pub(crate) fn set_ours(fd: c_int) {
    if let Some(cell) = new_cell(fd) {
        cell.store(OURS, Ordering::Release);
    }
}

/// Tells whether a descriptor is recorded as an RDS socket.
pub(crate) fn is_rds(fd: c_int) -> bool {
    cell(fd).is_some_and(|cell| cell.load(Ordering::Acquire) & 0xff == RDS)
}

/// Tells whether a descriptor is one of this library.
pub(crate) fn is_ours(fd: c_int) -> bool {
    cell(fd).is_some_and(|cell| cell.load(Ordering::Acquire) == OURS)
}

/// Forgets a descriptor that was closed or replaced.
pub(crate) fn forget(fd: c_int) {
    if let Some(cell) = cell(fd).filter(|cell| cell.load(Ordering::Relaxed) != UNKNOWN)
        && !process::is_visitor()
    {
        process::notice();
        cell.store(UNKNOWN, Ordering::Release);
        areas::retire(fd);
    }
}

/// Forgets all descriptors of a range that are not this library's own.
pub(crate) fn forget_range(first: usize, last: usize) {
    if process::is_visitor() {
        return;
    }
    process::notice();
    let end = END.load(Ordering::Relaxed).min(last.saturating_add(1));
    for fd in first..end {
        let known =
            TABLE.get(fd).filter(|cell| ![UNKNOWN, OURS].contains(&cell.load(Ordering::Relaxed)));
        if let Some(cell) = known {
            cell.store(UNKNOWN, Ordering::Release);
            areas::retire(fd as c_int);
        }
    }
}
