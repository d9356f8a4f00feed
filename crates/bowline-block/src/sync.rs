//! Single blocking requests to a disk. Each registers memory of its own: a
//! [`DiskHandle`](crate::DiskHandle) reuses it.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bowline_rnbd::{Errno, IoOp};

pub use crate::device::Durable;
use crate::device::{BlockDevice, DiskDone, DiskIo};

/// Reads from the disk, a multiple of its logical block.
///
/// # Errors
/// Errors of the disk.
pub fn read_at(disk: &dyn BlockDevice, offset: u64, out: &mut [u8]) -> Result<(), Errno> {
    let mem = disk.memory(out.len())?;
    let len = length(out.len())?;
    call(disk, IoOp::Read, offset, len, Some((mem.region, 0)), Durable::Later)?;
    mem.read(0, out);
    Ok(())
}

/// Writes to the disk, a multiple of its logical block.
///
/// # Errors
/// Errors of the disk.
pub fn write_at(
    disk: &dyn BlockDevice,
    offset: u64,
    bytes: &[u8],
    durable: Durable,
) -> Result<(), Errno> {
    let mem = disk.memory(bytes.len())?;
    mem.write(0, bytes);
    call(disk, IoOp::Write, offset, length(bytes.len())?, Some((mem.region, 0)), durable)
}

/// Makes all writes durable that were answered.
///
/// # Errors
/// Errors of the disk.
pub fn flush(disk: &dyn BlockDevice) -> Result<(), Errno> {
    call(disk, IoOp::Flush, 0, 0, None, Durable::Later)
}

/// Discards bytes.
///
/// # Errors
/// Errors of the disk, EOPNOTSUPP among them.
pub fn discard(disk: &dyn BlockDevice, offset: u64, len: u32) -> Result<(), Errno> {
    call(disk, IoOp::Discard, offset, len, None, Durable::Later)
}

/// Makes bytes zero.
///
/// # Errors
/// Errors of the disk, EOPNOTSUPP among them.
pub fn write_zeroes(disk: &dyn BlockDevice, offset: u64, len: u32) -> Result<(), Errno> {
    call(disk, IoOp::WriteZeroes, offset, len, None, Durable::Later)
}

/// One request, and its result.
///
/// # Errors
/// Errors of the disk.
pub fn call(
    disk: &dyn BlockDevice,
    op: IoOp,
    offset: u64,
    len: u32,
    mem: Option<(u32, usize)>,
    durable: Durable,
) -> Result<(), Errno> {
    let waiter = Arc::new(Waiter::default());
    let done: Arc<dyn DiskDone> = waiter.clone();
    disk.submit(&mut vec![DiskIo { mem, ..DiskIo::new(op, offset, len, done).durable(durable) }]);
    let mut result = waiter.result.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        match *result {
            Some(0) => return Ok(()),
            Some(errno) => return Err(Errno(-errno)),
            None => result = waiter.there.wait(result).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

#[derive(Default)]
struct Waiter {
    result: Mutex<Option<i32>>,
    there: Condvar,
}

impl DiskDone for Waiter {
    fn done(&self, results: &[(u64, i32)]) {
        if let Some((_, errno)) = results.first() {
            *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(*errno);
            self.there.notify_all();
        }
    }
}

fn length(bytes: usize) -> Result<u32, Errno> {
    u32::try_from(bytes).map_err(|_| Errno::EINVAL)
}
