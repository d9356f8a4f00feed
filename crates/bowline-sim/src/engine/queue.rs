//! Queue of events in the order of virtual time.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// One microsecond in nanoseconds, the unit of virtual time.
pub(crate) const US: u64 = 1_000;
/// One millisecond in nanoseconds.
pub(crate) const MS: u64 = 1_000_000;
/// One second in nanoseconds.
pub(crate) const SEC: u64 = 1_000_000_000;

/// Events by the time at which they are due; events of the same time in the order of insertion.
#[derive(Debug)]
pub(crate) struct Queue<E> {
    seq: u64,
    heap: BinaryHeap<Reverse<Entry<E>>>,
}

#[derive(Debug)]
struct Entry<E> {
    at: u64,
    seq: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl<E> Eq for Entry<E> {}
impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.seq).cmp(&(other.at, other.seq))
    }
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { seq: 0, heap: BinaryHeap::new() }
    }
}

impl<E> Queue<E> {
    /// Inserts `event`, due at `at`.
    pub(crate) fn push(&mut self, at: u64, event: E) {
        self.seq += 1;
        self.heap.push(Reverse(Entry { at, seq: self.seq, event }));
    }

    /// Takes the next event; returns when it is due.
    pub(crate) fn pop(&mut self) -> Option<(u64, E)> {
        let Reverse(entry) = self.heap.pop()?;
        Some((entry.at, entry.event))
    }
}
