//! The window of a path: as large as keeps a short queue in the slowest port, found by the delay of
//! that queue [CC-3].
//!
//! ```text
//!   round trip   least |======== route ========|--- queue ---|  of the shortest of a round
//!                                                ^ target: grow below, shrink above
//! ```
//! - *Start.* The window doubles each round trip until a queue shows or packets are lost.
//! - *Below the target* it grows by a quarter of a packet and a little each round trip, and
//!   faster and faster where there was no queue for many rounds. *Above* it shrinks by what is too
//!   much, by half at most.
//! - *A loss* with a queue reduces the window; so does a share of losses that no bad line explains.
//!   Other losses say nothing about congestion. The window does not become smaller than what was
//!   delivered lately fills the route with. What the port could queue is learned: the target stays
//!   well below it.
//! - *A mark* (a notification of the peer) reduces it as DCQCN does.
//! - *A drain*: from time to time the window is small for three round trips. Senders of a queue do
//!   so together, and see the route without it.
//! - *A queue that does not shrink* with the window is none, but a longer route, if its length
//!   stays the same. One that stays above the target for many rounds again and again, or in four
//!   drains, is that of others, who fill it until they lose packets: then the window grows and
//!   shrinks like theirs for some time.
//!
//! The shortest round trip of a round is looked at, because threads that are scheduled late and
//! acknowledgements that are held back make single ones longer, but not all of a round. Where
//! processors are late often, a drain shows by how much, and the target is not below that.

use std::time::Duration;

use bowline_base::Instant;

use super::controller::{Acknowledged, Cause, Controller, Lost, Room, Route, TimedOut};
use super::round_trip::RoundTrip;

