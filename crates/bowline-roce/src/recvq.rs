//! Receives posted on a queue pair, and the receive that the current message is written to.
//!
//! ```text
//!   entries   [id 7, 2 pieces]            [id 8, 1 piece]     first in, first out
//!   sges      [addr len key] [addr ..]    [addr ..]           of all entries, in the same order
//!   ActiveRecv    id, pieces, position of the next byte
//! ```
//!
//! Scatter lists are stored in one ring, and the active receive keeps the memory of its list for
//! the next one, so nothing is allocated per receive once the rings have grown.

use std::collections::VecDeque;

use bowline_verbs::{Error, PdId, RecvWr, Sge};

use crate::mr::MrTable;

/// Most bytes of one message [HDR-12].
pub(crate) const MESSAGE_MAX: u64 = 1 << 31;

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: u64,
    sges: usize,
}

/// Posted receives.
#[derive(Debug, Default)]
pub(crate) struct RecvQueue {
    entries: VecDeque<Entry>,
    sges: VecDeque<Sge>,
}

impl RecvQueue {
    /// Queues a receive, if fewer than `max` are posted.
    pub(crate) fn post(&mut self, wr: &RecvWr<'_>, max: usize) -> Result<(), Error> {
        if self.entries.len() >= max {
            return Err(Error::QueueFull);
        }
        self.entries.push_back(Entry { id: wr.id, sges: wr.sges.len() });
        self.sges.extend(wr.sges);
        Ok(())
    }

    /// Number of posted receives.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the capacity of the first receive in bytes; `None` if there is none.
    pub(crate) fn room(&self) -> Option<u64> {
        let first = self.entries.front()?;
        Some(room(self.sges.iter().take(first.sges)))
    }

    /// Moves the first receive to `taken`; tells whether there was one.
    pub(crate) fn take(&mut self, taken: &mut ActiveRecv) -> bool {
        let Some(first) = self.entries.pop_front() else { return false };
        taken.sges.clear();
        taken.sges.extend(self.sges.drain(..first.sges));
        taken.id = first.id;
        taken.room = room(taken.sges.iter());
        taken.rewind();
        true
    }

    /// Removes the first receive without using its list, and returns its id.
    pub(crate) fn take_id(&mut self) -> Option<u64> {
        let first = self.entries.pop_front()?;
        self.sges.drain(..first.sges);
        Some(first.id)
    }
}

fn room<'a>(sges: impl Iterator<Item = &'a Sge>) -> u64 {
    sges.map(|sge| u64::from(sge.len)).sum()
}

/// Why bytes could not be written to a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlaceError {
    /// There is no room; nothing was written.
    TooLong,
    /// A local key does not allow the access [MR-4].
    Key,
}

/// The receive that a message is being written to.
#[derive(Debug, Default)]
pub(crate) struct ActiveRecv {
    id: u64,
    sges: Vec<Sge>,
    room: u64,
    /// Bytes written so far.
    len: u64,
    /// Index of the piece that the next byte goes to, and the offset in that piece.
    piece: usize,
    offset: u32,
}

impl ActiveRecv {
    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    /// Bytes written so far.
    pub(crate) const fn len(&self) -> u64 {
        self.len
    }

    /// Begins again: the next byte goes to the first piece.
    pub(crate) const fn rewind(&mut self) {
        self.len = 0;
        self.piece = 0;
        self.offset = 0;
    }

    /// Writes the next bytes of the message [RSP-19]. Keys are looked up in each call, so memory
    /// that was deregistered in the meantime is not written [MR-11].
    pub(crate) fn place(
        &mut self,
        mrs: &MrTable,
        pd: PdId,
        mut bytes: &[u8],
    ) -> Result<(), PlaceError> {
        let after = self.len + bytes.len() as u64;
        if after > self.room.min(MESSAGE_MAX) {
            return Err(PlaceError::TooLong);
        }
        while !bytes.is_empty() {
            let sge = self.sges.get(self.piece).ok_or(PlaceError::TooLong)?;
            let left = sge.len - self.offset;
            if left == 0 {
                self.piece += 1;
                self.offset = 0;
                continue;
            }
            let (now, rest) = bytes.split_at(bytes.len().min(left as usize));
            let va = sge.addr.checked_add(u64::from(self.offset)).ok_or(PlaceError::Key)?;
            mrs.scatter(pd, sge.lkey, va, now).map_err(|_| PlaceError::Key)?;
            self.offset += now.len() as u32; // at most `left`, which is a u32
            self.len += now.len() as u64;
            bytes = rest;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [HDR-12]: also when the receive has room for more.
    #[test]
    fn a_message_has_an_end() {
        let mut queue = RecvQueue::default();
        let sge = Sge { addr: 0, len: u32::MAX, lkey: 0 };
        queue.post(&RecvWr { id: 1, sges: &[sge, sge] }, 1).unwrap();
        assert_eq!(queue.room(), Some(2 * u64::from(u32::MAX)));
        let mut taken = ActiveRecv::default();
        assert!(queue.take(&mut taken));
        taken.len = MESSAGE_MAX - 1;
        let mrs = MrTable::new(1, 0);
        assert_eq!(taken.place(&mrs, PdId(0), b"xy"), Err(PlaceError::TooLong));
        assert_eq!(taken.place(&mrs, PdId(0), b"x"), Err(PlaceError::Key));
    }
}
