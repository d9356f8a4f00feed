//! The only place that reads the clock.

use bowline_rds::Instant;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Nanoseconds since the driver started, plus one second so that zero means "never".
#[derive(Debug)]
pub(crate) struct Clock {
    base: u64,
}

fn nanos(time: Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds * 1_000_000_000 + rest
}

impl Clock {
    pub(crate) fn new() -> Self {
        let start = nanos(clock_gettime(ClockId::Monotonic));
        Self { base: start.saturating_sub(1_000_000_000) }
    }

    /// The time, exact; about 20 ns.
    #[inline]
    pub(crate) fn now(&self) -> Instant {
        Instant::from_nanos(nanos(clock_gettime(ClockId::Monotonic)).saturating_sub(self.base))
    }

    /// The time of the last timer interrupt, up to some milliseconds ago; a third of the cost.
    #[inline]
    pub(crate) fn coarse(&self) -> Instant {
        let now = nanos(clock_gettime(ClockId::MonotonicCoarse));
        Instant::from_nanos(now.saturating_sub(self.base))
    }
}
