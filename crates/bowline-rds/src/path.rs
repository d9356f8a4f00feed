//! A path: one lane of a connection, with its numbered queue. Spec: `docs/spec/rds.md`, section 3.
//!
//! ```text
//!          connect, accept              established, accepted
//!   Down ------------------> Connecting ---------------------> Up
//!    ^                           | failed                       | drop
//!    +---------------------------+------ Disconnecting <--------+
//! ```
//! `queue[..planned]` is what the kernel calls the retransmit list, the rest its send queue.

use std::collections::{BTreeSet, VecDeque};

use bowline_base::Instant;
use bowline_wire::rds::{EXT_AREA_LEN, HEADER_LEN, Header, PROBE_PORT};
use serde::{Deserialize, Serialize};

use crate::api::PathEnd;
use crate::ids::{LinkId, SocketId};
use crate::txlog::{TxBatch, TxLog, TxPool};

/// State of a path [spec section 3.2]. A node passes through `Resetting` and `Error` without
/// stopping there; they are listed because the info interface knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum PathState {
    /// No TCP connection.
    #[default]
    Down = 0,
    /// A TCP connection is being opened.
    Connecting = 1,
    /// The TCP connection is being emptied before it is closed.
    Disconnecting = 2,
    /// In service.
    Up = 3,
    /// A newer TCP connection replaces the present one.
    Resetting = 4,
    /// To be dropped.
    Error = 5,
}

/// Bits of [`TxMsg::marks`].
pub(crate) mod mark {
    /// The message was started on an earlier link and is sent again [R-321].
    pub(crate) const RETRANS: u8 = 1;
    /// The message asks for an acknowledgement.
    pub(crate) const ACK_REQUIRED: u8 = 2;
    /// The message was removed by cancel or close; it goes out only if it was started [R-226].
    pub(crate) const CANCELLED: u8 = 4;
    /// The message carries a completion cookie for zero-copy sends.
    pub(crate) const ZCOPY: u8 = 8;
    /// The message is a pong, which counts against the limit of pongs.
    pub(crate) const PONG: u8 = 16;
    /// RDMA operations come before the message, which is never sent again once it was begun.
    pub(crate) const OPS: u8 = 32;
    /// The message has no frames, only operations.
    pub(crate) const SILENT: u8 = 64;
    /// The message is cancelled and its bytes are forgotten: nobody will need them.
    pub(crate) const GONE: u8 = 128;
}

/// Number of cancelled messages that a queue may keep until they are at its front, and the part of
/// it that they may be beside.
pub(crate) const CANCELLED_KEPT: usize = 64;
const CANCELLED_PART: usize = 4;
/// Bytes of forgotten frames that a log may keep.
const GARBAGE_KEPT: u64 = 64 << 10;
/// Number of records for which a queue keeps memory.
const RECORDS_KEPT: usize = 1 << 11;

/// Value of [`TxMsg::stream_start`] for a message that was not given to the present link.
pub(crate) const UNPLANNED: u64 = u64::MAX;

/// One message of a path's queue. Its frame lies in the path's log.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TxMsg {
    /// Sequence number.
    pub(crate) seq: u64,
    /// Offset of the frame in the log.
    pub(crate) log_start: u64,
    /// Offset of the frame in the byte stream of the present link, or [`UNPLANNED`].
    pub(crate) stream_start: u64,
    /// The socket that sent it; `None` for probes and pongs.
    pub(crate) socket: Option<SocketId>,
    /// Length of the payload in bytes.
    pub(crate) len: u32,
    /// Cookie of a zero-copy send.
    pub(crate) cookie: u32,
    pub(crate) sport: u16,
    pub(crate) dport: u16,
    /// Bits of [`mark`].
    pub(crate) marks: u8,
    /// Generation of the peer's process on whose link the message was started and not finished;
    /// 0: not known.
    pub(crate) generation: u32,
    /// Number of the message before it from its socket to its port, which may be cancelled, or 0;
    /// one that has left the queue's front may be named as well.
    #[serde(skip)]
    pub(crate) before: u64,
}

