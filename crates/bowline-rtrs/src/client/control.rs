//! Commands of the program: opening, closing, and changes of paths [RS-3], [RS-4], [RS-24],
//! [RS-25], [RS-34], [RS-37] to [RS-39].

use bowline_wire::rtrs::{MAX_CONNECTIONS, Uuid};

use super::path::{FirstConnect, Goal, ManualReconnect, Path};
use super::session::{Event, SessionState};
use super::{PathAddr, PathState, Session};
use crate::{Errno, Instant, PathId};

impl Session {
    /// Connects all paths, one after the other; [`Event::Opened`] reports the outcome. If one
    /// cannot be connected, none is. Each path needs a random UUID. Fails with `EOPNOTSUPP` when
    /// READs are to have their own keys and the device of a path cannot make any.
    pub fn open(&mut self, now: Instant, paths: &[(PathAddr, Uuid)]) {
        if self.state != SessionState::New {
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
            _ if !self.supports_read_keys(paths.iter().map(|(addr, _)| addr)) => {
                Some(Errno::EOPNOTSUPP)
            }
            _ => None,
        };
        if let Some(errno) = errno {
            self.state = SessionState::Failing(errno);
            return self.settle();
        }
        for (at, (addr, uuid)) in paths.iter().enumerate() {
            let path = Path::new(*addr, *uuid, at == 0, FirstConnect::Opening);
            self.list.extend(self.paths.add(path));
        }
        self.state = SessionState::Opening;
        self.open_next(now);
        self.settle();
    }

    /// Connects the next of the initial paths.
    pub(super) fn open_next(&mut self, now: Instant) {
        if self.state != SessionState::Opening {
            return;
        }
        let next = self.list.iter().copied().find(|id| {
            self.paths.get(*id).is_some_and(|path| path.first_connect == FirstConnect::Opening)
        });
        match next {
            Some(id) => self.start_incarnation(now, id),
            None => {
                self.state = SessionState::Open;
                self.events.push_back(Event::Opened(Ok(())));
            }
        }
    }

    /// Tears down all paths, because opening has failed.
    pub(super) fn fail_open(&mut self, now: Instant, errno: Errno) {
        if self.state == SessionState::Opening {
            self.state = SessionState::Failing(errno);
            self.close_all(now);
        }
    }

    fn close_all(&mut self, now: Instant) {
        self.shorten_timeouts(now);
        for id in self.list.clone() {
            self.close_path(now, id, Goal::Removed);
        }
    }

    /// Closes all paths. Requests in flight get a second to end; the others fail with
    /// `ECONNABORTED`. [`Event::Closed`] reports that every path is gone and every permit is back.
    /// Memory is deregistered as soon as the paths are gone ([`is_gone`](Self::is_gone)).
    pub fn close(&mut self, now: Instant) {
        match self.state {
            SessionState::New | SessionState::Open => {
                self.state = SessionState::Closing;
                self.close_all(now);
            }
            SessionState::Opening => self.fail_open(now, Errno::ECONNABORTED),
            SessionState::Failing(_) | SessionState::Closing | SessionState::Closed => {}
        }
        self.settle();
    }

    /// Adds a path and connects it; [`Event::PathAdded`] reports the outcome.
    ///
    /// # Errors
    /// [`Errno::ENOTCONN`] if the session is not open, [`Errno::EEXIST`] if it has this path,
    /// [`Errno::EINVAL`] if it has too many or there is no such device, [`Errno::EOPNOTSUPP`] if
    /// the device cannot make keys for single requests and the session needs them.
    pub fn add_path(&mut self, now: Instant, addr: PathAddr, uuid: Uuid) -> Result<PathId, Errno> {
        if self.state != SessionState::Open {
            return Err(Errno::ENOTCONN);
        }
        if self.paths.iter().any(|(_, path)| same(&path.addr, &addr)) {
            return Err(Errno::EEXIST);
        }
        if self.list.len() >= self.paths_max() || usize::from(addr.port.0) >= self.ports.len() {
            return Err(Errno::EINVAL);
        }
        if !self.supports_read_keys([addr].iter()) {
            return Err(Errno::EOPNOTSUPP);
        }
        let path = Path::new(addr, uuid, self.list.is_empty(), FirstConnect::Adding);
        let id = self.paths.add(path).ok_or(Errno::ENOMEM)?;
        self.list.push(id);
        self.start_incarnation(now, id);
        self.settle();
        Ok(id)
    }

