//! Threads that wait for completions while another one reads the network. Each is woken for its own
//! queue: with a hundred sessions on a device, a heartbeat of one must not wake the threads of all.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use bowline_verbs::CqId;

use crate::shared::State;

/// Queues whose numbers are equal but for a multiple of this are woken together.
const LANES: usize = 64;

/// Where these threads sleep.
#[derive(Debug)]
pub(crate) struct Followers([Condvar; LANES]);

/// How many sleep in which lane: part of [`State`].
#[derive(Debug)]
pub(crate) struct Following {
    counts: [usize; LANES],
    /// A bit for each lane in which a thread sleeps.
    waiting: u64,
}

/// Lanes of queues that are ready, a bit for each.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ready(u64);

const fn lane(cq: CqId) -> usize {
    cq.0 as usize % LANES
}

impl Ready {
    pub(crate) const fn add(&mut self, cq: CqId) {
        self.0 |= 1 << lane(cq);
    }

    pub(crate) const fn is_any(self) -> bool {
        self.0 != 0
    }
}

impl Default for Following {
    fn default() -> Self {
        Self { counts: [0; LANES], waiting: 0 }
    }
}

impl Followers {
    pub(crate) fn new() -> Self {
        Self([const { Condvar::new() }; LANES])
    }

    /// Sleeps until a queue of the lane of `cq` is ready, the lead is free, or the limit is over.
    pub(crate) fn sleep<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        cq: CqId,
        limit: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        let lane = lane(cq);
        state.following.counts[lane] += 1;
        state.following.waiting |= 1 << lane;
        let mut state = match limit {
            None => self.0[lane].wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                self.0[lane].wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.following.counts[lane] -= 1;
        if state.following.counts[lane] == 0 {
            state.following.waiting &= !(1 << lane);
        }
        state
    }

    /// Wakes those whose queue may be ready; returns whether there were any.
    pub(crate) fn wake(&self, following: &Following, ready: Ready) -> bool {
        let mut left = ready.0 & following.waiting;
        let is_any = left != 0;
        while left != 0 {
            self.0[left.trailing_zeros() as usize].notify_all();
            left &= left - 1;
        }
        is_any
    }

    /// Wakes one, to become the leader; returns whether there was any.
    pub(crate) fn wake_one(&self, following: &Following) -> bool {
        let is_any = following.waiting != 0;
        if is_any {
            self.0[following.waiting.trailing_zeros() as usize].notify_one();
        }
        is_any
    }

    /// Wakes all.
    pub(crate) fn wake_all(&self) {
        self.0.iter().for_each(Condvar::notify_all);
    }
}
