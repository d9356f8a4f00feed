//! Device ids of one session: the lowest free one is given out, and one may stay reserved.

/// A table of things by small numbers [NB-9].
#[derive(Debug)]
pub(crate) struct IdTable<T> {
    slots: Vec<Slot<T>>,
    max: usize,
}

#[derive(Debug)]
enum Slot<T> {
    Free,
    Used(T),
    /// Closed by the operator: not given out again while the peer may still use the number [NB-21].
    Reserved,
}

impl<T> IdTable<T> {
    /// Makes an empty table of at most `max` entries, reserved ones included.
    pub(crate) const fn new(max: usize) -> Self {
        Self { slots: Vec::new(), max }
    }

    /// Puts `item` under the lowest free id; gives it back when the table is full.
    pub(crate) fn insert(&mut self, item: T) -> Result<u32, T> {
        if let Some(at) = self.slots.iter().position(|slot| matches!(slot, Slot::Free)) {
            self.slots[at] = Slot::Used(item);
            return u32::try_from(at).map_err(|_| unreachable!("`max` ids fit"));
        }
        match u32::try_from(self.slots.len()) {
            Ok(id) if self.slots.len() < self.max => {
                self.slots.push(Slot::Used(item));
                Ok(id)
            }
            _ => Err(item),
        }
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        match self.slots.get_mut(usize::try_from(id).ok()?) {
            Some(Slot::Used(item)) => Some(item),
            _ => None,
        }
    }

    /// Takes the entry out, and frees its id or keeps it reserved.
    pub(crate) fn remove(&mut self, id: u32, reserve: bool) -> Option<T> {
        let slot = self.slots.get_mut(usize::try_from(id).ok()?)?;
        if !matches!(slot, Slot::Used(_)) {
            return None;
        }
        let after = if reserve { Slot::Reserved } else { Slot::Free };
        match std::mem::replace(slot, after) {
            Slot::Used(item) => Some(item),
            Slot::Free | Slot::Reserved => None,
        }
    }

    /// Frees a reserved id: the peer has said that it uses it no longer.
    pub(crate) fn unreserve(&mut self, id: u32) {
        let slot = usize::try_from(id).ok().and_then(|at| self.slots.get_mut(at));
        if let Some(slot @ Slot::Reserved) = slot {
            *slot = Slot::Free;
        }
    }

    /// Returns the entries with their ids, in the order of these.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.slots).filter_map(|(id, slot)| match slot {
            Slot::Used(item) => Some((id, item)),
            _ => None,
        })
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| match slot {
            Slot::Used(item) => Some(item),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_id_is_given_and_reserved_ones_are_not() {
        // tests [NB-9] [NB-21]
        let mut table = IdTable::new(4);
        assert_eq!(
            [table.insert('a'), table.insert('b'), table.insert('c')],
            [Ok(0), Ok(1), Ok(2)]
        );
        assert_eq!(table.remove(0, true), Some('a'));
        assert_eq!(table.remove(1, false), Some('b'));
        assert_eq!(table.remove(1, false), None);
        assert_eq!(table.insert('d'), Ok(1));
        assert_eq!(table.insert('e'), Ok(3));
        assert_eq!(table.insert('f'), Err('f'), "four at most, the reserved one counts");
        assert!(table.get_mut(0).is_none());
        table.unreserve(0);
        table.unreserve(1);
        assert_eq!(table.insert('f'), Ok(0));
        assert_eq!(
            table.iter().map(|(id, c)| (id, *c)).collect::<Vec<_>>(),
            [(0, 'f'), (1, 'd'), (2, 'c'), (3, 'e')]
        );
    }
}
