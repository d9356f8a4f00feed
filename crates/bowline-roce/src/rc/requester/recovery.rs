//! What is sent again, and why: gaps that the peer reports, packets that it had no receive for, and
//! answers that are missing [REQ-10], [REQ-11], [REQ-13], [REQ-24].
//!
//! ```text
//!   gap reported ──> the peer keeps later packets, or that is not known: the packet alone
//!                └─> it does not keep them: all from `una` on, a go-back
//!   silence ───────> a probe, the packet `una` alone; when the timer expires, a go-back
//!   RNR NAK ───────> a pause, then all from `una` on
//! ```
//! Whether the peer keeps packets that arrive after a gap shows in its answer to a packet that was
//! retransmitted alone: it acknowledges either that packet together with those after it, or that
//! packet only. The packets themselves are made in [`send`](super::send); when silence has lasted
//! too long is up to the [retransmission timer](super::retransmission_timer).

use bowline_base::Instant;
use bowline_wire::roce::Psn;

use super::Psns;
use super::out_of_order::OutOfOrderAnswers;
use super::retransmission_timer::FEW_UNANSWERED;
use super::settings::{RETRY_SEVEN, Settings};
use crate::gso_loss::GsoLossDetector;

/// Consecutive packets that are retransmitted one by one before a go-back.
const CONSECUTIVE_GAPS_MAX: u32 = 2;

/// Whether the peer keeps packets that arrive after a gap. The standard allows it to drop them, and
/// nothing on the wire shows it in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerReorders {
    /// No loss has shown it yet.
    Unknown,
    Yes,
    No,
}

/// Why one packet is retransmitted alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repair {
    /// The peer misses the packet and has received later ones.
    Gap,
    /// The peer is silent; its acknowledgement will show what it has received [RSP-3].
    Probe,
}

/// What is done about a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum GapRepair {
    /// Nothing: the packet is on its way again, or is sent next anyway.
    None,
    /// All packets from `una` on are retransmitted.
    GoBack,
    /// The packet `una` is retransmitted alone.
    Alone,
    /// The same, and the packets behind it that were to be retransmitted are not needed.
    AloneThenFresh,
}

/// State of the recovery from losses.
#[derive(Debug)]
pub(super) struct Recovery {
    /// A retransmission from `una` is under way and has not led to progress yet.
    under_way: bool,
    peer_reorders: PeerReorders,
    /// The packet `una` is to be retransmitted alone.
    repair: Option<Repair>,
    /// The last packet retransmitted alone: the PSN after it, and the reason.
    repaired: Option<(Psn, Repair)>,
    /// Consecutive missing packets, each retransmitted alone.
    consecutive_gaps: u32,
    /// Nothing is sent before this time: the peer had no receive posted (RNR NAK).
    paused_until: Option<Instant>,
    rnr_retry: u8,
    /// RNR NAKs that are still tolerated without progress.
    rnr_left: u8,
    out_of_order: OutOfOrderAnswers,
    gso_loss: GsoLossDetector,
}

impl Recovery {
    pub(super) const fn new() -> Self {
        Self {
            under_way: false,
            peer_reorders: PeerReorders::Unknown,
            repair: None,
            repaired: None,
            consecutive_gaps: 0,
            paused_until: None,
            rnr_retry: 0,
            rnr_left: 0,
            out_of_order: OutOfOrderAnswers::new(),
            gso_loss: GsoLossDetector::for_requests(),
        }
    }

    /// Takes the queue pair's attributes, at first or while nothing is in flight.
    pub(super) const fn configure(&mut self, settings: &Settings) {
        self.rnr_retry = settings.rnr_retry;
        self.rnr_left = settings.rnr_retry;
    }

    /// Notes that everything before `una` has been acknowledged, more than before.
    #[inline]
    pub(super) fn progress(&mut self, una: Psn) {
        self.under_way = false;
        self.paused_until = None;
        self.repair = None;
        if self.repaired.is_some_and(|(end, _)| una.is_after(end)) {
            self.repaired = None;
        }
        self.rnr_left = self.rnr_retry;
    }

    /// Forgets what was to be sent again: the queue pair is in ERR.
    pub(super) fn clear(&mut self) {
        self.paused_until = None;
        self.repair = None;
        self.out_of_order.clear();
    }

    /// Answers that arrived after a gap.
    pub(super) const fn out_of_order(&self) -> &OutOfOrderAnswers {
        &self.out_of_order
    }

