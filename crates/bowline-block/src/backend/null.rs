//! A store without storage, for measuring everything else.

use std::io;
use std::sync::Arc;

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::Buffer;

use super::{Backend, BackendDone, BackendIo, answer};
use crate::device::{Allocation, Extent};

/// Size in bytes that it reports.
const BYTES: u64 = 1 << 40;
/// Bytes of zeroes that are kept for reads; longer ones get copies of them.
const ZEROES: usize = 1 << 20;

/// Discards writes. Every read returns the same zeroes.
#[derive(Debug)]
pub(super) struct Null {
    zeroes: Arc<Buffer>,
    limits: Limits,
}

impl Null {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { zeroes: Arc::new(Buffer::new(ZEROES)?), limits: Limits::plain(BYTES) })
    }

    fn execute(&self, io: &BackendIo) -> Result<Option<u64>, Errno> {
        io.check(&self.limits)?;
        let len = io.len as usize;
        match &io.mem {
            Some(mem) if io.op == IoOp::Read && len > ZEROES => {
                for at in (0..len).step_by(ZEROES) {
                    self.zeroes.copy_to(0, &mem.buffer, mem.offset + at, ZEROES.min(len - at));
                }
                Ok(None)
            }
            _ => Ok((io.op == IoOp::Read).then_some(0)),
        }
    }
}

impl Backend for Null {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        answer(io, done, |io| self.execute(io));
    }

    fn region(&self) -> Option<Arc<Buffer>> {
        Some(self.zeroes.clone())
    }

    fn extent(&self, _: u64, len: u64) -> Extent {
        Extent { len, allocation: Allocation::Hole }
    }
}
