//! Beginning and end of connections.

use bowline_roce::Device;
use bowline_verbs::{
    Access, AddressVector, CmEvent, CmId, ConnParam, ConnRequest, Error, InvalidReason, MrKeys,
    MwType, Object, QpAttr, QpCap, QpInit, QpState, QpType, Qpn, RecvWr, RejectReason, SendFlags,
    SendOp, SendWr, SrqId, SrqInit, WcOpcode,
};

use super::app::{INLINE, SGES};
use super::host::PORT;
use super::memory::{Memory, Purpose, fill};
use super::oracle::{self, note_cause};
use super::plan::ConnPlan;
use super::reach::{self, Link, SharedRow, Step};
use super::side::{
    CmEventsSeen, FailureCauses, Fast, Receive, Request, SharedReceives, Side, SideId, Stage,
};
use super::world::{Event, World};
use crate::engine::queue::MS;
use crate::engine::rng::mix;

/// How long a side stays after its queues are flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linger {
    /// The side goes at once.
    No,
    /// The side stays until the peer has agreed to the end.
    Disconnected,
    /// The side stays until no late packet can come.
    Timewait,
}

/// Returns private data of a handshake: the number of the side and bytes derived from it, at most
/// `most` bytes.
fn private_data_of(id: SideId, most: usize) -> Vec<u8> {
    let mut data = (id as u64).to_le_bytes().to_vec();
    let len = mix(id as u64) % (most as u64 - 7);
    fill(id as u64, len as usize, &mut data);
    data
}

/// Tells whether private data that a peer received are those of this side, followed by zeroes.
fn is_private_data_of(data: &[u8], id: SideId, most: usize) -> bool {
    let sent = private_data_of(id, most);
    data.len() == most && data.starts_with(&sent) && data[sent.len()..].iter().all(|b| *b == 0)
}

fn side_in(data: &[u8]) -> Option<SideId> {
    data.first_chunk().map(|bytes| u64::from_le_bytes(*bytes) as usize)
}

/// Number of bytes of the peer's private data that a consumer sees [CMA-5].
const REQUEST_DATA: usize = 56;
const ACCEPT_DATA: usize = 196;
const REJECT_DATA: usize = 148;

/// Returns the memory areas of a side, except those for receives.
fn areas(plan: &ConnPlan) -> Vec<(Purpose, usize)> {
    let mut out = Vec::new();
    for (purpose, count) in [
        (Purpose::Source, 6),
        (Purpose::Receive, plan.recv_depth),
        (Purpose::Sink, 4),
        (Purpose::Target, 3),
        (Purpose::Words, 1),
        (Purpose::Constant, 1),
        (Purpose::Fast, 1),
    ] {
        let len = match purpose {
            Purpose::Words => 64,
            _ => plan.message_max.max(64),
        };
        out.extend((0..count).map(|_| (purpose, len)));
    }
    out
}

impl World {
    /// Returns the side that asks for a connection.
    pub(crate) fn side_of(&self, request: &ConnRequest) -> Option<SideId> {
        side_in(&request.private_data).filter(|id| *id < self.sides.len())
    }

