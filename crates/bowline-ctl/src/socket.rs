//! The control socket of a process, which serves its tree: JSON lines over a unix socket, version
//! 1. RDS nodes, exports and clients of disks have this one server.
//!
//! ```text
//! client: {"version":1,"op":"read","path":"/class/rtrs-client/s1/mpath_policy"}
//! server: {"ok":"min-inflight (MI: 1)"}
//! client: {"version":1,"op":"write","path":"/block/rnbd0/rnbd/unmap_device","value":"normal"}
//! server: {"errno":16,"error":"Device or resource busy"}
//! client: {"version":2,"op":"fly"}
//! server: {"version":1,"ok":false,"errno":22,"error":"version 2 was asked for and ..."}
//! ```
//!
//! A process that serves something beside the tree may be asked by another one for its place, with
//! the operation `replace` and what the other one wants as the value; after the answer, both use
//! the connection for what they have to say ([`Successor`]).
//!
//! One request, one answer, any number of times per connection. Operations: `read` (the value, as
//! [`Value::to_json`](crate::Value::to_json)), `text` (the exact text of the file), `write` (the
//! result of the command, or `null`), `list` (an array of objects with `name` and `mode`, `link` or
//! neither), `dump` (everything below a directory). A request without a version means version 1. An
//! answer with a version means that the line was no request of the server's version. The socket
//! file belongs to the user who runs the server; other users cannot connect.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::DirBuilderExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak, mpsc::Sender},
    thread,
    time::Duration,
};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

use crate::{
    Acceptor, Caller, ClientConnection, ClientHandler, ConnectionLimits, Errno, Json, OwnedFile,
    Tree, Value, is_socket,
    listen::{SYSTEM_RUN_DIR, folder_of, refuse_unsafe_folder, run_folder},
    tree::{Entry, Kind, Refused},
};

/// Name of the folder of control sockets.
const FOLDER: &str = "rnbd";
/// Version of the protocol; a change that old programs cannot ignore gets a new number.
const VERSION: i64 = 1;
/// Longest request line.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Longest time that a client may be idle between two requests.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Most active clients, and most clients that are gone with a command still in progress.
const LIMITS: ConnectionLimits = ConnectionLimits { active: 16, lingering: 64 };
/// How long the end of a server waits for answers to requests in progress.
const END_WAIT: Duration = Duration::from_secs(2);
/// Longest answer that a client accepts, in bytes, unless it is told otherwise.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Returns the folder of the control sockets of this user: [`run_folder`] `rnbd`.
pub fn folder() -> PathBuf {
    run_folder(FOLDER)
}

/// Returns all folders in which there may be control sockets for this user: the user's folder, and
/// that of services, which have no `$XDG_RUNTIME_DIR`.
pub fn folders() -> Vec<PathBuf> {
    let mut all = vec![folder(), Path::new(SYSTEM_RUN_DIR).join("bowline").join(FOLDER)];
    all.dedup();
    all
}

/// A process that asks to continue in the place of this one.
#[derive(Debug)]
pub struct Successor {
    /// Its connection. It waits for an [`answer`](Self::answer).
    pub stream: Arc<UnixStream>,
    /// What it wants.
    pub wants: String,
}

impl Successor {
    /// Answers: with `Ok`, this process is about to leave its place to the other one, and both use
    /// the connection for that; otherwise why it does not.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn answer(&self, answer: Result<(), (Errno, &str)>) -> io::Result<()> {
        let answer = match answer {
            Ok(()) => Json::Object(vec![("ok".to_owned(), Json::Null)]),
            Err((errno, text)) => failed(errno, text),
        };
        (&*self.stream).write_all(format!("{answer}\n").as_bytes())
    }
}

