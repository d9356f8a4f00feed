//! Storage behind exports: memory, files, block devices, and nothing at all.
//!
//! Requests go in by batches and are answered by batches, in any order and from any thread:
//!
//! ```text
//!   engine thread        submit(..) submit(..) kick()         memory: answered inside submit
//!                            |         |         |            file:   queued, then one system call
//!                            v         v         v
//!   bowline-uring            completions of the ring ------>  BackendDone::done(results)
//! ```

mod file;
mod job;
mod memory;
mod null;
mod pool;
mod sys;
#[cfg(test)]
mod tests;
mod uring;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::{Buffer, Mem, catch_callback_panic};

/// One open export, which all sessions share.
pub trait Backend: Send + Sync {
    /// Returns the limits. `bytes` changes with [`resize`](Self::resize).
    fn limits(&self) -> Limits;

    /// Submits all of `io` and leaves it empty. Never blocks. Each request is answered once to
    /// `done`, perhaps inside this call. Reads and writes may be as long as a session allows, which
    /// may exceed `max_io` of the limits: the store then carries them out in pieces. [NB-30]
    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>);

    /// Begins what was submitted since the last call: to be called after each batch.
    fn kick(&self) {}

    /// The store itself, where it is memory: results of reads may point into it.
    fn region(&self) -> Option<Arc<Buffer>> {
        None
    }

    /// Reads the size of the store anew; returns its size in bytes from now on.
    ///
    /// # Errors
    /// Errors of reading the size.
    fn resize(&self) -> io::Result<u64>;
}

/// A request to a store.
#[derive(Clone, Debug)]
pub struct BackendIo {
    /// Returned with the result.
    pub token: u64,
    /// The operation.
    pub op: IoOp,
    /// Offset in the store in bytes; ignored by a flush.
    pub offset: u64,
    /// Length in bytes, a multiple of the logical block; 0 for a flush.
    pub len: u32,
    /// The write must be durable before it is answered.
    pub fua: bool,
    /// Zeroed blocks stay allocated.
    pub nounmap: bool,
    /// Linux I/O priority (class in bits 13..15), 0 for none.
    pub prio: u16,
    /// Memory of the data: at least `len` bytes. Only for reads and writes.
    pub mem: Option<Mem>,
}

/// The result of one request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BackendResult {
    /// Token of the request.
    pub token: u64,
    /// 0, or a negative errno.
    pub errno: i32,
    /// The data of a read was not copied: it is in [`Backend::region`], from this offset on.
    pub direct: Option<u64>,
}

/// Callback for results.
pub trait BackendDone: Send + Sync {
    /// Delivers results. Called from any thread, with no locks held. A panic of it is reported on
    /// standard error and contained.
    fn done(&self, results: &[BackendResult]);
}

/// Description of a store to open.
#[derive(Debug)]
pub enum BackendSpec {
    /// Memory, all zero at first and lost at the end. There is no secure erase: the system may have
    /// a copy of what was there in its swap.
    Memory {
        /// Bytes, rounded down to whole blocks.
        bytes: u64,
        /// Bytes of a logical block: a power of two from 512 to 4096.
        block: u32,
    },
    /// No storage: writes are discarded, reads return zeroes. For measuring everything else.
    Null,
    /// A regular file or a block device, of which the limits are those of its queue. There is no
    /// secure erase: no file system has it, and of a device it cannot be known.
    File {
        /// The file, open for reading, and for writing unless `read_only`. Its flags are changed.
        fd: OwnedFd,
        /// Nothing may be written.
        read_only: bool,
        /// Bytes of a logical block: a power of two from 512 to 4096. A block device that has
        /// larger ones keeps its own.
        block: u32,
        /// Bypass the page cache (`O_DIRECT`) where the file system supports that for this block
        /// size.
        direct: bool,
    },
}

/// Opens a store.
///
/// # Errors
/// EINVAL for a block that is no power of two from 512 to 4096; ENOMEM; for files also ENOTBLK for
/// what is neither a regular file nor a block device, EACCES for one that was not opened as asked,
/// and errors of the system calls.
pub fn open(spec: BackendSpec) -> io::Result<Arc<dyn Backend>> {
    match spec {
        BackendSpec::Memory { bytes, block } => {
            check_block(block)?;
            Ok(Arc::new(memory::Memory::new(bytes, block)?))
        }
        BackendSpec::Null => Ok(Arc::new(null::Null::new()?)),
        BackendSpec::File { fd, read_only, block, direct } => {
            check_block(block)?;
            Ok(Arc::new(file::File::new(fd, read_only, block, direct)?))
        }
    }
}

fn check_block(block: u32) -> io::Result<()> {
    let right = block.is_power_of_two() && (512..=4096).contains(&block);
    if right { Ok(()) } else { Err(error(Errno::EINVAL)) }
}

fn error(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

/// Checks a request against the limits of the store, as the block layer does. [NB-24] [NB-25]
fn check(limits: &Limits, io: &BackendIo) -> Result<(), Errno> {
    if io.op == IoOp::Flush {
        return Ok(());
    }
    if limits.read_only && io.op.changes() {
        return Err(Errno::EPERM);
    }
    let (len, block) = (u64::from(io.len), u64::from(limits.logical));
    let most = match io.op {
        // Not limited here: the memory exists, and the session limits the length.
        IoOp::Read | IoOp::Write | IoOp::Flush => u64::MAX,
        IoOp::Discard => limits.discard.map_or(0, |discard| discard.max_bytes),
        IoOp::WriteZeroes => u64::from(limits.max_write_zeroes),
        // No store here supports it; stores of programs check for themselves.
        IoOp::SecureErase => 0,
    };
    if most == 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if len > most || !len.is_multiple_of(block) || !io.offset.is_multiple_of(block) {
        return Err(Errno::EINVAL);
    }
    if !limits.holds(io.offset, len) {
        return Err(Errno::EIO);
    }
    let fits = io.mem.as_ref().is_some_and(|mem| {
        let end = mem.offset.checked_add(mem.len);
        io.len as usize <= mem.len && end.is_some_and(|end| end <= mem.buffer.len())
    });
    if io.op.has_data() && !fits {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Answers every request at once. `carry_out` returns the offset of the data of a read.
fn answer(
    io: &mut Vec<BackendIo>,
    done: &Arc<dyn BackendDone>,
    mut carry_out: impl FnMut(&BackendIo) -> Result<Option<u64>, Errno>,
) {
    // On the stack, so that no request needs an allocation.
    let mut results = [BackendResult { token: 0, errno: 0, direct: None }; 64];
    for batch in io.chunks(results.len()) {
        for (io, result) in batch.iter().zip(&mut results) {
            let (errno, direct) = match carry_out(io) {
                Ok(direct) => (0, direct),
                Err(errno) => (errno.neg(), None),
            };
            *result = BackendResult { token: io.token, errno, direct };
        }
        done.done(&results[..batch.len()]);
    }
    io.clear();
}

/// Delivers results: one call for each run with the same callback. `results` is scratch memory.
fn deliver(
    finished: &mut Vec<(Arc<dyn BackendDone>, BackendResult)>,
    results: &mut Vec<BackendResult>,
) {
    while let Some((done, first)) = finished.pop() {
        results.clear();
        results.push(first);
        while let Some((_, result)) = finished.pop_if(|(other, _)| Arc::ptr_eq(other, &done)) {
            results.push(result);
        }
        let results = &*results;
        catch_callback_panic(move || done.done(results));
    }
}
