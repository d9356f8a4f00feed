//! Reliable Datagram Sockets in user space, over the wire protocol of Linux's `rds_tcp`.
//!
//! Everything is in [`rds`]:
//!
//! ```
//! use bowline::rds::Node;
//! # use std::time::Duration;
//!
//! # fn main() -> Result<(), bowline::rds::Error> {
//! let left = Node::builder().address([127, 77, 0, 1].into()).build()?;
//! let right = Node::builder().address([127, 77, 0, 2].into()).build()?;
//! let a = left.bind(([127, 77, 0, 1], 4000).into())?;
//! let b = right.bind(([127, 77, 0, 2], 4000).into())?;
//!
//! a.send_to(b"hello", ([127, 77, 0, 2], 4000).into())?;
//! let mut buf = [0; 16];
//! let (len, from) = b.recv_from(&mut buf)?;
//! assert_eq!((&buf[..len], from), (&b"hello"[..], ([127, 77, 0, 1], 4000).into()));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod rds;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub mod readme {}
