//! The recorded runs that the page is about, by machine.

use std::path::Path;

use crate::args::Suite;
use crate::recorded::Recorded;
use crate::targets::Outcome;

/// A run and its verdicts.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) recorded: Recorded,
    pub(super) outcomes: Vec<Outcome>,
}

/// A machine, as far as heads of runs tell machines apart, and the last run of each suite on it.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) name: char,
    /// In the order of the suites.
    pub(super) runs: Vec<Run>,
}

impl Machine {
    /// The run of a suite.
    pub(super) fn run(&self, suite: Suite) -> Option<&Run> {
        self.runs.iter().find(|run| run.recorded.suite == suite)
    }

    fn last_date(&self) -> &str {
        self.runs.iter().map(|run| run.recorded.head.date.as_str()).max().unwrap_or_default()
    }
}

/// What tells machines apart.
fn key(run: &Recorded) -> (&str, usize, &str) {
    (&run.head.cpu, run.head.cores, &run.head.kernel)
}

/// Reads every run of a folder; the machine with the newest run comes first.
///
/// # Errors
///
/// Says which file cannot be read, or which two are of one suite and machine.
pub(super) fn read(dir: &Path) -> Result<Vec<Machine>, String> {
    let bad = |e: std::io::Error| format!("{}: {e}", dir.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(bad)? {
        let path = entry.map_err(bad)?.path();
        if path.extension().is_some_and(|ending| ending == "json") {
            files.push(path);
        }
    }
    files.sort();
    let runs: Result<Vec<Recorded>, String> = files.iter().map(|f| Recorded::read(f)).collect();
    by_machine(runs?)
}

fn by_machine(runs: Vec<Recorded>) -> Result<Vec<Machine>, String> {
    let mut machines: Vec<Machine> = Vec::new();
    for recorded in runs {
        let known = machines.iter_mut().find(|machine| {
            machine.runs.first().is_some_and(|run| key(&run.recorded) == key(&recorded))
        });
        let run = Run { outcomes: recorded.outcomes(), recorded };
        match known {
            None => machines.push(Machine { name: '?', runs: vec![run] }),
            Some(machine) => {
                if let Some(other) = machine.run(run.recorded.suite) {
                    return Err(format!(
                        "{} and {} are of one suite and machine: keep the last one",
                        other.recorded.file, run.recorded.file
                    ));
                }
                machine.runs.push(run);
            }
        }
    }
    // Stable, so that machines of one day stay in the order of their files.
    machines.sort_by(|a, b| b.last_date().cmp(a.last_date()));
    for (machine, name) in machines.iter_mut().zip('A'..='Z') {
        machine.name = name;
        machine.runs.sort_by_key(|run| Suite::ALL.iter().position(|s| *s == run.recorded.suite));
    }
    Ok(machines)
}