impl TxMsg {
    pub(crate) const fn frame_len(&self) -> u64 {
        HEADER_LEN as u64 + self.len as u64
    }

    pub(crate) const fn has(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    /// Tells whether the message is one of a socket to a port.
    fn is_from(&self, of: SocketId, dport: u16) -> bool {
        self.socket == Some(of) && self.dport == dport
    }

    /// Offset in the present link's stream at which the message ends, which was given to it.
    pub(crate) const fn stream_end(&self) -> u64 {
        self.stream_start.saturating_add(self.frame_len())
    }

    /// Tells whether the message is cancelled and no byte of it was given to the present link.
    pub(crate) const fn is_dropped(&self) -> bool {
        self.has(mark::CANCELLED) && self.stream_start == UNPLANNED
    }
}

/// What the present link of a path still takes from the log of messages that were begun.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unwritten {
    /// TCP has taken this many bytes of the stream.
    Stream { written: u64 },
    /// Over RDMA, the rest of this message is not posted.
    Message(Option<u64>),
}

impl Unwritten {
    /// Tells whether bytes of a message that was begun are still to be taken from the log.
    fn needs(self, msg: &TxMsg) -> bool {
        match self {
            Self::Stream { written } => msg.stream_end() > written,
            Self::Message(seq) => seq == Some(msg.seq),
        }
    }
}

/// One lane of a connection [R-304].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Path {
    pub(crate) state: PathState,
    /// The link in service.
    pub(crate) link: Option<LinkId>,
    /// Sequence number of the next message.
    pub(crate) next_tx_seq: u64,
    /// The next expected number as the info interface shows it [R-602].
    pub(crate) next_rx_seq: u64,
    /// Sequence number expected next from a bowline peer, and 0 if any is taken. Messages with
    /// lower numbers were processed before.
    pub(crate) rx_expected: u64,
    /// Messages that are neither acknowledged nor cancelled, however old [R-326].
    pub(crate) queue: VecDeque<TxMsg>,
    /// How many messages of `queue` were given to the present link.
    pub(crate) planned: usize,
    /// The frames of `queue`, as they go on the wire.
    pub(crate) log: TxLog,
    /// Payload bytes of messages that are not cancelled.
    pub(crate) queued_bytes: u64,
    /// Number of messages in `queue` that are cancelled.
    #[serde(skip)]
    pub(crate) cancelled: usize,
    /// Numbers of those whose bytes are kept, since they are being written.
    #[serde(skip)]
    pub(crate) unwritten: BTreeSet<u64>,
    /// Offset in the present link's stream at which the last of these ends.
    #[serde(skip)]
    pub(crate) cancelled_end: u64,
    /// Bytes in `log` of frames that nobody needs any more, about.
    #[serde(skip)]
    garbage: u64,
    /// Number of pongs in `queue`.
    pub(crate) pongs: usize,
    /// Messages and bytes until the next message that asks for an acknowledgement.
    pub(crate) unacked_packets: i64,
    pub(crate) unacked_bytes: i64,
    /// Present reconnect delay in nanoseconds; 0 for the first attempt [R-331].
    pub(crate) delay: u64,
    /// When the next attempt to connect is due.
    pub(crate) reconnect_at: Option<Instant>,
    /// How often the path lost its link.
    pub(crate) resets: u64,
    /// Messages that were queued, and new ones that came.
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// When and why it last lost its link, or did not get one.
    pub(crate) last_end: Option<PathEnd>,
    /// Since when the peer has ended every link of this path without having sent a byte.
    pub(crate) rejected_since: Option<Instant>,
    /// When the path lost a link on which the peer, which acknowledges end to end, may not have
    /// got the last acknowledgements. The next link's greeting tells them.
    #[serde(default)]
    pub(crate) untold_since: Option<Instant>,
}

impl Path {
    pub(crate) fn new(first_sequence: u64) -> Self {
        Self {
            state: PathState::Down,
            link: None,
            next_tx_seq: first_sequence,
            next_rx_seq: 0,
            rx_expected: 0,
            queue: VecDeque::new(),
            planned: 0,
            log: TxLog::default(),
            queued_bytes: 0,
            cancelled: 0,
            unwritten: BTreeSet::new(),
            cancelled_end: 0,
            garbage: 0,
            pongs: 0,
            unacked_packets: 0,
            unacked_bytes: 0,
            delay: 0,
            reconnect_at: None,
            resets: 0,
            sent: 0,
            received: 0,
            last_end: None,
            rejected_since: None,
            untold_since: None,
        }
    }

