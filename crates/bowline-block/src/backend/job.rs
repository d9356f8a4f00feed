//! One request of a file as a sequence of system calls: the next call, and the meaning of a result.
//!
//! ```text
//!   Read, Write --short--> the rest of it --all there--> done
//!   Discard      punch a hole; of a block device: discard ------> done, or Sync
//!   WriteZeroes  punch a hole (unless NOUNMAP) --not supported-->
//!                zero the range --not supported--> write zeroes -> done, or Sync
//!   Flush        Sync ------------------------------------------> done
//! ```

use std::sync::Arc;

use bowline_rnbd::{Errno, IoOp};
use bowline_verbs::Buffer;

use super::{BackendDone, BackendIo, BackendResult};

/// How often an interrupted call is repeated before the request fails.
const TRIES: u8 = 100;

/// A request in progress.
pub(super) struct Job {
    pub(super) done: Arc<dyn BackendDone>,
    io: BackendIo,
    phase: Phase,
    /// Number of bytes read or written so far.
    at: u32,
    tries: u8,
    /// Aligned memory in place of the request's, which direct IO cannot use.
    bounce: Option<Arc<Buffer>>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    Data,
    PunchHole,
    Discard,
    ZeroRange,
    WriteZeroes,
    Sync,
}

/// One system call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Step {
    /// Reads to an address in memory that the job keeps.
    Read { to: u64, len: u32, offset: u64 },
    /// Writes from such an address; with `dsync` the data is durable after.
    Write { from: u64, len: u32, offset: u64, dsync: bool },
    /// Makes a hole in the file.
    PunchHole { len: u32, offset: u64 },
    /// Tells a block device that bytes are not needed. It blocks, and rings do not have it.
    Discard { len: u32, offset: u64 },
    /// Makes bytes zero and keeps their blocks.
    ZeroRange { len: u32, offset: u64 },
    /// Makes durable all that was written.
    Sync,
}

impl Job {
    /// Makes a job of a checked request, of a file or a block `device`. If the address must be a
    /// multiple of `align` and is not, the data goes through a bounce buffer.
    ///
    /// # Errors
    /// ENOMEM without memory for the bounce buffer; EOPNOTSUPP for operations that no file
    /// supports.
    pub(super) fn new(
        io: BackendIo,
        done: &Arc<dyn BackendDone>,
        align: u64,
        device: bool,
    ) -> Result<Self, Errno> {
        let phase = match io.op {
            IoOp::Read | IoOp::Write => Phase::Data,
            IoOp::Flush => Phase::Sync,
            IoOp::WriteZeroes if io.nounmap => Phase::ZeroRange,
            // Punching a hole writes zeroes, which not every device with discards supports.
            IoOp::Discard if device => Phase::Discard,
            IoOp::WriteZeroes | IoOp::Discard => Phase::PunchHole,
            // The contents of a hole may still be on the disk.
            IoOp::SecureErase => return Err(Errno::EOPNOTSUPP),
        };
        let mut bounce = None;
        if let Some(mem) = io.mem.as_ref().filter(|_| phase == Phase::Data)
            && !(mem.buffer.addr() + mem.offset as u64).is_multiple_of(align)
        {
            let other = Buffer::new(io.len as usize).map_err(|_| Errno::ENOMEM)?;
            if io.op == IoOp::Write {
                mem.buffer.copy_to(mem.offset, &other, 0, io.len as usize);
            }
            bounce = Some(Arc::new(other));
        }
        Ok(Self { done: done.clone(), io, phase, at: 0, tries: 0, bounce })
    }

    /// Tells whether only a thread that may block can carry it out.
    pub(super) fn blocks(&self) -> bool {
        self.phase == Phase::Discard
    }

    /// Linux I/O priority of the calls. Real-time needs a privilege and is left out, as are bits
    /// that are no level: a client must not make its requests fail this way.
    pub(super) fn priority(&self) -> u16 {
        let class = self.io.prio >> 13;
        if matches!(class, 2 | 3) { class << 13 | self.io.prio & 7 } else { 0 }
    }

