//! Seeds of RTRS sessions and RNBD disks that every build runs. Many more run by
//! `bowline sim --rtrs --seeds N`.

#[macro_use]
mod common;

use std::ops::ControlFlow;

use bowline_sim::TraceMode;
use bowline_sim::rtrs::{Options, SEEDS_OF_STEP, Scenario, run, run_many};

any_seeds!(150, bytes);

#[test]
#[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
fn every_scenario_keeps_its_promises() {
    // That one has a test of its own.
    for scenario in Scenario::ALL.into_iter().filter(|scenario| *scenario != Scenario::SingleFault)
    {
        assert_kept(1_000_000, 60, &Options::default().with_scenario(Some(scenario)));
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
fn disks_come_and_go_while_others_are_in_use() {
    let options = Options::default().with_scenario(Some(Scenario::Disks));
    let stats = run_many(2_000_000..2_000_060, 2, &options, |_| ControlFlow::Continue(())).stats;
    assert!(stats.given_up > stats.given_up_busy && stats.given_up_busy > 0, "{stats:?}");
    assert!(stats.mapped > stats.sessions && stats.not_mapped > 0, "{stats:?}");
}

/// Not drawn, but one datagram in eleven of all of them: whatever goes wrong at whatever datagram
/// of a session, from its first to its last. `bowline sim --rtrs --scenario each` runs all.
#[test]
#[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
fn anything_may_go_wrong_at_many_steps() {
    let options = Options::default().with_scenario(Some(Scenario::SingleFault));
    let mut before = SEEDS_OF_STEP;
    for step in (0_u64..).step_by(11) {
        let seeds = step * SEEDS_OF_STEP..(step + 1) * SEEDS_OF_STEP;
        let summary = run_many(seeds, 2, &options, |_| ControlFlow::Continue(()));
        let reports: Vec<String> = summary.failures.iter().map(|o| o.report()).collect();
        assert_eq!(summary.failed, 0, "step {step}: {}", reports.join("\n"));
        // Stories end one by one, each for all mishaps at the same step.
        let faults = summary.stats.faults;
        assert!(
            faults <= before && faults.is_multiple_of(SEEDS_OF_STEP / 4),
            "step {step}: {faults}"
        );
        assert!(faults == before || step > 100, "a story of {step} steps");
        if faults == 0 {
            // What `.ci/run` runs of it is all of it.
            assert!(step * SEEDS_OF_STEP <= 24_000, "{} seeds", step * SEEDS_OF_STEP);
            return;
        }
        before = faults;
    }
}
