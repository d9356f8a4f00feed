//! A split ring of virtio, in memory that the guest changes at any time: every number is read once,
//! checked, and used as it was read.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use bowline_verbs::Buffer;

use super::log::DirtyLog;
use super::memory::{GuestMemory, Part};

/// Most descriptors of a ring, and of a table that one of them refers to.
pub(super) const SIZE_MAX: u16 = 1024;

const DESCRIPTOR_LEN: usize = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// The guest wants no call when something was used.
const NO_CALL: u16 = 1;

/// A guest has broken the rules of its ring, which is served no more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Broken(pub(super) &'static str);

/// Memory of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Segment {
    /// Address in the guest.
    pub(super) guest: u64,
    pub(super) len: u32,
    /// It is for the device to write.
    pub(super) is_written: bool,
}

struct Descriptor {
    guest: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn read(table: &Part, index: u16) -> Self {
        let mut bytes = [0; DESCRIPTOR_LEN];
        table.buffer.read(table.at + usize::from(index) * DESCRIPTOR_LEN, &mut bytes);
        let [g0, g1, g2, g3, g4, g5, g6, g7, l0, l1, l2, l3, f0, f1, n0, n1] = bytes;
        Self {
            guest: u64::from_le_bytes([g0, g1, g2, g3, g4, g5, g6, g7]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        }
    }
}

/// What guest and device have agreed on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Agreed {
    pub(super) event_index: bool,
    pub(super) indirect: bool,
}

/// A ring with the device's place in it.
pub(super) struct SplitRing {
    descriptors: Part,
    available: Part,
    used: Part,
    size: u16,
    agreed: Agreed,
    /// Number of the next request to take.
    next: u16,
    /// Number of the next place for a used one.
    next_used: u16,
    log: Option<UsedLog>,
}

/// Where writes to a used ring are logged.
pub(super) struct UsedLog {
    pub(super) log: Arc<DirtyLog>,
    /// Where the ring is for the log.
    pub(super) guest: u64,
}

/// Bytes of a used ring of `size` descriptors.
pub(super) fn used_len(size: u16) -> u64 {
    6 + 8 * u64::from(size)
}

fn load(buffer: &Buffer, at: usize) -> u16 {
    u16::from_le(buffer.load_u16(at))
}

fn store(buffer: &Buffer, at: usize, number: u16) {
    buffer.store_u16(at, number.to_le());
}

impl SplitRing {
    /// Makes a ring of `size` descriptors, a power of two, whose parts `GuestMemory::ring` found;
    /// `next` is the request to begin with.
    pub(super) fn new(parts: [Part; 3], size: u16, agreed: Agreed, next: u16) -> Self {
        let [descriptors, available, used] = parts;
        let next_used = load(&used.buffer, used.at + 2);
        Self { descriptors, available, used, size, agreed, next, next_used, log: None }
    }

    /// Moves to other memory with the same contents.
    pub(super) fn relocate(&mut self, parts: [Part; 3]) {
        [self.descriptors, self.available, self.used] = parts;
    }

    /// Sets where writes to the used ring are logged.
    pub(super) fn set_log(&mut self, log: Option<UsedLog>) {
        self.log = log;
    }

    pub(super) const fn size(&self) -> u16 {
        self.size
    }

    pub(super) const fn next(&self) -> u16 {
        self.next
    }

    pub(super) const fn set_next(&mut self, next: u16) {
        self.next = next;
    }

    pub(super) const fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Takes the next request: the index of its first descriptor. If no request is there, the guest
    /// will notify of the next.
    pub(super) fn take(&mut self) -> Result<Option<u16>, Broken> {
        if self.available()? == 0 {
            if !self.agreed.event_index {
                return Ok(None);
            }
            let event = self.used.at + 4 + 8 * usize::from(self.size);
            store(&self.used.buffer, event, self.next);
            self.mark_used(event, 2);
            // The guest writes a request, then reads this number: one of both sees the other's.
            fence(Ordering::SeqCst);
            if self.available()? == 0 {
                return Ok(None);
            }
        }
        let at = self.available.at + 4 + 2 * usize::from(self.next % self.size);
        let head = load(&self.available.buffer, at);
        if head >= self.size {
            return Err(Broken("a request begins outside of its descriptors"));
        }
        self.next = self.next.wrapping_add(1);
        Ok(Some(head))
    }

