//! What comes from the network, and sleeping on it as `poll` does: what is there stays ready until
//! it is read.

use shuttle::sync::{Condvar, Mutex};

/// Arrivals that nobody has read, by the number of the thread they are for, and descriptors that
/// are signalled.
#[derive(Default)]
struct Ready {
    arrived: Vec<usize>,
    leader_kick: bool,
    helper_kick: bool,
}

/// One network.
#[derive(Default)]
pub(super) struct Net {
    ready: Mutex<Ready>,
    changed: Condvar,
}

/// Who sleeps.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sleeper {
    Leader,
    HelperThatLeads,
    Helper,
}

impl Net {
    /// Something comes for a thread.
    pub(super) fn arrive(&self, to: usize) {
        self.ready.lock().unwrap().arrived.push(to);
        self.changed.notify_all();
    }

    pub(super) fn kick_leader(&self) {
        self.ready.lock().unwrap().leader_kick = true;
        self.changed.notify_all();
    }

    pub(super) fn kick_helper(&self) {
        self.ready.lock().unwrap().helper_kick = true;
        self.changed.notify_all();
    }

    /// Sleeps until there is something for this thread, and resets its descriptor; tells whether it
    /// was signalled. What has arrived stays.
    pub(super) fn sleep(&self, sleeper: Sleeper) -> bool {
        let mut ready = self.ready.lock().unwrap();
        loop {
            let kick = match sleeper {
                Sleeper::Leader => &mut ready.leader_kick,
                Sleeper::HelperThatLeads | Sleeper::Helper => &mut ready.helper_kick,
            };
            let kicked = std::mem::take(kick);
            let arrived = sleeper != Sleeper::Helper && !ready.arrived.is_empty();
            if kicked || arrived {
                return kicked;
            }
            ready = self.changed.wait(ready).unwrap();
        }
    }

    /// Reads what has arrived.
    pub(super) fn read(&self) -> Vec<usize> {
        std::mem::take(&mut self.ready.lock().unwrap().arrived)
    }
}
