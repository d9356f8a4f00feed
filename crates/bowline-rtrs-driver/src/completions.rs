//! Taking batches of completions from a queue, and choosing their size.

use bowline_rtrs::bind::done_of;
use bowline_rtrs::{ConnId, Done};
use bowline_verbs::{Completion, Error};
use bowline_wire::rtrs::Imm;

use crate::port::Port;
use crate::stats::Stats;

/// Most completions taken at once.
pub(crate) const BATCH: usize = 128;

/// Number of requests of 4 KiB that leave with one system call.
const BURST: usize = 15;

/// How many polls a deferred request may be passed over while requests of other connections are
/// answered.
const DEFERRED_POLLS_MAX: usize = 2;

/// How many completions a client with this many outstanding requests takes at once: half of them.
/// If it took all, its next requests would leave at the same time, and client and server would work
/// alternately instead of concurrently. The result is a multiple of whole bursts, and at least one.
/// `spread` is the number of paths over which the next requests are spread evenly. Then the result
/// is half of one path's outstanding requests, but a burst for each path, so that the server finds
/// more requests of a path at once and answers them together.
pub(crate) fn batch_limit(outstanding: usize, spread: usize) -> usize {
    let spread = spread.max(1);
    let unit = (BURST * spread).min(BATCH);
    (outstanding / 2 / spread / unit * unit).clamp(unit, BATCH)
}

/// The completions of one poll of a queue.
#[derive(Debug, Default)]
pub(crate) struct CompletionBatch {
    completions: Vec<Completion>,
    pub(crate) dones: Vec<Done>,
    /// The last poll returned as many completions as it was asked for.
    full: bool,
    /// Completions taken from the queue, but left for the next poll.
    deferred: Vec<Done>,
    /// Connections of which some completions are deferred.
    queues: Vec<ConnRequests>,
}

impl CompletionBatch {
    /// Takes at most `max` completions; returns their number.
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
        // These may be the rest that the last poll left behind. With completions that have arrived
        // meanwhile they may make up a whole burst.
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

    /// Like [`poll`](Self::poll), for a server, whose thread always polls again. Requests of a
    /// connection beyond whole bursts are deferred to the next poll, because their responses would
    /// begin a burst of a few. While requests of other connections can be answered, they are
    /// deferred for a few more polls, until they make up a burst.
    pub(crate) fn poll_requests(&mut self, port: &Port, stats: &Stats) -> Result<usize, Error> {
        self.poll(port, 0, BATCH, stats)?;
        if port.attr().burst > 0 {
            self.defer_partial_bursts();
        }
        Ok(self.dones.len())
    }

    fn defer_partial_bursts(&mut self) {
        if !self.deferred.is_empty() {
            self.deferred.append(&mut self.dones);
            std::mem::swap(&mut self.deferred, &mut self.dones);
        }
        self.queues.iter_mut().for_each(|queue| queue.requests = 0);
        for done in self.dones.iter().filter(|done| is_request(done)) {
            let known = self.queues.iter().position(|queue| queue.conn == done.conn);
            let at = known.unwrap_or_else(|| {
                self.queues.push(ConnRequests {
                    conn: done.conn,
                    requests: 0,
                    taken: 0,
                    passed: None,
                });
                self.queues.len() - 1
            });
            self.queues[at].requests += 1;
        }
        let others = self.queues.iter().any(|queue| !queue.may_wait());
        self.queues.retain_mut(|queue| {
            let waits = others && queue.may_wait();
            queue.passed = Some(if waits { queue.passed.unwrap_or(0) + 1 } else { 0 });
            queue.taken = match queue.requests / BURST * BURST {
                _ if waits => 0,
                0 => queue.requests,
                whole => whole,
            };
            queue.taken < queue.requests
        });
        let (queues, deferred) = (&mut self.queues, &mut self.deferred);
        self.dones.retain(|done| {
            let queue = queues.iter_mut().find(|queue| queue.conn == done.conn);
            let Some(queue) = queue else { return true };
            // Later completions of the same connection must stay behind the deferred ones.
            let taken = queue.taken > 0;
            if taken {
                queue.taken -= usize::from(is_request(done));
            } else {
                deferred.push(*done);
            }
            taken
        });
    }
}

