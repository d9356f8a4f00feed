//! What the peer answers, and which requests that completes [REQ-9], [REQ-10].

use std::time::Duration;

use bowline_verbs::{Access, Piece, Status};
use bowline_wire::roce::{Aeth, NakCode, Opcode, Packet, Psn, Syndrome, rnr_timer_ns};

use super::settings::RETRY_SEVEN;
use super::{Outcome, Requester, TxCtx};
use crate::rc::responder::full_packets;
use crate::sendq::Request;

impl Requester {
    /// Takes a response whose ICRC is good [REQ-9].
    pub(crate) fn handle(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) -> Outcome {
        ctx.counters.responses_received += 1;
        let psn = packet.bth.psn;
        // REQ-9 a and c, and what was never sent.
        if psn.since(self.una) >= self.end.since(self.una) {
            ctx.counters.responses_ignored += 1;
            return Outcome::Idle;
        }
        match packet.opcode {
            Opcode::Acknowledge => match packet.aeth.map(|aeth| aeth.syndrome) {
                Some(Syndrome::Ack(_)) => self.handle_ack(ctx, psn),
                Some(Syndrome::Rnr(code)) => self.handle_rnr(ctx, psn, code),
                Some(Syndrome::Nak(code)) => self.handle_nak(ctx, psn, code),
                Some(Syndrome::Reserved(_)) | None => self.fail(ctx, Status::BadRespErr),
            },
            opcode => {
                // What comes before the request answered is acknowledged by the answer.
                if self.acknowledge(ctx, psn) == Outcome::Failed {
                    return Outcome::Failed;
                }
                if psn != self.una {
                    // REQ-9 d: an answer before this one is missing.
                    self.handle_out_of_order(ctx, packet);
                    return Outcome::Idle;
                }
                let good = |aeth: Option<Aeth>| {
                    aeth.is_some_and(|aeth| matches!(aeth.syndrome, Syndrome::Ack(_)))
                };
                if opcode != Opcode::ReadResponseMiddle && !good(packet.aeth) {
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

    fn handle_ack(&mut self, ctx: &mut TxCtx<'_>, psn: Psn) -> Outcome {
        let lost_all_after = self.judge_repair(psn.next());
        if self.acknowledge(ctx, psn.next()) == Outcome::Failed {
            return Outcome::Failed;
        }
        if lost_all_after {
            self.go_back(ctx);
        }
        // REQ-9 b: it acknowledges something behind a read or atomic whose response was lost.
        let missed = self.queue.front().is_some_and(|head| {
            head.is_started()
                && head.is_read_or_atomic()
                && !psn.is_before(head.first + head.packets)
        });
        // If later answers have come, what is missing has been asked for.
        if missed && self.out_of_order.is_empty() {
            self.go_back(ctx);
        }
        Outcome::Idle
    }

    /// A packet is missing at the peer, or it refuses one; everything before `psn` has arrived
    /// [REQ-10].
    fn handle_nak(&mut self, ctx: &mut TxCtx<'_>, psn: Psn, code: NakCode) -> Outcome {
        if code == NakCode::PsnSequence {
            ctx.counters.naks_sequence_received += 1;
        } else {
            ctx.counters.naks_fatal_received += 1;
        }
        // That it misses the packet next to the one sent again proves nothing.
        if self.repaired.is_some_and(|(end, _)| psn.is_after(end)) {
            self.judge_repair(psn);
        }
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
        // The refusal is of a later request; the answer to a read before it was lost.
        self.go_back(ctx);
        Outcome::Idle
    }

    /// The peer had no receive posted [REQ-13].
    fn handle_rnr(&mut self, ctx: &mut TxCtx<'_>, psn: Psn, code: u8) -> Outcome {
        ctx.counters.rnr_naks_received += 1;
        if self.acknowledge(ctx, psn) == Outcome::Failed {
            return Outcome::Failed;
        }
        if psn != self.una {
            self.go_back(ctx);
            return Outcome::Idle;
        }
        if self.rnr_until.is_some() {
            return Outcome::Idle;
        }
        let rnr_retry = self.settings.as_ref().map_or(0, |settings| settings.rnr_retry);
        if rnr_retry != RETRY_SEVEN {
            if self.rnr_left == 0 {
                return self.fail(ctx, Status::RnrRetryExcErr);
            }
            self.rnr_left -= 1;
        }
        self.rnr_until = Some(ctx.now + Duration::from_nanos(rnr_timer_ns(code)));
        self.rto_deadline = None;
        self.probe_at = None;
        self.repair = None;
        self.repaired = None;
        self.packets_since_ack_req = 0;
        // What is sent again is not timed.
        self.rtt_sample = None;
        // The peer lives.
        self.progress_at = ctx.now;
        self.seek_una();
        Outcome::Idle
    }

    fn handle_read(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) -> Outcome {
        let mtu = self.settings.as_ref().map_or(0, |settings| settings.mtu);
        let Some(head) = self.queue.front() else { return Outcome::Idle };
        if head.is_started() && head.has_empty_response() {
            return self.handle_empty_response(ctx, packet);
        }
        if !head.is_started() || !head.is_read() {
            return self.fail(ctx, Status::BadRespErr);
        }
        let received = self.una.since(head.first);
        let offset = received * mtu as u32;
        let left = (head.len - offset.min(head.len)) as usize;
        // Where an answer begins and ends depends on how the read was asked for, the last time and
        // those before, so of the opcode nothing is certain but that the end ends.
        let done = left <= mtu;
        let ends = matches!(packet.opcode, Opcode::ReadResponseLast | Opcode::ReadResponseOnly);
        if done && !ends || packet.payload.len() != left.min(mtu) {
            return self.fail(ctx, Status::BadRespErr);
        }
        if self.queue.scatter(0, ctx.mrs, ctx.pd, offset, packet.payload).is_err() {
            return self.fail(ctx, Status::LocProtErr);
        }
        self.una = self.una.next();
        if done {
            self.complete_head(ctx);
        }
        self.progress(ctx, 1);
        if self.out_of_order.is_empty() {
            self.finish_head(ctx)
        } else {
            self.drain_out_of_order(ctx)
        }
    }

    /// The READ whose answers come next, and how many bytes of it have come.
    fn current_read(&self) -> Option<(&Request, u32)> {
        let head = self.queue.front()?;
        let mtu = self.settings.as_ref()?.mtu as u32;
        let reads =
            head.is_started() && head.is_read() && self.una.is_within(head.first, head.packets);
        reads.then(|| (head, (self.una.since(head.first) * mtu).min(head.len)))
    }

    /// Bytes still to come of the READ whose answers come next.
    pub(crate) fn read_bytes_left(&self) -> usize {
        self.current_read().map_or(0, |(head, come)| (head.len - come) as usize)
    }

    /// The answer that comes next, and where the bytes of it and of those behind it belong, at most
    /// `most` of them: as far as they are full packets of a READ and have been asked for, and
    /// nothing has come out of order.
    pub(crate) fn placement(&self, ctx: &TxCtx<'_>, most: usize) -> Option<(Psn, Piece)> {
        let mtu = self.settings.as_ref()?.mtu;
        let (head, come) = self.current_read().filter(|_| self.out_of_order.is_empty())?;
        // REQ-9: what was never asked for is no answer.
        let asked = self.end.since(self.una) as usize * mtu;
        let bytes = 1..=full_packets((head.len - come) as usize, mtu).min(asked).min(most);
        let span = self.queue.contiguous(0, ctx.mrs, ctx.pd, come, bytes, Access::LOCAL_WRITE)?;
        Some((self.una, span.first_contiguous()?))
    }

    /// Takes the answer that comes next, one in the middle of a READ, whose bytes are where they
    /// belong.
    pub(crate) fn accept_in_place(&mut self, ctx: &mut TxCtx<'_>) {
        ctx.counters.responses_received += 1;
        self.una = self.una.next();
        self.progress(ctx, 1);
    }

    /// A flush or an atomic write is done: an empty answer says so [HDR-5].
    fn handle_empty_response(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) -> Outcome {
        if packet.opcode != Opcode::ReadResponseOnly || !packet.payload.is_empty() {
            return self.fail(ctx, Status::BadRespErr);
        }
        self.una = self.una.next();
        self.complete_head(ctx);
        self.progress(ctx, 1);
        self.finish_head(ctx)
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
        self.una = self.una.next();
        self.complete_head(ctx);
        self.progress(ctx, 1);
        if self.out_of_order.is_empty() {
            self.finish_head(ctx)
        } else {
            self.drain_out_of_order(ctx)
        }
    }

    /// Everything before `upto` has arrived: completes sends and writes. Reads and atomics are
    /// completed by their answers alone, and hold up what is behind them [REQ-9 b].
    pub(super) fn acknowledge(&mut self, ctx: &mut TxCtx<'_>, upto: Psn) -> Outcome {
        let before = self.una;
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
                if upto.is_after(self.una) {
                    self.una = upto;
                }
                break;
            }
            self.una = end;
            self.complete_head(ctx);
        }
        let steps = self.una.since(before);
        if steps > 0 {
            self.progress(ctx, steps);
        }
        self.finish_head(ctx)
    }
}
