//! Deliberate mistakes, to prove that the oracle notices them. Only for tests.

use bowline_wire::rds::{Flags, HEADER_LEN, Header, checksum};

use super::rdma::Frame;
use crate::engine::rng::Rng;

/// A mistake that a run makes on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests do wrong on purpose"))]
pub(crate) enum Sabotage {
    /// A frame is lost on its way although TCP acknowledges it.
    DropFrame,
    /// A byte of a payload changes.
    FlipByte,
    /// A frame comes twice.
    Double,
    /// Two frames change places.
    Swap,
    /// A reader is not woken.
    LoseWake,
    /// A connection is not read any more.
    Deaf,
    /// A connection that is dropped is reset without being read.
    Unread,
    /// A node whose peer restarted forgets all messages for it.
    ForgetOnRestart,
    /// A node connects no more once all faults are over.
    StayAway,
    /// A node keeps messages of sockets that are closed.
    KeepClosed,
    /// A node has no limit of what is queued, and of the memory for it.
    NoSendLimit,
    /// A node that ends in order does not acknowledge what it has received.
    EndUntold,
    /// A node takes an attempt to connect that is refused for a connection that broke.
    TakeRefusal,
    /// A node takes for new what comes again over RDMA.
    RdmaTakeTwice,
    /// A frame over RDMA acknowledges nothing.
    RdmaSilent,
    /// A message that is sent again over RDMA is lost on its way.
    RdmaLoseRepeated,
    /// A frame over RDMA is lost although the NIC says that it came.
    RdmaSkip,
    /// The end of a message over RDMA wakes nobody.
    RdmaUnsolicited,
    /// More frames are sent over RDMA than the peer has announced receives.
    RdmaOverdraw,
    /// What was under way of an operation when its connection ended is done once more.
    RdmaOpAgain,
    /// The completion of an operation is reported twice.
    RdmaReportTwice,
    /// Memory for one use is not released.
    RdmaKeep,
    /// The answer of a read or an atomic does not come, although the NIC says that it came.
    RdmaNoAnswer,
    /// All sockets of a node have the same type of service.
    RdmaOneTos,
}

impl Sabotage {
    /// Tells whether TCP must take all bytes it is offered, so that the mistake shows.
    pub(crate) const fn needs_room(self) -> bool {
        let not_needed = matches!(
            self,
            Self::Unread
                | Self::ForgetOnRestart
                | Self::StayAway
                | Self::KeepClosed
                | Self::NoSendLimit
                | Self::EndUntold
                | Self::TakeRefusal
        );
        !not_needed && !self.of_rdma()
    }

    const fn of_rdma(self) -> bool {
        matches!(
            self,
            Self::RdmaTakeTwice
                | Self::RdmaSilent
                | Self::RdmaLoseRepeated
                | Self::RdmaSkip
                | Self::RdmaUnsolicited
                | Self::RdmaOverdraw
                | Self::RdmaOpAgain
                | Self::RdmaReportTwice
                | Self::RdmaKeep
                | Self::RdmaNoAnswer
                | Self::RdmaOneTos
        )
    }

    /// Falsifies a header that has come over RDMA.
    pub(crate) fn mangle_header(self, bytes: &mut [u8; HEADER_LEN]) {
        let mut header = Header::from_bytes(bytes);
        match self {
            Self::RdmaTakeTwice => {
                let others = header.flags.bits() & !Flags::RETRANSMITTED.bits();
                header.flags = Flags::from_bits(others);
            }
            Self::RdmaOverdraw if header.credit > 0 => header.credit = 255,
            _ => return,
        }
        *bytes = finished(header);
    }

    /// Falsifies a frame that is about to be posted.
    pub(crate) fn mangle_frame(self, rng: &mut Rng, frame: &mut Frame) {
        let mut header = Header::from_bytes(&frame.header);
        let named = header.sport > 1 && header.dport > 1;
        match self {
            Self::RdmaSilent => header.ack = 0,
            Self::RdmaUnsolicited => frame.solicited = false,
            // An acknowledgement of the same number takes the frame's place.
            Self::RdmaLoseRepeated if header.flags.contains(Flags::RETRANSMITTED) => {}
            Self::RdmaSkip if named && rng.chance(50) => {}
            _ => return,
        }
        frame.header = finished(header);
        if matches!(self, Self::RdmaLoseRepeated | Self::RdmaSkip) {
            frame.lost = true;
        }
    }
}

/// Returns the bytes of a header with the right checksum.
fn finished(mut header: Header) -> [u8; HEADER_LEN] {
    header.csum = 0;
    header.csum = checksum(&header.to_bytes());
    header.to_bytes()
}

/// Follows the bytes that a link writes, to know where frames begin.
#[derive(Clone, Debug, Default)]
pub(crate) struct Framing {
    head: Vec<u8>,
    rest: u64,
}

