//! What the messages carry, and how a receiver knows that they arrived whole and in order.
//!
//! ```text
//!  0        8                                 size-8    size
//!  | head   | body: a pattern of the stream   | tail    |
//! ```
//!
//! The head is the stream's number in the upper 16 bits and the message's number in the lower 48,
//! little-endian; the tail is its complement (messages below 24 bytes have none). Head, length and
//! tail of every message are checked, the body of one message in [`BODY_EVERY`]. The programs under
//! `peers/` do the same.

/// The body of one message in this many is compared in full.
pub(crate) const BODY_EVERY: u64 = 64;

const STREAM_SHIFT: u32 = 48;
const SEQ_MASK: u64 = (1 << STREAM_SHIFT) - 1;
const TAIL_FROM: usize = 24;

fn fill(buf: &mut [u8], stream: usize) {
    for (i, byte) in buf.iter_mut().enumerate() {
        *byte = (i.wrapping_mul(131) ^ (i >> 8).wrapping_mul(17)).wrapping_add(stream * 29) as u8;
    }
}

#[inline]
fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Makes the messages of one stream.
#[derive(Clone, Debug)]
pub(crate) struct Maker {
    buf: Vec<u8>,
    head: u64,
}

impl Maker {
    /// Starts stream `stream` of messages of `size` bytes (at least 8).
    pub(crate) fn new(stream: usize, size: usize) -> Self {
        let mut buf = vec![0; size.max(8)];
        fill(&mut buf, stream);
        Self { buf, head: (stream as u64) << STREAM_SHIFT }
    }

    /// Makes the next message.
    #[inline]
    pub(crate) fn next(&mut self) -> &[u8] {
        Self::stamp(&mut self.buf, self.head);
        self.head += 1;
        &self.buf
    }

    /// Makes the next message in a buffer that was cloned from this maker's.
    #[inline]
    pub(crate) fn next_in(&mut self, buf: &mut [u8]) {
        Self::stamp(buf, self.head);
        self.head += 1;
    }

    /// Makes the next message in memory that holds this maker's [`buffer`](Self::buffer) already
    /// and is reached by `write` only, which copies bytes to a place.
    #[inline]
    pub(crate) fn next_at(&mut self, write: impl Fn(usize, &[u8])) {
        write(0, &self.head.to_le_bytes());
        if self.buf.len() >= TAIL_FROM {
            write(self.buf.len() - 8, &(!self.head).to_le_bytes());
        }
        self.head += 1;
    }

    /// A buffer for [`next_in`](Self::next_in).
    pub(crate) fn buffer(&self) -> Vec<u8> {
        self.buf.clone()
    }

    /// Takes back the last message made, because it was not sent.
    #[inline]
    pub(crate) fn undo(&mut self) {
        self.head -= 1;
    }

    #[inline]
    fn stamp(buf: &mut [u8], head: u64) {
        let len = buf.len();
        if let Some(first) = buf.first_chunk_mut::<8>() {
            *first = head.to_le_bytes();
        }
        if len >= TAIL_FROM
            && let Some(last) = buf.last_chunk_mut::<8>()
        {
            *last = (!head).to_le_bytes();
        }
    }
}

/// Whether messages may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Every message must come.
    Forbidden,
    /// Messages may be missing, but none may come twice or late.
    Allowed,
}

/// Checks the messages of several streams.
#[derive(Debug)]
pub(crate) struct Checker {
    size: usize,
    loss: Loss,
    next: Vec<u64>,
    bodies: Vec<Vec<u8>>,
}

impl Checker {
    /// Expects `streams` streams of messages of `size` bytes.
    pub(crate) fn new(streams: usize, size: usize, loss: Loss) -> Self {
        let bodies = (0..streams)
            .map(|stream| {
                let mut body = vec![0; size.max(8)];
                fill(&mut body, stream);
                body
            })
            .collect();
        Self { size: size.max(8), loss, next: vec![0; streams], bodies }
    }

    /// Checks one message and returns the number of its stream.
    ///
    /// # Errors
    ///
    /// Says what is wrong with a message that is not the one expected.
    #[inline]
    pub(crate) fn check(&mut self, message: &[u8]) -> Result<usize, String> {
        let head = word(message, 0);
        let (stream, seq) = ((head >> STREAM_SHIFT) as usize, head & SEQ_MASK);
        let tail_ok = self.size < TAIL_FROM || word(message, self.size - 8) == !head;
        let Some(next) = self.next.get_mut(stream) else {
            return Err(self.complaint(message));
        };
        let order_ok = seq == *next || (self.loss == Loss::Allowed && seq > *next);
        if message.len() != self.size || !tail_ok || !order_ok {
            return Err(self.complaint(message));
        }
        *next = seq + 1;
        if seq.is_multiple_of(BODY_EVERY) && !self.body_ok(stream, message) {
            return Err(format!("message {seq} of stream {stream} has a damaged body"));
        }
        Ok(stream)
    }

    fn body_ok(&self, stream: usize, message: &[u8]) -> bool {
        let end = if self.size >= TAIL_FROM { self.size - 8 } else { self.size };
        self.bodies.get(stream).is_some_and(|body| body.get(8..end) == message.get(8..end))
    }

