//! Loss on purpose, for measurements and tests.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Odd, and with its bits well spread: multiples of it visit every number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Loses one packet in so many, at random; a device loses the same ones each time.
#[derive(Debug)]
pub(crate) struct Loss {
    one_in: u64,
    state: AtomicU64,
}

impl Loss {
    pub(crate) fn new(one_in: u32) -> Self {
        Self { one_in: u64::from(one_in.max(1)), state: AtomicU64::new(0) }
    }

    /// Tells whether the next packet is lost.
    pub(crate) fn strikes(&self) -> bool {
        let mut x = self.state.fetch_add(STEP, Relaxed).wrapping_add(STEP);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)).is_multiple_of(self.one_in)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_lost_as_asked_for() {
        let count = |one_in| {
            let loss = Loss::new(one_in);
            (0..100_000).filter(|_| loss.strikes()).count()
        };
        assert_eq!(count(1), 100_000);
        assert!((900..1100).contains(&count(100)), "{}", count(100));
        assert!((70..130).contains(&count(1000)), "{}", count(1000));
    }
}