    /// Makes queue pair, queues and memory of one side of a connection.
    fn make_side(&mut self, host: usize, conn: usize, active: bool) -> Option<SideId> {
        let id = self.sides.len();
        let boot = self.hosts[host].boot;
        let plan = self.plan.conns[conn].clone();
        let now = self.instant();
        let memory = Memory::new(&mut self.rng, &areas(&plan))?;
        let iova = (self.rng.next() >> 1) & !0xfff;
        let device = self.hosts[host].device.as_mut()?;
        let made = make(device, now, &plan, memory, iova);
        let made = made.map_err(|e| format!("side {id} cannot be made: {e}"));
        let mut side = self.judge(made)?;
        (side.host, side.boot, side.conn, side.active) = (host, boot, conn, active);
        side.left = plan.requests[usize::from(!active)];
        // No two requests of a run have the same number.
        side.next_number = (id as u64) << 32;
        side.receives_due = plan.recv_depth;
        side.linger = self.rng.pick(&[Linger::No, Linger::Disconnected, Linger::Timewait]);
        let away = |host: usize| self.hosts[host].device.is_none();
        if away(plan.from) || away(plan.to) {
            side.failure_causes.add(FailureCauses::DIED);
        }
        if self.plan.hard_network() || plan.patience != (17, 7) {
            side.failure_causes.add(FailureCauses::NETWORK);
        }
        let qpn = side.qpn;
        self.note([20, id as u64, qpn.0.into()], || {
            format!("side {id} of connection {conn}: {qpn:x?} on host {host}")
        });
        self.sides.push(side);
        self.stats.sides += 1;
        for _ in 0..plan.recv_depth {
            self.schedule_within(plan.recv_delay, Event::Receive(id));
        }
        if let Some(after) = plan.end_after[usize::from(!active)] {
            self.schedule_within(after, Event::End(id));
        }
        if let Some(after) = plan.deregister_after
            && self.rng.chance(500)
        {
            self.schedule_within(after, Event::Revoke(id));
        }
        self.poll_completions(id);
        Some(id)
    }

    fn param(&self, id: SideId, private_data: Vec<u8>) -> ConnParam {
        let side = &self.sides[id];
        let plan = &self.plan.conns[side.conn];
        let mine = usize::from(!side.active);
        ConnParam {
            qpn: side.qpn,
            private_data,
            responder_resources: plan.depths[mine],
            initiator_depth: plan.depths[1 - mine],
            rnr_retry_count: plan.rnr_retry,
            min_rnr_timer: plan.min_rnr_timer,
            ..ConnParam::default()
        }
    }

    /// Begins a connection of a program.
    pub(crate) fn connect(&mut self, conn: usize) {
        let plan = self.plan.conns[conn].clone();
        let dead = |host: usize| self.hosts[host].device.is_none();
        if dead(plan.from) || !plan.managed && dead(plan.to) {
            self.schedule(MS, Event::Connect(conn));
            return;
        }
        self.starts_left = self.starts_left.saturating_sub(1);
        let Some(id) = self.make_side(plan.from, conn, true) else { return };
        self.stats.connects += 1;
        reach::linked(&mut self.coverage, if plan.managed { Link::Asked } else { Link::Unmanaged });
        if plan.managed {
            let param = self.param(id, private_data_of(id, REQUEST_DATA));
            let port = if plan.wrong_port { PORT + 1 } else { PORT };
            let remote = (self.hosts[plan.to].addr(), port).into();
            let now = self.instant();
            let Some(device) = &mut self.hosts[plan.from].device else { return };
            let result = device.connect(now, None, remote, &param);
            let result = result.map_err(|e| format!("side {id} cannot connect: {e}"));
            self.sides[id].id = self.judge(result);
            self.schedule_turn(plan.from);
            return;
        }
        let Some(other) = self.make_side(plan.to, conn, false) else { return };
        self.sides[id].peer = Some(other);
        self.sides[other].peer = Some(id);
        for id in [id, other] {
            self.schedule_within(2 * MS, Event::SetUp(id));
        }
    }

