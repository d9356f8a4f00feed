//! The background thread: does the work for which no application thread is present.
//!
//! While application threads poll or wait, they read the network themselves, and this thread only
//! checks now and then whether they still do, and whether timers are overdue. If no application
//! thread has polled since its last check, it becomes the leader: it reads the network and sleeps
//! on the sockets, so that a device that nobody polls still answers its peers.

use core::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bowline_base::clock;
use bowline_roce::FormerConnection;
use bowline_verbs::Error;
use bowline_wait::{Leader, Others};

use crate::receive::PumpResult;
use crate::shared::Shared;

/// Interval of checks, in nanoseconds, while application threads are active.
const TICK_NS: u64 = 1_000_000;
/// Longest interval while they poll: an acknowledgement may be deferred this long for a program
/// that has stopped sending and polling.
const TICK_ACTIVE_NS: u64 = 2_000_000;
/// Longest interval while an application thread waits all the time.
const TICK_WAITING_NS: u64 = 256_000_000;
/// Longest time it polls without sleeping after a packet arrived, also where threads of the program
/// never sleep.
const POLL_MAX_NS: u64 = 50_000;
/// Interval at which the capture file is flushed.
const CAPTURE_FLUSH: Duration = Duration::from_millis(100);

/// State of the background thread between two turns.
#[derive(Debug, Default)]
struct HelperState {
    polls: u64,
    epoch: u64,
    /// When it last decided whether an application thread polls, in nanoseconds.
    decided_at: u64,
    tick_ns: u64,
    /// It polls without sleeping until this time, in nanoseconds; 0: it does not poll.
    poll_end: u64,
    /// When that poll began, in nanoseconds.
    poll_begun: u64,
    /// Another thread was reading the network when this one tried to.
    pump_was_busy: bool,
}

/// Activity of other threads as seen in one turn.
#[derive(Clone, Copy, Debug)]
struct ThreadActivity {
    /// The time, in nanoseconds.
    now: u64,
    /// How often an application thread has polled the network without waiting.
    polls: u64,
    /// How often a waiting thread has become the leader.
    epoch: u64,
}

impl HelperState {
    /// Tells whether other threads have read the network since the last turn.
    fn others(&mut self, activity: ThreadActivity) -> Others {
        let pump_was_busy = std::mem::take(&mut self.pump_was_busy);
        let active = pump_was_busy || activity.polls != self.polls || activity.epoch != self.epoch;
        // In less time, a polling thread may not have had the processor.
        let decides = active || activity.now - self.decided_at >= TICK_NS / 2;
        if decides {
            (self.polls, self.epoch, self.decided_at) =
                (activity.polls, activity.epoch, activity.now);
        }
        if active {
            Others::Active
        } else if decides {
            Others::Silent
        } else {
            Others::Unknown
        }
    }
}

impl Shared {
    /// Runs until the device is closed.
    pub(crate) fn help(&self) {
        let mut state = HelperState::default();
        while self.help_once(&mut state) {}
    }

    fn help_once(&self, state: &mut HelperState) -> bool {
        self.stats.helper_turns.inc();
        let mut st = self.lock();
        let now = clock::now();
        if st.stop {
            return false;
        }
        if std::mem::take(&mut st.connections_changed) {
            let connections = st.core.former_connections();
            drop(st);
            self.write_connection_files(&connections);
            return true;
        }
        let activity = ThreadActivity {
            now: now.as_nanos(),
            polls: self.polls.load(Relaxed),
            epoch: st.lead.epoch(),
        };
        let waited = activity.epoch != state.epoch;
        let mut others = state.others(activity);
        if std::mem::take(&mut st.program_sleeps) {
            others = Others::Silent;
        }
        let watching = st.lead.take_turn(others) == Leader::Helper;
        let timer = st.core.poll_timeout();
        // A polling or waiting thread runs timers and sends. If this thread did that too, the other
        // one would have to wait for it: on one processor, for as long as the scheduler likes.
        let asleep = watching || st.lead.is_asleep();
        let patience = if asleep { 0 } else { TICK_ACTIVE_NS };
        if timer.is_some_and(|at| at.as_nanos().saturating_add(patience) <= now.as_nanos()) {
            drop(st);
            self.run_timers();
            return true;
        }
        if watching && now.as_nanos() < state.poll_end {
            drop(st);
            self.pump_and_flush(state);
            return true;
        }
        if std::mem::take(&mut state.poll_end) > 0 && watching {
            self.poll_budget.note(false, now.as_nanos().saturating_sub(state.poll_begun));
        }
        let limit = if watching {
            state.tick_ns = TICK_NS;
            let until = timer.map_or(u64::MAX, |at| at.as_nanos());
            st.lead.fall_asleep(until);
            // A thread that becomes leader and stops being leader has to wake this one.
            st.helper_polls_at = until;
            timer.map(|at| at.saturating_since(now))
        } else {
            state.tick_ns = match st.lead.leader() {
                Leader::Application if !waited => {
                    (state.tick_ns * 2).clamp(TICK_NS, TICK_WAITING_NS)
                }
                _ => (state.tick_ns * 2).clamp(TICK_NS, TICK_ACTIVE_NS),
            };
            let due = timer
                .filter(|_| asleep)
                .map_or(u64::MAX, |at| at.as_nanos().saturating_sub(now.as_nanos()));
            let tick = state.tick_ns.min(due);
            st.helper_polls_at = now.as_nanos() + tick;
            Some(Duration::from_nanos(tick))
        };
        drop(st);
        if asleep {
            self.flush_unsent();
        }
        let limit = if self.capture.is_some() {
            self.flush_capture();
            Some(limit.map_or(CAPTURE_FLUSH, |limit| limit.min(CAPTURE_FLUSH)))
        } else {
            limit
        };
        let woken = self.sleep(&self.helper_kick, watching, None, limit);
        if woken.arrived {
            let mut st = self.lock();
            if st.lead.leader() == Leader::Helper {
                st.lead.wake_up();
                drop(st);
                self.silence(woken);
                self.pump_and_flush(state);
            }
        }
        true
    }

