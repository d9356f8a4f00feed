//! Requests in the hands of storage.

use std::sync::Arc;

use bowline_block::backend::{Backend, BackendIo};
use bowline_rnbd::IoOp;
use bowline_rnbd::server::{ExportId, OpenId};
use bowline_rtrs::RegionId;
use bowline_rtrs_driver::server::OpId;

/// One of them.
pub(super) struct Op {
    /// The request to answer.
    pub(super) op: OpId,
    pub(super) open: OpenId,
    pub(super) export: ExportId,
    pub(super) what: IoOp,
    pub(super) len: u32,
    /// Bytes the answer of a read carries.
    pub(super) room: u32,
    /// The store as registered memory.
    pub(super) region: Option<RegionId>,
    /// What follows when this went well: a write after a flush, or a flush after a write.
    pub(super) then: Option<Box<Step>>,
}

/// A further step of a request.
pub(super) struct Step {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) io: BackendIo,
    pub(super) then: Option<Box<Step>>,
}

/// All of them, by token.
#[derive(Default)]
pub(super) struct Ops {
    slots: Vec<Option<Op>>,
    free: Vec<usize>,
}

impl Ops {
    pub(super) fn insert(&mut self, op: Op) -> u64 {
        let at = self.free.pop().unwrap_or(self.slots.len());
        if at == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[at] = Some(op);
        at as u64
    }

    pub(super) fn get_mut(&mut self, token: u64) -> Option<&mut Op> {
        self.slots.get_mut(usize::try_from(token).ok()?)?.as_mut()
    }

    pub(super) fn remove(&mut self, token: u64) -> Option<Op> {
        let at = usize::try_from(token).ok()?;
        let op = self.slots.get_mut(at)?.take()?;
        self.free.push(at);
        Some(op)
    }

    pub(super) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
