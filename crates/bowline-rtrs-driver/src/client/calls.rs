//! Control calls about paths that are waiting for their outcomes.

use bowline_rtrs::{Errno, PathId};

/// The event of a path that a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// The path has been connected for the first time, or its connection failed.
    Added,
    /// An existing path has been connected again, or its connection failed.
    Reconnected,
    /// The path is closed.
    Closed,
    /// The path is removed.
    Removed,
}

/// Identifies a call within its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallId(u64);

struct Call {
    call_id: CallId,
    path: PathId,
    until: Until,
    outcome: Option<Result<(), Errno>>,
}

/// All calls whose callers have not collected their outcomes.
#[derive(Default)]
pub(super) struct Calls {
    list: Vec<Call>,
    next_id: u64,
}

impl Calls {
    /// Registers a call. The lock under which the core got the command must still be held.
    pub(super) fn begin(&mut self, path: PathId, until: Until) -> CallId {
        let call_id = CallId(self.next_id);
        self.next_id += 1;
        self.list.push(Call { call_id, path, until, outcome: None });
        call_id
    }

    /// Records the outcome of all calls that wait for this event of this path.
    pub(super) fn end(&mut self, path: PathId, until: Until, outcome: Result<(), Errno>) {
        let waits = |call: &&mut Call| call.path == path && call.until == until;
        for call in self.list.iter_mut().filter(waits) {
            call.outcome.get_or_insert(outcome);
        }
    }

    /// Returns the outcome of a call, once.
    pub(super) fn take(&mut self, call_id: CallId) -> Option<Result<(), Errno>> {
        let at = self.list.iter().position(|call| call.call_id == call_id)?;
        let outcome = self.list[at].outcome?;
        self.list.swap_remove(at);
        Some(outcome)
    }
}
