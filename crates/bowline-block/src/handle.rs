//! Requests to a disk, one by one: calls that a thread waits for, and futures for any runtime. Both
//! reuse registered memory.

use core::future::{Future, poll_fn};
use core::task::{Context, Poll, Waker};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bowline_rnbd::{Errno, IoOp};

use crate::device::{BlockDevice, DeviceMem, DiskDone, DiskIo, Durable};

/// Least length of registered memory in bytes.
const MEMORY_MIN: usize = 4096;
/// Most bytes of registered memory kept for later calls.
const FREE_BYTES_MAX: usize = 16 << 20;

/// A disk with simple calls: a thread waits for [`read_at`](Self::read_at), a task of any runtime
/// awaits [`read_at_async`](Self::read_at_async), and so on.
///
/// Data is copied through registered memory, which the handle keeps for its next calls, at most 16
/// MiB of it. A program that does not want to copy, or has hundreds of requests in flight, submits
/// [`DiskIo`]s of its own.
///
/// Errors of a disk are the numbers that block devices have: `EIO` when its storage failed, the
/// request lies beyond the end, or the session was lost for longer than `Outage` allows;
/// `ETIMEDOUT` after the time limit of requests; `EINVAL` for what is not whole blocks; `EPERM` for
/// a change of a disk that is only read; `EOPNOTSUPP` for an operation that its limits do not have;
/// `ENOSPC`, `ENOMEM`, `EILSEQ` and others as the server says.
///
/// Any number of threads and tasks may call at once. Requests in flight at the same time may be
/// carried out in any order: what depends on an earlier request waits for it.
///
/// ```
/// use bowline_block::backend::{BackendSpec, open};
/// use bowline_block::{DiskHandle, Durable, LocalDevice};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In place of a mapped disk, a store of this process.
/// let store = open(BackendSpec::Memory { bytes: 1 << 20, block: 512 })?;
/// let disk = DiskHandle::new(LocalDevice::new("disk0", store));
/// disk.write_at(4096, &[7; 512], Durable::Later)?;
/// disk.flush()?;
/// let mut block = [0; 512];
/// disk.read_at(4096, &mut block)?;
/// assert_eq!(block, [7; 512]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DiskHandle {
    disk: Arc<dyn BlockDevice>,
    pool: Arc<Pool>,
}

impl fmt::Debug for DiskHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskHandle").field("disk", &self.disk.name()).finish_non_exhaustive()
    }
}

impl DiskHandle {
    /// Makes a handle on a disk. Its clones share registered memory.
    pub fn new(disk: Arc<dyn BlockDevice>) -> Self {
        Self { disk, pool: Arc::default() }
    }

    /// Returns the disk.
    pub fn disk(&self) -> &Arc<dyn BlockDevice> {
        &self.disk
    }