/// Window of a path about which nothing is known, in bytes.
const START: f64 = 32_768.0;
/// The start ends with a queue of at least this part of the least round trip.
const START_PART: u32 = 4;
/// Largest window, in bytes.
const WINDOW_MAX: f64 = (256 << 20) as f64;
/// Smallest window, in packets.
const WINDOW_MIN: f64 = 0.05;
/// The target for a large window.
const TARGET: Duration = Duration::from_micros(300);
/// The target is at least this part of the least round trip: a port on a long route queues more.
const LONG_ROUTE: u32 = 8;
/// Times the deviation of round trips that the target is at least, and what that is at most,
/// where half of the least round trip is not more.
const NOISE: u32 = 2;
const NOISE_MAX: Duration = Duration::from_millis(2);
/// What processors add to round trips counts up to this; and the round trips of a drain that show
/// it, at least.
const UNLOADED_MAX: Duration = Duration::from_millis(10);
const UNLOADED_SAMPLES: u32 = 2;
/// Times the target is larger for a small window, so that small windows grow towards those of
/// others, and many senders have room; in between it falls with the root of the window.
const SMALL_WINDOW: f64 = 4.0;
/// The inverse roots of a small window, one packet, and a large one, 100.
const SMALL: f64 = 1.0;
const LARGE: f64 = 0.1;
/// Part of the longest possible queue that is aimed at, at most.
const OF_LIMIT: f64 = 0.7;
/// The target is at least this part of the least round trip, since bursts queue behind themselves.
const SHORT_ROUTE: u32 = 16;
/// The longest queue that is taken for possible is at least this.
const LIMIT_MIN: Duration = Duration::from_micros(4);
/// What it grows by with each round without a loss: what was learned may have been due to others.
const LIMIT_GROWTH: f64 = 1.0 / 2048.0;
/// The longest queue of late becomes shorter by this part each round.
const PEAK_FADES: u32 = 128;
/// Part of it that shows with a loss that the port was full; and the shortest that says anything.
const PEAK_PART: f64 = 0.8;
const PEAK_MIN: Duration = Duration::from_micros(4);
/// Samples that show a queue when the shortest of them does.
const RECENT: usize = 4;
/// What a loss leaves of the window, and of what fills the route.
const AFTER_LOSS: f64 = 0.7;
const AFTER_LOSS_OF_ROUTE: f64 = 0.92;
/// Rounds of which the fastest tells what fills the route.
const RATES: usize = 4;
/// Smallest window, in packets, for which that is known well enough.
const RATE_PACKETS: f64 = 8.0;
/// Packets that losses leave of the window.
const LOSS_MIN: f64 = 2.0;
/// Packets that time-outs leave of the window.
const AFTER_TIMEOUT: f64 = 4.0;
/// Share of lost packets that is taken for congestion even without a queue, one in this many.
const LOSS_PART: u64 = 40;
/// Packets over which that share is counted, at least; and losses.
const LOSS_PACKETS: u64 = 400;
const LOSSES_MIN: u64 = 3;
/// What the window grows by in a round trip, in packets.
const PART: f64 = 0.25;
/// What it grows by each round in addition, of itself; and at most, after rounds without a queue.
const GROWTH: f64 = 1.0 / 64.0;
const GROWTH_MAX: f64 = 0.25;
/// Rounds without a queue after which growth doubles, and each so many further rounds.
const EMPTY_ROUNDS: u32 = 4;
/// Rounds above the target that show that the queue is not one's own, if the window has become
/// so many times smaller meanwhile.
const FOREIGN_ROUNDS: u32 = 6;
const SHRUNK: f64 = 16.0;
/// Rounds above the target after which further ones count, the rounds that are looked at together,
/// and the part of them that shows that others fill the queue.
const LONG_FULL: u32 = 12;
const JUDGED: u32 = 64;
const FILLED_PART: u32 = 8;
/// Drains in a row in which the queue stays, which show that too; and those whose least round trips
/// are compared.
const FILLED_DRAINS: u32 = 4;
const DRAINS: usize = 4;
/// Round trips for which this is thought, at first and after it was found again and again.
const FOREIGN_MIN: u32 = 256;
const FOREIGN_MAX: u32 = 4096;
/// What a drain leaves of the window while others fill the queue.
const DRAIN_FOREIGN: f64 = 0.25;
/// Packets of the window with which one begins to compete with them, at least.
const FOREIGN_START: f64 = 4.0;
/// Round trips that differ by this part of what they are longer than the least are steady.
const STEADY_PART: u32 = 32;
/// The least round trip is looked for again after so many round trips, rounded up to a power of two
/// of nanoseconds: senders that share a queue do so at the same time, and the queue becomes empty.
const DRAIN_AFTER: u32 = 128;
const DRAIN_AFTER_MIN: Duration = Duration::from_millis(10);
const DRAIN_AFTER_MAX: Duration = Duration::from_secs(10);
/// Round trips that a drain lasts, and what it leaves of the window that the route alone holds.
const DRAIN_ROUND_TRIPS: u32 = 3;
const DRAIN_PART: f64 = 0.75;
/// Smallest window, in packets, that delay alone leads to.
const DELAY_MIN: f64 = 0.25;
/// Weight of a new round in the share of marked rounds.
const MARK_WEIGHT: f64 = 1.0 / 16.0;

/// What kind of growth there is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// The window doubles each round trip.
    Start,
    /// The window follows the target.
    Target,
    /// The window is small for a moment, to see the route without a queue: the window before, until
    /// when, the least round trip meanwhile, and of what was sent since `empty_from`, when the
    /// queue of before is gone, the longest round trip and how many there were.
    Drain {
        window: f64,
        until: Instant,
        least: Duration,
        empty_from: Instant,
        longest: Duration,
        samples: u32,
        foreign: Option<Instant>,
    },
    /// Others fill the queue; so it is thought until a time.
    Foreign { until: Instant },
}

/// Samples of one round trip.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// The round ends with the answer to what was sent from then on.
    began: Instant,
    shortest: Duration,
    longest: Duration,
    samples: u32,
    /// The window was full.
    limited: bool,
    /// Bytes that were acknowledged.
    delivered: f64,
    /// A loss or mark has reduced the window in this round.
    reduced: bool,
    /// Packets that were lost.
    lost: u64,
    /// Something was marked.
    marked: bool,
}

