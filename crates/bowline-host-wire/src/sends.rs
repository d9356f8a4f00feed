//! The ring of sends: the program pushes messages for which it has credit, the node pops them.
//!
//! An entry is the length of the payload and the number of the destination, 4 bytes each, 8 bytes
//! of nothing, and the payload.

#![allow(unsafe_code, reason = "payload that a program points at")]

use core::sync::atomic::Ordering;

use crate::area::{
    ALIGN, Area, DESTINATIONS, PAD, Place, RING_LEN, RING_MESSAGE_MAX, RING_NAME_MAX, SENDS, at,
    entry_len, is_aligned,
};
use crate::ids::LockOwner;
use crate::sync::{fence, spin_loop};

const HEAD: usize = 16;
/// In the lock while the node changes a destination.
const NODE: u32 = u32::MAX;

/// What became of a message that a program wanted to push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The node will see it.
    Done,
    /// The node sleeps: tell it.
    Wake,
    /// The node has to be asked, for this message.
    Ask,
}

/// A piece of a payload.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Where it is.
    pub base: *const u8,
    /// Its length in bytes.
    pub len: usize,
}

impl Area {
    /// Pushes a message to a destination; an empty name stands for the connected one. `owner` is a
    /// channel that nobody else uses meanwhile: if its process dies here, the node sets the lock
    /// free.
    ///
    /// # Safety
    /// The pieces are readable.
    pub unsafe fn push(&self, owner: LockOwner, name: &[u8], pieces: &[Piece]) -> Pushed {
        let copy = |place: Place, piece: &Piece| {
            // SAFETY: as the caller promises.
            unsafe { self.copy_in_from(place, piece.base, piece.len) };
            true
        };
        self.push_with(owner, name, pieces, copy).unwrap_or(Pushed::Ask)
    }

    /// The same with a copy of the caller's own, which tells whether it could: `None` where not,
    /// and then nothing was pushed.
    pub fn push_with(
        &self,
        owner: LockOwner,
        name: &[u8],
        pieces: &[Piece],
        copy: impl FnMut(Place, &Piece) -> bool,
    ) -> Option<Pushed> {
        let len = pieces.iter().fold(0, |sum: usize, piece| sum.saturating_add(piece.len));
        if len > RING_MESSAGE_MAX || !self.lock(owner) {
            return Some(Pushed::Ask);
        }
        let done = self.push_locked(name, pieces, len, copy);
        self.unlock();
        if !done? {
            return Some(Pushed::Ask);
        }
        // Pairs with the fence in `set_asleep`:
        // either the node sees the message before it sleeps, or the program sees that it sleeps.
        fence(Ordering::SeqCst);
        let asleep = self.u32(at::ASLEEP);
        // Of several programs one wakes the node. What it does then goes over its channel.
        let must_wake =
            asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::AcqRel) != 0;
        Some(if must_wake { Pushed::Wake } else { Pushed::Done })
    }

    /// Tells whether it was pushed; `None` where it could not be copied.
    fn push_locked(
        &self,
        name: &[u8],
        pieces: &[Piece],
        len: usize,
        mut copy: impl FnMut(Place, &Piece) -> bool,
    ) -> Option<bool> {
        let Some(destination) = (0..DESTINATIONS).find(|n| self.is_destination(*n, name)) else {
            return Some(false);
        };
        let slot = at::destination(destination);
        // What programs write, the lock orders. Credit pairs with `set_credit` and `set_credit_to`.
        let to_it = self.u64(slot + 8).load(Ordering::Relaxed);
        let bytes = self.u64(at::SENT_BYTES).load(Ordering::Relaxed).wrapping_add(len as u64);
        if to_it > self.u64(slot).load(Ordering::Acquire)
            || bytes >= self.u64(at::CREDIT).load(Ordering::Acquire)
        {
            return Some(false);
        }
        let tail = self.u64(at::SENDS).load(Ordering::Relaxed);
        // Pairs with `Sends::advance`: the node has read what was there before this writes over it.
        let head = self.u64(at::SENDS_POPPED).load(Ordering::Acquire);
        if !is_aligned(tail) {
            return Some(false); // the node will find what is wrong
        }
        let Some(room) = self.reserve(SENDS, head, tail, entry_len(HEAD, len)) else {
            return Some(false);
        };
        self.number(room.place).store(len as u32, Ordering::Relaxed);
        self.number(room.place.skip(4)).store(destination as u32, Ordering::Relaxed);
        let mut place = room.place.skip(HEAD);
        for piece in pieces {
            if !copy(place, piece) {
                return None;
            }
            place = place.skip(piece.len);
        }
        self.u64(slot + 8).store(to_it.wrapping_add(len as u64), Ordering::Relaxed);
        self.u64(at::SENT_BYTES).store(bytes, Ordering::Relaxed);
        // Pairs with the loads in `peek` and `set_destination`: who sees it sees the entry.
        self.u64(at::SENDS).store(room.end, Ordering::Release);
        Some(true)
    }

    fn is_destination(&self, n: usize, name: &[u8]) -> bool {
        let slot = at::destination(n);
        // One more than the length: 0 stands for no destination.
        if self.u32(slot + 16).load(Ordering::Relaxed) as usize != name.len() + 1 {
            return false;
        }
        let mut words = name.chunks(8).zip((slot + 24..).step_by(8));
        words.all(|(bytes, at)| word(bytes) == self.u64(at).load(Ordering::Relaxed))
    }

    fn lock(&self, LockOwner(owner): LockOwner) -> bool {
        let lock = self.u32(at::LOCK);
        // Others hold it for the time of a copy. Pairs with `unlock`, and with `owner_is_gone`.
        for _ in 0..64 {
            if lock.compare_exchange_weak(0, owner, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return true;
            }
            spin_loop();
        }
        false
    }

    fn unlock(&self) {
        // Pairs with the next `lock`, or with that in `set_destination`.
        self.u32(at::LOCK).store(0, Ordering::Release);
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(whole)
}

