//! The region of requests in flight: the machine's process keeps it, so that whoever serves its
//! disk next knows what has to be done again.
//!
//! ```text
//!   of each queue    0 features  8 version  10 size  12 head of the last batch  14 used
//!   of each request  16 + 16 n:  0 in flight  6 next of its batch  8 number, for the order
//! ```
//!
//! A request is marked when it is taken. Used ones are listed as a batch, written to the ring, then
//! unmarked, and then `used` follows the ring's: who finds both different completes the batch.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use bowline_verbs::Buffer;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::ring::SIZE_MAX;
use super::wire::InflightSpec;

const HEADER_LEN: usize = 16;
const ENTRY_LEN: usize = 16;
const VERSION: u16 = 1;
/// Most bytes of its file, which is far more than a region has.
const FILE_MAX: usize = 1 << 30;

/// Bytes of one queue's part, a multiple of a cache line.
fn queue_len(size: u16) -> usize {
    (HEADER_LEN + ENTRY_LEN * usize::from(size)).next_multiple_of(64)
}

/// The region of a machine.
#[derive(Clone, Debug)]
pub(super) struct InflightRegion {
    buffer: Arc<Buffer>,
    offset: usize,
    queues: u16,
    size: u16,
}

/// The part of one queue.
#[derive(Debug)]
pub(super) struct InflightQueue {
    buffer: Arc<Buffer>,
    at: usize,
    size: u16,
    /// Number of the next request.
    next: u64,
}

