//! The controller as a whole: what the parts together make of round trips, losses and time-outs.

use super::*;
use crate::congestion::{DeviationWeight, Extent};

const PACKET: u64 = 1000;
const LEAST: Duration = Duration::from_millis(1);

const fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// A path with a controller, which carries a window each round trip.
struct Path {
    control: DelayController,
    round_trip: RoundTrip,
    now: Instant,
}

impl Path {
    /// A path whose start is not over.
    fn new() -> Self {
        let now = Instant::from_nanos(1_000_000_000);
        let mut control = DelayController::new(now);
        control.set_packet(PACKET);
        Self { control, round_trip: RoundTrip::new(DeviationWeight::Window), now }
    }

    /// A path whose start is over, with a window of so many packets. Its least round trip is known.
    fn of(packets: u64) -> Self {
        let mut path = Self::new();
        path.round(Duration::ZERO);
        path.control.phase = Phase::Target;
        path.control.set((packets * PACKET) as f64);
        path
    }

    fn window(&self) -> u64 {
        self.control.window().expect("it is limited")
    }

    /// A round trip on a route of 1 ms, with a queue: the window is full, and four acknowledgements
    /// take all of it.
    fn round(&mut self, queue: Duration) {
        self.samples([LEAST + queue; 4], Room::Full);
    }

    /// A round trip with these samples; a round ends with the first of the next.
    fn samples(&mut self, samples: [Duration; 4], room: Room) {
        let part = self.window() / 4;
        self.control.sent(4 * part, room);
        self.now = self.now + samples[0];
        for sample in samples {
            self.round_trip.sample(self.now, sample);
            let back = self.now.as_nanos() - sample.as_nanos() as u64;
            let acknowledged = Acknowledged {
                now: self.now,
                amount: part,
                sample: Some((sample, Instant::from_nanos(back))),
                round_trip: &self.round_trip,
            };
            if let Route::Least(least) = self.control.acknowledged(&acknowledged) {
                self.round_trip.reset_least(self.now, least);
            }
        }
    }

    /// A loss of a packet that was sent at a time.
    fn lose(&mut self, sent_at: Instant) -> Cause {
        self.control.lost(&Lost {
            now: self.now,
            sent_at,
            extent: Extent::Packet,
            in_flight: self.window(),
            round_trip: &self.round_trip,
        })
    }

    fn time_out(&mut self) {
        let (now, round_trip) = (self.now, &self.round_trip);
        self.control.timed_out(&TimedOut { now, consecutive: 1, round_trip });
    }
}

// tests [CC-15]
#[test]
fn the_window_doubles_each_round_trip_until_a_queue_shows() {
    let mut path = Path::new();
    assert_eq!(path.window(), 32_768);
    path.round(Duration::ZERO);
    path.round(Duration::ZERO);
    assert_eq!(path.window(), 4 * 32_768);
    // Who has nothing to send learns nothing about the path.
    for _ in 0..3 {
        path.samples([LEAST; 4], Room::Left);
    }
    let before = path.window();
    path.samples([LEAST; 4], Room::Left);
    assert_eq!(path.window(), before);
    // Samples of a queue of 400 us, above the target and a quarter of the route.
    path.round(us(400));
    path.round(us(400));
    let ended = path.window();
    path.round(us(100));
    assert!(ended < 4 * before && path.window() < ended + ended / 32, "no longer doubled");
}

// tests [CC-15], [CC-23]
#[test]
fn a_queue_or_a_loss_in_the_start_leaves_half_of_the_window() {
    let mut path = Path::new();
    path.control.end_start(path.now);
    assert_eq!((path.window(), path.control.phase), (16_384, Phase::Target));
    let mut path = Path::new();
    for loss in 1..=11 {
        let cause = path.lose(path.now);
        assert_eq!(cause == Cause::Congestion, loss == 11, "more than a 40th of 400");
    }
    assert_eq!((path.window(), path.control.phase), (16_384, Phase::Target));
}

