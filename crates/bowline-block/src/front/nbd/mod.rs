//! A disk behind a unix socket that speaks NBD: fixed newstyle handshake, simple replies.
//!
//! ```text
//!   bowline-nbd      accepts
//!   bowline-nbd-in   one for each connection: requests off the socket, data into registered memory,
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
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use bowline_ctl::OwnFile;
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use crate::device::BlockDevice;
use connection::Connection;

/// How a disk is offered.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NbdOptions {
    /// Clients cannot write, whatever the disk can.
    pub read_only: bool,
    /// Connections at the same time, those among them that have ended while the disk had requests of theirs, as long
    /// as it has them; more are closed at once. 64 if nothing is said.
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

/// A socket at which a disk is offered. Dropping it ends all connections and removes the socket, unless
/// somebody else's is in its place.
pub struct NbdServer {
    file: OwnFile,
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    disk: Arc<dyn BlockDevice>,
    options: NbdOptions,
    stop: AtomicBool,
    /// New connections are closed at once. Changes and is looked at with `connections` locked.
    shut: AtomicBool,
    connections: Mutex<Vec<Served>>,
}

/// A connection, as long as its thread has it, and the thread.
type Served = (Weak<Connection>, JoinHandle<()>);

/// Offers `disk` at a unix socket, which only its owner can connect to (mode 0600). The export has
/// the disk's name; the empty name means it too. A socket that nobody listens at is replaced; a file of
/// another kind is not.
///
/// A client sees the size that the disk has when it connects, since NBD cannot tell it of another;
/// requests beyond the end that the disk has by then are refused.
///
/// # Errors
/// EADDRINUSE when somebody listens there, or something else than a socket is there; EINVAL for options
/// that cannot be; the system's.
pub fn serve(disk: Arc<dyn BlockDevice>, at: &Path, options: NbdOptions) -> io::Result<NbdServer> {
    if options.memory < 1 << 16 || !options.memory.is_multiple_of(4096) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (listener, file) = bowline_ctl::listen(at)?;
    listener.set_nonblocking(true)?;
    let wake = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
    let shared = Arc::new(Shared {
        disk,
        options,
        stop: AtomicBool::new(false),
        shut: AtomicBool::new(false),
        connections: Mutex::default(),
    });
    let (of_thread, woken) = (shared.clone(), wake.clone());
    let thread = std::thread::Builder::new()
        .name("bowline-nbd".into())
        .spawn(move || of_thread.accept(&listener, &woken))?;
    Ok(NbdServer { file, shared, wake, thread: Some(thread) })
}

impl NbdServer {
    /// Where the socket is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Connections there are now.
    pub fn connections(&self) -> usize {
        alive(&self.shared.lock())
    }

    /// Lets nobody in any more if there are no connections, until [`NbdServer::unshut`]; says whether it
    /// is so.
    pub fn shut_if_unused(&self) -> bool {
        let connections = self.shared.lock();
        let unused = alive(&connections) == 0;
        if unused {
            // Relaxed, here and elsewhere: the lock orders it.
            self.shared.shut.store(true, Ordering::Relaxed);
        }
        unused
    }

    /// Lets clients in again.
    pub fn unshut(&self) {
        let _connections = self.shared.lock();
        self.shared.shut.store(false, Ordering::Relaxed);
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        // While it is listened at, which the thread ends: after that the same number may be another's socket.
        self.file.remove();
        self.shared.stop.store(true, Ordering::Release);
        // Fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
        let connections = std::mem::take(&mut *self.shared.lock());
        for connection in connections.iter().filter_map(|(connection, _)| connection.upgrade()) {
            connection.close();
        }
        for (_, thread) in connections {
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
    fn lock(&self) -> MutexGuard<'_, Vec<Served>> {
        // The list is whole whenever something that holds it can panic.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(&self, listener: &UnixListener, woken: &OwnedFd) {
        loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(woken, PollFlags::IN)];
            // A signal interrupts; nothing else fails.
            let _ = rustix::event::poll(&mut fds, None);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            match listener.accept() {
                // The client sees the connection end, if nobody can serve it.
                Ok((socket, _)) => drop(self.begin(socket)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Too many open files, perhaps: the client waits until there are fewer.
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(50)),
            }
        }
    }

    fn begin(&self, socket: UnixStream) -> io::Result<()> {
        let mut connections = self.lock();
        // One that has ended is there still while the disk has its requests, and so is their memory.
        connections.retain(|(known, thread)| known.strong_count() > 0 || !thread.is_finished());
        let shut = self.shut.load(Ordering::Relaxed);
        if shut || connections.len() >= self.options.max_connections {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let connection = Connection::new(socket, self.disk.clone(), self.options)?;
        let known = Arc::downgrade(&connection);
        let thread = std::thread::Builder::new()
            .name("bowline-nbd-in".into())
            .spawn(move || connection.run())?;
        connections.push((known, thread));
        Ok(())
    }
}

fn alive(connections: &[Served]) -> usize {
    connections.iter().filter(|(_, thread)| !thread.is_finished()).count()
}
