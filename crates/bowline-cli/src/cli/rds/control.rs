//! The control socket of a running node: JSON lines over a unix socket, version 1.
//!
//! ```text
//! client: {"version":1,"command":"info"}
//! node:   {"version":1,"ok":true,"result":{...}}
//! node:   {"version":1,"ok":false,"error":"..."}
//! ```
//!
//! One request, one answer, any number of times per connection. Commands: `info` (everything
//! `bowline info` shows), `drop` (`peer`: an address, absent for all; cuts TCP connections, RDS
//! reconnects), `sysctl` (`name`, and `value` to change it), `probe` (`local`, `remote`,
//! `timeout_ms`: one RDS ping from the node), `ping` (nothing). The socket file belongs to the
//! user who runs the node and is of no use to others.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::IpAddr,
    os::unix::{
        fs::DirBuilderExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bowline::rds::Node;
use bowline_ctl::{Acceptor, ClientConnection, ClientHandler, ConnectionLimits, OwnedFile};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::snapshot::{self, Snapshot};
use crate::cli::{Failure, Outcome, common::args::Address};

/// Version of the protocol; a change that old programs cannot ignore gets a new number.
pub(crate) const VERSION: u32 = 1;
/// Longest request line, and longest silence of a client.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Most clients at a time, and most of those that have left while something was still done for
/// them.
const CLIENT_LIMITS: ConnectionLimits = ConnectionLimits { active: 16, lingering: 64 };
/// Bounds of the wait for the answer to a probe.
const PROBE_MIN: Duration = Duration::from_millis(1);
const PROBE_MAX: Duration = Duration::from_secs(60);
/// Longest part of it between looks whether the client is still there.
const PROBE_SLICE: Duration = Duration::from_millis(100);
/// Longest wait of a client for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// What a client asks.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Request {
    version: u32,
    #[serde(flatten)]
    command: Command,
}

/// The commands of version 1.
#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "command", rename_all = "lowercase")]
pub(crate) enum Command {
    /// Everything the node knows about itself.
    Info,
    /// Cuts the TCP connections to one peer, or all of them.
    Drop {
        /// Peer, or everyone.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer: Option<IpAddr>,
    },
    /// Reads a setting and, with a value, changes it first.
    Sysctl {
        /// Name as under /proc/sys, with dots.
        name: String,
        /// New value.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        value: Option<i64>,
    },
    /// Sends one RDS ping and waits for the answer.
    Probe {
        /// Address of the node to send from.
        local: Address,
        /// Whom to ask.
        remote: Address,
        /// Longest wait, milliseconds.
        timeout_ms: u64,
    },
    /// Asks whether the node answers.
    Ping,
}

/// What became of a probe.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub(crate) enum Probe {
    /// The answer came.
    Answered {
        /// Round trip, nanoseconds.
        nanos: u64,
    },
    /// It did not.
    Failed {
        /// Why, as an error number of Linux.
        errno: i32,
    },
}

#[derive(Debug, Deserialize, Serialize)]
struct Answer {
    version: u32,
    ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The served control socket; dropping it removes the file.
#[derive(Debug)]
pub(crate) struct Server {
    file: OwnedFile,
    _acceptor: Acceptor,
}

/// A client while it is served.
#[derive(Debug, Default)]
struct ClientState {
    hung_up: AtomicBool,
}

impl ClientState {
    fn hung_up(&self) -> bool {
        // Relaxed: the flag publishes nothing but itself.
        self.hung_up.load(Ordering::Relaxed)
    }
}

impl ClientHandler for ClientState {
    fn hung_up(&self) {
        self.hung_up.store(true, Ordering::Relaxed);
    }

    fn abort(&self) {
        self.hung_up();
    }
}

impl Server {
    /// Binds the socket and answers in the background for as long as the process lives.
    pub(crate) fn start(path: &Path, node: Node, facts: snapshot::NodeFacts) -> Outcome<Self> {
        let (listener, file) = listen(path)?;
        let started = Instant::now();
        let acceptor = Acceptor::open("control", listener, CLIENT_LIMITS, move |connection| {
            let (node, facts) = (node.clone(), facts.clone());
            let client = thread::Builder::new().name("control-client".into());
            // A client that breaks off is its own business, and one for whom there is no thread
            // sees the end.
            _ = client.spawn(move || serve_client(&connection, &node, &facts, started));
        });
        let acceptor = acceptor.map_err(|error| {
            Failure::failed(format!("cannot start the control thread: {error}"))
        })?;
        Ok(Self { file, _acceptor: acceptor })
    }

    /// Returns where the socket is.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.file.remove();
    }
}

