//! An allocator of ranges of one registered memory region, for the data of requests in flight.

use std::collections::BTreeMap;

/// Alignment of ranges in bytes, which lets stores do direct IO on them.
const ALIGNMENT: usize = 4096;

/// The free ranges of a memory region.
#[derive(Debug)]
pub(super) struct RangeAllocator {
    /// Start and length of each free range; no two are adjacent.
    free: BTreeMap<usize, usize>,
}

impl RangeAllocator {
    /// Makes an allocator of `len` free bytes, a multiple of 4096.
    pub(super) fn new(len: usize) -> Self {
        Self { free: BTreeMap::from([(0, len)]) }
    }

    /// How much an allocation of `len` bytes takes.
    #[cfg(feature = "fuse")]
    pub(super) fn taken_by(len: usize) -> usize {
        round(len)
    }

    /// Allocates from the first free range of at least `len` bytes, if there is one.
    pub(super) fn allocate(&mut self, len: usize) -> Option<usize> {
        let len = round(len);
        let (&at, &free) = self.free.iter().find(|(_, free)| **free >= len)?;
        self.free.remove(&at);
        if free > len {
            self.free.insert(at + len, free - len);
        }
        Some(at)
    }

    /// Frees a range that was allocated with this length.
    pub(super) fn free(&mut self, mut at: usize, len: usize) {
        let mut len = round(len);
        if let Some((&before, &free)) = self.free.range(..at).next_back() {
            assert!(before + free <= at, "given back twice");
            if before + free == at {
                self.free.remove(&before);
                (at, len) = (before, free + len);
            }
        }
        if let Some(after) = self.free.remove(&(at + len)) {
            len += after;
        }
        let twice = self.free.insert(at, len);
        assert!(twice.is_none(), "given back twice");
    }
}

fn round(len: usize) -> usize {
    len.max(1).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_never_overlap_and_all_come_back() {
        let len = 64 * ALIGNMENT;
        let mut ranges = RangeAllocator::new(len);
        let mut taken: Vec<(usize, usize)> = Vec::new();
        let mut random = 7_u64;
        for _ in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let n = (random >> 33) as usize;
            if n.is_multiple_of(2) {
                let want = n / 2 % (9 * ALIGNMENT);
                if let Some(at) = ranges.allocate(want) {
                    assert!(at.is_multiple_of(ALIGNMENT) && at + round(want) <= len);
                    let apart = |(other, size): &(usize, usize)| {
                        at + round(want) <= *other || *other + round(*size) <= at
                    };
                    assert!(taken.iter().all(apart));
                    taken.push((at, want));
                }
            } else if !taken.is_empty() {
                let (at, size) = taken.swap_remove(n % taken.len());
                ranges.free(at, size);
            }
        }
        for (at, size) in taken {
            ranges.free(at, size);
        }
        assert_eq!(ranges.allocate(len), Some(0));
        assert_eq!(ranges.allocate(1), None);
    }
}
