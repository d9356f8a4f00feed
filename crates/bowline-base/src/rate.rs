//! A limit of what others can cause, such as lines of a log.

use crate::Instant;

const SECOND_NS: u64 = 1_000_000_000;

/// Admits so many a second, and counts the rest.
#[derive(Clone, Debug)]
pub struct RateLimit {
    per_second: u32,
    second: u64,
    admitted: u32,
    left_out: u64,
}

impl RateLimit {
    /// Makes one that admits this many in each second.
    pub const fn per_second(per_second: u32) -> Self {
        Self { per_second, second: 0, admitted: 0, left_out: 0 }
    }

    /// Tells whether one more is admitted at this time, and if so how many were not since the last
    /// that was.
    pub const fn admit(&mut self, now: Instant) -> Option<u64> {
        let second = now.as_nanos() / SECOND_NS;
        if second != self.second {
            (self.second, self.admitted) = (second, 0);
        }
        if self.admitted == self.per_second {
            self.left_out += 1;
            return None;
        }
        self.admitted += 1;
        let left_out = self.left_out;
        self.left_out = 0;
        Some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use core::time::Duration;

    use super::*;

    #[test]
    fn what_is_left_out_is_counted_and_told_with_the_next() {
        let mut limit = RateLimit::per_second(20);
        let first = Instant::from_nanos(5 * SECOND_NS);
        assert_eq!((0..30).filter(|_| limit.admit(first).is_some()).count(), 20);
        let next = first + Duration::from_secs(1);
        assert_eq!(limit.admit(next), Some(10));
        assert_eq!(limit.admit(next), Some(0));
    }
}
