//! The lead as a value under the driver's lock, as RDS and RoCE have it.
//!
//! ```text
//!                     take                    others silent at its turn
//!      Application <--------- Nobody --------------------------> Helper
//!           |        leave       ^        others active              |
//!           +------------------->+<----------------------------------+
//!           ^                              take                      |
//!           +--------------------------------------------------------+
//! ```
//! The leader says until when it sleeps before it releases the lock. Whoever adds work that is due
//! earlier sees that under the same lock, and interrupts the sleep.

/// The thread that reads the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leader {
    /// No fixed thread.
    #[default]
    Nobody,
    /// A thread of the program that waits.
    Application,
    /// The background thread.
    Helper,
}

/// What the background thread has seen of the program's threads since its last turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// At least one reads the network, or has.
    Active,
    /// None does.
    Silent,
    /// None has, but too little time has passed to tell.
    Unknown,
}

/// Who leads, and whether the leader sleeps.
#[derive(Debug, Default)]
pub struct Lead {
    leader: Leader,
    epoch: u64,
    /// When the sleeping leader wakes up by itself, in nanoseconds; `u64::MAX`: never.
    sleeping: Option<u64>,
}

impl Lead {
    /// Returns who leads.
    pub const fn leader(&self) -> Leader {
        self.leader
    }

    /// Returns how often threads of the program have taken the lead. The background thread compares
    /// it with what it was at its last turn.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Makes the calling thread of the program the leader, unless another one is. Returns who led
    /// before; a background thread that led finds out at its next turn.
    pub const fn take(&mut self) -> Option<Leader> {
        let former = self.leader;
        if matches!(former, Leader::Application) {
            return None;
        }
        self.leader = Leader::Application;
        self.epoch += 1;
        self.sleeping = None;
        Some(former)
    }

    /// Ends the lead of the calling thread, which then hands it on.
    pub const fn leave(&mut self) {
        self.leader = Leader::Nobody;
        self.sleeping = None;
    }

    /// Lets the background thread, at its turn, take the lead or leave it; returns who leads then.
    pub const fn take_turn(&mut self, others: Others) -> Leader {
        self.leader = match (self.leader, others) {
            (Leader::Application, _) => return self.leader,
            // A thread that reads for itself is faster.
            (_, Others::Active) => Leader::Nobody,
            (_, Others::Silent) => Leader::Helper,
            (leader, Others::Unknown) => leader,
        };
        self.sleeping = None;
        self.leader
    }

    /// Notes that the leader is about to sleep until `until_ns`, or longer than anybody waits
    /// (`u64::MAX`).
    pub const fn fall_asleep(&mut self, until_ns: u64) {
        self.sleeping = Some(until_ns);
    }

    /// Notes that the leader is awake, or has been woken.
    pub const fn wake_up(&mut self) {
        self.sleeping = None;
    }

    /// Tells whether the leader sleeps.
    pub const fn is_asleep(&self) -> bool {
        self.sleeping.is_some()
    }

    /// Tells whether the leader sleeps, and would sleep past a timer that is due at `at_ns`.
    pub fn sleeps_past(&self, at_ns: Option<u64>) -> bool {
        self.sleeping.is_some_and(|until| at_ns.is_some_and(|at| at < until))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_of_the_program_leads_at_a_time() {
        let mut lead = Lead::default();
        assert_eq!(lead.take(), Some(Leader::Nobody));
        assert_eq!((lead.take(), lead.epoch()), (None, 1));
        lead.leave();
        assert_eq!(lead.take_turn(Others::Silent), Leader::Helper);
        assert_eq!((lead.take(), lead.epoch()), (Some(Leader::Helper), 2));
    }

    #[test]
    fn the_background_thread_leads_only_while_no_other_does() {
        let mut lead = Lead::default();
        assert_eq!(lead.take_turn(Others::Unknown), Leader::Nobody);
        assert_eq!(lead.take_turn(Others::Active), Leader::Nobody);
        assert_eq!(lead.take_turn(Others::Silent), Leader::Helper);
        assert_eq!(lead.take_turn(Others::Unknown), Leader::Helper);
        assert_eq!(lead.take_turn(Others::Active), Leader::Nobody);
        lead.take();
        assert_eq!(lead.take_turn(Others::Silent), Leader::Application);
    }

    #[test]
    fn a_sleep_is_interrupted_for_what_is_due_before_its_end() {
        let mut lead = Lead::default();
        lead.take();
        assert!(!lead.sleeps_past(Some(1)), "it is awake");
        lead.fall_asleep(10);
        assert_eq!([None, Some(9), Some(10)].map(|at| lead.sleeps_past(at)), [false, true, false]);
        lead.take_turn(Others::Silent);
        assert!(lead.is_asleep(), "the background thread leaves another's sleep alone");
        lead.wake_up();
        assert!(!lead.is_asleep());
        lead.fall_asleep(u64::MAX);
        lead.leave();
        assert!(!lead.is_asleep());
    }
}
