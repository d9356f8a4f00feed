//! Memory that peers may read and write.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use crate::foreign::{Foreign, ForeignMemory};
use crate::prefetch::{CACHE_LINE, prefetch_line};

/// A range of a buffer, for reads and writes that need no region or key.
#[derive(Clone, Debug)]
pub struct Mem {
    /// The memory.
    pub buffer: Arc<Buffer>,
    /// Offset of the range in the buffer, in bytes.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// Size of a huge page in bytes. Buffers of at least this size use huge pages if the system has
/// any.
pub const HUGE_PAGE: usize = 2 << 20;
/// Size of a small page in bytes, on the supported machines.
const PAGE: usize = 4096;

/// `madvise` value that collapses small pages into huge ones at once (Linux 6.1).
const MADV_COLLAPSE: i32 = 25;

/// Memory of fixed size, which may be registered: zeroed pages of this process alone, a file of
/// memory shared with another one, memory that the program has allocated, or the memory of another
/// process. Peers change it at any time, as a device would by DMA, so no reference to its bytes is
/// ever created: bytes are copied in and out.
#[derive(Debug)]
pub struct Buffer {
    /// Dangling for memory of another process, of which this process maps nothing.
    start: NonNull<u8>,
    len: usize,
    direct_placement: bool,
    /// The mapping is the buffer's own and ends with it.
    owned: bool,
    foreign: Option<Box<Foreign>>,
}

// SAFETY: the mapping belongs to the buffer alone, is reached only through raw copies, and stays
// until the buffer is dropped.
#[allow(unsafe_code)]
unsafe impl Send for Buffer {}
// SAFETY: as above. Copies that race mix bytes, as DMA does. The language calls that undefined for
// threads; this relies on a copy between raw pointers being one wherever it is made, as all code
// does that shares memory with other processes or devices.
#[allow(unsafe_code)]
unsafe impl Sync for Buffer {}

#[allow(unsafe_code)]
impl Buffer {
    /// Allocates `len` bytes, all zero.
    ///
    /// # Errors
    /// The system's, when there is no memory.
    pub fn new(len: usize) -> io::Result<Self> {
        let buffer = Self::map(len)?;
        if len >= HUGE_PAGE {
            buffer.advise(0, len, libc::MADV_HUGEPAGE);
        }
        Ok(buffer)
    }

    /// Allocates `len` bytes, all zero, for sparse use: a small page takes memory only when one of
    /// its bytes is first used. See [`Buffer::enlarge_pages`].
    ///
    /// # Errors
    /// The system's, when there is no memory.
    pub fn sparse(len: usize) -> io::Result<Self> {
        let mut buffer = Self::map(len + HUGE_PAGE)?;
        // The buffer begins at a multiple of the huge page size.
        let start = buffer.start.as_ptr();
        let before = start.align_offset(HUGE_PAGE);
        let behind = before + len.max(1).next_multiple_of(PAGE);
        let end = (len + HUGE_PAGE).next_multiple_of(PAGE);
        for (from, to) in [(0, before), (behind, end)] {
            if from < to {
                // SAFETY: whole pages of the mapping just made, which nothing refers to.
                unsafe { libc::munmap(start.wrapping_add(from).cast(), to - from) };
            }
        }
        buffer.start = NonNull::new(start.wrapping_add(before)).unwrap_or(buffer.start);
        buffer.len = len;
        buffer.advise(0, len, libc::MADV_NOHUGEPAGE);
        Ok(buffer)
    }

    /// The memory of another process; offsets are its addresses. Bytes that the process does not
    /// have, or has no longer, or does not give, read as zeroes, and what is written to them is
    /// lost; [`Buffer::faults`] counts these. How long an access may take is for the
    /// [`ForeignMemory`] to say: through a file of `/proc` as long as the process lets it, for
    /// example when a file system in userspace is behind the memory.
    ///
    /// Devices other than software ones cannot use it, and no address in this process stands for
    /// it.
    pub fn of_process(memory: Arc<dyn ForeignMemory>) -> Self {
        Self {
            start: NonNull::dangling(),
            len: isize::MAX as usize,
            direct_placement: false,
            owned: false,
            foreign: Some(Box::new(Foreign::new(memory))),
        }
    }

