//! The node's side of the rings of one socket: what a program has pushed is sent, and what the core
//! lends is pushed to it.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use bowline_host_wire::{
    Area, Broken, DESTINATIONS, LockOwner, Receives, SavedReceives, SavedSends, Sends, name,
};
use bowline_rds::{Node, SendMsg, SocketId};
use bowline_rds_driver::Driver;
use serde::{Deserialize, Serialize};

use crate::core::{Rds, SharedMemory};

/// Most messages, and bytes of them, that one socket sends before others get their turn.
const TURN_MESSAGES: usize = 256;
const TURN_BYTES: usize = 256 << 10;

/// Rings of one socket.
#[derive(Debug)]
pub(crate) struct Rings<M> {
    sends: Sends,
    receives: Receives,
    /// Position behind each message that is lent, and its length in bytes.
    lent: VecDeque<(u64, usize)>,
    lent_bytes: usize,
    /// Name of each destination, as programs give it and as it is meant.
    destinations: [Option<(Vec<u8>, Option<SocketAddr>)>; DESTINATIONS],
    /// The next place for a destination.
    next: usize,
    /// The first send has no room now.
    stalled: bool,
    /// There is something to receive that is not lent.
    more: bool,
    memory: M,
}

/// What the node knows of the rings of one socket beside what is in them.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedRings {
    sends: SavedSends,
    receives: SavedReceives,
    lent: VecDeque<(u64, usize)>,
    destinations: [Option<(Vec<u8>, Option<SocketAddr>)>; DESTINATIONS],
    next: usize,
    stalled: bool,
    more: bool,
}

impl<M: SharedMemory> Rings<M> {
    /// `fill_token`: a number that nobody guesses.
    pub(crate) fn new(memory: M, fill_token: u64) -> Self {
        let area: Area = memory.area();
        area.set_fill_token(fill_token);
        Self {
            sends: Sends::new(area),
            receives: Receives::new(area),
            lent: VecDeque::new(),
            lent_bytes: 0,
            destinations: Default::default(),
            next: 0,
            stalled: false,
            more: false,
            memory,
        }
    }

    pub(crate) const fn memory(&self) -> &M {
        &self.memory
    }

    pub(crate) fn into_memory(self) -> M {
        self.memory
    }

    /// What another process needs to resume with the same memory.
    pub(crate) fn saved(&self) -> SavedRings {
        SavedRings {
            sends: self.sends.saved(),
            receives: self.receives.saved(),
            lent: self.lent.clone(),
            destinations: self.destinations.clone(),
            next: self.next,
            stalled: self.stalled,
            more: self.more,
        }
    }

    /// Resumes with memory that another process had.
    pub(crate) fn resume(memory: M, saved: SavedRings) -> Self {
        let area = memory.area();
        Self {
            sends: Sends::resume(area, saved.sends),
            receives: Receives::resume(area, saved.receives),
            lent_bytes: saved.lent.iter().map(|(_, len)| len).sum(),
            lent: saved.lent,
            destinations: saved.destinations,
            next: saved.next % DESTINATIONS,
            stalled: saved.stalled,
            more: saved.more,
            memory,
        }
    }

    /// Sends what programs have pushed. Returns how many messages.
    pub(crate) fn run_sends(
        &mut self,
        rds: &impl Rds,
        id: SocketId,
        cx: &Context<'_>,
        scratch: &mut [u8],
    ) -> Result<usize, Broken> {
        let (mut messages, mut bytes) = (0, 0);
        let mut touched = [false; DESTINATIONS];
        self.stalled = false;
        while messages < TURN_MESSAGES && bytes < TURN_BYTES {
            let Some(queued) = self.sends.peek()? else { break };
            let payload = &mut scratch[..queued.len];
            self.memory.area().copy_out(queued.payload, payload);
            let name = self.destinations[queued.destination].as_ref().and_then(|(_, name)| *name);
            let payload = [IoSlice::new(payload)];
            let promised = queued.has_credit;
            let message = SendMsg { name, payload: &payload, promised, ..SendMsg::default() };
            if let Err(error) = rds.send(id, &message)
                && Driver::would_block(&error)
                && rds.poll_send(id, &message, cx).is_pending()
            {
                self.stalled = true;
                break;
            }
            // What can never be sent is lost, as it is when a destination goes away later.
            self.sends.pop(&queued);
            touched[queued.destination] = true;
            messages += 1;
            bytes += queued.len;
        }
        if messages > 0 {
            rds.with_core(|core, _| {
                self.set_credit(core, id);
                for (n, _) in touched.iter().enumerate().filter(|(_, touched)| **touched) {
                    self.set_credit_to(core, id, n);
                }
            });
        }
        Ok(messages)
    }

    /// Gives programs credit for what the socket has room for.
    fn set_credit(&mut self, core: &Node, id: SocketId) {
        // A queue that is full of empty messages has no room for another.
        let is_writable = core.readiness(id).is_ok_and(|ready| ready.writable);
        let used = core.send_bytes(id).ok().filter(|_| is_writable).unwrap_or(usize::MAX);
        let room = core.send_buffer(id).unwrap_or(0).saturating_sub(used);
        self.sends.set_credit(room);
    }

    fn set_credit_to(&mut self, core: &Node, id: SocketId, destination: usize) {
        if let Some((_, name)) = &self.destinations[destination] {
            self.sends.set_credit_to(destination, core.send_room(id, *name));
        }
    }

    /// There may be more room now than there is credit for.
    pub(crate) fn renew_credit(&mut self, rds: &impl Rds, id: SocketId) {
        rds.with_core(|core, _| self.set_credit(core, id));
    }