impl Round {
    const fn new(began: Instant) -> Self {
        Self {
            began,
            shortest: Duration::MAX,
            longest: Duration::ZERO,
            samples: 0,
            limited: false,
            delivered: 0.0,
            reduced: false,
            lost: 0,
            marked: false,
        }
    }
}

/// Rounds whose shortest round trips are nearly the same: where others fill a queue it changes.
#[derive(Clone, Copy, Debug)]
struct Steady {
    rounds: u32,
    least: Duration,
    most: Duration,
}

impl Steady {
    const fn new() -> Self {
        Self { rounds: 0, least: Duration::MAX, most: Duration::ZERO }
    }

    /// Adds a round, on a route of `route`.
    fn add(&mut self, shortest: Duration, route: Duration) {
        let (least, most) = (self.least.min(shortest), self.most.max(shortest));
        if most - least > shortest.saturating_sub(route) / STEADY_PART {
            *self = Self { rounds: 1, least: shortest, most: shortest };
        } else {
            *self = Self { rounds: self.rounds + 1, least, most };
        }
    }

    const fn lasts(&self, rounds: u32) -> bool {
        self.rounds >= rounds
    }
}

/// What the window follows from.
#[derive(Debug)]
pub(crate) struct DelayTarget {
    window: f64,
    packet: f64,
    mode: Mode,
    round: Round,
    /// The window was full in the last round.
    was_limited: bool,
    /// Longest queue of the last round.
    queue_before: Duration,
    /// The longest queue that is possible, as losses have taught.
    limit: Duration,
    /// The longest queue of late, which fades.
    peak: Duration,
    /// How far round trips deviate from their mean.
    deviation: Duration,
    /// How much longer than the least one round trips are without a queue: what processors add.
    unloaded: Duration,
    /// Consecutive rounds without a queue, and above the target.
    empty_rounds: u32,
    full_rounds: u32,
    /// Rounds whose shortest round trips are nearly the same.
    steady: Steady,
    /// Window when the queue first was above the target.
    window_before: f64,
    /// When the window was reduced last: what was sent before does not count again.
    reduced_at: Instant,
    /// The window before a timeout that may have been wrong.
    before_timeout: Option<f64>,
    /// Rounds since the queue was last judged, and those of them after many above the target.
    judged: u32,
    filled: u32,
    /// Round trips for which others are thought to fill the queue next time.
    foreign_for: u32,
    /// Consecutive drains in which the queue did not become empty.
    filled_drains: u32,
    /// The least round trips around the last drains.
    emptiest: [Duration; DRAINS],
    /// Losses, and packets delivered, since losses were last counted.
    losses: u64,
    delivered: f64,
    /// Bytes per second delivered in the last rounds.
    rates: [f64; RATES],
    /// Share of marked rounds (DCQCN's alpha).
    marks: f64,
    /// The last samples.
    recent: [Duration; RECENT],
}

/// Time after which the least round trip is looked for again.
fn drain_after(round_trip: &RoundTrip) -> Duration {
    let after = round_trip.smoothed().unwrap_or_default() * DRAIN_AFTER;
    let nanos = (after.as_nanos() as u64).next_power_of_two();
    Duration::from_nanos(nanos).clamp(DRAIN_AFTER_MIN, DRAIN_AFTER_MAX)
}

