//! A disk as its users see it: what a mapped RNBD device is to the doors in front of it (NBD, FUSE,
//! ublk) and to programs that use it directly.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::Mem;

/// A disk: requests go in, results come by way of [`DiskDone`].
///
/// Requests that are under way together may be carried out in any order.
pub trait BlockDevice: Send + Sync {
    /// What the disk can do, now: its size changes with [`DiskEvent::Resized`].
    fn limits(&self) -> Limits;

    /// What the disk is called.
    fn name(&self) -> &str;

    /// Allocates memory that requests of this disk may name.
    ///
    /// # Errors
    /// ENOMEM, or what registering it came to.
    fn memory(&self, len: usize) -> Result<DeviceMem, Errno>;

    /// Takes all of `reqs` and leaves it empty. Never waits: what cannot go out now is queued.
    /// Each request is answered once, perhaps inside this call. A request of any length is split
    /// as the limits demand; its offset and length have to be multiples of the logical block.
    fn submit(&self, reqs: &mut Vec<DiskIo>);

    /// Ends requests that nobody wants any more ([`DiskDone::is_wanted`]), as far as they wait and
    /// nothing of them can be under way; others end as they would. A disk at which nothing waits
    /// for long has none.
    fn forget(&self) {}

    /// Calls `f` at every later change. It must not block. A panic of it ends there.
    fn on_change(&self, f: Box<dyn Fn(DiskEvent) + Send + Sync>);
}

/// What changed about a disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DiskEvent {
    /// It has so many bytes now.
    Resized(u64),
    /// It cannot be reached; requests wait or fail, as it was set up.
    Offline,
    /// It can be reached again.
    Online,
    /// It will not come back: every request fails.
    Gone,
}

/// One request.
#[derive(Clone)]
pub struct DiskIo {
    /// What to do.
    pub op: IoOp,
    /// First byte on the disk; ignored by a flush.
    pub offset: u64,
    /// Bytes; 0 with a flush.
    pub len: u32,
    /// The data has to be durable when a write is answered.
    pub fua: bool,
    /// Zeroed blocks stay allocated.
    pub nounmap: bool,
    /// Where the data is or goes: [`DeviceMem::region`], and the offset in that region. Reads and
    /// writes have it, others do not.
    pub mem: Option<(u32, usize)>,
    /// Given back with the result.
    pub tag: u64,
    /// Who is told the result.
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

/// Is told results.
pub trait DiskDone: Send + Sync {
    /// Requests were answered: the tag and the result of each, which is 0 or a negative errno.
    /// Called from any thread, with no locks held; must not block for long, since nothing else is
    /// answered meanwhile. A panic of it is reported on standard error and ends there: the thread
    /// goes on.
    fn done(&self, results: &[(u64, i32)]);

    /// Tells whether requests of this kind are still wanted. Asked with locks of the disk held:
    /// must not block, nor call the disk.
    fn is_wanted(&self, op: IoOp) -> bool {
        let _ = op;
        true
    }
}

/// Memory that requests of one disk may name, until it is dropped. It has to outlive the requests
/// that name it.
pub struct DeviceMem {
    /// The memory.
    pub mem: Mem,
    /// Its name in [`DiskIo::mem`].
    pub region: u32,
    _keep: Box<dyn Any + Send + Sync>,
}

impl DeviceMem {
    /// Memory with a name; `keep` is dropped with it, and takes the registration back.
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
