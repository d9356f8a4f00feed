//! The control socket of a running node, and the requests of the commands that talk to it.
//!
//! The node serves its control tree (`tree.rs`) by the server that all processes of bowline
//! have, [`bowline_ctl::Server`]; its module describes the protocol and the limits of clients. A
//! request of these commands is one file of the tree, below `/class/rds/node`:
//!
//! | command | request |
//! |---|---|
//! | `info`, `ping`, and `drop` for what they ask of a node | `text` of `info`: all at one moment |
//! | `top` | `text` of `state`: the same without the messages |
//! | `sysctl NAME` | `read` of `sysctl/NAME` |
//! | `sysctl NAME=VALUE` | `write` of VALUE to `sysctl/NAME`, then the same |
//! | `drop [PEER]`, `stress --reset` | `write` of PEER or `all` to `drop` |
//! | `ping` through a node | `write` of `LOCAL REMOTE MILLISECONDS` to `probe` |
//!
//! The answer to `drop` is how many TCP connections were cut, that to `probe` the round trip in
//! nanoseconds, or the errno. A probe ends when its client leaves. `bowline rtrs tree`, `get` and
//! `set` work on the socket too, with `--control`.

pub mod snapshot;
pub(crate) mod tree;

use std::{
    fs, io, iter,
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use bowline_ctl::{Errno, Json, Op, Place, Server, Tree};

pub use self::tree::MANUAL_NAMES;
use self::{
    snapshot::Snapshot,
    tree::{ALL_PEERS, NODE, PROBE_MAX},
};
use crate::{
    Failure, Outcome,
    log::shown,
    namespaces::{Whose, numbered},
    programs,
    values::Address,
};

/// Longest wait of a client for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait of one that looks for its node until a node says of which network namespace it is.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest answer that a client accepts, in bytes: rows of 200 bytes for about five times as many
/// messages as can wait for readers in a node with the default memory limit.
const ANSWER_BYTES_MAX: u64 = 4 << 30;

/// Listens at the first of these places that no node of another network namespace has. The folder
/// of this user is made where it is missing.
pub(crate) fn listen(paths: &[PathBuf]) -> Outcome<Place> {
    let mut failure = Failure::usage("no place for a control socket");
    for path in paths {
        failure = match listen_at(path) {
            Ok(place) => return Ok(place),
            Err(Refused::InUse(failure)) if !is_known_as_ours(path) => failure,
            Err(Refused::InUse(failure) | Refused::Other(failure)) => return Err(failure),
        };
    }
    Err(failure)
}

/// Why a node cannot listen at a place.
enum Refused {
    /// Somebody listens there.
    InUse(Failure),
    Other(Failure),
}

fn listen_at(path: &Path) -> Result<Place, Refused> {
    let parent = bowline_ctl::folder_of(path);
    if parent != folder() && !parent.exists() {
        return Err(Refused::Other(Failure::failed(format!(
            "cannot use {}: there is no folder {}; make it, or choose another place with --control \
             PATH",
            path.display(),
            parent.display()
        ))));
    }
    bowline_ctl::create_folder_of(path).map_err(|error| {
        Refused::Other(Failure::failed(format!(
            "cannot use {}: {error}; choose another place with --control PATH, or --no-control",
            bowline_ctl::folder_of(path).display()
        )))
    })?;
    if bowline_ctl::folder_of(path) == folder() {
        // Nodes that were confined have left some, each with the name of its network namespace.
        bowline_ctl::sweep(&folder());
    }
    Place::listen(path).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse if bowline_ctl::is_socket(path) => {
            Refused::InUse(Failure::failed(format!(
                "another node has {}, or one of another user has left it; stop it, remove the \
                 file, or choose --control PATH",
                path.display()
            )))
        }
        _ => Refused::Other(Failure::failed(format!(
            "cannot listen on {}: {error}; choose another place with --control PATH",
            path.display()
        ))),
    })
}

fn is_known_as_ours(path: &Path) -> bool {
    matches!(look_at(path), Look::Node(_, Whose::Ours))
}

