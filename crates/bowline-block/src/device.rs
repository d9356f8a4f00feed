//! The interface of a disk, by which front ends (NBD, FUSE, ublk, vhost-user) and programs use a
//! mapped RNBD device.

use core::ops::Range;
use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::{Buffer, Mem};

/// A disk: takes requests, and delivers results by [`DiskDone`].
///
/// Requests in flight at the same time may be executed in any order.
pub trait BlockDevice: Send + Sync {
    /// Returns the present limits: the size changes with [`DiskEvent::Resized`].
    fn limits(&self) -> Limits;

    /// Returns the name of the disk.
    fn name(&self) -> &str;

    /// Allocates memory that requests of this disk may name.
    ///
    /// # Errors
    /// ENOMEM, or errors of registering it.
    fn memory(&self, len: usize) -> Result<DeviceMem, Errno>;

    /// Registers memory that exists already, so that requests of this disk may name it. Others may
    /// change it at any time.
    ///
    /// # Errors
    /// `EOPNOTSUPP` when the disk only takes memory of its own making; errors of registering it.
    fn register(&self, buffer: Arc<Buffer>) -> Result<DeviceMem, Errno> {
        let _ = buffer;
        Err(Errno::EOPNOTSUPP)
    }

    /// Submits all of `reqs` and leaves it empty. Never waits: requests that cannot be sent now are
    /// queued. Each request is answered once, perhaps inside this call. A request of any length is
    /// split as the limits require; its offset and length must be multiples of the logical block.
    fn submit(&self, reqs: &mut Vec<DiskIo>);

    /// Answers requests that have ended, in this thread; without any, sleeps until some have or
    /// `other` can be read: for a thread that serves both, until it [leaves](Self::leave). Returns
    /// how many have ended at least; `None` if other threads answer, so that the caller may sleep
    /// on `other` alone. `is_waiting` tells whether requests of the caller's are in flight.
    fn take_turn(&self, other: BorrowedFd<'_>, is_waiting: &dyn Fn() -> bool) -> Option<usize> {
        let _ = (other, is_waiting);
        None
    }

    /// The calling thread [takes no more turns](Self::take_turn) for a while: others answer.
    fn leave(&self) {}

    /// Ends waiting requests that are no longer wanted ([`DiskDone::is_wanted`]), unless a part of
    /// them may be in flight; those end normally. Does nothing on a disk whose requests do not wait
    /// for long.
    fn cancel_unwanted(&self) {}

    /// Returns how the bytes from `offset` on are stored, and how many of the next `len` bytes are
    /// stored in the same way: at least one, unless `len` is 0. The range lies within the disk.
    ///
    /// For a thread that may wait for the storage. A write in flight may change the answer. The
    /// default is for a disk that cannot know, such as one of another machine: RNBD has no such
    /// request.
    fn extent(&self, offset: u64, len: u64) -> Extent {
        let _ = offset;
        Extent { len, allocation: Allocation::Unknown }
    }

    /// Calls `f` at every later event. It must not block. A panic of it is contained.
    fn on_change(&self, f: Box<dyn Fn(DiskEvent) + Send + Sync>);
}

/// An event of a disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum DiskEvent {
    /// The size changed; new size in bytes.
    Resized(u64),
    /// The disk cannot be reached; requests wait or fail, as configured.
    Offline,
    /// The disk can be reached again.
    Online,
    /// The disk will not come back: every request fails.
    Gone,
}

/// Bytes of a disk that are stored in the same way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Extent {
    /// Number of bytes.
    pub len: u64,
    /// How they are stored.
    pub allocation: Allocation,
}

/// How bytes are stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Allocation {
    /// They may take space and be anything.
    Unknown,
    /// They take no space, and read as zeroes.
    Hole,
}

/// A request to a disk.
#[derive(Clone)]
#[non_exhaustive]
pub struct DiskIo {
    /// The operation.
    pub op: IoOp,
    /// Offset on the disk in bytes; ignored by a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u32,
    /// A write must be durable before it is answered.
    pub fua: bool,
    /// Zeroed blocks stay allocated.
    pub nounmap: bool,
    /// Memory of the data: [`DeviceMem::region`], and the offset in that region in bytes. Only for
    /// reads and writes.
    pub mem: Option<(u32, usize)>,
    /// Returned with the result.
    pub tag: u64,
    /// Callback for the result.
    pub done: Arc<dyn DiskDone>,
}

