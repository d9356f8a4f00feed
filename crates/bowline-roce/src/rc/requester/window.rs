//! What is in flight, and what may be: the window of packets, the READs and atomics that the peer
//! takes at once, and how often an acknowledgement is requested.
//!
//! ```text
//!           una                      end
//!   PSNs ----|------------------------|-------->
//!    done    |  not acknowledged      |  fresh
//! ```
//! How large the window is says its [controller](crate::congestion::Controller).

use std::collections::VecDeque;

use bowline_base::Instant;
use bowline_wire::roce::Psn;

use super::settings::Settings;
use crate::congestion::{
    Acknowledged, Cause, Control, Controller, Extent, Lost, Room, RoundTrip, Route, TimedOut,
};

/// Size of the window where that of the path decides, in packets: what sequence numbers and the
/// peer's memory allow.
const PATH_DECIDES: u32 = 1 << 14;
/// Most packets that must be free before a full window opens again.
const REOPEN_MAX: u32 = 256;
/// Packets requested by one READ request, where the window of the path decides.
const READ_PART: u32 = 64;
/// Most packets between two requests for an acknowledgement, where the window of the path decides
/// [CC-26].
const ACK_REQ_PACKETS: u32 = 80;

/// Packets, READs and atomics in flight.
#[derive(Debug)]
pub(super) struct Window {
    una: Psn,
    end: Psn,
    /// In packets; unlimited where the window of the path decides.
    control: Control,
    /// The window has been filled: the next packet waits until a quarter of the window is free
    /// again.
    closed: bool,
    /// Packets sent since the last one with the AckReq bit.
    packets_since_ack_req: u32,
    /// Most packets requested by one READ request; not 0.
    read_part: u32,
    /// Packets of the path's window, if that decides.
    path_window: Option<u32>,
    /// Most READs and atomics that the peer takes at once.
    reads_max: usize,
    /// READs and atomics started and not complete.
    reads_outstanding: usize,
    /// End PSN of each expected answer: one for each atomic and each part of a READ that has been
    /// requested [REQ-4].
    expected_answers: VecDeque<Psn>,
}

impl Window {
    pub(super) const fn new() -> Self {
        Self {
            una: Psn::ZERO,
            end: Psn::ZERO,
            control: Control::closed(),
            closed: false,
            packets_since_ack_req: 0,
            read_part: 1,
            path_window: None,
            reads_max: 0,
            reads_outstanding: 0,
            expected_answers: VecDeque::new(),
        }
    }

    /// Opens the window at the first PSN, `psn`.
    pub(super) fn start(&mut self, settings: &Settings, psn: Psn) {
        (self.una, self.end) = (psn, psn);
        self.control = settings.congestion.of_queue_pair();
        self.read_part = self.control.window().map_or(READ_PART, |packets| packets as u32);
        self.change(settings);
    }

    /// Takes changed attributes, while nothing is in flight.
    pub(super) fn change(&mut self, settings: &Settings) {
        self.reads_max = usize::from(settings.max_rd_atomic);
    }

    /// Number of packets that may be in flight.
    #[inline]
    fn size(&self) -> u32 {
        self.control.window().map_or(PATH_DECIDES, |packets| packets as u32)
    }

    /// The oldest PSN that is not acknowledged.
    #[inline]
    pub(super) const fn una(&self) -> Psn {
        self.una
    }

    /// The first PSN that has not been sent.
    #[inline]
    pub(super) const fn end(&self) -> Psn {
        self.end
    }

