//! Completion queues.

use std::collections::VecDeque;

use bowline_verbs::{Completion, CqId, Error, InvalidReason, Object, Qpn, Resource};

use crate::table::Table;

/// Consequence of adding an entry to a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Added {
    /// There is nothing to do.
    Quiet,
    /// The waiter of the queue must be notified.
    Ready,
    /// The queue has just overrun: this entry and all later ones are lost. A waiter, even for
    /// solicited entries, must be notified if `waited`.
    Overrun { waited: bool },
    /// The queue had overrun before, or does not exist; the entry is lost.
    Lost,
}

/// The entries for which a waiter is notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    No,
    Any,
    Solicited,
}

#[derive(Debug)]
struct Cq {
    depth: usize,
    entries: VecDeque<(Completion, bool)>,
    /// Number of entries that wake a waiter for solicited entries.
    solicited: usize,
    armed: Armed,
    overrun: bool,
    users: usize,
}

/// A completion that is not in its queue yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingCompletion {
    pub(crate) cq: CqId,
    pub(crate) completion: Completion,
    /// The completion also wakes a waiter for solicited entries [RSP-20].
    pub(crate) wakes: bool,
}

/// All completion queues of a device.
#[derive(Debug)]
pub(crate) struct CqTable {
    queues: Table<Cq>,
    max: usize,
    max_depth: usize,
}

const NO_CQ: Error = Error::NoSuch(Object::CompletionQueue);
const OVERRUN: Error = Error::Invalid(InvalidReason::CqOverrun);

impl CqTable {
    pub(crate) fn new(max: usize, max_depth: usize) -> Self {
        Self { queues: Table::new(), max: max.min(1 << 19), max_depth }
    }

    /// Number of queues.
    pub(crate) fn count(&self) -> usize {
        self.queues.len()
    }

    pub(crate) fn create(&mut self, depth: usize) -> Result<CqId, Error> {
        if self.queues.len() >= self.max {
            return Err(Error::Limit(Resource::CompletionQueues));
        }
        self.check_depth(depth)?;
        Ok(CqId(self.queues.insert(Cq {
            depth,
            entries: VecDeque::new(),
            solicited: 0,
            armed: Armed::No,
            overrun: false,
            users: 0,
        })))
    }

    fn check_depth(&self, depth: usize) -> Result<(), Error> {
        match depth {
            0 => Err(Error::Invalid(InvalidReason::NoEntries)),
            _ if depth > self.max_depth => Err(Error::Limit(Resource::CqEntries)),
            _ => Ok(()),
        }
    }

    /// Gives a queue room for this many entries, which must not be fewer than it has.
    pub(crate) fn resize(&mut self, cq: CqId, depth: usize) -> Result<(), Error> {
        self.check_depth(depth)?;
        let queue = self.queues.get_mut(cq.0).ok_or(NO_CQ)?;
        if depth < queue.entries.len() {
            return Err(Error::Invalid(InvalidReason::NoEntries));
        }
        queue.depth = depth;
        Ok(())
    }

    pub(crate) fn destroy(&mut self, cq: CqId) -> Result<(), Error> {
        if self.queues.get(cq.0).ok_or(NO_CQ)?.users > 0 {
            return Err(Error::Busy(Object::CompletionQueue));
        }
        self.queues.remove(cq.0);
        Ok(())
    }

    /// Counts a queue pair as a user of the queue.
    pub(crate) fn hold(&mut self, cq: CqId) -> Result<(), Error> {
        let queue = self.queues.get_mut(cq.0).ok_or(NO_CQ)?;
        if queue.overrun {
            return Err(OVERRUN);
        }
        queue.users += 1;
        Ok(())
    }

    /// Drops a queue pair as a user of the queue.
    pub(crate) fn release(&mut self, cq: CqId) {
        if let Some(queue) = self.queues.get_mut(cq.0) {
            queue.users = queue.users.saturating_sub(1);
        }
    }

    /// Moves up to `max` entries to `out`.
    pub(crate) fn poll(
        &mut self,
        cq: CqId,
        out: &mut Vec<Completion>,
        max: usize,
    ) -> Result<usize, Error> {
        let queue = self.queues.get_mut(cq.0).ok_or(NO_CQ)?;
        let count = queue.entries.len().min(max);
        let mut solicited = 0;
        out.extend(queue.entries.drain(..count).map(|(entry, wakes)| {
            solicited += usize::from(wakes);
            entry
        }));
        queue.solicited -= solicited;
        Ok(count)
    }

