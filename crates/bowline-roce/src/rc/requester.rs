//! The requester of a reliable connection.
//!
//! ```text
//!           una          next                 end
//!   PSNs ----|------------|--------------------|-------->
//!    done    |  awaiting  |  to be sent again  |  fresh
//! ```
//! Four parts hold its state, each with a question that it alone answers:
//!
//! | part | question |
//! |---|---|
//! | [`cursor`] | what is sent next: a PSN, and its place in the send queue |
//! | [`window`] | what is in flight, and may more be sent? |
//! | [`recovery`] | what is sent again, and why |
//! | [`retransmission_timer`] | when is it sent again, and when is the peer given up? |
//!
//! The [`Requester`] owns them and the send queue, and tells each what the others have to know. It
//! makes packets ([`send`], [`uniform_run`]), takes answers ([`answers`], [`out_of_order`]) and
//! retransmits ([`resend`]).
//!
//! Without a loss, `next` equals `end`. After a loss, `next` goes back to `una` and the same
//! packets are made again from memory [REQ-11]; local operations that were executed are skipped
//! [REQ-20]. `una` always lies in the request at the head of the queue.
//!
//! If the peer keeps packets that arrive after a gap, as the responder of this stack does, only the
//! missing packet is retransmitted, next to the packets that continue at `next`.

mod answers;
mod cursor;
mod holes;
mod out_of_order;
mod recovery;
mod resend;
mod retransmission_timer;
mod send;
mod sent_log;
mod settings;
mod uniform_run;
mod window;

/// Two devices wired back to back, as other tests have them.
#[cfg(test)]
#[path = "../../tests/common/mod.rs"]
mod common;
#[cfg(test)]
mod tests;

use core::mem::discriminant;

use bowline_verbs::{
    CqId, Error, InvalidReason, PdId, QpCap, QpType, Qpn, RequestPart, SendFlags, SendOp, SendWr,
    Status,
};
use bowline_wire::roce::Psn;

use self::cursor::Cursor;
use self::holes::Holes;
use self::recovery::Recovery;
use self::retransmission_timer::RetransmissionTimer;
use self::send::Place;
pub(crate) use self::send::{execute_local, opcode};
use self::sent_log::SentLog;
pub(crate) use self::settings::Settings;
use self::window::Window;
use crate::burst::Burst;
use crate::congestion::Path;
use crate::counters::Counters;
use crate::cq::PendingCompletion;
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
    /// The path to the peer.
    pub(crate) path: &'a mut Path,
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

/// Whether a requester has something to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Idle,
    Ready,
    /// It has, but the path's window is full, or its pacer holds it back.
    WaitsForPath,
}

/// The PSNs that divide those of a connection.
#[derive(Clone, Copy, Debug)]
struct Psns {
    /// The oldest that is not acknowledged.
    una: Psn,
    /// That of the next packet.
    next: Psn,
    /// The first that has not been sent.
    end: Psn,
}

/// The sending half of a reliable connection.
#[derive(Debug)]
pub(crate) struct Requester {
    queue: SendQueue,
    cursor: Cursor,
    window: Window,
    recovery: Recovery,
    timer: RetransmissionTimer,
    /// What is in flight on the path.
    log: SentLog,
    /// What READs have asked for, and what of it counts on the path.
    asked: SentLog,
    /// What the peer has reported missing.
    holes: Holes,
    /// When packets were last sent again because of silence.
    resent_at: Option<Instant>,
    /// The peer may report gaps.
    takes_gap_reports: bool,
    cap: QpCap,
    /// Every request produces a completion, signaled or not.
    signal_all: bool,
    /// Payload bytes of a full packet; `None` until the queue pair goes to RTS.
    mtu: Option<usize>,
    /// The queue pair is in SQD: no further request is started [QP-3].
    sqd: bool,
}

impl Requester {
    pub(crate) fn new(cap: QpCap, signal_all: bool) -> Self {
        Self {
            queue: SendQueue::default(),
            cursor: Cursor::new(Psn::ZERO),
            window: Window::new(),
            recovery: Recovery::new(),
            timer: RetransmissionTimer::new(),
            log: SentLog::new(Psn::ZERO),
            asked: SentLog::new(Psn::ZERO),
            holes: Holes::new(),
            resent_at: None,
            takes_gap_reports: false,
            cap,
            signal_all,
            mtu: None,
            sqd: false,
        }
    }

