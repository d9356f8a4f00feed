//! Deliberate mistakes, to prove that the judges notice them. For tests only.

use bowline_rnbd::server::Reply;
use bowline_wire::rnbd::{self as wire, OpenRsp, Request};

/// A deliberate mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// A write is carried out a second time, later: as a request that its repetition overtook would
    /// be if the server did not serialize them.
    DoubleWrite,
    /// A permit is not given back.
    ForgetPermit,
    /// A request is completed twice.
    CompleteTwice,
    /// The client can write to a chunk while the server has it.
    NoWithdraw,
    /// The next key of a chunk is valid while the server has it.
    EarlyRenew,
    /// A response names another request.
    WrongId,
    /// Requests move to other paths before the queue pairs of the old path are dead.
    EarlyDrain,
    /// A request is forgotten.
    DropRequest,
    /// The announced key differs from the real one.
    StaleKey,
    /// No new key is made.
    NoRenew,
    /// A write is acknowledged before it is carried out.
    EarlyAnswer,
    /// Memory stays registered.
    LeakRegion,
    /// A key for a single READ is not invalidated.
    KeepKey,
    /// Keys of a path remain when it ends.
    LeakKeys,
    /// Every session gets the device ids 0, 1 and so on, also after a restart of the server.
    SmallIds,
    /// A request fails as if no path were left.
    GiveUp,
    /// A waiter is not told that a permit is free.
    LosePermitFree,
    /// Silent peers are not detected.
    Patience,
    /// A client never reconnects a lost path.
    StayAway,
    /// A server ignores the command to close.
    StayOpen,
    /// A server does not report that it has closed.
    LoseClosed,
    /// The server gets no notices of paths that are given up.
    NoNotice,
    /// A server stops responding when final IO begins.
    DeafToFinalIo,
}

/// Misdeed device ids of one session: always the lowest free ones, which mean another device to the
/// server before or after a restart. Maps them to the server's real ids.
#[derive(Debug, Default)]
pub(crate) struct SmallIds(Vec<Option<u32>>);

impl SmallIds {
    /// Returns a message with the server's real id in it.
    pub(crate) fn message(&mut self, usr: &[u8]) -> Vec<u8> {
        let mut usr = usr.to_vec();
        let small = match wire::parse(&usr) {
            Ok(Request::Io(io)) => io.device,
            Ok(Request::Close { id }) => id,
            _ => return usr,
        };
        let closes = matches!(wire::parse(&usr), Ok(Request::Close { .. }));
        let slot = self.0.get_mut(small as usize);
        let own = slot.and_then(|slot| if closes { slot.take() } else { *slot });
        // An unknown id becomes one that most likely does not exist.
        usr[4..8].copy_from_slice(&own.unwrap_or(u32::MAX).to_le_bytes());
        usr
    }

    /// Returns a response with a small id in it.
    pub(crate) fn reply(&mut self, reply: Reply) -> Reply {
        let Reply::Open(bytes) = &reply else { return reply };
        let Some(rsp) = OpenRsp::parse(bytes) else { return reply };
        let own = Some(rsp.device_id);
        let at = self.0.iter().position(|slot| *slot == own);
        let at = at.or_else(|| self.0.iter().position(Option::is_none)).unwrap_or(self.0.len());
        self.0.resize(self.0.len().max(at + 1), None);
        self.0[at] = own;
        Reply::Open(OpenRsp { device_id: at as u32, ..rsp }.emit())
    }
}

#[cfg(test)]
impl Sabotage {
    const ALL: [Self; 23] = [
        Self::DoubleWrite,
        Self::ForgetPermit,
        Self::CompleteTwice,
        Self::NoWithdraw,
        Self::EarlyRenew,
        Self::WrongId,
        Self::EarlyDrain,
        Self::DropRequest,
        Self::StaleKey,
        Self::NoRenew,
        Self::EarlyAnswer,
        Self::LeakRegion,
        Self::KeepKey,
        Self::LeakKeys,
        Self::SmallIds,
        Self::GiveUp,
        Self::LosePermitFree,
        Self::Patience,
        Self::StayAway,
        Self::StayOpen,
        Self::LoseClosed,
        Self::NoNotice,
        Self::DeafToFinalIo,
    ];
}

#[cfg(test)]
mod tests {
    use super::Sabotage;
    use crate::engine::simulator::run_seed;
    use crate::engine::simulator::tests::{assert_found, seeds_to_find};
    use crate::rtrs::run::Rtrs;
    use crate::rtrs::{Options, Scenario};

    /// The first seed of the search for each mistake, and the number of seeds that must suffice.
    const SEEDS: u64 = 7_000_000;
    const SOON: u64 = 2_000;

    /// The failures that the judges report for 300 seeds.
    fn caught(how: Sabotage, scenario: Scenario) -> impl Iterator<Item = String> {
        let options = Options::default().with_scenario(Some(scenario));
        (0..300).filter_map(move |seed| {
            let outcome = run_seed::<Rtrs>(seed, &options, Some(how));
            outcome.failure.map(|failure| failure.what)
        })
    }

