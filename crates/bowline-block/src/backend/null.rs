//! A store that is not there, for measuring everything else.

use std::io;
use std::sync::Arc;

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::Buffer;

use super::{Backend, BackendDone, BackendIo, answer, check};

/// Bytes it claims to have.
const BYTES: u64 = 1 << 40;

/// Forgets what is written. Every read gives the same zeroes.
#[derive(Debug)]
pub(super) struct Null {
    zeroes: Arc<Buffer>,
    limits: Limits,
}

impl Null {
    pub(super) fn new() -> io::Result<Self> {
        let limits = Limits::plain(BYTES);
        Ok(Self { zeroes: Arc::new(Buffer::new(limits.max_io as usize)?), limits })
    }

    fn carry_out(&self, io: &BackendIo) -> Result<Option<u64>, Errno> {
        check(&self.limits, io)?;
        Ok((io.op == IoOp::Read).then_some(0))
    }
}

impl Backend for Null {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        answer(io, done, |io| self.carry_out(io));
    }

    fn region(&self) -> Option<Arc<Buffer>> {
        Some(self.zeroes.clone())
    }

    fn resize(&self) -> io::Result<u64> {
        Ok(BYTES)
    }
}
