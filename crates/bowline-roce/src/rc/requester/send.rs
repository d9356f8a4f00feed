//! Conversion of a request to PSNs and packets, and execution of local operations, which have
//! neither.

use bowline_base::Instant;
use bowline_verbs::{FlushOf, Mtu, Remote, SendFlags, SendOp, Status};
use bowline_wire::roce::{AtomicEth, Bth, Opcode, Packet, Psn, Reth};

use super::recovery::Repair;
use super::{Requester, TxCtx};
use crate::burst::{Burst, burst_payload};
use crate::sendq::{Request, Stage};

/// Longest WRITE, in bytes, that is sent as WRITEs of one packet each: two bursts. All these
/// packets have the same headers, while the first packet of a long WRITE is longer than the others,
/// so that a burst ends behind its second packet. A longer WRITE stays one message, because then
/// the peer knows the destination of its later packets and need not copy them [REQ-26]. Programs
/// that post both short and long WRITEs may want to order them accordingly: see `LONG` of
/// `bowline-rtrs`.
const PER_PACKET_MAX: u32 = 2 * burst_payload(Mtu::M4096) as u32;
/// Smallest MTU with per-packet WRITEs; no gain was measured with shorter packets.
const PER_PACKET_MTU_MIN: usize = 2048;

impl Requester {
    /// Executes the local operation at the cursor, exactly once [REQ-20], [MR-8].
    pub(super) fn execute(&mut self, ctx: &mut TxCtx<'_>) {
        let Some(request) = self.queue.get_mut(self.cursor) else { return };
        let result = match &mut request.op {
            SendOp::RegMr { key, pieces, iova, access } => {
                ctx.mrs.bind(ctx.pd, *key, std::mem::take(pieces), *iova, *access)
            }
            SendOp::LocalInv(key) => ctx.mrs.invalidate((ctx.pd, ctx.qpn), *key),
            SendOp::BindMw { key, to } => ctx.mrs.bind_window(ctx.pd, ctx.qpn, *key, to),
            _ => Ok(()),
        };
        if result.is_err() {
            // [MR-6], [MR-7], [QP-7]
            request.stage = Stage::Broken(match request.op {
                SendOp::BindMw { .. } => Status::MwBindErr,
                _ => Status::LocQpOpErr,
            });
            return;
        }
        request.stage = Stage::Started;
        self.cursor += 1;
        self.sent = 0;
    }

    /// Assigns PSNs to the request at the cursor [REQ-3]; tells whether the request can be
    /// executed.
    pub(super) fn begin(&mut self, ctx: &TxCtx<'_>, mtu: usize) -> bool {
        let fits = match self.queue.get(self.cursor) {
            Some(request) if request.is_read() || request.is_atomic() => {
                self.queue.check_scatter(self.cursor, ctx.mrs, ctx.pd).is_ok()
            }
            _ => true,
        };
        let Some(request) = self.queue.get_mut(self.cursor) else { return false };
        if !fits {
            request.stage = Stage::Broken(Status::LocProtErr);
            self.request_ack_before_broken();
            return false;
        }
        request.first = self.end;
        request.packets = if request.is_atomic() || request.has_empty_response() {
            1
        } else {
            (request.len as usize).div_ceil(mtu).max(1) as u32
        };
        // Not for WRITEs with an immediate: the peer's program is told the length of the whole
        // message.
        let is_write = matches!(request.op, SendOp::Write(_));
        request.per_packet =
            is_write && ctx.gso && mtu >= PER_PACKET_MTU_MIN && request.len <= PER_PACKET_MAX;
        request.stage = Stage::Started;
        self.sent = 0;
        if request.is_read_or_atomic() {
            self.reads_outstanding += 1;
        }
        true
    }

    /// Makes sure that the requests before a broken one at the cursor get acknowledged: the broken
    /// request is not sent, and fails only after them. They may have relied on it to request the
    /// acknowledgement [REQ-25].
    fn request_ack_before_broken(&mut self) {
        if self.una != self.end && self.packets_since_ack_req > 0 {
            // A retransmission that is due already requests an acknowledgement as well.
            self.repair.get_or_insert(Repair::Probe);
            self.rtt_sample = None;
        }
    }

