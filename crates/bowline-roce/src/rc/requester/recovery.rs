//! Progress, retransmission timer and loss recovery [REQ-11], [REQ-12], [REQ-22], [REQ-24].

use std::time::Duration;

use bowline_base::Instant;
use bowline_verbs::Status;
use bowline_wire::roce::Psn;

use super::settings::{FEW_UNANSWERED, Settings, WINDOW_MAX, WINDOW_MIN};
use super::{Outcome, Requester, TxCtx};
use crate::burst::Burst;
use crate::sendq::{Request, Stage};

/// Consecutive packets that are retransmitted one by one before a go-back.
const CONSECUTIVE_GAPS_MAX: u32 = 2;
/// Losses within one window that do not reduce the window of a peer that reorders.
const LOSSES_TOLERATED: u32 = 4;
/// The same tolerance as a fraction of the window (one in this many packets).
const LOSSES_TOLERATED_PART: u32 = 16;
/// Most probes of a silent peer without an answer, before the retransmission timer expires.
const PROBES_MAX: u32 = 2;

/// Whether the peer keeps packets that arrive after a gap. The standard allows it to drop them, and
/// nothing on the wire shows it in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerReorders {
    /// No loss has shown it yet.
    Unknown,
    Yes,
    No,
}

/// Why one packet is retransmitted alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repair {
    /// The peer misses the packet and has received later ones.
    Gap,
    /// The peer is silent; its acknowledgement will show what it has received [RSP-3].
    Probe,
}

impl Requester {
    /// Notes that `steps` more packets have been acknowledged.
    pub(super) fn progress(&mut self, ctx: &TxCtx<'_>, steps: u32) {
        while self.expected_answers.front().is_some_and(|end| !end.is_after(self.una)) {
            self.expected_answers.pop_front();
        }
        self.recovering = false;
        self.rnr_until = None;
        self.rto_count = 0;
        self.probes = 0;
        self.repair = None;
        if self.repaired.is_some_and(|(end, _)| self.una.is_after(end)) {
            self.repaired = None;
        }
        self.progress_at = ctx.now;
        if let Some(settings) = &self.settings {
            self.rnr_left = settings.rnr_retry;
            let max = settings.window.clamp(WINDOW_MIN, WINDOW_MAX);
            self.acked_since_growth += steps;
            if self.acked_since_growth >= self.window {
                self.acked_since_growth = 0;
                let more = if self.window < self.ssthresh { 4 } else { 16 };
                self.window = (self.window + self.window / more).min(max);
            }
        }
        if let Some((psn, at)) = self.rtt_sample
            && psn.is_before(self.una)
        {
            self.rtt_sample = None;
            let sample = ctx.now.saturating_since(at);
            self.srtt = Some(self.srtt.map_or(sample, |old| (old * 7 + sample) / 8));
        }
        if !self.next.is_after(self.una) {
            // The packets to be retransmitted have arrived after all.
            self.seek_una();
        }
        self.rto_deadline = None;
        self.probe_at = None;
        if self.una != self.end {
            self.arm_rto(ctx.now);
        }
    }

    /// Moves `next` and the cursor to `una`.
    pub(super) fn seek_una(&mut self) {
        self.next = self.una;
        self.cursor = 0;
        self.sent = 0;
        // A local operation at the head would have been completed.
        if let Some(head) = self.queue.front()
            && head.is_started()
            && !head.is_local()
        {
            self.sent = self.una.since(head.first);
        }
    }

    /// Moves `next` and the cursor to `end`: the next packet is a new one.
    fn seek_end(&mut self) {
        let started = |request: &&Request| {
            request.stage == Stage::Started
                && (request.is_local() || !self.end.is_before(request.first + request.packets))
        };
        self.next = self.end;
        self.cursor = self.queue.iter().take_while(started).count();
        self.sent = match self.queue.get(self.cursor) {
            Some(request) if request.is_started() => self.end.since(request.first),
            _ => 0,
        };
    }

