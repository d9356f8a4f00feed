//! Who is let in at a listening socket, and who makes way.
//!
//! ```text
//!   comes --> silent --> served --> has left --> gone
//!               |          |           |
//!               |          |           '- if too many are left: the longest is cut
//!               |          '- hangs up: its place is free at once
//!               '- for a second, all places taken, and somebody waits: it makes way
//! ```
//!
//! A client has a place until it hangs up or leaves. While all places are taken, others wait to be
//! accepted. What is still worked on for clients that have left is bounded by itself.

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

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    net::{Shutdown, shutdown},
};

/// How long a client may say nothing before it makes way for one that waits.
const SILENCE: Duration = Duration::from_secs(1);
/// How often is looked for a place while somebody waits for one.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Pause when no client can be accepted for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many clients there may be.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Clients at a time.
    pub here: usize,
    /// Clients that have left while something was still done for them.
    pub left: usize,
}

/// What serves one client.
pub trait Guest: Send + Sync {
    /// The client has hung up: nobody takes answers any more. Must not block.
    fn hung_up(&self);

    /// What is still done for it ends as soon as it can. Must not block.
    fn cut(&self);
}

/// Lets clients in at a socket, by a thread of its own, until it is closed or dropped.
pub struct Door {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    places: Places,
    wake: OwnedFd,
    stop: AtomicBool,
    visits: Mutex<Visits>,
}

#[derive(Default)]
struct Visits {
    /// In the order in which they came.
    all: BTreeMap<u64, Entry>,
    next: u64,
}

struct Entry {
    socket: Arc<UnixStream>,
    guest: Option<Weak<dyn Guest>>,
    /// Since when it is waited for what the client says.
    silent: Option<Instant>,
    has_left: bool,
    was_cut: bool,
}

/// A client that was let in. It counts until this is dropped.
pub struct Visit {
    id: u64,
    socket: Arc<UnixStream>,
    shared: Arc<Shared>,
}

