//! Delayed acknowledgements: an acknowledgement waits for later packets to the same peer.
//!
//! Next to a single one-packet request (often an application's answer), an acknowledgement turns a
//! burst of one packet into one of two, which costs each side half a microsecond of round trip;
//! sent afterwards, it costs a system call on both sides. So the acknowledgement is deferred a few
//! times, and is sent with a later packet or when its delay expires [PERF-6] [RSP-25]. A peer that
//! sends nothing until it has the acknowledgement would lose the whole delay every time. If the
//! delay expires twice in a row, and no packet was sent in its second half, acknowledgements are
//! not deferred for the next thousand packets, and for longer each time that happens again.

use std::time::Duration;

use bowline_base::Instant;

/// Consecutive packets sent without the pending acknowledgement.
const DEFERS_MAX: u8 = 3;
/// Consecutive expired delays that start a backoff; a single one can be an accident.
const EXPIRED_MAX: u32 = 2;
/// Packets of the first backoff, during which nothing is deferred.
const BACKOFF_MIN: u32 = 1024;
/// Growth of the backoff each time it is repeated, and how often it may grow.
const BACKOFF_FACTOR: u32 = 4;
const BACKOFFS_MAX: u32 = 5;
/// Acknowledgements sent in time after which the backoff starts from its minimum again.
const IN_TIME_RESET: u32 = 256;

/// State of the delayed acknowledgement of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct DelayedAck {
    until: Option<Instant>,
    defers: u8,
    /// The last packet was sent in the second half of the delay.
    recent_send: bool,
    /// Packets left in the present backoff.
    backoff_left: u32,
    /// Consecutive expired delays, backoffs so far, and acknowledgements sent in time since the
    /// last backoff.
    expired: u32,
    backoffs: u32,
    in_time: u32,
}

impl DelayedAck {
    /// Tells whether the acknowledgement may be deferred past a request packet that is about to be
    /// sent alone. The first deferral starts the delay.
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

    /// Ends the delay: the acknowledgement was sent or dropped.
    pub(crate) fn clear(&mut self, now: Instant) {
        let Some(until) = self.until.take() else { return };
        self.defers = 0;
        if until <= now {
            // The traffic continued, so the peer did not wait for the acknowledgement; it is only
            // slow.
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

    /// Ends the delay early; tells whether an acknowledgement was delayed.
    pub(crate) fn release(&mut self) -> bool {
        self.defers = 0;
        self.until.take().is_some()
    }

    /// Returns when the delay ends; `None` if no acknowledgement is delayed any more.
    pub(crate) fn deadline(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acknowledgement_is_deferred_a_few_times_and_briefly() {
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
    fn a_slow_peer_causes_no_backoff() {
        let delay = Duration::from_micros(20);
        let mut now = Instant::from_nanos(1);
        let mut ack = DelayedAck::default();
        for _ in 0..100 {
            // Two packets are sent before the delay ends, and the acknowledgement with the third.
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
    fn a_peer_that_waits_after_two_packets_loses_little() {
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
    fn a_peer_that_waits_for_acknowledgements_loses_little() {
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
        // The peer changes its behaviour, after which a single expired delay does not count.
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
