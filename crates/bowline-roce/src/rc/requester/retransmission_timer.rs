//! When what is not acknowledged is sent again, and when the peer is given up [REQ-12], [REQ-22].
//!
//! ```text
//!   sent or       probe             probe               expired            expired .. given up
//!   progress        |                 |                    |                  |          |
//!   ----|-----------|-----------------|--------------------|------------------|----------|-->
//!       |-----------|-----------------|                    |------------------|
//!       2 round trips   twice as long                      |    doubled each time
//!       and 1 or 5 ms                                      |
//!       |--------------------------------------------------|
//!                4 round trips and the minimum
//! ```
//! A probe asks a silent peer for an acknowledgement before the timer expires [REQ-24]. What is
//! sent again then is up to the [recovery](super::recovery).

use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::roce::Psn;

use super::settings::Settings;

/// Most probes of a silent peer without an answer, before the timer expires.
const PROBES_MAX: u32 = 2;
/// Shortest time before a silent peer is probed, in addition to two round trips.
const PROBE_MIN: Duration = Duration::from_millis(1);
/// The same while fewer than `FEW_UNANSWERED` packets are unacknowledged. A thread that waits for
/// one answer sleeps, and a timer that expires before the next tick of the system costs each sleep
/// some microseconds.
const PROBE_MIN_FEW: Duration = Duration::from_millis(5);
/// Fewer unacknowledged packets than this are few.
pub(super) const FEW_UNANSWERED: u32 = 16;
/// Most times that the timer is doubled.
const DOUBLINGS_MAX: u32 = 20;

/// What is due when the time of [`deadline`](RetransmissionTimer::deadline) has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Due {
    /// Nothing yet.
    Nothing,
    /// The peer is probed. A probe does not count as a retry.
    Probe,
    /// The timer has expired: what was not acknowledged is sent again.
    Retransmission,
    /// There was no progress for so long that the peer is given up.
    GivingUp,
}

/// Bounds that the queue pair's attributes set.
#[derive(Clone, Copy, Debug, Default)]
struct Bounds {
    /// Part of the timer that does not depend on the round trip.
    min: Duration,
    /// Longest time of the timer; `None`: it does not run.
    max: Option<Duration>,
    /// Time without progress after which the peer is given up; `None`: never.
    give_up: Option<Duration>,
}

/// Retransmission timer of a queue pair, with the round-trip time that it follows.
#[derive(Debug, Default)]
pub(super) struct RetransmissionTimer {
    bounds: Bounds,
    /// When the timer expires.
    expires_at: Option<Instant>,
    /// Consecutive expiries without progress.
    expiries: u32,
    /// When a silent peer is probed.
    probe_at: Option<Instant>,
    /// Probes without progress.
    probes: u32,
    /// Since when the peer makes no progress.
    waiting_since: Instant,
    /// Smoothed round-trip time.
    srtt: Option<Duration>,
    /// PSN of the packet whose round trip is being measured, and when it was sent.
    sample: Option<(Psn, Instant)>,
}

impl RetransmissionTimer {
    /// Takes the queue pair's attributes, at first or while nothing is in flight. The round trip is
    /// measured anew.
    pub(super) fn configure(&mut self, settings: &Settings) {
        self.bounds = Bounds {
            min: settings.retransmit_min,
            max: settings.timeout().map(|timeout| timeout.max(settings.retransmit_min)),
            give_up: settings.give_up_time(),
        };
        self.srtt = None;
    }

