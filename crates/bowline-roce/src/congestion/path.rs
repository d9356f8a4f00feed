//! A path: what all queue pairs to one destination share.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use bowline_base::Instant;
use bowline_verbs::PathStats;

use super::Congestion;
use super::controller::{
    Acknowledged, Cause, Control, Controller, Extent, Lost, Room, Route, TimedOut,
};
use super::pacer::Pacer;
use super::round_trip::{DeviationWeight, RoundTrip};

/// Most bytes that must be free before a window that was full opens again: a burst.
const REOPEN_MAX: u64 = 65_000;
/// After a loss, more are expected for this long [CC-13].
const LOSSY_FOR: Duration = Duration::from_secs(10);
/// The answer to a packet takes this part of the least round trip, at least.
const OWN_ANSWER: f64 = 0.9;
/// Parts of the window of READs that are asked for one by one.
const READ_PARTS: u64 = 4;
/// Least time between two notifications of congestion to a peer, as NICs keep it.
const CNP_INTERVAL: Duration = Duration::from_micros(50);
/// Bytes of a packet on the network besides its datagram's payload.
const OUTER_BYTES: u64 = 42;

/// The path to a destination.
#[derive(Debug)]
pub(crate) struct Path {
    stats: PathStats,
    round_trip: RoundTrip,
    /// Not limited where each queue pair has a window of its own.
    control: Control,
    /// The way back: what READs have asked for.
    reads: Control,
    read_round_trip: RoundTrip,
    asked: u64,
    pacer: Pacer,
    in_flight: u64,
    /// The window is full, until enough of it is free.
    closed: bool,
    packet: u64,
    /// Queue pairs that wait to send, in the order of their turns.
    pub(crate) waiting: VecDeque<u32>,
    /// When the path's timer is due: the valid entry of the heap.
    pub(crate) timer_at: Option<Instant>,
    used_at: Instant,
    /// When the peer was last notified of congestion.
    notified_at: Option<Instant>,
    /// How long a packet that the peer misses may only be late.
    late_for: Duration,
    /// When something was lost last.
    lost_at: Option<Instant>,
}

impl Path {
    pub(super) fn new(peer: IpAddr, congestion: Congestion, now: Instant) -> Self {
        Self {
            stats: PathStats {
                peer,
                queue_pairs: 0,
                round_trip: None,
                least_round_trip: Duration::ZERO,
                window: None,
                in_flight: 0,
                rate: None,
                lost_gaps: 0,
                lost_timeouts: 0,
                congestion_losses: 0,
                resent: 0,
                cnps_received: 0,
                cnps_sent: 0,
            },
            round_trip: RoundTrip::new(DeviationWeight::Window),
            control: congestion.of_path(now),
            reads: congestion.of_path(now),
            read_round_trip: RoundTrip::new(DeviationWeight::Window),
            asked: 0,
            pacer: Pacer::new(),
            in_flight: 0,
            closed: false,
            packet: 1024,
            waiting: VecDeque::new(),
            timer_at: None,
            used_at: now,
            notified_at: None,
            late_for: Duration::ZERO,
            lost_at: None,
        }
    }

    pub(super) const fn addr(&self) -> IpAddr {
        self.stats.peer
    }

    /// Adds a queue pair; tells whether it is the first.
    pub(super) const fn join(&mut self, now: Instant) -> bool {
        self.used_at = now;
        self.stats.queue_pairs += 1;
        self.stats.queue_pairs == 1
    }

    /// Removes a queue pair; tells whether it was the last.
    pub(super) const fn leave(&mut self) -> bool {
        self.stats.queue_pairs -= 1;
        self.stats.queue_pairs == 0
    }

    pub(super) const fn is_unused(&self) -> bool {
        self.stats.queue_pairs == 0
    }

    pub(crate) const fn used_at(&self) -> Instant {
        self.used_at
    }

    pub(super) fn stats(&self) -> PathStats {
        PathStats {
            round_trip: self.round_trip.smoothed(),
            least_round_trip: self.round_trip.least(),
            window: self.control.window(),
            in_flight: self.in_flight,
            rate: self.pacer.rate(),
            ..self.stats
        }
    }

