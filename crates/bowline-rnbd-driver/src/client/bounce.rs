//! Bounce buffers for requests with an IO timeout.
//!
//! A request that was answered because its time was up is still in flight: the server may read or
//! write its memory at any time, while the program uses that memory for something else. So the data
//! of such requests is copied through memory of this pool. A buffer of a late request is not
//! reused: the link keeps it until the server has answered, and it is freed then.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bowline_block::{DiskDone, DiskIo};
use bowline_rnbd::{Errno, IoOp};
use bowline_rtrs_driver::client::{Region, Session};
use bowline_verbs::{Buffer, catch_callback_panic};

/// Most bytes of free memory kept for later requests.
const FREE_BYTES_MAX: usize = 16 << 20;

/// Bounce buffers for the requests of one disk.
pub(super) struct BouncePool {
    session: Arc<Session>,
    /// Buffers of the program, by the region id that its requests name.
    registered: Mutex<Vec<(u32, Weak<Buffer>)>>,
    free_regions: Mutex<Vec<Region>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BouncePool {
    pub(super) fn new(session: &Arc<Session>) -> Arc<Self> {
        let (registered, free_regions) = (Mutex::default(), Mutex::default());
        Arc::new(Self { session: Arc::clone(session), registered, free_regions })
    }

    /// Registers memory that the program's requests may name.
    pub(super) fn register(&self, id: u32, buffer: &Arc<Buffer>) {
        let mut registered = lock(&self.registered);
        // Ids of freed regions are reused.
        registered.retain(|(known, buffer)| *known != id && buffer.strong_count() > 0);
        registered.push((id, Arc::downgrade(buffer)));
    }

    /// Redirects a request to a bounce buffer. Completes the request with an error if there is
    /// none.
    pub(super) fn bounce(self: &Arc<Self>, mut io: DiskIo) -> Option<DiskIo> {
        let Some((id, at)) = io.mem.filter(|_| io.op.has_data() && io.len > 0) else {
            return Some(io);
        };
        let (to, tag, len) = (Arc::clone(&io.done), io.tag, io.len as usize);
        match self.prepare(&io, id, at, len) {
            Ok((program_buffer, region)) => {
                io.mem = Some((region.id().0, 0));
                let program_buffer = (io.op == IoOp::Read).then_some((program_buffer, at));
                let region = Mutex::new(Some(region));
                let detour =
                    BouncedRequest { pool: Arc::clone(self), region, program_buffer, len, tag, to };
                (io.tag, io.done) = (0, Arc::new(detour));
                Some(io)
            }
            Err(errno) => {
                catch_callback_panic(|| to.done(&[(tag, errno.neg())]));
                None
            }
        }
    }

    /// Finds a bounce buffer for a request, and copies the data of a write into it.
    fn prepare(
        &self,
        io: &DiskIo,
        id: u32,
        at: usize,
        len: usize,
    ) -> Result<(Arc<Buffer>, Region), Errno> {
        let program_buffer =
            lock(&self.registered).iter().find(|(registered, _)| *registered == id).cloned();
        let program_buffer =
            program_buffer.and_then(|(_, buffer)| buffer.upgrade()).ok_or(Errno::EINVAL)?;
        if at.checked_add(len).is_none_or(|end| end > program_buffer.len()) {
            return Err(Errno::EINVAL);
        }
        let region = self.region(len)?;
        if io.op == IoOp::Write {
            program_buffer.copy_to(at, region.buffer(), 0, len);
        }
        Ok((program_buffer, region))
    }

    fn region(&self, len: usize) -> Result<Region, Errno> {
        let mut free_regions = lock(&self.free_regions);
        if let Some(at) = free_regions.iter().position(|region| region.buffer().len() >= len) {
            return Ok(free_regions.swap_remove(at));
        }
        drop(free_regions);
        let made = self.session.region(len.next_power_of_two());
        made.map_err(|error| error.errno())
    }

    fn recycle(&self, region: Region) {
        let mut free_regions = lock(&self.free_regions);
        let free_bytes: usize = free_regions.iter().map(|region| region.buffer().len()).sum();
        if free_bytes + region.buffer().len() <= FREE_BYTES_MAX {
            free_regions.push(region);
        }
    }
}

/// A request whose data goes through a bounce buffer.
struct BouncedRequest {
    pool: Arc<BouncePool>,
    region: Mutex<Option<Region>>,
    /// The program's buffer and the offset in it that a read is copied to.
    program_buffer: Option<(Arc<Buffer>, usize)>,
    len: usize,
    tag: u64,
    to: Arc<dyn DiskDone>,
}

impl DiskDone for BouncedRequest {
    fn done(&self, results: &[(u64, i32)]) {
        let Some((_, errno)) = results.first() else { return };
        // The buffer of a late request stays here: the server may still use it.
        let server_done = *errno != Errno::ETIMEDOUT.neg();
        if let Some(region) = lock(&self.region).take_if(|_| server_done) {
            if let Some((buffer, at)) = self.program_buffer.as_ref().filter(|_| *errno == 0) {
                region.buffer().copy_to(0, buffer, *at, self.len);
            }
            self.pool.recycle(region);
        }
        self.to.done(&[(self.tag, *errno)]);
    }

    fn is_wanted(&self, op: IoOp) -> bool {
        self.to.is_wanted(op)
    }
}
