//! Containers by number: a dense table with generations, in which a stale number finds nothing; a
//! fast hash map for random numbers; and a direct-mapped table whose random numbers are chosen to
//! fit.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use bowline_verbs::prefetch;

/// Bits of a number that are the slot; the rest is the generation.
const SLOT_BITS: u32 = 20;

/// Slots of a [`DirectMap`] after its first insertion.
const SLOTS_MIN: usize = 16;

/// Objects by dense number, never 0. The number is generation and slot.
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

/// Hash map of numbers that this side has chosen; peers cannot make them collide.
pub(crate) type NumberMap<T> = HashMap<u32, T, BuildHasherDefault<NumberHasher>>;

/// Hasher for a single number: one multiplication.
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

/// An object that stores its number.
pub(crate) trait Numbered {
    /// Returns the number, which never changes.
    fn number(&self) -> u32;
}

/// A slot of one cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Slot<T>(Option<T>);

/// Direct-mapped table. This side chooses the numbers at random so that the low bits of each are
/// unique. A lookup takes one memory access, which can be prefetched.
#[derive(Debug)]
pub(crate) struct DirectMap<T> {
    /// Slots by the low bits of the number: a power of two, at least twice the number of objects.
    slots: Vec<Slot<T>>,
    len: usize,
}

impl<T: Numbered> DirectMap<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), len: 0 }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    fn slot(&self, number: u32) -> Option<&Slot<T>> {
        self.slots.get(number as usize & self.slots.len().wrapping_sub(1))
    }

    fn slot_mut(&mut self, number: u32) -> Option<&mut Slot<T>> {
        let at = number as usize & self.slots.len().wrapping_sub(1);
        self.slots.get_mut(at)
    }

    /// Makes room for one more object; at least half of all numbers are free afterwards.
    pub(crate) fn reserve(&mut self) {
        if 2 * self.len < self.slots.len() {
            return;
        }
        let more = (2 * self.slots.len()).max(SLOTS_MIN);
        let before = std::mem::take(&mut self.slots);
        self.slots.resize_with(more, || Slot(None));
        // The low bits of all numbers differ, so they still do with one bit more.
        for value in before.into_iter().filter_map(|slot| slot.0) {
            if let Some(slot) = self.slot_mut(value.number()) {
                slot.0 = Some(value);
            }
        }
    }

    /// Tells whether the slot of this number is free.
    pub(crate) fn has_free_slot(&self, number: u32) -> bool {
        self.slot(number).is_some_and(|slot| slot.0.is_none())
    }

    /// Adds an object whose slot [is free](Self::has_free_slot).
    pub(crate) fn insert(&mut self, value: T) {
        if let Some(slot) = self.slot_mut(value.number()) {
            debug_assert!(slot.0.is_none(), "a place for it");
            slot.0 = Some(value);
            self.len += 1;
        }
    }

    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        self.slot(number)?.0.as_ref().filter(|value| value.number() == number)
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.slot_mut(number)?.0.as_mut().filter(|value| value.number() == number)
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<T> {
        let removed = self.slot_mut(number)?.0.take_if(|value| value.number() == number)?;
        self.len -= 1;
        Some(removed)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.0.as_ref())
    }

    /// Prefetches the slot that [`get`](Self::get) reads.
    pub(crate) fn prefetch(&self, number: u32) {
        if let Some(slot) = self.slot(number) {
            prefetch(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Numbered for u32 {
        fn number(&self) -> u32 {
            *self
        }
    }

    #[test]
    fn spread_numbers_are_found_while_others_come_and_go() {
        let mut map = DirectMap::new();
        assert_eq!((map.get(0), map.get(1)), (None, None));
        assert_eq!(map.remove(1), None);
        let mut known = Vec::new();
        let mut random = 1_u32;
        for step in 0..4000 {
            map.reserve();
            assert!(2 * map.len() < map.slots.len());
            let number = loop {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if map.has_free_slot(random >> 8) {
                    break random >> 8;
                }
            };
            // The number maps to a slot but is not in the table.
            assert_eq!(map.get(number), None);
            map.insert(number);
            assert!(!map.has_free_slot(number));
            assert!(!map.has_free_slot(number ^ 0x80_0000), "whose last bits are the same");
            assert_eq!(map.get(number ^ 0x80_0000), None);
            assert_eq!(map.remove(number ^ 0x80_0000), None);
            known.push(number);
            if step % 3 == 0 {
                let gone = known.swap_remove(random as usize % known.len());
                assert_eq!(map.remove(gone), Some(gone));
                assert_eq!(map.get(gone), None);
                assert_eq!(map.remove(gone), None);
            }
        }
        assert_eq!(map.len(), known.len());
        for number in &known {
            assert_eq!(map.get(*number), Some(number));
            assert_eq!(map.get_mut(*number).copied(), Some(*number));
            map.prefetch(*number);
        }
        let mut values: Vec<u32> = map.values().copied().collect();
        values.sort_unstable();
        known.sort_unstable();
        assert_eq!(values, known);
    }

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
