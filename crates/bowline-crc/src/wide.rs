//! CRC over wide registers, with carry-less multiplication.
//!
//! Bits are the coefficients of a polynomial, the highest power first, so a message is a single
//! number. Its CRC is the remainder of that number, times x^32, modulo [`POLY`]. To move a register
//! past the bits that follow it, it is multiplied by x^distance and added to what is there. This is
//! done row after row of registers, then from all registers of the last row to its last register,
//! then from all lanes of that register to its last lane. The remaining 128 bits are divided by
//! [`reduce`].

mod ymm;
mod zmm;

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::{
    __m128i, _mm_and_si128, _mm_clmulepi64_si128, _mm_cvtsi32_si128, _mm_extract_epi32,
    _mm_set_epi64x, _mm_srli_si128, _mm_xor_si128,
};

/// The polynomial without x^32; the highest bit is the coefficient of x^0.
const POLY: u32 = 0xedb8_8320;

/// The wide registers of this processor.
#[derive(Clone, Copy)]
pub(crate) struct Wide(Registers);

#[derive(Clone, Copy)]
enum Registers {
    /// 32 bytes, with AVX2.
    Ymm,
    /// 64 bytes, with AVX-512.
    Zmm,
}

impl Wide {
    /// Returns the wide registers of this processor. The standard library queries the processor
    /// once and caches the result.
    #[inline]
    pub(crate) fn get() -> Option<Self> {
        let multiplies =
            is_x86_feature_detected!("vpclmulqdq") && is_x86_feature_detected!("pclmulqdq");
        if multiplies && is_x86_feature_detected!("avx512f") {
            Some(Self(Registers::Zmm))
        } else if multiplies && is_x86_feature_detected!("avx2") {
            Some(Self(Registers::Ymm))
        } else {
            None
        }
    }

    /// Returns the wide registers if a sum alone is also faster with them than with `crc32fast`,
    /// which uses the smaller registers.
    #[inline]
    pub(crate) fn for_sums() -> Option<Self> {
        Self::get().filter(|wide| matches!(wide.0, Registers::Zmm))
    }

    /// Returns how many of `len` bytes can be processed.
    #[inline]
    pub(crate) const fn takes(self, len: usize) -> usize {
        match self.0 {
            Registers::Ymm => len & !(ymm::REGISTER - 1),
            Registers::Zmm => len & !3,
        }
    }

    /// Goes on with a CRC over as many bytes as it [`takes`](Self::takes), at least 64.
    pub(crate) fn update(self, crc: u32, bytes: &[u8]) -> u32 {
        // SAFETY: a slice has its bytes.
        unsafe { self.sum(crc, bytes.as_ptr(), bytes.len()) }
    }

    /// Goes on with a CRC over as many bytes as it [`takes`](Self::takes), at least 64.
    ///
    /// # Safety
    ///
    /// As for [`sum`](crate::sum).
    pub(crate) unsafe fn sum(self, crc: u32, from: *const u8, len: usize) -> u32 {
        // SAFETY: the caller's promise, and nothing is stored.
        unsafe { self.run::<false>(crc, from, std::ptr::null_mut(), len) }
    }

    /// Copies as many bytes as it [`takes`](Self::takes), at least 64, and goes on with a CRC over
    /// what is stored.
    ///
    /// # Safety
    ///
    /// As for [`copy`](crate::copy).
    pub(crate) unsafe fn copy(self, crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { self.run::<true>(crc, from, to, len) }
    }

    /// # Safety
    ///
    /// There are `len` bytes to be read at `from`, and if `COPY`, to be written at `to`.
    unsafe fn run<const COPY: bool>(
        self,
        crc: u32,
        from: *const u8,
        to: *mut u8,
        len: usize,
    ) -> u32 {
        assert!(len >= 64 && self.takes(len) == len);
        match self.0 {
            // SAFETY: the processor can do it, as `self` shows; the length is as was just checked,
            // and the rest is the caller's promise.
            Registers::Ymm => unsafe { ymm::run::<COPY>(crc, from, to, len) },
            // SAFETY: the same.
            Registers::Zmm => unsafe { zmm::run::<COPY>(crc, from, to, len) },
        }
    }
}

/// Divides the remaining 128 bits, times x^32, by the polynomial, and returns the CRC: 128 bits
/// become 96, then 64, and these are divided by multiplication with the reciprocal (Barrett).
#[inline]
#[target_feature(enable = "pclmulqdq,sse4.1")]
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

/// Returns the factors that move 128 bits past `distance` bits: for the first 64 bits and for the
/// others.
const fn factors(distance: u32) -> [i64; 2] {
    [power(distance + 32), power(distance - 32)]
}

/// The polynomial including x^32, in the order in which the products need it.
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

/// Returns x^n modulo the polynomial, shifted left by one bit, because the product of two
/// bit-reversed numbers comes out shifted right by one.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests also registers that this processor would not choose.
    #[test]
    fn registers_of_both_sizes_sum_and_copy() {
        let bytes: Vec<u8> = (0..5000_u32).map(|i| ((i * i) >> 7) as u8).collect();
        let multiplies =
            is_x86_feature_detected!("vpclmulqdq") && is_x86_feature_detected!("pclmulqdq");
        for (registers, there, name) in [
            (Registers::Ymm, is_x86_feature_detected!("avx2"), "AVX2 with VPCLMULQDQ"),
            (Registers::Zmm, is_x86_feature_detected!("avx512f"), "AVX-512 with VPCLMULQDQ"),
        ] {
            if !(there && multiplies) {
                bowline_testkit::skipped::because(format!(
                    "registers of this size, for want of {name}"
                ));
                continue;
            }
            let wide = Wide(registers);
            let lens = (64..=4900).filter(|len| wide.takes(*len) == *len);
            for (at, len) in lens.enumerate().map(|(k, len)| (k % 37, len)) {
                let (bytes, crc) = (&bytes[at..at + len], !(at as u32));
                let mut hasher = crc32fast::Hasher::new_with_initial(crc);
                hasher.update(bytes);
                let expected = hasher.finalize();
                assert_eq!(wide.update(crc, bytes), expected, "{name}, {len} bytes");
                let mut to = vec![0xa5; len + 64];
                // SAFETY: both have so many bytes.
                let copied = unsafe { wide.copy(crc, bytes.as_ptr(), to.as_mut_ptr(), len) };
                assert_eq!(copied, expected, "{name}, {len} bytes");
                assert!(to[..len] == *bytes && to[len..].iter().all(|byte| *byte == 0xa5));
            }
        }
    }
}
