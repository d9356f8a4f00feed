//! Recognises repeated messages of peers that acknowledge by TCP alone.
//!
//! Such a peer repeats a message (flag 0x04) only if its TCP had no acknowledgement of the last
//! byte when the connection broke. So only messages of the last receive window can come again, and
//! each message received in that window is remembered. A flagged message is a duplicate if it
//! equals a message from another TCP connection. A plain message is a duplicate if it comes after
//! its flagged copy, and the copy came on a newer connection or the number is too high for a peer
//! that counts from 1 again: the copy overtook the plain message on the way.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bowline_wire::rds::{HEADER_LEN, Header};
use serde::{Deserialize, Serialize};

use crate::config::DUPLICATE_RECORD;
use crate::ids::LinkId;
use crate::rxbuf::Rope;

/// Number of bytes of a stream whose messages are remembered: the largest receive window that Linux
/// opens by default.
const WINDOW: u64 = 32 << 20;
/// Maximum number of messages remembered per peer.
const RECORDS_MAX: usize = 1 << 17;
/// The highest number that a peer which counts from 1 again can have reached while an earlier
/// message with that number is remembered, since each message that the peer counts takes a record.
pub(crate) const COUNTED_MAX: u64 = RECORDS_MAX as u64;
/// Maximum number of messages remembered of a quiet peer while more than half of the node's budget
/// is used.
const RECORDS_QUIET_MAX: usize = 1 << 10;
/// Number of messages that each peer may have remembered, however many peers there are.
const RECORDS_MIN: usize = 16;

/// Limit on the number of messages remembered for all peers of a node together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Budget {
    used: Arc<AtomicUsize>,
    limit: usize,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Self {
        Self { used: Arc::default(), limit }
    }

    /// Returns the number of messages that each peer may have remembered when the budget is used
    /// up.
    fn share(&self) -> usize {
        // The records of each peer hold one reference, and the node holds one.
        let peers = Arc::strong_count(&self.used).saturating_sub(1).max(1);
        (self.limit / peers).clamp(RECORDS_MIN, RECORDS_MAX)
    }

    /// Counts further messages; returns how many the peer that they are of may have remembered.
    pub(crate) fn take(&self, messages: usize) -> usize {
        // Relaxed suffices: the node has one thread at a time, and the value is only a sum.
        let used = self.used.fetch_add(messages, Relaxed);
        if used < self.limit { RECORDS_MAX } else { self.share() }
    }

    /// Counts messages no longer.
    pub(crate) fn give_back(&self, messages: usize) {
        self.used.fetch_sub(messages, Relaxed);
    }

    /// Memory in use, bytes.
    pub(crate) fn memory(&self) -> usize {
        self.used.load(Relaxed) * DUPLICATE_RECORD
    }

    /// Tells whether more than half of the budget is used, so that records unlikely to be needed
    /// have to go.
    pub(crate) fn is_tight(&self) -> bool {
        self.used.load(Relaxed) > self.limit / 2
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Key {
    sequence: u64,
    digest: u64,
    len: u32,
    sport: u16,
    dport: u16,
}

/// Properties of the connection that brings a message which matter for duplicates.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SourceLink {
    pub(crate) link: LinkId,
    /// Serial of the link: later links of the peer have higher ones.
    pub(crate) serial: u64,
    /// Path of the sender, if the peer dialled the connection: the one it named, or the one that
    /// its port tells.
    pub(crate) sender_path: Option<u8>,
}

/// How a message came.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Arrival {
    source: SourceLink,
    flagged: bool,
    /// Number of bytes received from the peer at that time; unique among arrivals.
    at: u64,
}

/// Arrivals of equal messages: nearly always one, and more only from paths that use the same
/// numbers.
#[derive(Debug, Serialize, Deserialize)]
struct Arrivals {
    last: Arrival,
    others: Vec<Arrival>,
}

impl Arrivals {
    fn any(&self, mut is: impl FnMut(&Arrival) -> bool) -> bool {
        is(&self.last) || self.others.iter().any(is)
    }

