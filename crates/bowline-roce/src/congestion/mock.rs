//! A controller for tests of recovery: its window is what the test says, and it records what it is
//! told.

use bowline_base::Instant;

use super::controller::{Acknowledged, Cause, Controller, Extent, Lost, Room, Route, TimedOut};

/// A call of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Sent(u64, Room),
    Acknowledged(u64),
    Lost(Extent),
    TimedOut(u32),
    Spurious,
    Marked,
}

/// A controller that decides nothing.
#[derive(Debug)]
pub(crate) struct Mock {
    pub(crate) window: u64,
    /// The sender is paced, at a window in a round trip.
    pub(crate) paced: bool,
    pub(crate) calls: Vec<Call>,
}

impl Mock {
    pub(crate) const fn new(window: u64) -> Self {
        Self { window, paced: false, calls: Vec::new() }
    }

    /// Amounts that were sent, and acknowledged.
    pub(crate) fn amounts(&self) -> (u64, u64) {
        self.calls.iter().fold((0, 0), |(sent, acknowledged), call| match call {
            Call::Sent(amount, _) => (sent + amount, acknowledged),
            Call::Acknowledged(amount) => (sent, acknowledged + amount),
            _ => (sent, acknowledged),
        })
    }

    /// How often the controller was called like this.
    pub(crate) fn count(&self, call: Call) -> usize {
        self.calls.iter().filter(|seen| **seen == call).count()
    }
}

impl Controller for Mock {
    fn window(&self) -> Option<u64> {
        Some(self.window)
    }

    fn pacing(&self) -> Option<f64> {
        self.paced.then_some(self.window as f64)
    }

    fn sent(&mut self, amount: u64, room: Room) {
        self.calls.push(Call::Sent(amount, room));
    }

    fn acknowledged(&mut self, acknowledged: &Acknowledged<'_>) -> Route {
        self.calls.push(Call::Acknowledged(acknowledged.amount));
        Route::Same
    }

    fn lost(&mut self, lost: &Lost<'_>) -> Cause {
        self.calls.push(Call::Lost(lost.extent));
        Cause::Chance
    }

    fn timed_out(&mut self, timed_out: &TimedOut<'_>) {
        self.calls.push(Call::TimedOut(timed_out.consecutive));
    }

    fn spurious(&mut self) {
        self.calls.push(Call::Spurious);
    }

    fn marked(&mut self, _now: Instant) {
        self.calls.push(Call::Marked);
    }
}
