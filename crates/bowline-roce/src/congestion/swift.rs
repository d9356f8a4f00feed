//! Swift (Kumar et al., SIGCOMM 2020), for comparison: the window follows a target of the delay by
//! additive increase and multiplicative decrease, at most once in a round trip.
//!
//! Names in comments are those of the paper's algorithm 1. Two of its inputs do not exist here. The
//! distance in hops is known there from the topology: the least round trip that was ever measured
//! stands for it. There are no time stamps of NICs: delay is that of the whole round trip, without
//! a second window for the host. What the paper does not have: a window that is not full does not
//! grow; and the sender is paced above a packet, too, since here an acknowledgement is that of up
//! to 80 packets. Marks say nothing to it, and a spurious time-out is not taken back.

use std::time::Duration;

use bowline_base::Instant;

use super::controller::{Acknowledged, Cause, Controller, Lost, Room, Route, TimedOut};
use super::pacer::paced;
use super::usage::Usage;

/// ai: packets that the window grows by in a round trip.
const ADDED: f64 = 1.0;
/// beta: the part of what is too much of the delay by which the window shrinks.
const BETA: f64 = 0.8;
/// 1 - max_mdf: what a round trip leaves of the window, at least.
const LEFT_MIN: f64 = 0.5;
/// The base target, here without the distance.
const BASE: Duration = Duration::from_micros(25);
/// fs_range: what flow scaling adds for the smallest windows. Chosen: four times the base, as the
/// delay controller has it.
const SCALED: Duration = Duration::from_micros(100);
/// fs_min_cwnd and fs_max_cwnd: windows between which the target is scaled, in packets.
const SCALED_FROM: f64 = 0.1;
const SCALED_TO: f64 = 100.0;
/// RETX_RESET_THRESHOLD: time-outs in a row that leave the smallest window. Chosen.
const RESET_AFTER: u32 = 5;
/// min_cwnd: a packet in a thousand round trips.
const WINDOW_MIN: f64 = 0.001;
/// The first window. Chosen, as in RFC 6928.
const WINDOW: f64 = 10.0;
/// Largest window, in bytes: that of the delay controller.
const BYTES_MAX: f64 = (256 << 20) as f64;

/// The window of a path, in packets, and what it follows from.
#[derive(Debug)]
pub(crate) struct Swift {
    window: f64,
    /// Bytes of a full packet.
    packet: f64,
    usage: Usage,
    /// Packets acknowledged since the last round trip was measured.
    acknowledged: f64,
    /// t_last_decrease.
    reduced_at: Instant,
}

impl Swift {
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            window: WINDOW,
            packet: 1024.0,
            usage: Usage::new(now),
            acknowledged: 0.0,
            reduced_at: Instant::from_nanos(0),
        }
    }

    /// Shrinks the window to a part, if it has not shrunk in the last round trip.
    fn shrink(&mut self, now: Instant, round_trip: Duration, part: f64) {
        if now.saturating_since(self.reduced_at) >= round_trip {
            self.reduced_at = now;
            self.set(self.window * part);
        }
    }

    fn set(&mut self, window: f64) {
        self.window = window.clamp(WINDOW_MIN, BYTES_MAX / self.packet);
    }

    /// Grows by what was acknowledged in time.
    fn grow(&mut self) {
        if self.usage.is_limited() {
            self.set(self.window + ADDED * self.acknowledged / self.window.max(1.0));
        }
    }
}

/// TargetDelay() on a route of `least` (section 3.1): more for small windows, whose flows are many.
fn target(window: f64, least: Duration) -> Duration {
    let root = |packets: f64| 1.0 / packets.sqrt();
    let part = (root(window) - root(SCALED_TO)) / (root(SCALED_FROM) - root(SCALED_TO));
    least + BASE + SCALED.mul_f64(part.clamp(0.0, 1.0))
}

/// What is left of the window after a delay above the target.
fn left(delay: Duration, target: Duration) -> f64 {
    let too_much = delay.saturating_sub(target).as_secs_f64() / delay.as_secs_f64().max(1e-9);
    (1.0 - BETA * too_much).max(LEFT_MIN)
}

