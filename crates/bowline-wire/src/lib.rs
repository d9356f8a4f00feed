//! Every byte bowline puts on a wire or takes from one.
//!
//! No I/O and no state of a protocol: checked views over bytes, builders of bytes, and one-line
//! `Display` forms for logs. Nothing is allocated but in the vectors a caller has written to.
//! Nothing here can panic, whatever the bytes. Numbered rules are those of `docs/spec/rds.md`
//! (`[R-101]`), `docs/spec/rds-rdma.md` (`[IB-14]`), `docs/spec/roce.md` (`[HDR-1]`),
//! `docs/spec/rtrs.md` (`[RT-1]`, `[RS-1]`) and `docs/spec/rnbd.md` (`[NB-1]`).
//!
//! ```
//! use bowline_wire::rds::{HEADER_LEN, Handshake, Header, PROBE_PORT};
//!
//! let handshake = Handshake { npaths: Some(8), ..Handshake::default() };
//! let ping =
//!     Header { sequence: 1, sport: PROBE_PORT, ext: handshake.emit(), ..Header::default() };
//! let bytes: [u8; HEADER_LEN] = ping.to_bytes();
//!
//! let read = Header::parse(&bytes)?;
//! assert_eq!(read, ping);
//! assert_eq!(Handshake::parse(&read.ext).npaths, Some(8));
//! assert_eq!(read.to_string(), "seq 1 1->0 len 0 flags 0 probe-ping ext npaths 8");
//! # Ok::<(), bowline_wire::rds::DecodeError>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

extern crate alloc;

pub mod rds;
pub mod rnbd;
pub mod roce;
pub mod rtrs;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
