//! Cells measured side by side: their processes are all there, and take turns on the CPUs.
//!
//! ```text
//!   bare sockets  ==    ......    ==........==      == goes on, for a slice
//!   bowline         ==........==    ==....==        .. halted by a signal
//!   a peer            ==....==        ====
//! ```
//!
//! A machine, and more so a virtual one, is fast now and slow a second later. What was measured one after the
//! other differs by that, what was measured in turns does not. What a turn begins with, caches full of others'
//! memory, is not counted.

use std::thread::sleep;
use std::time::Duration;

use crate::run::{Launcher, RESULT_LIMIT, Run, Sample};
use crate::sys;

/// What is counted of a turn, and what is not of its beginning: after that the caches are its own.
pub(crate) const COUNTED: Duration = Duration::from_millis(40);
const LEAD: Duration = Duration::from_millis(10);
/// So much longer it goes on, to see that its window is over.
const TRAIL: Duration = Duration::from_millis(2);
/// How long a cell may take until it is warm.
const WARM_LIMIT: Duration = Duration::from_secs(6);

/// A cell that takes part.
struct Party {
    run: Run,
}

impl Party {
    /// Halts its processes, or has them go on: who asks is halted first and goes on last.
    fn halt(&self, halted: bool) {
        let [rx, tx, programs @ ..] = self.run.pids.as_slice() else { return };
        let servers = programs.iter().chain([rx]);
        if halted {
            sys::halt(*tx, true);
        }
        servers.for_each(|pid| sys::halt(*pid, halted));
        if !halted {
            sys::halt(*tx, false);
        }
    }

    /// Lets it run once it is started, until it is warm.
    fn warm(mut run: Run) -> Result<Self, String> {
        run.hear_counting("warm", WARM_LIMIT)?;
        let party = Self { run };
        party.halt(true);
        Ok(party)
    }

    fn take_turn(&mut self) {
        let from = sys::now_ns() + LEAD.as_nanos() as u64;
        let until = from + COUNTED.as_nanos() as u64;
        self.run.tell_counting(&format!("turn {from} {until}"));
        self.halt(false);
        sleep(LEAD + COUNTED + TRAIL);
        self.halt(true);
    }
}

/// Measures cells in turns, each for `window` in all; `start` starts one of them.
pub(crate) fn measure<T>(
    launcher: &Launcher,
    cells: &mut [T],
    window: Duration,
    mut start: impl FnMut(&mut T) -> Result<Run, String>,
) -> Vec<Result<Sample, String>> {
    let mut parties: Vec<Result<Party, String>> =
        cells.iter_mut().map(|cell| start(cell).and_then(Party::warm)).collect();
    let pids = parties.iter().flatten().flat_map(|party| party.run.pids.clone()).collect();
    let watch = launcher.watch(pids);
    for turn in 0..window.div_duration_f64(COUNTED).ceil() as u32 {
        // There and back again, so that nobody is always the one after.
        let all: &mut dyn Iterator<Item = &mut Party> = match turn % 2 {
            0 => &mut parties.iter_mut().flatten(),
            _ => &mut parties.iter_mut().rev().flatten(),
        };
        all.for_each(Party::take_turn);
    }
    let foreign = watch.foreign();
    let end = |party: Result<Party, String>| {
        let mut party = party?;
        party.run.tell_counting("end");
        party.halt(false);
        let words = party.run.hear_counting("result", RESULT_LIMIT)?;
        party.run.finish(words, foreign)
    };
    parties.into_iter().map(end).collect()
}
