//! The program that uses the disks: what it asks for, what it gets, and in the end all of them.

use bowline_rnbd::IoOp;
use bowline_rnbd::client::DiskRequest;

use super::disks::Held;
use super::{Client, Common, Stage, go};
use crate::engine::queue::SEC;
use crate::roce::host::Host;
use crate::rtrs::base::Base;
use crate::rtrs::oracle::{SECTOR, What, fill};
use crate::rtrs::reach::{self, Ended};

/// A request of the program.
#[derive(Debug)]
pub(super) struct Request {
    op: IoOp,
    /// Which of the client's disks.
    pub(super) disk: usize,
    place: usize,
    len: u32,
    pub(super) fate: Fate,
}

/// How a request may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Without an error, unless the session was lost and the client does not wait for it.
    Kept,
    /// Its disk was given up meanwhile: it may have been done, or not.
    Dropped,
    /// Its disk was given up before: it is refused.
    Refused,
}

impl Client {
    /// Longest pause of the program; in the end it makes none.
    fn gap(&self) -> u64 {
        if self.calm { 0 } else { self.plan.gap }
    }

    /// Requests of the program that have ended.
    pub(super) fn results(&mut self, base: &mut Base, common: &Common<'_>) -> bool {
        let Some(life) = &mut self.life else { return false };
        let Some(core) = &mut life.core else { return false };
        let mut results = Vec::new();
        core.take_done(&mut results);
        let moved = !results.is_empty();
        for result in results {
            let (id, errno) = (result.done, result.errno);
            base.note([16, id, errno as u64], || {
                format!("client {}: request {id} ends with {errno}", self.number)
            });
            let Some(request) = life.requests.remove(&id) else {
                base.fail(|| format!("client {}: request {id} ends twice", self.number));
                return false;
            };
            let mut data = Vec::new();
            if request.op == IoOp::Read && errno == 0 {
                life.buffer.append_to(request.place, request.len as usize, &mut data);
            }
            life.places.push(request.place);
            base.stats.failed += u64::from(errno != 0);
            if errno == 0 {
                base.stats.bytes += u64::from(request.len);
            }
            let how = match (request.fate, errno) {
                (_, 0) => Ended::Done,
                (Fate::Kept, _) => Ended::Lost,
                (Fate::Dropped, _) => Ended::Dropped,
                (Fate::Refused, _) => Ended::Refused,
            };
            reach::ended(&mut base.coverage, request.op, how);
            let waits = self.plan.queues && life.stage < Stage::Unmapping;
            let lost = common.faulty && !waits && life.stage != Stage::Fresh;
            let good = match (request.fate, errno) {
                (Fate::Kept, 0) | (Fate::Dropped, 0 | -5) | (Fate::Refused, -5) => true,
                (Fate::Kept, -5) => lost,
                _ => false,
            };
            if !good && !self.plan.hostile {
                let number = self.number;
                base.fail(|| format!("client {number}: {request:?} {id} ends with {errno}"));
            }
            if life.stage == Stage::Verifying {
                life.unread |= errno != 0;
            }
            let disk = &mut self.disks[request.disk];
            let judged = disk.oracle.end(id, errno == 0, &data);
            if !self.plan.hostile {
                let (number, disk) = (self.number, disk.number);
                let op = request.op;
                let judged =
                    judged.map_err(|e| format!("client {number}: {op:?} {id} of disk{disk}: {e}"));
                base.judge(judged);
            }
        }
        if moved && !std::mem::replace(&mut self.going, true) {
            let event = go(&self.process, self.number);
            base.schedule_within(self.gap(), event);
        }
        moved
    }

    /// The program goes on.
    pub(crate) fn go(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        self.going = false;
        let stage = self.life.as_ref().map(|life| life.stage);
        match stage {
            Some(Stage::Running) => self.work(base, common),
            Some(Stage::Verifying) => self.verify(base, common),
            Some(Stage::Fresh) => self.go_on_fresh(base),
            _ => return,
        }
        self.pump(base, hosts, common);
    }

    fn work(&mut self, base: &mut Base, common: &Common<'_>) {
        if self.leaves_early(base) {
            return;
        }
        let mut burst = 1 + base.rng.below(8);
        let mut last = None;
        while burst > 0 && self.left > 0 {
            let places = self.life.as_ref().map_or(0, |life| life.places.len());
            if places == 0 {
                return;
            }
            // With none it goes on when it has one again.
            let Some(disk) = self.choose_disk(base) else { return };
            burst -= 1;
            self.left -= 1;
            self.submit_something(base, disk);
            last = Some(disk);
        }
        if let Some(disk) = last {
            self.swap_in_haste(base, disk);
        }
        let Some(life) = &mut self.life else { return };
        if self.left == 0 && self.calm && life.requests.is_empty() {
            if !life.disks.iter().all(|held| matches!(held, Held::Yes(_))) {
                return;
            }
            life.stage = Stage::Verifying;
            (life.verified, life.unread) = ((0, 0), false);
            self.verify(base, common);
        } else if self.left > 0 && !life.places.is_empty() && !self.going {
            self.going = true;
            let event = go(&self.process, self.number);
            base.schedule_within(self.gap(), event);
        }
    }

