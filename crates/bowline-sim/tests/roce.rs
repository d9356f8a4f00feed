//! Seeds of RoCEv2 devices that every build runs. Many more run by `bowline sim --roce --seeds N`.

#[macro_use]
mod common;

use bowline_sim::TraceMode;
use bowline_sim::roce::{Options, Scenario, run, run_many};

any_seeds!(120, received);

#[test]
#[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
fn every_scenario_keeps_its_promises() {
    for scenario in Scenario::ALL {
        assert_kept(1_000_000, 60, &Options::default().with_scenario(Some(scenario)));
    }
}
