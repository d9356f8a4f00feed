//! What goes between the core of the disks and the core of the session: messages and requests one
//! way, their ends and events the other.

use std::time::Duration;

use bowline_rnbd::SessionLimits;
use bowline_rnbd::client::{Config, Core, Outage, Token};
use bowline_rtrs::client::{
    Completed, Event as SessionEvent, PathState, Permit, PermitKind, Session,
};
use bowline_rtrs::{Errno, MemRef, PathId, RegionId};
use bowline_wire::rtrs::Dir;

use super::failover::Failover;
use super::landing::Landing;
use super::{Client, Common, Life, Stage};
use crate::rtrs::base::Base;
use crate::rtrs::reach::{self, Word, Wrong};
use crate::rtrs::sabotage::Sabotage;

/// Longest time requests wait for a session that is away: longer than any run.
const WAIT_MAX: Duration = Duration::from_secs(100_000);

/// What a request of the session is for.
#[derive(Debug)]
pub(super) enum Purpose {
    Io(u16, Option<Landing>),
    /// A message, and where its answer goes.
    Service(Token, Option<usize>, u32),
}

/// Takes a permit. Who was `refused` one does not ask again before being told that there is one.
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

impl Life {
    /// A path has changed.
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
            reach::wrong(&mut base.coverage, Wrong::UsedUp);
        }
    }
}

