//! A disk behind a unix socket that speaks NBD: fixed newstyle handshake, simple,
//! structured or extended replies.
//!
//! ```text
//!   bowline-nbd      lets clients in, as long as there are places, and notices who hangs up
//!   bowline-nbd-in   one for each connection: requests off the socket, data to registered memory,
//!                    all that is there submitted together; while requests are in flight, the
//!                    disk's answers too, if no other thread takes these
//!   that thread      DiskDone: replies to the socket, as far as it takes them   (no hand-over)
//!   bowline-nbd-out  one for each connection: the rest, when the client reads slowly
//! ```
//!
//! Clients may ask which ranges are allocated (`base:allocation`). The answer is what
//! [`BlockDevice::extent`] says: holes of local files and memory. A disk of another machine is
//! reported as allocated, since RNBD has no request that would tell.
//!
//! Spec: `docs/spec/rnbd.md`, NB-53; the protocol is NBD's own `doc/proto.md`.

mod check;
mod connection;
mod contexts;
mod faults;
mod hand_over;
mod handshake;
mod output;
mod reply;
mod requests;
#[cfg(test)]
pub(crate) mod script;
mod status;
#[cfg(test)]
mod stream_checks;
pub(crate) mod wire;
mod work;

use std::fmt;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bowline_ctl::{Acceptor, ClientConnection, ConnectionLimits, OwnedFile};

use crate::device::BlockDevice;
use connection::{Begin, Connection};
use faults::Faults;
use hand_over::Gate;
pub use hand_over::{Handed, HandedClient};
pub use wire::{Format, Session};

/// Clients that may linger, per allowed connection: gone while the disk still has requests of them.
const LINGERING_PER_CONNECTION: usize = 4;

/// How often a server that is resumed checks whether its connections have what they need.
const BEGIN_POLL: Duration = Duration::from_millis(1);

/// How long a server that is handed over waits for clients which choose an export.
const HANDSHAKE_REST: Duration = Duration::from_millis(100);

/// Options of an NBD server.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NbdOptions {
    /// Clients cannot write, even if the disk is writable.
    pub read_only: bool,
    /// Most connections at a time; more clients wait to be accepted. While a client waits, one that
    /// has not chosen an export within a second is disconnected. Default: 64.
    ///
    /// A connection whose client has hung up does not count; its requests that wait for a lost
    /// session end. No client is accepted while the disk has requests of more than four times this
    /// number of clients that are gone.
    pub max_connections: usize,
    /// Memory of each connection for the data of requests in flight, in bytes; a multiple of 4096.
    /// Default: 8 MiB. A request larger than an eighth of it gets separate memory.
    pub memory: usize,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self { read_only: false, max_connections: 64, memory: 8 << 20 }
    }
}

/// An NBD server for a disk. Dropping it ends all connections and removes the socket, unless
/// another process has replaced it.
pub struct NbdServer {
    path: PathBuf,
    /// `None` when it was left to another process.
    file: Option<OwnedFile>,
    listener: Arc<UnixListener>,
    shared: Arc<Shared>,
    acceptor: Acceptor,
    /// Something was read from a client or sent to one. Relaxed: it guards nothing else.
    has_begun: AtomicBool,
}

