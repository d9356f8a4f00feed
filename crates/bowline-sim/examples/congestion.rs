//! Runs the cells whose names contain a text, and prints a line for each:
//! `congestion [TEXT [PACKETS [SEED]]]`, with a number of packets as the fixed window; 0: none.

use std::time::Instant;

use bowline_roce::{Config, Congestion};
use bowline_sim::roce::congestion::{cells, run};

fn main() {
    let mut args = std::env::args().skip(1);
    let wanted = args.next().unwrap_or_default();
    let fixed = args.next().and_then(|packets| packets.parse().ok()).filter(|packets| *packets > 0);
    let seed = args.next().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let congestion = fixed.map_or(Congestion::Delay, Congestion::Fixed);
    let config = Config { congestion, ..Config::default() };
    let mut missed = 0;
    for cell in cells().iter().filter(|cell| cell.name.contains(&wanted)) {
        let start = Instant::now();
        let report = run(cell, &config, seed);
        let us = |times: [u64; 3]| times.map(|time| time / 1000);
        println!(
            "{:<22} used {:.3} tcp {:.3} jain {:.3} {:.2}-{:.2} bulk {:?} small {:?} us, drop \
             {:.4} wait {}; resent {} goback {} repair {} probe {} rto {}; {} steps {:.1} s",
            cell.name,
            report.used,
            report.cubic,
            report.fairness,
            report.shares.0,
            report.shares.1,
            us(report.bulk),
            us(report.small),
            report.dropped as f64 / report.offered.max(1) as f64,
            report.waited / 1000,
            report.counter("packets_resent"),
            report.counter("go_backs"),
            report.counter("repairs"),
            report.counter("probes"),
            report.counter("timeouts"),
            report.steps,
            start.elapsed().as_secs_f64(),
        );
        let faults = cell.missed(&report).into_iter().chain(report.failure.clone());
        for fault in faults {
            missed += 1;
            println!("    {fault}");
        }
    }
    println!("{missed} missed");
}