    /// Evaluates an acknowledgement of everything before `upto` as the answer to the packet
    /// retransmitted alone. Tells whether the peer has none of the packets sent after that one.
    pub(super) fn judge_repair(&mut self, upto: Psn) -> bool {
        if self.recovering && self.next.is_after(self.una) && upto.is_after(self.next) {
            // More has arrived than was retransmitted.
            self.peer_reorders = PeerReorders::Unknown;
        }
        let Some((end, why)) = self.repaired else { return false };
        if upto.is_before(end) || !upto.is_after(self.una) {
            return false;
        }
        self.repaired = None;
        if upto != end {
            self.consecutive_gaps = 0;
            if why == Repair::Gap {
                self.peer_reorders = PeerReorders::Yes;
            }
            return false;
        }
        if !self.next.is_after(end) {
            return false;
        }
        match why {
            // The peer dropped the later packets it had received.
            Repair::Gap => self.peer_reorders = PeerReorders::No,
            // The later packets may be lost, or still under way. A few packets are retransmitted
            // without further probing.
            Repair::Probe => {
                self.consecutive_gaps += 1;
                let many = self.end.since(upto) >= FEW_UNANSWERED;
                if many
                    && self.peer_reorders != PeerReorders::No
                    && self.consecutive_gaps < CONSECUTIVE_GAPS_MAX
                {
                    return false;
                }
            }
        }
        true
    }

    /// Handles a gap that the peer reports: it misses `psn` and has received a later packet
    /// [REQ-10].
    pub(super) fn handle_gap(&mut self, ctx: &mut TxCtx<'_>, psn: Psn) {
        if self.recovering || self.rnr_until.is_some() || self.una == self.end {
            return;
        }
        let next_to_it = match self.repaired.take() {
            Some((end, Repair::Gap)) => end == self.una,
            _ => false,
        };
        self.consecutive_gaps = if next_to_it { self.consecutive_gaps + 1 } else { 0 };
        // A peer that keeps no later packets needs all of them again. For a READ, that would be the
        // whole answer.
        let all = match self.peer_reorders {
            PeerReorders::Yes => false,
            PeerReorders::Unknown => self.queue.front().is_none_or(|head| head.is_read_or_atomic()),
            PeerReorders::No => true,
        };
        if all || psn != self.una || self.consecutive_gaps >= CONSECUTIVE_GAPS_MAX {
            self.go_back(ctx);
            return;
        }
        if self.peer_reorders == PeerReorders::Yes && self.next.is_before(self.end) {
            self.seek_end();
        }
        if !self.next.is_after(self.una) {
            return; // the missing packet is sent next anyway
        }
        ctx.counters.repairs += 1;
        self.recovering = true;
        self.repair = Some(Repair::Gap);
        self.gso_loss.note_restart(self.una);
        self.rtt_sample = None;
        // Single losses say nothing about the path; many at once mean that it is congested.
        if !self.una.is_before(self.loss_epoch) {
            self.loss_epoch = self.end;
            self.losses = 0;
        }
        self.losses += 1;
        if self.losses == (self.window / LOSSES_TOLERATED_PART).max(LOSSES_TOLERATED) {
            self.window = (self.window - self.window / 4).max(WINDOW_MIN);
            self.ssthresh = self.window;
            self.acked_since_growth = 0;
        }
        self.arm_rto(ctx.now);
    }

    /// Retransmits the packet `una` alone, while `next` stays where it is. The packet requests an
    /// acknowledgement.
    pub(super) fn retransmit_una(
        &mut self,
        ctx: &mut TxCtx<'_>,
        mtu: usize,
        why: Repair,
        out: &mut Burst,
    ) -> Outcome {
        // The answer to a READ says nothing about the packets behind it.
        let tells = self.queue.front().is_some_and(|head| !head.is_read_or_atomic());
        let place = (self.next, self.cursor, self.sent, self.window_closed);
        self.seek_una();
        if !self.append(ctx, mtu, true, out) {
            return self.finish_head(ctx);
        }
        self.repaired = tells.then_some((self.next, why));
        (self.next, self.cursor, self.sent, self.window_closed) = place;
        Outcome::Packet
    }