    /// The controller of what is sent.
    #[cfg(test)]
    pub(crate) const fn control_mut(&mut self) -> &mut Control {
        &mut self.control
    }

    /// Smoothed round trip, if one was measured.
    #[inline]
    pub(crate) const fn smoothed(&self) -> Option<Duration> {
        self.round_trip.smoothed()
    }

    /// Smoothed round trip, if it is no guess.
    pub(crate) fn measured(&self) -> Option<Duration> {
        self.smoothed().filter(|_| !self.round_trip.is_guess())
    }

    /// Tells whether ports may mark what is sent instead of dropping it [CC-5].
    #[inline]
    pub(crate) fn takes_marks(&self) -> bool {
        self.control.heeds_marks()
    }

    /// Sets the payload bytes of a full packet.
    pub(crate) fn set_mtu(&mut self, mtu: usize) {
        self.packet = mtu as u64 + 16 + OUTER_BYTES;
        self.control.set_packet(self.packet);
        self.reads.set_packet(self.packet);
    }

    /// The share of one queue pair in the window, in full packets; `None`: not limited.
    #[inline]
    pub(crate) fn window_packets(&self) -> Option<u32> {
        // Those in line share it.
        let share = self.control.window()? / (1 + self.waiting.len() as u64);
        Some(u32::try_from(share / self.packet).unwrap_or(u32::MAX).max(1))
    }

    /// Tells whether a packet may leave whatever the pacer says [CC-4]: nothing is in flight from
    /// which it is to be apart, the window has room for it, and the round trip that paces is
    /// doubtful. So an answer that a link has held back does not hold back what follows.
    fn is_clocked_by_answers(&self) -> bool {
        self.in_flight == 0
            && self.round_trip.is_doubtful()
            && self.control.window().is_some_and(|window| window >= self.packet)
    }

    /// Returns how many bytes the pacer lets leave now.
    fn paced_room(&self, now: Instant) -> u64 {
        self.pacer.room(now).max(u64::from(self.is_clocked_by_answers()))
    }

    /// Returns how many packets of `bytes` each may be sent now.
    #[inline]
    pub(crate) fn room(&self, now: Instant, bytes: usize) -> usize {
        let Some(window) = self.control.window() else { return usize::MAX };
        if self.closed {
            return 0;
        }
        let bytes = bytes as u64 + OUTER_BYTES;
        let window = window.saturating_sub(self.in_flight) / bytes;
        // The last packet may exceed what the pacer has.
        let paced = self.paced_room(now).div_ceil(bytes);
        let least = u64::from(self.in_flight == 0 || paced > 0 && window == 0);
        paced.min(window.max(least)) as usize
    }

    /// Tells whether a packet may be sent now.
    #[inline]
    pub(crate) fn allows(&self, now: Instant) -> bool {
        !self.closed && self.paced_room(now) > 0
    }

    /// Tells whether a packet of `bytes` more leaves no room for another one.
    #[inline]
    pub(crate) fn fills(&self, bytes: usize) -> bool {
        let filled = self.in_flight + bytes as u64 + OUTER_BYTES + self.packet;
        self.control.window().is_some_and(|window| filled > window)
    }

    /// Tells whether a READ may ask for more [CC-8].
    #[inline]
    pub(crate) fn allows_read(&self) -> bool {
        self.reads.window().is_none_or(|window| self.asked == 0 || self.asked < window)
    }

    /// Most packets that a READ asks for at once: they leave in one burst.
    pub(crate) fn read_part(&self) -> u32 {
        let window = self.reads.window().unwrap_or(u64::MAX);
        u32::try_from(window / (READ_PARTS * self.packet)).unwrap_or(u32::MAX).max(1)
    }

    /// Notes that a READ asks for `packets` packets; returns what they count for.
    pub(crate) fn asked(&mut self, packets: u32) -> u64 {
        let bytes = u64::from(packets) * self.packet;
        self.asked += bytes;
        let full = self.reads.window().is_some_and(|window| self.asked >= window);
        self.reads.sent(bytes, Room::full_if(full));
        bytes
    }

