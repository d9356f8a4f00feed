//! Final IO after the faults, when every path is connected and all requests are done: on each disk
//! one block is written, flushed if the disk has a cache, and read, within a stated time.

use bowline_rnbd::IoOp;

use super::{Client, Common, Stage, go};
use crate::engine::coverage::time_share;
use crate::rtrs::context::Base;
use crate::rtrs::reach;

/// The final IO of a session.
#[derive(Debug)]
pub(super) struct FinalIo {
    since: u64,
    bound: u64,
    /// Requests still to be made, as disk and operation; the last comes first.
    left: Vec<(usize, IoOp)>,
}

impl Client {
    /// Begins the final IO; later, if a path may still only seem connected.
    pub(super) fn begin_final_io(&mut self, base: &mut Base, common: &Common<'_>) {
        if base.now < common.sure_from {
            return base.schedule_at(common.sure_from, go(&self.process, self.number));
        }
        let Some(active) = &mut self.active else { return };
        active.stage = Stage::FinalIo;
        let (mut left, mut bound) = (Vec::new(), 0);
        for (at, disk) in self.disks.iter().enumerate() {
            left.push((at, IoOp::Read));
            if disk.plan.cache {
                left.push((at, IoOp::Flush));
            }
            left.push((at, IoOp::Write));
            let ops = 2 + u64::from(disk.plan.cache);
            bound += ops * (common.final_io + disk.plan.takes.0);
        }
        base.final_io = true;
        base.note([24, self.number as u64, bound], || {
            format!("client {}: FRESH WORK within {bound} ns", self.number)
        });
        active.final_io = Some(FinalIo { since: base.now, bound, left });
        base.schedule(bound + 1, go(&self.process, self.number));
        self.continue_final_io(base);
    }

    /// Makes one request after the other; unmaps the disks when all are done.
    pub(super) fn continue_final_io(&mut self, base: &mut Base) {
        let Some(active) = &mut self.active else { return };
        let Some(final_io) = &mut active.final_io else { return };
        let (spent, bound) = (base.now - final_io.since, final_io.bound);
        if spent > bound {
            let (number, left) = (self.number, &final_io.left);
            return base.fail(|| {
                format!("client {number}: fresh work is not done within {bound} ns; then {left:?}")
            });
        }
        if !active.requests.is_empty() {
            return;
        }
        let Some((disk, op)) = final_io.left.pop() else {
            active.final_io = None;
            base.coverage.hit(reach::FRESH, time_share(spent, bound));
            return self.unmap_all(base);
        };
        let block = self.disks[disk].plan.logical;
        self.submit(base, disk, op, (0, block), false);
    }
}
