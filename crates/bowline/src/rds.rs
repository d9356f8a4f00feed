//! Nodes, sockets and messages.
//!
//! A [`Node`] owns addresses and has one TCP connection (or a few paths) to every peer node; any
//! number of [`Socket`]s share them. A message arrives whole, once, and in the order of its socket,
//! although connections break; a receiver that does not keep up makes its senders wait instead of
//! losing messages.
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

pub use bowline_driver::{DriverStats, PollMode};
pub use bowline_rds::{
    ConnInfo, Event, Info, Interest, LatencyTrace, Limits, LinkInfo, MessageInfo, PathInfo,
    PathState, Readiness, SendControl, SocketInfo,
};
pub use builder::Builder;
pub use error::Error;
pub use message::{Control, Message};
pub use node::Node;
pub use socket::Socket;
