//! Whether a sender uses its window: one that does not must not make it larger, since nothing shows
//! what a larger one would do (RFC 9438, section 5.8).

use bowline_base::Instant;

use super::controller::Room;

/// Whether the window was full in this round trip or in the one before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    /// What was sent from then on ends the round trip when it is acknowledged.
    began: Instant,
    full: bool,
    was_full: bool,
}

impl Usage {
    pub(super) const fn new(now: Instant) -> Self {
        Self { began: now, full: false, was_full: false }
    }

    /// Something was sent, and has filled the window or has not.
    #[inline]
    pub(super) fn sent(&mut self, room: Room) {
        self.full |= room == Room::Full;
    }

    /// Something was acknowledged that was sent at a time.
    pub(super) fn acknowledged(&mut self, now: Instant, sent_at: Instant) {
        if sent_at >= self.began {
            *self = Self { began: now, full: false, was_full: self.full };
        }
    }

    pub(super) const fn is_limited(&self) -> bool {
        self.full || self.was_full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_window_counts_until_the_end_of_the_next_round_trip() {
        let at = Instant::from_nanos;
        let mut usage = Usage::new(at(10));
        assert!(!usage.is_limited());
        usage.sent(Room::Full);
        usage.sent(Room::Left);
        assert!(usage.is_limited());
        usage.acknowledged(at(20), at(10));
        assert!(usage.is_limited(), "in the round trip before");
        usage.acknowledged(at(25), at(19));
        assert!(usage.is_limited(), "sent before this one began");
        usage.acknowledged(at(30), at(20));
        assert!(!usage.is_limited());
    }
}
