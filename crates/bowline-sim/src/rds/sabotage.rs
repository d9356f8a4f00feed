//! Deliberate mistakes, to prove that the oracle notices them. Only for tests.

use bowline_wire::rds::{HEADER_LEN, Header};

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
}

impl Sabotage {
    /// Tells whether TCP must take all bytes it is offered, so that the mistake shows.
    pub(crate) const fn needs_room(self) -> bool {
        !matches!(self, Self::Unread | Self::ForgetOnRestart | Self::StayAway)
    }
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
    use crate::engine::run::Options;
    use crate::engine::simulator::run_seed;
    use crate::engine::simulator::tests::{assert_found, seeds_to_find};
    use crate::rds::plan::Scenario;
    use crate::rds::run::Rds;

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
        assert!(what.contains("starved") || what.contains("no end"), "{what}");
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

    const ALL: [Sabotage; 9] = [
        Sabotage::DropFrame,
        Sabotage::FlipByte,
        Sabotage::Double,
        Sabotage::Swap,
        Sabotage::LoseWake,
        Sabotage::Deaf,
        Sabotage::Unread,
        Sabotage::ForgetOnRestart,
        Sabotage::StayAway,
    ];

    /// No mistake is forced: seeds that draw at random show each of them soon.
    #[test]
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
