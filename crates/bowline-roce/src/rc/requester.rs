//! The requester of a reliable connection.
//!
//! ```text
//!           una          next                 end
//!   PSNs ----|------------|--------------------|-------->
//!    done    |  awaiting  |  to be sent again  |  fresh
//!
//!   queue   [ head ][ .. ][ cursor: `sent` of its packets are behind `next` ][ waiting .. ]
//! ```
//! Without a loss, `next` equals `end`. After a loss, `next` goes back to `una` and the same
//! packets are made again from memory [REQ-11]; local operations that were executed are skipped
//! [REQ-20]. `una` always lies in the request at the head of the queue.
//!
//! If the peer keeps packets that arrive after a gap, as the responder of this stack does, only the
//! missing packet is retransmitted, next to the packets that continue at `next`. The peer's answer
//! shows whether it keeps them: either it acknowledges the retransmitted packet together with those
//! after it, or the retransmitted packet alone.

mod answers;
mod out_of_order;
mod recovery;
mod send;
mod settings;
mod uniform_run;

use core::mem::discriminant;
use std::collections::VecDeque;
use std::time::Duration;

use bowline_verbs::{
    CqId, Error, InvalidReason, PdId, QpCap, QpType, Qpn, RequestPart, SendFlags, SendOp, SendWr,
    Status,
};
use bowline_wire::roce::Psn;

use self::out_of_order::PsnRange;
use self::recovery::{PeerReorders, Repair};
pub(crate) use self::settings::Settings;
use self::settings::{WINDOW_MAX, WINDOW_MIN};
use crate::burst::Burst;
use crate::counters::Counters;
use crate::cq::PendingCompletion;
use crate::gso_loss::GsoLossDetector;
use crate::mr::MrTable;
use crate::sendq::{Request, SendQueue, Stage};
use bowline_base::Instant;

/// Most PSNs of one READ: together with a window still below half of the PSN space.
const READ_PACKETS_MAX: u64 = 1 << 22;

/// Upper bound of a packet's bytes besides its payload: headers, pad and ICRC.
const HEADERS_MAX: usize = 64;

/// Context of a call of the requester.
#[derive(Debug)]
pub(crate) struct TxCtx<'a> {
    pub(crate) now: Instant,
    pub(crate) mrs: &'a mut MrTable,
    pub(crate) pd: PdId,
    pub(crate) qpn: Qpn,
    pub(crate) dest_qpn: Qpn,
    /// Packets of one size are sent as a burst (UDP GSO).
    pub(crate) gso: bool,
    pub(crate) counters: &'a mut Counters,
    /// Completion queue of sends.
    pub(crate) cq: CqId,
    /// Completions, to be moved to their queues.
    pub(crate) done: &'a mut Vec<PendingCompletion>,
}

impl TxCtx<'_> {
    pub(crate) fn complete(&mut self, request: &Request, status: Status) {
        let completion = request.completion(self.qpn, status);
        self.done.push(PendingCompletion {
            cq: self.cq,
            completion,
            wakes: status != Status::Success,
        });
    }
}

/// Outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Outcome {
    /// A packet was appended.
    Packet,
    /// There is nothing to do now.
    Idle,
    /// A request failed. Its completion has been written, and the queue pair must go to ERR [QP-4].
    Failed,
}

