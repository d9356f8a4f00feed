//! Memory for the data of requests under way: one piece of registered memory, and stretches of it.

use std::collections::BTreeMap;

/// Stretches are multiples of this, so that stores can do direct IO on them.
const GRAIN: usize = 4096;

/// Which stretches of a piece of memory are free.
#[derive(Debug)]
pub(super) struct Stretches {
    /// Start and length of each; no two touch.
    free: BTreeMap<usize, usize>,
}

impl Stretches {
    /// All of `len` bytes, a multiple of 4096.
    pub(super) fn new(len: usize) -> Self {
        Self { free: BTreeMap::from([(0, len)]) }
    }

    /// Takes the first stretch of at least `len` bytes, if there is one.
    pub(super) fn take(&mut self, len: usize) -> Option<usize> {
        let len = round(len);
        let (&at, &free) = self.free.iter().find(|(_, free)| **free >= len)?;
        self.free.remove(&at);
        if free > len {
            self.free.insert(at + len, free - len);
        }
        Some(at)
    }

    /// Gives one back that was taken with this length.
    pub(super) fn give(&mut self, mut at: usize, len: usize) {
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
    len.max(1).next_multiple_of(GRAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_never_overlap_and_all_come_back() {
        let len = 64 * GRAIN;
        let mut stretches = Stretches::new(len);
        let mut taken: Vec<(usize, usize)> = Vec::new();
        let mut random = 7_u64;
        for _ in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let n = (random >> 33) as usize;
            if n.is_multiple_of(2) {
                let want = n / 2 % (9 * GRAIN);
                if let Some(at) = stretches.take(want) {
                    assert!(at.is_multiple_of(GRAIN) && at + round(want) <= len);
                    let apart = |(other, size): &(usize, usize)| {
                        at + round(want) <= *other || *other + round(*size) <= at
                    };
                    assert!(taken.iter().all(apart));
                    taken.push((at, want));
                }
            } else if !taken.is_empty() {
                let (at, size) = taken.swap_remove(n % taken.len());
                stretches.give(at, size);
            }
        }
        for (at, size) in taken {
            stretches.give(at, size);
        }
        assert_eq!(stretches.take(len), Some(0));
        assert_eq!(stretches.take(1), None);
    }
}
