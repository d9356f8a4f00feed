//! CUBIC (RFC 9438), for comparison: the window grows with the time since the last loss.
//!
//! ```text
//!   window   W_max ........................._____.......
//!                                    ___---'     | below: concave; beyond W_max: convex
//!            0.7 W_max   loss ---__--'           |
//!                             '------ K ---------'   seconds
//! ```
//! All amounts are packets, as the RFC's are segments; names in comments are the RFC's. What the
//! RFC leaves open: slow start is that of RFC 5681, without HyStart++. What differs: the sender is
//! paced, since here an acknowledgement is that of up to 80 packets, where TCP's is that of two.

use std::time::Duration;

use bowline_base::Instant;

use super::controller::{Acknowledged, Cause, Controller, Lost, Room, Route, TimedOut};
use super::pacer::paced;
use super::round_trip::RoundTrip;
use super::usage::Usage;

/// C, in packets per cubed second (section 5).
const C: f64 = 0.4;
/// beta_cubic: what congestion leaves of the window (section 4.6).
const BETA: f64 = 0.7;
/// alpha_cubic until the window is that of before: as much growth as makes a window that falls to
/// 0.7 as large on average as Reno's (section 4.3).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);
/// Most by which the window may grow in a round trip, as a factor (section 4.2).
const GROWTH_MAX: f64 = 1.5;
/// The first window (RFC 6928).
const WINDOW: f64 = 10.0;
/// Least window after a loss (section 4.6), and after a time-out (RFC 5681, section 3.1).
const AFTER_LOSS_MIN: f64 = 2.0;
const AFTER_TIMEOUT: f64 = 1.0;
/// Largest window, in bytes: that of the delay controller.
const BYTES_MAX: f64 = (256 << 20) as f64;

/// A stage of congestion avoidance.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Epoch {
    /// t_epoch; moved by times in which the sender had nothing to send.
    began: Instant,
    /// K, in seconds.
    k: f64,
    /// W_est: the window that Reno would have.
    reno: f64,
}

/// What a time-out changes, and a spurious one gives back (section 4.9).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Curve {
    /// cwnd.
    window: f64,
    /// ssthresh.
    threshold: f64,
    /// W_max.
    max: f64,
    /// cwnd_prior.
    prior: f64,
    /// None in slow start.
    epoch: Option<Epoch>,
}

/// The window of a path, in packets, and what it follows from.
#[derive(Debug)]
pub(crate) struct Cubic {
    curve: Curve,
    /// Bytes of a full packet.
    packet: f64,
    usage: Usage,
    /// The last acknowledgement.
    acknowledged_at: Instant,
    /// Congestion among what was sent before this belongs to the last reduction.
    reduced_at: Instant,
    round_trip: Duration,
    /// What was before a time-out that may turn out to be spurious.
    before_timeout: Option<Curve>,
}

impl Cubic {
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            curve: Curve {
                window: WINDOW,
                threshold: f64::INFINITY,
                max: 0.0,
                prior: 0.0,
                epoch: None,
            },
            packet: 1024.0,
            usage: Usage::new(now),
            acknowledged_at: now,
            reduced_at: Instant::from_nanos(0),
            round_trip: Duration::ZERO,
            before_timeout: None,
        }
    }

    fn most(&self) -> f64 {
        BYTES_MAX / self.packet
    }

    /// Grows by so many acknowledged packets.
    fn grow(&mut self, now: Instant, packets: f64) {
        let curve = &mut self.curve;
        if curve.window < curve.threshold {
            curve.window += packets;
        } else {
            let mut epoch = curve.epoch.unwrap_or_else(|| curve.begin(now));
            curve.window = epoch.grown(now, packets, curve, self.round_trip);
            curve.epoch = Some(epoch);
        }
        self.curve.window = self.curve.window.min(self.most());
    }

    /// Reduces the window for congestion, but not twice for what was sent at one time.
    fn reduce(&mut self, now: Instant) {
        self.reduced_at = now;
        let curve = &mut self.curve;
        curve.fall();
        curve.window = curve.threshold;
        curve.epoch = Some(curve.begin(now));
    }
}