    #[cold]
    fn complaint(&self, message: &[u8]) -> String {
        let head = word(message, 0);
        let (stream, seq) = ((head >> STREAM_SHIFT) as usize, head & SEQ_MASK);
        if message.len() != self.size {
            return format!("a message of {} bytes instead of {}", message.len(), self.size);
        }
        match self.next.get(stream) {
            None => format!("a message of stream {stream}, which was never opened"),
            Some(next) if seq != *next => {
                format!("message {seq} of stream {stream} where {next} was due")
            }
            Some(_) => format!("message {seq} of stream {stream} has a wrong tail"),
        }
    }
}

/// Checks messages of one stream that lie in memory which can only be copied from.
#[derive(Debug)]
pub(crate) struct SpotCheck {
    stream: u64,
    body: Vec<u8>,
    copy: Vec<u8>,
    looks: u64,
}

impl SpotCheck {
    /// Expects messages of `size` bytes (at least 24) of stream `stream`.
    pub(crate) fn new(stream: usize, size: usize) -> Self {
        let mut body = vec![0; size.max(TAIL_FROM)];
        fill(&mut body, stream);
        Self { stream: stream as u64, copy: body.clone(), body, looks: 0 }
    }

    /// Checks the ends of what should be message `seq`, and its body when that is due; `read`
    /// copies bytes out from a place.
    ///
    /// # Errors
    ///
    /// Says what is wrong.
    pub(crate) fn check(
        &mut self,
        seq: u64,
        read: impl Fn(usize, &mut [u8]),
    ) -> Result<(), String> {
        let (mut head, mut tail) = ([0; 8], [0; 8]);
        let last = self.body.len() - 8;
        read(0, &mut head);
        read(last, &mut tail);
        let (head, tail) = (u64::from_le_bytes(head), u64::from_le_bytes(tail));
        let due = (self.stream << STREAM_SHIFT) | seq;
        if head != due {
            return Err(format!("message {} where {seq} was due", head & SEQ_MASK));
        }
        if tail != !due {
            return Err(format!("message {seq} has a wrong tail"));
        }
        if self.looks.is_multiple_of(BODY_EVERY) {
            read(0, &mut self.copy);
            if self.copy[8..last] != self.body[8..last] {
                return Err(format!("message {seq} has a damaged body"));
            }
        }
        self.looks += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_what_the_maker_makes_in_order() {
        for size in [8, 16, 24, 64, 1000] {
            let mut checker = Checker::new(2, size, Loss::Forbidden);
            let (mut a, mut b) = (Maker::new(0, size), Maker::new(1, size));
            for _ in 0..200 {
                assert_eq!(checker.check(a.next()), Ok(0));
                assert_eq!(checker.check(b.next()), Ok(1));
            }
        }
    }

    #[test]
    fn refuses_a_missing_a_repeated_a_short_and_a_damaged_message() {
        let mut maker = Maker::new(0, 64);
        let mut checker = Checker::new(1, 64, Loss::Forbidden);
        let first = maker.next().to_vec();
        let mut bad = first.clone();
        bad[20] ^= 1;
        assert!(checker.check(&bad).is_err_and(|e| e.contains("damaged")));
        let mut checker = Checker::new(1, 64, Loss::Forbidden);
        assert!(checker.check(&first[..63]).is_err_and(|e| e.contains("63 bytes")));
        assert!(checker.check(&first).is_ok());
        assert!(checker.check(&first).is_err_and(|e| e.contains("where 1 was due")));
        maker.next();
        assert!(checker.check(maker.next()).is_err_and(|e| e.contains("message 2")));
        let mut torn = Maker::new(0, 64);
        torn.next();
        let mut torn = torn.next().to_vec();
        torn[60] ^= 1;
        assert!(checker.check(&torn).is_err_and(|e| e.contains("tail")));
        assert!(checker.check(Maker::new(5, 64).next()).is_err_and(|e| e.contains("stream 5")));
    }

    #[test]
    fn a_lossy_stream_may_skip_but_not_repeat() {
        let mut maker = Maker::new(0, 64);
        let mut checker = Checker::new(1, 64, Loss::Allowed);
        maker.next();
        let second = maker.next().to_vec();
        assert!(checker.check(&second).is_ok());
        assert!(checker.check(&second).is_err());
    }

    #[test]
    fn messages_in_memory_are_made_and_checked_in_place() {
        let memory = std::cell::RefCell::new(Maker::new(1, 100).buffer());
        let write = |at: usize, bytes: &[u8]| {
            memory.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let read = |at: usize, out: &mut [u8]| {
            out.copy_from_slice(&memory.borrow()[at..at + out.len()]);
        };
        let (mut maker, mut check) = (Maker::new(1, 100), SpotCheck::new(1, 100));
        for seq in 0..3 {
            maker.next_at(write);
            assert_eq!(check.check(seq, read), Ok(()));
        }
        assert!(check.check(3, read).is_err_and(|e| e.contains("message 2 where 3")));
        write(99, &[0]);
        assert!(check.check(2, read).is_err_and(|e| e.contains("tail")));
        maker.next_at(write);
        write(50, &[0]);
        let mut fresh = SpotCheck::new(1, 100);
        assert!(fresh.check(3, read).is_err_and(|e| e.contains("damaged")));
    }

    #[test]
    fn an_unsent_message_is_made_again() {
        let mut maker = Maker::new(3, 64);
        let first = maker.next().to_vec();
        maker.undo();
        assert_eq!(maker.next(), first);
    }
}
