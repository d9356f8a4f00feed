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
//! paced, since here an acknowledgement is that of up to 80 packets, where TCP's is that of two;
//! and a window is not reduced because nothing was sent for a while (RFC 5681, section 4.1), as
//! that of the delay controller is not.

use std::time::Duration;

use bowline_base::Instant;

use super::controller::{Acknowledged, Cause, Controller, Lost, Room, Route, TimedOut};
use super::pacer::paced;
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
/// Least window and ssthresh after a loss, and least window after a mark (section 4.6).
const AFTER_LOSS_MIN: f64 = 2.0;
const AFTER_MARK_MIN: f64 = 1.0;
/// The window after a time-out (RFC 5681, section 3.1).
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

/// A path on which nothing was acknowledged.
const FIRST: Curve =
    Curve { window: WINDOW, threshold: f64::INFINITY, max: 0.0, prior: 0.0, epoch: None };

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
    /// What was before a time-out that may turn out to be spurious, until something sent after it
    /// is acknowledged.
    before_timeout: Option<Curve>,
}

impl Cubic {
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            curve: FIRST,
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

    /// Grows by so many acknowledged packets: in slow start up to ssthresh, then with the curve.
    fn grow(&mut self, now: Instant, packets: f64) {
        let curve = &mut self.curve;
        let start = packets.min((curve.threshold - curve.window).max(0.0));
        curve.window += start;
        if curve.window >= curve.threshold {
            let mut epoch = curve.epoch.unwrap_or_else(|| curve.begin(now));
            curve.window = epoch.grown(now, packets - start, curve, self.round_trip);
            curve.epoch = Some(epoch);
        }
        self.curve.window = self.curve.window.min(self.most());
    }

    /// Reduces the window for congestion, to so many packets at least.
    fn reduce(&mut self, now: Instant, least: f64) {
        self.reduced_at = now;
        self.before_timeout = None;
        let curve = &mut self.curve;
        curve.fall();
        curve.window = (curve.prior * BETA).max(least);
        curve.epoch = Some(curve.begin(now));
    }