struct Shared {
    disk: Arc<dyn BlockDevice>,
    options: NbdOptions,
    faults: Arc<Faults>,
    clients: Mutex<Clients>,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Clients {
    /// New connections are closed at once.
    disabled: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    /// Returns the number of connections.
    fn count(&self) -> usize {
        self.threads.iter().filter(|thread| !thread.is_finished()).count()
    }
}

/// Serves `disk` at a unix socket, which only its owner can connect to (mode 0600). The export has
/// the disk's name; the empty name selects it too. A stale socket is replaced; a file of another
/// kind is not.
///
/// A client sees the size that the disk has when it connects, since NBD has no message for a new
/// size. Requests beyond the present end of the disk are refused.
///
/// # Errors
/// EADDRINUSE when a process listens there, or the file is not a socket; EINVAL for invalid
/// options; errors of the system calls.
pub fn serve(disk: Arc<dyn BlockDevice>, at: &Path, options: NbdOptions) -> io::Result<NbdServer> {
    check_options(&options)?;
    let (listener, file) = bowline_ctl::listen(at)?;
    let server = open(disk, at, Arc::new(listener), Some(file), options)?;
    server.unpause();
    Ok(server)
}

/// Continues with a server that another process has [handed over](NbdServer::hand_over), at the
/// path at which it listens. The disk must be the same: clients know its size and abilities.
///
/// The server is paused until [`NbdServer::unpause`]: nothing is read from a client or sent to one,
/// and nobody is accepted. Dropped before that, it leaves the socket's file and all clients as they
/// are, for whoever has a copy of the descriptors.
///
/// # Errors
/// EINVAL for invalid options; ENOMEM; errors of the system calls. Nothing has changed then.
pub fn resume(
    disk: Arc<dyn BlockDevice>,
    at: &Path,
    options: NbdOptions,
    handed: Handed,
) -> io::Result<NbdServer> {
    check_options(&options)?;
    let server = open(disk, at, handed.listener, OwnedFile::new(at).ok(), options)?;
    let count = handed.clients.len();
    let (failed, failure) = mpsc::channel();
    for client in handed.clients {
        let HandedClient { socket, session, unread, unsent } = client;
        let connection = server.acceptor.adopt(socket);
        let begin = Begin { session, unread, unsent };
        let failed = failed.clone();
        server.shared.begin(connection, move |connection, disk, options, gate| {
            Connection::resume(connection, disk, options, gate, begin).inspect_err(|error| {
                // Nobody waits for it once all have begun.
                let _ = failed.send(error.raw_os_error().unwrap_or(libc::EIO));
            })
        })?;
    }
    while server.shared.gate.parked() < count {
        let is_one_gone = server.connections() < count;
        match failure.recv_timeout(BEGIN_POLL) {
            Ok(errno) => return Err(io::Error::from_raw_os_error(errno)),
            Err(_) if is_one_gone => return Err(io::Error::other("a client's thread has ended")),
            Err(_) => {}
        }
    }
    Ok(server)
}

fn check_options(options: &NbdOptions) -> io::Result<()> {
    let is_valid = options.memory >= 1 << 16 && options.memory.is_multiple_of(4096);
    if is_valid { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn open(
    disk: Arc<dyn BlockDevice>,
    at: &Path,
    listener: Arc<UnixListener>,
    file: Option<OwnedFile>,
    options: NbdOptions,
) -> io::Result<NbdServer> {
    let gate = Arc::new(Gate::new()?);
    let shared =
        Arc::new(Shared { disk, options, faults: Arc::default(), clients: Mutex::default(), gate });
    let active = options.max_connections;
    let limits =
        ConnectionLimits { active, lingering: active.saturating_mul(LINGERING_PER_CONNECTION) };
    let acceptor_shared = Arc::clone(&shared);
    let accepts = listener.try_clone()?;
    let acceptor = Acceptor::prepare("bowline-nbd", accepts, limits, move |client| {
        // Without a thread, this client is disconnected.
        let _ = acceptor_shared.begin(client, Connection::serve);
    })?;
    let path = at.to_owned();
    Ok(NbdServer { path, file, listener, shared, acceptor, has_begun: AtomicBool::new(false) })
}

impl NbdServer {
    /// Returns the number of connections.
    pub fn connections(&self) -> usize {
        self.shared.lock().count()
    }

    /// Returns how many clients were disconnected so far because they broke the protocol.
    pub fn faults(&self) -> u64 {
        self.shared.faults.count()
    }

    /// Calls `f` with the reason when a client is disconnected because it broke the protocol, at
    /// most once a second.
    pub fn on_fault(&self, f: impl Fn(&str) + Send + Sync + 'static) {
        self.shared.faults.report_to(Box::new(f));
    }

    /// Returns the processes that are connected.
    pub fn peers(&self) -> Vec<u32> {
        self.acceptor.peers()
    }

    /// Accepts no more clients, and takes no more requests: each connection ends once the requests
    /// that its client has sent are answered.
    pub fn finish(&mut self) {
        self.acceptor.finish_all();
    }

    /// Accepts no more clients if there are no connections, until [`NbdServer::enable`]; returns
    /// true if so.
    pub fn disable_if_unused(&self) -> bool {
        let mut clients = self.shared.lock();
        let unused = clients.count() == 0;
        clients.disabled |= unused;
        unused
    }

    /// Accepts clients again.
    pub fn enable(&self) {
        self.shared.lock().disabled = false;
    }

    /// Returns the socket at which it listens.
    pub const fn listener(&self) -> &Arc<UnixListener> {
        &self.listener
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes no more requests, until [`NbdServer::unpause`].
    pub fn pause(&self) {
        self.shared.gate.close();
    }

    /// Tells whether a pause has begun for all clients that have chosen an export: each request
    /// that was begun is answered.
    pub fn is_paused(&self) -> bool {
        self.shared.gate.is_quiet()
    }

    /// Takes requests, again or for the first time.
    pub fn unpause(&self) {
        self.has_begun.store(true, Relaxed);
        self.shared.gate.open();
        self.acceptor.accept();
    }

    /// Ends a server that [is paused](Self::is_paused), and returns what another process needs to
    /// [`resume`] it: clients notice a pause. A client that does not choose an export in
    /// time is disconnected. No descriptors are needed for that.
    pub fn hand_over(mut self) -> Handed {
        self.acceptor.close();
        self.file = None;
        self.shared.gate.hand_over();
        // Those that are paused leave as soon as their threads run.
        while self.shared.gate.is_giving() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let until = Instant::now() + HANDSHAKE_REST;
        while self.connections() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.end();
        Handed { listener: Arc::clone(&self.listener), clients: self.shared.gate.take() }
    }

    /// Ends all connections.
    fn end(&self) {
        self.acceptor.abort_all();
        self.join();
    }

    fn join(&self) {
        let threads = std::mem::take(&mut self.shared.lock().threads);
        for thread in threads {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        if !self.has_begun.load(Relaxed) {
            // Another process has copies of all descriptors, and continues.
            self.shared.gate.hand_over();
            self.acceptor.close();
            return self.join();
        }
        // Removed while the acceptor still listens: after that, a new socket may get the same inode
        // number.
        self.file.iter().for_each(OwnedFile::remove);
        self.acceptor.close();
        // A server that ends serves its clients no longer.
        self.shared.gate.open();
        self.end();
    }
}

impl fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdServer").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Clients> {
        // The list is consistent whenever its holder can panic.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to serve a client, or disconnects it.
    fn begin<F>(&self, client: ClientConnection, serve: F) -> io::Result<()>
    where
        F: FnOnce(ClientConnection, Arc<dyn BlockDevice>, NbdOptions, Arc<Gate>) -> io::Result<()>
            + Send
            + 'static,
    {
        let mut clients = self.lock();
        clients.threads.retain(|thread| !thread.is_finished());
        if clients.disabled {
            return Ok(());
        }
        let (disk, options, gate) = (Arc::clone(&self.disk), self.options, Arc::clone(&self.gate));
        let thread = std::thread::Builder::new().name("bowline-nbd-in".into());
        let faults = Arc::clone(&self.faults);
        let thread = thread.spawn(move || {
            // An error of one client ends its connection only.
            if let Err(error) = serve(client, disk, options, gate)
                && error.kind() == io::ErrorKind::InvalidData
            {
                faults.note(&error.to_string());
            }
        });
        clients.threads.push(thread?);
        Ok(())
    }
}