// tests [CC-3]
#[test]
fn a_round_without_a_sample_ends_after_three_round_trips() {
    let mut path = Path::of(200);
    path.round(Duration::ZERO);
    for (after, lost) in [(3000, 6), (3001, 1)] {
        path.control.round.lost = 5;
        path.now = path.control.round.began + us(after);
        let _: Cause = path.lose(path.now);
        assert_eq!(path.control.round.lost, lost, "{after} us");
    }
}

// tests [CC-17], [CC-18]
#[test]
fn the_window_grows_below_the_target_and_shrinks_above_it() {
    let mut path = Path::of(200);
    path.round(us(250));
    path.round(us(250));
    let before = path.window();
    path.round(us(250));
    // A packet by four and a 64th, but for rounding.
    assert!(path.window().abs_diff(before + PACKET / 4 + before / 64) <= 1);
    // Nothing is learned where the window is not full.
    path.samples([LEAST + us(250); 4], Room::Left);
    let before = path.window();
    path.samples([LEAST + us(250); 4], Room::Left);
    assert_eq!(path.window(), before);
    path.round(us(3000));
    path.round(us(3000));
    assert!(path.window() < before, "{} {before}", path.window());
}

// tests [CC-18]
#[test]
fn above_the_target_only_four_late_samples_shrink_the_window() {
    let mut path = Path::of(200);
    path.round(us(250));
    // The round has one sample, a late one; those before were not late.
    let late = [LEAST + us(3000); 4];
    path.samples(late, Room::Left);
    let before = path.window();
    assert_eq!(before, path.window());
    path.control.recent.add(LEAST);
    path.samples(late, Room::Left);
    assert_eq!(path.window(), before, "one of the last four was on time");
    path.samples(late, Room::Left);
    assert!(path.window() < before);
}

// tests [CC-19]
#[test]
fn the_window_is_small_for_three_round_trips_and_then_as_before() {
    let mut path = Path::of(200);
    let mut rounds = 0;
    while !matches!(path.control.phase, Phase::Drain(_)) {
        path.round(us(250));
        rounds += 1;
        assert!(rounds < 300, "128 round trips of 1.25 ms are 160 ms, rounded up to 268");
    }
    let Phase::Drain(drain) = path.control.phase else { unreachable!() };
    assert!((200..230).contains(&rounds), "{rounds}");
    assert!((path.window() as f64) < drain.window * 0.8 * 0.76);
    // The queue is gone, and the route is 1.1 ms.
    for _ in 0..4 {
        assert!(matches!(path.control.phase, Phase::Drain(_)));
        path.round(us(100));
    }
    assert_eq!(path.control.phase, Phase::Target);
    assert_eq!(path.window(), drain.window as u64);
    assert_eq!(path.round_trip.least(), LEAST + us(100), "the route that the drain has shown");
}

// tests [CC-21]
#[test]
fn beside_others_who_fill_the_queue_the_window_grows_like_reno() {
    let mut path = Path::of(200);
    let mut rounds = 0;
    while !matches!(path.control.phase, Phase::Competing { .. }) {
        // A sawtooth: no longer route.
        path.round(us(15_000 + 1000 * (rounds % 8)));
        rounds += 1;
        assert!(rounds < 200);
    }
    assert!(path.window() >= 4 * PACKET);
    let before = path.window();
    path.round(us(15_000));
    path.round(us(15_000));
    assert_eq!(path.window(), before + 2 * PACKET, "a packet each round trip");
    // Any loss counts, and what the port holds is not learned from it.
    let limit = path.control.limit.cap();
    assert_eq!(path.lose(path.now), Cause::Congestion);
    assert_eq!(path.window(), ((before + 2 * PACKET) as f64 * 0.7) as u64);
    assert_eq!(path.control.limit.cap(), limit);
}

// tests [CC-21]
#[test]
fn competing_begins_with_four_packets() {
    let mut path = Path::of(1);
    path.control.compete(path.now, LEAST);
    assert_eq!(path.window(), 4 * PACKET);
    let mut path = Path::of(5);
    path.control.compete(path.now, LEAST);
    assert_eq!(path.window(), 5 * PACKET);
}

