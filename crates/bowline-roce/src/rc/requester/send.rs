//! Conversion of a request to PSNs and packets, and execution of local operations, which have
//! neither.

use bowline_verbs::{FlushOf, Mtu, Remote, SendFlags, SendOp, Status};
use bowline_wire::roce::{AtomicEth, Bth, ICRC_LEN, Opcode, Packet, Psn, Reth};

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

/// Where a packet stands among those that are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The next one.
    InOrder,
    /// Retransmitted alone: the packet requests an acknowledgement, and others do not follow it.
    Alone,
    /// One of those that the peer has reported missing; the last of a hole requests an
    /// acknowledgement.
    InHole { last: bool },
}

/// What of a request goes into its next packet.
#[derive(Clone, Copy, Debug)]
struct Part {
    psn: Psn,
    /// Number of PSNs, more than 1 only for a READ.
    psns: u32,
    /// Bytes of the message before this packet, and from there on.
    offset: u32,
    left: u32,
    /// The packet is the first or the last of the request.
    first: bool,
    last: bool,
    ack_req: bool,
    is_read: bool,
}

impl Requester {
    /// Executes the local operation at the cursor, exactly once [REQ-20], [MR-8].
    pub(super) fn execute(&mut self, ctx: &mut TxCtx<'_>) {
        let Some(request) = self.queue.get_mut(self.cursor.index()) else { return };
        match execute_local(ctx, &mut request.op) {
            Ok(()) => {
                request.stage = Stage::Started;
                self.cursor.advance_request();
            }
            Err(status) => request.stage = Stage::Broken(status),
        }
    }

    /// Assigns PSNs to the request at the cursor [REQ-3]; tells whether the request can be
    /// executed.
    pub(super) fn begin(&mut self, ctx: &TxCtx<'_>, mtu: usize) -> bool {
        let index = self.cursor.index();
        let fits = match self.queue.get(index) {
            Some(request) if request.is_read() || request.is_atomic() => {
                self.queue.check_scatter(index, ctx.mrs, ctx.pd).is_ok()
            }
            _ => true,
        };
        let Some(request) = self.queue.get_mut(index) else { return false };
        if !fits {
            request.stage = Stage::Broken(Status::LocProtErr);
            self.request_ack_before_broken();
            return false;
        }
        request.first = self.window.end();
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
        debug_assert_eq!(self.cursor.sent(), 0);
        if request.is_read_or_atomic() {
            self.window.begin_read();
        }
        true
    }

    /// Makes sure that the requests before a broken one at the cursor get acknowledged: the broken
    /// request is not sent, and fails only after them. They may have relied on it to request the
    /// acknowledgement [REQ-25].
    fn request_ack_before_broken(&mut self) {
        if self.window.lacks_ack_req() {
            self.recovery.request_probe();
            self.timer.cancel_measurement();
        }
    }

    /// Appends the packet at the cursor; returns `false` if its bytes are not accessible [REQ-16].
    pub(super) fn append(
        &mut self,
        ctx: &mut TxCtx<'_>,
        mtu: usize,
        place: Place,
        out: &mut Burst,
    ) -> bool {
        let index = self.cursor.index();
        let Some(request) = self.queue.get(index) else { return false };
        let (fills, short) = (ctx.path.fills(mtu), ctx.path.read_part());
        let part = self.next_part(request, mtu, place, fills, short);
        let packet = make_packet(request, &part, mtu, ctx.dest_qpn.0);
        let take = match request.op {
            SendOp::AtomicWrite(_) => part.left as usize,
            _ if request.is_read_or_atomic() => 0,
            _ => (part.left as usize).min(mtu),
        };
        let expects_answer = request.is_read_or_atomic();
        let start = out.bytes.len();
        let gathered = out.push(&packet, take, |out| {
            self.queue.gather(index, ctx.mrs, ctx.pd, part.offset, take, out).is_ok()
        });
        if !gathered {
            if let Some(request) = self.queue.get_mut(index) {
                request.stage = Stage::Broken(Status::LocProtErr);
            }
            self.request_ack_before_broken();
            return false;
        }
        let bytes = out.bytes.len() - start + ICRC_LEN;
        self.note_part_sent(ctx, &part, place, expects_answer, bytes);
        // Prefetches the first bytes of the next packet before they are copied.
        let offset = self.cursor.sent() * mtu as u32;
        self.queue.prefetch(self.cursor.index(), ctx.mrs, ctx.pd, offset, mtu);
        true
    }

    /// Returns what of the request at the cursor goes into the next packet.
    #[inline]
    fn next_part(
        &self,
        request: &Request,
        mtu: usize,
        place: Place,
        fills: bool,
        short: u32,
    ) -> Part {
        let (psn, sent) = (self.cursor.next(), self.cursor.sent());
        let offset = sent * mtu as u32;
        let one_packet = request.is_read_or_atomic();
        let psns = if one_packet { self.read_psns(request, place, short) } else { 1 };
        let last = sent + psns == request.packets;
        // REQ-8, REQ-25: an acknowledgement is requested at the end of a message that the program
        // waits for or that no other follows, and often enough that the window cannot stall.
        let awaited = self.signal_all
            || request.flags.contains(SendFlags::SIGNALED)
            || self.sqd
            || self.queue.get(self.cursor.index() + 1).is_none_or(Request::is_local);
        let ack_req = matches!(place, Place::Alone | Place::InHole { last: true })
            || last && awaited
            || one_packet
            || fills
            || self.window.needs_ack_req(psn);
        let left = request.len - offset.min(request.len);
        let is_read = request.is_read();
        Part { psn, psns, offset, left, first: sent == 0, last, ack_req, is_read }
    }

