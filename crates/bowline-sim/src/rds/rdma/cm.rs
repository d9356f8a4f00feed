//! Connections that are made and ended by messages of the CM.

use std::net::IpAddr;

use bowline_rds::RdmaShape;
use bowline_wire::rds::FRAGMENT_LEN;

use super::{Qp, QpId, QpState, RdmaEvent, RdmaNotice, WireCheck};
use crate::engine::queue::{MS, SEC};
use crate::rds::ctx::{Ctx, Event, HostId};
use crate::rds::net::Reason;

/// How often the CM repeats a message.
const CM_TRIES: u32 = 15;

impl Ctx {
    fn new_qp(
        &mut self,
        host: HostId,
        (local, remote): (IpAddr, IpAddr),
        shape: &RdmaShape,
        state: QpState,
    ) -> QpId {
        let breaks = self.rdma.plan.as_ref().map_or(0, |plan| plan.break_permille);
        let breaks = self.net.faulty && self.rng.chance(breaks);
        let breaks_at = breaks.then(|| self.rng.magnitude(1, 500));
        let flow_control = self.rdma.node(host).is_some_and(|node| node.flow_control);
        let operations = self.ops.plan.is_some();
        let deaf = self.rdma.node(host).map_or(0, |node| node.deaf_permille);
        let withheld = (self.net.faulty && self.rng.chance(deaf)).then(|| {
            let posts = self.rng.pick(&[0, shape.receives / 2]);
            shape.receives - posts
        });
        let id = QpId(self.rdma.qps.len() as u32);
        self.rdma.qps.push(Qp {
            host,
            boot: self.net.hosts[host].boot,
            local,
            remote,
            peer: None,
            state,
            private_data: shape.private_data.to_vec(),
            cm_tries: 0,
            limited: flow_control,
            queue: Default::default(),
            acked: 0,
            sent: 0,
            next: 0,
            last_arrival: 0,
            heard: 0,
            retries: 0,
            timer: false,
            again: false,
            completions: Default::default(),
            refused: None,
            breaks_at,
            lingers: false,
            mute: false,
            expected: 0,
            receives: shape.receives - withheld.unwrap_or(0),
            withheld,
            frame: shape.frame,
            arrived: Default::default(),
            check: WireCheck::new(flow_control, operations, shape.sends),
            named: Default::default(),
        });
        id
    }

    /// Makes a queue pair and asks for a connection.
    pub(crate) fn rdma_connect(
        &mut self,
        host: HostId,
        (local, remote): (IpAddr, IpAddr),
        shape: &RdmaShape,
    ) -> Result<QpId, Reason> {
        if !self.net.hosts[host].addrs.contains(&local) {
            return Err(Reason::AddrNotAvail);
        }
        let id = self.new_qp(host, (local, remote), shape, QpState::Requesting);
        self.stats.rdma_connects += 1;
        self.note([80, u64::from(id.0), 0], || format!("{id} connects {local} -> {remote}"));
        self.send_request(id);
        Ok(id)
    }

    fn send_request(&mut self, id: QpId) {
        self.rdma_later(RdmaEvent::Request(id));
        let late = self.rdma.plan.as_ref().map_or(0, |plan| plan.late_permille);
        if self.net.faulty && self.rng.chance(late) {
            let delay = self.rng.magnitude(MS, 5 * SEC);
            self.schedule(delay, Event::Rdma(RdmaEvent::Request(id)));
        }
        self.wait_for_cm(id);
    }

    fn wait_for_cm(&mut self, id: QpId) {
        let wait = self.rdma.plan.as_ref().map_or(SEC, |plan| plan.cm_timeout);
        self.schedule(wait, Event::Rdma(RdmaEvent::CmTimeout(id)));
    }

    pub(super) fn on_cm_timeout(&mut self, id: QpId) {
        if !self.rdma_lives(id) {
            return;
        }
        let qp = self.rdma.qp_mut(id);
        if !matches!(qp.state, QpState::Requesting | QpState::Responding) {
            return;
        }
        qp.cm_tries += 1;
        if qp.cm_tries > CM_TRIES {
            self.coverage.hit("rdma", "CM gives up");
            self.end_qp(id, Reason::TimedOut);
        } else if qp.state == QpState::Requesting {
            self.coverage.hit("rdma", "REQ repeated");
            self.send_request(id);
        } else {
            self.coverage.hit("rdma", "REP repeated");
            self.rdma_later(RdmaEvent::Reply(id));
            self.wait_for_cm(id);
        }
    }

