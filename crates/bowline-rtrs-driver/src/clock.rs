//! The only place that reads the clock.

use bowline_rtrs::Instant;
use rustix::time::{ClockId, clock_gettime};

/// The time on the system's monotonic clock; about 20 ns.
#[inline]
pub(crate) fn now() -> Instant {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec).unwrap_or(0);
    Instant::from_nanos(seconds * 1_000_000_000 + rest)
}