    /// Returns the bytes of queued frames that were not given to the present link, about.
    pub(crate) fn unplanned_bytes(&self) -> u64 {
        let next = self.queue.get(self.planned);
        next.map_or(0, |m| self.log.held_from(m.log_start).max(m.frame_len()))
    }

    /// Tells whether a cancelled message was started on a link that has ended. It is not sent
    /// again, but the peer may have received all of it.
    pub(crate) fn has_cancelled_started(&self) -> bool {
        self.queue.iter().any(|m| m.has(mark::CANCELLED) && m.has(mark::RETRANS))
    }

    /// Returns the place of message `seq`, if it is still there: one of a socket to a port.
    fn place_of(&self, of: SocketId, dport: u16, seq: u64) -> Option<usize> {
        steps::count(1);
        let at = self.queue.binary_search_by_key(&seq, |msg| msg.seq).ok()?;
        self.queue.get(at).filter(|msg| msg.is_from(of, dport)).map(|_| at)
    }

    /// Returns the place of the message that came before message `at` from its socket to its port.
    fn one_before(&self, at: usize) -> Option<usize> {
        let msg = self.queue.get(at)?;
        let (of, dport, seq) = (msg.socket?, msg.dport, msg.before);
        let distance = msg.seq.checked_sub(seq).filter(|distance| *distance > 0)?;
        // Mostly no number between the two is missing.
        let guess = usize::try_from(distance).ok().and_then(|distance| at.checked_sub(distance));
        steps::count(1);
        let is_it = |msg: &TxMsg| msg.seq == seq && msg.is_from(of, dport);
        match guess.filter(|at| self.queue.get(*at).is_some_and(is_it)) {
            None => self.place_of(of, dport, seq),
            found => found,
        }
    }

    /// Returns the messages of a socket to a port that are not cancelled, from the one with number
    /// `last` down.
    pub(crate) fn sent_by(
        &self,
        of: SocketId,
        dport: u16,
        last: u64,
    ) -> impl Iterator<Item = &TxMsg> {
        let places =
            std::iter::successors(self.place_of(of, dport, last), |at| self.one_before(*at));
        places.filter_map(|at| self.queue.get(at)).filter(|msg| !msg.has(mark::CANCELLED))
    }

    /// Returns cancelled messages that are being written.
    pub(crate) fn unwritten(&self) -> impl Iterator<Item = &TxMsg> {
        let place = |seq| self.queue.binary_search_by_key(seq, |msg| msg.seq).ok();
        self.unwritten.iter().filter_map(place).filter_map(|at| self.queue.get(at))
    }

    /// Cancels all messages of a socket to a port, the latest of which has number `last`, and
    /// pushes them on `cancelled`. Costs as much as these are, however many others are queued.
    /// Their records stay till [`drop_cancelled`](Self::drop_cancelled) is [worth
    /// it](Self::has_many_cancelled).
    pub(crate) fn cancel(
        &mut self,
        pool: &mut TxPool,
        (of, dport, last): (SocketId, u16, u64),
        unwritten: Unwritten,
        mut cancelled: impl FnMut(&TxMsg),
    ) {
        let mut next = self.place_of(of, dport, last);
        while let Some(at) = next {
            if !self.queue.get(at).is_some_and(|msg| msg.has(mark::CANCELLED)) {
                self.cancel_at(pool, at, unwritten);
                self.queue.get(at).into_iter().for_each(&mut cancelled);
            }
            next = self.one_before(at);
        }
    }

