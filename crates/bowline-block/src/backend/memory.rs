//! A store of plain memory, answered at once.

use std::io;
use std::sync::Arc;

use bowline_rnbd::{Discard, Errno, IoOp, Limits};
use bowline_verbs::Buffer;

use super::{Backend, BackendDone, BackendIo, answer};

/// Largest discard or write of zeroes in bytes: cleared in well under a millisecond, since the
/// thread that serves all requests does it.
const CLEAR_MAX: u32 = 4 << 20;
/// Zeroes that are copied over memory to clear it.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Memory that is all zero at first and gone at the end. Reads are answered from the store itself,
/// without a copy.
#[derive(Debug)]
pub(super) struct Memory {
    store: Arc<Buffer>,
    limits: Limits,
}

impl Memory {
    /// Allocates a store; its pages exist once they are written to.
    pub(super) fn new(bytes: u64, block: u32) -> io::Result<Self> {
        let bytes = bytes - bytes % u64::from(block);
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let limits = Limits {
            logical: block,
            discard: Some(Discard {
                max_bytes: CLEAR_MAX.into(),
                granularity: block,
                alignment: 0,
            }),
            max_write_zeroes: CLEAR_MAX,
            ..Limits::plain(bytes)
        };
        Ok(Self { store: Arc::new(Buffer::new(len)?), limits })
    }

    fn carry_out(&self, io: &BackendIo) -> Result<Option<u64>, Errno> {
        io.check(&self.limits)?;
        // The store was allocated, so what lies within the limits fits a usize.
        let (at, len) = (io.offset as usize, io.len as usize);
        match (io.op, &io.mem) {
            (IoOp::Read, _) => return Ok(Some(io.offset)),
            (IoOp::Write, Some(mem)) => mem.buffer.copy_to(mem.offset, &self.store, at, len),
            (IoOp::Flush, _) => {}
            (IoOp::Discard | IoOp::WriteZeroes, _) => {
                for done in (0..len).step_by(ZEROES.len()) {
                    let piece = ZEROES.len().min(len - done);
                    self.store.write(at + done, &ZEROES[..piece]);
                }
            }
            (IoOp::Write, None) => return Err(Errno::EINVAL),
            (IoOp::SecureErase, _) => return Err(Errno::EOPNOTSUPP),
        }
        Ok(None)
    }
}

impl Backend for Memory {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        answer(io, done, |io| self.carry_out(io));
    }

    fn region(&self) -> Option<Arc<Buffer>> {
        Some(self.store.clone())
    }
}
