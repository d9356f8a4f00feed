//! Paths whose client is not proven to exist [RT-66].
//!
//! A connection request proves nothing: anyone can send any number of them with forged addresses.
//! Only when the client shows that it has received the answer is it proven to exist at its address.
//! Until then its path is a stranger: it takes little memory, counts for no limit, times out soon,
//! and the oldest makes room for the next. So forged requests keep out neither present clients nor
//! new ones.

use std::net::IpAddr;

use super::path::{Path, PathState};
use super::{CloseReason, Server};
use crate::{Errno, Instant, PathId};

impl Server {
    /// Adds a stranger; the oldest makes room for it.
    pub(super) fn add_stranger(&mut self, now: Instant, id: PathId) {
        self.strangers.push_back(id);
        if self.strangers.len() > self.config.limits.strangers
            && let Some(&oldest) = self.strangers.front()
        {
            self.counters.paths_pushed_out += 1;
            self.close_path(now, oldest, CloseReason::PushedOut);
        }
    }

    /// Removes a path from the strangers, if it is one: it is proven, or closed.
    pub(super) fn remove_stranger(&mut self, id: PathId) {
        self.strangers.retain(|stranger| *stranger != id);
    }

    /// Whether one more session may be begun from an address.
    pub(super) fn has_session_room(&self, from: IpAddr) -> bool {
        let per_address = self.config.limits.sessions_per_address;
        let proven = || self.sessions.iter().filter(|session| session.proven);
        proven().count() < self.config.sessions_max()
            && proven().filter(|session| session.from == from).count() < per_address
    }

    /// Whether this many more connections are allowed from an address.
    pub(super) fn has_room(&self, wanted: u16, from: IpAddr) -> bool {
        let (wanted, limits) = (usize::from(wanted), &self.config.limits);
        let same = self.paths.iter().filter(|path| path.remote.ip() == from);
        let theirs: usize = same.map(Path::promised).sum();
        self.paths.connections + wanted <= limits.connections
            && theirs + wanted <= limits.connections_per_address
    }

    /// Marks the client of a path as proven; from now on the path counts for the limits. These are
    /// checked again: other clients may have come since the path was requested.
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