/// Serves the tree of a node at its control socket until the result is dropped.
pub(crate) fn serve(place: &Place, tree: Tree) -> Outcome<Server> {
    place
        .serve(tree)
        .map_err(|error| Failure::failed(format!("cannot start the control thread: {error}")))
}

/// A connection to a running node.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    tree: bowline_ctl::Client,
}

impl Client {
    /// Connects to the node behind `path`, or to the only one that runs here.
    pub fn connect(path: Option<&Path>) -> Outcome<Self> {
        let Some(path) = path else { return only_node() };
        Self::open(path).map_err(|error| {
            Failure::failed(format!(
                "no node answers on {}: {error}; is `bowline node` running?",
                path.display()
            ))
        })
    }

    fn open(path: &Path) -> io::Result<Self> {
        Self::open_within(path, ANSWER_TIMEOUT)
    }

    fn open_within(path: &Path, limit: Duration) -> io::Result<Self> {
        let mut tree = bowline_ctl::Client::connect_within(path, limit)?;
        tree.set_answer_bytes_max(ANSWER_BYTES_MAX);
        Ok(Self { path: path.to_owned(), tree })
    }

    /// Asks for a file of the node. The inner error is that of the file.
    fn ask(&mut self, op: Op<'_>, file: &str) -> Outcome<Result<Json, Errno>> {
        let path = self.path.display();
        self.tree.ask(op, &format!("{NODE}/{file}")).map_err(|error| {
            Failure::failed(match error.kind() {
                io::ErrorKind::InvalidData => {
                    format!("the node on {path} answers in another way: {error}; update the older")
                }
                io::ErrorKind::UnexpectedEof => format!(
                    "the node on {path} broke off: end of the connection; look at its output"
                ),
                _ => format!("the node on {path} broke off: {error}; look at its output"),
            })
        })
    }

    /// Returns the failure for a missing file that every node serves: the process is not a node.
    fn refused(&self, file: &str, errno: Errno) -> Failure {
        let path = self.path.display();
        Failure::failed(format!(
            "the process on {path} is not a node: {NODE}/{file}: {}; choose a node with --control \
             PATH",
            errno.strerror()
        ))
    }

    /// Parses the number that a file or a command returned.
    fn number<T>(
        &self,
        file: &str,
        answer: Result<Json, Errno>,
        number: fn(&Json) -> Option<T>,
    ) -> Outcome<T> {
        let answer = answer.map_err(|errno| self.refused(file, errno))?;
        number(&answer).ok_or_else(|| self.refused(file, Errno::EIO))
    }

    /// Asks of which network namespace the node is. One that does not tell is of an older version,
    /// or no node, which another request finds out.
    fn whose(&mut self) -> Whose {
        match self.ask(Op::Read, "namespace") {
            Ok(answer) => Whose::of(answer.ok().and_then(|n| n.as_u64()).unwrap_or_default()),
            Err(_) => Whose::Unknown,
        }
    }

    /// Connects to the node of this network namespace that serves this address, if one does.
    pub fn serving(address: Address) -> Option<Self> {
        running().here.into_iter().find_map(|mut client| {
            let addresses = client.snapshot().ok()?.node.addresses;
            (addresses.is_empty() || addresses.contains(&address)).then_some(client)
        })
    }

    /// Has the node send one RDS ping. Returns the round trip time, or why there was no answer.
    pub fn probe(
        &mut self,
        local: Address,
        remote: Address,
        timeout: Duration,
    ) -> Outcome<Result<Duration, Errno>> {
        let patience = timeout.min(PROBE_MAX) + ANSWER_TIMEOUT;
        // If this fails, the wait is shorter at worst.
        let _ = self.tree.set_limit(Some(patience));
        let words = format!("{local} {remote} {}", timeout.as_millis());
        match self.ask(Op::Write(&words), "probe")? {
            Ok(nanos) => {
                self.number("probe", Ok(nanos), Json::as_u64).map(Duration::from_nanos).map(Ok)
            }
            Err(errno) => Ok(Err(errno)),
        }
    }

