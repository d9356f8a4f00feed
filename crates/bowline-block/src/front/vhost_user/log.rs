//! The dirty log: a bit for each page of the guest's memory, by which the machine's process learns
//! what was written to while it copies the memory to another one.

use std::io;
use std::os::fd::OwnedFd;

use bowline_verbs::Buffer;

use super::wire::FileRange;

/// Bytes of the guest's memory for each bit.
const PAGE: u64 = 4096;
/// Most bytes of its file: bits for 16 TiB, and as much again.
const FILE_MAX: usize = 1 << 30;
/// Bits, and bytes, that are set at once.
const WORD_BITS: u64 = 64;
const WORD: usize = 8;

/// A log, which the machine's process reads and clears at any time.
#[derive(Debug)]
pub(super) struct DirtyLog {
    buffer: Buffer,
    /// Where it begins in its file, a multiple of a word.
    at: usize,
    pages: u64,
}

impl DirtyLog {
    /// Maps the log that the machine's process has named.
    pub(super) fn open(range: &FileRange, file: &OwnedFd) -> io::Result<Self> {
        let buffer = Buffer::from_memfd_within(file, FILE_MAX)?;
        let at = usize::try_from(range.offset).ok().filter(|at| at.is_multiple_of(WORD));
        let len =
            usize::try_from(range.len).ok().and_then(|len| len.checked_next_multiple_of(WORD));
        let end = at.zip(len).and_then(|(at, len)| at.checked_add(len));
        let at = at.filter(|_| end.is_some_and(|end| end <= buffer.len()));
        let at = at.ok_or(io::ErrorKind::InvalidData)?;
        // No more than the bits of memory that is mapped, so that it fits.
        Ok(Self { buffer, at, pages: range.len * 8 })
    }

    /// Tells whether it has bits for these bytes, of which there is one at least.
    pub(super) fn holds(&self, guest: u64, len: u64) -> bool {
        guest.checked_add(len - 1).is_some_and(|last| last / PAGE < self.pages)
    }

    /// Marks the pages of some bytes as written. Comes after the write: who clears the mark before
    /// it reads the page misses nothing.
    pub(super) fn mark(&self, guest: u64, len: usize) {
        let Some(before_end) = (len as u64).checked_sub(1) else { return };
        let end = (guest.saturating_add(before_end) / PAGE + 1).min(self.pages);
        let mut page = guest / PAGE;
        while page < end {
            let bit = page % WORD_BITS;
            let count = (WORD_BITS - bit).min(end - page);
            let mask = (u64::MAX >> (WORD_BITS - count)) << bit;
            // The bits are in order of bytes, whatever the order of bytes in a number.
            let mask = mask.to_le();
            // Within the log, as the number of its pages says.
            let at = self.at + (page / WORD_BITS) as usize * WORD;
            self.buffer.update(at, |word| word | mask);
            page += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    fn file(len: u64, seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("log", flags).unwrap();
        ftruncate(&file, len).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn the_pages_of_what_was_written_are_marked_and_no_others() {
        let file = file(64, SealFlags::SHRINK);
        let log = DirtyLog::open(&FileRange { len: 32, offset: 16 }, &file).unwrap();
        let bytes = |at: usize, len: usize| {
            let mut bytes = vec![0; len];
            log.buffer.read(at, &mut bytes);
            bytes
        };
        log.mark(0x3fff, 2);
        assert_eq!(bytes(16, 2), [0b1_1000, 0]);
        log.mark(0x8000, 0x1000);
        assert_eq!(bytes(16, 2), [0b1_1000, 1]);
        log.mark(5, 0);
        assert_eq!(bytes(16, 2), [0b1_1000, 1]);
        // Pages 62 to 192, and the last one.
        log.mark(62 << 12, 131 << 12);
        log.mark(255 << 12, 1);
        let mut expected = vec![0b1_1000, 1, 0, 0, 0, 0, 0, 0b1100_0000];
        expected.extend([0xff; 16]);
        expected.extend([1, 0, 0, 0, 0, 0, 0, 0x80]);
        assert_eq!(bytes(16, 32), expected);
        // What has no bit changes nothing.
        for (guest, len) in [(256 << 12, 1 << 20), (u64::MAX, 1), (u64::MAX - 5, 100)] {
            log.mark(guest, len);
            assert!(!log.holds(guest, len as u64), "{guest:x}");
        }
        log.mark(254 << 12, usize::MAX);
        assert_eq!((bytes(0, 16), bytes(48, 16)), (vec![0; 16], vec![0; 16]));
        assert!(log.holds(0, 256 << 12) && !log.holds(1, 256 << 12));
    }

    #[test]
    fn logs_that_lie_outside_of_their_file_are_refused() {
        let sealed = file(64, SealFlags::SHRINK);
        for (len, offset) in [(65, 0), (64, 8), (8, 4), (61, 8), (u64::MAX, 0), (8, u64::MAX - 7)] {
            assert!(DirtyLog::open(&FileRange { len, offset }, &sealed).is_err(), "{len} {offset}");
        }
        // Its mapping would take addresses that the process needs.
        let huge = file(FILE_MAX as u64 + 1, SealFlags::SHRINK);
        assert!(DirtyLog::open(&FileRange { len: 64, offset: 0 }, &huge).is_err());
        let unsealed = file(64, SealFlags::empty());
        assert!(DirtyLog::open(&FileRange { len: 64, offset: 0 }, &unsealed).is_err());
    }
}