    /// Adds an arrival in place of those for which `replaced` is true.
    fn replace(&mut self, new: Arrival, mut replaced: impl FnMut(&Arrival) -> bool) {
        self.others.retain(|a| !replaced(a));
        if !replaced(&self.last) {
            self.others.push(self.last);
        }
        self.last = new;
    }

    /// Forgets one arrival; returns true if none is left.
    fn forget(&mut self, at: u64) -> bool {
        if self.last.at != at {
            self.others.retain(|a| a.at != at);
            return false;
        }
        match self.others.pop() {
            Some(other) => self.last = other,
            None => return true,
        }
        false
    }
}

/// Messages received lately from one peer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Dedup {
    #[serde(skip)]
    budget: Budget,
    seen: HashMap<Key, Arrivals>,
    /// The messages in order of arrival, oldest first, so that old ones can be forgotten.
    order: VecDeque<(Key, u64)>,
    /// Number of bytes received from this peer on all links.
    received: u64,
}

impl Drop for Dedup {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Dedup {
    /// Counts records that were read from elsewhere towards a budget.
    pub(crate) fn charge(&mut self, budget: &Budget) {
        self.budget = budget.clone();
        self.budget.take(self.order.len());
    }

    pub(crate) fn new(budget: &Budget) -> Self {
        Self { budget: budget.clone(), seen: HashMap::new(), order: VecDeque::new(), received: 0 }
    }

    /// Tells whether a complete message came before on another link, and remembers it. `by_path`:
    /// the peer's ports tell its paths, which use the same numbers. This node may
    /// learn that only after messages have come, so each message is remembered with its path in
    /// either case.
    pub(crate) fn is_duplicate(
        &mut self,
        source: SourceLink,
        by_path: bool,
        header: &Header,
        payload: &Rope,
    ) -> bool {
        let key = Key {
            sequence: header.sequence,
            digest: digest(payload),
            len: header.len,
            sport: header.sport,
            dport: header.dport,
        };
        self.received += HEADER_LEN as u64 + u64::from(header.len);
        let flagged = header.flags.contains(bowline_wire::rds::Flags::RETRANSMITTED);
        let new = Arrival { source, flagged, at: self.received };
        let is_copy = |a: &Arrival| {
            // Connections may be accepted in another order than they were made in, and than a path
            // of the peer used them in. But a peer that counts from 1 again cannot have come so far
            // while this message is remembered. Answers of different paths may have the same
            // number; messages of two sockets have different ones, whatever their path. So a port
            // that was changed on the way, and tells another path, does no harm there.
            let may_be_reused = header.sport == 0 || header.sequence <= COUNTED_MAX;
            let overtaken = a.flagged && (source.serial < a.source.serial || !may_be_reused);
            (!by_path || !may_be_reused || a.source.sender_path == source.sender_path)
                && a.source.link != source.link
                && (flagged || overtaken)
        };
        let duplicate = match self.seen.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(Arrivals { last: new, others: Vec::new() });
                false
            }
            Entry::Occupied(mut entry) => {
                let before = entry.get_mut();
                let duplicate = before.any(is_copy);
                before.replace(new, |a| {
                    if duplicate { is_copy(a) } else { a.source.sender_path == source.sender_path }
                });
                duplicate
            }
        };
        self.order.push_back((key, self.received));
        self.forget_old();
        duplicate
    }

    /// Forgets messages that cannot come again, and the oldest ones beyond the limits.
    fn forget_old(&mut self) {
        let most = self.budget.take(1);
        let oldest = self.received.saturating_sub(WINDOW);
        while let Some((_, at)) = self.order.front() {
            if *at >= oldest && self.order.len() <= most {
                break;
            }
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        let Some((first, at)) = self.order.pop_front() else { return };
        self.budget.give_back(1);
        if self.seen.get_mut(&first).is_some_and(|arrivals| arrivals.forget(at)) {
            self.seen.remove(&first);
        }
    }

    /// Forgets messages whose numbers the next process of the peer may use again, because it may
    /// count from 1. Numbers taken from the clock do not come again. What looks like a restart may
    /// also be a connection of a dead process that is accepted after those of its successor, which
    /// replaced on. Messages that came on links with this serial or a later one belong to the next
    /// process: it may have sent them before it told its generation.
    pub(crate) fn forget_reusable_numbers(&mut self, serial: u64) {
        let (seen, budget) = (&mut self.seen, &self.budget);
        self.order.retain(|(key, at)| {
            let of_next_process = |a: &Arrival| a.at == *at && a.source.serial >= serial;
            let kept =
                key.sequence > COUNTED_MAX || seen.get(key).is_some_and(|a| a.any(of_next_process));
            if !kept {
                budget.give_back(1);
                if seen.get_mut(key).is_some_and(|arrivals| arrivals.forget(*at)) {
                    seen.remove(key);
                }
            }
            kept
        });
    }

    /// Forgets all but the latest `RECORDS_QUIET_MAX` messages.
    pub(crate) fn trim(&mut self) {
        while self.order.len() > RECORDS_QUIET_MAX {
            self.forget_first();
        }
    }

    /// Forgets all messages.
    fn clear(&mut self) {
        self.budget.give_back(self.order.len());
        self.seen = HashMap::new();
        self.order = VecDeque::new();
    }
}