    /// Moves the queue pair of a program without a connection manager to RTS.
    pub(crate) fn set_up(&mut self, id: SideId) {
        let Some(peer) = self.sides[id].peer else { return };
        if !self.runs(id) || self.sides[id].stage != Stage::Connecting {
            return;
        }
        let (side, other) = (&self.sides[id], &self.sides[peer]);
        let plan = &self.plan.conns[side.conn];
        let mine = usize::from(!side.active);
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            av: Some(AddressVector {
                local: self.hosts[side.host].addr(),
                remote: self.hosts[other.host].addr(),
                flow_label: 0,
                tos: 0,
            }),
            path_mtu: Some(plan.mtu),
            dest_qpn: Some(other.qpn),
            rq_psn: Some(plan.psns[1 - mine]),
            max_dest_rd_atomic: Some(plan.depths[mine]),
            min_rnr_timer: Some(plan.min_rnr_timer),
            ..QpAttr::default()
        };
        let rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(plan.psns[mine]),
            timeout: Some(plan.patience.0),
            retry_cnt: Some(plan.patience.1),
            rnr_retry: Some(plan.rnr_retry),
            max_rd_atomic: Some(plan.depths[1 - mine]),
            ..QpAttr::default()
        };
        let (host, qpn, now) = (side.host, side.qpn, self.instant());
        let slowly = plan.slowly;
        let Some(device) = &mut self.hosts[host].device else { return };
        let state = device.query_qp(qpn).map(|(state, _)| state);
        let waits = slowly > 0 && state == Ok(QpState::Init);
        if state == Ok(QpState::Err) {
            // A request of the peer was wrong.
            return self.end(id);
        }
        let mut result = Ok(());
        if state != Ok(QpState::Rtr) {
            result = device.modify_qp(now, qpn, &rtr);
        }
        if !waits {
            result = result.and_then(|()| device.modify_qp(now, qpn, &rts));
        }
        self.judge(result.map_err(|e| format!("side {id}: {e}")));
        self.schedule_turn(host);
        if waits {
            // Packets that come meanwhile are received.
            reach::stepped(&mut self.coverage, Step::Receives);
            return self.schedule_within(slowly, Event::SetUp(id));
        }
        reach::stepped(&mut self.coverage, Step::UpByProgram);
        self.up(id);
    }

    fn up(&mut self, id: SideId) {
        self.note([21, id as u64, 0], || format!("side {id} is up"));
        self.stats.established += 1;
        self.sides[id].stage = Stage::Up;
        self.schedule_post(id, 0);
    }

    /// Answers a connection request for a program.
    pub(crate) fn decide(&mut self, host: usize, cm: CmId, request: &ConnRequest) {
        let Some(active) = self.side_of(request) else {
            self.fail(|| format!("host {host}: a request nobody made: {request:?}"));
            return;
        };
        let conn = self.sides[active].conn;
        let now = self.instant();
        if self.hosts[host].listener.is_none() {
            // The request of a dead program came late; no program listens any more.
            let Some(device) = &mut self.hosts[host].device else { return };
            let rejected = device.reject(now, cm, &[]);
            reach::linked(&mut self.coverage, Link::TooLate);
            self.note([26, host as u64, 0], || format!("too late for side {active}: {rejected:?}"));
            self.schedule_turn(host);
            return;
        }
        let right = is_private_data_of(&request.private_data, active, REQUEST_DATA)
            && request.remote_qpn == self.sides[active].qpn
            && request.local == (self.hosts[host].addr(), PORT).into()
            && request.remote.ip() == self.hosts[self.sides[active].host].addr()
            && Some(request.listener) == self.hosts[host].listener
            && request.responder_resources == self.plan.conns[conn].depths[0]
            && request.initiator_depth == self.plan.conns[conn].depths[1]
            && !self.plan.conns[conn].wrong_port
            && self.plan.conns[conn].mtu <= self.plan.hosts[host].mtu;
        if !right {
            self.fail(|| format!("host {host}: side {active} did not ask so: {request:?}"));
            return;
        }
        if self.plan.conns[conn].reject {
            self.note([22, host as u64, active as u64], || format!("side {active} is refused"));
            let Some(device) = &mut self.hosts[host].device else { return };
            let result = device.reject(now, cm, &private_data_of(active, REJECT_DATA));
            self.answered(active, result);
            self.schedule_turn(host);
            return;
        }
        let Some(id) = self.make_side(host, conn, false) else { return };
        self.sides[id].id = Some(cm);
        self.sides[id].requester = Some(active);
        let param = self.param(id, private_data_of(id, ACCEPT_DATA));
        let Some(device) = &mut self.hosts[host].device else { return };
        let result = device.accept(now, cm, &param);
        if !self.answered(active, result) {
            self.sides[id].failure_causes.add(FailureCauses::NOT_ESTABLISHED);
            let gone = self.hosts[host].device.as_mut().map(|device| device.destroy_id(now, cm));
            let gone = gone.unwrap_or(Ok(())).map_err(|e| format!("side {id}: {cm:?}: {e}"));
            self.judge(gone);
            self.sides[id].id = None;
            self.end(id);
        }
        self.schedule_turn(host);
    }

    /// Checks the result of an answer; the request may have been withdrawn before.
    fn answered(&mut self, active: SideId, result: Result<(), Error>) -> bool {
        if let Err(e) = &result
            && !self.sides[active].failure_causes.any()
        {
            self.fail(|| format!("the request of side {active} cannot be answered: {e}"));
        }
        if result.is_err() {
            reach::linked(&mut self.coverage, Link::Withdrawn);
        }
        result.is_ok()
    }

    /// Handles an event of the connection manager.
    pub(crate) fn handle_cm_event(&mut self, host: usize, event: CmEvent) {
        let boot = self.hosts[host].boot;
        let (CmEvent::Established { id: cm, .. }
        | CmEvent::Rejected { id: cm, .. }
        | CmEvent::Unreachable { id: cm }
        | CmEvent::Disconnected { id: cm }
        | CmEvent::TimewaitExit { id: cm }) = event
        else {
            return;
        };
        let mine = |s: &Side| s.host == host && s.boot == boot && s.stage < Stage::Gone;
        let found = self.sides.iter().position(|s| mine(s) && s.id == Some(cm));
        // The event may be for a connection that has been destroyed meanwhile.
        let Some(id) = found else { return };
        let seen = self.sides[id].cm_events_seen;
        let possible = match event {
            CmEvent::Established { .. } => !seen.established && !seen.refused && !seen.disconnected,
            CmEvent::Rejected { .. } | CmEvent::Unreachable { .. } => {
                !seen.refused && !seen.disconnected
            }
            CmEvent::Disconnected { .. } => !seen.refused && !seen.disconnected,
            _ => !seen.timewait_exit && (seen.disconnected || seen.refused),
        };
        if !possible {
            self.fail(|| format!("side {id}: {event:?} after {seen:?}"));
            return;
        }
        let excused = self.sides[id].failure_causes.any()
            || !self.sides[id].active && self.sides[id].peer.is_none();
        match event {
            CmEvent::Established { private_data, responder_resources, initiator_depth, .. } => {
                let depths = (responder_resources, initiator_depth);
                self.established(id, &private_data, depths);
            }
            CmEvent::Rejected { reason, private_data, .. } => {
                self.sides[id].cm_events_seen.refused = true;
                self.stats.refused += 1;
                let plan = &self.plan.conns[self.sides[id].conn];
                let by_program = plan.reject
                    && reason == RejectReason::CONSUMER
                    && is_private_data_of(&private_data, id, REJECT_DATA);
                let nobody = plan.wrong_port && reason == RejectReason::INVALID_SERVICE_ID;
                let too_large =
                    plan.mtu > self.plan.hosts[plan.to].mtu && reason == RejectReason::INVALID_MTU;
                let active = self.sides[id].active;
                reach::linked(
                    &mut self.coverage,
                    match (by_program, nobody, too_large) {
                        (true, ..) => Link::RefusedByProgram,
                        (_, true, _) => Link::Nobody,
                        (.., true) => Link::TooLarge,
                        _ => Link::RefusedOtherwise,
                    },
                );
                if !(active && (by_program || nobody || too_large)) && !excused {
                    self.fail(|| format!("side {id} was refused: {reason:?}"));
                }
                self.cm_finished(id);
            }
            CmEvent::Unreachable { .. } => {
                self.sides[id].cm_events_seen.refused = true;
                let active = self.sides[id].active;
                reach::linked(&mut self.coverage, Link::Unreachable { active });
                if !excused && !self.may_stay_untold(id) {
                    self.fail(|| format!("side {id} did not reach its peer"));
                }
                self.cm_finished(id);
            }
            CmEvent::Disconnected { .. } => {
                self.sides[id].cm_events_seen.disconnected = true;
                let active = self.sides[id].active;
                reach::linked(&mut self.coverage, Link::Disconnected { active });
                if !excused {
                    self.fail(|| format!("side {id} was disconnected by nobody"));
                }
                self.cm_finished(id);
            }
            _ => {
                self.sides[id].cm_events_seen.timewait_exit = true;
                reach::linked(&mut self.coverage, Link::TimewaitOver);
                self.cm_finished(id);
            }
        }
    }

    fn established(&mut self, id: SideId, data: &[u8], depths: (u8, u8)) {
        self.sides[id].cm_events_seen.established = true;
        let active = self.sides[id].active;
        reach::linked(&mut self.coverage, Link::Established { active });
        let side = &self.sides[id];
        let plan = &self.plan.conns[side.conn];
        let mine = usize::from(!side.active);
        if depths != (plan.depths[mine], plan.depths[1 - mine]) {
            self.fail(|| format!("side {id} was given depths of {depths:?}"));
        }
        if self.sides[id].active {
            let peer = side_in(data).filter(|peer| {
                is_private_data_of(data, *peer, ACCEPT_DATA)
                    && self.sides.get(*peer).is_some_and(|p| {
                        p.peer.is_none() && !p.active && p.conn == self.sides[id].conn
                    })
            });
            let Some(peer) = peer else {
                self.fail(|| format!("side {id} was accepted by nobody: {data:x?}"));
                return;
            };
            self.sides[id].peer = Some(peer);
            self.sides[peer].peer = Some(id);
            let both = self.sides[peer].failure_causes;
            note_cause(&mut self.sides, id, both);
            let both = self.sides[id].failure_causes;
            note_cause(&mut self.sides, id, both);
        } else if self.sides[id].peer.is_none() {
            // The other program gave up before it noticed.
            self.sides[id].failure_causes.add(FailureCauses::NOT_ESTABLISHED);
            let requester = self.sides[id].requester.map(|requester| &self.sides[requester]);
            if requester.is_none_or(|requester| requester.stage <= Stage::Up) {
                self.fail(|| format!("side {id} was connected by nobody"));
            }
        }
        if self.sides[id].stage == Stage::Connecting {
            reach::stepped(&mut self.coverage, Step::UpByManager);
            self.up(id);
        }
    }

    /// The connection manager has finished with this side.
    fn cm_finished(&mut self, id: SideId) {
        match self.sides[id].stage {
            Stage::Connecting | Stage::Up => self.end(id),
            Stage::Drained => self.try_leave(id),
            _ => {}
        }
    }

    /// Ends a program's connection, or does the work left after its end.
    pub(crate) fn end(&mut self, id: SideId) {
        self.note([23, id as u64, 0], || format!("side {id} ends"));
        let before = self.sides[id].stage;
        self.sides[id].stage = Stage::Ending;
        note_cause(&mut self.sides, id, FailureCauses::ENDED);
        let (host, qpn, seen, now) = (
            self.sides[id].host,
            self.sides[id].qpn,
            self.sides[id].cm_events_seen,
            self.instant(),
        );
        let plan = &self.plan.conns[self.sides[id].conn];
        let abrupt = plan.abrupt && plan.managed && self.rng.chance(500);
        self.reach_end(id, before, abrupt);
        let Some(device) = &mut self.hosts[host].device else { return };
        let over = seen.refused || seen.disconnected;
        let mut ended = Ok(());
        if let Some(cm) = self.sides[id].id.filter(|_| !over && !abrupt) {
            if before == Stage::Connecting && self.sides[id].active {
                ended = device.destroy_id(now, cm);
                self.sides[id].id = None;
            } else {
                ended = device.disconnect(now, cm);
            }
        }
        self.judge(ended.map_err(|e| format!("side {id} cannot end: {e}")));
        if abrupt {
            self.sides[id].linger = Linger::No;
            self.poll_completions(id);
            if self.sides[id].stage == Stage::Ending {
                let result = oracle::abandoned(&mut self.sides, id);
                self.judge(result);
                self.destroy_side(id);
            }
            return;
        }
        let Some(device) = &mut self.hosts[host].device else { return };
        let state = match device.query_qp(qpn) {
            Ok((state, _)) => state,
            Err(e) => return self.fail(|| format!("side {id}: {e}")),
        };
        if state != QpState::Err {
            // Without a connection, or with a refused one, the program moves its queue pair to the
            // error state itself.
            let attr = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
            let result = device.modify_qp(now, qpn, &attr);
            if self.sides[id].cm_events_seen.established {
                self.fail(|| format!("side {id} has no connection and is in {state:?}"));
            }
            self.judge(result.map_err(|e| format!("side {id}: to error: {e}")));
        }
        self.post_markers(id);
        self.schedule_turn(host);
        self.try_destroy(id);
    }

    /// Tells whether a passive side may never learn that its peer is up: its REP is sent six
    /// times, each RTU can be lost, and a peer that sends nothing else shows itself by no packet
    /// [CM-57].
    fn may_stay_untold(&self, id: SideId) -> bool {
        let side = &self.sides[id];
        let [by_active, _] = self.plan.conns[side.conn].requests;
        !side.active && by_active == 0 && self.plan.leaves_behind()
    }

    /// Counts the stage in which a side ends.
    fn reach_end(&mut self, id: SideId, before: Stage, abrupt: bool) {
        let side = &self.sides[id];
        let Some(device) = &self.hosts[side.host].device else { return };
        let Ok((state, _)) = device.query_qp(side.qpn) else { return };
        let failed = side.send_failed || side.recv_failed;
        let step = match (state, failed, side.cm_events_seen.disconnected) {
            (QpState::Err, true, _) => Some(Step::Fails),
            (QpState::Err, _, true) => Some(Step::Disconnected),
            (QpState::Err, ..) => None,
            (_, _, _) if abrupt => None,
            (state, ..) => Some(Step::Ends(state)),
        };
        let given_up = before == Stage::Connecting
            && side.id.is_some()
            && !side.cm_events_seen.refused
            && !side.cm_events_seen.disconnected;
        let active = side.active;
        if given_up {
            reach::linked(&mut self.coverage, Link::GivenUp { active });
        }
        if abrupt {
            reach::linked(&mut self.coverage, Link::Abrupt);
        }
        if let Some(step) = step {
            reach::stepped(&mut self.coverage, step);
        }
    }

    /// Posts requests whose completions show that all earlier requests have completed [QP-9].
    fn post_markers(&mut self, id: SideId) {
        let side = &mut self.sides[id];
        side.receives_due = 0;
        side.left = 0;
        side.next_number += 2;
        let (last, number) = (side.next_number, side.next_number - 1);
        let mut request = Request::new(number, WcOpcode::Send);
        (request.signalled, request.must_fail) = (true, true);
        side.requests.push_back(request);
        let is_shared = side.shared_receives.is_some();
        if !is_shared {
            side.receives.push_back(Receive { number: last, area: 0, pieces: Vec::new(), len: 0 });
        }
        let (host, qpn, now) = (side.host, side.qpn, self.instant());
        let Some(device) = &mut self.hosts[host].device else { return };
        let marker = SendWr {
            id: number,
            op: SendOp::Send,
            sges: &[],
            inline: &[],
            flags: SendFlags::SIGNALED,
        };
        let sent = device.post_send(now, qpn, &[marker]).map_err(|(_, e)| e);
        let received = device.post_recv(now, qpn, &[RecvWr { id: last, sges: &[] }]);
        let received = match received {
            // There the device reports the last receive [SRQ-5].
            Err((0, Error::Invalid(InvalidReason::SharedReceives))) if is_shared => Ok(()),
            received => received,
        };
        let result = sent.and(received.map_err(|(_, e)| e));
        self.judge(result.map_err(|e| format!("side {id}: a queue in error refused: {e}")));
    }

    /// Handles a report that a shared receive queue has fewer receives than its limit.
    pub(crate) fn limit_reached(&mut self, host: usize, srq: SrqId) {
        let boot = self.hosts[host].boot;
        let found = self.sides.iter().position(|side| {
            (side.host, side.boot) == (host, boot)
                && side.stage < Stage::Gone
                && side.shared_receives.is_some_and(|shared| shared.srq == srq)
        });
        // The side may have gone by now.
        let Some(id) = found else { return };
        let Some(shared) = &mut self.sides[id].shared_receives else { return };
        let limit = std::mem::take(&mut shared.limit);
        reach::shared(&mut self.coverage, SharedRow::LimitReached);
        if limit == 0 {
            self.fail(|| format!("host {host}: {srq:?} has no limit, and one is reported"));
        }
        self.try_destroy(id);
    }

    /// Handles a report that a queue pair takes no shared receive any more.
    pub(crate) fn last_receive(&mut self, host: usize, qpn: Qpn) {
        let boot = self.hosts[host].boot;
        let found = self.sides.iter().position(|side| {
            (side.host, side.boot, side.qpn) == (host, boot, qpn) && side.stage < Stage::Gone
        });
        // The side may have gone by now.
        let Some(id) = found else { return };
        let Some(shared) = &mut self.sides[id].shared_receives else {
            return self.fail(|| format!("side {id} shares no receives, and has a last one"));
        };
        if std::mem::replace(&mut shared.is_reported, true) {
            return self.fail(|| format!("side {id} has two last receives"));
        }
        // The completion of that receive is there by now.
        self.schedule_look(id);
    }

    /// Destroys a side whose queues are flushed.
    pub(crate) fn try_destroy(&mut self, id: SideId) {
        let side = &mut self.sides[id];
        let is_flushed = match &side.shared_receives {
            Some(shared) => shared.is_last,
            None => side.receives.is_empty(),
        };
        if side.stage != Stage::Ending || !side.requests.is_empty() || !is_flushed {
            return;
        }
        if let Some(shared) = side.shared_receives {
            let left = side.receives.len();
            if left < shared.limit {
                // The report is among the events that follow, or the side never ends.
                return;
            }
            // What is left in the queue completes for nobody.
            side.receives.clear();
            reach::shared(
                &mut self.coverage,
                if left > 0 { SharedRow::Left } else { SharedRow::Used },
            );
        }
        let side = &mut self.sides[id];
        side.stage = Stage::Drained;
        self.note([24, id as u64, 0], || format!("side {id} is flushed"));
        let result = oracle::drained(&mut self.sides, id);
        self.judge(result);
        self.try_leave(id);
    }

    fn try_leave(&mut self, id: SideId) {
        let side = &self.sides[id];
        let CmEventsSeen { refused, disconnected, timewait_exit, .. } = side.cm_events_seen;
        let connected = side.id.is_some() && !refused;
        let leaves = match side.linger {
            Linger::No => true,
            _ if !connected => true,
            Linger::Disconnected => disconnected,
            Linger::Timewait => timewait_exit,
        };
        if leaves {
            self.destroy_side(id);
        }
    }

    /// Removes all objects of a side, none of which may be in use.
    fn destroy_side(&mut self, id: SideId) {
        self.note([25, id as u64, 0], || format!("side {id} leaves"));
        let now = self.instant();
        self.sides[id].stage = Stage::Gone;
        let side = &self.sides[id];
        let host = side.host;
        let Some(device) = &mut self.hosts[host].device else { return };
        if let Ok((state, _)) = device.query_qp(side.qpn) {
            reach::stepped(&mut self.base.coverage, Step::Destroyed(state));
        }
        let result = remove(device, now, side);
        self.judge(result.map_err(|e| format!("side {id}: something is left: {e}")));
        self.schedule_turn(host);
    }
}

