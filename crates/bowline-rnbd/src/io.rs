//! Operations and limits of disks: the types that storage, devices and front ends share.

/// An operation on a range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoOp {
    /// Reads bytes.
    Read,
    /// Writes bytes.
    Write,
    /// Makes all writes durable that were acknowledged before.
    Flush,
    /// Deallocates bytes: their contents are not needed any more.
    Discard,
    /// Zeroes bytes without sending zeroes.
    WriteZeroes,
    /// Makes contents unrecoverable.
    SecureErase,
}

impl IoOp {
    /// Tells whether the operation changes stored data: refused on a read-only device.
    pub const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes | Self::SecureErase)
    }

    /// Tells whether the operation transfers data.
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// Limits of discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discard {
    /// Largest discard in bytes.
    pub max_bytes: u64,
    /// Unit in bytes in which the storage frees space: smaller or unaligned discards may do
    /// nothing.
    pub granularity: u32,
    /// Offset in bytes from the start of the disk to the first boundary of such a unit.
    pub alignment: u32,
}

/// Size and limits of a disk. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the disk, a multiple of `logical`.
    pub bytes: u64,
    /// Smallest unit of IO, a power of two from 512 to 4096.
    pub logical: u32,
    /// Unit that the storage works in internally.
    pub physical: u32,
    /// Largest read or write in bytes. For storage, the most it does in one operation: longer ones,
    /// which a session may allow, are carried out too.
    pub max_io: u32,
    /// Largest number of memory segments of one request.
    pub max_segments: u16,
    /// Limits of discards, if supported.
    pub discard: Option<Discard>,
    /// Largest write of zeroes in bytes, 0 when not supported.
    pub max_write_zeroes: u32,
    /// Tells whether secure erase is supported; the limits of discards apply to it.
    pub secure_erase: bool,
    /// Tells whether writes are durable only after a flush.
    pub write_cache: bool,
    /// Tells whether a single write can be made durable (FUA).
    pub fua: bool,
    /// Tells whether the disk is read-only.
    pub read_only: bool,
}

impl Limits {
    /// Largest length of one request in bytes: a 32-bit number of whole sectors [NB-59].
    pub const IO_MAX: u32 = u32::MAX - u32::MAX % 512;
    /// Largest size of a disk in bytes: files and front ends use signed 64-bit offsets.
    pub const BYTES_MAX: u64 = i64::MAX as u64;

    /// Returns the limits of a plain memory disk: 4 KiB pages, 512-byte blocks, no cache, reads and
    /// writes of any length.
    pub const fn plain(bytes: u64) -> Self {
        Self {
            bytes,
            logical: 512,
            physical: 4096,
            max_io: Self::IO_MAX,
            max_segments: 128,
            discard: None,
            max_write_zeroes: 0,
            secure_erase: false,
            write_cache: false,
            fua: false,
            read_only: false,
        }
    }

    /// Tells whether the range lies within the disk.
    pub const fn holds(&self, offset: u64, len: u64) -> bool {
        match offset.checked_add(len) {
            Some(end) => end <= self.bytes,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_at_the_end_is_held_and_one_past_it_is_not() {
        let disk = Limits::plain(8192);
        assert!(disk.holds(4096, 4096));
        assert!(disk.holds(8192, 0));
        assert!(!disk.holds(4096, 4097));
        assert!(!disk.holds(u64::MAX, 2));
    }

    #[test]
    fn operations_that_change_a_disk() {
        use IoOp::{Discard, Flush, Read, SecureErase, Write, WriteZeroes};
        assert!([Write, Discard, WriteZeroes, SecureErase].iter().all(|op| op.changes()));
        assert!(![Read, Flush].iter().any(|op| op.changes()));
        assert!([Read, Write].iter().all(|op| op.has_data()));
    }
}
