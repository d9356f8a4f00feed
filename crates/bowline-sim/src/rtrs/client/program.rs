//! The program that uses the disk: what it asks for, what it gets, and in the end all of the disk.

use bowline_rnbd::IoOp;
use bowline_rnbd::client::DiskRequest;

use super::{Client, Common, Stage, go};
use crate::queue::SEC;
use crate::roce::host::Host;
use crate::rtrs::base::Base;
use crate::rtrs::oracle::{SECTOR, What, fill};

/// A request of the program.
#[derive(Debug)]
pub(super) struct Request {
    op: IoOp,
    place: usize,
    len: u32,
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
            if errno != 0 && !self.plan.hostile {
                let (number, op) = (self.number, request.op);
                if self.plan.queues && life.stage < Stage::Unmapping {
                    base.fail(|| format!("client {number}: {op:?} {id} fails with {errno}"));
                } else if !common.faulty || errno != -5 {
                    base.fail(|| format!("client {number}: {op:?} {id} failed with {errno}"));
                }
            }
            if life.stage == Stage::Verifying {
                life.unread |= errno != 0;
            }
            let judged = self.oracle.end(id, errno == 0, &data);
            if !self.plan.hostile {
                let number = self.number;
                let op = request.op;
                let judged = judged.map_err(|e| format!("client {number}: {op:?} {id}: {e}"));
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
            Some(Stage::Running) => self.work(base),
            Some(Stage::Verifying) => self.verify(base),
            _ => return,
        }
        self.pump(base, hosts, common);
    }

    fn work(&mut self, base: &mut Base) {
        let mut burst = 1 + base.rng.below(8);
        while burst > 0 && self.left > 0 {
            let places = self.life.as_ref().map_or(0, |life| life.places.len());
            if places == 0 {
                return;
            }
            burst -= 1;
            self.left -= 1;
            self.submit_something(base);
        }
        let Some(life) = &mut self.life else { return };
        if self.left == 0 && self.calm && life.requests.is_empty() {
            life.stage = Stage::Verifying;
            (life.verified, life.unread) = (0, false);
            self.verify(base);
        } else if self.left > 0 && !life.places.is_empty() && !self.going {
            self.going = true;
            let event = go(&self.process, self.number);
            base.schedule_within(self.gap(), event);
        }
    }

    fn submit_something(&mut self, base: &mut Base) {
        let unit = u64::from(self.plan.disk.logical);
        let blocks = self.plan.disk.sectors * SECTOR as u64 / unit;
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
        self.submit(base, op, first * unit, (count * unit) as u32, fua);
    }

    fn submit(&mut self, base: &mut Base, op: IoOp, offset: u64, len: u32, fua: bool) {
        let now = base.instant();
        let Some(life) = &mut self.life else { return };
        let (Some(core), Some(dev)) = (&mut life.core, life.dev) else { return };
        let Some(place) = life.places.pop() else { return };
        let part = place..place + self.plan.request_max as usize;
        let kept = life.landings.reuse(&life.buffer, part);
        base.judge(kept.map_err(|e| format!("client {}: {e}", self.number)));
        self.requests += 1;
        let id = self.requests;
        let (offset, len) = if op == IoOp::Flush { (0, 0) } else { (offset, len) };
        let first = offset / SECTOR as u64;
        let count = u64::from(len) / SECTOR as u64;
        let durable = fua || !self.plan.disk.cache;
        let what = match op {
            IoOp::Read => What::Read,
            IoOp::Write => What::Write(self.oracle.next_stamp(), durable),
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
            let number = self.number;
            format!("client {number}: request {id}: {op:?} sector {first}, {count} {what:?}")
        });
        self.oracle.begin(id, what, first, count);
        life.requests.insert(id, Request { op, place, len });
        let mem = op.has_data().then_some((life.region.0, place as u64));
        let request = DiskRequest { op, offset, len, fua, nounmap: false, mem, done: id };
        core.submit(now, dev, request);
    }

    /// Reads the whole disk; goes on when all of it could be read.
    fn verify(&mut self, base: &mut Base) {
        let bytes = self.plan.disk.sectors * SECTOR as u64;
        let unit = u64::from(self.plan.disk.logical);
        loop {
            let Some(life) = &mut self.life else { return };
            if life.unread && life.requests.is_empty() {
                (life.verified, life.unread) = (0, false);
                return base.schedule(SEC, go(&self.process, self.number));
            }
            if life.verified >= bytes || self.plan.hostile {
                if life.requests.is_empty() {
                    life.stage = Stage::Unmapping;
                    if let (Some(core), Some(dev)) = (&mut life.core, life.dev) {
                        base.stats.resent +=
                            core.infos().iter().map(|disk| disk.stats.resent).sum::<u64>();
                        let unmapped = core.unmap(dev).map_err(|e| format!("unmap: {e}"));
                        base.judge(unmapped);
                    }
                }
                return;
            }
            if life.places.is_empty() || life.unread {
                return;
            }
            let most = u64::from(self.plan.request_max) / unit * unit;
            let (at, len) = (life.verified, most.min(bytes - life.verified));
            life.verified += len;
            self.submit(base, IoOp::Read, at, len as u32, false);
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