    /// The same, to be changed.
    pub(super) const fn out_of_order_mut(&mut self) -> &mut OutOfOrderAnswers {
        &mut self.out_of_order
    }

    /// Tells whether the peer receives only the first packet of every burst [ICRC-23].
    pub(super) const fn has_gso_loss(&self) -> bool {
        self.gso_loss.is_detected()
    }
}

/// Single packets.
impl Recovery {
    /// Tells whether one packet is to be retransmitted alone.
    #[inline]
    pub(super) const fn has_repair(&self) -> bool {
        self.repair.is_some()
    }

    /// Returns why one packet is to be retransmitted alone, once.
    #[inline]
    pub(super) const fn take_repair(&mut self) -> Option<Repair> {
        self.repair.take()
    }

    /// Lets the packet `una` be retransmitted alone.
    pub(super) const fn request_repair(&mut self, why: Repair) {
        self.repair = Some(why);
    }

    /// Lets the packet `una` request an acknowledgement. A retransmission that is due already does
    /// so as well.
    pub(super) fn request_probe(&mut self) {
        self.repair.get_or_insert(Repair::Probe);
    }

    /// Notes that the packet `una` was retransmitted alone: the PSN after it and the reason, or
    /// `None` if the answer will not tell what the peer keeps.
    pub(super) const fn sent_alone(&mut self, packet: Option<(Psn, Repair)>) {
        self.repaired = packet;
    }

    /// Decides about a gap that the peer reports: it misses `missing` and has received a later
    /// packet [REQ-10]. `answer_is_missing` if a READ or atomic is the oldest request.
    pub(super) fn gap(&mut self, psns: Psns, missing: Psn, answer_is_missing: bool) -> GapRepair {
        if !self.may_begin(psns) {
            return GapRepair::None;
        }
        let next_to_it = match self.repaired.take() {
            Some((end, Repair::Gap)) => end == psns.una,
            _ => false,
        };
        self.consecutive_gaps = if next_to_it { self.consecutive_gaps + 1 } else { 0 };
        // A peer that keeps no later packets needs all of them again. For a READ, that would be the
        // whole answer.
        let all = match self.peer_reorders {
            PeerReorders::Yes => false,
            PeerReorders::Unknown => answer_is_missing,
            PeerReorders::No => true,
        };
        if all || missing != psns.una || self.consecutive_gaps >= CONSECUTIVE_GAPS_MAX {
            return GapRepair::GoBack;
        }
        let keeps_later = self.peer_reorders == PeerReorders::Yes && psns.next.is_before(psns.end);
        if !keeps_later && !psns.next.is_after(psns.una) {
            return GapRepair::None; // the missing packet is sent next anyway
        }
        self.under_way = true;
        self.repair = Some(Repair::Gap);
        self.gso_loss.note_restart(psns.una);
        if keeps_later { GapRepair::AloneThenFresh } else { GapRepair::Alone }
    }

    /// Evaluates an acknowledgement of everything before `upto` as the answer to the packet
    /// retransmitted alone. Tells whether the peer has none of the packets sent after that one.
    pub(super) fn judge_ack(&mut self, psns: Psns, upto: Psn) -> bool {
        let Psns { una, next, end } = psns;
        if self.under_way && next.is_after(una) && upto.is_after(next) {
            // More has arrived than was retransmitted.
            self.peer_reorders = PeerReorders::Unknown;
        }
        let Some((after, why)) = self.repaired else { return false };
        if upto.is_before(after) || !upto.is_after(una) {
            return false;
        }
        self.repaired = None;
        if upto != after {
            self.consecutive_gaps = 0;
            if why == Repair::Gap {
                self.peer_reorders = PeerReorders::Yes;
            }
            return false;
        }
        if !next.is_after(after) {
            return false;
        }
        match why {
            // The peer dropped the later packets it had received.
            Repair::Gap => self.peer_reorders = PeerReorders::No,
            // The later packets may be lost, or still under way. A few packets are retransmitted
            // without further probing.
            Repair::Probe => {
                self.consecutive_gaps += 1;
                let many = end.since(upto) >= FEW_UNANSWERED;
                if many
                    && self.peer_reorders != PeerReorders::No
                    && self.consecutive_gaps < CONSECUTIVE_GAPS_MAX
                {
                    return false;
                }
            }
        }
        true
    }

    /// Evaluates a NAK in the same way: everything before `psn` has arrived. A NAK of the packet
    /// directly after the retransmitted one proves nothing.
    pub(super) fn judge_nak(&mut self, psns: Psns, psn: Psn) {
        if self.repaired.is_some_and(|(end, _)| psn.is_after(end)) {
            self.judge_ack(psns, psn);
        }
    }
}

