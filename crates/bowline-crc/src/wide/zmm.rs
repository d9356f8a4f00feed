//! 64 bytes at once, with AVX-512.
//!
//! Zeros before a message whose sum so far is nothing do not count, so it is taken as one of whole
//! rows:
//!
//! ```text
//!            register 0    register 1    register 2    register 3
//!   row 0   0000 0000 00  0000 0000 00  000S MMMM MM  MMMM MMMM MM     S: the CRC so far, added to
//!   row 1   MMMM MMMM MM  ..                                              the first four bytes
//! ```

use std::arch::x86_64::{
    __m128i, __m512i, _mm_set_epi64x, _mm_xor_si128, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_xor_si256, _mm512_broadcast_i32x4, _mm512_castsi512_si256,
    _mm512_clmulepi64_epi128, _mm512_extracti64x4_epi64, _mm512_loadu_si512,
    _mm512_mask_blend_epi64, _mm512_maskz_expand_epi32, _mm512_maskz_set1_epi32, _mm512_set_epi64,
    _mm512_setzero_si512, _mm512_storeu_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
};

use super::{factors, reduce};

/// Bytes of a register.
const REGISTER: usize = 64;
/// Exclusive or of three.
const XOR: i32 = 0x96;

/// # Safety
///
/// `len` is a multiple of four and at least 64. So many bytes can be read at `from`, and if `COPY`,
/// written at `to`.
#[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq")]
pub(super) unsafe fn run<const COPY: bool>(
    crc: u32,
    from: *const u8,
    to: *mut u8,
    len: usize,
) -> u32 {
    let words = len / 4;
    let registers = words.div_ceil(16);
    // Of the first register that is not all zeros; and how many of the first row are not.
    let first_words = (words - 1) % 16 + 1;
    let first_row = (registers - 1) % 4 + 1;

    let mut bytes = Bytes::<COPY> { from, to };
    let mut row = [_mm512_setzero_si512(); 4];
    // It reads a whole register: there is one. What is stored too much is stored again by the next,
    // with what that one reads.
    // SAFETY: `len` is at least 64.
    let head = unsafe { bytes.next(4 * first_words) };
    let head = _mm512_maskz_expand_epi32(u16::MAX << (16 - first_words), head);
    let so_far = _mm512_maskz_set1_epi32(1 << (16 - first_words), !crc as i32);
    row[3] = _mm512_xor_si512(head, so_far);
    for _ in 1..first_row {
        // SAFETY: after the first register, whole ones are left.
        row = [row[1], row[2], row[3], unsafe { bytes.next(REGISTER) }];
    }
    let past_row = past::<{ 4 * 512 }>();
    for _ in 0..(registers - first_row) / 4 {
        for register in &mut row {
            // SAFETY: after the first row, whole ones are left.
            *register = fold(*register, unsafe { bytes.next(REGISTER) }, past_row);
        }
    }

    let past_two = past::<{ 2 * 512 }>();
    let (a, b) = (fold(row[0], row[2], past_two), fold(row[1], row[3], past_two));
    reduce(last_quarter(fold(a, b, past::<512>())))
}

/// What is left to be summed, and where it is to be stored.
struct Bytes<const COPY: bool> {
    from: *const u8,
    to: *mut u8,
}

impl<const COPY: bool> Bytes<COPY> {
    /// Takes the next 64 bytes and goes on by `step`.
    ///
    /// They are loaded once, and stored as they were: the store may overwrite what was loaded from,
    /// so the compiler cannot load again behind it instead of keeping them. That it does not load
    /// twice before it shows in the code made, and in the test of a copy that others write to
    /// meanwhile.
    ///
    /// # Safety
    ///
    /// There are 64 bytes left, and `step` is not more.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn next(&mut self, step: usize) -> __m512i {
        // SAFETY: the caller's promise.
        let bytes = unsafe { _mm512_loadu_si512(self.from.cast()) };
        // SAFETY: as above.
        self.from = unsafe { self.from.add(step) };
        if COPY {
            // SAFETY: as above; there is as much room.
            unsafe { _mm512_storeu_si512(self.to.cast(), bytes) };
            // SAFETY: as above.
            self.to = unsafe { self.to.add(step) };
        }
        bytes
    }
}

/// Adds `a`, taken past the distance of the factors `past`, to `b`: each quarter to that quarter.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(a: __m512i, b: __m512i, past: __m512i) -> __m512i {
    let low = _mm512_clmulepi64_epi128::<0x00>(a, past);
    let high = _mm512_clmulepi64_epi128::<0x11>(a, past);
    _mm512_ternarylogic_epi64::<XOR>(low, high, b)
}

/// Takes each quarter past those behind it, and adds them up.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn last_quarter(a: __m512i) -> __m128i {
    const PAST: [[i64; 2]; 3] = [factors(384), factors(256), factors(128)];
    let [[k0, k1], [k2, k3], [k4, k5]] = PAST;
    let past = _mm512_set_epi64(0, 0, k5, k4, k3, k2, k1, k0);
    let last = _mm512_mask_blend_epi64(0b1100_0000, _mm512_setzero_si512(), a);
    let taken = fold(a, last, past);
    let halves =
        _mm256_xor_si256(_mm512_castsi512_si256(taken), _mm512_extracti64x4_epi64::<1>(taken));
    _mm_xor_si128(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
}

/// The factors that take each quarter past `BITS`.
#[inline]
#[target_feature(enable = "avx512f")]
fn past<const BITS: u32>() -> __m512i {
    let [first, second] = const { factors(BITS) };
    _mm512_broadcast_i32x4(_mm_set_epi64x(second, first))
}