/// What a program may send to one destination, besides the socket's credit.
#[derive(Clone, Copy, Debug, Default)]
struct Credit {
    /// Bytes popped.
    done: u64,
    /// The most bytes up to which there ever was credit.
    limit: u64,
    named: bool,
}

/// A message that a program has pushed.
#[derive(Clone, Copy, Debug)]
pub struct QueuedSend {
    /// Its destination.
    pub destination: usize,
    /// Length of the payload in bytes.
    pub len: usize,
    /// Where the payload is.
    pub payload: Place,
    /// There was credit for it when it was pushed.
    pub has_credit: bool,
    next: u64,
}

/// The shared memory says what cannot be: its socket is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// The node's side of the ring of sends.
#[derive(Debug)]
pub struct Sends {
    area: Area,
    head: u64,
    /// Bytes popped, and the most up to which there ever was credit: a program may have pushed by
    /// an earlier credit.
    done: u64,
    limit: u64,
    credits: [Credit; DESTINATIONS],
}

/// The node's side of a ring of sends, for another process: how far it is, what was sent and the
/// most credit in all, and for each destination the same, and whether it has a name.
pub type SavedSends = ([u64; 3], [(u64, u64, bool); DESTINATIONS]);

impl Sends {
    /// What another process needs to resume.
    pub fn saved(&self) -> SavedSends {
        let credits = self.credits.map(|Credit { done, limit, named }| (done, limit, named));
        ([self.head, self.done, self.limit], credits)
    }

    /// The ring of an area that another process had.
    pub fn resume(area: Area, ([head, done, limit], credits): SavedSends) -> Self {
        let credits = credits.map(|(done, limit, named)| Credit { done, limit, named });
        Self { area, head, done, limit, credits }
    }

    /// The ring of an area that is new.
    pub fn new(area: Area) -> Self {
        area.mark();
        Self { area, head: 0, done: 0, limit: 0, credits: [Credit::default(); DESTINATIONS] }
    }

