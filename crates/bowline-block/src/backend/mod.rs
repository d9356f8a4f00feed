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
mod filter;
mod job;
mod memory;
mod nbd;
mod null;
mod pages;
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

pub use filter::{Filters, filtered};
pub use nbd::NbdUri;

use crate::device::{Allocation, Extent};

/// One open export, which all sessions share: [`open`] makes those of this crate, and programs
/// write their own.
///
/// # What holds when requests come
///
/// Behind a server, each request has been checked against the [limits](Self::limits), the access
/// mode of its client and the memory that carries its data: the operation is supported, offset and
/// length are whole blocks of the store, a discard is no longer than its limit, reads and writes
/// have memory of `len` bytes. A store whose size changes checks again with [`BackendIo::check`],
/// since it may have become smaller in the meantime; a [`LocalDevice`](crate::LocalDevice) leaves
/// all checks to the store.
///
/// [`submit`](Self::submit) is called with no lock held, perhaps by several threads at once. Such a
/// thread serves other requests and the heartbeats of their clients, so it must not wait for a
/// disk, a network or another request. Requests in flight at the same time may be executed in
/// any order. A panic is contained: requests that are still in the list fail with `EIO`, while one
/// that was taken and is never answered blocks its client, and the end of its session, for ever.
///
/// # What is expected
///
/// - Each request is answered once, with its token, to the `done` it came with: inside `submit` or
///   later, from any thread, alone or with others. `done` may call `submit` of the same store
///   before it returns, so no lock that `submit` takes may be held during the call.
/// - A read is answered when its data is in `mem`, or is in [`region`](Self::region) and the answer
///   says where ([`BackendResult::direct`]).
/// - The memory of a write is only read. Behind a server it is the server's own copy, in which a
///   store may also work, as one that encrypts in place; behind a `LocalDevice` it is the
///   program's. A client that breaks the rules may change it at any time: what a store decides by,
///   it reads once.
/// - With a cache ([`Limits::write_cache`]), a flush makes all writes durable that were answered
///   before, and a write with `fua` is durable when it is answered. Servers ask for neither without
///   one, and for `fua` only where [`Limits::fua`] has it.
///
/// [`answer`] does the bookkeeping of a store that has its results at once. A whole store:
///
/// ```
/// use std::sync::Arc;
///
/// use bowline_block::backend::{Backend, BackendDone, BackendIo, answer};
/// use bowline_block::{Errno, IoOp, Limits};
///
/// /// Reads give the number of each block.
/// struct Numbers;
///
/// impl Backend for Numbers {
///     fn limits(&self) -> Limits {
///         Limits { read_only: true, ..Limits::plain(1 << 30) }
///     }
///
///     fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
///         answer(io, done, |io| {
///             io.check(&self.limits())?;
///             let (IoOp::Read, Some(mem)) = (io.op, &io.mem) else {
///                 return Err(Errno::EOPNOTSUPP);
///             };
///             for at in (0..io.len as usize).step_by(512) {
///                 let number = (io.offset + at as u64) / 512;
///                 mem.buffer.write(mem.offset + at, &number.to_le_bytes());
///             }
///             Ok(None)
///         });
///     }
/// }
/// ```
pub trait Backend: Send + Sync {
    /// Returns the limits: `bytes` changes with [`resize`](Self::resize), nothing else does. Called
    /// often and with locks of the server held: it must neither wait nor call the server.
    fn limits(&self) -> Limits;

    /// Submits all of `io` and leaves it empty. Never blocks. Each request is answered once to
    /// `done`, perhaps inside this call. Reads and writes may be as long as a session allows, which
    /// may exceed `max_io` of the limits: the store then carries them out in pieces. [NB-30]
    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>);

    /// Begins what was submitted since the last call: called after each batch. Stores that begin in
    /// `submit` do not need it.
    fn kick(&self) {}

    /// The store itself, where it is memory: results of reads may point into it. It stays the same.
    fn region(&self) -> Option<Arc<Buffer>> {
        None
    }

    /// Returns how the bytes from `offset` on are stored, and how many of the next `len` bytes are
    /// stored in the same way, as [`BlockDevice::extent`](crate::BlockDevice::extent). Called on
    /// threads that may wait, for local disks only. The default is for a store that cannot know.
    fn extent(&self, offset: u64, len: u64) -> Extent {
        let _ = offset;
        Extent { len, allocation: Allocation::Unknown }
    }

    /// Reads the size of the store again; returns its size in bytes from now on, which `limits` has
    /// from then on, too. Called at each open of the export and when its owner asks for it, on
    /// threads that may wait. The default is for a store of a fixed size.
    ///
    /// # Errors
    /// Errors of reading the size; the former one stays.
    fn resize(&self) -> io::Result<u64> {
        Ok(self.limits().bytes)
    }

    /// The server ends, and waits until all requests are answered: from now on the store holds
    /// none back, and answers each within some seconds. It does not wait. The default is for a
    /// store that does so always.
    fn begin_close(&self) {}

    /// Nobody uses the store any more: what it keeps elsewhere is made durable, and its connections
    /// are closed. Called once the last request is answered, on a thread that may wait for some
    /// seconds. Later requests fail, later calls do nothing.
    ///
    /// # Errors
    /// What was not flushed may be lost.
    fn close(&self) -> io::Result<()> {
        Ok(())
    }

    /// Takes what those should read who look after the server: at most some lines, of what has
    /// happened to the store since the last call.
    fn take_notices(&self) -> Vec<String> {
        Vec::new()
    }
}

