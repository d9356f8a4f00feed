//! The delay controller: the window of a path is as large as keeps a short queue in the slowest
//! port, found by the delay of that queue [CC-3].
//!
//! ```text
//!   round trip   least |======== route ========|--- queue ---|  of the shortest of a round
//!                                                ^ target: grow below, shrink above
//! ```
//! | part | question | rule |
//! |---|---|---|
//! | [`round`] | how long was the queue of the last round trip? | CC-3 |
//! | [`start`] | when does the doubling of the start end? | CC-15 |
//! | [`target`] | which queue is aimed at? | CC-16, CC-20 |
//! | [`follow`] | how does the window grow below that, and shrink above? | CC-17, CC-18 |
//! | [`drain`] | when is the route looked at without a queue, and what does that show? | CC-19, CC-20 |
//! | [`competition`] | do others fill the queue? | CC-21 |
//! | [`route`] | has the route become longer? | CC-22 |
//! | [`losses`], [`delivery`] | is a loss congestion, and what does it leave? | CC-23, CC-25 |
//! | [`limit`] | what can the port queue at most? | CC-24 |
//! | [`marks`] | what does a notification of congestion leave? | CC-7 |
//!
//! The controller here owns the window and the phase, and tells each part what the others have to
//! know. Senders of a shared port take the same decisions from the same queue. A number with the
//! word "chosen" was set by hand until the cells of the simulator (`bowline sim --roce --cells`,
//! `crates/bowline-sim/src/roce/congestion/floors.rs`) reached their goals. What the cells say when
//! such a number is changed: `bench/notes/2026-11-29-numbers-of-the-delay-controller.md`.

mod competition;
mod delivery;
mod drain;
mod follow;
mod limit;
mod losses;
mod marks;
mod round;
mod route;
mod start;
mod target;

use std::time::Duration;

use bowline_base::Instant;

use self::competition::Competition;
use self::delivery::DeliveryRate;
use self::drain::Drain;
use self::follow::Growth;
use self::limit::QueueLimit;
use self::losses::LossShare;
use self::marks::MarkShare;
use self::round::{RECENT, Recent, Round};
use self::route::StandingQueue;
pub(super) use self::start::PACING_GAIN as START_PACING_GAIN;
use self::target::Target;
use super::controller::{Acknowledged, Cause, Controller, Lost, Room, Route, TimedOut};
use super::round_trip::RoundTrip;

/// Largest window, in bytes: 400 Gb/s over 5 ms. Chosen.
const WINDOW_MAX: f64 = (256 << 20) as f64;
/// Smallest window, in packets: one packet in 20 round trips. Chosen; Swift has a thousandth.
const WINDOW_MIN: f64 = 0.05;
/// Pacing after the start: the window, not the pacer, decides. BBR's gain that looks for more rate.
pub(super) const PACING_GAIN: f64 = 1.25;
/// Windows of fewer packets are paced exactly, so that they do not leave in pairs. Chosen.
pub(super) const EXACTLY_PACED: f64 = 2.0;
/// Round trips after which a round without a sample ends: while much is sent again, no round trip
/// is measured. Chosen.
const OLD_ROUND: f64 = 3.0;

/// What the window follows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// The window doubles each round trip.
    Start,
    /// The window follows the target.
    Target,
    /// The window is small for a moment, to see the route without a queue.
    Drain(Drain),
    /// Others fill the queue, as it is thought until a time: the window grows and shrinks like
    /// theirs.
    Competing { until: Instant },
}

/// The window of a path, in bytes, and what it follows from.
#[derive(Debug)]
pub(crate) struct DelayController {
    window: f64,
    /// Bytes of a full packet.
    packet: f64,
    phase: Phase,
    round: Round,
    /// The window was full in the last round.
    was_limited: bool,
    /// Longest queue of the last round.
    queue_before: Duration,
    recent: Recent,
    target: Target,
    limit: QueueLimit,
    growth: Growth,
    standing: StandingQueue,
    competition: Competition,
    losses: LossShare,
    delivery: DeliveryRate,
    marks: MarkShare,
    /// When the window was reduced last: what was sent before does not count again.
    reduced_at: Instant,
    /// The window before a time-out that may turn out to be spurious.
    before_timeout: Option<f64>,
}

