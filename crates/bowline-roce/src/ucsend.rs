//! The sending half of an unreliable connection (UC). A message is complete as soon as its last
//! packet is handed to the line [UC-2].

use bowline_verbs::{Error, InvalidReason, QpCap, QpType, SendFlags, SendOp, SendWr, Status};
use bowline_wire::roce::{BTH_LEN, Bth, ICRC_LEN, Packet, Psn, Reth, pad};

use crate::burst::Burst;
use crate::rc::requester::{Outcome, TxCtx, execute_local, opcode};
use crate::sendq::{Request, SendQueue, Stage};

/// The sender.
#[derive(Debug)]
pub(crate) struct UcSender {
    queue: SendQueue,
    cap: QpCap,
    signal_all: bool,
    /// PSN of the next packet.
    next: Psn,
    /// Bytes of the oldest request that are sent.
    sent: u32,
    /// Payload bytes of a full packet.
    mtu: usize,
}

impl UcSender {
    pub(crate) fn new(cap: QpCap, signal_all: bool) -> Self {
        Self { queue: SendQueue::default(), cap, signal_all, next: Psn::ZERO, sent: 0, mtu: 0 }
    }

    /// Starts to send when the queue pair goes to RTS.
    pub(crate) fn start(&mut self, sq_psn: u32, mtu: usize) {
        self.next = Psn::new(sq_psn);
        self.mtu = mtu;
    }

    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), Error> {
        match wr.op {
            SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::Write(_)
            | SendOp::WriteImm(..)
            | SendOp::RegMr { .. }
            | SendOp::LocalInv(_)
            | SendOp::BindMw { .. } => {}
            _ => return Err(Error::Invalid(InvalidReason::RequestOfOtherType(QpType::Uc))),
        }
        self.queue.post(wr, &self.cap)
    }

    /// Takes the newest requests back, of which none has begun: `len` are left.
    pub(crate) fn take_back(&mut self, len: usize) {
        self.queue.truncate(len);
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Tells whether a message has begun and has not ended.
    pub(crate) fn is_within_message(&self) -> bool {
        self.queue.front().is_some_and(|request| request.stage == Stage::Started)
    }

    /// Bytes of the next packet, ICRC included.
    pub(crate) fn next_len(&self) -> Option<usize> {
        let request = self.queue.front().filter(|request| !request.is_local())?;
        let (first, last, len) = self.part(request);
        let headers = self.opcode(request, first, last)?.header_len();
        Some(BTH_LEN + headers + len + pad(len) + ICRC_LEN)
    }

    /// Whether the next packet is the first and the last of its message, and its payload bytes.
    fn part(&self, request: &Request) -> (bool, bool, usize) {
        let left = (request.len - self.sent.min(request.len)) as usize;
        let is_first = request.stage != Stage::Started;
        (is_first, left <= self.mtu, left.min(self.mtu))
    }

    fn opcode(
        &self,
        request: &Request,
        first: bool,
        last: bool,
    ) -> Option<bowline_wire::roce::Opcode> {
        opcode(&request.op, first, last).over_uc()
    }

    /// Executes the local operations at the head of the queue, in order; tells whether one failed.
    fn execute_local(&mut self, ctx: &mut TxCtx<'_>) -> bool {
        while let Some(request) = self.queue.get_mut(0).filter(|request| request.is_local()) {
            let result = execute_local(ctx, &mut request.op);
            let Some(request) = self.queue.pop() else { break };
            if let Err(status) = result {
                ctx.complete(&request, status);
                return true;
            }
            if self.signal_all || request.flags.contains(SendFlags::SIGNALED) {
                ctx.complete(&request, Status::Success);
            }
        }
        false
    }

    /// Appends the next packet to `out`, and completes its request behind the last one.
    pub(crate) fn fill(&mut self, ctx: &mut TxCtx<'_>, out: &mut Burst) -> Outcome {
        if self.execute_local(ctx) {
            return Outcome::Failed;
        }
        let Some(request) = self.queue.front() else { return Outcome::Idle };
        let (first, last, len) = self.part(request);
        let Some(opcode) = self.opcode(request, first, last) else { return Outcome::Idle };
        let ends_receive = last && !matches!(request.op, SendOp::Write(_));
        let bth = Bth {
            // REQ-14
            solicited: ends_receive && request.flags.contains(SendFlags::SOLICITED),
            dest_qpn: ctx.dest_qpn.0,
            psn: self.next,
            ..Bth::default()
        };
        let mut packet = Packet::new(opcode, bth);
        match request.op {
            SendOp::SendImm(imm) => packet.imm = Some(imm),
            SendOp::Write(remote) => {
                packet.reth = Some(Reth { va: remote.addr, rkey: remote.rkey, len: request.len });
            }
            SendOp::WriteImm(remote, imm) => {
                packet.reth = Some(Reth { va: remote.addr, rkey: remote.rkey, len: request.len });
                packet.imm = Some(imm);
            }
            _ => {}
        }
        let offset = self.sent;
        let gathered = out.push(&packet, len, |out| {
            self.queue.gather(0, ctx.mrs, ctx.pd, offset, len, out).is_ok()
        });
        if gathered {
            self.next = self.next.next();
            self.sent += len as u32; // at most an MTU
            if let Some(request) = self.queue.get_mut(0) {
                request.stage = Stage::Started;
            }
        }
        if gathered && !last {
            return Outcome::Packet;
        }
        self.sent = 0;
        let Some(request) = self.queue.pop() else { return Outcome::Idle };
        if !gathered {
            ctx.complete(&request, Status::LocProtErr);
            return Outcome::Failed;
        }
        if self.signal_all || request.flags.contains(SendFlags::SIGNALED) {
            ctx.complete(&request, Status::Success);
        }
        Outcome::Packet
    }

    /// Completes all requests with a flush error, in order [QP-4].
    pub(crate) fn flush(&mut self, ctx: &mut TxCtx<'_>) {
        self.sent = 0;
        while let Some(request) = self.queue.pop() {
            ctx.complete(&request, Status::WrFlushErr);
        }
    }
}