impl DelayTarget {
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            window: START,
            packet: 1024.0,
            mode: Mode::Start,
            round: Round::new(now),
            was_limited: false,
            queue_before: Duration::ZERO,
            limit: Duration::from_secs(1),
            peak: Duration::ZERO,
            deviation: Duration::ZERO,
            unloaded: Duration::ZERO,
            empty_rounds: 0,
            full_rounds: 0,
            steady: Steady::new(),
            window_before: START,
            reduced_at: Instant::from_nanos(0),
            before_timeout: None,
            judged: 0,
            filled: 0,
            foreign_for: FOREIGN_MIN,
            filled_drains: 0,
            emptiest: [Duration::MAX; DRAINS],
            losses: 0,
            delivered: 0.0,
            rates: [0.0; RATES],
            marks: 1.0,
            recent: [Duration::ZERO; RECENT],
        }
    }

    /// How much faster than the window is sent.
    fn pacing_gain(&self) -> f64 {
        match self.mode {
            Mode::Start => 2.0,
            _ if self.window < 2.0 * self.packet => 1.0,
            _ => 1.25,
        }
    }

    /// Ends a round without an end: while much is sent again, no round trip is measured.
    fn end_old_round(&mut self, now: Instant, smoothed: Duration) {
        // With less than a packet in flight the next one leaves later than after a round trip.
        let longest = smoothed.mul_f64(3.0 * (2.0 * self.packet / self.window).max(1.0));
        if !smoothed.is_zero() && now.saturating_since(self.round.began) > longest {
            self.was_limited = self.round.limited;
            self.round = Round::new(now);
        }
    }

    /// Ends the start: a queue shows. It was made by half of the present window.
    fn end_start(&mut self, now: Instant) {
        self.set(self.window / 2.0);
        self.mode = Mode::Target;
        self.round.reduced = true;
        self.reduced_at = now;
    }

    /// The delay of the queue that is aimed at: more for small windows, and never as much as the
    /// port cannot hold.
    fn target(&self, least: Duration) -> Duration {
        let packets = (self.window / self.packet).max(WINDOW_MIN);
        let small = ((1.0 / packets.sqrt() - LARGE) / (SMALL - LARGE)).clamp(0.0, 1.0);
        // Threads that are scheduled late leave a short queue empty.
        let noise = (self.deviation * NOISE).min(NOISE_MAX.max(least / 2));
        let target = TARGET.max(least / LONG_ROUTE).max(noise).mul_f64(1.0 + SMALL_WINDOW * small);
        let target = target.max(self.unloaded);
        target.min(self.limit.mul_f64(OF_LIMIT)).max(least / SHORT_ROUTE)
    }

    /// Takes what a drain has shown: by how much a round trip was longer than the least one.
    fn learn_unloaded(&mut self, longer: Duration) {
        let longer = longer.min(UNLOADED_MAX);
        let before = if self.unloaded.is_zero() { longer } else { self.unloaded };
        self.unloaded = (before + longer) / 2;
    }

    /// The shortest of the last samples.
    fn recent_least(&self) -> Duration {
        self.recent.iter().min().copied().unwrap_or_default()
    }

    /// What the window grows by in a round, the same in a round trip for all senders. Rounds of
    /// less than a packet last longer.
    fn growth(&self) -> f64 {
        let packets = self.window / self.packet;
        self.packet * PART / packets.min(1.0)
    }

    /// The window that fills the route at the rate of the last rounds, if that is known.
    fn fills_route(&self, least: Duration) -> f64 {
        if self.window < RATE_PACKETS * self.packet {
            return 0.0;
        }
        self.rates.iter().copied().fold(0.0, f64::max) * least.as_secs_f64()
    }

    fn end_round(&mut self, now: Instant, round_trip: &RoundTrip) -> Route {
        let least = round_trip.least();
        let round = std::mem::replace(&mut self.round, Round::new(now));
        let queue = round.shortest.saturating_sub(least);
        self.was_limited = round.limited;
        self.queue_before = round.longest.saturating_sub(least);
        self.steady.add(round.shortest, least);
        self.rates.rotate_left(1);
        let took = now.saturating_since(round.began).as_secs_f64();
        self.rates[RATES - 1] = round.delivered / took.max(1e-9);
        self.marks += ((if round.marked { 1.0 } else { 0.0 }) - self.marks) * MARK_WEIGHT;
        self.peak -= self.peak / PEAK_FADES;
        self.limit = self.limit.max(self.peak);
        if !round.reduced {
            self.limit = self.limit.mul_f64(1.0 + LIMIT_GROWTH).min(Duration::from_secs(1));
            self.before_timeout = None;
        }
        let target = self.target(least);
        self.empty_rounds = if queue < target / 4 { self.empty_rounds + 1 } else { 0 };
        if queue > target {
            if self.full_rounds == 0 {
                self.window_before = self.window;
            }
            self.full_rounds += 1;
        } else {
            self.full_rounds = 0;
        }
        if matches!(self.mode, Mode::Target | Mode::Foreign { .. }) {
            self.judge_queue(now, round_trip.smoothed().unwrap_or_default());
        }
        let overdue = now.saturating_since(round_trip.least_at()) > drain_after(round_trip);
        match self.mode {
            Mode::Start => {}
            Mode::Drain { window, until, least, longest, samples, foreign, .. } if now >= until => {
                self.full_rounds = 0;
                let others = self.judge_drain(least, round_trip.least(), target);
                // What others fill shows nothing about processors, nor does a single round trip.
                if foreign.is_none() && samples >= UNLOADED_SAMPLES {
                    self.learn_unloaded(longest.saturating_sub(least));
                }
                self.set(window);
                self.mode = foreign.map_or(Mode::Target, |until| Mode::Foreign { until });
                if others && foreign.is_none() {
                    self.begin_foreign(now, round_trip.smoothed().unwrap_or_default());
                }
                return Route::Least(least);
            }
            Mode::Drain { .. } => {}
            Mode::Target | Mode::Foreign { .. } if overdue => {
                let route = least.as_secs_f64() / round.shortest.as_secs_f64().max(1e-9);
                let (part, foreign) = match self.mode {
                    Mode::Foreign { until } => (DRAIN_FOREIGN, Some(until)),
                    _ => (route, None),
                };
                let until = now + round.shortest * DRAIN_ROUND_TRIPS;
                self.mode = Mode::Drain {
                    window: self.window,
                    until,
                    least: Duration::MAX,
                    empty_from: now + round.shortest,
                    longest: Duration::ZERO,
                    samples: 0,
                    foreign,
                };
                let least = (DELAY_MIN * self.packet).min(self.window);
                self.set((self.window * part.min(1.0) * DRAIN_PART).max(least));
            }
            // A single round trip may be long because a thread had its turn late.
            Mode::Target if queue > target && self.recent_least() < least + target => {}
            Mode::Target if queue > target => return self.above_target(&round, target, least),
            Mode::Target if round.reduced || !round.limited => {}
            Mode::Target => {
                let doublings = (self.empty_rounds / EMPTY_ROUNDS).min(8);
                let part = (GROWTH * f64::from(1_u32 << doublings)).min(GROWTH_MAX);
                self.set(self.window + self.growth() + self.window * part);
            }
            Mode::Foreign { .. } if round.limited && !round.reduced => {
                self.set(self.window + self.packet);
            }
            Mode::Foreign { .. } => {}
        }
        Route::Same
    }

    /// Counts a round, and looks at the last ones: senders that follow a target do not keep a
    /// queue above it for long. If one stays for many rounds again and again, others fill it.
    fn judge_queue(&mut self, now: Instant, smoothed: Duration) {
        if let Mode::Foreign { until } = self.mode {
            if now >= until {
                self.mode = Mode::Target;
                (self.judged, self.filled) = (0, 0);
            }
            return;
        }
        self.judged += 1;
        self.filled += u32::from(self.full_rounds >= LONG_FULL);
        if self.judged < JUDGED {
            return;
        }
        let others = self.filled * FILLED_PART > self.judged;
        (self.judged, self.filled) = (0, 0);
        if others {
            self.begin_foreign(now, smoothed);
        } else if self.filled_drains == 0 {
            self.foreign_for = FOREIGN_MIN;
        }
    }

    /// Begins to compete with others, each time for twice as long.
    fn begin_foreign(&mut self, now: Instant, smoothed: Duration) {
        self.foreign_for = (self.foreign_for * 2).min(FOREIGN_MAX);
        self.mode = Mode::Foreign { until: now + smoothed * self.foreign_for };
        self.set(self.window.max(FOREIGN_START * self.packet));
    }

    /// Looks at what a drain has left of the queue: all senders that follow a target have drained
    /// it. What was `found` then is the route, unless shorter round trips were seen around the last
    /// drains. Tells whether others fill the queue.
    fn judge_drain(&mut self, found: Duration, before: Duration, target: Duration) -> bool {
        let emptiest = self.emptiest.iter().copied().fold(before, Duration::min);
        self.emptiest.rotate_left(1);
        self.emptiest[DRAINS - 1] = found.min(before);
        self.filled_drains = if found > emptiest + target / 2 { self.filled_drains + 1 } else { 0 };
        self.filled_drains >= FILLED_DRAINS
    }

    /// Follows the target down, unless that has led nowhere.
    fn above_target(&mut self, round: &Round, target: Duration, least: Duration) -> Route {
        let queue = round.shortest.saturating_sub(least);
        let shrunk = self.window * SHRUNK <= self.window_before || self.window <= self.packet;
        if shrunk && self.full_rounds >= FOREIGN_ROUNDS && self.steady.lasts(FOREIGN_ROUNDS) {
            self.full_rounds = 0;
            self.set(self.window_before);
            return Route::Least(round.shortest);
        }
        if !round.reduced {
            let over = (queue - target).as_secs_f64() / (queue + least).as_secs_f64();
            let least = (DELAY_MIN * self.packet).min(self.window);
            self.set((self.window * (1.0 - 0.8 * over).max(0.5)).max(least));
        }
        Route::Same
    }

    fn reduce(&mut self, now: Instant, factor: f64) {
        self.round.reduced = true;
        self.reduced_at = now;
        self.empty_rounds = 0;
        match &mut self.mode {
            Mode::Start => self.mode = Mode::Target,
            // What was lost was sent before.
            Mode::Drain { window, .. } => *window *= factor,
            Mode::Target | Mode::Foreign { .. } => {}
        }
        self.set(self.window * factor);
    }

    fn set(&mut self, window: f64) {
        self.window = window.clamp(WINDOW_MIN * self.packet, WINDOW_MAX);
    }
}

