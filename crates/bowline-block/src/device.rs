//! The interface of a disk, by which front ends (NBD, FUSE, ublk) and programs use a mapped RNBD
//! device.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::Mem;

/// A disk: takes requests, and delivers results by [`DiskDone`].
///
/// Requests in flight at the same time may be carried out in any order.
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

    /// Submits all of `reqs` and leaves it empty. Never waits: requests that cannot be sent now are
    /// queued. Each request is answered once, perhaps inside this call. A request of any length is
    /// split as the limits require; its offset and length must be multiples of the logical block.
    fn submit(&self, reqs: &mut Vec<DiskIo>);

    /// Ends waiting requests that are no longer wanted ([`DiskDone::is_wanted`]), unless a part of
    /// them may be in flight; those end as usual. Does nothing on a disk whose requests do not wait
    /// for long.
    #[doc(alias = "forget")]
    fn cancel_unwanted(&self) {}

    /// Calls `f` at every later event. It must not block. A panic of it is contained.
    fn on_change(&self, f: Box<dyn Fn(DiskEvent) + Send + Sync>);
}

/// An event of a disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
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

/// A request to a disk.
#[derive(Clone)]
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
}

impl fmt::Debug for DeviceMem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMem")
            .field("mem", &self.mem)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}
