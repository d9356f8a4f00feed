//! `bowline sim --roce --cells`: networks whose ports have a rate, a short queue and a delay, and
//! what the congestion control of RoCE makes of them.

use std::{
    collections::BTreeMap,
    num::NonZero,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use bowline_node::{
    log::{Progress, count},
    signals::Stop,
};
use bowline_roce::{Config, Congestion};
use bowline_sim::roce::congestion::{Cell, Report, cells, run};

use super::{Args, Failure, Outcome};

/// Runs the cells whose names contain a text, each with every seed, and prints a line for each.
pub(super) fn run_cells(args: &Args, text: &str) -> Outcome {
    let cells = cells();
    let chosen: Vec<&Cell> = cells.iter().filter(|cell| cell.name.contains(text)).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = cells.iter().map(|cell| cell.name.as_str()).collect();
        return Err(Failure::usage(format!("--cells {text}: none of {}", names.join(", "))));
    }
    let (first, seeds) = match args.seed {
        Some(seed) => (seed, 1),
        None => (args.from, args.seeds.unwrap_or(1)),
    };
    let last = seeds.checked_sub(1).and_then(|more| first.checked_add(more));
    let all = usize::try_from(seeds).ok().and_then(|seeds| seeds.checked_mul(chosen.len()));
    let (Some(_), Some(all)) = (last, all) else {
        return Err(Failure::usage("--from and --seeds together are beyond the last seed"));
    };
    // Each seed runs all cells.
    let nth = |at: usize| (chosen[at % chosen.len()], first + (at / chosen.len()) as u64);
    let threads = args.threads.or_else(|| thread::available_parallelism().ok());
    let mut table = Table::new(args);
    let stop = Stop::install()?;
    let config = Config { congestion: args.congestion, ..Config::default() };
    let next = AtomicUsize::new(0);
    let mut done = 0;
    thread::scope(|scope| {
        let (sender, reports) = mpsc::channel();
        for _ in 0..threads.map_or(1, NonZero::get).min(all) {
            let (sender, nth, next, config, stop) = (sender.clone(), &nth, &next, &config, &stop);
            scope.spawn(move || {
                while !stop.asked() {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= all {
                        break;
                    }
                    let (cell, seed) = nth(at);
                    let start = Instant::now();
                    let report = run(cell, config, seed);
                    if sender.send((at, report, start.elapsed())).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        // They are told in their order.
        let mut early = BTreeMap::new();
        for (at, report, took) in reports {
            early.insert(at, (report, took));
            while let Some((report, took)) = early.remove(&done) {
                let (cell, seed) = nth(done);
                done += 1;
                table.add(cell, seed, &report, took);
                table.show_progress(done, all);
            }
        }
    });
    table.end();
    if done < all {
        return Err(Failure::failed(format!("interrupted after {done} of {all} runs")));
    }
    if table.broken == 0 { Ok(()) } else { Err(Failure::Reported) }
}

/// Results as text, or gathered for one JSON object.
struct Table {
    json: Option<Vec<serde_json::Value>>,
    /// Cells have floors for the delay controller only.
    congestion: Congestion,
    progress: Progress,
    runs: u64,
    missed: u64,
    broken: u64,
}

impl Table {
    fn new(args: &Args) -> Self {
        if !args.json {
            say!(
                "{:<22}{:>5} {:>5} {:>5} {:>5} {:>5} {:>9} {:>9} {:>6} {:>8} {:>8} {:>6}",
                "cell",
                "seed",
                "used",
                "tcp",
                "jain",
                "least",
                "bulk p99",
                "4KiB p99",
                "drop",
                "queue",
                "resent",
                "s"
            );
        }
        let (json, congestion) = (args.json.then(Vec::new), args.congestion);
        let progress = Progress::new(args.progress);
        Self { json, congestion, progress, runs: 0, missed: 0, broken: 0 }
    }

    fn add(&mut self, cell: &Cell, seed: u64, report: &Report, took: Duration) {
        let missed = cell.missed(report);
        let broken = match self.congestion {
            Congestion::Fixed(_) | Congestion::Cubic | Congestion::Swift => {
                report.failure.iter().cloned().collect()
            }
            Congestion::Auto | Congestion::Delay => cell.broken(report),
        };
        self.runs += 1;
        self.missed += u64::from(!missed.is_empty());
        self.broken += u64::from(!broken.is_empty());
        let dropped = report.dropped as f64 / report.offered.max(1) as f64;
        if let Some(objects) = &mut self.json {
            objects.push(serde_json::json!({
                "cell": cell.name,
                "seed": seed,
                "used": report.used,
                "tcp": report.cubic,
                "fairness": report.fairness,
                "least_share": report.shares.0,
                "largest_share": report.shares.1,
                "bulk_ns": report.bulk,
                "small_ns": report.small,
                "dropped": dropped,
                "longest_queue_ns": report.waited,
                "counters": report.counters.iter().copied().collect::<BTreeMap<_, _>>(),
                "goals_missed": missed,
                "broken": broken,
            }));
            return;
        }
        self.progress.clear();
        let us = |nanos: u64| match nanos {
            0 => "-".to_owned(),
            _ => format!("{} us", nanos / 1_000),
        };
        say!(
            "{:<22}{seed:>5} {:>5.3} {:>5.3} {:>5.3} {:>5.2} {:>9} {:>9} {:>6.4} {:>8} {:>8} {:>6.1}",
            cell.name,
            report.used,
            report.cubic,
            report.fairness,
            report.shares.0 + 0.0, // never -0.00
            us(report.bulk[1]),
            us(report.small[1]),
            dropped,
            us(report.waited),
            report.counter("packets_resent"),
            took.as_secs_f64(),
        );
        missed.iter().for_each(|goal| say!("    goal missed: {goal}"));
        broken.iter().for_each(|floor| say!("    BROKEN: {floor}"));
    }

    fn show_progress(&mut self, done: usize, all: usize) {
        self.progress.show(format_args!("{done} of {all} runs"));
    }

    fn end(&mut self) {
        self.progress.clear();
        if let Some(objects) = self.json.take() {
            let object = serde_json::json!({
                "runs": self.runs,
                "goals_missed": self.missed,
                "broken": self.broken,
                "cells": objects,
            });
            say!("{object}");
        } else {
            say!(
                "{} runs: {} reach their goals, {} miss one, {} broken",
                count(self.runs),
                count(self.runs - self.missed),
                count(self.missed),
                count(self.broken)
            );
        }
    }
}
