//! What can be asked of a disk, and what a disk can do: the words storage, devices and doors share.

/// What is done with a range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoOp {
    /// Reads bytes.
    Read,
    /// Writes bytes.
    Write,
    /// Makes durable all that was acknowledged before.
    Flush,
    /// Says that the contents are not needed any more.
    Discard,
    /// Makes bytes zero without sending them.
    WriteZeroes,
    /// Makes contents unrecoverable.
    SecureErase,
}

impl IoOp {
    /// Tells whether the operation changes what is stored: refused on a read-only device.
    pub const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes | Self::SecureErase)
    }

    /// Tells whether bytes travel with the operation.
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// How far a disk can discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discard {
    /// Bytes of one discard at most.
    pub max_bytes: u64,
    /// Bytes of what is really freed: smaller or unaligned discards may do nothing.
    pub granularity: u32,
    /// Bytes from the start of the disk to the first boundary of such a piece.
    pub alignment: u32,
}

/// What a disk is and can do. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the disk, a multiple of `logical`.
    pub bytes: u64,
    /// Smallest unit of IO, a power of two from 512 to 4096.
    pub logical: u32,
    /// Unit the storage itself works in.
    pub physical: u32,
    /// Bytes of one read or write at most. Of storage: what it does in one go; a session may allow
    /// more, and storage carries that out too.
    pub max_io: u32,
    /// Pieces of memory of one request at most.
    pub max_segments: u16,
    /// Discards, if there are any.
    pub discard: Option<Discard>,
    /// Bytes of one write of zeroes at most, 0 when there is no such operation.
    pub max_write_zeroes: u32,
    /// Tells whether there is secure erase; it is limited as discards are.
    pub secure_erase: bool,
    /// Tells whether writes are durable only after a flush.
    pub write_cache: bool,
    /// Tells whether one write can be made durable by itself.
    pub fua: bool,
    /// Tells whether writing is impossible.
    pub read_only: bool,
}

impl Limits {
    /// Bytes that one request can name: 32 bits of them, in whole sectors [NB-59].
    pub const IO_MAX: u32 = u32::MAX - u32::MAX % 512;
    /// Bytes of the largest disk: files, and the doors in front of disks, count them with a sign.
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
    fn what_changes_a_disk_is_known() {
        use IoOp::{Discard, Flush, Read, SecureErase, Write, WriteZeroes};
        assert!([Write, Discard, WriteZeroes, SecureErase].iter().all(|op| op.changes()));
        assert!(![Read, Flush].iter().any(|op| op.changes()));
        assert!([Read, Write].iter().all(|op| op.has_data()));
    }
}
