//! Work of programs: they post requests and receives, poll completions, and remove memory.

use bowline_verbs::{Completion, QpAttr, QpState, SrqChange};

use super::{Event, World};
use crate::engine::queue::{MS, US};
use crate::roce::app::{self, App, OwnedRequest};
use crate::roce::oracle;
use crate::roce::reach::{self, LoanEvent, Step};
use crate::roce::side::{SharedReceives, SideId, Stage};

/// Longest time in nanoseconds for which a send queue is stopped.
const PAUSE: u64 = 2 * MS;

impl World {
    /// Tells whether the side's program still runs.
    pub(crate) fn runs(&self, id: SideId) -> bool {
        let side = &self.sides[id];
        side.stage < Stage::Gone && self.lives(side.host, side.boot)
    }

    pub(crate) fn poll_completions(&mut self, id: SideId) {
        self.sides[id].looking = false;
        if !self.runs(id) || self.sides[id].stage >= Stage::Drained {
            return;
        }
        let (host, queues) =
            (self.sides[id].host, [self.sides[id].send_cq, self.sides[id].recv_cq]);
        let count = if queues[0] == queues[1] { 1 } else { 2 };
        for (which, cq) in queues.into_iter().enumerate().take(count) {
            let mut refused = false;
            loop {
                let mut entries = std::mem::take(&mut self.entries);
                entries.clear();
                let most = 1 + self.rng.index(16);
                let Some(device) = &mut self.hosts[host].device else { return };
                let polled = device.poll_cq(cq, &mut entries, most);
                let n = match polled {
                    Ok(n) if n == entries.len() && n <= most => n,
                    bad => {
                        self.fail(|| format!("side {id}: polling {most} gave {bad:?}"));
                        return;
                    }
                };
                self.sabotaged_entries(&mut entries);
                for entry in &entries {
                    self.completed(id, entry);
                }
                self.entries = entries;
                if n > 0 {
                    refused = false;
                    continue;
                }
                if self.sides[id].armed[which] || self.failure.is_some() {
                    break;
                }
                if refused {
                    self.fail(|| format!("side {id}: {cq:?} is empty and cannot be armed"));
                    return;
                }
                let Some(device) = &mut self.hosts[host].device else { return };
                let armed = device.arm_cq(cq, false).map_err(|e| format!("side {id}: arm: {e}"));
                match self.judge(armed) {
                    Some(true) => {
                        self.sides[id].armed[which] = true;
                        break;
                    }
                    Some(false) => refused = true,
                    None => return,
                }
            }
        }
        if let Some(shared) = &mut self.sides[id].shared_receives {
            shared.is_last = shared.is_reported;
        }
        self.schedule_turn(host);
        self.go_on(id);
    }

    fn completed(&mut self, id: SideId, entry: &Completion) {
        let facts = [5, id as u64, entry.wr_id << 16 | (entry.status as u64) << 8];
        self.note(facts, || format!("side {id}: {entry:?}"));
        if self.failure.is_some() {
            return;
        }
        self.fresh.last = self.now;
        let verdict = oracle::completed(&mut self.sides, id, entry);
        let Some(verdict) = self.judge(verdict) else { return };
        match verdict.request {
            Some(opcode) => self.reached.request(opcode, entry.status),
            None => self.reached.receive(entry),
        }
        self.stats.completions += 1;
        self.stats.received += u64::from(verdict.received);
        self.stats.bytes += verdict.bytes;
        self.stats.failed += u64::from(verdict.failed);
        if verdict.received && self.sides[id].stage <= Stage::Up {
            self.sides[id].receives_due += 1;
            let delay = self.plan.conns[self.sides[id].conn].recv_delay;
            self.schedule_within(delay, Event::Receive(id));
        }
    }

    /// Continues after completions: there may be room for more requests, or no work may be left.
    fn go_on(&mut self, id: SideId) {
        let side = &self.sides[id];
        match side.stage {
            Stage::Connecting | Stage::Up if side.send_failed || side.recv_failed => self.end(id),
            Stage::Up => self.schedule_post(id, 0),
            Stage::Ending => self.try_destroy(id),
            _ => {}
        }
    }

    pub(crate) fn schedule_post(&mut self, id: SideId, delay: u64) {
        let side = &mut self.sides[id];
        if side.left > 0 && !std::mem::replace(&mut side.posting, true) {
            self.schedule(delay, Event::Post(id));
        }
    }

    pub(super) fn post(&mut self, id: SideId) {
        self.sides[id].posting = false;
        let Some(peer) = self.sides[id].peer else { return };
        if !self.runs(id) || self.sides[id].stage != Stage::Up {
            return;
        }
        let conn = self.sides[id].conn;
        let burst = 1 + self.base.rng.below(self.plan.conns[conn].burst);
        let mut requests: Vec<OwnedRequest> = Vec::new();
        for _ in 0..burst {
            if self.sides[id].left == 0 {
                break;
            }
            let Self { base, sides, plan, .. } = self;
            let plan = &plan.conns[conn];
            let (rng, coverage) = (&mut base.rng, &mut base.coverage);
            let next = App { sides, id, peer, plan, rng, coverage }.next();
            if next.is_empty() {
                break;
            }
            requests.extend(next);
        }
        if requests.is_empty() {
            // The program continues after a completion; if none is to come, it continues later.
            if !self.sides[id].requests.iter().any(|r| r.signalled) {
                self.schedule_post(id, 50 * US);
            }
            return;
        }
        for request in &requests {
            let facts = [6, id as u64, request.id];
            self.note(facts, || {
                let OwnedRequest { id: number, op, sges, inline, flags } = request;
                let inline = inline.len();
                format!("side {id} posts {number}: {op:?} {sges:x?} {inline} inline {flags:?}")
            });
        }
        self.stats.posted += requests.len() as u64;
        let wrs: Vec<_> = requests.iter().map(OwnedRequest::wr).collect();
        let (host, qpn, now) = (self.sides[id].host, self.sides[id].qpn, self.instant());
        if let Some(device) = &mut self.hosts[host].device {
            let result = device.post_send(now, qpn, &wrs);
            drop(wrs);
            self.judge(result.map_err(|(n, e)| format!("side {id}: request {n} refused: {e}")));
        }
        self.pause(id);
        self.schedule_turn(host);
        let gap = self.plan.conns[conn].gap;
        let delay = self.rng.below(gap + 1);
        self.schedule_post(id, delay);
    }

