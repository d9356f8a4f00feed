//! Nodes, sockets and messages.
//!
//! A [`Node`] owns addresses and has one TCP connection (or a few paths) to every peer node; any
//! number of [`Socket`]s share them. A message arrives whole, once, and in the order of its socket,
//! although connections break; a receiver that does not keep up makes its senders wait instead of
//! losing messages.
//!
//! # What is delivered when something dies
//!
//! While both sockets live, a message comes exactly once and in order, whatever becomes of the
//! connections between nodes that both acknowledge end to end, which is the default. Otherwise:
//!
//! - A socket or process that ends takes with it what was sent to it and not received. If the
//!   machine of a receiver goes off without a word, so does what was *begun* on a connection to it
//!   before its sender noticed, even if the receiving socket was bound again before the send.
//! - A restarted receiver may get a message that its earlier process had and did not acknowledge.
//! - A peer that acknowledges by TCP alone (a kernel, or a node with `end_to_end` off) has let go
//!   of what TCP acknowledged. A bowline node reads all of that, also when its own side ends the
//!   connection. A kernel whose connections break may lose such messages, or take repeated ones for
//!   new ones; that is its own limit. What it repeats is known to a bowline node for a day after a
//!   connection was lost, the latest 32 MiB and 131,072 messages of it
//!   ([`Limits::duplicate_records_total`]).
//! - A kernel that has several paths, answers no pings (`net.rds.ping_enable` 0) and keeps a single
//!   connection for half a minute is taken for one with a single path.
//!
//! # What a sender is not told
//!
//! RDS acknowledges from node to node. A message to a port that no socket is bound to is
//! acknowledged and dropped: sends and [`Socket::flush`] are `Ok`, and its sender is told nothing.
//! So whoever starts first asks until an answer comes, or the services bind their sockets before
//! anybody is told of them. The counter `recv_drop_no_sock` of the *receiver's* node tells how many
//! were dropped.
//!
//! A peer that does not exist, or whose node does not run (yet), is no error either: messages to it
//! wait in the send buffer, until that is full. [`Node::info`] tells of it: no path to it is
//! [`PathState::Up`].
//!
//! ```
//! use bowline::rds::{Node, PathState};
//! # use std::{net::SocketAddr, time::Duration};
//!
//! # fn main() -> Result<(), bowline::rds::Error> {
//! let left = Node::builder().address([127, 45, 77, 1].into()).build()?;
//! let right = Node::builder().address([127, 45, 77, 2].into()).build()?;
//! let socket = left.bind(([127, 45, 77, 1], 4000).into())?;
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
//! let paths = left.info().paths;
//! let mut to_it = paths.iter().filter(|path| path.remote == no_node_runs_there.ip());
//! assert!(!to_it.any(|path| path.state == PathState::Up));
//! # Ok(())
//! # }
//! ```
//!
//! Calls block unless told otherwise, work from any number of threads at once, and report errors
//! with the errno that Linux's own RDS sockets give ([`Error::errno`]).
//!
//! A process must not `fork` and go on using a node in the child.

mod builder;
mod error;
mod message;
mod node;
mod socket;

pub use bowline_rds::{
    ConnInfo, Event, Info, Interest, LatencyTrace, Limits, LinkInfo, MessageInfo,
    OutstandingMessages, PathInfo, PathState, Readiness, SendControl, SocketInfo,
};
pub use bowline_rds_driver::{DriverStats, PollMode};
pub use builder::Builder;
pub use error::Error;
pub use message::{Control, Message};
pub use node::Node;
pub use socket::Socket;