    pub(super) fn on_request(&mut self, id: QpId) {
        let qp = self.rdma.qp(id);
        let (host, local, remote) = (qp.host, qp.local, qp.remote);
        let lost = self.lost();
        let Some(target) = self.net.owner(remote).filter(|target| {
            !lost && self.net.owner(local) == Some(host) && !self.net.is_blocked(host, *target)
        }) else {
            self.coverage.hit("rdma", "REQ lost");
            return;
        };
        if target == host {
            return;
        }
        let boot = self.net.hosts[target].boot;
        let answer = self.rdma.ids().rev().find(|other| {
            let other = self.rdma.qp(*other);
            other.peer == Some(id) && other.host == target && other.boot == boot
        });
        match answer.map(|answer| (answer, self.rdma.qp(answer).state)) {
            Some((answer, QpState::Responding)) => {
                self.coverage.hit("rdma", "REQ comes again");
                self.rdma_later(RdmaEvent::Reply(answer));
                return;
            }
            // The CM remembers it for a while.
            Some((_, QpState::Ready | QpState::Broken(_))) => return,
            Some((_, _)) => self.coverage.hit("rdma", "REQ comes again after the connection"),
            None => {}
        }
        if self.rdma.asked.contains(&(id, target)) {
            return;
        }
        let listener = &self.net.hosts[target];
        if !self.rdma.serves(remote) || !listener.listening || listener.closing {
            self.coverage.hit("rdma", "REQ without a listener");
            self.rdma_later(RdmaEvent::Reject(id));
            return;
        }
        if !self.rdma_lives(id) {
            self.coverage.hit("rdma", "REQ of an attempt that was given up");
        }
        if self.rdma.moved.contains(&remote) {
            self.coverage.hit("rdma", "REQ comes to a node that took the address");
        }
        let crossing = self.rdma.ids().rev().any(|other| {
            let qp = self.rdma.qp(other);
            let same = (qp.host, qp.local, qp.remote) == (target, remote, local);
            same && qp.state == QpState::Requesting && self.rdma.tos(other) == self.rdma.tos(id)
        });
        if crossing {
            self.coverage.hit("rdma", "both connect at once");
        }
        self.rdma.asked.insert((id, target));
        self.rdma_notices.push_back((target, id, RdmaNotice::Requested));
    }

    /// Accepts a request: makes a queue pair and answers.
    pub(crate) fn rdma_accept(&mut self, host: HostId, request: QpId, shape: &RdmaShape) -> QpId {
        self.rdma.asked.remove(&(request, host));
        let from = self.rdma.qp(request);
        let (local, remote) = (from.remote, from.local);
        let limited = from.limited;
        let id = self.new_qp(host, (local, remote), shape, QpState::Responding);
        let qp = self.rdma.qp_mut(id);
        qp.peer = Some(request);
        qp.limited &= limited;
        let fragment = self.rdma.fragment(request, id);
        if fragment > FRAGMENT_LEN {
            self.coverage.hit("rdma", "long frames");
        }
        self.rdma.qp_mut(id).check.set_fragment(fragment);
        if self.rdma.moved.contains(&local) || self.rdma.moved.contains(&remote) {
            self.coverage.hit("rdma", "accepted for an address that has moved");
        }
        if self.rdma.tos(request).is_some_and(|tos| tos != 0) {
            self.coverage.hit("rdma", "a type of service");
        }
        self.note([81, u64::from(id.0), u64::from(request.0)], || {
            format!("{id} on host {host} accepts {request}")
        });
        self.rdma_later(RdmaEvent::Reply(id));
        self.wait_for_cm(id);
        id
    }

    /// Refuses a request.
    pub(crate) fn rdma_refuse(&mut self, host: HostId, request: QpId) {
        self.rdma.asked.remove(&(request, host));
        self.note([82, u64::from(request.0), 0], || format!("host {host} refuses {request}"));
        self.coverage.hit("rdma", "REQ refused by the node");
        self.rdma_later(RdmaEvent::Reject(request));
    }

