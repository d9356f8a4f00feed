//! The background thread: it does what no application thread is there to do.
//!
//! While application threads poll or wait, they read the network themselves, and this thread only
//! looks now and then whether they still do, and for timers that are overdue. When nobody has since
//! its last look, it takes the lead: it reads the network and sleeps on the sockets, so that a
//! device nobody polls answers its peers.

use core::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bowline_base::clock;
use bowline_roce::FormerLife;
use bowline_verbs::Error;

use crate::receive::Came;
use crate::shared::{Lead, Shared};

/// Interval of looks while application threads are active.
const TICK_NS: u64 = 1_000_000;
/// The longest it becomes while they poll: as long may an acknowledgement be held back for a
/// program that does not send or poll any more.
const TICK_ACTIVE_NS: u64 = 2_000_000;
/// The longest it becomes while one of them waits without a break.
const TICK_WAITING_NS: u64 = 256_000_000;
/// The longest it looks without sleeping after something came.
const SPIN_MAX_NS: u64 = 50_000;
/// Interval at which a capture file gets what was captured.
const CAPTURE_FLUSH: Duration = Duration::from_millis(100);

/// What the thread remembers between two looks.
#[derive(Debug, Default)]
struct Memory {
    looks: u64,
    epoch: u64,
    /// When it last judged whether somebody polls.
    judged_at: u64,
    tick_ns: u64,
    /// Looks at the network without sleeping until then.
    spin_end: u64,
    /// Another thread was at it when this one looked.
    elsewhere: bool,
}

/// What it sees of other threads at a look.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// The time, in nanoseconds.
    now: u64,
    /// Times an application thread has looked at the network without waiting.
    looks: u64,
    /// Times a waiting thread has taken the lead.
    epoch: u64,
}

impl Memory {
    /// Tells who is to read the network from now on.
    fn judge(&mut self, lead: Lead, seen: Seen) -> Lead {
        let met = std::mem::take(&mut self.elsewhere);
        let active = met || seen.looks != self.looks || seen.epoch != self.epoch;
        // In less time than that somebody who polls need not have had the processor.
        let judges = active || seen.now - self.judged_at >= TICK_NS / 2;
        if judges {
            (self.looks, self.epoch, self.judged_at) = (seen.looks, seen.epoch, seen.now);
        }
        match lead {
            Lead::App => Lead::App,
            // Whoever polls does better to read the network without this thread in between.
            Lead::Nobody | Lead::Helper if active => Lead::Nobody,
            Lead::Nobody if judges => Lead::Helper,
            Lead::Nobody | Lead::Helper => lead,
        }
    }
}

impl Shared {
    /// Runs until the device is closed.
    pub(crate) fn help(&self) {
        let mut memory = Memory::default();
        while self.help_once(&mut memory) {}
    }

    fn help_once(&self, memory: &mut Memory) -> bool {
        self.stats.helper_turns.inc();
        let mut st = self.lock();
        let now = clock::now();
        if st.stop {
            return false;
        }
        if std::mem::take(&mut st.lives_changed) {
            let lives = st.core.former_lives();
            drop(st);
            self.write_lives(&lives);
            return true;
        }
        let seen =
            Seen { now: now.as_nanos(), looks: self.looks.load(Relaxed), epoch: st.lead_epoch };
        let waited = seen.epoch != memory.epoch;
        st.lead = memory.judge(st.lead, seen);
        let watching = st.lead == Lead::Helper;
        if st.lead != Lead::App {
            st.sleeping = None;
        }
        let timer = st.core.poll_timeout();
        // Whoever polls or waits sees to timers and to what is to be sent: with this thread at it
        // too, that one would have to wait for it, on one processor for as long as the scheduler
        // likes.
        let asleep = watching || st.sleeping.is_some();
        let patience = if asleep { 0 } else { TICK_ACTIVE_NS };
        if timer.is_some_and(|at| at.as_nanos().saturating_add(patience) <= now.as_nanos()) {
            drop(st);
            self.run_timers();
            return true;
        }
        if watching && now.as_nanos() < memory.spin_end {
            drop(st);
            self.look(memory);
            return true;
        }
        let limit = if watching {
            memory.tick_ns = TICK_NS;
            let until = timer.map_or(u64::MAX, |at| at.as_nanos());
            st.sleeping = Some(until);
            // A thread that takes the lead and leaves it again has to wake this one.
            st.helper_looks_at = until;
            timer.map(|at| at.saturating_since(now))
        } else {
            memory.tick_ns = match st.lead {
                Lead::App if !waited => (memory.tick_ns * 2).clamp(TICK_NS, TICK_WAITING_NS),
                _ => (memory.tick_ns * 2).clamp(TICK_NS, TICK_ACTIVE_NS),
            };
            let due = timer
                .filter(|_| asleep)
                .map_or(u64::MAX, |at| at.as_nanos().saturating_sub(now.as_nanos()));
            let tick = memory.tick_ns.min(due);
            st.helper_looks_at = now.as_nanos() + tick;
            Some(Duration::from_nanos(tick))
        };
        drop(st);
        if asleep {
            self.flush_rest();
        }
        let limit = if self.capture.is_some() {
            self.flush_capture();
            Some(limit.map_or(CAPTURE_FLUSH, |limit| limit.min(CAPTURE_FLUSH)))
        } else {
            limit
        };
        if self.sleep(&self.helper_kick, watching, limit) {
            let mut st = self.lock();
            if st.lead == Lead::Helper {
                st.sleeping = None;
                drop(st);
                self.look(memory);
            }
        }
        true
    }

