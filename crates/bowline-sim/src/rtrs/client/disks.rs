//! The disks of a client: which of them its session has mapped, and how they are swapped while
//! others are in use.

use bowline_rnbd::client::{DevId, Event, State};
use bowline_wire::rnbd::Access;

use super::program::AllowedOutcome;
use super::{ActiveSession, Client, Common, Stage, go};
use crate::roce::host::Host;
use crate::rtrs::context::{Base, Event as Due};
use crate::rtrs::oracle::Oracle;
use crate::rtrs::plan::DiskPlan;
use crate::rtrs::reach::{self, DiskEventClass};

/// A disk as its only user knows it.
#[derive(Debug)]
pub(super) struct ClientDisk {
    /// Its number on the server.
    pub(super) number: usize,
    pub(super) plan: DiskPlan,
    pub(super) oracle: Oracle,
}

impl ClientDisk {
    pub(super) fn new(number: usize, plan: DiskPlan) -> Self {
        Self { number, oracle: Oracle::new(number, plan.sectors), plan }
    }
}

/// The state of a disk in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapState {
    No,
    Mapping(DevId),
    Yes(DevId),
    Leaving(DevId),
}

impl MapState {
    const fn dev(self) -> Option<DevId> {
        match self {
            Self::No => None,
            Self::Mapping(dev) | Self::Yes(dev) | Self::Leaving(dev) => Some(dev),
        }
    }
}

impl ActiveSession {
    fn map(&mut self, at: usize, number: usize) -> Result<(), String> {
        let Some(core) = self.core.as_mut().filter(|_| self.disks[at] == MapState::No) else {
            return Ok(());
        };
        let mapped = core.map(&format!("disk{number}"), Access::Rw);
        self.disks[at] =
            MapState::Mapping(mapped.map_err(|e| format!("map of disk{number}: {e}"))?);
        Ok(())
    }

    /// Begins to unmap a disk: its requests in progress may fail now.
    fn unmap(&mut self, at: usize) -> Result<(), String> {
        let (Some(core), Some(dev)) = (&mut self.core, self.disks[at].dev()) else { return Ok(()) };
        for request in self.requests.values_mut().filter(|request| request.disk == at) {
            if request.outcome == AllowedOutcome::Kept {
                request.outcome = AllowedOutcome::Dropped;
            }
        }
        self.disks[at] = MapState::Leaving(dev);
        core.unmap(dev).map_err(|e| format!("unmap: {e}"))
    }

    /// Returns whether requests of a disk are in progress.
    fn is_busy(&self, at: usize) -> bool {
        self.requests.values().any(|request| request.disk == at)
    }
}

impl Client {
    fn map(&mut self, base: &mut Base, at: usize) {
        let Some(active) = &mut self.active else { return };
        let mapped = active.map(at, self.disks[at].number);
        base.judge(mapped.map_err(|e| format!("client {}: {e}", self.number)));
    }

    /// Begins to map the disks that are not mapped.
    pub(super) fn map_all(&mut self, base: &mut Base) {
        for at in 0..self.disks.len() {
            self.map(base, at);
        }
    }

    fn unmap(&mut self, base: &mut Base, at: usize) {
        let Some(active) = &mut self.active else { return };
        let infos = active.core.iter().flat_map(|core| core.infos());
        let of = infos.filter(|disk| Some(disk.id) == active.disks[at].dev());
        base.stats.resent += of.map(|disk| disk.stats.resent).sum::<u64>();
        let unmapped = active.unmap(at);
        base.judge(unmapped.map_err(|e| format!("client {}: {e}", self.number)));
    }

    /// Unmaps all disks in the end; the session is closed after the last.
    pub(super) fn unmap_all(&mut self, base: &mut Base) {
        let Some(active) = &mut self.active else { return };
        active.stage = Stage::Unmapping;
        for at in 0..self.disks.len() {
            self.unmap(base, at);
        }
    }

    /// Chooses the disk of the next request; now and then one that is being unmapped.
    pub(super) fn choose_disk(&self, base: &mut Base) -> Option<usize> {
        let active = self.active.as_ref()?;
        let late = active.disks.len() > 1 && base.extra.chance(50);
        let serves = |held: &MapState| match held {
            MapState::Yes(_) => true,
            MapState::Leaving(_) => late,
            MapState::No | MapState::Mapping(_) => false,
        };
        let all = (0..).zip(&active.disks);
        let some: Vec<usize> = all.filter(|(_, held)| serves(held)).map(|(at, _)| at).collect();
        match some[..] {
            [] => None,
            [one] => Some(one),
            _ => Some(base.extra.pick(&some)),
        }
    }

    /// Schedules the next swap, if there are several disks.
    pub(super) fn swap_later(&mut self, base: &mut Base) {
        if self.disks.len() > 1 && !self.calm && !std::mem::replace(&mut self.swapping, true) {
            let wait = base.extra.wait(self.plan.swap);
            let event = Due::Swap { client: self.number, boot: self.process.boot };
            base.schedule(wait, event);
        }
    }