    /// The next call. `zeroes` is memory to write zeroes from.
    pub(super) fn step(&self, zeroes: &Buffer) -> Step {
        let BackendIo { offset, len, fua, .. } = self.io;
        match self.phase {
            Phase::Data => {
                let start = match (&self.bounce, &self.io.mem) {
                    (Some(bounce), _) => bounce.addr(),
                    (None, Some(mem)) => mem.buffer.addr() + mem.offset as u64,
                    // Not reached: data requests without memory are refused before.
                    (None, None) => return Step::Sync,
                };
                let (at, len) = (start + u64::from(self.at), len - self.at);
                let offset = offset + u64::from(self.at);
                if self.io.op == IoOp::Read {
                    Step::Read { to: at, len, offset }
                } else {
                    Step::Write { from: at, len, offset, dsync: fua }
                }
            }
            Phase::PunchHole => Step::PunchHole { len, offset },
            Phase::Discard => Step::Discard { len, offset },
            Phase::ZeroRange => Step::ZeroRange { len, offset },
            Phase::WriteZeroes => {
                let piece = (len - self.at).min(u32::try_from(zeroes.len()).unwrap_or(u32::MAX));
                let offset = offset + u64::from(self.at);
                Step::Write { from: zeroes.addr(), len: piece, offset, dsync: false }
            }
            Phase::Sync => Step::Sync,
        }
    }

    /// Handles the result of a call: bytes, or a negative errno. Returns the result of the request
    /// once it is finished.
    pub(super) fn advance(&mut self, returned: i32) -> Option<BackendResult> {
        match (self.phase, returned) {
            // EINTR and EAGAIN; ECANCELED when the submitting thread has ended.
            (_, e) if matches!(-e, libc::EINTR | libc::EAGAIN | libc::ECANCELED) => {
                self.tries += 1;
                if self.tries > TRIES { self.result(Errno::EIO.neg()) } else { None }
            }
            (Phase::PunchHole, e) if self.io.op == IoOp::WriteZeroes && not_there(e) => {
                self.turn(Phase::ZeroRange)
            }
            (Phase::ZeroRange, e) if not_there(e) => self.turn(Phase::WriteZeroes),
            (_, e) if e < 0 => self.result(e),
            (Phase::Data | Phase::WriteZeroes, 0) => {
                // The file was truncated: there is no data.
                self.result(Errno::EIO.neg())
            }
            (Phase::Data | Phase::WriteZeroes, n) => {
                self.tries = 0;
                self.at = self.at.saturating_add(n.unsigned_abs());
                if self.at < self.io.len {
                    // A read that ends within a sector has reached the end of a truncated file.
                    if n % 512 == 0 { None } else { self.result(Errno::EIO.neg()) }
                } else if self.phase == Phase::WriteZeroes && self.io.fua {
                    self.turn(Phase::Sync)
                } else {
                    self.read_out();
                    self.result(0)
                }
            }
            (Phase::PunchHole | Phase::Discard | Phase::ZeroRange, _) if self.io.fua => {
                self.turn(Phase::Sync)
            }
            (Phase::PunchHole | Phase::Discard | Phase::ZeroRange | Phase::Sync, _) => {
                self.result(0)
            }
        }
    }

    fn turn(&mut self, phase: Phase) -> Option<BackendResult> {
        (self.phase, self.at, self.tries) = (phase, 0, 0);
        None
    }

    fn result(&self, errno: i32) -> Option<BackendResult> {
        Some(BackendResult { token: self.io.token, errno, direct: None })
    }

    fn read_out(&self) {
        if let (IoOp::Read, Some(bounce), Some(mem)) = (self.io.op, &self.bounce, &self.io.mem) {
            bounce.copy_to(0, &mem.buffer, mem.offset, self.io.len as usize);
        }
    }
}

/// Tells whether the file system does not support the operation.
fn not_there(returned: i32) -> bool {
    matches!(-returned, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV)
}
