//! Compares CRCs with `crc32fast` for every length, and copies with their source.

use bowline_crc::{copy, sum, update};
use proptest::prelude::*;

use bowline_testkit::skipped;

fn reference(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}

/// Pseudorandom bytes.
fn noise(len: usize) -> Vec<u8> {
    let next = |state: &mut u64| {
        *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        Some((*state >> 56) as u8)
    };
    std::iter::repeat_n((), len).scan(7, |state, ()| next(state)).collect()
}

/// Copies into the middle of other bytes, and checks that these stay.
fn check_copy(crc: u32, from: &[u8], align: usize) {
    const AROUND: usize = 128;
    let mut to = vec![0xa5; AROUND + align + from.len() + AROUND];
    let start = AROUND + align;
    let at = to[start..].as_mut_ptr();
    // SAFETY: `from` has its bytes, and `to` has room for as many from `at` on.
    let sum = unsafe { copy(crc, from.as_ptr(), at, from.len()) };
    assert_eq!(sum, reference(crc, from), "{} bytes", from.len());
    let (before, rest) = to.split_at(start);
    let (copied, behind) = rest.split_at(from.len());
    assert!(copied == from, "{} bytes", from.len());
    assert!(before.iter().chain(behind).all(|byte| *byte == 0xa5), "{} bytes", from.len());
}

#[test]
fn every_length_has_the_sum_and_is_copied() {
    if bowline_crc::algorithm() != bowline_crc::Algorithm::Wide {
        skipped::because(
            "sums of 64 bytes at once, for want of AVX-512 with VPCLMULQDQ; the rest is tested",
        );
    }
    let bytes = noise(5000 + 64);
    let mut crc = 0;
    for len in 0..=5000 {
        let at = [0, 1, 4, 12, 31, 60, 63][len % 7];
        crc = reference(crc, &bytes[..9]);
        for at in [0, at] {
            let bytes = &bytes[at..][..len];
            for crc in [0, !0, crc] {
                assert_eq!(update(crc, bytes), reference(crc, bytes), "{len} bytes");
                // SAFETY: a slice has its bytes.
                let in_place = unsafe { sum(crc, bytes.as_ptr(), len) };
                assert_eq!(in_place, reference(crc, bytes), "{len} bytes");
            }
            check_copy(crc, bytes, 63 - at);
        }
    }
}

#[test]
fn every_bit_counts() {
    let mut bytes = vec![0; 1100];
    let zero = update(0, &bytes);
    for bit in 0..8 * bytes.len() {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(update(0, &bytes), zero);
        assert_eq!(update(0, &bytes), reference(0, &bytes));
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Another thread writes to the source during the copy.
#[test]
fn what_is_stored_is_what_was_summed() {
    use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
    let shared: Vec<AtomicU8> = (0..4099).map(|_| AtomicU8::new(0)).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0_u8;
            while !done.load(Ordering::Relaxed) {
                value = value.wrapping_add(1);
                for byte in &shared {
                    byte.store(value, Ordering::Relaxed);
                }
            }
        });
        let mut to = vec![0; shared.len()];
        let mut torn = 0;
        for _ in 0..20_000 {
            // SAFETY: both are as long as said, and `to` is nobody else's.
            let sum = unsafe { copy(1, shared.as_ptr().cast(), to.as_mut_ptr(), to.len()) };
            assert_eq!(sum, reference(1, &to));
            torn += usize::from(to.iter().any(|byte| *byte != to[0]));
        }
        done.store(true, Ordering::Relaxed);
        eprintln!("{torn} copies of 20000 were of two states");
    });
}

proptest! {
    #[test]
    fn a_sum_goes_on_where_it_was_left(
        crc in any::<u32>(),
        bytes in proptest::collection::vec(any::<u8>(), 0..9000),
        cut in any::<prop::sample::Index>(),
        align in 0_usize..64,
    ) {
        let whole = reference(crc, &bytes);
        let (a, b) = bytes.split_at(cut.index(bytes.len() + 1));
        prop_assert_eq!(update(update(crc, a), b), whole);
        check_copy(crc, &bytes, align);
    }
}