    /// Cancels all messages that were begun on a connection to the process of this generation.
    pub(crate) fn cancel_begun(
        &mut self,
        pool: &mut TxPool,
        generation: u32,
        unwritten: Unwritten,
        mut cancelled: impl FnMut(&TxMsg),
    ) {
        for at in 0..self.queue.len() {
            let begun = |msg: &&TxMsg| msg.generation == generation && !msg.has(mark::CANCELLED);
            if let Some(msg) = self.queue.get(at).filter(begun) {
                cancelled(msg);
                self.cancel_at(pool, at, unwritten);
            }
        }
    }

    /// Cancels a message. Its bytes are forgotten at once unless they are being written.
    pub(crate) fn cancel_at(&mut self, pool: &mut TxPool, at: usize, unwritten: Unwritten) {
        let Some(msg) = self.queue.get_mut(at) else { return };
        msg.marks |= mark::CANCELLED;
        self.cancelled += 1;
        self.queued_bytes -= u64::from(msg.len);
        if msg.stream_start != UNPLANNED && unwritten.needs(msg) {
            self.cancelled_end = self.cancelled_end.max(msg.stream_end());
            self.unwritten.insert(msg.seq);
        } else {
            self.forget_bytes(pool, at);
        }
    }

    /// Forgets the bytes of a cancelled message.
    fn forget_bytes(&mut self, pool: &mut TxPool, at: usize) {
        let Some(msg) = self.queue.get_mut(at).filter(|msg| !msg.has(mark::GONE)) else { return };
        msg.marks |= mark::GONE;
        pool.discount(1, msg.len as usize);
        self.garbage += msg.frame_len();
        self.log.give_back(msg.log_start + HEADER_LEN as u64, msg.log_start + msg.frame_len());
    }

    /// Forgets the bytes of cancelled messages of which the present link has taken all, which is up
    /// to `written`, or none.
    pub(crate) fn forget_written(&mut self, pool: &mut TxPool, written: u64) {
        self.cancelled_end = 0;
        for seq in std::mem::take(&mut self.unwritten) {
            let Ok(at) = self.queue.binary_search_by_key(&seq, |msg| msg.seq) else { continue };
            let end = self.queue.get(at).filter(|msg| !msg.is_dropped()).map(TxMsg::stream_end);
            match end.filter(|end| *end > written) {
                None => self.forget_bytes(pool, at),
                Some(end) => {
                    self.cancelled_end = self.cancelled_end.max(end);
                    self.unwritten.insert(seq);
                }
            }
        }
    }

    /// Tells whether so many messages of the queue are cancelled, or so many bytes of the log
    /// forgotten, that looking at all to give back their memory costs little for each.
    pub(crate) fn has_many_cancelled(&self) -> bool {
        let living = self.queued_bytes + ((self.queue.len() - self.cancelled) * HEADER_LEN) as u64;
        CANCELLED_PART * self.cancelled > self.queue.len() + CANCELLED_PART * CANCELLED_KEPT
            || self.garbage > living / 2 + GARBAGE_KEPT
    }

    /// Tells whether many dropped messages stand before the first that may be overtaken by none.
    pub(crate) fn begins_with_many_dropped(&self) -> bool {
        let first = self.queue.iter().take_while(|msg| msg.socket.is_none() || msg.is_dropped());
        first.filter(|msg| msg.is_dropped()).nth(CANCELLED_KEPT).is_some()
    }

    /// Passes over dropped messages: the next one to be given to the link is none of them.
    pub(crate) fn skip_dropped(&mut self) {
        while self.queue.get(self.planned).is_some_and(TxMsg::is_dropped) {
            self.planned += 1;
        }
    }

    /// Drops cancelled messages at the front that are not on the wire, so that no acknowledgement
    /// will come for them.
    pub(crate) fn drop_cancelled_first(&mut self, pool: &mut TxPool) {
        while self.queue.front().is_some_and(TxMsg::is_dropped) {
            self.pop_front(pool);
        }
    }

