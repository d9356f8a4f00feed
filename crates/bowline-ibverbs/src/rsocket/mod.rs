//! Sockets over RDMA: the calls of rsocket(7), on connections and queue pairs of this library.
//!
//! ```text
//!   calls, poll --> Socket --> Connection --> Stream (no input and output) --> wire
//!              \          \--> Datagrams
//!               \--> wait: a thread's descriptor <-- Signal <-- the device's watcher
//! ```
//! The protocol of streams is that of rdma-core's librdmacm (docs/spec/rsocket.md), so that its
//! programs are peers. What happens to a socket is taken in by the calls on it: there is no thread
//! of its own.

mod calls;
mod connection;
mod datagrams;
mod maps;
mod options;
mod poll;
mod socket;
mod stream;
mod transfer;
mod wait;
mod wire;

pub(crate) use wait::Signals;
