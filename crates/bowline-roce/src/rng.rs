//! Random numbers derived from a seed: the ChaCha stream cipher with 8 rounds, used as a generator.
//! Queue pair numbers, keys and identifiers come from here, so that a stranger cannot guess them
//! [CM-53]; the same seed gives the same numbers.

/// The generator.
#[derive(Clone, Debug)]
pub(crate) struct Rng {
    key: [u32; 8],
    block: u64,
    words: [u32; 16],
    used: usize,
}

impl Rng {
    pub(crate) fn new(seed: &[u8; 32]) -> Self {
        let mut key = [0; 8];
        for (word, bytes) in key.iter_mut().zip(seed.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Self { key, block: 0, words: [0; 16], used: 16 }
    }

    pub(crate) fn next_u32(&mut self) -> u32 {
        if self.used == self.words.len() {
            self.words = chacha8(&self.key, self.block);
            self.block = self.block.wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.words[self.used - 1]
    }

    /// Returns a number of 24 bits.
    pub(crate) fn next_u24(&mut self) -> u32 {
        self.next_u32() >> 8
    }
}

fn chacha8(key: &[u32; 8], block: u64) -> [u32; 16] {
    let mut start = [0; 16];
    start[..4].copy_from_slice(&[0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574]);
    start[4..12].copy_from_slice(key);
    start[12] = block as u32;
    start[13] = (block >> 32) as u32;
    let mut words = start;
    for _ in 0..4 {
        quarter(&mut words, 0, 4, 8, 12);
        quarter(&mut words, 1, 5, 9, 13);
        quarter(&mut words, 2, 6, 10, 14);
        quarter(&mut words, 3, 7, 11, 15);
        quarter(&mut words, 0, 5, 10, 15);
        quarter(&mut words, 1, 6, 11, 12);
        quarter(&mut words, 2, 7, 8, 13);
        quarter(&mut words, 3, 4, 9, 14);
    }
    for (word, first) in words.iter_mut().zip(start) {
        *word = word.wrapping_add(first);
    }
    words
}

fn quarter(words: &mut [u32; 16], a: usize, b: usize, c: usize, d: usize) {
    words[a] = words[a].wrapping_add(words[b]);
    words[d] = (words[d] ^ words[a]).rotate_left(16);
    words[c] = words[c].wrapping_add(words[d]);
    words[b] = (words[b] ^ words[c]).rotate_left(12);
    words[a] = words[a].wrapping_add(words[b]);
    words[d] = (words[d] ^ words[a]).rotate_left(8);
    words[c] = words[c].wrapping_add(words[d]);
    words[b] = (words[b] ^ words[c]).rotate_left(7);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_chacha_with_8_rounds() {
        // Key and nonce of zeroes: the known first bytes of the key stream are 3e 00 ef 2f.
        let mut rng = Rng::new(&[0; 32]);
        assert_eq!(rng.next_u32().to_le_bytes(), [0x3e, 0x00, 0xef, 0x2f]);
        for _ in 0..40 {
            assert!(rng.next_u24() < 1 << 24);
        }
    }
}
