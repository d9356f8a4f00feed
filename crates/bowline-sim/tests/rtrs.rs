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
fn named_seeds_keep_every_promise() {
    for (name, seed, about) in named_seeds() {
        let outcome = run(*seed, &Options::default().with_trace(TraceMode::Last(60)));
        assert!(outcome.failure.is_none(), "{name}, {about}:\n{}", outcome.report());
    }
}
