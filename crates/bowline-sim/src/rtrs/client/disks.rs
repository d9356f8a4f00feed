//! The disks of a client: which of them its session has, and how they come and go while others are
//! in use.

use bowline_rnbd::client::{DevId, Event, State};
use bowline_wire::rnbd::Access;

use super::program::Fate;
use super::{Client, Common, Life, Stage, go};
use crate::roce::host::Host;
use crate::rtrs::base::{Base, Event as Due};
use crate::rtrs::oracle::Oracle;
use crate::rtrs::plan::DiskPlan;
use crate::rtrs::reach::{self, OfDisk};

/// A disk as its only user knows it.
#[derive(Debug)]
pub(super) struct Mine {
    /// Its number on the server.
    pub(super) number: usize,
    pub(super) plan: DiskPlan,
    pub(super) oracle: Oracle,
}

impl Mine {
    pub(super) fn new(number: usize, plan: DiskPlan) -> Self {
        Self { number, oracle: Oracle::new(number, plan.sectors), plan }
    }
}

/// What a session has of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    No,
    Mapping(DevId),
    Yes(DevId),
    Leaving(DevId),
}

impl Held {
    const fn dev(self) -> Option<DevId> {
        match self {
            Self::No => None,
            Self::Mapping(dev) | Self::Yes(dev) | Self::Leaving(dev) => Some(dev),
        }
    }
}

impl Life {
    fn map(&mut self, at: usize, number: usize) -> Result<(), String> {
        let Some(core) = self.core.as_mut().filter(|_| self.disks[at] == Held::No) else {
            return Ok(());
        };
        let mapped = core.map(&format!("disk{number}"), Access::Rw);
        self.disks[at] = Held::Mapping(mapped.map_err(|e| format!("map of disk{number}: {e}"))?);
        Ok(())
    }

    /// Begins to give a disk up: what is under way of it may fail now.
    fn unmap(&mut self, at: usize) -> Result<(), String> {
        let (Some(core), Some(dev)) = (&mut self.core, self.disks[at].dev()) else { return Ok(()) };
        for request in self.requests.values_mut().filter(|request| request.disk == at) {
            if request.fate == Fate::Kept {
                request.fate = Fate::Dropped;
            }
        }
        self.disks[at] = Held::Leaving(dev);
        core.unmap(dev).map_err(|e| format!("unmap: {e}"))
    }

    /// Tells whether requests of a disk are under way.
    fn is_busy(&self, at: usize) -> bool {
        self.requests.values().any(|request| request.disk == at)
    }
}

impl Client {
    fn map(&mut self, base: &mut Base, at: usize) {
        let Some(life) = &mut self.life else { return };
        let mapped = life.map(at, self.disks[at].number);
        base.judge(mapped.map_err(|e| format!("client {}: {e}", self.number)));
    }

    /// Begins to map the disks the session does not have.
    pub(super) fn map_all(&mut self, base: &mut Base) {
        for at in 0..self.disks.len() {
            self.map(base, at);
        }
    }

    fn unmap(&mut self, base: &mut Base, at: usize) {
        let Some(life) = &mut self.life else { return };
        let infos = life.core.iter().flat_map(|core| core.infos());
        let of = infos.filter(|disk| Some(disk.id) == life.disks[at].dev());
        base.stats.resent += of.map(|disk| disk.stats.resent).sum::<u64>();
        let unmapped = life.unmap(at);
        base.judge(unmapped.map_err(|e| format!("client {}: {e}", self.number)));
    }

    /// Gives all disks up in the end; the session is closed after the last.
    pub(super) fn unmap_all(&mut self, base: &mut Base) {
        let Some(life) = &mut self.life else { return };
        life.stage = Stage::Unmapping;
        for at in 0..self.disks.len() {
            self.unmap(base, at);
        }
    }

    /// Chooses the disk of the next request; now and then one that is being given up.
    pub(super) fn choose_disk(&self, base: &mut Base) -> Option<usize> {
        let life = self.life.as_ref()?;
        let late = life.disks.len() > 1 && base.extra.chance(50);
        let serves = |held: &Held| match held {
            Held::Yes(_) => true,
            Held::Leaving(_) => late,
            Held::No | Held::Mapping(_) => false,
        };
        let all = (0..).zip(&life.disks);
        let some: Vec<usize> = all.filter(|(_, held)| serves(held)).map(|(at, _)| at).collect();
        match some[..] {
            [] => None,
            [one] => Some(one),
            _ => Some(base.extra.pick(&some)),
        }
    }

