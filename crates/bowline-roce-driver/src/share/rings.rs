//! The memory rings of a process with the others of its host.
//!
//! A process asks the host for a ring to another one when it first sends to it, and sends by its
//! socket until it has it. What was sent so is in the other's socket when the first burst is put
//! into the ring, so a reader empties its sockets before it reads a new ring for the first time.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bowline_base::clock;
use bowline_roce::{Burst, Instant};

use super::message::Message;
use super::ring::{BURST_MAX, Came, Put, Reader, Writer};

/// Number of the queue pair of connection messages, which the host gets.
const GSI_QPN: [u8; 3] = [0, 0, 1];

/// How long the host may take to answer, or not, before it is asked again.
const ASKED_AGAIN: Duration = Duration::from_secs(1);

/// The way to another process.
#[derive(Debug)]
enum Way {
    /// The host has been asked for a ring, then.
    Asked(Instant),
    Ring {
        writer: Writer,
        /// Wakes the other process.
        bell: OwnedFd,
        /// There was no room for a whole patience: the other process has stopped.
        is_stuck: bool,
    },
}

#[derive(Debug)]
struct From {
    part: u8,
    reader: Reader,
}

/// The rings of a process.
#[derive(Debug)]
pub(crate) struct Rings {
    own: u8,
    host: Arc<OwnedFd>,
    /// Rung by others when they have put something into a ring of which the reader sleeps.
    bell: OwnedFd,
    ways: Mutex<HashMap<u8, Way>>,
    readers: Mutex<Vec<From>>,
    /// Number of readers: seen without the lock.
    count: AtomicUsize,
}

/// What a ring does with a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Done,
    /// There is no room now.
    Full,
    /// There is no room, and has not been any for long.
    Stuck,
    /// It is to be sent by the socket.
    Elsewhere,
}

/// A buffer for bursts.
pub(crate) type BurstBuffer = Box<[u8; BURST_MAX]>;

pub(crate) fn burst_buffer() -> BurstBuffer {
    Box::new([0; BURST_MAX])
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The part that all packets of a burst are for.
fn part_of(burst: &Burst) -> Option<u8> {
    let mut qpns = burst.bytes.chunks(burst.segment.max(1)).map(|packet| packet.get(5..8));
    let first = qpns.next()??;
    let part = *first.first()?;
    let is_of_one = first != GSI_QPN && qpns.all(|qpn| qpn.is_some_and(|qpn| qpn[0] == part));
    is_of_one.then_some(part)
}

impl Rings {
    pub(super) fn new(own: u8, host: Arc<OwnedFd>, bell: OwnedFd) -> Self {
        Self {
            own,
            host,
            bell,
            ways: Mutex::default(),
            readers: Mutex::default(),
            count: AtomicUsize::new(0),
        }
    }

    /// Sends a burst to another process of this host, if it is for one.
    pub(crate) fn put(&self, burst: &Burst) -> Sent {
        let Some(part) = part_of(burst).filter(|part| *part != self.own && *part != 0) else {
            return Sent::Elsewhere;
        };
        match lock(&self.ways).get_mut(&part) {
            Some(Way::Asked(at)) if clock::now().saturating_since(*at) < ASKED_AGAIN => {
                return Sent::Elsewhere;
            }
            Some(Way::Ring { writer, bell, is_stuck }) => {
                if !writer.is_ready() {
                    return Sent::Elsewhere;
                }
                if *is_stuck && !writer.is_half_empty() {
                    return Sent::Stuck;
                }
                let put = writer.put(burst);
                if put == Put::Full {
                    return Sent::Full;
                }
                *is_stuck = false;
                if put == Put::Wake {
                    ring(bell);
                }
                return Sent::Done;
            }
            _ => {}
        }
        lock(&self.ways).insert(part, Way::Asked(clock::now()));
        // Without an answer, the socket does as well.
        let _ = Message::Ring(part).send_now(&*self.host, &[]);
        Sent::Elsewhere
    }

    /// Tells whether a burst is for another process of this host: it does not go with others by one
    /// call.
    pub(crate) fn is_way(&self, burst: &Burst) -> bool {
        part_of(burst).is_some_and(|part| part != self.own && part != 0)
    }

    /// The process that a burst is for takes nothing: until there is room, nothing waits for it.
    pub(crate) fn note_stuck(&self, burst: &Burst) {
        let Some(part) = part_of(burst) else { return };
        if let Some(Way::Ring { is_stuck, .. }) = lock(&self.ways).get_mut(&part) {
            *is_stuck = true;
        }
    }

    /// Sends to a process by memory from now on.
    ///
    /// # Errors
    /// For what is no memory of a ring.
    pub(super) fn add_writer(&self, part: u8, memory: OwnedFd, bell: OwnedFd) -> io::Result<()> {
        let writer = Writer::new(memory)?;
        lock(&self.ways).insert(part, Way::Ring { writer, bell, is_stuck: false });
        Ok(())
    }

    /// Receives from a process by memory from now on.
    ///
    /// # Errors
    /// For what is no memory of a ring.
    pub(super) fn add_reader(&self, part: u8, memory: OwnedFd) -> io::Result<()> {
        let reader = Reader::new(memory)?;
        let mut readers = lock(&self.readers);
        readers.retain(|from| from.part != part);
        readers.push(From { part, reader });
        self.count.store(readers.len(), Ordering::SeqCst);
        drop(readers);
        // Who sleeps does not know of it.
        ring(&self.bell);
        Ok(())
    }

    /// Tells whether there is something to read from a process.
    pub(super) fn has_some(&self, part: u8) -> bool {
        lock(&self.readers).iter().any(|from| from.part == part && from.reader.has_some())
    }

    /// A process has left.
    pub(super) fn remove(&self, part: u8) {
        lock(&self.ways).remove(&part);
        let mut readers = lock(&self.readers);
        readers.retain(|from| from.part != part);
        self.count.store(readers.len(), Ordering::SeqCst);
    }

    /// Tells whether there are rings to read.
    pub(crate) fn are_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Becomes readable when there is something to read.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The bell has rung.
    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8][..]);
    }

    /// Asks for the bell to be rung; returns whether there is something to read already.
    pub(crate) fn fall_asleep(&self) -> bool {
        lock(&self.readers).iter().any(|from| from.reader.fall_asleep())
    }

    /// Tells whether the sockets are to be emptied before the rings are read.
    pub(crate) fn sockets_first(&self) -> bool {
        let mut readers = lock(&self.readers);
        let new = readers.iter_mut().filter(|from| from.reader.is_fresh && from.reader.has_some());
        new.fold(false, |_, from| {
            from.reader.is_fresh = false;
            true
        })
    }

    /// Takes the next burst of the ring number `at`, if it has one.
    pub(crate) fn take(&self, at: usize, out: &mut BurstBuffer) -> Option<Came> {
        lock(&self.readers).get_mut(at).filter(|from| !from.reader.is_fresh)?.reader.take(out)
    }

    /// Number of rings to read.
    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }
}

/// Rings a bell. One that is full rings.
fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}
