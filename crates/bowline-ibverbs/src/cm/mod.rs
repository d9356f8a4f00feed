//! `librdmacm.so.1`: connections, in the terms of rdma_cma.h.
//!
//! ```text
//!   rdma_create_id --> rdma_resolve_addr, rdma_resolve_route --> rdma_create_qp --> rdma_connect
//!                  \-> rdma_bind_addr, rdma_listen ... CONNECT_REQUEST: a new id --> rdma_accept
//!   datagrams (RDMA_PS_UDP): rdma_connect looks a service up, rdma_accept answers
//!   what happens --> the id's channel --> rdma_get_cm_event ... rdma_ack_cm_event
//! ```
//! An id without a channel of the program has one of its own, and its calls wait for their event.
//!
//! It is the same file as libibverbs: both work on one device.

pub(crate) mod abi;
pub(crate) mod addr;
mod connections;
mod events;
mod groups;
mod ids;
mod lookup;
mod queue_pairs;
mod shared_receives;

pub(crate) use events::{report, report_removal};
pub(crate) use ids::{Port, is_own, opened, pd, release, source};
pub(crate) use queue_pairs::{UDP_QKEY, datagram_steps};
