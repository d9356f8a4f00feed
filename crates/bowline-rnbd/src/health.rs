//! What is known of the storage behind a disk: which requests it has failed, and how long it takes.

use std::time::Duration;

use bowline_base::Instant;

use crate::{Errno, IoOp};

/// Requests that storage has failed, and whether it works again.
///
/// Those that it does not support do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failures {
    /// Requests that failed.
    pub count: u64,
    /// The last of them.
    pub last: Option<LastFailure>,
}

/// The last request that storage has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LastFailure {
    /// What was asked for.
    pub op: IoOp,
    /// Why it failed: at a client, as far as the protocol tells [NB-26].
    pub errno: Errno,
    /// When it failed.
    pub at: Instant,
    /// A request of the same kind has succeeded since.
    pub succeeded: bool,
}

impl Failures {
    /// Time without a failure after which storage works again. A full file system takes writes to
    /// what it has already, among others that fail.
    pub const CALM: Duration = Duration::from_secs(5);

    /// Counts a request that failed.
    pub fn failed(&mut self, now: Instant, op: IoOp, errno: Errno) {
        if errno != Errno::EOPNOTSUPP {
            self.count += 1;
            self.last = Some(LastFailure { op, errno, at: now, succeeded: false });
        }
    }

    /// Notes a request that succeeded.
    pub const fn succeeded(&mut self, op: IoOp) {
        if let Some(last) = &mut self.last
            && reads(last.op) == reads(op)
        {
            last.succeeded = true;
        }
    }

    /// Tells whether storage fails requests, as far as is known: one has failed, and none of its
    /// kind has succeeded, or another one has failed within [`CALM`](Self::CALM).
    pub fn is_failing(&self, now: Instant) -> bool {
        self.last.is_some_and(|last| !last.succeeded || now.saturating_since(last.at) < Self::CALM)
    }
}

const fn reads(op: IoOp) -> bool {
    matches!(op, IoOp::Read)
}

/// How many requests took how long: a count for each quarter of a power of two of microseconds, so
/// that a percentile is at most a quarter above the true value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies {
    counts: Box<[u64]>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: vec![0; Self::COUNTS].into() }
    }
}

impl Latencies {
    /// Nanoseconds of the smallest step, as a power of two.
    const STEP: u32 = 10;
    /// Steps up to here have a count each, and each later power of two has as many.
    const PARTS: u64 = 4;
    const COUNTS: usize = 124;

    /// Counts a request that took this long.
    pub fn record(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let at = Self::index(nanos).min(Self::COUNTS - 1);
        self.counts[at] += 1;
    }

    /// Returns the counts that are not 0, each with the longest time that it stands for.
    pub fn counted(&self) -> impl Iterator<Item = (Duration, u64)> {
        let all = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        all.map(|(at, count)| (Self::longest(at), *count))
    }

    fn index(nanos: u64) -> usize {
        let steps = nanos >> Self::STEP;
        if steps < Self::PARTS {
            return steps as usize;
        }
        let power = steps.ilog2();
        let part = steps >> (power - 2) & (Self::PARTS - 1);
        ((u64::from(power) - 1) * Self::PARTS + part) as usize
    }

    fn longest(at: usize) -> Duration {
        let next = at as u64 + 1;
        let steps = if next <= Self::PARTS {
            next
        } else {
            let (power, part) = (next / Self::PARTS + 1, next % Self::PARTS);
            (Self::PARTS + part) << (power - 2)
        };
        Duration::from_nanos(steps << Self::STEP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn storage_fails_until_a_request_of_that_kind_succeeds_and_none_fails_for_a_while() {
        let mut failures = Failures::default();
        assert!(!failures.is_failing(at(100)));
        failures.failed(at(100), IoOp::Write, Errno::EOPNOTSUPP);
        assert_eq!(failures, Failures::default());
        failures.failed(at(100), IoOp::Write, Errno::ENOSPC);
        failures.succeeded(IoOp::Read);
        assert!(failures.is_failing(at(200)), "a read tells nothing of writes");
        failures.succeeded(IoOp::Flush);
        assert!(failures.is_failing(at(104)) && !failures.is_failing(at(105)));
        failures.failed(at(201), IoOp::Read, Errno::EIO);
        assert!(failures.is_failing(at(1000)));
        assert_eq!((failures.count, failures.last.unwrap().errno), (2, Errno::EIO));
    }

    #[test]
    fn every_time_is_in_the_count_that_is_next_above_it() {
        let powers = (0..50).map(|power| 1_u64 << power);
        for nanos in powers.flat_map(|n| [n - 1, n, n + n / 3, n + n / 2, n * 2 - 1]) {
            let mut latencies = Latencies::default();
            latencies.record(Duration::from_nanos(nanos));
            let (longest, count) = latencies.counted().next().unwrap();
            assert_eq!(count, 1);
            let longest = longest.as_nanos() as u64;
            let most = (nanos + nanos / 4).max(nanos + (1 << Latencies::STEP));
            // The last count stands for all longer times.
            let is_last = Latencies::index(nanos) >= Latencies::COUNTS - 1;
            assert!(is_last || longest > nanos && longest <= most, "{nanos}: {longest}");
        }
        let next = |at| Latencies::longest(at).as_nanos() as u64;
        assert!((0..Latencies::COUNTS).all(|at| Latencies::index(next(at)) == at + 1));
    }
}
