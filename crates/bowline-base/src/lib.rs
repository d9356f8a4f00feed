//! What all crates of bowline share, each once: error numbers, time, counters, slabs, randomness.
//!
//! Without the feature `system` nothing here asks the operating system for anything, so that cores
//! can use it; with it there are the clock and random bytes for the drivers. `std` converts error
//! numbers from and into [`std::io::Error`](https://doc.rust-lang.org/std/io/struct.Error.html).
#![cfg_attr(not(feature = "std"), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(feature = "system")]
pub mod clock;
pub mod count;
#[cfg(feature = "system")]
pub mod entropy;
mod errno;
mod rate;
mod rng;
pub mod slab;
mod time;

pub use errno::Errno;
pub use rate::RateLimit;
pub use rng::{SplitMix64, mix};
pub use time::Instant;
