//! The requests of an NBD store: those that wait to be sent, and those that the server has.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Instant;

use bowline_rnbd::{Errno, IoOp};
use bowline_verbs::Mem;

use super::losses::Losses;
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
    /// Who asks, as [`BackendIo::user`](crate::backend::BackendIo::user).
    pub(super) user: u64,
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
    Sent(Entry, Sent),
}

/// What became of a request that is sent.
struct Sent {
    since: Instant,
    /// Its data is still read from its memory, to be sent.
    is_copied_from: bool,
    /// The result, if the server has answered before it had all data.
    errno: Option<i32>,
}

/// How a connection has ended, by which it is decided what is sent again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Cut {
    /// The server has ended it.
    ByServer,
    /// It is not known whether the server has what it was sent, and still executes it.
    Unknown,
    /// The server has not answered in time.
    Silent,
}

impl Cut {
    /// Returns with which error a request fails that the server had, if it is not sent again.
    fn errno(self, op: IoOp) -> Option<Errno> {
        match self {
            Self::Silent => Some(Errno::ETIMEDOUT),
            Self::Unknown if op.changes() => Some(Errno::EIO),
            Self::Unknown | Self::ByServer => None,
        }
    }
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
    pub(super) losses: Losses,
}

impl Table {
    /// Queues a request.
    pub(super) fn add(&mut self, piece: Piece) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let entry = Entry { piece, resends: 0, covers: self.losses.changes() };
        self.slots[slot as usize].state = State::Waits(entry);
        self.queue.push_back(slot);
    }

    /// Tells whether requests wait to be sent.
    pub(super) fn waits(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Tells whether the server has requests.
    pub(super) fn has_sent(&self) -> bool {
        self.sent > 0
    }

    /// Returns since when the server has had the oldest of its requests.
    pub(super) fn oldest(&self) -> Option<Instant> {
        let sent = self.slots.iter().filter_map(|slot| match &slot.state {
            State::Sent(_, sent) => Some(sent.since),
            State::Free | State::Waits(_) => None,
        });
        sent.min()
    }

    /// Takes the next request to send, with its cookie. Of a write [`copied`](Self::copied) is to
    /// be called once its memory is not needed any more.
    pub(super) fn next(&mut self, now: Instant) -> Option<(u64, Piece)> {
        let number = self.queue.pop_front()?;
        let slot = self.slots.get_mut(number as usize)?;
        match mem::take(&mut slot.state) {
            State::Waits(entry) => {
                slot.generation = slot.generation.wrapping_add(1);
                let piece = entry.piece.clone();
                let is_copied_from = piece.op == IoOp::Write;
                slot.state = State::Sent(entry, Sent { since: now, is_copied_from, errno: None });
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

    /// Returns what the server was asked with this cookie, and has not answered.
    pub(super) fn asked(&mut self, cookie: u64) -> Option<(Asked, Option<Mem>)> {
        match &self.sent(cookie)?.state {
            State::Sent(Entry { piece, .. }, Sent { errno: None, .. }) => {
                let is_read = piece.op == IoOp::Read;
                let asked = Asked { is_read, offset: piece.offset, len: piece.len };
                Some((asked, piece.mem.clone()))
            }
            State::Sent(..) | State::Free | State::Waits(_) => None,
        }
    }

    /// The data of a write has been copied.
    pub(super) fn copied(&mut self, cookie: u64, finished: &mut Finished) {
        if let Some(State::Sent(_, sent)) = self.sent(cookie).map(|slot| &mut slot.state) {
            sent.is_copied_from = false;
            if let Some(errno) = sent.errno {
                self.answered(cookie, errno, finished);
            }
        }
    }

    /// Ends a request that the server has answered. The memory of a request that has ended is
    /// another one's: a write that is answered too early ends once it was copied.
    pub(super) fn answered(&mut self, cookie: u64, errno: i32, finished: &mut Finished) {
        let Some(slot) = self.sent(cookie) else { return };
        if let State::Sent(_, sent @ Sent { is_copied_from: true, .. }) = &mut slot.state {
            sent.errno = Some(errno);
            return;
        }
        if let State::Sent(entry, _) = mem::take(&mut slot.state) {
            self.sent -= 1;
            self.free.push(cookie as u32);
            if errno == 0 {
                match entry.piece.op {
                    IoOp::Flush => self.losses.flushed(entry.covers),
                    op if op.changes() && !entry.piece.fua => {
                        self.losses.changed(entry.piece.user);
                    }
                    _ => {}
                }
            }
            finished.extend(entry.piece.end(errno));
        }
    }

    /// The server has refused a request since it ends: the next connection has it first.
    pub(super) fn refused(&mut self, cookie: u64, finished: &mut Finished) {
        let Some(slot) = self.sent(cookie) else { return };
        match mem::take(&mut slot.state) {
            State::Sent(mut entry, _) if entry.resends < RESENDS_MAX => {
                entry.resends += 1;
                slot.state = State::Waits(entry);
                self.sent -= 1;
                self.queue.push_front(cookie as u32);
            }
            state => {
                slot.state = state;
                self.answered(cookie, Errno::EIO.neg(), finished);
            }
        }
    }

    /// The connection is lost, and nothing is copied to be sent. Requests that the server had are
    /// sent again, or fail, as [`Cut`] says. With changes that were not durable, flushes fail
    /// [NB-77].
    pub(super) fn lost(&mut self, cut: Cut, finished: &mut Finished) {
        let is_loss = self.losses.lose();
        let mut all = Vec::new();
        for (number, slot) in self.slots.iter_mut().enumerate() {
            let (mut entry, since) = match mem::take(&mut slot.state) {
                State::Free => continue,
                State::Waits(entry) => (entry, None),
                State::Sent(entry, sent) => (entry, Some(sent.since)),
            };
            let op = entry.piece.op;
            let errno = if is_loss && op == IoOp::Flush {
                self.losses.report(entry.piece.user);
                Some(Errno::EIO)
            } else {
                let has_tried = entry.resends >= RESENDS_MAX;
                let errno = || cut.errno(op).or(has_tried.then_some(Errno::EIO));
                since.and_then(|_| errno())
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
