//! The part of the driver that carries out connections over RDMA.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use bowline_rds::{CloseReason, RdmaFrame, RdmaLinkId, RdmaRequest, RdmaShape, RdmaStatus, RxBuf};
use bowline_wire::rds::HEADER_LEN;

use super::{BowlineHost, close_reason, now};
use crate::engine::queue::{MS, US};
use crate::rds::ctx::{Ctx, HostEvent};
use crate::rds::net::Reason;
use crate::rds::ops::Work;
use crate::rds::rdma::{Frame, QpId, RdmaNodePlan, RdmaNotice};
use crate::rds::sabotage::Sabotage;

/// Work of the driver that is due later.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RdmaWork {
    /// Answers a request.
    Answer(QpId),
    /// Tells the node that a connection is established.
    Establish(QpId),
    /// Posts frames that the node has to send.
    Send(QpId),
    /// Reports that frames are posted.
    Posted(QpId),
    /// Takes completions of sends.
    Complete(QpId),
    /// Takes received frames.
    Read(QpId),
    /// Posts receives.
    Refill(QpId),
    /// Ends a queue pair that the node does not want any more.
    Stop(QpId),
    /// All requests of a queue pair are flushed.
    Flushed(QpId, Reason),
}

/// A queue pair of the driver.
#[derive(Debug)]
struct RdmaIo {
    qp: QpId,
    /// Frames were posted, and the node was not told yet.
    unreported: bool,
    send_pending: bool,
    complete_pending: bool,
    read_pending: bool,
    refill_pending: bool,
    /// The node wants no receives posted.
    paused: bool,
    /// Number of receives that were used and not posted again.
    owed: usize,
    /// It is being flushed.
    closing: bool,
}

/// The queue pairs of a driver.
#[derive(Debug)]
pub(crate) struct RdmaSide {
    pub(super) plan: RdmaNodePlan,
    links: BTreeMap<RdmaLinkId, RdmaIo>,
    qps: BTreeMap<QpId, RdmaLinkId>,
    /// Requests of operations that a connection left behind.
    left: Vec<Work>,
}

impl RdmaSide {
    fn new(plan: RdmaNodePlan) -> Self {
        Self { plan, links: BTreeMap::new(), qps: BTreeMap::new(), left: Vec::new() }
    }

    fn adopt(&mut self, link: RdmaLinkId, qp: QpId) {
        let io = RdmaIo {
            qp,
            unreported: false,
            send_pending: false,
            complete_pending: false,
            read_pending: false,
            refill_pending: false,
            paused: false,
            owed: 0,
            closing: false,
        };
        self.links.insert(link, io);
        self.qps.insert(qp, link);
    }

    fn of(&mut self, qp: QpId) -> Option<(RdmaLinkId, &mut RdmaIo)> {
        let link = *self.qps.get(&qp)?;
        Some((link, self.links.get_mut(&link)?))
    }
}

impl BowlineHost {
    /// Lets the node serve addresses over RDMA.
    pub(crate) fn serve_rdma(&mut self, plan: &RdmaNodePlan, addrs: &[IpAddr]) {
        self.node.set_rdma_addrs(addrs.iter().copied());
        self.node.set_rdma_frame(plan.frame);
        self.rdma_addrs = addrs.to_vec();
        if self.rdma.is_none() {
            self.rdma = Some(RdmaSide::new(plan.clone()));
        }
    }

    pub(crate) fn rdma_notice(&mut self, ctx: &mut Ctx, qp: QpId, notice: RdmaNotice) {
        let lag = ctx.rng.below(self.plan.lag + 1);
        if notice == RdmaNotice::Requested {
            self.rdma_work_later(ctx, lag, RdmaWork::Answer(qp));
            return;
        }
        let Some(side) = &mut self.rdma else { return };
        let solicited = !side.plan.solicited || ctx.rdma_is_solicited(qp);
        let flush = side.plan.flush;
        let Some((_, io)) = side.of(qp) else { return };
        match notice {
            // The CM's events come another way than frames, which may be taken first [IB-39].
            RdmaNotice::Established if ctx.rng.chance(500) => {
                self.rdma_work_later(ctx, lag, RdmaWork::Establish(qp));
            }
            RdmaNotice::Established => self.rdma_establish(ctx, qp),
            RdmaNotice::Ended(reason) if !std::mem::replace(&mut io.closing, true) => {
                ctx.rdma_disconnect(qp);
                let delay = ctx.rng.below(flush + 1);
                self.rdma_work_later(ctx, delay, RdmaWork::Flushed(qp, reason));
            }
            RdmaNotice::Received if solicited && !std::mem::replace(&mut io.read_pending, true) => {
                self.rdma_work_later(ctx, lag, RdmaWork::Read(qp));
            }
            RdmaNotice::Sent if !std::mem::replace(&mut io.complete_pending, true) => {
                self.rdma_work_later(ctx, lag, RdmaWork::Complete(qp));
            }
            _ => {}
        }
        self.carry_out(ctx);
    }

