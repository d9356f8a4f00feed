//! Taking completions: what the thread that does it needs, used again and again.

use bowline_rtrs::Done;
use bowline_rtrs::bind::done_of;
use bowline_verbs::{Completion, Error};

use crate::port::Port;
use crate::stats::Stats;

/// Completions taken at once, at most.
pub(crate) const BATCH: usize = 128;

/// As many requests of 4 KiB as leave with one call.
const BURST: usize = 15;

/// How many completions a client takes at once that has so many requests outstanding: half of them. Were it
/// to take all, its next requests would all leave at the same time, and client and server would work in
/// turns instead of at the same time. In whole bursts, and at least one.
pub(crate) fn share(outstanding: usize) -> usize {
    (outstanding / 2 / BURST * BURST).clamp(BURST, BATCH)
}

/// What one look at a completion queue brings.
#[derive(Debug, Default)]
pub(crate) struct Drive {
    completions: Vec<Completion>,
    pub(crate) dones: Vec<Done>,
}

impl Drive {
    /// Takes what has completed, at most so many; returns how many.
    pub(crate) fn poll(
        &mut self,
        port: &Port,
        queue: u16,
        max: usize,
        stats: &Stats,
    ) -> Result<usize, Error> {
        self.completions.clear();
        self.dones.clear();
        let count = port.poll(queue, &mut self.completions, max)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_takes_half_of_what_is_outstanding_but_whole_bursts() {
        assert_eq!([0, 1, 29, 32, 128, 255, 4096].map(share), [15, 15, 15, 15, 60, 120, 128]);
    }
}
