//! The ring of messages to receive: the node pushes them, programs take them.
//!
//! An entry is the length of the payload and that of the sender's name, 4 bytes each, 8 bytes of
//! nothing, the name in 32 bytes, and the payload.

#![allow(unsafe_code, reason = "memory of a program that it points at")]

use core::sync::atomic::Ordering;

use crate::area::{
    Area, PAD, Place, RECEIVES, RING_LEN, RING_MESSAGE_MAX, RING_NAME_MAX, at, entry_len,
    is_aligned,
};
use crate::sends::Broken;
use crate::sync::fence;

const HEAD: usize = 48;
const NAME: usize = 16;

/// A message that a program has taken.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    /// Length of the whole message in bytes.
    pub len: usize,
    /// Name of the sender.
    pub name: [u8; RING_NAME_MAX],
    /// Length of the name in bytes.
    pub name_len: usize,
    /// The node wants a request to wake.
    pub notice: bool,
}

impl Area {
    /// Takes the first message, or looks at it. `copy` gets its payload's place and length; more
    /// than once, if another was quicker.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn take(
        &self,
        peek: bool,
        mut copy: impl FnMut(Place, usize),
    ) -> Result<Option<Received>, Broken> {
        self.take_with(peek, |place, len| {
            copy(place, len);
            true
        })
    }

    /// The same with a copy that tells whether it could. Where not, the message stays, and the
    /// result is `None`.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn take_with(
        &self,
        peek: bool,
        mut copy: impl FnMut(Place, usize) -> bool,
    ) -> Result<Option<Received>, Broken> {
        loop {
            // Pairs with `advance` of another program.
            let head = self.u64(at::TAKEN).load(Ordering::Acquire);
            // Pairs with `publish`: who sees the position sees the entries before it.
            let tail = self.u64(at::PUSHED).load(Ordering::Acquire);
            if head == tail {
                return Ok(None);
            }
            let place = RECEIVES.place(head);
            let len = self.number(place).load(Ordering::Relaxed);
            let step = if len == PAD {
                RING_LEN - head as usize % RING_LEN
            } else {
                entry_len(HEAD, (len as usize).min(RING_LEN))
            };
            let next = head.wrapping_add(step as u64);
            let there = tail.wrapping_sub(head);
            let fits = is_aligned(head)
                && there <= RING_LEN as u64
                && step as u64 <= there
                && (len == PAD || place.has(step));
            if !fits {
                // Pairs with the fence in `reclaim`, where what was read of the entry is newer:
                // another may have taken it, and the node have used its place again.
                fence(Ordering::Acquire);
                if self.u64(at::TAKEN).load(Ordering::Relaxed) == head {
                    return Err(Broken);
                }
                continue;
            }
            if len == PAD {
                self.advance(head, next);
                continue;
            }
            let len = len as usize;
            let name_len = self.number(place.skip(4)).load(Ordering::Relaxed) as usize;
            let mut name = [0; RING_NAME_MAX];
            let name_len = name_len.min(RING_NAME_MAX);
            self.copy_out(place.skip(NAME), &mut name[..name_len]);
            if !copy(place.skip(HEAD), len) {
                return Ok(None);
            }
            // Pairs with the fence in `reclaim`, as above, behind all that was copied.
            fence(Ordering::Acquire);
            let is_ours = if peek {
                self.u64(at::TAKEN).load(Ordering::Relaxed) == head
            } else {
                self.advance(head, next)
            };
            if is_ours {
                // Behind `advance`, in one order with the node's `notice_at` and then `reclaim`:
                // either this sees that the node is to be told, or the node what was taken.
                let at = self.u64(at::NOTICE).load(Ordering::SeqCst);
                let notice = !peek && head < at && at <= next;
                return Ok(Some(Received { len, name, name_len, notice }));
            }
        }
    }

    fn advance(&self, from: u64, to: u64) -> bool {
        // Pairs with the load in `reclaim`: the node writes behind what was read here.
        let taken = self.u64(at::TAKEN);
        taken.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Tells whether there is something to take.
    pub fn has_message(&self) -> bool {
        // As in `has_nothing`.
        fence(Ordering::SeqCst);
        self.u64(at::TAKEN).load(Ordering::Relaxed) != self.u64(at::PUSHED).load(Ordering::Acquire)
    }

    /// Tells whether there is nothing to take, nor more at the node.
    pub fn has_nothing(&self) -> bool {
        // Behind `wake_token_taken`, in one order with `publish` and then `next_wake_token`.
        fence(Ordering::SeqCst);
        self.u64(at::TAKEN).load(Ordering::Relaxed) == self.u64(at::PUSHED).load(Ordering::Acquire)
            && !self.has_more()
    }

    /// Tells whether the node has something to receive that does not go through the ring.
    pub fn has_more(&self) -> bool {
        // Pairs with `publish`. What there is comes over a channel.
        self.u32(at::MORE).load(Ordering::Acquire) != 0
    }

    /// Tells whether the socket shows a wake token that nobody has taken.
    pub fn has_wake_token(&self) -> bool {
        // Pairs with `next_wake_token` and `wake_token_taken`. Whoever is wrong receives from the
        // socket, where the token is, or is not.
        self.u32(at::WAKE_TOKEN).load(Ordering::SeqCst)
            != self.u32(at::WAKE_TOKEN_TAKEN).load(Ordering::SeqCst)
    }

    /// A wake token was taken from the socket.
    pub fn wake_token_taken(&self, token: u32) {
        // Another may have taken a later one, and been quicker to say so.
        let newer = |known: u32| (token.wrapping_sub(known).cast_signed() > 0).then_some(token);
        // In one order with `publish` and then `next_wake_token` of the node. What follows here is
        // `has_nothing`: either that sees what was published, or the node that the token is gone.
        let taken = self.u32(at::WAKE_TOKEN_TAKEN);
        let _ = taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, newer);
        fence(Ordering::SeqCst);
    }
}