    /// Gives back the request that was taken last.
    pub(super) const fn give_back(&mut self) {
        self.next = self.next.wrapping_sub(1);
    }

    fn available(&self) -> Result<u16, Broken> {
        let available = load(&self.available.buffer, self.available.at + 2);
        match available.wrapping_sub(self.next) {
            n if n > self.size => Err(Broken("more requests than descriptors")),
            n => Ok(n),
        }
    }

    /// Appends the memory of a request to `out`: what the device reads, then what it writes.
    pub(super) fn segments(
        &self,
        memory: &GuestMemory,
        head: u16,
        out: &mut Vec<Segment>,
    ) -> Result<(), Broken> {
        let first = Descriptor::read(&self.descriptors, head);
        if first.flags & INDIRECT == 0 {
            return chain(&self.descriptors, self.size, first, out);
        }
        let count = first.len / DESCRIPTOR_LEN as u32;
        let is_table = first.flags & NEXT == 0
            && (1..=u32::from(SIZE_MAX)).contains(&count)
            && first.len.is_multiple_of(DESCRIPTOR_LEN as u32);
        if !self.agreed.indirect || !is_table {
            return Err(Broken("an invalid table of descriptors"));
        }
        let table = memory.whole(first.guest, first.len.into());
        let table = table.ok_or(Broken("a table of descriptors outside of memory"))?;
        let first = Descriptor::read(&table, 0);
        chain(&table, count as u16, first, out)
    }

    /// Writes used requests, each with the number of bytes that were written to its memory;
    /// returns true if the guest wants a call.
    pub(super) fn put_used(&mut self, used: impl Iterator<Item = (u16, u32)>) -> bool {
        let before = self.next_used;
        for (head, written) in used {
            let mut element = [0; 8];
            element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
            element[4..].copy_from_slice(&written.to_le_bytes());
            let at = self.used.at + 4 + 8 * usize::from(self.next_used % self.size);
            self.used.buffer.write(at, &element);
            self.mark_used(at, element.len());
            self.next_used = self.next_used.wrapping_add(1);
        }
        store(&self.used.buffer, self.used.at + 2, self.next_used);
        self.mark_used(self.used.at + 2, 2);
        // The guest writes what it wants, then reads what was used: one of both sees the other's.
        fence(Ordering::SeqCst);
        if !self.agreed.event_index {
            return load(&self.available.buffer, self.available.at) & NO_CALL == 0;
        }
        let event = self.available.at + 4 + 2 * usize::from(self.size);
        let event = load(&self.available.buffer, event);
        let new = self.next_used;
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(before)
    }

    /// Logs that bytes of the used ring were written.
    fn mark_used(&self, at: usize, len: usize) {
        if let Some(UsedLog { log, guest }) = &self.log {
            log.mark(guest.saturating_add((at - self.used.at) as u64), len);
        }
    }
}

/// Follows a chain of descriptors of a table with `size` of them.
fn chain(table: &Part, size: u16, first: Descriptor, out: &mut Vec<Segment>) -> Result<(), Broken> {
    let begin = out.len();
    let mut descriptor = first;
    loop {
        if descriptor.flags & INDIRECT != 0 {
            return Err(Broken("a table of descriptors within a chain"));
        }
        // More than all of them: a loop.
        if out.len() - begin >= usize::from(size) {
            return Err(Broken("descriptors in a loop"));
        }
        let is_written = descriptor.flags & WRITE != 0;
        if !is_written && out[begin..].last().is_some_and(|last| last.is_written) {
            return Err(Broken("memory to read behind memory to write"));
        }
        out.push(Segment { guest: descriptor.guest, len: descriptor.len, is_written });
        if descriptor.flags & NEXT == 0 {
            return Ok(());
        }
        if descriptor.next >= size {
            return Err(Broken("a descriptor outside of its table"));
        }
        descriptor = Descriptor::read(table, descriptor.next);
    }
}
