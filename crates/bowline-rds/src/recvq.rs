//! Messages that wait for their reader. Neighbouring messages share one record of their sender and
//! of the buffer they arrived in.
//!
//! ```text
//!   runs      [peer A, buffer 7, 3 left] [peer B, buffer 9, 2 left]
//!   entries   [..] [..] [..]             [..] [..]
//! ```

use std::collections::VecDeque;
use std::net::Ipv6Addr;
use std::sync::Arc;

use bowline_base::Instant;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::ConnId;
use crate::rxbuf::Rope;
use crate::socket::Endpoint;

/// Number of elements for which a queue keeps memory however few it has: as many 64-byte messages
/// as fit a usual buffer.
const KEPT: usize = 1 << 11;

/// Origin of a message, without the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    pub(crate) addr: Ipv6Addr,
    pub(crate) scope: u32,
    /// The connection; `None` for a message sent within the node.
    pub(crate) conn: Option<ConnId>,
}

/// Properties that only few messages have.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Rare {
    /// Remote memory key from the sender.
    pub(crate) rdma_dest: Option<u64>,
    pub(crate) queued_at: Option<Instant>,
    /// Times when the first byte of the header was seen, when the header was complete, and when the
    /// message was queued.
    pub(crate) trace: Option<[Instant; 3]>,
}

/// A message with all its properties.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RecvMsg {
    pub(crate) origin: Origin,
    pub(crate) sport: u16,
    pub(crate) seq: u64,
    pub(crate) data: Rope,
    pub(crate) rare: Option<Box<Rare>>,
}

/// Neighbouring messages of one origin in one buffer.
#[derive(Debug)]
struct Run {
    origin: Origin,
    /// `None` while all messages of the run are empty or have ropes.
    buf: Option<Arc<Vec<u8>>>,
    left: usize,
}

#[derive(Debug)]
struct Entry {
    seq: u64,
    /// Offset of the payload in the buffer of the run.
    start: u32,
    len: u32,
    sport: u16,
    /// Further properties of the message stand in the queue's `unshared`.
    has_unshared: bool,
}

/// Properties that an entry does not share with its neighbours.
#[derive(Clone, Debug)]
struct Unshared {
    /// The payload, if it lies in several buffers.
    rope: Option<Rope>,
    rare: Option<Box<Rare>>,
}

/// A message that [`RecvQueue::pop_into`] took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Popped {
    pub(crate) origin: Origin,
    pub(crate) sport: u16,
    /// Length of the message in bytes; the caller's buffer may be shorter.
    pub(crate) len: usize,
}

/// Payload of a message that stays in the queue.
pub(crate) enum Payload<'a> {
    Bytes(&'a [u8]),
    Rope(&'a Rope),
}

impl Payload<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Rope(rope) => rope.len(),
        }
    }
}

/// The first message of a queue, if it has no rare properties.
pub(crate) struct Front<'a> {
    pub(crate) origin: Origin,
    pub(crate) sport: u16,
    pub(crate) seq: u64,
    pub(crate) payload: Payload<'a>,
}

/// Queue of received messages, first in, first out.
#[derive(Debug, Default)]
pub(crate) struct RecvQueue {
    runs: VecDeque<Run>,
    entries: VecDeque<Entry>,
    /// The unshared properties of the entries that have any, in the order of the entries.
    unshared: VecDeque<Unshared>,
}

impl Serialize for RecvQueue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let runs = self.runs.iter().flat_map(|run| std::iter::repeat_n(run, run.left));
        let mut unshared = self.unshared.iter();
        serializer.collect_seq(runs.zip(&self.entries).map(|(run, entry)| {
            let own = if entry.has_unshared { unshared.next().cloned() } else { None };
            message(run, entry, own)
        }))
    }
}

impl<'de> Deserialize<'de> for RecvQueue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut queue = Self::default();
        Vec::<RecvMsg>::deserialize(deserializer)?.into_iter().for_each(|msg| queue.push(msg));
        Ok(queue)
    }
}