    /// Goes back to `una` and retransmits from there [REQ-11], once per loss.
    pub(super) fn go_back(&mut self, ctx: &mut TxCtx<'_>) {
        if self.recovering || self.rnr_until.is_some() || self.una == self.end {
            return;
        }
        ctx.counters.go_backs += 1;
        self.recovering = true;
        self.gso_loss.note_restart(self.una);
        self.window = (self.window / 2).max(WINDOW_MIN);
        if self.rto_count <= 1 {
            self.ssthresh = self.window;
        }
        self.acked_since_growth = 0;
        self.packets_since_ack_req = 0;
        self.rtt_sample = None;
        self.repair = None;
        self.repaired = None;
        self.consecutive_gaps = 0;
        self.seek_una();
        self.arm_rto(ctx.now);
    }

    /// Starts the retransmission timer [REQ-22].
    pub(super) fn arm_rto(&mut self, now: Instant) {
        let Some(settings) = &self.settings else { return };
        let Some(limit) = settings.timeout() else { return };
        let first = self.srtt.unwrap_or_default() * 4 + settings.retransmit_min;
        let limit = limit.max(settings.retransmit_min);
        let time = first.checked_mul(1 << self.rto_count.min(20)).unwrap_or(limit).min(limit);
        let mut at = now + time;
        if let Some(give_up_time) = settings.give_up_time() {
            at = at.min(self.progress_at + give_up_time);
        }
        let at = at.max(now + Duration::from_nanos(1));
        self.rto_deadline = Some(at);
        self.plan_probe(now, at);
    }

    /// Schedules the next probe of a silent peer, if the retransmission timer does not expire
    /// earlier.
    fn plan_probe(&mut self, now: Instant, deadline: Instant) {
        self.probe_at = None;
        if self.rto_count > 0 || self.probes >= PROBES_MAX {
            return;
        }
        let unanswered = self.end.since(self.una);
        let at = now + Settings::probe_after(self.srtt, unanswered) * (1 << self.probes);
        self.probe_at = (at < deadline).then_some(at);
    }

    /// Probes a silent peer with a packet that it may be missing. A probe does not count as a retry
    /// [REQ-12].
    fn probe(&mut self, ctx: &mut TxCtx<'_>, deadline: Instant) {
        self.probes += 1;
        self.plan_probe(ctx.now, deadline);
        // Not needed if that packet is sent next anyway.
        if self.next.is_after(self.una) {
            ctx.counters.probes += 1;
            self.repair = Some(Repair::Probe);
            self.rtt_sample = None;
        }
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.rnr_until.or(self.probe_at).or(self.rto_deadline)
    }

    /// Continues after an RNR delay, probes, or retransmits what was not acknowledged in time
    /// [REQ-12].
    pub(crate) fn handle_timeout(&mut self, ctx: &mut TxCtx<'_>) -> Outcome {
        if let Some(until) = self.rnr_until {
            if until <= ctx.now {
                self.rnr_until = None;
                // The time until the peer is given up starts again: it could not answer during the
                // delay.
                self.progress_at = ctx.now;
            }
            return Outcome::Idle;
        }
        let Some(deadline) = self.rto_deadline else { return Outcome::Idle };
        if deadline > ctx.now {
            if self.probe_at.is_some_and(|at| at <= ctx.now) {
                self.probe(ctx, deadline);
            }
            return Outcome::Idle;
        }
        ctx.counters.timeouts += 1;
        let give_up_time = self.settings.as_ref().and_then(Settings::give_up_time);
        let waited = ctx.now.saturating_since(self.progress_at);
        if give_up_time.is_some_and(|give_up_time| waited >= give_up_time) {
            ctx.counters.retries_exceeded += 1;
            return self.fail(ctx, Status::RetryExcErr);
        }
        self.rto_count += 1;
        self.recovering = false;
        self.rto_deadline = None;
        self.go_back(ctx);
        Outcome::Idle
    }
}
