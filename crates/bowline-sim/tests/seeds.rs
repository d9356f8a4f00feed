//! Seeds that every build runs. Many more run by `bowline sim --seeds N`.

#[macro_use]
mod common;

use std::ops::ControlFlow;

use bowline_sim::TraceMode;
use bowline_sim::rds::{Options, SEEDS_OF_REQUEST, Scenario, Summary, run, run_many};

any_seeds!(120, received);

#[test]
#[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
fn every_scenario_keeps_its_promises() {
    // That one has a test of its own.
    for scenario in Scenario::ALL.into_iter().filter(|s| *s != Scenario::RdmaStep) {
        let count = match scenario {
            Scenario::Mesh | Scenario::Long => 10,
            Scenario::Ends => 300,
            _ => 60,
        };
        assert_kept(1_000_000, count, &Options::default().with_scenario(Some(scenario)));
    }
}

const OPERATIONS: [(&str, &str); 4] =
    [("ops", "write"), ("ops", "read"), ("ops", "fetch-add"), ("ops", "compare-swap")];

fn assert_reached(summary: &Summary, names: &[(&str, &str)]) {
    for (group, name) in names {
        let mut all = summary.coverage.iter();
        let found = all.find(|(g, n, reach)| (g, n) == (group, name) && reach.runs > 0);
        assert!(found.is_some(), "{group}: {name} does not happen");
    }
}

/// What seeds over RDMA promise to try really happens, and soon.
#[test]
#[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
fn every_fault_over_rdma_happens() {
    let options = Options::default().with_scenario(Some(Scenario::Rdma));
    let summary = run_many(0..1_000, 2, &options, |_| ControlFlow::Continue(()));
    assert_eq!(summary.failed, 0);
    let faults = [
        ("rdma", "cut on both sides"),
        ("rdma", "cut on one side, which tells"),
        ("rdma", "cut on one side, silently"),
        ("rdma", "retries exceeded"),
        ("ops", "broken before a request"),
        ("ops", "broken in a request"),
        ("ops", "broken after a request"),
        ("ops", "not taken by the device"),
        ("ops", "refused"),
        ("rdma", "both connect at once"),
        ("core", "ib_connect_raced"),
        ("rdma", "receives are never posted"),
        ("rdma", "no receive posted"),
        ("core", "ib_tx_throttle"),
        ("fault", "address moves, end to end"),
        ("rdma", "REQ comes to a node that took the address"),
        ("rdma", "accepted for an address that has moved"),
        ("receive", "over RDMA"),
        ("receive", "over TCP where RDMA is served"),
        ("fault", "process dies, end to end"),
        ("fault", "process dies, plain"),
        ("fault", "machine goes off, end to end"),
        ("fault", "node ends in order, end to end"),
        ("fault", "node hands over, end to end"),
        ("rdma", "a type of service"),
        ("kernel over RDMA", "gets a message"),
        ("kernel over RDMA", "drops a duplicate"),
        ("kernel over RDMA", "is asked to acknowledge"),
        ("kernel over RDMA", "drops a connection for a later request"),
        ("kernel over RDMA", "refuses while it connects"),
        ("ops", "reported: success"),
        ("ops", "reported: remote error"),
        ("ops", "reported: cancelled"),
        ("ops", "reported: dropped"),
        ("ops", "reported: other error"),
    ];
    assert_reached(&summary, &faults);
    assert_reached(&summary, &OPERATIONS);
}

/// Not drawn, but all of them: a connection over RDMA is lost at whatever work request, from the
/// first to the last, before it is sent or after it is carried out.
#[test]
#[cfg_attr(debug_assertions, ignore = "takes minutes: cargo test --release")]
fn a_connection_may_be_lost_at_every_work_request() {
    let options = Options::default().with_scenario(Some(Scenario::RdmaStep));
    let mut before = SEEDS_OF_REQUEST;
    for request in 0_u64.. {
        let seeds = request * SEEDS_OF_REQUEST..(request + 1) * SEEDS_OF_REQUEST;
        let summary = run_many(seeds, 2, &options, |_| ControlFlow::Continue(()));
        let reports: Vec<String> = summary.failures.iter().map(|o| o.report()).collect();
        assert_eq!(summary.failed, 0, "request {request}: {}", reports.join("\n"));
        if request == 0 {
            assert_reached(&summary, &OPERATIONS);
        }
        // Base runs end one by one, each for all ways at the same place.
        let cuts = summary.stats.cuts;
        assert!(cuts <= before && cuts.is_multiple_of(5), "request {request}: {cuts}");
        if cuts < before {
            println!("{cuts} of {SEEDS_OF_REQUEST} at work request {request}");
            assert!(request > 50, "a run of {request} work requests");
        }
        if cuts == 0 {
            return;
        }
        before = cuts;
    }
}
