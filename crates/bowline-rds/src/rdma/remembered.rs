//! What a kernel has sent lately over RDMA [IB-82].
//!
//! A kernel counts from 1 again after its machine has booted, and no generation tells that it has.
//! What it begins on a connection that breaks comes again with flag 0x04 and a number that was
//! passed long ago, whether it has come before or not. Its contents tell the two apart.

use std::collections::VecDeque;

use bowline_wire::rds::Header;
use serde::{Deserialize, Serialize};

use crate::dedup::{Budget, COUNTED_MAX, digest};
use crate::rxbuf::Rope;

/// Number of messages that are remembered. A peer asks for an acknowledgement of one message in
/// nine at least [IB-68], so one that so many others followed was acknowledged and does not come
/// again.
const KEPT: usize = 1 << 14;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Message {
    sequence: u64,
    digest: u64,
    len: u32,
    sport: u16,
    dport: u16,
}

impl Message {
    fn of(header: &Header, payload: &Rope) -> Self {
        // The extensions tell messages apart whose payloads are equal.
        let (ext, _) = header.ext.as_chunks::<8>();
        let ext =
            ext.iter().fold(0_u64, |sum, word| sum.rotate_left(7) ^ u64::from_le_bytes(*word));
        Self {
            sequence: header.sequence,
            digest: digest(payload) ^ ext,
            len: header.len,
            sport: header.sport,
            dport: header.dport,
        }
    }
}

/// The messages that a peer's present process sent last, in the order of their numbers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Remembered {
    #[serde(skip)]
    budget: Budget,
    messages: VecDeque<Message>,
    /// Some of the last `KEPT` messages were forgotten, since there are too many of all peers.
    has_gaps: bool,
}

impl Drop for Remembered {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Remembered {
    pub(crate) fn new(budget: &Budget) -> Self {
        Self { budget: budget.clone(), messages: VecDeque::new(), has_gaps: false }
    }

    /// Counts what was read from elsewhere towards a budget.
    pub(crate) fn charge(&mut self, budget: &Budget) {
        self.budget = budget.clone();
        self.budget.take(self.messages.len());
    }

    /// Tells whether numbers of this size are remembered: a kernel that has sent more messages
    /// since it booted has numbers that the next boot does not come near.
    pub(crate) const fn counts(sequence: u64) -> bool {
        sequence <= COUNTED_MAX
    }

    /// Tells whether a message with this number is so old, when `next` is expected, that it does
    /// not come again.
    pub(crate) const fn is_over(next: u64, sequence: u64) -> bool {
        next.saturating_sub(sequence) > KEPT as u64
    }

    /// Remembers a message.
    pub(crate) fn note(&mut self, header: &Header, payload: &Rope) {
        if self.messages.back().is_some_and(|last| last.sequence >= header.sequence) {
            self.clear();
        }
        let most = self.budget.take(1).min(KEPT);
        self.messages.push_back(Message::of(header, payload));
        while self.messages.len() > most {
            self.has_gaps |= self.messages.len() <= KEPT;
            self.messages.pop_front();
            self.budget.give_back(1);
        }
    }

    /// Tells whether a message that is sent again, with a number below `next`, has not come before:
    /// the peer counts anew.
    pub(crate) fn is_new(&self, next: u64, header: &Header, payload: &Rope) -> bool {
        let message = Message::of(header, payload);
        let over = Self::is_over(next, header.sequence);
        let first = self.messages.partition_point(|known| known.sequence < header.sequence);
        let mut same =
            self.messages.range(first..).take_while(|known| known.sequence == header.sequence);
        !same.any(|known| *known == message) && (over || !self.has_gaps)
    }

    /// Forgets all messages: the numbers that come now are those of another process.
    pub(crate) fn clear(&mut self) {
        self.budget.give_back(self.messages.len());
        self.messages = VecDeque::new();
        self.has_gaps = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(sequence: u64) -> Header {
        Header { sequence, len: 5, sport: 1000, dport: 2000, ..Header::default() }
    }

    fn text(of: &[u8; 5]) -> Rope {
        Rope::from_vec(of.to_vec())
    }

    // tests [IB-82]
    #[test]
    fn contents_tell_a_repetition_from_a_message_of_another_boot() {
        let mut remembered = Remembered::new(&Budget::new(usize::MAX));
        for sequence in 1..=3 {
            remembered.note(&header(sequence), &text(b"hello"));
        }
        assert!(!remembered.is_new(4, &header(2), &text(b"hello")));
        assert!(remembered.is_new(4, &header(2), &text(b"hullo")));
        assert!(remembered.is_new(4, &Header { sport: 1001, ..header(2) }, &text(b"hello")));
        let cookie = Header { ext: [3; 16], ..header(2) };
        assert!(remembered.is_new(4, &cookie, &text(b"hello")), "its extensions differ");
        remembered.clear();
        assert!(remembered.is_new(4, &header(2), &text(b"hello")));
    }

    // tests [IB-82]
    #[test]
    fn what_was_forgotten_for_want_of_room_is_no_new_message() {
        let budget = Budget::new(20);
        let mut remembered = Remembered::new(&budget);
        for sequence in 1..=100 {
            remembered.note(&header(sequence), &text(b"hello"));
        }
        assert!(!remembered.is_new(101, &header(1), &text(b"hullo")), "it may have come");
        let far = 1 + KEPT as u64 + 100;
        assert!(remembered.is_new(far, &header(1), &text(b"hullo")), "too far back to come again");
        assert!(budget.memory() <= 21 * crate::config::DUPLICATE_RECORD);
        drop(remembered);
        assert_eq!(budget.memory(), 0);
    }

    #[test]
    fn a_number_that_is_no_higher_begins_anew() {
        let budget = Budget::new(usize::MAX);
        let mut remembered = Remembered::new(&budget);
        for sequence in [7, 9, 5, 6] {
            remembered.note(&header(sequence), &text(b"hello"));
        }
        assert!(!remembered.is_new(7, &header(5), &text(b"hello")));
        assert_eq!(budget.memory(), 2 * crate::config::DUPLICATE_RECORD, "5 and 6");
    }

    #[test]
    fn no_more_than_the_latest_are_remembered() {
        let budget = Budget::new(usize::MAX);
        let mut remembered = Remembered::new(&budget);
        for sequence in 1..=KEPT as u64 + 10 {
            remembered.note(&header(sequence), &text(b"hello"));
        }
        assert_eq!(budget.memory(), KEPT * crate::config::DUPLICATE_RECORD);
        assert!(!remembered.is_new(KEPT as u64 + 11, &header(11), &text(b"hello")));
        assert!(remembered.is_new(KEPT as u64 + 11, &header(10), &text(b"hello")));
    }
}
