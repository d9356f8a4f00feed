//! Frames between two queue pairs: each arrives once, in order, in a receive that was posted.

use std::net::SocketAddr;

use bowline_wire::rds::{HEADER_LEN, Header};

use super::{Frame, QpId, QpState, RdmaEvent, RdmaNotice};
use crate::engine::queue::{MS, SEC, US};
use crate::rds::ctx::{Ctx, Event};
use crate::rds::net::Reason;
use crate::rds::ops::{Answer, Work};
use crate::rds::single_cut::Place;

/// Number of frames that are on their way at a time.
const WINDOW: u64 = 64;

impl Ctx {
    /// Posts a frame.
    pub(crate) fn rdma_post(&mut self, id: QpId, frame: Frame) {
        let now = self.now;
        if frame.work.is_none() {
            self.check_message(id, &frame);
        }
        let qp = self.rdma.qp_mut(id);
        let judged = match &frame.work {
            Some(_) => qp.check.posted_work(frame.id),
            None => qp.check.posted(&frame),
        };
        if let Err(what) = judged {
            self.fail(|| format!("{id}: {what}"));
            return;
        }
        if let Some(work) = &frame.work {
            self.op_posted(id, frame.id, work);
        }
        let qp = self.rdma.qp_mut(id);
        if qp.state == QpState::Gone {
            self.fail(|| format!("{id}: a frame for a queue pair that is gone"));
            return;
        }
        if qp.state != QpState::Ready {
            return; // it is flushed
        }
        if qp.queue.is_empty() {
            qp.heard = now;
        }
        qp.queue.push_back(frame);
        qp.next += 1;
        if qp.breaks_at.is_some_and(|at| qp.next > at) {
            qp.breaks_at = None;
            self.rdma_cut(id);
        }
        self.rdma_comes_to(Place::Posted, id);
        self.pump_frames(id);
    }

    /// The device does not take a request, and the driver gives the connection up.
    pub(crate) fn rdma_refuse_post(&mut self, id: QpId) -> bool {
        let refuses = self.ops.plan.as_ref().map_or(0, |plan| plan.refuse);
        let ready = self.rdma.qp(id).state == QpState::Ready;
        let refuses = ready && self.net.faulty && refuses > 0 && self.rng.chance(refuses);
        if refuses {
            self.coverage.hit("ops", "not taken by the device");
            self.end_qp(id, Reason::Reset);
        }
        refuses
    }

    /// Checks that a message goes on the connection of its type of service, and that its operations
    /// were posted before it, on the same connection.
    fn check_message(&mut self, id: QpId, frame: &Frame) {
        let qp = self.rdma.qp(id);
        let header = Header::from_bytes(&frame.header);
        if !qp.check.is_between() || header.sport < 2 || header.dport == 0 {
            return;
        }
        let (local, remote) = (qp.local, qp.remote);
        let from = SocketAddr::new(local, header.sport);
        let tos = self.oracle.slot_at(from).map(|slot| self.oracle.tos(slot));
        if tos != self.rdma.tos(id) {
            self.fail(|| format!("{id}: a message of {from} on the connection of another type"));
        }
        let tag = &frame.payload;
        if self.ops.plan.is_none() || tag.len() < 8 {
            return;
        }
        if let Some(message) = self.oracle.identify(from, (remote, header.dport).into(), tag) {
            self.rdma.qp_mut(id).named.insert(header.sequence, message);
            if let Err(what) = self.ops.check_frame(id, message, frame.fence) {
                self.fail(|| what);
            }
        }
    }

    /// Sends as many frames as may be on their way.
    fn pump_frames(&mut self, id: QpId) {
        loop {
            let qp = self.rdma.qp(id);
            let Some(to) = qp.peer.filter(|_| qp.state == QpState::Ready) else { return };
            if qp.sent >= qp.next || qp.sent >= qp.acked + WINDOW || qp.again {
                break;
            }
            let at = (qp.sent - qp.acked) as usize;
            let work = qp.queue.get(at).and_then(|frame| frame.work);
            let reads = |frame: &Frame| frame.work.is_some_and(|work| work.reads());
            if qp.queue.get(at).is_some_and(|frame| frame.fence)
                && qp.queue.iter().take(at).any(reads)
            {
                self.coverage.hit("ops", "a fence waits");
                break;
            }
            if let Some(work) = work {
                self.op_touches(&work);
            }
            let number = self.rdma.qp(id).sent;
            let at = (self.now + self.rdma_delay()).max(self.rdma.qp(id).last_arrival);
            let qp = self.rdma.qp_mut(id);
            qp.sent += 1;
            qp.last_arrival = at;
            self.schedule_at(at, Event::Rdma(RdmaEvent::Frame { to, number }));
        }
        let timeout = self.rdma.plan.as_ref().map_or(SEC, |plan| plan.timeout);
        let qp = self.rdma.qp_mut(id);
        if !qp.queue.is_empty() && !std::mem::replace(&mut qp.timer, true) {
            self.schedule(timeout, Event::Rdma(RdmaEvent::Timeout(id)));
        }
    }

