//! Accepts clients at a listening socket, within limits, and disconnects idle ones for others.
//!
//! ```text
//!   accepted --> idle --> served --> lingering --> gone
//!                 |          |           |
//!                 |          |           '- over the limit: the oldest is aborted
//!                 |          '- hangs up: another client can be accepted at once
//!                 '- for a second, limit reached, and a client waits: it is disconnected
//! ```
//!
//! A client is active until it hangs up or is disconnected. While the limit of active clients is
//! reached, others wait to be accepted. Clients that are gone while their requests are still in
//! progress linger, with a limit of their own.

use std::{
    collections::BTreeMap,
    fmt, io,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::Peer;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    net::{Shutdown, shutdown},
};

/// How long a client may be idle before it is disconnected for one that waits.
const IDLE_MAX: Duration = Duration::from_secs(1);
/// How often free capacity is checked for while a client waits.
const CAPACITY_POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Pause when no client can be accepted for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Limits on numbers of clients.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Most active clients.
    pub active: usize,
    /// Most lingering clients: gone while their requests are still in progress.
    pub lingering: usize,
}

/// Serves one client.
pub trait ClientHandler: Send + Sync {
    /// The client has hung up: its answers cannot be delivered any more. Must not block.
    fn hung_up(&self);

    /// Ends the requests still in progress as soon as possible. Must not block.
    fn abort(&self);
}

/// Accepts clients at a socket in its own thread, until it is closed or dropped.
pub struct Acceptor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    limits: ConnectionLimits,
    wake: OwnedFd,
    /// Clients may be accepted. Relaxed: the thread is woken after it is set.
    accepts: AtomicBool,
    stop: AtomicBool,
    finishing: AtomicBool,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    /// In the order of their arrival.
    all: BTreeMap<u64, Entry>,
    next: u64,
}

struct Entry {
    socket: Arc<UnixStream>,
    handler: Option<Weak<dyn ClientHandler>>,
    /// Since when the server waits for the client; `None` while it works for it.
    idle_since: Option<Instant>,
    lingers: bool,
    was_aborted: bool,
}

/// The connection of an accepted client. It counts towards the limits until this is dropped.
pub struct ClientConnection {
    id: u64,
    socket: Arc<UnixStream>,
    shared: Arc<Shared>,
}

impl Acceptor {
    /// Starts to accept clients. The thread, called `name`, calls `begin` with each client; `begin`
    /// must not block.
    ///
    /// # Errors
    /// Errors of the system calls.
    pub fn open(
        name: &str,
        listener: UnixListener,
        limits: ConnectionLimits,
        begin: impl Fn(ClientConnection) + Send + 'static,
    ) -> io::Result<Self> {
        let acceptor = Self::prepare(name, listener, limits, begin)?;
        acceptor.accept();
        Ok(acceptor)
    }