    /// Returns the number of PSNs that the next packet of a READ or atomic takes. A long READ is
    /// requested in parts, as several READs, since the answers come as fast as the peer can send
    /// them [REQ-6], and in shorter ones where a short queue is on their way [CC-8]. The parts of a
    /// repeated request stay the same, since the peer matches it against the original one [RSP-3].
    fn read_psns(&self, request: &Request, place: Place, short: u32) -> u32 {
        let (sent, next) = (self.cursor.sent(), self.cursor.next());
        let part = match self.window.part_end(next) {
            Some(end) if next.is_before(self.window.end()) => end.since(next),
            _ => self.window.read_part().min(short),
        };
        let most = match place {
            Place::InOrder | Place::InHole { .. } => part,
            // Answers that have arrived already are not requested.
            Place::Alone => part.min(self.recovery.out_of_order().leading_gap(self.window.una())),
        };
        (request.packets - sent).min(most)
    }

    /// Notes that a packet was appended, and moves the cursor behind it.
    #[inline]
    fn note_part_sent(
        &mut self,
        ctx: &mut TxCtx<'_>,
        part: &Part,
        place: Place,
        expects_answer: bool,
        bytes: usize,
    ) {
        let upto = part.psn + part.psns;
        let fresh = !part.psn.is_before(self.window.end());
        if !fresh {
            ctx.counters.packets_resent += 1;
            ctx.path.resent(1);
        }
        self.note_sent(ctx, upto);
        if part.ack_req {
            self.window.requested_ack();
        }
        if place == Place::InOrder {
            self.window.close_if_full(upto);
            let counted = ctx.path.sent(ctx.now, 1, bytes);
            self.log.sent(ctx.now, part.psn, upto, counted);
            if part.is_read {
                let counted = ctx.path.asked(part.psns);
                self.asked.sent(ctx.now, part.psn, upto, counted);
            }
        } else {
            // It takes the place of the lost one in flight.
            ctx.path.replaced(ctx.now, bytes);
            self.log.sent_again(self.window.end());
        }
        if fresh && expects_answer {
            self.window.expect_answer(upto);
        }
        if fresh && part.ack_req {
            self.timer.measure(part.psn, ctx.now);
        }
        self.cursor.advance(part.psns);
        if part.last {
            self.cursor.advance_request();
        }
    }

    /// Notes that a packet is sent now, up to the PSN `upto`.
    #[inline]
    pub(super) fn note_sent(&mut self, ctx: &TxCtx<'_>, upto: Psn) {
        if self.window.is_empty() {
            self.timer.begin(ctx.now, self.window.end());
            // Others may have measured the path since then.
            self.timer.replace_guess(ctx.now, ctx.path.measured());
        }
        self.window.sent(upto, 1);
        self.timer.sent(ctx.now, self.window.unanswered());
    }

    /// Notes the end of a burst of `count` packets.
    pub(crate) fn end_burst(&mut self, count: usize) {
        self.window.end_burst(self.cursor.next(), count as u32);
    }
}

/// Executes a local operation [MR-8].
pub(crate) fn execute_local(ctx: &mut TxCtx<'_>, op: &mut SendOp) -> Result<(), Status> {
    let result = match op {
        SendOp::RegMr { key, pieces, iova, access } => {
            ctx.mrs.bind(ctx.pd, *key, std::mem::take(pieces), *iova, *access)
        }
        SendOp::LocalInv(key) => ctx.mrs.invalidate((ctx.pd, ctx.qpn), *key),
        SendOp::BindMw { key, to } => ctx.mrs.bind_window(ctx.pd, ctx.qpn, *key, to),
        _ => Ok(()),
    };
    // [MR-6], [MR-7], [QP-7]
    result.map_err(|_| match op {
        SendOp::BindMw { .. } => Status::MwBindErr,
        _ => Status::LocQpOpErr,
    })
}

/// Makes the headers of a packet, from base transport header on.
#[inline]
fn make_packet(request: &Request, part: &Part, mtu: usize, dest_qpn: u32) -> Packet<'static> {
    let ends_send = part.last
        && matches!(
            request.op,
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) | SendOp::WriteImm(..)
        );
    let bth = Bth {
        // REQ-14
        solicited: ends_send && request.flags.contains(SendFlags::SOLICITED),
        dest_qpn,
        ack_req: part.ack_req,
        psn: part.psn,
        ..Bth::default()
    };
    let first = part.first || request.per_packet;
    let last = part.last || request.per_packet;
    let mut packet = Packet::new(opcode(&request.op, first, last), bth);
    add_extended_headers(&mut packet, request, part, mtu);
    packet
}

/// Adds the headers behind the base transport header that the operation needs.
#[inline]
fn add_extended_headers(packet: &mut Packet<'_>, request: &Request, part: &Part, mtu: usize) {
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
            packet.reth = Some(reth(remote, part.offset, part.left.min(mtu as u32)));
        }
        SendOp::Write(remote) => packet.reth = Some(reth(remote, 0, request.len)),
        SendOp::WriteImm(remote, imm) => {
            packet.reth = Some(reth(remote, 0, request.len));
            packet.imm = Some(*imm);
        }
        // REQ-11: after a loss, only the missing part.
        SendOp::Read(remote) => {
            let len = if part.last { part.left } else { part.psns * mtu as u32 };
            packet.reth = Some(reth(remote, part.offset, len));
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
}

/// Opcode of a packet [HDR-5], [REQ-2].
pub(crate) const fn opcode(op: &SendOp, first: bool, last: bool) -> Opcode {
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
