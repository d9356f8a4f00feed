//! bowline's own cells, through its public interface.
//!
//! The bench is a part of the `bowline` command, which is built from the same package as the library,
//! so this crate cannot name the library's types: it asks for a [`Stack`], and the command hands in
//! the one that maps each function to the public call of the same name.

mod extras;
mod flows;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::cell::{Cell, Kind, Subject, Wait};
use crate::role::{Role, Side};

/// How a node is to be built.
#[derive(Clone, Debug, Default)]
pub struct NodeOptions {
    /// Addresses of the node.
    pub addresses: Vec<IpAddr>,
    /// RDS paths per connection; the library's default when absent.
    pub paths: Option<u8>,
    /// Send and receive buffer of every socket, in bytes.
    pub buffer: usize,
    /// How waiting threads wait: `adaptive`, `spin` or `sleep`.
    pub poll: &'static str,
    /// TCP congestion control; the library's choice when absent.
    pub congestion_control: Option<String>,
}

/// What a call on a socket can end in, apart from success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    const AGAIN: i32 = 11;
    const NOBUFS: i32 = 105;

    /// Says whether the call would have had to wait.
    pub(crate) fn is_wait(self) -> bool {
        self.0 == Self::AGAIN || self.0 == Self::NOBUFS
    }
}

/// Counters of a node, as far as it has them: name and value.
pub type Counters = Vec<(&'static str, u64)>;

/// The public interface of the library under test.
pub trait Stack: 'static {
    /// A node.
    type Node: 'static;
    /// A socket of a node.
    type Socket;
    /// A received message.
    type Message;

    /// Builds a node.
    ///
    /// # Errors
    ///
    /// Returns the library's one-line message.
    fn node(options: &NodeOptions) -> Result<Self::Node, String>;
    /// Opens a socket and binds it.
    ///
    /// # Errors
    ///
    /// Returns the library's one-line message.
    fn bind(node: &Self::Node, addr: SocketAddr) -> Result<Self::Socket, String>;
    /// Sends one message.
    ///
    /// # Errors
    ///
    /// Returns the errno of the call.
    fn send_to(socket: &Self::Socket, message: &[u8], to: SocketAddr) -> Result<(), Errno>;
    /// Sends several messages; returns how many were taken.
    ///
    /// # Errors
    ///
    /// Returns the errno of the call.
    fn send_batch(socket: &Self::Socket, batch: &[(SocketAddr, &[u8])]) -> Result<usize, Errno>;
    /// Receives one message.
    ///
    /// # Errors
    ///
    /// Returns the errno of the call.
    fn recv_from(socket: &Self::Socket, buf: &mut [u8]) -> Result<(usize, SocketAddr), Errno>;
    /// Receives up to `max` messages, waiting for the first.
    ///
    /// # Errors
    ///
    /// Returns the errno of the call.
    fn recv_batch(
        socket: &Self::Socket,
        into: &mut Vec<Self::Message>,
        max: usize,
    ) -> Result<usize, Errno>;
    /// Copies a received message out; returns its length.
    fn copy_to(message: &Self::Message, buf: &mut [u8]) -> usize;
    /// Makes calls return at once instead of waiting.
    ///
    /// # Errors
    ///
    /// Returns the errno of the call.
    fn set_nonblocking(socket: &Self::Socket, on: bool) -> Result<(), Errno>;
    /// Waits until the socket can be written to (or read from, when `write` is false).
    fn wait(socket: &Self::Socket, write: bool, at_most: Duration);
    /// Waits until everything sent on the socket has been acknowledged.
    ///
    /// # Errors
    ///
    /// Returns the errno of the call.
    fn flush(socket: &Self::Socket, at_most: Duration) -> Result<(), Errno>;
    /// Reads the node's counters; `syscalls` is the one the bench looks for.
    fn counters(node: &Self::Node) -> Counters;
}

/// Says whether no library was handed in.
pub(crate) fn is_absent<S: Stack>() -> bool {
    std::any::TypeId::of::<S>() == std::any::TypeId::of::<NoStack>()
}

