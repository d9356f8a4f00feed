//! Packets that came after a gap. A responder may drop them, and its peer sends them all again;
//! kept, they are carried out as soon as what is missing has come, and the peer sends that alone.
//! Nothing of it shows on the wire but acknowledgements that jump [RSP-2], [RSP-16], [REQ-24].
//!
//! ```text
//!   expected 7     held  9 10 12 13        7 comes: 7 is done, NAK 8;  8 comes: 8 to 10, NAK 11
//! ```
//!
//! What a peer can make this side keep is bounded: packets not far ahead, each once, and bytes of
//! all queue pairs together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bowline_wire::roce::{Packet, Psn};

/// Packets ahead of the expected one that are kept.
const AHEAD_MAX: u32 = 512;
/// Empty buffers of a queue pair that are used again.
const SPARE_MAX: usize = 16;

/// How much all queue pairs of a device keep together.
#[derive(Clone, Debug)]
pub(crate) struct ReorderBudget {
    used: Arc<AtomicUsize>,
    max: usize,
}

impl ReorderBudget {
    /// At most `max` bytes.
    pub(crate) fn new(max: usize) -> Self {
        Self { used: Arc::default(), max }
    }

    /// Bytes kept now.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, len: usize) -> bool {
        // One thread at a time works with a device.
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

/// The packets of one queue pair, in the order of their numbers.
#[derive(Debug, Default)]
pub(super) struct ReorderBuffer {
    packets: VecDeque<(Psn, Vec<u8>)>,
    spare: Vec<Vec<u8>>,
    /// Whose bytes they are counted in.
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

    /// Keeps a packet later than `expected`; `false`: there is no room for it, or it is too far
    /// ahead. One that is kept already is not kept again.
    pub(super) fn keep(
        &mut self,
        budget: &ReorderBudget,
        expected: Psn,
        packet: &Packet<'_>,
    ) -> bool {
        let psn = packet.bth.psn;
        let ahead = psn.since(expected);
        if ahead > AHEAD_MAX {
            return false;
        }
        let at = match self.packets.back() {
            Some((last, _)) if last.since(expected) >= ahead => {
                let at = self.packets.partition_point(|(at, _)| at.since(expected) < ahead);
                if self.packets.get(at).is_some_and(|(at, _)| *at == psn) {
                    return true;
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
            return false;
        }
        if self.budget.is_none() {
            self.budget = Some(budget.clone());
        }
        self.packets.insert(at, (psn, bytes));
        true
    }

    /// Takes the packet `expected`, if it is there; those before it are of no use any more.
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

    /// Takes back the memory of a packet that is done with.
    pub(super) fn recycle(&mut self, bytes: Vec<u8>) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(bytes);
        }
    }

    /// Forgets all packets.
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
