//! Seeds that every build runs. Many more run by `bowline sim --seeds N`.

#[macro_use]
mod common;

use bowline_sim::{Options, Scenario, TraceMode, named_seeds, run, run_many};

any_seeds!(600, received);

#[test]
fn every_scenario_keeps_its_promises() {
    for scenario in Scenario::ALL {
        let count = if matches!(scenario, Scenario::Mesh | Scenario::Long) { 10 } else { 60 };
        assert_kept(1_000_000, count, &Options::default().with_scenario(Some(scenario)));
    }
}

#[test]
fn named_seeds_keep_every_promise() {
    for named in named_seeds() {
        let options = Options::default().with_scenario(named.scenario);
        let outcome = run(named.seed, &options.with_trace(TraceMode::Last(60)));
        assert!(outcome.failure.is_none(), "{}:\n{}", named.name, outcome.report());
    }
}
