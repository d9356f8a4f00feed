//! The verbs of `bowline-verbs` on RDMA devices (NICs, rxe, siw), through rdma-core's libibverbs
//! and librdmacm, which are opened at run time: building needs neither [VERBS-1], [VERBS-2].
//!
//! ```text
//!   application threads                        libibverbs            kernel, NIC
//!   post_send, post_recv, poll_cq  ---------->  ops table  ------->  queues
//!   wait_cq  polls, arms, sleeps   ---------->  completion channel
//!   connect, accept, ...           -- lock -->  librdmacm  ------->  rdma_cm
//!   cm_event, async_event  <-- queues -- background thread <-- event channel, asynchronous events
//! ```
//! The background thread moves queue pairs along with their connections, so that a program that
//! only waits for completions sees its requests flushed when the peer has gone.
//!
//! Not offered: fast registration, which userspace verbs have none of: a window of type 2, bound to
//! a region that stays, is what serves for it [MR-12]; and flushes and atomic writes.
//!
//! Spec: `docs/spec/roce.md`, sections 9.4 and 14.

mod cm;
mod context;
mod cq;
mod device;
mod error;
mod ffi;
mod load;
mod mw;
mod qp;
mod watch;

pub use device::{Listed, RdmaCoreDevice, list};
pub use load::Unavailable;
