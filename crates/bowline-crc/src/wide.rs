//! 64 bytes at once, with AVX-512 and carry-less multiplication.
//!
//! Bits are the coefficients of a polynomial, that of the highest power first, so a message is one
//! number; its CRC is what remains of it, times x^32, modulo [`POLY`]. Zeros before a message whose
//! sum so far is nothing do not count, so it is taken as one of whole rows:
//!
//! ```text
//!            register 0    register 1    register 2    register 3
//!   row 0   0000 0000 00  0000 0000 00  000S MMMM MM  MMMM MMMM MM     S: the CRC so far, added to
//!   row 1   MMMM MMMM MM  ..                                              the first four bytes
//! ```
//!
//! [`fold`] takes a register past what follows it: multiplied by x^distance, it is added to what is
//! there already. That is done row after row, then from all registers to the last one, then from all
//! quarters of this to its last one. What is left are 128 bits, which [`reduce`] divides.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::{
    __m128i, __m512i, _mm_and_si128, _mm_clmulepi64_si128, _mm_cvtsi32_si128, _mm_extract_epi32,
    _mm_set_epi64x, _mm_srli_si128, _mm_xor_si128, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_xor_si256, _mm512_broadcast_i32x4, _mm512_castsi512_si256,
    _mm512_clmulepi64_epi128, _mm512_extracti64x4_epi64, _mm512_loadu_si512,
    _mm512_mask_blend_epi64, _mm512_maskz_expand_epi32, _mm512_maskz_set1_epi32, _mm512_set_epi64,
    _mm512_setzero_si512, _mm512_storeu_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
};

/// x^32 and the lower powers, the highest bit being that of x^0.
const POLY: u32 = 0xedb8_8320;
/// Bytes of a register.
const REGISTER: usize = 64;
/// Exclusive or of three.
const XOR: i32 = 0x96;

/// The processor can do it.
#[derive(Clone, Copy)]
pub(crate) struct Wide(());

impl Wide {
    /// The standard library asks the processor once and remembers.
    #[inline]
    pub(crate) fn get() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq");
        all.then_some(Self(()))
    }

    /// Goes on with a CRC over a multiple of four bytes, at least 64.
    pub(crate) fn update(self, crc: u32, bytes: &[u8]) -> u32 {
        assert!(bytes.len() >= REGISTER && bytes.len().is_multiple_of(4));
        let from = bytes.as_ptr();
        // SAFETY: the processor can do it, as `self` shows; a slice has its bytes, and nothing is stored.
        unsafe { run::<false>(crc, from, std::ptr::null_mut(), bytes.len()) }
    }

    /// Copies a multiple of four bytes, at least 64, and goes on with a CRC over what is stored.
    ///
    /// # Safety
    ///
    /// As for [`copy`](crate::copy).
    pub(crate) unsafe fn copy(self, crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
        assert!(len >= REGISTER && len.is_multiple_of(4));
        // SAFETY: the processor can do it, as `self` shows; the rest is the caller's promise.
        unsafe { run::<true>(crc, from, to, len) }
    }
}

/// # Safety
///
/// `len` is a multiple of four and at least 64. So many bytes can be read at `from`, and if `COPY`,
/// written at `to`.
#[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq")]
unsafe fn run<const COPY: bool>(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
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
    /// They are loaded once, and stored as they were: the store may overwrite what was loaded from, so
    /// the compiler cannot load again behind it instead of keeping them. That it does not load twice before it
    /// shows in the code made, and in the test of a copy that others write to meanwhile.
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

/// Divides what is left, times x^32, by the polynomial, and makes a CRC of the remainder: 128 bits
/// become 96, then 64, and these are divided by multiplying with the reciprocal (Barrett).
#[inline]
#[target_feature(enable = "avx512f,pclmulqdq")]
fn reduce(a: __m128i) -> u32 {
    const K96: i64 = power(96);
    const K64: i64 = power(64);
    let low = _mm_cvtsi32_si128(-1);
    let a = _mm_xor_si128(
        _mm_clmulepi64_si128::<0x00>(a, _mm_set_epi64x(0, K96)),
        _mm_srli_si128::<8>(a),
    );
    let a = _mm_xor_si128(
        _mm_clmulepi64_si128::<0x00>(_mm_and_si128(a, low), _mm_set_epi64x(0, K64)),
        _mm_srli_si128::<4>(a),
    );
    let divisor = _mm_set_epi64x(DIVISOR, RECIPROCAL);
    let quotient = _mm_clmulepi64_si128::<0x00>(_mm_and_si128(a, low), divisor);
    let product = _mm_clmulepi64_si128::<0x10>(_mm_and_si128(quotient, low), divisor);
    !(_mm_extract_epi32::<1>(_mm_xor_si128(a, product)) as u32)
}

/// The factors that take each quarter past `BITS`.
#[inline]
#[target_feature(enable = "avx512f")]
fn past<const BITS: u32>() -> __m512i {
    let [first, second] = const { factors(BITS) };
    _mm512_broadcast_i32x4(_mm_set_epi64x(second, first))
}

/// Those that take 128 bits past `distance` bits: for the first 64 and for the others.
const fn factors(distance: u32) -> [i64; 2] {
    [power(distance + 32), power(distance - 32)]
}

/// The polynomial with x^32, which is the highest bit but for one more.
const DIVISOR: i64 = (POLY as i64) << 1 | 1;

/// x^64 divided by the polynomial.
const RECIPROCAL: i64 = {
    let (mut quotient, mut rest, mut bit) = (1, POLY, 1);
    while bit <= 32 {
        quotient |= ((rest & 1) as i64) << bit;
        rest = times_x(rest);
        bit += 1;
    }
    quotient
};

/// x^n modulo the polynomial; one bit further left, which makes up for the product of two reversed
/// numbers being one bit further right.
const fn power(n: u32) -> i64 {
    let (mut remainder, mut done) = (1 << 31, 0);
    while done < n {
        remainder = times_x(remainder);
        done += 1;
    }
    (remainder as i64) << 1
}

const fn times_x(a: u32) -> u32 {
    (a >> 1) ^ (POLY & (a & 1).wrapping_neg())
}
