//! Runs seeds of RoCEv2 devices: `roce FROM COUNT [SCENARIO]`, or `roce SEED` with its whole trace.

use std::time::Instant;

use bowline_sim::roce::{Options, Scenario, run, run_many};
use bowline_sim::{Numbers, TraceMode};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize| args.get(i).and_then(|s| s.parse::<u64>().ok());
    let scenario = args.get(2).and_then(|s| Scenario::from_name(s));
    let options = Options::default().with_scenario(scenario);
    let from = number(0).unwrap_or(0);
    match number(1) {
        None | Some(0) => {
            print!("{}", run(from, &options.with_trace(TraceMode::All)).report());
        }
        Some(count) => {
            let start = Instant::now();
            let summary = run_many(from..from + count, 2, &options, |_| {});
            for outcome in &summary.failures {
                println!("{}", outcome.report());
            }
            for (name, value) in summary.stats.fields() {
                println!("{name} {value}");
            }
            println!("{} of {} failed, {:?}", summary.failed, summary.runs, start.elapsed());
        }
    }
}