    /// The first message, which stays there.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn peek(&mut self) -> Result<Option<QueuedSend>, Broken> {
        loop {
            // Pairs with the store at the end of `push_locked`.
            let tail = self.area.u64(at::SENDS).load(Ordering::Acquire);
            let there = usize::try_from(tail.wrapping_sub(self.head)).map_err(|_| Broken)?;
            if there == 0 {
                return Ok(None);
            }
            if there > RING_LEN || !there.is_multiple_of(ALIGN) {
                return Err(Broken);
            }
            let place = SENDS.place(self.head);
            let len = self.area.number(place).load(Ordering::Relaxed);
            if len == PAD {
                let rest = RING_LEN - self.head as usize % RING_LEN;
                if rest > there {
                    return Err(Broken);
                }
                self.advance(self.head + rest as u64);
                continue;
            }
            let destination = self.area.number(place.skip(4)).load(Ordering::Relaxed) as usize;
            let len = len as usize;
            let whole = entry_len(HEAD, len.min(RING_LEN));
            if len > RING_MESSAGE_MAX || whole > there || !place.has(whole) {
                return Err(Broken);
            }
            let credit = self.credits.get(destination).filter(|p| p.named).ok_or(Broken)?;
            let has_credit = credit.done <= credit.limit && self.done + (len as u64) < self.limit;
            let next = self.head + whole as u64;
            let payload = place.skip(HEAD);
            return Ok(Some(QueuedSend { destination, len, payload, has_credit, next }));
        }
    }

    /// The first message was sent: its place is free.
    pub fn pop(&mut self, send: &QueuedSend) {
        self.done += send.len as u64;
        if let Some(credit) = self.credits.get_mut(send.destination) {
            credit.done += send.len as u64;
        }
        self.advance(send.next);
    }

    fn advance(&mut self, to: u64) {
        self.head = to;
        // Pairs with the load in `push_locked`, which makes room of what was read here.
        self.area.u64(at::SENDS_POPPED).store(to, Ordering::Release);
    }

    /// Gives credit for so many bytes more than were popped.
    pub fn set_credit(&mut self, room: usize) {
        let limit = self.done.saturating_add(room as u64);
        self.limit = self.limit.max(limit);
        // Pairs with the load in `push_locked`. An older one is as good: it was given once.
        self.area.u64(at::CREDIT).store(limit, Ordering::Release);
    }

    /// Gives credit at one destination; `None`: each message has to be asked for.
    pub fn set_credit_to(&mut self, destination: usize, room: Option<usize>) {
        let Some(credit) = self.credits.get_mut(destination) else { return };
        // Without credit, not even an empty message may be pushed.
        let limit = match room {
            Some(room) => credit.done.saturating_add(room as u64),
            None => credit.done.saturating_sub(1),
        };
        credit.limit = credit.limit.max(limit);
        // As in `set_credit`.
        self.area.u64(at::destination(destination)).store(limit, Ordering::Release);
    }

    /// Gives a place to a destination, in which there is nothing under way. Returns `false` when a
    /// program pushes at this moment, or has pushed.
    pub fn set_destination(&mut self, destination: usize, name: &[u8]) -> bool {
        let area = self.area;
        let Some(credit) = self.credits.get_mut(destination) else { return false };
        // Pairs with `unlock`: what was pushed under the lock is seen.
        let lock = area.u32(at::LOCK);
        if name.len() > RING_NAME_MAX
            || lock.compare_exchange(0, NODE, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        // A program that pushes without the lock is not honest, and may be missed.
        let is_empty = area.u64(at::SENDS).load(Ordering::Acquire) == self.head;
        if is_empty {
            let slot = at::destination(destination);
            // Counts from 1, so that a limit of 0 is none.
            *credit = Credit { done: 1, limit: 0, named: true };
            area.u64(slot).store(0, Ordering::Relaxed);
            area.u64(slot + 8).store(1, Ordering::Relaxed);
            for (bytes, at) in name.chunks(8).zip((slot + 24..).step_by(8)) {
                area.u64(at).store(word(bytes), Ordering::Relaxed);
            }
            area.u32(slot + 16).store(name.len() as u32 + 1, Ordering::Relaxed);
        }
        area.unlock();
        is_empty
    }

    /// Tells whether nothing is pushed.
    pub fn is_empty(&self) -> bool {
        // Behind the fence in `set_asleep`, where that matters.
        self.area.u64(at::SENDS).load(Ordering::SeqCst) == self.head
    }

    /// The node is about to sleep, or is awake. After it has said so, it looks once more.
    pub fn set_asleep(&self, asleep: bool) {
        // Pairs with the fence at the end of `Area::push`.
        self.area.u32(at::ASLEEP).store(u32::from(asleep), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The process of a channel is gone, perhaps in the middle of a push.
    pub fn owner_is_gone(&self, LockOwner(owner): LockOwner) {
        // Pairs with the next `lock`. The system has told that the process is gone, so what it has
        // written is seen.
        let lock = self.area.u32(at::LOCK);
        let _ = lock.compare_exchange(owner, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}