fn listen(path: &Path) -> Outcome<(UnixListener, OwnedFile)> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|error| {
            Failure::failed(format!(
                "cannot create {}: {error}; choose another place with --control PATH, or \
                 --no-control",
                dir.display()
            ))
        })?;
    }
    bowline_ctl::listen(path).map_err(|error| {
        Failure::failed(match error.kind() {
            io::ErrorKind::AddrInUse if bowline_ctl::is_socket(path) => format!(
                "another node has {}, or one of another user has left it; stop it, remove the \
                 file, or choose --control PATH",
                path.display()
            ),
            _ => format!(
                "cannot listen on {}: {error}; choose another place with --control PATH",
                path.display()
            ),
        })
    })
}

fn serve_client(
    connection: &ClientConnection,
    node: &Node,
    facts: &snapshot::NodeFacts,
    started: Instant,
) -> io::Result<()> {
    let client_state = Arc::<ClientState>::default();
    let handler: Weak<ClientState> = Arc::downgrade(&client_state);
    connection.set_handler(handler);
    let stream = connection.socket();
    stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
    stream.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    let mut writer = stream;
    loop {
        connection.set_idle(true);
        let mut line = Vec::new();
        let length = (&mut reader).take(REQUEST_BYTES_MAX).read_until(b'\n', &mut line)?;
        if length == 0 {
            return Ok(());
        }
        connection.set_idle(false);
        let complete = line.ends_with(b"\n");
        let result = if complete {
            answer(&line, &client_state, node, facts, started)
        } else {
            Err(format!("a request is one line of at most {REQUEST_BYTES_MAX} bytes"))
        };
        let answer = match result {
            Ok(result) => Answer { version: VERSION, ok: true, result: Some(result), error: None },
            Err(text) => Answer { version: VERSION, ok: false, result: None, error: Some(text) },
        };
        let mut line = serde_json::to_vec(&answer)?;
        line.push(b'\n');
        // One that takes no answers is as one that says nothing.
        connection.set_idle(true);
        writer.write_all(&line)?;
        if !complete {
            return Ok(());
        }
    }
}

fn answer(
    line: &[u8],
    client_state: &ClientState,
    node: &Node,
    facts: &snapshot::NodeFacts,
    started: Instant,
) -> Result<Value, String> {
    #[derive(Deserialize)]
    struct Head {
        version: u32,
    }
    let head: Head = serde_json::from_slice(line)
        .map_err(|error| format!("not a request with a version: {error}"))?;
    if head.version != VERSION {
        let older = if head.version < VERSION { "the client" } else { "the node" };
        return Err(format!(
            "protocol version {} was asked for and {VERSION} is spoken here; {older} is older",
            head.version
        ));
    }
    let request: Request =
        serde_json::from_slice(line).map_err(|error| format!("not a known request: {error}"))?;
    match request.command {
        Command::Info => serde_json::to_value(Snapshot::take(node, facts, started.elapsed()))
            .map_err(|error| error.to_string()),
        Command::Drop { peer } => Ok(serde_json::json!({ "dropped": node.drop_connections(peer) })),
        Command::Sysctl { name, value } => {
            if let Some(value) = value {
                node.set_sysctl(&name, value).map_err(|error| format!("{name}: {error}"))?;
            }
            let value = node.sysctl(&name).map_err(|error| format!("{name}: {error}"))?;
            Ok(serde_json::json!({ "name": name, "value": value }))
        }
        Command::Probe { local, remote, timeout_ms } => {
            let timeout = Duration::from_millis(timeout_ms).clamp(PROBE_MIN, PROBE_MAX);
            let result = match probe(node, client_state, local, remote, timeout) {
                Ok(time) => Probe::Answered { nanos: time.as_nanos() as u64 },
                Err(error) => Probe::Failed { errno: error.errno().0 },
            };
            serde_json::to_value(result).map_err(|error| error.to_string())
        }
        Command::Ping => Ok(serde_json::json!({})),
    }
}

/// Waits for the answer of a peer for as long as somebody wants to know.
fn probe(
    node: &Node,
    client_state: &ClientState,
    local: Address,
    remote: Address,
    timeout: Duration,
) -> Result<Duration, bowline::rds::Error> {
    let socket = node.bind(local.at(0))?;
    let start = Instant::now();
    socket.set_send_timeout(Some(timeout));
    socket.send_to(&[], remote.at(0))?;
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        socket.set_recv_timeout(Some(left.min(PROBE_SLICE)));
        match socket.recv_from(&mut []) {
            Ok(_) => return Ok(start.elapsed()),
            Err(error) if error.is_timed_out() && left > PROBE_SLICE && !client_state.hung_up() => {
            }
            Err(error) => return Err(error),
        }
    }
}

/// A connection to a running node.
#[derive(Debug)]
pub(crate) struct Client {
    path: PathBuf,
    reader: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the node behind `path`, or to the only one that runs here.
    pub(crate) fn connect(path: Option<&Path>) -> Outcome<Self> {
        let (path, stream) = match path {
            Some(path) => match UnixStream::connect(path) {
                Ok(stream) => (path.to_owned(), stream),
                Err(error) => {
                    return Err(Failure::failed(format!(
                        "no node answers on {}: {error}; is `bowline node` running?",
                        path.display()
                    )));
                }
            },
            None => only_node()?,
        };
        Ok(Self::new(path, stream))
    }

