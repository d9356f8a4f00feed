//! Handling of responses, and the completion of the requests they acknowledge [REQ-9], [REQ-10].

use std::time::Duration;

use bowline_verbs::{Access, Piece, Status};
use bowline_wire::roce::{Aeth, NakCode, Opcode, Packet, Psn, Syndrome, rnr_timer_ns};

use super::retransmission_timer::Answered;
use super::{Outcome, Requester, TxCtx};
use crate::rc::responder::full_packets;
use crate::sendq::Request;

impl Requester {
    /// Handles a response with a correct ICRC [REQ-9].
    pub(crate) fn handle(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) -> Outcome {
        ctx.counters.responses_received += 1;
        let psn = packet.bth.psn;
        if self.takes_gap_reports
            && let Some(Aeth { syndrome: Syndrome::GAP, msn }) = packet.aeth
        {
            self.handle_gap_report(ctx, psn, msn);
            return Outcome::Idle;
        }
        // REQ-9 a and c, and PSNs that were never sent.
        if psn.since(self.window.una()) >= self.window.unanswered() {
            ctx.counters.responses_ignored += 1;
            return Outcome::Idle;
        }
        if self.timer.round_trip().is_guess() || ctx.path.guesses() {
            self.bound_guesses(ctx, psn);
        }
        match packet.opcode {
            Opcode::Acknowledge => match packet.aeth.map(|aeth| aeth.syndrome) {
                Some(Syndrome::Ack(_)) => self.handle_ack(ctx, psn),
                Some(Syndrome::Rnr(code)) => self.handle_rnr(ctx, psn, code),
                Some(Syndrome::Nak(code)) => self.handle_nak(ctx, psn, code),
                Some(Syndrome::Reserved(_)) | None => self.fail(ctx, Status::BadRespErr),
            },
            opcode => {
                // A response acknowledges all requests before the one it answers.
                if self.acknowledge(ctx, psn) == Outcome::Failed {
                    return Outcome::Failed;
                }
                if psn != self.window.una() {
                    // REQ-9 d: an answer before this one is missing.
                    self.handle_out_of_order(ctx, packet);
                    return Outcome::Idle;
                }
                if !has_ack_syndrome(packet) {
                    return self.fail(ctx, Status::BadRespErr);
                }
                if opcode == Opcode::AtomicAcknowledge {
                    self.handle_atomic(ctx, packet)
                } else {
                    self.handle_read(ctx, packet)
                }
            }
        }
    }

    /// Lets guesses of the round trip be no longer than the answer to the packet `psn`, or a later
    /// one, can have taken.
    fn bound_guesses(&mut self, ctx: &mut TxCtx<'_>, psn: Psn) {
        if let Some(longest) = self.timer.answer_took(ctx.now, psn, self.window.end()) {
            self.timer.bound_guess(ctx.now, longest, self.window.unanswered());
            ctx.path.bound_guess(ctx.now, longest);
        }
    }

    fn handle_ack(&mut self, ctx: &mut TxCtx<'_>, psn: Psn) -> Outcome {
        let lost_all_after = self.recovery.judge_ack(self.psns(), psn.next());
        if self.acknowledge(ctx, psn.next()) == Outcome::Failed {
            return Outcome::Failed;
        }
        if lost_all_after {
            ctx.path.lost_in_gap(ctx.now, ctx.now);
            self.go_back(ctx);
        }
        // REQ-9 b: the acknowledged PSN lies behind a READ or atomic whose response was lost.
        let missed = self.queue.front().is_some_and(|head| {
            head.is_started()
                && head.is_read_or_atomic()
                && !psn.is_before(head.first + head.packets)
        });
        // If later answers have arrived, the missing one has been requested already.
        if missed && self.recovery.out_of_order().is_empty() {
            self.go_back(ctx);
        }
        Outcome::Idle
    }

    /// Handles a NAK: the peer misses the packet `psn` or refuses it, and everything before `psn`
    /// has arrived [REQ-10].
    fn handle_nak(&mut self, ctx: &mut TxCtx<'_>, psn: Psn, code: NakCode) -> Outcome {
        if code == NakCode::PsnSequence {
            ctx.counters.naks_sequence_received += 1;
        } else {
            ctx.counters.naks_fatal_received += 1;
        }
        self.recovery.judge_nak(self.psns(), psn);
        if self.acknowledge(ctx, psn) == Outcome::Failed {
            return Outcome::Failed;
        }
        let status = match code {
            NakCode::PsnSequence => {
                self.handle_gap(ctx, psn);
                return Outcome::Idle;
            }
            NakCode::InvalidRequest => Status::RemInvReqErr,
            NakCode::RemoteAccess => Status::RemAccessErr,
            NakCode::RemoteOperational | NakCode::InvalidRdRequest | NakCode::Other(_) => {
                Status::RemOpErr
            }
        };
        let head = self.queue.front();
        if head.is_some_and(|head| psn.is_within(head.first, head.packets)) {
            return self.fail(ctx, status);
        }
        // A later request was refused, so the answer to a READ before it was lost.
        self.go_back(ctx);
        Outcome::Idle
    }

