//! The CRC-32 of zlib and of RoCE, over bytes alone or over bytes on their way to somewhere else.
//!
//! Where the processor has AVX-512 with carry-less multiplication, 64 bytes are taken at once, and
//! the copy comes with the sum: each byte is loaded once for both. With AVX2 instead of AVX-512, a
//! copy takes 32 bytes at once, and a sum alone is the crate `crc32fast`, which is as fast then.
//! Elsewhere, and for what is short, it is that, after an ordinary copy; or tables under an
//! emulator, whose carry-less products are slow.
//!
//! One core of a virtual machine, best of hundreds, nanoseconds, on an AMD EPYC with AVX-512 (Zen
//! 5, 512 KiB in turn) and on one that shows AVX2 only (Zen 4, 4 MiB in turn):
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

/// Bytes from which on 64 are taken at once, or 32. Between 64 and this, one sum by itself is done
/// a little earlier that way, but many in a row take 2 ns more each.
const WIDE_FROM: usize = 96;

/// Goes on with a CRC: over what it was computed for and then `bytes`. That of nothing is 0.
pub fn update(crc: u32, bytes: &[u8]) -> u32 {
    let is_for_it = |_: &Wide| bytes.len() >= WIDE_FROM && way() == Way::Wide;
    let Some(wide) = Wide::for_sums().filter(is_for_it) else {
        return portable(crc, bytes);
    };
    let (whole, rest) = bytes.split_at(wide.takes(bytes.len()));
    portable(wide.update(crc, whole), rest)
}

/// How sums are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// 64 bytes at once, and what is short by `crc32fast`.
    Wide,
    /// By `crc32fast`; in copies 32 bytes at once, if the processor can.
    Crc32Fast,
    /// By tables, under an emulator.
    Tables,
}

/// Tells how sums are made on this processor, which is asked at first use.
pub fn way() -> Way {
    static WAY: OnceLock<Way> = OnceLock::new();
    *WAY.get_or_init(|| {
        if emulated::is_emulated() {
            Way::Tables
        } else if Wide::for_sums().is_some() {
            Way::Wide
        } else {
            Way::Crc32Fast
        }
    })
}

/// Copies `len` bytes, and goes on with a CRC over them: [`update`] over what is stored. Others may
/// change what is at `from` at the same time; whatever comes of that, stored are the bytes that
/// were summed.
///
/// # Safety
///
/// There are `len` bytes to be read at `from`, and as many to be written at `to`. These do not
/// overlap, and nobody else reads or writes those at `to` meanwhile.
pub unsafe fn copy(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    let (mut crc, mut done) = (crc, 0);
    if let Some(wide) = Wide::get().filter(|_| len >= WIDE_FROM && way() != Way::Tables) {
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

/// Goes on with a CRC over `len` bytes which others may change at the same time: [`update`] over
/// what was loaded of them, whatever comes of that.
///
/// # Safety
///
/// There are `len` bytes to be read at `from`.
pub unsafe fn sum(crc: u32, from: *const u8, len: usize) -> u32 {
    let (mut crc, mut done) = (crc, 0);
    if let Some(wide) = Wide::get().filter(|_| len >= WIDE_FROM && way() != Way::Tables) {
        done = wide.takes(len);
        // SAFETY: no more bytes than the caller has.
        crc = unsafe { wide.sum(crc, from, done) };
    }
    // The rest is summed where nobody else writes.
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
    match way() {
        Way::Tables => tables::update(crc, bytes),
        Way::Wide | Way::Crc32Fast => by_crc32fast(crc, bytes),
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