    /// `len` bytes of this process's memory that the program allocates and frees: what it registers
    /// through an interface of C. `None` for the null address and for a range that goes around the
    /// end of all addresses.
    ///
    /// # Safety
    /// The memory stays mapped until the buffer is dropped, for reading, and for writing too if the
    /// buffer is registered with a right to write or written to.
    pub unsafe fn from_program(start: *mut u8, len: usize) -> Option<Self> {
        let start = NonNull::new(start)?;
        (start.as_ptr() as usize).checked_add(len)?;
        Some(Self { start, len, direct_placement: true, owned: false, foreign: None })
    }

    /// All bytes of a file of memory (`memfd_create`) that other processes may have mapped too.
    ///
    /// # Errors
    /// `PermissionDenied` when the file is not sealed against shrinking (`F_SEAL_SHRINK`): an
    /// access behind its end would end this process. `InvalidInput` when it has no seals, as files
    /// that are not memory, or no bytes. Otherwise the system's.
    pub fn from_memfd(file: impl AsFd) -> io::Result<Self> {
        Self::from_memfd_within(file, usize::MAX)
    }

    /// The same of a file with at most `most` bytes; `InvalidInput` when it has more, which costs
    /// this process no addresses.
    ///
    /// # Errors
    /// As [`from_memfd`](Self::from_memfd).
    pub fn from_memfd_within(file: impl AsFd, most: usize) -> io::Result<Self> {
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: the call only reads the descriptor's state.
        let seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) };
        if seals < 0 {
            return Err(io::Error::last_os_error());
        }
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // Asked for after the seal, so it cannot become less.
        // SAFETY: all-zero is a valid value of this plain structure.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the call writes one structure.
        if unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let len = usize::try_from(stat.st_size).ok().filter(|len| (1..=most).contains(len));
        let len = len.ok_or(io::ErrorKind::InvalidInput)?;
        let buffer = Self::map_of(len, libc::MAP_SHARED, fd)?;
        // What others keep there does not belong into a core dump of this process.
        buffer.advise(0, len, libc::MADV_DONTDUMP);
        Ok(buffer)
    }

    /// Number of accesses to bytes that the other process did not have; 0 for memory of this one.
    pub fn faults(&self) -> u64 {
        self.foreign.as_ref().map_or(0, |foreign| foreign.faults())
    }

    /// Tells whether this is the memory of another process.
    pub const fn is_foreign(&self) -> bool {
        self.foreign.is_some()
    }

    /// Collapses a fully used range of [`Buffer::sparse`] memory into huge pages, if the system can
    /// do that. This affects only speed. Takes some milliseconds per page, and seconds if the
    /// system has to move other pages first.
    ///
    /// # Panics
    /// When the range does not lie within the buffer.
    pub fn enlarge_pages(&self, offset: usize, len: usize) {
        self.advise(offset, len, libc::MADV_HUGEPAGE);
        self.advise(offset, len, MADV_COLLAPSE);
    }

    /// Gives the system advice about a range. A refusal does not matter, since the advice never
    /// affects the contents.
    fn advise(&self, offset: usize, len: usize, advice: i32) {
        self.check(offset, len);
        if cfg!(miri) || self.is_foreign() {
            return; // Miri has no advice to take, and another process takes its own.
        }
        let at = self.at(offset, len);
        // SAFETY: within the mapping, as `at` checked.
        unsafe { libc::madvise(at.cast(), len, advice) };
    }

    /// Forbids a device to place payloads in this memory before it has checked them: only valid
    /// packets change it. Memory needs that if a peer may send a message again to bytes that this
    /// side is already reading.
    #[must_use]
    pub fn without_direct_placement(mut self) -> Self {
        self.direct_placement = false;
        self
    }

    /// Tells whether a device may receive payloads in this memory before it has checked them.
    pub const fn allows_direct_placement(&self) -> bool {
        self.direct_placement
    }

    fn map(len: usize) -> io::Result<Self> {
        Self::map_of(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn map_of(len: usize, flags: i32, fd: i32) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a mapping at an address of the system's choosing touches no memory that exists.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len.max(1), access, flags, fd, 0) };
        match NonNull::new(at.cast::<u8>()).filter(|_| at != libc::MAP_FAILED) {
            Some(start) => {
                Ok(Self { start, len, direct_placement: true, owned: true, foreign: None })
            }
            None => Err(io::Error::last_os_error()),
        }
    }

    /// Bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Tells whether the buffer is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte, at which a region registered without an `iova`
    /// begins; 0 for the memory of another process.
    pub fn addr(&self) -> u64 {
        if self.is_foreign() { 0 } else { self.start.as_ptr() as u64 }
    }

    fn check(&self, offset: usize, len: usize) {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "outside of the buffer");
    }

    /// Returns the address of a range of memory of this process.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        self.check(offset, len);
        // SAFETY: just checked to lie within the mapping, or one past its end.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// Copies `out.len()` bytes from `offset` on to `out`.
    ///
    /// # Panics
    /// When they do not lie within the buffer.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        if let Some(foreign) = &self.foreign {
            self.check(offset, out.len());
            return foreign.read(offset, out);
        }
        let from = self.at(offset, out.len());
        // SAFETY: `at` checked the range; `out` is other memory, since no slice of a buffer exists.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
    }

    /// Appends the `len` bytes from `offset` on to `out`.
    ///
    /// # Panics
    /// When they do not lie within the buffer.
    pub fn append_to(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        if self.is_foreign() {
            let begin = out.len();
            self.check(offset, len);
            out.resize(begin + len, 0);
            return self.read(offset, &mut out[begin..]);
        }
        let from = self.at(offset, len);
        out.reserve(len);
        let to = out.spare_capacity_mut().as_mut_ptr().cast::<u8>();
        // SAFETY: `at` checked the range, and there is room for `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        // SAFETY: these bytes have just been written.
        unsafe { out.set_len(out.len() + len) };
    }

    /// Appends the `len` bytes from `offset` on to `out`, and continues a CRC over exactly the
    /// appended bytes, whatever peers write during the call.
    ///
    /// # Panics
    /// When the bytes do not lie within the buffer.
    pub fn append_summed(&self, offset: usize, len: usize, out: &mut Vec<u8>, crc: u32) -> u32 {
        if self.is_foreign() {
            let begin = out.len();
            self.append_to(offset, len, out);
            return bowline_crc::update(crc, &out[begin..]);
        }
        let from = self.at(offset, len);
        out.reserve(len);
        let to = out.spare_capacity_mut().as_mut_ptr().cast::<u8>();
        // SAFETY: `at` checked the range, and there is room for `len` bytes, which are `out`'s
        // alone.
        let crc = unsafe { bowline_crc::copy(crc, from, to, len) };
        // SAFETY: these bytes have just been written.
        unsafe { out.set_len(out.len() + len) };
        crc
    }

    /// Continues a CRC over the `len` bytes from `offset` on, whatever peers write during the call.
    ///
    /// # Panics
    /// When they do not lie within the buffer.
    pub fn sum(&self, offset: usize, len: usize, crc: u32) -> u32 {
        if let Some(foreign) = &self.foreign {
            self.check(offset, len);
            let mut crc = crc;
            foreign.for_each(offset, len, |_, bytes| crc = bowline_crc::update(crc, bytes));
            return crc;
        }
        let from = self.at(offset, len);
        // SAFETY: `at` checked the range.
        unsafe { bowline_crc::sum(crc, from, len) }
    }

    /// Returns the address of a range, for system calls that write to it as a device would. The
    /// address is valid as long as the buffer.
    ///
    /// # Panics
    /// When they do not lie within the buffer, or it is the memory of another process.
    pub fn raw(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(!self.is_foreign(), "memory of another process has no address here");
        self.at(offset, len)
    }

    /// Zeroes a range.
    ///
    /// # Panics
    /// When they do not lie within the buffer.
    pub fn clear(&self, offset: usize, len: usize) {
        if let Some(foreign) = &self.foreign {
            self.check(offset, len);
            return (0..len).step_by(PAGE).for_each(|at| {
                foreign.write(offset + at, &[0; PAGE][..PAGE.min(len - at)]);
            });
        }
        let to = self.at(offset, len);
        // SAFETY: `at` checked the range; no slice of a buffer exists.
        unsafe { to.write_bytes(0, len) };
    }

    /// Prefetches a range that is copied soon; affects only speed.
    ///
    /// # Panics
    /// When they do not lie within the buffer.
    pub fn prefetch(&self, offset: usize, len: usize) {
        if self.is_foreign() {
            return self.check(offset, len);
        }
        let from = self.at(offset, len);
        for line in (0..len).step_by(CACHE_LINE) {
            prefetch_line(from.wrapping_add(line));
        }
    }

    /// Copies `bytes` to the buffer, from `offset` on.
    ///
    /// # Panics
    /// When the bytes do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        if let Some(foreign) = &self.foreign {
            self.check(offset, bytes.len());
            return foreign.write(offset, bytes);
        }
        let to = self.at(offset, bytes.len());
        // SAFETY: `at` checked the range; `bytes` is other memory, since no slice of a buffer
        // exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies `len` bytes to offset `at` of another buffer or of this one; the ranges may overlap.
    ///
    /// # Panics
    /// When a range does not lie within its buffer.
    pub fn copy_to(&self, from: usize, to: &Self, at: usize, len: usize) {
        if self.is_foreign() || to.is_foreign() {
            let mut bytes = Vec::new();
            self.append_to(from, len, &mut bytes);
            return to.write(at, &bytes);
        }
        let from = self.at(from, len);
        let to = to.at(at, len);
        // SAFETY: `at` checked both ranges.
        unsafe { std::ptr::copy(from, to, len) };
    }

    /// Changes 8 aligned bytes, a number in host byte order, atomically; returns the old value.
    ///
    /// # Panics
    /// When the bytes are not aligned or do not lie within the buffer.
    pub fn update(&self, offset: usize, mut change: impl FnMut(u64) -> u64) -> u64 {
        if let Some(foreign) = &self.foreign {
            self.check(offset, 8);
            assert!(offset.is_multiple_of(8), "not aligned to 8 bytes");
            return foreign.update(offset, change);
        }
        let at = self.at(offset, 8).cast::<u64>();
        assert!(at.is_aligned(), "not aligned to 8 bytes");
        // SAFETY: in range and aligned, both just checked; mapped as long as `self` is borrowed.
        let word = unsafe { AtomicU64::from_ptr(at) };
        let done = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(change(old)));
        done.unwrap_or_else(|old| old)
    }

    /// Reads 2 aligned bytes at once, a number in host byte order. What was written before a
    /// [`store_u16`](Self::store_u16) of this number is seen by later reads.
    ///
    /// # Panics
    /// When the bytes are not aligned, do not lie within the buffer, or are another process's.
    pub fn load_u16(&self, offset: usize) -> u16 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Writes 2 aligned bytes at once, a number in host byte order, after all earlier writes.
    ///
    /// # Panics
    /// As [`load_u16`](Self::load_u16).
    pub fn store_u16(&self, offset: usize, number: u16) {
        self.word(offset).store(number, Ordering::Release);
    }

    /// Reads 8 aligned bytes at once, a number in host byte order. What was written before a
    /// [`store_u64`](Self::store_u64) of this number is seen by later reads.
    ///
    /// # Panics
    /// As [`load_u16`](Self::load_u16).
    pub fn load_u64(&self, offset: usize) -> u64 {
        self.long_word(offset).load(Ordering::Acquire)
    }

    /// Writes 8 aligned bytes at once, a number in host byte order, after all earlier writes.
    ///
    /// # Panics
    /// As [`load_u16`](Self::load_u16).
    pub fn store_u64(&self, offset: usize, number: u64) {
        self.long_word(offset).store(number, Ordering::Release);
    }

    fn long_word(&self, offset: usize) -> &AtomicU64 {
        let at = self.raw(offset, 8).cast::<u64>();
        assert!(at.is_aligned(), "not aligned to 8 bytes");
        // SAFETY: in range and aligned, both just checked; mapped as long as `self` is borrowed.
        unsafe { AtomicU64::from_ptr(at) }
    }

    fn word(&self, offset: usize) -> &AtomicU16 {
        let at = self.raw(offset, 2).cast::<u16>();
        assert!(at.is_aligned(), "not aligned to 2 bytes");
        // SAFETY: in range and aligned, both just checked; mapped as long as `self` is borrowed.
        unsafe { AtomicU16::from_ptr(at) }
    }
}

