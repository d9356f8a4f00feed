//! Whose node a process believes. What a stranger says of himself, such as the name of a socket,
//! counts for nothing: the kernel tells who made a descriptor, and who listens at a place.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::system;

/// The user that stands for those whom a user namespace does not know.
const NOBODY: u32 = 65_534;
/// Folders and file of a node, below a folder of runtime files.
const FOLDER: &[u8] = b"/bowline/rds/host";

/// Variable that says where the node serves programs.
const PLACE: &CStr = c"BOWLINE_RDS_SOCKET";

/// Owner of a place where a node was found, plus one. It stays known when the file is gone.
static FOUND: AtomicU64 = AtomicU64::new(0);

/// Where a node may serve this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) path: Vec<u8>,
    /// It counts for the namespace of the calling thread only, and not whatever the node's is.
    pub(crate) is_usual: bool,
}

fn variable(name: &CStr) -> Option<&'static [u8]> {
    // Who has started a program that gains privileges does not choose for it.
    // SAFETY: a question about this process.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    // SAFETY: the name ends with a zero byte.
    let value: *const c_char = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: a value ends with a zero byte; programs that change their environment while other
    // threads read it are wrong in themselves.
    let value = (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) }.to_bytes());
    value.filter(|value| !value.is_empty())
}

/// The places at which to look for the node of the calling thread, in this order: where the
/// environment says, else below the user's folder of runtime files and below `/run`.
///
/// A folder of runtime files that belongs to another user than root, as after `sudo -E`, is left
/// out.
pub(crate) fn places() -> Vec<Place> {
    if let Some(path) = variable(PLACE) {
        return vec![Place { path: path.to_vec(), is_usual: false }];
    }
    let own = variable(c"XDG_RUNTIME_DIR").filter(
        |folder| matches!(system::owner(folder), Ok(o) if o == 0 || o == system::geteuid()),
    );
    let namespace = system::network_namespace();
    let mut all = Vec::new();
    for runtime in own.into_iter().chain([b"/run".as_slice()]) {
        let named =
            |suffix: &[u8]| Place { path: [runtime, FOLDER, suffix].concat(), is_usual: true };
        // That of this namespace first: another's may stand still.
        if namespace != 0 {
            all.push(named(format!("-{namespace}.sock").as_bytes()));
        }
        all.push(named(b".sock"));
    }
    all
}

/// The network namespace whose node the calling thread wants: its own; 0 if the environment says
/// where the node is, whose namespace that is then, or if the system does not tell.
pub fn wanted_namespace() -> u64 {
    if variable(PLACE).is_some() { 0 } else { system::network_namespace() }
}

/// A node was found at a place of this owner.
pub(crate) fn found(owner: u32) {
    FOUND.store(u64::from(owner) + 1, Ordering::Relaxed);
}

/// Tells whether a node of a user is believed: root's, the own user's, and that of whoever owns the
/// place where this process is to look for its node.
pub(crate) fn is_trusted(user: u32) -> bool {
    user == 0
        || user == system::geteuid()
        || FOUND.load(Ordering::Relaxed) == u64::from(user) + 1
        || places().iter().any(|place| system::owner(&place.path) == Ok(user))
}

/// Tells whether a node of a user may have all memory of this process, which it could have anyway.
pub(crate) fn may_have_memory(user: u32) -> bool {
    user == 0 || (user == system::geteuid() && user != NOBODY)
}

/// Who made a socket of the kind that nodes make, by whatever name it goes; `None` for others.
///
/// The kernel has noted it when the pair was made, whoever has either end now.
pub(crate) fn maker(fd: c_int) -> Option<libc::ucred> {
    let is_pair = system::option(fd, libc::SO_TYPE) == Ok(libc::SOCK_SEQPACKET)
        && system::option(fd, libc::SO_DOMAIN) == Ok(libc::AF_UNIX);
    if is_pair { system::peer(fd).ok() } else { None }
}

/// What the agent calls the node that made a socket: what the kernel says of it, since a node could
/// say that it is another.
pub(crate) fn number_of(maker: libc::ucred) -> u64 {
    u64::from(maker.uid) << 32 | u64::from(maker.pid.cast_unsigned())
}

/// Tells whether a descriptor whose peer has the name of a node's socket is one of a node that this
/// process believes.
pub fn is_socket_of_node(fd: c_int) -> bool {
    maker(fd).is_some_and(|maker| is_trusted(maker.uid))
}
