//! The start: the window doubles each round trip until a queue shows or packets are lost [CC-15].

use std::time::Duration;

/// Window of a path about which nothing is known, in bytes: 32 packets of 1 KiB. Chosen; TCP begins
/// with 10 segments, about 14 KB (RFC 6928).
pub(super) const WINDOW: f64 = 32_768.0;
/// The start ends with a queue of at least this part of the least round trip. HyStart++ (RFC 9406)
/// has an eighth, of the shortest of eight samples; here four samples are compared.
const QUEUE_PART: u32 = 4;
/// What the end of the start leaves of the window, and the least that a loss in it leaves: the
/// window has doubled in the round trip before the queue showed.
pub(super) const AT_END: f64 = 0.5;
/// Pacing in the start: the window doubles in a round trip, so that twice as much is sent.
pub(in crate::congestion) const PACING_GAIN: f64 = 2.0;

/// Tells whether a queue ends the start. The first burst of a round queues behind itself, so that a
/// queue has to be longer than in later rounds.
pub(super) fn ends(queue: Duration, target: Duration, least: Duration) -> bool {
    queue > target.max(least / QUEUE_PART)
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [CC-15]
    #[test]
    fn the_start_ends_with_a_queue_above_the_target_and_a_quarter_of_the_route() {
        let us = Duration::from_micros;
        assert!(!ends(us(300), us(300), us(1000)));
        assert!(ends(us(301), us(300), us(1000)));
        assert!(!ends(us(500), us(300), us(2000)));
        assert!(ends(us(501), us(300), us(2000)));
    }
}
