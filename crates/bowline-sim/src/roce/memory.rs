//! The memory of one side, and the bytes it must hold.
//!
//! ```text
//!   | gap | area | gap | area | ... | gap |      one buffer
//! ```
//! Every area has one purpose and one user at a time. The bytes of pending *changes* are known
//! beforehand: until a change has completed, its bytes are either the old ones or the new ones;
//! afterwards they are the new ones. All other bytes, and all gaps, never change.

use std::sync::Arc;

use bowline_verbs::{Buffer, Piece, Sge};

use crate::engine::rng::{Rng, mix};

/// Index of an area.
pub(crate) type AreaId = usize;
/// Ranges of memory in the order of a message, as (offset in the buffer, bytes).
pub(crate) type Pieces = Vec<(usize, usize)>;

/// Purpose of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Bytes to send.
    Source,
    /// Memory of a posted receive.
    Receive,
    /// Results of reads and atomics.
    Sink,
    /// The peer writes and reads it.
    Target,
    /// The peer only reads it.
    Constant,
    /// The peer's atomics work on it: numbers of 8 bytes.
    Words,
    /// The peer writes and reads it while it is registered.
    Fast,
}

/// A pending change of an area.
#[derive(Debug)]
struct Change {
    request: u64,
    pieces: Pieces,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct Area {
    purpose: Purpose,
    start: usize,
    len: usize,
    pending: Vec<Change>,
    /// This side uses the area.
    taken: bool,
}

/// The memory of one side.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) buffer: Arc<Buffer>,
    /// The bytes that the memory must hold, except for pending changes.
    model: Vec<u8>,
    areas: Vec<Area>,
    /// Requests whose bytes were not in the memory at the last check.
    missing: Vec<u64>,
    scratch: Vec<u8>,
    /// The device has placed bytes here by mistake, and has wiped them out.
    pub(crate) wiped: bool,
}

impl Memory {
    /// Lays out areas of the given purposes and lengths, and fills everything with random bytes.
    pub(crate) fn new(rng: &mut Rng, wanted: &[(Purpose, usize)]) -> Option<Self> {
        let mut areas = Vec::with_capacity(wanted.len());
        let mut end = 16 + rng.index(48);
        for &(purpose, len) in wanted {
            let start = if purpose == Purpose::Words { end.next_multiple_of(8) } else { end };
            areas.push(Area { purpose, start, len, pending: Vec::new(), taken: false });
            end = start + len + 1 + rng.index(64);
        }
        let mut model = Vec::with_capacity(end + 8);
        fill(rng.next(), end, &mut model);
        let buffer = Buffer::new(end).ok()?;
        buffer.write(0, &model);
        let buffer = Arc::new(buffer);
        Some(Self { buffer, model, areas, missing: Vec::new(), scratch: Vec::new(), wiped: false })
    }

    /// Takes a free area of a purpose, of at least `len` bytes.
    pub(crate) fn take(&mut self, rng: &mut Rng, purpose: Purpose, len: usize) -> Option<AreaId> {
        let free =
            |a: &Area| a.purpose == purpose && !a.taken && a.pending.is_empty() && a.len >= len;
        let count = self.areas.iter().filter(|a| free(a)).count();
        let chosen = rng.index(count);
        let id = self.areas.iter().enumerate().filter(|(_, a)| free(a)).nth(chosen)?.0;
        self.areas[id].taken = true;
        Some(id)
    }

    /// Takes the first free area of a purpose, at most `len` bytes of it, for a request that must
    /// fail. No bytes arrive there, but bytes that the device places there by mistake are wiped
    /// out.
    pub(crate) fn lend(
        &mut self,
        purpose: Purpose,
        request: u64,
        len: usize,
    ) -> Option<(AreaId, Pieces)> {
        let free = |a: &Area| a.purpose == purpose && !a.taken && a.pending.is_empty();
        let id = self.areas.iter().position(free)?;
        self.areas[id].taken = true;
        let (start, room) = self.range(id);
        let pieces = vec![(start, len.min(room))];
        let as_it_is = self.expected_bytes(id, &pieces);
        self.expect(id, request, pieces.clone(), as_it_is);
        Some((id, pieces))
    }

    /// Tells whether an area of a purpose is free.
    pub(crate) fn has_free(&self, purpose: Purpose) -> bool {
        self.areas.iter().any(|a| a.purpose == purpose && !a.taken && a.pending.is_empty())
    }

    /// Makes an area free.
    pub(crate) fn release(&mut self, id: AreaId) {
        self.areas[id].taken = false;
    }

