//! Acknowledgements that wait for the next packets.
//!
//! Beside a single small request, an answer say, an acknowledgement makes a burst of two packets out
//! of one, which costs each side half a microsecond of the round trip; sent after it, it costs a call
//! to the system on both sides. So it stays behind a few times, and goes out with a later answer, or
//! after a while [PERF-6].

use std::time::Duration;

use crate::time::Instant;

/// Answers in a row without the acknowledgement.
const PASSED_MAX: u8 = 3;
/// Bytes of a request that is small.
const SMALL: usize = 512;

/// The acknowledgement of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct LateAck {
    until: Option<Instant>,
    passed: u8,
}

impl LateAck {
    /// A request of `len` bytes is about to go out alone: tells whether the acknowledgement may stay
    /// behind, at most for `delay`.
    pub(crate) fn stay_behind(&mut self, now: Instant, len: usize, delay: Duration) -> bool {
        let until = self.until.unwrap_or(now + delay);
        if len > SMALL || until <= now || self.passed == PASSED_MAX {
            return false;
        }
        self.passed += 1;
        self.until = Some(until);
        true
    }

    /// It has been sent, or is no more.
    pub(crate) fn gone(&mut self) {
        *self = Self::default();
    }

    /// Until when it waits; `None`: it does not, or not any more.
    pub(crate) fn waits(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_a_few_times_and_not_for_long() {
        let delay = Duration::from_micros(20);
        let at = Instant::from_nanos;
        let mut ack = LateAck::default();
        assert!(!ack.stay_behind(at(0), 100, Duration::ZERO));
        assert!(!ack.stay_behind(at(0), 4096, delay));
        assert_eq!(ack.waits(at(0)), None);
        for now in [0, 7_000, 14_000] {
            assert!(ack.stay_behind(at(now), 100, delay));
            assert_eq!(ack.waits(at(now)), Some(at(20_000)), "since it came first");
        }
        assert!(!ack.stay_behind(at(15_000), 100, delay));
        assert_eq!(ack.waits(at(20_000)), None);
        ack.gone();
        assert!(ack.stay_behind(at(21_000), 100, delay));
        assert!(!ack.stay_behind(at(41_000), 100, delay));
        ack.gone();
        assert!(ack.stay_behind(at(50_000), 100, delay));
    }
}
