//! Deliberate mistakes, to prove that the oracle notices them. Only for tests.

use bowline_verbs::{Completion, Status};

use super::net::Datagram;
use super::side::Stage;
use super::world::World;
use crate::engine::queue::MS;

/// A mistake that a run makes on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests do wrong on purpose"))]
pub(crate) enum Sabotage {
    /// A device acknowledges a write and forgets its bytes.
    Unwrite,
    /// An atomic is carried out again.
    DoubleAtomic,
    /// A byte changes between the check of the packet and its copy to the memory.
    FlipByte,
    /// A byte outside all regions changes.
    Stray,
    /// A completion is lost.
    LoseEntry,
    /// A completion comes twice.
    DoubleEntry,
    /// Two completions change places.
    SwapEntries,
    /// A failure is reported as a success.
    Whitewash,
    /// The immediate or the length of a message changes.
    WrongEntry,
    /// The event that a queue has entries is lost.
    LoseReady,
    /// A side does not answer any more when fresh work begins.
    DeafToFresh,
    /// Timers of devices expire too late when fresh work begins.
    LateTimers,
}

/// By how many nanoseconds they do: the timer of a queue pair that knows no round trip.
const LATE: u64 = 200 * MS;

impl World {
    /// Returns the time in nanoseconds by which a timer is too late.
    pub(crate) fn sabotaged_timer(&self) -> u64 {
        let late = self.sabotage == Some(Sabotage::LateTimers) && self.is_fresh();
        if late { LATE } else { 0 }
    }

    /// Passes a datagram wrongly to a device; returns false if it is to be passed unchanged.
    pub(crate) fn sabotaged_arrival(&mut self, host: usize, datagram: &Datagram) -> bool {
        let Some(how) = self.sabotage else { return false };
        let opcode = datagram.bytes.first().copied().unwrap_or(0xff);
        let qpn = datagram.bytes.get(5..8).map_or(0, |b| u32::from_be_bytes([0, b[0], b[1], b[2]]));
        let wanted = match how {
            Sabotage::Unwrite | Sabotage::FlipByte => (0x06..=0x0b).contains(&opcode),
            Sabotage::DoubleAtomic => opcode == 0x14,
            Sabotage::Stray => true,
            Sabotage::DeafToFresh => return self.is_fresh_for(opcode),
            _ => false,
        };
        let side = self
            .sides
            .iter()
            .position(|s| s.host == host && s.qpn.0 == qpn && s.stage == Stage::Up && !s.dead);
        let Some(id) = side.filter(|_| wanted && self.rng.chance(200)) else { return false };
        let buffer = std::sync::Arc::clone(&self.sides[id].memory.buffer);
        let mut before = vec![0; buffer.len()];
        buffer.read(0, &mut before);
        self.deliver(host, datagram);
        let mut after = vec![0; buffer.len()];
        buffer.read(0, &mut after);
        let changed = before.iter().zip(&after).position(|(a, b)| a != b);
        match (how, changed) {
            (Sabotage::Unwrite, Some(_)) => buffer.write(0, &before),
            (Sabotage::FlipByte, Some(at)) => self.sides[id].memory.tamper(at),
            (Sabotage::DoubleAtomic, Some(at)) => {
                buffer.update(at & !7, |n| n.wrapping_add(1));
            }
            (Sabotage::Stray, _) => self.sides[id].memory.tamper(0),
            _ => {}
        }
        true
    }

    /// Falsifies polled completions.
    pub(crate) fn sabotaged_entries(&mut self, entries: &mut Vec<Completion>) {
        let Some(how) = self.sabotage else { return };
        if entries.is_empty() || !self.rng.chance(200) {
            return;
        }
        let at = self.rng.index(entries.len());
        match how {
            Sabotage::LoseEntry => {
                entries.remove(at);
            }
            Sabotage::DoubleEntry => entries.insert(at, entries[at]),
            Sabotage::SwapEntries if entries.len() > 1 => entries.swap(0, 1),
            Sabotage::Whitewash => entries[at].status = Status::Success,
            Sabotage::WrongEntry if entries[at].is_recv() => match entries[at].imm {
                Some(imm) => entries[at].imm = Some(imm ^ 1),
                None => entries[at].byte_len += 1,
            },
            _ => {}
        }
    }
}

