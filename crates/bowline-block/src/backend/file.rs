//! A regular file or a block device as a store: its limits, and the ring or threads that carry
//! requests out.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bowline_rnbd::{Discard, Errno, IoOp, Limits};
use bowline_verbs::Buffer;
use rustix::fs::{AtFlags, FallocateFlags, FileType, OFlags, SeekFrom, StatxFlags};

use super::job::Job;
use super::pool::Pool;
use super::uring::Ring;
use super::{Backend, BackendDone, BackendIo, BackendResult, error, sys};
use crate::device::{Allocation, Extent};

/// Bytes one request can name. [NB-47] [NB-59]
const REQUEST_MAX: u64 = Limits::IO_MAX as u64;
/// Bytes of one write where zeroes have to be written as data.
const ZEROES: usize = 256 << 10;
/// Where block devices show their queue limits.
const SYSFS: &str = "/sys/dev/block";

/// The file. The ring and the threads hold it while requests are in flight.
#[derive(Debug)]
pub(super) struct Facts {
    fd: OwnedFd,
    /// Required alignment of memory addresses in bytes: 1 unless direct IO is used.
    pub(super) align: u64,
    /// It is a block device.
    device: bool,
    pub(super) zeroes: Buffer,
    limits: Limits,
    /// Its present size, in place of `limits.bytes`.
    bytes: AtomicU64,
}

impl Facts {
    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn limits(&self) -> Limits {
        Limits { bytes: self.bytes.load(Ordering::Relaxed), ..self.limits }
    }
}

/// A file as a store.
#[derive(Debug)]
pub(super) struct File {
    facts: Arc<Facts>,
    workers: Workers,
    /// Threads for calls that io_uring lacks.
    blocking: Option<Pool>,
}

#[derive(Debug)]
enum Workers {
    Ring(Ring),
    Pool(Pool),
}

impl File {
    /// Opens a file as a store. Requests use io_uring, or threads where there is none.
    pub(super) fn new(fd: OwnedFd, read_only: bool, block: u32, direct: bool) -> io::Result<Self> {
        let facts = Arc::new(look_at(fd, read_only, block, direct)?);
        let workers = match Ring::new(&facts) {
            Ok(ring) => Workers::Ring(ring),
            Err(_) => Workers::Pool(Pool::new(&facts)?),
        };
        let discards = facts.device && facts.limits.discard.is_some();
        let blocking = match workers {
            Workers::Ring(_) if discards => Some(Pool::new(&facts)?),
            _ => None,
        };
        Ok(Self { facts, workers, blocking })
    }

    #[cfg(test)]
    pub(super) fn by_threads(fd: OwnedFd, block: u32, direct: bool) -> io::Result<Self> {
        let facts = Arc::new(look_at(fd, false, block, direct)?);
        let workers = Workers::Pool(Pool::new(&facts)?);
        Ok(Self { facts, workers, blocking: None })
    }

    #[cfg(test)]
    pub(super) fn is_direct(&self) -> bool {
        self.facts.align > 1
    }

    #[cfg(test)]
    pub(super) fn is_over_ring(&self) -> bool {
        matches!(self.workers, Workers::Ring(_))
    }
}

impl Backend for File {
    fn limits(&self) -> Limits {
        self.facts.limits()
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        let limits = self.facts.limits();
        let mut answered = Vec::new();
        let mut blocking = Vec::new();
        // Answers are delivered once no lock is held.
        let jobs = io.drain(..).filter_map(|io| {
            let (token, nothing) = (io.token, io.op != IoOp::Flush && io.len == 0);
            let job = io
                .check(&limits)
                .and_then(|()| Job::new(io, done, self.facts.align, self.facts.device));
            let errno = match job {
                Ok(job) if self.blocking.is_some() && job.blocks() => {
                    blocking.push(job);
                    return None;
                }
                Ok(job) if !nothing => return Some(job),
                Ok(_) => 0,
                Err(errno) => errno.neg(),
            };
            answered.push(BackendResult { token, errno, direct: None });
            None
        });
        match &self.workers {
            Workers::Ring(ring) => ring.submit(jobs),
            Workers::Pool(pool) => pool.submit(jobs),
        }
        if let Some(pool) = self.blocking.as_ref().filter(|_| !blocking.is_empty()) {
            pool.submit(blocking.into_iter());
            pool.kick();
        }
        if !answered.is_empty() {
            done.done(&answered);
        }
    }