/// Asks the process behind a control socket to leave its place to this one. Returns the connection,
/// for what both have to say, or why that process does not.
///
/// # Errors
/// Those of connecting; `TimedOut` after `limit`; `InvalidData` for an invalid answer: the
/// other process cannot be replaced.
pub fn ask_to_replace(
    path: &Path,
    wants: &str,
    limit: Duration,
) -> io::Result<Result<UnixStream, (Errno, String)>> {
    let mut client = Client::connect_within(path, limit)?;
    client.send("replace", "/", Some(wants))?;
    let answer = client.receive()?;
    let text = answer.member("error").and_then(Json::as_str).unwrap_or_default().to_owned();
    match result(answer)? {
        // The other one says nothing more before it is asked to, so nothing is lost in the reader.
        Ok(_) => Ok(Ok(client.reader.into_inner())),
        Err(errno) => Ok(Err((errno, text))),
    }
}

/// A served control socket. Dropping it ends the service and removes the file, unless another
/// process has replaced it or it is that of a [`Place`](crate::Place). Requests in progress are
/// answered first, unless that takes more than two seconds; then all clients are disconnected, so
/// that nobody has the tree any more.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    /// The socket's file, where it goes with the service.
    file: Option<OwnedFile>,
    acceptor: Acceptor,
    in_progress: Arc<RequestsInProgress>,
}

/// Requests that were read and not answered yet.
#[derive(Debug, Default)]
struct RequestsInProgress {
    count: Mutex<usize>,
    ended: Condvar,
}

impl RequestsInProgress {
    fn change(&self, change: impl FnOnce(&mut usize)) {
        change(&mut self.count.lock().unwrap_or_else(PoisonError::into_inner));
        self.ended.notify_all();
    }

    /// Counts a request until the returned guard is dropped.
    fn begin(&self) -> impl Drop {
        struct Counted<'a>(&'a RequestsInProgress);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.change(|count| *count -= 1);
            }
        }
        self.change(|count| *count += 1);
        Counted(self)
    }

    fn wait(&self) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        // The server ends whether all were answered or time was up.
        drop(self.ended.wait_timeout_while(count, END_WAIT, |count| *count > 0));
    }
}

impl Server {
    /// Binds the socket and answers requests in its own threads. Missing folders are created, for
    /// this user only; a socket that no process listens at is replaced.
    ///
    /// # Errors
    ///
    /// `AddrInUse` when another process listens there, and the errors of creating the file.
    pub fn start(path: &Path, tree: Tree) -> io::Result<Self> {
        Self::start_with(path, tree, None)
    }

    /// As [`start`](Self::start); processes that ask to continue in the place of this one are sent
    /// to `successors`.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub fn start_replaceable(
        path: &Path,
        tree: Tree,
        successors: Sender<Successor>,
    ) -> io::Result<Self> {
        Self::start_with(path, tree, Some(successors))
    }

    fn start_with(
        path: &Path,
        tree: Tree,
        successors: Option<Sender<Successor>>,
    ) -> io::Result<Self> {
        let (listener, file) = listen(path)?;
        let mut server = Self::at(listener, path.to_owned(), tree, successors)?;
        server.file = Some(file);
        Ok(server)
    }

    /// Answers requests at a socket that listens at a path, in its own threads.
    pub(crate) fn at(
        listener: UnixListener,
        path: PathBuf,
        tree: Tree,
        successors: Option<Sender<Successor>>,
    ) -> io::Result<Self> {
        let in_progress = Arc::<RequestsInProgress>::default();
        let counts = Arc::clone(&in_progress);
        let acceptor = Acceptor::open("bowline-ctl", listener, LIMITS, move |connection| {
            let (tree, in_progress) = (tree.clone(), Arc::clone(&counts));
            let successors = successors.clone();
            let client = thread::Builder::new().name("bowline-ctl-client".into());
            // Errors of one client end its connection only, and so does the lack of a thread.
            _ = client
                .spawn(move || serve_client(&connection, &tree, &in_progress, successors.as_ref()));
        })?;
        Ok(Self { path, file: None, acceptor, in_progress })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
        self.acceptor.close();
        self.in_progress.wait();
        self.acceptor.abort_all();
    }
}

