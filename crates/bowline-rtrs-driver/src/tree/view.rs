//! The interfaces that sessions and servers implement for the tree.

use std::{net::IpAddr, time::Duration};

use bowline_ctl::{Errno, PathSpec};
use bowline_rtrs::{PathId, Policy};
use bowline_verbs::PathStats;

/// Rows of the latency histogram: up to 1, 2, 4 .. 65536 ms, and above [RS-46].
pub const LATENCY_ROWS: usize = 18;

/// A session of this client.
pub trait ClientSession: Send + Sync {
    /// Returns its name.
    fn name(&self) -> String;

    /// Returns its paths, in the order in which they were added.
    fn paths(&self) -> Vec<ClientPath>;

    /// Returns how paths are chosen.
    fn policy(&self) -> Policy;

    /// Changes how paths are chosen.
    fn set_policy(&self, policy: Policy);

    /// Returns how many failed attempts to reconnect a path are made before it is given up; -1: no
    /// limit.
    fn max_reconnects(&self) -> i16;

    /// Changes [`max_reconnects`](Self::max_reconnects).
    fn set_max_reconnects(&self, attempts: i16);

    /// Adds a path and waits until it is connected or has failed [RS-34].
    ///
    /// # Errors
    ///
    /// The error that kept the path from being connected; the path is removed then.
    fn add_path(&self, path: PathSpec) -> Result<(), Errno>;

    /// Carries out a command on a path and waits for its end [RS-37..39].
    ///
    /// # Errors
    ///
    /// Those given by the rules of the commands; `ENODEV` for a path that is gone.
    fn command(&self, path: PathId, command: PathCommand) -> Result<(), Errno>;

    /// Resets statistics of a path to 0.
    fn reset(&self, path: PathId, what: Stats);
}

/// A command on a path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PathCommand {
    /// Reconnects the path now.
    Reconnect,
    /// Closes the path's connections and does not reconnect it.
    Disconnect,
    /// Closes the path and removes it.
    Remove,
}

/// Groups of statistics that are reset together [RS-41] [RS-42].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Stats {
    /// Reads, writes, failovers.
    Rdma,
    /// Completions on another processor than expected.
    Migration,
    /// Reconnections.
    Reconnects,
    /// Latencies of requests.
    Latency,
    /// Completions handled per wake-up.
    Completions,
    /// All of these groups.
    All,
}

/// A path of a client session.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ClientPath {
    /// Identifies the path in commands.
    pub id: PathId,
    /// Local address.
    pub src: IpAddr,
    /// Address of the server.
    pub dst: IpAddr,
    /// The path carries requests.
    pub connected: bool,
    /// Name of the device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// Round-trip time of the last heartbeat in nanoseconds.
    pub latency_ns: u64,
    /// Counters of the path.
    pub stats: ClientStats,
    /// What the device knows about the way to the server, for all paths to its address together;
    /// `None` if it does not tell.
    pub network: Option<PathStats>,
}

/// Counters of a client's path.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct ClientStats {
    /// Reads and writes.
    pub io: IoStats,
    /// Requests that were moved here from a path that failed.
    pub failovers: u64,
    /// Successful reconnections.
    pub reconnects: u64,
    /// Failed attempts to reconnect.
    pub reconnects_failed: u64,
    /// For each processor: completions that were expected there and ran elsewhere.
    pub migration_from: Vec<u64>,
    /// For each processor: completions that ran there and were expected elsewhere.
    pub migration_to: Vec<u64>,
    /// Number of reads and of writes by latency; rows as for [`LATENCY_ROWS`].
    pub latency: [(u64, u64); LATENCY_ROWS],
    /// The highest latency of a read and of a write, in whole milliseconds.
    pub latency_max_ms: (u64, u64),
    /// All latencies of reads and of writes together.
    pub latency_sum: (Duration, Duration),
    /// Work completions.
    pub completions: Completions,
}

/// Reads and writes of a path.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct IoStats {
    /// Reads.
    pub reads: u64,
    /// Bytes of these reads, user messages included.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of these writes, user messages included.
    pub write_bytes: u64,
    /// Requests without a response yet.
    pub inflight: u64,
}

/// Work completions handled per wake-up.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Completions {
    /// The most in one wake-up.
    pub max: u64,
    /// The total.
    pub total: u64,
    /// Wake-ups that found completions.
    pub calls: u64,
}

/// A server with its sessions.
pub trait ServerSessions: Send + Sync {
    /// Returns the sessions that have a name, with their connected paths.
    fn sessions(&self) -> Vec<ServerSession>;

    /// Closes a path, in the background [RS-40].
    ///
    /// # Errors
    ///
    /// `ENODEV` for a path that is gone.
    fn disconnect(&self, path: PathId) -> Result<(), Errno>;

    /// Resets statistics of a path to 0.
    fn reset(&self, path: PathId, what: Stats);
}

/// A session of a server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServerSession {
    /// Its name.
    pub name: String,
    /// Its paths, oldest first.
    pub paths: Vec<ServerPath>,
}

/// A path of a server session.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServerPath {
    /// Identifies the path in commands.
    pub id: PathId,
    /// Address of the client.
    pub client: IpAddr,
    /// Address of this server.
    pub server: IpAddr,
    /// Name of the device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// Reads and writes of the path.
    pub io: IoStats,
    /// Work completions.
    pub completions: Completions,
    /// What the device knows about the way to the client, for all paths to its address together;
    /// `None` if it does not tell.
    pub network: Option<PathStats>,
}