    /// Closes a path and removes it; [`Event::PathRemoved`] reports the end, once for all calls
    /// made meanwhile [RS-39].
    ///
    /// [`Errno::EINVAL`] if there is no such path; [`Errno::EBUSY`] while the session is being
    /// opened, which connects all its paths or none.
    /// [`Errno::EINVAL`] if there is no such path; [`Errno::EBUSY`] while the session is being
    /// opened: all of its paths are, or none.
    pub fn remove_path(&mut self, now: Instant, id: PathId) -> Result<(), Errno> {
        self.order_close(now, id, Goal::Removed)
    }

    /// Closes a path, which stays listed and is not reconnected automatically, unless it is being
    /// removed; [`Event::PathClosed`] reports the end, once for all calls made meanwhile [RS-38].
    ///
    /// # Errors
    /// As [`remove_path`](Self::remove_path).
    pub fn disconnect_path(&mut self, now: Instant, id: PathId) -> Result<(), Errno> {
        self.order_close(now, id, Goal::Closed)
    }

    fn order_close(&mut self, now: Instant, id: PathId, goal: Goal) -> Result<(), Errno> {
        let path = self.paths.get(id).ok_or(Errno::EINVAL)?;
        if self.state == SessionState::Opening {
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
        match (path.state, path.incarnation) {
            (PathState::Closed, _) => {
                // Closed already: reports it again, or removes the path.
                path.state = PathState::Closing;
                self.path_closed(id);
            }
            (PathState::Closing, _) => {}
            (_, incarnation) => {
                self.change(id, PathState::Closing);
                match incarnation {
                    Some(incarnation) => self.quiesce(now, incarnation),
                    None => self.path_closed(id),
                }
            }
        }
    }

    /// Reconnects a path now; [`Event::PathReconnected`] reports the outcome [RS-37].
    ///
    /// # Errors
    /// [`Errno::EBUSY`] while the path or the session is being connected, closed or removed;
    /// [`Errno::EINVAL`] if there is no such path.
    pub fn reconnect_path(&mut self, now: Instant, id: PathId) -> Result<(), Errno> {
        let path = self.paths.get_mut(id).ok_or(Errno::EINVAL)?;
        let opening = self.state == SessionState::Opening;
        if opening
            || path.goal == Goal::Removed
            || path.first_connect != FirstConnect::Done
            || path.manual != ManualReconnect::No
        {
            return Err(Errno::EBUSY);
        }
        let (state, incarnation) = (path.state, path.incarnation);
        match state {
            PathState::Connecting | PathState::Closing | PathState::Dead => {
                return Err(Errno::EBUSY);
            }
            PathState::Connected | PathState::Closed => self.change(id, PathState::Reconnecting),
            PathState::ConnectingErr | PathState::Reconnecting => {}
        }
        let Some(path) = self.paths.get_mut(id) else { return Err(Errno::EINVAL) };
        path.goal = Goal::Up;
        path.manual = ManualReconnect::Ordered;
        path.attempts = 0;
        path.backoff = 0;
        path.busy = 0;
        path.changed = false;
        path.retry_at = None;
        path.lost_at = now;
        match incarnation {
            Some(incarnation) => self.quiesce(now, incarnation),
            None => self.retry(now, id),
        }
        self.settle();
        Ok(())
    }

    fn paths_max(&self) -> usize {
        self.config.limits.paths.min(bowline_wire::rtrs::MAX_PATHS)
    }

    /// Returns whether the session was closed, or could not be opened, and has no path, incarnation
    /// or memory any more. Permits may still be out, but are useless.
    pub fn is_gone(&self) -> bool {
        let ending = matches!(
            self.state,
            SessionState::Failing(_) | SessionState::Closing | SessionState::Closed
        );
        ending && self.list.is_empty() && self.incarnations.is_empty()
    }

    /// Completes the end of the session if nothing is left of it.
    pub(super) fn settle(&mut self) {
        if self.state == SessionState::Closed || !self.is_gone() {
            return;
        }
        self.headers = None;
        for region in self.regions.ids().collect::<Vec<_>>() {
            self.drop_region(region);
        }
        if !self.permits.all_back() {
            return;
        }
        if let SessionState::Failing(errno) =
            std::mem::replace(&mut self.state, SessionState::Closed)
        {
            self.events.push_back(Event::Opened(Err(errno)));
        } else {
            self.events.push_back(Event::Closed);
        }
    }
}

/// Whether two paths have the same addresses; they would share a directory [RS-34].
fn same(one: &PathAddr, other: &PathAddr) -> bool {
    one.src.ip() == other.src.ip() && one.dst.ip() == other.dst.ip()
}
