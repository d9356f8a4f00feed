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
use crate::congestion::{DeviationWeight, RoundTrip};

/// Most probes of a silent peer without an answer, before the timer expires.
const PROBES_MAX: u32 = 2;
/// The same on a path that has lost packets lately, where probes come sooner, and while no round
/// trip is known, since the timer is long then.
const PROBES_OFTEN: u32 = 4;
/// Shortest time before a silent peer is probed, in addition to two round trips.
const PROBE_MIN: Duration = Duration::from_millis(1);
/// The same while fewer than `FEW_UNANSWERED` packets are unacknowledged. A thread that waits for
/// one answer sleeps, and a timer that expires before the next tick of the system costs each sleep
/// some microseconds.
const PROBE_MIN_FEW: Duration = Duration::from_millis(5);
/// The same on a path that has lost packets lately, where a probe is often needed.
const LOSSY_MIN: Duration = Duration::from_micros(250);
/// Fewer unacknowledged packets than this are few.
pub(super) const FEW_UNANSWERED: u32 = 16;
/// The timer while no round trip was measured. A probe comes earlier [CC-13].
const FIRST: Duration = Duration::from_millis(200);
/// Most times that it is doubled beyond that while only copies are acknowledged.
const LONGER_MAX: u32 = 3;
/// Most times that the timer is doubled.
const DOUBLINGS_MAX: u32 = 12;

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

/// What an acknowledgement is the answer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// Packets that were sent once, at least one.
    SentOnce,
    /// Only packets that were sent again because of silence. As long as this is so, the timer waits
    /// longer than that silence lasted, since the answer may be that to the first sending: on a
    /// path that is slower than it was everything would be sent again for ever, and no round trip
    /// measured [CC-13].
    AfterSilence,
    /// Packets that were sent again because the peer missed them.
    Repaired,
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
#[derive(Debug)]
pub(super) struct RetransmissionTimer {
    bounds: Bounds,
    /// When the timer expires.
    expires_at: Option<Instant>,
    /// Consecutive expiries without progress.
    expiries: u32,
    /// Times that the timer and probes may be doubled, since only what was sent again is
    /// acknowledged.
    doublings: u32,
    /// How long the peer was silent before the last such acknowledgement.
    silence: Duration,
    /// When a silent peer is probed.
    probe_at: Option<Instant>,
    /// Probes without progress.
    probes: u32,
    /// Since when the peer makes no progress.
    waiting_since: Instant,
    /// Round trip of this queue pair. While it is a guess it may be the time of a link that was cut
    /// or held packets back.
    round_trip: RoundTrip,
    /// The path has lost packets lately.
    lossy: bool,
    /// The packet that is being measured was sent again meanwhile: its time is a guess.
    guesses: bool,
    /// PSN of the packet whose round trip is being measured, and when it was sent.
    sample: Option<(Psn, Instant)>,
    /// The first PSN that had not been sent at a time: what answers this packet or a later one took
    /// no longer than since then.
    unsent: (Psn, Instant),
}

impl RetransmissionTimer {
    /// A timer that does not run.
    pub(super) fn new() -> Self {
        Self {
            bounds: Bounds::default(),
            expires_at: None,
            expiries: 0,
            doublings: 0,
            silence: Duration::ZERO,
            probe_at: None,
            probes: 0,
            waiting_since: Instant::default(),
            round_trip: RoundTrip::new(DeviationWeight::Timer),
            lossy: false,
            guesses: false,
            sample: None,
            unsent: (Psn::ZERO, Instant::default()),
        }
    }

    /// Takes the queue pair's attributes, at first or while nothing is in flight. The round trip is
    /// measured anew.
    pub(super) fn configure(&mut self, settings: &Settings) {
        self.bounds = Bounds {
            min: settings.retransmit_min,
            max: settings.timeout().map(|timeout| timeout.max(settings.retransmit_min)),
            give_up: settings.give_up_time(),
        };
        self.round_trip = RoundTrip::new(DeviationWeight::Timer);
        self.guesses = false;
    }

    /// Notes whether the path has lost packets lately.
    #[inline]
    pub(super) const fn set_lossy(&mut self, lossy: bool) {
        self.lossy = lossy;
    }

    /// Takes the round trip of the path, if it was measured, in the place of a longer guess. It is
    /// a guess as well until this queue pair has measured its own: a link may have held back the
    /// packets that tell it [CC-2].
    pub(super) fn replace_guess(&mut self, now: Instant, measured: Option<Duration>) {
        let Some(measured) = measured else { return };
        if std::mem::take(&mut self.guesses) {
            self.sample = None;
            self.round_trip.guess(now, measured);
        } else {
            self.round_trip.bound_guess(now, measured);
        }
    }