    /// Tells whether everything sent has been acknowledged.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.una == self.end
    }

    /// Number of packets sent and not acknowledged.
    #[inline]
    pub(super) const fn unanswered(&self) -> u32 {
        self.end.since(self.una)
    }

    /// Tells whether the packet `next` may be sent now. A full window reopens by quarters, since an
    /// acknowledgement comes for each quarter. Otherwise packets would be sent one by one for ever,
    /// each with an acknowledgement of its own.
    #[inline]
    pub(super) fn allows(&self, next: Psn) -> bool {
        let (in_flight, size) = (next.since(self.una), self.size());
        let room = (size / 4).min(REOPEN_MAX);
        in_flight < size && (!self.closed || in_flight <= size - room)
    }

    /// Notes that `packets` packets were sent, up to the PSN `upto`.
    #[inline]
    pub(super) fn sent(&mut self, upto: Psn, packets: u32) {
        if upto.is_after(self.end) {
            self.end = upto;
        }
        self.packets_since_ack_req += packets;
        let full = upto.since(self.una) >= self.size();
        self.control.sent(u64::from(packets), Room::full_if(full));
    }

    /// Notes that everything before `una` has been acknowledged, on a connection of this
    /// `round_trip`.
    #[inline]
    pub(super) fn acknowledged(&mut self, now: Instant, una: Psn, round_trip: &RoundTrip) {
        let packets = una.since(self.una);
        self.una = una;
        while self.expected_answers.front().is_some_and(|end| !end.is_after(una)) {
            self.expected_answers.pop_front();
        }
        let amount = u64::from(packets);
        // A fixed window looks at no route.
        let _: Route =
            self.control.acknowledged(&Acknowledged { now, amount, sample: None, round_trip });
    }

    /// Closes the window if the packets before `next` fill it.
    #[inline]
    pub(super) fn close_if_full(&mut self, next: Psn) {
        self.closed = next.since(self.una) >= self.size();
    }

    /// Closes the window if it has no room for another burst of `count` packets: the requests for
    /// the acknowledgements which that burst needs are already under way, and a burst of a few
    /// packets costs nearly as much as a full one.
    pub(super) fn end_burst(&mut self, next: Psn, count: u32) {
        let size = self.size();
        let room = size.saturating_sub(next.since(self.una));
        if room < count.min(size / 4) {
            self.closed = true;
        }
    }

    /// Notes the loss of the packet `una` alone.
    pub(super) fn lost_one(&mut self, now: Instant, round_trip: &RoundTrip) {
        self.lost(now, Extent::Packet, round_trip);
    }

    /// Notes that everything in flight is sent again because of a loss, after that many consecutive
    /// `expiries` of the retransmission timer.
    pub(super) fn lost_all(&mut self, now: Instant, expiries: u32, round_trip: &RoundTrip) {
        match expiries {
            0 => self.lost(now, Extent::Window, round_trip),
            consecutive => self.control.timed_out(&TimedOut { now, consecutive, round_trip }),
        }
        self.packets_since_ack_req = 0;
    }

    fn lost(&mut self, now: Instant, extent: Extent, round_trip: &RoundTrip) {
        let in_flight = u64::from(self.unanswered());
        // The path counts what is taken for congestion.
        let _: Cause =
            self.control.lost(&Lost { now, sent_at: now, extent, in_flight, round_trip });
    }

    /// Notes that everything in flight is sent again because the peer was not ready.
    pub(super) const fn refused_all(&mut self) {
        self.packets_since_ack_req = 0;
    }

    /// Forgets what is in flight: the queue pair is in ERR.
    pub(super) fn clear(&mut self) {
        self.una = self.end;
        self.reads_outstanding = 0;
        self.expected_answers.clear();
    }
}

/// Requests for acknowledgements [REQ-8].
impl Window {
    /// Tells whether the packet `psn` must request an acknowledgement so that the window cannot
    /// stall.
    #[inline]
    pub(super) fn needs_ack_req(&self, psn: Psn) -> bool {
        let filling = psn.since(self.una) + 1 >= self.size();
        filling || self.packets_since_ack_req + 1 >= self.ack_req_interval()
    }

    /// Returns the number of packets from `next` on up to and including the one that must request
    /// an acknowledgement.
    #[inline]
    pub(super) fn packets_until_ack_req(&self, next: Psn) -> u32 {
        let until_full = self.size().saturating_sub(next.since(self.una));
        until_full.min(self.ack_req_interval().saturating_sub(self.packets_since_ack_req))
    }

    /// Notes that the last packet sent requests an acknowledgement.
    #[inline]
    pub(super) const fn requested_ack(&mut self) {
        self.packets_since_ack_req = 0;
    }

    /// Tells whether packets are in flight for which no acknowledgement has been requested.
    pub(super) fn lacks_ack_req(&self) -> bool {
        !self.is_empty() && self.packets_since_ack_req > 0
    }

    /// Returns the most packets between two requests for an acknowledgement.
    #[inline]
    fn ack_req_interval(&self) -> u32 {
        let size = match self.path_window {
            Some(packets) => packets.min(3 * ACK_REQ_PACKETS),
            None => self.size(),
        };
        (size / 3).max(1)
    }

    /// Takes the window of the path, in packets, if that decides.
    #[inline]
    pub(super) const fn set_path_window(&mut self, packets: Option<u32>) {
        self.path_window = packets;
    }
}

