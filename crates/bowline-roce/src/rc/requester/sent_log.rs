//! When the packets in flight were sent, and how many bytes they count for: a record for each
//! burst [CC-2].

use std::collections::VecDeque;

use bowline_base::Instant;
use bowline_wire::roce::Psn;

use super::holes::Holes;

/// Packets that were sent at once.
#[derive(Clone, Copy, Debug)]
struct Record {
    from: Psn,
    upto: Psn,
    at: Instant,
    bytes: u64,
}

/// Packets in flight, in the order of their PSNs.
#[derive(Debug)]
pub(super) struct SentLog {
    records: VecDeque<Record>,
    bytes: u64,
    /// Everything before has arrived, and does not count, but for what is missing.
    kept_upto: Option<Psn>,
    /// Packets before were sent twice, from the oldest one on.
    restarted_at: Psn,
    /// Packets from here on were sent once, and nothing before them was sent again since: their
    /// acknowledgements tell the round trip.
    once_from: Psn,
}

/// What an acknowledgement has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Acknowledged {
    pub(super) bytes: u64,
    /// When the newest of the packets was sent, if their round trip is known.
    pub(super) sent_at: Option<Instant>,
    /// When the oldest of them was first sent.
    pub(super) first_at: Option<Instant>,
}

impl SentLog {
    pub(super) const fn new(first: Psn) -> Self {
        Self {
            records: VecDeque::new(),
            bytes: 0,
            kept_upto: None,
            restarted_at: first,
            once_from: first,
        }
    }

    /// Bytes in flight.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes that the packets `from` to before `upto` are sent.
    #[inline]
    pub(super) fn sent(&mut self, now: Instant, from: Psn, upto: Psn, bytes: u64) {
        self.bytes += bytes;
        if let Some(last) = self.records.back_mut()
            && last.at == now
            && last.upto == from
        {
            last.upto = upto;
            last.bytes += bytes;
            return;
        }
        self.records.push_back(Record { from, upto, at: now, bytes });
    }

    /// Notes that everything before `una` has been acknowledged.
    #[inline]
    pub(super) fn acknowledged(&mut self, una: Psn) -> Acknowledged {
        let (mut bytes, mut sent_at) = (0, None);
        let first_at = self.records.front().map(|first| first.at);
        while let Some(first) = self.records.front_mut() {
            if !una.is_after(first.from) {
                break;
            }
            if !first.from.is_before(self.once_from) {
                sent_at = Some(first.at);
            }
            if una.is_before(first.upto) {
                let (part, whole) = (una.since(first.from), first.upto.since(first.from));
                let part = first.bytes * u64::from(part) / u64::from(whole.max(1));
                first.bytes -= part;
                first.from = una;
                bytes += part;
                break;
            }
            bytes += first.bytes;
            self.records.pop_front();
        }
        self.bytes -= bytes;
        Acknowledged { bytes, sent_at, first_at }
    }

    /// Notes that everything before `upto` has arrived but for the `holes`: what has is not in
    /// flight any more. Tells when the newest of it was sent.
    pub(super) fn kept(&mut self, upto: Psn, holes: &Holes) -> Acknowledged {
        let (mut bytes, mut sent_at) = (0, None);
        let Some(una) = self.records.front().map(|first| first.from) else {
            return Acknowledged { bytes, sent_at, first_at: None };
        };
        let far = upto.since(una);
        let kept =
            self.kept_upto.filter(|kept| kept.is_after(una)).map_or(0, |kept| kept.since(una));
        if far <= kept {
            return Acknowledged { bytes, sent_at, first_at: None };
        }
        let mut at = self.records.partition_point(|record| record.upto.since(una) <= kept);
        while let Some(record) = self.records.get(at).copied()
            && record.from.since(una) < far
        {
            if record.upto.since(una) > far {
                let (part, whole) = (upto.since(record.from), record.upto.since(record.from));
                let part = record.bytes * u64::from(part) / u64::from(whole);
                let rest = Record { from: upto, bytes: record.bytes - part, ..record };
                self.records[at] = Record { upto, bytes: part, ..record };
                self.records.insert(at + 1, rest);
            }
            let record = &mut self.records[at];
            let packets = u64::from(record.upto.since(record.from)).max(1);
            let missing = u64::from(holes.missing(record.from, record.upto)).min(packets);
            let arrived = record.bytes * (packets - missing) / packets;
            record.bytes -= arrived;
            bytes += arrived;
            if missing < packets && !record.from.is_before(self.restarted_at) {
                sent_at = Some(record.at);
            }
            at += 1;
        }
        self.kept_upto = Some(upto);
        self.bytes -= bytes;
        Acknowledged { bytes, sent_at, first_at: None }
    }