impl Client {
    /// Requests of the session that have ended.
    pub(super) fn completions(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(life) = &mut self.life else { return false };
        let mut ended: Vec<Completed> = Vec::new();
        life.session.take_completed(&mut ended);
        let moved = !ended.is_empty();
        if moved && base.wrongs(Sabotage::CompleteTwice, 50) {
            ended.extend_from_within(..1);
        }
        for mut one in ended {
            if base.wrongs(Sabotage::GiveUp, 20) {
                one.errno = Errno::ECONNABORTED.neg();
            }
            base.note([13, self.number as u64, one.tag], || format!("client: {one:?}"));
            let Some((permit, purpose)) = life.asked.remove(&one.tag) else {
                base.fail(|| format!("client {}: {one:?} was never asked", self.number));
                return false;
            };
            life.failover.ended(one);
            if let Some(permit) = permit
                && !base.wrongs(Sabotage::ForgetPermit, 20)
            {
                life.session.put_permit(permit);
            }
            let Some(core) = &mut life.core else { continue };
            match purpose {
                Purpose::Io(slot, landing) => {
                    if let Some(landing) = landing.filter(|_| one.errno == 0) {
                        life.landings.land(&life.buffer, landing);
                    }
                    core.io_answer(now, slot, one.errno);
                }
                Purpose::Service(token, place, room) => {
                    let mut data = Vec::new();
                    if let Some(place) = place {
                        life.buffer.append_to(place, room as usize, &mut data);
                        life.service_slots.push(place);
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
        while let Some(life) = &mut self.life
            && let Some(event) = life.session.poll_event()
        {
            moved = true;
            base.note([14, self.number as u64, 0], || format!("client {}: {event:?}", self.number));
            let limits = life.session.geometry().map(|attrs| {
                let max_segments = attrs.max_segments.min(128) as u16;
                (SessionLimits { max_io: attrs.max_io, max_segments }, attrs.queue_depth)
            });
            match event {
                SessionEvent::Opened(Ok(())) => {
                    reach::session(&mut base.coverage, Word::Opened, life.stage);
                    let outage =
                        if self.plan.queues { Outage::Queue(WAIT_MAX) } else { Outage::FailFast };
                    let depth = limits.map_or(1, |(_, depth)| depth);
                    let mut core = Core::new(Config { outage, ..Config::default() }, depth);
                    if let Some((limits, _)) = limits {
                        core.link_up(now, limits);
                    }
                    // As drivers do: a slot is a permit.
                    if depth > 1 {
                        let poll = self.plan.poll_connections > 0;
                        let mut take = || {
                            let some = poll && base.extra.chance(500);
                            let kind = if some { PermitKind::Polled } else { PermitKind::Io };
                            life.session.get_permit(kind, 0)
                        };
                        life.permits.extend(std::iter::from_fn(&mut take));
                    }
                    life.core = Some(core);
                    life.stage = Stage::Mapping;
                    self.map_all(base);
                }
                SessionEvent::Opened(Err(errno)) => {
                    base.stats.unopened += 1;
                    reach::session(&mut base.coverage, Word::NotOpened, life.stage);
                    if !common.faulty {
                        base.fail(|| format!("client {}: not opened: {errno:?}", self.number));
                    }
                    life.stage = Stage::Closed;
                }
                SessionEvent::Closed => life.stage = Stage::Closed,
                SessionEvent::Disconnected => {
                    reach::session(&mut base.coverage, Word::Lost, life.stage);
                    base.stats.outages += u64::from(life.stage < Stage::Closing);
                    if let Some(core) = &mut life.core {
                        core.link_down(now);
                    }
                }
                SessionEvent::Reconnected => {
                    reach::session(&mut base.coverage, Word::Back, life.stage);
                    self.disks.iter_mut().for_each(|disk| disk.oracle.resumed());
                    if let (Some(core), Some((limits, _))) = (&mut life.core, limits) {
                        core.link_up(now, limits);
                    }
                }
                SessionEvent::PathState { path, state: PathState::Connected, .. } => {
                    life.state(base, path, PathState::Connected);
                    life.failover.path(path, PathState::Connected);
                    base.stats.paths_up += 1;
                }
                SessionEvent::PathState { path, state, .. } => {
                    life.state(base, path, state);
                    life.failover.path(path, state);
                    let lost = matches!(
                        state,
                        PathState::Reconnecting | PathState::ConnectingErr | PathState::Dead
                    );
                    base.stats.paths_lost += u64::from(state == PathState::Reconnecting);
                    if lost && !common.faulty && life.stage < Stage::Closing {
                        base.fail(|| format!("client {}: {path:?} became {state:?}", self.number));
                    }
                }
                SessionEvent::PermitFree if !base.wrongs(Sabotage::LosePermitFree, 1000) => {
                    life.refused = [false; 2];
                }
                _ => {}
            }
        }
        if let Some(life) = &mut self.life
            && !self.plan.hostile
        {
            let judged = life.failover.judge();
            base.judge(judged.map_err(|e| format!("client {}: {e}", self.number)));
        }
        moved
    }

    /// Sends service messages.
    pub(super) fn messages(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(life) = &mut self.life else { return false };
        let Some(core) = &mut life.core else { return false };
        life.messages.extend(std::iter::from_fn(|| core.poll_service_message()));
        let mut moved = false;
        while let Some(message) = life.messages.front() {
            let wanted = message.room > 0;
            if wanted && life.service_slots.is_empty() {
                break;
            }
            let Some(permit) =
                take_permit(&mut life.session, &mut life.refused[0], PermitKind::Service, 0)
            else {
                if life.stage >= Stage::Closing {
                    life.messages.clear();
                }
                break;
            };
            moved = true;
            let Some(message) = life.messages.pop_front() else { break };
            let place = if wanted { life.service_slots.pop() } else { None };
            let data = place.map(|place| MemRef {
                region: life.region,
                offset: place as u64,
                len: message.room,
            });
            life.tags += 1;
            let tag = life.tags;
            let dir = if wanted { Dir::Read } else { Dir::Write };
            let asked = life.session.request(now, dir, &permit, &message.usr, data.as_slice(), tag);
            match asked {
                Ok(()) => {
                    let purpose = Purpose::Service(message.token, place, message.room);
                    life.asked.insert(tag, (Some(permit), purpose));
                    life.failover.begun(tag);
                }
                Err(errno) => {
                    base.judge(Failover::refused(errno, life.session.paths()));
                    life.session.put_permit(permit);
                    life.service_slots.extend(place);
                    core.service_answer(now, message.token, errno.neg(), &[]);
                }
            }
        }
        moved
    }

    /// Sends IO messages.
    pub(super) fn sends(&mut self, base: &mut Base) -> bool {
        let now = base.instant();
        let Some(life) = &mut self.life else { return false };
        let Some(core) = &mut life.core else { return false };
        let mut sends = Vec::new();
        core.take_sends(&mut sends);
        life.sends.extend(sends);
        let mut moved = false;
        while let Some(send) = life.sends.pop_front() {
            let cpu = base.rng.below(4) as u16;
            let mut taken = None;
            if life.permits.is_empty() {
                taken = take_permit(&mut life.session, &mut life.refused[1], PermitKind::Io, cpu);
            }
            let kept = life.permits.get(usize::from(send.slot));
            let Some(permit) = taken.as_ref().or(kept) else {
                life.sends.push_front(send);
                break;
            };
            life.session.set_cpu_of(permit, cpu);
            moved = true;
            let data = send.data.map(|piece| MemRef {
                region: RegionId(piece.region),
                offset: piece.offset,
                len: piece.len,
            });
            let landing = data.filter(|_| send.dir == Dir::Read).and_then(|data| {
                let (often, keys) = (self.plan.scattered, self.plan.read_keys);
                life.landings.choose(base, often, keys, &data)
            });
            let pieces = landing.as_ref().map(|landing| &landing.pieces[..]);
            let pieces = pieces.filter(|pieces| !pieces.is_empty()).unwrap_or(data.as_slice());
            life.tags += 1;
            let tag = life.tags;
            let asked = life.session.request(now, send.dir, permit, &send.usr, pieces, tag);
            match asked {
                Ok(()) => {
                    life.asked.insert(tag, (taken, Purpose::Io(send.slot, landing)));
                    life.failover.begun(tag);
                }
                Err(errno) => {
                    base.judge(Failover::refused(errno, life.session.paths()));
                    taken.into_iter().for_each(|permit| life.session.put_permit(permit));
                    core.send_failed(now, send.slot, errno);
                }
            }
        }
        moved
    }
}
