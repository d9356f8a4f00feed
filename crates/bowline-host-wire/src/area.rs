//! Memory that a program and the node share for one socket: two rings of messages, and what the one
//! tells the other.
//!
//! ```text
//!      0   magic | fill token
//!     64   node:     sends popped | bytes of credit | more
//!    128   both:     the node sleeps
//!    192   program:  sends | bytes sent | lock
//!    256   node:     messages pushed | last wake token | notice
//!    320   program:  messages taken | last wake token taken
//!    512   8 destinations of 64 bytes: bytes of credit | bytes sent | name
//!   4096   ring of sends
//!   4096 + RING_LEN   ring of messages to receive
//! ```
//!
//! Each number has one writer, but for the lock and the sleep. Positions in a ring count bytes from
//! the beginning and never wrap. Either side may find anything here: it trusts only what it has
//! written itself and kept a copy of, and looks at a number of the other once.
//!
//! What is in the rings, names, and what only programs write are accessed Relaxed: a position, or
//! the lock, orders them. Which access pairs with which stands at each. `model/` runs both sides in
//! all orders of a few steps, and without one or the other of these orderings.

#![allow(unsafe_code, reason = "memory that is shared between processes")]

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::sync::{self, U8, U32, U64};

/// Length of each ring in bytes.
pub const RING_LEN: usize = sync::RING_LEN;

/// Length of the shared memory in bytes.
pub const AREA_LEN: usize = FRONT + 2 * RING_LEN;

/// Longest message that goes through a ring, bytes.
pub const RING_MESSAGE_MAX: usize = RING_LEN / 4;

/// Bytes of a fill token.
pub const FILL_TOKEN_LEN: usize = 8;

/// Destinations for which a program may have credit.
pub const DESTINATIONS: usize = sync::DESTINATIONS;

/// Longest name of a destination or sender, bytes: a `sockaddr_in6`.
pub const RING_NAME_MAX: usize = 28;

const FRONT: usize = 4096;
const MAGIC: u64 = u64::from_ne_bytes(*b"bowline1");

/// Bytes to which entries of a ring are aligned.
pub(crate) const ALIGN: usize = 16;
/// Length in an entry that says that the next entry is at the start of the ring.
pub(crate) const PAD: u32 = u32::MAX;
/// An empty ring whose next entry lies above starts anew: what is used of it stays in the cache.
const RESTART_ABOVE: usize = RING_LEN / 4;

/// The shared memory of one socket, mapped.
#[derive(Clone, Copy, Debug)]
pub struct Area(NonNull<u8>);

// SAFETY: all access to the memory is atomic.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

/// One of the two rings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring(usize);

pub(crate) const SENDS: Ring = Ring(FRONT);
pub(crate) const RECEIVES: Ring = Ring(FRONT + RING_LEN);

/// A place in a ring.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    ring: Ring,
    /// Bytes from the start of the ring.
    offset: usize,
}

/// Room for an entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserved {
    pub(crate) place: Place,
    /// Position behind the entry.
    pub(crate) end: u64,
}

/// Tells whether an entry may begin at a position.
pub(crate) const fn is_aligned(position: u64) -> bool {
    position.is_multiple_of(ALIGN as u64)
}

/// Bytes of a ring that an entry takes.
pub(crate) const fn entry_len(head: usize, payload: usize) -> usize {
    (head + payload).next_multiple_of(ALIGN)
}

impl Place {
    /// The place so many bytes on.
    #[must_use]
    pub const fn skip(self, by: usize) -> Self {
        Self { ring: self.ring, offset: self.offset + by }
    }

    /// Tells whether so many bytes lie between here and the end of the ring.
    pub(crate) const fn has(self, len: usize) -> bool {
        len <= RING_LEN - self.offset
    }
}

impl Ring {
    /// The place of an entry: aligned, and with [`ALIGN`] bytes before the end of the ring,
    /// whatever position the other side has written.
    pub(crate) const fn place(self, position: u64) -> Place {
        Place { ring: self, offset: position as usize % RING_LEN / ALIGN * ALIGN }
    }
}