impl Door {
    /// Lets clients in. `begin` is called by the thread of that name with each, and must not block.
    ///
    /// # Errors
    /// The system's.
    pub fn open(
        name: &str,
        listener: UnixListener,
        places: Places,
        begin: impl Fn(Visit) + Send + 'static,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            places,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
            visits: Mutex::default(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || of_thread.run(&listener, &begin))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Lets nobody in any more, and waits until that is so. Who waits to be accepted sees the end.
    pub fn close(&mut self) {
        // Release: pairs with the Acquire of the thread.
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
    }

    /// Ends the connections of all clients, and what is still done for those that have left.
    pub fn cut_all(&self) {
        let mut guests = Vec::new();
        for entry in self.shared.lock().all.values_mut() {
            entry.end();
            guests.extend(entry.guest.clone());
        }
        for guest in guests.iter().filter_map(Weak::upgrade) {
            guest.cut();
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("places", &self.shared.places).finish_non_exhaustive()
    }
}

impl Entry {
    /// Ends the connection; its place is free.
    fn end(&mut self) {
        // One that the client has closed already is as good.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.has_left = true;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Visits> {
        // What panics with the lock held is a mistake in here, printed when it happened.
        self.visits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn run(self: &Arc<Self>, listener: &UnixListener, begin: &impl Fn(Visit)) {
        let mut waits = false;
        loop {
            waits |= self.watch(listener, waits);
            // Acquire: pairs with the Release of `close`.
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if !waits || !self.has_place() {
                continue;
            }
            waits = false;
            match listener.accept() {
                Ok((socket, _)) => begin(self.admit(socket)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Too many open files, perhaps: the client waits until there are fewer.
                Err(_) => thread::sleep(ACCEPT_PAUSE),
            }
        }
    }

    /// Waits until something happens; tells whether somebody wants to be let in. While it is known
    /// that somebody `waits`, it is looked again after a while.
    fn watch(&self, listener: &UnixListener, waits: bool) -> bool {
        let here: Vec<(u64, Arc<UnixStream>)> = {
            let visits = self.lock();
            let here = visits.all.iter().filter(|(_, entry)| !entry.has_left);
            here.map(|(id, entry)| (*id, Arc::clone(&entry.socket))).collect()
        };
        let wanted = if waits { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(listener, wanted)];
        // Of a socket the system always tells that the other end was closed.
        fds.extend(here.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::empty())));
        // A signal interrupts; nothing else fails.
        let _ = poll(&mut fds, waits.then_some(&LOOK));
        let knocks = fds[1].revents().contains(PollFlags::IN);
        let ended = fds[2..].iter().map(|fd| fd.revents().contains(PollFlags::HUP));
        for ((id, _), _) in here.iter().zip(ended).filter(|(_, ended)| *ended) {
            self.hung_up(*id);
        }
        // Nothing to read is as good.
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        knocks
    }

    fn hung_up(&self, id: u64) {
        let mut visits = self.lock();
        let Some(entry) = visits.all.get_mut(&id) else { return };
        entry.has_left = true;
        let guest = entry.guest.clone();
        drop(visits);
        if let Some(guest) = guest.and_then(|guest| guest.upgrade()) {
            guest.hung_up();
        }
    }

    /// Tells whether somebody can be let in; if not, has one make way that is in nobody's service.
    fn has_place(&self) -> bool {
        let mut visits = self.lock();
        let left = visits.all.values().filter(|entry| entry.has_left).count();
        if visits.all.len() - left >= self.places.here {
            let silent = |entry: &&mut Entry| {
                !entry.has_left && entry.silent.is_some_and(|since| since.elapsed() >= SILENCE)
            };
            let Some(entry) = visits.all.values_mut().find(silent) else { return false };
            entry.end();
        }
        let left = visits.all.values().filter(|entry| entry.has_left).count();
        if left <= self.places.left {
            return true;
        }
        let entry = visits.all.values_mut().find(|entry| entry.has_left && !entry.was_cut);
        let guest = entry.and_then(|entry| {
            entry.was_cut = true;
            entry.guest.clone()
        });
        drop(visits);
        if let Some(guest) = guest.and_then(|guest| guest.upgrade()) {
            guest.cut();
        }
        self.lock().all.values().filter(|entry| entry.has_left).count() <= self.places.left
    }

    fn admit(self: &Arc<Self>, socket: UnixStream) -> Visit {
        let socket = Arc::new(socket);
        let mut visits = self.lock();
        let id = visits.next;
        visits.next += 1;
        let entry = Entry {
            socket: Arc::clone(&socket),
            guest: None,
            silent: Some(Instant::now()),
            has_left: false,
            was_cut: false,
        };
        visits.all.insert(id, entry);
        Visit { id, socket, shared: Arc::clone(self) }
    }
}

impl Visit {
    /// The connection.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Says what serves the client from now on; its place is its own until it hangs up or leaves.
    pub fn served(&self, guest: Weak<dyn Guest>) {
        let mut visits = self.shared.lock();
        let Some(entry) = visits.all.get_mut(&self.id) else { return };
        entry.silent = None;
        entry.guest = Some(Weak::clone(&guest));
        let has_left = entry.has_left;
        drop(visits);
        if let Some(guest) = guest.upgrade().filter(|_| has_left) {
            guest.hung_up();
        }
    }

    /// Says whether the client is waited for, as it is at the beginning. If it says nothing and
    /// takes nothing for long, it may have to make way.
    pub fn set_silent(&self, is_silent: bool) {
        if let Some(entry) = self.shared.lock().all.get_mut(&self.id) {
            entry.silent = is_silent.then(Instant::now);
        }
    }

    /// Ends the connection. The client's place is free; it counts among those that have left.
    pub fn end(&self) {
        if let Some(entry) = self.shared.lock().all.get_mut(&self.id) {
            entry.end();
        }
        self.shared.wake();
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.shared.lock().all.remove(&self.id);
        self.shared.wake();
    }
}

impl fmt::Debug for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Visit").field("id", &self.id).finish_non_exhaustive()
    }
}
