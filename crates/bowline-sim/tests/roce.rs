//! Seeds of RoCEv2 devices that every build runs. Many more run by `bowline sim --roce --seeds N`.

#[macro_use]
mod common;

use bowline_sim::TraceMode;
use bowline_sim::roce::{Options, Scenario, named_seeds, run, run_many};

any_seeds!(600, received);

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
