//! An incarnation of a path: one attempt to connect it, from the first connect to the end of its
//! connections.

use std::collections::VecDeque;
use std::sync::Arc;

use bowline_verbs::Buffer;
use bowline_wire::rtrs::{Geometry, INFO_REQ_MAX, PathLife};

use super::keys::Keys;
use crate::{
    Batch, ConnId, Errno, Heartbeat, Instant, MemRef, PathId, PortId, RecvSlot, RegionId, Tag, Wr,
    WrKind,
};

/// Send queue entries kept free for heartbeats.
pub(super) const HEARTBEAT_RESERVE: u32 = 4;
/// Bytes of a receive that takes RKEY_RSP.
pub(super) const RECV_SLOT: u32 = 8;

/// The phase of an incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The connection of this number is being made.
    Connecting(u16),
    /// Waiting for INFO_RSP.
    Info,
    /// Carries IO.
    Up,
    /// Takes no new IO; requests in flight may complete for a while.
    Quiescing,
    /// Queue pairs are in the error state: their queues are being flushed, or the queue pairs
    /// destroyed [RT-100].
    Draining,
    /// The queues are empty; waiting for the peer's answers to the disconnects.
    Disconnecting,
}

#[derive(Debug)]
pub(super) struct Incarnation {
    /// The path it belongs to; `None` once it ends in the background.
    pub(super) path: Option<PathId>,
    pub(super) port: PortId,
    /// The name of this incarnation in notices.
    pub(super) generation: PathLife,
    pub(super) phase: Phase,
    /// When the phase times out.
    pub(super) deadline: Option<Instant>,
    /// When the path stops waiting for the end of this incarnation; set when the end begins.
    pub(super) release_at: Option<Instant>,
    pub(super) conns: Vec<Conn>,
    /// The geometry the server announced.
    pub(super) geometry: Option<Geometry>,
    /// Each reply carries the new key of its chunk.
    pub(super) new_rkey: bool,
    /// Each reply advances the key of its chunk without carrying it [RT-99].
    pub(super) counted_keys: bool,
    /// The server ends paths when it gets notice that they are given up [RT-101].
    pub(super) accepts_notice: bool,
    /// Given-up incarnations that its INFO_REQ named.
    pub(super) named: Vec<PathLife>,
    /// Address and key of each chunk.
    pub(super) chunks: Vec<(u64, u32)>,
    /// Keys for single requests.
    pub(super) keys: Keys,
    /// Memory of INFO_RSP, INFO_REQ and the receives.
    pub(super) memory: Option<(RegionId, Arc<Buffer>)>,
    pub(super) heartbeat: Option<Heartbeat>,
    pub(super) inflight: u32,
    /// It has carried IO and is counted in `Session::up`.
    pub(super) counted: bool,
    /// The server has answered IO on it, not only service messages.
    pub(super) served: bool,
    /// The server broke the rules: its later messages are ignored.
    pub(super) distrusted: bool,
    /// The server refused because it has not noticed the end of the former incarnation.
    pub(super) busy: bool,
    /// The error that ended it.
    pub(super) errno: Errno,
    /// Completions handled in the current batch.
    pub(super) handled: u64,
}

impl Incarnation {
    pub(super) fn new(path: PathId, port: PortId, generation: PathLife) -> Self {
        Self {
            path: Some(path),
            port,
            generation,
            phase: Phase::Connecting(0),
            deadline: None,
            release_at: None,
            conns: Vec::new(),
            geometry: None,
            new_rkey: false,
            counted_keys: false,
            accepts_notice: false,
            named: Vec::new(),
            chunks: Vec::new(),
            keys: Keys::None,
            memory: None,
            heartbeat: None,
            inflight: 0,
            counted: false,
            served: false,
            distrusted: false,
            busy: false,
            errno: Errno::ECONNABORTED,
            handled: 0,
        }
    }

