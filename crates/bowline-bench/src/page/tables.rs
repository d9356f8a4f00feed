//! The tables of the page, in Markdown.

use std::fmt::Write as _;

use super::names::{meaning, rival};
use super::runs::{Machine, Run};
use crate::args::Suite;
use crate::report::{short, time};
use crate::targets::{self, Against, Metric, Outcome, Target, Verdict};

/// Rows of the first table: suite, target, cell and first rival of it, and what people would call
/// it.
const HEADLINES: &[(Suite, &str, &str, &str, &str)] = &[
    (Suite::Rds, "R2", "stream/64", "zmq", "RDS, messages of 64 B"),
    (Suite::Rds, "R5", "stream/1024", "zmq", "RDS, messages of 1 KiB"),
    (Suite::Rds, "R5", "stream/1024", "ofi-net", "the same"),
    (Suite::Rds, "R7", "stream/8192", "nanomsg", "RDS, messages of 8 KiB"),
    (Suite::Rds, "R9", "stream/1048576", "tcpb", "RDS, messages of 1 MiB"),
    (Suite::Rds, "R13", "rtt-sleep/64", "zmq", "RDS, round trip, sleeping"),
    (Suite::Roce, "V1", "bulk/4096", "udp-gso", "RoCEv2, RDMA WRITE of 1 MiB"),
    (Suite::Roce, "V2", "bulk/4096", "tcpz", "the same"),
    (Suite::Rtrs, "T2", "read/4096x32", "nbdkit", "RTRS, reads of 4 KiB"),
    (Suite::Rtrs, "T2", "write/4096x32", "nbdkit", "RTRS, writes of 4 KiB"),
    (Suite::Rtrs, "T6", "read/131072x16", "nbdkit", "RTRS, reads of 128 KiB"),
    (Suite::Rtrs, "T7", "write/131072x16", "nbdkit", "RTRS, writes of 128 KiB"),
    (Suite::Rnbd, "N2", "read/4096x32", "nbdkit", "rnbd library, reads of 4 KiB"),
    (Suite::Rnbd, "N2", "write/4096x32", "nbdkit", "rnbd library, writes of 4 KiB"),
    (Suite::Rnbd, "N2", "read/4096x32", "qemu-nbd", "rnbd library, reads of 4 KiB"),
    (Suite::Rnbd, "N2", "read/4096x32", "tgt", "the same"),
    (Suite::Doors, "N5", "doors/read/4096x32", "nbdkit", "NBD socket, fio, reads of 4 KiB"),
    (Suite::Doors, "N5", "doors/write/4096x32", "nbdkit", "NBD socket, fio, writes of 4 KiB"),
    (Suite::Doors, "N5", "doors/read/131072x16", "nbdkit", "NBD socket, fio, reads of 128 KiB"),
    (Suite::Doors, "N5", "doors/write/131072x16", "nbdkit", "NBD socket, fio, writes of 128 KiB"),
    (Suite::Doors, "N6", "doors/read/4096x32", "nbdkit", "file by FUSE, fio, reads of 4 KiB"),
    (Suite::Doors, "N6", "doors/write/4096x32", "nbdkit", "file by FUSE, fio, writes of 4 KiB"),
    (Suite::Doors, "N6", "doors/read/131072x16", "nbdkit", "file by FUSE, fio, reads of 128 KiB"),
    (Suite::Doors, "N6", "doors/write/131072x16", "nbdkit", "file by FUSE, fio, writes of 128 KiB"),
];

/// Writes what a stranger asks for first: figures beside what people use, and on which machines.
pub(super) fn summary(machines: &[Machine]) -> String {
    format!("### In short\n\n{}\n### Machines and runs\n\n{}", headlines(machines), list(machines))
}

/// Writes every target, with the figures of every machine.
pub(super) fn by_target(machines: &[Machine]) -> String {
    let titles = [
        "RDS: messages",
        "RoCEv2: RDMA in user space",
        "RTRS: requests for remote memory",
        "rnbd library: a mapped disk, used through the library",
        "Doors: a mapped disk, used by fio through its NBD socket and its file",
    ];
    let tables: Vec<String> = Suite::ALL
        .into_iter()
        .zip(titles)
        .map(|(suite, title)| (title, suite_tables(suite, machines)))
        .filter(|(_, table)| !table.is_empty())
        .map(|(title, table)| format!("## {title}\n\n{table}"))
        .collect();
    tables.join("\n")
}