    fn kick(&self) {
        match &self.workers {
            Workers::Ring(ring) => ring.kick(),
            Workers::Pool(pool) => pool.kick(),
        }
    }

    fn extent(&self, offset: u64, len: u64) -> Extent {
        // Of what was not written, a block device knows nothing.
        let known = if self.facts.device { None } else { extent(&self.facts.fd, offset, len) };
        known.unwrap_or(Extent { len, allocation: Allocation::Unknown })
    }

    fn resize(&self) -> io::Result<u64> {
        let bytes = size(&self.facts.fd, self.facts.limits.logical)?;
        self.facts.bytes.store(bytes, Ordering::Relaxed);
        Ok(bytes)
    }
}

fn size(fd: &OwnedFd, block: u32) -> io::Result<u64> {
    let bytes = rustix::fs::seek(fd, SeekFrom::End(0))?;
    Ok(bytes - bytes % u64::from(block))
}

/// Returns the first extent of a range of a regular file; `None` where the file system does not
/// know, or the file has become shorter. Moves the file's offset, which nothing else uses.
fn extent(fd: &OwnedFd, offset: u64, len: u64) -> Option<Extent> {
    let (end, allocation) = match rustix::fs::seek(fd, SeekFrom::Data(offset)) {
        Ok(data) if data > offset => (data, Allocation::Hole),
        Ok(_) => (rustix::fs::seek(fd, SeekFrom::Hole(offset)).ok()?, Allocation::Unknown),
        // No data follows.
        Err(rustix::io::Errno::NXIO) => {
            (rustix::fs::seek(fd, SeekFrom::End(0)).ok()?, Allocation::Hole)
        }
        Err(_) => return None,
    };
    let found = end.checked_sub(offset).filter(|found| *found > 0)?;
    Some(Extent { len: found.min(len), allocation })
}

fn look_at(fd: OwnedFd, read_only: bool, block: u32, direct: bool) -> io::Result<Facts> {
    let stat = rustix::fs::fstat(&fd)?;
    let device = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => false,
        FileType::BlockDevice => true,
        _ => return Err(error(Errno::ENOTBLK)),
    };
    let mode = rustix::fs::fcntl_getfl(&fd)? & OFlags::RWMODE;
    if mode == OFlags::WRONLY || (mode == OFlags::RDONLY && !read_only) {
        return Err(error(Errno::EACCES));
    }
    let (mut logical, mut physical) = (block, 4096);
    if device {
        logical = logical.max(rustix::fs::ioctl_blksszget(&fd)?);
        physical = rustix::fs::ioctl_blkpbszget(&fd)?;
        super::check_block(logical)?;
    }
    let bytes = size(&fd, logical)?;
    let align = if direct { go_direct(&fd, logical)? } else { None };
    if align.is_none() {
        rustix::fs::fcntl_setfl(&fd, OFlags::empty())?;
    }
    let fs_block = u32::try_from(stat.st_blksize).unwrap_or(4096);
    let queue = Queue::of(stat.st_rdev);
    let discard = match (read_only, device) {
        (true, _) => None,
        (false, true) => queue.discard(),
        (false, false) => file_discard(&fd, bytes, fs_block),
    };
    let plain = Limits::plain(bytes);
    let (max_io, max_segments) = if device {
        (queue.max_io(logical), queue.max_segments())
    } else {
        (plain.max_io, plain.max_segments)
    };
    let max_zeroes = REQUEST_MAX - REQUEST_MAX % u64::from(logical);
    let limits = Limits {
        logical,
        physical: physical.max(logical),
        max_io,
        max_segments,
        discard,
        max_write_zeroes: if read_only { 0 } else { u32::try_from(max_zeroes).unwrap_or(0) },
        // Even without the page cache, the drive has a cache and the file system its journal.
        write_cache: !read_only,
        fua: !read_only,
        read_only,
        ..plain
    };
    Ok(Facts {
        fd,
        align: align.unwrap_or(1),
        device,
        zeroes: Buffer::new(ZEROES)?,
        limits,
        bytes: AtomicU64::new(bytes),
    })
}

