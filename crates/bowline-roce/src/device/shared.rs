//! State that all queue pairs of a device share, and the bookkeeping after a queue pair has
//! changed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use bowline_base::Instant;
use bowline_verbs::{Access, AsyncEvent, CqId, PdId, QpAttr, QpState, QpType, Qpn, SrqId};

use super::Event;
use crate::config::Config;
use crate::congestion::{PathId, Paths};
use crate::counters::Counters;
use crate::cq::{Added, CqTable, PendingCompletion};
use crate::gso_loss::GsoBlocklist;
use crate::mr::MrTable;
use crate::qp::{Halves, Qp};
use crate::rc::requester::{Outcome, Readiness, Requester, TxCtx};
use crate::rc::responder::{ReorderBudget, RxCtx};
use crate::srq::SrqTable;
use crate::table::NumberMap;

/// Attributes of a queue pair that both of its halves need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpContext {
    qpn: Qpn,
    pd: PdId,
    pub(crate) dest_qpn: Qpn,
    access: Access,
    mtu: usize,
    send_cq: CqId,
    recv_cq: CqId,
    srq: Option<SrqId>,
    path: PathId,
}

/// State that all queue pairs share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) mrs: MrTable,
    pub(crate) cqs: CqTable,
    pub(crate) srqs: SrqTable,
    pub(crate) counters: Counters,
    pub(crate) events: VecDeque<Event>,
    pub(crate) gso_blocklist: GsoBlocklist,
    pub(crate) paths: Paths,
    /// Paths on which a queue pair that waits may send.
    pub(crate) ready_paths: Vec<PathId>,
    reorder_budget: ReorderBudget,
    /// Completions that are not in their queues yet.
    done: Vec<PendingCompletion>,
    /// Completions stay in `done` until `end_gathering`.
    gathering: bool,
    /// Completion queues that have overrun and whose queue pairs have not been failed yet.
    pub(crate) overrun: Vec<CqId>,
    /// Queue pairs with replies to send, by number, in the order of their turns.
    pub(crate) urgent: VecDeque<u32>,
    /// Queue pairs of `urgent` whose acknowledgement is deferred [RSP-25].
    pub(crate) deferred_acks: Vec<u32>,
    pub(crate) normal: VecDeque<u32>,
    /// Heap of (due time, queue pair number). Stale entries remain; only the entry equal to
    /// `Qp::timer_at` counts.
    timers: BinaryHeap<Reverse<(Instant, u32)>>,
    /// Heap of (due time, path). Only the entry equal to `Path::timer_at` counts.
    path_timers: BinaryHeap<Reverse<(Instant, PathId)>>,
}

/// Stale timers allowed in the heap, in addition to four per queue pair, before they are purged.
const TIMERS_KEPT: usize = 64;

impl QpContext {
    /// Payload bytes of a full packet.
    pub(crate) const fn mtu(&self) -> usize {
        self.mtu
    }
}

