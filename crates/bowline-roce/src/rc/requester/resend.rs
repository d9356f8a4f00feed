//! Retransmission: carries out what the [recovery](super::recovery) decides and what the
//! [timer](super::retransmission_timer) says is due.

use bowline_base::Instant;
use bowline_verbs::Status;
use bowline_wire::roce::Psn;

use super::recovery::{GapRepair, Repair};
use super::retransmission_timer::Due;
use super::send::Place;
use super::{Outcome, Requester, TxCtx};
use crate::burst::Burst;
use crate::sendq::Request;

impl Requester {
    /// Handles a gap that the peer reports: it misses `psn` and has received a later packet
    /// [REQ-10].
    pub(super) fn handle_gap(&mut self, ctx: &mut TxCtx<'_>, psn: Psn) {
        let answer_is_missing = self.queue.front().is_none_or(Request::is_read_or_atomic);
        match self.recovery.gap(self.psns(), psn, answer_is_missing) {
            GapRepair::None => return,
            GapRepair::GoBack => return self.go_back(ctx),
            GapRepair::Alone => {}
            GapRepair::AloneThenFresh => self.cursor.seek_end(&self.queue, self.window.end()),
        }
        ctx.counters.repairs += 1;
        self.timer.cancel_measurement();
        self.window.lost_one();
        self.timer.arm(ctx.now, self.window.unanswered());
    }

    /// Retransmits the packet `una` alone, while the cursor stays where it is. The packet requests
    /// an acknowledgement.
    pub(super) fn retransmit_una(
        &mut self,
        ctx: &mut TxCtx<'_>,
        mtu: usize,
        why: Repair,
        out: &mut Burst,
    ) -> Outcome {
        // The answer to a READ says nothing about the packets behind it.
        let tells = self.queue.front().is_some_and(|head| !head.is_read_or_atomic());
        let cursor = self.cursor;
        self.cursor.seek_una(&self.queue, self.window.una());
        if !self.append(ctx, mtu, Place::Alone, out) {
            return self.finish_head(ctx);
        }
        self.recovery.sent_alone(tells.then_some((self.cursor.next(), why)));
        self.cursor = cursor;
        Outcome::Packet
    }

    /// Goes back to `una` and retransmits from there [REQ-11], once per loss.
    pub(super) fn go_back(&mut self, ctx: &mut TxCtx<'_>) {
        if !self.recovery.may_begin(self.psns()) {
            return;
        }
        ctx.counters.go_backs += 1;
        let una = self.window.una();
        self.recovery.go_back(una);
        self.window.lost_all(self.timer.expiries());
        self.timer.cancel_measurement();
        self.cursor.seek_una(&self.queue, una);
        self.timer.arm(ctx.now, self.window.unanswered());
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) is due.
    #[inline]
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.recovery.paused_until().or(self.timer.deadline())
    }

    /// Continues after an RNR delay, probes, or retransmits what was not acknowledged in time
    /// [REQ-12].
    pub(crate) fn handle_timeout(&mut self, ctx: &mut TxCtx<'_>) -> Outcome {
        if self.recovery.is_paused() {
            if self.recovery.resume(ctx.now) {
                // The peer could not answer during the delay.
                self.timer.wait_from(ctx.now);
            }
            return Outcome::Idle;
        }
        match self.timer.expired(ctx.now, self.window.unanswered()) {
            Due::Nothing => {}
            Due::Probe => self.probe(ctx),
            Due::Retransmission => {
                ctx.counters.timeouts += 1;
                self.recovery.timed_out();
                self.go_back(ctx);
            }
            Due::GivingUp => {
                ctx.counters.timeouts += 1;
                ctx.counters.retries_exceeded += 1;
                return self.fail(ctx, Status::RetryExcErr);
            }
        }
        Outcome::Idle
    }

    /// Probes a silent peer with a packet that it may be missing, unless that packet is sent next
    /// anyway.
    fn probe(&mut self, ctx: &mut TxCtx<'_>) {
        if self.cursor.next().is_after(self.window.una()) {
            ctx.counters.probes += 1;
            self.recovery.request_repair(Repair::Probe);
            self.timer.cancel_measurement();
        }
    }
}