/// Requests of one connection in the current batch.
#[derive(Debug)]
struct ConnRequests {
    conn: ConnId,
    requests: usize,
    /// Number of requests to take now.
    taken: usize,
    /// Number of polls for which deferred requests were passed over; `None`: none were deferred.
    passed: Option<usize>,
}

impl ConnRequests {
    /// Whether requests were deferred, are still less than a burst, and may wait while others are
    /// answered.
    fn may_wait(&self) -> bool {
        self.requests < BURST && self.passed.is_some_and(|passed| passed < DEFERRED_POLLS_MAX)
    }
}

fn is_request(done: &Done) -> bool {
    done.imm.is_some_and(|imm| matches!(Imm::from_u32(imm), Imm::Request(_)))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use bowline_rtrs::{PathId, Tag};
    use bowline_verbs::{Status, WcOpcode};

    use super::*;

    #[test]
    fn a_client_takes_half_of_what_is_outstanding_but_whole_bursts() {
        let limits = |spread| {
            [0, 1, 29, 32, 128, 255, 4096].map(|outstanding| batch_limit(outstanding, spread))
        };
        assert_eq!(limits(1), [15, 15, 15, 15, 60, 120, 128]);
        assert_eq!(limits(0), limits(1));
        assert_eq!(limits(2), [30, 30, 30, 30, 30, 60, 128]);
        assert_eq!(limits(9), [128; 7]);
    }

    struct Xorshift(u64);

    impl Xorshift {
        fn below(&mut self, limit: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 20) as usize % limit
        }
    }

    /// Completions of a connection with these numbers; each third is of a send.
    fn dones(cid: u16, numbers: std::ops::Range<u32>) -> impl Iterator<Item = Done> {
        let request = Imm::Request(0).to_u32();
        numbers.map(move |n| Done {
            conn: ConnId { path: PathId { slot: 0, generation: 0 }, cid },
            tag: Tag(n),
            status: Status::Success,
            opcode: WcOpcode::Send,
            len: 0,
            imm: (n % 3 > 0).then_some(request),
            invalidated: None,
        })
    }

    #[test]
    fn a_server_takes_whole_bursts_and_the_rest_the_next_time() {
        let mut drive = CompletionBatch::default();
        let mut seen = Vec::new();
        let mut look = |new| {
            let before = drive.deferred.len();
            drive.dones.clear();
            drive.dones.extend(dones(1, new));
            drive.defer_partial_bursts();
            assert!(drive.dones.len() >= before, "what was deferred goes first");
            assert!(drive.deferred.iter().filter(|done| is_request(done)).count() < BURST);
            seen.extend(drive.dones.iter().map(|done| done.tag.0));
            drive.dones.iter().filter(|done| is_request(done)).count()
        };
        // 10 requests; 20, of which 5 wait; 32 more, and 7 wait; none, and these go.
        let taken = [0..15, 15..45, 45..93, 93..93, 93..93].map(&mut look);
        assert_eq!(taken, [10, 15, 30, 7, 0]);
        assert_eq!(seen, (0..93).collect::<Vec<_>>(), "each once, in order");
    }

    #[test]
    fn what_is_held_waits_for_more_while_others_are_answered_but_not_for_long() {
        let mut drive = CompletionBatch::default();
        let mut look = |new: &mut dyn Iterator<Item = Done>| {
            drive.dones.clear();
            drive.dones.extend(new);
            drive.defer_partial_bursts();
            let of = |dones: &[Done], cid| dones.iter().filter(|done| done.conn.cid == cid).count();
            [of(&drive.dones, 1), of(&drive.dones, 2), of(&drive.deferred, 1)]
        };
        let requests =
            |cid, count: u32| dones(cid, 0..3 * count).filter(is_request).take(count as usize);
        assert_eq!(look(&mut requests(1, 19)), [15, 0, 4]);
        assert_eq!(look(&mut requests(2, 30)), [0, 30, 4]);
        // With these they are a burst, and those that came last are deferred.
        assert_eq!(look(&mut requests(1, 14).chain(requests(2, 1))), [15, 1, 3]);
        // A connection that always has bursts does not keep them for ever.
        let looks = [15, 15, 15, 15].map(|count| look(&mut requests(2, count))[0]);
        assert_eq!(looks, [0, 0, 3, 0]);
        // Nor do they wait for nothing.
        assert_eq!(look(&mut requests(1, 16)), [15, 0, 1]);
        assert_eq!(look(&mut requests(1, 0)), [1, 0, 0]);
        // Few that come alone never waited.
        assert_eq!(look(&mut requests(1, 2).chain(requests(2, 30))), [2, 30, 0]);
    }

    /// Whatever comes: each once, in the order of its connection, soon, and never nothing while
    /// some are deferred.
    #[test]
    fn nothing_is_lost_or_overtaken() {
        const LOOKS: usize = 20_000;
        let mut drive = CompletionBatch::default();
        let (mut given, mut taken) = ([0; 6], [0; 6]);
        // When each was given, by connection.
        let mut since: [VecDeque<usize>; 6] = Default::default();
        let mut random = Xorshift(1);
        for look in 0..LOOKS + DEFERRED_POLLS_MAX + 1 {
            drive.dones.clear();
            let quiet = look >= LOOKS || random.below(4) == 0;
            for _ in 0..if quiet { 0 } else { random.below(BATCH) } {
                // Some connections are much busier than others.
                let cid = random.below(6).min(random.below(6)).min(random.below(6));
                drive.dones.extend(dones(cid as u16, given[cid]..given[cid] + 1));
                given[cid] += 1;
                since[cid].push_back(look);
            }
            drive.defer_partial_bursts();
            for done in &drive.dones {
                let cid = usize::from(done.conn.cid);
                assert_eq!(done.tag.0, taken[cid], "connection {cid}");
                taken[cid] += 1;
                let waited = look - since[cid].pop_front().unwrap();
                assert!(waited <= DEFERRED_POLLS_MAX + 1, "{waited} looks");
            }
            assert!(!drive.dones.is_empty() || drive.deferred.is_empty());
            let left: u32 = given.iter().zip(taken).map(|(given, taken)| given - taken).sum();
            assert_eq!(drive.deferred.len(), left as usize);
        }
        assert_eq!(given, taken);
        assert!(taken.iter().all(|count| *count > 1000), "{taken:?}");
    }

    #[test]
    fn each_connection_has_bursts_of_its_own() {
        let mut drive = CompletionBatch::default();
        drive.dones.extend(dones(1, 0..27).chain(dones(2, 0..2)).chain(dones(1, 27..30)));
        drive.defer_partial_bursts();
        let of = |dones: &[Done], cid| dones.iter().filter(|done| done.conn.cid == cid).count();
        // 20 requests of the first, of which 15 fill a burst with the last of them in place 22, and
        // one of the second.
        assert_eq!((of(&drive.dones, 1), of(&drive.dones, 2)), (23, 2));
        assert_eq!((of(&drive.deferred, 1), of(&drive.deferred, 2)), (7, 0));
        // Heartbeats are no requests.
        let mut drive = CompletionBatch::default();
        let beat = Some(Imm::HbMsg.to_u32());
        drive.dones.extend(dones(1, 0..60).map(|done| Done { imm: beat, ..done }));
        drive.defer_partial_bursts();
        assert_eq!((drive.dones.len(), drive.deferred.len()), (60, 0));
    }
}