    /// Removes the entries of a queue pair.
    pub(crate) fn forget(&mut self, cq: CqId, qpn: Qpn) {
        if let Some(queue) = self.queues.get_mut(cq.0) {
            queue.entries.retain(|(entry, _)| entry.qpn != qpn);
            queue.solicited = queue.entries.iter().filter(|(_, wakes)| *wakes).count();
        }
    }

    /// Requests a notification of the next entry, or of the next solicited entry or error [RSP-20].
    /// Returns `false`, without a request, if there is such an entry already. The remaining entries
    /// of a queue that has overrun can still be polled; after that, waiting is an error.
    pub(crate) fn arm(&mut self, cq: CqId, solicited: bool) -> Result<bool, Error> {
        let queue = self.queues.get_mut(cq.0).ok_or(NO_CQ)?;
        let there = if solicited { queue.solicited } else { queue.entries.len() };
        if there > 0 {
            return Ok(false);
        }
        if queue.overrun {
            return Err(OVERRUN);
        }
        // A second waiter must not weaken the request of one that waits for any entry.
        if queue.armed != Armed::Any {
            queue.armed = if solicited { Armed::Solicited } else { Armed::Any };
        }
        Ok(true)
    }

    /// As [`arm`](Self::arm), but for entries that are added from now on, whatever is there.
    pub(crate) fn arm_next(&mut self, cq: CqId, solicited: bool) -> Result<(), Error> {
        let queue = self.queues.get_mut(cq.0).ok_or(NO_CQ)?;
        if queue.overrun {
            return Err(OVERRUN);
        }
        if queue.armed != Armed::Any {
            queue.armed = if solicited { Armed::Solicited } else { Armed::Any };
        }
        Ok(())
    }