    pub(super) fn on_frame(&mut self, to: QpId, number: u64) {
        let Some(from) = self.rdma.qp(to).peer else { return };
        let sender = self.rdma.qp(from);
        let sends = sender.state == QpState::Ready
            || (matches!(sender.state, QpState::Broken(_)) && sender.lingers);
        if !self.rdma_reaches(from, to) {
            self.coverage.hit("rdma", "frame lost");
            return;
        }
        let takes = matches!(self.rdma.qp(to).state, QpState::Ready | QpState::Responding);
        if !takes || !self.rdma_lives(to) || !sends {
            self.coverage.hit("rdma", "frame comes to an end that has broken");
            return;
        }
        if self.rdma.qp(to).state == QpState::Responding && self.rng.chance(500) {
            self.coverage.hit("rdma", "established by a frame");
            self.establish(to);
        }
        let sender = self.rdma.qp(from);
        if !matches!(sender.state, QpState::Ready) {
            self.base.coverage.hit("rdma", "frame of an end that has broken");
        }
        let Some(frame) = number
            .checked_sub(sender.acked)
            .and_then(|at| sender.queue.get(usize::try_from(at).ok()?))
            .cloned()
        else {
            return self.acknowledge_frames(to, from); // the acknowledgement was lost
        };
        let limited = sender.limited;
        let qp = self.rdma.qp_mut(to);
        if HEADER_LEN + frame.payload.len() > qp.frame {
            self.fail(|| format!("{from} sends more than a receive of {to} holds"));
            return;
        }
        if number != qp.expected {
            if number < qp.expected {
                self.acknowledge_frames(to, from);
            }
            return;
        }
        if let Some(work) = &frame.again {
            self.op_carry_out(work, false);
        }
        if let Some(work) = &frame.work {
            return self.on_work(to, number, work);
        }
        let qp = self.rdma.qp_mut(to);
        if qp.receives == 0 {
            let deaf = qp.withheld.is_some();
            let name = if deaf { "receives are never posted" } else { "no receive posted" };
            self.coverage.hit("rdma", name);
            if limited && !deaf {
                self.fail(|| format!("{from} sends although {to} has no receive posted"));
            }
            self.rdma_later(RdmaEvent::NotReady(from));
            return;
        }
        qp.expected += 1;
        if frame.lost {
            return self.acknowledge_frames(to, from);
        }
        qp.receives -= 1;
        qp.arrived.push_back(frame);
        self.rdma_tell(to, RdmaNotice::Received);
        if !self.rdma_comes_to(Place::Done, from) {
            self.acknowledge_frames(to, from);
        }
    }

    /// Carries out a request of an operation. The connection may break before, in the middle or
    /// after it.
    fn on_work(&mut self, to: QpId, number: u64, work: &Work) {
        let Some(from) = self.rdma.qp(to).peer else { return };
        let breaks = self.ops.plan.as_ref().map_or(0, |plan| plan.breaks);
        let breaks = self.net.faulty && breaks > 0 && self.rng.chance(breaks);
        let place = if breaks { self.rng.below(3) } else { u64::MAX };
        if place == 0 {
            self.coverage.hit("ops", "broken before a request");
            return self.rdma_cut(to);
        }
        let partly = place == 1 && work.is_divisible();
        if self.op_carry_out(work, partly) == Answer::Refused {
            self.rdma_later(RdmaEvent::Refused { to: from, number });
            // What caused it has broken as well.
            return self.end_qp(to, Reason::Reset);
        }
        if !partly {
            self.rdma.qp_mut(to).expected += 1;
        }
        if breaks {
            let name = if partly { "broken in a request" } else { "broken after a request" };
            self.coverage.hit("ops", name);
            return self.rdma_cut(to);
        }
        if !self.rdma_comes_to(Place::Done, from) {
            self.acknowledge_frames(to, from);
        }
    }

    /// The peer has refused a request, which fails, and the connection with it.
    pub(super) fn on_refused(&mut self, id: QpId, number: u64) {
        let Some(peer) = self.rdma.qp(id).peer else { return };
        let ready = self.rdma.qp(id).state == QpState::Ready;
        if !self.rdma_lives(id) || !self.rdma_reaches(peer, id) || !ready {
            self.coverage.hit("ops", "refusal lost");
            return;
        }
        self.complete_frames(id, number);
        let qp = self.rdma.qp_mut(id);
        qp.refused = qp.queue.front().map(|frame| frame.id);
        self.rdma_tell(id, RdmaNotice::Sent);
        self.end_qp(id, Reason::Reset);
    }