    /// Reads `out.len()` bytes from `offset` on, both multiples of the logical block.
    ///
    /// # Errors
    /// Errors of the disk; `EINVAL` for 4 GiB or more; `ENOMEM`.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), Errno> {
        let call = self.begin_read(offset, out.len())?;
        call.wait()?;
        call.copy_to(out);
        Ok(())
    }

    /// Writes bytes from `offset` on, multiples of the logical block.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    pub fn write_at(&self, offset: u64, bytes: &[u8], durable: Durable) -> Result<(), Errno> {
        self.begin_write(offset, bytes, durable)?.wait()
    }

    /// Makes all writes durable that were answered.
    ///
    /// # Errors
    /// Errors of the disk.
    pub fn flush(&self) -> Result<(), Errno> {
        self.begin_without_data(IoOp::Flush, 0, 0).wait()
    }

    /// Discards bytes: what is read there afterwards is not said.
    ///
    /// # Errors
    /// Errors of the disk, `EOPNOTSUPP` among them.
    pub fn discard(&self, offset: u64, len: u32) -> Result<(), Errno> {
        self.begin_without_data(IoOp::Discard, offset, len).wait()
    }

    /// Makes bytes zero.
    ///
    /// # Errors
    /// Errors of the disk, `EOPNOTSUPP` among them.
    pub fn write_zeroes(&self, offset: u64, len: u32) -> Result<(), Errno> {
        self.begin_without_data(IoOp::WriteZeroes, offset, len).wait()
    }

    /// Reads as [`read_at`](Self::read_at), in a task of any runtime.
    ///
    /// Cancel safe: dropped before it is ready, it has not changed `out`.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    pub async fn read_at_async(&self, offset: u64, out: &mut [u8]) -> Result<(), Errno> {
        let call = self.begin_read(offset, out.len())?;
        call.ended().await?;
        call.copy_to(out);
        Ok(())
    }

    /// Writes as [`write_at`](Self::write_at), in a task of any runtime. The bytes are copied, and
    /// the request is sent, when this is polled first.
    ///
    /// Cancel safe as a request can be: dropped after it was polled, the write continues by itself,
    /// once and with these bytes. Nobody learns whether it succeeds; a later
    /// [`flush_async`](Self::flush_async) need not wait for it.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    pub async fn write_at_async(
        &self,
        offset: u64,
        bytes: &[u8],
        durable: Durable,
    ) -> Result<(), Errno> {
        let call = self.begin_write(offset, bytes, durable)?;
        call.ended().await
    }

    /// Makes all writes durable that were answered, as [`flush`](Self::flush), in a task of any
    /// runtime.
    ///
    /// Cancel safe: dropped before it is ready, the flush continues by itself.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub async fn flush_async(&self) -> Result<(), Errno> {
        self.begin_without_data(IoOp::Flush, 0, 0).ended().await
    }

    /// Discards as [`discard`](Self::discard), in a task of any runtime. Cancel safe as
    /// [`write_at_async`](Self::write_at_async).
    ///
    /// # Errors
    /// As [`discard`](Self::discard).
    pub async fn discard_async(&self, offset: u64, len: u32) -> Result<(), Errno> {
        self.begin_without_data(IoOp::Discard, offset, len).ended().await
    }

    /// Makes bytes zero as [`write_zeroes`](Self::write_zeroes), in a task of any runtime. Cancel
    /// safe as [`write_at_async`](Self::write_at_async).
    ///
    /// # Errors
    /// As [`write_zeroes`](Self::write_zeroes).
    pub async fn write_zeroes_async(&self, offset: u64, len: u32) -> Result<(), Errno> {
        self.begin_without_data(IoOp::WriteZeroes, offset, len).ended().await
    }

    fn begin_read(&self, offset: u64, len: usize) -> Result<Arc<Call>, Errno> {
        let mem = self.memory(len)?;
        Ok(self.begin(IoOp::Read, offset, length(len)?, Some(mem), Durable::Later))
    }

    fn begin_write(&self, offset: u64, bytes: &[u8], durable: Durable) -> Result<Arc<Call>, Errno> {
        let mem = self.memory(bytes.len())?;
        mem.write(0, bytes);
        Ok(self.begin(IoOp::Write, offset, length(bytes.len())?, Some(mem), durable))
    }

    fn begin(
        &self,
        op: IoOp,
        offset: u64,
        len: u32,
        mem: Option<DeviceMem>,
        durable: Durable,
    ) -> Arc<Call> {
        let part = mem.as_ref().map(|mem| (mem.region, 0));
        let pool = Arc::clone(&self.pool);
        let (outcome, there) = (Mutex::default(), Condvar::new());
        let call = Arc::new(Call { outcome, there, mem, pool });
        let io = DiskIo::new(op, offset, len, call.clone()).durable(durable);
        self.disk.submit(&mut vec![DiskIo { mem: part, ..io }]);
        call
    }

    fn begin_without_data(&self, op: IoOp, offset: u64, len: u32) -> Arc<Call> {
        self.begin(op, offset, len, None, Durable::Later)
    }

    /// Takes registered memory of at least `len` bytes.
    fn memory(&self, len: usize) -> Result<DeviceMem, Errno> {
        let known = {
            let mut free = self.pool.lock();
            let fits = free.iter().enumerate().filter(|(_, mem)| mem.len() >= len);
            let best = fits.min_by_key(|(_, mem)| mem.len()).map(|(at, _)| at);
            best.map(|at| free.swap_remove(at))
        };
        let len = len.max(MEMORY_MIN);
        known.map_or_else(|| self.disk.memory(len.checked_next_power_of_two().unwrap_or(len)), Ok)
    }
}

/// Registered memory that no request uses.
#[derive(Default)]
struct Pool(Mutex<Vec<DeviceMem>>);

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Vec<DeviceMem>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps memory for a later call, or frees it.
    fn put(&self, mem: DeviceMem) {
        let mut free = self.lock();
        let kept: usize = free.iter().map(DeviceMem::len).sum();
        if kept + mem.len() <= FREE_BYTES_MAX {
            free.push(mem);
        } else {
            // Without the lock: it ends a registration.
            drop(free);
            drop(mem);
        }
    }
}

/// A request in flight, and who waits for it. The disk has it until it has answered, so its memory
/// outlives the request also when nobody waits any more.
struct Call {
    outcome: Mutex<Outcome>,
    there: Condvar,
    mem: Option<DeviceMem>,
    pool: Arc<Pool>,
}

#[derive(Default)]
struct Outcome {
    errno: Option<i32>,
    waker: Option<Waker>,
}

impl Call {
    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) -> Result<(), Errno> {
        let mut outcome = self.lock();
        loop {
            if let Some(errno) = outcome.errno {
                return ended(errno);
            }
            outcome = self.there.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn ended(&self) -> impl Future<Output = Result<(), Errno>> {
        poll_fn(|context| self.poll(context))
    }

    fn poll(&self, context: &Context<'_>) -> Poll<Result<(), Errno>> {
        let mut outcome = self.lock();
        if let Some(errno) = outcome.errno {
            return Poll::Ready(ended(errno));
        }
        let former = outcome.waker.replace(context.waker().clone());
        drop(outcome);
        // Without the lock: a waker is code of the program.
        drop(former);
        Poll::Pending
    }

    fn copy_to(&self, out: &mut [u8]) {
        if let Some(mem) = &self.mem {
            mem.read(0, out);
        }
    }
}

impl DiskDone for Call {
    fn done(&self, results: &[(u64, i32)]) {
        let mut outcome = self.lock();
        outcome.errno = results.first().map(|(_, errno)| *errno);
        let waker = outcome.waker.take();
        self.there.notify_all();
        drop(outcome);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(mem) = self.mem.take() {
            self.pool.put(mem);
        }
    }
}

const fn ended(errno: i32) -> Result<(), Errno> {
    if errno == 0 { Ok(()) } else { Err(Errno(-errno)) }
}

fn length(bytes: usize) -> Result<u32, Errno> {
    u32::try_from(bytes).map_err(|_| Errno::EINVAL)
}
