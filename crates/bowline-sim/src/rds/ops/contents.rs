//! Contents of regions, and what reads and atomics bring home of them.
//!
//! Every byte of a region is known from the start, and so is every byte that a write puts there. A
//! read is right if each of its bytes was in the region at some time between its beginning and its
//! end.

use std::collections::BTreeMap;

use super::HEAD;

/// Returns the byte at place `at` of a region that nobody has written to.
fn known(key: u32, at: usize) -> u8 {
    (key as u8).wrapping_mul(59).wrapping_add(at as u8).wrapping_add((at >> 8) as u8)
}

/// Returns the byte at place `at` of the memory from which an operation writes.
fn written(op: usize, at: u64) -> u8 {
    (op as u8).wrapping_mul(31).wrapping_add(at as u8).wrapping_add((at >> 8) as u8)
}

/// Bytes of a region that a write has changed.
#[derive(Debug)]
struct Write {
    from: usize,
    to: usize,
    op: usize,
    /// Place of the first byte in the operation's memory.
    at: u64,
}

/// Contents of a region.
#[derive(Debug)]
pub(super) struct Contents {
    bytes: Vec<u8>,
    writes: Vec<Write>,
}

impl Contents {
    pub(super) fn new(key: u32, len: usize) -> Self {
        let byte = |at| if at < HEAD { 0 } else { known(key, at) };
        Self { bytes: (0..len).map(byte).collect(), writes: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number at a place.
    pub(super) fn word(&self, at: usize) -> u64 {
        let bytes = self.bytes.get(at..).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    pub(super) fn set_word(&mut self, at: usize, word: u64) {
        if let Some(bytes) = self.bytes.get_mut(at..).and_then(|bytes| bytes.first_chunk_mut()) {
            *bytes = word.to_le_bytes();
        }
    }

    /// Writes what is at place `at` of an operation's memory.
    pub(super) fn write(&mut self, (from, to): (usize, usize), op: usize, at: u64) {
        for (place, byte) in self.bytes[from..to].iter_mut().enumerate() {
            *byte = written(op, at + place as u64);
        }
        self.writes.push(Write { from, to, op, at });
    }

    pub(super) fn read(&self, (from, to): (usize, usize)) -> Vec<u8> {
        self.bytes[from..to].to_vec()
    }

    /// Tells whether a place held a byte after the first `since` writes.
    fn held(&self, place: usize, byte: u8, since: usize) -> bool {
        self.writes[since..].iter().any(|write| {
            let inside = (write.from..write.to).contains(&place);
            inside && written(write.op, write.at + (place - write.from) as u64) == byte
        })
    }
}

/// Memory of an operation that reads.
#[derive(Default)]
pub(super) struct Home {
    /// Place of the first byte in the region, what was there when the operation began, and the
    /// number of writes until then.
    began: Option<(usize, Vec<u8>, usize)>,
    /// What requests have read, by their places in the operation, as long as it is on its way.
    answers: BTreeMap<u64, Vec<u8>>,
    came: BTreeMap<u64, Vec<u8>>,
}

impl std::fmt::Debug for Home {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes came", self.len())
    }
}

impl Home {
    pub(super) fn len(&self) -> u64 {
        self.came.values().map(|bytes| bytes.len() as u64).sum()
    }

    /// Notes what is in the region when the operation begins.
    pub(super) fn begin(&mut self, contents: &Contents, (from, to): (usize, usize)) {
        let now = || (from, contents.read((from, to)), contents.writes.len());
        self.began.get_or_insert_with(now);
    }

    /// The peer has read, and answers.
    pub(super) fn answer(&mut self, at: u64, bytes: Vec<u8>) {
        self.answers.insert(at, bytes);
    }

    /// The answer of a request has come.
    pub(super) fn come(&mut self, at: u64) {
        if let Some(bytes) = self.answers.remove(&at) {
            self.came.insert(at, bytes);
        }
    }

    /// Returns the number that an atomic has brought.
    pub(super) fn word(&self) -> Option<u64> {
        let bytes = self.came.get(&0)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    }

    /// Returns the place of a byte that was never in the region between the beginning and now.
    pub(super) fn wrong(&self, contents: &Contents) -> Option<usize> {
        let (from, before, since) = self.began.as_ref()?;
        let all = self.came.iter().flat_map(|(at, bytes)| (*at as usize..).zip(bytes));
        let mut places = all.map(|(at, byte)| (at, from + at, *byte));
        places
            .find(|(at, place, byte)| {
                before.get(*at) != Some(byte) && !contents.held(*place, *byte, *since)
            })
            .map(|(at, ..)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte is right if it was there at any time since the beginning, and only then.
    #[test]
    fn bytes_of_another_time_or_place_are_noticed() {
        let mut contents = Contents::new(7, HEAD + 64);
        let range = (HEAD, HEAD + 32);
        contents.write(range, 3, 0);
        let old = Contents::new(7, HEAD + 64).read(range);
        let mut home = Home::default();
        home.begin(&contents, range);
        let before = contents.read(range);
        contents.write((HEAD + 8, HEAD + 16), 4, 0);
        let after = contents.read(range);
        let came = |bytes: Vec<u8>| {
            let began = home.began.clone();
            Home { began, answers: BTreeMap::new(), came: BTreeMap::from([(0, bytes)]) }
        };
        for right in [&before, &after] {
            assert_eq!(came(right.clone()).wrong(&contents), None);
        }
        assert_eq!(came(old).wrong(&contents), Some(0));
        let shifted = contents.read((HEAD + 1, HEAD + 33));
        assert_eq!(came(shifted).wrong(&contents), Some(0));
    }
}