    /// Handles an RNR NAK: the peer had no receive posted [REQ-13].
    fn handle_rnr(&mut self, ctx: &mut TxCtx<'_>, psn: Psn, code: u8) -> Outcome {
        ctx.counters.rnr_naks_received += 1;
        if self.acknowledge(ctx, psn) == Outcome::Failed {
            return Outcome::Failed;
        }
        if psn != self.window.una() {
            self.go_back(ctx);
            return Outcome::Idle;
        }
        if self.recovery.is_paused() {
            return Outcome::Idle;
        }
        if !self.recovery.may_retry() {
            return self.fail(ctx, Status::RnrRetryExcErr);
        }
        self.recovery.pause(ctx.now + Duration::from_nanos(rnr_timer_ns(code)));
        self.timer.stop();
        // An RNR NAK proves that the peer is alive.
        self.timer.wait_from(ctx.now);
        self.window.refused_all();
        self.holes.clear();
        ctx.path.gone(self.log.clear(self.window.end()));
        let asked = self.asked.clear(self.window.end());
        ctx.path.answered(ctx.now, asked, None);
        self.cursor.seek_una(&self.queue, psn);
        Outcome::Idle
    }

    fn handle_read(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) -> Outcome {
        let mtu = self.mtu.unwrap_or_default();
        let Some(head) = self.queue.front() else { return Outcome::Idle };
        if head.is_started() && head.has_empty_response() {
            return self.handle_empty_response(ctx, packet);
        }
        if !head.is_started() || !head.is_read() {
            return self.fail(ctx, Status::BadRespErr);
        }
        let una = self.window.una();
        let offset = una.since(head.first) * mtu as u32;
        let left = (head.len - offset.min(head.len)) as usize;
        // The boundaries of READ responses depend on how the READ was requested, last and earlier.
        // So only one thing is certain about the opcode: the final packet has an ending opcode.
        let done = left <= mtu;
        let ends = matches!(packet.opcode, Opcode::ReadResponseLast | Opcode::ReadResponseOnly);
        if done && !ends || packet.payload.len() != left.min(mtu) {
            return self.fail(ctx, Status::BadRespErr);
        }
        if self.queue.scatter(0, ctx.mrs, ctx.pd, offset, packet.payload).is_err() {
            return self.fail(ctx, Status::LocProtErr);
        }
        if done {
            self.complete_head(ctx);
        }
        self.finish_answer(ctx)
    }

    /// Returns the READ whose answers come next, and how many bytes of it have been received.
    fn current_read(&self) -> Option<(&Request, u32)> {
        let head = self.queue.front()?;
        let (mtu, una) = (self.mtu? as u32, self.window.una());
        let reads = head.is_started() && head.is_read() && una.is_within(head.first, head.packets);
        reads.then(|| (head, (una.since(head.first) * mtu).min(head.len)))
    }

    /// Returns how many bytes of the READ at the head are still missing.
    pub(crate) fn read_bytes_left(&self) -> usize {
        self.current_read().map_or(0, |(head, come)| (head.len - come) as usize)
    }

    /// Returns the PSN of the next answer, and the destination of its payload and of those behind
    /// it, up to `most` bytes. Covers only full packets of a READ that have been requested, and
    /// only while no answer is out of order.
    pub(crate) fn placement(&self, ctx: &TxCtx<'_>, most: usize) -> Option<(Psn, Piece)> {
        let mtu = self.mtu?;
        let in_order = self.recovery.out_of_order().is_empty();
        let (head, come) = self.current_read().filter(|_| in_order)?;
        // REQ-9: a packet that was never requested is no answer.
        let asked = self.window.unanswered() as usize * mtu;
        let bytes = 1..=full_packets((head.len - come) as usize, mtu).min(asked).min(most);
        let span = self.queue.contiguous(0, ctx.mrs, ctx.pd, come, bytes, Access::LOCAL_WRITE)?;
        Some((self.window.una(), span.first_contiguous()?))
    }

    /// Accepts the next answer, a middle packet of a READ whose payload is already in place.
    pub(crate) fn accept_in_place(&mut self, ctx: &mut TxCtx<'_>) {
        ctx.counters.responses_received += 1;
        self.progress(ctx, self.window.una().next());
    }

