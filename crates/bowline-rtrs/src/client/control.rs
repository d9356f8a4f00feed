//! What the program orders: opening, closing, and paths that come and go [RS-3], [RS-4], [RS-24],
//! [RS-25], [RS-34], [RS-37] to [RS-39].

use bowline_wire::rtrs::{MAX_CONNECTIONS, Uuid};

use super::path::{Goal, Join, Manual, Path};
use super::session::{Event, Life};
use super::{PathAddr, PathState, Session};
use crate::{Errno, Instant, PathId};

impl Session {
    /// Connects all paths, one after the other; [`Event::Opened`] tells how it went. If one cannot
    /// be connected, none is. Each path has a random UUID. `EOPNOTSUPP` when READs are to have keys
    /// of their own and the device of a path cannot make any.
    pub fn open(&mut self, now: Instant, paths: &[(PathAddr, Uuid)]) {
        if self.life != Life::New {
            return self.events.push_back(Event::Opened(Err(Errno::EBUSY)));
        }
        let duplicate = (1..paths.len()).any(|at| {
            let (one, before) = (&paths[at].0, &paths[..at]);
            before.iter().any(|(other, _)| same(one, other))
        });
        let errno = match paths.len() {
            0 => Some(Errno::EINVAL),
            n if n > self.paths_max() => Some(Errno::EINVAL),
            _ if self.config.connections() > MAX_CONNECTIONS.into() => Some(Errno::EINVAL),
            _ if duplicate => Some(Errno::EEXIST),
            _ if !self.suits(paths.iter().map(|(addr, _)| addr)) => Some(Errno::EOPNOTSUPP),
            _ => None,
        };
        if let Some(errno) = errno {
            self.life = Life::Failing(errno);
            return self.settle();
        }
        for (at, (addr, uuid)) in paths.iter().enumerate() {
            let path = Path::new(*addr, *uuid, at == 0, Join::Opening);
            self.list.extend(self.paths.add(path));
        }
        self.life = Life::Opening;
        self.open_next(now);
        self.settle();
    }

    /// Connects the next of the initial paths.
    pub(super) fn open_next(&mut self, now: Instant) {
        if self.life != Life::Opening {
            return;
        }
        let next = self
            .list
            .iter()
            .copied()
            .find(|id| self.paths.get(*id).is_some_and(|path| path.join == Join::Opening));
        match next {
            Some(id) => self.start_link(now, id),
            None => {
                self.life = Life::Open;
                self.events.push_back(Event::Opened(Ok(())));
            }
        }
    }

    /// Opening has failed: all paths are taken down.
    pub(super) fn fail_open(&mut self, now: Instant, errno: Errno) {
        if self.life == Life::Opening {
            self.life = Life::Failing(errno);
            self.close_all(now);
        }
    }

    fn close_all(&mut self, now: Instant) {
        self.hurry(now);
        for id in self.list.clone() {
            self.close_path(now, id, Goal::Removed);
        }
    }

    /// Closes all paths. Requests in flight end first, those that do not within a second with
    /// `ECONNABORTED`. [`Event::Closed`] tells when every path is gone and every permit is back;
    /// memory is no longer registered as soon as the paths are ([`is_gone`](Self::is_gone)).
    pub fn close(&mut self, now: Instant) {
        match self.life {
            Life::New | Life::Open => {
                self.life = Life::Closing;
                self.close_all(now);
            }
            Life::Opening => self.fail_open(now, Errno::ECONNABORTED),
            Life::Failing(_) | Life::Closing | Life::Closed => {}
        }
        self.settle();
    }

    /// Adds a path and connects it; [`Event::PathAdded`] tells how it went.
    ///
    /// # Errors
    /// [`Errno::ENOTCONN`] if the session is not open, [`Errno::EEXIST`] if it has this path,
    /// [`Errno::EINVAL`] if it has too many or there is no such device, [`Errno::EOPNOTSUPP`] if
    /// the device cannot make keys for single requests and the session needs them.
    pub fn add_path(&mut self, now: Instant, addr: PathAddr, uuid: Uuid) -> Result<PathId, Errno> {
        if self.life != Life::Open {
            return Err(Errno::ENOTCONN);
        }
        if self.paths.iter().any(|(_, path)| same(&path.addr, &addr)) {
            return Err(Errno::EEXIST);
        }
        if self.list.len() >= self.paths_max() || usize::from(addr.port.0) >= self.ports.len() {
            return Err(Errno::EINVAL);
        }
        if !self.suits([addr].iter()) {
            return Err(Errno::EOPNOTSUPP);
        }
        let path = Path::new(addr, uuid, self.list.is_empty(), Join::Adding);
        let id = self.paths.add(path).ok_or(Errno::ENOMEM)?;
        self.list.push(id);
        self.start_link(now, id);
        self.settle();
        Ok(id)
    }

