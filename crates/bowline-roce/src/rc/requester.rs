//! The requester of a reliable connection.
//!
//! ```text
//!           una          next                 end
//!   PSNs ----|------------|--------------------|-------->
//!    done    |  awaiting  |  to be sent again  |  fresh
//!
//!   queue   [ head ][ .. ][ cursor: `sent` of its packets are behind `next` ][ waiting .. ]
//! ```
//! Without a loss `next` and `end` are the same. After one, `next` goes back to `una` and the same
//! packets are made again from memory [REQ-11]; local operations that were executed are passed over
//! [REQ-20]. `una` always lies in the request at the head of the queue.

use std::time::Duration;

use bowline_verbs::{
    Completion, Error, PdId, QpCap, Qpn, Remote, SendFlags, SendOp, SendWr, Status,
};
use bowline_wire::roce::{
    Aeth, AtomicEth, Bth, Builder, NakCode, Opcode, Packet, Psn, Reth, Syndrome, rnr_timer_ns,
};

use crate::config::GiveUp;
use crate::counters::Counters;
use crate::mr::MrTable;
use crate::paths::Creeping;
use crate::sendq::{Request, SendQueue, Stage};
use crate::time::Instant;

/// Smallest window, packets.
const WINDOW_MIN: u32 = 16;
/// Largest window, packets: far below half of the PSNs [REQ-6].
const WINDOW_MAX: u32 = 4096;
/// Most PSNs of one read: with a window on top still below half of all.
const READ_PACKETS_MAX: u64 = 1 << 22;
/// A retry count, as an RNR retry count, of 7 [REQ-13].
const SEVEN: u8 = 7;

/// What the requester is given for the time of a call.
#[derive(Debug)]
pub(crate) struct TxCtx<'a> {
    pub(crate) now: Instant,
    pub(crate) mrs: &'a mut MrTable,
    pub(crate) pd: PdId,
    pub(crate) qpn: Qpn,
    pub(crate) dest_qpn: Qpn,
    pub(crate) counters: &'a mut Counters,
    /// Completions, and whether each wakes a waiter for solicited ones.
    pub(crate) done: &'a mut Vec<(Completion, bool)>,
}

impl TxCtx<'_> {
    fn complete(&mut self, request: &Request, status: Status) {
        let failed = status != Status::Success;
        self.done.push((request.completion(self.qpn, status), failed));
    }
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Outcome {
    /// A packet was appended.
    Packet,
    /// Nothing is to be done now.
    Idle,
    /// A request failed; its completion is written, and the queue pair is to go to error [QP-4].
    Failed,
}

/// Attributes of the queue pair that concern the requester. What it makes of them is its own affair:
/// the peer never sees it [REQ-21].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) mtu: usize,
    pub(crate) max_rd_atomic: u8,
    /// Code of the acknowledgement timeout; 0: never [REQ-12].
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) window: u32,
    pub(crate) give_up: GiveUp,
    pub(crate) retransmit_min: Duration,
}

impl Settings {
    /// The negotiated timeout: an upper bound of the own timer [REQ-22].
    fn timeout(&self) -> Option<Duration> {
        (self.timeout != 0).then(|| Duration::from_nanos(4096 << (self.timeout & 31)))
    }

    /// Time without progress after which the peer is given up.
    fn patience(&self) -> Option<Duration> {
        let timeout = self.timeout()?.max(self.retransmit_min);
        match self.give_up {
            GiveUp::After(time) => Some(time),
            GiveUp::RetryCountSevenForever if self.retry_cnt == SEVEN => None,
            GiveUp::RetryCount | GiveUp::RetryCountSevenForever => {
                Some(timeout * u32::from(self.retry_cnt.max(1)))
            }
        }
    }
}

/// The requester.
#[derive(Debug)]
pub(crate) struct Requester {
    queue: SendQueue,
    cap: QpCap,
    /// Every request completes with an entry.
    signal_all: bool,
    settings: Option<Settings>,
    /// Index of the request that the next packet is of.
    cursor: usize,
    /// PSNs of it that lie before `next`.
    sent: u32,
    next: Psn,
    end: Psn,
    una: Psn,
    /// Reads and atomics begun and not complete [REQ-4].
    reads: usize,
    window: u32,
    /// Packets acknowledged since the window last grew.
    acknowledged: u32,
    /// Packets sent since the last that asked for an acknowledgement.
    unasked: u32,
    /// Went back to `una`, and nothing has come of it yet.
    went_back: bool,
    creeping: Creeping,
    /// Not before: the peer had no receive posted.
    pause: Option<Instant>,
    rnr_left: u8,
    /// Retransmission timer.
    deadline: Option<Instant>,
    /// Times it ran out without progress.
    expiries: u32,
    progress_at: Instant,
    /// Smoothed round trip.
    round_trip: Option<Duration>,
    /// PSN whose acknowledgement is timed, and when it was sent.
    timed: Option<(Psn, Instant)>,
}