    /// Leaves time out of the curve in which the window was not used: t must not count it
    /// (section 4.2). Where it is used, that is what passed before the acknowledged was sent, with
    /// nothing on its way.
    fn leave_out(&mut self, now: Instant, sent_at: Option<Instant>) {
        let upto = if self.usage.is_limited() { sent_at } else { Some(now) };
        let unused = upto.map(|upto| upto.saturating_since(self.acknowledged_at));
        if let (Some(epoch), Some(unused)) = (&mut self.curve.epoch, unused) {
            epoch.began = epoch.began + unused;
        }
        self.acknowledged_at = now;
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

    /// The same number of bytes in packets of another size; the curve begins anew.
    fn resized(self, factor: f64) -> Self {
        Self {
            window: self.window * factor,
            threshold: self.threshold * factor,
            max: self.max * factor,
            prior: self.prior * factor,
            epoch: None,
        }
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
        // What was in flight when the window was reduced is more than a window.
        let part = (packets / window).min(1.0);
        self.reno += alpha * part;
        let t = now.saturating_since(self.began).as_secs_f64();
        if self.cubic(t, curve.max) < self.reno {
            return window.max(self.reno);
        }
        let target = self.cubic(t + round_trip.as_secs_f64(), curve.max);
        let target = target.clamp(window, GROWTH_MAX * window);
        window + (target - window) * part
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

    /// Queue pairs of a path may have packets of different sizes: its bytes stay as they are. The
    /// first window is a number of packets.
    fn set_packet(&mut self, packet: u64) {
        let before = std::mem::replace(&mut self.packet, packet as f64);
        if before != self.packet && self.curve != FIRST {
            self.curve = self.curve.resized(before / self.packet);
            self.before_timeout = None;
        }
    }

    #[inline]
    fn sent(&mut self, _amount: u64, room: Room) {
        self.usage.sent(room);
    }

    fn acknowledged(&mut self, acknowledged: &Acknowledged<'_>) -> Route {
        let Acknowledged { now, amount, sample, round_trip } = *acknowledged;
        self.round_trip = round_trip.smoothed().unwrap_or_default();
        self.leave_out(now, sample.map(|(_, sent_at)| sent_at));
        if self.usage.is_limited() {
            self.grow(now, amount as f64 / self.packet);
        }
        let Some((_, sent_at)) = sample else { return Route::Same };
        self.usage.acknowledged(now, sent_at);
        if sent_at >= self.reduced_at {
            self.before_timeout = None;
        }
        Route::Same
    }

    /// Every loss is congestion.
    fn lost(&mut self, lost: &Lost<'_>) -> Cause {
        if lost.sent_at >= self.reduced_at {
            self.reduce(lost.now, AFTER_LOSS_MIN);
        }
        Cause::Congestion
    }

    fn timed_out(&mut self, timed_out: &TimedOut<'_>) {
        self.reduced_at = timed_out.now;
        // What is lost once more leaves ssthresh (RFC 5681, section 3.1); so does what else was on
        // the path then. The first expiry of a timer need not have come here [CC-13].
        if self.before_timeout.is_none() {
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
            self.reduce(now, AFTER_MARK_MIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::{DeviationWeight, Extent, RoundTrip};

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
            (0..10).for_each(|_| self.acknowledge(part, Some(sent_at)));
        }

        fn acknowledge(&mut self, amount: u64, sent_at: Option<Instant>) {
            let sample = sent_at.map(|at| (self.takes, at));
            let (now, round_trip) = (self.now, &self.round_trip);
            let acknowledged = Acknowledged { now, amount, sample, round_trip };
            assert_eq!(self.control.acknowledged(&acknowledged), Route::Same);
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
    fn time_in_which_nothing_was_in_flight_is_none_of_the_curve() {
        let mut path = Path::after_loss(1000.0, MS * 100);
        let mut other = Path::after_loss(1000.0, MS * 100);
        (0..20).for_each(|_| {
            path.round(Room::Full);
            other.round(Room::Full);
        });
        // All is sent and acknowledged, and then there is nothing to send for a minute.
        path.now = path.now + Duration::from_secs(60);
        (0..5).for_each(|_| {
            path.round(Room::Full);
            other.round(Room::Full);
        });
        assert!((path.packets() - other.packets()).abs() < 0.5, "{}", path.packets());
        // What was sent again has no round trip, and its time counts.
        let began = path.control.curve.epoch.unwrap().began;
        path.control.sent(PACKET, Room::Full);
        path.now = path.now + MS * 100;
        path.acknowledge(PACKET, None);
        assert_eq!(path.control.curve.epoch.unwrap().began, began);
    }

    #[test]
    fn an_acknowledgement_of_more_than_a_window_grows_it_as_that_of_a_window() {
        let mut path = Path::after_loss(1000.0, MS * 100);
        let mut other = Path::after_loss(1000.0, MS * 100);
        for (path, packets) in [(&mut path, 1000), (&mut other, 700)] {
            path.control.sent(PACKET, Room::Full);
            let sent_at = path.now;
            path.now = path.now + MS * 100;
            path.acknowledge(packets * PACKET, Some(sent_at));
        }
        assert!(path.packets() > 700.0);
        assert_eq!(path.packets(), other.packets());
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
        let max = path.control.curve.max;
        assert!((max - 490.0).abs() < 1e-9 && epoch.reno > max, "{max} {}", epoch.reno);
    }

    #[test]
    fn slow_start_ends_at_ssthresh_however_much_is_acknowledged_at_once() {
        let mut path = Path::after_loss(1000.0, MS);
        path.now = path.now + MS * 300;
        path.time_out(1);
        path.control.curve.window = 400.0;
        path.control.sent(400 * PACKET, Room::Full);
        let sent_at = path.now;
        path.now = path.now + MS;
        path.acknowledge(400 * PACKET, Some(sent_at));
        assert!((490.0..492.0).contains(&path.packets()), "{}", path.packets());
    }

    #[test]
    fn the_first_timeout_that_comes_here_may_be_the_second_of_its_timer() {
        let mut path = Path::new(MS);
        (0..3).for_each(|_| path.round(Room::Full));
        path.now = path.now + MS * 300;
        path.time_out(2);
        assert_eq!((path.control.window(), path.control.curve.threshold), (Some(PACKET), 56.0));
    }

    #[test]
    fn the_silence_of_many_queue_pairs_falls_once_until_one_of_them_is_answered() {
        let mut path = Path::after_loss(1000.0, MS);
        let before = path.control.curve;
        for _ in 0..5 {
            path.now = path.now + MS * 10;
            path.time_out(1);
        }
        assert_eq!(path.control.curve.threshold.round(), 490.0);
        // What was sent again shows nothing, and the silence may turn out to have been none.
        path.acknowledge(PACKET, None);
        let mut spurious = path.control.curve;
        path.control.spurious();
        std::mem::swap(&mut path.control.curve, &mut spurious);
        assert_eq!(spurious, before);
        path.now = path.now + MS * 10;
        path.time_out(1);
        assert_eq!(path.control.curve.threshold, AFTER_LOSS_MIN);
    }

    #[test]
    fn a_timeout_is_not_taken_back_once_something_sent_after_it_was_acknowledged() {
        let mut path = Path::after_loss(1000.0, MS);
        path.now = path.now + MS * 300;
        path.time_out(1);
        (0..20).for_each(|_| path.round(Room::Full));
        let before = path.control.curve;
        path.control.spurious();
        assert_eq!(path.control.curve, before, "of a probe that was answered at once");
        // Nor after a loss.
        path.now = path.now + MS * 300;
        path.time_out(1);
        assert_eq!(path.lose(path.now), Cause::Congestion);
        let before = path.control.curve;
        path.control.spurious();
        assert_eq!(path.control.curve, before);
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

    #[test]
    fn losses_leave_two_packets_and_notifications_one() {
        let mut path = Path::new(MS);
        path.round(Room::Full);
        for _ in 0..20 {
            path.now = path.now + MS;
            assert_eq!(path.lose(path.now), Cause::Congestion);
        }
        assert_eq!((path.packets(), path.control.curve.threshold), (2.0, 2.0));
        for _ in 0..20 {
            path.now = path.now + MS;
            path.control.marked(path.now);
        }
        assert_eq!((path.packets(), path.control.curve.threshold), (1.0, 2.0));
        // What a loss leaves may be more than there was: the curve begins there.
        path.now = path.now + MS;
        assert_eq!(path.lose(path.now), Cause::Congestion);
        assert_eq!((path.packets(), path.control.curve.epoch.unwrap().k), (2.0, 0.0));
    }

    #[test]
    fn the_window_grows_towards_the_curve_of_a_round_trip_later() {
        let mut path = Path::after_loss(1000.0, MS * 1000);
        let sent_at = path.now;
        path.control.sent(PACKET, Room::Full);
        path.now = path.now + MS * 1000;
        path.acknowledge(PACKET, Some(sent_at));
        // W_cubic(2 s), with K of 9.09 s.
        let target = 1000.0 - C * (750.0_f64.cbrt() - 2.0).powi(3);
        let wanted = 700.0 + (target - 700.0) / 700.0;
        assert!((path.packets() - wanted).abs() < 1e-9, "{} {wanted}", path.packets());
    }

    #[test]
    fn the_window_is_256_mib_at_most() {
        let mut path = Path::new(MS);
        path.control.curve.window = 200_000.0;
        path.round(Room::Full);
        assert_eq!(path.control.window(), Some(256 << 20));
    }

    #[test]
    fn packets_of_another_size_leave_the_bytes_as_they_are_but_for_the_first_window() {
        let mut path = Path::new(MS);
        path.control.set_packet(4 * PACKET);
        assert_eq!(path.control.window(), Some(40 * PACKET));
        path.control.curve.window = 100.0;
        assert_eq!(path.lose(path.now), Cause::Congestion);
        let before = path.control.curve;
        path.control.set_packet(4 * PACKET);
        assert_eq!(path.control.curve, before);
        path.control.set_packet(PACKET);
        assert_eq!(path.control.window(), Some(280 * PACKET));
        assert_eq!((path.control.curve.max, path.control.curve.threshold), (400.0, 280.0));
        // K is that of 280 packets and 400.
        path.round(Room::Full);
        let k = path.control.curve.epoch.unwrap().k;
        assert!((k - 300.0_f64.cbrt()).abs() < 1e-9, "{k}");
    }
}