impl Controller for DelayTarget {
    #[inline]
    fn window(&self) -> Option<u64> {
        Some(self.window as u64)
    }

    fn pacing(&self) -> Option<f64> {
        Some(self.window * self.pacing_gain())
    }

    fn set_packet(&mut self, packet: u64) {
        self.packet = packet as f64;
    }

    #[inline]
    fn sent(&mut self, _amount: u64, room: Room) {
        self.round.limited |= room == Room::Full;
    }

    fn acknowledged(&mut self, acknowledged: &Acknowledged<'_>) -> Route {
        let Acknowledged { now, amount: bytes, sample, round_trip } = *acknowledged;
        let (least, smoothed) = (round_trip.least(), round_trip.smoothed().unwrap_or_default());
        self.end_old_round(now, smoothed);
        self.deviation = round_trip.deviation();
        self.delivered += bytes as f64;
        self.round.delivered += bytes as f64;
        if self.mode == Mode::Start && (self.round.limited || self.was_limited) {
            self.set(self.window + bytes as f64);
        }
        let Some((sample, sent_at)) = sample else { return Route::Same };
        let round = &mut self.round;
        round.shortest = round.shortest.min(sample);
        round.longest = round.longest.max(sample);
        round.samples += 1;
        self.peak = self.peak.max(sample.saturating_sub(least));
        if let Mode::Drain { least, empty_from, longest, samples, .. } = &mut self.mode {
            *least = (*least).min(sample);
            if sent_at >= *empty_from {
                *longest = (*longest).max(sample);
                *samples += 1;
            }
        }
        self.recent.rotate_left(1);
        self.recent[RECENT - 1] = sample;
        if self.mode == Mode::Start && round.samples >= RECENT as u32 {
            let queue = self.recent_least().saturating_sub(least);
            // The first burst of a round queues behind itself.
            if queue > self.target(least).max(least / START_PART) {
                self.end_start(now);
            }
        }
        if sent_at < self.round.began {
            return Route::Same;
        }
        self.end_round(now, round_trip)
    }

