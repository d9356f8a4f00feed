//! Connects the core of the disks with the core of the session: messages and requests in one
//! direction, their results and events in the other.

use std::time::Duration;

use bowline_rnbd::SessionLimits;
use bowline_rnbd::client::{Config, Core, Outage, Token};
use bowline_rtrs::client::{
    Completed, Event as SessionEvent, PathState, Permit, PermitKind, Session,
};
use bowline_rtrs::{Errno, MemRef, PathId, RegionId};
use bowline_wire::rtrs::Dir;

use super::failover::Failover;
use super::placement::Placement;
use super::{ActiveSession, Client, Common, Stage};
use crate::rtrs::context::Base;
use crate::rtrs::reach::{self, Misdeed, SessionEventClass};
use crate::rtrs::sabotage::Sabotage;

/// Longest time requests wait for a session without a path: longer than any run.
const WAIT_MAX: Duration = Duration::from_secs(100_000);

/// The purpose of a request of the session.
#[derive(Debug)]
pub(super) enum Purpose {
    Io(u16, Option<Placement>),
    /// A message, with the place and the bytes of its response.
    Service(Token, Option<usize>, u32),
}

/// Takes a permit. After a refusal it does not ask again before a permit was reported free.
fn take_permit(
    session: &mut Session,
    refused: &mut bool,
    kind: PermitKind,
    cpu: u16,
) -> Option<Permit> {
    let permit = if *refused { None } else { session.get_permit(kind, cpu) };
    *refused = permit.is_none();
    permit
}

impl ActiveSession {
    /// Records the change of a path.
    fn state(&mut self, base: &mut Base, path: PathId, state: PathState) {
        let before = self.states.insert(path, state).unwrap_or(PathState::Connecting);
        if before == state {
            return;
        }
        reach::path(&mut base.coverage, before, state);
        let gives_up = matches!(before, PathState::Reconnecting | PathState::ConnectingErr)
            && state == PathState::Closing
            && self.stage < Stage::Closing;
        if gives_up {
            reach::misdeed(&mut base.coverage, Misdeed::UsedUp);
        }
    }
}

impl Client {
    /// Handles requests of the session that have ended.
    pub(super) fn completions(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(active) = &mut self.active else { return false };
        let mut ended: Vec<Completed> = Vec::new();
        active.session.take_completed(&mut ended);
        let moved = !ended.is_empty();
        if moved && base.sabotages(Sabotage::CompleteTwice, 50) {
            ended.extend_from_within(..1);
        }
        for mut one in ended {
            if base.sabotages(Sabotage::GiveUp, 20) {
                one.errno = Errno::ECONNABORTED.neg();
            }
            base.note([13, self.number as u64, one.tag], || format!("client: {one:?}"));
            let Some((permit, purpose)) = active.in_flight.remove(&one.tag) else {
                base.fail(|| format!("client {}: {one:?} was never asked", self.number));
                return false;
            };
            active.failover.ended(one);
            if let Some(permit) = permit
                && !base.sabotages(Sabotage::ForgetPermit, 20)
            {
                active.session.put_permit(permit);
            }
            let Some(core) = &mut active.core else { continue };
            match purpose {
                Purpose::Io(slot, placement) => {
                    if let Some(placement) = placement.filter(|_| one.errno == 0) {
                        active.placements.finish(&active.buffer, placement);
                    }
                    core.io_answer(now, slot, one.errno);
                }
                Purpose::Service(token, place, room) => {
                    let mut data = Vec::new();
                    if let Some(place) = place {
                        active.buffer.append_to(place, room as usize, &mut data);
                        active.service_slots.push(place);
                    }
                    let data = if one.errno == 0 { &data[..] } else { &[] };
                    core.service_answer(now, token, one.errno, data);
                }
            }
        }
        moved
    }

