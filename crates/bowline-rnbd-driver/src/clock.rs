//! The clock: nanoseconds since it was first read.

use std::sync::OnceLock;
use std::time::Instant as Moment;

use bowline_wire::time::Instant;

/// Returns the time.
pub(crate) fn now() -> Instant {
    static START: OnceLock<Moment> = OnceLock::new();
    let start = START.get_or_init(Moment::now);
    Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
}