/// All packets from `una` on.
impl Recovery {
    /// Tells whether a retransmission from `una` may begin: there is one for each loss.
    pub(super) fn may_begin(&self, psns: Psns) -> bool {
        !self.under_way && !self.is_paused() && psns.una != psns.end
    }

    /// Begins a retransmission of everything from `una` on.
    pub(super) fn go_back(&mut self, una: Psn) {
        self.under_way = true;
        self.gso_loss.note_restart(una);
        self.repair = None;
        self.repaired = None;
        self.consecutive_gaps = 0;
    }

    /// Notes that the retransmission under way, if any, has failed: another one may begin.
    pub(super) const fn timed_out(&mut self) {
        self.under_way = false;
    }
}

/// The pause after an RNR NAK [REQ-13].
impl Recovery {
    /// Returns until when nothing is sent.
    #[inline]
    pub(super) const fn paused_until(&self) -> Option<Instant> {
        self.paused_until
    }

    /// Tells whether nothing is sent now.
    #[inline]
    pub(super) const fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// Counts an RNR NAK; tells whether the request may be tried once more.
    pub(super) const fn may_retry(&mut self) -> bool {
        if self.rnr_retry == RETRY_SEVEN {
            return true;
        }
        match self.rnr_left.checked_sub(1) {
            Some(left) => {
                self.rnr_left = left;
                true
            }
            None => false,
        }
    }

    /// Sends nothing before `until`, and all packets from `una` on again then.
    pub(super) const fn pause(&mut self, until: Instant) {
        self.paused_until = Some(until);
        self.repair = None;
        self.repaired = None;
    }

    /// Ends the pause if its time has come; tells whether it has.
    pub(super) fn resume(&mut self, now: Instant) -> bool {
        let over = self.paused_until.is_some_and(|until| until <= now);
        if over {
            self.paused_until = None;
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets 10 to 59 are in flight.
    const PSNS: Psns = Psns { una: Psn::new(10), next: Psn::new(60), end: Psn::new(60) };

    /// Reports a gap at `una` and answers the packet that is retransmitted for it.
    fn repair(recovery: &mut Recovery, upto: u32) -> bool {
        assert_eq!(recovery.gap(PSNS, PSNS.una, false), GapRepair::Alone);
        let why = recovery.take_repair().expect("the gap is repaired");
        recovery.sent_alone(Some((PSNS.una.next(), why)));
        recovery.judge_ack(PSNS, Psn::new(upto))
    }

    // tests [REQ-24]
    #[test]
    fn a_peer_that_acknowledges_only_the_missing_packet_needs_all_from_then_on() {
        let mut recovery = Recovery::new();
        assert!(repair(&mut recovery, 11));
        recovery.progress(Psn::new(11));
        let later = Psns { una: Psn::new(11), ..PSNS };
        assert_eq!(recovery.gap(later, later.una, false), GapRepair::GoBack);
    }

    // tests [REQ-24]
    #[test]
    fn a_peer_that_acknowledges_more_keeps_what_comes_after_a_gap() {
        let mut recovery = Recovery::new();
        assert!(!repair(&mut recovery, 20));
        recovery.progress(Psn::new(20));
        let again = Psns { una: Psn::new(20), next: Psn::new(30), ..PSNS };
        assert_eq!(recovery.gap(again, again.una, true), GapRepair::AloneThenFresh);
        assert_eq!(recovery.gap(again, again.una, true), GapRepair::None);
    }

    // tests [REQ-24]
    #[test]
    fn while_nothing_is_known_a_missing_answer_is_asked_for_with_all_behind_it() {
        let mut recovery = Recovery::new();
        assert_eq!(recovery.gap(PSNS, PSNS.una, true), GapRepair::GoBack);
    }

    // tests [REQ-13]
    #[test]
    fn rnr_naks_are_counted_until_there_is_progress() {
        let mut recovery = Recovery::new();
        (recovery.rnr_retry, recovery.rnr_left) = (2, 2);
        assert!(recovery.may_retry() && recovery.may_retry() && !recovery.may_retry());
        recovery.progress(Psn::new(11));
        assert!(recovery.may_retry());

        let at = |us: u64| Instant::from_nanos(1000 * us);
        recovery.pause(at(20));
        assert!(!recovery.may_begin(PSNS) && !recovery.resume(at(19)));
        assert!(recovery.resume(at(20)) && recovery.may_begin(PSNS));
    }
}
