//! Reliable datagrams (RDS) and block devices over RDMA (RTRS, RNBD) in user space, over the wire
//! protocols of Linux's `rds_tcp`, `rdma_rxe`, `rtrs` and `rnbd`.
//!
//! | module | feature | what |
//! | --- | --- | --- |
//! | [`rds`] | always | nodes, sockets and messages |
//! | `verbs` | `rtrs` | RDMA devices: one in this process over UDP; with `rdma-core` those of the machine |
//! | `rtrs` | `rtrs`, by default | sessions of several paths between a client and a server |
//! | `ctl` | `rtrs`, by default | trees as under /sys, that show and change sessions and disks |
//! | `rnbd`, `block` | `rnbd`, by default | exports and disks; what they are stored in, NBD and ublk in front |
//!
//! `fuse` adds disks and trees as files; `tokio` adds sockets of RDS for its tasks. Whoever needs
//! RDS only says `default-features = false`. `cargo doc -p bowline --all-features` documents all of
//! it.
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

#[cfg(feature = "rnbd")]
pub mod block;
#[cfg(feature = "rtrs")]
pub mod ctl;
pub mod rds;
#[cfg(feature = "rnbd")]
pub mod rnbd;
#[cfg(feature = "rtrs")]
pub mod rtrs;
#[cfg(feature = "rtrs")]
pub mod verbs;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub mod readme {}
