//! Which nodes a process trusts. Claims of the other side, such as the name of a socket, do not
//! count: the kernel knows who made a descriptor, and who listens at a path.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::system::{self, Process};

/// The user number of all users that are not mapped in a user namespace (overflow UID).
const NOBODY: u32 = 65_534;
/// Path of a node's socket below a folder of runtime files.
const FOLDER: &[u8] = b"/bowline/rds/host";

/// Environment variable with the path of the node's socket.
const PLACE: &CStr = c"BOWLINE_RDS_SOCKET";

/// Owner of a path at which a node was found, plus one; kept when the file is deleted.
static FOUND: AtomicU64 = AtomicU64::new(0);

/// A path at which a node may serve this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) path: Vec<u8>,
    /// Only a node of the calling thread's namespace counts here.
    pub(crate) is_default: bool,
    /// Beside it a node of this namespace has a place with the number of that.
    is_second: bool,
    /// It is below a folder that the environment names, where others may come to have a hand in
    /// what is there: its owner counts for nothing.
    is_of_user: bool,
}

impl Place {
    /// A path that the caller has given for its node.
    pub(crate) fn named(path: &[u8]) -> Self {
        Self { path: path.to_vec(), is_default: false, is_second: false, is_of_user: false }
    }

    /// Tells whether only a node of another namespace can be here, or one that is asked at its
    /// other place. Nodes have this one as a second name of the other's file; a file by itself may
    /// be anybody's. What is mounted here alone has its other name where nobody sees it.
    pub(crate) fn is_left_out(&self) -> bool {
        self.is_second && system::has_second_name(&self.path)
    }

    /// The user trusted here besides root and the own user: the owner of the file.
    ///
    /// # Errors
    /// Those of `stat(2)`.
    pub(crate) fn believed(&self) -> Result<Option<u32>, c_int> {
        system::owner(&self.path).map(|owner| Some(owner).filter(|_| !self.is_of_user))
    }
}

fn variable(name: &CStr) -> Option<&'static [u8]> {
    // The environment of a program that gains privileges belongs to another user, and is ignored.
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

/// Returns the paths at which to look for the node of the calling thread, in order: that of the
/// environment, else those below the user's folder of runtime files and below `/run`.
///
/// A folder of runtime files that belongs to another user than root, as after `sudo -E`, is left
/// out, and one where others may have put what is there, as `/tmp`. Of one that counts they may
/// have a hand in what is there all the same, by its group, or by a link on the way to it: see
/// [`Place::believed`].
pub(crate) fn places() -> Vec<Place> {
    if let Some(path) = variable(PLACE) {
        return vec![Place::named(path)];
    }
    let own = variable(c"XDG_RUNTIME_DIR").filter(|folder| is_of_friends(folder));
    let namespace = system::network_namespace();
    let mut all = Vec::new();
    let own = own.map(|folder| (folder, true));
    for (runtime, is_of_user) in own.into_iter().chain([(b"/run".as_slice(), false)]) {
        let named = |suffix: &[u8], is_second| {
            let path = [runtime, FOLDER, suffix].concat();
            Place { path, is_default: true, is_second, is_of_user }
        };
        // The node of this namespace first: another may be stuck.
        if namespace != 0 {
            all.push(named(format!("-{namespace}.sock").as_bytes(), false));
        }
        all.push(named(b".sock", namespace != 0));
    }
    all
}

/// Tells whether nobody but root and the own user can have put something into a folder of runtime
/// files: it belongs to one of them, and where all may write, so does what is there.
fn is_of_friends(folder: &[u8]) -> bool {
    const WRITABLE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let Ok(owner) = system::owner(folder) else { return false };
    // The folder itself, and not a link to it.
    let Ok((_, mode)) = system::owner_and_mode(&[folder, b"/."].concat()) else { return false };
    let is_closed = mode & WRITABLE == 0;
    let holds_own = || {
        let below = system::owner_and_mode(&[folder, b"/bowline"].concat());
        mode & STICKY != 0 && below.is_ok_and(|(user, _)| is_friend(user))
    };
    is_friend(owner) && (is_closed || holds_own())
}

/// The network namespace whose node the calling thread wants: its own; 0 if the environment says
/// where the node is, whose namespace that is then, or if the system does not tell.
pub fn wanted_namespace() -> u64 {
    if variable(PLACE).is_some() { 0 } else { system::network_namespace() }
}

