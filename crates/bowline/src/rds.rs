//! Nodes, sockets and messages.
//!
//! A [`Node`] owns addresses and has one TCP connection (or up to eight paths) to every peer node;
//! any number of [`Socket`]s share them. It is part of the process, or that of the host, which
//! programs share ([`Node::of_host`]). A message arrives whole, once, and in the order of its
//! socket, even if connections break. A receiver that does not keep up makes its senders wait; no
//! message is lost. A message is as long as its socket's send buffer at most, which is 104 KiB at
//! first ([`Socket::set_send_buffer`], [`Builder::max_message_bytes`]), and to a kernel 1 MiB.
//!
//! # What is delivered when a socket, process or machine fails
//!
//! While both sockets exist, a message arrives exactly once and in order, whatever happens to the
//! connections between nodes that both acknowledge end to end, which is the default. Otherwise:
//!
//! - When a socket or process ends, messages that it has not received are lost. When the machine of
//!   a receiver fails without closing its connections, messages are lost that were *started* on
//!   such a connection before the sender noticed, even if the receiving socket was bound again
//!   before the send.
//! - A restarted receiver may get a message that its earlier process received and did not
//!   acknowledge.
//! - A peer that acknowledges by TCP alone (a kernel, or a node with `end_to_end` off) frees
//!   messages that TCP has acknowledged. A bowline node reads all of them, also when it ends the
//!   connection itself. A kernel whose connections break may lose such messages, or take repeated
//!   ones for new ones; that is the kernel's limit. A bowline node recognises messages that a
//!   kernel repeats for a day after a connection was lost, among the latest 32 MiB and 131,072
//!   messages ([`Limits::duplicate_records_total`]).
//! - A kernel that has several paths, answers no pings (`net.rds.ping_enable` 0) and keeps a single
//!   connection for half a minute is taken for a kernel with a single path.
//!
//! # What a sender does not learn
//!
//! RDS acknowledges from node to node. A message to a port that no socket is bound to is
//! acknowledged and dropped: sends and [`Socket::flush`] are `Ok`, and the sender does not learn of
//! it. So a program that starts first repeats its request until an answer comes, or services bind
//! their sockets before their clients start. The counter `recv_drop_no_sock` of the *receiver's*
//! node counts dropped messages.
//!
//! A peer that does not exist, or whose node does not run (yet), is no error either: messages to it
//! wait in the send buffer, until that is full. [`Node::events`] tells it with the cause
//! ([`Event::CannotConnect`]), and [`Node::info`] shows it: no path to the peer is
//! [`PathState::Up`]. When a peer's node ends in good order, it says so ([`Event::PeerEnded`]);
//! what it had not acknowledged then waits for the next node there, and [`Socket::flush`] fails
//! with [`ErrorKind::PeerEnded`] if none comes.
//!
//! ```
//! use bowline::rds::{CloseReason, Event, Node};
//! # use std::{net::SocketAddr, time::Duration};
//!
//! # fn main() -> Result<(), bowline::rds::Error> {
//! let left = Node::builder().address([127, 45, 77, 1]).build()?;
//! let right = Node::builder().address([127, 45, 77, 2]).build()?;
//! let socket = left.bind(([127, 45, 77, 1], 4000))?;
//!
//! let nobody_has_bound_it = SocketAddr::from(([127, 45, 77, 2], 4000));
//! socket.send_to(b"lost", nobody_has_bound_it)?;
//! socket.flush(None)?;
//! let dropped = right.counters().into_iter().find(|(name, _)| *name == "recv_drop_no_sock");
//! assert_eq!(dropped, Some(("recv_drop_no_sock", 1)));
//!
//! let no_node_runs_there = SocketAddr::from(([127, 45, 77, 3], 4000));
//! socket.send_to(b"kept", no_node_runs_there)?;
//! let flushed = socket.flush(Some(Duration::from_millis(200)));
//! assert!(flushed.is_err_and(|error| error.is_timed_out()));
//! let refused = left.events().into_iter().any(|event| {
//!     matches!(event, Event::CannotConnect { remote, why: CloseReason::Refused, .. }
//!         if remote == no_node_runs_there.ip())
//! });
//! assert!(refused);
//! # Ok(())
//! # }
//! ```
//!
//! # The host's node
//!
//! [`Node::of_host`] gives the node that `bowline node` runs for the programs of a machine, with
//! the same [`Socket`]s. Messages go through memory that the program and that node share. What
//! differs:
//!
//! - A message between two sockets of the node is there some microseconds after its send has
//!   returned, as over a network.
//! - When the node ends, its sockets end: calls fail with `ENETDOWN`. If it was killed, some sends
//!   may still be accepted before that. A node that is replaced (`bowline node --replace`) keeps
//!   its sockets.
//! - [`Socket::event_fd`] is the socket itself, readable and writable as a kernel's is.
//! - The errno of a call is all that the program gets: `EAGAIN` of a send has the kind
//!   [`ErrorKind::QueueFull`], also where a node of the process says [`ErrorKind::PeerUnknown`].
//! - What is up to the node's owner fails with `EOPNOTSUPP`: [`Node::set_sysctl`] and others say
//!   so.
//! - Tasks need a runtime with its IO driver enabled (`enable_io` or `enable_all`).
//!
//! # Tasks
//!
//! With the feature `tokio` most calls have a form for tasks, whose name ends in `_async`, as
//! [`Socket::send_to`] has `send_to_async`. All of them are cancel safe: one that is dropped before
//! it is ready, by `select!` or a timeout, has lost no message and sent none.
//!
//! # Waiting and errors
//!
//! Calls block unless [`Socket::set_nonblocking`] is on, work from any number of threads at once,
//! and report errors of a kind ([`Error::kind`]), with the errno that Linux's own RDS sockets give
//! ([`Error::errno`]).
//!
//! A process must not `fork` and go on using a node in the child.

mod addr;
mod builder;
mod control;
mod error;
mod host;
mod message;
mod node;
#[cfg(feature = "rdma")]
mod rdma;
mod socket;
#[cfg(feature = "tokio")]
mod tasks;

pub use addr::{ToAddr, ToIp};
pub use bowline_rds::{
    CloseReason, ConnInfo, Event, Info, Interest, IpNet, LatencyTrace, LengthLimit, Limits, LinkId,
    LinkInfo, MessageInfo, Misbehaviour, OutstandingMessages, PathEnd, PathInfo, PathState,
    PeerList, RdmaInfo, RdmaStatus, Readiness, Refusal, SendControl, SocketInfo, TooLong,
    Transport,
};
pub use bowline_rds_driver::{DriverStats, PollMode};
#[cfg(feature = "rdma")]
pub use bowline_rds_driver::{ForeignMemory, RdmaMemory};
pub use builder::{Builder, Paths};
pub use error::{Error, ErrorKind};
pub use message::{Control, Message};
pub use node::Node;
#[cfg(feature = "rdma")]
pub use rdma::Transfer;
pub use socket::Socket;