impl Curve {
    /// Congestion: W_max with fast convergence (section 4.7), and ssthresh (section 4.6).
    fn fall(&mut self) {
        self.prior = self.window;
        let back = self.window >= self.max;
        self.max = if back { self.window } else { self.window * (1.0 + BETA) / 2.0 };
        self.threshold = (self.window * BETA).max(AFTER_LOSS_MIN);
    }

    /// Begins congestion avoidance. After slow start the window may be beyond W_max: K is 0 then
    /// (section 4.8).
    fn begin(&mut self, now: Instant) -> Epoch {
        self.max = self.max.max(self.window);
        let k = ((self.max - self.window) / C).cbrt();
        Epoch { began: now, k, reno: self.window }
    }
}

impl Epoch {
    /// W_cubic(t).
    fn cubic(&self, t: f64, max: f64) -> f64 {
        C * (t - self.k).powi(3) + max
    }

    /// The window after so many packets were acknowledged (sections 4.2 to 4.5).
    fn grown(&mut self, now: Instant, packets: f64, curve: &Curve, round_trip: Duration) -> f64 {
        let window = curve.window;
        let alpha = if self.reno < curve.prior { ALPHA } else { 1.0 };
        self.reno += alpha * packets / window;
        let t = now.saturating_since(self.began).as_secs_f64();
        if self.cubic(t, curve.max) < self.reno {
            return window.max(self.reno);
        }
        let target = self.cubic(t + round_trip.as_secs_f64(), curve.max);
        let target = target.clamp(window, GROWTH_MAX * window);
        window + (target - window) * packets / window
    }
}

impl Controller for Cubic {
    #[inline]
    fn window(&self) -> Option<u64> {
        Some((self.curve.window * self.packet) as u64)
    }

    fn pacing(&self) -> Option<f64> {
        let start = self.curve.window < self.curve.threshold;
        Some(paced(self.curve.window, start) * self.packet)
    }

    fn set_packet(&mut self, packet: u64) {
        self.packet = packet as f64;
    }

    #[inline]
    fn sent(&mut self, _amount: u64, room: Room) {
        self.usage.sent(room);
    }

    fn acknowledged(&mut self, acknowledged: &Acknowledged<'_>) -> Route {
        let Acknowledged { now, amount, sample, round_trip } = *acknowledged;
        self.round_trip = round_trip.smoothed().unwrap_or_default();
        let idle = now.saturating_since(self.acknowledged_at);
        self.acknowledged_at = now;
        if self.usage.is_limited() {
            self.grow(now, amount as f64 / self.packet);
        } else if let Some(epoch) = &mut self.curve.epoch {
            epoch.began = epoch.began + idle;
        }
        if let Some((_, sent_at)) = sample {
            self.usage.acknowledged(now, sent_at);
        }
        Route::Same
    }

    /// Every loss is congestion.
    fn lost(&mut self, lost: &Lost<'_>) -> Cause {
        if lost.sent_at >= self.reduced_at {
            self.before_timeout = None;
            self.reduce(lost.now);
        }
        Cause::Congestion
    }

    fn timed_out(&mut self, timed_out: &TimedOut<'_>) {
        let TimedOut { now, consecutive, round_trip } = *timed_out;
        if is_same_silence(now, self.reduced_at, round_trip) {
            return;
        }
        self.reduced_at = now;
        // What is lost once more leaves ssthresh (RFC 5681, section 3.1).
        if consecutive <= 1 {
            self.before_timeout = Some(self.curve);
            self.curve.fall();
        }
        // The curve begins anew where slow start ends (section 4.8).
        let threshold = self.curve.threshold;
        self.curve = Curve { window: AFTER_TIMEOUT, max: threshold, epoch: None, ..self.curve };
    }

    fn spurious(&mut self) {
        if let Some(before) = self.before_timeout.take() {
            self.curve = before;
        }
    }