/// Makes all objects that a side needs of a device.
fn make(
    device: &mut Device,
    now: bowline_roce::Instant,
    plan: &ConnPlan,
    memory: Memory,
    iova: u64,
) -> Result<Side, Error> {
    let pd = device.alloc_pd()?;
    let depth = plan.send_depth + plan.recv_depth + 2;
    let send_cq = device.create_cq(depth)?;
    let recv_cq = if plan.one_queue { send_cq } else { device.create_cq(depth)? };
    let cap = QpCap {
        max_send_wr: plan.send_depth + 1,
        max_recv_wr: plan.recv_depth + 1,
        max_send_sge: SGES,
        max_recv_sge: SGES,
        max_inline: INLINE,
    };
    let (qp_type, sq_sig_all) = (QpType::Rc, plan.signal_all);
    let srq = match plan.shared_receives {
        true => Some(device.create_srq(&SrqInit { pd, max_wr: plan.recv_depth, max_sge: SGES })?),
        false => None,
    };
    let qpn = device.create_qp(&QpInit { pd, send_cq, recv_cq, srq, qp_type, cap, sq_sig_all })?;
    let shared_receives =
        srq.map(|srq| SharedReceives { srq, limit: 0, is_reported: false, is_last: false });
    let all = Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::FLUSH_GLOBAL;
    let attr = QpAttr { state: Some(QpState::Init), access: Some(all), ..QpAttr::default() };
    device.modify_qp(now, qpn, &attr)?;
    let mut region = |purposes: &[Purpose], access| {
        let (start, len) = memory.span(purposes);
        let iova = Some(iova + start as u64);
        device.reg_mr(pd, &memory.buffer, start, len, iova, access)
    };
    let own = [Purpose::Source, Purpose::Receive, Purpose::Sink];
    let local = region(&own, Access::LOCAL_WRITE)?;
    let shared = region(&[Purpose::Target, Purpose::Words], all)?;
    let constant = region(&[Purpose::Constant], Access::REMOTE_READ)?;
    let names = (pd, send_cq, recv_cq, qpn);
    let regions = [local, shared, constant];
    if plan.windows {
        let under = region(&[Purpose::Fast], Access::LOCAL_WRITE | Access::MW_BIND)?;
        let key = device.alloc_mw(pd, MwType::Type2)?;
        let fast = MrKeys { lkey: key, rkey: key };
        let side = Side::new(memory, iova, names, regions, fast, Some(under));
        return Ok(Side { shared_receives, ..side });
    }
    let fast: MrKeys = device.alloc_mr(pd)?;
    Ok(Side { shared_receives, ..Side::new(memory, iova, names, regions, fast, None) })
}

