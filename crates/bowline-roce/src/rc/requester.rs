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
//!
//! A peer that keeps what comes after a gap, as this stack's responder does, is sent again only the
//! packet that is missing, beside what goes on at `next`. Whether it keeps shows by what it answers
//! then: the packet sent again alone is acknowledged with those after it, or it is not.

mod answers;
mod out_of_order;
mod recovery;
mod send;
mod settings;
mod uniform_run;

use core::mem::discriminant;
use std::collections::VecDeque;
use std::time::Duration;

use bowline_verbs::{CqId, Error, PdId, QpCap, Qpn, SendFlags, SendOp, SendWr, Status};
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

/// Most PSNs of one read: with a window on top still below half of all.
const READ_PACKETS_MAX: u64 = 1 << 22;

/// No packet has more bytes of headers, pad and ICRC.
const HEADERS_MAX: usize = 64;

/// What the requester is given for the time of a call.
#[derive(Debug)]
pub(crate) struct TxCtx<'a> {
    pub(crate) now: Instant,
    pub(crate) mrs: &'a mut MrTable,
    pub(crate) pd: PdId,
    pub(crate) qpn: Qpn,
    pub(crate) dest_qpn: Qpn,
    /// Packets of one size leave together.
    pub(crate) gso: bool,
    pub(crate) counters: &'a mut Counters,
    /// Completion queue of sends.
    pub(crate) cq: CqId,
    /// What has completed.
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
    /// Reads and atomics begun and not complete.
    reads_outstanding: usize,
    /// Where the answers end to what was asked of the peer and is not answered: one for each atomic
    /// and each part of a read [REQ-4].
    expected_answers: VecDeque<Psn>,
    /// Answers that have come before one that is missing, in order.
    out_of_order: VecDeque<PsnRange>,
    /// Packets that may be on their way [REQ-6]: half after going back, a quarter less when many
    /// are lost of a peer that keeps the others; a quarter more for every window without one up to
    /// half of where the last loss was, then a sixteenth.
    window: u32,
    ssthresh: u32,
    /// Most packets asked for by one read request; not 0.
    read_part: u32,
    /// The window has been filled: the next packet waits until a quarter of it is free again.
    window_closed: bool,
    /// Packets acknowledged since the window last grew.
    acked_since_growth: u32,
    /// Packets sent since the last that asked for an acknowledgement.
    packets_since_ack_req: u32,
    /// Went back to `una`, and nothing has come of it yet.
    recovering: bool,
    /// Whether the peer keeps what comes after a gap.
    peer_reorders: PeerReorders,
    /// The packet `una` is to be sent again, alone.
    repair: Option<Repair>,
    /// One was: the PSN that follows it, and why.
    repaired: Option<(Psn, Repair)>,
    /// Packets in a row that were missing, each sent again alone.
    consecutive_gaps: u32,
    /// Losses since `epoch` was the end of what was sent.
    losses: u32,
    loss_epoch: Psn,
    gso_loss: GsoLossDetector,
    /// Not before: the peer had no receive posted.
    rnr_until: Option<Instant>,
    rnr_left: u8,
    /// No request is begun [QP-3].
    sqd: bool,
    /// Retransmission timer.
    rto_deadline: Option<Instant>,
    /// Times it ran out without progress.
    rto_count: u32,
    /// When the peer is asked how far it has come, and how often that was done without progress.
    probe_at: Option<Instant>,
    probes: u32,
    progress_at: Instant,
    /// Smoothed round trip.
    srtt: Option<Duration>,
    /// PSN whose acknowledgement is timed, and when it was sent.
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

    /// The queue pair goes to RTS: all PSNs begin at `sq_psn` [REQ-1].
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
                return Err(Error::Invalid("datagrams are for UD queue pairs"));
            }
            SendOp::Read(_)
            | SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::AtomicWrite(_)
            | SendOp::Flush { .. } => {
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

    /// Begins no request from now on, or goes on [QP-3].
    pub(crate) const fn set_sqd(&mut self, sqd: bool) {
        self.sqd = sqd;
    }

    /// Tells whether everything begun is finished.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.front().is_none_or(|head| head.stage == Stage::Waiting)
    }

    /// Takes other attributes, while nothing is under way [QP-1].
    pub(crate) fn change(&mut self, settings: Settings) {
        self.rnr_left = settings.rnr_retry;
        self.srtt = None;
        self.settings = Some(settings);
    }

    /// Tells whether of every burst only the first packet arrives [ICRC-23].
    pub(crate) const fn has_gso_loss(&self) -> bool {
        self.gso_loss.is_detected()
    }

    /// Requests not complete.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Tells whether [`fill`](Self::fill) would do something.
    pub(crate) fn has_work(&self) -> bool {
        self.rnr_until.is_none()
            && self.settings.is_some()
            && (self.repair.is_some()
                || self.queue.get(self.cursor).is_some_and(|request| !self.must_wait(request)))
    }

    /// At most how many bytes the next packet has, if it is one of the request at the cursor, and
    /// none that it would share a burst with follows: one of the same kind, and as short.
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

    /// Tells whether a request, the one at the cursor, has to wait for answers to earlier ones.
    fn must_wait(&self, request: &Request) -> bool {
        match request.stage {
            Stage::Broken(_) => return true,
            Stage::Started => {}
            Stage::Waiting => {
                if self.sqd {
                    return true;
                }
                // REQ-5: a local invalidation waits for everything, as with rxe.
                let alone = matches!(request.op, SendOp::LocalInv(_));
                let fenced = request.flags.contains(SendFlags::FENCE);
                if alone && self.cursor > 0 || fenced && self.reads_outstanding > 0 {
                    return true;
                }
            }
        }
        // REQ-4; what is asked for again the peer has in mind already.
        if request.is_read_or_atomic() && !self.next.is_before(self.end) {
            let limit = self.settings.as_ref().map_or(0, |s| usize::from(s.max_rd_atomic));
            if self.expected_answers.len() >= limit {
                return true;
            }
        }
        !request.is_local() && self.is_full()
    }

    /// Tells whether the window lets no packet through. One that is full opens by quarters, since
    /// an acknowledgement comes for each: else packets would go out one by one, each with an
    /// acknowledgement of its own, for ever.
    fn is_full(&self) -> bool {
        let in_flight = self.next.since(self.una);
        in_flight >= self.window || self.window_closed && in_flight > self.window - self.window / 4
    }

    /// Executes local operations whose turn it is, and appends one packet, from base transport
    /// header to pad, to `out`, if one may be sent [REQ-7].
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
            if self.append(ctx, mtu, false, out) {
                return Outcome::Packet;
            }
            return self.finish_head(ctx);
        }
    }

    /// Completes the head as done.
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
