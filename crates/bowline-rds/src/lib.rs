//! RDS as a state machine: sockets, congestion maps, connections, paths, and the framing over TCP.
//!
//! No socket, thread or clock is in here. [`Node`] takes calls of applications, bytes, and the
//! time; it gives [`Output`]s for a driver to carry out. The same code runs in production, in the
//! simulator and under fuzzing.
//!
//! ```text
//!  applications      send, recv, bind ...          Wake
//!        |                 |                         ^
//!        v                 v                         |
//!   +---------------------------------------------------+
//!   | Node   sockets -- connections -- paths -- links    |
//!   +---------------------------------------------------+
//!        ^                 |            |            ^
//!        | handle_data     | Connect    | poll_      | handle_timeout
//!        | handle_accepted v Close      v transmit   |
//!      TCP connections, one link each              clock
//! ```
//!
//! Numbered rules (`[R-101]`) are those of `docs/spec/rds.md`.
//!
//! # Example
//! Two nodes, and a driver that is a loop in memory:
//! ```
//! use std::io::IoSlice;
//! use bowline_rds::{Config, Instant, Node, Output, RecvOpts, RxBuf, SendMsg, TxBatch};
//!
//! let now = Instant::default();
//! let config = |addr: &str, generation| Config {
//!     addrs: vec![addr.parse().unwrap()], generation, ..Config::default()
//! };
//! let mut a = Node::new(config("10.0.0.1", 1));
//! let mut b = Node::new(config("10.0.0.2", 2));
//! let from = a.socket().unwrap();
//! a.bind(from, "10.0.0.1:4000".parse().unwrap()).unwrap();
//! let to = b.socket().unwrap();
//! b.bind(to, "10.0.0.2:4000".parse().unwrap()).unwrap();
//!
//! let name = Some("10.0.0.2:4000".parse().unwrap());
//! a.send(now, from, &SendMsg { name, payload: &[IoSlice::new(b"hello")], ..SendMsg::default() })
//!     .unwrap();
//! let Some(Output::Connect { link, .. }) = a.poll_output() else { panic!() };
//! a.handle_connected(now, link, "10.0.0.1:40000".parse().unwrap());
//! let accepted = b
//!     .handle_accepted(now, "10.0.0.2:16385".parse().unwrap(), "10.0.0.1:40000".parse().unwrap())
//!     .unwrap();
//! let mut batch = TxBatch::default();
//! let n = a.poll_transmit(now, link, &mut batch, 65_536);
//! b.handle_data(now, accepted, RxBuf::from_vec(batch.slices().flatten().copied().collect()));
//! a.transmitted(now, link, n, false);
//! b.process(now, None, usize::MAX);
//! let got = b.recv(now, to, RecvOpts::default()).unwrap();
//! assert_eq!(got.source, Some("10.0.0.1:4000".parse().unwrap()));
//! assert_eq!(got.data.unwrap().slices().next(), Some(&b"hello"[..]));
//! ```
#![forbid(unsafe_code)]

mod api;
mod config;
mod cong;
mod conn;
mod dedup;
mod error;
mod hash;
mod ids;
mod link;
mod node;
mod path;
mod peers;
mod rdma;
mod recvq;
mod rxbuf;
mod socket;
mod stats;
mod txlog;

pub use api::{
    AcceptError, CloseHow, CloseReason, Control, Event, Interest, Misbehaviour, Output,
    OutstandingMessages, PathEnd, Readiness, Received, ReceivedInto, RecvOpts, Refusal,
    SendControl, SendMemory, SendMsg, Sent,
};
pub use bowline_base::Instant;
pub use config::{
    Config, Limits, MAX_MESSAGE_KERNEL, RECV_BUFFER_MIN, SEND_BUFFER_MIN, SYSCTL_NAMES, Sysctl,
    sysctl_name, sysctl_range,
};
pub use error::{Error, LengthLimit, TooLong};
pub use ids::{LinkId, RdmaLinkId, SocketId};
pub use node::{
    ConnInfo, Info, InfoTable, LinkInfo, MessageInfo, Node, PathInfo, RdmaInfo, SAVED_FORMAT,
    SocketInfo, poll,
};
pub use path::PathState;
pub use peers::{IpNet, PeerList};
pub use rdma::{
    RDMA_MAX, RDMA_PIECES, RDMA_PIECES_MAX, RDMA_REJECT, RdmaAccept, RdmaAccess, RdmaFrame,
    RdmaHold, RdmaOp, RdmaPiece, RdmaRequest, RdmaSend, RdmaShape, RdmaStatus, RdmaWork,
};
pub use rxbuf::{RX_BUF_LEN, Rope, RxBuf, RxBufMut, RxPool};
pub use socket::{LatencyTrace, Transport};
pub use stats::Counters;
pub use txlog::TxBatch;
