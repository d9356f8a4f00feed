//! Nodes that this process has sockets of, and new sockets of the host's node.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bowline_host_client::{
    Channel, Descriptors, Opened, Welcome, is_refusal, system, wanted_namespace,
};

use crate::{areas, cancel, faults, process, table};

pub(crate) type Node = bowline_host_client::Node<Hidden>;

/// Most nodes of which one process has had sockets. A restarted node is a different node, unless it
/// has taken over the state of the previous one. An index has 8 bits; 0 means no node elsewhere.
const NODES_MAX: usize = 254;

static NODES: [Node; NODES_MAX] = [const { Node::vacant() }; NODES_MAX];
/// The namespace whose node was found last, above 8 bits of the number of that node, plus one.
static LAST_FOUND: AtomicU64 = AtomicU64::new(0);

/// Channels that are hidden from the program.
pub(crate) struct Hidden;

impl Descriptors for Hidden {
    fn opened(fd: c_int) -> c_int {
        let is_visitor = process::is_visitor();
        if is_visitor {
            // What signals do is its own, all else its parent's.
            faults::handle();
        } else {
            prepare();
        }
        let fd = system::move_up(fd);
        // One that the child of a `vfork` makes is closed with the call: its parent has none.
        if !is_visitor {
            table::set_ours(fd);
        }
        fd
    }

    fn closes(fd: c_int) {
        if !process::is_visitor() {
            table::forget(fd);
        }
    }

    fn are_kept() -> bool {
        !process::is_visitor()
    }

    fn waits(fd: c_int) -> Result<(), c_int> {
        cancel::wait(fd)
    }
}

pub(crate) fn get(index: u8) -> Option<&'static Node> {
    NODES.get(usize::from(index))
}

pub(crate) fn index(node: &'static Node) -> u8 {
    let first = NODES.as_ptr().addr();
    ((ptr::from_ref(node).addr() - first) / size_of::<Node>()) as u8
}

/// Returns the node of a greeting.
pub(crate) fn of(welcome: &Welcome) -> Result<&'static Node, c_int> {
    NODES.iter().find(|node| node.claim(welcome)).ok_or(libc::EMFILE)
}

/// Returns the node of new sockets, and a channel to it: the node of the calling thread's network
/// namespace, as a kernel's socket belongs to that namespace.
fn host_node() -> Result<(&'static Node, Channel<Hidden>), c_int> {
    let namespace = wanted_namespace();
    // Pairs with the store below: the node that it names has been claimed.
    let last = LAST_FOUND.load(Ordering::Acquire);
    if last >> 8 == namespace
        && let Some(node) = (last as u8).checked_sub(1).and_then(get)
        && let Some(channel) = node.idle_channel()
    {
        return Ok((node, channel));
    }
    let (channel, welcome) = Channel::open_to_host()?;
    let node = of(&welcome)?;
    // Pairs with the load above.
    LAST_FOUND.store(namespace << 8 | u64::from(index(node) + 1), Ordering::Release);
    Ok((node, channel))
}

/// `socket(AF_RDS, ..)`.
pub(crate) fn socket(kind: c_int, protocol: c_int) -> Result<c_int, c_int> {
    let flags = kind & !0xf;
    if flags & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) != 0 {
        return Err(libc::EINVAL);
    }
    if kind & 0xf != libc::SOCK_SEQPACKET || protocol != 0 {
        return Err(libc::ESOCKTNOSUPPORT);
    }
    process::notice();
    // A restarted node has ended the previous channels.
    let (node, opened) = match open() {
        Err(libc::ENETDOWN) => open()?,
        done => done?,
    };
    let fd = opened.fd;
    // Forgets what another thread may have recorded about the number while it was being closed.
    table::forget(fd);
    if process::is_visitor() {
        system::close(opened.memory);
    } else if let Err(errno) = areas::map(fd, opened.memory) {
        system::close(fd);
        return Err(errno);
    }
    if flags & libc::SOCK_CLOEXEC == 0 {
        system::clear_cloexec(fd);
    }
    if flags & libc::SOCK_NONBLOCK != 0 {
        system::set_flags(fd, system::flags(fd)? | libc::O_NONBLOCK);
    }
    table::set(fd, node, opened.handle);
    Ok(fd)
}

/// Asks the host's node for a socket.
fn open() -> Result<(&'static Node, Opened), c_int> {
    // The error of a kernel without the module, unless a node refuses this user.
    let absent = |errno| if is_refusal(errno) { errno } else { libc::EAFNOSUPPORT };
    let (node, channel) = host_node().map_err(absent)?;
    Ok((node, node.open(channel)?))
}

/// Closes idle channels. Called before calls that close their numbers, which would then belong to
/// the program.
pub(crate) fn close_idle() {
    if process::is_owner() {
        NODES.iter().for_each(Node::forget_channels);
    }
}

/// The child of a `fork` makes its own channels: replies on a shared one could go to either
/// process.
pub(crate) extern "C" fn after_fork() {
    process::adopt();
    NODES.iter().for_each(Node::forget_channels);
}

/// What the first use of a node in this process needs. Threads may come here at once: none waits
/// for another, which the child of a `fork` would not have.
fn prepare() {
    static IS_PREPARED: AtomicBool = AtomicBool::new(false);
    static IS_REGISTERED: AtomicBool = AtomicBool::new(false);
    // Acquire and Release: who finds it prepared finds all of that.
    if IS_PREPARED.load(Ordering::Acquire) {
        return;
    }
    process::adopt();
    faults::handle();
    // Relaxed: one registers. A child that is made before is known by the mark of its process.
    if !IS_REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the function is there as long as the library, which is never unloaded: programs
        // do not unload what was preloaded.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    }
    IS_PREPARED.store(true, Ordering::Release);
}