    /// Closes a path and forgets it; [`Event::PathRemoved`] tells when, once for all who order it
    /// meanwhile [RS-39].
    ///
    /// # Errors
    /// [`Errno::EINVAL`] if there is no such path; [`Errno::EBUSY`] while the session is being
    /// opened: all of its paths are, or none.
    pub fn remove_path(&mut self, now: Instant, id: PathId) -> Result<(), Errno> {
        self.order_close(now, id, Goal::Removed)
    }

    /// Closes a path, which stays listed and is not connected again by itself, unless it is being
    /// removed; [`Event::PathClosed`] tells when, once for all who order it meanwhile [RS-38].
    ///
    /// # Errors
    /// As [`remove_path`](Self::remove_path).
    pub fn disconnect_path(&mut self, now: Instant, id: PathId) -> Result<(), Errno> {
        self.order_close(now, id, Goal::Closed)
    }

    fn order_close(&mut self, now: Instant, id: PathId, goal: Goal) -> Result<(), Errno> {
        let path = self.paths.get(id).ok_or(Errno::EINVAL)?;
        if self.life == Life::Opening {
            return Err(Errno::EBUSY);
        }
        if path.goal != Goal::Removed {
            self.close_path(now, id, goal);
        }
        self.settle();
        Ok(())
    }

    fn close_path(&mut self, now: Instant, id: PathId, goal: Goal) {
        let Some(path) = self.paths.get_mut(id) else { return };
        path.goal = goal;
        path.retry_at = None;
        match (path.state, path.link) {
            (PathState::Closed, _) => {
                // Closed already: told again, or removed.
                path.state = PathState::Closing;
                self.path_closed(id);
            }
            (PathState::Closing, _) => {}
            (_, link) => {
                self.change(id, PathState::Closing);
                match link {
                    Some(link) => self.quiet(now, link),
                    None => self.path_closed(id),
                }
            }
        }
    }

    /// Connects a path anew, at once; [`Event::PathReconnected`] tells how it went [RS-37].
    ///
    /// # Errors
    /// [`Errno::EBUSY`] while it or the session is being connected, closed or removed;
    /// [`Errno::EINVAL`] if there is no such path.
    pub fn reconnect_path(&mut self, now: Instant, id: PathId) -> Result<(), Errno> {
        let path = self.paths.get_mut(id).ok_or(Errno::EINVAL)?;
        let opening = self.life == Life::Opening;
        if opening
            || path.goal == Goal::Removed
            || path.join != Join::Member
            || path.manual != Manual::No
        {
            return Err(Errno::EBUSY);
        }
        let (state, link) = (path.state, path.link);
        match state {
            PathState::Connecting | PathState::Closing | PathState::Dead => {
                return Err(Errno::EBUSY);
            }
            PathState::Connected | PathState::Closed => self.change(id, PathState::Reconnecting),
            PathState::ConnectingErr | PathState::Reconnecting => {}
        }
        let Some(path) = self.paths.get_mut(id) else { return Err(Errno::EINVAL) };
        path.goal = Goal::Up;
        path.manual = Manual::Ordered;
        path.attempts = 0;
        path.backoff = 0;
        path.busy = 0;
        path.changed = false;
        path.retry_at = None;
        path.lost_at = now;
        match link {
            Some(link) => self.quiet(now, link),
            None => self.retry(now, id),
        }
        self.settle();
        Ok(())
    }

    fn paths_max(&self) -> usize {
        self.config.limits.paths.min(bowline_wire::rtrs::MAX_PATHS)
    }

    /// Tells whether the session was closed, or could not be opened, and has no path, link and
    /// memory any more. Permits may still be out, and are good for nothing.
    pub fn is_gone(&self) -> bool {
        let ending = matches!(self.life, Life::Failing(_) | Life::Closing | Life::Closed);
        ending && self.list.is_empty() && self.links.is_empty()
    }

    /// Finds out whether the end of the session has come.
    pub(super) fn settle(&mut self) {
        if self.life == Life::Closed || !self.is_gone() {
            return;
        }
        self.headers = None;
        for region in self.regions.ids().collect::<Vec<_>>() {
            self.drop_region(region);
        }
        if !self.permits.all_back() {
            return;
        }
        if let Life::Failing(errno) = std::mem::replace(&mut self.life, Life::Closed) {
            self.events.push_back(Event::Opened(Err(errno)));
        } else {
            self.events.push_back(Event::Closed);
        }
    }
}

/// Tells whether two paths join the same addresses, which would be one directory [RS-34].
fn same(one: &PathAddr, other: &PathAddr) -> bool {
    one.src.ip() == other.src.ip() && one.dst.ip() == other.dst.ip()
}