    pub(super) fn events(&mut self, base: &mut Base, common: &Common<'_>) -> bool {
        let now = base.instant();
        let mut moved = false;
        while let Some(active) = &mut self.active
            && let Some(event) = active.session.poll_event()
        {
            moved = true;
            base.note([14, self.number as u64, 0], || format!("client {}: {event:?}", self.number));
            let limits = active.session.geometry().map(|attrs| {
                let max_segments = attrs.max_segments.min(128) as u16;
                (SessionLimits { max_io: attrs.max_io, max_segments }, attrs.queue_depth)
            });
            match event {
                SessionEvent::Opened(Ok(())) => {
                    reach::session(&mut base.coverage, SessionEventClass::Opened, active.stage);
                    let outage =
                        if self.plan.queues { Outage::Queue(WAIT_MAX) } else { Outage::FailFast };
                    let depth = limits.map_or(1, |(_, depth)| depth);
                    let mut core = Core::new(Config { outage, ..Config::default() }, depth);
                    if let Some((limits, _)) = limits {
                        core.link_up(now, limits);
                    }
                    // A slot is a permit, as in drivers.
                    if depth > 1 {
                        let poll = self.plan.poll_connections > 0;
                        let mut take = || {
                            let some = poll && base.extra.chance(500);
                            let kind = if some { PermitKind::Polled } else { PermitKind::Io };
                            active.session.get_permit(kind, 0)
                        };
                        active.permits.extend(std::iter::from_fn(&mut take));
                    }
                    active.core = Some(core);
                    active.stage = Stage::Mapping;
                    self.map_all(base);
                }
                SessionEvent::Opened(Err(errno)) => {
                    base.stats.unopened += 1;
                    reach::session(&mut base.coverage, SessionEventClass::NotOpened, active.stage);
                    if !common.faulty {
                        base.fail(|| format!("client {}: not opened: {errno:?}", self.number));
                    }
                    active.stage = Stage::Closed;
                }
                SessionEvent::Closed => active.stage = Stage::Closed,
                SessionEvent::Disconnected => {
                    reach::session(&mut base.coverage, SessionEventClass::Lost, active.stage);
                    base.stats.outages += u64::from(active.stage < Stage::Closing);
                    if let Some(core) = &mut active.core {
                        core.link_down(now);
                    }
                }
                SessionEvent::Reconnected => {
                    reach::session(&mut base.coverage, SessionEventClass::Back, active.stage);
                    self.disks.iter_mut().for_each(|disk| disk.oracle.resumed());
                    if let (Some(core), Some((limits, _))) = (&mut active.core, limits) {
                        core.link_up(now, limits);
                    }
                }
                SessionEvent::PathState { path, state: PathState::Connected, .. } => {
                    active.state(base, path, PathState::Connected);
                    active.failover.path(path, PathState::Connected);
                    base.stats.paths_up += 1;
                }
                SessionEvent::PathState { path, state, .. } => {
                    active.state(base, path, state);
                    active.failover.path(path, state);
                    let lost = matches!(
                        state,
                        PathState::Reconnecting | PathState::ConnectingErr | PathState::Dead
                    );
                    base.stats.paths_lost += u64::from(state == PathState::Reconnecting);
                    if lost && !common.faulty && active.stage < Stage::Closing {
                        base.fail(|| format!("client {}: {path:?} became {state:?}", self.number));
                    }
                }
                SessionEvent::PermitFree if !base.sabotages(Sabotage::LosePermitFree, 1000) => {
                    active.refused = [false; 2];
                }
                _ => {}
            }
        }
        if let Some(active) = &mut self.active
            && !self.plan.hostile
        {
            let judged = active.failover.judge();
            base.judge(judged.map_err(|e| format!("client {}: {e}", self.number)));
        }
        moved
    }

    /// Sends service messages.
    pub(super) fn messages(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(active) = &mut self.active else { return false };
        let Some(core) = &mut active.core else { return false };
        active.messages.extend(std::iter::from_fn(|| core.poll_service_message()));
        let mut moved = false;
        while let Some(message) = active.messages.front() {
            let wanted = message.room > 0;
            if wanted && active.service_slots.is_empty() {
                break;
            }
            let Some(permit) =
                take_permit(&mut active.session, &mut active.refused[0], PermitKind::Service, 0)
            else {
                if active.stage >= Stage::Closing {
                    active.messages.clear();
                }
                break;
            };
            moved = true;
            let Some(message) = active.messages.pop_front() else { break };
            let place = if wanted { active.service_slots.pop() } else { None };
            let data = place.map(|place| MemRef {
                region: active.region,
                offset: place as u64,
                len: message.room,
            });
            active.tags += 1;
            let tag = active.tags;
            let dir = if wanted { Dir::Read } else { Dir::Write };
            let accepted =
                active.session.request(now, dir, &permit, &message.usr, data.as_slice(), tag);
            match accepted {
                Ok(()) => {
                    let purpose = Purpose::Service(message.token, place, message.room);
                    active.in_flight.insert(tag, (Some(permit), purpose));
                    active.failover.begun(tag);
                }
                Err(errno) => {
                    base.judge(Failover::refused(errno, active.session.paths()));
                    active.session.put_permit(permit);
                    active.service_slots.extend(place);
                    core.service_answer(now, message.token, errno.neg(), &[]);
                }
            }
        }
        moved
    }

    /// Sends IO messages.
    pub(super) fn sends(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(active) = &mut self.active else { return false };
        let Some(core) = &mut active.core else { return false };
        let mut sends = Vec::new();
        core.take_sends(&mut sends);
        active.sends.extend(sends);
        let mut moved = false;
        while let Some(send) = active.sends.pop_front() {
            let cpu = base.rng.below(4) as u16;
            let mut taken = None;
            if active.permits.is_empty() {
                taken =
                    take_permit(&mut active.session, &mut active.refused[1], PermitKind::Io, cpu);
            }
            let kept = active.permits.get(usize::from(send.slot));
            let Some(permit) = taken.as_ref().or(kept) else {
                active.sends.push_front(send);
                break;
            };
            active.session.set_cpu_of(permit, cpu);
            moved = true;
            let data = send.data.map(|piece| MemRef {
                region: RegionId(piece.region),
                offset: piece.offset,
                len: piece.len,
            });
            let placement = data.filter(|_| send.dir == Dir::Read).and_then(|data| {
                let (often, keys) = (self.plan.scattered, self.plan.read_keys);
                active.placements.choose(base, often, keys, &data)
            });
            let pieces = placement.as_ref().map(|placement| &placement.pieces[..]);
            let pieces = pieces.filter(|pieces| !pieces.is_empty()).unwrap_or(data.as_slice());
            active.tags += 1;
            let tag = active.tags;
            let accepted = active.session.request(now, send.dir, permit, &send.usr, pieces, tag);
            match accepted {
                Ok(()) => {
                    active.in_flight.insert(tag, (taken, Purpose::Io(send.slot, placement)));
                    active.failover.begun(tag);
                }
                Err(errno) => {
                    base.judge(Failover::refused(errno, active.session.paths()));
                    taken.into_iter().for_each(|permit| active.session.put_permit(permit));
                    core.send_failed(now, send.slot, errno);
                }
            }
        }
        moved
    }
}
