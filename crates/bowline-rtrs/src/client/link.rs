//! A link: one attempt to connect a path, from the first connect to the end of its connections.

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

/// How far a link has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// This connection is being made.
    Connecting(u16),
    /// INFO_RSP is waited for.
    Info,
    /// Carries IO.
    Up,
    /// Takes no new IO; what is in flight may end by itself for a while.
    Quiet,
    /// Queue pairs are in error; their queues run empty, or they are removed [RT-100].
    Draining,
    /// Queues are empty; the peer's answers to the disconnects are waited for.
    Parting,
}

#[derive(Debug)]
pub(super) struct Link {
    /// The path it belongs to; `None`: it ends in the background.
    pub(super) path: Option<PathId>,
    pub(super) port: PortId,
    /// What notices call the path, as long as it has this link.
    pub(super) life: PathLife,
    pub(super) phase: Phase,
    /// End of the phase.
    pub(super) deadline: Option<Instant>,
    /// When the path stops waiting for the end of the link, from the beginning of the end on.
    pub(super) release_at: Option<Instant>,
    pub(super) conns: Vec<Conn>,
    /// What the server announced, once it has.
    pub(super) geometry: Option<Geometry>,
    /// Each reply brings the new key of its chunk.
    pub(super) new_rkey: bool,
    /// Each reply renews the key of its chunk, and does not say to what [RT-99].
    pub(super) counted_keys: bool,
    /// The server ends paths of which it gets notice that they are given up [RT-101].
    pub(super) heeds_notice: bool,
    /// Paths that were given up when INFO_REQ was sent.
    pub(super) named: Vec<PathLife>,
    /// Address and key of each chunk.
    pub(super) chunks: Vec<(u64, u32)>,
    /// Keys for single requests.
    pub(super) keys: Keys,
    /// Memory of INFO_RSP, INFO_REQ and the receives.
    pub(super) memory: Option<(RegionId, Arc<Buffer>)>,
    pub(super) heartbeat: Option<Heartbeat>,
    pub(super) inflight: u32,
    /// It has carried IO, and the session counts it as up.
    pub(super) counted: bool,
    /// The server broke the rules: nothing it says is believed any more.
    pub(super) distrusted: bool,
    /// The server was not ready for the path: it has not noticed the end of its last link.
    pub(super) busy: bool,
    /// Why it ended.
    pub(super) errno: Errno,
    /// Completions of the batch being handled.
    pub(super) handled: u64,
}

impl Link {
    pub(super) fn new(path: PathId, port: PortId, life: PathLife) -> Self {
        Self {
            path: Some(path),
            port,
            life,
            phase: Phase::Connecting(0),
            deadline: None,
            release_at: None,
            conns: Vec::new(),
            geometry: None,
            new_rkey: false,
            counted_keys: false,
            heeds_notice: false,
            named: Vec::new(),
            chunks: Vec::new(),
            keys: Keys::None,
            memory: None,
            heartbeat: None,
            inflight: 0,
            counted: false,
            distrusted: false,
            busy: false,
            errno: Errno::ECONNABORTED,
            handled: 0,
        }
    }

    /// Tells whether what was sent may be sent again: its queue pairs are not in error.
    pub(super) const fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Connecting(_) | Phase::Info | Phase::Up | Phase::Quiet)
    }

    /// Where INFO_REQ lies in the memory.
    pub(super) fn info_req_at(&self) -> u64 {
        let depth = self.geometry.map_or(0, |g| g.queue_depth());
        (8 + 16 * u64::from(depth)).next_multiple_of(64)
    }

    /// Where the receives begin in the memory.
    pub(super) fn recvs_at(&self) -> u64 {
        self.info_req_at() + (INFO_REQ_MAX as u64).next_multiple_of(64)
    }

    /// A receive of a connection.
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
    /// Ordered, not answered.
    Connecting,
    /// Made.
    Established,
    /// Never made: nothing was posted.
    Failed,
    /// Ordered to be forgotten, since its queues did not run empty [RT-100].
    Forgotten,
}

