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
    /// The last look brought as much as was asked for.
    full: bool,
    /// Taken, and left for the next look.
    held: Vec<Done>,
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
        let mut count = port.poll(queue, &mut self.completions, max)?;
        stats.polls.inc();
        // The rest of what the last look did not take: with what has come meanwhile it may be a whole burst.
        if self.full && (1..max).contains(&count) {
            count += port.poll(queue, &mut self.completions, max - count)?;
            stats.polls.inc();
        }
        self.full = count == max;
        if count == 0 {
            stats.empty_polls.inc();
        } else {
            stats.completions.add(count as u64);
            self.dones.extend(self.completions.iter().map(done_of));
        }
        Ok(count)
    }

    /// The same for a server, whose thread always looks again: requests that come beside whole bursts of
    /// them wait for that look, since their answers would begin a burst of a few.
    pub(crate) fn poll_requests(&mut self, port: &Port, stats: &Stats) -> Result<usize, Error> {
        self.poll(port, 0, BATCH, stats)?;
        self.hold_odd();
        Ok(self.dones.len())
    }

    fn hold_odd(&mut self) {
        if !self.held.is_empty() {
            self.held.append(&mut self.dones);
            std::mem::swap(&mut self.held, &mut self.dones);
        }
        let requests = self.dones.iter().filter(|done| done.imm.is_some()).count();
        if requests > BURST {
            let whole = requests / BURST * BURST;
            let mut places = self.dones.iter().enumerate().filter(|(_, done)| done.imm.is_some());
            if let Some((at, _)) = places.nth(whole) {
                self.held.extend(self.dones.drain(at..));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bowline_rtrs::{ConnId, PathId, Tag};
    use bowline_verbs::{Status, WcOpcode};

    use super::*;

    #[test]
    fn a_client_takes_half_of_what_is_outstanding_but_whole_bursts() {
        assert_eq!([0, 1, 29, 32, 128, 255, 4096].map(share), [15, 15, 15, 15, 60, 120, 128]);
    }

    /// Completions with these numbers; each third is of a send.
    fn dones(numbers: std::ops::Range<u32>) -> impl Iterator<Item = Done> {
        numbers.map(|n| Done {
            conn: ConnId { path: PathId { slot: 0, life: 0 }, cid: 1 },
            tag: Tag(n),
            status: Status::Success,
            opcode: WcOpcode::Send,
            len: 0,
            imm: (n % 3 > 0).then_some(n),
            invalidated: None,
        })
    }

    #[test]
    fn a_server_takes_whole_bursts_and_the_rest_the_next_time() {
        let mut drive = Drive::default();
        let mut seen = Vec::new();
        let mut look = |new| {
            drive.dones.clear();
            drive.dones.extend(dones(new));
            drive.hold_odd();
            seen.extend(drive.dones.iter().map(|done| done.tag.0));
            drive.dones.iter().filter(|done| done.imm.is_some()).count()
        };
        // 10 requests, 20, 30 and two from before, those two: none waits longer than for the next look.
        let taken = [0..15, 15..45, 45..93, 93..93, 93..93].map(&mut look);
        assert_eq!(taken, [10, 15, 30, 7, 0]);
        assert_eq!(seen, (0..93).collect::<Vec<_>>(), "each once, in order");
    }
}
