//! Keys that are valid for one READ only [RT-42], [RT-43].
//!
//! ```text
//!   posted:   register memory under the next key of the permit, then the request, which asks the
//!             server to invalidate the key
//!   answer:   the server has invalidated it -> the request ends
//!             it has not                    -> invalidated here, then the request ends [RT-54]
//!   incarnation lost: all keys of the incarnation are ended before anything else of it [RS-8]
//! ```
//! So a request completes only when the server cannot reach its memory any more [RT-69]. Keys
//! belong to an incarnation of a path: a request that moves gets a key of the other path's.

use std::collections::VecDeque;

use bowline_wire::rtrs::Dir;

use super::config::ReadKeys;
use super::incarnation::{HEARTBEAT_RESERVE, Incarnation};
use super::{PathAddr, Session};
use crate::{ConnId, Done, Errno, Instant, MemRef, Order, PathId, PortAttr, Tag, WrKind};

/// Most pieces of a request [RT-42].
pub(super) const PIECES_MAX: usize = 128;

/// The keys of an incarnation.
#[derive(Debug, Default)]
pub(super) enum Keys {
    /// Not needed so far.
    #[default]
    None,
    /// Being made.
    Ordered,
    /// The last used key of each permit; and the permit of each key, ordered by the key's upper 24
    /// bits.
    Ready(Vec<u32>, Vec<(u32, u16)>),
    /// They could not be made.
    Failed(Errno),
}

impl Keys {
    fn made(keys: Vec<u32>) -> Self {
        let mut owners: Vec<(u32, u16)> = keys.iter().map(|key| key >> 8).zip(0..).collect();
        owners.sort_unstable();
        Self::Ready(keys, owners)
    }

    /// The last used key of a permit.
    fn of(&self, index: u16) -> Option<u32> {
        match self {
            Self::Ready(keys, _) => keys.get(usize::from(index)).copied(),
            _ => None,
        }
    }

    /// Advances the key of a permit and returns it.
    pub(super) fn next(&mut self, index: u16) -> Option<u32> {
        let Self::Ready(keys, _) = self else { return None };
        let key = keys.get_mut(usize::from(index))?;
        *key = bowline_verbs::next_key(*key);
        Some(*key)
    }

    /// The permit whose current key this is.
    fn owner(&self, key: u32) -> Option<u16> {
        let Self::Ready(_, owners) = self else { return None };
        let at = owners.binary_search_by_key(&(key >> 8), |(name, _)| *name).ok()?;
        let (_, index) = owners.get(at)?;
        (self.of(*index) == Some(key)).then_some(*index)
    }

    pub(super) const fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(..))
    }
}

/// The state of a request's own key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum OwnKey {
    /// The request has no key of its own, or is not posted.
    #[default]
    None,
    /// The server may write to the request's memory.
    Valid,
    /// The key is invalidated.
    Invalidated,
}

/// Merges adjacent pieces.
pub(super) fn join(pieces: &mut Vec<MemRef>) {
    pieces.dedup_by(|next, before| {
        let follows = before.region == next.region
            && before.offset.checked_add(before.len.into()) == Some(next.offset);
        let len = before.len.checked_add(next.len).filter(|_| follows);
        if let Some(len) = len {
            before.len = len;
        }
        len.is_some()
    });
}

impl Incarnation {
    /// Orders keys, one for each permit, unless that is done.
    ///
    /// # Errors
    /// [`Errno::EINVAL`] when the device cannot make keys; the error of making them.
    pub(super) fn ensure_keys(
        &mut self,
        path: PathId,
        device: Option<&PortAttr>,
        orders: &mut VecDeque<Order>,
    ) -> Result<(), Errno> {
        match self.keys {
            Keys::Ready(..) | Keys::Ordered => Ok(()),
            Keys::Failed(errno) => Err(errno),
            Keys::None if device.is_none_or(|device| !device.fast_registration) => {
                Err(Errno::EINVAL)
            }
            Keys::None => {
                self.keys = Keys::Ordered;
                let count = self.geometry.map_or(0, |geometry| geometry.queue_depth());
                orders.push_back(Order::AddKeys { path, port: self.port, count });
                Ok(())
            }
        }
    }
}

