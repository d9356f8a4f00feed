//! Paths of clients that may not be there [RT-66].
//!
//! A request to connect proves nothing: anybody can send it from any address, and as many as it
//! likes. Only when the client shows that it has got the answer is it known that somebody lives
//! there. Until then a path is a stranger: it takes little memory, counts for no limit, ends soon,
//! and the oldest makes room for the next. So whoever forges requests keeps out neither those that
//! are there nor those that come.

use std::net::IpAddr;

use super::path::{Path, PathState};
use super::{CloseReason, Server};
use crate::{Errno, Instant, PathId};

impl Server {
    /// A stranger comes; the oldest makes room for it.
    pub(super) fn add_stranger(&mut self, now: Instant, id: PathId) {
        self.strangers.push_back(id);
        if self.strangers.len() > self.config.limits.strangers
            && let Some(&oldest) = self.strangers.front()
        {
            self.counters.paths_pushed_out += 1;
            self.close_path(now, oldest, CloseReason::PushedOut);
        }
    }

    /// A path is none any more, if it was: it is proven, or over.
    pub(super) fn remove_stranger(&mut self, id: PathId) {
        self.strangers.retain(|stranger| *stranger != id);
    }

    /// Tells whether there may be one more session that was begun from an address.
    pub(super) fn has_session_room(&self, from: IpAddr) -> bool {
        let per_address = self.config.limits.sessions_per_address;
        let proven = || self.sessions.iter().filter(|session| session.proven);
        proven().count() < self.config.sessions_max()
            && proven().filter(|session| session.from == from).count() < per_address
    }

    /// Tells whether there may be so many more connections from an address.
    pub(super) fn has_room(&self, wanted: u16, from: IpAddr) -> bool {
        let (wanted, limits) = (usize::from(wanted), &self.config.limits);
        let same = self.paths.iter().filter(|path| path.remote.ip() == from);
        let theirs: usize = same.map(Path::promised).sum();
        self.paths.connections + wanted <= limits.connections
            && theirs + wanted <= limits.connections_per_address
    }

    /// The client of a path is there, and the path counts from now on. The limits are looked at
    /// once more: others may have come since it asked.
    pub(super) fn prove(&mut self, now: Instant, id: PathId) {
        let Some(path) = self.paths.get(id).filter(|path| !path.proven) else { return };
        if path.state != PathState::Connecting {
            return;
        }
        let Some(session) = self.sessions.get(path.session) else { return };
        let room = self.has_room(path.conns.len(), path.remote.ip())
            && (session.proven || self.has_session_room(session.from));
        if !room {
            self.counters.refused_full += 1;
            return self.close_path(now, id, CloseReason::Failed(Errno::ENOMEM));
        }
        let (slot, deadline) = (path.session, now + self.config.limits.establish);
        self.paths.prove(id);
        self.remove_stranger(id);
        if let Some(session) = self.sessions.get_mut(slot) {
            session.proven = true;
        }
        if let Some(path) = self.paths.get_mut(id) {
            path.deadline = deadline;
        }
        self.wake_at(deadline);
    }
}