    /// Notes that `bytes` that READs have asked for have come, the first of those asked for at
    /// `asked_at`, or will not come.
    pub(crate) fn answered(&mut self, now: Instant, bytes: u64, asked_at: Option<Instant>) {
        self.asked = self.asked.saturating_sub(bytes);
        let sample = asked_at.map(|at| (now.saturating_since(at), at));
        if let Some((sample, _)) = sample {
            self.read_round_trip.sample(now, sample);
        }
        let round_trip = &self.read_round_trip;
        let answered = Acknowledged { now, amount: bytes, sample, round_trip };
        if let Route::Least(least) = self.reads.acknowledged(&answered) {
            self.read_round_trip.reset_least(now, least);
        }
    }

    /// Notes that an answer was lost that was asked for at a time.
    pub(crate) fn answer_lost(&mut self, now: Instant, asked_at: Instant) {
        let _: Cause = self.reads.lost(&Lost {
            now,
            sent_at: asked_at,
            extent: Extent::Packet,
            in_flight: self.asked,
            round_trip: &self.read_round_trip,
        });
    }

    /// Notes that the timer of those who wait was due at a time.
    pub(crate) fn timer_came(&mut self, now: Instant, due: Instant) {
        self.pacer.turn_is_late(now.saturating_since(due));
    }

    /// Returns when packets may be sent again, if the pacer holds them back.
    pub(crate) fn resumes_at(&self, now: Instant) -> Option<Instant> {
        let held_back = !self.closed && !self.is_clocked_by_answers();
        self.pacer.resumes_at(now).filter(|_| held_back)
    }

    /// Notes that `packets` packets of `bytes` in all are sent; returns what they count for.
    #[inline]
    pub(crate) fn sent(&mut self, now: Instant, packets: usize, bytes: usize) -> u64 {
        let bytes = bytes as u64 + packets as u64 * OUTER_BYTES;
        if self.is_clocked_by_answers() {
            self.pacer.forget_debt(now);
        }
        self.in_flight += bytes;
        if let Some(window) = self.control.window() {
            self.pacer.sent(now, packets as u32, bytes / packets.max(1) as u64);
            let full = self.in_flight + self.packet > window;
            self.closed |= full;
            self.control.sent(bytes, Room::full_if(full));
        }
        bytes
    }

    /// Notes that `bytes` are not in flight any more, and will not be acknowledged.
    pub(crate) fn gone(&mut self, bytes: u64) {
        self.in_flight = self.in_flight.saturating_sub(bytes);
        self.reopen();
    }

    fn reopen(&mut self) {
        if !self.closed {
            return;
        }
        let Some(window) = self.control.window() else { return };
        let room = (window / 4).min(REOPEN_MAX).max(self.packet);
        self.closed = self.in_flight > 0 && self.in_flight + room > window;
    }

    /// Takes the acknowledgement of `bytes`, the newest of which were sent at `sent_at`, if they
    /// were sent once only.
    pub(crate) fn acknowledged(&mut self, now: Instant, bytes: u64, sent_at: Option<Instant>) {
        self.used_at = now;
        self.in_flight = self.in_flight.saturating_sub(bytes);
        let sample = sent_at.map(|at| (now.saturating_since(at), at));
        if let Some((sample, _)) = sample {
            let was_wrong = self.round_trip.is_guess() || self.round_trip.is_doubtful();
            self.round_trip.sample(now, sample);
            if was_wrong && !self.round_trip.is_doubtful() {
                self.pacer.forget_debt(now);
            }
        }
        let acknowledged =
            Acknowledged { now, amount: bytes, sample, round_trip: &self.round_trip };
        if let Route::Least(least) = self.control.acknowledged(&acknowledged) {
            self.round_trip.reset_least(now, least);
        }
        self.set_rate(now);
        self.reopen();
    }

    /// Takes the time since something was first sent that may have been lost: the best guess of the
    /// round trip while nothing is known.
    pub(crate) fn guess_round_trip(&mut self, now: Instant, first_at: Instant) {
        self.round_trip.guess(now, now.saturating_since(first_at));
    }

    /// Takes the longest that the round trip can be, in the place of a longer guess: packets left
    /// at the pace of a link that was cut [CC-2].
    pub(crate) fn bound_guess(&mut self, now: Instant, longest: Duration) {
        if self.round_trip.bound_guess(now, longest) {
            self.pacer.forget_debt(now);
            self.set_rate(now);
        }
    }