impl Framing {
    /// Returns the frames that lie whole in `bytes`, as ranges, and moves behind all of `bytes`.
    fn whole_frames(&mut self, bytes: &[u8]) -> Vec<(usize, usize, Header)> {
        let mut found = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            if self.rest > 0 {
                let skip = self.rest.min((bytes.len() - at) as u64);
                self.rest -= skip;
                at += skip as usize;
                continue;
            }
            let start = at;
            let fresh = self.head.is_empty();
            let take = (HEADER_LEN - self.head.len()).min(bytes.len() - at);
            self.head.extend_from_slice(&bytes[at..at + take]);
            at += take;
            let Ok(header) = Header::parse(&self.head) else { continue };
            self.head.clear();
            self.rest = u64::from(header.len);
            let end = at + header.len as usize;
            if fresh && end <= bytes.len() && header.sport > 1 && header.dport > 0 {
                found.push((start, end, header));
            }
        }
        found
    }

    /// From time to time falsifies bytes that a link is about to write.
    pub(crate) fn mangle(&mut self, how: Sabotage, rng: &mut Rng, bytes: &mut Vec<u8>) {
        let frames = self.whole_frames(bytes);
        if !rng.chance(200) {
            return;
        }
        match (how, frames.as_slice()) {
            (Sabotage::DropFrame, [(start, end, _), ..]) => {
                bytes.drain(start..end);
            }
            (Sabotage::FlipByte, [.., (_, end, header)]) if header.len > 0 => {
                bytes[end - 1] ^= 0x40;
            }
            (Sabotage::Double, [(start, end, _), ..]) => {
                let copy = bytes[*start..*end].to_vec();
                bytes.splice(*end..*end, copy);
            }
            (Sabotage::Swap, [(start, middle, _), (_, end, _), ..])
                if bytes[*start..*middle] != bytes[*middle..*end] =>
            {
                bytes[*start..*end].rotate_left(middle - start);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Sabotage;
    use crate::engine::kept::Kept;
    use crate::engine::run::Options;
    use crate::engine::simulator::tests::{assert_found, seeds_to_find};
    use crate::engine::simulator::{Simulator, run_seed};
    use crate::engine::trace::{Trace, TraceMode};
    use crate::rds::plan::{Plan, Scenario};
    use crate::rds::run::{Outcome, Rds};

    /// Runs seeds until one fails, and returns the text of its failure.
    fn caught(how: Sabotage) -> String {
        caught_in(how, Scenario::Calm)
    }

    fn caught_in(how: Sabotage, scenario: Scenario) -> String {
        let options = Options::default().with_scenario(Some(scenario));
        (0..400)
            .find_map(|seed| run_seed::<Rds>(seed, &options, Some(how)).failure)
            .unwrap_or_else(|| panic!("nobody noticed {how:?}"))
            .what
    }

    #[test]
    fn a_lost_message_is_noticed() {
        let what = caught(Sabotage::DropFrame);
        // A message that comes in the place of another one is unexpected.
        let words = [" before ", "did not come", "unexpected"];
        assert!(words.iter().any(|w| what.contains(w)), "{what}");
    }

    #[test]
    fn a_changed_byte_is_noticed() {
        let what = caught(Sabotage::FlipByte);
        assert!(what.contains("not what was sent") || what.contains("unexpected"), "{what}");
    }

    #[test]
    fn a_double_is_noticed() {
        let what = caught(Sabotage::Double);
        assert!(what.contains("twice") || what.contains("unexpected"), "{what}");
    }

    #[test]
    fn a_wrong_order_is_noticed() {
        let what = caught(Sabotage::Swap);
        let order = [" before ", "twice or out of order", "unexpected", "did not come"];
        assert!(order.iter().any(|o| what.contains(o)), "{what}");
    }

    #[test]
    fn a_reader_left_asleep_is_noticed() {
        let what = caught(Sabotage::LoseWake);
        assert!(what.contains("was not woken"), "{what}");
    }

    #[test]
    fn a_connection_nobody_reads_is_noticed() {
        let what = caught(Sabotage::Deaf);
        let words = ["starved", "no end", "no traffic"];
        assert!(words.iter().any(|w| what.contains(w)), "{what}");
    }

    #[test]
    fn messages_forgotten_for_a_restarted_peer_are_noticed() {
        let what = caught_in(Sabotage::ForgetOnRestart, Scenario::Crash);
        let words = ["did not come", " before ", "unexpected"];
        assert!(words.iter().any(|w| what.contains(w)), "{what}");
    }

    #[test]
    fn a_node_that_does_not_come_back_is_noticed() {
        let what = caught_in(Sabotage::StayAway, Scenario::Cuts);
        assert!(what.contains("no end") || what.contains("no traffic"), "{what}");
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn memory_of_closed_sockets_is_noticed() {
        let options = Options::default().with_scenario(Some(Scenario::Swarm));
        let run = |seed| run_seed::<Rds>(seed, &options, Some(Sabotage::KeepClosed)).failure;
        // Others are noticed only at the end, when all sockets are to be closed.
        let found = (0..400).filter_map(run).any(|failure| failure.what.contains("sockets have"));
        assert!(found, "only at the end");
    }

    #[test]
    fn memory_without_a_limit_is_noticed() {
        let what = caught_in(Sabotage::NoSendLimit, Scenario::Swarm);
        assert!(what.contains("too much memory of frames"), "{what}");
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn an_end_without_acknowledgements_is_noticed() {
        let what = caught_in(Sabotage::EndUntold, Scenario::Ends);
        assert!(what.contains("received and not acknowledged"), "{what}");
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn an_end_that_nobody_hears_of_is_noticed() {
        let what = caught_in(Sabotage::TakeRefusal, Scenario::Ends);
        assert!(what.contains("waits for a peer that has ended"), "{what}");
    }

    fn caught_over_rdma(how: Sabotage, words: &[&str]) {
        let what = caught_in(how, Scenario::Rdma);
        assert!(words.iter().any(|word| what.contains(word)), "{how:?}: {what}");
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn mistakes_over_rdma_are_noticed() {
        caught_over_rdma(Sabotage::RdmaTakeTwice, &["twice", "unexpected", "pongs"]);
        caught_over_rdma(Sabotage::RdmaSilent, &["no end"]);
        let lost = [" before ", "did not come", "unexpected", "broke a rule", "no end"];
        caught_over_rdma(Sabotage::RdmaLoseRepeated, &lost);
        caught_over_rdma(Sabotage::RdmaSkip, &lost);
        caught_over_rdma(Sabotage::RdmaUnsolicited, &["not solicited"]);
        caught_over_rdma(Sabotage::RdmaOverdraw, &["no receive posted", "broke a rule"]);
        caught_over_rdma(
            Sabotage::RdmaOpAgain,
            &["executed twice", "is the wrong status", "counts"],
        );
        caught_over_rdma(Sabotage::RdmaReportTwice, &["reported twice", " times, of "]);
        caught_over_rdma(Sabotage::RdmaKeep, &["not released", "invalid control messages"]);
        caught_over_rdma(Sabotage::RdmaNoAnswer, &["before all bytes have arrived"]);
        caught_over_rdma(Sabotage::RdmaOneTos, &["of another type"]);
    }

    const ALL: [Sabotage; 24] = [
        Sabotage::DropFrame,
        Sabotage::FlipByte,
        Sabotage::Double,
        Sabotage::Swap,
        Sabotage::LoseWake,
        Sabotage::Deaf,
        Sabotage::Unread,
        Sabotage::ForgetOnRestart,
        Sabotage::StayAway,
        Sabotage::KeepClosed,
        Sabotage::NoSendLimit,
        Sabotage::EndUntold,
        Sabotage::TakeRefusal,
        Sabotage::RdmaTakeTwice,
        Sabotage::RdmaSilent,
        Sabotage::RdmaLoseRepeated,
        Sabotage::RdmaSkip,
        Sabotage::RdmaUnsolicited,
        Sabotage::RdmaOverdraw,
        Sabotage::RdmaOpAgain,
        Sabotage::RdmaReportTwice,
        Sabotage::RdmaKeep,
        Sabotage::RdmaNoAnswer,
        Sabotage::RdmaOneTos,
    ];

    /// Kept plans over RDMA, with the mistakes that they show in a few hundred steps.
    const KEPT: [(Sabotage, &str); 11] = [
        (Sabotage::RdmaTakeTwice, "taken-twice"),
        (Sabotage::RdmaSilent, "few-messages"),
        (Sabotage::RdmaUnsolicited, "few-messages"),
        (Sabotage::RdmaLoseRepeated, "repeated-and-lost"),
        (Sabotage::RdmaSkip, "two-types-of-service"),
        (Sabotage::RdmaOneTos, "two-types-of-service"),
        (Sabotage::RdmaOverdraw, "overdrawn"),
        (Sabotage::RdmaOpAgain, "operation-again"),
        (Sabotage::RdmaReportTwice, "operations"),
        (Sabotage::RdmaKeep, "used-region"),
        (Sabotage::RdmaNoAnswer, "operations"),
    ];

    /// Seeds draw other plans when the simulator changes; these stay.
    #[test]
    fn kept_plans_show_mistakes_over_rdma() {
        for (how, name) in KEPT {
            let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/kept");
            let text = std::fs::read_to_string(format!("{dir}/rds-rdma-{name}.json"));
            let kept: Kept<Plan> = serde_json::from_str(&text.expect("a plan")).expect("a plan");
            let mut outcome = Outcome::new(kept.seed, name, String::new());
            outcome.play(|| Rds::world(kept.start, Trace::new(TraceMode::Hash), Some(how)));
            assert!(outcome.failure.is_some(), "{how:?} is not noticed in {name}");
        }
    }

    /// No mistake is forced: seeds that draw at random show each of them soon.
    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn each_mistake_is_noticed_by_random_seeds() {
        for how in ALL {
            assert!(seeds_to_find::<Rds>(how, 0, 3_000).is_some(), "{how:?} is not noticed");
        }
    }

    #[test]
    #[ignore = "takes minutes; from BOWLINE_FRESH_FROM on, or from where the clock says"]
    fn each_is_noticed_within_10_000_fresh_seeds() {
        assert_found::<Rds>(&ALL);
    }
}
