//! After the faults, when every path is back and all that was asked for is done: on each disk one
//! block is written, flushed where that means anything, and read, within a time that is stated.

use bowline_rnbd::IoOp;

use super::{Client, Common, Stage, go};
use crate::engine::coverage::time_share;
use crate::rtrs::base::Base;
use crate::rtrs::reach;

/// Fresh work of a session.
#[derive(Debug)]
pub(super) struct Fresh {
    since: u64,
    bound: u64,
    /// What is still to do: disk and request, the last first.
    left: Vec<(usize, IoOp)>,
}

impl Client {
    /// Begins the fresh work; later, if a path may still seem to be connected that is not.
    pub(super) fn begin_fresh(&mut self, base: &mut Base, common: &Common<'_>) {
        if base.now < common.sure_from {
            return base.schedule(common.sure_from - base.now, go(&self.process, self.number));
        }
        let Some(life) = &mut self.life else { return };
        life.stage = Stage::Fresh;
        let (mut left, mut bound) = (Vec::new(), 0);
        for (at, disk) in self.disks.iter().enumerate() {
            left.push((at, IoOp::Read));
            if disk.plan.cache {
                left.push((at, IoOp::Flush));
            }
            left.push((at, IoOp::Write));
            let ops = 2 + u64::from(disk.plan.cache);
            bound += ops * (common.fresh + disk.plan.takes.0);
        }
        base.fresh = true;
        base.note([24, self.number as u64, bound], || {
            format!("client {}: FRESH WORK within {bound} ns", self.number)
        });
        life.fresh = Some(Fresh { since: base.now, bound, left });
        base.schedule(bound + 1, go(&self.process, self.number));
        self.go_on_fresh(base);
    }

    /// One request after the other; when all are done the disks are given up.
    pub(super) fn go_on_fresh(&mut self, base: &mut Base) {
        let Some(life) = &mut self.life else { return };
        let Some(fresh) = &mut life.fresh else { return };
        let (spent, bound) = (base.now - fresh.since, fresh.bound);
        if spent > bound {
            let (number, left) = (self.number, &fresh.left);
            return base.fail(|| {
                format!("client {number}: fresh work is not done within {bound} ns; then {left:?}")
            });
        }
        if !life.requests.is_empty() {
            return;
        }
        let Some((disk, op)) = fresh.left.pop() else {
            life.fresh = None;
            base.coverage.hit(reach::FRESH, time_share(spent, bound));
            return self.unmap_all(base);
        };
        let block = self.disks[disk].plan.logical;
        self.submit(base, disk, op, (0, block), false);
    }
}
