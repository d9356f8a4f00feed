//! What goes into the client's core and comes out of it.

use std::fmt;
use std::time::Duration;

use bowline_wire::rnbd::{self as wire, Access};
use bowline_wire::rtrs::Dir;

use crate::{Errno, IoOp, Limits};

/// What becomes of requests while the session is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// They fail with EIO, as with the kernel [NB-27].
    FailFast,
    /// They wait for so long; then they fail with EIO [NB-54].
    Queue(Duration),
}

/// How a client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// What becomes of requests while the session is away.
    pub outage: Outage,
    /// Time after which a request is answered ETIMEDOUT, though its memory stays in use until the
    /// server answers, and what later requests write to the same bytes waits until then. `None`:
    /// never, as with the kernel [NB-28].
    pub io_timeout: Option<Duration>,
    /// Time between attempts to open a device again that the server has forgotten or refused while
    /// requests wait for it.
    pub reopen_delay: Duration,
    /// Whether NOUNMAP is sent: only to servers known to be of version 2.2 [NB-57]. To others
    /// zeroes that must stay allocated are written as data.
    pub nounmap: bool,
    /// Whether zeroes may be written without sending them: off for servers before 5.18, which
    /// write one block again and again instead [NB-12].
    pub write_zeroes: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            outage: Outage::FailFast,
            io_timeout: None,
            reopen_delay: Duration::from_secs(1),
            nounmap: false,
            write_zeroes: true,
        }
    }
}

/// A mapped device; one mapped later at its place has another life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevId {
    pub(crate) index: u32,
    pub(crate) life: u32,
}

/// State of a device [NB-32].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The server has not answered the first OPEN yet.
    Init,
    /// In use.
    Open,
    /// The server does not hold it open: the session was lost.
    Closed,
    /// Being given up.
    Unmapped,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Init => "init",
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Unmapped => "unmapped",
        })
    }
}

/// Names a service message in its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u32);

/// A service message to send, in the order they come, on the service connection. Its answer goes to
/// `Core::answered` [NB-60].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Names the message in its answer.
    pub token: Token,
    /// The message.
    pub usr: Vec<u8>,
    /// Bytes of the answer: a READ of so many; 0: a WRITE without data [NB-2].
    pub room: u32,
}

/// A part of a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which region.
    pub region: u32,
    /// From which byte on.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// An IO message to send on an IO connection. Its answer goes to `Core::io_answer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendIo {
    /// Names it in its answer; less than the number of slots.
    pub slot: u16,
    /// RTRS direction [NB-2].
    pub dir: Dir,
    /// The message.
    pub usr: [u8; wire::IO_LEN],
    /// Its data: comes from there or goes there.
    pub data: Option<Piece>,
}

/// A request of the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRequest<D> {
    /// What to do.
    pub op: IoOp,
    /// From which byte on; ignored for a flush.
    pub offset: u64,
    /// Bytes; 0 for a flush.
    pub len: u32,
    /// Tells whether a write must be durable before it is answered.
    pub fua: bool,
    /// Tells whether zeroed bytes must stay allocated.
    pub nounmap: bool,
    /// Region and offset of the data of a read or write.
    pub mem: Option<(u32, u64)>,
    /// Comes back with the result.
    pub done: D,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoneIo<D> {
    /// What came with the request.
    pub done: D,
    /// 0 or a negative errno.
    pub errno: i32,
    /// Its time was up, and its memory may still be used: until
    /// [`Core::take_ended`](super::Core::take_ended) gives this number.
    pub late: Option<u32>,
}

/// What happened to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The first OPEN was answered; on errors the device is gone.
    Mapped {
        /// Which device.
        dev: DevId,
        /// The server's errno, or what was wrong with its answer.
        result: Result<(), Errno>,
    },
    /// `Core::remap` is over.
    Remapped {
        /// Which device.
        dev: DevId,
        /// The server's errno, or what was wrong with its answer.
        result: Result<(), Errno>,
    },
    /// The device is gone, and nothing of it is under way.
    Unmapped {
        /// Which device.
        dev: DevId,
    },
    /// The device takes requests again.
    Online {
        /// Which device.
        dev: DevId,
    },
    /// The device is closed: requests fail or wait.
    Offline {
        /// Which device.
        dev: DevId,
    },
    /// The device has another size.
    Resized {
        /// Which device.
        dev: DevId,
        /// Its size.
        bytes: u64,
    },
    /// The device came back with other blocks, or time is up: requests fail until it is remapped
    /// [NB-55].
    Gone {
        /// Which device.
        dev: DevId,
    },
}

/// What was done with a device, as the block layer counts it: requests answered without error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Reads.
    pub reads: u64,
    /// Bytes of them.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Discards, erases and writes of zeroes.
    pub discards: u64,
    /// Bytes of them.
    pub discarded_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Pieces sent again after an outage.
    pub resent: u64,
}

/// A device, for the control tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevInfo {
    /// Which it is.
    pub id: DevId,
    /// The name it was asked for by.
    pub mapping_path: String,
    /// How it was asked for.
    pub access: Access,
    /// Where it stands.
    pub state: State,
    /// What it can do; the last known while it is closed.
    pub limits: Option<Limits>,
    /// Pieces at the server.
    pub in_flight: u32,
    /// Requests, or rests of them, that wait for a slot or for the session.
    pub waiting: usize,
    /// What was done with it.
    pub stats: DiskStats,
}
