//! Duplicates from peers that acknowledge by TCP.
//!
//! Such a peer repeats a message (flag 0x04) only if its TCP had no acknowledgement of the last
//! byte when the connection broke, so only messages of the last receive window can come again.
//! Each one received in that window is remembered; a flagged message that equals one from another
//! TCP connection is a duplicate. So is a plain one on a connection older than the one that brought
//! its flagged copy: it was overtaken on the way.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bowline_wire::rds::{HEADER_LEN, Header};

use crate::ids::LinkId;
use crate::rxbuf::Rope;

/// Bytes of stream a link remembers: the largest receive window Linux opens by default.
const WINDOW: u64 = 32 << 20;
/// Most messages remembered per peer.
const RECORDS_MAX: usize = 1 << 17;
/// The same once the node as a whole remembers as many as it may.
const RECORDS_FEW: usize = 1 << 10;

/// How many messages all peers of a node may have remembered together.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    used: Arc<AtomicUsize>,
    limit: usize,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Self {
        Self { used: Arc::default(), limit }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sequence: u64,
    digest: u64,
    len: u32,
    sport: u16,
    dport: u16,
    /// Path of the sender, where its ports tell it: numbers of different paths are alike.
    lane: u8,
}

/// How a message came.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    link: LinkId,
    /// Age of the link among its peer's.
    serial: u64,
    flagged: bool,
}

/// What came lately from one peer.
#[derive(Debug)]
pub(crate) struct Dedup {
    budget: Budget,
    /// How each message came last, and when.
    seen: HashMap<Key, (Arrival, u64)>,
    /// The same in order of arrival, for forgetting.
    order: VecDeque<(Key, u64)>,
    /// Bytes received from this peer on all links.
    received: u64,
}

impl Drop for Dedup {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Dedup {
    pub(crate) fn new(budget: &Budget) -> Self {
        Self { budget: budget.clone(), seen: HashMap::new(), order: VecDeque::new(), received: 0 }
    }

    /// Tells whether a complete message is one that came before on another link, and remembers it.
    /// `serial` grows with every new link of the peer; `lane` is the sender's path or 0.
    pub(crate) fn is_duplicate(
        &mut self,
        link: LinkId,
        (serial, lane): (u64, u8),
        header: &Header,
        payload: &Rope,
    ) -> bool {
        let key = Key {
            sequence: header.sequence,
            digest: digest(payload),
            len: header.len,
            sport: header.sport,
            dport: header.dport,
            lane,
        };
        self.received += HEADER_LEN as u64 + u64::from(header.len);
        let flagged = header.flags.contains(bowline_wire::rds::Flags::RETRANSMITTED);
        let arrival = Arrival { link, serial, flagged };
        let before = self.seen.insert(key, (arrival, self.received));
        self.order.push_back((key, self.received));
        // Only a sum: the node has one thread at a time.
        let used = self.budget.used.fetch_add(1, Relaxed);
        let most = if used < self.budget.limit { RECORDS_MAX } else { RECORDS_FEW };
        let oldest = self.received.saturating_sub(WINDOW);
        while let Some((old, at)) = self.order.front().copied() {
            if at >= oldest && self.order.len() <= most {
                break;
            }
            self.order.pop_front();
            self.budget.used.fetch_sub(1, Relaxed);
            if self.seen.get(&old).is_some_and(|(_, last)| *last == at) {
                self.seen.remove(&old);
            }
        }
        before.is_some_and(|(before, _)| {
            before.link != link && (flagged || (before.flagged && serial < before.serial))
        })
    }

    /// Forgets everything: the peer has restarted.
    pub(crate) fn clear(&mut self) {
        self.budget.used.fetch_sub(self.order.len(), Relaxed);
        self.seen = HashMap::new();
        self.order = VecDeque::new();
    }
}

/// A 64-bit digest; the peer only competes with its own messages.
fn digest(payload: &Rope) -> u64 {
    const K: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut h = payload.len() as u64;
    // Pieces may split words differently on the second arrival, so bytes are regrouped.
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

    // tests
    #[test]
    fn only_flagged_repeats_from_another_link_are_duplicates() {
        let (a, b) = (LinkId((0, 1)), LinkId((1, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let other = Rope::from_vec(b"hullo".to_vec());
        let again = Flags::RETRANSMITTED;
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(a, (1, 0), &header(7, Flags::NONE), &text));
        assert!(!dedup.is_duplicate(b, (2, 0), &header(7, Flags::NONE), &text), "unflagged");
        assert!(!dedup.is_duplicate(a, (1, 0), &header(7, again), &other), "other payload");
        assert!(dedup.is_duplicate(a, (1, 0), &header(7, again), &text));
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(a, (1, 0), &header(7, Flags::NONE), &text));
        assert!(!dedup.is_duplicate(a, (1, 0), &header(7, again), &text), "same link");
    }

    #[test]
    fn a_message_overtaken_by_its_repetition_is_a_duplicate() {
        let (old, new, newest) = (LinkId((0, 1)), LinkId((1, 1)), LinkId((2, 1)));
        let text = Rope::from_vec(b"hello".to_vec());
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(new, (2, 0), &header(7, Flags::RETRANSMITTED), &text));
        assert!(dedup.is_duplicate(old, (1, 0), &header(7, Flags::NONE), &text));
        let mut dedup = Dedup::new(&Budget::new(usize::MAX));
        assert!(!dedup.is_duplicate(new, (2, 0), &header(7, Flags::RETRANSMITTED), &text));
        assert!(
            !dedup.is_duplicate(newest, (3, 0), &header(7, Flags::NONE), &text),
            "a restarted peer"
        );
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

    #[test]
    fn all_peers_together_remember_no_more_than_the_budget() {
        let budget = Budget::new(5_000);
        let text = Rope::from_vec(b"hello".to_vec());
        let mut peers: Vec<Dedup> = (0..10).map(|_| Dedup::new(&budget)).collect();
        for sequence in 0..4_000 {
            for peer in &mut peers {
                peer.is_duplicate(LinkId((0, 1)), (1, 0), &header(sequence, Flags::NONE), &text);
            }
        }
        let used = budget.used.load(Relaxed);
        assert_eq!(used, peers.iter().map(|p| p.order.len()).sum::<usize>());
        assert!(used <= 10 * (RECORDS_FEW + 1), "{used} remembered");
        peers.clear();
        assert_eq!(budget.used.load(Relaxed), 0);
    }
}