    /// Appends the packet with PSN `next`; returns `false` if its bytes are not accessible
    /// [REQ-16]. A packet sent `alone` requests an acknowledgement.
    pub(super) fn append(
        &mut self,
        ctx: &mut TxCtx<'_>,
        mtu: usize,
        alone: bool,
        out: &mut Burst,
    ) -> bool {
        let Some(request) = self.queue.get(self.cursor) else { return false };
        let psn = self.next;
        let (sent, packets) = (self.sent, request.packets);
        let offset = sent * mtu as u32;
        let left = request.len - offset.min(request.len);
        let one_packet = request.is_read_or_atomic();
        // A long READ is requested in parts, as several READs, since the answers come as fast as
        // the peer can send them [REQ-6]. The boundaries of the parts stay the same, since the peer
        // matches a repeated request against the original one [RSP-3].
        let part = self.read_part - sent % self.read_part;
        // Answers that have arrived already are not requested.
        let most = if alone { part.min(self.leading_gap()) } else { part };
        let steps = if one_packet { (packets - sent).min(most) } else { 1 };
        let last = sent + steps == packets;
        // REQ-8, REQ-25: an acknowledgement is requested at the end of a message that the program
        // waits for or that no other follows, and often enough that the window cannot stall.
        let filling = psn.since(self.una) + 1 >= self.window;
        let awaited = self.signal_all
            || request.flags.contains(SendFlags::SIGNALED)
            || self.sqd
            || self.queue.get(self.cursor + 1).is_none_or(Request::is_local);
        let ask = alone
            || last && awaited
            || one_packet
            || filling
            || self.packets_since_ack_req + 1 >= self.ack_req_interval();
        let opcode =
            opcode(&request.op, sent == 0 || request.per_packet, last || request.per_packet);
        let body = (left as usize).min(mtu);
        let ends_send = last
            && matches!(
                request.op,
                SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) | SendOp::WriteImm(..)
            );
        let bth = Bth {
            // REQ-14
            solicited: ends_send && request.flags.contains(SendFlags::SOLICITED),
            dest_qpn: ctx.dest_qpn.0,
            ack_req: ask,
            psn,
            ..Bth::default()
        };
        let mut packet = Packet::new(opcode, bth);
        let reth = |remote: &Remote, skip: u32, len| Reth {
            va: remote.addr.wrapping_add(u64::from(skip)),
            rkey: remote.rkey,
            len,
        };
        match &request.op {
            SendOp::SendImm(imm) => packet.imm = Some(*imm),
            // REQ-17
            SendOp::SendInv(key) => packet.ieth = Some(*key),
            SendOp::Write(remote) if request.per_packet => {
                packet.reth = Some(reth(remote, offset, body as u32));
            }
            SendOp::Write(remote) => packet.reth = Some(reth(remote, 0, request.len)),
            SendOp::WriteImm(remote, imm) => {
                packet.reth = Some(reth(remote, 0, request.len));
                packet.imm = Some(*imm);
            }
            // REQ-11: after a loss, only the missing part.
            SendOp::Read(remote) => {
                let len = if last { left } else { steps * mtu as u32 };
                packet.reth = Some(reth(remote, offset, len));
            }
            SendOp::CompareSwap { remote, compare, swap } => {
                packet.atomic = Some(AtomicEth {
                    va: remote.addr,
                    rkey: remote.rkey,
                    swap_or_add: *swap,
                    compare: *compare,
                });
            }
            SendOp::FetchAdd { remote, add } => {
                packet.atomic = Some(AtomicEth {
                    va: remote.addr,
                    rkey: remote.rkey,
                    swap_or_add: *add,
                    compare: 0,
                });
            }
            SendOp::AtomicWrite(remote) => packet.reth = Some(reth(remote, 0, request.len)),
            SendOp::Flush { remote, of, placement } => {
                // HDR-2: a range, or the whole region.
                let (level, len) = match of {
                    FlushOf::Range(len) => (0, *len),
                    FlushOf::Region => (1, 0),
                };
                packet.feth = Some(level << 4 | u32::from(placement.bits()));
                packet.reth = Some(reth(remote, 0, len));
            }
            _ => {}
        }
        let take = match request.op {
            SendOp::AtomicWrite(_) => left as usize,
            _ if one_packet => 0,
            _ => body,
        };
        let gathered = out.push(&packet, take, |out| {
            self.queue.gather(self.cursor, ctx.mrs, ctx.pd, offset, take, out).is_ok()
        });
        if !gathered {
            if let Some(request) = self.queue.get_mut(self.cursor) {
                request.stage = Stage::Broken(Status::LocProtErr);
            }
            self.request_ack_before_broken();
            return false;
        }

