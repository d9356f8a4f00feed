//! Seeds of nodes and the programs of their hosts that every build runs. Many more run by
//! `bowline sim --host --seeds N`.

#[macro_use]
mod common;

use bowline_sim::TraceMode;
use bowline_sim::host::{Options, Scenario, run, run_many};

any_seeds!(300, bytes);

#[test]
fn every_scenario_keeps_its_promises() {
    for scenario in Scenario::ALL {
        assert_kept(1_000_000, 200, &Options::default().with_scenario(Some(scenario)));
    }
}