/// The node's side of the ring.
#[derive(Debug)]
pub struct Receives {
    area: Area,
    tail: u64,
    /// How far programs had got when their places were last reclaimed.
    head: u64,
    token: u32,
}

/// The node's side of a ring of messages, for another process: how far it is, how far programs
/// were, and the number of the last wake token.
pub type SavedReceives = (u64, u64, u32);

impl Receives {
    /// What another process needs to resume.
    pub fn saved(&self) -> SavedReceives {
        (self.tail, self.head, self.token)
    }

    /// The ring of an area that another process had.
    pub fn resume(area: Area, (tail, head, token): SavedReceives) -> Self {
        Self { area, tail, head, token }
    }

    /// The ring of an area that is new.
    pub fn new(area: Area) -> Self {
        // Relaxed: programs get the memory later, by a message.
        area.u64(at::NOTICE).store(u64::MAX, Ordering::Relaxed);
        Self { area, tail: 0, head: 0, token: 0 }
    }

    /// Sees how far programs have got, whose messages' places are free; returns the position.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn reclaim(&mut self) -> Result<u64, Broken> {
        // Pairs with `Area::advance`. Behind `notice_at`; see `Area::take`.
        let head = self.area.u64(at::TAKEN).load(Ordering::SeqCst);
        let step = head.wrapping_sub(self.head);
        if step > self.tail - self.head || !is_aligned(step) {
            return Err(Broken);
        }
        // Pairs with the fences in `Area::take`: who reads what is written there from now on sees
        // that the place was taken.
        self.head = head;
        fence(Ordering::Release);
        Ok(head)
    }

    /// Tells whether programs have got further since places were last reclaimed.
    pub fn has_taken(&self) -> bool {
        // Behind `notice_at`, as `reclaim`.
        self.area.u64(at::TAKEN).load(Ordering::SeqCst) != self.head
    }

    /// Pushes a message; returns the position behind it. `None`: there is no room for it.
    pub fn push<'a>(
        &mut self,
        name: &[u8],
        len: usize,
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> Option<u64> {
        if len > RING_MESSAGE_MAX || name.len() > RING_NAME_MAX {
            return None;
        }
        let room = self.area.reserve(RECEIVES, self.head, self.tail, entry_len(HEAD, len))?;
        self.area.number(room.place).store(len as u32, Ordering::Relaxed);
        self.area.number(room.place.skip(4)).store(name.len() as u32, Ordering::Relaxed);
        self.area.copy_in(room.place.skip(NAME), name);
        let mut place = room.place.skip(HEAD);
        for piece in pieces {
            self.area.copy_in(place, piece);
            place = place.skip(piece.len());
        }
        self.tail = room.end;
        Some(room.end)
    }

    /// Shows programs what was pushed, and whether there is more that does not fit.
    pub fn publish(&mut self, more: bool) {
        // Pairs with the loads in `Area::take` and `has_nothing`. Before `next_wake_token`, in one
        // order with `Area::wake_token_taken`.
        self.area.u64(at::PUSHED).store(self.tail, Ordering::SeqCst);
        self.area.u32(at::MORE).store(u32::from(more), Ordering::SeqCst);
    }

    /// Asks for a request to wake when programs have got so far.
    pub fn notice_at(&mut self, position: Option<u64>) {
        // Before `reclaim`, in one order with `Area::take`.
        self.area.u64(at::NOTICE).store(position.unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Tells whether everything that was pushed is taken, as far as programs say.
    pub fn is_empty(&self) -> bool {
        // Pairs with `Area::advance`.
        self.area.u64(at::TAKEN).load(Ordering::SeqCst) == self.tail
    }

    /// Number of a new wake token to send, unless the last one has not been taken.
    pub fn next_wake_token(&mut self) -> Option<u32> {
        if self.has_wake_token() {
            return None;
        }
        self.token = self.token.wrapping_add(1).max(1);
        // Pairs with `Area::has_wake_token`, here and below.
        self.area.u32(at::WAKE_TOKEN).store(self.token, Ordering::SeqCst);
        Some(self.token)
    }

    /// The last wake token was not sent.
    pub fn take_wake_token_back(&mut self) {
        self.token = self.token.wrapping_sub(1);
        self.area.u32(at::WAKE_TOKEN).store(self.token, Ordering::SeqCst);
    }

    /// Tells whether a wake token was sent that no program says to have taken.
    pub fn has_wake_token(&self) -> bool {
        // Behind `publish`, in one order with `Area::wake_token_taken`.
        self.token != self.area.u32(at::WAKE_TOKEN_TAKEN).load(Ordering::SeqCst)
    }

    /// The last wake token is gone, whatever programs say.
    pub fn wake_token_is_gone(&mut self) {
        // Programs write here as well, but nothing that is newer.
        self.area.u32(at::WAKE_TOKEN_TAKEN).store(self.token, Ordering::SeqCst);
    }
}
