//! A permit as the program holds it.

use std::sync::{Arc, Weak};

use bowline_rtrs::client::{Permit as Core, PermitKind};

use super::shared::Shared;

/// The right to have one request in flight, in a chunk of the server [RT-37].
///
/// Dropping a permit gives it back to its session;
/// [`Session::put_permit`](super::Session::put_permit) does the same faster. Its request may still
/// be in flight; the next holder can use the permit when that request has ended. A permit of a
/// session that is closed or dropped is useless, and keeps no part of the session alive.
///
/// Like `put_permit`, dropping a permit may run callbacks of the program for requests, paths and
/// the session: do not drop it while holding a lock that these callbacks take.
#[must_use = "a permit that is dropped goes back to its session"]
pub struct Permit {
    core: Core,
    /// Weak, because the program may keep a permit for ever.
    session: Weak<Shared>,
}

impl core::fmt::Debug for Permit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (index, kind) = (self.index(), self.kind());
        f.debug_struct("Permit").field("index", &index).field("kind", &kind).finish_non_exhaustive()
    }
}

impl Eq for Permit {}

impl PartialEq for Permit {
    fn eq(&self, other: &Self) -> bool {
        self.core == other.core
    }
}

impl Permit {
    /// Call without the session's lock.
    pub(super) fn new(core: Core, session: &Arc<Shared>) -> Self {
        Self { core, session: Arc::downgrade(session) }
    }

    /// Index of the permit's chunk on the server.
    pub const fn index(&self) -> u16 {
        self.core.index()
    }

    /// The kind of connection that its requests take.
    pub const fn kind(&self) -> PermitKind {
        self.core.kind()
    }

    /// The permit as the core knows it.
    pub(super) const fn core(&self) -> &Core {
        &self.core
    }

    /// Gives the permit back to its session, which may differ from `at_hand`.
    pub(super) fn put(mut self, at_hand: &Shared) {
        if std::ptr::eq(self.session.as_ptr(), at_hand) {
            // Makes the drop that follows do nothing.
            self.session = Weak::new();
            at_hand.put_permit(self.core.take());
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(session) = self.session.upgrade() {
            session.put_permit(self.core.take());
        }
    }
}
