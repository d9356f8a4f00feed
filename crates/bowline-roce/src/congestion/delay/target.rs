//! The delay of the queue that is aimed at [CC-16].

use std::time::Duration;

/// The target for a large window: longer than threads of a quiet machine are late, shorter than
/// what small switches queue at 1 Gb/s (decision 0014). Chosen; Swift has 25 us for its NICs.
const LARGE_WINDOW: Duration = Duration::from_micros(300);
/// The target is at least this part of the least round trip: a port on a long route queues more.
/// Chosen.
const LONG_ROUTE: u32 = 8;
/// Times the deviation of round trips that the target is at least: threads that are scheduled late
/// leave a short queue empty (bench/notes/2026-11-27-on-a-network.md, "A short target beside late
/// threads"); and what that is at most, where half of the least round trip is not more. Chosen.
const NOISE: u32 = 2;
const NOISE_MAX: Duration = Duration::from_millis(2);
/// What processors add to round trips counts up to this: more than twice what the latest threads of
/// `--cells late-turns` add, 4 ms, and of an emulated guest
/// (bench/notes/2026-11-27-on-a-network.md, "Processors that are late").
const HOST_DELAY_MAX: Duration = Duration::from_millis(10);
/// Times the target is larger for a small window, so that small windows grow towards those of
/// others, and many senders have room; in between it falls with the root of the window, as in
/// Swift (flow-based scaling, section 3.1).
const SMALL_WINDOW: f64 = 4.0;
/// The inverse roots of a small window, one packet, and a large one, 100 (Swift's fs_max_cwnd).
const SMALL: f64 = 1.0;
const LARGE: f64 = 0.1;
/// The target is at least this part of the least round trip, whatever the port can hold, since
/// bursts queue behind themselves. Chosen.
const SHORT_ROUTE: u32 = 16;

/// What the target follows from, apart from the window and the route.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// How far round trips deviate from their mean.
    pub(super) deviation: Duration,
    /// How much longer than the least one round trips are without a queue: what processors add.
    host_delay: Duration,
}

impl Target {
    pub(super) const fn new() -> Self {
        Self { deviation: Duration::ZERO, host_delay: Duration::ZERO }
    }

    /// The target of a window of `packets`: more for small ones, and never more than `cap`, what
    /// the port can hold, if bursts allow it.
    pub(super) fn delay(&self, packets: f64, least: Duration, cap: Duration) -> Duration {
        let small = ((1.0 / packets.sqrt() - LARGE) / (SMALL - LARGE)).clamp(0.0, 1.0);
        let noise = (self.deviation * NOISE).min(NOISE_MAX.max(least / 2));
        let network = LARGE_WINDOW.max(least / LONG_ROUTE).max(noise);
        let scaled = network.mul_f64(1.0 + SMALL_WINDOW * small);
        scaled.max(self.host_delay).min(cap).max(least / SHORT_ROUTE)
    }

    /// A drain has shown by how much round trips are longer than the least one [CC-20].
    pub(super) fn learn_host_delay(&mut self, longer: Duration) {
        let longer = longer.min(HOST_DELAY_MAX);
        let before = if self.host_delay.is_zero() { longer } else { self.host_delay };
        self.host_delay = (before + longer) / 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Duration = Duration::MAX;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    // tests [CC-16]
    #[test]
    fn the_target_is_300_us_for_large_windows_and_five_times_that_for_a_packet() {
        let target = Target::new();
        assert_eq!(target.delay(1000.0, us(50), NONE), us(300));
        assert_eq!(target.delay(100.0, us(50), NONE), us(300));
        assert_eq!(target.delay(1.0, us(50), NONE), us(1500));
        assert_eq!(target.delay(0.1, us(50), NONE), us(1500));
        let between = target.delay(10.0, us(50), NONE);
        assert!((us(588)..us(589)).contains(&between), "falls with the root: {between:?}");
    }

    // tests [CC-16]
    #[test]
    fn long_routes_and_round_trips_that_vary_have_a_longer_target() {
        let mut target = Target::new();
        assert_eq!(target.delay(1000.0, us(8000), NONE), us(1000));
        target.deviation = us(400);
        assert_eq!(target.delay(1000.0, us(50), NONE), us(800));
        target.deviation = us(5000);
        assert_eq!(target.delay(1000.0, us(50), NONE), us(2000), "up to 2 ms");
        assert_eq!(target.delay(1000.0, us(6000), NONE), us(3000), "or half of the route");
    }

    // tests [CC-16]
    #[test]
    fn the_port_bounds_the_target_and_bursts_bound_that() {
        let target = Target::new();
        assert_eq!(target.delay(1.0, us(50), us(70)), us(70));
        assert_eq!(target.delay(1.0, us(1600), us(70)), us(100), "a sixteenth of the route");
    }

    // tests [CC-20]
    #[test]
    fn the_target_is_not_below_what_processors_add() {
        let mut target = Target::new();
        target.learn_host_delay(us(4000));
        assert_eq!(target.delay(1000.0, us(50), NONE), us(4000));
        target.learn_host_delay(us(2000));
        assert_eq!(target.delay(1000.0, us(50), NONE), us(3000), "half of it is new");
        for _ in 0..40 {
            target.learn_host_delay(us(1_000_000));
        }
        let most = target.delay(1000.0, us(50), NONE);
        assert!(most <= us(10_000) && most > us(9_999), "10 ms at most: {most:?}");
    }
}
