//! Seeds that every build runs. Many more run by `bowline sim --seeds N`.

#[macro_use]
mod common;

use bowline_sim::TraceMode;
use bowline_sim::rds::{Options, Scenario, run, run_many};

any_seeds!(600, received);

#[test]
fn every_scenario_keeps_its_promises() {
    for scenario in Scenario::ALL {
        let count = if matches!(scenario, Scenario::Mesh | Scenario::Long) { 10 } else { 60 };
        assert_kept(1_000_000, count, &Options::default().with_scenario(Some(scenario)));
    }
}