    /// Replaces the file of connections [CM-53].
    pub(crate) fn write_lives(&self, lives: &[FormerLife]) {
        if let Some(file) = &self.lives
            && let Err(error) = file.write(lives)
        {
            let what = "writing the file of connections".to_owned();
            self.fault(None, Error::System { what, errno: bowline_base::Errno::of(&error) });
        }
    }

    /// Looks at the network once, and goes on for a while when that pays.
    fn look(&self, memory: &mut Memory) {
        let came = self.pump();
        self.flush_rest();
        match came {
            Came::Nothing => core::hint::spin_loop(),
            Came::ToAnother => memory.elsewhere = true,
            Came::Something => {
                memory.spin_end = clock::now().as_nanos() + self.spin_ns.min(SPIN_MAX_NS);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: u64 = TICK_NS / 2;

    fn seen(now: u64, looks: u64, epoch: u64) -> Seen {
        Seen { now, looks, epoch }
    }

    #[test]
    fn a_thread_that_polls_now_and_then_keeps_the_network() {
        let mut memory = Memory::default();
        let mut lead = memory.judge(Lead::Nobody, seen(HALF, 1, 0));
        // Called far more often than the other thread, which shares a processor, can look.
        for at in 1..100 {
            let now = HALF + at * HALF / 10;
            lead = memory.judge(lead, seen(now, 1 + at / 9, 0));
            assert_eq!(lead, Lead::Nobody, "{at}");
        }
    }

    #[test]
    fn nobody_who_looks_leaves_the_network_to_the_background_thread() {
        let mut memory = Memory::default();
        assert_eq!(memory.judge(Lead::Nobody, seen(HALF, 1, 0)), Lead::Nobody);
        assert_eq!(memory.judge(Lead::Nobody, seen(2 * HALF - 1, 1, 0)), Lead::Nobody);
        assert_eq!(memory.judge(Lead::Nobody, seen(2 * HALF, 1, 0)), Lead::Helper);
        assert_eq!(memory.judge(Lead::Helper, seen(2 * HALF + 1, 1, 0)), Lead::Helper);
        // Until somebody looks or waits again.
        assert_eq!(memory.judge(Lead::Helper, seen(2 * HALF + 2, 2, 0)), Lead::Nobody);
        assert_eq!(memory.judge(Lead::Nobody, seen(3 * HALF + 1, 2, 0)), Lead::Nobody);
        assert_eq!(memory.judge(Lead::Nobody, seen(3 * HALF + 2, 2, 0)), Lead::Helper);
        assert_eq!(memory.judge(Lead::Helper, seen(3 * HALF + 3, 2, 1)), Lead::Nobody);
        assert_eq!(memory.judge(Lead::App, seen(9 * HALF, 2, 1)), Lead::App, "it waits still");
    }

    #[test]
    fn a_thread_that_was_met_at_the_network_counts_once() {
        for looks in [0, 1] {
            let mut memory = Memory { elsewhere: true, ..Memory::default() };
            assert_eq!(memory.judge(Lead::Helper, seen(HALF, looks, 0)), Lead::Nobody);
            assert_eq!(memory.judge(Lead::Nobody, seen(2 * HALF, looks, 0)), Lead::Helper);
        }
    }
}
