//! Taking completions: what the thread that does it needs, used again and again.

use bowline_rtrs::bind::done_of;
use bowline_rtrs::{ConnId, Done};
use bowline_verbs::{Completion, Error};
use bowline_wire::rtrs::Imm;

use crate::port::Port;
use crate::stats::Stats;

/// Completions taken at once, at most.
pub(crate) const BATCH: usize = 128;

/// As many requests of 4 KiB as leave with one call.
const BURST: usize = 15;

/// For so many further looks requests that were held wait at most while those of others are
/// answered.
const PASSED_MAX: usize = 2;

/// How many completions a client takes at once that has so many requests outstanding: half of them.
/// Were it to take all, its next requests would all leave at the same time, and client and server
/// would work in turns instead of at the same time. In whole bursts, and at least one. `spread`:
/// the next requests are dealt out evenly to so many paths; then half of what one of them has, but
/// a burst for each, so that the server finds more of a path at once, and answers it together.
pub(crate) fn share(outstanding: usize, spread: usize) -> usize {
    let spread = spread.max(1);
    let unit = (BURST * spread).min(BATCH);
    (outstanding / 2 / spread / unit * unit).clamp(unit, BATCH)
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
    /// Connections of which some are held.
    queues: Vec<Queue>,
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
        // Perhaps the rest of what the last look did not take: with what has come meanwhile it may
        // be a whole burst.
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

    /// The same for a server, whose thread always looks again: requests of a connection that come
    /// beside whole bursts of them wait for that look, since their answers would begin a burst of a
    /// few; and while there is other work for a few more, until they are a burst.
    pub(crate) fn poll_requests(&mut self, port: &Port, stats: &Stats) -> Result<usize, Error> {
        self.poll(port, 0, BATCH, stats)?;
        if port.attr().burst > 0 {
            self.hold_odd();
        }
        Ok(self.dones.len())
    }

    fn hold_odd(&mut self) {
        if !self.held.is_empty() {
            self.held.append(&mut self.dones);
            std::mem::swap(&mut self.held, &mut self.dones);
        }
        self.queues.iter_mut().for_each(|queue| queue.requests = 0);
        for done in self.dones.iter().filter(|done| is_request(done)) {
            let known = self.queues.iter().position(|queue| queue.conn == done.conn);
            let at = known.unwrap_or_else(|| {
                self.queues.push(Queue { conn: done.conn, requests: 0, taken: 0, passed: None });
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
        let (queues, held) = (&mut self.queues, &mut self.held);
        self.dones.retain(|done| {
            let queue = queues.iter_mut().find(|queue| queue.conn == done.conn);
            let Some(queue) = queue else { return true };
            // What follows on the same connection stays behind those that are held.
            let taken = queue.taken > 0;
            if taken {
                queue.taken -= usize::from(is_request(done));
            } else {
                held.push(*done);
            }
            taken
        });
    }
}

/// Requests of a connection.
#[derive(Debug)]
struct Queue {
    conn: ConnId,
    requests: usize,
    /// So many of them are taken now.
    taken: usize,
    /// Looks for which some that were held were passed over; `None`: none were held.
    passed: Option<usize>,
}

impl Queue {
    /// Tells whether they were held, are no burst yet, and may wait while others are answered.
    fn may_wait(&self) -> bool {
        self.requests < BURST && self.passed.is_some_and(|passed| passed < PASSED_MAX)
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
        let shares =
            |spread| [0, 1, 29, 32, 128, 255, 4096].map(|outstanding| share(outstanding, spread));
        assert_eq!(shares(1), [15, 15, 15, 15, 60, 120, 128]);
        assert_eq!(shares(0), shares(1));
        assert_eq!(shares(2), [30, 30, 30, 30, 30, 60, 128]);
        assert_eq!(shares(9), [128; 7]);
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
            conn: ConnId { path: PathId { slot: 0, life: 0 }, cid },
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
        let mut drive = Drive::default();
        let mut seen = Vec::new();
        let mut look = |new| {
            let before = drive.held.len();
            drive.dones.clear();
            drive.dones.extend(dones(1, new));
            drive.hold_odd();
            assert!(drive.dones.len() >= before, "what was held goes first");
            assert!(drive.held.iter().filter(|done| is_request(done)).count() < BURST);
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
        let mut drive = Drive::default();
        let mut look = |new: &mut dyn Iterator<Item = Done>| {
            drive.dones.clear();
            drive.dones.extend(new);
            drive.hold_odd();
            let of = |dones: &[Done], cid| dones.iter().filter(|done| done.conn.cid == cid).count();
            [of(&drive.dones, 1), of(&drive.dones, 2), of(&drive.held, 1)]
        };
        let requests =
            |cid, count: u32| dones(cid, 0..3 * count).filter(is_request).take(count as usize);
        assert_eq!(look(&mut requests(1, 19)), [15, 0, 4]);
        assert_eq!(look(&mut requests(2, 30)), [0, 30, 4]);
        // With these they are a burst, and those that came last are held.
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
    /// some are held.
    #[test]
    fn nothing_is_lost_or_overtaken() {
        const LOOKS: usize = 20_000;
        let mut drive = Drive::default();
        let (mut given, mut taken) = ([0; 6], [0; 6]);
        // When each was given, by connection.
        let mut since: [VecDeque<usize>; 6] = Default::default();
        let mut random = Xorshift(1);
        for look in 0..LOOKS + PASSED_MAX + 1 {
            drive.dones.clear();
            let quiet = look >= LOOKS || random.below(4) == 0;
            for _ in 0..if quiet { 0 } else { random.below(BATCH) } {
                // Some connections are much busier than others.
                let cid = random.below(6).min(random.below(6)).min(random.below(6));
                drive.dones.extend(dones(cid as u16, given[cid]..given[cid] + 1));
                given[cid] += 1;
                since[cid].push_back(look);
            }
            drive.hold_odd();
            for done in &drive.dones {
                let cid = usize::from(done.conn.cid);
                assert_eq!(done.tag.0, taken[cid], "connection {cid}");
                taken[cid] += 1;
                let waited = look - since[cid].pop_front().unwrap();
                assert!(waited <= PASSED_MAX + 1, "{waited} looks");
            }
            assert!(!drive.dones.is_empty() || drive.held.is_empty());
            let left: u32 = given.iter().zip(taken).map(|(given, taken)| given - taken).sum();
            assert_eq!(drive.held.len(), left as usize);
        }
        assert_eq!(given, taken);
        assert!(taken.iter().all(|count| *count > 1000), "{taken:?}");
    }

    #[test]
    fn each_connection_has_bursts_of_its_own() {
        let mut drive = Drive::default();
        drive.dones.extend(dones(1, 0..27).chain(dones(2, 0..2)).chain(dones(1, 27..30)));
        drive.hold_odd();
        let of = |dones: &[Done], cid| dones.iter().filter(|done| done.conn.cid == cid).count();
        // 20 requests of the first, of which 15 fill a burst with the last of them in place 22, and
        // one of the second.
        assert_eq!((of(&drive.dones, 1), of(&drive.dones, 2)), (23, 2));
        assert_eq!((of(&drive.held, 1), of(&drive.held, 2)), (7, 0));
        // Heartbeats are no requests.
        let mut drive = Drive::default();
        let beat = Some(Imm::HbMsg.to_u32());
        drive.dones.extend(dones(1, 0..60).map(|done| Done { imm: beat, ..done }));
        drive.hold_odd();
        assert_eq!((drive.dones.len(), drive.held.len()), (60, 0));
    }
}
