//! The only source of randomness in a run: SplitMix64, so that a seed determines a run.

pub(crate) use bowline_base::mix;
use serde::{Deserialize, Serialize};

/// Seeded generator, for simulation only.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Starts a stream that depends on every bit of `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Self(seed ^ 0x6c62_272e_07bb_0142);
        rng.next();
        rng
    }

    /// Draws 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Draws from `0..n`; 0 when `n` is 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { ((u128::from(self.next()) * u128::from(n)) >> 64) as u64 }
    }

    /// Draws an index below `n`.
    pub(crate) fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// Draws from `lo..=hi`, each value with the same probability.
    pub(crate) fn between(&mut self, lo: u64, hi: u64) -> u64 {
        lo + self.below(hi.saturating_sub(lo).saturating_add(1))
    }

    /// Draws from `lo..=hi`, each order of magnitude with the same probability.
    pub(crate) fn magnitude(&mut self, lo: u64, hi: u64) -> u64 {
        let (from, to) = (lo.max(1).ilog2(), hi.max(1).ilog2());
        let bits = self.between(u64::from(from), u64::from(to)) as u32;
        let base = 1u64 << bits;
        (base + self.below(base)).clamp(lo, hi)
    }

    /// Returns true with a probability of `permille` in a thousand.
    pub(crate) fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// Picks one of `items`, which is not empty.
    pub(crate) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.index(items.len())]
    }

    /// Draws a waiting time with the mean `mean`: almost exponential, at most eight times the mean.
    pub(crate) fn wait(&mut self, mean: u64) -> u64 {
        // -log2 of a uniform number in (0, 1], in 1/65536; the mantissa serves as its own
        // logarithm. Only integers are used, so that every machine draws the same.
        let u = self.next() | 1;
        let zeros = u.leading_zeros();
        let mantissa = ((u << zeros) >> 47) & 0xffff;
        let log2 = (u64::from(zeros) + 1) * 65_536 - mantissa;
        const LN_2: u128 = 45_426;
        let wait = (u128::from(mean) * u128::from(log2) * LN_2) >> 32;
        (wait as u64).clamp(1, mean.saturating_mul(8).max(1))
    }

    /// Shuffles in place.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.index(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_range() {
        let mut rng = Rng::new(7);
        for _ in 0..10_000 {
            assert!(rng.below(3) < 3);
            assert!((5..=9).contains(&rng.between(5, 9)));
            assert!((3..=70_000).contains(&rng.magnitude(3, 70_000)));
            assert!((1..=8_000).contains(&rng.wait(1_000)));
        }
    }

    #[test]
    fn neighbouring_seeds_differ() {
        assert_ne!(Rng::new(1).next(), Rng::new(2).next());
    }
}
