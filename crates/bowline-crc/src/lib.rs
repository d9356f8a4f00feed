//! The CRC-32 of zlib and of RoCE, over bytes in place or while they are copied.
//!
//! If the processor has AVX-512 with carry-less multiplication, 64 bytes are processed at once, and
//! a copy includes the sum: each byte is loaded once for both. With AVX2 instead of AVX-512, a copy
//! processes 32 bytes at once, and a sum alone is computed by the crate `crc32fast`, which is as
//! fast in that case. On other processors, and for short inputs, `crc32fast` computes the sum,
//! after an ordinary copy. Under an emulator, whose carry-less products are slow, tables are used.
//!
//! Nanoseconds, best of hundreds of runs, on one core of a virtual machine: an AMD EPYC with
//! AVX-512 (Zen 5, 512 KiB in turn), and one that shows AVX2 only (Zen 4, 4 MiB in turn):
//!
//! | bytes | `crc32fast` | [`update`] | copy | copy, then `crc32fast` | [`copy`] | AVX2: `crc32fast` | copy | both | [`copy`] |
//! |---|---|---|---|---|---|---|---|---|---|
//! | 128 | 20 | 18 | 3 | 22 | 19 | 18 | 4 | 21 | 15 |
//! | 256 | 29 | 21 | 4 | 33 | 21 | 21 | 5 | 25 | 20 |
//! | 1024 | 44 | 27 | 12 | 53 | 27 | 55 | 16 | 64 | 54 |
//! | 4096 | 81 | 73 | 38 | 116 | 72 | 189 | 72 | 251 | 188 |
//!
//! `crc-fast` 1.10 took 57 ns for 44 bytes, where `crc32fast` took 11.
//!
//! ```
//! let whole = bowline_crc::update(0, b"123456789");
//! assert_eq!(whole, 0xcbf4_3926);
//! assert_eq!(bowline_crc::update(bowline_crc::update(0, b"1234"), b"56789"), whole);
//! ```

#[cfg(target_arch = "x86_64")]
mod emulated;
mod tables;
#[cfg(target_arch = "x86_64")]
mod wide;
#[cfg(not(target_arch = "x86_64"))]
#[path = "narrow.rs"]
mod wide;
#[cfg(not(target_arch = "x86_64"))]
use wide as emulated;

use std::sync::OnceLock;

use wide::Wide;

/// Shortest input, in bytes, for the wide registers. Between 64 bytes and this, a single sum is a
/// little faster with them, but each sum of a long sequence takes 2 ns more.
const WIDE_FROM: usize = 96;

/// Continues a CRC: returns the CRC over the bytes it was computed for, followed by `bytes`. The
/// CRC of no bytes is 0.
pub fn update(crc: u32, bytes: &[u8]) -> u32 {
    let fits = |_: &Wide| bytes.len() >= WIDE_FROM && algorithm() == Algorithm::Wide;
    let Some(wide) = Wide::for_sums().filter(fits) else {
        return portable(crc, bytes);
    };
    let (whole, rest) = bytes.split_at(wide.takes(bytes.len()));
    portable(wide.update(crc, whole), rest)
}

/// Algorithm of the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// 64 bytes at once; short inputs by `crc32fast`.
    Wide,
    /// `crc32fast`; copies process 32 bytes at once, if the processor can.
    Crc32Fast,
    /// Tables, under an emulator.
    Tables,
}

/// Returns the algorithm for this processor, which is detected at the first call.
pub fn algorithm() -> Algorithm {
    static ALGORITHM: OnceLock<Algorithm> = OnceLock::new();
    *ALGORITHM.get_or_init(|| {
        if emulated::is_emulated() {
            Algorithm::Tables
        } else if Wide::for_sums().is_some() {
            Algorithm::Wide
        } else {
            Algorithm::Crc32Fast
        }
    })
}

/// Copies `len` bytes, and continues a CRC over the bytes that were stored, like [`update`]. Other
/// threads may change the bytes at `from` at the same time; the CRC always matches the stored
/// bytes.
///
/// # Safety
///
/// `len` bytes are readable at `from`, and `len` bytes are writable at `to`. The two do not
/// overlap, and nobody else reads or writes the bytes at `to` during the call.
pub unsafe fn copy(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    let (mut crc, mut done) = (crc, 0);
    if let Some(wide) = Wide::get().filter(|_| len >= WIDE_FROM && algorithm() != Algorithm::Tables)
    {
        done = wide.takes(len);
        // SAFETY: no more bytes than the caller has, from and to where it says.
        crc = unsafe { wide.copy(crc, from, to, done) };
    }
    if done == len {
        return crc;
    }
    let rest = len - done;
    // SAFETY: `done` is less than `len`.
    let from = unsafe { from.add(done) };
    // SAFETY: as before.
    let to = unsafe { to.add(done) };
    // SAFETY: `rest` bytes are left of those the caller has, and they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from, to, rest) };
    // SAFETY: these have just been written, and nobody else writes them.
    let stored = unsafe { std::slice::from_raw_parts(to, rest) };
    portable(crc, stored)
}

/// Continues a CRC over `len` bytes that other threads may change at the same time: like [`update`]
/// over the bytes that were loaded.
///
/// # Safety
///
/// `len` bytes are readable at `from`.
pub unsafe fn sum(crc: u32, from: *const u8, len: usize) -> u32 {
    let (mut crc, mut done) = (crc, 0);
    if let Some(wide) = Wide::get().filter(|_| len >= WIDE_FROM && algorithm() != Algorithm::Tables)
    {
        done = wide.takes(len);
        // SAFETY: no more bytes than the caller has.
        crc = unsafe { wide.sum(crc, from, done) };
    }
    // The rest is copied to private memory before it is summed.
    let mut own = [0; 512];
    while done < len {
        let now = own.len().min(len - done);
        // SAFETY: `done` is less than `len`.
        let from = unsafe { from.add(done) };
        // SAFETY: `now` bytes are left of those the caller has, and `own` has room for them.
        unsafe { std::ptr::copy_nonoverlapping(from, own.as_mut_ptr(), now) };
        crc = portable(crc, &own[..now]);
        done += now;
    }
    crc
}

fn portable(crc: u32, bytes: &[u8]) -> u32 {
    if bytes.is_empty() {
        return crc;
    }
    match algorithm() {
        Algorithm::Tables => tables::update(crc, bytes),
        Algorithm::Wide | Algorithm::Crc32Fast => by_crc32fast(crc, bytes),
    }
}

fn by_crc32fast(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
