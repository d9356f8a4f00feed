//! The responder of a reliable connection: handles request packets in order, executes them, and
//! queues the responses.
//!
//! ```text
//!   packet ── before expected ──> answered again [RSP-3]
//!          ── after expected ───> one NAK, then silence [RSP-2]; kept until its turn
//!          ── expected ─────────> sequence, rights, receive, length, key, execute [RSP-1]
//!                                   │ no receive: RNR NAK, expected again [RSP-12]
//!                                   │ fault: NAK; nothing is taken from now on [RSP-18]
//!                                   └ done: acknowledged if asked [RSP-16]
//! ```
//!
//! The peer is not trusted: a packet is checked before it has any effect, and its memory access is
//! checked for every packet. A key that is invalidated or deregistered between two packets of a
//! message is therefore useless for the second [MR-11], [MR-13].

mod flush;
mod reorder;
mod replies;
#[cfg(test)]
mod tests;

use bowline_verbs::{Access, Completion, CqId, Error, PdId, Piece, Qpn, RecvWr, Status, WcOpcode};
use bowline_wire::roce::{AtomicEth, NakCode, Opcode, Packet, Psn, Syndrome};

pub(crate) use self::reorder::ReorderBudget;
use self::reorder::{Kept, ReorderBuffer};
use self::replies::{Filled, ReadPart, Replies};
use crate::burst::Burst;
use crate::counters::Counters;
use crate::cq::PendingCompletion;
use crate::incoming_write::IncomingWrite;
use crate::mr::MrTable;
use crate::recvq::{ActiveRecv, MESSAGE_MAX, PlaceError, RecvQueue};
use bowline_base::Instant;

/// Context of a call of the responder.
#[derive(Debug)]
pub(crate) struct RxCtx<'a> {
    pub(crate) now: Instant,
    pub(crate) mrs: &'a mut MrTable,
    pub(crate) pd: PdId,
    /// Rights of the peer on this queue pair [RSP-5].
    pub(crate) access: Access,
    /// Payload bytes of a full packet.
    pub(crate) mtu: usize,
    /// This queue pair.
    pub(crate) qpn: Qpn,
    pub(crate) counters: &'a mut Counters,
    /// Memory budget of all queue pairs for packets that arrived after a gap.
    pub(crate) reorder_budget: &'a ReorderBudget,
    /// The receives of a queue pair that shares them, and the domain of their memory [SRQ-3].
    pub(crate) shared_receives: Option<&'a mut RecvQueue>,
    pub(crate) recv_pd: PdId,
    /// Completion queue of receives.
    pub(crate) cq: CqId,
    /// Completed receives, to be moved to their queues.
    pub(crate) done: &'a mut Vec<PendingCompletion>,
}

impl RxCtx<'_> {
    /// Returns the queue that receives are taken from: the shared one, or else the queue pair's own
    /// [SRQ-2].
    pub(crate) fn receives<'b>(&'b mut self, own: &'b mut RecvQueue) -> &'b mut RecvQueue {
        match &mut self.shared_receives {
            Some(shared) => shared,
            None => own,
        }
    }

    /// The completion is built in place. A copy of data that was just written in pieces waits until
    /// all earlier stores have left the store buffer, including those to the memory of the message.
    #[inline]
    fn complete(&mut self, id: u64, status: Status, completion: Completion, solicited: bool) {
        let completion = Completion { wr_id: id, status, qpn: self.qpn, ..completion };
        self.done.push(PendingCompletion { cq: self.cq, completion, wakes: solicited });
    }
}

/// What happens to the queue pair after a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacketOutcome {
    /// The queue pair continues.
    Continue,
    /// The queue pair goes to ERR as soon as its queued replies have been sent [RSP-18].
    Fatal,
}

/// Why a packet is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// No receive is posted [RSP-12]. The only fault that does not end the connection.
    NotReady,
    /// Not a request this queue pair accepts [RSP-4], [RSP-5], [RSP-9].
    Invalid,
    /// More bytes than the receive has room for [RSP-9].
    TooLong,
    /// The remote key does not allow the access [RSP-10].
    Access,
    /// The local key of the receive does not allow the access [MR-4].
    LocalKey,
    /// The key of a SEND with invalidate cannot be invalidated; the message itself has been
    /// executed [RSP-18].
    Invalidate,
}

