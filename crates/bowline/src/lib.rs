//! Reliable datagrams (RDS) and block devices over RDMA (RTRS, RNBD) in user space, over the wire
//! protocols of Linux's `rds_tcp`, `rdma_rxe`, `rtrs` and `rnbd`.
//!
//! | module | feature | what |
//! | --- | --- | --- |
//! | [`rds`] | always | nodes, sockets and messages |
//! | `verbs` | `rdma`, by default | RDMA devices: one in this process over UDP; with `rdma-core` those of the machine |
//! | `rtrs` | `rtrs`, by default | sessions of several paths between a client and a server |
//! | `ctl` | `rtrs`, by default | trees as under /sys, that show and change sessions and disks |
//! | `rnbd`, `block` | `rnbd`, by default | exports and disks; what they are stored in, NBD and ublk in front |
//! | [`guide`] | always | **a page for each task, with whole programs**; limits |
//!
//! `fuse` adds disks and trees as files, `tokio` sockets of RDS for its tasks, `tracing` events for
//! the log of a program. Whoever needs RDS only says `default-features = false`. `cargo doc -p
//! bowline --all-features` documents all of it.
//!
//! Begin with the pages of the guide: [request and reply](guide::request_reply), [publish and
//! subscribe](guide::publish_subscribe), [time limits and cancellation](guide::deadlines), [a
//! graceful end](guide::graceful_end), [and others](guide).
//!
//! Numbers in brackets, as `[NB-30]`, are rules of the [specification], of which this is an
//! implementation.
//!
//! [specification]: https://github.com/bowline-rs/bowline/tree/main/docs/spec
//!
//! ```
//! use bowline::rds::Node;
//!
//! # fn main() -> Result<(), bowline::rds::Error> {
//! let left = Node::builder().address([127, 77, 0, 1]).build()?;
//! let right = Node::builder().address([127, 77, 0, 2]).build()?;
//! let a = left.bind(([127, 77, 0, 1], 4000))?;
//! let b = right.bind(([127, 77, 0, 2], 4000))?;
//!
//! a.send_to(b"hello", ([127, 77, 0, 2], 4000))?;
//! let mut buf = [0; 16];
//! let (len, from) = b.recv_from(&mut buf)?;
//! assert_eq!((&buf[..len], from), (&b"hello"[..], ([127, 77, 0, 1], 4000).into()));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// The error number of the errors of all modules: each has a method `errno` that returns it, and
/// becomes a [`std::io::Error`] with its text.
pub use bowline_base::Errno;
/// A point on the monotonic clock, used as timestamp of past events.
pub use bowline_base::Instant;
/// A counter with its name and what it counts, as lists of counters have it.
pub use bowline_base::count::Described;

#[cfg(feature = "rnbd")]
pub mod block;
#[cfg(feature = "rtrs")]
pub mod ctl;
pub mod guide;
pub mod rds;
#[cfg(feature = "rnbd")]
pub mod rnbd;
#[cfg(feature = "rtrs")]
pub mod rtrs;
#[cfg(feature = "rdma")]
pub mod verbs;

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