impl DelayController {
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            window: start::WINDOW,
            packet: 1024.0,
            phase: Phase::Start,
            round: Round::new(now),
            was_limited: false,
            queue_before: Duration::ZERO,
            recent: Recent::new(),
            target: Target::new(),
            limit: QueueLimit::new(),
            growth: Growth::new(),
            standing: StandingQueue::new(),
            competition: Competition::new(),
            losses: LossShare::new(),
            delivery: DeliveryRate::new(),
            marks: MarkShare::new(),
            reduced_at: Instant::from_nanos(0),
            before_timeout: None,
        }
    }

    fn set(&mut self, window: f64) {
        self.window = window.clamp(WINDOW_MIN * self.packet, WINDOW_MAX);
    }

    /// The delay of the queue that is aimed at now.
    fn target_delay(&self, least: Duration) -> Duration {
        let packets = (self.window / self.packet).max(WINDOW_MIN);
        self.target.delay(packets, least, self.limit.cap())
    }

    /// Takes the round trip of something that was sent at a time.
    fn add_sample(&mut self, now: Instant, sample: Duration, sent_at: Instant, least: Duration) {
        self.round.add(sample);
        self.recent.add(sample);
        self.limit.seen(sample.saturating_sub(least));
        match &mut self.phase {
            Phase::Drain(drain) => drain.add(sample, sent_at),
            Phase::Start if self.round.samples >= RECENT as u32 => {
                let queue = self.recent.shortest().saturating_sub(least);
                if start::ends(queue, self.target_delay(least), least) {
                    self.end_start(now);
                }
            }
            Phase::Start | Phase::Target | Phase::Competing { .. } => {}
        }
    }

    /// Ends the start: a queue shows.
    fn end_start(&mut self, now: Instant) {
        self.set(self.window * start::AT_END);
        self.phase = Phase::Target;
        self.round.reduced = true;
        self.reduced_at = now;
    }

    /// Makes the window smaller, and does so once for what was sent until now.
    fn reduce(&mut self, now: Instant, part: f64) {
        self.round.reduced = true;
        self.reduced_at = now;
        self.growth.restart();
        match &mut self.phase {
            Phase::Start => self.phase = Phase::Target,
            // What was lost was sent before.
            Phase::Drain(drain) => drain.window *= part,
            Phase::Target | Phase::Competing { .. } => {}
        }
        self.set(self.window * part);
    }

    /// Begins to compete with others who fill the queue.
    fn compete(&mut self, now: Instant, smoothed: Duration) {
        let until = self.competition.begin(now, smoothed);
        self.phase = Phase::Competing { until };
        self.set(self.window.max(competition::WINDOW_MIN * self.packet));
    }
}

/// Ends of rounds.
impl DelayController {
    /// Ends a round that lasts too long, without a decision.
    fn end_old_round(&mut self, now: Instant, smoothed: Duration) {
        // With less than a packet in flight the next one leaves later than after a round trip.
        let slower = (2.0 * self.packet / self.window).max(1.0);
        let longest = smoothed.mul_f64(OLD_ROUND * slower);
        if !smoothed.is_zero() && now.saturating_since(self.round.began) > longest {
            self.was_limited = self.round.limited;
            self.round = Round::new(now);
        }
    }

    /// Ends a round, and decides what the window is in the next one.
    fn end_round(&mut self, now: Instant, round_trip: &RoundTrip) -> Route {
        let (least, smoothed) = (round_trip.least(), round_trip.smoothed().unwrap_or_default());
        let round = std::mem::replace(&mut self.round, Round::new(now));
        self.learn(now, &round, least);
        let target = self.target_delay(least);
        let queue = round.queue(least);
        self.growth.end_round(queue, target);
        self.standing.end_round(queue > target, self.window);
        self.look_for_others(now, smoothed);
        match self.phase {
            Phase::Drain(drain) if now >= drain.until => {
                return self.end_drain(now, drain, round_trip, target);
            }
            Phase::Start | Phase::Drain(_) => {}
            Phase::Target | Phase::Competing { .. } if drain::is_due(now, round_trip) => {
                self.begin_drain(now, &round, least);
            }
            Phase::Target => return self.follow_target(&round, target, least),
            Phase::Competing { .. } if round.limited && !round.reduced => {
                self.set(self.window + competition::ADDED * self.packet);
            }
            Phase::Competing { .. } => {}
        }
        Route::Same
    }

