//! Paths that their client has given up, as it tells by a notice over another path of the session
//! or in the INFO_REQ of a path that joins [RT-101].
//!
//! Packets sent over such a path may be late instead of lost. Carrying out a late request, or only
//! writing its data to a chunk, would undo later changes. So the path is closed before anything
//! that comes behind the notice begins.

use bowline_wire::rtrs::PathLife;

use super::path::PathState;
use super::{CloseReason, Server};
use crate::{Instant, PathId};

impl Server {
    /// Handles a notice over one path that another is given up.
    pub(super) fn notice(&mut self, now: Instant, by: PathId, generation: PathLife) {
        self.counters.notices += 1;
        if !self.end_given_up(now, by, generation) {
            self.counters.notices_ignored += 1;
        }
    }

    /// Closes the path of this name in the same session as path `by`, but never `by` itself.
    /// Returns whether there was one.
    pub(super) fn end_given_up(&mut self, now: Instant, by: PathId, generation: PathLife) -> bool {
        let session = self.paths.get(by).and_then(|path| self.sessions.get(path.session));
        let slots = session.map_or(&[][..], |session| &session.paths);
        // If two paths have the same name by chance, both are closed: that costs the other one a
        // reconnection.
        let named: Vec<PathId> = (slots.iter())
            .filter_map(|&slot| self.paths.at(slot))
            .filter(|path| path.id != by && path.generation == generation)
            .map(|path| path.id)
            .collect();
        for &id in &named {
            if let Some(path) = self.paths.get_mut(id)
                && !std::mem::replace(&mut path.given_up, true)
            {
                self.given_up += 1;
            }
            self.close_path(now, id, CloseReason::GivenUp);
        }
        !named.is_empty()
    }

    /// Whether given-up paths are being closed. The orders of [`poll_order`](Self::poll_order) for
    /// them must be carried out before the upper layer begins requests of
    /// [`take_requests`](Self::take_requests): until then late writes of the client may change
    /// chunks.
    pub const fn ends_given_up(&self) -> bool {
        self.given_up > 0
    }

    /// Whether a session has such a path.
    pub(super) fn awaits_given_up(&self, slot: u32) -> bool {
        let of = |path: &super::path::Path| path.given_up && path.state == PathState::Closing;
        self.given_up > 0
            && self.sessions.get(slot).is_some_and(|session| {
                session.paths.iter().filter_map(|&path| self.paths.at(path)).any(of)
            })
    }
}