    /// Once in a round trip, as a loss (section 4.6).
    fn marked(&mut self, now: Instant) {
        if now.saturating_since(self.reduced_at) >= self.round_trip {
            self.reduce(now);
        }
    }
}

/// Tells whether the silence of another queue pair was the same, which has just been counted.
fn is_same_silence(now: Instant, reduced_at: Instant, round_trip: &RoundTrip) -> bool {
    now.saturating_since(reduced_at) < round_trip.smoothed().unwrap_or_default() * 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::{DeviationWeight, Extent};

    const PACKET: u64 = 1000;
    const MS: Duration = Duration::from_millis(1);

    /// A path with a controller, on a route whose round trip is always the same.
    struct Path {
        control: Cubic,
        round_trip: RoundTrip,
        now: Instant,
        takes: Duration,
    }

    impl Path {
        fn new(takes: Duration) -> Self {
            let now = Instant::from_nanos(1_000_000_000);
            let mut control = Cubic::new(now);
            control.set_packet(PACKET);
            let mut round_trip = RoundTrip::new(DeviationWeight::Window);
            round_trip.sample(now, takes);
            Self { control, round_trip, now, takes }
        }

        /// A path that has lost a packet with a window of so many packets.
        fn after_loss(packets: f64, takes: Duration) -> Self {
            let mut path = Self::new(takes);
            path.control.curve.window = packets;
            assert_eq!(path.lose(path.now), Cause::Congestion);
            path
        }

        /// A round trip in which a whole window is acknowledged, in ten parts.
        fn round(&mut self, room: Room) {
            let part = self.control.window().expect("it is limited") / 10;
            self.control.sent(10 * part, room);
            let sent_at = self.now;
            self.now = self.now + self.takes;
            for _ in 0..10 {
                let sample = Some((self.takes, sent_at));
                let round_trip = &self.round_trip;
                let acknowledged = Acknowledged { now: self.now, amount: part, sample, round_trip };
                assert_eq!(self.control.acknowledged(&acknowledged), Route::Same);
            }
        }

        fn lose(&mut self, sent_at: Instant) -> Cause {
            self.control.lost(&Lost {
                now: self.now,
                sent_at,
                extent: Extent::Packet,
                in_flight: 0,
                round_trip: &self.round_trip,
            })
        }

        fn time_out(&mut self, consecutive: u32) {
            let (now, round_trip) = (self.now, &self.round_trip);
            self.control.timed_out(&TimedOut { now, consecutive, round_trip });
        }

        fn packets(&self) -> f64 {
            self.control.curve.window
        }
    }

    #[test]
    fn slow_start_doubles_ten_packets_and_a_loss_leaves_seven_tenths() {
        let mut path = Path::new(MS);
        assert_eq!(path.control.window(), Some(10 * PACKET));
        path.round(Room::Full);
        path.round(Room::Full);
        assert_eq!(path.control.window(), Some(40 * PACKET));
        let before = path.now;
        path.now = path.now + MS;
        assert_eq!(path.lose(before), Cause::Congestion);
        assert_eq!(path.control.window(), Some(28 * PACKET));
        // Others of the same time do not count again, later ones do.
        assert_eq!(path.lose(before), Cause::Congestion);
        assert_eq!(path.control.window(), Some(28 * PACKET));
        assert_eq!(path.lose(path.now), Cause::Congestion);
        assert!(path.packets() < 20.0);
    }

    #[test]
    fn after_a_loss_the_window_is_that_of_before_after_k_seconds() {
        let takes = MS * 100;
        let mut path = Path::after_loss(1000.0, takes);
        assert!((path.packets() - 700.0).abs() < 1e-9);
        // The cube root of 300 / 0.4 is 9.09 seconds.
        let mut rounds = 0;
        let mut growth = Vec::new();
        while path.packets() < 999.0 {
            let before = path.packets();
            path.round(Room::Full);
            growth.push(path.packets() - before);
            rounds += 1;
        }
        assert!((75..=95).contains(&rounds), "{rounds}");
        assert!(growth[1] > 5.0 * growth[rounds - 1], "concave");
        for _ in 0..60 {
            path.round(Room::Full);
        }
        // 0.4 * 6 ^ 3 beyond, but for where it was noticed.
        assert!((1030.0..1100.0).contains(&path.packets()), "convex: {}", path.packets());
    }

    #[test]
    fn on_a_short_route_the_window_grows_as_reno_would() {
        let mut path = Path::after_loss(100.0, MS);
        let before = path.packets();
        (0..10).for_each(|_| path.round(Room::Full));
        let grown = path.packets() - before;
        assert!((grown - 10.0 * ALPHA).abs() < 0.1, "{grown}");
        // A packet each round trip once the window is that of before.
        (0..60).for_each(|_| path.round(Room::Full));
        let before = path.packets();
        assert!(before > 100.0, "{before}");
        (0..10).for_each(|_| path.round(Room::Full));
        assert!((path.packets() - before - 10.0).abs() < 0.1);
    }

    #[test]
    fn the_window_grows_by_half_in_a_round_trip_at_most() {
        let mut path = Path::after_loss(10.0, MS * 100);
        path.now = path.now + Duration::from_secs(100);
        path.control.acknowledged_at = path.now;
        let before = path.packets();
        path.round(Room::Full);
        // Ten steps of a twentieth of what was the window then.
        assert!(path.packets() <= before * 1.05_f64.powi(10) && path.packets() > before * 1.4);
    }

    #[test]
    fn a_window_that_did_not_come_back_leaves_room_for_others() {
        let mut path = Path::after_loss(100.0, MS);
        assert_eq!(path.control.curve.max, 100.0);
        path.now = path.now + MS;
        assert_eq!(path.lose(path.now), Cause::Congestion);
        assert!((path.control.curve.max - 70.0 * 0.85).abs() < 1e-9);
    }

    #[test]
    fn who_has_nothing_to_send_does_not_grow_and_its_time_does_not_count() {
        let mut path = Path::after_loss(100.0, MS);
        path.round(Room::Left);
        let (before, began) = (path.packets(), path.control.curve.epoch.unwrap().began);
        (0..500).for_each(|_| path.round(Room::Left));
        assert_eq!(path.packets(), before);
        let moved = path.control.curve.epoch.unwrap().began.saturating_since(began);
        assert!(moved >= MS * 498, "{moved:?}");
    }

    #[test]
    fn a_timeout_leaves_a_packet_and_slow_start_up_to_seven_tenths() {
        let mut path = Path::after_loss(1000.0, MS);
        path.now = path.now + MS * 300;
        path.time_out(1);
        assert_eq!(path.control.window(), Some(PACKET));
        path.now = path.now + MS * 600;
        path.time_out(2);
        assert_eq!(path.control.curve.threshold.round(), 490.0);
        for _ in 0..10 {
            path.round(Room::Full);
        }
        let (window, epoch) = (path.packets(), path.control.curve.epoch.unwrap());
        assert!((490.0..520.0).contains(&window), "{window}");
        assert_eq!(epoch.k, 0.0, "the curve begins here");
    }

    #[test]
    fn a_spurious_timeout_is_taken_back_and_the_silence_of_two_is_one() {
        let mut path = Path::after_loss(1000.0, MS);
        path.now = path.now + MS * 300;
        let before = path.control.curve;
        path.time_out(1);
        path.now = path.now + MS;
        path.time_out(1);
        assert_eq!(path.control.curve.threshold.round(), 490.0, "of another queue pair");
        path.control.spurious();
        assert_eq!(path.control.curve, before);
        path.control.spurious();
        assert_eq!(path.control.curve, before);
    }

    #[test]
    fn a_notification_counts_as_a_loss_once_a_round_trip() {
        let mut path = Path::new(MS);
        path.round(Room::Full);
        for _ in 0..5 {
            path.control.marked(path.now);
        }
        assert_eq!(path.control.window(), Some(14 * PACKET));
        path.now = path.now + MS;
        path.control.marked(path.now);
        assert!(path.packets() < 14.0);
    }
}
