//! Requests that storage is working on.

use std::sync::Arc;

use bowline_block::backend::{Backend, BackendIo};
use bowline_rnbd::IoOp;
use bowline_rnbd::server::{ExportId, OpenId};
use bowline_rtrs::RegionId;
use bowline_rtrs_driver::server::OpId;

/// A request that storage is working on.
pub(super) struct Op {
    /// The request to answer.
    pub(super) op: OpId,
    pub(super) open: OpenId,
    pub(super) export: ExportId,
    pub(super) kind: IoOp,
    pub(super) len: u32,
    /// Data bytes in the answer to a read.
    pub(super) room: u32,
    /// The exported memory as a registered region, if it is memory.
    pub(super) region: Option<RegionId>,
    /// The step that follows a success: a write after a flush, or a flush after a write.
    pub(super) next: Option<Box<Step>>,
}

/// A further step of a request.
pub(super) struct Step {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) io: BackendIo,
    pub(super) next: Option<Box<Step>>,
}

/// All requests that storage is working on, by token.
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
