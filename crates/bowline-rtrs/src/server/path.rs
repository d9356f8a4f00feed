//! Paths and their connections.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use bowline_verbs::Buffer;
use bowline_wire::rtrs::{INFO_REQ_LEN, INFO_REQ_MAX, PathLife, Uuid};

use super::PathStats;
use super::accept::Asked;
use super::sendq::SendQueue;
use crate::{ConnId, Heartbeat, Instant, MemRef, PATHS_MAX, PathId, PortId, RegionId, RequestId};

/// State of a path [RS-18]. A path connects only once.
///
/// ```text
/// Connecting --INFO_RSP--> Connected --+
///      |                               v
///      +---------------------------> Closing --queues empty--> Closed --peer answered--> (gone)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// Connections are made, and the client asks for the chunks.
    Connecting,
    /// Requests are served.
    Connected,
    /// The queues are being flushed.
    Closing,
    /// The queue pairs are dead. The session does not know the path any more; only the disconnects
    /// are still repeated to the client.
    Closed,
}

/// The progress of a path in [`PathState::Connecting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setup {
    /// Its internal memory is being registered; the connections wait.
    Preparing,
    /// Connections are being made.
    Connecting,
    /// INFO_REQ came, the chunks are being registered.
    Registering,
    /// The upper layer is being asked.
    Linking,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) state: ConnState,
    /// The connection request, while the binding can still refuse it.
    pub(super) request: Option<RequestId>,
    /// The client knows of it.
    pub(super) established: bool,
    /// The client has disconnected, or has answered a disconnect.
    pub(super) disconnected: bool,
    pub(super) queue: SendQueue,
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnState {
    /// Requested; the path's memory is not registered yet.
    Requested,
    /// Accepted.
    Live,
    /// Ordered to close; counts its drain markers.
    Closing(u8),
    /// Being destroyed, since its queues were not flushed [RT-100].
    Forgetting,
    /// Its queues are flushed.
    Drained,
    /// Destroyed.
    Gone,
}

/// The connections of a path. Connections that a client only announces take no memory: they may
/// never come [RT-66].
#[derive(Debug)]
pub(super) struct Conns {
    /// Number of connections the client wants.
    count: u16,
    /// All connections, once all are requested.
    all: Vec<Conn>,
    /// Until then the requested ones, by number.
    asked: BTreeMap<u16, Conn>,
}

impl Conns {
    pub(super) const fn new(count: u16) -> Self {
        Self { count, all: Vec::new(), asked: BTreeMap::new() }
    }

    pub(super) const fn len(&self) -> u16 {
        self.count
    }

    #[inline]
    pub(super) fn get_mut(&mut self, cid: u16) -> Option<&mut Conn> {
        match self.all.get_mut(usize::from(cid)) {
            Some(conn) => Some(conn),
            None => self.asked.get_mut(&cid),
        }
    }

    /// The requested connections with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u16, &Conn)> {
        let asked = self.asked.iter().map(|(cid, conn)| (*cid, conn));
        (0..).zip(&self.all).chain(asked)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Conn)> {
        let asked = self.asked.iter_mut().map(|(cid, conn)| (*cid, conn));
        (0..).zip(&mut self.all).chain(asked)
    }

    /// Adds a requested connection; its number must be unused.
    pub(super) fn ask(&mut self, cid: u16, conn: Conn) {
        self.asked.insert(cid, conn);
        if self.asked.len() == usize::from(self.count) {
            self.all = std::mem::take(&mut self.asked).into_values().collect();
        }
    }

    /// Whether all connections are requested.
    pub(super) const fn are_all_asked(&self) -> bool {
        !self.all.is_empty()
    }
}

/// A path's state of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkKey {
    /// The client's present key, if keys are refreshed.
    pub(super) rkey: u32,
    /// The client has sent a request in the chunk that was not answered yet.
    pub(super) taken: bool,
}

/// The path's internal memory: INFO_REQ, the key messages, INFO_RSP.
#[derive(Debug)]
pub(super) struct InternalMemory {
    pub(super) region: RegionId,
    pub(super) buffer: Arc<Buffer>,
    depth: u64,
}

impl InternalMemory {
    const KEYS: u64 = INFO_REQ_MAX as u64;

    /// Bytes it takes for this many chunks.
    pub(super) const fn bytes(depth: u16, refresh: bool) -> usize {
        let descs = if refresh { depth as usize } else { 1 };
        INFO_REQ_MAX + 8 * depth as usize + 8 + 16 * descs
    }

    pub(super) fn new(region: RegionId, buffer: Arc<Buffer>, depth: u16) -> Self {
        Self { region, buffer, depth: depth.into() }
    }

    const fn piece(&self, offset: u64, len: u32) -> MemRef {
        MemRef { region: self.region, offset, len }
    }

    /// `names`: INFO_REQ may name given-up paths.
    pub(super) const fn info_req(&self, names: bool) -> MemRef {
        self.piece(0, if names { INFO_REQ_MAX } else { INFO_REQ_LEN } as u32)
    }

    pub(super) const fn key_msg(&self, chunk: u16) -> MemRef {
        self.piece(Self::KEYS + 8 * chunk as u64, 8)
    }

    pub(super) const fn info_rsp(&self, len: u32) -> MemRef {
        self.piece(Self::KEYS + 8 * self.depth, len)
    }
}