    /// Whether its queue pairs work: they have not been taken to the error state.
    pub(super) const fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Connecting(_) | Phase::Info | Phase::Up | Phase::Quiescing)
    }

    /// Offset of INFO_REQ in the memory.
    pub(super) fn info_req_at(&self) -> u64 {
        let depth = self.geometry.map_or(0, |g| g.queue_depth());
        (8 + 16 * u64::from(depth)).next_multiple_of(64)
    }

    /// Offset of the receives in the memory.
    pub(super) fn recvs_at(&self) -> u64 {
        self.info_req_at() + (INFO_REQ_MAX as u64).next_multiple_of(64)
    }

    /// The receive of this index of a connection.
    pub(super) fn recv_slot(&self, conn: ConnId, index: u32) -> Option<RecvSlot> {
        let of = self.conns.get(usize::from(conn.cid))?;
        let (region, _) = self.memory.as_ref()?;
        let offset = self.recvs_at() + u64::from((of.recv_base + index) * RECV_SLOT);
        let mem = MemRef { region: *region, offset, len: RECV_SLOT };
        let mem = self.new_rkey.then_some(mem);
        Some(RecvSlot { conn, tag: Tag::new(Tag::RECV, index), mem })
    }
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnState {
    /// Ordered, but not answered yet.
    Connecting,
    /// Made.
    Established,
    /// Could not be made: nothing was posted on it.
    Failed,
    /// Its queue pair is being destroyed, because its queues were not flushed [RT-100].
    Forgotten,
}

#[derive(Debug)]
pub(super) struct Conn {
    pub(super) state: ConnState,
    /// Send queue entries that the core may use.
    pub(super) send_max: u32,
    /// Receives that are posted.
    pub(super) recvs: u32,
    /// Index of its first receive among those of the incarnation.
    pub(super) recv_base: u32,
    /// Send queue entries in use, as far as completions have told.
    used: u32,
    /// Work requests since the last signalled one, including that one. Its completion frees as many
    /// entries as recorded in `signals`.
    unsignalled: u32,
    signals: VecDeque<u32>,
    /// At least one in this many work requests is signalled.
    pub(super) signal_every: u32,
    /// Work requests posted, and those known to have completed.
    posted: u64,
    sent: u64,
    /// A caller waits for completion of everything posted, and no signalled work request has
    /// followed yet.
    pub(super) fenced: bool,
    /// Requests in flight, including those that wait for room.
    pub(super) inflight: u32,
    /// Posted requests with a key of their own, whose response may take two receives.
    pub(super) with_own_key: u32,
    /// Requests that wait for room in the queues.
    pub(super) waiting: VecDeque<u16>,
    /// Requests whose keys are to be invalidated; they wait for room in the send queue.
    pub(super) invalidating: VecDeque<u16>,
    /// Notices that wait for room, or until the server can take them.
    pub(super) notices: VecDeque<PathLife>,
    /// Drain markers that have completed, or count as completed.
    pub(super) drained: u8,
    /// The peer has disconnected, has answered a disconnect, or owes no answer.
    pub(super) disconnected: bool,
}

impl Conn {
    pub(super) fn new(send_max: u32, recvs: u32) -> Self {
        Self {
            state: ConnState::Connecting,
            send_max,
            recvs,
            recv_base: 0,
            used: 0,
            unsignalled: 0,
            signals: VecDeque::with_capacity(8),
            signal_every: 1,
            posted: 0,
            sent: 0,
            fenced: false,
            inflight: 0,
            with_own_key: 0,
            waiting: VecDeque::new(),
            invalidating: VecDeque::new(),
            notices: VecDeque::new(),
            drained: 0,
            disconnected: false,
        }
    }

    pub(super) const fn is_drained(&self) -> bool {
        self.drained >= 2
    }

    /// Whether a work request may be posted while `reserve` entries stay free.
    pub(super) const fn has_room(&self, reserve: u32) -> bool {
        self.used + reserve < self.send_max
    }

    /// Posts a send work request; its memory is what was added to `mems` since `start`.
    pub(super) fn post(
        &mut self,
        batch: &mut Batch,
        conn: ConnId,
        tag: Tag,
        kind: WrKind,
        start: usize,
    ) {
        self.post_signalled(batch, conn, tag, kind, start, false);
    }

