//! A disk behind a unix socket that speaks NBD: fixed newstyle handshake, simple replies.
//!
//! ```text
//!   bowline-nbd      lets clients in, as long as there are places, and notices who hangs up
//!   bowline-nbd-in   one for each connection: requests off the socket, data to registered memory,
//!                    all that is there submitted together
//!   driving thread   DiskDone: replies to the socket, as far as it takes them   (no hand-over)
//!   bowline-nbd-out  one for each connection: the rest, when the client reads slowly
//! ```
//!
//! Spec: `docs/spec/rnbd.md`, NB-53; the protocol is NBD's own `doc/proto.md`.

mod connection;
mod handshake;
mod output;
mod requests;
mod wire;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use bowline_ctl::{Door, OwnFile, Places, Visit};

use crate::device::BlockDevice;
use connection::Connection;

/// For each place so many clients may have left while the disk had requests of theirs.
const LEFT_PER_PLACE: usize = 4;

/// How a disk is offered.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NbdOptions {
    /// Clients cannot write, whatever the disk can.
    pub read_only: bool,
    /// Connections at the same time; more wait to be accepted. While somebody waits, one that has
    /// not chosen an export within a second makes way. 64 if nothing is said.
    ///
    /// One whose client has hung up does not count; of its requests, those that wait for a lost
    /// session end. Nobody is let in while the disk has requests of more than four times as many
    /// that have left.
    pub max_connections: usize,
    /// Bytes for the data of requests under way, of each connection; a multiple of 4096. 8 MiB if
    /// nothing is said. A request that is larger than an eighth gets memory of its own.
    pub memory: usize,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self { read_only: false, max_connections: 64, memory: 8 << 20 }
    }
}

/// A socket at which a disk is offered. Dropping it ends all connections and removes the socket,
/// unless somebody else's is in its place.
pub struct NbdServer {
    file: OwnFile,
    shared: Arc<Shared>,
    door: Door,
}

struct Shared {
    disk: Arc<dyn BlockDevice>,
    options: NbdOptions,
    clients: Mutex<Clients>,
}

#[derive(Default)]
struct Clients {
    /// New connections are closed at once.
    shut: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    /// How many there are.
    fn count(&self) -> usize {
        self.threads.iter().filter(|thread| !thread.is_finished()).count()
    }
}

/// Offers `disk` at a unix socket, which only its owner can connect to (mode 0600). The export has
/// the disk's name; the empty name means it too. A socket that nobody listens at is replaced; a
/// file of another kind is not.
///
/// A client sees the size that the disk has when it connects, since NBD cannot tell it of another;
/// requests beyond the end that the disk has by then are refused.
///
/// # Errors
/// EADDRINUSE when somebody listens there, or something else than a socket is there; EINVAL for
/// options that cannot be; the system's.
pub fn serve(disk: Arc<dyn BlockDevice>, at: &Path, options: NbdOptions) -> io::Result<NbdServer> {
    if options.memory < 1 << 16 || !options.memory.is_multiple_of(4096) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (listener, file) = bowline_ctl::listen(at)?;
    let shared = Arc::new(Shared { disk, options, clients: Mutex::default() });
    let here = options.max_connections;
    let places = Places { here, left: here.saturating_mul(LEFT_PER_PLACE) };
    let of_door = Arc::clone(&shared);
    let door = Door::open("bowline-nbd", listener, places, move |visit| of_door.begin(visit))?;
    Ok(NbdServer { file, shared, door })
}

impl NbdServer {
    /// Where the socket is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Connections there are now.
    pub fn connections(&self) -> usize {
        self.shared.lock().count()
    }

    /// Lets nobody in any more if there are no connections, until [`NbdServer::unshut`]; says
    /// whether it is so.
    pub fn shut_if_unused(&self) -> bool {
        let mut clients = self.shared.lock();
        let unused = clients.count() == 0;
        clients.shut |= unused;
        unused
    }

    /// Lets clients in again.
    pub fn unshut(&self) {
        self.shared.lock().shut = false;
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        // While it is listened at, which the door ends: after that the same number may be another's
        // socket.
        self.file.remove();
        self.door.close();
        self.door.cut_all();
        let threads = std::mem::take(&mut self.shared.lock().threads);
        for thread in threads {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdServer").field("path", &self.file.path()).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Clients> {
        // The list is whole whenever something that holds it can panic.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to serve a client. One that cannot be served sees the end.
    fn begin(&self, visit: Visit) {
        let mut clients = self.lock();
        clients.threads.retain(|thread| !thread.is_finished());
        if clients.shut {
            return;
        }
        let (disk, options) = (Arc::clone(&self.disk), self.options);
        let thread = std::thread::Builder::new().name("bowline-nbd-in".into());
        // Whatever goes wrong with one client ends its connection and nothing else.
        let thread = thread.spawn(move || _ = Connection::serve(visit, disk, options));
        clients.threads.extend(thread);
    }
}
