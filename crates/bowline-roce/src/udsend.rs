//! The sending half of a UD queue pair. A datagram is complete as soon as it is sent.

use bowline_verbs::{
    Error, InvalidReason, QpCap, QpType, RequestPart, SendFlags, SendOp, SendWr, Status,
};
use bowline_wire::roce::Psn;

use crate::burst::Burst;
use crate::rc::requester::{Outcome, TxCtx};
use crate::sendq::SendQueue;
use crate::ud::Datagram;

/// The sender.
#[derive(Debug)]
pub(crate) struct UdSender {
    queue: SendQueue,
    cap: QpCap,
    signal_all: bool,
    next: Psn,
    /// Most bytes of a datagram.
    mtu: usize,
}

impl UdSender {
    pub(crate) fn new(cap: QpCap, signal_all: bool, mtu: usize) -> Self {
        Self { queue: SendQueue::default(), cap, signal_all, next: Psn::ZERO, mtu }
    }

    pub(crate) fn start(&mut self, sq_psn: u32) {
        self.next = Psn::new(sq_psn);
    }

    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), Error> {
        if !matches!(wr.op, SendOp::Datagram(..)) {
            return Err(Error::Invalid(InvalidReason::RequestOfOtherType(QpType::Ud)));
        }
        let len = if wr.flags.contains(SendFlags::INLINE) {
            wr.inline.len()
        } else {
            wr.sges.iter().map(|sge| sge.len as usize).sum()
        };
        RequestPart::Datagram.check(len as u64, self.mtu as u64)?;
        self.queue.post(wr, &self.cap)
    }

    /// Takes the newest requests back, of which none has begun: `len` are left.
    pub(crate) fn take_back(&mut self, len: usize) {
        self.queue.truncate(len);
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns the destination of the next datagram.
    pub(crate) fn next_dest(&self) -> Option<bowline_verbs::UdDest> {
        match self.queue.front()?.op {
            SendOp::Datagram(dest, _) => Some(dest),
            _ => None,
        }
    }

    /// Appends the next datagram to `out` and completes it.
    pub(crate) fn fill(&mut self, ctx: &mut TxCtx<'_>, out: &mut Burst) -> Outcome {
        let Some(request) = self.queue.front() else { return Outcome::Idle };
        let SendOp::Datagram(dest, imm) = request.op else { return Outcome::Idle };
        let solicited = request.flags.contains(SendFlags::SOLICITED);
        let datagram =
            Datagram { dest, source: ctx.qpn, psn: self.next, imm, solicited, ack_req: false };
        let len = request.len as usize;
        let gathered = out.push(&datagram.packet(), len, |out| {
            self.queue.gather(0, ctx.mrs, ctx.pd, 0, len, out).is_ok()
        });
        let Some(request) = self.queue.pop() else { return Outcome::Idle };
        if !gathered {
            ctx.complete(&request, Status::LocProtErr);
            return Outcome::Failed;
        }
        self.next = self.next.next();
        if self.signal_all || request.flags.contains(SendFlags::SIGNALED) {
            ctx.complete(&request, Status::Success);
        }
        Outcome::Packet
    }

    /// Fails the next datagram because there is no route to its destination.
    pub(crate) fn refuse(&mut self, ctx: &mut TxCtx<'_>) -> Outcome {
        if let Some(request) = self.queue.pop() {
            ctx.complete(&request, Status::LocQpOpErr);
        }
        Outcome::Failed
    }

    /// Completes all requests with a flush error, in order [QP-4].
    pub(crate) fn flush(&mut self, ctx: &mut TxCtx<'_>) {
        while let Some(request) = self.queue.pop() {
            ctx.complete(&request, Status::WrFlushErr);
        }
    }
}
