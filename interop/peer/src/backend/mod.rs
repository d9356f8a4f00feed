//! What the jobs need of an RDS implementation, and the two there are.

pub(crate) mod bowline;
pub(crate) mod kernel;

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A failed call: its errno and what it says.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: i32,
    pub(crate) text: String,
}

/// Result of a call of a backend.
pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// The name of the errno, for those the scenarios look at.
    pub(crate) fn name(&self) -> String {
        match self.errno {
            libc::EAGAIN => "EAGAIN".into(),
            libc::ENOBUFS => "ENOBUFS".into(),
            libc::ETIMEDOUT => "ETIMEDOUT".into(),
            libc::EMSGSIZE => "EMSGSIZE".into(),
            n => n.to_string(),
        }
    }

    /// Whether the same call may succeed later.
    pub(crate) fn passing(&self) -> bool {
        matches!(self.errno, libc::EAGAIN | libc::ENOBUFS | libc::ETIMEDOUT | libc::EINTR)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (errno {})", self.text, self.errno)
    }
}

/// How calls of a socket wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// For as long as it takes.
    Block,
    /// For at most this time, both ways.
    Timeout(Duration),
    /// Not at all.
    Nonblock,
}

/// A bound socket's wishes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) bind: SocketAddr,
    /// Send and receive buffer in bytes; 0 = the default.
    pub(crate) sndbuf: usize,
    pub(crate) rcvbuf: usize,
}

/// A bound RDS socket.
pub(crate) trait Socket: Send + Sync {
    fn local(&self) -> Outcome<SocketAddr>;
    fn set_mode(&self, mode: Mode) -> Outcome<()>;
    fn send(&self, pieces: &[IoSlice<'_>], to: SocketAddr) -> Outcome<usize>;
    /// Sends the same message several times with as few calls as there are.
    fn send_many(&self, message: &[u8], count: usize, to: SocketAddr) -> Outcome<usize>;
    fn recv(&self, buf: &mut [u8]) -> Outcome<(usize, SocketAddr)>;
    /// Receives by the implementation's own best interface: number of messages
    /// and bytes.
    fn recv_many(&self, buf: &mut [u8]) -> Outcome<(u64, u64)>;
    /// Waits until there is something to receive or, with `write`, room to send.
    fn wait(&self, write: bool, timeout: Duration) -> Outcome<()>;
    fn cancel(&self, to: SocketAddr) -> Outcome<()>;
    /// Messages of this socket not yet acknowledged, after at most this time.
    fn unsent(&self, wait: Duration) -> Outcome<usize>;
}

/// A connection as a backend knows it.
#[derive(Debug, Default)]
pub(crate) struct Info {
    pub(crate) counters: Vec<(String, u64)>,
    /// Local and peer address of each TCP connection.
    pub(crate) tcp: Vec<(SocketAddr, SocketAddr)>,
    /// Path, messages and bytes received of each TCP connection.
    pub(crate) links: Vec<(u8, u64, u64)>,
    /// Connections and paths in words, for whoever looks into a failure.
    pub(crate) detail: Vec<String>,
    /// Messages waiting or unacknowledged, of all sockets.
    pub(crate) queued: usize,
    /// System calls, bytes and copies of the implementation, where it counts them.
    pub(crate) driver: Vec<(String, u64)>,
}

/// An RDS implementation.
pub(crate) trait Backend: Send + Sync {
    fn name(&self) -> String;
    fn bind(&self, wish: Wish) -> Outcome<Box<dyn Socket>>;
    fn info(&self) -> Outcome<Info>;
    fn sysctl(&self, name: &str, value: Option<i64>) -> Outcome<i64>;
    /// Cuts connections without a word; their number.
    fn cut(&self, peer: Option<IpAddr>) -> Outcome<usize>;
    /// Ends the implementation in good order.
    fn shutdown(&self);
}