    /// Handles the empty READ response that completes a FLUSH or ATOMIC WRITE [HDR-5].
    fn handle_empty_response(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) -> Outcome {
        if packet.opcode != Opcode::ReadResponseOnly || !packet.payload.is_empty() {
            return self.fail(ctx, Status::BadRespErr);
        }
        self.complete_head(ctx);
        self.finish_answer(ctx)
    }

    fn handle_atomic(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) -> Outcome {
        let Some(head) = self.queue.front() else { return Outcome::Idle };
        let (true, true, Some(ack)) = (head.is_started(), head.is_atomic(), packet.atomic_ack)
        else {
            return self.fail(ctx, Status::BadRespErr);
        };
        // REQ-18
        let bytes = ack.original.to_ne_bytes();
        if self.queue.scatter(0, ctx.mrs, ctx.pd, 0, &bytes).is_err() {
            return self.fail(ctx, Status::LocProtErr);
        }
        self.complete_head(ctx);
        self.finish_answer(ctx)
    }

    /// Moves behind the answer to the oldest PSN, and behind those that arrived before it.
    fn finish_answer(&mut self, ctx: &mut TxCtx<'_>) -> Outcome {
        self.progress(ctx, self.window.una().next());
        if self.recovery.out_of_order().is_empty() {
            self.finish_head(ctx)
        } else {
            self.drain_out_of_order(ctx)
        }
    }

    /// Handles an acknowledgement of all PSNs before `upto`: completes sends and writes. READs and
    /// atomics are completed only by their answers, and block the requests behind them [REQ-9 b].
    pub(super) fn acknowledge(&mut self, ctx: &mut TxCtx<'_>, upto: Psn) -> Outcome {
        let mut una = self.window.una();
        while let Some(head) = self.queue.front() {
            if head.is_local() && head.is_started() {
                self.complete_head(ctx);
                continue;
            }
            if !head.is_started() || head.is_read_or_atomic() {
                break;
            }
            let end = head.first + head.packets;
            if upto.is_before(end) {
                if upto.is_after(una) {
                    una = upto;
                }
                break;
            }
            una = end;
            self.complete_head(ctx);
        }
        if una != self.window.una() {
            self.progress(ctx, una);
        }
        self.finish_head(ctx)
    }

    /// Notes that everything before `una` has been acknowledged, more than before.
    pub(super) fn progress(&mut self, ctx: &mut TxCtx<'_>, una: Psn) {
        let reads = self.window.has_reads();
        self.window.acknowledged(ctx.now, una, self.timer.round_trip());
        if self.asked.bytes() > 0 {
            let first = self.asked.is_first(una.previous());
            let answered = self.asked.acknowledged(una);
            let asked_at = answered.sent_at.filter(|_| first);
            ctx.path.answered(ctx.now, answered.bytes, asked_at);
        }
        let acknowledged = self.log.acknowledged(una);
        if let Some(resent_at) = self.resent_at {
            ctx.path.answered_late(ctx.now, resent_at);
        }
        // The answer to a READ tells how long the peer took to send those before it as well.
        let sent_at = acknowledged.sent_at.filter(|_| !reads);
        if sent_at.is_none()
            && ctx.path.smoothed().is_none()
            && let Some(first_at) = acknowledged.first_at.filter(|_| !reads)
        {
            ctx.path.guess_round_trip(ctx.now, first_at);
        }
        ctx.path.acknowledged(ctx.now, acknowledged.bytes, sent_at);
        self.timer.set_lossy(ctx.path.is_lossy(ctx.now));
        let answered = match self.resent_at.take() {
            _ if acknowledged.sent_at.is_some() => Answered::SentOnce,
            Some(_) => Answered::AfterSilence,
            None => Answered::Repaired,
        };
        self.recovery.progress(una);
        if let Some(sent_at) = self.holes.filled(una) {
            ctx.path.repaired(ctx.now, sent_at);
        }
        if !self.cursor.next().is_after(una) {
            // The packets to be retransmitted have arrived after all.
            self.cursor.seek_una(&self.queue, una);
        }
        self.timer.replace_guess(ctx.now, ctx.path.measured());
        self.timer.progress(ctx.now, una, self.window.unanswered(), answered);
    }
}

/// Tells whether an answer acknowledges its request; the middle packet of a READ always does.
pub(super) fn has_ack_syndrome(packet: &Packet<'_>) -> bool {
    let good = |aeth: Aeth| matches!(aeth.syndrome, Syndrome::Ack(_));
    packet.opcode == Opcode::ReadResponseMiddle || packet.aeth.is_some_and(good)
}
