//! Operations, and the chunk each of them holds.
//!
//! Chunks belong to the session and are shared by its paths. So a request that a client repeats
//! over another path meets the first one in the same chunk. One operation at a time holds a chunk;
//! requests of other paths wait behind it [RS-9]:
//!
//! ```text
//! Waiting --chunk free--> Running --respond, room--> (free)
//!    |                      |  \--respond, no room--> Queued --room--> (free)
//!    \--path closed--> (free)   \                       |
//!                                \--respond, path closing--> Answered --path drained--> (free)
//! ```
//!
//! A chunk held for a closing path is not given to another before the path's queue pairs are dead:
//! until then a late write of the client may still change it.

use bowline_verbs::HUGE_PAGE;
use bowline_wire::rtrs::Desc;

use super::{OpId, Request};
use crate::PathId;

/// No operation.
pub(super) const NONE: u32 = u32::MAX;

/// The state of an operation.
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
    pub(super) generation: u32,
    pub(super) state: OpState,
    /// Slot of the session.
    pub(super) session: u32,
    pub(super) path: PathId,
    pub(super) cid: u16,
    pub(super) chunk: u16,
    /// The session's epoch when the request came.
    pub(super) epoch: u32,
    /// The next operation in its list: of those that wait for the chunk, or of the free slots.
    pub(super) next: u32,
    /// The destination of a read's data.
    pub(super) desc: Option<Desc>,
    /// The client wants the key of `desc` invalidated.
    pub(super) inval: bool,
    /// The request, to be handed to the upper layer when the wait is over.
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
            let generation = free.generation;
            *free = Op { generation, ..op };
            return OpId { slot, generation };
        }
        let slot = self.slots.len() as u32;
        self.slots.push(Op { generation: 0, ..op });
        OpId { slot, generation: 0 }
    }

    /// Gives a slot back.
    pub(super) fn free(&mut self, slot: u32) {
        let head = self.free;
        let op = self.at(slot);
        op.state = OpState::Free;
        op.generation = op.generation.wrapping_add(1);
        op.next = head;
        op.held = None;
        self.free = slot;
    }

    /// The operation in a slot that must be in use.
    pub(super) fn at(&mut self, slot: u32) -> &mut Op {
        &mut self.slots[slot as usize]
    }

    /// A shared reference to the operation in a slot that must be in use.
    pub(super) fn peek(&self, slot: u32) -> &Op {
        &self.slots[slot as usize]
    }

    /// Whether this is an answered operation of the path, which waits for the path's end.
    pub(super) fn is_answered(&self, slot: u32, path: PathId) -> bool {
        let op = self.slots.get(slot as usize);
        op.is_some_and(|op| op.path == path && op.state == OpState::Answered)
    }

    /// The operation with this id, if it is in this state.
    pub(super) fn find(&mut self, id: OpId, state: OpState) -> Option<&mut Op> {
        let op = self.slots.get_mut(id.slot as usize)?;
        (op.generation == id.generation && op.state == state).then_some(op)
    }
}

/// A chunk of a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// The operation that holds it.
    pub(super) holder: u32,
    /// The first operation that waits for it.
    pub(super) waiting: u32,
    /// The chunk was used at least once.
    used: bool,
}

/// For each range of the size of a large page: the number of chunks that were never used.
#[derive(Debug, Default)]
pub(super) struct Unused {
    /// Chunks in a range.
    each: usize,
    left: Vec<usize>,
}

impl Unused {
    pub(super) fn new(depth: usize, chunk_bytes: usize) -> Self {
        let each = (HUGE_PAGE / chunk_bytes).max(1);
        let left = (0..depth).step_by(each).map(|first| each.min(depth - first)).collect();
        Self { each, left }
    }

    /// Records the use of a chunk. Returns the first chunk and the number of chunks of its range,
    /// once, when all of them have been used.
    #[inline]
    pub(super) fn note_use(&mut self, index: usize, chunk: &mut Chunk) -> Option<(usize, usize)> {
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

    /// Appends an operation to those that wait.
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

    /// Removes the first operation that waits.
    pub(super) fn next(&mut self, ops: &Ops) -> Option<u32> {
        let slot = self.waiting;
        (slot != NONE).then(|| {
            self.waiting = ops.peek(slot).next;
            slot
        })
    }

    /// Removes the waiting operations of a path, and reports their epochs.
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
            told.extend(unused.note_use(index, &mut chunks[index]));
        }
        assert_eq!(told, [(16, 8), (8, 8), (0, 8)]);
        let mut large = Unused::new(2, 4 * HUGE_PAGE);
        assert_eq!(large.note_use(1, &mut chunks[0].clone()), None, "used before");
        assert_eq!(large.note_use(1, &mut Chunk::FREE.clone()), Some((1, 1)));
    }
}
