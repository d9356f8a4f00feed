//! The program that uses the disks: makes requests, checks their results, and in the end reads
//! everything.

use bowline_rnbd::IoOp;
use bowline_rnbd::client::DiskRequest;

use super::disks::MapState;
use super::{Client, Common, Stage, go};
use crate::engine::queue::SEC;
use crate::roce::host::Host;
use crate::rtrs::context::Base;
use crate::rtrs::oracle::{DiskOp, SECTOR, fill};
use crate::rtrs::reach::{self, Ended};

/// A request of the program.
#[derive(Debug)]
pub(super) struct Request {
    op: IoOp,
    /// Index of the client's disk.
    pub(super) disk: usize,
    place: usize,
    len: u32,
    pub(super) outcome: AllowedOutcome,
}

/// The outcomes that a request may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AllowedOutcome {
    /// No error, unless the session was lost and the client does not wait for it.
    Kept,
    /// Any: its disk was unmapped meanwhile.
    Dropped,
    /// An error: its disk was being unmapped before.
    Refused,
}

impl Client {
    /// Longest pause of the program in nanoseconds; 0 in the end.
    fn gap(&self) -> u64 {
        if self.calm { 0 } else { self.plan.gap }
    }

    /// Handles requests of the program that have ended.
    pub(super) fn results(&mut self, base: &mut Base, common: &Common<'_>) -> bool {
        let Some(active) = &mut self.active else { return false };
        let Some(core) = &mut active.core else { return false };
        let mut results = Vec::new();
        core.take_done(&mut results);
        let moved = !results.is_empty();
        for result in results {
            let (id, errno) = (result.done, result.errno);
            base.note([16, id, errno as u64], || {
                format!("client {}: request {id} ends with {errno}", self.number)
            });
            let Some(request) = active.requests.remove(&id) else {
                base.fail(|| format!("client {}: request {id} ends twice", self.number));
                return false;
            };
            let mut data = Vec::new();
            if request.op == IoOp::Read && errno == 0 {
                active.buffer.append_to(request.place, request.len as usize, &mut data);
            }
            active.places.push(request.place);
            base.stats.failed += u64::from(errno != 0);
            if errno == 0 {
                base.stats.bytes += u64::from(request.len);
            }
            let how = match (request.outcome, errno) {
                (_, 0) => Ended::Done,
                (AllowedOutcome::Kept, _) => Ended::Lost,
                (AllowedOutcome::Dropped, _) => Ended::Dropped,
                (AllowedOutcome::Refused, _) => Ended::Refused,
            };
            reach::ended(&mut base.coverage, request.op, how);
            let waits = self.plan.queues && active.stage < Stage::Unmapping;
            let lost = common.faulty && !waits && active.stage != Stage::FinalIo;
            let good = match (request.outcome, errno) {
                (AllowedOutcome::Kept, 0)
                | (AllowedOutcome::Dropped, 0 | -5)
                | (AllowedOutcome::Refused, -5) => true,
                (AllowedOutcome::Kept, -5) => lost,
                _ => false,
            };
            if !good && !self.plan.hostile {
                let number = self.number;
                base.fail(|| format!("client {number}: {request:?} {id} ends with {errno}"));
            }
            if active.stage == Stage::Verifying {
                active.unread |= errno != 0;
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

    /// The program continues.
    pub(crate) fn go(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        self.going = false;
        let stage = self.active.as_ref().map(|active| active.stage);
        match stage {
            Some(Stage::Running) => self.work(base, common),
            Some(Stage::Verifying) => self.verify(base, common),
            Some(Stage::FinalIo) => self.continue_final_io(base),
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
            let places = self.active.as_ref().map_or(0, |active| active.places.len());
            if places == 0 {
                return;
            }
            // Without a disk the program continues when one is mapped.
            let Some(disk) = self.choose_disk(base) else { return };
            burst -= 1;
            self.left -= 1;
            self.submit_something(base, disk);
            last = Some(disk);
        }
        if let Some(disk) = last {
            self.unmap_after_submit(base, disk);
        }
        let Some(active) = &mut self.active else { return };
        if self.left == 0 && self.calm && active.requests.is_empty() {
            if !active.disks.iter().all(|held| matches!(held, MapState::Yes(_))) {
                return;
            }
            active.stage = Stage::Verifying;
            (active.verified, active.unread) = ((0, 0), false);
            self.verify(base, common);
        } else if self.left > 0 && !active.places.is_empty() && !self.going {
            self.going = true;
            let event = go(&self.process, self.number);
            base.schedule_within(self.gap(), event);
        }
    }

    /// Closes the session now and then though there is more to do, with requests in progress.
    fn leaves_early(&mut self, base: &mut Base) -> bool {
        let Some(active) = &self.active else { return false };
        let leaves = self.plan.leaves > 0
            && !self.calm
            && active.disks.iter().all(|held| matches!(held, MapState::Yes(_)))
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
        let Some(active) = &mut self.active else { return };
        let (dev, outcome) = match active.disks[disk] {
            MapState::Yes(dev) => (dev, AllowedOutcome::Kept),
            MapState::Leaving(dev) => (dev, AllowedOutcome::Refused),
            MapState::No | MapState::Mapping(_) => return,
        };
        let Some(core) = &mut active.core else { return };
        let Some(place) = active.places.pop() else { return };
        let part = place..place + self.plan.request_max as usize;
        let kept = active.placements.reuse(&active.buffer, part);
        base.judge(kept.map_err(|e| format!("client {}: {e}", self.number)));
        self.requests += 1;
        let id = self.requests;
        let (offset, len) = if op == IoOp::Flush { (0, 0) } else { (offset, len) };
        let first = offset / SECTOR as u64;
        let count = u64::from(len) / SECTOR as u64;
        let Some(mine) = self.disks.get_mut(disk) else { return };
        let durable = fua || !mine.plan.cache;
        let what = match op {
            IoOp::Read => DiskOp::Read,
            IoOp::Write => DiskOp::Write(mine.oracle.next_stamp(), durable),
            IoOp::WriteZeroes => DiskOp::Write(0, durable),
            IoOp::Flush => DiskOp::Flush,
            IoOp::Discard | IoOp::SecureErase => DiskOp::Discard,
        };
        if let DiskOp::Write(stamp, _) = what
            && op == IoOp::Write
        {
            let mut bytes = vec![0; len as usize];
            for (at, sector) in (first..).zip(bytes.chunks_mut(SECTOR)) {
                fill(stamp, at, sector);
            }
            active.buffer.write(place, &bytes);
        }
        base.stats.requests += 1;
        base.note([17, id, offset << 24 | u64::from(len)], || {
            let (number, at) = (self.number, mine.number);
            format!(
                "client {number}: request {id}: disk{at} {op:?} sector {first}, {count} {what:?}"
            )
        });
        mine.oracle.begin(id, what, first, count);
        active.requests.insert(id, Request { op, disk, place, len, outcome });
        let mem = op.has_data().then_some((active.region.0, place as u64));
        let request = DiskRequest { op, offset, len, fua, nounmap: false, mem, done: id };
        core.submit(now, dev, request);
    }

    /// Reads all of every disk; goes on when everything could be read.
    fn verify(&mut self, base: &mut Base, common: &Common<'_>) {
        loop {
            let Some(active) = &mut self.active else { return };
            if active.unread && active.requests.is_empty() {
                (active.verified, active.unread) = ((0, 0), false);
                return base.schedule(SEC, go(&self.process, self.number));
            }
            let (disk, at) = active.verified;
            let plan = self.disks.get(disk).map(|mine| &mine.plan).filter(|_| !self.plan.hostile);
            let Some(plan) = plan else {
                if active.requests.is_empty()
                    && (self.plan.hostile || self.all_paths_connected(base))
                {
                    match self.plan.hostile || common.final_io == 0 {
                        true => self.unmap_all(base),
                        false => self.begin_final_io(base, common),
                    }
                }
                return;
            };
            if active.places.is_empty() || active.unread {
                return;
            }
            let (bytes, unit) = (plan.sectors * SECTOR as u64, u64::from(plan.logical));
            let most = u64::from(self.plan.request_max) / unit * unit;
            let len = most.min(bytes - at);
            active.verified = if at + len < bytes { (disk, at + len) } else { (disk + 1, 0) };
            self.submit(base, disk, IoOp::Read, (at, len as u32), false);
        }
    }

    /// Handles the end of the faults.
    pub(crate) fn calm(&mut self, base: &mut Base) {
        self.calm = true;
        self.left = self.left.min(20);
        self.attacks.clear();
        base.schedule(0, go(&self.process, self.number));
    }
}