    /// Asks for everything the node knows about itself.
    pub fn snapshot(&mut self) -> Outcome<Snapshot> {
        self.document("info")
    }

    /// Asks for the same without the messages.
    pub fn state(&mut self) -> Outcome<Snapshot> {
        self.document("state")
    }

    fn document(&mut self, file: &str) -> Outcome<Snapshot> {
        let answer = self.ask(Op::Text, file)?.map_err(|errno| self.refused(file, errno))?;
        serde_json::from_str(answer.as_str().unwrap_or_default()).map_err(|error| {
            Failure::failed(format!("the node answers in another way: {error}; update the older"))
        })
    }

    /// Returns a setting and, with a value, changes it first.
    pub fn sysctl(&mut self, name: &str, value: Option<i64>) -> Outcome<i64> {
        let failure = |error: bowline_rds::Error| Failure::failed(format!("{name}: {error}"));
        let known = bowline_rds::sysctl_name(name).ok_or_else(|| {
            Failure::failed(format!("{name}: no such setting; `bowline sysctl` lists all"))
        })?;
        let file = format!("sysctl/{known}");
        if let Some(value) = value {
            match self.ask(Op::Write(&value.to_string()), &file)? {
                Err(Errno::EINVAL) => {
                    let range = bowline_rds::sysctl_range(known).unwrap_or_default();
                    return Err(failure(bowline_rds::Error::BadSetting(range)));
                }
                answer => answer.map_err(|errno| self.refused(&file, errno))?,
            };
        }
        let answer = self.ask(Op::Read, &file)?;
        self.number(&file, answer, Json::as_i64)
    }

    /// Cuts the TCP connections to a peer, or all; returns their number.
    pub fn drop_connections(&mut self, peer: Option<IpAddr>) -> Outcome<u64> {
        let peer = peer.map_or_else(|| ALL_PEERS.to_owned(), |peer| peer.to_string());
        let answer = self.ask(Op::Write(&peer), "drop")?;
        self.number("drop", answer, Json::as_u64)
    }
}

/// Returns whether a process answers at this place as at a control socket.
pub fn is_control_socket(path: &Path) -> bool {
    let client = bowline_ctl::Client::connect_within(path, LOOK_TIMEOUT);
    client.is_ok_and(|mut client| client.ask(Op::List, "/").is_ok())
}

/// Returns the folder of the control sockets that this process makes.
pub fn folder() -> PathBuf {
    folders().into_iter().next().unwrap_or_default()
}

/// Returns the places of the control socket of a node with these addresses, in this order: the
/// usual one, and one beside it where a node of another network namespace has that.
pub(crate) fn default_paths(addresses: &[Address]) -> Vec<PathBuf> {
    let usual = addresses.first().map_or_else(|| "any".to_owned(), Address::to_string);
    let beside = numbered(&usual);
    iter::once(usual).chain(beside).map(|name| folder().join(format!("{name}.sock"))).collect()
}

/// Returns the folders that control sockets may be in: that of this user, and that of services.
fn folders() -> Vec<PathBuf> {
    let rnbd = bowline_ctl::folders();
    rnbd.iter().filter_map(|folder| folder.parent()).map(Path::to_owned).collect()
}

/// Lists the folders that were searched, and the error of one that could not be read.
pub fn looked_in(folders: &[PathBuf]) -> String {
    let name = |folder: &PathBuf| match fs::read_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            format!("{}: {error}", folder.display())
        }
        _ => folder.display().to_string(),
    };
    folders.iter().map(name).collect::<Vec<_>>().join(" and ")
}

/// Nodes of this user, in the order of their places.
#[derive(Default)]
struct Running {
    /// Those of this network namespace.
    here: Vec<Client>,
    /// Places of the others.
    elsewhere: Vec<PathBuf>,
    /// Places of those that do not answer.
    silent: Vec<PathBuf>,
}

/// What is at a place.
enum Look {
    /// Nobody listens, or nobody that this user may ask.
    Nobody,
    Node(Client, Whose),
    /// Somebody listens, and accepts nobody.
    Silent,
}