    pub(super) fn on_reply(&mut self, answer: QpId) {
        let Some(id) = self.rdma.qp(answer).peer else { return };
        if !self.rdma_lives(answer) || self.rdma.qp(answer).state != QpState::Responding {
            return;
        }
        if !self.rdma_reaches(answer, id) {
            self.coverage.hit("rdma", "REP lost");
            return;
        }
        let limited = self.rdma.qp(answer).limited;
        let lives = self.rdma_lives(id);
        let fragment = self.rdma.fragment(id, answer);
        let qp = self.rdma.qp_mut(id);
        if lives && qp.state == QpState::Requesting {
            qp.check.set_fragment(fragment);
            qp.peer = Some(answer);
            qp.state = QpState::Ready;
            qp.limited = limited;
            self.note([83, u64::from(id.0), u64::from(answer.0)], || format!("{id} established"));
            self.rdma_later(RdmaEvent::ReadyToUse(answer));
            self.rdma_tell(id, RdmaNotice::Established);
        } else if lives && qp.state == QpState::Ready && qp.peer == Some(answer) {
            self.rdma_later(RdmaEvent::ReadyToUse(answer));
        } else {
            self.coverage.hit("rdma", "REP comes to an attempt that was given up");
            self.rdma_later(RdmaEvent::Reject(answer));
        }
    }

    pub(super) fn on_ready_to_use(&mut self, id: QpId) {
        let Some(peer) = self.rdma.qp(id).peer else { return };
        if !self.rdma_reaches(peer, id) {
            self.coverage.hit("rdma", "RTU lost");
            return;
        }
        self.establish(id);
    }

    /// Takes a queue pair that has responded into use.
    pub(super) fn establish(&mut self, id: QpId) {
        if self.rdma_lives(id) && self.rdma.qp(id).state == QpState::Responding {
            self.rdma.qp_mut(id).state = QpState::Ready;
            self.note([84, u64::from(id.0), 0], || format!("{id} established"));
            self.rdma_tell(id, RdmaNotice::Established);
        }
    }

    pub(super) fn on_reject(&mut self, id: QpId) {
        let qp = self.rdma.qp(id);
        // Whoever rejects it, the way back is that to the address.
        let owned = self.net.owner(qp.local) == Some(qp.host);
        let waits = matches!(qp.state, QpState::Requesting | QpState::Responding);
        if self.lost() || !owned {
            self.coverage.hit("rdma", "REJ lost");
        } else if waits && self.rdma_lives(id) {
            self.end_qp(id, Reason::Refused);
        }
    }

    pub(super) fn on_disconnect(&mut self, id: QpId) {
        let Some(peer) = self.rdma.qp(id).peer else { return };
        if self.lost() || self.net.is_blocked(self.rdma.host(peer), self.rdma.host(id)) {
            self.coverage.hit("rdma", "DREQ lost");
        } else if self.rdma_lives(id)
            && matches!(self.rdma.qp(id).state, QpState::Ready | QpState::Responding)
        {
            self.coverage.hit("rdma", "DREQ received");
            self.end_qp(id, Reason::Reset);
        }
    }

    /// Breaks an end and tells its process.
    pub(super) fn end_qp(&mut self, id: QpId, reason: Reason) {
        if self.break_qp(id, reason) {
            self.rdma_tell(id, RdmaNotice::Ended(reason));
        }
    }

    /// Breaks an end. Tells whether it had not broken before.
    fn break_qp(&mut self, id: QpId, reason: Reason) -> bool {
        let lingers = self.rng.chance(500);
        let qp = self.rdma.qp_mut(id);
        if matches!(qp.state, QpState::Broken(_) | QpState::Gone) {
            return false;
        }
        qp.state = QpState::Broken(reason);
        qp.lingers = lingers;
        self.note([85, u64::from(id.0), 0], || format!("{id} broken: {reason:?}"));
        true
    }

    /// Ends a connection, or gives an attempt up. Work requests stay until the queue pair is
    /// destroyed.
    pub(crate) fn rdma_disconnect(&mut self, id: QpId) {
        let qp = self.rdma.qp(id);
        let (state, peer, mute) = (qp.state, qp.peer, qp.mute);
        self.break_qp(id, Reason::Reset);
        if let Some(peer) = peer.filter(|_| !mute) {
            match state {
                QpState::Responding => self.rdma_later(RdmaEvent::Reject(peer)),
                QpState::Gone | QpState::Requesting => {}
                _ => self.rdma_later(RdmaEvent::Disconnect(peer)),
            }
        }
    }

    /// Destroys a queue pair.
    pub(crate) fn rdma_destroy(&mut self, id: QpId) {
        self.rdma_disconnect(id);
        let qp = self.rdma.qp_mut(id);
        qp.state = QpState::Gone;
        qp.queue.clear();
        qp.arrived.clear();
        qp.completions.clear();
        qp.refused = None;
        self.ops_connection_ended(id);
    }
}