/// Creates the folder of a socket, for this user only, if it does not exist.
///
/// # Errors
///
/// `PermissionDenied` where other users could replace the socket; errors of creating the folder.
pub fn create_folder_of(path: &Path) -> io::Result<()> {
    let folder = folder_of(path);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    refuse_unsafe_folder(folder)
}

fn listen(path: &Path) -> io::Result<(UnixListener, OwnedFile)> {
    create_folder_of(path)?;
    crate::listen(path).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse if is_socket(path) => {
            io::Error::new(error.kind(), "another process has this control socket")
        }
        _ => error,
    })
}

/// Connects, and waits at most `limit` if the backlog of the socket is full.
pub(crate) fn stream_within(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
    let to = SocketAddrUnix::new(path)?;
    rustix::io::retry_on_intr(|| connect(&socket, &to))
        .map_err(|error| name_timeout(error.into()))?;
    Ok(socket.into())
}

/// Converts `WouldBlock`, by which a socket timeout ends, to `TimedOut`.
fn name_timeout(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::from_raw_os_error(Errno::ETIMEDOUT.0),
        _ => error,
    }
}

impl ClientHandler for Caller {
    fn hung_up(&self) {
        self.leave();
    }

    /// Commands that change something continue all the same.
    fn abort(&self) {
        self.leave();
    }
}

fn serve_client(
    connection: &ClientConnection,
    tree: &Tree,
    in_progress: &RequestsInProgress,
    successors: Option<&Sender<Successor>>,
) -> io::Result<()> {
    let caller = Arc::<Caller>::default();
    let handler: Weak<Caller> = Arc::downgrade(&caller);
    connection.set_handler(handler);
    let mut stream = connection.socket();
    stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
    stream.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    loop {
        connection.set_idle(true);
        let mut line = Vec::new();
        let length = (&mut reader).take(REQUEST_BYTES_MAX).read_until(b'\n', &mut line)?;
        if length == 0 {
            return Ok(());
        }
        connection.set_idle(false);
        let _counted = in_progress.begin();
        let complete = line.ends_with(b"\n");
        let text = std::str::from_utf8(&line);
        if let Ok(line) = text
            && complete
            && let Some((to, wants)) = wish(line, successors)
        {
            // From here on the connection is not ended with the service.
            let stream = connection.forget();
            // The receiver is gone at the end of the process.
            let _ = to.send(Successor { stream, wants });
            return Ok(());
        }
        let answer = match text {
            Ok(line) if complete => answer(line, tree, &caller),
            Ok(_) => refusal("a request must be one line of at most 65536 bytes"),
            Err(_) => refusal("a request must be UTF-8"),
        };
        // A client that does not read its answer counts as idle.
        connection.set_idle(true);
        stream.write_all(format!("{answer}\n").as_bytes())?;
        if !complete {
            return Ok(());
        }
    }
}

/// Returns what a process wants that asks to continue in the place of this one, and whom to tell.
fn wish<'a>(
    line: &str,
    successors: Option<&'a Sender<Successor>>,
) -> Option<(&'a Sender<Successor>, String)> {
    let to = successors?;
    let request = Json::parse(line).ok()?;
    let is_ours = request.member("version").and_then(Json::as_i64) == Some(VERSION)
        && request.member("op").and_then(Json::as_str) == Some("replace");
    let wants = request.member("value").and_then(Json::as_str).filter(|_| is_ours)?;
    Some((to, wants.to_owned()))
}

/// Returns the answer to a line that is no request of this version, which clients see by the member
/// `version`. The member `ok` is for clients older than the common protocol, which print the text
/// of an answer that is not `ok`.
fn refusal(text: &str) -> Json {
    Json::Object(vec![
        ("version".to_owned(), Json::Int(VERSION)),
        ("ok".to_owned(), Json::Bool(false)),
        ("errno".to_owned(), Json::Int(Errno::EINVAL.0.into())),
        ("error".to_owned(), Json::Text(text.to_owned())),
    ])
}

