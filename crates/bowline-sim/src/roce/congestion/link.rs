//! A link in virtual time: a rate, a queue with a limit and an ECN threshold, and a delay.

use crate::engine::rng::Rng;

/// Bytes of a packet besides the payload of its datagram: Ethernet, IPv4 and UDP.
pub(super) const OUTER_BYTES: u64 = 14 + 20 + 8;
/// The ECN bits of the type of service.
pub(super) const ECN: u8 = 0b11;
/// Congestion experienced, in these bits.
pub(super) const CE: u8 = 0b11;

/// Properties of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkPlan {
    /// Bits per second.
    pub rate: u64,
    /// Nanoseconds from end to end.
    pub delay: u64,
    /// Most bytes that wait; a packet that finds more is dropped.
    pub limit: u64,
    /// Packets that can carry a mark get one when more bytes than this wait; `None`: never.
    pub ecn: Option<u64>,
    /// Packets in ten thousand that are lost by chance.
    pub loss: u64,
    /// Packets in a thousand that take a random longer time, so that others overtake them.
    pub late: u64,
    /// Most nanoseconds that a late packet takes longer.
    pub late_by: u64,
}

impl LinkPlan {
    /// A link without faults and without marks.
    pub const fn new(rate: u64, delay: u64, limit: u64) -> Self {
        Self { rate, delay, limit, ecn: None, loss: 0, late: 0, late_by: 0 }
    }
}

/// What a link does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    /// It arrives at this time, in nanoseconds, with this type of service.
    Arrives(u64, u8),
    /// The queue has no room for it.
    Overflows,
    /// It is lost by chance.
    Lost,
}

/// A link. Its queue needs no events: a packet that comes at a time, in the order of time, finds as
/// many bytes as the link still has to send until it is free.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) plan: LinkPlan,
    /// When all bytes of the queue have been sent, in nanoseconds.
    free_at: u64,
    /// Bytes that left the queue.
    pub(super) carried: u64,
    pub(super) overflows: u64,
    pub(super) marks: u64,
    /// Most bytes that waited.
    pub(super) longest: u64,
}

impl Link {
    pub(super) fn new(plan: LinkPlan) -> Self {
        Self { plan, free_at: 0, carried: 0, overflows: 0, marks: 0, longest: 0 }
    }

    /// Takes a packet of `len` bytes.
    pub(super) fn pass(&mut self, now: u64, rng: &mut Rng, len: u64, tos: u8) -> Passage {
        let LinkPlan { delay, limit, ecn, loss, late, late_by, .. } = self.plan;
        if loss > 0 && rng.below(10_000) < loss {
            return Passage::Lost;
        }
        let waiting = self.bytes_in(self.free_at.saturating_sub(now));
        if waiting + len > limit {
            self.overflows += 1;
            return Passage::Overflows;
        }
        let mut tos = tos;
        if tos & ECN != 0 && ecn.is_some_and(|threshold| waiting > threshold) {
            self.marks += 1;
            tos |= CE;
        }
        self.carried += len;
        self.longest = self.longest.max(waiting + len);
        self.free_at = self.free_at.max(now) + self.time_of(len);
        let extra = if late > 0 && rng.chance(late) { rng.below(late_by + 1) } else { 0 };
        Passage::Arrives(self.free_at + delay + extra, tos)
    }

    fn time_of(&self, bytes: u64) -> u64 {
        (u128::from(bytes) * 8_000_000_000 / u128::from(self.plan.rate)) as u64
    }

    fn bytes_in(&self, nanos: u64) -> u64 {
        (u128::from(nanos) * u128::from(self.plan.rate) / 8_000_000_000) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_delays_marks_and_then_drops() {
        // One byte a nanosecond.
        let plan = LinkPlan { ecn: Some(1_500), ..LinkPlan::new(8_000_000_000, 500, 3_000) };
        let (mut link, mut rng) = (Link::new(plan), Rng::new(1));
        let mut pass = |at, tos| link.pass(at, &mut rng, 1_000, tos);
        assert_eq!(pass(0, 2), Passage::Arrives(1_500, 2));
        assert_eq!(pass(0, 2), Passage::Arrives(2_500, 2));
        assert_eq!(pass(0, 2), Passage::Arrives(3_500, 3), "2,000 bytes wait");
        assert_eq!(pass(0, 2), Passage::Overflows);
        assert_eq!(pass(1_000, 0), Passage::Arrives(4_500, 0), "it cannot carry a mark");
        assert_eq!(pass(9_000, 2), Passage::Arrives(10_500, 2), "the queue is empty again");
    }
}