/// The message of which more packets are expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    None,
    Send,
    Write(IncomingWrite),
}

/// The receiving half of a reliable connection.
#[derive(Debug)]
pub(crate) struct Responder {
    posted: RecvQueue,
    /// The receive of the current message; valid if `has_recv`.
    recv: ActiveRecv,
    has_recv: bool,
    message: Message,
    /// The expected PSN.
    expected: Psn,
    /// The last executed packet that was no READ request [RSP-3].
    executed: Psn,
    /// Messages completed, 24 bits [RSP-15].
    msn: u32,
    /// A NAK was sent for the expected packet [RSP-2], [RSP-12].
    nak_sent: bool,
    /// The expected packet found no receive [RSP-12].
    not_ready: bool,
    /// Packets that arrived after a gap.
    reorder: ReorderBuffer,
    rnr_timer: u8,
    failed: bool,
    /// The peer takes reports of gaps.
    reports_gaps: bool,
    /// Gaps before this PSN have been reported.
    reported: Psn,
    replies: Replies,
}

impl Responder {
    /// Makes a responder without receives that expects no packet yet.
    pub(crate) fn new() -> Self {
        Self {
            posted: RecvQueue::default(),
            recv: ActiveRecv::default(),
            has_recv: false,
            message: Message::None,
            expected: Psn::ZERO,
            executed: Psn::ZERO,
            msn: 0,
            nak_sent: false,
            not_ready: false,
            reorder: ReorderBuffer::default(),
            rnr_timer: 0,
            failed: false,
            reports_gaps: false,
            reported: Psn::ZERO,
            replies: Replies::default(),
        }
    }

    /// Starts to accept packets from `rq_psn` on, when the queue pair goes to RTR. Posted receives
    /// stay. `max_dest_rd_atomic`, rounded up to a power of two since a peer may do the same
    /// [QP-5], is the number of READs and atomics that are answered concurrently and saved.
    pub(crate) fn start(&mut self, rq_psn: u32, max_dest_rd_atomic: u8, min_rnr_timer: u8) {
        self.message = Message::None;
        self.has_recv = false;
        self.expected = Psn::new(rq_psn);
        self.executed = self.expected.previous();
        self.msn = 0;
        self.nak_sent = false;
        self.not_ready = false;
        self.reported = self.expected;
        self.reorder.clear();
        self.rnr_timer = min_rnr_timer & 0x1f;
        self.failed = false;
        self.replies.reset(answer_slots(max_dest_rd_atomic));
    }

    /// Changes the number of READs and atomics that are answered concurrently. Surplus saved
    /// answers are dropped, the oldest first [QP-1].
    pub(crate) fn set_depth(&mut self, max_dest_rd_atomic: u8) {
        self.replies.resize(answer_slots(max_dest_rd_atomic));
    }

    /// Reports gaps to the peer, which takes such reports [CC-10].
    pub(crate) const fn report_gaps(&mut self) {
        self.reports_gaps = true;
    }

    /// Changes the delay requested by RNR NAKs [RSP-13].
    pub(crate) fn set_rnr_timer(&mut self, min_rnr_timer: u8) {
        self.rnr_timer = min_rnr_timer & 0x1f;
    }