    /// Returns when [`expired`](Self::expired) is to be called.
    #[inline]
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.probe_at.or(self.expires_at)
    }

    /// Number of consecutive expiries without progress.
    pub(super) const fn expiries(&self) -> u32 {
        self.expiries
    }

    /// Starts the timer anew, with `unanswered` packets in flight [REQ-22].
    pub(super) fn arm(&mut self, now: Instant, unanswered: u32) {
        let Some(max) = self.bounds.max else { return };
        let first = self.srtt.unwrap_or_default() * 4 + self.bounds.min;
        let doubled = first.checked_mul(1 << self.expiries.min(DOUBLINGS_MAX));
        let mut at = now + doubled.unwrap_or(max).min(max);
        if let Some(give_up) = self.bounds.give_up {
            at = at.min(self.waiting_since + give_up);
        }
        let at = at.max(now + Duration::from_nanos(1));
        self.expires_at = Some(at);
        self.plan_probe(now, at, unanswered);
    }

    /// Stops the timer, and the measurement of the round trip.
    pub(super) const fn stop(&mut self) {
        self.expires_at = None;
        self.probe_at = None;
        self.sample = None;
    }

    /// Notes that a packet was sent, so that `unanswered` packets are in flight.
    #[inline]
    pub(super) fn sent(&mut self, now: Instant, unanswered: u32) {
        if self.expires_at.is_none() {
            self.arm(now, unanswered);
        }
    }

    /// Notes that everything before `una` has been acknowledged, so that `unanswered` packets are
    /// in flight.
    pub(super) fn progress(&mut self, now: Instant, una: Psn, unanswered: u32) {
        self.expiries = 0;
        self.probes = 0;
        self.waiting_since = now;
        if let Some((psn, at)) = self.sample
            && psn.is_before(una)
        {
            self.sample = None;
            let sample = now.saturating_since(at);
            self.srtt = Some(self.srtt.map_or(sample, |old| (old * 7 + sample) / 8));
        }
        self.expires_at = None;
        self.probe_at = None;
        if unanswered > 0 {
            self.arm(now, unanswered);
        }
    }

    /// Lets the time without progress begin now: the peer had nothing to answer, or could not.
    #[inline]
    pub(super) const fn wait_from(&mut self, now: Instant) {
        self.waiting_since = now;
    }

    /// Tells what is due now, with `unanswered` packets in flight.
    pub(super) fn expired(&mut self, now: Instant, unanswered: u32) -> Due {
        let Some(at) = self.expires_at else { return Due::Nothing };
        if at > now {
            if self.probe_at.is_none_or(|at| at > now) {
                return Due::Nothing;
            }
            self.probes += 1;
            self.plan_probe(now, at, unanswered);
            return Due::Probe;
        }
        let waited = now.saturating_since(self.waiting_since);
        if self.bounds.give_up.is_some_and(|give_up| waited >= give_up) {
            return Due::GivingUp;
        }
        self.expiries += 1;
        self.expires_at = None;
        Due::Retransmission
    }

    /// Schedules the next probe of a silent peer, if the timer does not expire earlier.
    fn plan_probe(&mut self, now: Instant, expires_at: Instant, unanswered: u32) {
        self.probe_at = None;
        if self.expiries > 0 || self.probes >= PROBES_MAX {
            return;
        }
        let at = now + self.probe_after(unanswered) * (1 << self.probes);
        self.probe_at = (at < expires_at).then_some(at);
    }

    /// Returns the time after which a silent peer is probed: late enough for the answer of a peer
    /// whose thread slept.
    fn probe_after(&self, unanswered: u32) -> Duration {
        let least = if unanswered < FEW_UNANSWERED { PROBE_MIN_FEW } else { PROBE_MIN };
        self.srtt.unwrap_or(PROBE_MIN) * 2 + least
    }

    /// Measures the round trip of the packet `psn`, sent now, unless one is being measured.
    #[inline]
    pub(super) const fn measure(&mut self, psn: Psn, now: Instant) {
        if self.sample.is_none() {
            self.sample = Some((psn, now));
        }
    }

    /// Gives up the measurement under way: the round trip of a retransmitted packet is not known.
    pub(super) const fn cancel_measurement(&mut self) {
        self.sample = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GiveUp;

    const MS: Duration = Duration::from_millis(1);

    fn at(ms: u32) -> Instant {
        Instant::from_nanos(0) + MS * ms
    }

    fn timer(timeout: u8, give_up: Duration) -> RetransmissionTimer {
        let settings = Settings {
            mtu: 1024,
            max_rd_atomic: 1,
            timeout,
            retry_cnt: 7,
            rnr_retry: 7,
            window: 64,
            give_up: GiveUp::After(give_up),
            retransmit_min: 10 * MS,
        };
        let mut timer = RetransmissionTimer::default();
        timer.configure(&settings);
        timer.wait_from(at(0));
        timer
    }

    /// Everything that is due, with the time in milliseconds, until the peer is given up.
    fn history(mut timer: RetransmissionTimer, unanswered: u32) -> Vec<(u128, Due)> {
        let mut history = Vec::new();
        timer.sent(at(0), unanswered);
        while let Some(now) = timer.deadline() {
            let due = timer.expired(now, unanswered);
            history.push((now.saturating_since(at(0)).as_millis(), due));
            match due {
                Due::GivingUp => break,
                Due::Retransmission => timer.arm(now, unanswered),
                Due::Nothing | Due::Probe => {}
            }
        }
        history
    }

    // tests [REQ-22], [REQ-24]
    #[test]
    fn a_silent_peer_is_probed_then_asked_again_in_doubled_times_then_given_up() {
        let expected = [
            (3, Due::Probe),
            (9, Due::Probe),
            (10, Due::Retransmission),
            (30, Due::Retransmission),
            (70, Due::Retransmission),
            (100, Due::GivingUp),
        ];
        assert_eq!(history(timer(14, 100 * MS), FEW_UNANSWERED), expected);
        let few = [(7, Due::Probe), (10, Due::Retransmission), (20, Due::GivingUp)];
        assert_eq!(history(timer(14, 20 * MS), FEW_UNANSWERED - 1), few);
    }

    // tests [REQ-12]
    #[test]
    fn timeout_0_means_that_nothing_is_ever_due() {
        assert!(history(timer(0, 100 * MS), 1).is_empty());
    }

    #[test]
    fn progress_ends_the_doubling_and_the_timer_follows_the_round_trip() {
        let mut timer = timer(20, 1000 * MS);
        timer.sent(at(0), 2);
        for ms in [7, 10, 30] {
            assert_eq!(timer.deadline(), Some(at(ms)));
            if timer.expired(at(ms), 2) == Due::Retransmission {
                timer.arm(at(ms), 2);
            }
        }
        timer.measure(Psn::new(5), at(40));
        timer.progress(at(50), Psn::new(6), 1);
        // Two round trips and 5 ms; four and 10 ms.
        assert_eq!(timer.deadline(), Some(at(50 + 25)));
        assert_eq!(timer.expired(at(75), 1), Due::Probe);
        assert_eq!(timer.deadline(), Some(at(50 + 50)));
        timer.progress(at(90), Psn::new(7), 0);
        assert_eq!(timer.deadline(), None);
    }
}