        let fresh = !psn.is_before(self.end);
        if !fresh {
            ctx.counters.packets_resent += 1;
        }
        self.note_sent(ctx.now, psn + steps);
        self.packets_since_ack_req = if ask { 0 } else { self.packets_since_ack_req + 1 };
        self.next += steps;
        self.window_closed = self.next.since(self.una) >= self.window;
        if fresh && one_packet {
            self.expected_answers.push_back(self.next);
        }
        if fresh && ask && self.rtt_sample.is_none() {
            self.rtt_sample = Some((psn, ctx.now));
        }
        if last {
            self.cursor += 1;
            self.sent = 0;
        } else {
            self.sent += steps;
        }
        // Prefetches the first bytes of the next packet before they are copied.
        self.queue.prefetch(self.cursor, ctx.mrs, ctx.pd, self.sent * mtu as u32, mtu);
        true
    }
}

impl Requester {
    /// Notes that a packet is sent now, up to the PSN `upto`.
    pub(super) fn note_sent(&mut self, now: Instant, upto: Psn) {
        if self.una == self.end {
            self.progress_at = now;
        }
        if upto.is_after(self.end) {
            self.end = upto;
        }
        if self.rto_deadline.is_none() {
            self.arm_rto(now);
        }
    }

    /// Returns the most packets between two requests for an acknowledgement.
    pub(super) fn ack_req_interval(&self) -> u32 {
        (self.window / 3).max(1)
    }

    /// Notes the end of a burst of `count` packets. If the window has no room for another such
    /// burst, that burst waits: the requests for the acknowledgements it needs are already under
    /// way, and a burst of a few packets costs nearly as much as a full one.
    pub(crate) fn end_burst(&mut self, count: usize) {
        let room = self.window.saturating_sub(self.next.since(self.una));
        if room < (count as u32).min(self.window / 4) {
            self.window_closed = true;
        }
    }
}

/// Opcode of a packet [HDR-5], [REQ-2].
pub(super) const fn opcode(op: &SendOp, first: bool, last: bool) -> Opcode {
    match (op, first, last) {
        (SendOp::Write(_) | SendOp::WriteImm(..), true, false) => Opcode::WriteFirst,
        (SendOp::Write(_) | SendOp::WriteImm(..), false, false) => Opcode::WriteMiddle,
        (SendOp::Write(_), false, true) => Opcode::WriteLast,
        (SendOp::Write(_), true, true) => Opcode::WriteOnly,
        (SendOp::WriteImm(..), false, true) => Opcode::WriteLastImm,
        (SendOp::WriteImm(..), true, true) => Opcode::WriteOnlyImm,
        (SendOp::Read(_), ..) => Opcode::ReadRequest,
        (SendOp::CompareSwap { .. }, ..) => Opcode::CompareSwap,
        (SendOp::FetchAdd { .. }, ..) => Opcode::FetchAdd,
        (SendOp::AtomicWrite(_), ..) => Opcode::AtomicWrite,
        (SendOp::Flush { .. }, ..) => Opcode::Flush,
        (SendOp::SendImm(_), false, true) => Opcode::SendLastImm,
        (SendOp::SendImm(_), true, true) => Opcode::SendOnlyImm,
        (SendOp::SendInv(_), false, true) => Opcode::SendLastInvalidate,
        (SendOp::SendInv(_), true, true) => Opcode::SendOnlyInvalidate,
        (_, true, false) => Opcode::SendFirst,
        (_, false, false) => Opcode::SendMiddle,
        (_, false, true) => Opcode::SendLast,
        (_, true, true) => Opcode::SendOnly,
    }
}
