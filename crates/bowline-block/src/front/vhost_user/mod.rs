//! A disk for virtual machines, by vhost-user: the machine's process hands over the guest's memory
//! and its virtio rings, and no process is between guest and disk.
//!
//! ```text
//!   guest           requests in its rings, and a kick
//!   bowline-vhost-q one for each machine: messages of the machine's process; takes requests off
//!                   the rings, all that are there submitted together
//!   driving thread  DiskDone: results to the ring, and a call to the guest        (no hand-over)
//!   bowline-vhost   lets machines in, and notices who hangs up
//! ```
//!
//! All memory of the machine is registered once, when its process names it. Data goes to and from
//! it directly where a request has few or long pieces; otherwise, and where it cannot be
//! registered, it is copied once.
//!
//! Nobody polls: threads sleep until a kick, a message or a completion.
//!
//! Spec: `docs/spec/rnbd.md`, NB-66; the protocol is vhost-user's own documentation, rings and
//! requests are those of virtio 1.2.

mod connection;
mod inflight;
mod log;
mod memory;
mod request;
mod ring;
mod rings;
mod wire;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bowline_ctl::{Acceptor, ClientConnection, ClientHandler, ConnectionLimits, OwnedFile};
use rustix::event::{EventfdFlags, eventfd};

use crate::device::{BlockDevice, DiskEvent};
use connection::{Connection, Ended};
use rings::Rings;

/// Most queues of a machine.
const RINGS_MAX: usize = 64;
/// Machines that may linger, per allowed one: gone while the disk still has requests of them.
const LINGERING_PER_MACHINE: usize = 4;
/// How long requests of a machine may take to end before the server ends the connection.
const DETACH_PATIENCE: Duration = Duration::from_secs(1);
/// How often it looks whether they have.
const DETACH_POLL: Duration = Duration::from_millis(1);
/// Least time between two reports of why a connection ended.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Options of a vhost-user server.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct VhostUserOptions {
    /// Machines cannot write, even if the disk is writable.
    pub read_only: bool,
    /// Most machines at a time; more wait to be accepted. Default: 4, of which two are in use while
    /// a machine moves from one process to another.
    pub max_machines: usize,
}

impl Default for VhostUserOptions {
    fn default() -> Self {
        Self { read_only: false, max_machines: 4 }
    }
}

/// A vhost-user server for a disk. Dropping it [detaches](Self::detach) all machines, ends their
/// connections after a second at the latest, and removes the socket, unless another process has
/// replaced it.
pub struct VhostUserServer {
    file: OwnedFile,
    shared: Arc<Shared>,
    acceptor: Acceptor,
}

struct Shared {
    disk: Arc<dyn BlockDevice>,
    options: VhostUserOptions,
    machines: Mutex<Machines>,
    trouble: Box<dyn Fn(&str) + Send + Sync>,
    last_report: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Machines {
    /// New connections are closed at once.
    disabled: bool,
    /// So they are, for good.
    detached: bool,
    /// Those whose requests may still reach the disk.
    rings: Vec<Weak<Rings>>,
    threads: Vec<JoinHandle<()>>,
}

impl Machines {
    /// Returns the number of connections.
    fn count(&self) -> usize {
        self.threads.iter().filter(|thread| !thread.is_finished()).count()
    }
}

/// Serves `disk` at a unix socket, which only its owner can connect to (mode 0600). A stale socket
/// is replaced; a file of another kind is not. When a machine breaks the protocol, `trouble`
/// gets the reason, at most once a second.
///
/// The machine's memory has to be shared, and sealed against shrinking, as QEMU's
/// `memory-backend-memfd,share=on` is.
///
/// A machine whose process has connected again continues where it was: requests that were in flight
/// are done again, after those of the former connection have ended.
///
/// # Errors
/// EADDRINUSE when a process listens there, or the file is not a socket; errors of the system
/// calls.
pub fn serve(
    disk: Arc<dyn BlockDevice>,
    at: &Path,
    options: VhostUserOptions,
    trouble: impl Fn(&str) + Send + Sync + 'static,
) -> io::Result<VhostUserServer> {
    let (listener, file) = bowline_ctl::listen(at)?;
    let shared = Arc::new(Shared {
        disk,
        options,
        machines: Mutex::default(),
        trouble: Box::new(trouble),
        last_report: Mutex::default(),
    });
    let resized = Arc::downgrade(&shared);
    shared.disk.on_change(Box::new(move |event| {
        if let (DiskEvent::Resized(_), Some(shared)) = (event, resized.upgrade()) {
            shared.announce_size();
        }
    }));
    let active = options.max_machines;
    let limits =
        ConnectionLimits { active, lingering: active.saturating_mul(LINGERING_PER_MACHINE) };
    let acceptor_shared = Arc::clone(&shared);
    let acceptor = Acceptor::open("bowline-vhost", listener, limits, move |client| {
        Shared::begin(&acceptor_shared, client);
    })?;
    Ok(VhostUserServer { file, shared, acceptor })
}

impl VhostUserServer {
    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns the number of connections.
    pub fn connections(&self) -> usize {
        self.shared.lock().count()
    }

