//! The receiving half of an unreliable connection (UC): messages arrive whole and in order, or not
//! at all; nothing is answered.
//!
//! ```text
//!   packet ── late or repeated ────────> dropped [UC-3]
//!          ── after a gap, or out of place ─> the message that it breaks is dropped [UC-4]
//!          │                                  a first packet begins the next one
//!          └ expected ─> rights, receive, length, key ─> placed
//!                          └ fault: the message is dropped, to its end [UC-5]
//! ```

use bowline_verbs::{Access, Completion, Error, RecvWr, Status, WcOpcode};
use bowline_wire::roce::{Packet, Psn};

use crate::cq::PendingCompletion;
use crate::incoming_write::IncomingWrite;
use crate::rc::responder::{PacketOutcome, RxCtx};
use crate::recvq::{ActiveRecv, PlaceError, RecvQueue};

/// A packet so far behind the expected one at most is late, or repeated by the network; one further
/// behind shows that as many are lost that sequence numbers have wrapped.
const LATE_MAX: u32 = 1 << 16;

/// The message of which more packets are expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// None: packets are dropped until the first one of a message.
    None,
    Send,
    Write(IncomingWrite),
}

/// Why a packet is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The message is dropped [UC-5].
    Dropped,
    /// The local key of the receive does not allow the access: the queue pair fails [MR-4].
    LocalKey,
}

/// The receiving half of an unreliable connection.
#[derive(Debug)]
pub(crate) struct UcReceiver {
    posted: RecvQueue,
    /// The receive of the current message, or of the next one; valid if `has_recv`.
    recv: ActiveRecv,
    has_recv: bool,
    message: Message,
    expected: Psn,
}

impl UcReceiver {
    /// Makes a receiver without receives that expects no packet yet.
    pub(crate) fn new() -> Self {
        Self {
            posted: RecvQueue::default(),
            recv: ActiveRecv::default(),
            has_recv: false,
            message: Message::None,
            expected: Psn::ZERO,
        }
    }

    /// Starts to accept packets from `rq_psn` on, when the queue pair goes to RTR.
    pub(crate) fn start(&mut self, rq_psn: u32) {
        self.expected = Psn::new(rq_psn);
    }

