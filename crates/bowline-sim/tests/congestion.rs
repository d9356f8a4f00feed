//! What the controller of RoCE keeps in every cell, with several seeds: a floor below what is
//! expected of it (`cargo run --release --package bowline-sim --example congestion` prints that).

use bowline_roce::{Config, Congestion};
use bowline_sim::roce::congestion::{Cell, Report, cells, run};

const SEEDS: [u64; 2] = [1, 2];
const MS: u64 = 1_000_000;

/// Least share of the link, least fairness, least share of a host, and most of a foreign flow.
struct Floor {
    used: f64,
    fairness: f64,
    host: f64,
    cubic: (f64, f64),
}

impl Floor {
    const fn used(used: f64) -> Self {
        Self { used, fairness: 0.0, host: 0.0, cubic: (0.0, 0.0) }
    }

    /// The floor of a cell.
    fn of(name: &str) -> Self {
        let incast = |fairness, host| Self { fairness, host, ..Self::used(0.9) };
        match name {
            // A port that holds no more than two packets.
            "one-400g-5us-quarter" => Self::used(0.35),
            "one-100g-50us-quarter" | "one-10g-500us-quarter" | "longer" | "halves" => {
                Self::used(0.8)
            }
            "loss-0.1" => Self::used(0.8),
            "loss-1" => Self::used(0.6),
            "cubic-1g-5ms" => Self { cubic: (0.25, 0.9), ..Self::used(0.1) },
            _ if name.starts_with("cubic") => Self { cubic: (0.25, 0.75), ..Self::used(0.25) },
            _ if name.starts_with("small") => Self::used(0.0),
            // Fifteen and twenty packets fill the route of so many senders: one packet in ten is
            // lost, and who loses all of its first ones finds the queue full for long.
            "incast-10g-64" | "incast-1g-64" => incast(0.6, 0.0),
            "incast-10g-32" | "incast-1g-32" => incast(0.7, 0.0),
            "connections-1g-16" => incast(0.5, 0.1),
            _ if name.starts_with("incast") => incast(0.7, 0.05),
            _ => Self::used(0.9),
        }
    }
}

fn check(cell: &Cell, seed: u64, report: &Report) {
    let (name, floor) = (&cell.name, Floor::of(&cell.name));
    let Report { used, fairness, shares, cubic, .. } = *report;
    assert_eq!(report.failure, None, "{name}, seed {seed}");
    assert!(used >= floor.used, "{name}, seed {seed}: {used:.3} of the link");
    assert!(fairness >= floor.fairness, "{name}, seed {seed}: fairness {fairness:.3}");
    assert!(shares.0 >= floor.host, "{name}, seed {seed}: a host has {:.3}", shares.0);
    let (least, most) = floor.cubic;
    assert!(
        !cell.cubic || (least..=most).contains(&cubic),
        "{name}, seed {seed}: {cubic:.3} is left to the foreign flow"
    );
}

fn all(prefix: &str) {
    let mut count = 0;
    for cell in cells().iter().filter(|cell| cell.name.starts_with(prefix)) {
        for seed in SEEDS {
            check(cell, seed, &run(cell, &Config::default(), seed));
            count += 1;
        }
    }
    assert!(count > 0, "no cell is called {prefix}");
}

#[test]
fn one_flow_fills_links_of_all_kinds() {
    for prefix in ["one-100m", "one-1g", "one-10g", "one-100g-5", "one-400g-5", "read", "ecn"] {
        all(prefix);
    }
}

#[test]
fn many_senders_share_a_port() {
    all("incast");
    all("connections");
}

#[test]
fn a_foreign_flow_neither_starves_nor_starves_us() {
    all("cubic");
}

#[test]
fn loss_reordering_and_changes_cost_little() {
    for prefix in ["loss", "late", "halves", "longer", "shorter"] {
        all(prefix);
    }
}

/// Of a message that is lost whole nobody tells: it is asked for long before the queue pair's
/// timeout, 537 ms.
#[test]
fn no_lost_tail_waits_for_the_timeout_of_the_queue_pair() {
    for cell in cells().iter().filter(|cell| cell.name.starts_with("small-loss")) {
        for seed in SEEDS {
            let report = run(cell, &Config::default(), seed);
            let longest = report.bulk[2].max(report.small[2]);
            assert!(longest < 50 * MS, "{}, seed {seed}: {longest} ns", cell.name);
        }
    }
}

/// The fixed window of before, with the same losses.
#[test]
fn one_per_cent_of_loss_costs_less_than_with_a_fixed_window() {
    let all = cells();
    let cell = all.iter().find(|cell| cell.name == "loss-1").expect("the cell");
    let fixed = Config { congestion: Congestion::Fixed(240), ..Config::default() };
    let [ours, before] = [Config::default(), fixed].map(|config| run(cell, &config, 1).used);
    assert!(ours >= 1.3 * before, "{ours:.3} and {before:.3}");
}
