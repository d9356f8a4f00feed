//! Sizes and contents of the messages of a stream, from its seed alone.
//!
//! The same rules are in `guest-tools/rds-verify.py`: whoever changes one
//! changes both.

use std::io::IoSlice;
use std::sync::{Arc, Mutex, OnceLock};

/// Largest message of RDS, bytes.
pub(crate) const MAX_MESSAGE: usize = 1 << 20;
/// Seed, index and length, little endian, at the start of a message that has room.
pub(crate) const HEAD: usize = 16;

const BLOCK: usize = 1 << 16;
const BLOCKS: usize = 33;

/// One step of splitmix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Messages of one stream.
#[derive(Debug, Clone)]
pub(crate) struct Generator {
    seed: u32,
    low: usize,
    high: usize,
    pool: Arc<[u8]>,
}

/// A message as two pieces, to be sent or compared without putting them together.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    head: [u8; HEAD],
    with_head: bool,
    body: &'a [u8],
}

impl Parts<'_> {
    pub(crate) fn slices(&self) -> [IoSlice<'_>; 2] {
        [IoSlice::new(self.head()), IoSlice::new(self.body)]
    }

    fn head(&self) -> &[u8] {
        if self.with_head { &self.head } else { &[] }
    }
}

impl Generator {
    pub(crate) fn new(seed: u32, low: usize, high: usize) -> Self {
        Self { seed, low, high: high.min(MAX_MESSAGE), pool: pool(seed) }
    }

    /// Length of message `i` in bytes.
    pub(crate) fn size(&self, i: u64) -> usize {
        match i {
            0 => return self.low,
            1 => return self.high,
            _ => {}
        }
        let r = mix((u64::from(self.seed) << 32) ^ i ^ 0x5157);
        // each power of two equally likely, so that small ones come often
        let cap = (self.high - self.low).min(1 << ((r & 0xFF) % 21));
        self.low + ((r >> 8) % (cap as u64 + 1)) as usize
    }

    /// Message `i`.
    pub(crate) fn parts(&self, i: u64) -> Parts<'_> {
        let n = self.size(i);
        let off = mix((u64::from(self.seed) << 32) ^ i ^ 0xC0DE) as usize & (MAX_MESSAGE - 1);
        let with_head = n >= HEAD;
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&self.seed.to_le_bytes());
        head[4..12].copy_from_slice(&i.to_le_bytes());
        head[12..].copy_from_slice(&(n as u32).to_le_bytes());
        let body = &self.pool[off..off + if with_head { n - HEAD } else { n }];
        Parts { head, with_head, body }
    }

    /// Compares a received message, in pieces, with message `i`.
    pub(crate) fn check<'a>(
        &self,
        i: u64,
        len: usize,
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), String> {
        let size = self.size(i);
        if len != size {
            return Err(format!("message {i} has {len} bytes, not {size}"));
        }
        let parts = self.parts(i);
        let (mut want, mut next) = (parts.head(), parts.body);
        let mut at = 0;
        for mut got in pieces {
            while !got.is_empty() {
                if want.is_empty() {
                    (want, next) = (next, &[]);
                }
                let n = got.len().min(want.len());
                if n == 0 || got[..n] != want[..n] {
                    return Err(format!("message {i} of {len} bytes differs after byte {at}"));
                }
                (got, want) = (&got[n..], &want[n..]);
                at += n;
            }
        }
        if at == len {
            Ok(())
        } else {
            Err(format!("message {i}: {at} of {len} bytes were handed over"))
        }
    }

    /// The index a message of at least [`HEAD`] bytes says it has.
    pub(crate) fn index(head: &[u8; HEAD]) -> u64 {
        let [_, _, _, _, i @ .., _, _, _, _] = *head;
        u64::from_le_bytes(i)
    }
}

/// The bytes all messages of a seed are cut from.
fn pool(seed: u32) -> Arc<[u8]> {
    type Pools = Mutex<Vec<(u32, Arc<[u8]>)>>;
    static POOLS: OnceLock<Pools> = OnceLock::new();
    let mut pools = POOLS.get_or_init(Pools::default).lock().unwrap_or_else(|e| e.into_inner());
    if let Some((_, p)) = pools.iter().find(|(s, _)| *s == seed) {
        return Arc::clone(p);
    }
    let mut bytes = Vec::with_capacity(BLOCK * BLOCKS);
    for i in 0..BLOCK as u64 / 8 {
        bytes.extend_from_slice(&mix((u64::from(seed) << 20).wrapping_add(i)).to_le_bytes());
    }
    for k in 1..BLOCKS {
        // the first block under another mask
        let mask = (k * 37) as u8;
        bytes.extend_from_within(..BLOCK);
        for b in &mut bytes[k * BLOCK..] {
            *b ^= mask;
        }
    }
    let p: Arc<[u8]> = bytes.into();
    pools.push((seed, Arc::clone(&p)));
    p
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(g: &Generator, i: u64) -> Vec<u8> {
        g.parts(i).slices().iter().flat_map(|s| s.to_vec()).collect()
    }

    /// Values computed by `guest-tools/rds-verify.py`.
    #[test]
    fn agrees_with_the_python_side() {
        let g = Generator::new(7, 0, MAX_MESSAGE);
        let sizes: Vec<usize> = (0..8).map(|i| g.size(i)).collect();
        assert_eq!(sizes, SIZES);
        let sum = |i| {
            whole(&g, i).iter().fold(0u64, |a, b| a.wrapping_mul(31).wrapping_add(u64::from(*b)))
        };
        assert_eq!((2..8).map(sum).collect::<Vec<u64>>(), SUMS);
    }

    const SIZES: [usize; 8] = [0, 1048576, 21, 6613, 217, 15, 7, 1009];
    const SUMS: [u64; 6] = [
        12268973999007721260,
        8594682799478468993,
        2958336947760137182,
        7394853429269947541,
        117562922978,
        8081648579773573073,
    ];

    #[test]
    fn a_message_passes_in_any_pieces_and_a_changed_one_does_not() {
        let g = Generator::new(3, 100, 5000);
        for i in 0..20 {
            let mut m = whole(&g, i);
            for cut in [1, 15, 16, 17, 4096] {
                g.check(i, m.len(), m.chunks(cut)).unwrap();
            }
            assert!(g.check(i + 100, m.len(), [m.as_slice()].into_iter()).is_err());
            assert!(g.check(i, m.len(), [&m[1..]].into_iter()).is_err());
            *m.last_mut().unwrap() ^= 1;
            assert!(g.check(i, m.len(), [m.as_slice()].into_iter()).is_err());
        }
    }
}
