//! Shared receive queues: receives for all queue pairs that were made with the queue.
//!
//! ```text
//!   post --> [id 7] [id 8] [id 9]  --> the next message of any of its queue pairs    [SRQ-2]
//!                     fewer than the limit --> reported once, then the limit is 0        [SRQ-4]
//! ```

use bowline_verbs::{
    Error, InvalidReason, Object, PdId, RecvWr, RequestPart, Resource, SrqAttr, SrqChange, SrqId,
    SrqInit,
};

use crate::config::Limits;
use crate::recvq::RecvQueue;
use crate::table::Table;

const NO_SRQ: Error = Error::NoSuch(Object::SharedReceiveQueue);

#[derive(Debug)]
struct Srq {
    pd: PdId,
    receives: RecvQueue,
    attr: SrqAttr,
    /// Queue pairs that take receives from it.
    users: usize,
}

/// All shared receive queues of a device.
#[derive(Debug)]
pub(crate) struct SrqTable {
    queues: Table<Srq>,
    max: usize,
    max_wr: usize,
    max_sge: usize,
}

impl SrqTable {
    pub(crate) fn new(limits: &Limits) -> Self {
        let max = limits.srqs.min(1 << 19);
        Self { queues: Table::new(), max, max_wr: limits.wrs, max_sge: limits.sges }
    }

    /// Number of queues.
    pub(crate) fn count(&self) -> usize {
        self.queues.len()
    }

    fn check_size(&self, max_wr: usize) -> Result<(), Error> {
        if max_wr == 0 {
            return Err(Error::Invalid(InvalidReason::SrqSize));
        }
        if max_wr > self.max_wr {
            return Err(Error::Limit(Resource::WorkRequests));
        }
        Ok(())
    }

    /// Makes a queue; the caller checks its protection domain.
    pub(crate) fn create(&mut self, init: &SrqInit) -> Result<SrqId, Error> {
        let SrqInit { pd, max_wr, max_sge } = *init;
        if self.queues.len() >= self.max {
            return Err(Error::Limit(Resource::SharedReceiveQueues));
        }
        self.check_size(max_wr)?;
        if max_sge > self.max_sge {
            return Err(Error::Limit(Resource::Sges));
        }
        let attr = SrqAttr { max_wr, max_sge, limit: 0 };
        Ok(SrqId(self.queues.insert(Srq { pd, receives: RecvQueue::default(), attr, users: 0 })))
    }

    pub(crate) fn modify(&mut self, srq: SrqId, change: &SrqChange) -> Result<(), Error> {
        let queue = self.queues.get(srq.0).ok_or(NO_SRQ)?;
        let mut attr = queue.attr;
        if let Some(max_wr) = change.max_wr {
            self.check_size(max_wr)?;
            if max_wr < queue.receives.len() {
                return Err(Error::Invalid(InvalidReason::SrqSize));
            }
            attr.max_wr = max_wr;
        }
        attr.limit = change.limit.unwrap_or(attr.limit);
        if attr.limit > attr.max_wr {
            return Err(Error::Invalid(InvalidReason::SrqLimit));
        }
        if let Some(queue) = self.queues.get_mut(srq.0) {
            queue.attr = attr;
        }
        Ok(())
    }

    pub(crate) fn query(&self, srq: SrqId) -> Result<SrqAttr, Error> {
        Ok(self.queues.get(srq.0).ok_or(NO_SRQ)?.attr)
    }

    /// Removes a queue; returns its protection domain.
    pub(crate) fn destroy(&mut self, srq: SrqId) -> Result<PdId, Error> {
        if self.queues.get(srq.0).ok_or(NO_SRQ)?.users > 0 {
            return Err(Error::Busy(Object::SharedReceiveQueue));
        }
        Ok(self.queues.remove(srq.0).ok_or(NO_SRQ)?.pd)
    }

    /// Counts a queue pair as a user of the queue.
    pub(crate) fn hold(&mut self, srq: SrqId) -> Result<(), Error> {
        self.queues.get_mut(srq.0).ok_or(NO_SRQ)?.users += 1;
        Ok(())
    }

    /// Drops a queue pair as a user of the queue.
    pub(crate) fn release(&mut self, srq: SrqId) {
        if let Some(queue) = self.queues.get_mut(srq.0) {
            queue.users = queue.users.saturating_sub(1);
        }
    }

    pub(crate) fn post(&mut self, srq: SrqId, wr: &RecvWr<'_>) -> Result<(), Error> {
        let queue = self.queues.get_mut(srq.0).ok_or(NO_SRQ)?;
        let SrqAttr { max_wr, max_sge, .. } = queue.attr;
        RequestPart::SharedScatterList.check(wr.sges.len() as u64, max_sge as u64)?;
        queue.receives.post(wr, max_wr)
    }

    /// The posted receives and the protection domain of their memory.
    pub(crate) fn receives(&mut self, srq: SrqId) -> Option<(PdId, &mut RecvQueue)> {
        self.queues.get_mut(srq.0).map(|queue| (queue.pd, &mut queue.receives))
    }

    /// Tells, once, that fewer receives than the limit are posted: disarms the limit.
    pub(crate) fn limit_reached(&mut self, srq: SrqId) -> bool {
        let Some(queue) = self.queues.get_mut(srq.0) else { return false };
        let reached = queue.receives.len() < queue.attr.limit;
        if reached {
            queue.attr.limit = 0;
        }
        reached
    }
}