/// Removes all objects of a side from a device.
fn remove(device: &mut Device, now: bowline_roce::Instant, side: &Side) -> Result<(), Error> {
    if let Some(cm) = side.id {
        device.destroy_id(now, cm)?;
    }
    if let Some(SharedReceives { srq, .. }) = side.shared_receives {
        // The queue stays while the queue pair is there; if it did not, it would be missed below.
        let _ = device.destroy_srq(srq);
        device.destroy_qp(side.qpn)?;
        device.destroy_srq(srq)?;
    } else {
        device.destroy_qp(side.qpn)?;
    }
    device.destroy_cq(side.send_cq)?;
    if side.recv_cq != side.send_cq {
        device.destroy_cq(side.recv_cq)?;
    }
    device.dereg_mr(side.local.lkey)?;
    if !side.revoked {
        device.dereg_mr(side.shared.lkey)?;
    }
    device.dereg_mr(side.constant.lkey)?;
    let key = side.fast.key();
    if let Some(under) = side.under {
        device.dealloc_mw(key)?;
        device.dereg_mr(under.lkey)?;
        return device.dealloc_pd(side.pd);
    }
    // A registration that was flushed has not changed the key.
    let before = key & !0xff | key.wrapping_sub(1) & 0xff;
    device.dereg_mr(key).or_else(|_| match side.fast {
        Fast::Granted(_) => device.dereg_mr(before),
        _ => Err(Error::NoSuch(Object::MemoryRegion)),
    })?;
    device.dealloc_pd(side.pd)
}