impl RecvQueue {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Queues any message.
    pub(crate) fn push(&mut self, msg: RecvMsg) {
        let RecvMsg { origin, sport, seq, data, rare } = msg;
        let len = data.len() as u32; // limits keep messages below 4 GiB
        let (piece, rope) = match data.into_single() {
            Ok(piece) => (piece, None),
            Err(rope) => (None, Some(rope)),
        };
        self.count(&origin, piece.as_ref().map(|p| &p.buf));
        let start = piece.map_or(0, |p| p.start);
        let has_unshared = rope.is_some() || rare.is_some();
        if has_unshared {
            self.unshared.push_back(Unshared { rope, rare });
        }
        self.entries.push_back(Entry { seq, start, len, sport, has_unshared });
    }

    /// Queues a message that lies in one buffer.
    #[inline]
    pub(crate) fn push_single(
        &mut self,
        origin: &Origin,
        (sport, seq): (u16, u64),
        buf: &Arc<Vec<u8>>,
        (start, len): (u32, u32),
    ) {
        self.count(origin, Some(buf));
        self.entries.push_back(Entry { seq, start, len, sport, has_unshared: false });
    }

    /// Queues a copy of a message.
    pub(crate) fn push_copy(&mut self, origin: &Origin, (sport, seq): (u16, u64), bytes: &[u8]) {
        let buf = (!bytes.is_empty()).then(|| Arc::new(bytes.to_vec()));
        self.count(origin, buf.as_ref());
        let len = bytes.len() as u32;
        self.entries.push_back(Entry { seq, start: 0, len, sport, has_unshared: false });
    }

    /// Counts a message in the last run if origin and buffer match, else in a new one.
    #[inline]
    fn count(&mut self, origin: &Origin, buf: Option<&Arc<Vec<u8>>>) {
        if let Some(run) = self.runs.back_mut()
            && run.origin == *origin
        {
            match (&run.buf, buf) {
                (_, None) => {
                    run.left += 1;
                    return;
                }
                (Some(theirs), Some(ours)) if Arc::ptr_eq(theirs, ours) => {
                    run.left += 1;
                    return;
                }
                _ => {}
            }
        }
        self.runs.push_back(Run { origin: *origin, buf: buf.cloned(), left: 1 });
    }

    /// Takes the first message and copies as much of it as fits, if the message lies in one buffer,
    /// is at most `limit` bytes long and has no rare properties.
    #[inline]
    pub(crate) fn pop_into(&mut self, out: &mut [u8], limit: usize) -> Option<Popped> {
        let entry = self.entries.front()?;
        let run = self.runs.front_mut()?;
        let len = entry.len as usize;
        if entry.has_unshared || len > limit {
            return None;
        }
        if let Some(buf) = &run.buf {
            let n = len.min(out.len());
            let start = entry.start as usize;
            out[..n].copy_from_slice(&buf[start..start + n]);
        }
        let popped = Popped { origin: run.origin, sport: entry.sport, len };
        self.entries.pop_front();
        self.end_run();
        Some(popped)
    }

