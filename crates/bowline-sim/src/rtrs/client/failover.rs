//! Which requests of a session may fail: those in whose life no path was connected for a moment.
//! All others move to a path that is, or never leave it.

use std::collections::{BTreeMap, BTreeSet};

use bowline_rtrs::client::{Completed, PathInfo, PathState};
use bowline_rtrs::{Errno, PathId};

/// Errors a session gives by itself; others are answers of the server.
const OWN: [Errno; 5] =
    [Errno::ECONNABORTED, Errno::ECONNRESET, Errno::ETIMEDOUT, Errno::ENOMEM, Errno::EMSGSIZE];

/// Judges the errors of a session's requests.
#[derive(Debug, Default)]
pub(super) struct Failover {
    connected: BTreeSet<PathId>,
    /// Times the last of them was lost.
    outages: u64,
    /// Outages before each request that is under way.
    begun: BTreeMap<u64, u64>,
    /// Requests that have failed, and the outages before: what has happened to paths by then is
    /// told after their end.
    failed: Vec<(Completed, u64)>,
}

impl Failover {
    /// The session has taken a request.
    pub(super) fn begun(&mut self, tag: u64) {
        self.begun.insert(tag, self.outages);
    }

    /// The session does not take a request.
    pub(super) fn refused<'a>(
        errno: Errno,
        mut paths: impl Iterator<Item = PathInfo<'a>>,
    ) -> Result<(), String> {
        match paths.find(|path| path.state == PathState::Connected) {
            Some(path) => Err(format!("a request is refused with {errno:?}, {:?} is up", path.id)),
            None => Ok(()),
        }
    }

    /// A request has ended.
    pub(super) fn ended(&mut self, one: Completed) {
        let before = self.begun.remove(&one.tag);
        let own = OWN.iter().any(|errno| errno.neg() == one.errno);
        self.failed.extend(before.filter(|_| own).map(|before| (one, before)));
    }

    /// A path has changed.
    pub(super) fn path(&mut self, path: PathId, state: PathState) {
        if state == PathState::Connected {
            self.connected.insert(path);
        } else if self.connected.remove(&path) && self.connected.is_empty() {
            self.outages += 1;
        }
    }

    /// All is told that has happened by now.
    pub(super) fn judge(&mut self) -> Result<(), String> {
        let up = !self.connected.is_empty();
        let wrong = |(_, before): &(Completed, u64)| up && *before == self.outages;
        let found = self.failed.iter().find(|one| wrong(one)).copied();
        self.failed.clear();
        found.map_or(Ok(()), |(one, _)| {
            Err(format!("{one:?} though a path was connected all the time"))
        })
    }
}
