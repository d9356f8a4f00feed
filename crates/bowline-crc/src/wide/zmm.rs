//! CRC over 64-byte registers, with AVX-512.
//!
//! Leading zeros do not change a remainder of zero, so the message is extended at its front to
//! whole rows:
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
/// Truth table of the exclusive or of three operands.
const XOR: i32 = 0x96;

/// # Safety
///
/// `len` is a multiple of four and at least 64. `len` bytes are readable at `from` and, if `COPY`,
/// writable at `to`.
#[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq")]
pub(super) unsafe fn run<const COPY: bool>(
    crc: u32,
    from: *const u8,
    to: *mut u8,
    len: usize,
) -> u32 {
    let words = len / 4;
    let registers = words.div_ceil(16);
    // Words of the first register that has message bytes, and the number of registers in the first
    // row that have any.
    let first_words = (words - 1) % 16 + 1;
    let first_row = (registers - 1) % 4 + 1;

    let mut bytes = Bytes::<COPY> { from, to };
    let mut row = [_mm512_setzero_si512(); 4];
    // A whole register is loaded and stored, although only a part counts. The surplus is stored
    // again by the next step, with the bytes that it loads.
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

/// The remaining bytes to sum, and the destination of the copy.
struct Bytes<const COPY: bool> {
    from: *const u8,
    to: *mut u8,
}

impl<const COPY: bool> Bytes<COPY> {
    /// Loads the next 64 bytes and advances by `step` bytes.
    ///
    /// The bytes are loaded once and stored unchanged. The store may overwrite the source, so the
    /// compiler cannot load again after it instead of keeping the register. That it does not load
    /// twice before the store is visible in the generated code, and tested by a copy that other
    /// threads write to.
    ///
    /// # Safety
    ///
    /// At least 64 bytes are left, and `step` is at most 64.
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

/// Moves `a` by the distance of the factors `past` and adds it to `b`, lane by lane.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(a: __m512i, b: __m512i, past: __m512i) -> __m512i {
    let low = _mm512_clmulepi64_epi128::<0x00>(a, past);
    let high = _mm512_clmulepi64_epi128::<0x11>(a, past);
    _mm512_ternarylogic_epi64::<XOR>(low, high, b)
}

/// Moves each 128-bit lane past the lanes behind it, and adds all of them up.
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

/// Returns the factors that move each 128-bit lane past `BITS` bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn past<const BITS: u32>() -> __m512i {
    let [first, second] = const { factors(BITS) };
    _mm512_broadcast_i32x4(_mm_set_epi64x(second, first))
}