    /// Takes what a round has shown.
    fn learn(&mut self, now: Instant, round: &Round, least: Duration) {
        self.was_limited = round.limited;
        self.queue_before = round.longest_queue(least);
        self.standing.sample(round.shortest(), least);
        self.delivery.end_round(round.delivered, now.saturating_since(round.began));
        self.marks.end_round(round.marked);
        self.limit.end_round(round.reduced);
        if !round.reduced {
            self.before_timeout = None;
        }
    }

    /// Looks at the last rounds: do others fill the queue, or not any more? [CC-21]
    fn look_for_others(&mut self, now: Instant, smoothed: Duration) {
        match self.phase {
            Phase::Competing { until } if now >= until => {
                self.phase = Phase::Target;
                self.competition.restart();
            }
            Phase::Target if self.competition.judge_round(self.standing.rounds()) => {
                self.compete(now, smoothed);
            }
            Phase::Start | Phase::Target | Phase::Drain(_) | Phase::Competing { .. } => {}
        }
    }

    /// Makes the window small for a moment [CC-19].
    fn begin_drain(&mut self, now: Instant, round: &Round, least: Duration) {
        let competing = match self.phase {
            Phase::Competing { until } => Some(until),
            Phase::Start | Phase::Target | Phase::Drain(_) => None,
        };
        let drain = Drain::begin(now, self.window, round, competing);
        self.phase = Phase::Drain(drain);
        self.set(drain.small_window(self.packet, round, least));
    }

    /// Goes on with the window of before, on the route that the drain has shown.
    fn end_drain(
        &mut self,
        now: Instant,
        drain: Drain,
        round_trip: &RoundTrip,
        target: Duration,
    ) -> Route {
        self.standing.restart();
        let others = self.competition.judge_drain(drain.least, round_trip.least(), target);
        if let Some(delay) = drain.host_delay() {
            self.target.learn_host_delay(delay);
        }
        self.set(drain.window);
        self.phase = drain.competing.map_or(Phase::Target, |until| Phase::Competing { until });
        if others && drain.competing.is_none() {
            self.compete(now, round_trip.smoothed().unwrap_or_default());
        }
        Route::Least(drain.least)
    }

    /// Grows below the target [CC-17] and shrinks above it [CC-18].
    fn follow_target(&mut self, round: &Round, target: Duration, least: Duration) -> Route {
        let queue = round.queue(least);
        if queue > target {
            // A single round trip may be long because a thread had its turn late.
            let late = self.recent.shortest() < least + target;
            return if late { Route::Same } else { self.above_target(round, target, least) };
        }
        if round.limited && !round.reduced {
            self.set(self.growth.grown(self.window, self.packet));
        }
        Route::Same
    }

    /// Follows the target down, unless that has led nowhere [CC-22].
    fn above_target(&mut self, round: &Round, target: Duration, least: Duration) -> Route {
        if let Some(before) = self.standing.is_route(self.window, self.packet) {
            self.standing.restart();
            self.set(before);
            return Route::Least(round.shortest());
        }
        if !round.reduced {
            let queue = round.queue(least);
            self.set(follow::shrunk(self.window, self.packet, queue, target, least));
        }
        Route::Same
    }
}

/// What speaks for a loss being congestion.
#[derive(Clone, Copy, Debug)]
struct Evidence {
    /// The port was full, and drops as many packets at once.
    overflow: bool,
    /// There is a queue at or above the target, or the port was full as far as a small window
    /// shows.
    queue: bool,
    /// More is lost than bad lines lose.
    share: bool,
    /// The longest queue of late.
    longest: Duration,
}

