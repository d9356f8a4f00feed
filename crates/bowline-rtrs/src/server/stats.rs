//! Counters of a server, and information about sessions and paths.

use std::net::SocketAddr;

use bowline_base::counters;
use bowline_wire::rtrs::{SessionName, Uuid};

use super::{PathState, SessId};
use crate::{PathId, PortId};

counters! {
    /// Every counter of a server; monotonic.
    #[derive(Copy)]
    pub struct ServerCounters {
        /// Connection requests accepted.
        accepted,
        /// Connection requests refused [RT-28].
        refused,
        /// Refused for lack of resources: of sessions, their memory, or connections [RT-66].
        refused_full,
        /// Paths that were connected.
        paths_connected,
        /// Paths closed, whether they had been connected or not.
        paths_closed,
        /// Closed because the client broke a rule [RT-67].
        paths_violated,
        /// Closed because the client, or the name of its session, was not admitted [RT-64],
        /// [RT-20].
        paths_refused,
        /// Closed because the client was not proven to exist, and others needed the place [RT-66].
        paths_pushed_out,
        /// Requests handed to the upper layer.
        requests,
        /// Requests that waited for a chunk that another path's operation still held [RS-9].
        requests_waited,
        /// Requests dropped because their path closed before they were begun.
        requests_dropped,
        /// Responses given.
        answers,
        /// Responses that waited for room in the send queue [RT-53].
        answers_waited,
        /// Responses dropped because their path was gone [RS-19].
        answers_dropped,
        /// HB_MSGs sent.
        heartbeats_sent,
        /// HB_MSGs answered.
        heartbeats_answered,
        /// HB_MSGs not answered because the send queue was full of responses.
        heartbeats_dropped,
        /// Notices of paths that are given up [RT-101].
        notices,
        /// Notices of a path that did not exist: closed already, or never there.
        notices_ignored,
        /// Immediates ignored: of an unknown type, a response, or a heartbeat in a wrong state
        /// [RT-14],
        /// [RT-62], [RT-67].
        immediates_ignored,
    }
}

/// Counters of a path, as `stats/rdma` and `stats/wc_completion` show them [RS-43], [RS-46].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathStats {
    /// Reads.
    pub reads: u64,
    /// Bytes of the reads, with their user messages.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of the writes, with their user messages.
    pub write_bytes: u64,
    /// Operations the upper layer has not answered yet.
    pub inflight: u32,
    /// Most work completions handled at once.
    pub wc_max: u64,
    /// Work completions.
    pub wc_total: u64,
    /// Number of calls that handled work completions.
    pub wc_calls: u64,
}

/// The current state of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathInfo {
    /// Id of the path.
    pub path: PathId,
    /// The device it uses.
    pub port: PortId,
    /// Local address.
    pub local: SocketAddr,
    /// The client's address.
    pub remote: SocketAddr,
    /// State.
    pub state: PathState,
    /// Connections of the path.
    pub connections: u16,
    /// Whether keys are refreshed on it.
    pub refresh: bool,
    /// Counters of the path.
    pub stats: PathStats,
}

/// The current state of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Id of the session.
    pub session: SessId,
    /// The name the client gave it; `None` until the first INFO_REQ.
    pub name: Option<SessionName>,
    /// Its UUID on the wire.
    pub uuid: Uuid,
    /// Its paths, oldest first.
    pub paths: Vec<PathInfo>,
    /// Operations not answered yet, including those of paths that are gone.
    pub operations: usize,
}