    /// Completes frames with lower numbers.
    fn complete_frames(&mut self, id: QpId, acked: u64) {
        let mut completed = false;
        loop {
            let qp = self.rdma.qp_mut(id);
            if qp.acked >= acked {
                break;
            }
            let Some(frame) = qp.queue.pop_front() else { break };
            qp.acked += 1;
            if frame.signalled {
                qp.completions.push_back(frame.id);
                completed = true;
            }
            if let Some(work) = frame.work.filter(|work| work.reads() && !frame.lost) {
                self.op_answered(&work);
            }
        }
        let qp = self.rdma.qp_mut(id);
        qp.sent = qp.sent.max(qp.acked);
        if completed {
            self.rdma_tell(id, RdmaNotice::Sent);
        }
    }

    fn acknowledge_frames(&mut self, by: QpId, to: QpId) {
        let acked = self.rdma.qp(by).expected;
        self.rdma_later(RdmaEvent::Ack { to, acked });
    }

    pub(super) fn on_frame_acked(&mut self, id: QpId, acked: u64) {
        let Some(peer) = self.rdma.qp(id).peer else { return };
        if !self.rdma_lives(id) || !self.rdma_reaches(peer, id) {
            return;
        }
        let now = self.now;
        let qp = self.rdma.qp_mut(id);
        if qp.state != QpState::Ready {
            return;
        }
        (qp.heard, qp.retries) = (now, 0);
        self.complete_frames(id, acked);
        self.pump_frames(id);
    }

    pub(super) fn on_not_ready(&mut self, id: QpId) {
        let Some(peer) = self.rdma.qp(id).peer else { return };
        if !self.rdma_lives(id) || !self.rdma_reaches(peer, id) {
            return;
        }
        let now = self.now;
        let qp = self.rdma.qp_mut(id);
        if qp.state != QpState::Ready || std::mem::replace(&mut qp.again, true) {
            return;
        }
        (qp.heard, qp.retries) = (now, 0);
        let delay = self.rng.magnitude(300 * US, 30 * MS);
        self.schedule(delay, Event::Rdma(RdmaEvent::Again(id)));
    }

    pub(super) fn on_again(&mut self, id: QpId) {
        let qp = self.rdma.qp_mut(id);
        qp.again = false;
        qp.sent = qp.acked;
        self.pump_frames(id);
    }

    pub(super) fn on_frame_timeout(&mut self, id: QpId) {
        let Some(plan) = &self.rdma.plan else { return };
        let (timeout, retries) = (plan.timeout, plan.retries);
        let now = self.now;
        let lives = self.rdma_lives(id);
        let qp = self.rdma.qp_mut(id);
        qp.timer = false;
        if qp.state != QpState::Ready || qp.queue.is_empty() || !lives {
            return;
        }
        if now >= qp.heard + timeout {
            qp.heard = now;
            qp.retries += 1;
            if qp.retries > retries {
                self.coverage.hit("rdma", "retries exceeded");
                let mute = self.rng.chance(500);
                self.rdma.qp_mut(id).mute |= mute;
                self.end_qp(id, Reason::TimedOut);
                return;
            }
            self.base.coverage.hit("rdma", "frames sent again");
            qp.sent = qp.acked;
        }
        let qp = self.rdma.qp_mut(id);
        qp.timer = true;
        let at = qp.heard + timeout;
        self.schedule_at(at, Event::Rdma(RdmaEvent::Timeout(id)));
        self.pump_frames(id);
    }

    /// Takes frames that have arrived, in their order.
    pub(crate) fn rdma_take(&mut self, id: QpId, max: usize) -> Vec<Frame> {
        let qp = self.rdma.qp_mut(id);
        let count = qp.arrived.len().min(max);
        let frames: Vec<_> = qp.arrived.drain(..count).collect();
        for frame in &frames {
            self.rdma.qp_mut(id).check.taken(frame);
        }
        frames
    }

    /// Tells whether a frame has arrived that wakes a process which waits for solicited ones.
    pub(crate) fn rdma_is_solicited(&self, id: QpId) -> bool {
        self.rdma.qp(id).arrived.iter().any(|frame| frame.solicited)
    }

    /// Posts receives.
    pub(crate) fn rdma_post_receives(&mut self, id: QpId, count: usize) {
        let qp = self.rdma.qp_mut(id);
        match &mut qp.withheld {
            Some(withheld) => *withheld += count,
            None => qp.receives += count,
        }
    }

    /// Takes the ids of requests that are complete, and notes that the process knows of them.
    pub(crate) fn rdma_take_completions(&mut self, id: QpId, max: usize) -> Vec<u64> {
        let qp = self.rdma.qp_mut(id);
        let count = qp.completions.len().min(max);
        let ids: Vec<_> = qp.completions.drain(..count).collect();
        if let Some(last) = ids.last() {
            qp.check.retired(*last);
        }
        ids
    }

    /// Takes the completion of a request that was refused, after those before it.
    pub(crate) fn rdma_take_refused(&mut self, id: QpId) -> Option<u64> {
        self.rdma.qp_mut(id).refused.take()
    }

    /// Tells whether more completions wait to be taken.
    pub(crate) fn rdma_has_completions(&self, id: QpId) -> bool {
        !self.rdma.qp(id).completions.is_empty()
    }
}