    /// Unmaps a disk, or maps it again.
    pub(crate) fn swap(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        self.swapping = false;
        self.swap_later(base);
        let at = base.extra.index(self.disks.len());
        let Some(active) = self.active.as_ref().filter(|active| active.stage == Stage::Running)
        else {
            return;
        };
        let (held, busy) = (active.disks[at], active.is_busy(at));
        match held {
            MapState::No => self.map(base, at),
            MapState::Mapping(_) | MapState::Yes(_)
                if !self.calm && (!busy || base.extra.chance(300)) =>
            {
                base.stats.given_up += 1;
                base.stats.given_up_busy += u64::from(busy);
                let what = match (held, busy) {
                    (MapState::Mapping(_), _) => DiskEventClass::Mapping,
                    (_, true) => DiskEventClass::Busy,
                    _ => DiskEventClass::Idle,
                };
                reach::disk(&mut base.coverage, what);
                self.unmap(base, at);
            }
            _ => return,
        }
        base.note([23, self.number as u64, at as u64], || {
            let (client, number) = (self.number, self.disks[at].number);
            format!("client {client}: swaps disk{number}, which was {held:?}, busy {busy}")
        });
        self.pump(base, hosts, common);
    }

    /// Unmaps a disk now and then just after requests to it were made, which may not have been sent
    /// yet.
    pub(super) fn unmap_after_submit(&mut self, base: &mut Base, at: usize) {
        if self.disks.len() == 1 || self.calm || !base.extra.chance(60) {
            return;
        }
        let Some(active) = &self.active else { return };
        if let MapState::Yes(_) = active.disks[at] {
            reach::disk(&mut base.coverage, DiskEventClass::AfterSubmit);
            base.stats.given_up += 1;
            base.stats.given_up_busy += u64::from(active.is_busy(at));
            self.unmap(base, at);
        }
    }

    /// Remaps closed disks, and maps unmapped ones again.
    pub(super) fn repair_disks(&mut self, base: &mut Base) {
        let now = base.instant();
        let Some(active) = self.active.as_mut().filter(|active| active.stage >= Stage::Running)
        else {
            return;
        };
        let Some(core) = &mut active.core else { return };
        for dev in active.disks.iter().filter_map(|held| held.dev()) {
            if core.state(dev) == Some(State::Closed) {
                let _ = core.remap(now, dev);
            }
        }
        if active.stage == Stage::Running {
            self.map_all(base);
        }
    }

    /// Handles events of disks.
    pub(super) fn disk_events(&mut self, base: &mut Base, common: &Common<'_>) -> bool {
        let Some(core) = self.active.as_mut().and_then(|active| active.core.as_mut()) else {
            return false;
        };
        core.check_invariants();
        let events: Vec<Event> = std::iter::from_fn(|| core.poll_event()).collect();
        for &event in &events {
            base.note([15, self.number as u64, 0], || format!("client {}: {event:?}", self.number));
            self.disk_event(base, common, event);
        }
        !events.is_empty()
    }

    fn disk_event(&mut self, base: &mut Base, common: &Common<'_>, event: Event) {
        let (Event::Mapped { dev, .. } | Event::Unmapped { dev }) = event else { return };
        let number = self.number;
        let Some(active) = &mut self.active else { return };
        let Some(at) = active.disks.iter().position(|held| held.dev() == Some(dev)) else {
            return base.fail(|| format!("client {number}: {event:?} of no disk"));
        };
        match event {
            Event::Mapped { result: Ok(()), .. } => {
                base.stats.mapped += 1;
                reach::disk(&mut base.coverage, DiskEventClass::Mapped);
                active.disks[at] = MapState::Yes(dev);
                if active.stage == Stage::Mapping && at == 0 {
                    active.stage = Stage::Running;
                    base.schedule(0, go(&self.process, number));
                } else if active.stage == Stage::Running
                    && !std::mem::replace(&mut self.going, true)
                {
                    base.schedule(0, go(&self.process, number));
                }
            }
            // Another client still has the disk open, perhaps this program before its restart.
            // Without its first disk the program starts again; other disks are tried again later.
            Event::Mapped { result: Err(errno), .. } => {
                active.disks[at] = MapState::No;
                base.stats.not_mapped += 1;
                reach::disk(&mut base.coverage, DiskEventClass::NotMapped);
                if !common.faulty {
                    base.fail(|| format!("client {number}: a disk is not mapped: {errno}"));
                }
                if active.stage == Stage::Mapping && at == 0 {
                    self.leave(base);
                }
            }
            _ => {
                active.disks[at] = MapState::No;
                if active.is_busy(at) {
                    base.fail(|| format!("client {number}: {event:?}, and requests are left"));
                }
                match active.stage {
                    Stage::Running if base.extra.chance(300) => self.map(base, at),
                    Stage::Unmapping if active.disks.iter().all(|held| *held == MapState::No) => {
                        self.leave(base);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Closes the session.
    fn leave(&mut self, base: &mut Base) {
        self.count(base);
        let Some(active) = &mut self.active else { return };
        active.stage = Stage::Closing;
        for permit in active.permits.drain(..) {
            active.session.put_permit(permit);
        }
        active.session.close(base.instant());
    }

    /// Records the death of the server.
    pub(crate) fn server_died(&mut self) {
        self.disks.iter_mut().for_each(|disk| disk.oracle.server_died());
    }

    /// Number of requests in progress.
    pub(crate) fn requests_running(&self) -> usize {
        self.disks.iter().map(|disk| disk.oracle.running()).sum()
    }
}
