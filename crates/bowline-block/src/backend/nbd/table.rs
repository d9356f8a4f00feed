//! The requests of an NBD store: those that wait to be sent, and those that the server has.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Instant;

use bowline_rnbd::{Errno, IoOp};
use bowline_verbs::Mem;

use super::replies::Asked;
use crate::backend::{BackendDone, BackendResult};

/// How often a request is sent again after its connection was lost.
const RESENDS_MAX: u8 = 3;

/// A request to the store, which is one or more requests to the server.
pub(super) struct Whole {
    pub(super) token: u64,
    pub(super) done: Arc<dyn BackendDone>,
    pub(super) left: AtomicU32,
    /// The first error.
    pub(super) errno: AtomicI32,
}

/// A request to the server.
#[derive(Clone)]
pub(super) struct Piece {
    pub(super) op: IoOp,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) fua: bool,
    pub(super) nounmap: bool,
    pub(super) mem: Option<Mem>,
    pub(super) whole: Arc<Whole>,
}

impl Piece {
    /// Counts the piece as answered; returns the result of the whole request with its last one.
    fn end(self, errno: i32) -> Option<(Arc<dyn BackendDone>, BackendResult)> {
        let whole = self.whole;
        // Relaxed, both: the lock of the table orders them.
        let _ = whole.errno.compare_exchange(0, errno, Ordering::Relaxed, Ordering::Relaxed);
        if whole.left.fetch_sub(1, Ordering::Relaxed) > 1 {
            return None;
        }
        let errno = whole.errno.load(Ordering::Relaxed);
        let result = BackendResult { token: whole.token, errno, direct: None };
        Some((Arc::clone(&whole.done), result))
    }
}

/// Results to deliver once no lock is held.
pub(super) type Finished = Vec<(Arc<dyn BackendDone>, BackendResult)>;

#[derive(Default)]
struct Slot {
    /// Changes with each use, so that no reply is taken for that of a later request.
    generation: u32,
    state: State,
}

#[derive(Default)]
enum State {
    #[default]
    Free,
    Waits(Entry),
    Sent(Entry, Instant),
}

struct Entry {
    piece: Piece,
    resends: u8,
    /// Of a flush: how many changes had been answered when it was asked for.
    covers: u64,
}

/// All requests.
#[derive(Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    queue: VecDeque<u32>,
    sent: usize,
    /// Changes that were answered, and how many of them are durable.
    changes: u64,
    durable: u64,
    /// A connection was lost with changes that were not durable: no flush has said so yet.
    has_lost: bool,
}

impl Table {
    /// Queues a request.
    pub(super) fn add(&mut self, piece: Piece) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let entry = Entry { piece, resends: 0, covers: self.changes };
        self.slots[slot as usize].state = State::Waits(entry);
        self.queue.push_back(slot);
    }

    /// Tells whether what was answered before may be lost, so that a flush has to fail; once.
    pub(super) fn take_lost(&mut self) -> bool {
        mem::take(&mut self.has_lost)
    }

    /// Tells whether requests wait to be sent.
    pub(super) fn waits(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Tells whether the server has requests.
    pub(super) fn has_sent(&self) -> bool {
        self.sent > 0
    }

    /// Takes the next request to send, with its cookie.
    pub(super) fn next(&mut self, now: Instant) -> Option<(u64, Piece)> {
        let number = self.queue.pop_front()?;
        let slot = self.slots.get_mut(number as usize)?;
        match mem::take(&mut slot.state) {
            State::Waits(entry) => {
                slot.generation = slot.generation.wrapping_add(1);
                let piece = entry.piece.clone();
                slot.state = State::Sent(entry, now);
                self.sent += 1;
                Some((u64::from(slot.generation) << 32 | u64::from(number), piece))
            }
            other => {
                slot.state = other;
                None
            }
        }
    }

    fn sent(&mut self, cookie: u64) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(cookie as u32 as usize)?;
        let is_it = u64::from(slot.generation) == cookie >> 32;
        (is_it && matches!(slot.state, State::Sent(..))).then_some(slot)
    }

    /// Returns what the server was asked with this cookie.
    pub(super) fn asked(&mut self, cookie: u64) -> Option<(Asked, Option<Mem>)> {
        match &self.sent(cookie)?.state {
            State::Sent(Entry { piece, .. }, _) => {
                let is_read = piece.op == IoOp::Read;
                let asked = Asked { is_read, offset: piece.offset, len: piece.len };
                Some((asked, piece.mem.clone()))
            }
            State::Free | State::Waits(_) => None,
        }
    }

    /// Ends a request that the server has answered.
    pub(super) fn answered(&mut self, cookie: u64, errno: i32, finished: &mut Finished) {
        if let Some(State::Sent(entry, _)) =
            self.sent(cookie).map(|slot| mem::take(&mut slot.state))
        {
            self.sent -= 1;
            self.free.push(cookie as u32);
            if errno == 0 {
                match entry.piece.op {
                    IoOp::Flush => self.durable = self.durable.max(entry.covers),
                    op if op.changes() && !entry.piece.fua => self.changes += 1,
                    _ => {}
                }
            }
            finished.extend(entry.piece.end(errno));
        }
    }

    /// The connection is lost. Requests that the server had are sent again; with `gives_up` they
    /// fail instead, since nobody knows what became of them. With changes that were not durable,
    /// flushes fail [NB-77].
    pub(super) fn lost(&mut self, gives_up: Option<Errno>, finished: &mut Finished) {
        let was_unflushed = self.changes > self.durable;
        self.durable = self.changes;
        let mut said = false;
        let mut all = Vec::new();
        for (number, slot) in self.slots.iter_mut().enumerate() {
            let (mut entry, since) = match mem::take(&mut slot.state) {
                State::Free => continue,
                State::Waits(entry) => (entry, None),
                State::Sent(entry, since) => (entry, Some(since)),
            };
            let is_flush = entry.piece.op == IoOp::Flush && was_unflushed;
            said |= is_flush;
            let errno = match gives_up.filter(|_| since.is_some()) {
                _ if is_flush => Some(Errno::EIO),
                Some(errno) => Some(errno),
                None if since.is_some() && entry.resends >= RESENDS_MAX => Some(Errno::EIO),
                None => None,
            };
            if let Some(errno) = errno {
                self.free.push(number as u32);
                finished.extend(entry.piece.end(errno.neg()));
                continue;
            }
            entry.resends += u8::from(since.is_some());
            all.push((since, number as u32));
            slot.state = State::Waits(entry);
        }
        self.has_lost |= was_unflushed && !said;
        // What was sent first comes first.
        all.sort_by_key(|(since, _)| (since.is_none(), *since));
        self.queue = all.into_iter().map(|(_, number)| number).collect();
        self.sent = 0;
    }

    /// Ends all requests.
    pub(super) fn fail_all(&mut self, errno: Errno, finished: &mut Finished) {
        self.queue.clear();
        self.sent = 0;
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if let State::Waits(entry) | State::Sent(entry, _) = mem::take(&mut slot.state) {
                self.free.push(number as u32);
                finished.extend(entry.piece.end(errno.neg()));
            }
        }
    }
}
