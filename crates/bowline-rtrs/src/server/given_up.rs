//! Paths that their client has given up, and says so: by a notice over another path of the session,
//! or by the INFO_REQ of one that joins [RT-101].
//!
//! What it had sent over such a path may be late, not lost. Carried out, or only written into a
//! chunk, it would undo what was done since; so the path is closed before anything that comes
//! behind the notice begins.

use bowline_wire::rtrs::PathLife;

use super::path::PathState;
use super::{CloseReason, Server};
use crate::{Instant, PathId};

impl Server {
    /// The client says over one path that it has given up another.
    pub(super) fn notice(&mut self, now: Instant, by: PathId, life: PathLife) {
        self.counters.notices += 1;
        if !self.end_given_up(now, by, life) {
            self.counters.notices_ignored += 1;
        }
    }

    /// Ends the path of this name in the session of the path it came by, but not that one itself.
    /// Tells whether there was any.
    pub(super) fn end_given_up(&mut self, now: Instant, by: PathId, life: PathLife) -> bool {
        let session = self.paths.get(by).and_then(|path| self.sessions.get(path.session));
        let slots = session.map_or(&[][..], |session| &session.paths);
        // Two that have the name by chance both end: it costs the other one a reconnect.
        let named: Vec<PathId> = (slots.iter())
            .filter_map(|&slot| self.paths.at(slot))
            .filter(|path| path.id != by && path.life == life)
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

    /// Tells whether paths that clients have given up are being closed. What
    /// [`poll_order`](Self::poll_order) has for them must be carried out before the upper layer
    /// begins requests of [`take_requests`](Self::take_requests): until then the client's writes
    /// that are late may change chunks.
    pub const fn ends_given_up(&self) -> bool {
        self.given_up > 0
    }

    /// Tells whether a session has such a path.
    pub(super) fn awaits_given_up(&self, slot: u32) -> bool {
        let of = |path: &super::path::Path| path.given_up && path.state == PathState::Closing;
        self.given_up > 0
            && self.sessions.get(slot).is_some_and(|session| {
                session.paths.iter().filter_map(|&path| self.paths.at(path)).any(of)
            })
    }
}