/// Returns a 64-bit digest. A cryptographic one is not needed: a peer could only cause collisions
/// among its own messages.
pub(crate) fn digest(payload: &Rope) -> u64 {
    const K: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut h = payload.len() as u64;
    // The payload may be split differently at its second arrival, so bytes are regrouped into
    // words.
    let mut word = [0; 8];
    let mut fill = 0;
    let mut mix = |w: u64| h = (h.rotate_left(5) ^ w).wrapping_mul(K);
    for mut slice in payload.slices() {
        if fill > 0 {
            let n = slice.len().min(8 - fill);
            word[fill..fill + n].copy_from_slice(&slice[..n]);
            fill += n;
            slice = &slice[n..];
            if fill < 8 {
                continue;
            }
            mix(u64::from_le_bytes(word));
        }
        let (words, rest) = slice.as_chunks::<8>();
        words.iter().for_each(|w| mix(u64::from_le_bytes(*w)));
        word[..rest.len()].copy_from_slice(rest);
        fill = rest.len();
    }
    if fill > 0 {
        word[fill..].fill(0);
        mix(u64::from_le_bytes(word));
    }
    h
}

#[cfg(test)]
mod tests {
    use bowline_wire::rds::Flags;

    use super::*;

    fn header(sequence: u64, flags: Flags) -> Header {
        Header { sequence, len: 5, sport: 1000, dport: 2000, flags, ..Header::default() }
    }

    fn by(link: LinkId, serial: u64) -> SourceLink {
        SourceLink { link, serial, sender_path: None }
    }

