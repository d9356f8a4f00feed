//! Nodes that this process has sockets of, and new sockets of the host's node.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Once;

use bowline_host_client::{
    Channel, Descriptors, Opened, Welcome, is_refusal, system, wanted_namespace,
};

use crate::{areas, table};

pub(crate) type Node = bowline_host_client::Node<Hidden>;

/// Most nodes that one process has had sockets of: after each start a node is another one, unless
/// it has gone on with what there was. An index has 8 bits, and 0 stands for none elsewhere.
const NODES_MAX: usize = 254;

static NODES: [Node; NODES_MAX] = [const { Node::vacant() }; NODES_MAX];
/// The namespace whose node was found last, above 8 bits of the number of that node, plus one.
static LAST_FOUND: AtomicU64 = AtomicU64::new(0);

/// Channels that the program does not know of.
pub(crate) struct Hidden;

impl Descriptors for Hidden {
    fn opened(fd: c_int) -> c_int {
        prepare();
        let fd = system::move_up(fd);
        table::set_ours(fd);
        fd
    }

    fn closes(fd: c_int) {
        table::forget(fd);
    }
}

pub(crate) fn get(index: u8) -> Option<&'static Node> {
    NODES.get(usize::from(index))
}

pub(crate) fn index(node: &'static Node) -> u8 {
    let first = NODES.as_ptr().addr();
    ((ptr::from_ref(node).addr() - first) / size_of::<Node>()) as u8
}

/// The node that has greeted so.
pub(crate) fn of(welcome: &Welcome) -> Result<&'static Node, c_int> {
    NODES.iter().find(|node| node.claim(welcome)).ok_or(libc::EMFILE)
}

/// The node of new sockets, and a channel to it. As a kernel's socket is one of the namespace in
/// which its thread is, the node is that of this namespace.
fn of_host() -> Result<(&'static Node, Channel<Hidden>), c_int> {
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
    // A node that was started anew ends the channels of before.
    let (node, opened) = match open() {
        Err(libc::ENETDOWN) => open()?,
        done => done?,
    };
    let fd = opened.fd;
    // What another thread may have found out about the number while it was being closed.
    table::forget(fd);
    if let Err(errno) = areas::map(fd, opened.memory) {
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
    // As a kernel without the module says, unless there is a node that refuses this user.
    let absent = |errno| if is_refusal(errno) { errno } else { libc::EAFNOSUPPORT };
    let (node, channel) = of_host().map_err(absent)?;
    Ok((node, node.open(channel)?))
}

/// Closes the channels that are not in use. For calls that would close them behind our back, after
/// which their numbers would be the program's.
pub(crate) fn close_idle() {
    if table::is_this_process() {
        NODES.iter().for_each(Node::forget_channels);
    }
}

/// The child of a `fork` makes channels of its own: answers on a shared one would go to either.
extern "C" fn after_fork() {
    table::adopt();
    NODES.iter().for_each(Node::forget_channels);
}

fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        table::adopt();
        // SAFETY: the function is there as long as the library, which is never unloaded: programs
        // do not unload what was preloaded.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    });
}
