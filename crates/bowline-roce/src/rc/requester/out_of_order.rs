//! Answers to READs and atomics that arrive after a gap: they are stored at their destination, and
//! only the missing answers are requested again [REQ-9 d], [REQ-11].
//!
//! ```text
//!   una 7     out_of_order  9..12  15..16        requested: 7 and 8;  then 12 to 14
//! ```

use bowline_verbs::SendOp;
use bowline_wire::roce::{Aeth, Opcode, Packet, Psn, Syndrome};

use super::recovery::Repair;
use super::{Outcome, Requester, TxCtx};

/// Most ranges of out-of-order answers kept; answers beyond that are requested again.
const RANGES_MAX: usize = 64;

/// Range of PSNs whose answers have arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct PsnRange {
    first: Psn,
    count: u32,
}

impl Requester {
    /// Handles an answer to a PSN after `una`.
    pub(super) fn handle_out_of_order(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        let lowest =
            self.out_of_order.front().map_or(u32::MAX, |front| front.first.since(self.una));
        if self.store_out_of_order(ctx, packet) && psn.since(self.una) < lowest {
            self.request_leading_gap(ctx);
        }
    }

    /// Returns how many answers are missing from `una` on.
    pub(super) fn leading_gap(&self) -> u32 {
        self.out_of_order.front().map_or(u32::MAX, |front| front.first.since(self.una))
    }

    /// Requests the answers of the first gap again.
    fn request_leading_gap(&mut self, ctx: &mut TxCtx<'_>) {
        if self.rnr_until.is_some() || !self.next.is_after(self.una) {
            return;
        }
        ctx.counters.repairs += 1;
        self.repair = Some(Repair::Gap);
        self.rtt_sample = None;
        self.arm_rto(ctx.now);
    }

    /// Stores an out-of-order answer; tells whether it was new.
    fn store_out_of_order(&mut self, ctx: &TxCtx<'_>, packet: &Packet<'_>) -> bool {
        let psn = packet.bth.psn;
        let far = psn.since(self.una);
        // Index of the range after the one that contains or precedes the answer.
        let at = self.out_of_order.partition_point(|stretch| stretch.first.since(self.una) <= far);
        let before = at.checked_sub(1).and_then(|before| self.out_of_order.get(before)).copied();
        let skip = before.map_or(u32::MAX, |stretch| psn.since(stretch.first));
        let extends = before.is_some_and(|stretch| skip == stretch.count);
        if before.is_some_and(|stretch| skip < stretch.count)
            || !extends && self.out_of_order.len() >= RANGES_MAX
            || !self.scatter_out_of_order(ctx, packet)
        {
            return false;
        }
        if extends {
            self.out_of_order[at - 1].count += 1;
        } else {
            self.out_of_order.insert(at, PsnRange { first: psn, count: 1 });
        }
        true
    }

    fn scatter_out_of_order(&self, ctx: &TxCtx<'_>, packet: &Packet<'_>) -> bool {
        let psn = packet.bth.psn;
        let good =
            |aeth: Option<Aeth>| aeth.is_some_and(|aeth| matches!(aeth.syndrome, Syndrome::Ack(_)));
        if packet.opcode != Opcode::ReadResponseMiddle && !good(packet.aeth) {
            return false;
        }
        let mtu = self.settings.as_ref().map_or(0, |settings| settings.mtu);
        let found = self.queue.iter().position(|request| {
            request.is_started()
                && !request.is_local()
                && psn.is_within(request.first, request.packets)
        });
        let Some((index, request)) = found.and_then(|at| Some((at, self.queue.get(at)?))) else {
            return false;
        };
        match (&request.op, packet.atomic_ack) {
            (SendOp::Read(_), None) => {
                let offset = psn.since(request.first) * mtu as u32;
                let left = (request.len - offset.min(request.len)) as usize;
                packet.payload.len() == left.min(mtu)
                    && self.queue.scatter(index, ctx.mrs, ctx.pd, offset, packet.payload).is_ok()
            }
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Some(ack)) => {
                let bytes = ack.original.to_ne_bytes();
                self.queue.scatter(index, ctx.mrs, ctx.pd, 0, &bytes).is_ok()
            }
            _ => false,
        }
    }

    /// Advances `una` over out-of-order answers after a gap was filled, and requests the next gap.
    pub(super) fn drain_out_of_order(&mut self, ctx: &mut TxCtx<'_>) -> Outcome {
        let mut moved = false;
        while let Some(front) = self.out_of_order.front().copied() {
            if self.acknowledge(ctx, front.first) == Outcome::Failed {
                return Outcome::Failed;
            }
            if self.una.is_before(front.first) {
                break;
            }
            let skip = self.una.since(front.first);
            if skip >= front.count {
                self.out_of_order.pop_front();
                continue;
            }
            let Some(head) = self.queue.front() else { break };
            if !head.is_started() || !head.is_read_or_atomic() {
                break;
            }
            let end = head.first + head.packets;
            let steps = (front.count - skip).min(end.since(self.una));
            self.una += steps;
            moved = true;
            if self.una == end {
                self.complete_head(ctx);
            }
            self.progress(ctx, steps);
        }
        if moved && !self.out_of_order.is_empty() {
            self.request_leading_gap(ctx);
        }
        self.finish_head(ctx)
    }
}