    fn rdma_work_later(&self, ctx: &mut Ctx, delay: u64, work: RdmaWork) {
        ctx.schedule_host(delay, self.id, HostEvent::Rdma(work));
    }

    pub(super) fn rdma_work(&mut self, ctx: &mut Ctx, work: RdmaWork) {
        match work {
            RdmaWork::Answer(qp) => self.rdma_answer(ctx, qp),
            RdmaWork::Establish(qp) => self.rdma_establish(ctx, qp),
            RdmaWork::Send(qp) => {
                let Some((link, io)) = self.rdma.as_mut().and_then(|side| side.of(qp)) else {
                    return;
                };
                io.send_pending = false;
                self.rdma_send(ctx, link);
            }
            RdmaWork::Posted(qp) => {
                if let Some((link, io)) = self.rdma.as_mut().and_then(|side| side.of(qp)) {
                    io.unreported = false;
                    self.node.handle_rdma_posted(now(ctx), link);
                }
            }
            RdmaWork::Complete(qp) => self.rdma_complete(ctx, qp),
            RdmaWork::Read(qp) => self.rdma_read(ctx, qp),
            RdmaWork::Refill(qp) => {
                if let Some((link, io)) = self.rdma.as_mut().and_then(|side| side.of(qp)) {
                    io.refill_pending = false;
                    self.rdma_refill(ctx, link);
                }
            }
            RdmaWork::Stop(qp) => {
                let Some(side) = &mut self.rdma else { return };
                let flush = side.plan.flush;
                if side.of(qp).is_some() {
                    ctx.rdma_disconnect(qp);
                    let delay = ctx.rng.below(flush + 1);
                    self.rdma_work_later(ctx, delay, RdmaWork::Flushed(qp, Reason::Reset));
                }
            }
            RdmaWork::Flushed(qp, reason) => {
                self.rdma_take_rest(ctx, qp);
                let Some(side) = &mut self.rdma else { return };
                let Some(link) = side.qps.remove(&qp) else { return };
                side.links.remove(&link);
                side.left.extend(ctx.rdma.works(qp));
                ctx.rdma_destroy(qp);
                self.node.handle_rdma_closed(now(ctx), link, close_reason(reason));
            }
        }
    }

    fn rdma_establish(&mut self, ctx: &mut Ctx, qp: QpId) {
        let Some((link, _)) = self.rdma.as_mut().and_then(|side| side.of(qp)) else { return };
        let reply = ctx.rdma.reply(qp);
        self.node.handle_rdma_established(now(ctx), link, reply.as_deref());
    }

    fn rdma_answer(&mut self, ctx: &mut Ctx, request: QpId) {
        let asked = ctx.rdma.request(request);
        let (local, remote) = (SocketAddr::new(asked.local, 0), SocketAddr::new(asked.remote, 0));
        let answer = self.node.handle_rdma_request(now(ctx), local, remote, &asked.private_data);
        match (answer, &mut self.rdma) {
            (Ok(accept), Some(side)) => {
                let qp = ctx.rdma_accept(self.id, request, &accept.shape);
                side.adopt(accept.link, qp);
            }
            _ => ctx.rdma_refuse(self.id, request),
        }
    }

    pub(super) fn rdma_connect(
        &mut self,
        ctx: &mut Ctx,
        link: RdmaLinkId,
        addrs: (IpAddr, IpAddr),
        shape: &RdmaShape,
    ) {
        if self.sabotage == Some(Sabotage::StayAway) && !ctx.net.faulty {
            return self.node.handle_rdma_closed(now(ctx), link, CloseReason::Refused);
        }
        match (ctx.rdma_connect(self.id, addrs, shape), &mut self.rdma) {
            (Ok(qp), Some(side)) => side.adopt(link, qp),
            (Ok(_), None) => ctx.fail(|| "a node without RDMA connects".into()),
            (Err(reason), _) => self.node.handle_rdma_closed(now(ctx), link, close_reason(reason)),
        }
    }

    pub(super) fn rdma_close(&mut self, ctx: &mut Ctx, link: RdmaLinkId) {
        let Some(side) = &mut self.rdma else { return };
        let Some(io) = side.links.get_mut(&link) else { return };
        if !std::mem::replace(&mut io.closing, true) {
            // Another thread ends the queue pair, and until then frames are complete for the peer.
            let (qp, delay) = (io.qp, ctx.rng.below(side.plan.flush + 1));
            self.rdma_work_later(ctx, delay, RdmaWork::Stop(qp));
        }
    }