impl Session {
    /// Whether the devices of these paths support the session's kind of read keys.
    pub(super) fn supports_read_keys<'a>(
        &self,
        mut addrs: impl Iterator<Item = &'a PathAddr>,
    ) -> bool {
        let fast = |addr: &PathAddr| {
            let port = self.ports.get(usize::from(addr.port.0));
            port.is_none_or(|port| port.fast_registration)
        };
        self.config.read_keys == ReadKeys::LongLived || addrs.all(fast)
    }

    /// Whether a request with this many pieces needs a key of its own.
    pub(super) fn needs_own_key(&self, dir: Dir, pieces: usize) -> bool {
        let per_request = self.config.read_keys == ReadKeys::PerRequest;
        dir == Dir::Read && (pieces > 1 || pieces == 1 && per_request)
    }

    /// Handles that keys were made, or could not be.
    pub(super) fn on_keys(&mut self, now: Instant, inc_id: PathId, keys: Result<Vec<u32>, Errno>) {
        let depth = self.agreed.map_or(0, |agreed| usize::from(agreed.depth));
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        if !matches!(incarnation.keys, Keys::Ordered) {
            return;
        }
        match keys {
            Ok(keys) if keys.len() == depth => incarnation.keys = Keys::made(keys),
            Ok(_) => incarnation.keys = Keys::Failed(Errno::ENOMEM),
            Err(errno) => incarnation.keys = Keys::Failed(errno),
        }
        if let Keys::Failed(errno) = incarnation.keys {
            if self.config.read_keys == ReadKeys::PerRequest {
                return self.fail(now, inc_id, errno);
            }
            self.fail_without_keys(now, inc_id, errno);
        }
        let conns =
            self.incarnations.get(inc_id).map_or(0, |incarnation| incarnation.conns.len() as u16);
        for cid in 0..conns {
            self.post_waiting(ConnId { path: inc_id, cid });
        }
    }

    /// Fails the requests that wait for keys which could not be made.
    fn fail_without_keys(&mut self, now: Instant, inc_id: PathId, errno: Errno) {
        let mut given_up = false;
        for index in 0..self.requests.len() as u16 {
            let request = &self.requests[usize::from(index)];
            if !request.running || request.incarnation != inc_id || !request.own_key {
                continue;
            }
            given_up |= request.moved;
            let cid = usize::from(request.cid);
            if let Some(incarnation) = self.incarnations.get_mut(inc_id) {
                incarnation.conns[cid].waiting.retain(|waiting| *waiting != index);
            }
            self.leave_incarnation(index);
            self.end_request(now, index, errno.neg());
        }
        if given_up {
            self.fail_stale_joins(now, true);
        }
    }

    /// Registers the memory of a request about to be posted under its key. Returns the key.
    pub(super) fn register_key(&mut self, index: u16) -> Option<u32> {
        let request = &mut self.requests[usize::from(index)];
        let incarnation = self.incarnations.get_mut(request.incarnation)?;
        let key = incarnation.keys.next(index)?;
        request.key_state = OwnKey::Valid;
        let start = self.batch.mems.len();
        self.batch.mems.extend_from_slice(&request.data);
        let conn = ConnId { path: request.incarnation, cid: request.cid };
        let of = &mut incarnation.conns[usize::from(request.cid)];
        of.with_own_key += 1;
        let tag = Tag::new(Tag::KEY, index.into());
        of.post_unsignalled(&mut self.batch, conn, tag, WrKind::Register(key), start);
        Some(key)
    }

    /// Handles that the server has invalidated a key; `false` if no request on this connection has
    /// it.
    pub(super) fn on_invalidated(&mut self, conn: ConnId, key: u32) -> bool {
        let incarnation = self.incarnations.get(conn.path);
        let Some(index) = incarnation.and_then(|incarnation| incarnation.keys.owner(key)) else {
            return false;
        };
        let request = &mut self.requests[usize::from(index)];
        let mine = request.running && (request.incarnation, request.cid) == (conn.path, conn.cid);
        let given = mine && request.key_state == OwnKey::Valid && request.answered.is_none();
        if given {
            request.key_state = OwnKey::Invalidated;
        }
        given
    }

    /// Handles a response that comes while the key is valid: the key must be invalidated first
    /// [RT-54], [RT-69]. `false` if the request can complete at once.
    pub(super) fn invalidate_first(&mut self, conn: ConnId, index: u16, errno: i32) -> bool {
        let request = &mut self.requests[usize::from(index)];
        if request.key_state != OwnKey::Valid {
            return false;
        }
        request.answered = Some(errno);
        let Some(incarnation) = self.incarnations.get_mut(conn.path) else { return true };
        // Keys of an incarnation that is ending are dropped all together.
        if incarnation.is_live() {
            incarnation.conns[usize::from(conn.cid)].invalidating.push_back(index);
            self.post_invalidations(conn);
        }
        true
    }

    /// Posts invalidations as far as there is room.
    pub(super) fn post_invalidations(&mut self, conn: ConnId) {
        let Some(incarnation) = self.incarnations.get_mut(conn.path) else { return };
        let Incarnation { conns, keys, .. } = incarnation;
        let Some(of) = conns.get_mut(usize::from(conn.cid)) else { return };
        while of.has_room(HEARTBEAT_RESERVE) {
            let Some(index) = of.invalidating.pop_front() else { return };
            let Some(key) = keys.of(index) else { continue };
            let start = self.batch.mems.len();
            let tag = Tag::new(Tag::KEY, index.into());
            let kind = WrKind::Invalidate(key);
            of.post_signalled(&mut self.batch, conn, tag, kind, start, true);
        }
    }

    /// Handles that a key is invalidated: completes its request if the response has come.
    pub(super) fn on_invalidate_done(&mut self, now: Instant, done: &Done) {
        let Ok(index) = u16::try_from(done.tag.index()) else { return };
        let Some(request) = self.requests.get_mut(usize::from(index)) else { return };
        let mine = request.running
            && (request.incarnation, request.cid) == (done.conn.path, done.conn.cid);
        if let Some(errno) = request.answered.take_if(|_| mine) {
            self.leave_incarnation(index);
            self.end_request(now, index, errno);
        }
    }

    /// Drops all keys of an incarnation: after this order the server can do nothing with them.
    pub(super) fn drop_keys(&mut self, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        let keys = std::mem::take(&mut incarnation.keys);
        incarnation.conns.iter_mut().for_each(|conn| conn.invalidating.clear());
        if matches!(keys, Keys::Ordered | Keys::Ready(..)) {
            self.orders.push_back(Order::DropKeys { path: inc_id });
        }
    }
}
