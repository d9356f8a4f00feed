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
use crate::congestion::Path;
use crate::sendq::Request;

/// A packet sent again is lost if one sent this part of a round trip later has arrived.
const LATE_PART: u32 = 4;
/// Half of the PSN space: more packets are never in flight.
const PSNS_HALF: u32 = 1 << 23;

impl Requester {
    /// Handles a gap that the peer reports: it misses `psn` and has received a later packet
    /// [REQ-10].
    pub(super) fn handle_gap(&mut self, ctx: &mut TxCtx<'_>, psn: Psn) {
        let answer_is_missing = self.queue.front().is_none_or(Request::is_read_or_atomic);
        if self.takes_gap_reports && !answer_is_missing && self.recovery.may_begin(self.psns()) {
            return self.add_hole(ctx, psn, psn.next());
        }
        match self.recovery.gap(self.psns(), psn, answer_is_missing) {
            GapRepair::None => return,
            GapRepair::GoBack => {
                ctx.path.lost_in_gap(ctx.now, ctx.now);
                return self.go_back(ctx);
            }
            GapRepair::Alone => {}
            GapRepair::AloneThenFresh => self.cursor.seek_end(&self.queue, self.window.end()),
        }
        ctx.counters.repairs += 1;
        self.timer.cancel_measurement();
        self.window.lost_one(ctx.now, self.timer.round_trip());
        self.log.sent_again(self.window.end());
        ctx.path.lost_in_gap(ctx.now, ctx.now);
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
        self.resent_at = Some(ctx.now);
        self.recovery.sent_alone(tells.then_some((self.cursor.next(), why)));
        self.cursor = cursor;
        Outcome::Packet
    }

    /// Handles the report of a gap: `count` packets from `psn` on are missing [CC-11].
    pub(super) fn handle_gap_report(&mut self, ctx: &mut TxCtx<'_>, psn: Psn, count: u32) {
        ctx.counters.gap_reports_received += 1;
        let (una, end) = (self.window.una(), self.window.end());
        // A report may be older than the last acknowledgement.
        let from = if psn.is_before(una) { una } else { psn };
        let upto = psn + count;
        let possible = count < PSNS_HALF && una.is_before(upto) && !upto.is_after(end);
        if !possible || !self.recovery.may_begin(self.psns()) {
            return;
        }
        if from.is_before(upto) {
            self.add_hole(ctx, from, upto);
            return;
        }
        self.note_kept(ctx, upto);
    }

    /// Notes that everything before `upto` has arrived but for the known holes [CC-14]: that is
    /// no longer in flight. A packet sent again before something else that has arrived is lost
    /// again.
    fn note_kept(&mut self, ctx: &mut TxCtx<'_>, upto: Psn) {
        let kept = self.log.kept(upto, &self.holes);
        ctx.path.acknowledged(ctx.now, kept.bytes, kept.sent_at);
        if let Some(sent_at) = kept.sent_at {
            let slack = ctx.path.smoothed().unwrap_or_default() / LATE_PART;
            let before = sent_at.as_nanos().saturating_sub(slack.as_nanos() as u64);
            self.holes.lost_again(self.window.una(), Instant::from_nanos(before), ctx.now);
        }
        self.timer.set_lossy(ctx.path.is_lossy(ctx.now));
        self.timer.arm(ctx.now, self.window.unanswered());
    }

    /// Lets missing packets be sent again, after the time in which packets that are only late
    /// arrive.
    fn add_hole(&mut self, ctx: &mut TxCtx<'_>, from: Psn, upto: Psn) {
        let una = self.window.una();
        if from.is_before(una) || upto.is_after(self.cursor.next()) {
            return; // sent next anyway
        }
        let now = ctx.now;
        self.timer.losses_are_real();
        self.holes.add(una, from, upto, now + ctx.path.late_for());
        if let Some(round_trip) = ctx.path.smoothed() {
            let before = now.as_nanos().saturating_sub(2 * round_trip.as_nanos() as u64);
            self.holes.lost_again(una, Instant::from_nanos(before), now);
        }
    }

    /// Sends a packet again that the peer has reported missing.
    pub(super) fn fill_hole(
        &mut self,
        ctx: &mut TxCtx<'_>,
        mtu: usize,
        psn: Psn,
        last: bool,
        out: &mut Burst,
    ) -> Outcome {
        let cursor = self.cursor;
        // The packet of a READ or atomic is found missing by its answer.
        if self.cursor.seek(&self.queue, psn) {
            ctx.counters.repairs += 1;
            ctx.path.lost_in_gap(ctx.now, self.log.sent_at(psn).unwrap_or(ctx.now));
            self.timer.cancel_measurement();
            if !self.append(ctx, mtu, Place::InHole { last }, out) {
                return self.finish_head(ctx);
            }
            self.timer.arm(ctx.now, self.window.unanswered());
            self.cursor = cursor;
            return Outcome::Packet;
        }
        self.cursor = cursor;
        Outcome::Idle
    }

    /// Goes back to `una` and retransmits from there [REQ-11], once per loss.
    pub(super) fn go_back(&mut self, ctx: &mut TxCtx<'_>) {
        if !self.recovery.may_begin(self.psns()) {
            return;
        }
        ctx.counters.go_backs += 1;
        let una = self.window.una();
        self.recovery.go_back(una);
        self.window.lost_all(ctx.now, self.timer.expiries(), self.timer.round_trip());
        self.timer.cancel_measurement();
        ctx.path.gone(self.log.clear(self.window.end()));
        let asked = self.asked.clear(self.window.end());
        ctx.path.answered(ctx.now, asked, None);
        self.holes.clear();
        self.cursor.seek_una(&self.queue, una);
        self.timer.arm(ctx.now, self.window.unanswered());
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) is due.
    #[inline]
    pub(crate) fn poll_timeout(&self, now: Instant, path: &Path) -> Option<Instant> {
        let timer = self.recovery.paused_until().or(self.timer.deadline());
        let Some(due) = self.holes.due() else { return timer };
        let hole = if due > now { Some(due) } else { path.replacement_at(now) };
        [timer, hole].into_iter().flatten().min()
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
                if self.takes_gap_reports && self.timer.expiries() == 1 {
                    // The peer keeps what it has, and tells what it lacks: its answer shows
                    // whether something was lost at all.
                    self.holes.lost_again(self.window.una(), ctx.now, ctx.now);
                    self.recovery.request_probe();
                    self.timer.cancel_measurement();
                    self.timer.arm(ctx.now, self.window.unanswered());
                    return Outcome::Idle;
                }
                ctx.path.timed_out(ctx.now, self.timer.expiries());
                self.resent_at = Some(ctx.now);
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
