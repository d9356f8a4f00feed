//! A store of plain memory, answered at once.

use std::io;
use std::sync::Arc;

use bowline_rnbd::{Discard, Errno, IoOp, Limits};
use bowline_verbs::Buffer;

use super::pages::Pages;
use super::{Backend, BackendDone, BackendIo, answer};
use crate::device::Extent;

/// Largest discard or write of zeroes in bytes: looked through in about a millisecond, since the
/// thread that serves all requests does it.
const CLEAR_MAX: u32 = 4 << 20;

/// Memory that is all zero at first and gone at the end. Reads are answered from the store itself,
/// without a copy.
#[derive(Debug)]
pub(super) struct Memory {
    pages: Pages,
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
        Ok(Self { pages: Pages::new(len)?, limits })
    }

    fn execute(&self, io: &BackendIo) -> Result<Option<u64>, Errno> {
        io.check(&self.limits)?;
        // The store was allocated, so what lies within the limits fits a usize.
        let (at, len) = (io.offset as usize, io.len as usize);
        match (io.op, &io.mem) {
            (IoOp::Read, _) => return Ok(Some(io.offset)),
            (IoOp::Write, Some(mem)) => {
                self.pages.note_written(at, len);
                mem.buffer.copy_to(mem.offset, self.pages.memory(), at, len);
            }
            (IoOp::Flush, _) => {}
            (IoOp::Discard | IoOp::WriteZeroes, _) => self.pages.clear(at, len),
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
        self.pages.note_batch();
        answer(io, done, |io| self.execute(io));
    }

    fn region(&self) -> Option<Arc<Buffer>> {
        Some(Arc::clone(self.pages.memory()))
    }

    fn extent(&self, offset: u64, len: u64) -> Extent {
        self.pages.extent(offset, len)
    }
}