    /// Takes an answer to the packet `psn` or a later one; `end` is the first PSN that is not sent.
    /// Returns the longest time that the answer can have taken, which is that since these packets
    /// were first sent. It is known if they were sent after the last such answer, or after nothing
    /// had been in flight.
    pub(super) fn answer_took(&mut self, now: Instant, psn: Psn, end: Psn) -> Option<Duration> {
        let (first, at) = self.unsent;
        if psn.is_before(first) {
            return None;
        }
        self.unsent = (end, now);
        Some(now.saturating_since(at))
    }

    /// Takes the longest that the round trip can be, with `unanswered` packets in flight. A guess,
    /// and a silence, that is longer gives way to it: what was lost next would wait for as long as
    /// a link was cut once [CC-13].
    pub(super) fn bound_guess(&mut self, now: Instant, longest: Duration, unanswered: u32) {
        if self.round_trip.bound_guess(now, longest) {
            self.silence = self.silence.min(longest);
            if self.expires_at.is_some() {
                self.arm(now, unanswered);
            }
        }
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

    /// Round trip of the queue pair.
    pub(super) const fn round_trip(&self) -> &RoundTrip {
        &self.round_trip
    }

    /// Starts the timer anew, with `unanswered` packets in flight [REQ-22].
    pub(super) fn arm(&mut self, now: Instant, unanswered: u32) {
        let Some(max) = self.bounds.max else { return };
        let first = match self.round_trip.smoothed() {
            Some(smoothed) => smoothed * 4 + self.round_trip.deviation() * 4 + self.bounds.min,
            None => FIRST,
        };
        let doubled = self.lengthened(first, 2).checked_mul(1 << self.expiries.min(DOUBLINGS_MAX));
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

    /// Notes that a packet is sent, `first`, while nothing is in flight.
    pub(super) const fn begin(&mut self, now: Instant, first: Psn) {
        self.waiting_since = now;
        self.unsent = (first, now);
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
    pub(super) fn progress(&mut self, now: Instant, una: Psn, unanswered: u32, what: Answered) {
        match what {
            Answered::SentOnce => self.doublings = 0,
            Answered::AfterSilence => {
                self.doublings = (self.doublings + 1).min(LONGER_MAX);
                self.silence = now.saturating_since(self.waiting_since);
            }
            Answered::Repaired => {}
        }
        self.expiries = 0;
        self.probes = 0;
        self.waiting_since = now;
        if let Some((psn, at)) = self.sample
            && psn.is_before(una)
        {
            self.sample = None;
            let sample = now.saturating_since(at);
            if std::mem::take(&mut self.guesses) {
                self.round_trip.guess(now, sample);
            } else {
                self.round_trip.sample(now, sample);
            }
        }
        self.expires_at = None;
        self.probe_at = None;
        if unanswered > 0 {
            self.arm(now, unanswered);
        }
    }

    /// Notes that the peer misses packets: they were lost, and the timer was not too short.
    pub(super) const fn losses_are_real(&mut self) {
        self.doublings = 0;
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
        let often = self.lossy || self.round_trip.smoothed().is_none();
        let most = if often { PROBES_OFTEN } else { PROBES_MAX };
        if self.expiries > 0 || self.probes >= most {
            return;
        }
        let after = self.lengthened(self.probe_after(unanswered), 1);
        let at = now + after * (1 << self.probes.min(DOUBLINGS_MAX));
        self.probe_at = (at < expires_at).then_some(at);
    }

    /// Returns the time to wait instead of `time`: while only what was sent again is acknowledged,
    /// `times` the last silence and an eighth, if that is longer, as far as the doublings go.
    fn lengthened(&self, time: Duration, times: u32) -> Duration {
        (self.silence * 9 / 8 * times).clamp(time, time * (1 << self.doublings))
    }

    /// Returns the time after which a silent peer is probed: late enough for the answer of a peer
    /// whose thread slept.
    fn probe_after(&self, unanswered: u32) -> Duration {
        let least = match unanswered {
            _ if self.lossy => LOSSY_MIN,
            0..FEW_UNANSWERED => PROBE_MIN_FEW,
            _ => PROBE_MIN,
        };
        let round_trip = self.round_trip.smoothed().unwrap_or(PROBE_MIN);
        round_trip * 2 + self.round_trip.deviation() * 4 + least
    }

    /// Measures the round trip of the packet `psn`, sent now, unless one is being measured.
    #[inline]
    pub(super) const fn measure(&mut self, psn: Psn, now: Instant) {
        if self.sample.is_none() {
            self.sample = Some((psn, now));
        }
    }

    /// Gives up the measurement under way: the round trip of a retransmitted packet is not known.
    pub(super) fn cancel_measurement(&mut self) {
        // While nothing is known, the time since a packet was first sent is the best guess.
        if self.round_trip.smoothed().is_some() {
            self.sample = None;
        } else {
            self.guesses = self.sample.is_some();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GiveUp;
    use crate::congestion::Congestion;

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
            congestion: Congestion::Fixed(64),
            give_up: GiveUp::After(give_up),
            retransmit_min: 10 * MS,
        };
        let mut timer = RetransmissionTimer::new();
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
            (21, Due::Probe),
            (45, Due::Probe),
            (200, Due::Retransmission),
            (600, Due::Retransmission),
            (1000, Due::GivingUp),
        ];
        assert_eq!(history(timer(20, 1000 * MS), FEW_UNANSWERED), expected);
        let few = [(7, Due::Probe), (20, Due::GivingUp)];
        assert_eq!(history(timer(20, 20 * MS), FEW_UNANSWERED - 1), few);
        // The negotiated timeout is the ceiling.
        let capped = [3, 9, 21, 45].map(|ms| (ms, Due::Probe));
        let history = history(timer(14, 100 * MS), FEW_UNANSWERED);
        assert_eq!((&history[..4], history[4]), (&capped[..], (67, Due::Retransmission)));
    }

    // tests [REQ-12]
    #[test]
    fn timeout_0_means_that_nothing_is_ever_due() {
        assert!(history(timer(0, 100 * MS), 1).is_empty());
    }

    /// A timer of a path with a round trip of 10 ms: probes after 25 ms, expires after 50.
    fn measured() -> RetransmissionTimer {
        let mut timer = timer(20, 10_000 * MS);
        timer.measure(Psn::new(0), at(0));
        timer.progress(at(10), Psn::new(1), 0, Answered::SentOnce);
        timer
    }

    // tests [CC-13]
    #[test]
    fn while_only_copies_are_acknowledged_the_timer_becomes_longer() {
        let mut timer = measured();
        let mut now = 1000;
        // A silence of 500 ms ends with the acknowledgement of a copy, again and again.
        for probe in [50, 100, 200, 200] {
            timer.wait_from(at(now));
            now += 500;
            timer.progress(at(now), Psn::new(1), 1, Answered::AfterSilence);
            assert_eq!(timer.deadline(), Some(at(now + probe)));
        }
        timer.progress(at(now), Psn::new(1), 1, Answered::Repaired);
        assert_eq!(timer.deadline(), Some(at(now + 200)));
        timer.losses_are_real();
        timer.progress(at(now), Psn::new(1), 1, Answered::Repaired);
        assert_eq!(timer.deadline(), Some(at(now + 25)));
    }

    // tests [CC-13]
    #[test]
    fn losses_make_the_timer_no_longer_than_the_silence_was() {
        let mut timer = measured();
        // Packets are lost in a row: each is sent again after 25 ms, and its copy takes 7.
        for now in (1000..1500).step_by(100) {
            timer.wait_from(at(now));
            timer.progress(at(now + 32), Psn::new(2), 1, Answered::AfterSilence);
            assert_eq!(timer.deadline(), Some(at(now + 32 + 36)));
            assert_eq!(timer.expired(at(now + 32 + 36), 1), Due::Probe);
            // The timer itself expires after twice that.
            assert_eq!(timer.deadline(), Some(at(now + 32 + 72)));
        }
        timer.progress(at(2000), Psn::new(3), 1, Answered::SentOnce);
        assert_eq!(timer.deadline(), Some(at(2025)));
    }

    // tests [CC-13]
    #[test]
    fn a_route_longer_than_the_timer_is_measured_in_the_end() {
        let mut timer = measured();
        let mut copies = 0;
        // An answer takes 90 ms; the packet that is measured leaves 8 ms after the first one.
        for psn in 1..10 {
            let now = 1000 * psn;
            timer.wait_from(at(now));
            timer.sent(at(now), 1);
            timer.measure(Psn::new(psn), at(now + 8));
            let mut again = false;
            while let Some(due) = timer.deadline().filter(|due| *due < at(now + 98)) {
                again = true;
                timer.cancel_measurement();
                match timer.expired(due, 1) {
                    Due::Retransmission => timer.arm(due, 1),
                    due => assert_eq!(due, Due::Probe),
                }
            }
            copies += u32::from(again);
            let answered = if again { Answered::AfterSilence } else { Answered::SentOnce };
            timer.progress(at(now + 98), Psn::new(psn + 1), 0, answered);
        }
        assert_eq!(copies, 2, "and then the round trip is known");
    }

    /// A timer that only knows that an answer took no longer than 400 ms.
    fn guessing() -> RetransmissionTimer {
        let mut timer = timer(20, 10_000 * MS);
        timer.begin(at(0), Psn::new(0));
        timer.sent(at(0), 1);
        timer.measure(Psn::new(0), at(0));
        timer.cancel_measurement();
        timer.progress(at(400), Psn::new(1), 0, Answered::AfterSilence);
        assert_eq!(timer.round_trip().smoothed(), Some(400 * MS));
        timer
    }

    // tests [CC-13]
    #[test]
    fn a_guess_gives_way_to_the_time_that_an_answer_took() {
        let mut timer = guessing();
        timer.begin(at(1000), Psn::new(1));
        timer.sent(at(1000), 2);
        assert_eq!(timer.deadline(), Some(at(1000 + 805)));
        // An answer is no progress: the timer that runs is set again.
        timer.bound_guess(at(1010), 10 * MS, 2);
        assert!(timer.round_trip().is_guess());
        assert_eq!(timer.deadline(), Some(at(1010 + 25)));
        // One that took longer makes no guess longer.
        timer.bound_guess(at(1020), 11 * MS, 2);
        assert_eq!(timer.deadline(), Some(at(1010 + 25)));
        // What was measured is more than a bound.
        let mut timer = measured();
        timer.bound_guess(at(1010), MS, 0);
        assert_eq!(timer.round_trip().smoothed(), Some(10 * MS));
    }

    // tests [CC-2], [CC-13]
    #[test]
    fn the_round_trip_of_the_path_is_a_guess_until_the_queue_pair_has_measured_its_own() {
        let mut timer = guessing();
        timer.replace_guess(at(1000), Some(300 * MS));
        assert_eq!(timer.round_trip().smoothed(), Some(300 * MS));
        // Answers bound it, and a longer one of the path does not replace that.
        timer.bound_guess(at(1010), 10 * MS, 0);
        timer.replace_guess(at(1020), Some(290 * MS));
        assert_eq!(timer.round_trip().smoothed(), Some(10 * MS));
        timer.replace_guess(at(1030), Some(9 * MS));
        assert_eq!(timer.round_trip().smoothed(), Some(9 * MS));
        // The first measured one replaces it, shorter or longer.
        timer.begin(at(2000), Psn::new(1));
        timer.measure(Psn::new(1), at(2000));
        timer.replace_guess(at(2011), Some(9 * MS));
        timer.progress(at(2011), Psn::new(2), 0, Answered::SentOnce);
        assert_eq!(timer.round_trip().smoothed(), Some(11 * MS));
        timer.replace_guess(at(2020), Some(5 * MS));
        assert_eq!(timer.round_trip().smoothed(), Some(11 * MS));
    }

    // tests [CC-13]
    #[test]
    fn an_answer_took_no_longer_than_since_its_packet_was_first_sent() {
        let (mut timer, psn) = (timer(20, 1000 * MS), Psn::new);
        timer.begin(at(1000), psn(1));
        assert_eq!(timer.answer_took(at(1010), psn(1), psn(3)), Some(10 * MS));
        // A later answer to the same packets tells nothing.
        assert_eq!(timer.answer_took(at(1011), psn(2), psn(4)), None);
        // What was sent after the first answer.
        assert_eq!(timer.answer_took(at(1014), psn(3), psn(6)), Some(4 * MS));
        assert_eq!(timer.answer_took(at(1015), psn(5), psn(6)), None);
        timer.begin(at(2000), psn(6));
        assert_eq!(timer.answer_took(at(2001), psn(6), psn(7)), Some(MS));
    }

    #[test]
    fn progress_ends_the_doubling_and_the_timer_follows_the_round_trip() {
        let mut timer = timer(20, 1000 * MS);
        timer.sent(at(0), 2);
        for ms in [7, 21, 49, 105, 200, 600] {
            assert_eq!(timer.deadline(), Some(at(ms)));
            if timer.expired(at(ms), 2) == Due::Retransmission {
                timer.arm(at(ms), 2);
            }
        }
        timer.measure(Psn::new(5), at(640));
        timer.progress(at(650), Psn::new(6), 1, Answered::SentOnce);
        // Two round trips and 5 ms; four and 10 ms.
        assert_eq!(timer.deadline(), Some(at(650 + 25)));
        assert_eq!(timer.expired(at(675), 1), Due::Probe);
        assert_eq!(timer.deadline(), Some(at(650 + 50)));
        timer.progress(at(690), Psn::new(7), 0, Answered::SentOnce);
        assert_eq!(timer.deadline(), None);
        // A path that loses is asked sooner.
        timer.set_lossy(true);
        timer.arm(at(700), 1);
        assert_eq!(timer.deadline(), Some(at(720) + LOSSY_MIN));
        timer.progress(at(710), Psn::new(7), 0, Answered::SentOnce);
        assert_eq!(timer.deadline(), None);
    }
}
