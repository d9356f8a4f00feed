//! Cells measured side by side: all their processes exist, and take turns on the CPUs.
//!
//! ```text
//!   bare sockets  ==....==....==....      == runs
//!   bowline       ..==....==....==..      .. halted by a signal
//!   a peer        ....==....==....==
//! ```
//!
//! The speed of a machine changes from second to second, most of all that of a virtual one. Figures
//! measured one after the other differ by that, figures measured in turns do not. The beginning of
//! a turn, while caches hold memory of others, is not counted. The counting side ends a turn; if
//! other programs use the CPUs, the turn takes longer.

use std::time::Duration;

use crate::run::{Launcher, RESULT_LIMIT, Run, Sample};
use crate::sys::Process;

/// Counted part of a turn, and its uncounted beginning, in which caches fill again.
pub(crate) const COUNTED: Duration = Duration::from_millis(40);
pub(crate) const LEAD: Duration = Duration::from_millis(10);
/// How long a cell may take until it is warm.
const WARM_LIMIT: Duration = Duration::from_secs(20);
/// Longest time of a turn with hardly any replies.
const TURN_LIMIT: Duration = Duration::from_secs(5);

/// A cell that takes part.
struct Party {
    run: Run,
    /// The asking process, and the answering ones.
    asks: Process,
    answer: Vec<Process>,
}

impl Party {
    fn new(run: Run) -> Result<Self, String> {
        let find = |pid: &u32| Process::find(*pid).map_err(|e| format!("process {pid}: {e}"));
        let [rx, tx, programs @ ..] = run.pids.as_slice() else {
            return Err("a side is missing".into());
        };
        let answer = programs.iter().chain([rx]).map(find).collect::<Result<_, _>>()?;
        Ok(Self { asks: find(tx)?, answer, run })
    }

    /// Stops or continues its processes: the asking side is stopped first and continued last.
    fn halt(&self, halted: bool) {
        if halted {
            self.asks.halt(true);
        }
        self.answer.iter().for_each(|process| process.halt(halted));
        if !halted {
            self.asks.halt(false);
        }
    }

    /// Lets it run until it is warm.
    fn warm(mut self) -> Result<Self, String> {
        self.run.go();
        self.run.wait_counting("warm", WARM_LIMIT)?;
        self.halt(true);
        Ok(self)
    }

    /// Lets it run for a turn.
    fn take_turn(&mut self) -> Result<(), String> {
        self.run.send_counting("turn");
        self.halt(false);
        let over = self.run.wait_counting("over", TURN_LIMIT);
        self.halt(true);
        over.map(drop)
    }

    fn end(mut self, foreign: f64) -> Result<Sample, String> {
        self.run.send_counting("end");
        self.halt(false);
        let words = self.run.wait_counting("result", RESULT_LIMIT)?;
        self.run.finish(words, foreign)
    }
}

/// Measures cells in turns, each for `window` in all; `start` starts one of them.
pub(crate) fn measure<T>(
    launcher: &Launcher,
    cells: &mut [T],
    window: Duration,
    start: impl FnMut(&mut T) -> Result<Run, String>,
) -> Vec<Result<Sample, String>> {
    let runs: Vec<Result<Run, String>> = cells.iter_mut().map(start).collect();
    // One after the other, without delay: requests of stopped processes wait.
    let warm = |run: Result<Run, String>| run.and_then(Party::new).and_then(Party::warm);
    let mut parties: Vec<Result<Party, String>> = runs.into_iter().map(warm).collect();
    let pids = parties.iter().flatten().flat_map(|party| party.run.pids.clone()).collect();
    let watch = launcher.watch(pids);
    let turns = window.div_duration_f64(COUNTED).ceil() as u32;
    for _ in 0..turns {
        // Always in one order: everybody has been halted for as long before its turn.
        for party in &mut parties {
            if let Err(why) = party.as_mut().map_or(Ok(()), Party::take_turn) {
                *party = Err(why);
            }
        }
    }
    let foreign = watch.foreign();
    parties.into_iter().map(|party| party.and_then(|party| party.end(foreign))).collect()
}
