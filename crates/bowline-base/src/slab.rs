//! A slab whose keys carry a generation: a stale key finds nothing, never another object.

use alloc::vec::Vec;

/// Key of an object: its index, and the generation of the object at that index.
pub type Key = (u32, u32);

/// Objects under small dense keys.
///
/// ```
/// use bowline_base::slab::Slab;
///
/// let mut slab = Slab::new();
/// let first = slab.insert("first");
/// slab.remove(first);
/// let second = slab.insert("second");
/// assert_eq!((slab.get(first), slab.get(second)), (None, Some(&"second")));
/// ```
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    len: usize,
}

#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Slab<T> {
    /// Makes an empty slab.
    pub const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), len: 0 }
    }

    /// Makes an empty slab that gives out none of the keys that this one has given out.
    pub fn emptied<U>(&self) -> Slab<U> {
        let next = |slot: &Slot<T>| match slot.value {
            Some(_) => slot.generation.wrapping_add(1).max(1),
            None => slot.generation,
        };
        let slots = self.slots.iter().map(|s| Slot { generation: next(s), value: None }).collect();
        Slab { slots, free: (0..self.slots.len() as u32).rev().collect(), len: 0 }
    }

    /// Returns the number of objects.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Tells whether there are no objects.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an object.
    ///
    /// # Panics
    /// With 2^32 objects.
    pub fn insert(&mut self, value: T) -> Key {
        self.len += 1;
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.value = Some(value);
            return (index, slot.generation);
        }
        let index = u32::try_from(self.slots.len()).expect("limits keep slabs below 2^32");
        self.slots.push(Slot { generation: 1, value: Some(value) });
        (index, 1)
    }

    /// Returns an object, if it is still there.
    pub fn get(&self, (index, generation): Key) -> Option<&T> {
        let slot = self.slots.get(index as usize)?;
        if slot.generation == generation { slot.value.as_ref() } else { None }
    }

    /// Returns an object to change, if it is still there.
    pub fn get_mut(&mut self, (index, generation): Key) -> Option<&mut T> {
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation == generation { slot.value.as_mut() } else { None }
    }

    /// Takes an object out, if it is still there.
    pub fn remove(&mut self, (index, generation): Key) -> Option<T> {
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation != generation {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1).max(1);
        self.free.push(index);
        self.len -= 1;
        Some(value)
    }

    /// Returns all objects to change, in the order of their indices.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.value.as_mut())
    }

    /// Returns all objects with their keys, in the order of their indices.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots.iter().enumerate().filter_map(|(i, slot)| {
            slot.value.as_ref().map(|value| ((i as u32, slot.generation), value))
        })
    }
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self::new()
    }
}
