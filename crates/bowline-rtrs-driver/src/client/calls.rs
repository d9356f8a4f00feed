//! Calls about paths that wait: each has an outcome of its own.

use bowline_rtrs::{Errno, PathId};

/// What a call about a path waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// The path is connected for the first time, or could not be.
    Added,
    /// The same of a path that was there.
    Reconnected,
    /// It is closed.
    Closed,
    /// It is gone.
    Removed,
}

/// Tells a call from all others of its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket(u64);

struct Call {
    ticket: Ticket,
    path: PathId,
    until: Until,
    outcome: Option<Result<(), Errno>>,
}

/// All calls whose callers have not looked at their outcomes.
#[derive(Default)]
pub(super) struct Calls {
    list: Vec<Call>,
    begun: u64,
}

impl Calls {
    /// A call begins. The lock under which the core was told of it is held still.
    pub(super) fn begin(&mut self, path: PathId, until: Until) -> Ticket {
        let ticket = Ticket(self.begun);
        self.begun += 1;
        self.list.push(Call { ticket, path, until, outcome: None });
        ticket
    }

    /// This has happened to a path: all calls that wait for it have come to this.
    pub(super) fn end(&mut self, path: PathId, until: Until, outcome: Result<(), Errno>) {
        let waits = |call: &&mut Call| call.path == path && call.until == until;
        for call in self.list.iter_mut().filter(waits) {
            call.outcome.get_or_insert(outcome);
        }
    }

    /// What a call has come to, once.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Result<(), Errno>> {
        let at = self.list.iter().position(|call| call.ticket == ticket)?;
        let outcome = self.list[at].outcome?;
        self.list.swap_remove(at);
        Some(outcome)
    }
}