    /// Returns the first message where it is; `None` if there is none, or if it has rare
    /// properties.
    pub(crate) fn front_plain(&self) -> Option<Front<'_>> {
        let entry = self.entries.front()?;
        let run = self.runs.front()?;
        let unshared = if entry.has_unshared { self.unshared.front() } else { None };
        if unshared.is_some_and(|unshared| unshared.rare.is_some()) {
            return None;
        }
        let (start, len) = (entry.start as usize, entry.len as usize);
        let payload = match (unshared.and_then(|unshared| unshared.rope.as_ref()), &run.buf) {
            (Some(rope), _) => Payload::Rope(rope),
            (None, Some(buf)) if len > 0 => Payload::Bytes(&buf[start..start + len]),
            (None, _) => Payload::Bytes(&[]),
        };
        Some(Front { origin: run.origin, sport: entry.sport, seq: entry.seq, payload })
    }

    /// Drops the first message.
    pub(crate) fn drop_front(&mut self) {
        let Some(entry) = self.entries.pop_front() else { return };
        if entry.has_unshared {
            self.unshared.pop_front();
        }
        self.end_run();
    }

    /// Counts a message of the first run that was taken.
    #[inline]
    fn end_run(&mut self) {
        let Some(run) = self.runs.front_mut() else { return };
        run.left -= 1;
        if run.left == 0 {
            self.runs.pop_front();
            shrink(&mut self.entries);
            shrink(&mut self.runs);
            shrink(&mut self.unshared);
        }
    }

    /// Takes the first message.
    pub(crate) fn pop(&mut self) -> Option<RecvMsg> {
        let entry = self.entries.pop_front()?;
        let unshared = if entry.has_unshared { self.unshared.pop_front() } else { None };
        let run = self.runs.front_mut()?;
        let msg = message(run, &entry, unshared);
        self.end_run();
        Some(msg)
    }

    /// Returns the first message and leaves it in the queue.
    pub(crate) fn peek(&self) -> Option<RecvMsg> {
        let entry = self.entries.front()?;
        let run = self.runs.front()?;
        let unshared = if entry.has_unshared { self.unshared.front().cloned() } else { None };
        Some(message(run, entry, unshared))
    }

    /// Sender, number and length of each message, and the connection it came on.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Endpoint, u64, usize, Option<ConnId>)> {
        let origins = self.runs.iter().flat_map(|run| std::iter::repeat_n(&run.origin, run.left));
        origins.zip(&self.entries).map(|(origin, entry)| {
            (origin.endpoint(entry.sport), entry.seq, entry.len as usize, origin.conn)
        })
    }
}

impl Origin {
    pub(crate) const fn endpoint(&self, port: u16) -> Endpoint {
        Endpoint { addr: self.addr, port, scope: self.scope }
    }
}

/// Gives back the memory of elements that are gone, for which they have paid. Few keep it.
#[inline]
pub(crate) fn shrink<T>(queue: &mut VecDeque<T>) {
    let kept = queue.capacity();
    if kept > KEPT && queue.len() < kept / 8 {
        queue.shrink_to((2 * queue.len()).max(KEPT));
    }
}

