//! Seeds of RTRS sessions and RNBD disks that every build runs. Many more run by
//! `bowline sim --rtrs --seeds N`.

#[macro_use]
mod common;

use bowline_sim::TraceMode;
use bowline_sim::rtrs::{Options, Scenario, named_seeds, run, run_many};

any_seeds!(1_400, bytes);

#[test]
fn every_scenario_keeps_its_promises() {
    for scenario in Scenario::ALL {
        assert_kept(1_000_000, 60, &Options::default().with_scenario(Some(scenario)));
    }
}

#[test]
fn disks_come_and_go_while_others_are_in_use() {
    let options = Options::default().with_scenario(Some(Scenario::Disks));
    let stats = run_many(2_000_000..2_000_060, 2, &options, |_| {}).stats;
    assert!(stats.given_up > stats.given_up_busy && stats.given_up_busy > 0, "{stats:?}");
    assert!(stats.mapped > stats.sessions && stats.not_mapped > 0, "{stats:?}");
}

#[test]
fn named_seeds_keep_every_promise() {
    for (name, seed, about) in named_seeds() {
        let outcome = run(*seed, &Options::default().with_trace(TraceMode::Last(60)));
        assert!(outcome.failure.is_none(), "{name}, {about}:\n{}", outcome.report());
    }
}