    /// Returns the areas of a purpose.
    pub(crate) fn of(&self, purpose: Purpose) -> Vec<AreaId> {
        (0..self.areas.len()).filter(|id| self.areas[*id].purpose == purpose).collect()
    }

    /// Returns offset and length of an area.
    pub(crate) fn range(&self, id: AreaId) -> (usize, usize) {
        (self.areas[id].start, self.areas[id].len)
    }

    /// Returns offset and length of the range that covers all areas of these purposes.
    pub(crate) fn span(&self, purposes: &[Purpose]) -> (usize, usize) {
        let mine = || self.areas.iter().filter(|a| purposes.contains(&a.purpose));
        let start = mine().map(|a| a.start).min().unwrap_or(0);
        let end = mine().map(|a| a.start + a.len).max().unwrap_or(0);
        (start, end.max(start + 1) - start)
    }

    /// Cuts `len` bytes of an area into at most `most` pieces, in random order.
    pub(crate) fn cut(&self, rng: &mut Rng, id: AreaId, len: usize, most: usize) -> Pieces {
        let (start, room) = self.range(id);
        let at = start + rng.index((room - len).min(40) + 1);
        cut(rng, at, len, most)
    }

    /// Writes bytes for this side itself.
    pub(crate) fn write(&mut self, pieces: &[(usize, usize)], bytes: &[u8]) {
        put(&mut self.model, pieces, bytes);
        let mut rest = bytes;
        for &(at, len) in pieces {
            let (now, later) = rest.split_at(len.min(rest.len()));
            self.buffer.write(at, now);
            rest = later;
        }
    }

    /// Notes a change that request number `request` will make.
    pub(crate) fn expect(&mut self, id: AreaId, request: u64, pieces: Pieces, bytes: Vec<u8>) {
        self.areas[id].pending.push(Change { request, pieces, bytes });
    }

    /// Returns the bytes of the pieces when all pending changes are made.
    pub(crate) fn expected_bytes(&self, id: AreaId, pieces: &[(usize, usize)]) -> Vec<u8> {
        let area = &self.areas[id];
        let mut out = Vec::new();
        for &(at, len) in pieces {
            out.extend_from_slice(&self.model[at..at + len]);
        }
        for change in &area.pending {
            let mut from = 0;
            for &(at, len) in &change.pieces {
                let mut to = 0;
                for &(want, want_len) in pieces {
                    let lo = at.max(want);
                    let hi = (at + len).min(want + want_len);
                    if lo < hi {
                        out[to + lo - want..to + hi - want]
                            .copy_from_slice(&change.bytes[from + lo - at..from + hi - at]);
                    }
                    to += want_len;
                }
                from += len;
            }
        }
        out
    }

    /// Completes a change: its bytes must be in the memory now.
    pub(crate) fn done(&mut self, id: AreaId, request: u64) -> Result<(), String> {
        let area = &mut self.areas[id];
        let Some(index) = area.pending.iter().position(|c| c.request == request) else {
            return match self.missing.contains(&request) {
                true => Err(format!("request {request} succeeded, but its bytes never came")),
                false => Ok(()),
            };
        };
        let change = area.pending.remove(index);
        let quiet = area.pending.is_empty();
        put(&mut self.model, &change.pieces, &change.bytes);
        if quiet { self.check_area(id) } else { Ok(()) }
    }

    /// Checks that the bytes of all requests up to `request` are in the memory, unless a later
    /// change replaces them.
    pub(crate) fn placed_up_to(&mut self, request: u64) -> Result<(), String> {
        for id in 0..self.areas.len() {
            let area = &self.areas[id];
            let theirs = matches!(area.purpose, Purpose::Target | Purpose::Words | Purpose::Fast);
            if !theirs || area.pending.last().is_none_or(|c| c.request > request) {
                continue;
            }
            let whole = [(area.start, area.len)];
            let wanted = self.expected_bytes(id, &whole);
            let start = area.start;
            self.scratch.resize(wanted.len(), 0);
            self.buffer.read(start, &mut self.scratch);
            differs(&self.scratch, &wanted, start)
                .map_err(|e| format!("a message came before what was written ahead of it: {e}"))?;
        }
        Ok(())
    }

    /// Checks an area without pending changes.
    fn check_area(&mut self, id: AreaId) -> Result<(), String> {
        let Area { start, len, purpose, .. } = self.areas[id];
        self.scratch.resize(len, 0);
        self.buffer.read(start, &mut self.scratch);
        differs(&self.scratch, &self.model[start..start + len], start)
            .map_err(|e| format!("area {id} ({purpose:?}) does not hold what it must: {e}"))
    }