fn answer(line: &str, tree: &Tree, caller: &Caller) -> Json {
    let request = match Json::parse(line) {
        Ok(request) => request,
        Err(error) => return refusal(&format!("not a request: {error}")),
    };
    if let Some(version) = request.member("version") {
        let Some(version) = version.as_i64() else {
            return refusal("the version of a request must be a number");
        };
        if version != VERSION {
            let older = if version < VERSION { "client" } else { "server" };
            return refusal(&format!(
                "the request has version {version}, this process {VERSION}: update the {older}"
            ));
        }
    }
    let text = |name| request.member(name).and_then(Json::as_str);
    let (Some(op), Some(path)) = (text("op"), text("path")) else {
        return refusal(
            "a request must have the members op and path; if bowline sent this, it is older",
        );
    };
    let result = match op {
        "read" => tree.read(path).map(|value| value.to_json()),
        "text" => tree.read(path).map(|value| Json::Text(value.to_string())),
        "list" => tree.list(path).map(|all| Json::List(all.into_iter().map(entry_json).collect())),
        "dump" => tree.dump(path),
        "write" => match text("value") {
            Some(value) => {
                let found_out = tree.call(path, value, caller);
                found_out.map(|value| value.as_ref().map_or(Json::Null, Value::to_json))
            }
            None => return refusal("op write needs the member value"),
        },
        _ => return refusal("op must be read, text, write, list or dump"),
    };
    match result {
        Ok(value) => Json::Object(vec![("ok".to_owned(), value)]),
        Err(errno) => failed(errno, &caller.take_explanation().unwrap_or_else(|| errno.strerror())),
    }
}

fn failed(errno: Errno, text: &str) -> Json {
    Json::Object(vec![
        ("errno".to_owned(), Json::Int(errno.0.into())),
        ("error".to_owned(), Json::Text(text.to_owned())),
    ])
}