    /// Returns the processes that are connected.
    pub fn peers(&self) -> Vec<u32> {
        self.acceptor.peers()
    }

    /// Accepts no more machines if there are no connections, until [`VhostUserServer::enable`];
    /// returns true if so.
    pub fn disable_if_unused(&self) -> bool {
        let mut machines = self.shared.lock();
        let unused = machines.count() == 0;
        machines.disabled |= unused;
        unused
    }

    /// Lets go of all machines, for good, and does not wait for it: from now on no requests are
    /// taken off rings, and none fails. Each connection ends when the requests in flight have
    /// ended. Of requests that the disk fails from now on the guest learns nothing: these and those
    /// that were not taken are left to whoever serves the machine next. A machine whose process
    /// connects again (QEMU with `reconnect-ms`) waits for that without an error.
    pub fn detach(&self) {
        let mut machines = self.shared.lock();
        machines.detached = true;
        let rings: Vec<_> = machines.rings.iter().filter_map(Weak::upgrade).collect();
        drop(machines);
        rings.iter().for_each(|rings| rings.detach());
    }

    /// Accepts machines again, unless they were detached.
    pub fn enable(&self) {
        self.shared.lock().disabled = false;
    }
}

impl Drop for VhostUserServer {
    fn drop(&mut self) {
        // Removed while the acceptor still listens: after that, a new socket may get the same inode
        // number.
        self.file.remove();
        self.acceptor.close();
        self.detach();
        let threads = std::mem::take(&mut self.shared.lock().threads);
        let end = Instant::now() + DETACH_PATIENCE;
        while !threads.iter().all(JoinHandle::is_finished) && Instant::now() < end {
            std::thread::sleep(DETACH_POLL);
        }
        self.acceptor.abort_all();
        for thread in threads {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for VhostUserServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUserServer").field("path", &self.file.path()).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Machines> {
        // The lists are consistent whenever their holder can panic.
        self.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whether requests of a machine that has hung up may still reach the disk.
    fn lingers(&self) -> bool {
        let mut machines = self.lock();
        machines.rings.retain(|rings| rings.strong_count() > 0);
        machines.rings.iter().filter_map(Weak::upgrade).any(|rings| rings.lingers())
    }

    fn announce_size(&self) {
        let rings: Vec<_> = self.lock().rings.iter().filter_map(Weak::upgrade).collect();
        for rings in rings {
            rings.resized.store(true, Ordering::Release);
            rings.wake();
        }
    }

    fn report(&self, why: &str) {
        let mut last = self.last_report.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL) {
            *last = Some(Instant::now());
            drop(last);
            (self.trouble)(why);
        }
    }

    /// Begins to serve a machine, or disconnects it.
    fn begin(self: &Arc<Self>, client: ClientConnection) {
        let mut machines = self.lock();
        machines.threads.retain(|thread| !thread.is_finished());
        machines.rings.retain(|rings| rings.strong_count() > 0);
        if machines.disabled || machines.detached {
            return;
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("bowline-vhost-q".into());
        let thread = thread.spawn(move || {
            if let Err(why) = shared.serve(client) {
                shared.report(&format!("a machine cannot be served: {why}"));
            }
        });
        machines.threads.extend(thread);
    }

    /// Serves a machine until one side ends it.
    fn serve(self: &Arc<Self>, client: ClientConnection) -> io::Result<()> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let rings = Rings::new(client, Arc::clone(&self.disk), self.options, wake)
            .map_err(|errno| io::Error::from_raw_os_error(errno.0))?;
        let mut machines = self.lock();
        if machines.detached {
            return Ok(());
        }
        machines.rings.push(Arc::downgrade(&rings));
        drop(machines);
        let weak = Arc::downgrade(&rings);
        let handler: Weak<dyn ClientHandler> = weak;
        rings.client.set_handler(handler);
        if let Ended::Broken(why) = Connection::new(Arc::clone(&rings), Arc::clone(self)).run() {
            // Before the machine sees the end.
            self.report(&format!("disconnected from a machine: {why}"));
        }
        rings.client.shut_down();
        Ok(())
    }
}
