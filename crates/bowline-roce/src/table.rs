//! Objects under numbers: dense ones with a generation, so that a stale number finds nothing, and a
//! fast hash map for numbers chosen at random.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Bits of a number that are the slot; the rest is the generation.
const SLOT_BITS: u32 = 20;

/// Objects under small numbers, never 0.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    pub(crate) const fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds an object; the caller keeps the table below 2^20 objects.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push((1, None));
            self.slots.len() as u32 - 1
        });
        let entry = &mut self.slots[slot as usize];
        entry.1 = Some(value);
        entry.0 << SLOT_BITS | slot
    }

    pub(crate) fn get(&self, id: u32) -> Option<&T> {
        let (generation, value) = self.slots.get((id & ((1 << SLOT_BITS) - 1)) as usize)?;
        value.as_ref().filter(|_| *generation == id >> SLOT_BITS)
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        let (generation, value) = self.slots.get_mut((id & ((1 << SLOT_BITS) - 1)) as usize)?;
        value.as_mut().filter(|_| *generation == id >> SLOT_BITS)
    }

    pub(crate) fn remove(&mut self, id: u32) -> Option<T> {
        let slot = id & ((1 << SLOT_BITS) - 1);
        self.get(id)?;
        let entry = &mut self.slots[slot as usize];
        entry.0 = ((entry.0 + 1) & ((1 << (32 - SLOT_BITS)) - 1)).max(1);
        self.free.push(slot);
        entry.1.take()
    }
}

/// Map of numbers this side has chosen itself; peers cannot make them collide.
pub(crate) type NumberMap<T> = HashMap<u32, T, BuildHasherDefault<NumberHasher>>;

/// One multiplication.
#[derive(Debug, Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        let mixed = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_number_finds_nothing() {
        let mut table = Table::new();
        let first = table.insert('a');
        assert_ne!(first, 0);
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b');
        assert_eq!((table.get(first), table.get(second)), (None, Some(&'b')));
        assert_eq!(table.remove(first), None);
        assert_eq!(table.len(), 1);
    }
}
