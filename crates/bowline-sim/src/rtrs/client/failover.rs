//! Judges which requests of a session may fail: those during which, for a moment, no path was
//! connected. All others move to a connected path, or never leave theirs.

use std::collections::{BTreeMap, BTreeSet};

use bowline_rtrs::client::{Completed, PathInfo, PathState};
use bowline_rtrs::{Errno, PathId};

/// Errors that a session itself gives; others are responses of the server.
const OWN: [Errno; 5] =
    [Errno::ECONNABORTED, Errno::ECONNRESET, Errno::ETIMEDOUT, Errno::ENOMEM, Errno::EMSGSIZE];

/// Judges the errors of a session's requests.
#[derive(Debug, Default)]
pub(super) struct Failover {
    connected: BTreeSet<PathId>,
    /// Number of times the last connected path was lost.
    outages: u64,
    /// For each request in progress: the number of outages before it.
    begun: BTreeMap<u64, u64>,
    /// Failed requests, with the number of outages before them. They are judged later, because path
    /// events of that time come after the completions.
    failed: Vec<(Completed, u64)>,
}

impl Failover {
    /// The session has taken a request.
    pub(super) fn begun(&mut self, tag: u64) {
        self.begun.insert(tag, self.outages);
    }

    /// Judges the refusal of a request.
    pub(super) fn refused<'a>(
        errno: Errno,
        mut paths: impl Iterator<Item = PathInfo<'a>>,
    ) -> Result<(), String> {
        match paths.find(|path| path.state == PathState::Connected) {
            Some(path) => Err(format!("a request is refused with {errno:?}, {:?} is up", path.id)),
            None => Ok(()),
        }
    }

    /// Records the end of a request.
    pub(super) fn ended(&mut self, one: Completed) {
        let before = self.begun.remove(&one.tag);
        let own = OWN.iter().any(|errno| errno.neg() == one.errno);
        self.failed.extend(before.filter(|_| own).map(|before| (one, before)));
    }

    /// Records the change of a path.
    pub(super) fn path(&mut self, path: PathId, state: PathState) {
        if state == PathState::Connected {
            self.connected.insert(path);
        } else if self.connected.remove(&path) && self.connected.is_empty() {
            self.outages += 1;
        }
    }

    /// Judges the failed requests, once all events up to now are recorded.
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