    /// The node has something to send: now or a little later.
    pub(super) fn rdma_send_soon(&mut self, ctx: &mut Ctx, link: RdmaLinkId) {
        let Some(io) = self.rdma.as_mut().and_then(|side| side.links.get_mut(&link)) else {
            return;
        };
        if ctx.rng.chance(700) {
            return self.rdma_send(ctx, link);
        }
        if !std::mem::replace(&mut io.send_pending, true) {
            let (qp, delay) = (io.qp, ctx.rng.below(200 * US));
            self.rdma_work_later(ctx, delay, RdmaWork::Send(qp));
        }
    }

    fn rdma_send(&mut self, ctx: &mut Ctx, link: RdmaLinkId) {
        let Some(side) = &mut self.rdma else { return };
        let Some(io) = side.links.get_mut(&link) else { return };
        let max = 1 + ctx.rng.index(side.plan.batch);
        let mut frames = Vec::new();
        let (mut wrong, mut works) = (None, 0);
        let count = self.node.poll_rdma_requests(now(ctx), link, max, |request, payload| {
            let send = match request {
                RdmaRequest::Frame(send) => send,
                RdmaRequest::Work(work) => {
                    frames.push(Frame::of_work(&work));
                    works += 1;
                    return;
                }
            };
            let payload = payload.flatten().copied().collect::<Vec<_>>();
            if payload.len() != send.len {
                wrong = Some((send.len, payload.len()));
            }
            frames.push(Frame {
                id: send.id,
                header: send.header,
                payload,
                signalled: send.signalled,
                solicited: send.solicited,
                lost: false,
                fence: send.fence,
                work: None,
                again: None,
            });
        });
        // A silent message counts as one.
        let rest = frames.len() - works;
        let counts = (rest..=frames.len()).contains(&count) && count <= max;
        if wrong.is_some() || !counts || (io.unreported && count > 0) {
            let posted = frames.len();
            ctx.fail(|| format!("{count} frames of {max} announced, {posted} come: {wrong:?}"));
        }
        if count == 0 && works == 0 {
            return;
        }
        let qp = io.qp;
        io.unreported = ctx.rng.chance(side.plan.slow_post_permille);
        let unreported = io.unreported;
        for mut frame in frames {
            if let Some(how) = self.sabotage.filter(|_| frame.work.is_none()) {
                how.mangle_frame(&mut ctx.rng, &mut frame);
                if how == Sabotage::RdmaOpAgain {
                    frame.again = side.left.pop();
                }
            }
            frame.lost |= frame.work.is_some() && self.sabotage == Some(Sabotage::RdmaNoAnswer);
            let refused = frame.work.is_some() && ctx.rdma_refuse_post(qp);
            let id = frame.id;
            ctx.rdma_post(qp, frame);
            if refused {
                ctx.ops.failed(qp, id, RdmaStatus::OtherError);
                self.node.handle_rdma_failed(now(ctx), link, id, RdmaStatus::OtherError);
            }
        }
        if unreported {
            ctx.coverage.hit("rdma", "posting reported late");
            let delay = ctx.rng.magnitude(US, 20 * MS);
            self.rdma_work_later(ctx, delay, RdmaWork::Posted(qp));
        } else {
            self.node.handle_rdma_posted(now(ctx), link);
        }
    }

    fn rdma_complete(&mut self, ctx: &mut Ctx, qp: QpId) {
        let Some(side) = &mut self.rdma else { return };
        let max = 1 + ctx.rng.index(side.plan.batch);
        let Some((link, io)) = side.of(qp) else { return };
        io.complete_pending = false;
        let mut ids = ctx.rdma_take_completions(qp, max);
        if ctx.rng.chance(300) {
            ids.drain(..ids.len().saturating_sub(1)); // the last stands for those before it
        }
        if ctx.rdma_has_completions(qp) {
            io.complete_pending = true;
            let delay = ctx.rng.below(self.plan.lag + 1);
            self.rdma_work_later(ctx, delay, RdmaWork::Complete(qp));
        }
        for id in ids {
            ctx.ops.completed(qp, id);
            self.node.handle_rdma_sent(now(ctx), link, id);
        }
        if !ctx.rdma_has_completions(qp)
            && let Some(id) = ctx.rdma_take_refused(qp)
        {
            ctx.ops.failed(qp, id, RdmaStatus::RemoteError);
            self.node.handle_rdma_failed(now(ctx), link, id, RdmaStatus::RemoteError);
        }
    }

