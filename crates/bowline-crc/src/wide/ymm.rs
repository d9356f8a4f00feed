//! CRC over 32-byte registers, with AVX2.
//!
//! Rows of four registers; the first row may lack some at its front:
//!
//! ```text
//!            register 0   register 1   register 2   register 3
//!   row 0   0000         0000         SMMM         MMMM            S: the CRC so far, added to
//!   row 1   MMMM         ..                                           the first four bytes
//! ```

use std::arch::x86_64::{
    __m256i, _mm_set_epi64x, _mm_xor_si128, _mm256_broadcastsi128_si256, _mm256_castsi256_si128,
    _mm256_clmulepi64_epi128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_set_epi32,
    _mm256_set_epi64x, _mm256_setzero_si256, _mm256_storeu_si256, _mm256_xor_si256,
};

use super::{factors, reduce};

/// Bytes of a register.
pub(super) const REGISTER: usize = 32;

/// # Safety
///
/// `len` is a multiple of 32, not 0. `len` bytes are readable at `from` and, if `COPY`, writable at
/// `to`.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.1")]
pub(super) unsafe fn run<const COPY: bool>(
    crc: u32,
    from: *const u8,
    to: *mut u8,
    len: usize,
) -> u32 {
    let registers = len / REGISTER;
    let first_row = (registers - 1) % 4 + 1;

    let mut bytes = Bytes::<COPY> { from, to };
    let mut row = [_mm256_setzero_si256(); 4];
    let so_far = _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, !crc as i32);
    // SAFETY: there is one at least.
    row[3] = _mm256_xor_si256(unsafe { bytes.next() }, so_far);
    for _ in 1..first_row {
        // SAFETY: so many are in the first row.
        row = [row[1], row[2], row[3], unsafe { bytes.next() }];
    }
    let past_row = past::<{ 4 * 256 }>();
    for _ in 0..(registers - first_row) / 4 {
        for register in &mut row {
            // SAFETY: after the first row, whole ones are left.
            *register = fold(*register, unsafe { bytes.next() }, past_row);
        }
    }

    let past_two = past::<{ 2 * 256 }>();
    let (a, b) = (fold(row[0], row[2], past_two), fold(row[1], row[3], past_two));
    let last = fold(a, b, past::<256>());
    let [first, second] = const { factors(128) };
    let taken = fold(last, _mm256_setzero_si256(), _mm256_set_epi64x(0, 0, second, first));
    reduce(_mm_xor_si128(_mm256_castsi256_si128(taken), _mm256_extracti128_si256::<1>(last)))
}

/// The remaining bytes to sum, and the destination of the copy.
struct Bytes<const COPY: bool> {
    from: *const u8,
    to: *mut u8,
}

impl<const COPY: bool> Bytes<COPY> {
    /// Loads the next register, once, and stores it unchanged, as in `zmm`.
    ///
    /// # Safety
    ///
    /// At least one register is left.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn next(&mut self) -> __m256i {
        // SAFETY: the caller's promise.
        let bytes = unsafe { _mm256_loadu_si256(self.from.cast()) };
        // SAFETY: as above.
        self.from = unsafe { self.from.add(REGISTER) };
        if COPY {
            // SAFETY: as above; there is as much room.
            unsafe { _mm256_storeu_si256(self.to.cast(), bytes) };
            // SAFETY: as above.
            self.to = unsafe { self.to.add(REGISTER) };
        }
        bytes
    }
}

/// Moves `a` by the distance of the factors `past` and adds it to `b`, lane by lane.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn fold(a: __m256i, b: __m256i, past: __m256i) -> __m256i {
    let low = _mm256_clmulepi64_epi128::<0x00>(a, past);
    let high = _mm256_clmulepi64_epi128::<0x11>(a, past);
    _mm256_xor_si256(_mm256_xor_si256(low, b), high)
}

/// Returns the factors that move each 128-bit lane past `BITS` bits.
#[inline]
#[target_feature(enable = "avx2")]
fn past<const BITS: u32>() -> __m256i {
    let [first, second] = const { factors(BITS) };
    _mm256_broadcastsi128_si256(_mm_set_epi64x(second, first))
}