/// A path.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) id: PathId,
    /// Slot of the session.
    pub(super) session: u32,
    pub(super) uuid: Uuid,
    /// The path's name in notices.
    pub(super) generation: PathLife,
    /// Number of the client's attempt that it belongs to [RT-33].
    pub(super) attempt: u16,
    /// The request by which the client begins it once more, while this one ends.
    pub(super) again: Option<Box<Asked>>,
    pub(super) port: PortId,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) state: PathState,
    pub(super) setup: Setup,
    /// The client is proven to exist: it has received what was sent to its address [RT-66].
    pub(super) proven: bool,
    /// Its chunk keys are refreshed [RT-65].
    pub(super) refresh: bool,
    /// They are refreshed, but not sent to the client, which counts them [RT-99].
    pub(super) counted: bool,
    /// The client gives notice of paths it has given up [RT-101].
    pub(super) accepts_notice: bool,
    /// The client has given up this path.
    pub(super) given_up: bool,
    pub(super) conns: Conns,
    pub(super) internal: InternalMemory,
    /// The chunks, registered for this path.
    pub(super) region: Option<RegionId>,
    pub(super) keys: Vec<ChunkKey>,
    /// Bytes of INFO_RSP, until it is sent.
    pub(super) info_rsp_len: u32,
    pub(super) heartbeat: Option<Heartbeat>,
    /// When a connecting path times out, or a closed one stops waiting for its client.
    pub(super) deadline: Instant,
    /// When a closed path stops waiting for its queues to be flushed.
    pub(super) drain_by: Instant,
    /// Number of its requests that wait for a chunk.
    pub(super) waiting: usize,
    pub(super) stats: PathStats,
    /// Completions in the current call of `handle_done`, and that call's number.
    pub(super) turn: (u64, u64),
}

impl Path {
    pub(super) const fn conn_id(&self, cid: u16) -> ConnId {
        ConnId { path: self.id, cid }
    }

    /// Number of connections that exist or may still come; they count against the limits.
    pub(super) fn promised(&self) -> usize {
        if self.proven { self.conns.len().into() } else { 0 }
    }

    /// Whether all its queue pairs are dead.
    pub(super) fn is_drained(&self) -> bool {
        (self.conns.iter())
            .all(|(_, conn)| matches!(conn.state, ConnState::Drained | ConnState::Gone))
    }

    /// Whether the binding has no object of it any more.
    pub(super) fn is_gone(&self) -> bool {
        self.conns.iter().all(|(_, conn)| conn.state == ConnState::Gone)
    }

    /// Counts a work completion in this call of `handle_done`.
    pub(super) fn count_completion(&mut self, turn: u64) {
        if self.turn.0 != turn {
            self.turn = (turn, 0);
            self.stats.wc_calls += 1;
        }
        self.turn.1 += 1;
        self.stats.wc_total += 1;
        self.stats.wc_max = self.stats.wc_max.max(self.turn.1);
    }
}

/// All paths of a server.
#[derive(Debug, Default)]
pub(super) struct Paths {
    slots: Vec<Slot>,
    /// Connections of all proven paths, announced or made.
    pub(super) connections: usize,
    used: usize,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u8,
    path: Option<Path>,
}

impl Paths {
    pub(super) const fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// The id of the next path; `None` when there are too many.
    pub(super) fn vacancy(&self) -> Option<PathId> {
        let at = self.slots.iter().position(|slot| slot.path.is_none());
        let slot = u16::try_from(at.unwrap_or(self.slots.len())).ok()?;
        let generation = self.slots.get(usize::from(slot)).map_or(0, |slot| slot.generation);
        (slot < PATHS_MAX).then_some(PathId { slot, generation })
    }

    /// Adds a path, whose id must come from [`vacancy`](Self::vacancy).
    pub(super) fn add(&mut self, path: Path) {
        let at = usize::from(path.id.slot);
        if at == self.slots.len() {
            self.slots.push(Slot::default());
        }
        self.used += 1;
        self.slots[at].path = Some(path);
    }

    /// Marks the client of a path as proven.
    pub(super) fn prove(&mut self, id: PathId) {
        if let Some(path) = self.get_mut(id)
            && !std::mem::replace(&mut path.proven, true)
        {
            self.connections += path.promised();
        }
    }

    /// Removes a path. The generation of its slot distinguishes later events for it.
    pub(super) fn remove(&mut self, slot: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(slot))
            && let Some(path) = slot.path.take()
        {
            slot.generation = slot.generation.wrapping_add(1);
            self.connections -= path.promised();
            self.used -= 1;
        }
    }

    pub(super) fn at(&self, slot: u16) -> Option<&Path> {
        self.slots.get(usize::from(slot))?.path.as_ref()
    }

    pub(super) fn at_mut(&mut self, slot: u16) -> Option<&mut Path> {
        self.slots.get_mut(usize::from(slot))?.path.as_mut()
    }

    /// The path of this id, if it still exists.
    pub(super) fn get(&self, id: PathId) -> Option<&Path> {
        self.at(id.slot).filter(|path| path.id == id)
    }

    pub(super) fn get_mut(&mut self, id: PathId) -> Option<&mut Path> {
        self.at_mut(id.slot).filter(|path| path.id == id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Path> {
        self.slots.iter().filter_map(|slot| slot.path.as_ref())
    }

    /// Number of slots, used or not.
    pub(super) fn slots(&self) -> u16 {
        self.slots.len() as u16
    }
}
