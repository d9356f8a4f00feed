//! Cells measured side by side: their processes are all there, and take turns on the CPUs.
//!
//! ```text
//!   bare sockets  ==....==....==....      == goes on
//!   bowline       ..==....==....==..      .. halted by a signal
//!   a peer        ....==....==....==
//! ```
//!
//! A machine, and more so a virtual one, is fast now and slow a second later. What was measured one
//! after the other differs by that, what was measured in turns does not. What a turn begins with,
//! caches full of others' memory, is not counted. A turn is over when the counting side says so:
//! where others have the CPUs, it lasts longer.

use std::time::Duration;

use crate::run::{Launcher, RESULT_LIMIT, Run, Sample};
use crate::sys::Process;

/// What is counted of a turn, and what is not of its beginning: after that the caches are its own.
pub(crate) const COUNTED: Duration = Duration::from_millis(40);
pub(crate) const LEAD: Duration = Duration::from_millis(10);
/// How long a cell may take until it is warm.
const WARM_LIMIT: Duration = Duration::from_secs(20);
/// How long a turn may take in which hardly anything is answered.
const TURN_LIMIT: Duration = Duration::from_secs(5);

/// A cell that takes part.
struct Party {
    run: Run,
    /// Its processes: who asks, and who answers.
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

    /// Halts its processes, or has them go on: who asks is halted first and goes on last.
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
    // One after the other, and soon: who is halted meanwhile has requests that wait.
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