    /// Closes the session now and then though there is more to do, with all that is under way.
    fn leaves_early(&mut self, base: &mut Base) -> bool {
        let Some(life) = &self.life else { return false };
        let leaves = self.plan.leaves > 0
            && !self.calm
            && life.disks.iter().all(|held| matches!(held, Held::Yes(_)))
            && base.extra.chance(self.plan.leaves);
        if leaves {
            self.leaves_now = true;
            self.unmap_all(base);
        }
        leaves
    }

    fn submit_something(&mut self, base: &mut Base, disk: usize) {
        let plan = &self.disks[disk].plan;
        let unit = u64::from(plan.logical);
        let blocks = plan.sectors * SECTOR as u64 / unit;
        let most = (u64::from(self.plan.request_max) / unit).clamp(1, blocks);
        let count = if base.rng.chance(500) { 1 } else { base.rng.magnitude(1, most) };
        let first = base.rng.below(blocks - count + 1);
        let op = match base.rng.below(20) {
            0 => IoOp::Flush,
            1 => IoOp::WriteZeroes,
            2 => IoOp::Discard,
            n if n % 2 == 0 => IoOp::Read,
            _ => IoOp::Write,
        };
        let fua = op == IoOp::Write && base.rng.chance(150);
        self.submit(base, disk, op, (first * unit, (count * unit) as u32), fua);
    }

    pub(super) fn submit(
        &mut self,
        base: &mut Base,
        disk: usize,
        op: IoOp,
        (offset, len): (u64, u32),
        fua: bool,
    ) {
        let now = base.instant();
        let Some(life) = &mut self.life else { return };
        let (dev, fate) = match life.disks[disk] {
            Held::Yes(dev) => (dev, Fate::Kept),
            Held::Leaving(dev) => (dev, Fate::Refused),
            Held::No | Held::Mapping(_) => return,
        };
        let Some(core) = &mut life.core else { return };
        let Some(place) = life.places.pop() else { return };
        let part = place..place + self.plan.request_max as usize;
        let kept = life.landings.reuse(&life.buffer, part);
        base.judge(kept.map_err(|e| format!("client {}: {e}", self.number)));
        self.requests += 1;
        let id = self.requests;
        let (offset, len) = if op == IoOp::Flush { (0, 0) } else { (offset, len) };
        let first = offset / SECTOR as u64;
        let count = u64::from(len) / SECTOR as u64;
        let Some(mine) = self.disks.get_mut(disk) else { return };
        let durable = fua || !mine.plan.cache;
        let what = match op {
            IoOp::Read => What::Read,
            IoOp::Write => What::Write(mine.oracle.next_stamp(), durable),
            IoOp::WriteZeroes => What::Write(0, durable),
            IoOp::Flush => What::Flush,
            IoOp::Discard | IoOp::SecureErase => What::Discard,
        };
        if let What::Write(stamp, _) = what
            && op == IoOp::Write
        {
            let mut bytes = vec![0; len as usize];
            for (at, sector) in (first..).zip(bytes.chunks_mut(SECTOR)) {
                fill(stamp, at, sector);
            }
            life.buffer.write(place, &bytes);
        }
        base.stats.requests += 1;
        base.note([17, id, offset << 24 | u64::from(len)], || {
            let (number, at) = (self.number, mine.number);
            format!(
                "client {number}: request {id}: disk{at} {op:?} sector {first}, {count} {what:?}"
            )
        });
        mine.oracle.begin(id, what, first, count);
        life.requests.insert(id, Request { op, disk, place, len, fate });
        let mem = op.has_data().then_some((life.region.0, place as u64));
        let request = DiskRequest { op, offset, len, fua, nounmap: false, mem, done: id };
        core.submit(now, dev, request);
    }

    /// Reads all of every disk; goes on when all could be read.
    fn verify(&mut self, base: &mut Base, common: &Common<'_>) {
        loop {
            let Some(life) = &mut self.life else { return };
            if life.unread && life.requests.is_empty() {
                (life.verified, life.unread) = ((0, 0), false);
                return base.schedule(SEC, go(&self.process, self.number));
            }
            let (disk, at) = life.verified;
            let plan = self.disks.get(disk).map(|mine| &mine.plan).filter(|_| !self.plan.hostile);
            let Some(plan) = plan else {
                if life.requests.is_empty() && (self.plan.hostile || self.is_all_back(base)) {
                    match self.plan.hostile || common.fresh == 0 {
                        true => self.unmap_all(base),
                        false => self.begin_fresh(base, common),
                    }
                }
                return;
            };
            if life.places.is_empty() || life.unread {
                return;
            }
            let (bytes, unit) = (plan.sectors * SECTOR as u64, u64::from(plan.logical));
            let most = u64::from(self.plan.request_max) / unit * unit;
            let len = most.min(bytes - at);
            life.verified = if at + len < bytes { (disk, at + len) } else { (disk + 1, 0) };
            self.submit(base, disk, IoOp::Read, (at, len as u32), false);
        }
    }

    /// Faults are over.
    pub(crate) fn calm(&mut self, base: &mut Base) {
        self.calm = true;
        self.left = self.left.min(20);
        self.attacks.clear();
        base.schedule(0, go(&self.process, self.number));
    }
}
