//! Reorder buffer: packets that arrived after a gap. A responder may drop them, and its peer
//! retransmits all of them. Kept packets are executed as soon as the missing one has arrived, and
//! the peer retransmits that one alone. On the wire only acknowledgements that jump show it
//! [RSP-2], [RSP-16], [REQ-24].
//!
//! ```text
//!   expected 7   kept  9 10 12 13   7 arrives: 7 is done, NAK 8;  8 arrives: 8 to 10, NAK 11
//! ```
//!
//! The memory a peer can occupy is bounded: packets not too far ahead, each one once, and a byte
//! budget for all queue pairs together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bowline_wire::roce::{Packet, Psn};

/// Largest distance from the expected packet at which packets are kept.
const AHEAD_MAX: u32 = 1 << 14;
/// Most empty buffers of a queue pair kept for reuse.
const SPARE_MAX: usize = 16;

/// Byte budget of the reorder buffers of all queue pairs of a device.
#[derive(Clone, Debug)]
pub(crate) struct ReorderBudget {
    used: Arc<AtomicUsize>,
    max: usize,
}

impl ReorderBudget {
    /// Makes a budget of `max` bytes.
    pub(crate) fn new(max: usize) -> Self {
        Self { used: Arc::default(), max }
    }

    /// Bytes in use.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, len: usize) -> bool {
        // Not atomic as a whole, but only one thread at a time uses a device.
        let fits = self.used.load(Ordering::Relaxed).saturating_add(len) <= self.max;
        if fits {
            self.used.fetch_add(len, Ordering::Relaxed);
        }
        fits
    }

    fn give_back(&self, len: usize) {
        self.used.fetch_sub(len, Ordering::Relaxed);
    }
}

/// What became of a packet that arrived after a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Kept {
    /// There is no room for it, or it is too far ahead.
    No,
    Yes,
}

/// Packets of one queue pair that arrived after a gap, in PSN order.
#[derive(Debug, Default)]
pub(super) struct ReorderBuffer {
    packets: VecDeque<(Psn, Vec<u8>)>,
    spare: Vec<Vec<u8>>,
    /// The budget that the packets are charged to.
    budget: Option<ReorderBudget>,
}

impl ReorderBuffer {
    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Keeps a packet later than `expected`, unless it is kept already.
    pub(super) fn keep(
        &mut self,
        budget: &ReorderBudget,
        expected: Psn,
        packet: &Packet<'_>,
    ) -> Kept {
        let psn = packet.bth.psn;
        let ahead = psn.since(expected);
        if ahead > AHEAD_MAX {
            return Kept::No;
        }
        let at = match self.packets.back() {
            Some((last, _)) if last.since(expected) >= ahead => {
                let at = self.packets.partition_point(|(at, _)| at.since(expected) < ahead);
                if self.packets.get(at).is_some_and(|(at, _)| *at == psn) {
                    return Kept::Yes;
                }
                at
            }
            _ => self.packets.len(),
        };
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        packet.emit(&mut bytes);
        if !budget.take(bytes.len()) {
            self.recycle(bytes);
            return Kept::No;
        }
        if self.budget.is_none() {
            self.budget = Some(budget.clone());
        }
        self.packets.insert(at, (psn, bytes));
        Kept::Yes
    }

    /// The PSN behind the last packet kept.
    pub(super) fn end(&self) -> Option<Psn> {
        self.packets.back().map(|(psn, _)| psn.next())
    }

    /// Returns the first gap behind `after`, a kept packet's PSN or an earlier one: the PSN of its
    /// first missing packet, and of the kept packet behind it.
    pub(super) fn gap_behind(&self, expected: Psn, after: Psn) -> Option<(Psn, Psn)> {
        let far = after.since(expected);
        let at = self.packets.partition_point(|(psn, _)| psn.since(expected) <= far);
        let mut before = match at.checked_sub(1).and_then(|at| self.packets.get(at)) {
            Some((psn, _)) => psn.next(),
            None => expected,
        };
        for (psn, _) in self.packets.range(at..) {
            if *psn != before {
                return Some((before, *psn));
            }
            before = psn.next();
        }
        None
    }

    /// Removes and returns the packet `expected`, if it is there; drops older packets, which are of
    /// no use any more.
    pub(super) fn take(&mut self, expected: Psn) -> Option<Vec<u8>> {
        while let Some((psn, _)) = self.packets.front() {
            if psn.is_after(expected) {
                return None;
            }
            let (psn, bytes) = self.packets.pop_front()?;
            if let Some(budget) = &self.budget {
                budget.give_back(bytes.len());
            }
            if psn == expected {
                return Some(bytes);
            }
            self.recycle(bytes);
        }
        None
    }

    /// Keeps the buffer of a finished packet for reuse.
    pub(super) fn recycle(&mut self, bytes: Vec<u8>) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(bytes);
        }
    }

    /// Drops all packets.
    pub(super) fn clear(&mut self) {
        let bytes: usize = self.packets.iter().map(|(_, bytes)| bytes.len()).sum();
        if let Some(budget) = &self.budget {
            budget.give_back(bytes);
        }
        self.packets = VecDeque::new();
        self.spare = Vec::new();
    }
}

impl Drop for ReorderBuffer {
    fn drop(&mut self) {
        self.clear();
    }
}
