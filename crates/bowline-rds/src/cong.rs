//! Congestion maps: which ports of an address are congested. Spec: `docs/spec/rds.md`, section 7.

use bowline_wire::rds::{MAP_LEN, MapView};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const WORDS: usize = MAP_LEN / 8;

/// One map; takes no memory while no port is congested.
#[derive(Debug, Default)]
pub(crate) struct CongMap {
    words: Option<Box<[u64; WORDS]>>,
}

impl Serialize for CongMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut bytes = Vec::new();
        if !self.is_empty() {
            self.emit(&mut bytes);
        }
        serializer.serialize_bytes(&bytes)
    }
}

impl<'de> Deserialize<'de> for CongMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut map = Self::default();
        let bytes = serde_bytes::ByteBuf::deserialize(deserializer)?;
        if let Some(view) = MapView::new(&bytes) {
            map.replace(&view);
        }
        Ok(map)
    }
}

impl CongMap {
    #[inline]
    pub(crate) fn is_set(&self, port: u16) -> bool {
        match &self.words {
            None => false,
            Some(words) => words[usize::from(port >> 6)] & (1 << (port & 63)) != 0,
        }
    }

    /// Tells whether no port is congested.
    pub(crate) const fn is_empty(&self) -> bool {
        self.words.is_none()
    }

    /// Marks a port; returns whether it was unmarked before.
    pub(crate) fn set(&mut self, port: u16) -> bool {
        let words = self.words.get_or_insert_with(|| Box::new([0; WORDS]));
        let word = &mut words[usize::from(port >> 6)];
        let fresh = *word & (1 << (port & 63)) == 0;
        *word |= 1 << (port & 63);
        fresh
    }

    /// Unmarks a port; returns whether it was marked.
    pub(crate) fn clear(&mut self, port: u16) -> bool {
        let Some(words) = &mut self.words else { return false };
        let word = &mut words[usize::from(port >> 6)];
        let was = *word & (1 << (port & 63)) != 0;
        *word &= !(1 << (port & 63));
        if was && words.iter().all(|w| *w == 0) {
            self.words = None;
        }
        was
    }

    /// Replaces the map by a received one; returns the port groups (port mod 64) in which a port
    /// became uncongested.
    pub(crate) fn replace(&mut self, new: &MapView<'_>) -> u64 {
        if new.words().all(|w| w == 0) {
            let old = self.words.take();
            return old.map_or(0, |old| old.iter().fold(0, |mask, w| mask | w));
        }
        let words = self.words.get_or_insert_with(|| Box::new([0; WORDS]));
        let mut mask = 0;
        for (old, new) in words.iter_mut().zip(new.words()) {
            mask |= *old & !new;
            *old = new;
        }
        mask
    }

    /// Empties the map; returns the port groups that had a congested port.
    pub(crate) fn take(&mut self) -> u64 {
        self.words.take().map_or(0, |old| old.iter().fold(0, |mask, w| mask | w))
    }

    /// Appends the 8192 bytes of the map in wire format.
    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        match &self.words {
            None => out.resize(out.len() + MAP_LEN, 0),
            Some(words) => words.iter().for_each(|w| out.extend_from_slice(&w.to_le_bytes())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(map: &CongMap) -> Vec<u8> {
        let mut out = Vec::new();
        map.emit(&mut out);
        out
    }

    // tests
    #[test]
    fn port_5000_is_bit_0_of_byte_625() {
        let mut map = CongMap::default();
        assert!(map.set(5000));
        assert!(!map.set(5000));
        let wire = bytes(&map);
        assert_eq!(wire.len(), 8192);
        assert_eq!(wire[625], 1);
        assert_eq!(wire.iter().filter(|b| **b != 0).count(), 1);
        assert!(map.clear(5000));
        assert_eq!(bytes(&map), vec![0; 8192]);
    }

    // tests
    #[test]
    fn replacing_reports_groups_that_became_free() {
        let mut theirs = CongMap::default();
        theirs.set(4000);
        theirs.set(4001);
        let mut ours = CongMap::default();
        assert_eq!(ours.replace(&MapView::new(&bytes(&theirs)).unwrap()), 0);
        assert!(ours.is_set(4000) && ours.is_set(4001) && !ours.is_set(4002));
        theirs.clear(4000);
        assert_eq!(ours.replace(&MapView::new(&bytes(&theirs)).unwrap()), 1 << (4000 % 64));
        theirs.clear(4001);
        assert_eq!(ours.replace(&MapView::new(&bytes(&theirs)).unwrap()), 1 << (4001 % 64));
        assert!(!ours.is_set(4001));
    }
}