    /// Posts a receive, if fewer than `max` are posted.
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>, max: usize) -> Result<(), Error> {
        self.posted.post(wr, max)
    }

    /// Completes all receives with [`Status::WrFlushErr`], in order [QP-4].
    pub(crate) fn flush(&mut self, ctx: &mut RxCtx<'_>) {
        self.message = Message::None;
        if std::mem::take(&mut self.has_recv) {
            self.complete(ctx, Status::WrFlushErr, Completion::default(), true);
        }
        while let Some(wr_id) = self.posted.take_id() {
            let flushed = Completion { wr_id, opcode: WcOpcode::Recv, ..Completion::default() };
            complete(ctx, Status::WrFlushErr, flushed, true);
        }
    }

    /// Handles a request packet of the peer.
    pub(crate) fn handle(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> PacketOutcome {
        let psn = packet.bth.psn;
        if psn.is_before(self.expected) && self.expected.since(psn) <= LATE_MAX {
            ctx.counters.requests_duplicate += 1;
            return PacketOutcome::Continue; // [UC-3]
        }
        let op = packet.opcode;
        let continues = match self.message {
            Message::None => false,
            Message::Send => op.is_send() && !op.starts(),
            Message::Write(_) => op.is_write() && !op.starts(),
        };
        let in_sequence = psn == self.expected && (continues || op.starts());
        self.expected = psn.next();
        if !in_sequence || !continues {
            self.drop_message(ctx); // [UC-4]
            if !op.starts() {
                ctx.counters.requests_discarded += 1;
                return PacketOutcome::Continue;
            }
        }
        let executed = if op.is_send() { self.send(ctx, packet) } else { self.write(ctx, packet) };
        match executed {
            Ok(()) => {
                ctx.counters.requests_executed += u64::from(op.ends());
                PacketOutcome::Continue
            }
            Err(Fault::Dropped) => {
                self.message = Message::None;
                ctx.counters.uc_messages_dropped += 1;
                PacketOutcome::Continue
            }
            Err(Fault::LocalKey) => {
                self.message = Message::None;
                self.has_recv = false;
                self.complete(ctx, Status::LocProtErr, Completion::default(), true);
                PacketOutcome::Fatal
            }
        }
    }

    /// Drops the message that has begun, if there is one. Its receive is that of the next message.
    fn drop_message(&mut self, ctx: &mut RxCtx<'_>) {
        if std::mem::replace(&mut self.message, Message::None) != Message::None {
            ctx.counters.uc_messages_dropped += 1;
        }
    }

    /// Takes a receive for the current message, or the one of a message that was dropped [UC-5].
    fn take_receive(&mut self, ctx: &mut RxCtx<'_>) -> Result<(), Fault> {
        if self.has_recv {
            self.recv.rewind();
        } else {
            self.has_recv = ctx.receives(&mut self.posted).take(&mut self.recv);
        }
        if self.has_recv { Ok(()) } else { Err(Fault::Dropped) }
    }

    fn send(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        let (op, bytes) = (packet.opcode, packet.payload);
        if !op.payload_rule().allows(bytes.len(), ctx.mtu) {
            return Err(Fault::Dropped);
        }
        if op.takes_receive() {
            self.take_receive(ctx)?;
        }
        self.recv.place(ctx.mrs, ctx.recv_pd, bytes).map_err(|error| match error {
            PlaceError::TooLong => Fault::Dropped,
            PlaceError::Key => Fault::LocalKey,
        })?;
        if !op.ends() {
            self.message = Message::Send;
            return Ok(());
        }
        self.message = Message::None;
        self.has_recv = false;
        let received = Completion {
            byte_len: self.recv.len() as u32, // at most 2^31 [HDR-12]
            imm: packet.imm,
            ..Completion::default()
        };
        self.complete(ctx, Status::Success, received, packet.bth.solicited);
        Ok(())
    }

    fn write(&mut self, ctx: &mut RxCtx<'_>, packet: &Packet<'_>) -> Result<(), Fault> {
        let op = packet.opcode;
        let current = match self.message {
            Message::Write(write) => Some(write),
            Message::None | Message::Send => None,
        };
        let write = IncomingWrite::of(current, packet).ok_or(Fault::Dropped)?;
        if !ctx.access.contains(Access::REMOTE_WRITE) || !write.fits(packet, ctx.mtu) {
            return Err(Fault::Dropped);
        }
        if op.takes_receive() {
            self.take_receive(ctx)?;
        }
        let rest = write.place(ctx, packet.payload).ok_or(Fault::Dropped)?;
        if !op.ends() {
            self.message = Message::Write(rest);
            return Ok(());
        }
        self.message = Message::None;
        if op.takes_receive() {
            self.has_recv = false;
            let received = Completion {
                opcode: WcOpcode::RecvRdmaWithImm,
                byte_len: write.total(),
                imm: packet.imm,
                ..Completion::default()
            };
            // The buffer of the receive is not written [RSP-8].
            self.complete(ctx, Status::Success, received, packet.bth.solicited);
        }
        Ok(())
    }

    /// Completes the receive that was taken.
    fn complete(
        &self,
        ctx: &mut RxCtx<'_>,
        status: Status,
        completion: Completion,
        solicited: bool,
    ) {
        let opcode = match completion.opcode {
            WcOpcode::RecvRdmaWithImm => completion.opcode,
            _ => WcOpcode::Recv,
        };
        let completion = Completion { wr_id: self.recv.id(), opcode, ..completion };
        complete(ctx, status, completion, solicited);
    }
}

fn complete(ctx: &mut RxCtx<'_>, status: Status, completion: Completion, solicited: bool) {
    let completion = Completion { status, qpn: ctx.qpn, ..completion };
    ctx.done.push(PendingCompletion { cq: ctx.cq, completion, wakes: solicited });
}