    /// Drops cancelled messages wherever they stand, unless they are on the wire, and forgets the
    /// bytes of those that are on the wire to their end: they are never sent again [R-324]. Of the
    /// latter, later paths have to wait only for the last one before the barrier, and the last one
    /// that there may be a barrier for.
    pub(crate) fn drop_cancelled(
        &mut self,
        pool: &mut TxPool,
        unwritten: Unwritten,
        barrier: Option<u64>,
    ) {
        if self.cancelled == 0 {
            return;
        }
        let barrier = barrier.unwrap_or(0);
        // From the last to the first, to know the last ones.
        let (mut after, mut before) = (false, false);
        self.cancelled_end = 0;
        self.unwritten.clear();
        steps::count(self.queue.len());
        for msg in self.queue.iter_mut().rev().filter(|m| m.has(mark::CANCELLED)) {
            if msg.stream_start == UNPLANNED {
                continue;
            }
            if unwritten.needs(msg) {
                self.cancelled_end = self.cancelled_end.max(msg.stream_end());
                self.unwritten.insert(msg.seq);
                continue;
            }
            if !msg.has(mark::GONE) {
                msg.marks |= mark::GONE;
                pool.discount(1, msg.len as usize);
            }
            let seen = if msg.seq < barrier { &mut before } else { &mut after };
            if std::mem::replace(seen, true) {
                msg.stream_start = UNPLANNED;
            }
        }
        self.drop_forgotten(pool);
    }

    /// Drops cancelled messages that are not on the wire, wherever they stand, and gives back their
    /// memory.
    pub(crate) fn drop_forgotten(&mut self, pool: &mut TxPool) {
        if self.cancelled == 0 {
            return;
        }
        steps::count(self.queue.len());
        let (mut at, mut planned) = (0, self.planned);
        let (mut cancelled, mut pongs) = (self.cancelled, self.pongs);
        // Numbers of messages that were cancelled alone, and what came before them: the next one of
        // the same socket to the same port leads there now.
        let mut alone: Vec<(u64, u64)> = Vec::new();
        self.queue.retain_mut(|msg| {
            let stays = !msg.is_dropped();
            if let Ok(at) = alone.binary_search_by_key(&msg.before, |(seq, _)| *seq) {
                msg.before = alone.get(at).map_or(0, |(_, before)| *before);
            }
            if !stays {
                if msg.has(mark::OPS) || msg.generation != 0 {
                    alone.push((msg.seq, msg.before));
                }
                planned -= usize::from(at < self.planned);
                cancelled -= 1;
                pongs -= usize::from(msg.has(mark::PONG));
                if !msg.has(mark::GONE) {
                    pool.discount(1, msg.len as usize);
                }
            }
            at += 1;
            stays
        });
        (self.planned, self.cancelled, self.pongs) = (planned, cancelled, pongs);
        self.compact(pool, false);
    }

    /// Gives back the memory of dropped messages: at once what is [worth it](TxLog::compact), or
    /// all of it, and that for more messages, if `whole`.
    pub(crate) fn compact(&mut self, pool: &mut TxPool, whole: bool) {
        steps::count(self.queue.len());
        self.garbage = 0;
        let kept = self.queue.iter().filter(|msg| !msg.has(mark::GONE));
        let frames = kept.map(|msg| (msg.log_start, msg.log_start + msg.frame_len()));
        self.log.compact(pool, frames, whole);
        self.shrink();
    }

    /// Moves the frames together in a log that begins at 0, to be written down: it has no gaps. The
    /// path has no link.
    pub(crate) fn repack(&mut self, pool: &mut TxPool) {
        self.drop_cancelled(pool, Unwritten::Message(None), None);
        let mut log = TxLog::default();
        for msg in &mut self.queue {
            let start = log.tail();
            let frame = self.log.slices(msg.log_start, msg.log_start + msg.frame_len());
            frame.for_each(|slice| log.append(pool, slice));
            msg.log_start = start;
        }
        self.log.release(pool, self.log.tail());
        self.log = log;
    }

    /// Counts the messages of a path that another process has written down.
    pub(crate) fn adopt_into(&mut self, pool: &mut TxPool) {
        pool.adopt(&self.log);
        self.queue.iter().for_each(|msg| pool.account(msg.len as usize));
        self.cancelled = self.queue.iter().filter(|msg| msg.has(mark::CANCELLED)).count();
        self.drop_cancelled(pool, Unwritten::Message(None), None);
    }