impl Area {
    /// Memory of [`AREA_LEN`] bytes.
    ///
    /// # Safety
    /// The memory is mapped readable and writable, aligned to a page, and stays mapped for as long
    /// as this or a copy of it is used. Nothing but an `Area` accesses it in this process.
    pub const unsafe fn new(base: NonNull<u8>) -> Self {
        Self(base)
    }

    /// Where it is mapped.
    pub const fn base(self) -> NonNull<u8> {
        self.0
    }

    /// Says what memory this is; the node does, once.
    pub fn mark(&self) {
        // Relaxed: programs get the memory later, by a message.
        self.u64(0).store(MAGIC, Ordering::Relaxed);
    }

    /// Says with what programs fill the socket; the node does, once, with a random number.
    pub fn set_fill_token(&self, token: u64) {
        // Relaxed: as in `mark`.
        self.u64(8).store(token, Ordering::Relaxed);
    }

    /// What a program sends on the socket to make it unwritable, and nobody by chance.
    pub fn fill_token(&self) -> [u8; FILL_TOKEN_LEN] {
        self.u64(8).load(Ordering::Relaxed).to_ne_bytes()
    }

    /// Tells whether this was sent to make the socket unwritable: anything may have been where the
    /// node that has made the socket gave no token.
    pub fn is_fill_token(&self, bytes: &[u8]) -> bool {
        let token = self.fill_token();
        bytes == token || token == [0; FILL_TOKEN_LEN]
    }

    /// Tells whether it is memory of this layout.
    pub fn is_marked(&self) -> bool {
        self.u64(0).load(Ordering::Relaxed) == MAGIC
    }

    pub(crate) fn u64(&self, at: usize) -> U64<'_> {
        debug_assert!(at + 8 <= AREA_LEN && at.is_multiple_of(8), "a number within the area");
        // SAFETY: all callers pass constants, or places within a ring, that lie in the memory. It
        // is mapped and aligned, and nothing but areas accesses it in this process.
        unsafe { sync::u64(self.0, at) }
    }

    pub(crate) fn u32(&self, at: usize) -> U32<'_> {
        debug_assert!(at + 4 <= AREA_LEN && at.is_multiple_of(4), "a number within the area");
        // SAFETY: as in `u64`.
        unsafe { sync::u32(self.0, at) }
    }

    fn u8(&self, at: usize) -> U8<'_> {
        debug_assert!(at < AREA_LEN, "a byte within the area");
        // SAFETY: as in `u64`.
        unsafe { sync::u8(self.0, at) }
    }

    /// A number at the beginning of an entry, or behind it.
    pub(crate) fn number(&self, place: Place) -> U32<'_> {
        self.u32(place.ring.0 + place.offset)
    }

    /// Finds room for an entry between `tail` and `head`, which is at most the ring's length
    /// behind. Marks bytes that are left out.
    pub(crate) fn reserve(&self, ring: Ring, head: u64, tail: u64, len: usize) -> Option<Reserved> {
        let free = RING_LEN.checked_sub(tail.wrapping_sub(head) as usize)?;
        let place = ring.place(tail);
        let to_end = RING_LEN - place.offset;
        // Offset 0 is before this one, so an empty ring has room for the entry below as well.
        let may_restart = free == RING_LEN && place.offset > RESTART_ABOVE.max(len);
        if len <= to_end && !may_restart {
            let end = tail.wrapping_add(len as u64);
            return (len <= free).then_some(Reserved { place, end });
        }
        if to_end + len > free {
            return None;
        }
        self.number(place).store(PAD, Ordering::Relaxed);
        let end = tail.wrapping_add((to_end + len) as u64);
        Some(Reserved { place: Place { ring, offset: 0 }, end })
    }

    /// Where bytes of a ring are, which other processes may change at any time.
    ///
    /// # Panics
    /// When they do not lie between the place and the end of the ring.
    pub fn bytes_at(&self, place: Place, len: usize) -> *mut u8 {
        assert!(place.has(len), "the bytes lie in the ring");
        self.0.as_ptr().wrapping_add(place.ring.0 + place.offset)
    }

    /// Copies bytes into a ring.
    ///
    /// # Panics
    /// When they do not fit between the place and the end of the ring.
    pub fn copy_in(&self, to: Place, from: &[u8]) {
        // SAFETY: a slice is readable.
        unsafe { self.copy_in_from(to, from.as_ptr(), from.len()) };
    }

    /// Copies bytes into a ring.
    ///
    /// # Panics
    /// As [`copy_in`](Self::copy_in).
    ///
    /// # Safety
    /// `from` is readable for `len` bytes, which may change meanwhile.
    pub unsafe fn copy_in_from(&self, to: Place, from: *const u8, len: usize) {
        assert!(to.has(len), "the bytes fit into the ring");
        let start = to.ring.0 + to.offset;
        in_words(start, len, |done, is_word| {
            let (at, from) = (start + done, from.wrapping_add(done));
            if is_word {
                // SAFETY: so many bytes are left.
                let word = unsafe { from.cast::<u64>().read_unaligned() };
                self.u64(at).store(word, Ordering::Relaxed);
            } else {
                // SAFETY: a byte is left.
                let byte = unsafe { from.read() };
                self.u8(at).store(byte, Ordering::Relaxed);
            }
        });
    }

    /// Copies bytes out of a ring.
    ///
    /// # Panics
    /// When they do not lie between the place and the end of the ring.
    pub fn copy_out(&self, from: Place, to: &mut [u8]) {
        // SAFETY: a slice is writable.
        unsafe { self.copy_out_to(from, to.as_mut_ptr(), to.len()) };
    }

    /// Copies bytes out of a ring.
    ///
    /// # Panics
    /// As [`copy_out`](Self::copy_out).
    ///
    /// # Safety
    /// `to` is writable for `len` bytes.
    pub unsafe fn copy_out_to(&self, from: Place, to: *mut u8, len: usize) {
        assert!(from.has(len), "the bytes lie in the ring");
        let start = from.ring.0 + from.offset;
        in_words(start, len, |done, is_word| {
            let (at, to) = (start + done, to.wrapping_add(done));
            if is_word {
                let word = self.u64(at).load(Ordering::Relaxed);
                // SAFETY: so many bytes are left.
                unsafe { to.cast::<u64>().write_unaligned(word) };
            } else {
                let byte = self.u8(at).load(Ordering::Relaxed);
                // SAFETY: a byte is left.
                unsafe { to.write(byte) };
            }
        });
    }
}

