//! Acknowledgements that wait for the next packets.
//!
//! Beside a single request of one packet, an answer say, an acknowledgement makes a burst of two
//! packets out of one, which costs each side half a microsecond of the round trip; sent after it,
//! it costs a call to the system on both sides. So it stays behind a few times, and goes out with a
//! later answer, or after a while [PERF-6] [RSP-25]. A peer that sends nothing until it has the
//! acknowledgement would lose that while every time: where it has passed twice in a row, and there
//! was no answer in its second half, acknowledgements do not wait for the next thousand answers,
//! and longer each time that happens again.

use std::time::Duration;

use bowline_base::Instant;

/// Answers in a row without the acknowledgement.
const PASSED_MAX: u8 = 3;
/// Waits in vain in a row; a single one can be an accident.
const VAIN: u32 = 2;
/// Answers without waiting after these, at first.
const OFF_MIN: u32 = 1024;
/// That many times longer each time, at most so often.
const OFF_STEP: u32 = 4;
const STRIKES_MAX: u32 = 5;
/// After so many that were not in vain, all is forgotten.
const GOOD: u32 = 256;

/// The acknowledgement of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct LateAck {
    until: Option<Instant>,
    passed: u8,
    /// The last answer passed in the second half of that time.
    lively: bool,
    /// Answers left for which it does not wait.
    off: u32,
    /// Times in a row it waited in vain, how often that was enough, and times it did not since.
    vain: u32,
    strikes: u32,
    good: u32,
}

impl LateAck {
    /// A packet of requests is about to go out alone: tells whether the acknowledgement may stay
    /// behind, at most for `delay`.
    pub(crate) fn stay_behind(&mut self, now: Instant, delay: Duration) -> bool {
        if self.off > 0 {
            self.off -= 1;
            return false;
        }
        let until = self.until.unwrap_or(now + delay);
        if until <= now || self.passed == PASSED_MAX {
            return false;
        }
        self.passed += 1;
        self.until = Some(until);
        self.lively = now + delay / 2 > until;
        true
    }

    /// It has been sent, or is no more.
    pub(crate) fn gone(&mut self, now: Instant) {
        let Some(until) = self.until.take() else { return };
        self.passed = 0;
        if until <= now {
            // A peer that still went on is slow.
            if self.lively {
                return;
            }
            self.vain += 1;
            if self.vain == VAIN {
                self.off = OFF_MIN * OFF_STEP.pow(self.strikes);
                self.strikes = (self.strikes + 1).min(STRIKES_MAX);
                (self.vain, self.good) = (0, 0);
            }
        } else {
            self.vain = 0;
            self.good += 1;
            if self.good == GOOD {
                (self.good, self.strikes) = (0, 0);
            }
        }
    }

    /// Has it go out now; tells whether it waited.
    pub(crate) fn release(&mut self) -> bool {
        self.passed = 0;
        self.until.take().is_some()
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
        assert!(!ack.stay_behind(at(0), Duration::ZERO));
        assert_eq!(ack.waits(at(0)), None);
        for now in [0, 7_000, 14_000] {
            assert!(ack.stay_behind(at(now), delay));
            assert_eq!(ack.waits(at(now)), Some(at(20_000)), "since it came first");
        }
        assert!(!ack.stay_behind(at(15_000), delay));
        assert_eq!(ack.waits(at(20_000)), None);
        ack.gone(at(15_000));
        assert!(ack.stay_behind(at(21_000), delay));
        assert!(!ack.stay_behind(at(41_000), delay));
    }

    #[test]
    fn a_peer_that_is_slow_does_not_wait_for_it() {
        let delay = Duration::from_micros(20);
        let mut now = Instant::from_nanos(1);
        let mut ack = LateAck::default();
        for _ in 0..100 {
            // Two answers before the time is over, and it goes with the third.
            assert_eq!(
                [(); 3].map(|()| {
                    let stays = ack.stay_behind(now, delay);
                    now = now + Duration::from_micros(15);
                    stays
                }),
                [true, true, false]
            );
            ack.gone(now);
        }
    }

    #[test]
    fn a_peer_that_waits_for_it_behind_two_answers_loses_little() {
        let delay = Duration::from_micros(20);
        let (mut now, mut lost) = (Instant::from_nanos(1), 0);
        let mut ack = LateAck::default();
        for _ in 0..1000 {
            let stays = [(); 2].map(|()| ack.stay_behind(now, delay));
            now = now + Duration::from_micros(1);
            if stays[1] {
                lost += 1;
                now = now + delay;
            }
            ack.gone(now);
        }
        assert_eq!(lost, 4, "2 in 512 of two answers, then in 2048");
    }

    #[test]
    fn a_peer_that_waits_for_it_loses_little() {
        let delay = Duration::from_micros(20);
        let (mut now, mut lost) = (Instant::from_nanos(1), 0);
        let mut ack = LateAck::default();
        for _ in 0..100_000 {
            if ack.stay_behind(now, delay) {
                lost += 1;
                now = now + delay;
            }
            ack.gone(now);
            now = now + Duration::from_micros(5);
        }
        assert_eq!(lost, 10, "2 in 1024, then 4096, 16384, 65536, 262144");
        // The peer changes its ways, and after a while once does not count any more.
        for _ in 0..2_000_000 {
            ack.stay_behind(now, delay);
            ack.gone(now);
        }
        for _ in 0..2 {
            assert!(ack.stay_behind(now, delay));
            ack.gone(now + delay);
        }
        let off = (0..10_000).take_while(|_| !ack.stay_behind(now, delay)).count();
        assert_eq!(off, 1024);
    }
}