/// Makes a region for queues of this number and size; returns the file and its description.
pub(super) fn create(queues: u16, size: u16) -> io::Result<(OwnedFd, InflightSpec)> {
    if queues == 0 || usize::from(queues) > super::RINGS_MAX || size == 0 || size > SIZE_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let len = (queue_len(size) * usize::from(queues)) as u64;
    let file = memfd_create("bowline-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((file, InflightSpec { len, offset: 0, queues, queue_size: size }))
}

impl InflightRegion {
    /// Maps a region that the machine's process has kept.
    pub(super) fn open(spec: &InflightSpec, file: OwnedFd) -> io::Result<Self> {
        let len = queue_len(spec.queue_size).checked_mul(spec.queues.into());
        let buffer = Buffer::from_memfd_within(File::from(file).as_fd(), FILE_MAX)?;
        let offset = usize::try_from(spec.offset).ok();
        let fits = offset.zip(len).and_then(|(offset, len)| offset.checked_add(len));
        let fits = fits.is_some_and(|end| end <= buffer.len()) && spec.queue_size <= SIZE_MAX;
        let offset = offset.filter(|offset| fits && offset.is_multiple_of(8));
        let offset = offset.ok_or(io::ErrorKind::InvalidData)?;
        let (queues, size) = (spec.queues, spec.queue_size);
        Ok(Self { buffer: Arc::new(buffer), offset, queues, size })
    }

    /// Returns the part of a queue of `size`, if there is one.
    pub(super) fn queue(&self, index: usize, size: u16) -> Option<InflightQueue> {
        let fits = index < self.queues.into() && size <= self.size;
        let at = self.offset + index * queue_len(self.size);
        fits.then(|| InflightQueue { buffer: Arc::clone(&self.buffer), at, size, next: 0 })
    }
}

impl InflightQueue {
    /// Finishes the batch that whoever served before may have left, given the number of requests
    /// that the ring says are used; returns those still in flight, in their order.
    pub(super) fn recover(&mut self, ring_used: u16) -> Vec<u16> {
        if self.buffer.load_u16(self.at + 8) == 0 {
            self.buffer.store_u16(self.at + 10, self.size);
            self.buffer.store_u16(self.at + 8, VERSION);
        }
        let count = ring_used.wrapping_sub(self.buffer.load_u16(self.at + 14));
        if count <= self.size {
            let mut head = self.buffer.load_u16(self.at + 12);
            for _ in 0..count {
                if head >= self.size {
                    break;
                }
                self.mark(head, false);
                head = self.buffer.load_u16(self.entry(head) + 6);
            }
        }
        self.buffer.store_u16(self.at + 14, ring_used);
        let mut found: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.buffer.load_u16(self.entry(*head)).to_ne_bytes()[0] != 0)
            .map(|head| (self.number(head), head))
            .collect();
        found.sort_unstable();
        self.next = found.last().map_or(0, |(number, _)| number.wrapping_add(1));
        found.into_iter().map(|(_, head)| head).collect()
    }

    /// Marks a request as taken.
    pub(super) fn taken(&mut self, head: u16) {
        self.buffer.write(self.entry(head) + 8, &self.next.to_ne_bytes());
        self.next = self.next.wrapping_add(1);
        self.mark(head, true);
    }

    /// Lists a batch of requests that are about to be written as used.
    pub(super) fn begin_used(&self, heads: impl Iterator<Item = u16>) {
        for head in heads {
            let last = self.buffer.load_u16(self.at + 12);
            self.buffer.store_u16(self.entry(head) + 6, last);
            self.buffer.store_u16(self.at + 12, head);
        }
    }

    /// Unmarks that batch, now that the ring says that `ring_used` were used.
    pub(super) fn end_used(&self, heads: impl Iterator<Item = u16>, ring_used: u16) {
        heads.for_each(|head| self.mark(head, false));
        self.buffer.store_u16(self.at + 14, ring_used);
    }

    fn entry(&self, head: u16) -> usize {
        self.at + HEADER_LEN + ENTRY_LEN * usize::from(head)
    }

    fn number(&self, head: u16) -> u64 {
        let mut number = [0; 8];
        self.buffer.read(self.entry(head) + 8, &mut number);
        u64::from_ne_bytes(number)
    }

    /// The mark is a byte, and padding follows it.
    fn mark(&self, head: u16, in_flight: bool) {
        self.buffer.store_u16(self.entry(head), u16::from_ne_bytes([in_flight.into(), 0]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(region: &InflightRegion) -> InflightQueue {
        region.queue(1, 8).unwrap()
    }

    fn region() -> InflightRegion {
        let (file, spec) = create(2, 8).unwrap();
        assert_eq!(spec.len, 2 * 192);
        InflightRegion::open(&spec, file).unwrap()
    }

    #[test]
    fn who_serves_next_does_again_what_was_not_used_in_its_order() {
        let region = region();
        let mut one = queue(&region);
        assert!(one.recover(0xfffe).is_empty());
        for head in [5, 0, 3] {
            one.taken(head);
        }
        assert_eq!(queue(&region).recover(0xfffe), [5, 0, 3]);
        // Killed between listing and writing: nothing was used.
        one.begin_used([5, 3].into_iter());
        assert_eq!(queue(&region).recover(0xfffe), [5, 0, 3]);
        // Killed after writing, with indices that wrapped: both were used.
        assert_eq!(queue(&region).recover(0), [0]);
        // Numbers continue behind those that are in flight.
        let mut next = queue(&region);
        assert_eq!(next.recover(0), [0]);
        next.taken(5);
        assert_eq!(queue(&region).recover(0), [0, 5]);
        next.begin_used([0].into_iter());
        next.end_used([0].into_iter(), 1);
        assert_eq!(queue(&region).recover(1), [5]);
    }

    #[test]
    fn hostile_regions_are_refused_or_searched_within_bounds() {
        for (queues, size) in [(0, 8), (1, 0), (u16::MAX, 8), (1, u16::MAX)] {
            assert!(create(queues, size).is_err(), "{queues} {size}");
        }
        let (file, spec) = create(2, 8).unwrap();
        let bad = [
            InflightSpec { offset: 8, ..spec },
            InflightSpec { offset: u64::MAX, ..spec },
            InflightSpec { queues: 3, ..spec },
            InflightSpec { queue_size: u16::MAX, ..spec },
        ];
        for bad in bad {
            assert!(InflightRegion::open(&bad, file.try_clone().unwrap()).is_err(), "{bad:?}");
        }
        let region = InflightRegion::open(&spec, file).unwrap();
        assert!(region.queue(2, 8).is_none() && region.queue(0, 16).is_none());
        region.buffer.write(0, &[0xff; 2 * 192]);
        // All are in flight, whatever the list says.
        assert_eq!(queue(&region).recover(0xffff).len(), 8);
        assert_eq!(queue(&region).recover(3).len(), 8);
    }
}