/// Passes over `len` bytes from `start` on: words of eight bytes where those are aligned, and
/// single bytes. `each` gets how many were passed, and whether a word is next.
#[inline(always)]
fn in_words(start: usize, len: usize, mut each: impl FnMut(usize, bool)) {
    const WORD: usize = size_of::<u64>();
    let mut done = 0;
    while done < len && !(start + done).is_multiple_of(WORD) {
        each(done, false);
        done += 1;
    }
    // Atomic accesses stay single ones, so the compiler makes no longer loop of this by itself.
    while len - done >= 4 * WORD {
        (0..4).for_each(|n| each(done + n * WORD, true));
        done += 4 * WORD;
    }
    while len - done >= WORD {
        each(done, true);
        done += WORD;
    }
    while done < len {
        each(done, false);
        done += 1;
    }
}

/// Offsets of the numbers.
pub(crate) mod at {
    pub(crate) const SENDS_POPPED: usize = 64;
    pub(crate) const CREDIT: usize = 72;
    pub(crate) const MORE: usize = 80;
    pub(crate) const ASLEEP: usize = 128;
    pub(crate) const SENDS: usize = 192;
    pub(crate) const SENT_BYTES: usize = 200;
    pub(crate) const LOCK: usize = 208;
    pub(crate) const PUSHED: usize = 256;
    pub(crate) const NOTICE: usize = 264;
    pub(crate) const WAKE_TOKEN: usize = 272;
    pub(crate) const TAKEN: usize = 320;
    pub(crate) const WAKE_TOKEN_TAKEN: usize = 328;

    /// Of destination `n`; the name is at 24, its length at 16.
    pub(crate) const fn destination(n: usize) -> usize {
        512 + 64 * n
    }
}