    /// When a packet was sent in its turn.
    pub(super) fn sent_at(&self, psn: Psn) -> Option<Instant> {
        let una = self.records.front()?.from;
        let at = self.records.partition_point(|record| record.upto.since(una) <= psn.since(una));
        self.records.get(at).map(|record| record.at)
    }

    /// Tells whether a packet is the first of its record, the oldest one.
    pub(super) fn is_first(&self, psn: Psn) -> bool {
        self.records.front().is_some_and(|first| first.from == psn)
    }

    /// Notes that a packet in flight is sent again: until everything before `end` has been
    /// acknowledged, acknowledgements do not tell the round trip.
    pub(super) fn sent_again(&mut self, end: Psn) {
        self.once_from = end;
    }

    /// Notes that nothing is in flight any more, because everything before `end` is sent again or
    /// never acknowledged; returns the bytes that were.
    pub(super) fn clear(&mut self, end: Psn) -> u64 {
        self.records.clear();
        (self.once_from, self.restarted_at) = (end, end);
        self.kept_upto = None;
        std::mem::take(&mut self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    #[test]
    fn an_acknowledgement_frees_its_share_of_a_burst_and_tells_when_it_was_sent() {
        let psn = Psn::new;
        let mut log = SentLog::new(psn(0));
        log.sent(at(1), psn(0), psn(10), 10_000);
        log.sent(at(1), psn(10), psn(11), 500);
        log.sent(at(2), psn(11), psn(12), 1_000);
        assert_eq!(log.bytes(), 11_500);
        let half = log.acknowledged(psn(0) + 5);
        assert_eq!((half.bytes, half.sent_at), (10_500 * 5 / 11, Some(at(1))));
        assert_eq!(log.acknowledged(psn(12)).sent_at, Some(at(2)));
        assert_eq!(log.bytes(), 0);
    }

    // tests [CC-14]
    #[test]
    fn what_has_arrived_behind_a_gap_is_not_in_flight() {
        let psn = Psn::new;
        let mut holes = Holes::new();
        let mut log = SentLog::new(psn(0));
        log.sent(at(1), psn(0), psn(10), 10_000);
        log.sent(at(2), psn(10), psn(20), 10_000);
        holes.add(psn(0), psn(3), psn(5), at(9));
        // All up to 14 but for 3 and 4.
        let kept = log.kept(psn(15), &holes);
        assert_eq!((kept.bytes, kept.sent_at), (13_000, Some(at(2))));
        assert_eq!(log.bytes(), 7_000);
        // An older report, and the same once more.
        assert_eq!(log.kept(psn(12), &holes).bytes, 0);
        assert_eq!(log.kept(psn(15), &holes).bytes, 0);
        assert_eq!(log.kept(psn(17), &holes).bytes, 2_000);
        assert_eq!(log.acknowledged(psn(20)).bytes, 5_000);
        assert_eq!(log.bytes(), 0);
    }

    #[test]
    fn what_was_sent_again_tells_no_round_trip() {
        let psn = Psn::new;
        let mut log = SentLog::new(psn(0));
        log.sent(at(1), psn(0), psn(10), 10_000);
        assert_eq!(log.clear(psn(10)), 10_000);
        log.sent(at(5), psn(0), psn(10), 10_000);
        log.sent(at(6), psn(10), psn(12), 2_000);
        let again = log.acknowledged(psn(10));
        assert_eq!((again.bytes, again.sent_at), (10_000, None));
        assert_eq!(log.acknowledged(psn(12)).sent_at, Some(at(6)));
    }
}
