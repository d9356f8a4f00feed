//! Sessions: the memory that a client's paths share.

use std::net::IpAddr;
use std::sync::Arc;

use bowline_verbs::{Buffer, Mem};
use bowline_wire::rtrs::{Geometry, SessionName, Uuid};

use super::SessId;
use super::chunks::{Chunk, Unused};
use crate::Errno;

/// The upper layer's knowledge of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Consent {
    /// It does not know the session.
    Down,
    /// It was asked, and has not answered yet.
    Asked,
    /// It takes requests.
    Up,
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: SessId,
    pub(super) uuid: Uuid,
    pub(super) name: Option<SessionName>,
    /// The address that began it.
    pub(super) from: IpAddr,
    /// A client of it is proven to exist.
    pub(super) proven: bool,
    /// All chunks, one after the other; empty before the first path joins.
    pub(super) buffer: Arc<Buffer>,
    pub(super) chunks: Vec<Chunk>,
    /// Tracks ranges that are used completely, to move them to large pages, which are faster.
    unused: Unused,
    /// Completely used ranges that are not moved to large pages yet: offset and length in bytes.
    filled: Vec<(usize, usize)>,
    /// Slots of its paths, oldest first.
    pub(super) paths: Vec<u16>,
    /// Operations not answered, not counting those that wait.
    pub(super) running: usize,
    /// Operations that wait for a chunk.
    pub(super) waiting: usize,
    /// Operations the upper layer has not answered, including those that wait.
    pub(super) unanswered: usize,
    /// Number of paths that have joined.
    pub(super) epoch: u32,
    /// Unanswered operations that are older than the last path's INFO_REQ.
    pub(super) old: usize,
    pub(super) consent: Consent,
}

impl Session {
    /// Makes a session without memory.
    pub(super) fn new(id: SessId, uuid: Uuid, from: IpAddr) -> Result<Self, Errno> {
        Ok(Self {
            id,
            uuid,
            name: None,
            from,
            proven: false,
            buffer: Arc::new(Buffer::new(0).map_err(|_| Errno::ENOMEM)?),
            chunks: Vec::new(),
            unused: Unused::default(),
            filled: Vec::new(),
            paths: Vec::new(),
            running: 0,
            waiting: 0,
            unanswered: 0,
            epoch: 0,
            old: 0,
            consent: Consent::Down,
        })
    }

    /// Allocates the memory of a session, if it has none. The system provides pages only when they
    /// are used.
    pub(super) fn allocate_chunks(&mut self, geometry: &Geometry) -> Result<(), Errno> {
        if self.chunks.is_empty() {
            let depth = usize::from(geometry.queue_depth());
            let chunk = geometry.chunk() as usize;
            let buffer = Buffer::sparse(depth * chunk).map(Buffer::without_direct_placement);
            self.buffer = Arc::new(buffer.map_err(|_| Errno::ENOMEM)?);
            self.chunks = vec![Chunk::FREE; depth];
            self.unused = Unused::new(depth, chunk);
        }
        Ok(())
    }

    /// Records that a request uses a chunk. Returns whether that completes a range.
    #[inline]
    pub(super) fn note_use(&mut self, index: usize) -> bool {
        let Some(chunk) = self.chunks.get_mut(index) else { return false };
        let Some((first, count)) = self.unused.note_use(index, chunk) else { return false };
        let bytes = self.buffer.len() / self.chunks.len();
        let count = count.min(self.chunks.len() - first);
        self.filled.push((first * bytes, count * bytes));
        true
    }

    /// Takes a completely used range.
    fn take_filled(&mut self) -> Option<Mem> {
        let (offset, len) = self.filled.pop()?;
        Some(Mem { buffer: Arc::clone(&self.buffer), offset, len })
    }

    /// Handles that a path joins: it is not served before everything now in progress is answered.
    pub(super) fn join(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.old = self.unanswered;
    }

    /// Records the begin of an operation; returns its epoch.
    pub(super) fn begin(&mut self) -> u32 {
        self.unanswered += 1;
        self.epoch
    }

    /// Records that an operation of this epoch is answered, or will never begin.
    pub(super) fn end(&mut self, epoch: u32) {
        self.unanswered -= 1;
        if epoch != self.epoch {
            self.old -= 1;
        }
    }

    /// Whether nothing is left of it except operations that the upper layer has not answered.
    pub(super) fn is_ending(&self) -> bool {
        self.paths.is_empty()
    }
}

/// All sessions of a server.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    slots: Vec<Slot>,
    used: usize,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    session: Option<Session>,
}

impl Sessions {
    pub(super) const fn len(&self) -> usize {
        self.used
    }

    /// Adds the session that `make` makes for the given id.
    pub(super) fn add(
        &mut self,
        make: impl FnOnce(SessId) -> Result<Session, Errno>,
    ) -> Result<&mut Session, Errno> {
        let free = self.slots.iter().position(|slot| slot.session.is_none());
        let at = free.unwrap_or(self.slots.len());
        if free.is_none() {
            self.slots.push(Slot::default());
        }
        let slot = &mut self.slots[at];
        let session = make(SessId { slot: at as u32, generation: slot.generation })?;
        self.used += 1;
        Ok(slot.session.insert(session))
    }

    /// Removes a session and its memory.
    pub(super) fn remove(&mut self, slot: u32) {
        if let Some(slot) = self.slots.get_mut(slot as usize)
            && slot.session.take().is_some()
        {
            slot.generation = slot.generation.wrapping_add(1);
            self.used -= 1;
        }
    }

    pub(super) fn get(&self, slot: u32) -> Option<&Session> {
        self.slots.get(slot as usize)?.session.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut Session> {
        self.slots.get_mut(slot as usize)?.session.as_mut()
    }

    /// Takes a completely used range of any session.
    pub(super) fn take_filled(&mut self) -> Option<Mem> {
        let mut sessions = self.slots.iter_mut().filter_map(|slot| slot.session.as_mut());
        sessions.find_map(Session::take_filled)
    }

    /// The session of this id, if it still exists.
    pub(super) fn find(&self, id: SessId) -> Option<&Session> {
        self.get(id.slot).filter(|session| session.id == id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Session> {
        self.slots.iter().filter_map(|slot| slot.session.as_ref())
    }
}
