//! What the tree needs to know and to do; sessions and servers give it.

use std::net::IpAddr;

use bowline_ctl::{Errno, PathSpec};
use bowline_rtrs::{PathId, Policy};

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

    /// Returns how often a path is connected again in vain before it is given up; -1 = for ever.
    fn max_reconnects(&self) -> i16;

    /// Changes it.
    fn set_max_reconnects(&self, attempts: i16);

    /// Adds a path and waits until it is connected or has failed [RS-34].
    ///
    /// # Errors
    ///
    /// What kept it from being connected; the path is gone then.
    fn add_path(&self, path: PathSpec) -> Result<(), Errno>;

    /// Carries out a command on a path and waits for its end [RS-37..39].
    ///
    /// # Errors
    ///
    /// As the rules of the commands say; `ENODEV` for a path that is gone.
    fn command(&self, path: PathId, command: PathCommand) -> Result<(), Errno>;

    /// Sets statistics of a path back to 0.
    fn reset(&self, path: PathId, what: Stats);
}

/// What can be asked of a path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PathCommand {
    /// Connect it again, now.
    Reconnect,
    /// End its connections and leave it at that.
    Disconnect,
    /// End it and forget it.
    Remove,
}

/// Groups of statistics that are set back together [RS-41] [RS-42].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Stats {
    /// Reads, writes, failovers.
    Rdma,
    /// Completions on other processors than expected.
    Migration,
    /// Connections made again.
    Reconnects,
    /// Latencies of requests.
    Latency,
    /// Completions handled at once.
    Completions,
    /// All of these.
    All,
}

/// A path of a client session.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ClientPath {
    /// Names it in commands.
    pub id: PathId,
    /// Local address.
    pub src: IpAddr,
    /// Address of the server.
    pub dst: IpAddr,
    /// It carries requests.
    pub connected: bool,
    /// Name of the device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// Round trip of the last heartbeat, nanoseconds.
    pub latency_ns: u64,
    /// What it has done.
    pub stats: ClientStats,
}

/// What a path of a client has done.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct ClientStats {
    /// Reads and writes.
    pub io: IoStats,
    /// Requests that were moved here from a path that failed.
    pub failovers: u64,
    /// How often it was connected again.
    pub reconnects: u64,
    /// How often that failed.
    pub reconnects_failed: u64,
    /// Per processor: completions expected there that ran elsewhere.
    pub migration_from: Vec<u64>,
    /// Per processor: completions that ran there and belonged elsewhere.
    pub migration_to: Vec<u64>,
    /// Reads and writes by the time they took; rows as [`LATENCY_ROWS`] says.
    pub latency: [(u64, u64); LATENCY_ROWS],
    /// The longest, in whole milliseconds.
    pub latency_max_ms: (u64, u64),
    /// Work completions.
    pub completions: Completions,
}

/// Reads and writes of a path.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct IoStats {
    /// Reads.
    pub reads: u64,
    /// Their bytes, user messages included.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Their bytes, user messages included.
    pub write_bytes: u64,
    /// Requests without an answer yet.
    pub inflight: u64,
}

/// Work completions handled per wake-up.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Completions {
    /// Most at once.
    pub max: u64,
    /// All.
    pub total: u64,
    /// Wake-ups that found any.
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

    /// Sets statistics of a path back to 0.
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
    /// Names it in commands.
    pub id: PathId,
    /// Address of the client.
    pub client: IpAddr,
    /// Address of this server.
    pub server: IpAddr,
    /// Name of the device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// What it has done.
    pub io: IoStats,
    /// Work completions.
    pub completions: Completions,
}