#[derive(Debug)]
pub(super) struct Conn {
    pub(super) state: ConnState,
    /// Entries of the send queue the core may use.
    pub(super) send_max: u32,
    /// Receives that are posted.
    pub(super) recvs: u32,
    /// The first of its receives among those of the link.
    pub(super) recv_base: u32,
    /// Send queue entries in use, as far as is known.
    used: u32,
    /// Requests posted since the last signalled one, that included: what its completion frees goes
    /// into `signals`.
    unsignalled: u32,
    signals: VecDeque<u32>,
    /// A request at so many is signalled.
    pub(super) signal_every: u32,
    /// Work requests posted, and those of them that are known to have completed.
    posted: u64,
    sent: u64,
    /// Somebody waits until what was posted has completed, and no signalled request has followed
    /// yet.
    pub(super) fenced: bool,
    /// Requests in flight, those that wait included.
    pub(super) inflight: u32,
    /// Those of them that are posted and whose answer may take two receives.
    pub(super) granted: u32,
    /// Requests that found no room.
    pub(super) waiting: VecDeque<u16>,
    /// Requests whose keys are to be invalidated and found no room.
    pub(super) revoking: VecDeque<u16>,
    /// Notices that found no room, or that the server cannot take yet.
    pub(super) notices: VecDeque<PathLife>,
    /// Drain markers that have come back, or would have.
    pub(super) drained: u8,
    /// The peer has disconnected, or answered a disconnect, or has nothing to answer.
    pub(super) parted: bool,
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
            granted: 0,
            waiting: VecDeque::new(),
            revoking: VecDeque::new(),
            notices: VecDeque::new(),
            drained: 0,
            parted: false,
        }
    }

    pub(super) const fn is_drained(&self) -> bool {
        self.drained >= 2
    }

    /// Tells whether a request may be posted, with so many entries left free.
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

    /// Posts a work request without a completion of its own: another one follows at once.
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

    /// A work request more, of which nothing is known yet.
    const fn count_posted(&mut self) {
        self.used += 1;
        self.unsignalled += 1;
        self.posted += 1;
    }

    /// Posts a send work request; with `always` it completes with an entry in any case.
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

    /// A signalled request has completed, and all before it with it.
    pub(super) fn sent(&mut self) {
        let freed = self.signals.pop_front().unwrap_or(0);
        self.used = self.used.saturating_sub(freed);
        self.sent += u64::from(freed);
    }

    /// The number of work requests after whose completion all that were posted until now are over;
    /// `None` when they are. The next one posted completes with an entry.
    pub(super) fn fence(&mut self) -> Option<u64> {
        let all_sent = self.sent == self.posted;
        self.fenced |= !all_sent && self.unsignalled > 0;
        (!all_sent).then_some(self.posted)
    }

    /// Tells whether so many work requests have completed.
    pub(super) const fn is_past(&self, fence: u64) -> bool {
        self.sent >= fence
    }
}

/// All links, by place and life.
#[derive(Debug, Default)]
pub(super) struct Table<T> {
    slots: Vec<(u8, Option<T>)>,
    free: Vec<u16>,
}

impl<T> Table<T> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    /// Adds one; `None` when the table is full.
    pub(super) fn add(&mut self, one: T) -> Option<PathId> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < usize::from(crate::PATHS_MAX) => {
                self.slots.push((u8::MAX, None));
                (self.slots.len() - 1) as u16
            }
            None => return None,
        };
        let (life, place) = &mut self.slots[usize::from(slot)];
        *life = life.wrapping_add(1);
        *place = Some(one);
        Some(PathId { slot, life: *life })
    }

    pub(super) fn get(&self, id: PathId) -> Option<&T> {
        let (life, one) = self.slots.get(usize::from(id.slot))?;
        if *life == id.life { one.as_ref() } else { None }
    }

    pub(super) fn get_mut(&mut self, id: PathId) -> Option<&mut T> {
        let (life, one) = self.slots.get_mut(usize::from(id.slot))?;
        if *life == id.life { one.as_mut() } else { None }
    }

    pub(super) fn remove(&mut self, id: PathId) -> Option<T> {
        let (life, one) = self.slots.get_mut(usize::from(id.slot))?;
        let gone = if *life == id.life { one.take() } else { None };
        if gone.is_some() {
            self.free.push(id.slot);
        }
        gone
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (PathId, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, (life, one))| {
            one.as_ref().map(|one| (PathId { slot: slot as u16, life: *life }, one))
        })
    }

    pub(super) fn ids(&self) -> Vec<PathId> {
        self.iter().map(|(id, _)| id).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }
}