fn entry_json(entry: Entry) -> Json {
    let mut members = vec![("name".to_owned(), Json::Text(entry.name))];
    match entry.kind {
        Kind::Dir => {}
        Kind::Attr(mode) => members.push(("mode".to_owned(), Json::Text(format!("{mode:04o}")))),
        Kind::Link(target) => members.push(("link".to_owned(), Json::Text(target))),
    }
    Json::Object(members)
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Op<'a> {
    /// The value of an attribute.
    Read,
    /// The exact text of an attribute.
    Text,
    /// The entries of a directory.
    List,
    /// Everything below a directory.
    Dump,
    /// Writes this value, which carries out a command. The answer is the result of the command, or
    /// `null`.
    Write(&'a str),
}

/// The answer of a server to a request.
pub type Answer = Result<Json, Errno>;

/// A connection to a served tree.
#[derive(Debug)]
pub struct Client {
    reader: BufReader<UnixStream>,
    answer_bytes_max: u64,
}

impl Client {
    /// Connects to the server behind a socket.
    ///
    /// # Errors
    ///
    /// The errors of connecting.
    pub fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self::new(UnixStream::connect(path)?))
    }

    /// Connects to the server behind a socket; waits at most `limit` for this, and for each answer.
    ///
    /// # Errors
    ///
    /// The errors of connecting, `TimedOut` among them.
    pub fn connect_within(path: &Path, limit: Duration) -> io::Result<Self> {
        let mut client = Self::new(stream_within(path, limit)?);
        client.set_limit(Some(limit))?;
        Ok(client)
    }

    fn new(stream: UnixStream) -> Self {
        Self { reader: BufReader::new(stream), answer_bytes_max: ANSWER_BYTES_MAX }
    }

    /// Sets the length in bytes of the longest answer that is accepted; 64 MiB at first.
    pub fn set_answer_bytes_max(&mut self, bytes: u64) {
        self.answer_bytes_max = bytes;
    }

    /// Sets the longest wait for an answer; without one, commands may take any time.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for a limit of zero.
    pub fn set_limit(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let stream = self.reader.get_ref();
        stream.set_read_timeout(limit)?;
        stream.set_write_timeout(limit)
    }

    /// Sends a request and waits for the answer. After a timeout the client must not be used any
    /// more, since the late answer would be taken for that of the next request.
    ///
    /// # Errors
    ///
    /// Outer: the connection broke, no answer came within the limit (`TimedOut`), or the answer is
    /// invalid (`InvalidData`), as that of a server with another protocol. Inner: the server's
    /// errno.
    pub fn ask(&mut self, op: Op<'_>, path: &str) -> io::Result<Answer> {
        Ok(self.ask_why(op, path)?.map_err(|refused| refused.errno))
    }

    /// As [`ask`](Self::ask); the inner error has the server's explanation, if there is one.
    ///
    /// # Errors
    ///
    /// Those of [`ask`](Self::ask).
    pub fn ask_why(&mut self, op: Op<'_>, path: &str) -> io::Result<Result<Json, Refused>> {
        let name = match op {
            Op::Read => "read",
            Op::Text => "text",
            Op::List => "list",
            Op::Dump => "dump",
            Op::Write(_) => "write",
        };
        let value = if let Op::Write(value) = op { Some(value) } else { None };
        self.send(name, path, value)?;
        let answer = self.receive()?;
        let text = answer.member("error").and_then(Json::as_str).map(str::to_owned);
        let refused = |errno: Errno| {
            let why = text.filter(|text| *text != errno.strerror());
            Refused { errno, why }
        };
        Ok(result(answer)?.map_err(refused))
    }

    fn send(&mut self, op: &str, path: &str, value: Option<&str>) -> io::Result<()> {
        let mut members = vec![
            ("version".to_owned(), Json::Int(VERSION)),
            ("op".to_owned(), Json::Text(op.to_owned())),
            ("path".to_owned(), Json::Text(path.to_owned())),
        ];
        members.extend(value.map(|value| ("value".to_owned(), Json::Text(value.to_owned()))));
        let line = format!("{}\n", Json::Object(members));
        self.reader.get_mut().write_all(line.as_bytes()).map_err(name_timeout)
    }

    fn receive(&mut self) -> io::Result<Json> {
        let mut line = String::new();
        let length = (&mut self.reader).take(self.answer_bytes_max).read_line(&mut line);
        if length.map_err(name_timeout)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Json::parse(line.trim_end())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

/// Distinguishes results and errors of the tree from the answer to a request of another version.
fn result(answer: Json) -> io::Result<Answer> {
    let refusal = answer.member("error").and_then(Json::as_str).unwrap_or("no result").to_owned();
    if answer.member("version").is_none() {
        let errno = answer.member("errno").and_then(Json::as_i64);
        if let Some(errno) = errno.and_then(|errno| i32::try_from(errno).ok()) {
            return Ok(Err(Errno(errno)));
        }
        if let Some(value) = answer.into_member("ok") {
            return Ok(Ok(value));
        }
    }
    let text = format!("it speaks another protocol: {refusal}");
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::{AttrDef, Errno, Node, tree::tests::toy_tree};

    fn place(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("bowline-ctl-{}-{name}", std::process::id())).join("s")
    }

    #[test]
    fn a_client_reads_writes_lists_and_dumps() {
        let path = place("ops");
        let server = Server::start(&path, toy_tree()).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut client = Client::connect(server.path()).unwrap();
        let mut ask = |op, path| client.ask(op, path).unwrap();
        assert_eq!(ask(Op::Write("9\n"), "/class/toy/level"), Ok(Json::Null));
        assert_eq!(ask(Op::Read, "/devices/toy0/level"), Ok(Json::Int(9)));
        assert_eq!(ask(Op::Text, "/devices/toy0/level"), Ok(Json::Text("9\n".to_owned())));
        assert_eq!(ask(Op::Write("x"), "/class/toy/level"), Err(Errno::EINVAL));
        assert_eq!(ask(Op::Read, "/nothing"), Err(Errno::ENOENT));
        assert_eq!(
            ask(Op::List, "/devices/toy0").unwrap().to_string(),
            r#"[{"name":"level","mode":"0644"},{"name":"kind","mode":"0444"},{"name":"reset","mode":"0200"},{"name":"help","mode":"0644"}]"#
        );
        assert!(ask(Op::Dump, "/").unwrap().to_string().contains(r#""link":"../devices/toy0""#));
        drop(server);
        assert!(!path.exists());
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    struct Explains;

    impl Node for Explains {
        fn attrs(&self) -> &'static [AttrDef] {
            &[AttrDef { name: "set", mode: 0o200 }]
        }

        fn call(&self, _: &str, value: &str, caller: &Caller) -> Result<Option<Value>, Errno> {
            if value == "why" {
                caller.explain("it has a reason".to_owned());
            }
            Err(Errno::EBUSY)
        }
    }

    #[test]
    fn a_command_that_fails_may_explain_why() {
        let path = place("why");
        let server = Server::start(&path, Tree::new(Arc::new(Explains))).unwrap();
        let mut client = Client::connect(server.path()).unwrap();
        for (value, why) in [("why", Some("it has a reason")), ("", None)] {
            let refused = client.ask_why(Op::Write(value), "/set").unwrap().unwrap_err();
            assert_eq!((refused.errno, refused.why.as_deref()), (Errno::EBUSY, why));
        }
        drop(server);
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_successor_keeps_its_connection_when_the_service_ends() {
        let path = place("next");
        let limit = Duration::from_secs(10);
        let server = Server::start(&path, toy_tree()).unwrap();
        // As one of an older version answers.
        let error = ask_to_replace(&path, "all", limit).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(server);
        let (successors, asking) = std::sync::mpsc::channel();
        let server = Server::start_replaceable(&path, toy_tree(), successors).unwrap();
        let ask = |wants: &'static str| {
            let path = path.clone();
            thread::spawn(move || ask_to_replace(&path, wants, limit).unwrap())
        };
        let refused = ask("nothing");
        let wants = asking.recv().unwrap();
        assert_eq!(wants.wants, "nothing");
        wants.answer(Err((Errno::EBUSY, "not now"))).unwrap();
        let refused = refused.join().unwrap().map(drop);
        assert_eq!(refused, Err((Errno::EBUSY, "not now".to_owned())));

        let next = ask("all");
        let former = asking.recv().unwrap();
        former.answer(Ok(())).unwrap();
        let mut next = next.join().unwrap().unwrap();
        drop(server);
        (&*former.stream).write_all(b"everything").unwrap();
        let mut all = [0; 10];
        next.read_exact(&mut all).unwrap();
        assert_eq!(&all, b"everything");
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn one_server_per_socket_and_dead_ones_are_replaced() {
        let path = place("twice");
        let server = Server::start(&path, toy_tree()).unwrap();
        let error = Server::start(&path, toy_tree()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(server);
        // A socket file that no process listens at, as kill -9 leaves it.
        drop(UnixListener::bind(&path).unwrap());
        let server = Server::start(&path, toy_tree()).unwrap();
        assert!(Client::connect(&path).is_ok());
        // A file that has replaced the socket stays.
        fs::remove_file(&path).unwrap();
        let other = Server::start(&path, toy_tree()).unwrap();
        drop(server);
        assert!(Client::connect(&path).is_ok());
        drop(other);
        assert!(!path.exists());
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    /// A command that waits until the test releases it.
    struct Slow(Mutex<std::sync::mpsc::Receiver<()>>);

    impl Node for Slow {
        fn attrs(&self) -> &'static [AttrDef] {
            const { &[AttrDef { name: "go", mode: 0o200 }] }
        }

        fn write(&self, _: &str, _: &str) -> Result<(), Errno> {
            self.0.lock().unwrap().recv().map_err(|_| Errno::EIO)
        }
    }

    #[test]
    fn the_end_of_a_service_waits_for_answers() {
        let path = place("end");
        let (go, tree) = slow();
        let server = Server::start(&path, tree).unwrap();
        let in_progress = Arc::clone(&server.in_progress);
        let asked = {
            let mut client = Client::connect(&path).unwrap();
            thread::spawn(move || client.ask(Op::Write("1"), "/go"))
        };
        while *in_progress.count.lock().unwrap() == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        let ended = thread::spawn(move || drop(server));
        thread::sleep(Duration::from_millis(100));
        assert!(!ended.is_finished(), "a request is under way");
        go.send(()).unwrap();
        ended.join().unwrap();
        assert_eq!(*in_progress.count.lock().unwrap(), 0);
        assert_eq!(asked.join().unwrap().unwrap(), Ok(Json::Null));
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn the_end_of_a_service_disconnects_clients() {
        let path = place("clients");
        let (_go, tree) = slow();
        let server = Server::start(&path, tree).unwrap();
        let mut client = Client::connect(&path).unwrap();
        assert!(client.ask(Op::List, "/").is_ok());
        drop(server);
        assert!(client.ask(Op::List, "/").is_err(), "nobody answers");
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    /// A tree with a command `/go` that waits until the test releases it.
    fn slow() -> (Sender<()>, Tree) {
        let (go, slow) = std::sync::mpsc::channel();
        (go, Tree::new(Arc::new(Slow(Mutex::new(slow)))))
    }

    #[test]
    fn clients_that_say_nothing_or_have_left_keep_nobody_out() {
        let path = place("places");
        let (go, tree) = slow();
        let server = Server::start(&path, tree).unwrap();
        let mut all: Vec<_> = (0..LIMITS.active).map(|_| Client::connect(&path).unwrap()).collect();
        let ask = || Client::connect(&path).unwrap().ask(Op::List, "/").unwrap();
        assert!(ask().is_ok(), "one that says nothing makes way");
        all.clear();
        for _ in 0..LIMITS.active {
            let mut client = Client::connect(&path).unwrap();
            client
                .reader
                .get_mut()
                .write_all(b"{\"op\":\"write\",\"path\":\"/go\",\"value\":\"1\"}\n")
                .unwrap();
        }
        let in_progress = Arc::clone(&server.in_progress);
        while *in_progress.count.lock().unwrap() < LIMITS.active {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(ask().is_ok(), "their commands go on, and their places are free");
        drop(go);
        drop(server);
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn who_does_not_answer_is_waited_for_as_long_as_was_said() {
        const LIMIT: Duration = Duration::from_millis(50);
        let path = place("silent");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // The server accepts, and never answers.
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = Client::connect_within(&path, LIMIT).unwrap();
        let accepted = listener.accept().unwrap();
        let error = client.ask(Op::Dump, "/").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop((client, accepted));
        // The server never accepts: the backlog takes some connections, and then no more.
        rustix::net::listen(&listener, 1).unwrap();
        let waiting: Vec<io::Result<Client>> =
            (0..4).map(|_| Client::connect_within(&path, LIMIT)).collect();
        let error = waiting.last().unwrap().as_ref().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // The process is alive, so its socket is not replaced.
        let error = Server::start(&path, toy_tree()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop((waiting, listener));
        fs::remove_file(&path).unwrap();
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn without_a_limit_an_answer_may_take_its_time() {
        let path = place("slow");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        let slow = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            thread::sleep(Duration::from_millis(200));
            stream.write_all(b"{\"ok\":null}\n").unwrap();
        });
        let mut client = Client::connect_within(&path, Duration::from_millis(50)).unwrap();
        client.set_limit(None).unwrap();
        assert_eq!(client.ask(Op::Write("1"), "/x").unwrap(), Ok(Json::Null));
        slow.join().unwrap();
        fs::remove_file(&path).unwrap();
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn requests_that_make_no_sense_are_refused() {
        let tree = toy_tree();
        for line in [
            "",
            "x",
            "{}",
            r#"{"op":"read"}"#,
            r#"{"op":"eat","path":"/"}"#,
            r#"{"op":"write","path":"/devices/toy0/level"}"#,
            r#"{"op":"read","path":7}"#,
            r#"{"version":2,"op":"read","path":"/devices/toy0/level"}"#,
            r#"{"version":"1","op":"read","path":"/devices/toy0/level"}"#,
        ] {
            let answer = answer(line, &tree, &Caller::default());
            assert_eq!(answer.member("errno"), Some(&Json::Int(22)), "{line}: {answer}");
        }
        let ask = |line| answer(line, &tree, &Caller::default()).to_string();
        assert_eq!(ask(r#"{"op":"read","path":"/devices/toy0/kind"}"#), r#"{"ok":"toy"}"#);
        assert_eq!(
            ask(r#"{"op":"read","path":"/x"}"#),
            r#"{"errno":2,"error":"No such file or directory"}"#
        );
    }

    /// A bowline of before RDS nodes had a tree asks as the first line does, and expects an answer
    /// of the form of the second.
    #[test]
    fn another_protocol_is_told_of_at_both_ends() {
        let answer = answer(r#"{"version":1,"command":"info"}"#, &toy_tree(), &Caller::default());
        assert_eq!(answer.member("version"), Some(&Json::Int(1)));
        assert_eq!(answer.member("ok"), Some(&Json::Bool(false)));
        let text = answer.member("error").and_then(Json::as_str);
        assert!(text.is_some_and(|text| text.contains("older")), "{answer}");

        let path = place("other");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        for old in [
            r#"{"version":1,"ok":false,"error":"not a known request: missing field `command`"}"#,
            r#"{"version":1,"result":{}}"#,
            "7",
        ] {
            let mut client = Client::connect(&path).unwrap();
            let (mut node, _) = listener.accept().unwrap();
            node.write_all(format!("{old}\n").as_bytes()).unwrap();
            let error = client.ask(Op::Read, "/").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains("it speaks another protocol: n"), "{error}");
        }
        fs::remove_file(&path).unwrap();
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    /// A command that finds out who has left: it ends when its caller has.
    struct Patient(Mutex<Sender<()>>);

    impl Node for Patient {
        fn attrs(&self) -> &'static [AttrDef] {
            const { &[AttrDef { name: "ask", mode: 0o200 }] }
        }

        fn call(&self, _: &str, value: &str, caller: &Caller) -> Result<Option<Value>, Errno> {
            if value == "now" {
                return Ok(Some(Value::Uint(7)));
            }
            while !caller.is_gone() {
                thread::sleep(Duration::from_millis(1));
            }
            self.0.lock().unwrap().send(()).map_err(|_| Errno::EIO)?;
            Err(Errno::ETIMEDOUT)
        }
    }

    #[test]
    fn a_command_answers_and_learns_that_its_caller_has_left() {
        let path = place("call");
        let (ended, end) = std::sync::mpsc::channel();
        let tree = Tree::new(Arc::new(Patient(Mutex::new(ended))));
        let server = Server::start(&path, tree).unwrap();
        let mut client = Client::connect(&path).unwrap();
        assert_eq!(client.ask(Op::Write("now"), "/ask").unwrap(), Ok(Json::Int(7)));
        let line = r#"{"op":"write","path":"/ask","value":"later"}"#;
        client.reader.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        while *server.in_progress.count.lock().unwrap() == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(end.try_recv().is_err(), "somebody waits for it");
        drop(client);
        end.recv_timeout(Duration::from_secs(60)).expect("nobody waits for it");
        drop(server);
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn an_answer_may_be_as_long_as_the_client_says() {
        let path = place("long");
        let server = Server::start(&path, toy_tree()).unwrap();
        for (bytes, fits) in [(13, true), (12, true), (11, false)] {
            let mut client = Client::connect(&path).unwrap();
            client.set_answer_bytes_max(bytes);
            // {"ok":"toy"} and the end of the line.
            let answer = client.ask(Op::Read, "/devices/toy0/kind");
            assert_eq!(answer.is_ok(), fits, "{bytes}: {answer:?}");
        }
        drop(server);
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }
}