    /// Starts the requester when the queue pair goes to RTS: all PSNs begin at `sq_psn` [REQ-1].
    pub(crate) fn start(&mut self, settings: &Settings, sq_psn: u32) {
        let psn = Psn::new(sq_psn);
        self.cursor = Cursor::new(psn);
        self.window.start(settings, psn);
        self.log = SentLog::new(psn);
        self.asked = SentLog::new(psn);
        self.recovery.configure(settings);
        self.timer.configure(settings);
        self.mtu = Some(settings.mtu);
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
                if self.mtu.is_some() && self.window.reads_max() == 0 {
                    return Err(Error::Invalid(InvalidReason::NoReads));
                }
                let mtu = self.mtu.map_or(256, |mtu| mtu as u64);
                let len: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
                RequestPart::Read.check(len.div_ceil(mtu), READ_PACKETS_MAX)?;
            }
            _ => {}
        }
        self.queue.post(wr, &self.cap)
    }

    /// Takes the newest requests back, of which none has begun: `len` are left.
    pub(crate) fn take_back(&mut self, len: usize) {
        self.queue.truncate(len);
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
    pub(crate) fn change(&mut self, settings: &Settings) {
        self.window.change(settings);
        self.recovery.configure(settings);
        self.timer.configure(settings);
        self.mtu = Some(settings.mtu);
    }

    /// Tells whether the peer receives only the first packet of every burst [ICRC-23].
    pub(crate) const fn has_gso_loss(&self) -> bool {
        self.recovery.has_gso_loss()
    }

    const fn psns(&self) -> Psns {
        Psns { una: self.window.una(), next: self.cursor.next(), end: self.window.end() }
    }

    /// Number of incomplete requests.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Tells whether [`fill`](Self::fill) would make progress.
    #[inline]
    pub(crate) fn readiness(&self, now: Instant, path: &Path) -> Readiness {
        if self.recovery.is_paused() || self.mtu.is_none() {
            return Readiness::Idle;
        }
        if self.has_repair(now, path) {
            return Readiness::Ready;
        }
        match self.cursor.request(&self.queue) {
            Some(request) if !self.must_wait(request) => {
                // Its own answers give it another turn.
                if !self.may_ask(request, path) {
                    Readiness::Idle
                } else if request.is_local() || path.allows(now) {
                    Readiness::Ready
                } else {
                    Readiness::WaitsForPath
                }
            }
            _ => Readiness::Idle,
        }
    }

    /// Tells whether a lost packet is to be sent again, for which no window matters: it takes the
    /// place of the lost one.
    #[inline]
    pub(crate) fn has_repair(&self, now: Instant, path: &Path) -> bool {
        self.recovery.has_repair()
            || self.holes.due().is_some_and(|due| due <= now) && path.allows_replacement(now)
    }

    /// Takes reports of gaps from the peer [CC-10].
    pub(crate) const fn take_gap_reports(&mut self) {
        self.takes_gap_reports = true;
    }

    /// Bytes that the path counts as in flight.
    pub(crate) const fn in_flight(&self) -> u64 {
        self.log.bytes()
    }

    /// Tells whether a READ may ask for more [CC-8]. One that has asked for nothing may always: no
    /// answer would give it another turn.
    fn may_ask(&self, request: &Request, path: &Path) -> bool {
        !request.is_read() || self.asked.bytes() == 0 || path.allows_read()
    }

    /// Bytes that READs have asked for.
    pub(crate) const fn asked(&self) -> u64 {
        self.asked.bytes()
    }

    /// Returns an upper bound of the next packet's bytes, if it belongs to the request at the
    /// cursor and no packet follows that could share a burst with it, which means one of the same
    /// kind that is as short.
    pub(crate) fn next_single_len(&self) -> Option<usize> {
        let request = self.cursor.request(&self.queue).filter(|request| !request.is_local())?;
        let mtu = self.mtu.filter(|_| !self.recovery.has_repair() && self.holes.due().is_none())?;
        if request.is_read_or_atomic() {
            return Some(HEADERS_MAX);
        }
        let sent = self.cursor.sent() as usize * mtu;
        let len = (request.len as usize).saturating_sub(sent).min(mtu);
        let shares = |next: &Request| {
            discriminant(&next.op) == discriminant(&request.op)
                && next.len as usize <= len
                && !next.flags.contains(SendFlags::FENCE)
        };
        let shared = !self.sqd && self.queue.get(self.cursor.index() + 1).is_some_and(shares);
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
                if alone && self.cursor.index() > 0 || fenced && self.window.has_reads() {
                    return true;
                }
            }
        }
        // REQ-4. A repeated request does not count, since the peer has a slot for it already.
        let next = self.cursor.next();
        let is_fresh = !next.is_before(self.window.end());
        if request.is_read_or_atomic() && is_fresh && !self.window.allows_read() {
            return true;
        }
        !request.is_local() && !self.window.allows(next)
    }

    /// Executes local operations that are due, and appends one packet, from base transport header
    /// to pad, to `out`, if one may be sent [REQ-7].
    pub(crate) fn fill(&mut self, ctx: &mut TxCtx<'_>, out: &mut Burst) -> Outcome {
        let Some(mtu) = self.mtu else { return Outcome::Idle };
        self.window.set_path_window(ctx.path.window_packets());
        self.timer.set_lossy(ctx.path.is_lossy(ctx.now));
        if !self.recovery.is_paused()
            && let Some(repair) = self.recovery.take_repair()
            && !self.window.is_empty()
        {
            return self.retransmit_una(ctx, mtu, repair, out);
        }
        if !self.recovery.is_paused()
            && ctx.path.allows_replacement(ctx.now)
            && let Some((psn, last)) = self.holes.take(ctx.now)
        {
            return self.fill_hole(ctx, mtu, psn, last, out);
        }
        loop {
            let Some(request) = self.cursor.request(&self.queue) else { return Outcome::Idle };
            if self.recovery.is_paused() || self.must_wait(request) {
                return Outcome::Idle;
            }
            let allowed = ctx.path.allows(ctx.now) && self.may_ask(request, ctx.path);
            if !request.is_local() && !allowed {
                return Outcome::Idle;
            }
            if request.is_local() {
                if request.is_started() {
                    // REQ-20: an executed local operation is skipped after a go-back.
                    self.cursor.advance_request();
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
            if self.append(ctx, mtu, Place::InOrder, out) {
                return Outcome::Packet;
            }
            return self.finish_head(ctx);
        }
    }

    /// Completes the request at the head with success.
    fn complete_head(&mut self, ctx: &mut TxCtx<'_>) {
        let Some(request) = self.queue.pop() else { return };
        if request.is_read_or_atomic() {
            self.window.end_read();
        }
        self.cursor.head_left();
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
        ctx.path.gone(self.log.clear(self.window.end()));
        let asked = self.asked.clear(self.window.end());
        ctx.path.answered(ctx.now, asked, None);
        self.holes.clear();
        self.cursor = Cursor::new(self.window.end());
        self.window.clear();
        self.recovery.clear();
        self.timer.stop();
    }
}
