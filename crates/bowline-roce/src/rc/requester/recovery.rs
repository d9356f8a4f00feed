//! What is done when answers come, when they do not come, and when packets were lost [REQ-11],
//! [REQ-12], [REQ-22]: the window, the timer, and the way back.

use std::time::Duration;

use bowline_verbs::Status;

use super::settings::{Settings, WINDOW_MAX, WINDOW_MIN};
use super::{Outcome, Requester, TxCtx};
use crate::time::Instant;

impl Requester {
    /// `steps` more packets have been acknowledged.
    pub(super) fn progress(&mut self, ctx: &TxCtx<'_>, steps: u32) {
        while self.asked.front().is_some_and(|end| !end.is_after(self.una)) {
            self.asked.pop_front();
        }
        self.went_back = false;
        self.pause = None;
        self.expiries = 0;
        self.progress_at = ctx.now;
        if let Some(settings) = &self.settings {
            self.rnr_left = settings.rnr_retry;
            let max = settings.window.clamp(WINDOW_MIN, WINDOW_MAX);
            self.acknowledged += steps;
            if self.acknowledged >= self.window {
                self.acknowledged = 0;
                let more = if self.window < self.slow_from { 4 } else { 16 };
                self.window = (self.window + self.window / more).min(max);
            }
        }
        if let Some((psn, at)) = self.timed
            && psn.is_before(self.una)
        {
            self.timed = None;
            let sample = ctx.now.saturating_since(at);
            self.round_trip = Some(self.round_trip.map_or(sample, |old| (old * 7 + sample) / 8));
        }
        if !self.next.is_after(self.una) {
            // What was to be sent again has arrived after all.
            self.seek();
        }
        self.deadline = None;
        if self.una != self.end {
            self.arm(ctx.now);
        }
    }

    /// The next packet is the one that `una` names.
    pub(super) fn seek(&mut self) {
        self.next = self.una;
        self.cursor = 0;
        self.sent = 0;
        // Local operations at the head would have been completed.
        if let Some(head) = self.queue.front()
            && head.is_started()
            && !head.is_local()
        {
            self.sent = self.una.since(head.first);
        }
    }

    /// Sends again from `una` [REQ-11], once for a loss.
    pub(super) fn go_back(&mut self, ctx: &mut TxCtx<'_>) {
        if self.went_back || self.pause.is_some() || self.una == self.end {
            return;
        }
        ctx.counters.go_backs += 1;
        self.went_back = true;
        self.creeping.begin_again(self.una);
        self.window = (self.window / 2).max(WINDOW_MIN);
        if self.expiries <= 1 {
            self.slow_from = self.window;
        }
        self.acknowledged = 0;
        self.unasked = 0;
        self.timed = None;
        self.seek();
        self.arm(ctx.now);
    }

    /// Starts the retransmission timer [REQ-22].
    pub(super) fn arm(&mut self, now: Instant) {
        let Some(settings) = &self.settings else { return };
        let Some(limit) = settings.timeout() else { return };
        let first = self.round_trip.unwrap_or_default() * 4 + settings.retransmit_min;
        let limit = limit.max(settings.retransmit_min);
        let time = first.checked_mul(1 << self.expiries.min(20)).unwrap_or(limit).min(limit);
        let mut at = now + time;
        if let Some(patience) = settings.patience() {
            at = at.min(self.progress_at + patience);
        }
        self.deadline = Some(at.max(now + Duration::from_nanos(1)));
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.pause.or(self.deadline)
    }

    /// Goes on after a pause, or sends again what was not acknowledged in time [REQ-12].
    pub(crate) fn handle_timeout(&mut self, ctx: &mut TxCtx<'_>) -> Outcome {
        if let Some(until) = self.pause {
            if until <= ctx.now {
                self.pause = None;
                // The peer's patience begins anew: nobody could answer meanwhile.
                self.progress_at = ctx.now;
            }
            return Outcome::Idle;
        }
        if self.deadline.is_none_or(|at| at > ctx.now) {
            return Outcome::Idle;
        }
        ctx.counters.timeouts += 1;
        let patience = self.settings.as_ref().and_then(Settings::patience);
        let waited = ctx.now.saturating_since(self.progress_at);
        if patience.is_some_and(|patience| waited >= patience) {
            ctx.counters.retries_exceeded += 1;
            return self.fail(ctx, Status::RetryExcErr);
        }
        self.expiries += 1;
        self.went_back = false;
        self.deadline = None;
        self.go_back(ctx);
        Outcome::Idle
    }
}