    /// A message to this destination was sent: programs may push the next ones.
    pub(crate) fn allow(
        &mut self,
        rds: &impl Rds,
        id: SocketId,
        raw: &[u8],
        name: Option<SocketAddr>,
    ) {
        let known = self.destinations.iter().position(|d| d.as_ref().is_some_and(|d| d.0 == raw));
        let destination = match known {
            Some(known) => known,
            None if self.sends.set_destination(self.next, raw) => {
                let place = self.next;
                self.destinations[place] = Some((raw.to_vec(), name));
                self.next = (place + 1) % DESTINATIONS;
                place
            }
            None => return,
        };
        rds.with_core(|core, _| {
            self.set_credit(core, id);
            self.set_credit_to(core, id, destination);
        });
    }

    /// Tells whether this was sent to make the socket unwritable.
    pub(crate) fn is_fill_token(&self, bytes: &[u8]) -> bool {
        self.memory.area().is_fill_token(bytes)
    }

    /// Programs have to ask again for each destination.
    pub(crate) fn allow_nothing(&mut self) {
        for n in 0..DESTINATIONS {
            self.sends.set_credit_to(n, None);
        }
    }

    /// Tells whether all that was pushed is sent.
    pub(crate) fn has_no_sends(&self) -> bool {
        self.sends.is_empty()
    }

    /// Tells whether there is a send that may have room.
    pub(crate) fn has_work(&self) -> bool {
        !self.stalled && !self.sends.is_empty()
    }

    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.sends.set_asleep(asleep);
    }

    pub(crate) fn owner_is_gone(&self, owner: LockOwner) {
        self.sends.owner_is_gone(owner);
    }

    /// Releases what programs have taken, and pushes what has come. Returns how many messages it
    /// has pushed, and whether there was something to release.
    pub(crate) fn push_received(
        &mut self,
        rds: &impl Rds,
        id: SocketId,
        cx: &Context<'_>,
    ) -> Result<(usize, bool), Broken> {
        let released = self.release(rds, id)?;
        let before = self.lent.len();
        let more = loop {
            let (receives, lent) = (&mut self.receives, &mut self.lent);
            let sum = &mut self.lent_bytes;
            let result = rds.poll_lend(id, cx, |from, len, pieces| {
                let (name, name_len) = name::raw(from);
                let Some(end) = receives.push(&name[..name_len], len, pieces) else {
                    return false;
                };
                lent.push_back((end, len));
                *sum += len;
                true
            });
            match result {
                Poll::Pending => break false,
                Poll::Ready(Ok(0)) => break true,
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(_)) => break self.more,
            }
        };
        let count = self.lent.len() - before;
        if count > 0 || more != self.more {
            self.more = more;
            self.receives.publish(more);
        }
        if count > 0 || released {
            self.renew_notice(rds, id);
        }
        Ok((count, released))
    }

    /// Asks for a request to wake by what is lent and by the size of the receive buffer. After a
    /// change of that size the socket needs another turn: nobody reports what was taken until now.
    pub(crate) fn renew_notice(&mut self, rds: &impl Rds, id: SocketId) {
        let (buffer, is_congested) =
            rds.with_core(|core, _| (core.recv_buffer(id).unwrap_or(0), core.is_congested(id)));
        // Senders wait for the room at a congested port, however little is lent.
        self.set_notice(if is_congested { 0 } else { NOTICE_BYTES.min(buffer / 4) });
    }

    /// Gives back to the core what programs have taken. Tells whether there was something.
    pub(crate) fn release(&mut self, rds: &impl Rds, id: SocketId) -> Result<bool, Broken> {
        let head = self.receives.reclaim()?;
        let taken = self.lent.iter().take_while(|(end, _)| *end <= head).count();
        if taken > 0 {
            self.lent_bytes -= self.lent.drain(..taken).map(|(_, len)| len).sum::<usize>();
            rds.with_core(|core, now| core.give_back(now, id, taken));
        }
        Ok(taken > 0)
    }

    /// Asks for a request to wake when half of what is lent is taken: only then senders learn of
    /// the room.
    fn set_notice(&mut self, enough: usize) {
        let mut half = self.lent_bytes / 2;
        let middle = self.lent.iter().find(|(_, len)| {
            let before = half;
            half = half.saturating_sub(*len);
            before <= *len
        });
        let many = self.lent_bytes > 0 && self.lent_bytes >= enough;
        self.receives.notice_at(middle.filter(|_| many).map(|(end, _)| *end));
    }

    /// Tells whether messages are lent that programs may have taken meanwhile.
    pub(crate) fn has_lent(&self) -> bool {
        !self.lent.is_empty()
    }

    /// Tells whether programs have taken messages that are not released yet.
    pub(crate) fn has_taken(&self) -> bool {
        self.receives.has_taken()
    }

    /// Tells whether there is something to receive that is not lent.
    pub(crate) fn has_more(&self) -> bool {
        self.more
    }

    /// Tells whether a program finds something to receive in the ring.
    pub(crate) fn has_in_ring(&self) -> bool {
        !self.receives.is_empty()
    }

    /// The wake token to send, if the socket is readable and does not show it.
    pub(crate) fn wake_token_to_show(&mut self) -> Option<u32> {
        (self.more || self.has_in_ring()).then(|| self.receives.next_wake_token()).flatten()
    }

    /// There was no room for the last wake token.
    pub(crate) fn wake_token_not_sent(&mut self) {
        self.receives.take_wake_token_back();
    }

    /// Programs that have taken a wake token may be gone.
    pub(crate) fn wake_token_is_gone(&mut self) {
        if self.receives.has_wake_token() {
            self.receives.wake_token_is_gone();
        }
    }
}

/// Bytes that may be taken without a request to wake.
const NOTICE_BYTES: usize = 16 << 10;