/// Records that a node was found at a path of this owner.
pub(crate) fn found(owner: u32) {
    // Relaxed: a number that stands for itself.
    FOUND.store(u64::from(owner) + 1, Ordering::Relaxed);
}

/// Tells whether a user is root or this process's own.
pub(crate) fn is_friend(user: u32) -> bool {
    user == 0 || user == system::geteuid()
}

/// Tells whether a node of a user is trusted: root, the own user, and the owner of the path at
/// which this process looks for its node, unless that path is below a user's folder.
pub(crate) fn is_trusted(user: u32) -> bool {
    is_friend(user)
        || FOUND.load(Ordering::Relaxed) == u64::from(user) + 1
        || places().iter().any(|place| place.believed() == Ok(Some(user)))
}

/// Tells whether a node of a user may use all memory of this process: it could read it anyway.
pub(crate) fn may_have_memory(user: u32) -> bool {
    user == 0 || (user == system::geteuid() && user != NOBODY)
}

/// Returns the user who made a socket of the kind that nodes make, whatever its name; `None` for
/// other sockets.
///
/// The kernel recorded it when the pair was made, whoever has either end now.
pub(crate) fn maker(fd: c_int) -> Option<Process> {
    let is_pair = system::option(fd, libc::SO_TYPE) == Ok(libc::SOCK_SEQPACKET)
        && system::option(fd, libc::SO_DOMAIN) == Ok(libc::AF_UNIX);
    if is_pair { system::peer(fd).ok() } else { None }
}

/// The agent's identity of a node that has greeted: that of the kernel, since a node could claim to
/// be another one.
pub(crate) fn number_of(greeter: Process) -> u64 {
    u64::from(greeter.user) << 32 | u64::from(greeter.number)
}

/// Tells whether a descriptor whose peer has the name of a node's socket may belong to a trusted
/// node: whether the maker of the pair is trusted. The greeting shows who has the other end now.
pub fn is_socket_of_node(fd: c_int) -> bool {
    maker(fd).is_some_and(|maker| is_trusted(maker.user))
}

/// Tells whether a descriptor is a socket of the kind that nodes make, whoever has made it.
pub fn is_like_those_of_nodes(fd: c_int) -> bool {
    maker(fd).is_some()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::process::CommandExt;
    use std::path::Path;
    use std::process::Command;

    use bowline_testkit::skipped;

    use super::*;

    const ANNA: u32 = 77_001;
    const STRANGER: u32 = 77_003;

    /// Tells where it looks, and as whom.
    #[test]
    #[ignore = "who_starts_a_program_that_gains_privileges_does_not_choose_its_node runs it"]
    fn child_that_looks_for_a_node() {
        println!("user {}", system::geteuid());
        places().iter().for_each(|place| println!("{}", String::from_utf8_lossy(&place.path)));
    }

    /// What the child says that a stranger starts, with a variable.
    fn looks(program: &Path, variable: (&str, &Path)) -> String {
        let mut command = Command::new(program);
        let child = "trust::tests::child_that_looks_for_a_node";
        command.args(["--exact", child, "--ignored", "--nocapture"]);
        command.env_remove("BOWLINE_RDS_SOCKET").env(variable.0, variable.1);
        command.uid(STRANGER).gid(STRANGER);
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    #[test]
    fn who_starts_a_program_that_gains_privileges_does_not_choose_its_node() {
        if system::geteuid() != 0 {
            return skipped::because("only root can make a program that gains privileges");
        }
        let folder = std::env::temp_dir().join(format!("bowline-gains-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        let program = folder.join("program");
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        chown(&program, Some(ANNA), Some(ANNA)).unwrap();
        for (mode, user) in [(0o755, STRANGER), (0o4755, ANNA)] {
            fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
            for name in ["BOWLINE_RDS_SOCKET", "XDG_RUNTIME_DIR"] {
                let told = looks(&program, (name, &folder));
                if !told.contains(&format!("user {user}\n")) {
                    skipped::because("no program gains privileges in the folder of tests");
                    continue;
                }
                let is_chosen = told.contains(folder.to_str().unwrap());
                assert_eq!(is_chosen, user == STRANGER, "{name}: {told}");
            }
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
