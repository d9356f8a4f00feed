//! Random numbers derived from a seed: the ChaCha stream cipher with 8 rounds, used as a generator.
//! Queue pair numbers, keys and identifiers come from here, so that a stranger cannot guess them
//! [CM-53]; the same seed gives the same numbers.

use chacha20::{
    ChaCha8Rng,
    rand_core::{Rng as _, SeedableRng as _},
};

/// The generator.
#[derive(Debug)]
pub(crate) struct Rng(ChaCha8Rng);

impl Rng {
    pub(crate) fn new(seed: &[u8; 32]) -> Self {
        Self(ChaCha8Rng::from_seed(*seed))
    }

    pub(crate) fn next_u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// Returns a number of 24 bits.
    pub(crate) fn next_u24(&mut self) -> u32 {
        self.next_u32() >> 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published key stream of ChaCha with 8 rounds for key and nonce of zeroes: two blocks.
    const STREAM: &str = "3e00ef2f895f40d67f5bb8e81f09a5a12c840ec3ce9a7f3b181be188ef711a1e\
                          984ce172b9216f419f445367456d5619314a42a3da86b001387bfdb80e0cfe42\
                          d2aefa0deaa5c151bf0adb6c01f2a5adc0fd581259f9a2aadcf20f8fd566a26b\
                          5032ec38bbc5da98ee0c6f568b872a65a08abf251deb21bb4b56e5d8821e68aa";

    #[test]
    fn the_stream_is_chacha_with_8_rounds() {
        let mut rng = Rng::new(&[0; 32]);
        let stream: Vec<String> =
            (0..32).map(|_| format!("{:08x}", rng.next_u32().swap_bytes())).collect();
        assert_eq!(stream.concat(), STREAM);
        for _ in 0..40 {
            assert!(rng.next_u24() < 1 << 24);
        }
    }

    /// Plans of the simulators are kept by their seeds.
    #[test]
    fn seeds_give_what_they_always_gave() {
        let mut rng = Rng::new(&std::array::from_fn(|at| at as u8));
        let sum = |sum: u64, _| sum.wrapping_mul(31).wrapping_add(rng.next_u32().into());
        assert_eq!((0..16_000).fold(0, sum), 0x79f1_124a_3e88_8139);
    }
}