/// Losses [CC-23].
impl DelayController {
    fn evidence(&mut self, least: Duration) -> Evidence {
        let latest = self.recent.longest().saturating_sub(least);
        let full = self.limit.is_reached(latest, least);
        let bunch = losses::is_bunch(self.round.lost, self.window, self.packet);
        let small = losses::is_small(self.window, self.packet);
        let standing = self.recent.shortest().saturating_sub(least);
        Evidence {
            overflow: full && bunch,
            queue: full && (bunch || small) || standing >= self.target_delay(least),
            share: self.losses.judge(self.window, self.packet),
            longest: latest.max(self.round.longest_queue(least)).max(self.queue_before),
        }
    }

    /// What a loss that shows congestion leaves of the window.
    fn left_by_loss(&self, least: Duration) -> f64 {
        let fills_route = self.delivery.fills_route(self.window, self.packet, least);
        match self.phase {
            Phase::Start => {
                losses::left(self.window, self.packet, fills_route, Some(start::AT_END))
            }
            Phase::Competing { .. } => {
                losses::at_least(competition::AFTER_LOSS, self.window, self.packet)
            }
            Phase::Target | Phase::Drain(_) => {
                losses::left(self.window, self.packet, fills_route, None)
            }
        }
    }
}

impl Controller for DelayController {
    #[inline]
    fn window(&self) -> Option<u64> {
        Some(self.window as u64)
    }

    /// [CC-4]
    fn pacing(&self) -> Option<f64> {
        let gain = match self.phase {
            Phase::Start => start::PACING_GAIN,
            _ if self.window < EXACTLY_PACED * self.packet => 1.0,
            _ => PACING_GAIN,
        };
        Some(self.window * gain)
    }

    fn set_packet(&mut self, packet: u64) {
        self.packet = packet as f64;
    }

    #[inline]
    fn sent(&mut self, _amount: u64, room: Room) {
        self.round.limited |= room == Room::Full;
    }

    fn acknowledged(&mut self, acknowledged: &Acknowledged<'_>) -> Route {
        let Acknowledged { now, amount, sample, round_trip } = *acknowledged;
        let bytes = amount as f64;
        self.end_old_round(now, round_trip.smoothed().unwrap_or_default());
        self.target.deviation = round_trip.deviation();
        self.losses.delivered(bytes);
        self.round.delivered += bytes;
        if self.phase == Phase::Start && (self.round.limited || self.was_limited) {
            self.set(self.window + bytes);
        }
        let Some((sample, sent_at)) = sample else { return Route::Same };
        self.add_sample(now, sample, sent_at, round_trip.least());
        if sent_at < self.round.began {
            return Route::Same;
        }
        self.end_round(now, round_trip)
    }

    fn lost(&mut self, lost: &Lost<'_>) -> Cause {
        let Lost { now, sent_at, round_trip, .. } = *lost;
        let least = round_trip.least();
        self.end_old_round(now, round_trip.smoothed().unwrap_or_default());
        self.round.lost += 1;
        self.losses.lost();
        if sent_at < self.reduced_at {
            return Cause::Congestion;
        }
        let evidence = self.evidence(least);
        let competing = matches!(self.phase, Phase::Competing { .. });
        if !evidence.queue && !evidence.share && !competing {
            return Cause::Chance;
        }
        if (evidence.share || evidence.overflow) && !competing {
            self.limit.learn(evidence.longest);
        }
        self.losses.restart();
        self.reduce(now, self.left_by_loss(least));
        Cause::Congestion
    }

    /// [CC-25]
    fn timed_out(&mut self, timed_out: &TimedOut<'_>) {
        let TimedOut { now, round_trip, .. } = *timed_out;
        self.round.lost += 1;
        let smoothed = round_trip.smoothed().unwrap_or_default();
        if now.saturating_since(self.reduced_at) < smoothed * 2 {
            return; // the silence of another queue pair was the same
        }
        self.before_timeout.get_or_insert(self.window);
        self.reduce(now, losses::left_by_timeout(self.window, self.packet));
    }

    /// [CC-25]
    fn spurious(&mut self) {
        if let Some(window) = self.before_timeout.take() {
            self.set(self.window.max(window));
        }
    }

    /// [CC-7]
    fn marked(&mut self, now: Instant) {
        self.round.marked = true;
        if !self.round.reduced {
            self.reduce(now, self.marks.left());
        }
    }
}

#[cfg(test)]
mod tests;