fn message(run: &Run, entry: &Entry, unshared: Option<Unshared>) -> RecvMsg {
    let Entry { seq, start, len, sport, .. } = *entry;
    let (rope, rare) = unshared.map_or((None, None), |u| (u.rope, u.rare));
    let data = match (rope, &run.buf) {
        (Some(rope), _) => rope,
        (None, Some(buf)) if len > 0 => Rope::single(Arc::clone(buf), start, len),
        (None, _) => Rope::default(),
    };
    RecvMsg { origin: run.origin, sport, seq, data, rare }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(last: u16) -> Origin {
        let addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0x0a00, last);
        Origin { addr, scope: 0, conn: Some(ConnId((u32::from(last), 1))) }
    }

    fn two_pieces() -> Rope {
        let mut rope = Rope::single(Arc::new(b"_spl_".to_vec()), 1, 3);
        rope.push(&crate::rxbuf::RxBuf::from_vec(b"_it".to_vec()), 1, 2);
        assert_eq!(rope.slices().count(), 2);
        rope
    }

    /// A queue with two peers, two buffers, an empty message, a message in pieces and a message
    /// with a time stamp.
    fn filled() -> RecvQueue {
        let (one, two) = (Arc::new(b"aabbb".to_vec()), Arc::new(b"cccc".to_vec()));
        let mut queue = RecvQueue::default();
        queue.push_single(&origin(1), (10, 1), &one, (0, 2));
        queue.push_single(&origin(1), (11, 2), &one, (2, 3));
        let msg = |seq, data, rare| RecvMsg { origin: origin(1), sport: 12, seq, data, rare };
        queue.push(msg(3, Rope::default(), None));
        queue.push(msg(4, two_pieces(), None));
        queue.push_single(&origin(1), (10, 5), &two, (0, 4));
        queue.push_single(&origin(2), (20, 6), &two, (1, 2));
        let rare = Rare { queued_at: Some(Instant::from_nanos(9)), ..Rare::default() };
        queue.push(msg(7, Rope::from_vec(b"late".to_vec()), Some(Box::new(rare))));
        queue
    }

    const WANT: [(u16, u64, &[u8]); 7] = [
        (10, 1, b"aa"),
        (11, 2, b"bbb"),
        (12, 3, b""),
        (12, 4, b"split"),
        (10, 5, b"cccc"),
        (20, 6, b"cc"),
        (12, 7, b"late"),
    ];

    #[test]
    fn messages_come_out_as_they_went_in() {
        let mut queue = filled();
        let listed: Vec<_> =
            queue.iter().map(|(from, seq, len, _)| (from.port, seq, len)).collect();
        assert_eq!(listed, WANT.map(|(port, seq, data)| (port, seq, data.len())));
        let mut plain = filled();
        for (port, seq, data) in WANT {
            match plain.front_plain() {
                Some(first) => {
                    assert_eq!((first.sport, first.seq), (port, seq));
                    assert_eq!(first.payload.len(), data.len());
                    let pieces = match first.payload {
                        Payload::Bytes(bytes) => bytes.to_vec(),
                        Payload::Rope(rope) => rope.slices().collect::<Vec<_>>().concat(),
                    };
                    assert_eq!(pieces, data);
                }
                None => assert_eq!(seq, 7, "only the last one is rare"),
            }
            plain.drop_front();
            let peeked = queue.peek().unwrap();
            let msg = queue.pop().unwrap();
            assert_eq!((msg.sport, msg.seq), (port, seq));
            assert_eq!((peeked.sport, peeked.seq), (port, seq));
            assert_eq!(msg.data.slices().collect::<Vec<_>>().concat(), data);
            assert_eq!(peeked.data.slices().collect::<Vec<_>>().concat(), data);
            assert_eq!(msg.origin, origin(if port == 20 { 2 } else { 1 }));
            assert_eq!(msg.rare.is_some(), seq == 7);
        }
        for queue in [&mut queue, &mut plain] {
            assert!(queue.pop().is_none() && queue.runs.is_empty() && queue.unshared.is_empty());
        }
    }

    #[test]
    fn copies_simple_messages_and_leaves_the_others() {
        let mut queue = filled();
        let mut out = [0; 3];
        for (port, seq, data) in WANT {
            let popped = queue.pop_into(&mut out, 3);
            if data.len() > 3 || seq == 7 {
                assert!(popped.is_none(), "number {seq} is long, in pieces or rare");
                assert_eq!(queue.pop().map(|m| m.seq), Some(seq));
                continue;
            }
            let popped = popped.unwrap();
            assert_eq!((popped.sport, popped.len), (port, data.len()));
            assert_eq!(&out[..data.len()], data);
        }
        assert!(queue.pop_into(&mut out, 3).is_none() && queue.runs.is_empty());
    }

    #[test]
    fn a_buffer_is_let_go_with_its_last_message() {
        let buf = Arc::new(vec![0; 8]);
        let mut queue = RecvQueue::default();
        for seq in 0..3 {
            queue.push_single(&origin(1), (1, seq), &buf, (0, 8));
        }
        assert_eq!(Arc::strong_count(&buf), 2);
        queue.pop_into(&mut [0; 8], 8).unwrap();
        drop(queue.pop());
        assert_eq!(Arc::strong_count(&buf), 2);
        queue.pop_into(&mut [0; 8], 8).unwrap();
        assert_eq!(Arc::strong_count(&buf), 1);
    }
}
