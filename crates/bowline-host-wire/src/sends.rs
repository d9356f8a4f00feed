//! The ring of sends: the program posts messages for which it was promised room, the node carries
//! them out.
//!
//! An entry is the length of the payload and the number of the destination, 4 bytes each, 8 bytes
//! of nothing, and the payload.

#![allow(unsafe_code, reason = "payload that a program points at")]

use core::sync::atomic::{Ordering, fence};

use crate::area::{
    ALIGN, Area, DESTINATIONS, PAD, Place, RING_LEN, RING_MESSAGE_MAX, RING_NAME_MAX, SENDS, at,
    entry_len, is_aligned,
};
use crate::ids::LockOwner;

const HEAD: usize = 16;
/// In the lock while the node changes a destination.
const NODE: u32 = u32::MAX;

/// What became of a message that a program wanted to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
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
    /// Posts a message to a destination; an empty name stands for the connected one. `owner` is a
    /// channel that nobody else uses meanwhile: if its process dies here, the node sets the lock
    /// free.
    ///
    /// # Safety
    /// The pieces are readable.
    pub unsafe fn post(&self, owner: LockOwner, name: &[u8], pieces: &[Piece]) -> Posted {
        let len = pieces.iter().fold(0, |sum: usize, piece| sum.saturating_add(piece.len));
        if len > RING_MESSAGE_MAX || !self.lock(owner) {
            return Posted::Ask;
        }
        // SAFETY: as the caller promises.
        let done = unsafe { self.post_locked(name, pieces, len) };
        self.unlock();
        if !done {
            return Posted::Ask;
        }
        // Either the node sees the message before it sleeps, or the program sees that it sleeps.
        fence(Ordering::SeqCst);
        let asleep = self.u32(at::ASLEEP);
        let must_wake =
            asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::AcqRel) != 0;
        if must_wake { Posted::Wake } else { Posted::Done }
    }

    /// # Safety
    /// The pieces are readable.
    unsafe fn post_locked(&self, name: &[u8], pieces: &[Piece], len: usize) -> bool {
        let Some(destination) = (0..DESTINATIONS).find(|n| self.is_destination(*n, name)) else {
            return false;
        };
        let slot = at::destination(destination);
        let to_it = self.u64(slot + 8).load(Ordering::Relaxed);
        let bytes = self.u64(at::SENT_BYTES).load(Ordering::Relaxed).wrapping_add(len as u64);
        if to_it > self.u64(slot).load(Ordering::Acquire)
            || bytes >= self.u64(at::PROMISED).load(Ordering::Acquire)
        {
            return false;
        }
        let tail = self.u64(at::SENDS).load(Ordering::Relaxed);
        let head = self.u64(at::SENDS_DONE).load(Ordering::Acquire);
        if !is_aligned(tail) {
            return false; // the node will find what is wrong
        }
        let Some(room) = self.reserve(SENDS, head, tail, entry_len(HEAD, len)) else {
            return false;
        };
        self.number(room.place).store(len as u32, Ordering::Relaxed);
        self.number(room.place.skip(4)).store(destination as u32, Ordering::Relaxed);
        let mut place = room.place.skip(HEAD);
        for piece in pieces {
            // SAFETY: as the caller promises.
            unsafe { self.copy_in_from(place, piece.base, piece.len) };
            place = place.skip(piece.len);
        }
        self.u64(slot + 8).store(to_it.wrapping_add(len as u64), Ordering::Relaxed);
        self.u64(at::SENT_BYTES).store(bytes, Ordering::Relaxed);
        self.u64(at::SENDS).store(room.end, Ordering::Release);
        true
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
        // Others hold it for the time of a copy.
        for _ in 0..64 {
            if lock.compare_exchange_weak(0, owner, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return true;
            }
            core::hint::spin_loop();
        }
        false
    }

    fn unlock(&self) {
        self.u32(at::LOCK).store(0, Ordering::Release);
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(whole)
}

/// What a program may send to one destination.
#[derive(Clone, Copy, Debug, Default)]
struct Promise {
    /// Bytes carried out.
    done: u64,
    /// The most bytes up to which sends were ever promised.
    limit: u64,
    named: bool,
}