    /// Checks all bytes that have no pending change.
    pub(crate) fn check_all(&mut self) -> Result<(), String> {
        let mut at = 0;
        for id in 0..=self.areas.len() {
            let (start, len) = match self.areas.get(id) {
                Some(area) => (area.start, area.len),
                None => (self.model.len(), 0),
            };
            self.scratch.resize(start - at, 0);
            self.buffer.read(at, &mut self.scratch);
            differs(&self.scratch, &self.model[at..start], at)
                .map_err(|e| format!("memory nobody was allowed to write has changed: {e}"))?;
            if self.areas.get(id).is_some_and(|a| a.pending.is_empty()) {
                self.check_area(id)?;
            }
            at = start + len;
        }
        Ok(())
    }

    /// Ends all pending changes, because nothing changes any more. Every byte must be an old one or
    /// one of a pending change. It may also be zero, if a change did not complete and bytes placed
    /// there by mistake were wiped out.
    pub(crate) fn settle(&mut self, purposes: &[Purpose]) -> Result<(), String> {
        for id in 0..self.areas.len() {
            let Area { start, len, purpose, .. } = self.areas[id];
            if !purposes.contains(&purpose) {
                continue;
            }
            self.scratch.resize(len, 0);
            self.buffer.read(start, &mut self.scratch);
            let mut known: Vec<bool> = (self.scratch.iter().zip(&self.model[start..start + len]))
                .map(|(now, old)| now == old)
                .collect();
            let changes = std::mem::take(&mut self.areas[id].pending);
            let count = changes.len();
            for (n, change) in changes.into_iter().enumerate() {
                let mut from = 0;
                let mut whole = true;
                for &(at, piece) in &change.pieces {
                    let bytes = &change.bytes[from..from + piece];
                    for (i, byte) in bytes.iter().enumerate() {
                        let same = self.scratch[at - start + i] == *byte;
                        let wiped = self.wiped && self.scratch[at - start + i] == 0;
                        known[at - start + i] |= same || wiped;
                        whole &= same;
                    }
                    from += piece;
                }
                if !whole && n + 1 == count {
                    self.missing.push(change.request);
                }
            }
            if let Some(bad) = known.iter().position(|ok| !ok) {
                let (at, byte) = (start + bad, self.scratch[bad]);
                return Err(format!(
                    "area {id} ({purpose:?}) holds {byte:#04x} at {at}, which nobody ever sent there"
                ));
            }
            self.model[start..start + len].copy_from_slice(&self.scratch);
        }
        Ok(())
    }

    /// Checks a message that came into the pieces of an area without pending changes.
    pub(crate) fn received(
        &mut self,
        id: AreaId,
        pieces: &[(usize, usize)],
        bytes: &[u8],
    ) -> Result<(), String> {
        put(&mut self.model, pieces, bytes);
        self.check_area(id)
    }

    /// Changes a byte without noting it.
    pub(crate) fn tamper(&self, at: usize) {
        let at = at % self.buffer.len().max(1);
        let mut byte = [0];
        self.buffer.read(at, &mut byte);
        self.buffer.write(at, &[byte[0] ^ 0x10]);
    }
}

/// Copies bytes into the pieces, as many bytes as given.
fn put(model: &mut [u8], pieces: &[(usize, usize)], bytes: &[u8]) {
    let mut rest = bytes;
    for &(at, len) in pieces {
        let (now, later) = rest.split_at(len.min(rest.len()));
        model[at..at + now.len()].copy_from_slice(now);
        rest = later;
    }
}

fn differs(got: &[u8], wanted: &[u8], at: usize) -> Result<(), String> {
    if got == wanted {
        return Ok(());
    }
    let count = got.iter().zip(wanted).filter(|(a, b)| a != b).count();
    let first = got.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or(0);
    let (found, must) = (got[first], wanted[first]);
    Err(format!("{count} bytes differ, the first at {}: {found:#04x}, not {must:#04x}", at + first))
}

/// Cuts `len` bytes from `at` on into at most `most` pieces, in random order.
pub(crate) fn cut(rng: &mut Rng, at: usize, len: usize, most: usize) -> Pieces {
    let count = 1 + rng.index(most.max(1));
    let mut ends: Vec<usize> = (1..count).map(|_| rng.index(len + 1)).collect();
    ends.push(len);
    ends.sort_unstable();
    let mut pieces = Vec::with_capacity(count);
    let mut from = 0;
    for end in ends {
        pieces.push((at + from, end - from));
        from = end;
    }
    rng.shuffle(&mut pieces);
    pieces
}

