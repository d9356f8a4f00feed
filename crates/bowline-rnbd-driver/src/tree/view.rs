//! The data and operations behind the tree; the client's disks and the server's exports implement
//! them.

use bowline_ctl::{Errno, Refused};
use bowline_rnbd::{Failures, Latencies};
use bowline_wire::rnbd::Access;

use super::MapSpec;

/// The mapped disks of this process.
pub trait Disks: Send + Sync {
    /// Maps a disk and waits until it is open [NB-35].
    ///
    /// # Errors
    ///
    /// The errors that the rule names.
    fn map(&self, spec: &MapSpec) -> Result<(), Errno>;

    /// Returns the disks, in the order of their names.
    fn disks(&self) -> Vec<DiskInfo>;

    /// Unmaps a disk; with `force` even if it is in use [NB-37].
    ///
    /// # Errors
    ///
    /// `EBUSY` when it is in use, `EALREADY` when it is being unmapped.
    fn unmap(&self, disk: &str, force: bool) -> Result<(), Errno>;

    /// Changes the size of a disk on this side only, in sectors of 512 bytes [NB-37]; with `force`
    /// it may become smaller while it is in use [NB-74].
    ///
    /// # Errors
    ///
    /// `ENOENT` unless the disk is open; `EINVAL` if its export is smaller; `EBUSY` if it would
    /// become smaller and is in use.
    fn resize(&self, disk: &str, sectors: u64, force: bool) -> Result<(), Refused>;

    /// Opens a closed disk again and waits for the answer [NB-37].
    ///
    /// # Errors
    ///
    /// `EALREADY` when it is open, `EBUSY` before its first opening, `ENODEV` when it is unmapped,
    /// and the errors of the server.
    fn remap(&self, disk: &str) -> Result<(), Errno>;
}

/// State of a mapped disk [NB-32].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DiskState {
    /// Not opened yet.
    Init,
    /// Usable.
    Open,
    /// The session is disconnected.
    Closed,
    /// Unmapped, or being unmapped.
    Unmapped,
}

impl DiskState {
    /// Returns the text of the file `state`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Unmapped => "unmapped",
        }
    }
}

/// A mapped disk.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DiskInfo {
    /// Local name, `rnbd0`.
    pub name: String,
    /// Name on the server.
    pub mapping_path: String,
    /// Name of its session.
    pub session: String,
    /// Access mode it was opened with.
    pub access: Access,
    /// State of the disk.
    pub state: DiskState,
    /// Connections for polled IO of its session.
    pub poll_queues: u32,
    /// Size in bytes.
    pub bytes: u64,
    /// Counters of its requests.
    pub traffic: Traffic,
    /// Requests that the server's storage has failed.
    pub failures: Failures,
    /// Pieces of requests in flight, and requests that wait for a slot or for the session.
    pub queue: Queue,
    /// How long reads took.
    pub read_latencies: Latencies,
    /// How long all other requests took.
    pub write_latencies: Latencies,
}

/// Requests of a disk without an answer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Queue {
    /// Pieces of them that the server has.
    pub in_flight: u64,
    /// Requests, or remainders of requests, that wait for a slot or for the session.
    pub waiting: u64,
}

/// Counters of a block device since it appeared.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Traffic {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Requests without an answer yet.
    pub inflight: u64,
    /// Discards.
    pub discards: u64,
    /// Bytes discarded.
    pub discard_bytes: u64,
    /// Flushes.
    pub flushes: u64,
}

impl Traffic {
    /// Returns the 17 numbers of a block device's `stat`; numbers that are not measured are 0.
    pub(super) fn stat(&self) -> String {
        let sectors = |bytes| bytes / 512;
        let numbers = [
            self.reads,
            0,
            sectors(self.read_bytes),
            0,
            self.writes,
            0,
            sectors(self.write_bytes),
            0,
            self.inflight,
            0,
            0,
            self.discards,
            0,
            sectors(self.discard_bytes),
            0,
            self.flushes,
            0,
        ];
        numbers.map(|number| format!("{number:8}")).join(" ")
    }
}

/// The exports of this process.
pub trait Exports: Send + Sync {
    /// Returns the exports, in the order of their names.
    fn exports(&self) -> Vec<ExportInfo>;

    /// Closes an export for one session, by force [NB-21].
    ///
    /// # Errors
    ///
    /// `ENOENT` when the session does not have it open.
    fn force_close(&self, export: &str, session: &str) -> Result<(), Errno>;
}

/// Commands that add exports and take them away [NB-64].
pub trait ExportCommands: Send + Sync {
    /// Adds an export; the words of the text are `NAME=VALUE`.
    ///
    /// # Errors
    ///
    /// `EINVAL` for words that are not understood, `EEXIST` for a name in use, and the errors of
    /// opening the storage.
    fn export(&self, text: &str) -> Result<(), Errno>;

    /// Takes an export away; with `force` even if clients have it open.
    ///
    /// # Errors
    ///
    /// `ENOENT` when there is none of that name, `EBUSY` when it is open.
    fn unexport(&self, export: &str, force: bool) -> Result<(), Errno>;
}

/// An export.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ExportInfo {
    /// Name of the export.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Counters of its requests.
    pub traffic: Traffic,
    /// Requests that storage has failed.
    pub failures: Failures,
    /// Sessions that have it open.
    pub opens: Vec<OpenInfo>,
}

/// A session that has an export open.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct OpenInfo {
    /// Name of the session.
    pub session: String,
    /// Access mode it was opened with.
    pub access: Access,
    /// The name as the client sent it.
    pub mapping_path: String,
}
