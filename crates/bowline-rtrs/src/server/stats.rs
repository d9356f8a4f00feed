//! What a server counts, and what it tells of sessions and paths.

use std::net::SocketAddr;

use bowline_wire::rtrs::{SessionName, Uuid};

use super::{PathState, SessId};
use crate::{PathId, PortId};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Every counter of a server; monotonic.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct ServerCounters {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl ServerCounters {
            /// Names and values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

counters! {
    /// Connection requests accepted.
    accepted,
    /// Connection requests refused [RT-28].
    refused,
    /// Of these: as much as there may be was there already, sessions or their memory or connections
    /// [RT-66].
    refused_full,
    /// Paths that were connected.
    paths_connected,
    /// Paths closed, whether they had been connected or not.
    paths_closed,
    /// Of these: the client broke a rule [RT-67].
    paths_violated,
    /// Of these: the client, or the name of its session, was not admitted [RT-64], [RT-20].
    paths_refused,
    /// Of these: nothing had proved that the client was there, and others asked [RT-66].
    paths_pushed_out,
    /// Requests handed to the upper layer.
    requests,
    /// Requests that waited for a chunk that another path's operation still held [RS-9].
    requests_waited,
    /// Requests dropped because their path closed before they were begun.
    requests_dropped,
    /// Answers given.
    answers,
    /// Answers that waited for room in the send queue [RT-53].
    answers_waited,
    /// Answers dropped because their path was gone [RS-19].
    answers_dropped,
    /// HB_MSGs sent.
    heartbeats_sent,
    /// HB_MSGs answered.
    heartbeats_answered,
    /// HB_MSGs not answered because the send queue was full of answers.
    heartbeats_dropped,
    /// Notices of paths that are given up [RT-101].
    notices,
    /// Of these: there was no such path, since it was closed already, or never there.
    notices_ignored,
    /// Immediates ignored: of an unknown type, an answer, or a heartbeat where none belongs
    /// [RT-14], [RT-62], [RT-67].
    immediates_ignored,
}

/// Counts of a path, as `stats/rdma` and `stats/wc_completion` show them [RS-43], [RS-46].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// How often there were any to be handled.
    pub wc_calls: u64,
}

/// What a path is like now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathInfo {
    /// Its name.
    pub path: PathId,
    /// Device it came by.
    pub port: PortId,
    /// Own address.
    pub local: SocketAddr,
    /// The client's.
    pub remote: SocketAddr,
    /// State.
    pub state: PathState,
    /// Connections of the path.
    pub connections: u16,
    /// Keys are refreshed on it.
    pub refresh: bool,
    /// Counts.
    pub stats: PathStats,
}

/// What a session is like now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Its name here.
    pub session: SessId,
    /// What the client calls it; `None` until a path has told.
    pub name: Option<SessionName>,
    /// Its name on the wire.
    pub uuid: Uuid,
    /// Its paths, oldest first.
    pub paths: Vec<PathInfo>,
    /// Operations not answered yet, those of paths that are gone included.
    pub operations: usize,
}