/// Turns on direct IO, if blocks of this size can be read by it; returns the required alignment of
/// addresses.
fn go_direct(fd: &OwnedFd, block: u32) -> io::Result<Option<u64>> {
    let known = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let known = known.ok().filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    let (memory, offset) =
        known.map_or((4096, block), |stat| (stat.stx_dio_mem_align, stat.stx_dio_offset_align));
    if offset == 0 || offset > block || rustix::fs::fcntl_setfl(fd, OFlags::DIRECT).is_err() {
        return Ok(None);
    }
    // Tries a read, since file systems may report wrong values.
    let page = Buffer::new(block as usize)?;
    match sys::read(fd.as_raw_fd(), page.addr(), block, 0) {
        n if n >= 0 => Ok(Some(u64::from(memory.max(1)))),
        _ => Ok(None),
    }
}

/// Discards of a regular file punch holes, where the file system supports them. Tried beyond the
/// end, where there is no data.
fn file_discard(fd: &OwnedFd, bytes: u64, granularity: u32) -> Option<Discard> {
    let beyond = bytes.checked_next_multiple_of(u64::from(granularity))?;
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, mode, beyond + u64::from(granularity), granularity.into()).ok()?;
    Some(Discard {
        max_bytes: REQUEST_MAX - REQUEST_MAX % u64::from(granularity),
        granularity,
        alignment: 0,
    })
}

/// The queue of a block device in sysfs. Secure erase is left out: sysfs does not show whether a
/// device supports it. [NB-9] [NB-47]
struct Queue {
    folder: String,
}

impl Queue {
    fn of(device: rustix::fs::Dev) -> Self {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        Self { folder: format!("{SYSFS}/{major}:{minor}") }
    }

    fn number(&self, name: &str) -> Option<u64> {
        let at = &self.folder;
        // A partition has the queue of its disk.
        let text = std::fs::read_to_string(format!("{at}/queue/{name}"))
            .or_else(|_| std::fs::read_to_string(format!("{at}/../queue/{name}")))
            .or_else(|_| std::fs::read_to_string(format!("{at}/{name}")));
        text.ok()?.trim().parse().ok()
    }

    /// Largest request in bytes; the kernel splits longer ones.
    fn max_io(&self, block: u32) -> u32 {
        let known = self.number("max_hw_sectors_kb").filter(|kib| *kib > 0);
        let bytes = known.map_or(REQUEST_MAX, |kib| kib.saturating_mul(1024).min(REQUEST_MAX));
        let bytes = u32::try_from(bytes).unwrap_or(Limits::IO_MAX);
        (bytes - bytes % block).max(block)
    }

    fn max_segments(&self) -> u16 {
        let known = self.number("max_segments").filter(|segments| *segments > 0);
        let default = Limits::plain(0).max_segments;
        known.map_or(default, |segments| u16::try_from(segments).unwrap_or(u16::MAX))
    }

    fn discard(&self) -> Option<Discard> {
        let granularity = u32::try_from(self.number("discard_granularity")?).ok()?.max(512);
        let most = self.number("discard_max_bytes").filter(|most| *most > 0)?.min(REQUEST_MAX);
        let alignment = self.number("discard_alignment");
        Some(Discard {
            max_bytes: most - most % u64::from(granularity),
            granularity,
            alignment: alignment.and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
        })
    }
}