    fn lost(&mut self, lost: &Lost<'_>) -> Cause {
        let Lost { now, sent_at, round_trip, .. } = *lost;
        let (least, smoothed) = (round_trip.least(), round_trip.smoothed().unwrap_or_default());
        self.end_old_round(now, smoothed);
        self.round.lost += 1;
        self.losses += 1;
        if sent_at < self.reduced_at {
            return Cause::Congestion;
        }
        let latest = self.recent.iter().max().copied().unwrap_or_default().saturating_sub(least);
        let longest = latest.max(self.round.longest.saturating_sub(least)).max(self.queue_before);
        let recent = self.recent_least();
        let full = latest >= self.peak.mul_f64(PEAK_PART) && self.peak > PEAK_MIN.max(least / 32);
        // One that was full drops several packets at once.
        let bunch = self.round.lost >= LOSSES_MIN
            && self.round.lost as f64 * LOSS_PART as f64 * self.packet > self.window;
        let few = self.window < RATE_PACKETS * self.packet;
        let evident = full && (bunch || few) || recent.saturating_sub(least) >= self.target(least);
        let packets = (self.delivered / self.packet) as u64;
        let many = self.losses >= LOSSES_MIN && self.losses * LOSS_PART > packets.max(LOSS_PACKETS);
        if packets >= LOSS_PACKETS.max((self.window / self.packet) as u64) {
            (self.losses, self.delivered) = (1, 0.0);
        }
        let foreign = matches!(self.mode, Mode::Foreign { .. });
        if !evident && !many && !foreign {
            return Cause::Chance;
        }
        if (many || full && bunch) && longest > LIMIT_MIN && !foreign {
            self.limit = longest.max(self.peak).max(LIMIT_MIN);
        }
        (self.losses, self.delivered) = (0, 0.0);
        let route = self.fills_route(least) * AFTER_LOSS_OF_ROUTE;
        // The start doubles the window, so half of it was enough.
        let part = match self.mode {
            Mode::Start => 0.5_f64.max((route / self.window).min(1.0)),
            Mode::Foreign { .. } => AFTER_LOSS,
            _ => AFTER_LOSS.max((route / self.window).min(1.0)),
        };
        // What chance takes from a few packets says nothing: below, the delay decides.
        let part = part.max((LOSS_MIN * self.packet / self.window).min(1.0));
        self.reduce(now, part);
        Cause::Congestion
    }

    fn timed_out(&mut self, timed_out: &TimedOut<'_>) {
        let TimedOut { now, round_trip, .. } = *timed_out;
        let smoothed = round_trip.smoothed().unwrap_or_default();
        self.round.lost += 1;
        if now.saturating_since(self.reduced_at) < smoothed * 2 {
            return; // the silence of another queue pair was the same
        }
        self.before_timeout.get_or_insert(self.window);
        // A peer that is dead says nothing about the path: a later connection must not begin with
        // less than a packet.
        let least = (AFTER_TIMEOUT * self.packet / self.window).min(1.0);
        self.reduce(now, least.max(0.5));
    }

    fn spurious(&mut self) {
        if let Some(window) = self.before_timeout.take() {
            self.set(self.window.max(window));
        }
    }

    fn marked(&mut self, now: Instant) {
        self.round.marked = true;
        if !self.round.reduced {
            self.reduce(now, 1.0 - self.marks / 2.0);
        }
    }
}
