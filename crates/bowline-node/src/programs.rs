//! Sockets of a node for the programs of its host.

use std::{
    fmt,
    fs::{self, Permissions},
    io::{self, ErrorKind},
    iter,
    os::fd::{BorrowedFd, OwnedFd},
    os::unix::{
        fs::{DirBuilderExt, MetadataExt, PermissionsExt},
        net::{SocketAddr, UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use crate::{Failure, Outcome};
use bowline::rds::Node;
use bowline_ctl::OwnedFile;
use bowline_host::{HandOver, Host, HostState, NodeConnection, Policy, Quota, Refusal};

use crate::{
    leases,
    namespaces::{Whose, numbered},
};

/// Serves programs until it is dropped.
pub struct Programs {
    path: PathBuf,
    /// The socket's file, where no service manager has made it; it goes before the listener.
    file: Option<SocketFile>,
    host: Host,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Programs").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The names of a socket, which go with it.
#[derive(Debug)]
struct SocketFile(Vec<OwnedFile>);

impl SocketFile {
    /// Those at this path and, if it is the same file, at the usual one.
    fn at(path: &Path) -> io::Result<Self> {
        let own = OwnedFile::new(path)?;
        let usual = OwnedFile::new(&path.with_file_name(USUAL));
        let usual = usual.ok().filter(|usual| usual.is_also(&own));
        Ok(Self(iter::once(own).chain(usual).collect()))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.0.iter().for_each(OwnedFile::remove);
    }
}

/// Where programs are to be served: it listens already, and who connects waits.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    file: SocketFile,
    listener: UnixListener,
}

impl Place {
    /// Listens at `path`, or at the default place, in a folder that is made where it is missing.
    /// Another node of this network namespace may have the default place: `None`, and this one
    /// serves no programs.
    pub fn listen(path: Option<&Path>, policy: &Policy) -> Outcome<Option<Self>> {
        let has_others = !policy.attach.is_nobody();
        let place = path.map_or_else(default_path, Path::to_owned);
        let mode = if has_others { OPEN } else { 0o700 };
        let folder = bowline_ctl::folder_of(&place);
        let listening = || -> io::Result<Self> {
            fs::DirBuilder::new().recursive(true).mode(mode).create(folder)?;
            if path.is_none() {
                let own = bowline_folders(&place);
                own.clone().try_for_each(bowline_ctl::refuse_unsafe_folder)?;
                if has_others {
                    own.for_each(open);
                }
                bowline_ctl::sweep(folder);
            }
            let (listener, _) = bowline_ctl::listen(&place)?;
            if path.is_none() {
                // Of several nodes one has the usual name as well; where no link can be made, none.
                let _ = fs::hard_link(&place, place.with_file_name(USUAL));
            }
            let file = SocketFile::at(&place)?;
            if has_others {
                // The node asks the kernel who connects, and turns away who may not.
                fs::set_permissions(&place, Permissions::from_mode(0o666))?;
                note_closed_folders(&place);
            }
            Ok(Self { path: place.clone(), file, listener })
        };
        match listening() {
            Ok(place) => Ok(Some(place)),
            Err(error) if path.is_none() && error.kind() == ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(cannot_serve(&place, &error)),
        }
    }
}

impl Place {
    /// Returns its path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Programs {
    /// Serves programs at this place.
    pub fn start(node: &Node, place: Place, policy: Policy, default_quota: Quota) -> Outcome<Self> {
        let Place { path, file, listener } = place;
        let host = Host::start(node.driver().clone(), listener, policy, default_quota);
        let host = host.map_err(|error| cannot_serve(&path, &error))?;
        Ok(Self { path, file: Some(file), host })
    }

    /// Serves programs at a socket whose file stays when this process ends, with the mode that it
    /// has. At one that the service manager has passed, the next program that connects starts the
    /// node again.
    pub fn start_passed(
        node: &Node,
        listener: UnixListener,
        policy: Policy,
        default_quota: Quota,
    ) -> Outcome<Self> {
        let serve = || -> io::Result<Self> {
            let path = path_of(&listener.local_addr()?);
            let host = Host::start(node.driver().clone(), listener, policy, default_quota)?;
            Ok(Self { path, file: None, host })
        };
        serve().map_err(|error| {
            Failure::failed(format!(
                "cannot serve programs at the socket that the service manager passed: {error}"
            ))
        })
    }

    /// Goes on with the programs of another node, which has handed them over: where that one
    /// listened, or at the socket that the service manager has passed. A socket of the manager's
    /// is not this process's to remove.
    pub fn resume(
        node: &Node,
        passed: Option<UnixListener>,
        is_managers: bool,
        former: HostState,
        policy: Policy,
        default_quota: Quota,
    ) -> Outcome<Self> {
        let resume = || {
            let host = Host::resume(node.driver().clone(), former, passed, policy, default_quota)?;
            let path = path_of(&host.address());
            // Without a file there is nothing to remove in the end.
            let file = if is_managers { None } else { SocketFile::at(&path).ok() };
            Ok(Self { path, file, host })
        };
        resume().map_err(|error: io::Error| {
            Failure::failed(format!("cannot take over the programs of another node: {error}"))
        })
    }

    /// A descriptor that is readable once another node has asked for this one's place.
    pub fn successor_bell(&self) -> BorrowedFd<'_> {
        self.host.successor_bell()
    }

    /// Takes the connection to that node.
    pub fn take_successor(&self) -> Option<UnixStream> {
        self.host.take_successor()
    }

    /// Stops serving, for another process to go on; the socket's file stays.
    /// Other sockets at which this process listens go with it.
    pub fn hand_over(self, others: Vec<(PathBuf, UnixListener)>) -> io::Result<HandOver> {
        std::mem::forget(self.file);
        self.host.hand_over_with(others)
    }

    /// Returns the path of the socket at which programs are served.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Prints what programs were refused since the last call.
    pub fn log(&self) {
        for Refusal { user, what, count } in self.host.refusals() {
            match user {
                Some(user) => say_of_peer!("programs: user {user} {what} ({count})"),
                None => say_of_peer!("programs: many users, {what} ({count})"),
            }
        }
    }
}

fn cannot_serve(place: &Path, error: &io::Error) -> Failure {
    Failure::failed(format!(
        "cannot serve programs at {}: {error}; choose another path with --programs, or use \
         --no-programs",
        place.display()
    ))
}

fn path_of(address: &SocketAddr) -> PathBuf {
    address.as_pathname().unwrap_or(Path::new("(no path)")).to_owned()
}

/// Mode of folders through which other users reach the node. What is in them has modes of its own.
const OPEN: u32 = 0o711;

/// Bowline's own folders around the usual place.
fn bowline_folders(place: &Path) -> impl Iterator<Item = &Path> + Clone {
    place.ancestors().skip(1).take(2)
}

/// Lets others through a folder, which another command may have made for its user.
fn open(folder: &Path) {
    let Ok(found) = fs::metadata(folder) else { return };
    let mode = found.mode() & 0o7777 | OPEN & 0o111;
    // Where that is not possible, `note_closed_folders` says so.
    let _ = fs::set_permissions(folder, Permissions::from_mode(mode));
}

fn note_closed_folders(place: &Path) {
    let is_closed = |folder: &&Path| fs::metadata(folder).is_ok_and(|f| f.mode() & 0o001 == 0);
    if let Some(folder) = place.ancestors().skip(1).find(is_closed) {
        note!(
            "bowline node: other users cannot reach {}: {} is not accessible to them; choose \
             another path with --programs",
            place.display(),
            folder.display()
        );
    }
}

/// Name of the folder of the places of nodes.
const FOLDER: &str = "rds";
/// The name that the node has which was there first, beside that with the number of its namespace.
const USUAL: &str = "host.sock";

/// The names of places in a folder: that with the number of this network namespace, and the usual
/// one, which the node of another may have.
fn names() -> Vec<String> {
    let numbered = numbered("host").map(|name| format!("{name}.sock"));
    numbered.into_iter().chain([USUAL.to_owned()]).collect()
}

/// The folder in which a node of this user has its place.
fn folder() -> PathBuf {
    bowline_ctl::run_folder(FOLDER)
}

/// A place at which somebody listens.
#[derive(Debug)]
pub struct Reached {
    /// The path of the place.
    pub place: PathBuf,
    whose: Whose,
    /// To the node, unless it has refused this user.
    connection: Option<NodeConnection>,
}

impl Reached {
    /// Asks whose node listens at a place.
    ///
    /// # Errors
    /// Nobody listens there, or nobody that this user may ask.
    pub fn at(place: &Path) -> io::Result<Self> {
        let reached = |whose, connection| Ok(Self { place: place.to_owned(), whose, connection });
        let mut connection = match NodeConnection::open(place) {
            Ok(connection) => connection,
            Err(error) => match error.kind() {
                ErrorKind::NotFound
                | ErrorKind::ConnectionRefused
                | ErrorKind::PermissionDenied => return Err(error),
                _ => return reached(Whose::Unknown, None),
            },
        };
        match connection.namespace() {
            Ok(Some(namespace)) => reached(Whose::of(namespace), Some(connection)),
            Ok(None) => reached(Whose::of(0), None),
            Err(_) => reached(Whose::Unknown, Some(connection)),
        }
    }

    /// Nobody has said yet whose node it is.
    pub fn is_silent(&self) -> bool {
        self.whose == Whose::Unknown
    }

    /// Takes a lease of the node; `None`: it needs none, since it stays without programs.
    ///
    /// # Errors
    /// The node is about to end, or has ended since it was reached.
    pub fn lease(&self) -> io::Result<Option<OwnedFd>> {
        let lease = leases::take(&self.place)?;
        // A node serves programs no longer than it gives leases. So one that still has the
        // connection gave none when it was asked, and one that has ended may have given some.
        if lease.is_none() && self.connection.as_ref().is_some_and(NodeConnection::has_ended) {
            return Err(io::Error::new(ErrorKind::ConnectionAborted, "the connection was closed"));
        }
        Ok(lease)
    }
}

/// Where a node of this user serves programs of this network namespace: at the name with its
/// number, unless it has the usual one only, which a service manager or an older version gave it.
pub fn default_path() -> PathBuf {
    let mut paths = names().into_iter().map(|name| folder().join(name));
    let own = paths.next().unwrap_or_default();
    let is_ours = |place: &Path| Reached::at(place).is_ok_and(|node| node.whose == Whose::Ours);
    let is_only = |usual: &PathBuf| Reached::at(&own).is_err() && is_ours(usual);
    paths.find(is_only).unwrap_or(own)
}

/// Paths at which programs look for a node, in this order.
pub fn places() -> Vec<PathBuf> {
    let mut folders = vec![folder(), Path::new("/run/bowline").join(FOLDER)];
    folders.dedup();
    folders.iter().flat_map(|folder| names().into_iter().map(|name| folder.join(name))).collect()
}

/// Why no node is reachable.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Unreachable {
    /// What is at each place.
    pub why: String,
    /// A place is closed to this user, who cannot see whether a node serves there.
    pub is_closed: bool,
}

/// The first of these places at which a node of this network namespace serves programs; else one at
/// which nobody has answered yet, as where a service manager starts the node.
///
/// # Errors
/// Why there is none.
pub fn reachable(places: &[PathBuf]) -> Result<Reached, Unreachable> {
    let (mut why, mut unknown, mut is_closed) = (Vec::new(), None, false);
    for place in places {
        match Reached::at(place) {
            Ok(node) => match node.whose {
                Whose::Ours => return Ok(node),
                Whose::Others => why.push(format!(
                    "{}: its node serves another network namespace",
                    place.display()
                )),
                Whose::Unknown => unknown = unknown.or(Some(node)),
            },
            Err(error) => {
                is_closed |= error.kind() == ErrorKind::PermissionDenied;
                why.push(format!("{}: {error}", place.display()));
            }
        }
    }
    unknown.ok_or_else(|| Unreachable { why: why.join("; "), is_closed })
}