/// A request to a store.
#[derive(Clone, Debug)]
#[non_exhaustive]
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
    /// Who asks: a store that has lost changes reports this to each of its users. 0 for the only
    /// one.
    pub user: u64,
}

impl BackendIo {
    /// Makes a request of any kind, without memory and flags.
    pub const fn new(token: u64, op: IoOp, offset: u64, len: u32) -> Self {
        Self { token, op, offset, len, fua: false, nounmap: false, prio: 0, mem: None, user: 0 }
    }

    /// Checks a request against the limits of its store, as the block layer does: see
    /// [`Backend`]. [NB-24] [NB-25]
    ///
    /// # Errors
    /// `EPERM` for a change of a store that is read-only, `EOPNOTSUPP` for an operation that the
    /// limits do not have, `EIO` beyond the end, `EINVAL` for what is not whole blocks, is longer
    /// than the limits allow or has too little memory.
    pub fn check(&self, limits: &Limits) -> Result<(), Errno> {
        if self.op == IoOp::Flush {
            return Ok(());
        }
        if limits.read_only && self.op.changes() {
            return Err(Errno::EPERM);
        }
        let (len, block) = (u64::from(self.len), u64::from(limits.logical));
        let discard = limits.discard.map_or(0, |discard| discard.max_bytes);
        let most = match self.op {
            // Not limited here: the memory exists, and the session limits the length.
            IoOp::Read | IoOp::Write | IoOp::Flush => u64::MAX,
            IoOp::Discard => discard,
            IoOp::SecureErase => u64::from(limits.secure_erase) * discard,
            IoOp::WriteZeroes => u64::from(limits.max_write_zeroes),
        };
        if most == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if len > most || !len.is_multiple_of(block) || !self.offset.is_multiple_of(block) {
            return Err(Errno::EINVAL);
        }
        if !limits.holds(self.offset, len) {
            return Err(Errno::EIO);
        }
        let fits = self.mem.as_ref().is_some_and(|mem| {
            let end = mem.offset.checked_add(mem.len);
            self.len as usize <= mem.len && end.is_some_and(|end| end <= mem.buffer.len())
        });
        if self.op.has_data() && !fits {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }
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

impl BackendResult {
    /// Makes the result of the request with this token.
    pub fn new(token: u64, result: Result<(), Errno>) -> Self {
        Self { token, errno: result.map_or_else(Errno::neg, |()| 0), direct: None }
    }
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
    /// An export of an NBD server, which is connected now, and again whenever the connection is
    /// lost. Its limits are those of the server.
    Nbd {
        /// Where it is.
        uri: NbdUri,
        /// Nothing may be written.
        read_only: bool,
        /// Bytes of a logical block: a power of two from 512 to 4096. An export that has larger
        /// ones keeps its own.
        block: u32,
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
        BackendSpec::Nbd { uri, read_only, block } => nbd::open(uri, read_only, block),
    }
}

fn check_block(block: u32) -> io::Result<()> {
    let right = block.is_power_of_two() && (512..=4096).contains(&block);
    if right { Ok(()) } else { Err(error(Errno::EINVAL)) }
}

fn error(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

/// Executes every request with `execute`, answers it, and leaves `io` empty: the body of
/// [`Backend::submit`] of a store that has its results at once. `execute` returns the offset of
/// the data of a read that is in [`Backend::region`], else `None`.
pub fn answer(
    io: &mut Vec<BackendIo>,
    done: &Arc<dyn BackendDone>,
    mut execute: impl FnMut(&BackendIo) -> Result<Option<u64>, Errno>,
) {
    // On the stack, so that no request needs an allocation.
    let mut results = [BackendResult { token: 0, errno: 0, direct: None }; 64];
    for batch in io.chunks(results.len()) {
        for (io, result) in batch.iter().zip(&mut results) {
            let (errno, direct) = match execute(io) {
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
