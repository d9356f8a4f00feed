//! `libibverbs.so.1`: what the library of this package has, by the names and versions of
//! `symbols.map`.
#![no_main]

extern crate bowline_ibverbs as _;
