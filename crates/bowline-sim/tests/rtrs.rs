//! Seeds of RTRS sessions and RNBD disks that every build runs. Many more run by
//! `bowline sim --rtrs --seeds N`.

use bowline_sim::TraceMode;
use bowline_sim::rtrs::{Options, Scenario, named_seeds, run, run_many};

fn assert_kept(from: u64, count: u64, options: &Options) {
    let summary = run_many(from..from + count, 2, options, |_| {});
    let reports: Vec<String> = summary.failures.iter().map(|o| o.report()).collect();
    assert_eq!(summary.failed, 0, "{}", reports.join("\n"));
    assert_eq!(summary.runs, count);
    assert!(summary.stats.bytes > 0, "nothing was read or written at all");
}

#[test]
fn seeds_keep_every_promise() {
    assert_kept(0, 1_400, &Options::default());
}

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

#[test]
fn a_seed_is_a_run() {
    for seed in 0..40 {
        let first = run(seed, &Options::default());
        let second = run(seed, &Options::default().with_trace(TraceMode::All));
        assert_eq!(first.trace_hash, second.trace_hash, "seed {seed}");
        assert_eq!(first.stats, second.stats, "seed {seed}");
        assert!(!second.lines.is_empty());
    }
}

#[test]
fn seeds_differ() {
    let hashes: std::collections::HashSet<u64> =
        (0..40).map(|seed| run(seed, &Options::default()).trace_hash).collect();
    assert_eq!(hashes.len(), 40);
}

#[test]
fn scenarios_are_found_by_their_names() {
    for scenario in Scenario::ALL {
        assert_eq!(Scenario::from_name(scenario.name()), Some(scenario));
    }
    assert_eq!(Scenario::from_name("nothing"), None);
}
