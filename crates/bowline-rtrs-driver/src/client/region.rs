//! Memory of a program that its session may use.

use std::sync::Arc;

use bowline_rtrs::{MemRef, RegionId};
use bowline_verbs::Buffer;

use super::shared::Shared;

/// Memory registered for a session: WRITEs are sent from it, READs are received into it. After it
/// is dropped it stays registered until requests in flight that use it have ended and no part of it
/// can have to be sent again. The latter is known at the next heartbeat at the latest.
pub struct Region {
    shared: Arc<Shared>,
    id: RegionId,
    buffer: Arc<Buffer>,
}

impl core::fmt::Debug for Region {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { id, buffer, .. } = self;
        f.debug_struct("Region").field("id", id).field("len", &buffer.len()).finish_non_exhaustive()
    }
}

impl Region {
    pub(super) const fn new(shared: Arc<Shared>, id: RegionId, buffer: Arc<Buffer>) -> Self {
        Self { shared, id, buffer }
    }

    /// The memory.
    pub const fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Id of the region in the session.
    pub const fn id(&self) -> RegionId {
        self.id
    }

    /// A part of the memory. A request refuses a part that exceeds the region.
    pub const fn piece(&self, offset: usize, len: u32) -> MemRef {
        MemRef { region: self.id, offset: offset as u64, len }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.shared.executor.lock().core.drop_region(self.id);
        self.shared.executor.drain();
    }
}
