//! A server that continues in another process: its connections are paused between two requests, or
//! in one, and given away with what was read of them and what is left to send.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::connection::Connection;
use super::wire::Session;

/// How long a connection waits for its client before it sleeps in a way that a pause ends: a client
/// that is busy costs no further system call.
pub(super) const AWAKE: Duration = Duration::from_millis(50);
/// How long a pause waits for a client that has sent a part of a request which is skipped.
pub(super) const REST: Duration = Duration::from_millis(500);

/// A server without its disk, for another process that takes it over.
#[derive(Debug)]
pub struct Handed {
    /// The socket at which it listens. Who connects waits there.
    pub listener: Arc<UnixListener>,
    /// Its clients.
    pub clients: Vec<HandedClient>,
}

/// A client that sends requests.
pub struct HandedClient {
    /// Its connection.
    pub socket: Arc<UnixStream>,
    /// What it has negotiated.
    pub session: Session,
    /// Bytes that were received, from the first request on that was not begun.
    pub unread: Vec<u8>,
    /// Bytes that are to be sent before all others.
    pub unsent: Vec<u8>,
}

impl fmt::Debug for HandedClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { socket, session, unread, unsent } = self;
        f.debug_struct("HandedClient")
            .field("socket", socket)
            .field("session", session)
            .field("unread", &unread.len())
            .field("unsent", &unsent.len())
            .finish()
    }
}

/// What the connections of a server do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// They serve their clients.
    #[default]
    Serving,
    /// They take no requests.
    Paused,
    /// They end, and leave their clients to another process.
    HandedOver,
}

#[derive(Default)]
struct State {
    phase: Phase,
    /// Connections that have chosen an export.
    connections: Vec<Weak<Connection>>,
    /// Those whose reading thread waits here.
    parked: Vec<Arc<Connection>>,
    handed: Vec<HandedClient>,
}

/// Pauses the connections of a server.
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Readable during a pause.
    event: OwnedFd,
    /// Relaxed: a thread that sees it takes the lock, or sleeps on the event.
    is_closed: AtomicBool,
}

impl Gate {
    /// A gate that is closed: a pause that [`open`](Self::open) ends for the first time.
    pub(super) fn new() -> io::Result<Self> {
        let gate = Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_closed: AtomicBool::new(false),
        };
        gate.close();
        Ok(gate)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Only a bug in this module panics with the lock held; the panic was printed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whether connections are to be paused.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }

    /// Adds a connection that serves its client from now on.
    pub(super) fn enter(&self, connection: Weak<Connection>) {
        let mut state = self.lock();
        state.connections.retain(|known| known.strong_count() > 0);
        state.connections.push(connection);
    }

    /// Sleeps until something comes from a client or a pause begins, at most as long as `limit`
    /// says during a pause.
    pub(super) fn wait(&self, socket: BorrowedFd<'_>, limit: Option<Duration>) -> io::Result<()> {
        let mut fds = [
            PollFd::from_borrowed_fd(socket, PollFlags::IN),
            PollFd::new(&self.event, PollFlags::IN),
        ];
        let paused = limit.filter(|_| self.is_closed());
        let paused = paused.map(|limit| Timespec::try_from(limit).unwrap_or_default());
        let fds = if paused.is_some() { &mut fds[..1] } else { &mut fds[..] };
        match poll(fds, paused.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until a pause ends; returns whether the connection continues here.
    pub(super) fn park(&self, connection: &Arc<Connection>) -> bool {
        let mut state = self.lock();
        state.parked.push(Arc::clone(connection));
        while state.phase == Phase::Paused {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.parked.retain(|parked| !Arc::ptr_eq(parked, connection));
        state.phase == Phase::Serving
    }

    /// Leaves a client to another process.
    pub(super) fn give(&self, client: HandedClient) {
        self.lock().handed.push(client);
    }

    /// Begins a pause.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.phase = Phase::Paused;
        self.is_closed.store(true, Relaxed);
        // Fails only when the counter is full, and then it is readable.
        let _ = rustix::io::write(self.event.as_fd(), &1_u64.to_ne_bytes());
        let connections: Vec<_> = state.connections.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        connections.iter().for_each(|connection| connection.pause(true));
    }

    /// Ends a pause.
    pub(super) fn open(&self) {
        let mut state = self.lock();
        state.phase = Phase::Serving;
        self.is_closed.store(false, Relaxed);
        // An error means that there is nothing to read.
        let _ = rustix::io::read(self.event.as_fd(), &mut [0_u8; 8]);
        let connections: Vec<_> = state.connections.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        connections.iter().for_each(|connection| connection.pause(false));
        self.changed.notify_all();
    }

    /// Tells whether all connections that have chosen an export are paused, and nothing of theirs
    /// is with the disk.
    pub(super) fn is_quiet(&self) -> bool {
        let state = self.lock();
        let all: Vec<_> = state.connections.iter().filter_map(Weak::upgrade).collect();
        let parked = state.parked.clone();
        drop(state);
        all.iter().all(|connection| {
            parked.iter().any(|parked| Arc::ptr_eq(parked, connection)) && connection.is_quiet()
        })
    }

    /// Makes all connections leave their clients to another process.
    pub(super) fn hand_over(&self) {
        self.lock().phase = Phase::HandedOver;
        self.changed.notify_all();
    }

    /// Returns how many connections wait here.
    pub(super) fn parked(&self) -> usize {
        self.lock().parked.len()
    }

    /// Tells whether connections that were paused still leave their clients.
    pub(super) fn is_giving(&self) -> bool {
        !self.lock().parked.is_empty()
    }

    /// Returns what connections have left.
    pub(super) fn take(&self) -> Vec<HandedClient> {
        std::mem::take(&mut self.lock().handed)
    }
}
