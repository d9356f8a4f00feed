//! Every byte bowline puts on a wire or takes from one.
//!
//! No state, no I/O, no allocation: checked views over bytes and builders of bytes. Numbered rules
//! (`[R-101]`) are those of `docs/spec/rds.md`.
#![forbid(unsafe_code)]
#![no_std]

#[cfg(test)]
extern crate std;

pub mod rds;