fn row(out: &mut String, cells: &[String]) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "| {} |", cells.join(" | "));
}

fn header(out: &mut String, names: &[String]) {
    row(out, names);
    let _ = writeln!(out, "|{}", "---|".repeat(names.len()));
}

fn list(machines: &[Machine]) -> String {
    let mut out = String::new();
    header(&mut out, &["", "processor", "kernel", "last runs"].map(str::to_owned));
    for machine in machines {
        let Some(first) = machine.runs.first() else { continue };
        let head = &first.recorded.head;
        let place = if head.virtualised { ", virtual" } else { "" };
        let runs: Vec<String> = machine.runs.iter().map(link).collect();
        row(
            &mut out,
            &[
                machine.name.to_string(),
                format!("{} x {}{place}", head.cores, head.cpu),
                head.kernel.clone(),
                runs.join(", "),
            ],
        );
    }
    out
}

fn link(run: &Run) -> String {
    let recorded = &run.recorded;
    format!("[{} {}](results/{})", recorded.suite.name(), recorded.head.date, recorded.file)
}

/// Writes what bowline reaches beside what people use: figures of the newest run, ratios of all.
fn headlines(machines: &[Machine]) -> String {
    let mut out = String::new();
    let names = ["what", "bowline", "compared with", "theirs", "ratio"];
    header(&mut out, &names.map(str::to_owned));
    for (suite, id, block, against, what) in HEADLINES {
        let target = targets::of(*suite).iter().find(|t| {
            (t.id, t.block) == (*id, *block) && t.rivals().next().is_some_and(|l| l == against)
        });
        let Some(target) = target else { continue };
        let runs: Vec<&Run> = machines.iter().filter_map(|m| m.run(*suite)).collect();
        let ratios: Vec<f64> =
            runs.iter().filter_map(|run| Some(outcome(run, target)?.ratio?.mid)).collect();
        let newest = runs.iter().find_map(|run| {
            let rivals: Vec<&str> = target.rivals().copied().collect();
            Some((best(run, target, target.own)?, best(run, target, &rivals)?))
        });
        let Some((own, theirs)) = newest else { continue };
        row(
            &mut out,
            &[
                (*what).to_owned(),
                own,
                rival(target).unwrap_or(against).to_owned(),
                theirs,
                range(&ratios),
            ],
        );
    }
    out
}

/// The better figure of some entries of a run, with its unit.
fn best(run: &Run, target: &Target, labels: &[&str]) -> Option<String> {
    let figures = labels
        .iter()
        .filter_map(|label| run.recorded.results.figure(target.block, label, target.metric));
    let better = if target.metric.smaller_is_better() { f64::min } else { f64::max };
    let figure = figures.reduce(better)?;
    Some(match target.metric {
        Metric::ByteRate => format!("{:.2} GB/s", figure / 1e9),
        Metric::P50 | Metric::P99 => time(figure),
        _ => format!("{}/s", short(figure)),
    })
}

fn range(ratios: &[f64]) -> String {
    let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let high = ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    match ratios {
        [] => "-".to_owned(),
        [one] => short(*one),
        _ => format!("{} to {}", short(low), short(high)),
    }
}

fn outcome<'a>(run: &'a Run, target: &Target) -> Option<&'a Outcome> {
    run.outcomes.iter().find(|o| {
        let t = &o.target;
        (t.id, t.what, t.block, t.against) == (target.id, target.what, target.block, target.against)
    })
}

/// Writes a row for each target and rival, with a column for each machine that has a run.
fn suite_tables(suite: Suite, machines: &[Machine]) -> String {
    let columns: Vec<(&Machine, &Run)> =
        machines.iter().filter_map(|m| Some((m, m.run(suite)?))).collect();
    if columns.is_empty() {
        return String::new();
    }
    let mut out = String::new();
    let mut names: Vec<String> = ["id", "what", "compared with", "must"].map(str::to_owned).into();
    names.extend(columns.iter().map(|(machine, _)| machine.name.to_string()));
    header(&mut out, &names);
    for group in groups(targets::of(suite)) {
        let Some(first) = group.first() else { continue };
        let mut cells = vec![
            first.id.to_owned(),
            meaning(first.id).unwrap_or(first.what).to_owned(),
            rival(first).map_or_else(|| first.against_text(), str::to_owned),
            must(&group),
        ];
        for (_, run) in &columns {
            cells.push(figures(&group, run));
        }
        row(&mut out, &cells);
    }
    out
}