fn look_at(path: &Path) -> Look {
    match Client::open_within(path, LOOK_TIMEOUT) {
        Ok(mut client) => {
            let whose = client.whose();
            // If this fails, the wait is shorter at worst.
            let _ = client.tree.set_limit(Some(ANSWER_TIMEOUT));
            Look::Node(client, whose)
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Look::Silent,
        Err(_) => Look::Nobody,
    }
}

fn running() -> Running {
    let entries = folders().into_iter().flat_map(fs::read_dir).flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "sock"));
    paths.sort();
    // Concurrently, so that several that do not answer take no longer than one.
    let looks: Vec<Look> = thread::scope(|scope| {
        let look = |path| thread::Builder::new().spawn_scoped(scope, move || look_at(path));
        let begun: Vec<_> = paths.iter().map(PathBuf::as_path).map(look).collect();
        let end = |look: io::Result<thread::ScopedJoinHandle<'_, Look>>| {
            look.ok().and_then(|look| look.join().ok()).unwrap_or(Look::Silent)
        };
        begun.into_iter().map(end).collect()
    });
    let mut found = Running::default();
    for (path, look) in paths.into_iter().zip(looks) {
        match look {
            Look::Node(client, Whose::Ours) => found.here.push(client),
            Look::Node(_, Whose::Others) => found.elsewhere.push(path),
            Look::Node(_, Whose::Unknown) | Look::Silent => found.silent.push(path),
            Look::Nobody => {}
        }
    }
    found
}

/// Lists places for a message.
pub fn listed<'a>(paths: impl IntoIterator<Item = &'a Path>) -> String {
    let names = paths.into_iter().map(|path| shown(&path.display().to_string()).into_owned());
    names.collect::<Vec<_>>().join(", ")
}

/// Why there is nothing to ask in this network namespace, where there is `something` in another:
/// at these places.
pub fn none_here(something: &str, elsewhere: &[PathBuf]) -> String {
    format!(
        "no {something} runs in this network namespace; start one here, or name the socket of one \
         that runs in another with --control PATH: {}",
        listed(elsewhere.iter().map(PathBuf::as_path))
    )
}

/// The node of this network namespace. One that does not answer is not asked, and others are.
fn only_node() -> Outcome<Client> {
    let Running { mut here, elsewhere, silent } = running();
    // As programs do, which look in this user's folder first. Root may ask nodes of others as well.
    let (own_folder, user) = (folder(), rustix::process::geteuid().as_raw());
    let is_near = |client: &Client| bowline_ctl::folder_of(&client.path) == own_folder;
    let is_own = |client: &Client| fs::metadata(&client.path).is_ok_and(|at| at.uid() == user);
    let nearer: [&dyn Fn(&Client) -> bool; 2] = [&is_near, &is_own];
    for is_nearer in nearer {
        if here.len() > 1 && here.iter().any(is_nearer) {
            here.retain(is_nearer);
        }
    }
    if here.len() > 1 {
        return Err(Failure::failed(format!(
            "several nodes run; choose one with --control PATH: {}",
            listed(here.iter().map(|client| client.path.as_path()))
        )));
    }
    here.pop().ok_or_else(|| {
        Failure::failed(if !silent.is_empty() {
            let silent = listed(silent.iter().map(PathBuf::as_path));
            format!("no node answers here; one runs that does not answer: {silent}")
        } else if !elsewhere.is_empty() {
            none_here("node", &elsewhere)
        } else if let Some(place) = place_of_another() {
            format!(
                "a node of another user serves programs at {}; only that user and root may ask it",
                place.display()
            )
        } else {
            format!(
                "no node runs here (looked in {}); start one with `bowline node` or name its \
                 socket with --control PATH",
                looked_in(&folders())
            )
        })
    })
}

/// Where a node serves programs whose control socket this user does not see.
fn place_of_another() -> Option<PathBuf> {
    let is_closed = |folder: PathBuf| {
        fs::read_dir(folder).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    };
    let place = || programs::reachable(&programs::places()).ok().map(|node| node.place);
    if folders().into_iter().any(is_closed) { place() } else { None }
}