    /// Stops the send queue of a program from time to time: posted requests wait [QP-3].
    fn pause(&mut self, id: SideId) {
        let pauses = self.plan.conns[self.sides[id].conn].pauses;
        // Plans without pauses draw no number here, so that older plans run as they did.
        if pauses > 0 && self.rng.chance(pauses) && self.changes(id, QpState::Rts, QpState::Sqd) {
            reach::stepped(&mut self.coverage, Step::Pauses);
            self.schedule_within(PAUSE, Event::Resume(id));
        }
    }

    pub(super) fn resume(&mut self, id: SideId) {
        if self.runs(id)
            && self.sides[id].stage == Stage::Up
            && self.changes(id, QpState::Sqd, QpState::Rts)
        {
            reach::stepped(&mut self.coverage, Step::GoesOn);
            self.schedule_turn(self.sides[id].host);
        }
    }

    /// Moves a queue pair from one state to another, if it is in the first one.
    fn changes(&mut self, id: SideId, from: QpState, to: QpState) -> bool {
        let (host, qpn, now) = (self.sides[id].host, self.sides[id].qpn, self.instant());
        let Some(device) = &mut self.hosts[host].device else { return false };
        if device.query_qp(qpn).map(|(state, _)| state) != Ok(from) {
            return false;
        }
        self.note([27, id as u64, to as u64], || format!("side {id}: {from:?} to {to:?}"));
        let attr = QpAttr { state: Some(to), ..QpAttr::default() };
        let Some(device) = &mut self.hosts[host].device else { return false };
        let changed = device.modify_qp(now, qpn, &attr);
        self.judge(changed.map_err(|e| format!("side {id}: {from:?} to {to:?}: {e}"))).is_some()
    }

    pub(crate) fn post_receive(&mut self, id: SideId) {
        if !self.runs(id) || self.sides[id].stage > Stage::Up || self.sides[id].receives_due == 0 {
            return;
        }
        let side = &mut self.sides[id];
        let plan = &self.plan.conns[side.conn];
        side.receives_due -= 1;
        let Some((number, sges)) = app::receive(side, plan, &mut self.base.rng) else {
            self.fail(|| format!("side {id}: no memory for a receive"));
            return;
        };
        self.note([7, id as u64, number], || format!("side {id} posts receive {number} {sges:x?}"));
        let (host, qpn, now) = (self.sides[id].host, self.sides[id].qpn, self.instant());
        let shared = self.sides[id].shared_receives;
        let Some(device) = &mut self.hosts[host].device else { return };
        let wr = bowline_verbs::RecvWr { id: number, sges: &sges };
        let result = match shared {
            Some(shared) => device.post_srq_recv(shared.srq, &[wr]),
            None => device.post_recv(now, qpn, &[wr]),
        };
        self.judge(result.map_err(|(_, e)| format!("side {id}: receive {number} refused: {e}")));
        self.limit_receives(id);
        self.schedule_turn(host);
    }

    /// Arms the limit of a side's shared receive queue from time to time.
    fn limit_receives(&mut self, id: SideId) {
        let Some(shared) = self.sides[id].shared_receives.filter(|shared| shared.limit == 0) else {
            return;
        };
        if !self.rng.chance(300) {
            return;
        }
        let (host, depth) = (self.sides[id].host, self.plan.conns[self.sides[id].conn].recv_depth);
        let limit = 1 + self.rng.index(depth);
        self.note([32, id as u64, limit as u64], || format!("side {id} arms limit {limit}"));
        self.sides[id].shared_receives = Some(SharedReceives { limit, ..shared });
        let Some(device) = &mut self.hosts[host].device else { return };
        let change = SrqChange { limit: Some(limit), ..SrqChange::default() };
        let armed = device.modify_srq(shared.srq, &change);
        self.judge(armed.map_err(|e| format!("side {id}: limit {limit}: {e}")));
    }

    pub(super) fn revoke(&mut self, id: SideId) {
        if !self.runs(id) || self.sides[id].stage > Stage::Up || self.sides[id].revoked {
            return;
        }
        self.note([8, id as u64, 0], || format!("side {id} deregisters the shared region"));
        let (host, key) = (self.sides[id].host, self.sides[id].shared.lkey);
        let busy = !self.sides[id].requests.is_empty()
            || self.sides[id].peer.is_some_and(|peer| !self.sides[peer].requests.is_empty());
        reach::loan(&mut self.coverage, LoanEvent::TakenAway { busy });
        if let Some(device) = &mut self.hosts[host].device {
            let result = device.dereg_mr(key).map_err(|e| format!("side {id}: deregister: {e}"));
            self.judge(result);
        }
        let result = oracle::revoked(&mut self.sides, id);
        self.judge(result);
        self.schedule_turn(host);
    }
}