    /// Removes the front message and its bytes.
    pub(crate) fn pop_front(&mut self, pool: &mut TxPool) -> Option<TxMsg> {
        let msg = self.queue.pop_front()?;
        self.planned = self.planned.saturating_sub(1);
        if msg.has(mark::PONG) {
            self.pongs -= 1;
        }
        if msg.has(mark::CANCELLED) {
            self.cancelled -= 1;
        } else {
            self.queued_bytes -= u64::from(msg.len);
        }
        if msg.has(mark::GONE) {
            self.garbage = self.garbage.saturating_sub(msg.frame_len());
        } else {
            if msg.has(mark::CANCELLED) {
                self.unwritten.remove(&msg.seq);
            }
            pool.discount(1, msg.len as usize);
        }
        self.release_log(pool);
        Some(msg)
    }

    /// Removes the first `count` messages, of `bytes` payload in all, none of them cancelled and
    /// none a pong.
    pub(crate) fn pop_plain(&mut self, count: usize, bytes: usize, pool: &mut TxPool) {
        self.queue.drain(..count);
        self.planned = self.planned.saturating_sub(count);
        self.queued_bytes -= bytes as u64;
        pool.discount(count, bytes);
        self.release_log(pool);
    }

    /// Moves the messages to another path, with new numbers, behind those that wait there. A probe
    /// or pong gets the extensions of that path.
    pub(crate) fn move_messages(
        &mut self,
        to: &mut Self,
        pool: &mut TxPool,
        greeting: [u8; EXT_AREA_LEN],
    ) {
        let mut batch = TxBatch::default();
        for msg in std::mem::take(&mut self.queue) {
            if msg.has(mark::CANCELLED) {
                if !msg.has(mark::GONE) {
                    pool.discount(1, msg.len as usize);
                }
                continue;
            }
            let greets =
                msg.socket.is_none() && (msg.sport == PROBE_PORT || msg.dport == PROBE_PORT);
            let header = Header {
                sequence: to.next_tx_seq,
                len: msg.len,
                sport: msg.sport,
                dport: msg.dport,
                ext: if greets { greeting } else { [0; EXT_AREA_LEN] },
                ..Header::default()
            };
            let log_start = to.log.tail();
            to.log.append(pool, &header.to_bytes());
            let payload = msg.log_start + HEADER_LEN as u64;
            batch.clear();
            self.log.collect(payload, payload + u64::from(msg.len), &mut batch);
            batch.slices().for_each(|slice| to.log.append(pool, slice));
            to.queued_bytes += u64::from(msg.len);
            to.pongs += usize::from(msg.has(mark::PONG));
            to.queue.push_back(TxMsg {
                seq: to.next_tx_seq,
                log_start,
                stream_start: UNPLANNED,
                marks: msg.marks & !mark::RETRANS,
                ..msg
            });
            to.next_tx_seq = to.next_tx_seq.wrapping_add(1);
        }
        batch.clear();
        self.log.release(pool, self.log.tail());
        let Self { resets, sent, received, last_end, .. } = *self;
        *self = Self { resets, sent, received, last_end, ..Self::new(self.next_tx_seq) };
    }

    #[inline]
    fn release_log(&mut self, pool: &mut TxPool) {
        let keep = self.queue.front().map_or(self.log.tail(), |m| m.log_start);
        self.log.release(pool, keep);
        self.shrink();
    }

    /// Gives back memory of the queue when most of it is not used: dropped messages take some.
    #[inline]
    fn shrink(&mut self) {
        let kept = self.queue.capacity();
        if kept > RECORDS_KEPT && self.queue.len() < kept / 4 {
            self.queue.shrink_to((2 * self.queue.len()).max(RECORDS_KEPT));
        }
    }
}

/// Counts the records that cancelling looks at, for tests.
pub(crate) mod steps {
    #[cfg(test)]
    thread_local! {
        static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    #[cfg(test)]
    pub(crate) fn count(more: usize) {
        STEPS.set(STEPS.get() + more);
    }

    #[cfg(not(test))]
    pub(crate) const fn count(_: usize) {}

    /// Returns the number since the last call.
    #[cfg(test)]
    pub(crate) fn take() -> usize {
        STEPS.take()
    }
}
