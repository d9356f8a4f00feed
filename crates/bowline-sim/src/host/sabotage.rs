//! Deliberate mistakes, to prove that the judge notices them. Only for tests.

/// A mistake that a run makes on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests do wrong on purpose"))]
pub(crate) enum Sabotage {
    /// A wake token that was sent does not come.
    LoseToken,
    /// The server is not woken when something happens in the node.
    DumbBell,
    /// What happens on a channel or socket is not told now and then.
    LoseEvent,
    /// The server sleeps, and programs see that it is awake.
    SleepUnseen,
    /// The server sleeps although something was pushed meanwhile.
    SleepAnyway,
    /// Programs are not asked to tell when they have taken what they were lent.
    NoNotice,
    /// A message of a ring is sent twice.
    SendTwice,
    /// A message of a ring is popped and not sent.
    DropSend,
    /// Two messages change places.
    SwapSends,
    /// A byte of a message changes.
    FlipByte,
    /// Messages are accepted whether there is room or not.
    Promise,
    /// A wake token that a program took before it was killed is not replaced.
    NeverRead,
    /// The lock of a program that was killed stays locked.
    KeepLock,
    /// The node keeps a socket that nobody has any more.
    KeepSocket,
    /// A channel with many requests is not served further.
    ForgetRequests,
    /// Waits do not end when their time is over.
    NoDeadlines,
    /// Users have no quota.
    NoQuota,
    /// A channel is lost when a node hands over.
    LoseChannel,
    /// The node takes what a program writes past the library for a fill token.
    TakeForFill,
}

#[cfg(test)]
mod tests {
    use super::super::plan::Scenario;
    use super::super::run::{Host, Options};
    use super::Sabotage;
    use crate::engine::simulator::run_seed;
    use crate::engine::simulator::tests::{assert_found, seeds_to_find};

    const ALL: [Sabotage; 19] = [
        Sabotage::LoseToken,
        Sabotage::DumbBell,
        Sabotage::LoseEvent,
        Sabotage::SleepUnseen,
        Sabotage::SleepAnyway,
        Sabotage::NoNotice,
        Sabotage::SendTwice,
        Sabotage::DropSend,
        Sabotage::SwapSends,
        Sabotage::FlipByte,
        Sabotage::Promise,
        Sabotage::NeverRead,
        Sabotage::KeepLock,
        Sabotage::KeepSocket,
        Sabotage::ForgetRequests,
        Sabotage::NoDeadlines,
        Sabotage::NoQuota,
        Sabotage::LoseChannel,
        Sabotage::TakeForFill,
    ];
    /// First of the seeds of these tests, and how many of them find a mistake at most.
    const SEEDS: u64 = 500_000;
    const SOON: u64 = 600;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
    fn each_is_noticed_by_seeds_that_know_nothing_of_it() {
        let mut missed = Vec::new();
        for how in ALL.into_iter().filter(|how| *how != Sabotage::NeverRead) {
            let found = seeds_to_find::<Host>(how, SEEDS, SOON);
            println!("{how:?}: {found:?}");
            missed.extend(found.is_none().then_some(how));
        }
        assert!(missed.is_empty(), "{missed:?} not noticed within {SOON} seeds");
    }

    /// It takes a process that is killed with the token in its hands, and another that waits.
    #[test]
    fn a_token_that_died_with_a_process_is_noticed() {
        let options = Options::default().with_scenario(Some(Scenario::Forks));
        let fails = |seed, how| run_seed::<Host>(seed, &options, how).failure.is_some();
        let mut seeds = SEEDS..SEEDS + 10 * SOON;
        let how = Some(Sabotage::NeverRead);
        let found = seeds.find(|seed| fails(*seed, how) && !fails(*seed, None));
        println!("{found:?}");
        assert!(found.is_some(), "not noticed");
    }

    #[test]
    #[ignore = "takes minutes; from BOWLINE_FRESH_FROM on, or from where the clock says"]
    fn each_is_noticed_within_10_000_fresh_seeds() {
        assert_found::<Host>(&ALL);
    }
}
