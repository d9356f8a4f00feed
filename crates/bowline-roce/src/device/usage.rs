//! Number of objects a device holds at the moment.

use super::Device;

/// Number of objects of each kind: created and not removed, or queued inside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Protection domains.
    pub pds: usize,
    /// Memory regions.
    pub mrs: usize,
    /// Fast-registration regions that are bound to memory now.
    pub bound: usize,
    /// Memory windows.
    pub mws: usize,
    /// Completion queues.
    pub cqs: usize,
    /// Queue pairs.
    pub qps: usize,
    /// Shared receive queues.
    pub srqs: usize,
    /// Listeners.
    pub listeners: usize,
    /// Connections, including those in TIMEWAIT [CM-45].
    pub connections: usize,
    /// Timers of queue pairs, including stale ones that are not due yet.
    pub timers: usize,
    /// Management datagrams to be sent.
    pub mads: usize,
    /// Events that the driver has not polled.
    pub events: usize,
}

impl Device {
    /// Counts what the device holds at the moment.
    pub fn in_use(&self) -> InUse {
        let (listeners, connections) = self.cm_counts();
        InUse {
            pds: self.pds.len(),
            mrs: self.shared.mrs.count(),
            bound: self.shared.mrs.bound_count(),
            mws: self.shared.mrs.windows.len(),
            cqs: self.shared.cqs.count(),
            qps: self.qps.len(),
            srqs: self.shared.srqs.count(),
            listeners,
            connections,
            timers: self.shared.timers(),
            mads: self.gsi.waiting(),
            events: self.shared.events.len(),
        }
    }
}