    // tests
    #[test]
    fn only_flagged_repeats_from_another_link_are_duplicates() {
        let (a, b) = (LinkId((0, 1)), LinkId((1, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let other = Rope::from_vec(b"hullo".to_vec());
        let again = Flags::RETRANSMITTED;
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(by(a, 1), false, &header(7, Flags::NONE), &text));
        assert!(!dedup.is_duplicate(by(b, 2), false, &header(7, Flags::NONE), &text), "unflagged");
        assert!(!dedup.is_duplicate(by(a, 1), false, &header(7, again), &other), "other payload");
        assert!(dedup.is_duplicate(by(a, 1), false, &header(7, again), &text));
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(by(a, 1), false, &header(7, Flags::NONE), &text));
        assert!(!dedup.is_duplicate(by(a, 1), false, &header(7, again), &text), "same link");
    }

    #[test]
    fn a_message_overtaken_by_its_repetition_is_a_duplicate() {
        let (old, new, newest) = (LinkId((0, 1)), LinkId((1, 1)), LinkId((2, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(by(new, 2), false, &header(7, Flags::RETRANSMITTED), &text));
        assert!(dedup.is_duplicate(by(old, 1), false, &header(7, Flags::NONE), &text));
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(by(new, 2), false, &header(7, Flags::RETRANSMITTED), &text));
        assert!(
            !dedup.is_duplicate(by(newest, 3), false, &header(7, Flags::NONE), &text),
            "a restarted peer"
        );
    }

    /// A peer has restarted. Connections of its paths 3 and 4 come up and bring messages before the
    /// one of path 0 brings the first handshake, which says that the peer's ports tell its paths.
    /// Then one of them breaks, and messages that were not acknowledged by its TCP come again on
    /// another.
    // tests
    #[test]
    fn messages_from_before_the_handshake_are_recognised_when_repeated_after_it() {
        let (first, second, third) = (LinkId((0, 1)), LinkId((1, 1)), LinkId((2, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let on_path = |link, serial, path| SourceLink { link, serial, sender_path: Some(path) };
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        let plain = header(7, Flags::NONE);
        let again = header(7, Flags::RETRANSMITTED);
        assert!(!dedup.is_duplicate(on_path(first, 1, 4), false, &plain, &text));
        assert!(
            !dedup.is_duplicate(on_path(second, 2, 3), false, &plain, &text),
            "of another path"
        );
        assert!(dedup.is_duplicate(on_path(third, 3, 4), true, &again, &text), "path 4 again");
        assert!(!dedup.is_duplicate(on_path(second, 2, 5), true, &again, &text), "new on path 5");
    }

    /// A connection is delayed on its way. The sender gives it up, dials again and repeats the
    /// messages on the new connection, which is accepted first.
    // tests
    #[test]
    fn a_copy_on_a_connection_accepted_after_its_successor_is_a_duplicate() {
        let (old, new) = (LinkId((1, 1)), LinkId((0, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let again = |sequence| header(sequence, Flags::RETRANSMITTED);
        let clock = COUNTED_MAX + 1;
        let plain = |sequence| header(sequence, Flags::NONE);
        let from = |link, serial, sender_path| SourceLink { link, serial, sender_path };
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(from(new, 1, Some(0)), true, &again(clock), &text));
        assert!(dedup.is_duplicate(from(old, 3, Some(0)), true, &plain(clock), &text));
        // A low number proves nothing: a restarted peer may have counted up to it again.
        let low = COUNTED_MAX;
        assert!(!dedup.is_duplicate(from(new, 1, Some(0)), true, &again(low), &text));
        assert!(!dedup.is_duplicate(from(old, 2, Some(0)), true, &plain(low), &text));
        // The numbers of answers prove nothing either: several paths may give the same ones.
        let answer = |flags| Header { sport: 0, ..header(clock + 1, flags) };
        let text = Rope::default();
        let flagged = answer(Flags::RETRANSMITTED);
        assert!(!dedup.is_duplicate(from(new, 1, None), true, &flagged, &text));
        assert!(!dedup.is_duplicate(from(old, 2, None), true, &answer(Flags::NONE), &text));
    }

    /// The port of a connection was changed on its way, and tells another path. A number of the
    /// clock is that of one message on any path; a low one may be counted on each.
    // tests
    #[test]
    fn a_number_of_the_clock_is_known_again_on_whichever_path() {
        let (old, new) = (LinkId((0, 1)), LinkId((1, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let from = |link, serial, path| SourceLink { link, serial, sender_path: Some(path) };
        for (sequence, known) in [(COUNTED_MAX + 1, true), (COUNTED_MAX, false)] {
            let mut dedup = Dedup::new(&Budget::new(usize::MAX));
            let plain = header(sequence, Flags::NONE);
            let again = header(sequence, Flags::RETRANSMITTED);
            assert!(!dedup.is_duplicate(from(old, 1, 1), true, &plain, &text));
            assert_eq!(dedup.is_duplicate(from(new, 2, 6), true, &again, &text), known);
        }
    }

    /// An acceptor like a kernel gives a path another connection, which this node dialled before
    /// the broken one, and repeats on it the messages of the broken one. The other connection is
    /// read first.
    // tests
    #[test]
    fn a_copy_on_a_connection_dialled_later_is_a_duplicate() {
        let (earlier, later) = (LinkId((0, 1)), LinkId((1, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let clock = COUNTED_MAX + 1;
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        let again = header(clock, Flags::RETRANSMITTED);
        assert!(!dedup.is_duplicate(by(earlier, 1), true, &again, &text));
        assert!(dedup.is_duplicate(by(later, 2), true, &header(clock, Flags::NONE), &text));
    }

    /// The connection of a dead process is accepted after those of its successor, which looks like
    /// a restart.
    // tests
    #[test]
    fn a_restart_leaves_what_is_numbered_by_the_clock() {
        let (a, b) = (LinkId((0, 1)), LinkId((1, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let budget = Budget::new(usize::MAX);
        let mut dedup = Dedup::new(&budget);
        for sequence in [7, COUNTED_MAX + 1] {
            assert!(!dedup.is_duplicate(by(a, 1), false, &header(sequence, Flags::NONE), &text));
        }
        dedup.forget_reusable_numbers(u64::MAX);
        assert_eq!(budget.used.load(Relaxed), 1);
        let again = |sequence| header(sequence, Flags::RETRANSMITTED);
        assert!(!dedup.is_duplicate(by(b, 2), false, &again(7), &text), "counted anew");
        assert!(dedup.is_duplicate(by(b, 2), false, &again(COUNTED_MAX + 1), &text));
    }

    #[test]
    fn digest_does_not_depend_on_pieces() {
        let bytes: Vec<u8> = (0..100).collect();
        let whole = Rope::from_vec(bytes.clone());
        for cut in 0..bytes.len() {
            let mut pool = crate::rxbuf::RxPool::default();
            let mut pieces = Rope::default();
            for part in [&bytes[..cut], &bytes[cut..]] {
                let mut buf = pool.get();
                buf.vec().extend_from_slice(part);
                buf.vec().resize(crate::rxbuf::RX_BUF_LEN, 0);
                let buf = pool.freeze(buf);
                pieces.push(&buf, 0, part.len());
            }
            assert_eq!(digest(&pieces), digest(&whole), "cut at {cut}");
        }
    }

    // tests
    #[test]
    fn of_one_peer_the_last_bytes_and_messages_are_remembered() {
        let (a, b) = (LinkId((0, 1)), LinkId((1, 1)));
        let short = Rope::default();
        let header = |sequence, len, flags| Header { len, ..header(sequence, flags) };
        // The figures of SECURITY.md; what counts is the length that a header tells.
        for (len, most) in [((1 << 20) - HEADER_LEN as u32, 32), (0, 131_072)] {
            let mut dedup = Dedup::new(&Budget::new(usize::MAX));
            for sequence in 1..=most + 2 {
                let first = header(sequence, len, Flags::NONE);
                assert!(!dedup.is_duplicate(by(a, 1), false, &first, &short));
            }
            let mut again = |sequence| {
                let flagged = header(sequence, len, Flags::RETRANSMITTED);
                dedup.is_duplicate(by(b, 2), false, &flagged, &short)
            };
            assert!(again(most + 2) && again(5) && !again(1), "{most} of {len}");
        }
    }

    #[test]
    fn records_of_all_peers_together_stay_within_the_budget() {
        let budget = Budget::new(5_000);
        let text = Rope::from_vec(b"hello".to_vec());
        let mut peers: Vec<Dedup> = (0..10).map(|_| Dedup::new(&budget)).collect();
        for sequence in 0..4_000 {
            for peer in &mut peers {
                let by = by(LinkId((0, 1)), 1);
                peer.is_duplicate(by, false, &header(sequence, Flags::NONE), &text);
            }
        }
        let used = budget.used.load(Relaxed);
        assert_eq!(used, peers.iter().map(|p| p.order.len()).sum::<usize>());
        assert!(used <= 10 * (RECORDS_QUIET_MAX + 1), "{used} remembered");
        peers.clear();
        assert_eq!(budget.used.load(Relaxed), 0);
    }
}