// tests [CC-1]
#[test]
fn the_window_is_a_twentieth_of_a_packet_at_least_and_256_mib_at_most() {
    let mut path = Path::of(1);
    path.control.set(0.0);
    assert_eq!(path.window(), PACKET / 20);
    path.control.set(1e12);
    assert_eq!(path.window(), 256 << 20);
}

// tests [CC-22]
#[test]
fn a_longer_route_is_taken_for_one_after_some_round_trips() {
    let mut path = Path::of(200);
    path.round(us(100));
    path.round(us(100));
    let before = path.window();
    let mut rounds = 0;
    while path.round_trip.least() == LEAST {
        path.round(us(4000));
        rounds += 1;
        assert!(rounds < 20, "the window halves each time");
    }
    assert_eq!(path.round_trip.least(), LEAST + us(4000));
    assert!(path.window() >= before, "{} {before}", path.window());
}

// tests [CC-23]
#[test]
fn a_single_loss_without_a_queue_is_chance_and_one_with_a_queue_is_not() {
    let mut path = Path::of(200);
    path.round(us(10));
    path.round(us(10));
    let before = path.window();
    assert_eq!(path.lose(path.now), Cause::Chance);
    assert_eq!(path.window(), before);
    path.samples([LEAST + us(400); 4], Room::Full);
    let before = path.window();
    let sent_before = path.now;
    assert_eq!(path.lose(path.now), Cause::Congestion);
    let after = path.window();
    assert!(after < before && after as f64 >= before as f64 * 0.699, "{before} {after}");
    // Others of the same time do not count again.
    path.now = path.now + us(1);
    path.control.reduced_at = path.now;
    assert_eq!(path.lose(sent_before), Cause::Congestion);
    assert_eq!(path.window(), after);
}

// tests [CC-24]
#[test]
fn the_target_stays_below_the_queue_that_overflowed() {
    let mut path = Path::of(200);
    for _ in 0..3 {
        path.round(us(290));
    }
    assert_eq!(path.control.target_delay(LEAST), us(300));
    for loss in 1..=2 {
        assert_eq!(path.lose(path.now), Cause::Chance, "{loss}");
    }
    path.control.round.lost = 20;
    assert_eq!(path.lose(path.now), Cause::Congestion, "a bunch");
    assert_eq!(path.control.target_delay(LEAST), us(290).mul_f64(0.7));
}

// tests [CC-25]
#[test]
fn a_timeout_halves_the_window_once_and_a_spurious_one_is_taken_back() {
    let mut path = Path::of(200);
    path.round(us(10));
    let before = path.window();
    path.now = path.now + us(5000);
    path.time_out();
    assert_eq!(path.window(), before / 2);
    path.now = path.now + us(1);
    path.time_out();
    assert_eq!(path.window(), before / 2, "of another queue pair");
    path.control.spurious();
    assert_eq!(path.window(), before);
    path.control.spurious();
    assert_eq!(path.window(), before);
}

// tests [CC-25]
#[test]
fn timeouts_one_after_the_other_leave_four_packets() {
    let mut path = Path::of(200);
    for _ in 0..20 {
        path.now = path.now + us(50_000);
        path.time_out();
    }
    assert_eq!(path.window(), 4 * PACKET);
}

// tests [CC-7]
#[test]
fn notifications_reduce_the_window_once_a_round() {
    let mut path = Path::of(200);
    path.round(us(10));
    let before = path.window();
    for _ in 0..5 {
        path.control.marked(path.now);
    }
    let after = path.window();
    assert!(after < before && after >= before / 2, "{before} {after}");
    path.round(us(10));
    path.control.marked(path.now);
    assert!(path.window() < after);
}

// tests [CC-4]
#[test]
fn the_pacer_sends_faster_than_the_window_but_for_the_smallest_ones() {
    assert_eq!(Path::new().control.pacing(), Some(2.0 * 32_768.0));
    assert_eq!(Path::of(2).control.pacing(), Some(1.25 * 2000.0));
    let mut path = Path::of(2);
    path.control.set(1999.0);
    assert_eq!(path.control.pacing(), Some(1999.0));
}