    /// Posts a receive, if fewer than `max` are posted.
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>, max: usize) -> Result<(), Error> {
        self.posted.post(wr, max)
    }

    /// Completes all posted receives with [`Status::WrFlushErr`], in order, and drops the queued
    /// replies, when the queue pair goes to ERR [QP-4].
    pub(crate) fn flush(&mut self, ctx: &mut RxCtx<'_>) {
        self.failed = true;
        self.message = Message::None;
        self.reorder.clear();
        self.replies.clear();
        let flushed = Completion { opcode: WcOpcode::Recv, ..Completion::default() };
        if std::mem::take(&mut self.has_recv) {
            ctx.complete(self.recv.id(), Status::WrFlushErr, flushed, true);
        }
        while let Some(id) = self.posted.take_id() {
            ctx.complete(id, Status::WrFlushErr, flushed, true);
        }
    }

    /// Tells whether a fault has ended the connection: the queue pair goes to ERR as soon as
    /// [`has_reply`](Self::has_reply) is false [RSP-18].
    pub(crate) const fn failed(&self) -> bool {
        self.failed
    }

    /// Tells whether [`fill_reply`](Self::fill_reply) has a packet.
    pub(crate) fn has_reply(&self) -> bool {
        !self.replies.is_empty()
    }

    /// Tells whether an acknowledgement is all that [`fill_reply`](Self::fill_reply) would append.
    pub(crate) fn has_one_ack(&self) -> bool {
        self.replies.is_one_ack()
    }

    /// Appends the next reply to `out`, one packet from base transport header to pad; tells whether
    /// there was one. [`failed`](Self::failed) may become true during the call.
    pub(crate) fn fill_reply(
        &mut self,
        ctx: &mut RxCtx<'_>,
        dest_qpn: Qpn,
        out: &mut Burst,
    ) -> bool {
        let filled = self.replies.fill(ctx, dest_qpn.0, out);
        if filled == Filled::Revoked {
            self.fail(ctx, Fault::Access);
        }
        filled != Filled::Nothing
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.replies.poll_timeout()
    }

    /// Repeats the last acknowledgement when it is time [RSP-24].
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        self.replies.handle_timeout(now);
    }

    /// Returns how many bytes of the current WRITE are still missing.
    pub(crate) const fn write_bytes_left(&self) -> usize {
        match self.message {
            Message::Write(write) => write.left(),
            Message::None | Message::Send => 0,
        }
    }

    /// Returns the expected PSN, and the destination of its payload and of those behind it, up to
    /// `most` bytes. Covers only full packets of the current WRITE, and only while no packet is out
    /// of order.
    pub(crate) fn placement(&self, ctx: &RxCtx<'_>, most: usize) -> Option<(Psn, Piece)> {
        let Message::Write(write) = self.message else { return None };
        if self.failed || !self.reorder.is_empty() || !ctx.access.contains(Access::REMOTE_WRITE) {
            return None;
        }
        let len = full_packets(write.left(), ctx.mtu).min(most) as u64;
        Some((self.expected, write.placement(ctx, len)?))
    }

    /// Accepts the expected packet, a middle packet of a WRITE whose payload is already in place.
    pub(crate) fn accept_in_place(&mut self, ctx: &RxCtx<'_>, ack_req: bool) {
        if let Message::Write(write) = &mut self.message {
            *write = write.without(ctx.mtu);
        }
        self.clear_nak();
        self.advance(ack_req);
    }

    /// Handles a request packet of the peer.
    pub(crate) fn handle(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> PacketOutcome {
        let expected = self.expected;
        let after = self.handle_packet(ctx, packet);
        if self.reorder.is_empty() || self.expected == expected {
            return after;
        }
        self.drain_reorder(ctx, after)
    }

    /// Executes the kept packets up to the next gap, after a missing packet has arrived. The next
    /// gap is reported by a NAK as if these packets had arrived only now [RSP-2].
    fn drain_reorder(&mut self, ctx: &mut RxCtx<'_>, mut after: PacketOutcome) -> PacketOutcome {
        while after == PacketOutcome::Continue
            && let Some(bytes) = self.reorder.take(self.expected)
        {
            if let Ok(packet) = Packet::parse(&bytes) {
                ctx.counters.requests_replayed += 1;
                after = self.handle_packet(ctx, &packet);
            }
            self.reorder.recycle(bytes);
        }
        if after == PacketOutcome::Fatal {
            return after;
        }
        // Acknowledges the last executed packet, for a peer that probed with the missing packet.
        if !self.not_ready && self.executed.next() == self.expected {
            self.replies.forget_gap();
            self.replies.ack(self.executed, self.msn);
        }
        if !self.reorder.is_empty() {
            self.nak_gap();
            self.report_new_gaps();
        }
        after
    }

    /// Reports gaps that were not reported, as many as replies are queued at once [CC-10].
    fn report_new_gaps(&mut self) {
        if !self.reports_gaps || self.reorder.is_empty() {
            return;
        }
        if self.reported.is_before(self.expected) {
            self.reported = self.expected;
        }
        while self.replies.may_report_gap()
            && let Some((from, upto)) = self.reorder.gap_behind(self.expected, self.reported)
        {
            self.replies.report_gap(from, upto.since(from));
            self.reported = upto;
        }
    }

    /// Reports how far packets have come beyond the missing ones: an acknowledgement would say
    /// nothing of them [CC-14].
    fn report_progress(&mut self) {
        if self.reports_gaps
            && self.replies.may_report_gap()
            && let Some(end) = self.reorder.end()
        {
            self.replies.report_progress(end);
        }
    }

    /// Reports that the expected packet is missing, once [RSP-2].
    fn nak_gap(&mut self) {
        if !std::mem::replace(&mut self.nak_sent, true) {
            let syndrome = Syndrome::Nak(NakCode::PsnSequence);
            self.replies.nak(self.expected, self.msn, syndrome);
        }
    }

    fn handle_packet(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> PacketOutcome {
        if self.failed {
            return PacketOutcome::Fatal; // no further packets are accepted [QP-4]
        }
        let psn = packet.bth.psn;
        if psn.is_after(self.expected) {
            self.nak_gap();
            let kept = match self.not_ready {
                true => Kept::No,
                false => self.reorder.keep(ctx.reorder_budget, self.expected, packet),
            };
            if kept == Kept::No {
                ctx.counters.requests_discarded += 1;
            } else {
                ctx.counters.requests_kept += 1;
            }
            self.report_new_gaps();
            if packet.bth.ack_req && kept == Kept::Yes {
                self.report_progress();
            }
            return PacketOutcome::Continue;
        }
        if psn.is_before(self.expected) {
            ctx.counters.requests_duplicate += 1;
            self.handle_duplicate(ctx, packet);
            return PacketOutcome::Continue;
        }
        self.clear_nak();
        let fault = match self.execute(ctx, packet) {
            Ok(()) => None,
            Err(Fault::NotReady) => {
                // The peer will resend the packet with the same PSN; all later packets are
                // discarded silently until then [RSP-12].
                self.nak_sent = true;
                self.not_ready = true;
                self.reorder.clear();
                self.replies.nak(psn, self.msn, Syndrome::Rnr(self.rnr_timer));
                ctx.counters.requests_discarded += 1;
                return PacketOutcome::Continue;
            }
            Err(Fault::Invalidate) => Some(Fault::Invalidate),
            Err(fault) => {
                self.fail(ctx, fault);
                self.replies.refuse(psn, self.msn, fault.code());
                return PacketOutcome::Fatal;
            }
        };
        // READs and atomics have advanced `expected` and queued their replies already.
        if packet.opcode.is_send() || packet.opcode.is_write() {
            self.advance(packet.bth.ack_req);
        }
        if packet.opcode.ends() {
            ctx.counters.requests_executed += 1;
        }
        match fault {
            None => PacketOutcome::Continue,
            Some(fault) => {
                self.fail(ctx, fault);
                PacketOutcome::Fatal
            }
        }
    }

    /// Resets the NAK state: the expected packet has arrived.
    const fn clear_nak(&mut self) {
        self.nak_sent = false;
        self.not_ready = false;
    }

    /// Advances past the expected packet, one of a SEND or WRITE, after its execution.
    fn advance(&mut self, ack_req: bool) {
        let psn = self.expected;
        self.expected = psn.next();
        self.executed = psn;
        if ack_req {
            self.replies.ack(psn, self.msn);
        }
    }

    /// Stops accepting packets; a receive already taken completes with the error [RSP-18].
    fn fail(&mut self, ctx: &mut RxCtx<'_>, fault: Fault) {
        self.failed = true;
        self.message = Message::None;
        self.reorder.clear();
        if std::mem::take(&mut self.has_recv) {
            let failed = Completion { opcode: WcOpcode::Recv, ..Completion::default() };
            ctx.complete(self.recv.id(), fault.status(), failed, true);
        }
    }

    /// Answers a packet that was executed before [RSP-3].
    fn handle_duplicate(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        let known = match packet.opcode {
            Opcode::ReadRequest => packet.reth.is_some_and(|reth| {
                let part = ReadPart { va: reth.va, key: reth.rkey, len: reth.len };
                self.replies.repeat_read(psn, responses(reth.len, ctx.mtu), part)
            }),
            op if op.is_atomic() => self.replies.repeat_atomic(psn),
            op if Self::has_empty_response(op) => self.replies.repeat_empty(psn),
            op if op.is_send() || op.is_write() => {
                self.replies.ack(self.executed, self.msn);
                true
            }
            _ => false,
        };
        if !known {
            ctx.counters.requests_discarded += 1;
        }
    }

    /// Executes the expected packet [RSP-1].
    fn execute(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        let op = packet.opcode;
        let in_sequence = match self.message {
            Message::None => op.starts(),
            Message::Send => op.is_send() && !op.starts(),
            Message::Write(_) => op.is_write() && !op.starts(),
        };
        if !in_sequence {
            return Err(Fault::Invalid); // [RSP-4]
        }
        if op.is_send() {
            self.send(ctx, packet)
        } else if op.is_write() {
            self.write(ctx, packet)
        } else if op == Opcode::ReadRequest {
            self.read(ctx, packet)
        } else if op.is_atomic() {
            self.atomic(ctx, packet)
        } else if Self::has_empty_response(op) {
            self.flush_or_atomic_write(ctx, packet)
        } else {
            Err(Fault::Invalid)
        }
    }

    /// Takes a receive for the current message [RSP-7].
    fn take_receive(&mut self, ctx: &mut RxCtx<'_>) -> Result<(), Fault> {
        self.has_recv = ctx.receives(&mut self.posted).take(&mut self.recv);
        if self.has_recv { Ok(()) } else { Err(Fault::NotReady) }
    }

    fn count_message(&mut self) {
        self.msn = self.msn.wrapping_add(1) & 0xff_ffff; // [RSP-15]
    }

    fn send(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        let (op, bytes) = (packet.opcode, packet.payload);
        if op.takes_receive() {
            self.take_receive(ctx)?;
        }
        if !op.payload_rule().allows(bytes.len(), ctx.mtu) {
            return Err(Fault::Invalid); // [RSP-9], [HDR-11]
        }
        self.recv.place(ctx.mrs, ctx.recv_pd, bytes).map_err(|error| match error {
            PlaceError::TooLong => Fault::TooLong,
            PlaceError::Key => Fault::LocalKey,
        })?;
        if !op.ends() {
            self.message = Message::Send;
            return Ok(());
        }
        self.message = Message::None;
        self.count_message();
        if let Some(key) = packet.ieth {
            ctx.mrs.invalidate_remote((ctx.pd, ctx.qpn), key).map_err(|_| Fault::Invalidate)?;
        }
        self.has_recv = false;
        let received = Completion {
            opcode: WcOpcode::Recv,
            byte_len: self.recv.len() as u32, // at most 2^31 [HDR-12]
            imm: packet.imm,
            invalidated: packet.ieth,
            ..Completion::default()
        };
        ctx.complete(self.recv.id(), Status::Success, received, packet.bth.solicited);
        Ok(())
    }

    fn write(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        let op = packet.opcode;
        if !ctx.access.contains(Access::REMOTE_WRITE) {
            return Err(Fault::Invalid); // [RSP-5]
        }
        if op.takes_receive() {
            self.take_receive(ctx)?;
        }
        let current = match self.message {
            Message::Write(write) => Some(write),
            Message::None | Message::Send => None,
        };
        let write = IncomingWrite::of(current, packet).ok_or(Fault::Invalid)?;
        if !write.fits(packet, ctx.mtu) {
            return Err(Fault::Invalid); // [RSP-9]
        }
        let rest = write.place(ctx, packet.payload).ok_or(Fault::Access)?;
        if !op.ends() {
            self.message = Message::Write(rest);
            return Ok(());
        }
        self.message = Message::None;
        self.count_message();
        if std::mem::take(&mut self.has_recv) {
            let received = Completion {
                opcode: WcOpcode::RecvRdmaWithImm,
                byte_len: write.total(),
                imm: packet.imm,
                ..Completion::default()
            };
            // The buffer of the receive is not written [RSP-8].
            ctx.complete(self.recv.id(), Status::Success, received, packet.bth.solicited);
        }
        Ok(())
    }

    fn read(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        if !ctx.access.contains(Access::REMOTE_READ) || !self.replies.can_save() {
            return Err(Fault::Invalid); // [RSP-5], [RSP-6]
        }
        let Some(reth) = packet.reth else { return Err(Fault::Invalid) };
        if u64::from(reth.len) > MESSAGE_MAX || !packet.payload.is_empty() {
            return Err(Fault::Invalid); // [RSP-9]
        }
        if reth.len > 0 {
            let (len, need) = (u64::from(reth.len), Access::REMOTE_READ);
            let whose = (ctx.pd, ctx.qpn);
            ctx.mrs.check(whose, reth.rkey, reth.va, len, need).map_err(|_| Fault::Access)?;
        }
        self.count_message();
        let psn = packet.bth.psn;
        let count = responses(reth.len, ctx.mtu);
        let part = ReadPart { va: reth.va, key: reth.rkey, len: reth.len };
        self.replies.read(psn, count, self.msn, part);
        self.expected = psn + count; // [RSP-14]
        Ok(())
    }

    fn atomic(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        if !ctx.access.contains(Access::REMOTE_ATOMIC) || !self.replies.can_save() {
            return Err(Fault::Invalid); // [RSP-5], [RSP-6]
        }
        let Some(atomic) = packet.atomic else { return Err(Fault::Invalid) };
        if !packet.payload.is_empty() {
            return Err(Fault::Invalid); // [RSP-9]
        }
        let AtomicEth { va, rkey, swap_or_add, compare } = atomic;
        let span = ctx
            .mrs
            .resolve((ctx.pd, ctx.qpn), rkey, va, 8, Access::REMOTE_ATOMIC)
            .map_err(|_| Fault::Access)?;
        if !va.is_multiple_of(8) {
            return Err(Fault::Invalid); // [RSP-11]
        }
        let mut original = 0;
        let reached = span.reaches(|span| {
            original = span.update(0, |old| match packet.opcode {
                Opcode::FetchAdd => old.wrapping_add(swap_or_add),
                _ if old == compare => swap_or_add,
                _ => old,
            });
        });
        if !reached {
            return Err(Fault::Access);
        }
        self.count_message();
        let psn = packet.bth.psn;
        self.replies.atomic(psn, self.msn, original);
        self.expected = psn.next();
        self.executed = psn;
        Ok(())
    }
}

impl Fault {
    /// Returns the NAK code for the peer.
    const fn code(self) -> NakCode {
        match self {
            Self::Access => NakCode::RemoteAccess,
            Self::LocalKey => NakCode::RemoteOperational,
            Self::NotReady | Self::Invalid | Self::TooLong | Self::Invalidate => {
                NakCode::InvalidRequest
            }
        }
    }

    /// Returns the completion status of a receive that was taken [RSP-18], [RSP-9].
    const fn status(self) -> Status {
        match self {
            Self::TooLong => Status::LocLenErr,
            Self::Access => Status::RemAccessErr,
            Self::LocalKey => Status::LocProtErr,
            Self::NotReady | Self::Invalid | Self::Invalidate => Status::RemInvReqErr,
        }
    }
}

/// Returns the number of READs and atomics answered concurrently [QP-5].
fn answer_slots(max_dest_rd_atomic: u8) -> usize {
    match max_dest_rd_atomic {
        0 => 0,
        n => usize::from(n).next_power_of_two(),
    }
}

/// Returns how many of a message's `left` missing bytes fill packets that are not its last.
pub(crate) const fn full_packets(left: usize, mtu: usize) -> usize {
    left.saturating_sub(1) / mtu * mtu
}

/// Returns the number of packets that answer a READ of `len` bytes, which is also the number of its
/// PSNs [REQ-3].
fn responses(len: u32, mtu: usize) -> u32 {
    len.div_ceil(mtu.max(1) as u32).max(1)
}