    /// Sets the time of the next swap, if there are several disks.
    pub(super) fn swap_later(&mut self, base: &mut Base) {
        if self.disks.len() > 1 && !self.calm && !std::mem::replace(&mut self.swapping, true) {
            let wait = base.extra.wait(self.plan.swap);
            let event = Due::Swap { client: self.number, boot: self.process.boot };
            base.schedule(wait, event);
        }
    }

    /// Gives a disk up or takes one again.
    pub(crate) fn swap(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        self.swapping = false;
        self.swap_later(base);
        let at = base.extra.index(self.disks.len());
        let Some(life) = self.life.as_ref().filter(|life| life.stage == Stage::Running) else {
            return;
        };
        let (held, busy) = (life.disks[at], life.is_busy(at));
        match held {
            Held::No => self.map(base, at),
            Held::Mapping(_) | Held::Yes(_) if !self.calm && (!busy || base.extra.chance(300)) => {
                base.stats.given_up += 1;
                base.stats.given_up_busy += u64::from(busy);
                let what = match (held, busy) {
                    (Held::Mapping(_), _) => OfDisk::Mapping,
                    (_, true) => OfDisk::Busy,
                    _ => OfDisk::Idle,
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

    /// Gives a disk up now and then just after requests of it were made, which may not have gone
    /// out yet.
    pub(super) fn swap_in_haste(&mut self, base: &mut Base, at: usize) {
        if self.disks.len() == 1 || self.calm || !base.extra.chance(60) {
            return;
        }
        let Some(life) = &self.life else { return };
        if let Held::Yes(_) = life.disks[at] {
            reach::disk(&mut base.coverage, OfDisk::Haste);
            base.stats.given_up += 1;
            base.stats.given_up_busy += u64::from(life.is_busy(at));
            self.unmap(base, at);
        }
    }

    /// Takes again what is closed or was given up.
    pub(super) fn repair_disks(&mut self, base: &mut Base) {
        let now = base.instant();
        let Some(life) = self.life.as_mut().filter(|life| life.stage >= Stage::Running) else {
            return;
        };
        let Some(core) = &mut life.core else { return };
        for dev in life.disks.iter().filter_map(|held| held.dev()) {
            if core.state(dev) == Some(State::Closed) {
                let _ = core.remap(now, dev);
            }
        }
        if life.stage == Stage::Running {
            self.map_all(base);
        }
    }

    /// What became of disks.
    pub(super) fn disk_events(&mut self, base: &mut Base, common: &Common<'_>) -> bool {
        let Some(core) = self.life.as_mut().and_then(|life| life.core.as_mut()) else {
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
        let Some(life) = &mut self.life else { return };
        let Some(at) = life.disks.iter().position(|held| held.dev() == Some(dev)) else {
            return base.fail(|| format!("client {number}: {event:?} of no disk"));
        };
        match event {
            Event::Mapped { result: Ok(()), .. } => {
                base.stats.mapped += 1;
                reach::disk(&mut base.coverage, OfDisk::Mapped);
                life.disks[at] = Held::Yes(dev);
                if life.stage == Stage::Mapping && at == 0 {
                    life.stage = Stage::Running;
                    base.schedule(0, go(&self.process, number));
                } else if life.stage == Stage::Running && !std::mem::replace(&mut self.going, true)
                {
                    base.schedule(0, go(&self.process, number));
                }
            }
            // Somebody else has it still, perhaps a former life of this program. Without its first
            // disk it begins again; others are tried again later.
            Event::Mapped { result: Err(errno), .. } => {
                life.disks[at] = Held::No;
                base.stats.not_mapped += 1;
                reach::disk(&mut base.coverage, OfDisk::NotMapped);
                if !common.faulty {
                    base.fail(|| format!("client {number}: a disk is not mapped: {errno}"));
                }
                if life.stage == Stage::Mapping && at == 0 {
                    self.leave(base);
                }
            }
            _ => {
                life.disks[at] = Held::No;
                if life.is_busy(at) {
                    base.fail(|| format!("client {number}: {event:?}, and requests are left"));
                }
                match life.stage {
                    Stage::Running if base.extra.chance(300) => self.map(base, at),
                    Stage::Unmapping if life.disks.iter().all(|held| *held == Held::No) => {
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
        let Some(life) = &mut self.life else { return };
        life.stage = Stage::Closing;
        for permit in life.permits.drain(..) {
            life.session.put_permit(permit);
        }
        life.session.close(base.instant());
    }

    /// The server dies.
    pub(crate) fn server_died(&mut self) {
        self.disks.iter_mut().for_each(|disk| disk.oracle.server_died());
    }

    /// How many requests are under way.
    pub(crate) fn requests_running(&self) -> usize {
        self.disks.iter().map(|disk| disk.oracle.running()).sum()
    }
}
