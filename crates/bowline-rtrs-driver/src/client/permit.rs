//! A permit as the program has it.

use std::sync::{Arc, Weak};

use bowline_rtrs::client::{Permit as Core, PermitKind};

use super::shared::Shared;

/// The right to have one request in flight, in a chunk of the server [RT-37].
///
/// It goes back to its session when it is dropped, or with
/// [`Session::put_permit`](super::Session::put_permit), which is quicker; its request may be in
/// flight still, and whoever has it next can use it when that has ended. A permit of a session that
/// is closed, or gone, is good for nothing, and does not hold anything of it.
///
/// Like `put_permit`, to drop one may run functions of the program that are told of requests, paths
/// and the session: not while a lock is held that these take.
#[must_use = "a permit that is dropped goes back to its session"]
pub struct Permit {
    core: Core,
    /// Weak: it is the program's, and may be kept for ever.
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
    /// Not while the session is locked.
    pub(super) fn new(core: Core, session: &Arc<Shared>) -> Self {
        Self { core, session: Arc::downgrade(session) }
    }

    /// Index of the chunk.
    pub const fn index(&self) -> u16 {
        self.core.index()
    }

    /// Which connection its requests take.
    pub const fn kind(&self) -> PermitKind {
        self.core.kind()
    }

    /// As the core knows it.
    pub(super) const fn core(&self) -> &Core {
        &self.core
    }

    /// Puts it back into its session, which may be another one than that which is at hand.
    pub(super) fn put(mut self, at_hand: &Shared) {
        if std::ptr::eq(self.session.as_ptr(), at_hand) {
            // Nothing is left to be done when it is dropped.
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
