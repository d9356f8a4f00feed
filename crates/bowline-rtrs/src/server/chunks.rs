//! Operations, and which chunk belongs to which of them.
//!
//! The chunks are the session's, shared by its paths, so a request that a client repeats over
//! another path meets the first one in the same chunk. One operation at a time holds a chunk; the
//! requests of other paths wait behind it [RS-9]:
//!
//! ```text
//! Waiting --chunk free--> Running --respond, room--> (free)
//!    |                      |  \--respond, no room--> Queued --room--> (free)
//!    \--path closed--> (free)   \                       |
//!                                \--respond, path closing--> Answered --path drained--> (free)
//! ```
//!
//! A chunk held for a path that closes is not given on before the path's queue pairs are dead:
//! until then a write of the client that was late may still come and change it.

use bowline_verbs::HUGE_PAGE;
use bowline_wire::rtrs::Desc;

use super::{OpId, Request};
use crate::PathId;

/// No operation.
pub(super) const NONE: u32 = u32::MAX;

/// Where an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpState {
    /// The slot is not in use.
    Free,
    /// Another operation holds the chunk.
    Waiting,
    /// The upper layer has it.
    Running,
    /// Answered; the reply waits for room in the send queue.
    Queued,
    /// Answered; the path is closing.
    Answered,
}

/// An operation.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) life: u32,
    pub(super) state: OpState,
    /// Slot of the session.
    pub(super) session: u32,
    pub(super) path: PathId,
    pub(super) cid: u16,
    pub(super) chunk: u16,
    /// Of the session, when it came.
    pub(super) epoch: u32,
    /// The next of the same list: of those that wait for the chunk, or of the free ones.
    pub(super) next: u32,
    /// Where a read's data goes.
    pub(super) desc: Option<Desc>,
    /// The client wants the key of `desc` invalidated.
    pub(super) inval: bool,
    /// What the upper layer is to get when the wait is over.
    pub(super) held: Option<Box<Request>>,
}

/// All operations of a server.
#[derive(Debug)]
pub(super) struct Ops {
    slots: Vec<Op>,
    free: u32,
}

impl Ops {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: NONE }
    }

    /// Takes a slot; the caller fills in the rest.
    #[inline]
    pub(super) fn take(&mut self, op: Op) -> OpId {
        let slot = self.free;
        if let Some(free) = self.slots.get_mut(slot as usize) {
            self.free = free.next;
            let life = free.life;
            *free = Op { life, ..op };
            return OpId { slot, life };
        }
        let slot = self.slots.len() as u32;
        self.slots.push(Op { life: 0, ..op });
        OpId { slot, life: 0 }
    }

    /// Gives a slot back.
    pub(super) fn free(&mut self, slot: u32) {
        let head = self.free;
        let op = self.at(slot);
        op.state = OpState::Free;
        op.life = op.life.wrapping_add(1);
        op.next = head;
        op.held = None;
        self.free = slot;
    }

    /// The operation of a slot that is known to be in use.
    pub(super) fn at(&mut self, slot: u32) -> &mut Op {
        &mut self.slots[slot as usize]
    }

    /// The same, to look at.
    pub(super) fn peek(&self, slot: u32) -> &Op {
        &self.slots[slot as usize]
    }

    /// Tells whether this is an operation of the path that waits for the path's end.
    pub(super) fn is_answered(&self, slot: u32, path: PathId) -> bool {
        let op = self.slots.get(slot as usize);
        op.is_some_and(|op| op.path == path && op.state == OpState::Answered)
    }

    /// The operation of this name in this state.
    pub(super) fn find(&mut self, id: OpId, state: OpState) -> Option<&mut Op> {
        let op = self.slots.get_mut(id.slot as usize)?;
        (op.life == id.life && op.state == state).then_some(op)
    }
}

/// A chunk of a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// The operation that holds it.
    pub(super) holder: u32,
    /// The first of those that wait for it.
    pub(super) waiting: u32,
    /// It was ever used.
    used: bool,
}

/// How many chunks of each stretch of a large page were never used.
#[derive(Debug, Default)]
pub(super) struct Unused {
    /// Chunks of a stretch.
    each: usize,
    left: Vec<usize>,
}

impl Unused {
    pub(super) fn new(depth: usize, chunk_bytes: usize) -> Self {
        let each = (HUGE_PAGE / chunk_bytes).max(1);
        let left = (0..depth).step_by(each).map(|first| each.min(depth - first)).collect();
        Self { each, left }
    }

    /// A chunk is used. Returns the first chunk and the number of those of its stretch when all of
    /// them have been, once.
    #[inline]
    pub(super) fn uses(&mut self, index: usize, chunk: &mut Chunk) -> Option<(usize, usize)> {
        if std::mem::replace(&mut chunk.used, true) {
            return None;
        }
        let stretch = index / self.each;
        let left = self.left.get_mut(stretch)?;
        *left -= 1;
        (*left == 0).then_some((stretch * self.each, self.each))
    }
}

impl Chunk {
    pub(super) const FREE: Self = Self { holder: NONE, waiting: NONE, used: false };

    /// Puts an operation at the end of those that wait.
    pub(super) fn wait(&mut self, ops: &mut Ops, slot: u32) {
        ops.at(slot).next = NONE;
        let mut last = self.waiting;
        if last == NONE {
            self.waiting = slot;
            return;
        }
        while ops.peek(last).next != NONE {
            last = ops.peek(last).next;
        }
        ops.at(last).next = slot;
    }

    /// Takes the first of those that wait.
    pub(super) fn next(&mut self, ops: &Ops) -> Option<u32> {
        let slot = self.waiting;
        (slot != NONE).then(|| {
            self.waiting = ops.peek(slot).next;
            slot
        })
    }

    /// Takes the operations of a path out of those that wait, and tells the epoch of each.
    pub(super) fn forget(&mut self, ops: &mut Ops, path: PathId, gone: &mut Vec<u32>) {
        let mut kept = NONE;
        let mut slot = self.waiting;
        while slot != NONE {
            let next = ops.peek(slot).next;
            if ops.peek(slot).path == path {
                if kept == NONE {
                    self.waiting = next;
                } else {
                    ops.at(kept).next = next;
                }
                gone.push(ops.peek(slot).epoch);
                ops.free(slot);
            } else {
                kept = slot;
            }
            slot = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_is_used_when_all_its_chunks_were() {
        let mut unused = Unused::new(18, HUGE_PAGE / 8);
        let mut chunks = vec![Chunk::FREE; 18];
        let mut told = Vec::new();
        for index in (0..18).rev().chain(0..18) {
            told.extend(unused.uses(index, &mut chunks[index]));
        }
        assert_eq!(told, [(16, 8), (8, 8), (0, 8)]);
        let mut large = Unused::new(2, 4 * HUGE_PAGE);
        assert_eq!(large.uses(1, &mut chunks[0].clone()), None, "used before");
        assert_eq!(large.uses(1, &mut Chunk::FREE.clone()), Some((1, 1)));
    }
}
