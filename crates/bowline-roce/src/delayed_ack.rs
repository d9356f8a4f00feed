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
const DEFERS_MAX: u8 = 3;
/// Waits in vain in a row; a single one can be an accident.
const EXPIRED_MAX: u32 = 2;
/// Answers without waiting after these, at first.
const BACKOFF_MIN: u32 = 1024;
/// That many times longer each time, at most so often.
const BACKOFF_FACTOR: u32 = 4;
const BACKOFFS_MAX: u32 = 5;
/// After so many that were not in vain, all is forgotten.
const IN_TIME_RESET: u32 = 256;

/// The acknowledgement of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct DelayedAck {
    until: Option<Instant>,
    defers: u8,
    /// The last answer passed in the second half of that time.
    recent_send: bool,
    /// Answers left for which it does not wait.
    backoff_left: u32,
    /// Times in a row it waited in vain, how often that was enough, and times it did not since.
    expired: u32,
    backoffs: u32,
    in_time: u32,
}

impl DelayedAck {
    /// A packet of requests is about to go out alone: tells whether the acknowledgement may stay
    /// behind, at most for `delay`.
    pub(crate) fn may_defer(&mut self, now: Instant, delay: Duration) -> bool {
        if self.backoff_left > 0 {
            self.backoff_left -= 1;
            return false;
        }
        let until = self.until.unwrap_or(now + delay);
        if until <= now || self.defers == DEFERS_MAX {
            return false;
        }
        self.defers += 1;
        self.until = Some(until);
        self.recent_send = now + delay / 2 > until;
        true
    }

    /// It has been sent, or is no more.
    pub(crate) fn clear(&mut self, now: Instant) {
        let Some(until) = self.until.take() else { return };
        self.defers = 0;
        if until <= now {
            // A peer that still went on is slow.
            if self.recent_send {
                return;
            }
            self.expired += 1;
            if self.expired == EXPIRED_MAX {
                self.backoff_left = BACKOFF_MIN * BACKOFF_FACTOR.pow(self.backoffs);
                self.backoffs = (self.backoffs + 1).min(BACKOFFS_MAX);
                (self.expired, self.in_time) = (0, 0);
            }
        } else {
            self.expired = 0;
            self.in_time += 1;
            if self.in_time == IN_TIME_RESET {
                (self.in_time, self.backoffs) = (0, 0);
            }
        }
    }

    /// Has it go out now; tells whether it waited.
    pub(crate) fn release(&mut self) -> bool {
        self.defers = 0;
        self.until.take().is_some()
    }

    /// Until when it waits; `None`: it does not, or not any more.
    pub(crate) fn deadline(&self, now: Instant) -> Option<Instant> {
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
        let mut ack = DelayedAck::default();
        assert!(!ack.may_defer(at(0), Duration::ZERO));
        assert_eq!(ack.deadline(at(0)), None);
        for now in [0, 7_000, 14_000] {
            assert!(ack.may_defer(at(now), delay));
            assert_eq!(ack.deadline(at(now)), Some(at(20_000)), "since it came first");
        }
        assert!(!ack.may_defer(at(15_000), delay));
        assert_eq!(ack.deadline(at(20_000)), None);
        ack.clear(at(15_000));
        assert!(ack.may_defer(at(21_000), delay));
        assert!(!ack.may_defer(at(41_000), delay));
    }

    #[test]
    fn a_peer_that_is_slow_does_not_wait_for_it() {
        let delay = Duration::from_micros(20);
        let mut now = Instant::from_nanos(1);
        let mut ack = DelayedAck::default();
        for _ in 0..100 {
            // Two answers before the time is over, and it goes with the third.
            assert_eq!(
                [(); 3].map(|()| {
                    let deferred = ack.may_defer(now, delay);
                    now = now + Duration::from_micros(15);
                    deferred
                }),
                [true, true, false]
            );
            ack.clear(now);
        }
    }

    #[test]
    fn a_peer_that_waits_for_it_behind_two_answers_loses_little() {
        let delay = Duration::from_micros(20);
        let (mut now, mut lost) = (Instant::from_nanos(1), 0);
        let mut ack = DelayedAck::default();
        for _ in 0..1000 {
            let deferred = [(); 2].map(|()| ack.may_defer(now, delay));
            now = now + Duration::from_micros(1);
            if deferred[1] {
                lost += 1;
                now = now + delay;
            }
            ack.clear(now);
        }
        assert_eq!(lost, 4, "2 in 512 of two answers, then in 2048");
    }

    #[test]
    fn a_peer_that_waits_for_it_loses_little() {
        let delay = Duration::from_micros(20);
        let (mut now, mut lost) = (Instant::from_nanos(1), 0);
        let mut ack = DelayedAck::default();
        for _ in 0..100_000 {
            if ack.may_defer(now, delay) {
                lost += 1;
                now = now + delay;
            }
            ack.clear(now);
            now = now + Duration::from_micros(5);
        }
        assert_eq!(lost, 10, "2 in 1024, then 4096, 16384, 65536, 262144");
        // The peer changes its ways, and after a while once does not count any more.
        for _ in 0..2_000_000 {
            ack.may_defer(now, delay);
            ack.clear(now);
        }
        for _ in 0..2 {
            assert!(ack.may_defer(now, delay));
            ack.clear(now + delay);
        }
        let off = (0..10_000).take_while(|_| !ack.may_defer(now, delay)).count();
        assert_eq!(off, 1024);
    }
}