impl Controller for Swift {
    #[inline]
    fn window(&self) -> Option<u64> {
        Some((self.window * self.packet) as u64)
    }

    fn pacing(&self) -> Option<f64> {
        Some(paced(self.window, false) * self.packet)
    }

    /// Queue pairs of a path may have packets of different sizes: its bytes stay as they are. The
    /// first window is a number of packets.
    fn set_packet(&mut self, packet: u64) {
        let before = std::mem::replace(&mut self.packet, packet as f64);
        if self.window != WINDOW {
            self.set(self.window * before / self.packet);
        }
    }

    #[inline]
    fn sent(&mut self, _amount: u64, room: Room) {
        self.usage.sent(room);
    }

    fn acknowledged(&mut self, acknowledged: &Acknowledged<'_>) -> Route {
        let Acknowledged { now, amount, sample, round_trip } = *acknowledged;
        self.acknowledged += amount as f64 / self.packet;
        let Some((delay, sent_at)) = sample else { return Route::Same };
        let target = target(self.window, round_trip.least());
        if delay < target {
            self.grow();
        } else {
            self.shrink(now, round_trip.smoothed().unwrap_or_default(), left(delay, target));
        }
        self.acknowledged = 0.0;
        self.usage.acknowledged(now, sent_at);
        Route::Same
    }

    /// Every loss is congestion.
    fn lost(&mut self, lost: &Lost<'_>) -> Cause {
        self.shrink(lost.now, lost.round_trip.smoothed().unwrap_or_default(), LEFT_MIN);
        Cause::Congestion
    }

    fn timed_out(&mut self, timed_out: &TimedOut<'_>) {
        let TimedOut { now, consecutive, round_trip } = *timed_out;
        if consecutive >= RESET_AFTER {
            self.reduced_at = now;
            self.set(WINDOW_MIN);
        } else {
            self.shrink(now, round_trip.smoothed().unwrap_or_default(), LEFT_MIN);
        }
    }

