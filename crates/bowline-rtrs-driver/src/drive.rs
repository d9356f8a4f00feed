//! Taking completions: what the thread that does it needs, used again and again.

use bowline_rtrs::Done;
use bowline_rtrs::bind::done_of;
use bowline_verbs::{Completion, Error};

use crate::port::Port;
use crate::stats::Stats;

/// Completions taken at once.
const BATCH: usize = 128;

/// What one look at a completion queue brings.
#[derive(Debug, Default)]
pub(crate) struct Drive {
    completions: Vec<Completion>,
    pub(crate) dones: Vec<Done>,
}

impl Drive {
    /// Takes what has completed; returns how many.
    pub(crate) fn poll(&mut self, port: &Port, queue: u16, stats: &Stats) -> Result<usize, Error> {
        self.completions.clear();
        self.dones.clear();
        let count = port.poll(queue, &mut self.completions, BATCH)?;
        stats.polls.inc();
        if count == 0 {
            stats.empty_polls.inc();
        } else {
            stats.completions.add(count as u64);
            self.dones.extend(self.completions.iter().map(done_of));
        }
        Ok(count)
    }
}