    /// Checks that one of the failures contains the word, though other seeds may fail differently.
    fn assert_shown(how: Sabotage, scenario: Scenario, word: &str) {
        assert!(caught(how, scenario).any(|what| what.contains(word)), "{how:?} is not noticed");
    }

    fn assert_caught(how: Sabotage, scenario: Scenario, words: &[&str]) {
        let what = caught(how, scenario).next();
        let what = what.unwrap_or_else(|| panic!("{how:?} is not noticed"));
        assert!(words.iter().any(|word| what.contains(word)), "{how:?}: {what}");
    }

    #[test]
    fn an_overlapped_retry_that_overwrites_newer_data_is_noticed() {
        assert_caught(Sabotage::DoubleWrite, Scenario::Calm, &["it may be of"]);
    }

    #[test]
    fn a_permit_that_is_not_returned_is_noticed() {
        assert_caught(Sabotage::ForgetPermit, Scenario::Calm, &["never ends"]);
    }

    #[test]
    fn a_second_end_of_a_request_is_noticed() {
        assert_caught(Sabotage::CompleteTwice, Scenario::Calm, &["never asked"]);
    }

    #[test]
    fn a_chunk_that_changes_while_the_server_has_it_is_noticed() {
        for how in [Sabotage::NoWithdraw, Sabotage::EarlyRenew] {
            assert_caught(how, Scenario::Hostile, &["its chunk has changed"]);
        }
    }

    #[test]
    fn an_answer_to_another_request_is_noticed() {
        assert_caught(Sabotage::WrongId, Scenario::Calm, &["became", "it may be of"]);
    }

    #[test]
    fn requests_that_move_before_their_old_path_is_dead_are_noticed() {
        let words =
            ["something is left", "its binding", "it may be of", "has changed", "at its end"];
        assert_caught(Sabotage::EarlyDrain, Scenario::Cuts, &words);
    }

    #[test]
    fn a_request_that_is_forgotten_is_noticed() {
        assert_caught(Sabotage::DropRequest, Scenario::Calm, &["never ends"]);
    }

    #[test]
    fn wrong_keys_are_noticed() {
        for how in [Sabotage::StaleKey, Sabotage::NoRenew] {
            assert_caught(how, Scenario::Calm, &["became"]);
        }
    }

    #[test]
    fn a_write_acknowledged_before_it_is_carried_out_is_noticed() {
        assert_caught(Sabotage::EarlyAnswer, Scenario::Calm, &["it may be of"]);
    }

    #[test]
    fn a_key_that_outlives_its_request_is_noticed() {
        assert_caught(Sabotage::KeepKey, Scenario::Keys, &["good after the end"]);
    }

    #[test]
    fn keys_that_outlive_their_path_are_noticed() {
        let words = ["good after the end", "is left", "not empty", "at its end"];
        assert_caught(Sabotage::LeakKeys, Scenario::Keys, &words);
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn device_ids_that_come_again_are_noticed() {
        assert_shown(Sabotage::SmallIds, Scenario::Disks, "it may be of");
    }

    #[test]
    fn a_request_that_does_not_move_to_another_path_is_noticed() {
        assert_caught(Sabotage::GiveUp, Scenario::Cuts, &["though a path was connected"]);
    }

    #[test]
    fn a_permit_nobody_is_told_of_is_noticed() {
        assert_caught(Sabotage::LosePermitFree, Scenario::Calm, &["never ends"]);
    }

    #[test]
    fn a_path_to_a_silent_peer_that_is_kept_is_noticed() {
        assert_caught(Sabotage::Patience, Scenario::Stalls, &["silent since"]);
    }

    #[test]
    fn a_path_that_does_not_come_back_is_noticed() {
        assert_shown(Sabotage::StayAway, Scenario::Cuts, "is not back");
    }

    #[test]
    fn a_server_that_does_not_close_is_noticed() {
        assert_shown(Sabotage::StayOpen, Scenario::Slow, "the server closes, and keeps");
        assert_shown(Sabotage::LoseClosed, Scenario::Slow, "the server does not close");
    }

    // tests [RT-101]
    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn late_requests_of_a_path_that_the_server_keeps_are_noticed() {
        let words = ["it may be of", "its chunk has changed"];
        assert_caught(Sabotage::NoNotice, Scenario::DelayedLines, &words);
    }

    #[test]
    fn memory_left_registered_is_noticed() {
        assert_caught(
            Sabotage::LeakRegion,
            Scenario::Calm,
            &["is left", "not empty", "at its end"],
        );
    }

    /// Random seeds find each mistake soon, without scenarios chosen for it: all but one that takes
    /// thousands, and has a test of its own above.
    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn each_is_noticed_by_seeds_that_know_nothing_of_it() {
        for how in Sabotage::ALL.into_iter().filter(|how| *how != Sabotage::NoNotice) {
            let found = seeds_to_find::<Rtrs>(how, SEEDS, SOON);
            assert!(found.is_some(), "{how:?} is not noticed");
        }
    }

    #[test]
    #[ignore = "takes minutes; from BOWLINE_FRESH_FROM on, or from where the clock says"]
    fn each_is_noticed_within_10_000_fresh_seeds() {
        assert_found::<Rtrs>(&Sabotage::ALL);
    }
}