    pub(crate) fn add(&mut self, cq: CqId, entry: Completion, wakes: bool) -> Added {
        let Some(queue) = self.queues.get_mut(cq.0) else { return Added::Lost };
        if queue.overrun {
            return Added::Lost;
        }
        if queue.entries.len() >= queue.depth {
            queue.overrun = true;
            let waited = std::mem::replace(&mut queue.armed, Armed::No) != Armed::No;
            return Added::Overrun { waited };
        }
        queue.entries.push_back((entry, wakes));
        queue.solicited += usize::from(wakes);
        match queue.armed {
            Armed::Any => {}
            Armed::Solicited if wakes => {}
            _ => return Added::Quiet,
        }
        queue.armed = Armed::No;
        Added::Ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(wr_id: u64) -> Completion {
        Completion { wr_id, ..Completion::default() }
    }

    #[test]
    fn entries_come_out_in_order_and_wake_once() {
        let mut table = CqTable::new(10, 10);
        let cq = table.create(3).unwrap();
        assert_eq!(table.arm(cq, false), Ok(true));
        assert_eq!(table.add(cq, entry(1), false), Added::Ready);
        assert_eq!(table.add(cq, entry(2), false), Added::Quiet);
        assert_eq!(table.arm(cq, false), Ok(false));
        let mut out = Vec::new();
        assert_eq!(table.poll(cq, &mut out, 1), Ok(1));
        assert_eq!(table.poll(cq, &mut out, 9), Ok(1));
        assert_eq!(table.poll(cq, &mut out, 9), Ok(0));
        assert_eq!(out, [entry(1), entry(2)]);
    }

    /// [RSP-20].
    #[test]
    fn a_waiter_for_solicited_entries_sleeps_through_others() {
        let mut table = CqTable::new(10, 10);
        let cq = table.create(3).unwrap();
        table.add(cq, entry(1), false);
        assert_eq!(table.arm(cq, true), Ok(true));
        assert_eq!(table.add(cq, entry(2), false), Added::Quiet);
        assert_eq!(table.add(cq, entry(3), true), Added::Ready);
        assert_eq!(table.arm(cq, true), Ok(false));
        table.poll(cq, &mut Vec::new(), 3).unwrap();
        assert_eq!(table.arm(cq, true), Ok(true));
        assert_eq!(table.arm(cq, false), Ok(true));
        assert_eq!(table.arm(cq, true), Ok(true));
        assert_eq!(table.add(cq, entry(4), false), Added::Ready);
    }

    #[test]
    fn a_request_for_the_next_entry_passes_over_those_that_are_there() {
        let mut table = CqTable::new(10, 10);
        let cq = table.create(4).unwrap();
        table.add(cq, entry(1), true);
        assert_eq!(table.arm_next(cq, true), Ok(()));
        assert_eq!(table.add(cq, entry(2), false), Added::Quiet);
        assert_eq!(table.add(cq, entry(3), true), Added::Ready);
        assert_eq!(table.add(cq, entry(4), true), Added::Quiet, "reported once");
        assert_eq!(table.arm_next(CqId(cq.0 + 1), true), Err(NO_CQ));
        assert_eq!(table.add(cq, entry(5), true), Added::Overrun { waited: false });
        assert_eq!(table.arm_next(cq, false), Err(OVERRUN));
    }

    #[test]
    fn entries_of_a_queue_pair_are_forgotten() {
        let mut table = CqTable::new(1, 10);
        let cq = table.create(10).unwrap();
        let of = |wr_id, qpn| Completion { qpn: Qpn(qpn), ..entry(wr_id) };
        for (id, qpn, wakes) in [(1, 7, true), (2, 8, true), (3, 7, false)] {
            table.add(cq, of(id, qpn), wakes);
        }
        table.forget(cq, Qpn(7));
        assert_eq!(table.arm(cq, true), Ok(false), "the other one's is solicited");
        let mut out = Vec::new();
        assert_eq!(table.poll(cq, &mut out, 9), Ok(1));
        assert_eq!(out, [of(2, 8)]);
        assert_eq!(table.arm(cq, true), Ok(true));
    }

    #[test]
    fn a_queue_is_made_longer_and_no_shorter_than_what_it_has() {
        let mut table = CqTable::new(2, 4);
        let cq = table.create(1).unwrap();
        assert_eq!(table.resize(cq, 3), Ok(()));
        for id in 0..3 {
            assert_eq!(table.add(cq, entry(id), false), Added::Quiet);
        }
        let few = Err(Error::Invalid(InvalidReason::NoEntries));
        assert_eq!((table.resize(cq, 2), table.resize(cq, 0)), (few.clone(), few));
        assert_eq!(table.resize(cq, 5), Err(Error::Limit(Resource::CqEntries)));
        assert_eq!(table.resize(CqId(cq.0 ^ 1), 3), Err(NO_CQ));
        table.poll(cq, &mut Vec::new(), 2).unwrap();
        assert_eq!(table.resize(cq, 1), Ok(()));
        assert_eq!(table.add(cq, entry(4), false), Added::Overrun { waited: false });
    }

    #[test]
    fn an_overrun_is_reported_once_and_is_final() {
        let mut table = CqTable::new(1, 10);
        assert_eq!(table.create(11), Err(Error::Limit(Resource::CqEntries)));
        let cq = table.create(1).unwrap();
        assert_eq!(table.create(1), Err(Error::Limit(Resource::CompletionQueues)));
        table.hold(cq).unwrap();
        assert_eq!(table.destroy(cq), Err(Error::Busy(Object::CompletionQueue)));
        assert_eq!(table.add(cq, entry(1), false), Added::Quiet);
        assert_eq!(table.add(cq, entry(2), false), Added::Overrun { waited: false });
        assert_eq!(table.arm(cq, false), Ok(false), "what it holds can be fetched");
        assert_eq!(table.arm(cq, true), Err(OVERRUN), "no solicited entry will come");
        table.poll(cq, &mut Vec::new(), 1).unwrap();
        assert_eq!(table.add(cq, entry(3), false), Added::Lost);
        assert_eq!(table.arm(cq, false), Err(OVERRUN));
        assert!(table.hold(cq).is_err());
        table.release(cq);
        assert_eq!(table.destroy(cq), Ok(()));
        assert_eq!(table.arm(cq, false), Err(NO_CQ));
        // Entries that do not wake the waiter can take the room of the one that would.
        let cq = table.create(1).unwrap();
        assert_eq!(table.arm(cq, true), Ok(true));
        assert_eq!(table.add(cq, entry(1), false), Added::Quiet);
        assert_eq!(table.add(cq, entry(2), true), Added::Overrun { waited: true });
        assert_eq!(table.add(cq, entry(3), true), Added::Lost);
    }
}