    /// Posts a work request without a completion: a signalled one follows at once.
    pub(super) fn post_unsignalled(
        &mut self,
        batch: &mut Batch,
        conn: ConnId,
        tag: Tag,
        kind: WrKind,
        start: usize,
    ) {
        self.count_posted();
        let mem = (start as u32, (batch.mems.len() - start) as u8);
        batch.wrs.push(Wr { conn, tag, kind, mem, signal: false });
    }

    /// Counts a work request that is being posted.
    const fn count_posted(&mut self) {
        self.used += 1;
        self.unsignalled += 1;
        self.posted += 1;
    }

    /// Posts a send work request; `always` forces a completion.
    pub(super) fn post_signalled(
        &mut self,
        batch: &mut Batch,
        conn: ConnId,
        tag: Tag,
        kind: WrKind,
        start: usize,
        always: bool,
    ) {
        self.count_posted();
        let fenced = std::mem::take(&mut self.fenced);
        let signal = always
            || fenced
            || self.unsignalled >= self.signal_every
            || self.used + HEARTBEAT_RESERVE >= self.send_max
            || self.signals.is_empty() && self.used >= self.send_max / 2;
        if signal {
            self.signals.push_back(std::mem::take(&mut self.unsignalled));
        }
        let mem = (start as u32, (batch.mems.len() - start) as u8);
        batch.wrs.push(Wr { conn, tag, kind, mem, signal });
    }

    /// A signalled work request has completed, and with it all before it.
    pub(super) fn sent(&mut self) {
        let freed = self.signals.pop_front().unwrap_or(0);
        self.used = self.used.saturating_sub(freed);
        self.sent += u64::from(freed);
    }

    /// Returns the number of work requests whose completion means that everything posted so far is
    /// done; `None` if it is done already. The next work request posted will be signalled.
    pub(super) fn fence(&mut self) -> Option<u64> {
        let all_sent = self.sent == self.posted;
        self.fenced |= !all_sent && self.unsignalled > 0;
        (!all_sent).then_some(self.posted)
    }

    /// Whether this many work requests have completed.
    pub(super) const fn is_past(&self, fence: u64) -> bool {
        self.sent >= fence
    }
}

/// A table with generational ids: an id is a slot and the slot's generation.
#[derive(Debug, Default)]
pub(super) struct Table<T> {
    slots: Vec<(u8, Option<T>)>,
    free: Vec<u16>,
}

impl<T> Table<T> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    /// Adds an entry; `None` when the table is full.
    pub(super) fn add(&mut self, one: T) -> Option<PathId> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < usize::from(crate::PATHS_MAX) => {
                self.slots.push((u8::MAX, None));
                (self.slots.len() - 1) as u16
            }
            None => return None,
        };
        let (generation, place) = &mut self.slots[usize::from(slot)];
        *generation = generation.wrapping_add(1);
        *place = Some(one);
        Some(PathId { slot, generation: *generation })
    }

    pub(super) fn get(&self, id: PathId) -> Option<&T> {
        let (generation, one) = self.slots.get(usize::from(id.slot))?;
        if *generation == id.generation { one.as_ref() } else { None }
    }

    pub(super) fn get_mut(&mut self, id: PathId) -> Option<&mut T> {
        let (generation, one) = self.slots.get_mut(usize::from(id.slot))?;
        if *generation == id.generation { one.as_mut() } else { None }
    }

    pub(super) fn remove(&mut self, id: PathId) -> Option<T> {
        let (generation, one) = self.slots.get_mut(usize::from(id.slot))?;
        let gone = if *generation == id.generation { one.take() } else { None };
        if gone.is_some() {
            self.free.push(id.slot);
        }
        gone
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (PathId, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, (generation, one))| {
            one.as_ref().map(|one| (PathId { slot: slot as u16, generation: *generation }, one))
        })
    }

    pub(super) fn ids(&self) -> Vec<PathId> {
        self.iter().map(|(id, _)| id).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }
}