/// A library that is not there: the bench then measures everything else.
#[derive(Clone, Copy, Debug)]
pub struct NoStack;

impl Stack for NoStack {
    type Node = ();
    type Socket = ();
    type Message = ();

    fn node(_: &NodeOptions) -> Result<(), String> {
        Err("this program was built without the library".into())
    }
    fn bind((): &(), _: SocketAddr) -> Result<(), String> {
        Ok(())
    }
    fn send_to((): &(), _: &[u8], _: SocketAddr) -> Result<(), Errno> {
        Err(Errno(0))
    }
    fn send_batch((): &(), _: &[(SocketAddr, &[u8])]) -> Result<usize, Errno> {
        Err(Errno(0))
    }
    fn recv_from((): &(), _: &mut [u8]) -> Result<(usize, SocketAddr), Errno> {
        Err(Errno(0))
    }
    fn recv_batch((): &(), _: &mut Vec<()>, _: usize) -> Result<usize, Errno> {
        Err(Errno(0))
    }
    fn copy_to((): &(), _: &mut [u8]) -> usize {
        0
    }
    fn set_nonblocking((): &(), _: bool) -> Result<(), Errno> {
        Ok(())
    }
    fn wait((): &(), _: bool, _: Duration) {}
    fn flush((): &(), _: Duration) -> Result<(), Errno> {
        Ok(())
    }
    fn counters((): &()) -> Counters {
        Vec::new()
    }
}

/// Port of the receiver's first socket; the others follow.
const RX_PORT: u16 = 4000;
/// Port of the sender's first socket; the others follow.
const TX_PORT: u16 = 20000;

/// Runs one side of a bowline cell.
pub(crate) fn run<S: Stack>(role: Role) -> Result<(), String> {
    let batch = role.cell.subject == Subject::BowlineBatch;
    match (role.cell.kind, role.side) {
        (Kind::Stream, Side::Rx) if batch => flows::batch_rx::<S>(role),
        (Kind::Stream, Side::Tx) if batch => flows::batch_tx::<S>(role),
        (Kind::Stream, Side::Rx) => flows::stream_rx::<S>(role),
        (Kind::Stream, Side::Tx) => flows::stream_tx::<S>(role),
        (Kind::Rtt, Side::Rx) => flows::answer::<S>(role),
        (Kind::Rtt, Side::Tx) => flows::ask::<S>(role),
        (Kind::AllAwake | Kind::OneAsleep, Side::Rx) => extras::pairs_rx::<S>(role),
        (Kind::AllAwake | Kind::OneAsleep, Side::Tx) => extras::pairs_tx::<S>(role),
        (Kind::Sockets | Kind::Nodes, Side::Rx) => extras::fan_rx::<S>(role),
        (Kind::Sockets | Kind::Nodes, Side::Tx) => extras::fan_tx::<S>(role),
        (Kind::IdleSockets, Side::Rx) => extras::idle_sockets::<S>(role),
        (Kind::IdleSockets, Side::Tx) => extras::nothing(role),
        (Kind::IdleConnections, side) => extras::idle_connections::<S>(role, side),
    }
}

fn options(cell: &Cell, addresses: Vec<IpAddr>) -> NodeOptions {
    NodeOptions {
        addresses,
        paths: u8::try_from(cell.paths).ok().filter(|p| *p > 0),
        buffer: cell.buffer,
        poll: match cell.wait {
            Wait::Adaptive => "adaptive",
            Wait::Spin => "spin",
            Wait::Sleep => "sleep",
        },
        congestion_control: Some(cell.cc.clone()).filter(|cc| !cc.is_empty()),
    }
}

fn failed(call: &'static str) -> impl Fn(Errno) -> String {
    move |e| format!("{call}: {}", std::io::Error::from_raw_os_error(e.0))
}

fn add_port(base: u16, n: usize) -> Result<u16, String> {
    u16::try_from(n)
        .ok()
        .and_then(|n| base.checked_add(n))
        .ok_or_else(|| format!("{n} sockets are more than there are ports"))
}