    /// Tells whether the round trip is no more than a guess.
    #[inline]
    pub(crate) const fn guesses(&self) -> bool {
        self.round_trip.is_guess()
    }

    fn set_rate(&mut self, now: Instant) {
        let short = self.is_lossy(now);
        if let (Some(bytes), Some(smoothed)) = (self.control.pacing(), self.round_trip.smoothed()) {
            self.pacer.set_rate(bytes, smoothed, short);
        }
    }

    /// Notes that a packet sent at a time was lost: the peer has later ones.
    pub(crate) fn lost_in_gap(&mut self, now: Instant, sent_at: Instant) {
        self.stats.lost_gaps += 1;
        self.lost_at = Some(now);
        let cause = self.control.lost(&Lost {
            now,
            sent_at,
            extent: Extent::Packet,
            in_flight: self.in_flight,
            round_trip: &self.round_trip,
        });
        self.stats.congestion_losses += u64::from(cause == Cause::Congestion);
        self.set_rate(now);
    }

    /// Notes that a silent peer has answered after something was sent again at a time. An answer
    /// that comes sooner than a round trip is that to the first copy: nothing was lost.
    pub(crate) fn answered_late(&mut self, now: Instant, resent_at: Instant) {
        if now.saturating_since(resent_at) >= self.round_trip.least().mul_f64(OWN_ANSWER) {
            self.lost_at = Some(now);
        } else {
            self.control.spurious();
            self.set_rate(now);
        }
    }

    /// Notes that the packets in flight of a queue pair were lost: their timer has expired, so many
    /// times in a row.
    pub(crate) fn timed_out(&mut self, now: Instant, consecutive: u32) {
        self.stats.lost_timeouts += 1;
        self.control.timed_out(&TimedOut { now, consecutive, round_trip: &self.round_trip });
        self.set_rate(now);
    }

    /// Tells whether a packet that was lost may be sent again now: the window has room for it,
    /// since it is not in flight any more.
    #[inline]
    pub(crate) fn allows_replacement(&self, now: Instant) -> bool {
        self.pacer.room(now) > 0
    }

    /// Returns when a packet that was lost may be sent again, if not now.
    pub(crate) fn replacement_at(&self, now: Instant) -> Option<Instant> {
        self.pacer.resumes_at(now)
    }

    /// Notes that a packet of `bytes` is sent in the place of one that was lost.
    pub(crate) fn replaced(&mut self, now: Instant, bytes: usize) {
        self.pacer.sent(now, 1, bytes as u64 + OUTER_BYTES);
    }

    /// Tells whether packets were lost lately, so that a lost tail is looked for soon.
    #[inline]
    pub(crate) fn is_lossy(&self, now: Instant) -> bool {
        self.lost_at.is_some_and(|at| now.saturating_since(at) < LOSSY_FOR)
    }

    /// How long a packet that the peer misses may only be late.
    pub(crate) const fn late_for(&self) -> Duration {
        self.late_for
    }

    /// Notes that what was sent again at a time has been acknowledged. An acknowledgement that
    /// comes sooner than a round trip is that of the first copy, which was only late [CC-11].
    pub(crate) fn repaired(&mut self, now: Instant, sent_at: Instant) {
        let least = self.round_trip.least();
        let own = now.saturating_since(sent_at) >= least.mul_f64(OWN_ANSWER);
        if !own && !self.round_trip.is_guess() {
            let most = self.round_trip.smoothed().unwrap_or(least);
            self.late_for = (self.late_for * 3 / 2).max(least / 4).min(most);
        }
    }

    /// Tells whether the peer is to be notified of congestion now [CC-6].
    pub(crate) fn may_notify(&mut self, now: Instant) -> bool {
        if self.notified_at.is_some_and(|at| now.saturating_since(at) < CNP_INTERVAL) {
            return false;
        }
        self.notified_at = Some(now);
        self.stats.cnps_sent += 1;
        true
    }

    /// Takes a notification of congestion.
    pub(crate) fn marked(&mut self, now: Instant) {
        self.stats.cnps_received += 1;
        self.control.marked(now);
    }

    /// Notes that packets were sent again.
    pub(crate) const fn resent(&mut self, packets: u64) {
        self.stats.resent += packets;
    }
}

#[cfg(test)]
mod tests;