    /// Replaces the files of established connections [CM-53].
    pub(crate) fn write_connection_files(&self, connections: &[FormerConnection]) {
        if let Some(files) = &self.connection_files
            && let Err(error) = files.write(connections)
        {
            let what = "writing the file of connections".to_owned();
            self.fault(None, Error::System { what, errno: bowline_base::Errno::of(&error) });
        }
    }

    /// Reads the network once and sends; extends polling if a packet arrived.
    fn pump_and_flush(&self, state: &mut HelperState) {
        let came = self.pump();
        self.flush_unsent();
        match came {
            PumpResult::Nothing | PumpResult::Rested => self.poll_budget.give_way(),
            PumpResult::Busy => state.pump_was_busy = true,
            PumpResult::Received => {
                let now = clock::now().as_nanos();
                if state.poll_end > 0 {
                    self.poll_budget.note(true, now.saturating_sub(state.poll_begun));
                }
                state.poll_begun = now;
                state.poll_end = self.poll_budget.begin(now).min(now + POLL_MAX_NS);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bowline_wait::Lead;

    use super::*;

    const HALF: u64 = TICK_NS / 2;

    fn activity(now: u64, polls: u64, epoch: u64) -> ThreadActivity {
        ThreadActivity { now, polls, epoch }
    }

    #[test]
    fn a_thread_that_polls_now_and_then_keeps_the_network() {
        let (mut state, mut lead) = (HelperState::default(), Lead::default());
        let mut turn = |activity| lead.take_turn(state.others(activity));
        assert_eq!(turn(activity(HALF, 1, 0)), Leader::Nobody);
        // Called far more often than the polling thread, which shares the processor, can poll.
        for at in 1..100 {
            let now = HALF + at * HALF / 10;
            assert_eq!(turn(activity(now, 1 + at / 9, 0)), Leader::Nobody, "{at}");
        }
    }

    #[test]
    fn without_polling_threads_the_background_thread_leads() {
        let (mut state, mut lead) = (HelperState::default(), Lead::default());
        let mut turn = |activity| lead.take_turn(state.others(activity));
        assert_eq!(turn(activity(HALF, 1, 0)), Leader::Nobody);
        assert_eq!(turn(activity(2 * HALF - 1, 1, 0)), Leader::Nobody);
        assert_eq!(turn(activity(2 * HALF, 1, 0)), Leader::Helper);
        assert_eq!(turn(activity(2 * HALF + 1, 1, 0)), Leader::Helper);
        // Until a thread polls or waits again.
        assert_eq!(turn(activity(2 * HALF + 2, 2, 0)), Leader::Nobody);
        assert_eq!(turn(activity(3 * HALF + 1, 2, 0)), Leader::Nobody);
        assert_eq!(turn(activity(3 * HALF + 2, 2, 0)), Leader::Helper);
        assert_eq!(turn(activity(3 * HALF + 3, 2, 1)), Leader::Nobody);
        lead.take();
        let others = state.others(activity(9 * HALF, 2, 1));
        assert_eq!(lead.take_turn(others), Leader::Application, "it waits still");
    }

    #[test]
    fn a_thread_that_was_met_at_the_network_counts_once() {
        for polls in [0, 1] {
            let mut state = HelperState { pump_was_busy: true, ..HelperState::default() };
            assert_eq!(state.others(activity(HALF, polls, 0)), Others::Active);
            assert_eq!(state.others(activity(2 * HALF, polls, 0)), Others::Silent);
        }
    }
}
