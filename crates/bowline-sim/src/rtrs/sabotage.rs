//! Faults that the promises do not allow, to prove that the judges notice. Tests only.

/// What a run does wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// A write is carried out once more, later: what a request overtaken by its repetition would do
    /// if the server did not let them wait for each other.
    DoubleWrite,
    /// A permit is not given back.
    ForgetPermit,
    /// The end of a request is told twice.
    CompleteTwice,
    /// The client can reach a chunk while the server has it.
    NoWithdraw,
    /// An answer names another request.
    WrongId,
    /// Requests move to other paths before the queue pairs of the old one are dead.
    EarlyDrain,
    /// A request is forgotten.
    DropRequest,
    /// The key told is not the key made.
    StaleKey,
    /// No new key is made.
    NoRenew,
    /// A write is acknowledged before it is carried out.
    EarlyAnswer,
    /// Memory stays registered.
    LeakRegion,
    /// A key of a READ is not invalidated.
    KeepKey,
    /// Keys of a path stay when it ends.
    LeakKeys,
}

#[cfg(test)]
mod tests {
    use super::Sabotage;
    use crate::rtrs::{Options, Scenario, run::run_with};

    /// What the judges say, of the first of many seeds in which they say anything.
    fn caught(how: Sabotage, scenario: Scenario) -> String {
        let options = Options::default().with_scenario(Some(scenario));
        let failed = (0..300).find_map(|seed| {
            let outcome = run_with(seed, &options, Some(how));
            outcome.failure.map(|failure| failure.what)
        });
        failed.unwrap_or_else(|| panic!("{how:?} is not noticed"))
    }

    fn assert_caught(how: Sabotage, scenario: Scenario, words: &[&str]) {
        let what = caught(how, scenario);
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
        assert_caught(Sabotage::NoWithdraw, Scenario::Hostile, &["its chunk has changed"]);
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
    fn memory_left_registered_is_noticed() {
        assert_caught(
            Sabotage::LeakRegion,
            Scenario::Calm,
            &["is left", "not empty", "at its end"],
        );
    }
}