#[allow(unsafe_code)]
impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // SAFETY: the mapping has this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len.max(1)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProcessFile;

    fn of_process() -> Buffer {
        let options = std::fs::File::options().read(true).write(true).clone();
        Buffer::of_process(Arc::new(ProcessFile::new(options.open("/proc/self/mem").unwrap())))
    }

    #[test]
    fn memory_of_the_program_stays_when_the_buffer_goes() {
        let mut owned = vec![1_u8; 100];
        // SAFETY: the vector outlives the buffer, and is not used while that exists.
        let buffer = unsafe { Buffer::from_program(owned.as_mut_ptr(), owned.len()) }.unwrap();
        buffer.write(98, &[2, 3]);
        assert_eq!(buffer.addr(), owned.as_ptr() as u64);
        drop(buffer);
        assert_eq!(owned[97..], [1, 2, 3]);
        // SAFETY: no such range is made.
        assert!(unsafe { Buffer::from_program(std::ptr::null_mut(), 1) }.is_none());
        // SAFETY: as above.
        assert!(unsafe { Buffer::from_program(owned.as_mut_ptr(), usize::MAX) }.is_none());
    }

    #[test]
    fn bytes_come_out_as_they_went_in() {
        let buffer = Buffer::new(10_000).unwrap();
        buffer.write(9_990, b"0123456789");
        let mut out = [0; 4];
        buffer.read(9_993, &mut out);
        assert_eq!(&out, b"3456");
        let mut all = vec![7];
        buffer.append_to(9_989, 2, &mut all);
        assert_eq!(all, [7, 0, b'0']);
        let crc = buffer.append_summed(9_000, 999, &mut all, 5);
        assert_eq!((all.len(), &all[992..]), (1002, &b"\x00012345678"[..]));
        assert_eq!(crc, bowline_crc::update(5, &all[3..]));
        assert_eq!(buffer.sum(9_000, 999, 5), crc);
        assert_eq!(buffer.raw(9_000, 1_000) as u64, buffer.addr() + 9_000);
        let other = Buffer::new(100).unwrap();
        buffer.copy_to(9_992, &other, 90, 8);
        other.copy_to(90, &other, 91, 8);
        other.read(90, &mut out);
        assert_eq!(&out, b"2234");
        buffer.write(8, &5_u64.to_ne_bytes());
        assert_eq!(buffer.update(8, |n| n + 1), 5);
        assert_eq!(buffer.update(8, |n| n), 6);
    }

    /// Makes a file of memory.
    #[allow(unsafe_code)]
    fn file(len: u64, seals: i32) -> std::fs::File {
        use std::os::fd::FromRawFd;
        // SAFETY: the name is a string, and the call makes a new descriptor.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING) };
        assert!(fd >= 0);
        // SAFETY: just made, and nobody else's.
        let file = unsafe { std::fs::File::from_raw_fd(fd) };
        file.set_len(len).unwrap();
        // SAFETY: the call changes only the file.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) }, 0);
        file
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no files of memory")]
    fn a_file_of_memory_is_shared_and_must_not_become_shorter() {
        use std::os::unix::fs::FileExt;
        let shared = file(8_192, libc::F_SEAL_SHRINK);
        let (one, other) =
            (Buffer::from_memfd(&shared).unwrap(), Buffer::from_memfd(&shared).unwrap());
        one.write(8_190, b"ab");
        let mut bytes = [0; 2];
        shared.read_at(&mut bytes, 8_190).unwrap();
        assert_eq!((&bytes, other.len()), (b"ab", 8_192));
        one.store_u16(2, 0x1234);
        assert_eq!(other.load_u16(2), 0x1234);

        let refused = |file: std::fs::File| Buffer::from_memfd(&file).unwrap_err().kind();
        assert_eq!(refused(file(4_096, 0)), io::ErrorKind::PermissionDenied);
        assert_eq!(refused(file(0, libc::F_SEAL_SHRINK)), io::ErrorKind::InvalidInput);
        let plain = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(refused(plain), io::ErrorKind::InvalidInput);
    }

    #[test]
    #[should_panic(expected = "aligned")]
    fn a_number_is_aligned() {
        Buffer::new(10).unwrap().load_u16(3);
    }

    /// This process stands for another one.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no /proc")]
    fn memory_of_a_process_is_read_and_written_by_its_addresses() {
        let own = Buffer::new(10_000).unwrap();
        let foreign = of_process();
        let at = own.addr() as usize;
        assert!(foreign.is_foreign() && !own.is_foreign());
        assert_eq!((foreign.addr(), foreign.allows_direct_placement()), (0, false));
        foreign.write(at + 9_990, b"0123456789");
        let mut out = [0; 4];
        own.read(9_993, &mut out);
        assert_eq!(&out, b"3456");
        let (mut theirs, mut ours) = (vec![7], vec![7]);
        let crcs =
            (foreign.append_summed(at + 1_000, 9_000, &mut theirs, 5), foreign.sum(at, 9, 5));
        assert_eq!(crcs, (own.append_summed(1_000, 9_000, &mut ours, 5), own.sum(0, 9, 5)));
        assert_eq!(theirs, ours);
        own.copy_to(9_995, &foreign, at + 16, 5);
        foreign.clear(at + 9_992, 2);
        foreign.copy_to(at + 9_990, &own, 24, 4);
        let mut out = [0; 12];
        foreign.read(at + 16, &mut out);
        assert_eq!(&out, b"56789\0\0\x0001\0\0");
        own.write(8, &5_u64.to_ne_bytes());
        assert_eq!(foreign.update(at + 8, |n| n + 1), 5);
        assert_eq!(own.update(8, |n| n), 6);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no /proc")]
    fn what_a_process_does_not_have_reads_as_zeroes_and_cannot_be_written() {
        let own = Buffer::new(8_192).unwrap();
        own.write(4_000, &[1; 96]);
        let foreign = of_process();
        let at = own.addr() as usize;
        // SAFETY: the second page of the buffer, which nothing refers to.
        #[allow(unsafe_code)]
        let left = unsafe { libc::mprotect(own.raw(4_096, 1).cast(), 4_096, libc::PROT_NONE) };
        assert_eq!(left, 0);
        foreign.write(0, b"nobody has this");
        let mut out = [7; 4];
        foreign.read(0, &mut out);
        assert_eq!(out, [0; 4]);
        assert_eq!((own.faults(), foreign.faults()), (0, 2));
        foreign.read(at + 4_094, &mut out);
        assert_eq!(out[..2], [1; 2]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri cannot unmap a part of a mapping")]
    fn sparse_memory_keeps_its_contents_when_pages_are_enlarged() {
        for len in [1, 5000, HUGE_PAGE, 3 * HUGE_PAGE + 100] {
            let buffer = Buffer::sparse(len).unwrap();
            assert_eq!((buffer.len(), buffer.addr() % HUGE_PAGE as u64), (len, 0));
            buffer.write(len - 1, b"x");
            buffer.enlarge_pages(0, len);
            let mut out = [0; 1];
            buffer.read(len - 1, &mut out);
            assert_eq!(&out, b"x");
        }
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn copy_to_checks_the_range() {
        let buffer = Buffer::new(10).unwrap();
        buffer.copy_to(0, &Buffer::new(5).unwrap(), 3, 3);
    }

    #[test]
    fn clear_zeroes_its_range_only() {
        let buffer = Buffer::new(100).unwrap();
        buffer.write(10, b"0123456789");
        buffer.clear(12, 5);
        buffer.clear(100, 0);
        let mut out = [0; 10];
        buffer.read(10, &mut out);
        assert_eq!(&out, b"01\0\0\0\0\x00789");
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn sum_checks_the_range() {
        Buffer::new(10).unwrap().sum(8, 3, 0);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn clear_checks_the_range() {
        Buffer::new(10).unwrap().clear(8, 3);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn raw_checks_the_range() {
        Buffer::new(10).unwrap().raw(8, 3);
    }

    #[test]
    fn prefetched_bytes_are_unchanged() {
        let buffer = Buffer::new(10_000).unwrap();
        buffer.write(9_990, b"0123456789");
        buffer.prefetch(9_000, 1_000);
        buffer.prefetch(10_000, 0);
        let mut out = [0; 10];
        buffer.read(9_990, &mut out);
        assert_eq!(&out, b"0123456789");
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn prefetch_checks_the_range() {
        Buffer::new(10).unwrap().prefetch(8, 3);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn read_checks_the_range() {
        Buffer::new(10).unwrap().read(8, &mut [0; 3]);
    }
}
