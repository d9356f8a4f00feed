//! Answers to READs and atomics that arrive after a gap: they are stored at their destination, and
//! only the missing answers are requested again [REQ-9 d], [REQ-11].
//!
//! ```text
//!   una 7     ranges  9..12  15..16        requested: 7 and 8;  then 12 to 14
//! ```

use std::collections::VecDeque;

use bowline_verbs::SendOp;
use bowline_wire::roce::{Packet, Psn};

use super::answers::has_ack_syndrome;
use super::recovery::Repair;
use super::{Outcome, Requester, TxCtx};

/// Most ranges of out-of-order answers kept; answers beyond that are requested again.
const RANGES_MAX: usize = 64;

/// Range of PSNs whose answers have arrived.
#[derive(Clone, Copy, Debug)]
struct PsnRange {
    first: Psn,
    count: u32,
}

/// Place for one more answer.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// At the end of the range with this index.
    Extends(usize),
    /// As a range of its own, with this index.
    New(usize),
}

/// PSNs of answers received after a gap, in order.
#[derive(Debug)]
pub(super) struct OutOfOrderAnswers {
    ranges: VecDeque<PsnRange>,
}

impl OutOfOrderAnswers {
    pub(super) const fn new() -> Self {
        Self { ranges: VecDeque::new() }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Returns how many answers are missing from `una` on; `u32::MAX` if none has arrived.
    pub(super) fn leading_gap(&self, una: Psn) -> u32 {
        self.ranges.front().map_or(u32::MAX, |front| front.first.since(una))
    }

    /// Returns the place for the answer `psn`, unless it has arrived before or there are too many
    /// ranges.
    fn slot(&self, una: Psn, psn: Psn) -> Option<Slot> {
        let far = psn.since(una);
        // Index of the range after the one that contains or precedes the answer.
        let at = self.ranges.partition_point(|range| range.first.since(una) <= far);
        if let Some(before) = at.checked_sub(1)
            && let Some(range) = self.ranges.get(before)
        {
            let skip = psn.since(range.first);
            if skip <= range.count {
                return (skip == range.count).then_some(Slot::Extends(before));
            }
        }
        (self.ranges.len() < RANGES_MAX).then_some(Slot::New(at))
    }

    /// Notes that the answer `psn` is stored.
    fn insert(&mut self, slot: Slot, psn: Psn) {
        match slot {
            Slot::Extends(index) => self.ranges[index].count += 1,
            Slot::New(index) => self.ranges.insert(index, PsnRange { first: psn, count: 1 }),
        }
    }
}

impl Requester {
    /// Handles an answer to a PSN after `una`.
    pub(super) fn handle_out_of_order(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) {
        let (psn, una) = (packet.bth.psn, self.window.una());
        let lowest = self.recovery.out_of_order().leading_gap(una);
        if self.store_out_of_order(ctx, packet) && psn.since(una) < lowest {
            self.request_leading_gap(ctx);
        }
    }

    /// Requests the answers of the first gap again.
    fn request_leading_gap(&mut self, ctx: &mut TxCtx<'_>) {
        if self.recovery.is_paused() || !self.cursor.next().is_after(self.window.una()) {
            return;
        }
        ctx.counters.repairs += 1;
        // An answer that was asked for again is lost again.
        let asked_at = self.asked.sent_at(self.window.una()).max(self.resent_at);
        ctx.path.answer_lost(ctx.now, asked_at.unwrap_or(ctx.now));
        self.asked.sent_again(self.window.end());
        self.recovery.request_repair(Repair::Gap);
        self.timer.cancel_measurement();
        self.timer.arm(ctx.now, self.window.unanswered());
    }

    /// Stores an out-of-order answer; tells whether it was new.
    fn store_out_of_order(&mut self, ctx: &TxCtx<'_>, packet: &Packet<'_>) -> bool {
        let psn = packet.bth.psn;
        let Some(slot) = self.recovery.out_of_order().slot(self.window.una(), psn) else {
            return false;
        };
        if !self.scatter_out_of_order(ctx, packet) {
            return false;
        }
        self.recovery.out_of_order_mut().insert(slot, psn);
        true
    }

    fn scatter_out_of_order(&self, ctx: &TxCtx<'_>, packet: &Packet<'_>) -> bool {
        let psn = packet.bth.psn;
        if !has_ack_syndrome(packet) {
            return false;
        }
        let mtu = self.mtu.unwrap_or_default();
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
        while let Some(front) = self.recovery.out_of_order().ranges.front().copied() {
            if self.acknowledge(ctx, front.first) == Outcome::Failed {
                return Outcome::Failed;
            }
            let una = self.window.una();
            if una.is_before(front.first) {
                break;
            }
            let skip = una.since(front.first);
            if skip >= front.count {
                self.recovery.out_of_order_mut().ranges.pop_front();
                continue;
            }
            let Some(head) = self.queue.front() else { break };
            if !head.is_started() || !head.is_read_or_atomic() {
                break;
            }
            let end = head.first + head.packets;
            let steps = (front.count - skip).min(end.since(una));
            moved = true;
            if una + steps == end {
                self.complete_head(ctx);
            }
            self.progress(ctx, una + steps);
        }
        if moved && !self.recovery.out_of_order().is_empty() {
            self.request_leading_gap(ctx);
        }
        self.finish_head(ctx)
    }
}
