//! When the next burst may leave [CC-4]: a bucket fills with time, at a rate above the window's,
//! so that the window, not the pacer, decides.
//!
//! The bucket holds what the rate yields in a quarter of a millisecond. At the rates of loopback
//! and fast networks that is more than a window, so that no timer is ever needed; at 1 Gb/s it is
//! half of what a small switch can queue. Where timers come late, it holds in addition what passes
//! meanwhile: otherwise a busy processor would lower the rate.

use std::time::Duration;

use bowline_base::Instant;

use super::delay;

/// Time in which an empty bucket becomes full.
const DEPTH: Duration = Duration::from_micros(250);

/// The same, at least, where a queue has overflowed.
const DEPTH_MIN: Duration = Duration::from_micros(20);

/// Lateness of timers counts up to this.
const LATE_MAX: Duration = Duration::from_millis(10);
/// Weight of a timer that is less late than those before.
const LATE_FADES: u32 = 16;

/// What may be sent in a round trip, of a window in packets, where a controller's publication says
/// nothing of pacing: as much as the delay controller sends.
pub(super) fn paced(packets: f64, start: bool) -> f64 {
    packets
        * match start {
            true => delay::START_PACING_GAIN,
            false if packets < delay::EXACTLY_PACED => 1.0,
            false => delay::PACING_GAIN,
        }
}

/// State of the bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pacer {
    /// Nanoseconds per byte; 0: nothing is known of the rate, and all may leave.
    per_byte: f64,
    /// The time that what was sent until now is worth: the bucket is as full as this lies behind.
    worth: Instant,
    /// The bucket was empty: nothing leaves before it is half full.
    empty: bool,
    depth: Duration,
    /// How late timers come, and what of that counts at most.
    late: Duration,
    late_max: Duration,
}

impl Pacer {
    pub(super) const fn new() -> Self {
        let (worth, late) = (Instant::from_nanos(0), Duration::ZERO);
        Self { per_byte: 0.0, worth, empty: false, depth: DEPTH, late, late_max: LATE_MAX }
    }

    /// Sets the rate: so many bytes in so much time; and, where a queue has overflowed, that bursts
    /// are short.
    pub(super) fn set_rate(&mut self, bytes: f64, time: Duration, short: bool) {
        (self.depth, self.late_max) = match short {
            true => ((time / 8).clamp(DEPTH_MIN, DEPTH), (time / 4).min(LATE_MAX)),
            false => (DEPTH, LATE_MAX),
        };
        self.per_byte = time.as_nanos() as f64 / bytes.max(1.0);
    }

    /// Notes that those who wait get their turn so much later than they could have had it.
    pub(super) fn turn_is_late(&mut self, by: Duration) {
        let by = by.min(LATE_MAX);
        self.late = match self.late.checked_sub(by) {
            Some(less) => self.late - less / LATE_FADES,
            None => (self.late + by) / 2,
        };
    }

    /// Bytes per second; `None`: not limited.
    pub(super) fn rate(&self) -> Option<u64> {
        (self.per_byte > 0.0).then(|| (1e9 / self.per_byte) as u64)
    }

    /// Returns how many bytes may leave now; the last packet of them may be longer.
    #[inline]
    pub(super) fn room(&self, now: Instant) -> u64 {
        if self.per_byte == 0.0 {
            return u64::MAX;
        }
        let full = now.saturating_since(self.worth).min(self.capacity());
        let bytes = (full.as_nanos() as f64 / self.per_byte) as u64;
        if full >= self.depth / 2 {
            // However slow the rate is.
            bytes.max(1)
        } else if self.empty {
            0
        } else {
            bytes
        }
    }

    /// Notes that packets of as many bytes each leave now.
    #[inline]
    pub(super) fn sent(&mut self, now: Instant, packets: u32, bytes: u64) {
        if self.per_byte == 0.0 {
            return;
        }
        let depth = self.capacity().as_nanos() as u64;
        let floor = Instant::from_nanos(now.as_nanos().saturating_sub(depth));
        // Rounded for each, so that those made together count as those made one by one.
        let time = Duration::from_nanos((bytes as f64 * self.per_byte) as u64) * packets;
        self.worth = self.worth.max(floor) + time;
        self.empty = self.worth >= now;
    }

    /// The time whose bytes the bucket holds.
    fn capacity(&self) -> Duration {
        self.depth + self.late.min(self.late_max)
    }

    /// The rate before was a guess, or much too low: what was sent at it is forgotten.
    pub(super) fn forget_debt(&mut self, now: Instant) {
        self.worth = self.worth.min(now);
    }

    /// Returns when more may leave, if nothing may now.
    pub(super) fn resumes_at(&self, now: Instant) -> Option<Instant> {
        (self.room(now) == 0).then(|| self.worth + self.depth / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(us: u64) -> Instant {
        Instant::from_nanos(1_000_000_000 + us * 1000)
    }

    // tests [CC-4]
    #[test]
    fn a_bucket_holds_a_quarter_of_a_millisecond_and_opens_again_when_it_is_half_full() {
        let mut pacer = Pacer::new();
        assert_eq!(pacer.room(at(0)), u64::MAX);
        pacer.sent(at(0), 1, 1 << 20);
        // A byte each microsecond.
        pacer.set_rate(1000.0, Duration::from_millis(1), false);
        assert_eq!(pacer.room(at(0)), 250);
        pacer.sent(at(0), 1, 200);
        assert_eq!(pacer.room(at(0)), 50);
        pacer.sent(at(0), 1, 100);
        assert_eq!((pacer.room(at(0)), pacer.resumes_at(at(0))), (0, Some(at(50 + 125))));
        assert_eq!(pacer.room(at(174)), 0);
        assert_eq!(pacer.room(at(175)), 125);
    }

    // tests [CC-4]
    #[test]
    fn a_bucket_makes_up_for_timers_that_come_late() {
        let mut pacer = Pacer::new();
        pacer.set_rate(1000.0, Duration::from_millis(1), false);
        pacer.sent(at(0), 1, 250);
        for turn in 1..40 {
            pacer.turn_is_late(Duration::from_micros(1900));
            let room = pacer.room(at(2000 * turn));
            pacer.sent(at(2000 * turn), 1, room);
            assert!(turn < 8 || room == 2000, "all that has passed since the last turn: {room}");
        }
        // A queue that has overflowed gets no such burst: three eighths of a round trip at most.
        pacer.set_rate(1000.0, Duration::from_millis(1), true);
        assert_eq!(pacer.room(at(500_000)), 375);
        pacer.set_rate(1000.0, Duration::from_millis(1), false);
        for _ in 0..200 {
            pacer.turn_is_late(Duration::ZERO);
        }
        assert!(pacer.room(at(1_000_000)) < 260);
    }
}