/// Targets of one number that are compared with the same, in the order of the list.
fn groups(targets: &[Target]) -> Vec<Vec<&Target>> {
    let mut groups: Vec<Vec<&Target>> = Vec::new();
    for target in targets {
        let alike = |other: &Target| {
            let both = [other.against, target.against];
            other.id == target.id
                && (both[0] == both[1] || both.iter().all(|a| matches!(a, Against::SameIndex(_))))
        };
        match groups.iter_mut().find(|group| group.first().is_some_and(|first| alike(first))) {
            Some(group) => group.push(target),
            None => groups.push(vec![target]),
        }
    }
    groups
}

fn must(group: &[&Target]) -> String {
    let mut limits: Vec<String> = Vec::new();
    for target in group {
        let sign = if target.metric.smaller_is_better() { "≤" } else { "≥" };
        limits.push(format!("{sign} {}", number(target, target.must)));
    }
    limits.dedup();
    limits.join(" / ")
}

/// Writes a figure of a target: whole numbers as such, and pauses in milliseconds.
fn number(target: &Target, value: f64) -> String {
    let value = if target.metric == Metric::Pause { value * 1e3 } else { value };
    let whole = value.fract() == 0.0 && value.abs() < 1e4;
    if whole { format!("{value:.0}") } else { short(value) }
}

/// Writes the figures of a row for one run: slashes between those of a cell, and between cells that
/// have one each; semicolons between cells that have several.
fn figures(group: &[&Target], run: &Run) -> String {
    let mut cells: Vec<(&str, Vec<String>)> = Vec::new();
    for target in group {
        let text = figure(outcome(run, target));
        match cells.iter_mut().find(|(block, _)| *block == target.block) {
            Some((_, texts)) => texts.push(text),
            None => cells.push((target.block, vec![text])),
        }
    }
    if cells.iter().flat_map(|(_, texts)| texts).all(|text| text == "-") {
        return "-".to_owned();
    }
    let several = cells.iter().any(|(_, texts)| texts.len() > 1);
    let cells: Vec<String> = cells.iter().map(|(_, texts)| texts.join(" / ")).collect();
    cells.join(if several { "; " } else { " / " })
}

/// Writes a ratio, marked by its verdict.
fn figure(outcome: Option<&Outcome>) -> String {
    let Some(Outcome { target, ratio: Some(ratio), verdict, .. }) = outcome else {
        return "-".to_owned();
    };
    let mid = number(target, ratio.mid);
    match verdict {
        Verdict::Pass | Verdict::Skipped(_) => mid,
        Verdict::Fail(_) => format!("**{mid}**"),
        Verdict::Undecided(_) => format!("{mid}?"),
        Verdict::Ceiling(_) => format!("{mid}†"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Spread;

    #[test]
    fn every_headline_is_about_a_target() {
        for (suite, id, block, against, _) in HEADLINES {
            let found = targets::of(*suite)
                .iter()
                .any(|t| t.id == *id && t.block == *block && t.rivals().next() == Some(against));
            assert!(found, "{id} {block} {against}");
        }
    }

    #[test]
    fn targets_of_one_number_and_rival_share_a_row() {
        let groups = groups(targets::RTRS);
        let sizes = |id: &str| -> Vec<usize> {
            groups.iter().filter(|g| g[0].id == id).map(Vec::len).collect()
        };
        assert_eq!((sizes("T3"), sizes("T5"), sizes("T8")), (vec![2, 2], vec![1, 1, 1], vec![6]));
        let reset = groups.iter().find(|group| group[0].id == "N3").unwrap();
        assert_eq!(must(reset), "≤ 1000 / ≤ 0");
    }

    #[test]
    fn a_verdict_marks_its_figure() {
        let spread = Spread { low: 0.5, mid: 0.6, high: 0.7, count: 3 };
        let outcome = |verdict| Outcome {
            target: targets::RDS[0],
            ratio: Some(spread),
            cpu: None,
            good_rounds: 3,
            ceiling: None,
            foreign: 0.0,
            verdict,
        };
        let marked = |verdict| figure(Some(&outcome(verdict)));
        assert_eq!(marked(Verdict::Pass), "0.60");
        assert_eq!(marked(Verdict::Fail(String::new())), "**0.60**");
        assert_eq!(marked(Verdict::Undecided(String::new())), "0.60?");
        assert_eq!(marked(Verdict::Ceiling(String::new())), "0.60†");
        assert_eq!(figure(None), "-");
    }
}
