//! Cells measured side by side: their processes are all there, and take turns on the CPUs.
//!
//! ```text
//!   bare sockets  ==....==....==....      == goes on
//!   bowline       ..==....==....==..      .. halted by a signal
//!   a peer        ....==....==....==
//! ```
//!
//! A machine, and more so a virtual one, is fast now and slow a second later. What was measured one after the
//! other differs by that, what was measured in turns does not. What a turn begins with, caches full of others'
//! memory, is not counted.

use std::thread::sleep;
use std::time::Duration;

use crate::run::{Launcher, RESULT_LIMIT, Run, Sample};
use crate::sys::{self, Process};

/// What is counted of a turn, and what is not of its beginning: after that the caches are its own.
pub(crate) const COUNTED: Duration = Duration::from_millis(40);
const LEAD: Duration = Duration::from_millis(10);
/// So much longer it goes on, to see that its window is over.
const TRAIL: Duration = Duration::from_millis(2);
/// How long a cell may take until it is warm.
const WARM_LIMIT: Duration = Duration::from_secs(6);

/// Less of the turns than this is no measurement: the counting side heard of them too late.
const ACCOUNTED_MIN: f64 = 0.75;

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
        self.run.hear_counting("warm", WARM_LIMIT)?;
        self.halt(true);
        Ok(self)
    }

    fn take_turn(&mut self) {
        let from = sys::now_ns() + LEAD.as_nanos() as u64;
        let until = from + COUNTED.as_nanos() as u64;
        self.run.tell_counting(&format!("turn {from} {until}"));
        self.halt(false);
        sleep(LEAD + COUNTED + TRAIL);
        self.halt(true);
    }

    fn end(mut self, turns: u32, foreign: f64) -> Result<Sample, String> {
        self.run.tell_counting("end");
        self.halt(false);
        let words = self.run.hear_counting("result", RESULT_LIMIT)?;
        let sample = self.run.finish(words, foreign)?;
        let asked = (COUNTED * turns).as_secs_f64();
        if sample.seconds < asked * ACCOUNTED_MIN {
            return Err(format!("{:.3} s of {asked:.3} s were counted", sample.seconds));
        }
        Ok(sample)
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
        parties.iter_mut().flatten().for_each(Party::take_turn);
    }
    let foreign = watch.foreign();
    parties.into_iter().map(|party| party.and_then(|party| party.end(turns, foreign))).collect()
}
