//! Seeds that nobody has looked at yet.

use std::time::{SystemTime, UNIX_EPOCH};

/// The first of a range of seeds that is another each time: that of BOWLINE_FRESH_FROM, or the time of day
/// in milliseconds.
pub(crate) fn first_seed() -> u64 {
    let told = std::env::var("BOWLINE_FRESH_FROM").ok().and_then(|text| text.parse().ok());
    told.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
    })
}