/// READs and atomics [REQ-4].
impl Window {
    /// Most READs and atomics that the peer takes at once.
    pub(super) const fn reads_max(&self) -> usize {
        self.reads_max
    }

    /// Most packets requested by one READ request; not 0.
    #[inline]
    pub(super) const fn read_part(&self) -> u32 {
        self.read_part
    }

    /// Tells whether the peer takes one more READ or atomic.
    #[inline]
    pub(super) fn allows_read(&self) -> bool {
        self.expected_answers.len() < self.reads_max
    }

    /// End of the part of a READ that was requested with the packet `psn`.
    pub(super) fn part_end(&self, psn: Psn) -> Option<Psn> {
        self.expected_answers.iter().copied().find(|end| end.is_after(psn))
    }

    /// Notes that an answer is expected that ends before the PSN `upto`.
    pub(super) fn expect_answer(&mut self, upto: Psn) {
        self.expected_answers.push_back(upto);
    }

    /// Tells whether a READ or atomic has been started and is not complete.
    pub(super) const fn has_reads(&self) -> bool {
        self.reads_outstanding > 0
    }

    /// Notes the start of a READ or atomic.
    pub(super) const fn begin_read(&mut self) {
        self.reads_outstanding += 1;
    }

    /// Notes that a READ or atomic is complete.
    pub(super) const fn end_read(&mut self) {
        self.reads_outstanding -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::GiveUp;
    use crate::congestion::{Congestion, DeviationWeight};

    const NOW: Instant = Instant::from_nanos(1);
    const UNKNOWN: RoundTrip = RoundTrip::new(DeviationWeight::Timer);

    fn window(congestion: Congestion, first: Psn) -> Window {
        let settings = Settings {
            mtu: 1024,
            max_rd_atomic: 2,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            congestion,
            give_up: GiveUp::RetryCount,
            retransmit_min: Duration::from_millis(10),
        };
        let mut window = Window::new();
        window.start(&settings, first);
        window
    }

    // tests [REQ-6]
    #[test]
    fn a_full_window_reopens_when_a_quarter_of_it_is_free() {
        let first = Psn::MAX - 3;
        let mut window = window(Congestion::Fixed(16), first);
        let full = first + 16;
        assert!(window.allows(first + 15));
        window.sent(full, 16);
        window.close_if_full(full);
        window.acknowledged(NOW, first + 3, &UNKNOWN);
        assert!(!window.allows(full));
        window.acknowledged(NOW, first + 4, &UNKNOWN);
        assert!(window.allows(full));
    }

    // tests [REQ-8]
    #[test]
    fn an_acknowledgement_is_requested_three_times_a_window_and_by_the_packet_that_fills_it() {
        let mut window = window(Congestion::Fixed(16), Psn::ZERO);
        let mut asked = Vec::new();
        for psn in (0..16).map(Psn::new) {
            let ahead = window.packets_until_ack_req(psn);
            assert_eq!(ahead == 1, window.needs_ack_req(psn));
            window.sent(psn.next(), 1);
            if ahead == 1 {
                window.requested_ack();
                asked.push(psn.get());
            }
        }
        assert_eq!(asked, [4, 9, 14, 15]);
        assert!(!window.lacks_ack_req());
    }

    // tests [CC-26]
    #[test]
    fn where_the_path_decides_an_acknowledgement_is_requested_after_a_third_of_the_share() {
        let mut window = window(Congestion::Delay, Psn::ZERO);
        for (share, packets) in [(30, 10), (240, 80), (10_000, 80), (1, 1)] {
            window.set_path_window(Some(share));
            assert_eq!(window.packets_until_ack_req(Psn::ZERO), packets, "of {share}");
        }
        // What sequence numbers allow is a window too, and the packet that fills it asks.
        window.set_path_window(Some(10_000));
        assert_eq!(window.packets_until_ack_req(Psn::ZERO + PATH_DECIDES - 5), 5);
    }

    // tests [REQ-4]
    #[test]
    fn a_read_waits_for_one_of_the_expected_answers() {
        let mut window = window(Congestion::Fixed(16), Psn::ZERO);
        for upto in [4, 5] {
            assert!(window.allows_read());
            window.sent(Psn::new(upto), 1);
            window.expect_answer(Psn::new(upto));
        }
        window.acknowledged(NOW, Psn::new(3), &UNKNOWN);
        assert!(!window.allows_read());
        window.acknowledged(NOW, Psn::new(4), &UNKNOWN);
        assert!(window.allows_read());
    }
}
