//! Types that go into the client's core and come out of it.

use std::fmt;
use std::time::Duration;

use bowline_wire::rnbd::{self as wire, Access};
use bowline_wire::rtrs::Dir;

use crate::{Errno, Failures, IoOp, Latencies, Limits};

/// What happens to requests while the session is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// Requests fail with EIO, as with the kernel [NB-27].
    FailFast,
    /// Requests wait for this long; then they fail with EIO [NB-54].
    Queue(Duration),
}

/// Settings of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// What happens to requests while the session is lost.
    pub outage: Outage,
    /// Time after which a request is answered with ETIMEDOUT. Its memory stays in use until the
    /// server answers, and later writes to the same bytes wait until then. `None`: never, as with
    /// the kernel [NB-28].
    pub io_timeout: Option<Duration>,
    /// Delay between attempts to open a device again that the server has lost or refused, while
    /// requests wait for it.
    pub reopen_delay: Duration,
    /// Whether the flag NOUNMAP is sent: only to servers known to speak version 2.2 [NB-57].
    /// Otherwise zeroes that must stay allocated are written as data.
    pub nounmap: bool,
    /// Whether WRITE_ZEROES is sent: off for kernel servers before 5.18, which write one block
    /// again and again instead [NB-12].
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

/// Id of a mapped device: its index, and a generation that tells it from later devices at that
/// index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
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
    /// Being unmapped.
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

/// Id of a service message, given back with its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u32);

/// A message to send on the service connection: SESS_INFO, OPEN or CLOSE. Messages are sent in the
/// order in which they come out. The answer goes to `Core::service_answer` [NB-60].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceMessage {
    /// Id of the message, given back with its answer.
    pub token: Token,
    /// The message.
    pub usr: Vec<u8>,
    /// Length of the expected answer in bytes: sent as a READ of that length. 0: sent as a WRITE
    /// without data [NB-2].
    pub room: u32,
}

/// A range of a registered memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Id of the region.
    pub region: u32,
    /// Offset of the range in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// An IO message to send on an IO connection. Its answer goes to `Core::io_answer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendIo {
    /// Slot of the message, given back with its answer; less than the number of slots.
    pub slot: u16,
    /// RTRS direction [NB-2].
    pub dir: Dir,
    /// The message.
    pub usr: [u8; wire::IO_LEN],
    /// Memory that its data is sent from or received into.
    pub data: Option<Piece>,
}

/// A request of the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRequest<D> {
    /// The operation.
    pub op: IoOp,
    /// Offset on the disk in bytes; ignored for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u32,
    /// Tells whether a write must be durable before it is answered.
    pub fua: bool,
    /// Tells whether zeroed bytes must stay allocated.
    pub nounmap: bool,
    /// Region and offset of the data of a read or write.
    pub mem: Option<(u32, u64)>,
    /// The caller's completion, given back with the result.
    pub done: D,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoneIo<D> {
    /// The caller's completion, as submitted.
    pub done: D,
    /// 0 or a negative errno.
    pub errno: i32,
    /// Set when the request was answered because its time was up. Its memory may still be in use
    /// until [`Core::take_ended`](super::Core::take_ended) returns this number.
    pub late: Option<u32>,
}

/// An event of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The first OPEN was answered; on errors the device is gone.
    Mapped {
        /// The device.
        dev: DevId,
        /// The server's errno, or what was wrong with its answer.
        result: Result<(), Errno>,
    },
    /// A `Core::remap` has ended.
    Remapped {
        /// The device.
        dev: DevId,
        /// The server's errno, or what was wrong with its answer.
        result: Result<(), Errno>,
    },
    /// The device is unmapped, and none of its IO is in flight.
    Unmapped {
        /// The device.
        dev: DevId,
    },
    /// The device takes requests again.
    Online {
        /// The device.
        dev: DevId,
    },
    /// The device is closed: requests fail or wait.
    Offline {
        /// The device.
        dev: DevId,
    },
    /// The size of the device has changed.
    Resized {
        /// The device.
        dev: DevId,
        /// Its new size in bytes.
        bytes: u64,
    },
    /// The device came back with another block size: requests fail until it is remapped [NB-55].
    Gone {
        /// The device.
        dev: DevId,
    },
}

/// Counters of a device, as the block layer keeps them: requests answered without error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskStats {
    /// Read requests.
    pub reads: u64,
    /// Bytes of these requests.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes of these requests.
    pub written_bytes: u64,
    /// Discards, erases and writes of zeroes.
    pub discards: u64,
    /// Bytes of these requests.
    pub discarded_bytes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Pieces sent again after a path or the session was lost.
    pub resent: u64,
}

/// Description of a device, for the control tree.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DevInfo {
    /// Id of the device.
    pub id: DevId,
    /// Name of the export it was mapped by.
    pub mapping_path: String,
    /// Access mode it was mapped with.
    pub access: Access,
    /// State of the device.
    pub state: State,
    /// Limits of the device; the last known while it is closed.
    pub limits: Option<Limits>,
    /// Number of pieces in flight.
    pub in_flight: u32,
    /// Number of requests, or remainders of requests, that wait for a slot or for the session.
    pub waiting: usize,
    /// Counters of the device.
    pub stats: DiskStats,
    /// Changes were answered that no flush has made durable: they may be in the server's cache.
    pub is_unflushed: bool,
    /// Requests that the server's storage has failed.
    pub failures: Failures,
    /// How long reads took from submission to answer, if they succeeded.
    pub read_latencies: Latencies,
    /// The same of all other requests.
    pub write_latencies: Latencies,
}
