//! The fill level of a send queue, and the responses that wait for room.
//!
//! Only some work requests are signalled; the completion of one means that all before it are done
//! too [RT-52]. The index of a work request's tag is its number in the queue, so a completion
//! single tells how far the queue has come.

use std::collections::VecDeque;

use super::OpId;
use crate::{Batch, ConnId, MemRef, Tag, WrKind};

/// Most work requests of one response: the data, the invalidation, the completion [RT-47].
pub(super) const CHAIN_MAX: u32 = 3;
/// Entries reserved for heartbeats and their answers [RT-60], [RT-62].
const RESERVE: u32 = 4;
/// Least size of a send queue: the reserve, and two chains.
pub(super) const SIZE_MIN: u32 = RESERVE + 2 * CHAIN_MAX;
const INDEX: u32 = 0x0fff_ffff;

/// A deferred response.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeferredReply {
    pub(super) op: OpId,
    pub(super) errno: u16,
    pub(super) from: Option<MemRef>,
}

/// The send queue of a connection.
#[derive(Debug)]
pub(super) struct SendQueue {
    size: u32,
    /// At least one in this many work requests is signalled.
    interval: u32,
    since_signal: u32,
    /// Number of the newest work request.
    posted: u32,
    /// Number of the newest work request known to be done.
    done: u32,
    /// Deferred responses, oldest first [RT-53].
    pub(super) deferred: VecDeque<DeferredReply>,
}

impl SendQueue {
    /// A queue of `size` entries, at least [`SIZE_MIN`], for a session of `depth` chunks.
    pub(super) fn new(size: u32, depth: u16) -> Self {
        assert!(size >= SIZE_MIN, "a send queue of {size}");
        // Unsignalled work requests must leave room for a signalled chain.
        let most = (size - RESERVE - CHAIN_MAX) / 2;
        let interval = (u32::from(depth).min(512) / 2).min(most).max(1);
        Self { size, interval, since_signal: 0, posted: 0, done: 0, deferred: VecDeque::new() }
    }

    pub(super) const fn used(&self) -> u32 {
        self.posted.wrapping_sub(self.done) & INDEX
    }

    /// Whether a response of this many work requests fits.
    pub(super) const fn has_room(&self, count: u32) -> bool {
        self.used() + count + RESERVE <= self.size
    }

    /// Whether a heartbeat fits.
    pub(super) const fn has_reserve(&self) -> bool {
        self.used() < self.size
    }

    /// Adds a work request. `last` ends a chain and may be signalled; one of the kind
    /// [`Tag::HEARTBEAT`] or [`Tag::INFO`] with `must` is.
    pub(super) fn send(
        &mut self,
        batch: &mut Batch,
        conn: ConnId,
        tag: u32,
        kind: WrKind,
        mems: &[MemRef],
        signal: Signal,
    ) {
        self.posted = self.posted.wrapping_add(1) & INDEX;
        self.since_signal += 1;
        let signal = match signal {
            Signal::No => false,
            Signal::InTurn => self.since_signal >= self.interval,
            Signal::Yes => true,
        };
        if signal {
            self.since_signal = 0;
        }
        batch.send(conn, Tag::new(tag, self.posted), kind, mems, signal);
    }

    /// Handles the completion of a signalled work request, and with it of all before it.
    pub(super) fn completed(&mut self, index: u32) {
        let ahead = self.posted.wrapping_sub(index) & INDEX;
        if ahead < self.used() {
            self.done = index;
        }
    }

    pub(super) fn check_invariants(&self) {
        assert!(self.used() <= self.size, "{} of {} places", self.used(), self.size);
        assert!(self.since_signal <= self.used(), "a signal that is not awaited");
        let stuck = self.since_signal == self.used() && !self.has_room(CHAIN_MAX);
        assert!(!stuck, "full, and nothing signalled");
    }
}

/// Whether a work request completes with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// No: another work request of its chain follows.
    No,
    /// If a signalled one is due [RT-52].
    InTurn,
    /// Yes.
    Yes,
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONN: ConnId = ConnId { path: crate::PathId { slot: 0, generation: 0 }, cid: 1 };

    /// Sends chains until there is no room; returns their number and the index signalled last.
    fn fill(queue: &mut SendQueue) -> (u32, Option<u32>) {
        let mut batch = Batch::default();
        let mut chains = 0;
        while queue.has_room(CHAIN_MAX) {
            for signal in [Signal::No, Signal::No, Signal::InTurn] {
                queue.send(&mut batch, CONN, Tag::REPLY, WrKind::Send, &[], signal);
            }
            queue.check_invariants();
            chains += 1;
        }
        (chains, batch.wrs.iter().rev().find(|wr| wr.signal).map(|wr| wr.tag.index()))
    }

    // tests [RT-52], [RT-53]
    #[test]
    fn a_full_queue_always_awaits_a_signal() {
        for size in SIZE_MIN..200 {
            for depth in [1, 2, 16, 512] {
                let mut queue = SendQueue::new(size, depth);
                for _ in 0..20 {
                    let (_, signalled) = fill(&mut queue);
                    queue.completed(signalled.expect("a signal in a full queue"));
                    assert!(queue.has_room(CHAIN_MAX), "size {size} depth {depth}");
                }
            }
        }
    }

    // tests [RT-62]
    #[test]
    fn heartbeats_fit_when_answers_do_not() {
        let mut queue = SendQueue::new(64, 512);
        fill(&mut queue);
        let mut batch = Batch::default();
        for _ in 0..RESERVE {
            assert!(queue.has_reserve());
            queue.send(&mut batch, CONN, Tag::HEARTBEAT, WrKind::Send, &[], Signal::InTurn);
        }
        assert!(!queue.has_room(1));
    }

    #[test]
    fn the_number_of_a_work_request_wraps() {
        let mut queue = SendQueue::new(64, 512);
        queue.posted = INDEX - 1;
        queue.done = INDEX - 1;
        let (chains, signalled) = fill(&mut queue);
        assert_eq!(queue.used(), chains * CHAIN_MAX);
        queue.completed(signalled.unwrap());
        assert!(queue.used() < CHAIN_MAX * 20);
        let used = queue.used();
        queue.completed(INDEX - 1);
        assert_eq!(queue.used(), used, "an old completion frees nothing");
    }
}
