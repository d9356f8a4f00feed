//! `bowline bench net`: bowline over a network whose ports are slow and whose buffers are small,
//! beside bare TCP and nbdkit.
//!
//! ```text
//!   cell: link, MTU, clients, work, what goes on beside it
//!     round 1:  bowline, then its rival  -- each in a scene of its own: namespaces, veth, tbf
//!     round 2:  bowline, then its rival     clients and servers are processes of this program
//! ```
//! The other suites measure what the processors can do over loopback, where nothing is lost; this
//! one measures what is made of a link, what it does to others on it, and what the router must
//! drop.

mod args;
mod judge;
mod measure;
mod plan;
mod report;
mod scene;

use std::time::Instant;

pub(crate) use args::{Args, Options};
use judge::{Judged, Round};
use measure::Measured;
use plan::NetCell;
use scene::Scene;

use crate::cell::Subject;
use crate::doors;
use crate::engine::Progress;
use crate::head::Head;
use crate::peers::Peers;
use crate::run::Launcher;
use crate::targets::{self, Verdict};

/// One measurement, or why there is none.
struct Record {
    /// Place of the cell in the plan.
    cell: usize,
    subject: Subject,
    round: u32,
    result: Result<Measured, String>,
}

/// Runs `bowline bench net` and returns the exit status.
pub(crate) fn run(options: &Options) -> Result<i32, String> {
    let cells = plan::plan(options);
    if options.list {
        cells.iter().for_each(|cell| println!("{:44} {}", cell.name(), cell.work.title()));
        return Ok(0);
    }
    let head = Head::look();
    let mut peers = Peers::find(|subject| subject == Subject::Nbdkit);
    if cells.iter().any(|cell| cell.work.is_by_fio()) {
        peers.add_doors();
        doors::keep_mounts();
    }
    let mut notes = conditions(options);
    notes.extend(crate::peer_notes(&peers));
    head.lines().iter().chain(&notes).for_each(|line| println!("{line}"));
    if !head.available_cc.is_empty() && !head.available_cc.contains(&options.cc) {
        let known = head.available_cc.join(", ");
        return Err(format!("--cc {}: this kernel has {known}", options.cc));
    }
    let first = &cells[0]; // an empty plan is refused with the options
    if let Err(why) = Scene::build(first.link, first.mtu, first.clients) {
        println!();
        cells.iter().for_each(|cell| println!("{:44} skipped: {why}", cell.name()));
        return Ok(0);
    }
    let (records, late) = measure_all(&cells, &peers, options)?;
    if let Some(late) = late {
        println!("\n{late}");
        notes.push(late);
    }
    print!("{}", report::tables(&cells, &records));
    let judged = judge_all(&cells, &records, &peers);
    print!("{}", report::figures(&judged));
    if let Some(path) = &options.json {
        let json = report::json(&head, &notes, &cells, &records, &judged);
        crate::write(path, &(crate::json::lines(&json, 2) + "\n"))?;
    }
    Ok(targets::exit_status(judged.iter().map(|judged| &judged.verdict)))
}

fn conditions(options: &Options) -> Vec<String> {
    vec![
        format!(
            "everybody: window {:?} after {:?}, not bound to CPUs; TCP: {}; packets are cut \
             before they leave a client or the server",
            options.window, options.warm, options.cc
        ),
        format!(
            "bowline: soft devices, congestion control {}; path MTU 1024 at MTU 1500, 4096 at 9000",
            options.congestion
        ),
    ]
}

/// Measures round by round; tells when the time was up before the last one.
fn measure_all(
    cells: &[NetCell],
    peers: &Peers,
    options: &Options,
) -> Result<(Vec<Record>, Option<String>), String> {
    let launcher = Launcher::new()?;
    let (start, mut progress, mut records) = (Instant::now(), Progress::new(), Vec::new());
    let wanted = |cell: &NetCell| {
        let there = |s: &Subject| !(s.is_peer() || cell.work.is_by_fio()) || peers.has(*s);
        [cell.work.own, cell.work.rival].into_iter().filter(there)
    };
    let total = cells.iter().flat_map(wanted).count() * options.rounds as usize;
    for round in 0..options.rounds {
        for (at, cell) in cells.iter().enumerate() {
            for subject in wanted(cell) {
                if start.elapsed() > options.limit {
                    progress.clear();
                    let done = records.len();
                    let late =
                        format!("ended after {done} of {total} measurements: the time was up");
                    return Ok((records, Some(late)));
                }
                progress.show(&format!(
                    "round {} of {}, {} of {total}: {} {} ({:.0} s)",
                    round + 1,
                    options.rounds,
                    records.len() + 1,
                    cell.name(),
                    subject.name(),
                    start.elapsed().as_secs_f64(),
                ));
                let result = measure::measure(&launcher, cell, subject, options);
                records.push(Record { cell: at, subject, round, result });
            }
        }
    }
    progress.clear();
    Ok((records, None))
}

fn judge_all(cells: &[NetCell], records: &[Record], peers: &Peers) -> Vec<Judged> {
    let mut all = Vec::new();
    for (at, cell) in cells.iter().enumerate() {
        let of = |subject, round| {
            let mut of = records.iter().filter(|record| record.cell == at);
            of.find(|record| record.subject == subject && record.round == round)
        };
        let rounds = records.iter().map(|record| record.round).max().map_or(0, |last| last + 1);
        let good = |subject, round| of(subject, round)?.result.as_ref().ok();
        let (own, rival) = (cell.work.own, cell.work.rival);
        let pairs: Vec<Round<'_>> =
            (0..rounds).filter_map(|round| Some((good(own, round)?, good(rival, round)))).collect();
        let error = (0..rounds).find_map(|round| of(own, round)?.result.as_ref().err());
        let why = error.map(|why| Verdict::Fail(why.clone()));
        for figure in judge::figures(cell, &pairs) {
            let mut judged = judge::judge(cell.name(), figure, why.clone());
            let missing = peers.missing(own).filter(|_| cell.work.is_by_fio());
            let missing = missing.or_else(|| peers.missing(rival));
            if let (None, Some(missing)) = (judged.ratio, missing) {
                judged.verdict = Verdict::Skipped(missing.to_owned());
            }
            all.push(judged);
        }
    }
    all
}
