//! Messages in flight on one or more queue pairs, in one direction or both.

use std::time::{Duration, Instant};

use bowline_verbs::{Buffer, Completion, Qpn, Remote, SendFlags, SendOp, SendWr, Sge};

use super::{Length, Op, Order};
use crate::cli::rdma::Ended;
use crate::cli::rdma::link::{Link, Memory};

/// Work request id of reading the other side's result; no other request has it.
const RESULT: u64 = u64::MAX - 1;
/// Time between two looks at it.
const RESULT_PAUSE: Duration = Duration::from_millis(2);

/// What one side has moved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    /// Number of messages, of all queue pairs.
    pub(super) done: u64,
    /// Time that took.
    pub(super) time: Duration,
}

impl Moved {
    /// Its length behind the buffer: number, nanoseconds, and 1 once both are there.
    pub(super) const BYTES: usize = 24;

    /// Writes it behind the buffer, where the other side reads it.
    pub(super) fn publish(&self, buffer: &Buffer, size: usize) {
        let nanos = u64::try_from(self.time.as_nanos()).unwrap_or(u64::MAX);
        buffer.write(size, &[self.done, nanos].map(u64::to_be_bytes).concat());
        buffer.write(size + 16, &1_u64.to_be_bytes());
    }

    /// Reads what was fetched from there; `None`: it is not there yet.
    fn found(buffer: &Buffer, size: usize) -> Option<Self> {
        let mut bytes = [0; Self::BYTES];
        buffer.read(size, &mut bytes);
        let number = |at: usize| {
            let number = bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            number.map_or(0, u64::from_be_bytes)
        };
        let time = Duration::from_nanos(number(8));
        (number(16) == 1).then(|| Self { done: number(0), time })
    }
}

/// One queue pair.
struct Lane {
    qpn: Qpn,
    posted: u64,
    done: u64,
    received: u64,
    /// Receives that were posted.
    receives: u64,
}

/// The messages of one side.
pub(super) struct Flow<'a> {
    order: &'a Order,
    target: Remote,
    part: Sge,
    lanes: Vec<Lane>,
    began: Instant,
    /// The other side's result has been read.
    has_fetched: bool,
}

impl<'a> Flow<'a> {
    /// Makes it for the queue pairs of a link, to which the first receives have been posted if the
    /// verb needs them. Messages are sent from `part`, and received there.
    pub(super) fn new(link: &Link<'_>, order: &'a Order, target: Remote, part: Sge) -> Self {
        let receives = order.receives();
        let lane = |qpn| Lane { qpn, posted: 0, done: 0, received: 0, receives };
        let lanes = link.qpns().into_iter().map(lane).collect();
        Self { order, target, part, lanes, began: Instant::now(), has_fetched: false }
    }

    /// When it began.
    pub(super) fn began(&self) -> Instant {
        self.began
    }

    /// Keeps all queue pairs full to their depth, and receives what comes, until the messages of
    /// this side have been moved.
    pub(super) fn run(&mut self, link: &mut Link<'_>) -> Result<Moved, Ended> {
        let (order, part) = (self.order, self.part);
        let wr = SendWr {
            id: 0,
            op: order.request(self.target),
            sges: std::slice::from_ref(&part),
            inline: &[],
            flags: SendFlags::SIGNALED,
        };
        let wrs = vec![wr; order.depth as usize];
        let (depth, mut is_over) = (u64::from(order.depth), false);
        self.began = Instant::now();
        loop {
            if let Length::Time(time) = order.length {
                is_over = is_over || self.began.elapsed() >= time;
            }
            for lane in &mut self.lanes {
                let limit = if is_over { lane.posted } else { order.length.limit() };
                let room = (depth - (lane.posted - lane.done)).min(limit - lane.posted);
                if room > 0 {
                    link.post_on(lane.qpn, wrs.get(..room as usize).unwrap_or(&wrs))?;
                    lane.posted += room;
                }
            }
            if self.lanes.iter().all(|lane| lane.done == lane.posted) {
                let done = self.lanes.iter().map(|lane| lane.done).sum();
                return Ok(Moved { done, time: self.began.elapsed() });
            }
            self.step(link)?;
        }
    }

    /// Receives until all messages of the other side have come, which of a time is known by its
    /// leaving. Counts them in `served`.
    pub(super) fn receive(&mut self, link: &mut Link<'_>, served: &mut u64) -> Result<(), Ended> {
        let limit = self.order.length.limit();
        let takes = self.order.takes_receives();
        loop {
            *served = self.lanes.iter().map(|lane| lane.received).sum();
            if !takes || self.lanes.iter().all(|lane| lane.received >= limit) {
                return Ok(());
            }
            self.step(link)?;
        }
    }

    /// Reads the other side's result, which it has behind its buffer; takes what comes until then.
    pub(super) fn fetch(
        &mut self,
        link: &mut Link<'_>,
        place: Remote,
        memory: &Memory,
        size: usize,
    ) -> Result<Option<Moved>, Ended> {
        let mut found = None;
        // It is read once more when it is there: a read may have seen a part of it.
        for _ in 0..2 {
            self.has_fetched = false;
            link.send(RESULT, SendOp::Read(place), memory.part(size, Moved::BYTES))?;
            while !self.has_fetched {
                self.step(link)?;
            }
            found = Moved::found(&memory.buffer, size);
            if found.is_none() {
                std::thread::sleep(RESULT_PAUSE);
                break;
            }
        }
        Ok(found)
    }

    /// Waits for a completion, and takes all that are there.
    fn step(&mut self, link: &mut Link<'_>) -> Result<(), Ended> {
        let mut next = Some(link.completion()?);
        while let Some(done) = next {
            self.take(link, &done)?;
            next = link.ready();
        }
        Ok(())
    }

    fn take(&mut self, link: &Link<'_>, done: &Completion) -> Result<(), Ended> {
        if done.wr_id == RESULT && !done.is_recv() {
            self.has_fetched = true;
            return Ok(());
        }
        let order = self.order;
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.qpn == done.qpn) else {
            return Ok(());
        };
        if !done.is_recv() {
            lane.done += 1;
            return Ok(());
        }
        lane.received += 1;
        if lane.receives < order.length.limit() {
            let part = (order.op == Op::Send).then_some(self.part);
            link.receive_on(lane.qpn, lane.receives, part)?;
            lane.receives += 1;
        }
        Ok(())
    }
}