    fn new(path: PathBuf, stream: UnixStream) -> Self {
        // A failure shows up as a wait without end at worst; the user can interrupt it.
        let _ = stream.set_read_timeout(Some(ANSWER_TIMEOUT));
        Self { path, reader: BufReader::new(stream) }
    }

    /// Sends a command and returns its result.
    pub(crate) fn ask(&mut self, command: Command) -> Outcome<Value> {
        let path = self.path.display().to_string();
        let lost = |error: &dyn std::fmt::Display| {
            Failure::failed(format!("the node on {path} broke off: {error}; look at its output"))
        };
        let request = Request { version: VERSION, command };
        let mut line = serde_json::to_vec(&request).map_err(|error| lost(&error))?;
        line.push(b'\n');
        self.reader.get_mut().write_all(&line).map_err(|error| lost(&error))?;
        let mut line = String::new();
        if self.reader.read_line(&mut line).map_err(|error| lost(&error))? == 0 {
            return Err(lost(&"end of the connection"));
        }
        let answer: Answer = serde_json::from_str(&line).map_err(|error| lost(&error))?;
        match (answer.ok, answer.result, answer.error) {
            (true, Some(result), _) => Ok(result),
            (_, _, Some(text)) => Err(Failure::Failed(text)),
            _ => Err(lost(&"an answer without a result")),
        }
    }

    /// Connects to the node that serves this address, if one does.
    pub(crate) fn of_address(address: Address) -> Option<Self> {
        let mut running = running();
        running.sort_by(|(a, _), (b, _)| a.cmp(b));
        running.into_iter().map(|(path, stream)| Self::new(path, stream)).find_map(|mut client| {
            let addresses = client.snapshot().ok()?.node.addresses;
            (addresses.is_empty() || addresses.contains(&address)).then_some(client)
        })
    }

    /// Lets the node send one RDS ping.
    pub(crate) fn probe(
        &mut self,
        local: Address,
        remote: Address,
        timeout: Duration,
    ) -> Outcome<Probe> {
        let patience = timeout.min(PROBE_MAX) + ANSWER_TIMEOUT;
        // As in new(): without it the wait is longer at worst.
        let _ = self.reader.get_ref().set_read_timeout(Some(patience));
        let timeout_ms = timeout.as_millis() as u64;
        let result = self.ask(Command::Probe { local, remote, timeout_ms })?;
        serde_json::from_value(result)
            .map_err(|error| Failure::failed(format!("the node answers in another way: {error}")))
    }

    /// Asks for everything the node knows about itself.
    pub(crate) fn snapshot(&mut self) -> Outcome<Snapshot> {
        let result = self.ask(Command::Info)?;
        serde_json::from_value(result).map_err(|error| {
            Failure::failed(format!("the node answers in another way: {error}; update the older"))
        })
    }
}

/// Returns the folder of the control sockets that this process makes.
pub(crate) fn folder() -> PathBuf {
    folders().into_iter().next().unwrap_or_default()
}

/// Returns the default place of the control socket of a node with these addresses.
pub(crate) fn default_path(addresses: &[Address]) -> PathBuf {
    let name = addresses.first().map_or_else(|| "any".to_owned(), Address::to_string);
    folder().join(format!("{name}.sock"))
}

/// Returns the folders that control sockets may be in: that of this user, and that of services.
fn folders() -> Vec<PathBuf> {
    let rnbd = bowline_ctl::folders();
    rnbd.iter().filter_map(|folder| folder.parent()).map(Path::to_owned).collect()
}

/// Names folders that were looked at, and why one could not be.
pub(crate) fn looked_in(folders: &[PathBuf]) -> String {
    let name = |folder: &PathBuf| match fs::read_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            format!("{}: {error}", folder.display())
        }
        _ => folder.display().to_string(),
    };
    folders.iter().map(name).collect::<Vec<_>>().join(" and ")
}

/// Returns every node of this user that answers.
fn running() -> Vec<(PathBuf, UnixStream)> {
    let mut found = Vec::new();
    for entries in folders().into_iter().flat_map(fs::read_dir) {
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|extension| extension == "sock")
                && let Ok(stream) = UnixStream::connect(&path)
            {
                found.push((path, stream));
            }
        }
    }
    found
}

fn only_node() -> Outcome<(PathBuf, UnixStream)> {
    let mut found = running();
    let mut names: Vec<String> = found.iter().map(|(path, _)| path.display().to_string()).collect();
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (Some(_), false) => {
            names.sort();
            Err(Failure::failed(format!(
                "several nodes run; choose one with --control PATH: {}",
                names.join(", ")
            )))
        }
        (None, _) => Err(Failure::failed(format!(
            "no node runs here (looked in {}); start one with `bowline node` or name its socket \
             with --control PATH",
            looked_in(&folders())
        ))),
    }
}