impl DiskIo {
    /// Makes a read from `offset` of the disk on into a part of registered memory. The disk answers
    /// `EINVAL` when that part does not lie within the memory.
    pub fn read(offset: u64, mem: &DeviceMem, part: Range<usize>, done: Arc<dyn DiskDone>) -> Self {
        Self::with_data(IoOp::Read, offset, mem, part, done)
    }

    /// Makes a write to `offset` of the disk and on, from a part of registered memory, as
    /// [`read`](Self::read).
    pub fn write(
        offset: u64,
        mem: &DeviceMem,
        part: Range<usize>,
        done: Arc<dyn DiskDone>,
    ) -> Self {
        Self::with_data(IoOp::Write, offset, mem, part, done)
    }

    /// Makes a flush: all writes that were answered before become durable.
    pub fn flush(done: Arc<dyn DiskDone>) -> Self {
        Self::new(IoOp::Flush, 0, 0, done)
    }

    /// Makes a discard of `len` bytes.
    pub fn discard(offset: u64, len: u32, done: Arc<dyn DiskDone>) -> Self {
        Self::new(IoOp::Discard, offset, len, done)
    }

    /// Makes `len` bytes zero.
    pub fn write_zeroes(offset: u64, len: u32, done: Arc<dyn DiskDone>) -> Self {
        Self::new(IoOp::WriteZeroes, offset, len, done)
    }

    /// Makes a request of any kind, without memory, with tag 0.
    pub fn new(op: IoOp, offset: u64, len: u32, done: Arc<dyn DiskDone>) -> Self {
        Self { op, offset, len, fua: false, nounmap: false, mem: None, tag: 0, done }
    }

    fn with_data(
        op: IoOp,
        offset: u64,
        mem: &DeviceMem,
        part: Range<usize>,
        done: Arc<dyn DiskDone>,
    ) -> Self {
        // What is too long for a request is beyond any memory, so the disk refuses it.
        let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
        Self { mem: Some((mem.region, part.start)), ..Self::new(op, offset, len, done) }
    }

    /// Sets the tag that comes with the result.
    #[must_use]
    pub fn tag(mut self, tag: u64) -> Self {
        self.tag = tag;
        self
    }

    /// Sets when a write must be durable.
    #[must_use]
    pub fn durable(mut self, durable: Durable) -> Self {
        self.fua = durable == Durable::Now;
        self
    }
}

/// When a write has to be durable.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Durable {
    /// When the next flush is answered.
    Later,
    /// When it is answered (forced unit access).
    Now,
}

impl fmt::Debug for DiskIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskIo")
            .field("op", &self.op)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .field("fua", &self.fua)
            .field("nounmap", &self.nounmap)
            .field("mem", &self.mem)
            .field("tag", &self.tag)
            .finish_non_exhaustive()
    }
}

/// Callback for results of requests.
pub trait DiskDone: Send + Sync {
    /// Delivers results: the tag of each request, and 0 or a negative errno. Called from any
    /// thread, with no locks held; must not block for long, since no other request is answered
    /// meanwhile. A panic of it is reported on standard error and contained.
    fn done(&self, results: &[(u64, i32)]);

    /// Tells whether requests of this kind are still wanted. Called with locks of the disk held:
    /// must neither block nor call the disk.
    fn is_wanted(&self, op: IoOp) -> bool {
        let _ = op;
        true
    }
}

/// Memory that requests of one disk may name, until it is dropped. It must outlive these requests.
pub struct DeviceMem {
    /// The memory.
    pub mem: Mem,
    /// Its region id in [`DiskIo::mem`].
    pub region: u32,
    _keep: Box<dyn Any + Send + Sync>,
}

impl DeviceMem {
    /// Makes registered memory; `keep` is dropped with it, which ends the registration.
    pub fn new(mem: Mem, region: u32, keep: impl Any + Send + Sync) -> Self {
        Self { mem, region, _keep: Box::new(keep) }
    }

    /// Returns its length in bytes.
    pub const fn len(&self) -> usize {
        self.mem.len
    }

    /// Tells whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `out.len()` bytes from offset `at` of this memory on to `out`.
    ///
    /// # Panics
    /// When they do not lie within this memory.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        self.mem.buffer.read(self.place(at, out.len()), out);
    }

    /// Copies `bytes` to offset `at` of this memory and on.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.mem.buffer.write(self.place(at, bytes.len()), bytes);
    }

    /// Returns the offset in the buffer of an offset in this memory.
    fn place(&self, at: usize, len: usize) -> usize {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(fits, "{len} bytes at {at} of {} bytes of memory", self.len());
        self.mem.offset + at
    }
}

impl fmt::Debug for DeviceMem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMem")
            .field("mem", &self.mem)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}
