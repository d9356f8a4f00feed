//! Memory of a program that its session may use.

use std::sync::Arc;

use bowline_rtrs::{MemRef, RegionId};
use bowline_verbs::Buffer;

use super::shared::Shared;

/// Memory that is registered for a session, from which WRITEs are sent and to which READs are
/// answered. Dropped, it is registered until the requests in flight that use it have ended and
/// nothing of it may have to be sent again, which is known at the next heartbeat at the latest.
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

    /// Its name in the session.
    pub const fn id(&self) -> RegionId {
        self.id
    }

    /// A part of it. One that does not lie within it is refused by the request.
    pub const fn piece(&self, offset: usize, len: u32) -> MemRef {
        MemRef { region: self.id, offset: offset as u64, len }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.shared.hub.lock().core.drop_region(self.id);
        self.shared.hub.drain();
    }
}
