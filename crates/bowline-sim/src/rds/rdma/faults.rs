//! Connections that break, and processes and machines that end.

use super::{QpId, QpState, RdmaEvent};
use crate::rds::ctx::{Ctx, HostId};
use crate::rds::net::Reason;
use crate::rds::single_cut::{End, Place};

impl Ctx {
    /// Breaks a connection at the place it has come to: for both ends, or first for one, whose
    /// process may or may not tell the other.
    pub(crate) fn rdma_cut(&mut self, id: QpId) {
        let Some(peer) = self.rdma.qp(id).peer else { return };
        let (one, other) = if self.rng.chance(500) { (id, peer) } else { (peer, id) };
        match self.rng.below(3) {
            0 => self.cut_both(one, other),
            1 => self.cut_one(one, true),
            _ => self.cut_one(one, false),
        }
    }

    fn cut_both(&mut self, one: QpId, other: QpId) {
        self.stats.cuts += 1;
        self.note([86, u64::from(one.0), 0], || format!("{one} cut"));
        self.coverage.hit("rdma", "cut on both sides");
        self.end_qp(one, Reason::TimedOut);
        self.end_qp(other, Reason::TimedOut);
    }

    fn cut_one(&mut self, one: QpId, tells: bool) {
        self.stats.cuts += 1;
        self.note([86, u64::from(one.0), 0], || format!("{one} cut"));
        if tells {
            self.coverage.hit("rdma", "cut on one side, which tells");
        } else {
            self.coverage.hit("rdma", "cut on one side, silently");
            self.rdma.qp_mut(one).mute = true;
        }
        self.end_qp(one, Reason::TimedOut);
    }

    /// Notes that a work request of a queue pair has come to a place, where the connection is lost
    /// if this is the one. Tells whether it is lost.
    pub(super) fn rdma_comes_to(&mut self, place: Place, sender: QpId) -> bool {
        let Some(case) = self.rdma.plan.as_ref().and_then(|plan| plan.cut) else { return false };
        let Some(receiver) = self.rdma.qp(sender).peer else { return false };
        if case.place != place || !self.net.faulty {
            return false;
        }
        self.rdma.counted += 1;
        let lost = self.rdma.counted == case.after + 1;
        if lost {
            match case.end {
                End::Both => self.cut_both(sender, receiver),
                End::Sender { tells } => self.cut_one(sender, tells),
                End::Receiver { tells } => self.cut_one(receiver, tells),
            }
        }
        lost
    }

    /// Faults are over: processes that posted no receives do it now.
    pub(crate) fn rdma_calm(&mut self) {
        for id in self.rdma.ids() {
            let qp = self.rdma.qp_mut(id);
            qp.receives += qp.withheld.take().unwrap_or(0);
        }
    }

    /// Ends all queue pairs of a host whose process ends, or whose machine does if it is silent.
    pub(crate) fn rdma_host_down(&mut self, host: HostId, silent: bool) {
        let ids: Vec<_> = self.rdma.ids().collect();
        for id in ids {
            let qp = self.rdma.qp(id);
            if qp.host != host || qp.state == QpState::Gone {
                continue;
            }
            self.rdma.qp_mut(id).mute |= silent;
            self.rdma_destroy(id);
        }
        let asked = self.rdma.asked.iter().filter(|(_, of)| *of == host);
        let asked: Vec<_> = asked.copied().collect();
        for request in asked {
            self.rdma.asked.remove(&request);
            if !silent {
                self.rdma_later(RdmaEvent::Reject(request.0));
            }
        }
    }
}