/// The sending half of a reliable connection.
#[derive(Debug)]
pub(crate) struct Requester {
    queue: SendQueue,
    cap: QpCap,
    /// Every request produces a completion, signaled or not.
    signal_all: bool,
    settings: Option<Settings>,
    /// Index in `queue` of the request that the next packet belongs to.
    cursor: usize,
    /// Number of PSNs of that request that lie before `next`.
    sent: u32,
    next: Psn,
    end: Psn,
    una: Psn,
    /// READs and atomics started and not complete.
    reads_outstanding: usize,
    /// End PSN of each expected answer: one for each atomic and each part of a READ that has been
    /// requested [REQ-4].
    expected_answers: VecDeque<Psn>,
    /// PSNs of answers received after a gap, in order.
    out_of_order: VecDeque<PsnRange>,
    /// Congestion window in packets [REQ-6]. Halved by a go-back; reduced by a quarter when a peer
    /// that reorders misses many packets. Each loss-free window raises it by a quarter while it is
    /// below `ssthresh`, then by a sixteenth.
    window: u32,
    ssthresh: u32,
    /// Most packets requested by one READ request; not 0.
    read_part: u32,
    /// The window has been filled: the next packet waits until a quarter of the window is free
    /// again.
    window_closed: bool,
    /// Packets acknowledged since the window last grew.
    acked_since_growth: u32,
    /// Packets sent since the last one with the AckReq bit.
    packets_since_ack_req: u32,
    /// A retransmission from `una` is under way and has not led to progress yet.
    recovering: bool,
    /// Whether the peer keeps packets that arrive after a gap.
    peer_reorders: PeerReorders,
    /// The packet `una` is to be retransmitted alone.
    repair: Option<Repair>,
    /// The last packet retransmitted alone: the PSN after it, and the reason.
    repaired: Option<(Psn, Repair)>,
    /// Consecutive missing packets, each retransmitted alone.
    consecutive_gaps: u32,
    /// Losses in the present window; a new window begins when `una` reaches `loss_epoch`.
    losses: u32,
    loss_epoch: Psn,
    gso_loss: GsoLossDetector,
    /// Nothing is sent before this time: the peer had no receive posted (RNR NAK).
    rnr_until: Option<Instant>,
    rnr_left: u8,
    /// The queue pair is in SQD: no further request is started [QP-3].
    sqd: bool,
    /// When the retransmission timer expires.
    rto_deadline: Option<Instant>,
    /// Consecutive expiries of the retransmission timer without progress.
    rto_count: u32,
    /// When a silent peer is probed, and the number of probes without progress.
    probe_at: Option<Instant>,
    probes: u32,
    progress_at: Instant,
    /// Smoothed round-trip time.
    srtt: Option<Duration>,
    /// PSN of the packet whose round trip is being measured, and when it was sent.
    rtt_sample: Option<(Psn, Instant)>,
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
            reads_outstanding: 0,
            expected_answers: VecDeque::new(),
            out_of_order: VecDeque::new(),
            window: 0,
            ssthresh: 0,
            read_part: 1,
            window_closed: false,
            acked_since_growth: 0,
            packets_since_ack_req: 0,
            recovering: false,
            peer_reorders: PeerReorders::Unknown,
            repair: None,
            repaired: None,
            consecutive_gaps: 0,
            losses: 0,
            loss_epoch: Psn::ZERO,
            gso_loss: GsoLossDetector::for_requests(),
            rnr_until: None,
            rnr_left: 0,
            sqd: false,
            rto_deadline: None,
            rto_count: 0,
            probe_at: None,
            probes: 0,
            progress_at: Instant::default(),
            srtt: None,
            rtt_sample: None,
        }
    }

    /// Starts the requester when the queue pair goes to RTS: all PSNs begin at `sq_psn` [REQ-1].
    pub(crate) fn start(&mut self, settings: Settings, sq_psn: u32) {
        let psn = Psn::new(sq_psn);
        (self.next, self.end, self.una, self.loss_epoch) = (psn, psn, psn, psn);
        self.window = settings.window.clamp(WINDOW_MIN, WINDOW_MAX);
        self.ssthresh = self.window;
        self.read_part = self.window;
        self.rnr_left = settings.rnr_retry;
        self.settings = Some(settings);
    }

    /// Queues a request.
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), Error> {
        match &wr.op {
            SendOp::Datagram(..) => {
                return Err(Error::Invalid(InvalidReason::RequestOfOtherType(QpType::Rc)));
            }
            SendOp::Read(_)
            | SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::AtomicWrite(_)
            | SendOp::Flush { .. } => {
                let settings = self.settings.as_ref();
                if settings.is_some_and(|settings| settings.max_rd_atomic == 0) {
                    return Err(Error::Invalid(InvalidReason::NoReads));
                }
                let mtu = settings.map_or(256, |settings| settings.mtu as u64);
                let len: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
                RequestPart::Read.check(len.div_ceil(mtu), READ_PACKETS_MAX)?;
            }
            _ => {}
        }
        self.queue.post(wr, &self.cap)
    }

    /// Enters or leaves SQD: in SQD no further request is started [QP-3].
    pub(crate) const fn set_sqd(&mut self, sqd: bool) {
        self.sqd = sqd;
    }

    /// Tells whether every started request is complete.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.front().is_none_or(|head| head.stage == Stage::Waiting)
    }

    /// Changes attributes, while no request is under way [QP-1].
    pub(crate) fn change(&mut self, settings: Settings) {
        self.rnr_left = settings.rnr_retry;
        self.srtt = None;
        self.settings = Some(settings);
    }

    /// Tells whether the peer receives only the first packet of every burst [ICRC-23].
    pub(crate) const fn has_gso_loss(&self) -> bool {
        self.gso_loss.is_detected()
    }

    /// Number of incomplete requests.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Tells whether [`fill`](Self::fill) would make progress.
    pub(crate) fn has_work(&self) -> bool {
        self.rnr_until.is_none()
            && self.settings.is_some()
            && (self.repair.is_some()
                || self.queue.get(self.cursor).is_some_and(|request| !self.must_wait(request)))
    }

    /// Returns an upper bound of the next packet's bytes, if it belongs to the request at the
    /// cursor and no packet follows that could share a burst with it, which means one of the same
    /// kind that is as short.
    pub(crate) fn next_single_len(&self) -> Option<usize> {
        let request = self.queue.get(self.cursor).filter(|request| !request.is_local())?;
        let mtu = self.settings.as_ref().filter(|_| self.repair.is_none())?.mtu;
        if request.is_read_or_atomic() {
            return Some(HEADERS_MAX);
        }
        let sent = self.sent as usize * mtu;
        let len = (request.len as usize).saturating_sub(sent).min(mtu);
        let shares = |next: &Request| {
            discriminant(&next.op) == discriminant(&request.op)
                && next.len as usize <= len
                && !next.flags.contains(SendFlags::FENCE)
        };
        let shared = !self.sqd && self.queue.get(self.cursor + 1).is_some_and(shares);
        (!shared).then_some(HEADERS_MAX + len)
    }

    /// Tells whether the request at the cursor has to wait for answers to earlier requests.
    fn must_wait(&self, request: &Request) -> bool {
        match request.stage {
            Stage::Broken(_) => return true,
            Stage::Started => {}
            Stage::Waiting => {
                if self.sqd {
                    return true;
                }
                // REQ-5: a local invalidation waits for all earlier requests, as with rxe.
                let alone = matches!(request.op, SendOp::LocalInv(_));
                let fenced = request.flags.contains(SendFlags::FENCE);
                if alone && self.cursor > 0 || fenced && self.reads_outstanding > 0 {
                    return true;
                }
            }
        }
        // REQ-4. A repeated request does not count, since the peer has a slot for it already.
        if request.is_read_or_atomic() && !self.next.is_before(self.end) {
            let limit = self.settings.as_ref().map_or(0, |s| usize::from(s.max_rd_atomic));
            if self.expected_answers.len() >= limit {
                return true;
            }
        }
        !request.is_local() && self.is_full()
    }

    /// Tells whether the window is closed. A full window reopens by quarters, since an
    /// acknowledgement comes for each quarter. Otherwise packets would be sent one by one for ever,
    /// each with an acknowledgement of its own.
    fn is_full(&self) -> bool {
        let in_flight = self.next.since(self.una);
        in_flight >= self.window || self.window_closed && in_flight > self.window - self.window / 4
    }

    /// Executes local operations that are due, and appends one packet, from base transport header
    /// to pad, to `out`, if one may be sent [REQ-7].
    pub(crate) fn fill(&mut self, ctx: &mut TxCtx<'_>, out: &mut Burst) -> Outcome {
        let Some(mtu) = self.settings.as_ref().map(|settings| settings.mtu) else {
            return Outcome::Idle;
        };
        if self.rnr_until.is_none()
            && let Some(repair) = self.repair.take()
            && self.una != self.end
        {
            return self.retransmit_una(ctx, mtu, repair, out);
        }
        loop {
            let Some(request) = self.queue.get(self.cursor) else { return Outcome::Idle };
            if self.rnr_until.is_some() || self.must_wait(request) {
                return Outcome::Idle;
            }
            if request.is_local() {
                if request.is_started() {
                    // REQ-20: an executed local operation is skipped after a go-back.
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
            if self.append(ctx, mtu, false, out) {
                return Outcome::Packet;
            }
            return self.finish_head(ctx);
        }
    }

    /// Completes the request at the head with success.
    fn complete_head(&mut self, ctx: &mut TxCtx<'_>) {
        let Some(request) = self.queue.pop() else { return };
        if request.is_read_or_atomic() {
            self.reads_outstanding -= 1;
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

    /// Completes executed local operations at the head. Fails the request at the head if it is
    /// broken; all requests before it have completed by then.
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

    /// Fails the request at the head.
    fn fail(&mut self, ctx: &mut TxCtx<'_>, status: Status) -> Outcome {
        if let Some(request) = self.queue.pop() {
            ctx.complete(&request, status);
        }
        Outcome::Failed
    }

    /// Completes all requests with a flush error, in order: the queue pair is in ERR [QP-4].
    pub(crate) fn flush(&mut self, ctx: &mut TxCtx<'_>) {
        while let Some(request) = self.queue.pop() {
            ctx.complete(&request, Status::WrFlushErr);
        }
        self.cursor = 0;
        self.sent = 0;
        self.reads_outstanding = 0;
        self.expected_answers.clear();
        self.out_of_order.clear();
        (self.next, self.una) = (self.end, self.end);
        self.rnr_until = None;
        self.rto_deadline = None;
        self.probe_at = None;
        self.repair = None;
        self.rtt_sample = None;
    }
}