impl Requester {
    pub(crate) fn new(cap: QpCap, signal_all: bool) -> Self {
        Self {
            queue: SendQueue::default(),
            cap,
            signal_all,
            settings: None,
            cursor: 0,
            sent: 0,
            next: Psn::ZERO,
            end: Psn::ZERO,
            una: Psn::ZERO,
            reads: 0,
            window: 0,
            acknowledged: 0,
            unasked: 0,
            went_back: false,
            creeping: Creeping::of_requests(),
            pause: None,
            rnr_left: 0,
            deadline: None,
            expiries: 0,
            progress_at: Instant::default(),
            round_trip: None,
            timed: None,
        }
    }

    /// The queue pair goes to RTS: all PSNs begin at `sq_psn` [REQ-1].
    pub(crate) fn start(&mut self, settings: Settings, sq_psn: u32) {
        let psn = Psn::new(sq_psn);
        (self.next, self.end, self.una) = (psn, psn, psn);
        self.window = settings.window.clamp(WINDOW_MIN, WINDOW_MAX);
        self.rnr_left = settings.rnr_retry;
        self.settings = Some(settings);
    }

    /// Queues a request.
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), Error> {
        match &wr.op {
            SendOp::Datagram(..) => {
                return Err(Error::Invalid("datagrams are for UD queue pairs"));
            }
            SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
                let settings = self.settings.as_ref();
                if settings.is_some_and(|settings| settings.max_rd_atomic == 0) {
                    return Err(Error::Invalid("the queue pair may have no read outstanding"));
                }
                let mtu = settings.map_or(256, |settings| settings.mtu as u64);
                let len: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
                if len.div_ceil(mtu) > READ_PACKETS_MAX {
                    return Err(Error::Invalid("a read has at most 2^22 packets"));
                }
            }
            _ => {}
        }
        self.queue.post(wr, &self.cap)
    }

    /// Tells whether of every burst only the first packet arrives [ICRC-23].
    pub(crate) const fn is_creeping(&self) -> bool {
        self.creeping.is_certain()
    }

    /// Requests not complete.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Tells whether [`fill`](Self::fill) would do something.
    pub(crate) fn has_work(&self) -> bool {
        self.pause.is_none()
            && self.settings.is_some()
            && self.queue.get(self.cursor).is_some_and(|request| !self.must_wait(request))
    }

    /// Tells whether a request, the one at the cursor, has to wait for answers to earlier ones.
    fn must_wait(&self, request: &Request) -> bool {
        match request.stage {
            Stage::Broken(_) => return true,
            Stage::Started => {}
            Stage::Waiting => {
                // REQ-5: a local invalidation waits for everything, as with rxe.
                let alone = matches!(request.op, SendOp::LocalInv(_));
                let fenced = request.flags.contains(SendFlags::FENCE);
                // REQ-4
                let limit = self.settings.as_ref().map_or(0, |s| usize::from(s.max_rd_atomic));
                let crowded = request.is_read_or_atomic() && self.reads >= limit;
                if alone && self.cursor > 0 || fenced && self.reads > 0 || crowded {
                    return true;
                }
            }
        }
        !request.is_local() && self.next.since(self.una) >= self.window
    }

    /// Executes local operations whose turn it is, and appends one packet, from base transport
    /// header to pad, to `out`, if one may be sent [REQ-7].
    pub(crate) fn fill(&mut self, ctx: &mut TxCtx<'_>, out: &mut Vec<u8>) -> Outcome {
        let Some(mtu) = self.settings.as_ref().map(|settings| settings.mtu) else {
            return Outcome::Idle;
        };
        loop {
            let Some(request) = self.queue.get(self.cursor) else { return Outcome::Idle };
            if self.pause.is_some() || self.must_wait(request) {
                return Outcome::Idle;
            }
            if request.is_local() {
                if request.is_started() {
                    // REQ-20: passed over on the way back.
                    self.cursor += 1;
                    self.sent = 0;
                } else {
                    self.execute(ctx);
                }
                if self.finish_head(ctx) == Outcome::Failed {
                    return Outcome::Failed;
                }
                continue;
            }
            if !request.is_started() && !self.begin(ctx, mtu) {
                return self.finish_head(ctx);
            }
            if self.append(ctx, mtu, out) {
                return Outcome::Packet;
            }
            return self.finish_head(ctx);
        }
    }

    /// Executes the local operation at the cursor, once and for all [REQ-20], [MR-8].
    fn execute(&mut self, ctx: &mut TxCtx<'_>) {
        let Some(request) = self.queue.get_mut(self.cursor) else { return };
        let result = match &mut request.op {
            SendOp::RegMr { key, pieces, iova, access } => {
                ctx.mrs.bind(ctx.pd, *key, std::mem::take(pieces), *iova, *access)
            }
            SendOp::LocalInv(key) => ctx.mrs.invalidate(ctx.pd, *key),
            _ => Ok(()),
        };
        if result.is_err() {
            request.stage = Stage::Broken(Status::LocQpOpErr);
            return;
        }
        request.stage = Stage::Started;
        self.cursor += 1;
        self.sent = 0;
    }

    /// Gives the request at the cursor its PSNs [REQ-3]; tells whether it can be carried out.
    fn begin(&mut self, ctx: &TxCtx<'_>, mtu: usize) -> bool {
        let fits = match self.queue.get(self.cursor) {
            Some(request) if request.is_read_or_atomic() => {
                self.queue.check_scatter(self.cursor, ctx.mrs, ctx.pd).is_ok()
            }
            _ => true,
        };
        let Some(request) = self.queue.get_mut(self.cursor) else { return false };
        if !fits {
            request.stage = Stage::Broken(Status::LocProtErr);
            return false;
        }
        request.first = self.end;
        request.packets = if request.is_atomic() {
            1
        } else {
            (request.len as usize).div_ceil(mtu).max(1) as u32
        };
        request.stage = Stage::Started;
        self.sent = 0;
        if request.is_read_or_atomic() {
            self.reads += 1;
        }
        true
    }

    /// Appends the packet with PSN `next`; `false`: its bytes are not to be had [REQ-16].
    fn append(&mut self, ctx: &mut TxCtx<'_>, mtu: usize, out: &mut Vec<u8>) -> bool {
        let Some(request) = self.queue.get(self.cursor) else { return false };
        let psn = self.next;
        let (sent, packets) = (self.sent, request.packets);
        let offset = sent * mtu as u32;
        let left = request.len - offset.min(request.len);
        let one_packet = request.is_read_or_atomic();
        let last = one_packet || sent + 1 == packets;
        // REQ-8: at the end of every message, and often enough that the window cannot stall.
        let filling = psn.since(self.una) + 1 >= self.window;
        let ask = last || filling || self.unasked + 1 >= (self.window / 4).max(1);
        let opcode = opcode(&request.op, sent == 0, last);
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
        let start = out.len();
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
            SendOp::Write(remote) => packet.reth = Some(reth(remote, 0, request.len)),
            SendOp::WriteImm(remote, imm) => {
                packet.reth = Some(reth(remote, 0, request.len));
                packet.imm = Some(*imm);
            }
            // REQ-11: after a loss, what is missing.
            SendOp::Read(remote) => packet.reth = Some(reth(remote, offset, left)),
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
            _ => {}
        }
        let mut builder = Builder::new(out, &packet);
        let take = if one_packet { 0 } else { (left as usize).min(mtu) };
        if take > 0 {
            let body = builder.payload();
            if self.queue.gather(self.cursor, ctx.mrs, ctx.pd, offset, take, body).is_err() {
                out.truncate(start);
                if let Some(request) = self.queue.get_mut(self.cursor) {
                    request.stage = Stage::Broken(Status::LocProtErr);
                }
                return false;
            }
        }
        builder.finish();

        let steps = if one_packet { packets - sent } else { 1 };
        let fresh = !psn.is_before(self.end);
        if !fresh {
            ctx.counters.packets_resent += 1;
        }
        self.unasked = if ask { 0 } else { self.unasked + 1 };
        if self.una == self.end {
            self.progress_at = ctx.now;
        }
        self.next += steps;
        if self.next.is_after(self.end) {
            self.end = self.next;
        }
        if fresh && ask && self.timed.is_none() {
            self.timed = Some((psn, ctx.now));
        }
        if last {
            self.cursor += 1;
            self.sent = 0;
        } else {
            self.sent += 1;
        }
        if self.deadline.is_none() {
            self.arm(ctx.now);
        }
        true
    }

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
                    // REQ-9 d: an answer before this one is missing. Asking for it again at once
                    // instead of waiting for the timer.
                    self.go_back(ctx);
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
        if self.acknowledge(ctx, psn.next()) == Outcome::Failed {
            return Outcome::Failed;
        }
        // REQ-9 b: it acknowledges something behind a read or atomic whose response was lost.
        let missed = self.queue.front().is_some_and(|head| {
            head.is_started()
                && head.is_read_or_atomic()
                && !psn.is_before(head.first + head.packets)
        });
        if missed {
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
        if self.acknowledge(ctx, psn) == Outcome::Failed {
            return Outcome::Failed;
        }
        let status = match code {
            NakCode::PsnSequence => {
                self.go_back(ctx);
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
        if self.pause.is_some() {
            return Outcome::Idle;
        }
        let rnr_retry = self.settings.as_ref().map_or(0, |settings| settings.rnr_retry);
        if rnr_retry != SEVEN {
            if self.rnr_left == 0 {
                return self.fail(ctx, Status::RnrRetryExcErr);
            }
            self.rnr_left -= 1;
        }
        self.pause = Some(ctx.now + Duration::from_nanos(rnr_timer_ns(code)));
        self.deadline = None;
        self.unasked = 0;
        // What is sent again is not timed.
        self.timed = None;
        // The peer lives.
        self.progress_at = ctx.now;
        self.seek();
        Outcome::Idle
    }

    fn handle_read(&mut self, ctx: &mut TxCtx<'_>, packet: &Packet<'_>) -> Outcome {
        let mtu = self.settings.as_ref().map_or(0, |settings| settings.mtu);
        let Some(head) = self.queue.front() else { return Outcome::Idle };
        if !head.is_started() || !head.is_read() {
            return self.fail(ctx, Status::BadRespErr);
        }
        let received = self.una.since(head.first);
        let offset = received * mtu as u32;
        let left = (head.len - offset.min(head.len)) as usize;
        // Where the answer begins depends on what was asked for last, so that a first packet may be
        // a middle one too, and a last one an only one.
        let ends = matches!(packet.opcode, Opcode::ReadResponseLast | Opcode::ReadResponseOnly);
        if ends != (left <= mtu) || packet.payload.len() != left.min(mtu) {
            return self.fail(ctx, Status::BadRespErr);
        }
        if self.queue.scatter(0, ctx.mrs, ctx.pd, offset, packet.payload).is_err() {
            return self.fail(ctx, Status::LocProtErr);
        }
        self.una = self.una.next();
        if ends {
            self.complete_head(ctx);
        }
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
        self.finish_head(ctx)
    }

    /// Everything before `upto` has arrived: completes sends and writes. Reads and atomics are
    /// completed by their answers alone, and hold up what is behind them [REQ-9 b].
    fn acknowledge(&mut self, ctx: &mut TxCtx<'_>, upto: Psn) -> Outcome {
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

    /// Completes the head as done.
    fn complete_head(&mut self, ctx: &mut TxCtx<'_>) {
        let Some(request) = self.queue.pop() else { return };
        if request.is_read_or_atomic() {
            self.reads -= 1;
        }
        if self.cursor > 0 {
            self.cursor -= 1;
        } else {
            self.sent = 0;
        }
        if self.signal_all || request.flags.contains(SendFlags::SIGNALED) {
            ctx.complete(&request, Status::Success);
        }
    }

    /// Completes local operations at the head that are executed, or fails the head if it is broken
    /// and everything before it has completed.
    fn finish_head(&mut self, ctx: &mut TxCtx<'_>) -> Outcome {
        while let Some(head) = self.queue.front() {
            match head.stage {
                Stage::Broken(status) => return self.fail(ctx, status),
                Stage::Started if head.is_local() => self.complete_head(ctx),
                Stage::Started | Stage::Waiting => break,
            }
        }
        Outcome::Idle
    }

    /// Fails the head.
    fn fail(&mut self, ctx: &mut TxCtx<'_>, status: Status) -> Outcome {
        if let Some(request) = self.queue.pop() {
            ctx.complete(&request, status);
        }
        Outcome::Failed
    }

    /// The queue pair is in error: everything left completes, in order [QP-4].
    pub(crate) fn flush(&mut self, ctx: &mut TxCtx<'_>) {
        while let Some(request) = self.queue.pop() {
            ctx.complete(&request, Status::WrFlushErr);
        }
        self.cursor = 0;
        self.sent = 0;
        self.reads = 0;
        (self.next, self.una) = (self.end, self.end);
        self.pause = None;
        self.deadline = None;
        self.timed = None;
    }

    /// `steps` more packets have been acknowledged.
    fn progress(&mut self, ctx: &TxCtx<'_>, steps: u32) {
        self.went_back = false;
        self.pause = None;
        self.expiries = 0;
        self.progress_at = ctx.now;
        if let Some(settings) = &self.settings {
            self.rnr_left = settings.rnr_retry;
            let max = settings.window.clamp(WINDOW_MIN, WINDOW_MAX);
            self.acknowledged += steps;
            if self.acknowledged >= self.window {
                self.acknowledged = 0;
                self.window = (self.window + self.window / 4).min(max);
            }
        }
        if let Some((psn, at)) = self.timed
            && psn.is_before(self.una)
        {
            self.timed = None;
            let sample = ctx.now.saturating_since(at);
            self.round_trip = Some(self.round_trip.map_or(sample, |old| (old * 7 + sample) / 8));
        }
        if !self.next.is_after(self.una) {
            // What was to be sent again has arrived after all.
            self.seek();
        }
        self.deadline = None;
        if self.una != self.end {
            self.arm(ctx.now);
        }
    }

    /// The next packet is the one that `una` names.
    fn seek(&mut self) {
        self.next = self.una;
        self.cursor = 0;
        self.sent = 0;
        // Local operations at the head would have been completed.
        if let Some(head) = self.queue.front()
            && head.is_started()
            && !head.is_local()
        {
            self.sent = self.una.since(head.first);
        }
    }

    /// Sends again from `una` [REQ-11], once for a loss.
    fn go_back(&mut self, ctx: &mut TxCtx<'_>) {
        if self.went_back || self.pause.is_some() || self.una == self.end {
            return;
        }
        ctx.counters.go_backs += 1;
        self.went_back = true;
        self.creeping.begin_again(self.una);
        self.window = (self.window / 2).max(WINDOW_MIN);
        self.acknowledged = 0;
        self.unasked = 0;
        self.timed = None;
        self.seek();
        self.arm(ctx.now);
    }

    /// Starts the retransmission timer [REQ-22].
    fn arm(&mut self, now: Instant) {
        let Some(settings) = &self.settings else { return };
        let Some(limit) = settings.timeout() else { return };
        let first = self.round_trip.unwrap_or_default() * 4 + settings.retransmit_min;
        let limit = limit.max(settings.retransmit_min);
        let time = first.checked_mul(1 << self.expiries.min(20)).unwrap_or(limit).min(limit);
        let mut at = now + time;
        if let Some(patience) = settings.patience() {
            at = at.min(self.progress_at + patience);
        }
        self.deadline = Some(at.max(now + Duration::from_nanos(1)));
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.pause.or(self.deadline)
    }

    /// Goes on after a pause, or sends again what was not acknowledged in time [REQ-12].
    pub(crate) fn handle_timeout(&mut self, ctx: &mut TxCtx<'_>) -> Outcome {
        if let Some(until) = self.pause {
            if until <= ctx.now {
                self.pause = None;
            }
            return Outcome::Idle;
        }
        if self.deadline.is_none_or(|at| at > ctx.now) {
            return Outcome::Idle;
        }
        ctx.counters.timeouts += 1;
        let patience = self.settings.as_ref().and_then(Settings::patience);
        let waited = ctx.now.saturating_since(self.progress_at);
        if patience.is_some_and(|patience| waited >= patience) {
            ctx.counters.retries_exceeded += 1;
            return self.fail(ctx, Status::RetryExcErr);
        }
        self.expiries += 1;
        self.went_back = false;
        self.deadline = None;
        self.go_back(ctx);
        Outcome::Idle
    }
}

/// Opcode of a packet [HDR-5], [REQ-2].
const fn opcode(op: &SendOp, first: bool, last: bool) -> Opcode {
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