    fn heeds_marks(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::{DeviationWeight, Extent, RoundTrip};

    const PACKET: u64 = 1000;
    const LEAST: Duration = Duration::from_micros(50);

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// A path with a controller, on a route of 50 us.
    struct Path {
        control: Swift,
        round_trip: RoundTrip,
        now: Instant,
    }

    impl Path {
        fn of(packets: f64) -> Self {
            let now = Instant::from_nanos(1_000_000_000);
            let mut control = Swift::new(now);
            control.set_packet(PACKET);
            control.window = packets;
            let mut round_trip = RoundTrip::new(DeviationWeight::Window);
            round_trip.sample(now, LEAST);
            Self { control, round_trip, now }
        }

        /// A round trip with a queue, in which a window is acknowledged at once.
        fn round(&mut self, queue: Duration, room: Room) {
            let amount = (self.control.window * PACKET as f64) as u64;
            self.control.sent(amount, room);
            let (sent_at, takes) = (self.now, LEAST + queue);
            self.now = self.now + takes;
            self.round_trip.sample(self.now, takes);
            let (sample, round_trip) = (Some((takes, sent_at)), &self.round_trip);
            let acknowledged = Acknowledged { now: self.now, amount, sample, round_trip };
            assert_eq!(self.control.acknowledged(&acknowledged), Route::Same);
        }

        fn lose(&mut self) {
            let cause = self.control.lost(&Lost {
                now: self.now,
                sent_at: self.now,
                extent: Extent::Packet,
                in_flight: 0,
                round_trip: &self.round_trip,
            });
            assert_eq!(cause, Cause::Congestion);
        }

        fn time_out(&mut self, consecutive: u32) {
            let (now, round_trip) = (self.now, &self.round_trip);
            self.control.timed_out(&TimedOut { now, consecutive, round_trip });
        }
    }

    #[test]
    fn the_target_is_25_us_above_the_route_and_100_more_for_small_windows() {
        assert_eq!(target(1000.0, LEAST), us(75));
        assert_eq!(target(100.0, LEAST), us(75));
        assert_eq!(target(0.1, LEAST), us(175));
        assert_eq!(target(0.001, LEAST), us(175));
        let between = target(1.0, LEAST);
        // 0.9 of 3.06 parts.
        assert!((us(104)..us(105)).contains(&between), "{between:?}");
    }

    #[test]
    fn below_the_target_the_window_grows_by_a_packet_each_round_trip() {
        let mut path = Path::of(200.0);
        (0..10).for_each(|_| path.round(us(20), Room::Full));
        assert!((path.control.window - 210.0).abs() < 0.01, "{}", path.control.window);
        // Less than a packet in flight: by a packet for each that was acknowledged.
        let mut path = Path::of(0.5);
        path.round(us(20), Room::Full);
        assert!((path.control.window - 1.0).abs() < 0.01, "{}", path.control.window);
    }

    #[test]
    fn who_has_nothing_to_send_does_not_grow() {
        let mut path = Path::of(200.0);
        (0..10).for_each(|_| path.round(us(20), Room::Left));
        assert_eq!(path.control.window, 200.0);
    }

    #[test]
    fn above_the_target_the_window_shrinks_by_what_is_too_much_at_most_by_half() {
        let mut path = Path::of(200.0);
        path.round(us(50), Room::Full);
        // A quarter of 100 us is too much.
        assert!((path.control.window - 160.0).abs() < 0.01, "{}", path.control.window);
        let mut path = Path::of(200.0);
        path.round(us(1000), Room::Full);
        assert_eq!(path.control.window, 100.0);
        // Once in a round trip, whatever shows that the port is full.
        path.now = path.now + us(1);
        path.lose();
        path.time_out(1);
        assert_eq!(path.control.window, 100.0);
        let round_trip = path.round_trip.smoothed().unwrap();
        path.now = path.now + (round_trip - us(2));
        path.lose();
        assert_eq!(path.control.window, 100.0);
        path.now = path.now + us(1);
        path.lose();
        assert_eq!(path.control.window, 50.0);
    }

    #[test]
    fn the_window_is_256_mib_at_most() {
        let mut path = Path::of(268_435.0);
        path.round(us(20), Room::Full);
        assert_eq!(path.control.window(), Some(256 << 20));
    }

    #[test]
    fn what_was_acknowledged_without_a_round_trip_counts_with_the_next() {
        let mut path = Path::of(200.0);
        path.control.sent(100 * PACKET, Room::Full);
        let (now, round_trip) = (path.now, &path.round_trip);
        let acknowledged = Acknowledged { now, amount: 100 * PACKET, sample: None, round_trip };
        assert_eq!(path.control.acknowledged(&acknowledged), Route::Same);
        assert_eq!(path.control.window, 200.0);
        path.round(us(20), Room::Full);
        assert!((path.control.window - 201.5).abs() < 0.01, "{}", path.control.window);
    }

    #[test]
    fn the_fifth_timeout_in_a_row_leaves_the_smallest_window() {
        let mut path = Path::of(160.0);
        for consecutive in 1..=4 {
            path.now = path.now + us(1000);
            path.time_out(consecutive);
        }
        assert_eq!(path.control.window, 10.0);
        path.time_out(5);
        assert_eq!(path.control.window(), Some(PACKET / 1000));
        assert_eq!(path.control.pacing(), Some(PACKET as f64 / 1000.0), "paced exactly");
    }

    #[test]
    fn packets_of_another_size_leave_the_bytes_as_they_are_but_for_the_first_window() {
        let mut path = Path::of(WINDOW);
        path.control.set_packet(4 * PACKET);
        assert_eq!(path.control.window(), Some(40 * PACKET));
        path.control.window = 100.0;
        path.control.set_packet(PACKET);
        assert_eq!(path.control.window(), Some(400 * PACKET));
    }

    #[test]
    fn neither_marks_nor_spurious_timeouts_change_the_window() {
        let mut path = Path::of(160.0);
        path.control.marked(path.now);
        assert_eq!(path.control.window, 160.0);
        path.time_out(1);
        path.control.spurious();
        assert_eq!(path.control.window, 80.0);
    }
}