#[cfg(test)]
impl Sabotage {
    const ALL: [Self; 12] = [
        Self::Unwrite,
        Self::DoubleAtomic,
        Self::FlipByte,
        Self::Stray,
        Self::LoseEntry,
        Self::DoubleEntry,
        Self::SwapEntries,
        Self::Whitewash,
        Self::WrongEntry,
        Self::LoseReady,
        Self::DeafToFresh,
        Self::LateTimers,
    ];
}

#[cfg(test)]
mod tests {
    use super::Sabotage;
    use crate::engine::simulator::run_seed;
    use crate::engine::simulator::tests::{assert_found, seeds_to_find};
    use crate::roce::run::Roce;
    use crate::roce::{Options, Scenario};

    /// First seed and number of seeds in which each mistake must be noticed.
    const SEEDS: u64 = 7_000_000;
    const SOON: u64 = 600;

    /// Runs seeds until one fails, and returns the text of its failure.
    fn caught(how: Sabotage, scenario: Scenario) -> String {
        let options = Options::default().with_scenario(Some(scenario));
        (0..300)
            .find_map(|seed| run_seed::<Roce>(seed, &options, Some(how)).failure)
            .unwrap_or_else(|| panic!("nobody noticed {how:?}"))
            .what
    }

    #[test]
    fn wrong_bytes_in_memory_are_noticed() {
        for how in [Sabotage::Unwrite, Sabotage::FlipByte] {
            let what = caught(how, Scenario::Calm);
            let words = ["does not hold", "ahead of it", "ever sent", "never came"];
            assert!(words.iter().any(|w| what.contains(w)), "{how:?}: {what}");
        }
    }

    #[test]
    fn an_atomic_carried_out_twice_is_noticed() {
        let what = caught(Sabotage::DoubleAtomic, Scenario::Calm);
        assert!(what.contains("bytes differ") || what.contains("ever sent"), "{what}");
    }

    #[test]
    fn a_byte_changed_outside_of_regions_is_noticed() {
        let what = caught(Sabotage::Stray, Scenario::Calm);
        assert!(what.contains("nobody was allowed"), "{what}");
    }

    #[test]
    fn completions_lost_doubled_or_swapped_are_noticed() {
        for how in [Sabotage::LoseEntry, Sabotage::DoubleEntry, Sabotage::SwapEntries] {
            let what = caught(how, Scenario::Calm);
            let words = ["twice", "was due", "completed before", "never ends", "none was posted"];
            assert!(words.iter().any(|w| what.contains(w)), "{how:?}: {what}");
        }
    }

    #[test]
    fn a_failure_told_as_a_success_is_noticed() {
        let what = caught(Sabotage::Whitewash, Scenario::Misuse);
        let words = ["succeeded after", "which was wrong", "nobody sent", "was not to be"];
        assert!(words.iter().any(|w| what.contains(w)), "{what}");
    }

    #[test]
    fn a_message_told_wrongly_is_noticed() {
        let what = caught(Sabotage::WrongEntry, Scenario::Calm);
        assert!(what.contains(" came as "), "{what}");
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn a_program_left_asleep_is_noticed() {
        let options = Options::default().with_scenario(Some(Scenario::Calm));
        let noticed = |seed| {
            run_seed::<Roce>(seed, &options, Some(Sabotage::LoseReady)).failure.map(|it| it.what)
        };
        let mut all = Vec::new();
        // A peer that asks for ever to try again keeps a run from ending as well, but that is not
        // the expected failure.
        let found = (0..300).filter_map(noticed).find(|what| {
            all.push(what.clone());
            what.contains("never ends")
        });
        assert!(found.is_some(), "{all:?}");
    }

    /// No mistake is forced: seeds that draw at random show each of them soon.
    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn each_mistake_is_noticed_by_random_seeds() {
        for how in Sabotage::ALL {
            let found = seeds_to_find::<Roce>(how, SEEDS, SOON);
            assert!(found.is_some(), "{how:?} is not noticed");
        }
    }

    #[test]
    #[ignore = "takes minutes; from BOWLINE_FRESH_FROM on, or from where the clock says"]
    fn each_is_noticed_within_10_000_fresh_seeds() {
        assert_found::<Roce>(&Sabotage::ALL);
    }
}