    fn rdma_read(&mut self, ctx: &mut Ctx, qp: QpId) {
        let Some(side) = &mut self.rdma else { return };
        let max = 1 + ctx.rng.index(side.plan.batch);
        let (hold_permille, hold) = (side.plan.hold_permille, side.plan.hold);
        let Some((link, io)) = side.of(qp) else { return };
        io.read_pending = false;
        if io.closing {
            return;
        }
        let frames = ctx.rdma_take(qp, max);
        io.owed += frames.len();
        self.rdma_frames(ctx, link, &frames);
        if ctx.ops.plan.is_some() {
            // What a node has taken is delivered, whatever becomes of the connection. A node that
            // ends takes nothing behind its farewell: messages come again, but not those with
            // operations.
            self.carry_out(ctx);
            let ends = self.says_farewell;
            let Some((_, io)) = self.rdma.as_mut().and_then(|side| side.of(qp)) else { return };
            if !io.closing && !ends {
                ctx.rdma.came(qp, &frames).into_iter().for_each(|message| ctx.ops.came(message));
            }
        }
        let Some((_, io)) = self.rdma.as_mut().and_then(|side| side.of(qp)) else { return };
        if ctx.rdma.has_arrived(qp) {
            io.read_pending = true;
            let delay = ctx.rng.below(self.plan.lag + 1);
            ctx.schedule_host(delay, self.id, HostEvent::Rdma(RdmaWork::Read(qp)));
        }
        if ctx.rng.chance(hold_permille) {
            let Some((_, io)) = self.rdma.as_mut().and_then(|side| side.of(qp)) else { return };
            if !std::mem::replace(&mut io.refill_pending, true) {
                ctx.coverage.hit("rdma", "receives posted late");
                let delay = ctx.rng.below(hold + 1);
                self.rdma_work_later(ctx, delay, RdmaWork::Refill(qp));
            }
        } else {
            self.rdma_refill(ctx, link);
        }
    }

    /// Hands frames over to the node.
    fn rdma_frames(&mut self, ctx: &mut Ctx, link: RdmaLinkId, frames: &[Frame]) {
        let mut list = Vec::new();
        let mut bytes = Vec::new();
        for frame in frames {
            // The payload may lie anywhere.
            bytes.resize(bytes.len() + ctx.rng.index(3), 0xee);
            let (len, start) = (frame.payload.len(), bytes.len());
            let mut header = frame.header;
            if let Some(how) = self.sabotage {
                how.mangle_header(&mut header);
            }
            list.push(RdmaFrame { bytes: HEADER_LEN + len, header, start });
            bytes.extend_from_slice(&frame.payload);
        }
        self.node.handle_rdma_frames(now(ctx), link, &RxBuf::from_vec(bytes), &list);
    }

    /// Hands over what lies in receives of a connection that has ended.
    fn rdma_take_rest(&mut self, ctx: &mut Ctx, qp: QpId) {
        let Some((link, _)) = self.rdma.as_mut().and_then(|side| side.of(qp)) else { return };
        let frames = ctx.rdma_take(qp, usize::MAX);
        if !frames.is_empty() {
            ctx.coverage.hit("rdma", "frames taken after the end");
            self.rdma_frames(ctx, link, &frames);
        }
    }

    /// Posts receives in place of those that were used, if the node wants it.
    fn rdma_refill(&mut self, ctx: &mut Ctx, link: RdmaLinkId) {
        let Some(io) = self.rdma.as_mut().and_then(|side| side.links.get_mut(&link)) else {
            return;
        };
        if io.closing || io.paused || io.owed == 0 {
            return;
        }
        if !self.node.wants_rdma_frames(link) {
            ctx.coverage.hit("rdma", "receives refused by the node");
            io.paused = true;
            return;
        }
        let count = std::mem::take(&mut io.owed);
        ctx.rdma_post_receives(io.qp, count);
        self.node.handle_rdma_receives_posted(link, count);
    }

    pub(super) fn rdma_resume(&mut self, ctx: &mut Ctx, link: RdmaLinkId) {
        if let Some(io) = self.rdma.as_mut().and_then(|side| side.links.get_mut(&link)) {
            io.paused = false;
            self.rdma_refill(ctx, link);
        }
    }

    /// Ends all queue pairs, since another process goes on.
    pub(super) fn rdma_abandon(&mut self, ctx: &mut Ctx) {
        let Some(side) = &mut self.rdma else { return };
        side.links.clear();
        for (qp, _) in std::mem::take(&mut side.qps) {
            ctx.coverage.hit("rdma", "hand-over ends a connection");
            ctx.rdma_destroy(qp);
        }
    }
}