/// A message that a program has posted.
#[derive(Clone, Copy, Debug)]
pub struct Post {
    /// Its destination.
    pub destination: usize,
    /// Length of the payload in bytes.
    pub len: usize,
    /// Where the payload is.
    pub payload: Place,
    /// There was room for it when it was posted.
    pub promised: bool,
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
    /// Bytes carried out, and the most up to which they were ever promised: a program may have
    /// posted by an earlier promise.
    done: u64,
    limit: u64,
    promises: [Promise; DESTINATIONS],
}

/// The node's side of a ring of sends, for another process: how far it is, what was promised in
/// all, and for each destination what was sent, the most that was promised, and whether it has a
/// name.
pub type SavedSends = ([u64; 3], [(u64, u64, bool); DESTINATIONS]);

impl Sends {
    /// What another process needs to go on.
    pub fn saved(&self) -> SavedSends {
        let promises = self.promises.map(|Promise { done, limit, named }| (done, limit, named));
        ([self.head, self.done, self.limit], promises)
    }

    /// The ring of an area that another process had.
    pub fn resume(area: Area, ([head, done, limit], promises): SavedSends) -> Self {
        let promises = promises.map(|(done, limit, named)| Promise { done, limit, named });
        Self { area, head, done, limit, promises }
    }

    /// The ring of an area that is new.
    pub fn new(area: Area) -> Self {
        area.mark();
        Self { area, head: 0, done: 0, limit: 0, promises: [Promise::default(); DESTINATIONS] }
    }

    /// The first message that is not carried out.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn first(&mut self) -> Result<Option<Post>, Broken> {
        loop {
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
            let promise = self.promises.get(destination).filter(|p| p.named).ok_or(Broken)?;
            let promised = promise.done <= promise.limit && self.done + (len as u64) < self.limit;
            let next = self.head + whole as u64;
            let payload = place.skip(HEAD);
            return Ok(Some(Post { destination, len, payload, promised, next }));
        }
    }

    /// A message was carried out.
    pub fn carried_out(&mut self, post: &Post) {
        self.done += post.len as u64;
        if let Some(promise) = self.promises.get_mut(post.destination) {
            promise.done += post.len as u64;
        }
        self.advance(post.next);
    }

    fn advance(&mut self, to: u64) {
        self.head = to;
        self.area.u64(at::SENDS_DONE).store(to, Ordering::Release);
    }

    /// Promises room for so many bytes more than were carried out.
    pub fn promise(&mut self, room: usize) {
        let limit = self.done.saturating_add(room as u64);
        self.limit = self.limit.max(limit);
        self.area.u64(at::PROMISED).store(limit, Ordering::Release);
    }

    /// Promises room at one destination; `None`: each message has to be asked for.
    pub fn promise_to(&mut self, destination: usize, room: Option<usize>) {
        let Some(promise) = self.promises.get_mut(destination) else { return };
        // Without a promise, not even an empty message may be posted.
        let limit = match room {
            Some(room) => promise.done.saturating_add(room as u64),
            None => promise.done.saturating_sub(1),
        };
        promise.limit = promise.limit.max(limit);
        self.area.u64(at::destination(destination)).store(limit, Ordering::Release);
    }

    /// Gives a place to a destination, in which there is nothing under way. Returns `false` when a
    /// program posts at this moment, or has posted.
    pub fn set_destination(&mut self, destination: usize, name: &[u8]) -> bool {
        let area = self.area;
        let Some(promise) = self.promises.get_mut(destination) else { return false };
        let lock = area.u32(at::LOCK);
        if name.len() > RING_NAME_MAX
            || lock.compare_exchange(0, NODE, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let is_empty = area.u64(at::SENDS).load(Ordering::Acquire) == self.head;
        if is_empty {
            let slot = at::destination(destination);
            // Counts from 1, so that a limit of 0 is none.
            *promise = Promise { done: 1, limit: 0, named: true };
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

    /// Tells whether nothing is posted.
    pub fn is_empty(&self) -> bool {
        self.area.u64(at::SENDS).load(Ordering::SeqCst) == self.head
    }

    /// The node is about to sleep, or is awake. After it has said so, it looks once more.
    pub fn set_asleep(&self, asleep: bool) {
        self.area.u32(at::ASLEEP).store(u32::from(asleep), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The process of a channel is gone, perhaps in the middle of a post.
    pub fn owner_is_gone(&self, LockOwner(owner): LockOwner) {
        let lock = self.area.u32(at::LOCK);
        let _ = lock.compare_exchange(owner, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}