    /// As [`open`](Self::open), but accepts nobody before [`accept`](Self::accept).
    ///
    /// # Errors
    /// Errors of the system calls.
    pub fn prepare(
        name: &str,
        listener: UnixListener,
        limits: ConnectionLimits,
        begin: impl Fn(ClientConnection) + Send + 'static,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            limits,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            accepts: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let thread_shared = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || thread_shared.run(&listener, &begin))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Accepts clients from now on.
    pub fn accept(&self) {
        self.shared.accepts.store(true, Ordering::Relaxed);
        self.shared.wake();
    }

    /// Adds a client that another process has accepted; it counts as one of this process.
    pub fn adopt(&self, socket: Arc<UnixStream>) -> ClientConnection {
        let connection = self.shared.admit(socket);
        // The thread notices from now on that it hangs up.
        self.shared.wake();
        connection
    }

    /// Stops accepting, and waits for the thread to end. Clients that wait to be accepted are
    /// disconnected.
    pub fn close(&mut self) {
        // Release: pairs with the Acquire of the thread.
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }

    /// Returns the processes of the clients that have not hung up, as far as this one sees them.
    pub fn peers(&self) -> Vec<u32> {
        let connections = self.shared.lock();
        let active = connections.all.values().filter(|entry| !entry.lingers);
        let processes = active.filter_map(|entry| Some(Peer::at(&entry.socket).ok()?.process));
        processes.filter_map(|id| u32::try_from(id).ok().filter(|id| *id > 0)).collect()
    }

    /// Takes no more clients, and nothing more from those there are: their connections end once
    /// what they have sent is answered, see [`ClientConnection::is_finishing`].
    pub fn finish_all(&mut self) {
        // Release: who reads the end of a client's stream sees it.
        self.shared.finishing.store(true, Ordering::Release);
        self.close();
        for entry in self.shared.lock().all.values() {
            // An error means that the client has closed it already.
            let _ = shutdown(&entry.socket, Shutdown::Read);
        }
    }

    /// Ends the connections of all clients, and the requests of lingering ones.
    pub fn abort_all(&self) {
        let mut handlers = Vec::new();
        for entry in self.shared.lock().all.values_mut() {
            entry.shut_down();
            handlers.extend(entry.handler.clone());
        }
        for handler in handlers.iter().filter_map(Weak::upgrade) {
            handler.abort();
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

impl Entry {
    /// Ends the connection; it counts as lingering.
    fn shut_down(&mut self) {
        // An error means that the client has closed it already.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.lingers = true;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        // Only a bug in this module panics with the lock held; the panic was printed.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn run(self: &Arc<Self>, listener: &UnixListener, begin: &impl Fn(ClientConnection)) {
        let mut client_waits = false;
        loop {
            client_waits |= self.wait_for_events(listener, client_waits);
            // Acquire: pairs with the Release of `close`.
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if !client_waits || !self.has_capacity() {
                continue;
            }
            client_waits = false;
            match listener.accept() {
                Ok((socket, _)) => begin(self.admit(Arc::new(socket))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Too many open files, perhaps: the client waits until there are fewer.
                Err(_) => thread::sleep(ACCEPT_PAUSE),
            }
        }
    }

    /// Waits for an event; returns true if a client waits to be accepted. While `client_waits`,
    /// returns after a while to check the capacity again.
    fn wait_for_events(&self, listener: &UnixListener, client_waits: bool) -> bool {
        let active: Vec<(u64, Arc<UnixStream>)> = {
            let connections = self.lock();
            let active = connections.all.iter().filter(|(_, entry)| !entry.lingers);
            active.map(|(id, entry)| (*id, Arc::clone(&entry.socket))).collect()
        };
        let accepts = self.accepts.load(Ordering::Relaxed) && !client_waits;
        let wanted = if accepts { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(listener, wanted)];
        // POLLHUP is always reported, whatever events are asked for.
        fds.extend(active.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::empty())));
        // Fails only when a signal interrupts it.
        let _ = poll(&mut fds, client_waits.then_some(&CAPACITY_POLL));
        let incoming = fds[1].revents().contains(PollFlags::IN);
        let ended = fds[2..].iter().map(|fd| fd.revents().contains(PollFlags::HUP));
        for ((id, _), _) in active.iter().zip(ended).filter(|(_, ended)| *ended) {
            self.hung_up(*id);
        }
        // An error means that there is nothing to read.
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        incoming
    }

    fn hung_up(&self, id: u64) {
        let mut connections = self.lock();
        let Some(entry) = connections.all.get_mut(&id) else { return };
        entry.lingers = true;
        let handler = entry.handler.clone();
        drop(connections);
        if let Some(handler) = handler.and_then(|handler| handler.upgrade()) {
            handler.hung_up();
        }
    }

    /// Tells whether a client can be accepted. If the limit is reached, disconnects a client that
    /// has been idle, or aborts the oldest lingering one.
    fn has_capacity(&self) -> bool {
        let mut connections = self.lock();
        let lingering = connections.all.values().filter(|entry| entry.lingers).count();
        if connections.all.len() - lingering >= self.limits.active {
            let idle = |entry: &&mut Entry| {
                !entry.lingers && entry.idle_since.is_some_and(|since| since.elapsed() >= IDLE_MAX)
            };
            let Some(entry) = connections.all.values_mut().find(idle) else { return false };
            entry.shut_down();
        }
        let lingering = connections.all.values().filter(|entry| entry.lingers).count();
        if lingering <= self.limits.lingering {
            return true;
        }
        let entry = connections.all.values_mut().find(|entry| entry.lingers && !entry.was_aborted);
        let handler = entry.and_then(|entry| {
            entry.was_aborted = true;
            entry.handler.clone()
        });
        drop(connections);
        if let Some(handler) = handler.and_then(|handler| handler.upgrade()) {
            handler.abort();
        }
        self.lock().all.values().filter(|entry| entry.lingers).count() <= self.limits.lingering
    }

    fn admit(self: &Arc<Self>, socket: Arc<UnixStream>) -> ClientConnection {
        let mut connections = self.lock();
        let id = connections.next;
        connections.next += 1;
        let entry = Entry {
            socket: Arc::clone(&socket),
            handler: None,
            idle_since: Some(Instant::now()),
            lingers: false,
            was_aborted: false,
        };
        connections.all.insert(id, entry);
        ClientConnection { id, socket, shared: Arc::clone(self) }
    }
}

impl ClientConnection {
    /// Returns the socket.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Tells whether the end of the client's stream is the server's doing, which wants to answer
    /// what came before.
    pub fn is_finishing(&self) -> bool {
        self.shared.finishing.load(Ordering::Acquire)
    }

    /// Sets the handler of the client, which from now on is not disconnected for being idle.
    pub fn set_handler(&self, handler: Weak<dyn ClientHandler>) {
        let mut connections = self.shared.lock();
        let Some(entry) = connections.all.get_mut(&self.id) else { return };
        entry.idle_since = None;
        entry.handler = Some(Weak::clone(&handler));
        let lingers = entry.lingers;
        drop(connections);
        if let Some(handler) = handler.upgrade().filter(|_| lingers) {
            handler.hung_up();
        }
    }

    /// Sets whether the server waits for the client, as it does at first. A client that is idle for
    /// long may be disconnected for another.
    pub fn set_idle(&self, is_idle: bool) {
        if let Some(entry) = self.shared.lock().all.get_mut(&self.id) {
            entry.idle_since = is_idle.then(Instant::now);
        }
    }

    /// Leaves the client to another process: the acceptor does not end its connection any more.
    /// Returns the socket, which needs no descriptor more.
    pub fn forget(&self) -> Arc<UnixStream> {
        self.shared.lock().all.remove(&self.id);
        self.shared.wake();
        Arc::clone(&self.socket)
    }

    /// Ends the connection. From now on the client counts as lingering.
    pub fn shut_down(&self) {
        if let Some(entry) = self.shared.lock().all.get_mut(&self.id) {
            entry.shut_down();
        }
        self.shared.wake();
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        self.shared.lock().all.remove(&self.id);
        self.shared.wake();
    }
}

impl fmt::Debug for ClientConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConnection").field("id", &self.id).finish_non_exhaustive()
    }
}