/// Returns the part of `pieces` from `skip` on, `len` bytes.
pub(crate) fn part(pieces: &[(usize, usize)], mut skip: usize, mut len: usize) -> Pieces {
    let mut out = Vec::new();
    for &(at, piece) in pieces {
        let jump = skip.min(piece);
        skip -= jump;
        let take = (piece - jump).min(len);
        if take > 0 {
            out.push((at + jump, take));
            len -= take;
        }
    }
    out
}

/// Converts pieces of the buffer to addresses of a region; offset 0 has the address `iova`.
pub(crate) fn sges(pieces: &[(usize, usize)], iova: u64, lkey: u32) -> Vec<Sge> {
    let sge = |&(at, len): &(usize, usize)| Sge { addr: iova + at as u64, len: len as u32, lkey };
    pieces.iter().map(sge).collect()
}

/// Converts pieces of the buffer for a fast registration.
pub(crate) fn list(memory: &Memory, pieces: &[(usize, usize)]) -> Vec<Piece> {
    let buffer = &memory.buffer;
    let piece = |&(offset, len): &(usize, usize)| Piece { buffer: Arc::clone(buffer), offset, len };
    pieces.iter().map(piece).collect()
}

/// Appends `len` bytes derived from `tag`.
pub(crate) fn fill(tag: u64, len: usize, out: &mut Vec<u8>) {
    let mut word = mix(tag ^ 0x0b0e);
    let end = out.len() + len;
    while out.len() < end {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        out.extend_from_slice(&(word ^ (word >> 29)).to_le_bytes());
    }
    out.truncate(end);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        let wanted = [(Purpose::Source, 100), (Purpose::Target, 100), (Purpose::Words, 16)];
        Memory::new(&mut Rng::new(1), &wanted).unwrap()
    }

    #[test]
    fn a_change_must_come_whole() {
        let mut memory = memory();
        let target = memory.of(Purpose::Target)[0];
        let (start, _) = memory.range(target);
        memory.expect(target, 1, vec![(start + 4, 2), (start, 2)], b"abcd".to_vec());
        assert_eq!(memory.expected_bytes(target, &[(start, 2), (start + 5, 1)]), b"cdb");
        assert!(memory.placed_up_to(0).is_ok());
        assert!(memory.placed_up_to(1).is_err());
        memory.buffer.write(start, b"cd");
        memory.buffer.write(start + 4, b"ab");
        assert_eq!(memory.placed_up_to(1), Ok(()));
        assert_eq!(memory.done(target, 1), Ok(()));
        assert_eq!(memory.check_all(), Ok(()));
        memory.expect(target, 2, vec![(start, 2)], b"xy".to_vec());
        assert!(memory.done(target, 2).is_err());
    }

    #[test]
    fn changes_without_a_request_are_found() {
        let mut memory = memory();
        let target = memory.of(Purpose::Target)[0];
        let (start, len) = memory.range(target);
        memory.expect(target, 1, vec![(start, 2)], vec![1, 2]);
        memory.buffer.write(start, &[1]);
        assert_eq!(memory.settle(&[Purpose::Target]), Ok(()));
        assert!(memory.done(target, 1).unwrap_err().contains("never came"));
        assert_eq!(memory.check_all(), Ok(()));
        memory.tamper(start + len);
        assert!(memory.check_all().unwrap_err().contains("nobody was allowed"));
        memory.tamper(start + len);
        memory.expect(target, 2, vec![(start, 2)], vec![1, 2]);
        memory.tamper(start + 3);
        assert!(memory.settle(&[Purpose::Target]).unwrap_err().contains("ever sent"));
    }

    #[test]
    fn only_memory_lent_to_a_failing_request_may_be_wiped_out() {
        for (wiped, byte, bears) in [(true, 0, true), (true, 7, false), (false, 0, false)] {
            let mut memory = memory();
            let (area, pieces) = memory.lend(Purpose::Target, 1, 1000).unwrap();
            assert!(memory.lend(Purpose::Target, 2, 1).is_none());
            assert_eq!(pieces, [memory.range(area)]);
            memory.wiped = wiped;
            memory.buffer.write(pieces[0].0, &[byte; 60]);
            assert_eq!(memory.settle(&[Purpose::Target]).is_ok(), bears, "{wiped} {byte}");
        }
    }
}