impl Shared {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            mrs: MrTable::new(config.limits.mrs, config.limits.mws),
            cqs: CqTable::new(config.limits.cqs, config.limits.cqes),
            srqs: SrqTable::new(&config.limits),
            counters: Counters::default(),
            events: VecDeque::new(),
            gso_blocklist: GsoBlocklist::default(),
            paths: Paths::new(config.congestion),
            ready_paths: Vec::new(),
            reorder_budget: ReorderBudget::new(config.limits.reorder_bytes),
            done: Vec::new(),
            gathering: false,
            overrun: Vec::new(),
            urgent: VecDeque::new(),
            deferred_acks: Vec::new(),
            normal: VecDeque::new(),
            timers: BinaryHeap::new(),
            path_timers: BinaryHeap::new(),
            config,
        }
    }

    /// Returns the attributes of a queue pair that both of its halves need.
    pub(crate) fn qp_context(&self, qp: &Qp) -> QpContext {
        QpContext {
            qpn: qp.qpn,
            pd: qp.init.pd,
            dest_qpn: qp.attr.dest_qpn.unwrap_or_default(),
            access: qp.attr.access.unwrap_or_default(),
            mtu: qp.mtu(&self.config),
            send_cq: qp.init.send_cq,
            recv_cq: qp.init.recv_cq,
            srq: qp.init.srq,
            path: qp.path,
        }
    }

    /// Returns the context of the sending half of a queue pair.
    pub(crate) fn tx(&mut self, now: Instant, context: QpContext) -> TxCtx<'_> {
        TxCtx {
            now,
            mrs: &mut self.mrs,
            pd: context.pd,
            qpn: context.qpn,
            dest_qpn: context.dest_qpn,
            gso: self.config.gso,
            counters: &mut self.counters,
            path: self.paths.get_mut(context.path),
            cq: context.send_cq,
            done: &mut self.done,
        }
    }

    /// Returns the context of the receiving half of a queue pair.
    pub(crate) fn rx(&mut self, now: Instant, context: QpContext) -> RxCtx<'_> {
        let shared = context.srq.and_then(|srq| self.srqs.receives(srq));
        let (recv_pd, shared_receives) = match shared {
            Some((pd, receives)) => (pd, Some(receives)),
            None => (context.pd, None),
        };
        RxCtx {
            now,
            mrs: &mut self.mrs,
            pd: context.pd,
            access: context.access,
            mtu: context.mtu,
            qpn: context.qpn,
            counters: &mut self.counters,
            reorder_budget: &self.reorder_budget,
            shared_receives,
            recv_pd,
            cq: context.recv_cq,
            done: &mut self.done,
        }
    }

    /// Does the bookkeeping after a queue pair has changed: moves its completions to their queues,
    /// unless they are being gathered, and schedules its next turn and its timer. With `urgent`,
    /// replies are scheduled before other packets; a queue pair that has just had a turn passes
    /// `false`.
    pub(crate) fn settle(&mut self, now: Instant, qp: &mut Qp, urgent: bool) {
        let ended = match &qp.halves {
            // The final NAK has been sent [RSP-18].
            Halves::Rc { responder, .. } => responder.failed() && !responder.has_reply(),
            Halves::Uc { .. } | Halves::Ud { .. } => false,
        };
        if ended && qp.state != QpState::Err && qp.state >= QpState::Rtr {
            self.fail(now, qp);
            return;
        }
        self.hand_out();
        if qp.draining.is_some() && qp.has_drained() {
            self.events.push_back(Event::Async(AsyncEvent::SqDrained(qp.qpn)));
        }
        let (replies, requests, timer) = match &qp.halves {
            Halves::Rc { requester, responder } => {
                let late = qp.delayed_ack.deadline(now).filter(|_| responder.has_one_ack());
                let timer = earliest(
                    requester.poll_timeout(now, self.paths.get(qp.path)),
                    responder.poll_timeout(),
                );
                (
                    qp.state >= QpState::Rtr && responder.has_reply() && late.is_none(),
                    qp.requests()
                        && !responder.failed()
                        && self.may_send(now, (qp.path, qp.qpn), &mut qp.in_line, requester),
                    earliest(timer, late),
                )
            }
            Halves::Uc { sender, .. } => (false, qp.has_message(sender), None),
            Halves::Ud { sender, .. } => {
                (false, qp.state == QpState::Rts && sender.len() > 0, None)
            }
        };
        if qp.state == QpState::Err || qp.state < QpState::Rtr {
            return;
        }
        let urgent = replies && urgent;
        if urgent && !qp.in_urgent {
            qp.in_urgent = true;
            self.urgent.push_back(qp.qpn.0);
        }
        if (requests || replies && !urgent) && !qp.in_normal {
            qp.in_normal = true;
            self.normal.push_back(qp.qpn.0);
        }
        if let Some(at) = timer
            && qp.timer_at.is_none_or(|now_at| at < now_at)
        {
            qp.timer_at = Some(at);
            self.timers.push(Reverse((at, qp.qpn.0)));
        }
    }

    /// Tells whether a requester may send. If it must wait for the path's window, or if others do,
    /// its queue pair joins the line of the path.
    fn may_send(
        &mut self,
        now: Instant,
        (id, qpn): (PathId, Qpn),
        in_line: &mut bool,
        requester: &Requester,
    ) -> bool {
        let path = self.paths.get_mut(id);
        let readiness = requester.readiness(now, path);
        let repairs = readiness == Readiness::Ready
            && (path.waiting.is_empty() || requester.has_repair(now, path));
        if readiness != Readiness::Idle && !repairs && !*in_line {
            *in_line = true;
            path.waiting.push_back(qpn.0);
        }
        if path.waiting.is_empty() {
            return repairs;
        }
        if path.allows(now) {
            self.ready_paths.push(id);
        } else {
            self.wake_line(now, id);
        }
        repairs
    }

    /// Sets the timer of a path whose pacer holds back those who wait.
    pub(crate) fn wake_line(&mut self, now: Instant, id: PathId) {
        let path = self.paths.get_mut(id);
        if !path.waiting.is_empty()
            && let Some(at) = path.resumes_at(now)
            && path.timer_at.is_none_or(|known| at < known)
        {
            path.timer_at = Some(at);
            self.path_timers.push(Reverse((at, id)));
        }
    }

    /// Chooses the path of a queue pair that gets the address of a peer, or forgets it.
    pub(crate) fn choose_path(&mut self, now: Instant, qp: &mut Qp, attr: &QpAttr, to: QpState) {
        let to_peer = attr.av.filter(|_| qp.init.qp_type == QpType::Rc);
        if to_peer.is_some() || to == QpState::Reset {
            self.paths.leave(now, qp.path, qp.qpn, qp.in_flight());
            self.ready_paths.push(qp.path);
            qp.in_line = false;
            qp.path = to_peer
                .map_or_else(PathId::default, |av| self.paths.join(now, av.local, av.remote));
        }
        if let Some(mtu) = attr.path_mtu.filter(|_| qp.init.qp_type == QpType::Rc) {
            self.paths.get_mut(qp.path).set_mtu(mtu.bytes());
        }
    }

    /// Runs the timers of paths that are due.
    pub(crate) fn run_path_timers(&mut self, now: Instant) {
        while let Some(Reverse((at, id))) = self.path_timers.peek().copied()
            && at <= now
        {
            self.path_timers.pop();
            let path = self.paths.get_mut(id);
            if path.timer_at == Some(at) {
                path.timer_at = None;
                path.timer_came(now, at);
                self.ready_paths.push(id);
            }
        }
    }

    /// Starts to gather completions, until [`end_gathering`](Self::end_gathering). Copying a
    /// completion that was just written in pieces stalls until all earlier stores have left the
    /// store buffer, the payload included.
    pub(crate) const fn begin_gathering(&mut self) {
        self.gathering = true;
    }

    /// Moves the gathered completions to their queues.
    pub(crate) fn end_gathering(&mut self) {
        self.gathering = false;
        self.hand_out();
    }

    /// Moves completions to their queues, unless they are being gathered.
    fn hand_out(&mut self) {
        if self.gathering {
            return;
        }
        for PendingCompletion { cq, completion, wakes } in self.done.drain(..) {
            match self.cqs.add(cq, completion, wakes) {
                Added::Quiet | Added::Lost => {}
                Added::Ready => self.events.push_back(Event::CqReady(cq)),
                Added::Overrun { waited } => {
                    self.counters.cq_overruns += 1;
                    if waited {
                        self.events.push_back(Event::CqReady(cq));
                    }
                    self.events.push_back(Event::Async(AsyncEvent::CqError(cq)));
                    self.overrun.push(cq);
                }
            }
        }
    }

    /// Moves a queue pair to ERR for an internal reason and reports that as an event, since there
    /// may be no completion that shows it [QP-10].
    pub(crate) fn fail(&mut self, now: Instant, qp: &mut Qp) {
        self.counters.qp_errors += 1;
        self.events.push_back(Event::Async(AsyncEvent::QpFatal(qp.qpn)));
        self.enter_error(now, qp);
    }

    /// Fails a queue pair that cannot continue for a reason outside of it.
    pub(crate) fn stop(&mut self, now: Instant, qp: &mut Qp) {
        if qp.state != QpState::Err && qp.state != QpState::Reset {
            self.fail(now, qp);
        }
    }

    /// Moves a queue pair to ERR: all posted requests are flushed, and nothing more is sent [QP-4].
    pub(crate) fn enter_error(&mut self, now: Instant, qp: &mut Qp) {
        let before = std::mem::replace(&mut qp.state, QpState::Err);
        self.flush(now, qp);
        if qp.init.srq.is_some() && before != QpState::Err {
            self.events.push_back(Event::Async(AsyncEvent::LastWqeReached(qp.qpn))); // [SRQ-5]
        }
    }

    /// Reports that a shared receive queue has fewer receives than its limit [SRQ-4].
    pub(crate) fn report_srq_limit(&mut self, srq: SrqId) {
        if self.srqs.limit_reached(srq) {
            self.events.push_back(Event::Async(AsyncEvent::SrqLimitReached(srq)));
        }
    }

    /// Moves the send queue of a UC or UD queue pair to SQE: its posted requests are flushed, and
    /// receiving continues.
    pub(crate) fn enter_send_error(&mut self, now: Instant, qp: &mut Qp) {
        qp.state = QpState::Sqe;
        self.flush_sends(now, qp);
    }

    /// Flushes the send queue of a UC or UD queue pair in SQE.
    pub(crate) fn flush_sends(&mut self, now: Instant, qp: &mut Qp) {
        let context = self.qp_context(qp);
        match &mut qp.halves {
            Halves::Rc { .. } => {}
            Halves::Uc { sender, .. } => sender.flush(&mut self.tx(now, context)),
            Halves::Ud { sender, .. } => sender.flush(&mut self.tx(now, context)),
        }
        self.hand_out();
    }

    /// Flushes a queue pair in error.
    pub(crate) fn flush(&mut self, now: Instant, qp: &mut Qp) {
        let context = self.qp_context(qp);
        match &mut qp.halves {
            Halves::Rc { requester, responder } => {
                requester.flush(&mut self.tx(now, context));
                self.ready_paths.push(context.path);
                responder.flush(&mut self.rx(now, context));
            }
            Halves::Uc { sender, receiver } => {
                sender.flush(&mut self.tx(now, context));
                receiver.flush(&mut self.rx(now, context));
            }
            Halves::Ud { sender, receiver } => {
                sender.flush(&mut self.tx(now, context));
                receiver.flush(&mut self.rx(now, context));
            }
        }
        self.hand_out();
    }

    pub(crate) fn handle_qp_timeout(&mut self, now: Instant, qp: &mut Qp) {
        if qp.state == QpState::Err {
            return;
        }
        let context = self.qp_context(qp);
        let mut outcome = Outcome::Idle;
        if let Halves::Rc { requester, responder } = &mut qp.halves {
            responder.handle_timeout(now);
            outcome = requester.handle_timeout(&mut self.tx(now, context));
        }
        self.detect_gso_loss(qp);
        self.after(now, qp, outcome, true);
    }

    /// Stops sending bursts to a peer that receives only the first packet of each [ICRC-23].
    pub(crate) fn detect_gso_loss(&mut self, qp: &Qp) {
        let gso_loss = match &qp.halves {
            Halves::Rc { requester, .. } => {
                requester.has_gso_loss() || qp.answer_gso_loss.is_detected()
            }
            Halves::Uc { .. } | Halves::Ud { .. } => false,
        };
        if gso_loss
            && let Some(av) = qp.attr.av
            && self.gso_blocklist.insert(av.remote)
        {
            self.counters.bursts_given_up += 1;
        }
    }

    /// Does the bookkeeping after one half of a queue pair has run.
    pub(crate) fn after(&mut self, now: Instant, qp: &mut Qp, outcome: Outcome, urgent: bool) {
        if outcome == Outcome::Failed {
            self.counters.qp_errors += 1;
            self.enter_error(now, qp);
        } else {
            self.settle(now, qp, urgent);
        }
    }

    /// Number of heap entries, stale ones included.
    pub(super) fn timers(&self) -> usize {
        self.timers.len()
    }

    /// Returns when the next timer is due.
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        let queue_pairs = self.timers.peek().map(|Reverse((at, _))| *at);
        earliest(queue_pairs, self.path_timers.peek().map(|Reverse((at, _))| *at))
    }

    /// Pops a queue pair whose timer is due. Purges stale timers when there are many: a peer that
    /// requests short RNR delays again and again leaves one behind with each.
    pub(crate) fn due(&mut self, now: Instant, qps: &NumberMap<Box<Qp>>) -> Option<Qpn> {
        if self.timers.len() > TIMERS_KEPT + 4 * qps.len() {
            self.timers.retain(|Reverse((at, qpn))| {
                qps.get(qpn).is_some_and(|qp| qp.timer_at == Some(*at))
            });
        }
        while let Some(Reverse((at, qpn))) = self.timers.peek().copied() {
            if at > now {
                return None;
            }
            self.timers.pop();
            if qps.get(&qpn).is_some_and(|qp| qp.timer_at == Some(at)) {
                return Some(Qpn(qpn));
            }
        }
        None
    }
}

fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
